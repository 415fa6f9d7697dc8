"""What one WebSocket connection may cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WebSocketLimits:
    """What one connection may cost, in bytes where nothing else is said. None means no limit."""

    part: int = 16 * 1024 * 1024
    """The payload of one frame received."""

    message: int | None = None
    """The sum over the fragments of one message received. Nothing holds them together here, so it is off by default."""

    fragments: int | None = None
    """Frames in one message received."""

    check_utf8: bool = False
    """Whether text messages received must be UTF-8; the check sees messages, not frames, and changes no byte."""

    send_buffer: int = 65536
    """What `room` starts from."""

    pongs: int = 512
    """Answers to Pings that may wait before the connection is `choked`."""


DEFAULT_LIMITS = WebSocketLimits()
