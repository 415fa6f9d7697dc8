"""Who waits for a slot of a model, and who is next: by level, and within a level in the order of arrival."""

from __future__ import annotations

from typing import final

import trio

LEVELS = 16
"""Levels of priority: 1 is served first."""
DEFAULT_LEVEL = 8
"""That of a request that does not say."""


def level_of(priority: int) -> int:
    """The level that a request's priority means: out of 1 to 16 it is the default, as Triton has it for what a model's
    levels do not reach."""
    return priority if 1 <= priority <= LEVELS else DEFAULT_LEVEL


@final
class SlotQueue:
    """Tasks that wait. There is no ageing: as long as those of a lower number come faster than slots, the others wait."""

    __slots__ = ("_levels", "_n")

    def __init__(self) -> None:
        self._levels: dict[int, dict[trio.lowlevel.Task, int]] = {}  # with what each holds
        self._n = 0

    def __len__(self) -> int:
        return self._n

    async def wait(self, level: int, held: int = 0) -> None:
        """Returns when this task is the one that `wake` means. Cancelled, it has left the queue. `held` is what
        `next_held` says of it."""
        task = trio.lowlevel.current_task()
        self._levels.setdefault(level, {})[task] = held
        self._n += 1

        def leave(_: object) -> trio.lowlevel.Abort:
            self._remove(level, task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(leave)

    @property
    def next_held(self) -> int:
        """What who is next holds; there must be somebody."""
        return next(iter(self._levels[min(self._levels)].values()))

    def wake(self) -> None:
        """Wakes who is next; there must be somebody."""
        level = min(self._levels)
        task = next(iter(self._levels[level]))
        self._remove(level, task)
        trio.lowlevel.reschedule(task)

    def _remove(self, level: int, task: trio.lowlevel.Task) -> None:
        waiting = self._levels[level]
        del waiting[task]
        if not waiting:
            del self._levels[level]
        self._n -= 1
