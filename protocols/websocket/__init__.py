"""The WebSocket machine, in either role."""

from protocols.websocket.connection import WebSocketConnection, WebSocketLimits
from protocols.websocket.frames import FrameMemory

__all__ = [
    "FrameMemory", "WebSocketConnection", "WebSocketLimits",
]  # fmt: skip
