"""A wake-up for one waiting task, which any task can ring: readers, writers and exchanges use no other."""

from __future__ import annotations

from typing import final

import trio

_reschedule = trio.lowlevel.reschedule


@final
class Doorbell:
    """A wake-up for at most one waiting task. A ring while no task waits is remembered.

    It costs less than an Event for each wait: a ring sets a flag or reschedules one task. A ring does not mean that the
    waiter's condition holds: the waiter must check it again.
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
        """Wakes the waiting task. If none waits, nothing is remembered: for a waiter that checks its condition right before
        it waits, and would only wake in vain."""
        task = self._task
        if task is not None:
            self._task = None
            _reschedule(task)

    async def wait(self) -> None:
        """Returns after a ring. It is always a checkpoint. A cancelled wait leaves the bell as it was."""
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
