"""One task waits, anyone rings: the only wake-up that readers, writers and exchanges need."""

from __future__ import annotations

from typing import final

import trio

_reschedule = trio.lowlevel.reschedule


@final
class Doorbell:
    """A wake-up for at most one waiting task, remembered when nobody waits yet.

    Cheaper than an Event per wait: a ring is a flag or one reschedule. Waiters re-check their condition: a ring says
    "look again", never "it is so".
    """

    __slots__ = ("_rung", "_task")

    def __init__(self) -> None:
        self._rung = False
        self._task: trio.lowlevel.Task | None = None

    @property
    def waiting(self) -> bool:
        return self._task is not None

    def ring(self) -> None:
        """Wakes the waiting task, or lets the next wait return at once. Idempotent."""
        if self._task is None:
            self._rung = True
        else:
            self.wake()

    def wake(self) -> None:
        """Wakes the waiting task and is forgotten where there is none: for those who look at their condition right
        before they wait, whom a ring of the past would only wake in vain."""
        task = self._task
        if task is not None:
            self._task = None
            _reschedule(task)

    async def wait(self) -> None:
        """Returns after a ring. A checkpoint always; a cancelled wait leaves the bell as it was."""
        if self._rung:
            await trio.lowlevel.checkpoint()
            self._rung = False
            return
        assert self._task is None, "a doorbell has one waiter"
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
