"""One model in service: loaded, supervised, and called by exchanges within its capacity."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar, cast, final
from uuid import uuid4

import trio

from gateway.config.text import text_without_secrets
from gateway.core.exchange import Exchange
from gateway.core.waits import SLOT
from gateway.doorbell import Doorbell
from gateway.errors import (
    DeadlineExceeded,
    Ending,
    NotFound,
    Overloaded,
    Refusal,
    TooLarge,
    Unavailable,
    WorkerLost,
)
from gateway.workers import failures
from gateway.workers.failures import LastError, LoadEnded
from gateway.workers.restart_policy import decide, within_period
from gateway.workers.slots import SlotQueue, level_of
from gateway.workers.states import TRANSITIONS, State
from gateway.workers.statistics import ModelStatistics
from gateway.workers.stuck import Background, StuckWatch
from models.batching import running
from models.blocking import Step, StepHolder, detached, reset_step_holder, run_step, set_step_holder, throw
from models.continuations import Continuations, TextChannel
from models.convert import convert
from models.errors import contained, is_failure, leaves
from models.messages import Family
from models.session import Session
from models.spec import Check, Model, ModelSpec, Restart, WarmupFailed, warm_up

if TYPE_CHECKING:
    from gateway.workers.caller import CallSpans

log = logging.getLogger("gateway.worker")

T = TypeVar("T")

_SHUTDOWN_SECONDS = 5.0
RESTART_GRACE = 5.0
"""Seconds for which a model that has crashed counts as ready still: one that is back by then does not take its server out of
service."""
_THREADS = 8


_READY, _TEXT = State.READY, Family.TEXT  # named once: a member costs three look-ups where it is used


@final
class Slot(StepHolder):
    """One place in a worker's capacity, as a context manager. It is free when the session and every blocking step of
    it are over.

    It also counts the call: as a success where the block ends without an exception, as a failure where not. A dialect that
    knows better sets `counts` to False inside the block. One that writes its answer after the block then says `answered` or
    `unanswered`, once; one that makes many calls of one session counts them itself.
    """

    __slots__ = (
        "_asked", "_began", "_exchange", "_holder", "_holds", "_returned", "_shared", "_since", "_waited", "_watched",
        "_worker", "counts", "told",
    )  # fmt: skip

    def __init__(self, worker: Worker, exchange: Exchange, asked: int = 0) -> None:
        """The place is taken already; it was `asked` for then, on `perf_counter_ns`, if not just now."""
        self._worker, self._exchange = worker, exchange
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
        worker = self._worker
        worker.live.discard(self._exchange)
        self._holds -= 1
        if self._holds or self._watched or stopped:
            self._ended()
        else:
            worker.slot_released()
        self._returned = perf_counter_ns()

    def answered(self, arrived: int = 0, batch: int = 1, copied: int = -1) -> None:
        """The call was a success, of so many inferences. Its request was read from `arrived` on, on `perf_counter_ns`, until
        the slot was asked for, where that took time; what has passed since the block is the writing of its answer. `copied`
        are the bytes of the body that were copied or converted for its tensors, where it has some."""
        exchange = self._exchange
        if exchange.gone and exchange.ending is not Ending.COMPLETE:
            self.unanswered()  # it was written to nobody
            return
        asked, statistics = self._asked, self._worker.statistics
        statistics.success(arrived or asked, asked, self._began + self._waited, self._returned, perf_counter_ns(), batch)
        if copied >= 0:
            statistics.received += exchange.bytes_in
            statistics.copied += exchange.copied + copied

    def unanswered(self, error: BaseException | None = None) -> None:
        """The call was a failure: of this error, or of a client's leaving."""
        exchange = self._exchange
        if exchange.ending is Ending.COMPLETE and isinstance(error, trio.Cancelled):
            self.answered(*self.told)  # it left with its whole answer
            return
        now = perf_counter_ns()
        self._worker.statistics.failure(now, now - self._asked, cancelled=exchange.gone)

    def _ended(self) -> None:
        """The session is over; it was to stop, or something of it goes on, or it is watched."""
        self._since = self._exchange.cancelled_at
        if self._holds:
            if self._since is None:
                self._since = trio.current_time()
        else:
            self._over()

    def _over(self) -> None:
        """Nothing of it is left."""
        worker = self._worker
        if worker._most_bytes:
            worker.body_gone(self)
        if self._since is not None and not self._shared:
            worker.stuck.stopped(self, trio.current_time() - self._since)
        if worker.stuck.over(self):
            worker.replacement_back()
        else:
            worker.slot_released()

    def weighed(self) -> None:
        """Its end is told, for the bytes of its body."""
        self._watched = True

    def watched(self) -> None:
        """It is to stop in time."""
        self._watched = True
        self._worker.stuck.watch(self, self)

    def stopping_since(self) -> float | None:
        if self._shared:
            return None
        return self._exchange.cancelled_at if self._since is None else self._since

    # what the steps of its model know of it

    @property
    def limiter(self) -> trio.CapacityLimiter:
        return self._worker.stuck.limiter

    def hold(self, *, stopping: bool = True) -> None:
        self._holds += 1
        self._shared |= not stopping

    def release(self) -> None:
        self._holds -= 1
        if self._holds == 0:
            self._over()

    def begin(self, step: Step) -> None:
        self._holds += 1
        self._worker.stuck.begin(step, self)

    def end(self, step: Step) -> None:
        self._worker.stuck.end(step)
        self.release()

    def reserve(self, n: int) -> Callable[[], None]:
        return self._exchange.reserve_objects(n)

    def background(self, stuck: Callable[[str], None]) -> Background:
        return Background(self._worker.stuck, stuck)

    def interrupt(self, text: str) -> None:
        self._exchange.interrupt(DeadlineExceeded(text))

    def replace(self) -> None:
        self._watched = True
        self._worker.replaced()

    def waited(self, ns: int) -> None:
        self._waited += ns

    def take_waited(self) -> int:
        """What was spent in a queue of the model's own since the last look, for one who counts calls of a session."""
        waited, self._waited = self._waited, 0
        return waited


@final
class Worker:
    """Keeps one model loaded and lets exchanges call it.

    Sessions run in their exchange's task. An exception out of a session is that session's; one out of `load()`'s
    context is the worker's: its live sessions get their one ending and the model is loaded again after the policy's
    wait, or given up.

    A worker that is not `lasting` is never there without its model: where the first load fails, and where the model is
    given up later, `run` ends, and `failure` is what it failed of.

    `changed` is called after each change of its state; `chance` gives numbers from 0 to 1, for the jitter of restarts;
    `spans` makes those of its calls, where there are some; `check` makes what looks at the answers of its warm-up.
    """

    __slots__ = (  # a dict of more than 30 names has no place in CPython's inline caches
        "_bodies",
        "_body_bytes",
        "_called",
        "_chance",
        "_changed",
        "_check",
        "_free",
        "_left",
        "_loaded",
        "_loading",
        "_lost_at",
        "_model",
        "_most_bytes",
        "_patience",
        "_queue",
        "_queued_bytes",
        "_replaced",
        "_settled",
        "_spans",
        "_special",
        "_stop",
        "_threads",
        "_waiting",
        "crashes",
        "failure",
        "given_up",
        "last_error",
        "lasting",
        "live",
        "name",
        "reason",
        "replaces",
        "restart_at",
        "since",
        "spec",
        "starts",
        "state",
        "statistics",
        "stopped",
        "stopping",
        "stuck",
        "successor",
        "task",
        "tensor_codec",
    )  # fmt: skip

    def __init__(
        self,
        spec: ModelSpec,
        *,
        lasting: bool = True,
        changed: Callable[[Worker], None] | None = None,
        chance: Callable[[], float] = random.random,
        spans: CallSpans | None = None,
        check: Callable[[ModelSpec], Check] | None = None,
    ) -> None:
        self._check = check
        self.spec, self.name = spec, spec.name
        self.lasting, self._loaded = lasting, False
        self._lost_at = -math.inf
        """The time when it was ready last, on Trio's clock, if it is not."""
        self.replaces = False
        """True if it is to take the place of a worker that serves meanwhile."""
        self._changed, self._chance, self._spans = changed, chance, spans
        self.failure: BaseException | None = None
        self.task: trio.lowlevel.Task | None = None
        """The task that loads the model, and runs its work beside the calls."""
        self.state = State.LOADING
        self.reason = ""
        """Why it is not ready, or was not before, where something went wrong."""
        self.crashes: list[float] = []
        """When it crashed, within the period of its policy, on Trio's clock."""
        self.successor: Worker | None = None
        """The worker that serves in its place since a reload: whoever has chosen this one and has no slot yet is sent on."""
        self.given_up = False
        """Whether it crashed, while it was in service or was to be, and is not loaded again."""
        self.since: float | None = None
        """When it came into its state, on Trio's clock; None before it runs."""
        self.last_error: LastError | None = None
        """The last failure of the model that a log line explains: its own, or of a session of it."""
        self.starts = 0
        self.restart_at: float | None = None
        """When it is loaded again, on Trio's clock, while it is RESTARTING."""
        self.statistics = ModelStatistics(batched=spec.batching is not None)
        self._free = spec.capacity
        self._queue = SlotQueue()
        self._queued_bytes = 0
        self._most_bytes = spec.body_bytes
        self._bodies: dict[Slot, int] = {}
        """Where those are bounded, what the bodies of the sessions that run hold."""
        self._body_bytes = 0
        """All of these, and those of sessions that are just let in."""
        self.tensor_codec: Any = None
        """What v2 has made for this worker's calls: it lasts as long."""
        self._threads = trio.CapacityLimiter(_THREADS)
        self.live: set[Exchange] = set()
        """Exchanges inside `slot`, those that wait for theirs too."""
        self._waiting: set[Exchange] = set()
        self._left = Doorbell()
        self.stuck = StuckWatch(spec, self._left.ring)
        """What of its model does not come back."""
        self.stopping = self.stuck.stopping
        """How long its sessions take to stop."""
        self._replaced = 0
        self._special = bool(spec.timeout or spec.stop_within or spec.body_bytes)
        self._model: Model | None = None
        self._called: Model | None = None  # the same, perhaps in spans
        self._loading = trio.CancelScope()
        self._stop = trio.Event()
        self._patience = trio.CancelScope()
        self._settled = trio.Event()
        self.stopped = trio.Event()

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    @property
    def absence(self) -> str:
        """Why it does not count as ready, in words for anybody; empty where it does, as a model does that has crashed less
        than `RESTART_GRACE` seconds ago and is loaded again."""
        match self.state:
            case State.READY:
                return ""
            case State.LOADING | State.RESTARTING if self._loaded:
                if trio.current_time() - self._lost_at < RESTART_GRACE:
                    return ""
                return f"crashed, and is not back within {RESTART_GRACE:g} s"
            case State.LOADING if self.starts <= 1:
                return "is loading"
            case State.LOADING | State.RESTARTING:
                return "could not be loaded, and is tried again"
            case State.FAILED:
                return "was given up"
            case State.ENDED:
                return "has ended"
            case _:
                return "is being unloaded"

    @property
    def model(self) -> Model | None:
        """The model itself, while it is loaded."""
        return self._model

    def said(self, name: str) -> Any:
        """The value of a field by the spec, else by the model itself; None where neither has one."""
        said = getattr(self.spec, name)
        return getattr(self._model, name, None) if said is None else said

    @property
    def own_stops(self) -> bool:
        """True if the model says that it acts on `stop_sequences`: its texts end there already."""
        parameters = self.said("parameters")
        return isinstance(parameters, Collection) and "stop_sequences" in parameters  # a torch module has such a method

    @property
    def waiting(self) -> frozenset[Exchange]:
        """Exchanges that wait for a slot."""
        return frozenset(self._waiting)

    @property
    def queued(self) -> int:
        """Exchanges that wait for a slot."""
        return len(self._queue)

    @property
    def queued_bytes(self) -> int:
        """What those hold of the byte budget."""
        return self._queued_bytes

    @property
    def slots_in_use(self) -> int:
        """Those included that are stuck, and replaced by others."""
        return self.spec.capacity - self._free + self._replaced

    # -- supervised life ---------------------------------------------------------------------------------------------

    async def first_load(self) -> None:
        """Waits until the first attempt to load has succeeded or failed."""
        await self._settled.wait()

    async def run(self) -> None:
        """Loads the model and keeps it loaded until `stop`. Raises nothing: a model that cannot be kept up is FAILED."""
        policy = self.spec.restart
        self.task = trio.lowlevel.current_task()
        try:
            while not self._stop.is_set():
                self.starts += 1
                crash = await self._one_life()
                if crash is None:
                    break
                now, ended = trio.current_time(), isinstance(crash, LoadEnded)
                self.crashes = [*within_period(policy, self.crashes, now), now]
                self.reason = text_without_secrets(f"{type(crash).__name__}: {crash}")[:300]
                wait = None
                if self.lasting or self._loaded:
                    wait = decide(policy, self.crashes, now, ended=ended, chance=self._chance())
                over = wait is None and ended and policy.kind is not Restart.PERMANENT
                if over:
                    self.crashes.pop()
                elif wait is None and (self.lasting or self._loaded):
                    self.given_up = True
                said = "model crashed" if wait is not None else "model ended" if over else self._end_said
                incident = {} if over else {"incident": self._failed(crash).incident}
                log.log(
                    logging.INFO if over else logging.ERROR,
                    said,
                    extra={"model": self.name, "reason": self.reason, "restart_in": wait, **incident},
                    exc_info=None if over else crash,
                )
                if wait is None and not self.lasting:
                    self.failure = contained(crash)
                    break
                detached(crash)  # this frame keeps it until the next one, but must not keep a failed load's memory
                if wait is not None:
                    self.restart_at = now + wait
                    self._enter(State.RESTARTING)
                else:
                    self._enter(State.ENDED if over else State.FAILED)
                self._settled.set()
                with trio.move_on_after(float("inf") if wait is None else wait):
                    await self._stop.wait()
                self.restart_at = None
        finally:
            self.restart_at = None
            self._enter(State.STOPPED)
            self._settled.set()
            self.stopped.set()

    @property
    def _end_said(self) -> str:
        """The log's message for a crash after which it is not loaded again."""
        if self.lasting or self._loaded:
            return "model given up"
        return "model not reloaded" if self.replaces else "model cannot be loaded"

    def _enter(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} does not become {state}"
        now = trio.current_time()
        if self.state is State.READY:
            self._lost_at = now
        self.state, self.since = state, now
        if self._changed is not None:
            self._changed(self)

    async def _one_life(self) -> BaseException | None:
        """One load and its life; the exception that ended it, None when it was asked to stop."""
        self._enter(State.LOADING)
        spec, spans = self.spec, self._spans
        if spans is not None and spec.batching is not None:
            spec = spans.batched(spec)
        began = trio.current_time()
        error: BaseException | None
        cold: WarmupFailed | None = None
        self._loading = scope = trio.CancelScope(deadline=began + self.spec.load_timeout)
        try:
            with scope:
                async with self.stuck.around(running(spec, self.statistics, self.stuck)) as model:
                    if self.spec.warmup:
                        try:
                            await warm_up(model, self.spec, self._check and self._check(self.spec))
                        except WarmupFailed as e:
                            cold = e  # a load() that contains what is raised in its block is no better for that
                            raise
                    # it may be too late, or not wanted any more, though load() did not notice
                    await trio.lowlevel.checkpoint_if_cancelled()
                    scope.deadline = float("inf")
                    self._model = model
                    self._called = model if spans is None else spans.model(self.spec, model)
                    self.reason, self._loaded = "", True
                    self._enter(State.READY)
                    log.info("model ready", extra={"model": self.name, "seconds": round(trio.current_time() - began, 3)})
                    self._settled.set()
                    try:
                        await self._stop.wait()
                        with self._patience:
                            await self._sessions_over()
                        self._lose_sessions()
                        with trio.move_on_after(_SHUTDOWN_SECONDS):
                            await self._sessions_over()  # and their threads
                    finally:
                        self._model = self._called = None
                        if not self._stop.is_set():
                            self._enter(State.RESTARTING)
                        # a crash in the background cancels us: sessions learn of it before the clean-up runs
                        self._lose_sessions()
                        scope.deadline = trio.current_time() + _SHUTDOWN_SECONDS
        except BaseException as e:  # a model's sys.exit() is not the server's
            if not is_failure(e):
                if isinstance(e, BaseExceptionGroup):
                    raise self._only_cancelled(e) from None  # the server was cancelled in the same moment
                raise
            error = failures.one_of(e)
        else:
            error = cold or self._silent_end(timed_out=scope.cancelled_caught)
        try:
            if error is not None and self._stop.is_set():
                log.warning("model did not unload", extra={"model": self.name, "reason": str(error)[:300]}, exc_info=error)
                return None
            return error
        finally:
            del error, cold  # they know this frame: a cycle would keep the model

    def _silent_end(self, *, timed_out: bool) -> Exception | None:
        """Why a life is over that raised nothing: None for the one good reason."""
        match self.state:
            case State.LOADING if timed_out and not self._stop.is_set():
                return TimeoutError(
                    f"loading took longer than {self.spec.load_timeout:g} s (models.{self.name}.load_timeout)"
                )
            case State.LOADING if not self._stop.is_set():
                return RuntimeError("load() ended its context before its model was ready")
            case State.RESTARTING if not timed_out:
                return LoadEnded("load() ended its context, though nobody had asked it to")
            case State.DRAINING | State.RESTARTING if timed_out:
                return TimeoutError(f"unloading took longer than {_SHUTDOWN_SECONDS:g} s")
            case _:
                return None

    def _lose_sessions(self) -> None:
        for exchange in list(self.live):
            exchange.interrupt(WorkerLost(f"the worker of model {self.name!r} ended; try again"))

    def stop(self, patience: float = 0.0) -> None:
        """Unloads the model, or gives up loading it. Sessions that wait for a slot are turned away at once, unless there is
        a successor; those that run get their ending after `patience` seconds. Idempotent: the most impatient call counts."""
        if self.state is State.READY:
            self._enter(State.DRAINING)
        elif self.state is State.LOADING:
            self._loading.cancel()
        if patience > 0:
            self._patience.deadline = min(self._patience.deadline, trio.current_time() + patience)
            for exchange in () if self.successor else list(self._waiting):
                exchange.interrupt(Unavailable(f"model {self.name!r} is being unloaded; nothing was started"))
        else:
            self._patience.cancel()
        self._stop.set()

    def hand_over(self, successor: Worker, patience: float) -> None:
        """Stops in favour of another worker. Sessions that run, and those that wait for a slot, have `patience` seconds to
        end here; calls that have chosen this worker, and no slot yet, go to the successor."""
        self.successor = successor
        self.stop(patience)

    async def _sessions_over(self) -> None:
        while self.slots_in_use or self.stuck.now:
            await self._left.wait()

    async def left(self) -> None:
        """After `stopped`: returns when nobody is inside `slot` any more, nor any thread of a session."""
        while self.slots_in_use or self.live or self.stuck.now:
            await self._left.wait()

    def retired(self) -> None:
        """After the end: what still knows this worker no longer keeps the model alive."""
        self.spec = replace(self.spec, load=_never)

    # -- calls -------------------------------------------------------------------------------------------------------

    def check_ready(self, *, room: bool = True) -> None:
        """Raises Unavailable unless the model can be called now, and Overloaded where there is not even a place in the
        queue: to be asked before a body is received. `room` is False where `slot` is to say that, because only the body
        tells in which words."""
        if self.state is _READY:
            if room and not self._free:
                self._check_queue()
        elif self.successor is not None:
            self.successor.check_ready(room=room)
        else:
            self._check_loaded()

    def _check_loaded(self) -> None:
        if self.state is _READY:
            return
        match self.state:
            case State.STOPPED if self._stop.is_set() or not self.lasting:
                raise NotFound(f"model {self.name!r} is not loaded")
            case State.FAILED:
                # no Retry-After: it does not come back by itself, but when somebody loads it
                said = f"model {self.name!r} is unavailable: it crashed too often; the log says why"
                if self.spec.restart.kind is Restart.TEMPORARY:
                    said = f"model {self.name!r} is unavailable: it crashed, and is not to be restarted; the log says why"
                raise Unavailable(said, retry_after=None)
            case State.ENDED:
                raise Unavailable(f"model {self.name!r} is unavailable: it has ended", retry_after=None)
            case _:
                wait = 0.0 if self.restart_at is None else self.restart_at - trio.current_time()
                raise Unavailable(f"model {self.name!r} is {self.state.value}; try again", retry_after=wait)

    def free_slot(self, exchange: Exchange) -> Slot | None:
        """What `slot` returns, if nobody has to wait for it."""
        if self.state is not _READY:
            if self.successor is not None:
                return self.successor.free_slot(exchange)
            self._check_loaded()
        if not self._free or (self._most_bytes and not self._fits(exchange.held)):
            return None
        self._free -= 1
        self.live.add(exchange)
        return self._slot(exchange, held=self._most_bytes and exchange.held) if self._special else Slot(self, exchange)

    def _fits(self, held: int) -> bool:
        """Whether so many bytes are free for a body, and nobody waits for more: those go first."""
        if self._queue or self._body_bytes + held > self._most_bytes:
            return False
        self._body_bytes += held
        return True

    def _slot(self, exchange: Exchange, asked: int = 0, *, held: int) -> Slot:
        if self.spec.timeout:
            exchange.limit_time(self.spec.timeout, f"models.{self.name}.timeout")
        slot = Slot(self, exchange, asked)
        if self.spec.stop_within:
            slot.watched()
        if self._most_bytes:
            slot.weighed()
            self._bodies[slot] = held
        return slot

    async def slot(self, exchange: Exchange) -> Slot:
        """A place in the capacity for one exchange: `with await worker.slot(exchange):`. Waited for in the order of
        `exchange.priority`, and of arrival; Overloaded at once when the queue is full, and after `queue_timeout`;
        DeadlineExceeded where its time is over when its turn comes."""
        free = self.free_slot(exchange)
        if free is not None:
            return free
        if self.successor is not None:
            return await self.successor.slot(exchange)
        asked = perf_counter_ns()
        self.live.add(exchange)
        self._waiting.add(exchange)
        try:
            held = await self._wait_for_slot(exchange)
        except BaseException:
            self.live.discard(exchange)
            self._left.ring()
            now = perf_counter_ns()
            self.statistics.failure(now, now - asked, cancelled=exchange.gone)
            raise
        finally:
            self._waiting.discard(exchange)
            if self._spans is not None:
                self._spans.waited(self.name, asked)
        return self._slot(exchange, asked, held=held)

    async def _wait_for_slot(self, exchange: Exchange) -> int:
        """Returns what the exchange held when it began to wait: so many bytes are its body's now."""
        held, limit = exchange.held, self.spec.queue_timeout
        self._check_queue(held)
        self._queued_bytes += held
        exchange.parks_for(SLOT)
        try:
            if limit:
                with trio.move_on_after(limit) as scope:
                    await self._queue.wait(level_of(exchange.priority), held)
                if scope.cancelled_caught:
                    why = f"no slot was free within {limit:g} s (models.{self.name}.queue_timeout)"
                    raise self._busy(why, Refusal.QUEUE_TIMEOUT)
            else:
                await self._queue.wait(level_of(exchange.priority), held)
        except BaseException:
            if self._most_bytes:
                self._admit()  # those behind it may be smaller
            raise
        finally:
            exchange.has_waited(SLOT)
            self._queued_bytes -= held
        try:
            if trio.current_time() >= exchange.deadline:
                throw(exchange.interruption_or_deadline)  # the model is not called for nobody
            self._check_still_loaded()
        except BaseException:
            if self._most_bytes:
                self._body_bytes -= held
            self.slot_released()
            raise
        return held

    def _check_queue(self, held: int = 0) -> None:
        """Overloaded where nobody more may wait, or nobody who holds so many bytes."""
        spec, name = self.spec, self.name
        if spec.body_bytes and held > spec.body_bytes:
            raise TooLarge(
                f"the body holds {held} bytes, and those of the sessions that run may hold {spec.body_bytes} together "
                f"(models.{name}.body_bytes)"
            )
        if self.queued >= spec.queue:
            raise self._busy(
                f"{spec.capacity} sessions run and {self.queued} wait (models.{name}.capacity, models.{name}.queue)"
            )
        if spec.queue_bytes and self._queued_bytes + held > spec.queue_bytes:
            raise self._busy(
                f"{self.queued} sessions wait with {self._queued_bytes} bytes, and there is no room for {held} more "
                f"(models.{name}.queue_bytes)"
            )

    def _busy(self, why: str, refusal: Refusal = Refusal.QUEUE) -> Overloaded:
        after = retry_estimate(self.queued, self.spec.capacity, self.statistics.service)
        return Overloaded(f"model {self.name!r} is busy: {why}; try again later", retry_after=after, refusal=refusal)

    def _check_still_loaded(self) -> None:
        """Raises Unavailable unless the model can be called by who has a slot of it, or is just given one."""
        if self.successor is None:
            self._check_loaded()
        elif self._model is None:
            raise Unavailable(f"model {self.name!r} was loaded anew, and this version of it is gone; try again")

    def slot_released(self) -> None:
        """A session and every step of it are over."""
        if self._most_bytes:
            self._free += 1
            self._admit()
        elif not self._free and self._queue:
            self._queue.wake()  # the first in the queue has it
        else:
            self._free += 1
        if self.state is not _READY:
            self._left.ring()

    def _admit(self) -> None:
        """Lets those in who are next, where their bodies fit: nobody goes before one whose does not."""
        queue = self._queue
        while self._free and queue and self._body_bytes + queue.next_held <= self._most_bytes:
            self._free -= 1
            self._body_bytes += queue.next_held
            queue.wake()

    def body_gone(self, slot: Slot) -> None:
        """Where bodies are bounded: nothing of a session is left."""
        self._body_bytes -= self._bodies.pop(slot)

    def replaced(self) -> None:
        """A slot is stuck, and another takes its place."""
        self._replaced += 1
        self.slot_released()

    def replacement_back(self) -> None:
        """It is over, and has no place that were free now."""
        self._replaced -= 1
        if self._most_bytes:
            self._admit()
        self._left.ring()

    async def call(self, session: Session[Any, Any], exchange: Exchange, wire: Family, read_prompt: Any = None) -> None:
        """Runs the model for one session, inside `slot`. Returns when the model has; what it raised comes out as ModelFailed
        (its own ModelError) or ModelCrashed (anything else, logged under the exchange's incident id)."""
        if self.state is not _READY:
            if self.successor is not None and exchange not in self.live:
                await self.successor.call(session, exchange, wire, read_prompt)
                return
            self._check_still_loaded()
        model = self._called
        assert model is not None
        text: Continuations | None = cast(TextChannel, session.channel).text if wire is _TEXT else None
        if self.spec.family is not wire:
            ended = partial(self._stopped, exchange)
            model = convert(model, self.spec.family, wire, read_prompt=read_prompt, own_stops=self.own_stops, stopped=ended)
        try:
            if text is None:
                await model(session)
                return
            await text.around(model(session))
            if text.stopped:
                self._stopped(exchange)
        except trio.Cancelled:
            raise
        except BaseException as e:  # sys.exit() too: a model's session is all that it can end
            if not (isinstance(e, BaseExceptionGroup) or is_failure(e)):
                raise
            raised = self._raised(e, session, exchange, text)
            if is_failure(e):
                detached(e)  # out of a thread that its author has begun it is in a cycle, which would keep the same
            if raised is None:
                return
            try:
                raise raised
            finally:
                del raised  # it knows this frame: a cycle would keep the exchange's memory

    def _stopped(self, exchange: Exchange, error: BaseException | None = None) -> None:
        """The gateway has stopped the model, as its text had all that was asked for. An error that it has raised since
        changes nothing in the answer."""
        exchange.stopped_by = "gateway"
        if error is not None and not failures.end_normally(list(leaves(error))):
            log.warning("model raised while stopped", extra={"model": self.name, "id": exchange.id}, exc_info=error)
        if error is not None:
            detached(error)

    def _raised(
        self, e: BaseException, session: Session[Any, Any], exchange: Exchange, text: Continuations | None
    ) -> BaseException | None:
        """What a call ends with whose model has raised; None: as if it had returned."""
        errors = list(leaves(e))
        if isinstance(e, BaseExceptionGroup) and not is_failure(e):
            return failures.because(self._only_cancelled(e, exchange.id), None)
        if (ours := failures.of_the_gateway(errors)) is not None:
            return failures.because(ours, None)
        if text is not None and text.stopped:
            self._stopped(exchange, e)
            return None
        if (said := failures.of_the_model(errors)) is not None:
            return failures.because(said, e)
        if failures.end_normally(errors, complete=session.channel.complete):
            return None
        exchange.incident = self._failed(errors[0]).incident
        log.error(
            "model raised",
            extra={"model": self.name, "id": exchange.id, "incident": exchange.incident},
            exc_info=errors[0] if len(errors) == 1 else e,
        )
        return failures.because(failures.crash(errors, exchange.incident), e)

    def _failed(self, error: BaseException) -> LastError:
        """The error, with an id under which the log is to explain it."""
        said = text_without_secrets(f"{type(error).__name__}: {error}")[:300]
        self.last_error = LastError(error=said, incident=uuid4().hex[:12], at=trio.current_time())
        return self.last_error

    async def run_author_code(self, call: Callable[[], T]) -> T:
        """Runs a function of the model's author that belongs to no session, in one of a few threads that are for those: one
        that hangs keeps nobody waiting but them. DeadlineExceeded where it takes longer than a session may. Where the
        exchange is cancelled it is left to itself."""
        seconds = self.spec.timeout or math.inf
        with trio.move_on_after(seconds) as scope:
            return await run_step(call, limiter=self._threads)
        assert scope.cancelled_caught
        raise DeadlineExceeded(f"the request took longer than {seconds:g} s to read (models.{self.name}.timeout)")

    def _only_cancelled(self, error: BaseExceptionGroup[Any], id: str = "") -> BaseException:
        cancelled, rest = failures.only_cancelled(error)
        if rest is not None:
            log.warning("model raised while cancelled", extra={"model": self.name, "id": id}, exc_info=rest)
            detached(rest)
        return cancelled


def _never() -> AbstractAsyncContextManager[Model]:
    raise RuntimeError("this model was unloaded")


def retry_estimate(queued: int, capacity: int, service: float) -> float:
    """Seconds until a request that comes now would have a slot, from 1 to 60, where one lasts `service` on average."""
    return min(max((queued + 1) / capacity * service, 1.0), 60.0)
