"""The receive windows of an HTTP/2 connection: grants credit, reserves memory for unread bytes, and gives both back."""

from __future__ import annotations

import sys
from typing import NamedTuple, final

from protocols.buffers import Budget, ByteBudget

FIRST_CONNECTION_WINDOW = 65_535
"""The initial window of every connection (RFC 9113 section 6.9.2). SETTINGS cannot change it."""
LARGEST_WINDOW = 2**31 - 1
LANDING = 4
"""The factor by which the window of a landing stream may exceed the largest other window: its bytes wait for no consumer."""
FLOOR = 4096
"""The bytes that a stream reserves when it begins, for itself and its first input."""
STEP = 16_384
"""The unit in which further unread bytes are reserved as they come: a frame of the usual largest size."""


class Ledger(NamedTuple):
    """The state of one window. `granted - unread - owed` is what the peer may still send. It must equal `library`, which is
    h2's own count."""

    granted: int
    unread: int
    owed: int
    library: int

    @property
    def available(self) -> int:
        return self.granted - self.unread - self.owed


@final
class Window:
    """The counts of one window, of a stream or of the connection, in bytes."""

    __slots__ = ("base", "budget", "granted", "lands", "low", "owed", "reserved", "spare", "unread")

    def __init__(self, granted: int, budget: Budget) -> None:
        self.granted = granted
        self.unread = 0
        self.owed = 0
        self.low = granted
        """The least that was available since the consumer last had taken everything."""
        self.budget = budget
        """The budget that its memory is reserved from."""
        self.reserved = 0
        """The reserved bytes: never fewer than the unread ones, unless those are dropped."""
        self.base = 0
        """The part of `reserved` that stays if nothing is unread: FLOOR, and the granted growth."""
        self.spare = 0
        """The bytes that may stay reserved beyond the unread ones: `base` and one STEP. A consumer that takes frame after
        frame then does not cause a reservation for each."""
        self.lands = False
        """True if its payload has a place elsewhere and is taken as soon as it comes: growth is not reserved."""


@final
class ReceiveWindows:
    """Grants credit as consumers take bytes, and reserves memory from a byte budget for unread bytes.

    A stream reserves FLOOR bytes when it begins, and more in steps of STEP bytes as unread bytes come. A window alone
    reserves nothing. The growth of a window is reserved before it is granted, except for a landing stream.

    A stream begins with a window of `initial` bytes. The window doubles if the peer has used more than half of it by the
    time its consumer has taken everything: then it limited the peer. It grows up to `maximum`, or LANDING times that for a
    landing stream. A stream's credit is given back once a quarter of its window is owed.

    The connection's window is the sum of its streams' windows plus one `initial`. Even if some streams leave input unread,
    each other stream can then use its whole window, and a new stream need not wait. It owes at most a quarter of `initial`.
    If it owed a quarter of *itself*, a thousand streams could together withhold more than one whole stream's window, and
    that stream would wait forever. Granted credit cannot be taken back. When streams leave, the window therefore shrinks by
    withheld credit, but keeps one `initial`: a stream that replaces another needs no new credit.
    """

    def __init__(self, *, initial: int, maximum: int, budget: Budget | None) -> None:
        self._initial = initial
        self._maximum = maximum
        self._budget = budget or ByteBudget(sys.maxsize)
        self._sum = 0
        self._target = FIRST_CONNECTION_WINDOW
        self.returned = 0
        """The window that the peer was given for the connection beyond the first one, in bytes."""
        self.connection = Window(FIRST_CONNECTION_WINDOW, self._budget)
        """The window that all streams share."""

    @property
    def unread(self) -> int:
        """The received and not consumed bytes of all streams."""
        return self.connection.unread

    @property
    def affordable(self) -> bool:
        """True if the budget has room for `open`."""
        return self._budget.used + FLOOR <= self._budget.limit

    def open(self, granted: int) -> Window | None:
        """Opens the window of a stream that begins with `granted` bytes from SETTINGS. None if the budget has no room."""
        if not self._budget.try_reserve(FLOOR):
            return None
        self._change(granted)
        window = Window(granted, self._budget)
        window.reserved = window.base = FLOOR
        window.spare = FLOOR + STEP
        return window

    def forget(self, window: Window) -> None:
        """Ends the reservation of a stream that is closed and read to its end."""
        self.unreserve(window)
        self._change(-window.granted)

    def unreserve(self, window: Window) -> None:
        """Ends the reservation of a stream that holds nothing and whose further input will not be held."""
        assert not window.unread, f"a reservation ends with {window.unread} bytes unread"
        window.budget.release(window.reserved)
        window.reserved = window.base = window.spare = 0

    def charge(self, window: Window, budget: Budget) -> int:
        """Makes the stream reserve from another budget from now on. Returns the bytes that are already reserved; the caller
        must transfer those itself."""
        window.budget = budget
        return window.reserved

    def pay(self, window: Window, unread: int) -> bool:
        """Reserves memory for `unread` unread bytes if that is more than is reserved. False, and nothing done, if the budget
        has no room."""
        missing = unread - window.reserved
        if missing > 0:
            n = -(-missing // STEP) * STEP
            if not window.budget.try_reserve(n):
                return False
            window.reserved += n
        return True

    def trim(self, window: Window) -> None:
        """Gives back reserved bytes beyond the unread ones and the window's base."""
        needed = -(-max(0, window.unread - window.base) // STEP) * STEP
        self._give_back(window, window.reserved - window.base - needed)

    def shrink(self, window: Window) -> None:
        """Gives back the memory reserved for the window's growth, because the peer sends no more on the stream."""
        window.base, window.spare = FLOOR, FLOOR + STEP
        self.trim(window)

    def _give_back(self, window: Window, n: int) -> None:
        if n > 0:
            window.reserved -= n
            window.budget.release(n)

    def adjust(self, window: Window, delta: int) -> None:
        """Changes an existing stream's window, because the peer acknowledged another initial window."""
        window.granted += delta
        self._change(delta)

    def received(self, window: Window, n: int) -> None:
        """Counts n flow-controlled bytes that came on the stream. (For the most frequent frame the machine does this itself,
        with `available` from h2's count.)"""
        unread = window.unread = window.unread + n
        available = window.granted - unread - window.owed
        if available < window.low:
            window.low = available
        self.connection.unread += n

    def discarded(self, n: int) -> None:
        """Counts n bytes that came on a stream that is over: the connection alone owes them."""
        self.connection.owed += n

    def granted(self, n: int) -> None:
        """Counts n bytes that h2 itself gave back to the connection: they are not given again."""
        self.connection.granted += n
        self.returned += n

    def consumed(self, window: Window, n: int) -> bool:
        """Counts n unread bytes as taken by the consumer. True if credit may be due for the stream or the connection: ask
        for their increments then."""
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
        """The increment of a WINDOW_UPDATE that is due on this stream; it counts as given. 0 if none is due."""
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
        """The increment of a WINDOW_UPDATE that is due on the connection; it counts as given. 0 if none is due."""
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
        """The state of one window (None: the connection's), beside h2's count."""
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
