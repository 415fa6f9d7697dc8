"""Measures how long an exchange's tasks wait: for a slot, for the client to send, for the client to read."""

from __future__ import annotations

from typing import final

import msgspec

SLOT, INPUT, ROOM = 1, 2, 4
"""The waits of an exchange's tasks: for a slot of the model, for the client to send, for the client to read."""

_OVER = 8


@final
class Waits(msgspec.Struct, gc=False):
    """The waits of one exchange's tasks, until its ending.

    Made when a task first waits: an exchange whose tasks never wait has none. Several tasks may wait at once. That time
    counts for `ROOM` if a task waits for it, else for `INPUT`, else for `SLOT`: only a client that does not read holds back
    a model that has something to send.
    """

    slot: float = 0.0
    """Seconds for a slot, without the wait that goes on."""
    input: float = 0.0
    """Seconds for the client to send, likewise."""
    room: float = 0.0
    """Seconds for the client to read, likewise."""
    ended_at: float | None = None
    """When the ending was decided, if that was before the exchange's task was done with it."""
    _what: int = 0
    _since: float = 0.0
    _began: float = 0.0  # when `what` last changed

    @property
    def what(self) -> int:
        """The wait that counts now: `SLOT`, `INPUT` or `ROOM`; 0 for none."""
        what = self._what
        return 0 if what == _OVER else ROOM if what & ROOM else INPUT if what & INPUT else what

    def begin(self, what: int, now: float) -> None:
        """Notes that a task waits from now on."""
        if not self._what:
            self._what = what
            self._since = self._began = now
        elif self._what != _OVER:
            self._change(self._what | what, now)

    def over(self, what: int, now: float) -> None:
        """Notes that no task waits for `what` any more. `now` may be before the begin, if that was there already."""
        if self._what == what:
            self._what = 0
            spent = now - self._since
            if spent > 0:
                if what == INPUT:
                    self.input += spent
                elif what == ROOM:
                    self.room += spent
                else:
                    self.slot += spent
        elif self._what != _OVER:
            self._change(self._what & ~what, now)

    def end(self, now: float) -> None:
        """Notes that the ending is decided: tasks that still wait no longer count."""
        self.stop(now)
        self.ended_at = now

    def stop(self, now: float) -> None:
        """Stops counting: tasks that still wait delay nothing."""
        if self._what != _OVER:
            self._count(now)
            self._what = _OVER

    def lasted(self, now: float) -> float:
        """Returns for how many seconds `what` has been as it is; 0 if no task waits."""
        return max(now - self._began, 0.0) if self.what else 0.0

    def _change(self, what: int, now: float) -> None:
        before = self.what
        self._count(now)
        self._what = what
        if self.what != before:
            self._began = now

    def so_far(self, now: float) -> tuple[float, float, float]:
        """Returns `slot`, `input` and `room` with the current wait included, and changes nothing."""
        what, spent = self.what, max(now - self._since, 0.0)
        slot, input, room = (spent if what == one else 0.0 for one in (SLOT, INPUT, ROOM))
        return self.slot + slot, self.input + input, self.room + room

    def _count(self, now: float) -> None:
        if self._what and now > self._since:
            self.slot, self.input, self.room = self.so_far(now)
            self._since = now
