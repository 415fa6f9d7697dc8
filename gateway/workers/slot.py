"""One place in a model's capacity: what a call holds from its first moment until nothing of its session is left."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Protocol, final

import trio

from gateway.errors import DeadlineExceeded, Ending
from gateway.workers.caller import Caller
from gateway.workers.statistics import ModelStatistics
from gateway.workers.stuck import StuckWatch
from models.blocking import BackgroundSteps, Step, StepHolder, reset_step_holder, set_step_holder


class Capacity(Protocol):
    """What one slot asks of them all."""

    live: set[Caller]
    lingering: set[Slot]
    statistics: ModelStatistics
    stuck: StuckWatch
    most_bytes: int

    def released(self, caller: Caller) -> None: ...
    def body_gone(self, slot: Slot) -> None: ...
    def replaced(self, slot: Slot) -> None: ...
    def replacement_back(self, slot: Slot) -> None: ...


@final
class Slot(StepHolder):
    """One place in a model's capacity, as a context manager. It is free when the session and every blocking step of
    it are over.

    It also counts the call: as a success where the block ends without an exception, as a failure where not. A dialect that
    knows better sets `counts` to False inside the block. One that writes its answer after the block then says `answered` or
    `unanswered`, once; one that makes many calls of one session counts them itself.
    """

    __slots__ = (
        "_asked", "_began", "_holder", "_holds", "_returned", "_shared", "_since", "_slots", "_waited",
        "_watched", "caller", "counts", "told",
    )  # fmt: skip

    def __init__(self, slots: Capacity, caller: Caller, asked: int = 0) -> None:
        """The place is taken already; it was `asked` for then, on `perf_counter_ns`, if not just now."""
        self._slots, self.caller = slots, caller
        caller.had_slot = True
        self._holds = 1
        self._watched = self._shared = False  # whether its end is looked at; whether others need what goes on after it
        self._since: float | None = None  # when it was to stop, once it has ended
        self._holder = set_step_holder(self)
        self.counts = True
        self.told: tuple[int, ...] = ()
        """What `answered` is to be told at the end of the block."""
        self._began = perf_counter_ns()
        self._asked = asked or self._began
        self._waited = 0  # in a queue of the model's own, since `take_waited`

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.leave(kind is not None)
        if self.counts:
            if error is None:
                self.answered(*self.told)
            else:
                self.unanswered(error)

    def leave(self, stopped: bool = False) -> None:
        """The end of the block, without a count; `stopped` where an exception ended it. For who has no block: a `with` costs
        more than its two calls."""
        reset_step_holder(self._holder)
        slots = self._slots
        slots.live.discard(self.caller)
        self._holds -= 1
        if self._holds or self._watched or stopped:
            self._ended()
        else:
            slots.released(self.caller)
        self._returned = perf_counter_ns()

    def answered(self, arrived: int = 0, batch: int = 1, copied: int = -1) -> None:
        """The call was a success, of so many inferences. Its request was read from `arrived` on, on `perf_counter_ns`, until
        the slot was asked for, where that took time; what has passed since the block is the writing of its answer. `copied`
        are the bytes of the body that were copied or converted for its tensors, where it has some."""
        caller = self.caller
        if caller.gone and caller.ending is not Ending.COMPLETE:
            self.unanswered()  # it was written to nobody
            return
        asked, statistics = self._asked, self._slots.statistics
        statistics.success(arrived or asked, asked, self._began + self._waited, self._returned, perf_counter_ns(), batch)
        if copied >= 0:
            statistics.received += caller.bytes_in
            statistics.copied += caller.copied + copied

    def unanswered(self, error: BaseException | None = None) -> None:
        """The call was a failure: of this error, or of a client's leaving."""
        caller = self.caller
        if caller.ending is Ending.COMPLETE and isinstance(error, trio.Cancelled):
            self.answered(*self.told)  # it left with its whole answer
            return
        now = perf_counter_ns()
        self._slots.statistics.failure(now, now - self._asked, cancelled=caller.gone)

    def _ended(self) -> None:
        """The session is over; it was to stop, or something of it goes on, or it is watched."""
        self._since = self.caller.cancelled_at
        if self._holds:
            self._slots.lingering.add(self)
            if self._since is None:
                self._since = trio.current_time()
        else:
            self._over()

    def _over(self) -> None:
        """Nothing of it is left."""
        slots = self._slots
        slots.lingering.discard(self)
        if slots.most_bytes:
            slots.body_gone(self)
        if self._since is not None and not self._shared:
            slots.stuck.stopped(self, trio.current_time() - self._since)
        if slots.stuck.over(self):
            slots.replacement_back(self)
        else:
            slots.released(self.caller)

    def weighed(self) -> None:
        """Its end is told, for the bytes of its body."""
        self._watched = True

    def watched(self) -> None:
        """It is to stop in time."""
        self._watched = True
        self._slots.stuck.watch(self, self)

    def stopping_since(self) -> float | None:
        if self._shared:
            return None
        return self.caller.cancelled_at if self._since is None else self._since

    # what the steps of its model know of it

    @property
    def limiter(self) -> trio.CapacityLimiter:
        return self._slots.stuck.limiter

    def hold(self, *, stopping: bool = True) -> None:
        self._holds += 1
        self._shared |= not stopping

    def release(self) -> None:
        self._holds -= 1
        if self._holds == 0:
            self._over()

    def begin(self, step: Step) -> None:
        self._holds += 1
        self._slots.stuck.begin(step, self)

    def end(self, step: Step) -> None:
        self._slots.stuck.end(step)
        self.release()

    def reserve(self, n: int) -> Callable[[], None]:
        return self.caller.reserve_objects(n)

    def background(self, stuck: Callable[[str], None]) -> BackgroundSteps:
        return BackgroundSteps(self._slots.stuck, stuck)

    def interrupt(self, text: str) -> None:
        self.caller.interrupt(DeadlineExceeded(text))

    def replace(self) -> None:
        self._watched = True
        self._slots.replaced(self)

    def ran_in(self, instance: int) -> None:
        self.caller.instance = instance

    def stuck_there(self, *, step: bool, stack: str, replaced: bool) -> None:
        self._slots.stuck.stuck_elsewhere(self, step=step, stack=stack, replaced=replaced)

    def waited(self, ns: int) -> None:
        self._waited += ns

    def take_waited(self) -> int:
        """What was spent in a queue of the model's own since the last look, for one who counts calls of a session."""
        waited, self._waited = self._waited, 0
        return waited
