"""Waits of an exchange's tasks, as they go: for a slot, for its client to send, for its client to read."""

from __future__ import annotations

from typing import final

SLOT, INPUT, ROOM = 1, 2, 4
"""The things that an exchange's tasks wait for: a slot of the model, the client to send, the client to read."""

_OVER = 8


@final
class Waits:
    """The times that the tasks of one exchange have waited, until its ending.

    It is made when one of them first waits: an exchange that never does has none. Several tasks may wait at once. A moment
    counts as a wait for a slot only if no task waits for the client. It counts as a wait for the client to read rather
    than to send, because only a client that does not read holds back a model that has something to send.
    """

    __slots__ = ("_began", "_since", "_what", "ended_at", "seconds")

    def __init__(self) -> None:
        self.seconds = [0.0] * (ROOM + 1)
        """By what was waited for."""
        self.ended_at: float | None = None
        """When the ending was decided, where that was before the exchange's task was done with it."""
        self._what, self._since = 0, 0.0
        self._began = 0.0  # when it began to be what it is now

    @property
    def what(self) -> int:
        """The thing that is waited for now, by the rule above; 0 for nothing."""
        what = self._what
        return 0 if what == _OVER else ROOM if what & ROOM else INPUT if what & INPUT else what

    def begin(self, what: int, now: float) -> None:
        """A task waits from now on."""
        if not self._what:
            self._what = what
            self._since = self._began = now
        elif self._what != _OVER:
            self._change(self._what | what, now)

    def over(self, what: int, now: float) -> None:
        """It waits no longer; `now` may be before its begin, where what it wanted was on its way already."""
        if self._what == what:
            self._what = 0
            spent = now - self._since
            if spent > 0:
                self.seconds[what] += spent
        elif self._what != _OVER:
            self._change(self._what & ~what, now)

    def end(self, now: float) -> None:
        """The ending is decided: what waits on is no part of the exchange."""
        self.stop(now)
        self.ended_at = now

    def stop(self, now: float) -> None:
        """Stops the count: tasks that wait longer are no longer charged to the exchange."""
        if self._what != _OVER:
            self._count(now)
            self._what = _OVER

    def lasted(self, now: float) -> float:
        """Seconds for which it has been what it is now; 0 where nothing is waited for."""
        return max(now - self._began, 0.0) if self.what else 0.0

    def _change(self, what: int, now: float) -> None:
        before = self.what
        self._count(now)
        self._what = what
        if self.what != before:
            self._began = now

    def so_far(self, now: float) -> list[float]:
        """As `seconds`, with the wait that goes on, until now. Nothing changes."""
        seconds, what, spent = self.seconds.copy(), self.what, now - self._since
        if what and spent > 0:
            seconds[what] += spent
        return seconds

    def _count(self, now: float) -> None:
        spent, what = now - self._since, self._what
        if what and spent > 0:
            self._since = now
            self.seconds[self.what] += spent
