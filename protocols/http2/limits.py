"""The limits of one HTTP/2 connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from protocols.http2.windows import LARGEST_WINDOW


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HTTP2Limits:
    """The limits of one connection, in bytes except these numbers: `streams` (of the peer's, open at once), `continuations`
    (CONTINUATION frames of a header block), `settings_entries` (of a SETTINGS frame) and `fields` (of a head).

    `initial_window` and `max_window` bound the unread input of a stream. `send_buffer` bounds the output that a stream may
    queue, `connection_send_buffer` the output of all streams beyond their shares. `output` is how many bytes of control
    frames may wait before the connection is `choked`. `linger` is how much of one request's body a server drops after its
    answer. `head` is the header list as RFC 9113 section 6.5.2 counts it.
    """

    streams: int = 1000
    initial_window: int = 65_536
    max_window: int = 262_144
    frame_size: int = 16_384
    continuations: int = 8
    settings_entries: int = 32
    head: int = 32_768
    fields: int = 100
    send_buffer: int = 65_536
    connection_send_buffer: int = 262_144
    output: int = 262_144
    linger: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        if not 1 <= self.initial_window <= self.max_window <= LARGEST_WINDOW:
            raise ValueError(
                f"initial_window {self.initial_window} and max_window {self.max_window}: 1 to 2**31 - 1, in this order"
            )
        if not 16_384 <= self.frame_size < 2**24:
            raise ValueError(f"frame_size is {self.frame_size}; RFC 9113 section 4.2 allows 16384 to 16777215")


DEFAULT_LIMITS = HTTP2Limits()
