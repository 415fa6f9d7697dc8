"""The WebSocket machine, in either role."""

from protocols.websocket.connection import WebSocketConnection, WebSocketLimits

__all__ = [
    "WebSocketConnection", "WebSocketLimits",
]  # fmt: skip
