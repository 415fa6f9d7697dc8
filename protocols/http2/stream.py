"""What the HTTP/2 machine knows of one stream."""

from __future__ import annotations

from typing import final

from h2.stream import H2Stream
from h2.windows import WindowManager

from protocols.events import Buffer, Headers
from protocols.http2.output import PayloadQueue
from protocols.http2.windows import Window


@final
class Stream:
    """One stream until it is closed and everything received on it is consumed."""

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
        """Where plain DATA frames are counted."""
        self.window = window
        self.receiving = True
        """The peer may still send on it."""
        self.dropped = False
        """Nobody reads it any more."""
        self.expected: int | None = None
        self.received = 0
        self.place: memoryview | None = None
        """The memory that its payload is copied to, as much as is not filled."""
        self.fed = 0
        """What was received when an empty DATA frame came last."""
        self.empty_row = 0
        """Empty DATA frames since then, that one included."""
        self.opened_at = 0.0
        self.bodyless = False
        """Client: the answer has no body, whatever its head says (HEAD)."""
        self.head_sent = False
        self.ended = False
        """`send` accepted our End."""
        self.finished = False
        """Our END_STREAM is out of the queue."""
        self.lingering = False
        """Server: our END_STREAM is out of the queue, the peer's has not come; it counts as over. Its payload is dropped."""
        self.swallowed = 0
        """Flow-controlled bytes that came while it lingered."""
        self.swallowed_before = 0
        """As many of them as the machine's last `tick` saw."""
        self.looks = 0
        """How often a `tick` has looked at it."""
        self.reset = False
        self.trailers: Headers = ()
        self.queue = PayloadQueue()
        self.counted = True

    @property
    def open(self) -> bool:
        return not self.reset and not self.lingering and (self.receiving or not self.finished)

    def has_wrong_length(self, *, ended: bool) -> bool:
        """RFC 9113 section 8.1.1. Of a body that nobody reads it does not matter, and our answer shall not suffer."""
        if self.expected is None or self.dropped:
            return False
        return self.received > self.expected or (ended and self.received != self.expected)

    def landed(self, data: bytes) -> Buffer:
        """The payload in its place, where it has one that holds it; else as it came, and so is what follows."""
        place, n = self.place, len(data)
        if place is None or n > len(place):
            self.place = None
            return data
        place[:n] = data
        return self.fill(place, n)

    def fill(self, place: memoryview, n: int) -> memoryview:
        """The first n bytes of its place, which have been copied there; the rest is its place from now on."""
        self.place = place[n:] if n < len(place) else None
        return place[:n]
