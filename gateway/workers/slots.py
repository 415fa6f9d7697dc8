"""The slots of one model: who has one, and who waits for the next, by level, and within a level in the order of arrival."""

from __future__ import annotations

from time import perf_counter_ns
from typing import final

import trio

from gateway.doorbell import Doorbell
from gateway.errors import Overloaded, Refusal, TooLarge, Unavailable
from gateway.workers.caller import Caller, CallSpans
from gateway.workers.slot import Slot
from gateway.workers.states import Life
from gateway.workers.statistics import ModelStatistics
from gateway.workers.stuck import StuckWatch
from models.blocking import throw
from models.spec import ModelSpec

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


@final
class Slots:
    """The places that a model has for calls at once, and the queue for them.

    They are `open` while the model can be called. Closed, a caller without a slot goes to the `successor`'s, or is told why
    there is none. Of the spec they keep the numbers alone: who knows them does not keep the model alive.
    """

    __slots__ = (
        "_life",
        "_most_queued",
        "_most_queued_bytes",
        "_name",
        "_queue_timeout",
        "_replaced",
        "_spans",
        "_special",
        "_stop_within",
        "_timeout",
        "bodies",
        "body_bytes",
        "capacity",
        "free",
        "left",
        "live",
        "most_bytes",
        "open",
        "queue",
        "queued_bytes",
        "statistics",
        "stuck",
        "successor",
        "waiting",
    )  # fmt: skip

    def __init__(self, spec: ModelSpec, life: Life, statistics: ModelStatistics, spans: CallSpans | None = None) -> None:
        self._name, self._life, self._spans, self.statistics = spec.name, life, spans, statistics
        self.open = False
        self.successor: Slots | None = None
        """Those of the worker that serves since a reload."""
        self.capacity = self.free = spec.capacity
        self._replaced = 0
        self._timeout, self._stop_within = spec.timeout, spec.stop_within
        self._special = bool(spec.timeout or spec.stop_within or spec.body_bytes)
        self.queue = SlotQueue()
        self._most_queued, self._queue_timeout = spec.queue, spec.queue_timeout
        self.queued_bytes, self._most_queued_bytes = 0, spec.queue_bytes
        """What those who wait hold of the byte budget."""
        self.most_bytes = spec.body_bytes
        """What the bodies of the sessions that run may hold together; 0: they are not bounded."""
        self.bodies: dict[Slot, int] = {}
        """Where those are bounded, what the bodies of the sessions that run hold."""
        self.body_bytes = 0
        """All of these, and those of sessions that are just let in."""
        self.live: set[Caller] = set()
        """Who has a slot, or waits for one."""
        self.waiting: set[Caller] = set()
        self.left = Doorbell()
        """Rung where something has ended while the slots are closed."""
        self.stuck = StuckWatch(spec, self.left.ring)
        """What of the model does not come back."""

    @property
    def queued(self) -> int:
        """How many wait."""
        return len(self.queue)

    @property
    def in_use(self) -> int:
        """How many are taken, those included that are stuck, and replaced by others."""
        return self.capacity - self.free + self._replaced

    # -- for who calls the model ------------------------------------------------------------------------------------

    def take_now(self, caller: Caller) -> Slot | None:
        """What `take` returns, if nobody has to wait for it."""
        if not self.open:
            if self.successor is not None:
                return self.successor.take_now(caller)
            self._life.check()
        if not self.free or (self.most_bytes and not self._fits(caller.held)):
            return None
        self.free -= 1
        self.live.add(caller)
        return self._slot(caller, held=self.most_bytes and caller.held) if self._special else Slot(self, caller)

    def _fits(self, held: int) -> bool:
        """Whether so many bytes are free for a body, and nobody waits for more: those go first."""
        if self.queue or self.body_bytes + held > self.most_bytes:
            return False
        self.body_bytes += held
        return True

    def _slot(self, caller: Caller, asked: int = 0, *, held: int) -> Slot:
        if self._timeout:
            caller.limit_time(self._timeout, f"models.{self._name}.timeout")
        slot = Slot(self, caller, asked)
        if self._stop_within:
            slot.watched()
        if self.most_bytes:
            slot.weighed()
            self.bodies[slot] = held
        return slot

    async def take(self, caller: Caller) -> Slot:
        """A place in the capacity for one caller: `with await worker.slots.take(caller):`. Waited for in the order of
        `caller.priority`, and of arrival; Overloaded at once when the queue is full, and after `queue_timeout`;
        DeadlineExceeded where its time is over when its turn comes."""
        slot = self.take_now(caller)
        if slot is not None:
            return slot
        if self.successor is not None:
            return await self.successor.take(caller)
        asked = perf_counter_ns()
        self.live.add(caller)
        self.waiting.add(caller)
        try:
            held = await self._wait(caller)
        except BaseException:
            self.live.discard(caller)
            self.left.ring()
            now = perf_counter_ns()
            self.statistics.failure(now, now - asked, cancelled=caller.gone)
            raise
        finally:
            self.waiting.discard(caller)
            if self._spans is not None:
                self._spans.waited(self._name, asked)
        return self._slot(caller, asked, held=held)

    async def _wait(self, caller: Caller) -> int:
        """Returns what the caller held when it began to wait: so many bytes are its body's now."""
        held, limit = caller.held, self._queue_timeout
        self.check_queue(held)
        self.queued_bytes += held
        caller.slot_wait_began()
        try:
            if limit:
                with trio.move_on_after(limit) as scope:
                    await self.queue.wait(level_of(caller.priority), held)
                if scope.cancelled_caught:
                    why = f"no slot was free within {limit:g} s (models.{self._name}.queue_timeout)"
                    raise self._busy(why, Refusal.QUEUE_TIMEOUT)
            else:
                await self.queue.wait(level_of(caller.priority), held)
        except BaseException:
            if self.most_bytes:
                self._admit()  # those behind it may be smaller
            raise
        finally:
            caller.slot_wait_over()
            self.queued_bytes -= held
        try:
            if trio.current_time() >= caller.deadline:
                throw(caller.interruption_or_deadline)  # the model is not called for nobody
            self.check_still_loaded()
        except BaseException:
            if self.most_bytes:
                self.body_bytes -= held
            self.released()
            raise
        return held

    def check_queue(self, held: int = 0) -> None:
        """Overloaded where nobody more may wait, or nobody who holds so many bytes."""
        name, most = self._name, self.most_bytes
        if most and held > most:
            raise TooLarge(
                f"the body holds {held} bytes, and those of the sessions that run may hold {most} together "
                f"(models.{name}.body_bytes)"
            )
        if self.queued >= self._most_queued:
            raise self._busy(
                f"{self.capacity} sessions run and {self.queued} wait (models.{name}.capacity, models.{name}.queue)"
            )
        if self._most_queued_bytes and self.queued_bytes + held > self._most_queued_bytes:
            raise self._busy(
                f"{self.queued} sessions wait with {self.queued_bytes} bytes, and there is no room for {held} more "
                f"(models.{name}.queue_bytes)"
            )

    def _busy(self, why: str, refusal: Refusal = Refusal.QUEUE) -> Overloaded:
        after = retry_estimate(self.queued, self.capacity, self.statistics.service)
        return Overloaded(f"model {self._name!r} is busy: {why}; try again later", retry_after=after, refusal=refusal)

    def check_still_loaded(self) -> None:
        """Raises Unavailable unless the model can be called by who has a slot of it, or is just given one."""
        if self.successor is None:
            self._life.check()
        elif not self._life.there:
            raise Unavailable(f"model {self._name!r} was loaded anew, and this version of it is gone; try again")

    # -- for a slot that is over, and for the worker -----------------------------------------------------------------

    def released(self) -> None:
        """A session and every step of it are over."""
        if self.most_bytes:
            self.free += 1
            self._admit()
        elif not self.free and self.queue:
            self.queue.wake()  # the first in the queue has it
        else:
            self.free += 1
        if not self.open:
            self.left.ring()

    def _admit(self) -> None:
        """Lets those in who are next, where their bodies fit: nobody goes before one whose does not."""
        queue = self.queue
        while self.free and queue and self.body_bytes + queue.next_held <= self.most_bytes:
            self.free -= 1
            self.body_bytes += queue.next_held
            queue.wake()

    def body_gone(self, slot: Slot) -> None:
        """Where bodies are bounded: nothing of a session is left."""
        self.body_bytes -= self.bodies.pop(slot)

    def replaced(self) -> None:
        """A slot is stuck, and another takes its place."""
        self._replaced += 1
        self.released()

    def replacement_back(self) -> None:
        """It is over, and has no place that were free now."""
        self._replaced -= 1
        if self.most_bytes:
            self._admit()
        self.left.ring()

    async def sessions_over(self) -> None:
        """Returns when nobody has a slot any more, nor is there any thread of a session; asked while they are closed."""
        while self.in_use or self.stuck.now:
            await self.left.wait()

    async def all_left(self) -> None:
        """Returns when nobody has a slot any more or waits for one, nor is there any thread of a session: asked while
        they are closed."""
        while self.in_use or self.live or self.stuck.now:
            await self.left.wait()


def retry_estimate(queued: int, capacity: int, service: float) -> float:
    """Seconds until a request that comes now would have a slot, from 1 to 60, where one lasts `service` on average."""
    return min(max((queued + 1) / capacity * service, 1.0), 60.0)
