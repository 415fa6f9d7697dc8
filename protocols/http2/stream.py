"""The state of one HTTP/2 stream."""

from __future__ import annotations

from typing import final

from h2.stream import H2Stream
from h2.windows import WindowManager

from protocols.events import Buffer, Headers
from protocols.http2.output import PayloadQueue
from protocols.http2.windows import Window


@final
class Stream:
    """One stream, until it is closed and all its input is consumed."""

    __slots__ = (
        "bodyless",
        "counted",
        "dropped",
        "empty_row",
        "ended",
        "expected",
        "fed",
        "finished",
        "head_sent",
        "id",
        "inbound",
        "library",
        "lingering",
        "looks",
        "opened_at",
        "place",
        "queue",
        "received",
        "receiving",
        "reset",
        "swallowed",
        "swallowed_before",
        "trailers",
        "window",
    )

    def __init__(self, stream: int, library: H2Stream, window: Window, inbound: WindowManager) -> None:
        self.id = stream
        self.library = library
        self.inbound = inbound
        """The window that plain DATA frames are counted against."""
        self.window = window
        self.receiving = True
        """True while the peer may send on it."""
        self.dropped = False
        """True if its input is discarded."""
        self.expected: int | None = None
        self.received = 0
        self.place: memoryview | None = None
        """The free part of the buffer that its payload is copied to, or None."""
        self.fed = 0
        """The value of `received` at the last empty DATA frame."""
        self.empty_row = 0
        """Empty DATA frames since then, that one included."""
        self.opened_at = 0.0
        self.bodyless = False
        """Client: the answer has no body, whatever its head says (HEAD)."""
        self.head_sent = False
        self.ended = False
        """True if `send` accepted our End."""
        self.finished = False
        """True if our END_STREAM has left the queue."""
        self.lingering = False
        """Server: our END_STREAM has left the queue, the peer's has not come. The stream counts as over, its payload is
        dropped."""
        self.swallowed = 0
        """Flow-controlled bytes that came while it lingered."""
        self.swallowed_before = 0
        """The value of `swallowed` at the last `tick`."""
        self.looks = 0
        """The number of ticks that have seen it linger."""
        self.reset = False
        self.trailers: Headers = ()
        self.queue = PayloadQueue()
        self.counted = True

    @property
    def open(self) -> bool:
        return not self.reset and not self.lingering and (self.receiving or not self.finished)

    def has_wrong_length(self, *, ended: bool) -> bool:
        """True if the body contradicts content-length (RFC 9113 section 8.1.1). A discarded body is not checked: a wrong one
        must not spoil our answer."""
        if self.expected is None or self.dropped:
            return False
        return self.received > self.expected or (ended and self.received != self.expected)

    def landed(self, data: bytes) -> Buffer:
        """The payload, copied to its place if that has room for it. If not, this payload and all that follow stay as they
        came."""
        place, n = self.place, len(data)
        if place is None or n > len(place):
            self.place = None
            return data
        place[:n] = data
        return self.fill(place, n)

    def fill(self, place: memoryview, n: int) -> memoryview:
        """The first n bytes of `place`, which hold the payload now. The rest is the place of the next payload."""
        self.place = place[n:] if n < len(place) else None
        return place[:n]
