"""One model in service: loaded, supervised, and called by exchanges within its capacity."""

from __future__ import annotations

import enum
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, final
from uuid import uuid4

import trio

from gateway.errors import GatewayError, ModelCrashed, ModelFailed, NotFound, Overloaded, Unavailable, WorkerLost
from gateway.exchange import Exchange
from gateway.workers.policy import decide
from models.blocking import reset_step_holder, set_step_holder
from models.convert import convert
from models.errors import ModelError
from models.messages import Family
from models.session import Session
from models.spec import Model, ModelSpec

log = logging.getLogger("gateway.worker")

_SHUTDOWN_SECONDS = 5.0


class State(enum.Enum):
    """Where a worker is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@final
class Slot:
    """One place in a worker's capacity. It is free when the session and every blocking step of it are over."""

    __slots__ = ("_holds", "_worker")

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._holds = 1

    def hold(self) -> None:
        self._holds += 1

    def release(self) -> None:
        self._holds -= 1
        if self._holds == 0:
            self._worker.slots.release()


@final
class Worker:
    """Keeps one model loaded and lets exchanges call it.

    Sessions run in their exchange's task. An exception out of a session is that session's; one out of `load()`'s
    context is the worker's: its live sessions get their one ending and the model is loaded again after the policy's
    wait, or given up.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.state = State.LOADING
        self.reason = ""
        self.crashes: list[float] = []
        self.slots = trio.Semaphore(spec.capacity, max_value=spec.capacity)
        self.live: set[Exchange] = set()
        self._model: Model | None = None
        self._stop = trio.Event()
        self._settled = trio.Event()
        self.stopped = trio.Event()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    @property
    def slots_in_use(self) -> int:
        return self.spec.capacity - self.slots.value

    # -- supervised life ---------------------------------------------------------------------------------------------

    async def first_load(self) -> None:
        """Waits until the first attempt to load has succeeded or failed."""
        await self._settled.wait()

    async def run(self) -> None:
        """Loads the model and keeps it loaded until `stop`. Raises nothing: a model that cannot be kept up is FAILED."""
        try:
            while not self._stop.is_set():
                crash = await self._one_life()
                if crash is None:
                    break
                now = trio.current_time()
                self.crashes = [*self.crashes[-99:], now]
                self.reason = f"{type(crash).__name__}: {crash}"[:300]
                self._lose_sessions()
                wait = decide(self.spec.restart, self.crashes, now)
                log.error(
                    "model crashed" if wait is not None else "model given up",
                    extra={"model": self.name, "reason": self.reason, "restart_in": wait},
                    exc_info=crash,
                )
                self.state = State.FAILED if wait is None else State.RESTARTING
                self._settled.set()
                with trio.move_on_after(float("inf") if wait is None else wait):
                    await self._stop.wait()
        finally:
            self._model = None
            self.state = State.STOPPED
            self._settled.set()
            self._lose_sessions()
            self.stopped.set()

    async def _one_life(self) -> Exception | None:
        """One load and its life; the exception that ended it, None when it was asked to stop."""
        self.state = State.LOADING
        began = trio.current_time()
        try:
            with trio.CancelScope(deadline=began + self.spec.load_timeout) as scope:
                async with self.spec.load() as model:
                    scope.deadline = float("inf")
                    self._model = model
                    self.state, self.reason = State.READY, ""
                    log.info("model ready", extra={"model": self.name, "seconds": round(trio.current_time() - began, 3)})
                    self._settled.set()
                    try:
                        await self._stop.wait()
                    finally:
                        # a crash in the background cancels us here: sessions learn of it before the clean-up runs
                        self._model = None
                        if not self._stop.is_set():
                            self.state = State.RESTARTING
                            self._lose_sessions()
                        else:
                            scope.deadline = trio.current_time() + _SHUTDOWN_SECONDS
        except Exception as e:
            return _one_of(e)
        if not scope.cancelled_caught:
            return None
        if self._stop.is_set():
            log.warning("model did not unload in time", extra={"model": self.name, "seconds": _SHUTDOWN_SECONDS})
            return None
        return TimeoutError(f"loading took longer than {self.spec.load_timeout:g} s (models.{self.name}.load_timeout)")

    def _lose_sessions(self) -> None:
        for exchange in list(self.live):
            exchange.interrupt(WorkerLost(f"the worker of model {self.name!r} ended; try again"))

    def stop(self) -> None:
        """Unloads the model; sessions that are still live get their ending."""
        if self.state is State.READY:
            self.state = State.DRAINING
        self._lose_sessions()
        self._stop.set()

    # -- calls -------------------------------------------------------------------------------------------------------

    def check_ready(self) -> None:
        """Raises Unavailable unless the model can be called now."""
        match self.state:
            case State.READY:
                return
            case State.STOPPED:
                raise NotFound(f"model {self.name!r} is not loaded")
            case State.FAILED:
                raise Unavailable(f"model {self.name!r} is unavailable: it crashed too often; the log says why")
            case _:
                raise Unavailable(f"model {self.name!r} is {self.state.value}; try again")

    @asynccontextmanager
    async def slot(self, exchange: Exchange) -> AsyncIterator[None]:
        """A place in the capacity, waited for in order; Overloaded at once when the queue is full."""
        self.check_ready()
        try:
            self.slots.acquire_nowait()
        except trio.WouldBlock:
            waiting = self.slots.statistics().tasks_waiting
            if waiting >= self.spec.queue:
                raise Overloaded(
                    f"model {self.name!r} is busy: {self.spec.capacity} sessions run and {waiting} wait "
                    f"(models.{self.name}.capacity, models.{self.name}.queue); try again later"
                ) from None
            await self.slots.acquire()
        slot = Slot(self)
        holder = set_step_holder(slot)
        self.live.add(exchange)
        try:
            self.check_ready()
            if self.spec.timeout:
                exchange.work.deadline = trio.current_time() + self.spec.timeout
            yield
        finally:
            self.live.discard(exchange)
            reset_step_holder(holder)
            slot.release()

    async def call(self, session: Session[Any, Any], exchange: Exchange, wire: Family, read_prompt: Any = None) -> None:
        """Runs the model for one session, inside `slot`. Returns when the model has; what it raised comes out as ModelFailed
        (its own ModelError) or ModelCrashed (anything else, logged under the exchange's incident id)."""
        model = self._model
        if model is None:
            self.check_ready()
            raise Unavailable(f"model {self.name!r} is restarting; try again")
        if self.spec.family is not wire:
            model = convert(model, self.spec.family, wire, read_prompt=read_prompt)
        try:
            await model(session)
        except Exception as e:
            error = _one_of(e)
            if isinstance(error, GatewayError):
                raise error from None
            if isinstance(error, ModelError):
                raise ModelFailed(error.message, code=error.code, status=error.status) from e
            if isinstance(error, trio.EndOfChannel):
                return  # it read on past the end of input: that is how many loops end
            if isinstance(error, trio.ClosedResourceError) and exchange_closed(session):
                return  # it sent on after its answer was complete; the answer stands
            exchange.incident = uuid4().hex[:12]
            log.error(
                "model raised",
                extra={"model": self.name, "id": exchange.id, "incident": exchange.incident},
                exc_info=error,
            )
            raise ModelCrashed(f"the model failed; incident {exchange.incident} in the server's log") from e


def exchange_closed(session: Session[Any, Any]) -> bool:
    """Whether the answer of this session was already complete."""
    return bool(getattr(session.channel, "complete", False))


def _one_of(error: Exception) -> Exception:
    """The exception that a group of one stands for: nurseries wrap what their tasks raise."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, ExceptionGroup):
        told = error.subgroup(ModelError)
        if told is not None:
            return _one_of(told) if len(told.exceptions) == 1 else _first(told)
    return error


def _first(group: BaseExceptionGroup[Any]) -> Exception:
    error: Any = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
