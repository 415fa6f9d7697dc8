"""The receive windows of an HTTP/2 connection: what is granted, unread and owed back, and when it is given back."""

from __future__ import annotations

from typing import NamedTuple, final

from protocols.buffers import ByteBudget
from protocols.errors import LocalProtocolError

FIRST_CONNECTION_WINDOW = 65_535
"""RFC 9113 section 6.9.2: what every connection starts with; SETTINGS cannot change it."""
LARGEST_WINDOW = 2**31 - 1


class Ledger(NamedTuple):
    """The state of one window. `granted - unread - owed` is what the peer may still send, which is also what h2 counts
    by itself: `library`."""

    granted: int
    unread: int
    owed: int
    library: int

    @property
    def available(self) -> int:
        return self.granted - self.unread - self.owed


class _Window:
    __slots__ = ("granted", "low", "owed", "reserved", "unread")

    def __init__(self, granted: int, reserved: int) -> None:
        self.granted = granted
        self.unread = 0
        self.owed = 0
        self.low = granted
        """The least that was available since the consumer last had taken everything."""
        self.reserved = reserved


@final
class ReceiveWindows:
    """Grants credit as the consumers take bytes, and reserves it from a byte budget before it is granted.

    A stream starts with `initial` bytes. Its window doubles, up to `maximum`, each time its consumer has taken
    everything after the peer had used more than half of it: a burst that the window held up. A stream's credit goes
    back when a quarter of its window is owed.

    The connection's window is the sum of its streams' windows and one `initial` more, so that whatever some streams
    leave unread, each other one can use its own window to the end, and a new stream need not wait. It owes at most a
    quarter of `initial`: with a quarter of *itself*, a thousand streams could together hold back more than one whole
    stream has, and that one would wait for ever. Credit once given cannot be taken back, so when streams
    leave, the window shrinks by what is not returned.
    """

    def __init__(self, *, initial: int, maximum: int, budget: ByteBudget | None) -> None:
        self._initial = initial
        self._maximum = maximum
        self._budget = budget
        self._streams: dict[int, _Window] = {}
        self._sum = 0
        self._target = FIRST_CONNECTION_WINDOW
        self._connection = _Window(FIRST_CONNECTION_WINDOW, 0)

    @property
    def unread(self) -> int:
        """Bytes received and not yet consumed, over all streams."""
        return self._connection.unread

    def affordable(self, granted: int) -> bool:
        """Whether `open` would find room."""
        return self._budget is None or self._budget.used + max(granted, self._initial) <= self._budget.limit

    def open(self, stream: int, granted: int) -> bool:
        """A stream begins with the `granted` bytes that SETTINGS give it; False if the budget has no room for it."""
        reserved = max(granted, self._initial)
        if not self._reserve(reserved):
            return False
        self._streams[stream] = _Window(granted, reserved)
        self._change(granted)
        return True

    def forget(self, stream: int) -> None:
        """The stream is closed and everything is read: its reservation ends."""
        window = self._streams.pop(stream)
        assert not window.unread, f"stream {stream} is forgotten with {window.unread} bytes unread"
        self._change(-window.granted)
        if self._budget is not None:
            self._budget.release(window.reserved)

    def adjust(self, stream: int, delta: int) -> None:
        """The peer acknowledged another initial window, which changes the windows of the streams that exist."""
        self._streams[stream].granted += delta
        self._change(delta)

    def received(self, stream: int, n: int) -> None:
        """The peer sent n flow-controlled bytes on the stream."""
        window = self._streams[stream]
        window.unread += n
        available = window.granted - window.unread - window.owed
        if available < window.low:
            window.low = available
        self._connection.unread += n

    def discarded(self, n: int) -> None:
        """The peer sent n bytes on a stream that is over: the connection alone owes them."""
        self._connection.owed += n

    def unread_on(self, stream: int) -> int:
        """Bytes of the stream that were received and not yet consumed."""
        window = self._streams.get(stream)
        return 0 if window is None else window.unread

    def consumed(self, stream: int, n: int) -> None:
        """The consumer took n bytes. Raises LocalProtocolError for more than it was given, and changes nothing then."""
        if not 0 <= n <= self.unread_on(stream):
            raise LocalProtocolError(f"credit of {n} bytes on stream {stream}, which has {self.unread_on(stream)} unread")
        if n:
            window, connection = self._streams[stream], self._connection
            window.unread -= n
            window.owed += n
            connection.unread -= n
            connection.owed += n

    def stream_increment(self, stream: int, *, grow: bool) -> int:
        """What a WINDOW_UPDATE on this stream shall give now, which counts as given; 0 for none."""
        window = self._streams[stream]
        growth = 0
        if not window.unread:
            if grow and 2 * window.low < window.granted:
                growth = self._growth(window)
            window.low = window.granted + growth
        if not growth and (not window.owed or 4 * window.owed < window.granted):
            return 0
        increment = window.owed + growth
        window.owed = 0
        window.granted += growth
        self._change(growth)
        return increment

    def connection_increment(self) -> int:
        """What a WINDOW_UPDATE on the connection shall give now, which counts as given; 0 for none."""
        window = self._connection
        growth = self._target - window.granted
        if growth < 0:
            withheld = min(window.owed, -growth)
            window.owed -= withheld
            window.granted -= withheld
            growth = 0
        if not growth and (not window.owed or 4 * window.owed < self._initial):
            return 0
        increment = window.owed + growth
        window.owed = 0
        window.granted += growth
        return increment

    def ledger(self, stream: int, library: int) -> Ledger:
        """The state of one window, of the connection's for stream 0, beside what h2 counts."""
        window = self._streams[stream] if stream else self._connection
        return Ledger(window.granted, window.unread, window.owed, library)

    def _change(self, delta: int) -> None:
        self._sum += delta
        self._target = min(max(FIRST_CONNECTION_WINDOW, self._sum + self._initial), LARGEST_WINDOW)

    def _growth(self, window: _Window) -> int:
        growth = min(window.granted, self._maximum - window.granted)
        if growth <= 0 or not self._reserve(growth):
            return 0
        window.reserved += growth
        return growth

    def _reserve(self, n: int) -> bool:
        return self._budget is None or self._budget.try_reserve(n)
