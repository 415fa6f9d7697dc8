"""How much an exchange's task may do before it lets others run, if its model never waits by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, final

import trio

if TYPE_CHECKING:
    from gateway.config import LimitsConfig

SENT = 2
"""Units of a turn that each sent message takes."""
TURN_UNITS = 66 * SENT
"""The units of a turn: for one message that has waited for room, then 64 that need not."""
BETWEEN = frozenset(range(SENT, TURN_UNITS, SENT)) - {TURN_UNITS - 3 * SENT, *range(SENT, TURN_UNITS - 3 * SENT, 4 * SENT)}
"""Numbers of units left at which the clock is not read: it is read for the third message, the fifth, and every fourth from
there on. So a turn of equal steps lasts for three of them, or for about twice its time, at most."""
TURN_SECONDS = 0.001  # a model whose steps are slow must not take 64 of them in one turn
PAST = float("-inf")
"""The end of a turn that is over."""
_RECEIVED = 64  # messages
_ALL = -(1 << 62)  # the byte count at which a turn began, for one that may send no more bytes


class Timed(Protocol):
    """The owner of an exchange, as a turn sees it."""

    limits: LimitsConfig

    def clock(self) -> float: ...


class Counted(Protocol):
    """The answer that a turn's task makes, as the turn sees it."""

    @property
    def owner(self) -> Timed: ...

    bytes_out: int
    items: int
    """The units that turns have taken, without those of the current one."""
    room_left: int
    """While `bytes_out` is below this, there is room and no checkpoint is due; a new turn sets it to 0."""


class _Nobody:
    """Stands for the answer while no exchange has the task: leftovers of the last one may still send or receive."""

    owner: Any = SimpleNamespace(clock=trio.current_time, limits=SimpleNamespace(checkpoint_bytes=0))
    bytes_out = items = room_left = 0


NOBODY = _Nobody()


@final
class Turn:
    """The turn of one task: 64 messages sent, 64 received, `limits.checkpoint_bytes` of both, or a millisecond.

    Thanks to turns, a model that never waits still meets its cancellation and lets others run, at the price of one
    checkpoint a turn. A new turn begins whenever others have run. The runner sees each wait of its task, so a model that
    paces itself pays for no checkpoint. The runner does not see the waits of tasks that the model started: for those, a turn
    begins when they wait for the client, and at the checkpoint that is due.
    """

    __slots__ = ("_cancelled", "bytes", "ends", "left", "of", "received", "task")

    def __init__(self, task: trio.lowlevel.Task | None = None) -> None:
        self.task = task
        """The task whose waits the runner sees."""
        self.of: Counted = NOBODY
        """The answer of the exchange that has the task."""
        self.left = TURN_UNITS
        self.ends = PAST
        self.bytes = self.received = 0
        self._cancelled = False

    def start(self, of: Counted, now: float) -> None:
        """The work of an exchange begins in this task; nothing of its answer is sent yet. With NOBODY, the last work is
        over, and it may be long until the next begins."""
        if self.left != TURN_UNITS:  # as always after `spend`
            self.of.items += TURN_UNITS - self.left
            self.left, self._cancelled = TURN_UNITS, False
        self.of = of
        self.ends = now + TURN_SECONDS
        self.bytes = self.received = 0

    def over(self) -> bool:
        """Counts one more received message. True if a checkpoint is due before it."""
        self.received = n = self.received + 1
        if n & 3 and self.of.bytes_out - self.bytes < self.of.owner.limits.checkpoint_bytes:
            return False
        return not n % _RECEIVED or self.due(0)

    def due(self, n: int) -> bool:
        """True if a checkpoint is due before n more bytes are sent; it then stays due."""
        if (
            self.left
            and self.of.owner.clock() <= self.ends
            and self.of.bytes_out + n - self.bytes < self.of.owner.limits.checkpoint_bytes
        ):
            return False
        self.ends, self.of.room_left = PAST, 0
        return True

    def begin(self) -> None:
        """Begins a new turn: others have run."""
        of = self.of
        of.items += TURN_UNITS - self.left
        of.room_left = 0
        self.left, self.bytes, self.received = TURN_UNITS, of.bytes_out, 0
        self.ends = self.of.owner.clock() + TURN_SECONDS
        if self._cancelled:
            self.spend()  # Trio raises Cancelled only at checkpoints: one must be due before the next message

    def spend(self) -> None:
        """The work is cancelled: a checkpoint is due before the next message, in this turn and in all later ones."""
        of = self.of
        of.items += SENT - self.left
        of.room_left = 0
        self.left, self.bytes, self.ends = SENT, _ALL, PAST
        self._cancelled = True

    async def checkpoint(self) -> None:
        """Counts one more received message, and lets others run if a checkpoint is due."""
        if self.over():
            await self.renew()

    async def renew(self) -> None:
        """Lets others run, then begins a new turn."""
        await trio.lowlevel.checkpoint()
        if trio.lowlevel.current_task() is not self.task:  # else its runner has seen that it waited
            self.begin()


NO_TURN = Turn()
"""The turn of an exchange whose work has not begun."""
