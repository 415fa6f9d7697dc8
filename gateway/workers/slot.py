"""One place in a model's capacity, which a call holds until nothing of its session is left."""

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
    """The interface that a slot needs of the model's `Slots`."""

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
    """One place in a model's capacity, as a context manager. The place is free again when the session and all its blocking
    steps are over.

    It also counts the call: as a success if the block ends without an exception, otherwise as a failure. A dialect that
    counts its calls itself sets `counts` to False inside the block. If it writes its answer after the block, it then calls
    `answered` or `unanswered`, once. If it makes several calls of one session, it counts them in the statistics itself.
    """

    __slots__ = (
        "_asked", "_began", "_holder", "_holds", "_returned", "_shared", "_since", "_slots", "_waited",
        "_watched", "caller", "counts", "told",
    )  # fmt: skip

    def __init__(self, slots: Capacity, caller: Caller, asked: int = 0) -> None:
        """The place must be taken already. `asked`: when the caller asked for it, on `perf_counter_ns`; default: now."""
        self._slots, self.caller = slots, caller
        caller.had_slot = True
        self._holds = 1
        self._watched = self._shared = False  # True if its end is reported; if steps after its end serve other calls too
        self._since: float | None = None  # once it has ended, the time at which it was told to stop
        self._holder = set_step_holder(self)
        self.counts = True
        self.told: tuple[int, ...] = ()
        """The arguments of `answered` at the end of the block."""
        self._began = perf_counter_ns()
        self._asked = asked or self._began
        self._waited = 0  # ns in the model's own queue since `take_waited`

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
        """Ends the slot without counting the call. `stopped`: an exception ended it. For callers that save the cost of a
        `with` block."""
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
        """Counts a success of `batch` inferences. `arrived`: when the reading of the request began, on `perf_counter_ns`;
        it ended when the slot was asked for. Default 0: it took no time. The time since the block counts as the writing of
        the answer. `copied`: bytes of the body that were copied or converted for tensors; default -1: it has no tensors."""
        caller = self.caller
        if caller.gone and caller.ending is not Ending.COMPLETE:
            self.unanswered()  # the client has not received the answer
            return
        asked, statistics = self._asked, self._slots.statistics
        statistics.success(arrived or asked, asked, self._began + self._waited, self._returned, perf_counter_ns(), batch)
        if copied >= 0:
            statistics.received += caller.bytes_in
            statistics.copied += caller.copied + copied

    def unanswered(self, error: BaseException | None = None) -> None:
        """Counts a failure: by this error, or because the client has disconnected."""
        caller = self.caller
        if caller.ending is Ending.COMPLETE and isinstance(error, trio.Cancelled):
            self.answered(*self.told)  # the client disconnected after its whole answer
            return
        now = perf_counter_ns()
        self._slots.statistics.failure(now, now - self._asked, cancelled=caller.gone)

    def _ended(self) -> None:
        """Ends a session that was told to stop, is watched, or has steps that go on."""
        self._since = self.caller.cancelled_at
        if self._holds:
            self._slots.lingering.add(self)
            if self._since is None:
                self._since = trio.current_time()
        else:
            self._over()

    def _over(self) -> None:
        """Frees the place: nothing of the session is left."""
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
        """Has its end reported, because the bytes of its body are counted."""
        self._watched = True

    def watched(self) -> None:
        """Has its time to stop watched."""
        self._watched = True
        self._slots.stuck.watch(self, self)

    def stopping_since(self) -> float | None:
        if self._shared:
            return None
        return self.caller.cancelled_at if self._since is None else self._since

    # -- StepHolder: called by the model's steps -----------------------------------------------------------------------

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
        """Returns the nanoseconds in the model's own queue since the last call, for a dialect that counts calls itself."""
        waited, self._waited = self._waited, 0
        return waited
