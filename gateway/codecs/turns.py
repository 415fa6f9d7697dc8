"""Decides which codec step comes next: the steps of all exchanges share one turn of the loop, and long ones one thread.

Many bodies may become whole in one round of the loop, a few packets of compressed ones above all. If all were read in that
round, nobody else would be served before the last one. So a round has room for `CODEC_ROUND` bytes or elements of steps; the
exchanges behind wait, and the loop looks at the kernel in between. A step in a thread is no better, because a call in C
holds the interpreter for all: long steps run one after the other.

Connections come round robin, as they do for their own turns. Requests that are read are used up before more are read, and
bodies that are inflated are read before more are inflated. So the memory for it is needed once, however many bodies wait.
They have been paid for as they came; what is made of them is paid for in the step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import TypeAlias, TypeVar, final

import trio

from protocols.floods import CODEC_ROUND

T = TypeVar("T")

INFLATED = 16 * 1024
"""The size that a step counts which inflates 64 KiB."""
_PRESSING = 2  # exchanges of a connection that wait for the thread, from which on it inflates no more bodies


class Stage(Enum):
    """How far an exchange is with its request."""

    INFLATE = "the first step of a body that is compressed"
    READ = "a step that makes values of what came"
    USE = "a step after that, or for the answer"


_Tasks: TypeAlias = "OrderedDict[trio.lowlevel.Task, int]"  # the size of each one's step


@final
class _Line:
    """The tasks of one connection."""

    __slots__ = ("inflate", "read")

    def __init__(self) -> None:
        self.inflate: _Tasks = OrderedDict()
        self.read: _Tasks = OrderedDict()

    def __len__(self) -> int:
        return len(self.inflate) + len(self.read)


@final
class Waiting:
    """The tasks that wait for their step: those that have read their request in the order in which they came, then the
    others, round robin by connection."""

    __slots__ = ("_blocked", "_lines", "_use")

    def __init__(self, blocked: Callable[[object], bool] | None = None) -> None:
        """`blocked` tells that a connection must not inflate more bodies yet."""
        self._use: _Tasks = OrderedDict()
        self._lines: OrderedDict[object, _Line] = OrderedDict()
        self._blocked = blocked

    def of(self, owner: object) -> int:
        """The number of tasks of a connection that have not read their request."""
        line = self._lines.get(owner)
        return 0 if line is None else len(line)

    async def wait(self, owner: object, stage: Stage, size: int) -> None:
        """Waits until `wake` is called for this task. A task that is cancelled no longer waits; it is not cancelled once it
        was woken."""
        task, line = trio.lowlevel.current_task(), None
        if stage is Stage.USE:
            tasks = self._use
        else:
            line = self._lines.get(owner)
            if line is None:
                line = self._lines[owner] = _Line()
            tasks = line.inflate if stage is Stage.INFLATE else line.read
        tasks[task] = size

        def abort(_: object) -> trio.lowlevel.Abort:
            del tasks[task]
            if line is not None and not line:
                del self._lines[owner]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def wake(self) -> int | None:
        """Wakes the task whose turn it is, and returns the size of its step; None if there is none."""
        if self._use:
            return _woken(self._use)
        for owner in self._lines:
            line = self._lines[owner]
            if not line.read and self._blocked is not None and self._blocked(owner):
                continue
            size = _woken(line.read or line.inflate)
            if line:
                self._lines.move_to_end(owner)
            else:
                del self._lines[owner]
            return size
        return None


def _woken(tasks: _Tasks) -> int:
    task, size = tasks.popitem(last=False)
    trio.lowlevel.reschedule(task)
    return size


@final
class CodecTurns:
    """The turns of one run of Trio, on the loop and in the thread."""

    __slots__ = ("_busy", "_left", "_loop", "_taken", "_thread")

    def __init__(self) -> None:
        self._thread = Waiting()
        self._taken = False
        self._loop = Waiting(self._pressing)
        self._left = CODEC_ROUND
        self._busy = 0  # tasks that were woken and have not made their step, or the one that lets others run

    async def step(self, size: int, call: Callable[[], T], owner: object, stage: Stage) -> T:
        """Makes a step of `size` bytes or elements on the loop: at once if this round has room for it, else when it is its
        turn."""
        if waits := self._busy > 0 or (stage is Stage.INFLATE and self._pressing(owner)):
            await self._loop.wait(owner, stage, size)
        try:
            return call()
        finally:
            self._left -= size
            self._busy -= waits
            if not self._busy:
                if self._left <= 0:
                    self._busy = 1
                    await trio.lowlevel.cancel_shielded_checkpoint()  # the loop looks at the kernel
                    self._busy, self._left = 0, CODEC_ROUND
                self._wake()

    def in_thread(self, owner: object, stage: Stage) -> _Held:
        """A block that has the turn for long steps."""
        return _Held(self, owner, stage)

    async def take(self, owner: object, stage: Stage) -> None:
        """Waits for the turn for long steps."""
        if self._taken:
            await self._thread.wait(owner, stage, 1)
        self._taken = True

    def give(self) -> None:
        """Gives the turn for long steps to the next."""
        self._taken = self._thread.wake() is not None
        if not self._busy:
            self._wake()  # its connection may inflate again

    def _wake(self) -> None:
        """Wakes as many tasks as a round has room for."""
        room = self._left
        while room > 0 and (size := self._loop.wake()) is not None:
            room -= size
            self._busy += 1

    def _pressing(self, owner: object) -> bool:
        return self._thread.of(owner) >= _PRESSING


@final
class _Held:
    __slots__ = ("_owner", "_stage", "_turns")

    def __init__(self, turns: CodecTurns, owner: object, stage: Stage) -> None:
        self._turns, self._owner, self._stage = turns, owner, stage

    async def __aenter__(self) -> None:
        await self._turns.take(self._owner, self._stage)

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._turns.give()


_turns: trio.lowlevel.RunVar[CodecTurns] = trio.lowlevel.RunVar("codec turns")


def codec_turns() -> CodecTurns:
    """The turns of this run."""
    try:
        return _turns.get()
    except LookupError:
        turns = CodecTurns()
        _turns.set(turns)
        return turns
