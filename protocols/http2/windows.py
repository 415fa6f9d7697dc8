"""The receive windows of an HTTP/2 connection: what is granted, paid for, unread, owed, and when it is given back."""

from __future__ import annotations

import sys
from typing import NamedTuple, final

from protocols.buffers import Budget, ByteBudget

FIRST_CONNECTION_WINDOW = 65_535
"""RFC 9113 section 6.9.2: what every connection starts with; SETTINGS cannot change it."""
LARGEST_WINDOW = 2**31 - 1
LANDING = 4
"""How many times the largest window a stream's may be whose payload lands: no byte of it waits for its consumer."""
FLOOR = 4096
"""What a stream reserves when it begins, for itself and the first bytes that come."""
STEP = 16_384
"""In steps of this many bytes what is unread beyond it is paid for as it comes: a frame of the usual largest size."""


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


@final
class Window:
    """What one stream, or the connection, was granted and what became of it, in bytes."""

    __slots__ = ("base", "budget", "granted", "lands", "low", "owed", "reserved", "spare", "unread")

    def __init__(self, granted: int, budget: Budget) -> None:
        self.granted = granted
        self.unread = 0
        self.owed = 0
        self.low = granted
        """The least that was available since the consumer last had taken everything."""
        self.budget = budget
        """Where its reservation is from."""
        self.reserved = 0
        """What is paid for: never less than what is unread, where that is not dropped."""
        self.base = 0
        """As much of it as stays when nothing is unread: FLOOR, and the growth that was granted."""
        self.spare = 0
        """How much more may be reserved than is unread: `base` and one STEP, so that who takes frame after frame does not
        pay for each anew."""
        self.lands = False
        """Its payload has a place elsewhere and is taken when it is there: growth is not reserved."""


@final
class ReceiveWindows:
    """Grants credit as the consumers take bytes, and pays from a byte budget for what has come.

    A stream reserves FLOOR bytes when it begins, and what is unread beyond those in steps of STEP bytes when it comes: a
    window alone takes nothing. What a window has grown is reserved before it is granted, but for one that lands.

    A stream starts with a window of `initial` bytes. It doubles, up to `maximum` or LANDING times that if it lands, each
    time its consumer has taken everything after the peer had used more than half of it: a burst that the window held up.
    A stream's credit goes back when a quarter of its window is owed.

    The connection's window is the sum of its streams' windows and one `initial` more, so that whatever some streams
    leave unread, each other one can use its own window to the end, and a new stream need not wait. It owes at most a
    quarter of `initial`: with a quarter of *itself*, a thousand streams could together hold back more than one whole
    stream has, and that one would wait for ever. Credit once given cannot be taken back, so when streams
    leave, the window shrinks by what is not returned, but for one `initial`, so that a stream that takes the place of
    another needs no new credit.
    """

    def __init__(self, *, initial: int, maximum: int, budget: Budget | None) -> None:
        self._initial = initial
        self._maximum = maximum
        self._budget = budget or ByteBudget(sys.maxsize)
        self._sum = 0
        self._target = FIRST_CONNECTION_WINDOW
        self.returned = 0
        """What the peer was given for the connection since it began, in bytes."""
        self.connection = Window(FIRST_CONNECTION_WINDOW, self._budget)
        """The window that all streams share."""

    @property
    def unread(self) -> int:
        """Bytes received and not yet consumed, over all streams."""
        return self.connection.unread

    @property
    def affordable(self) -> bool:
        """Whether `open` would find room."""
        return self._budget.used + FLOOR <= self._budget.limit

    def open(self, granted: int) -> Window | None:
        """A stream begins with the `granted` bytes that SETTINGS give it; None if the budget has no room for it."""
        if not self._budget.try_reserve(FLOOR):
            return None
        self._change(granted)
        window = Window(granted, self._budget)
        window.reserved = window.base = FLOOR
        window.spare = FLOOR + STEP
        return window

    def forget(self, window: Window) -> None:
        """The stream is closed and everything is read: its reservation ends."""
        self.unreserve(window)
        self._change(-window.granted)

    def unreserve(self, window: Window) -> None:
        """Nothing that still comes on the stream will be held, nor is anything: its reservation ends."""
        assert not window.unread, f"a reservation ends with {window.unread} bytes unread"
        window.budget.release(window.reserved)
        window.reserved = window.base = window.spare = 0

    def charge(self, window: Window, budget: Budget) -> int:
        """What the stream reserves from now on is that budget's; says how much is reserved already, which is for the caller
        to hand over from one to the other."""
        window.budget = budget
        return window.reserved

    def pay(self, window: Window, unread: int) -> bool:
        """Reserves what so many unread bytes take beyond what is reserved; False, and nothing done, if the budget has no
        room for them."""
        missing = unread - window.reserved
        if missing > 0:
            n = -(-missing // STEP) * STEP
            if not window.budget.try_reserve(n):
                return False
            window.reserved += n
        return True

    def trim(self, window: Window) -> None:
        """Gives back what is reserved and neither unread nor the window's base."""
        needed = -(-max(0, window.unread - window.base) // STEP) * STEP
        self._give_back(window, window.reserved - window.base - needed)

    def shrink(self, window: Window) -> None:
        """The peer sends no more on the stream: what is reserved for what its window has grown is given back."""
        window.base, window.spare = FLOOR, FLOOR + STEP
        self.trim(window)

    def _give_back(self, window: Window, n: int) -> None:
        if n > 0:
            window.reserved -= n
            window.budget.release(n)

    def adjust(self, window: Window, delta: int) -> None:
        """The peer acknowledged another initial window, which changes the windows of the streams that exist."""
        window.granted += delta
        self._change(delta)

    def received(self, window: Window, n: int) -> None:
        """The peer sent n flow-controlled bytes on the stream. (The machine does this by itself for the frame that comes
        most, with `available` as h2 counts it.)"""
        unread = window.unread = window.unread + n
        available = window.granted - unread - window.owed
        if available < window.low:
            window.low = available
        self.connection.unread += n

    def discarded(self, n: int) -> None:
        """The peer sent n bytes on a stream that is over: the connection alone owes them."""
        self.connection.owed += n

    def granted(self, n: int) -> None:
        """h2 has given the connection n bytes of its own accord: so much less will be given back."""
        self.connection.granted += n
        self.returned += n

    def consumed(self, window: Window, n: int) -> bool:
        """The consumer took n bytes, which must be unread. Says whether any credit may be due, for the stream or the
        connection, so that their increments are to be asked for."""
        connection = self.connection
        unread = window.unread = window.unread - n
        owed = window.owed = window.owed + n
        connection.unread -= n
        connection.owed += n
        surplus = window.reserved - unread - window.spare
        if surplus > 0:
            self._give_back(window, -(-surplus // STEP) * STEP)
        if not unread:
            if 2 * window.low < window.granted:
                return True
            window.low = window.granted
        spare = connection.granted - self._target
        return 4 * owed >= window.granted or 4 * connection.owed >= self._initial or spare < 0 or spare > self._initial

    def stream_increment(self, window: Window, *, grow: bool) -> int:
        """What a WINDOW_UPDATE on this stream shall give now, which counts as given; 0 for none."""
        growth = 0
        if not window.unread:
            if grow and 2 * window.low < window.granted:
                growth = self._growth(window)
            window.low = window.granted + growth
        if not growth and (not window.owed or 4 * window.owed < window.granted):
            return 0
        increment = window.owed + growth
        window.owed = 0
        if growth:
            window.granted += growth
            self._change(growth)
        return increment

    def connection_increment(self) -> int:
        """What a WINDOW_UPDATE on the connection shall give now, which counts as given; 0 for none."""
        window = self.connection
        growth = self._target - window.granted
        if growth < 0:
            if -growth > self._initial:
                withheld = min(window.owed, -growth - self._initial)
                window.owed -= withheld
                window.granted -= withheld
            growth = 0
        if not growth and (not window.owed or 4 * window.owed < self._initial):
            return 0
        increment = window.owed + growth
        window.owed = 0
        window.granted += growth
        self.returned += increment
        return increment

    def ledger(self, window: Window | None, library: int) -> Ledger:
        """The state of one window, of the connection's for None, beside what h2 counts."""
        found = window or self.connection
        return Ledger(found.granted, found.unread, found.owed, library)

    def _change(self, delta: int) -> None:
        self._sum += delta
        target = self._sum + self._initial
        if target < FIRST_CONNECTION_WINDOW:
            target = FIRST_CONNECTION_WINDOW
        self._target = target if target <= LARGEST_WINDOW else LARGEST_WINDOW

    def _growth(self, window: Window) -> int:
        maximum = min(self._maximum * LANDING, LARGEST_WINDOW) if window.lands else self._maximum
        growth = min(window.granted, maximum - window.granted)
        if growth <= 0:
            return 0
        if window.lands:
            return growth
        if not window.budget.try_reserve(growth):
            return 0
        window.reserved += growth
        window.base += growth
        window.spare += growth
        return growth
