"""The linger of a connection: after its last byte, what the client still sends is received and dropped, within bounds.

Closing over unread bytes makes the kernel send RST, which can destroy the answer before the client reads it (RFC 9112
section 9.6).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from gateway.net.transport import Transport

_SECONDS = 1.0  # and up to one more, until the coarse timer sees it
# More than a client sends beyond a limit by mistake: one that is cut off while it writes never reads why (over TLS,
# botocore and others do not even try). It costs time alone, which is bounded.
_BYTES = 64 * 1024 * 1024
_BRIEF_SECONDS, _BRIEF_BYTES = 0.1, 256 * 1024  # for a flooding peer: just enough that it can read why the connection ends
_READS = 4  # receives in one turn: much may arrive


class Parting(enum.Enum):
    """How a connection leaves a peer whose exchanges its wire has refused."""

    USUAL = enum.auto()
    BRIEF = enum.auto()
    """It floods: its bytes are received for a moment only."""


class Swallowed(enum.Enum):
    """The result of one turn of a linger."""

    DRY = enum.auto()
    """Nothing more has arrived yet."""
    MORE = enum.auto()
    OVER = enum.auto()
    """The client has ended, or time or bytes have reached the linger's bound."""


@final
class Linger:
    """The bounded receiving at the end of one connection, after everything is written."""

    __slots__ = ("_left", "until")

    def __init__(self, now: float, *, brief: bool = False) -> None:
        self._left = _BRIEF_BYTES if brief else _BYTES
        self.until = now + (_BRIEF_SECONDS if brief else _SECONDS)
        """When the linger ends, on Trio's clock."""

    def swallow(self, transport: Transport, scratch: memoryview, now: float) -> Swallowed:
        """Receives and drops bytes, for one turn."""
        if now > self.until:
            return Swallowed.OVER
        for _ in range(_READS):
            n = transport.try_receive_into(scratch)
            if n is None:
                return Swallowed.DRY
            self._left -= n
            if not n or self._left <= 0:
                return Swallowed.OVER
        return Swallowed.MORE
