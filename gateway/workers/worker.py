"""One model in service: loads it, calls it within its capacity, and loads it again after a crash."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast, final
from uuid import uuid4

import trio

from gateway.config.text import text_without_secrets
from gateway.errors import (
    DeadlineExceeded,
    Unavailable,
    WorkerLost,
)
from gateway.log_limits import LogLimits
from gateway.workers import failures
from gateway.workers.caller import Caller
from gateway.workers.failures import Failure, GivenUpElsewhere, LastError, LoadEnded
from gateway.workers.restart_policy import decide, within_period
from gateway.workers.slots import Slots
from gateway.workers.states import Life, State
from gateway.workers.statistics import ModelStatistics
from models.batching import running
from models.blocking import detached, run_step
from models.continuations import Continuations, TextChannel
from models.convert import convert
from models.errors import contained, is_failure, leaves
from models.messages import Family
from models.session import Session
from models.spec import Check, Model, ModelSpec, Restart, WarmupFailed, context_of, features_of, warm_up
from models.tracebacks.text import explains

if TYPE_CHECKING:
    from gateway.workers.caller import CallSpans

log = logging.getLogger("gateway.worker")

T = TypeVar("T")

_SHUTDOWN_SECONDS = 5.0
_THREADS = 8


_TEXT = Family.TEXT  # a global, because each use of an enum's member costs three look-ups


@final
class Worker:
    """Keeps one model loaded and lets exchanges call it.

    A session runs in the task of its exchange. An exception of a session ends only that session. An exception of the
    context of `load()` is a crash: live sessions get their one ending, and the model is loaded again after the policy's
    wait, or given up.

    A worker that is not `lasting` does not outlive its model: if the first load fails, or the model is given up later,
    `run` ends, and `failure` is the exception.

    `changed` is called after each change of state. `chance` returns numbers from 0 to 1, for the jitter of restarts.
    `spans` makes the spans of calls; default None: there are none. `check` makes the function that checks the answers of
    the warm-up. `explained` is called with each failure that the log explains. `admit` is awaited with the model's name when
    it is loaded and warm, before it takes calls.
    """

    __slots__ = (  # a dict of more than 30 names has no place in CPython's inline caches
        "_admit",
        "_called",
        "_chance",
        "_changed",
        "_check",
        "_explained",
        "_loading",
        "_model",
        "_patience",
        "_settled",
        "_spans",
        "_threads",
        "context",
        "crashes",
        "failure",
        "features",
        "given_up",
        "last_error",
        "life",
        "log_limits",
        "name",
        "reason",
        "replaces",
        "slots",
        "spec",
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
        explained: Callable[[Failure], None] | None = None,
        admit: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._check, self._explained, self._admit = check, explained, admit
        self.spec, self.name = spec, spec.name
        self.life = Life(spec.name, spec.restart.kind, lasting=lasting)
        self.replaces = False
        """True if the worker will replace another in a reload."""
        self._changed, self._chance, self._spans = changed, chance, spans
        self.failure: BaseException | None = None
        self.task: trio.lowlevel.Task | None = None
        """The task that loads the model, and runs its work beside the calls."""
        self.reason = ""
        """The reason of the last crash or failed load; empty once the model is loaded."""
        self.crashes: list[float] = []
        """The times of crashes within the period of the policy, on Trio's clock."""
        self.successor: Worker | None = None
        """The worker that has replaced this one in a reload. Calls that picked this one and have not asked for a slot go to
        it."""
        self.given_up = False
        """True if the model crashed in service, or before its first load if it is `lasting`, and is not loaded again."""
        self.last_error: LastError | None = None
        """The last failure of the model, or of one of its sessions, that the log explains."""
        self.log_limits = LogLimits(model=spec.name)
        """The limit on log lines about exceptions of sessions."""
        self.statistics = ModelStatistics(batched=spec.batching is not None)
        self.slots = Slots(spec, self.life, self.statistics, spans)
        self.tensor_codec: Any = None
        """The codec that v2 has made for this worker's calls; None before the first."""
        self._threads = trio.CapacityLimiter(_THREADS)
        self.stuck = self.slots.stuck
        self.stopping = self.stuck.stopping
        """The times that sessions take to stop."""
        self._model: Model | None = None
        self._called: Model | None = None  # the model, with spans if there are some
        self.context = spec.context
        """The most tokens of a prompt and its answer together, by the spec or the loaded model; 0: unknown."""
        self.features = spec.features or frozenset()
        """The features that the spec or the loaded model declares."""
        self._loading = trio.CancelScope()
        self._patience = trio.CancelScope()
        self._settled = trio.Event()
        self.stopped = trio.Event()

    @property
    def state(self) -> State:
        return self.life.state

    @property
    def ready(self) -> bool:
        return self.life.state is State.READY

    @property
    def model(self) -> Model | None:
        """The model itself, while it is loaded."""
        return self._model

    @property
    def in_processes(self) -> bool:
        """True while the model is loaded and runs in separate processes."""
        return hasattr(self._model, "__model_instances__")

    @property
    def body_memory(self) -> Any:
        """The BodyMemory in which whole bodies for the model should be received; None: any memory will do."""
        return getattr(self._model, "__model_bodies__", None)

    @property
    def formatting(self) -> Any:
        """The function that makes the `Formatting` of a request, by its id, if the model's formatters run in its processes;
        None: they run in this process."""
        return getattr(self._model, "__model_formatting__", None)

    def said(self, name: str) -> Any:
        """Returns the value of a field of the spec, or else of the model's attribute; None if neither has one."""
        said = getattr(self.spec, name, None)
        return getattr(self._model, name, None) if said is None else said

    @property
    def own_stops(self) -> bool:
        """True if the model declares the parameter `stop_sequences`: then its texts end there already."""
        parameters = self.said("parameters")
        return isinstance(parameters, Collection) and "stop_sequences" in parameters  # a torch module has such a method

    # -- loading -----------------------------------------------------------------------------------------------------

    async def first_load(self) -> None:
        """Waits until the first attempt to load has succeeded or failed."""
        await self._settled.wait()

    async def run(self) -> None:
        """Loads the model and keeps it loaded until `stop`. Raises nothing: a model that is given up is FAILED."""
        policy, life = self.spec.restart, self.life
        self.task = trio.lowlevel.current_task()
        try:
            while not life.stop.is_set():
                life.starts += 1
                crash = await self._one_life()
                if crash is None:
                    break
                now, ended = trio.current_time(), isinstance(crash, LoadEnded)
                self.crashes = [*within_period(policy, self.crashes, now), now]
                told = isinstance(crash, GivenUpElsewhere)  # its text has the type and the text of the original error
                self.reason = text_without_secrets(str(crash) if told else f"{type(crash).__name__}: {crash}")[:300]
                wait = None
                if (life.lasting or life.loaded) and not told:
                    wait = decide(policy, self.crashes, now, ended=ended, chance=self._chance())
                over = wait is None and ended and policy.kind is not Restart.PERMANENT
                if over:
                    self.crashes.pop()
                elif wait is None and (life.lasting or life.loaded):
                    self.given_up = True
                said = "model crashed" if wait is not None else "model ended" if over else self._end_said
                incident = {} if over else {"incident": self._failed(crash).incident}
                if not over:
                    self.explain(crash, incident["incident"])
                log.log(
                    logging.INFO if over else logging.ERROR,
                    said,
                    extra={"model": self.name, "reason": self.reason, "restart_in": wait, **incident},
                    exc_info=None if over else explains(crash),
                )
                if wait is None and not life.lasting:
                    self.failure = contained(crash)
                    break
                detached(crash)  # this frame keeps it until the next crash, but must not keep the memory of a failed load
                if wait is not None:
                    life.restart_at = now + wait
                    self._enter(State.RESTARTING)
                else:
                    self._enter(State.ENDED if over else State.FAILED)
                self._settled.set()
                with trio.move_on_after(float("inf") if wait is None else wait):
                    await life.stop.wait()
                life.restart_at = None
        finally:
            life.restart_at = None
            self._enter(State.STOPPED)
            self._settled.set()
            self.stopped.set()

    @property
    def _end_said(self) -> str:
        """The log's message for a crash after which the model is not loaded again."""
        if self.life.lasting or self.life.loaded:
            return "model given up"
        return "model not reloaded" if self.replaces else "model cannot be loaded"

    def _enter(self, state: State) -> None:
        self.life.enter(state)
        self.slots.open = state is State.READY
        if self._changed is not None:
            self._changed(self)

    async def _one_life(self) -> BaseException | None:
        """Loads the model and keeps it until it ends. Returns the exception that ended it; None if it was asked to stop."""
        self._enter(State.LOADING)
        spec, spans, life = self.spec, self._spans, self.life
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
                            cold = e  # kept, because a load() might suppress the exception
                            raise
                    said = self.spec.features
                    features = features_of(model, self.spec.family) if said is None else said
                    # load() may not have noticed that its time is over, or that it is no longer wanted
                    await trio.lowlevel.checkpoint_if_cancelled()
                    scope.deadline = float("inf")
                    if self._admit is not None:
                        await self._admit(self.name)
                        await trio.lowlevel.checkpoint_if_cancelled()
                    self._model = model
                    self.context = self.spec.context or context_of(model)
                    self.features = features
                    self._called = model if spans is None else spans.model(self.spec, model)
                    self.reason, life.there, life.loaded = "", True, True
                    self._enter(State.READY)
                    log.info("model ready", extra={"model": self.name, "seconds": round(trio.current_time() - began, 3)})
                    self._settled.set()
                    try:
                        await life.stop.wait()
                        with self._patience:
                            await self.slots.sessions_over()
                        self._lose_sessions()
                        with trio.move_on_after(_SHUTDOWN_SECONDS):
                            await self.slots.sessions_over()  # and their threads
                    finally:
                        self._model = self._called = None
                        life.there = False
                        if not life.stop.is_set():
                            self._enter(State.RESTARTING)
                        # a crash in the background cancels this task: sessions end before the clean-up runs
                        self._lose_sessions()
                        scope.deadline = trio.current_time() + _SHUTDOWN_SECONDS
        except BaseException as e:  # a model's sys.exit() is not the server's
            if not is_failure(e):
                if isinstance(e, BaseExceptionGroup):
                    raise self._only_cancelled(e) from None  # the gateway was cancelled in the same moment
                raise
            error = failures.one_of(e)
        else:
            error = cold or self._silent_end(timed_out=scope.cancelled_caught)
        try:
            if error is not None and life.stop.is_set():
                log.warning(
                    "model did not unload", extra={"model": self.name, "reason": str(error)[:300]}, exc_info=explains(error)
                )
                return None
            return error
        finally:
            del error, cold  # they refer to this frame, and the cycle would keep the model

    def _silent_end(self, *, timed_out: bool) -> Exception | None:
        """Returns the error of a load that ended without an exception; None if the end was asked for."""
        stopping = self.life.stop.is_set()
        match self.state:
            case State.LOADING if timed_out and not stopping:
                return TimeoutError(
                    f"loading took longer than {self.spec.load_timeout:g} s (models.{self.name}.load_timeout)"
                )
            case State.LOADING if not stopping:
                return RuntimeError("load() ended its context before its model was ready")
            case State.RESTARTING if not timed_out:
                return LoadEnded("load() ended its context by itself")
            case State.DRAINING | State.RESTARTING if timed_out:
                return TimeoutError(f"unloading took longer than {_SHUTDOWN_SECONDS:g} s")
            case _:
                return None

    def _lose_sessions(self) -> None:
        for caller in list(self.slots.live):
            caller.interrupt(WorkerLost(f"the worker of model {self.name!r} ended; try again"))

    def stop(self, patience: float = 0.0) -> None:
        """Unloads the model, or gives up loading it. Sessions that wait for a slot get an error at once, unless there is a
        successor. Running sessions have `patience` seconds to end. May be called again: the shortest patience counts."""
        if self.state is State.READY:
            self._enter(State.DRAINING)
        elif self.state is State.LOADING:
            self._loading.cancel()
        if patience > 0:
            self._patience.deadline = min(self._patience.deadline, trio.current_time() + patience)
            for caller in () if self.successor else list(self.slots.waiting):
                caller.interrupt(Unavailable(f"model {self.name!r} is being unloaded; nothing was started"))
        else:
            self._patience.cancel()
        self.life.stop.set()

    def hand_over(self, successor: Worker, patience: float) -> None:
        """Stops in favour of another worker. Sessions that run or wait for a slot have `patience` seconds to end here. Calls
        that picked this worker, but have not asked for a slot yet, go to the successor."""
        self.successor, self.slots.successor = successor, successor.slots
        self.stop(patience)

    def retired(self) -> None:
        """Drops the model's `load` after the end, so that references to this worker do not keep the model alive."""
        self.spec = replace(self.spec, load=_never)

    # -- calls -------------------------------------------------------------------------------------------------------

    def check_ready(self, caller: Caller, *, room: bool = True) -> None:
        """Raises Unavailable unless the model can be called, and Overloaded if even the queue has no place for the caller.
        Call it before a body is received. With `room=False`, the queue is not checked: `Slots.take` does that later, if the
        form of the error depends on the body."""
        slots = self.slots
        if slots.open:
            if room and slots.free <= slots.brink:
                slots.check_room(caller)
        elif self.successor is not None:
            self.successor.check_ready(caller, room=room)
        else:
            self.life.check()

    async def call(self, session: Session[Any, Any], caller: Caller, wire: Family, read_prompt: Any = None) -> None:
        """Runs the model for one session, whose caller has a slot, until the model returns. If the model raises, this raises
        ModelFailed for its own ModelError, and ModelCrashed for any other error, which is logged under the caller's incident
        id."""
        if not self.slots.open:
            if self.successor is not None and caller not in self.slots.live:
                await self.successor.call(session, caller, wire, read_prompt)
                return
            self.slots.check_still_loaded()
        model = self._called
        assert model is not None
        text: Continuations | None = cast(TextChannel, session.channel).text if wire is _TEXT else None
        if self.spec.family is not wire:
            ended = partial(self._stopped, caller)
            model = convert(model, self.spec.family, wire, read_prompt=read_prompt, own_stops=self.own_stops, stopped=ended)
        try:
            if text is None:
                await model(session)
                return
            await text.around(model(session))
            if text.stopped:
                self._stopped(caller)
        except trio.Cancelled:
            raise
        except BaseException as e:  # sys.exit() too: a model's session is all that it can end
            if not (isinstance(e, BaseExceptionGroup) or is_failure(e)):
                raise
            raised = self._raised(e, session, caller, text)
            if is_failure(e):
                detached(e)  # from a thread of the model's code it is in a reference cycle, which would keep memory too
            if raised is None:
                return
            try:
                raise raised
            finally:
                del raised  # it refers to this frame, and the cycle would keep the exchange's memory

    def _stopped(self, caller: Caller, error: BaseException | None = None) -> None:
        """Notes that the gateway has stopped the model, because its text was complete. An error that the model raised since
        then is logged, and does not change the answer."""
        caller.stopped_by = "gateway"
        raised = error is not None and not failures.end_normally(list(leaves(error)))
        if raised and self.log_limits.allows("model raised while stopped", level=logging.WARNING):
            log.warning("model raised while stopped", extra={"model": self.name, "id": caller.id}, exc_info=error)
        if error is not None:
            detached(error)

    def _raised(
        self, e: BaseException, session: Session[Any, Any], caller: Caller, text: Continuations | None
    ) -> BaseException | None:
        """Returns the error of a call whose model has raised; None if the call ends as if the model had returned."""
        errors = list(leaves(e))
        if isinstance(e, BaseExceptionGroup) and not is_failure(e):
            return failures.because(self._only_cancelled(e, caller.id), None)
        if (ours := failures.of_the_gateway(errors)) is not None:
            return failures.because(ours, None)
        if text is not None and text.stopped:
            self._stopped(caller, e)
            return None
        if (said := failures.of_the_model(errors)) is not None:
            return failures.because(said, e)
        if failures.end_normally(errors, complete=session.channel.complete):
            return None
        caller.incident = self._failed(errors[0]).incident
        if self.log_limits.allows("model raised", level=logging.ERROR):
            log.error(
                "model raised",
                extra={"model": self.name, "id": caller.id, "incident": caller.incident},
                exc_info=errors[0] if len(errors) == 1 else e,
            )
        told = failures.crash(errors, caller.incident)
        self.explain(errors[0], caller.incident, caller.id, told.message)
        return failures.because(told, e)

    def _failed(self, error: BaseException) -> LastError:
        """Makes an incident id for an error of the model, and keeps both as the last error."""
        said = text_without_secrets(f"{type(error).__name__}: {error}")[:300]
        self.last_error = LastError(error=said, incident=uuid4().hex[:12], at=trio.current_time())
        return self.last_error

    def explain(self, error: BaseException, incident: str, stream: str = "", told: str = "") -> None:
        """Reports an error that the log explains under the id `incident`. `told` is the error that the client of that stream
        gets."""
        if self._explained is not None:
            spec = self.spec
            self._explained(
                Failure(incident=incident, error=error, model=self.name, version=spec.version, stream=stream, told=told)
            )

    async def run_author_code(self, call: Callable[[], T]) -> T:
        """Runs a function of the model's code that belongs to no session, in one of 8 threads for these: one that hangs
        delays only other functions of this kind. DeadlineExceeded if it takes longer than the model's `timeout`. If the
        exchange is cancelled, the function runs on without it."""
        seconds = self.spec.timeout or math.inf
        with trio.move_on_after(seconds) as scope:
            return await run_step(call, limiter=self._threads)
        assert scope.cancelled_caught
        raise DeadlineExceeded(f"the request took longer than {seconds:g} s to read (models.{self.name}.timeout)")

    def _only_cancelled(self, error: BaseExceptionGroup[Any], id: str = "") -> BaseException:
        cancelled, rest = failures.only_cancelled(error)
        if rest is not None:
            if self.log_limits.allows("model raised while cancelled", level=logging.WARNING):
                log.warning("model raised while cancelled", extra={"model": self.name, "id": id}, exc_info=rest)
            detached(rest)
        return cancelled


def _never() -> AbstractAsyncContextManager[Model]:
    raise RuntimeError("this model was unloaded")
