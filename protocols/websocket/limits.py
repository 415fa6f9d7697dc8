"""The limits of one WebSocket connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WebSocketLimits:
    """The limits of one connection, in bytes unless a field says otherwise. None: no limit."""

    part: int = 16 * 1024 * 1024
    """The payload of one received frame."""

    message: int | None = None
    """The payload of all fragments of one received message. Off by default, because nothing here holds them together."""

    fragments: int | None = None
    """The number of frames in one received message."""

    check_utf8: bool = False
    """True if received text messages must be UTF-8. The check covers messages, not frames, and changes no byte."""

    send_buffer: int = 65536
    """The size of the send queue that `room` counts down from."""

    pongs: int = 512
    """Answers to Pings that may wait before the connection is `choked`."""


DEFAULT_LIMITS = WebSocketLimits()
