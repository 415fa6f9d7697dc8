"""Runs the workers of a gateway: starts them in order, stops them in reverse, and replaces them in a reload."""

from __future__ import annotations

import contextvars
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, final

import trio

from gateway.config.problem import ConfigError
from gateway.config.text import show
from gateway.errors import Conflict, NotFound, Unavailable
from gateway.workers.caller import Caller
from gateway.workers.failures import Failure
from gateway.workers.snapshot import ModelsSnapshot
from gateway.workers.states import State
from gateway.workers.worker import Worker
from models.spec import Check, ModelSpec

if TYPE_CHECKING:
    from gateway.workers.caller import CallSpans


log = logging.getLogger("gateway.worker")


@final
class Absent(NamedTuple):
    """A reason why a server is not ready."""

    name: str
    """The name of the model."""
    why: str
    """The reason why the model does not answer, for all clients of health checks; empty if it does answer."""
    error: str
    """The exception that the model's code raised, as text for operators; empty if there is none."""

    @property
    def public(self) -> str:
        """The reason without the text of an exception."""
        return f"model {self.name!r} {self.why}"

    @property
    def full(self) -> str:
        """The reason with the text of the exception."""
        return f"{self.public}: {self.error}" if self.error else self.public


@final
class Supervisor:
    """Runs a worker per model. A model that cannot load or keeps crashing is given up; the others are not affected.

    `workers` are the models in service, by name: those of `specs`, and those that `load` has added. A model of `load`
    appears when it is ready, and disappears when it is unloaded or given up. `served` are the same models by the names that
    they are served under besides their own. `configured` are `specs` by name, in service or not. ValueError if two of
    `specs` have one name; ConfigError if a served name of one is another's too.

    If a model's policy asks for it, `escalated` is called with the name and the reason when the model is given up. `chance`
    returns numbers from 0 to 1, for the jitter of restarts. `spans` makes the spans of calls; default None: there are none.
    `check` makes the function that checks the answers of a model's warm-up.
    """

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        *,
        escalated: Callable[[str, str], None] | None = None,
        chance: Callable[[], float] = random.random,
        spans: CallSpans | None = None,
        check: Callable[[ModelSpec], Check] | None = None,
    ) -> None:
        self.workers: dict[str, Worker] = {}
        self.served: dict[str, Worker] = {}
        self._escalated, self._chance, self._spans, self._check = escalated, chance, spans, check
        self.explained: list[Callable[[Failure], None]] = []
        """Functions that are called with every failure of a model that the log explains."""
        self.admit: Callable[[str], Awaitable[None]] | None = None
        """Awaited with the name of each model that is loaded and warm, before it takes calls."""
        self.noticed: list[Callable[[Worker], None]] = []
        """Functions that are called after every change of a worker's state, even if it is not in service."""
        self._revision = 0
        self._watchers = trio.lowlevel.ParkingLot()
        for spec in specs:
            if spec.name in self.workers:
                raise ValueError(f"two models are named {spec.name!r}: give one another name")
            if why := clash(spec, [worker.spec for worker in self.workers.values()]):
                raise ConfigError(why)
            self._take_in(self._worker(spec))
        self.configured = {name: worker.spec for name, worker in self.workers.items()}
        self._configured = list(self.workers.values())
        self._begun: list[Worker] = []
        self._added: list[Worker] = []
        self._nursery: trio.Nursery | None = None
        self.reloading: set[str] = set()
        """The names of models of which a new version is loading."""
        self.dismissed: set[str] = set()
        """Configured models that were unloaded on request: readiness does not wait for them."""
        self._unloadable: dict[str, str] = {}
        """The error of the last `load` of each configured model whose `load` failed."""
        self._replaced: dict[str, set[Worker]] = {}
        self._aside: set[trio.CancelScope] = set()
        self._stopping = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Runs until `stop` is called or it is cancelled. It has started when the first load of each model has ended."""
        async with trio.open_nursery() as nursery:
            self._nursery, self._context = nursery, contextvars.copy_context()
            try:
                for worker in self._configured:
                    nursery.start_soon(worker.run)
                    self._begun.append(worker)
                    await worker.first_load()
                task_status.started()
                await self._stopping.wait()
            finally:
                self._nursery = None

    async def stop(self) -> None:
        """Unloads every model and waits for each. Models in processes are unloaded concurrently; the others one by one, the
        last started first. Models that have not been started are not started any more."""
        self._stopping.set()
        workers = [*reversed([*self._configured, *self._added])]
        for worker in workers:
            if worker.in_processes:  # they do not depend on each other, and one that hangs must not delay the rest
                worker.stop()
        for worker in workers:
            worker.stop()
            if worker in self._begun or worker in self._added:
                await worker.stopped.wait()
        for scope in self._aside:
            scope.cancel()

    def _worker(self, spec: ModelSpec, *, lasting: bool = True) -> Worker:
        return Worker(
            spec,
            lasting=lasting,
            changed=self._changed,
            chance=self._chance,
            spans=self._spans,
            check=self._check,
            explained=self.explain,
            admit=self._admitted,
        )

    async def _admitted(self, name: str) -> None:
        if self.admit is not None:
            await self.admit(name)

    def explain(self, failure: Failure) -> None:
        """Passes a failure that the log explains to all of `explained`."""
        for told in self.explained:
            try:
                told(failure)
            except Exception:  # from the error's own code, such as a __str__: the client still gets its answer
                log.exception("an incident cannot be kept", extra={"incident": failure.incident})

    def _changed(self, worker: Worker | None = None) -> None:
        self._revision += 1
        self._watchers.unpark_all()
        if worker is not None:
            for noticed in self.noticed:
                noticed(worker)
        if worker is not None and worker.given_up and worker.spec.restart.escalate and self._escalated is not None:
            self._escalated(worker.name, worker.reason)

    # -- the models --------------------------------------------------------------------------------------------------

    @property
    def models(self) -> ModelsSnapshot:
        """A snapshot of the models in service."""
        return ModelsSnapshot(self.workers, self._revision)

    def versions(self, name: str) -> list[Worker]:
        """Returns the workers of a model: first the one in service, then those that are loading or have not ended yet."""
        serving = self.workers.get(name)
        others = [worker for worker in self._added if worker.name == name and not worker.stopped.is_set()]
        every = dict.fromkeys((*([] if serving is None else [serving]), *others, *self._replaced.get(name, ())))
        return list(every)

    async def models_after(self, revision: int) -> ModelsSnapshot:
        """Waits for a change after that revision, and returns the models in service. Always a checkpoint."""
        await trio.lowlevel.checkpoint()
        while self._revision <= revision:
            await self._watchers.park()
        return self.models

    @property
    def loading(self) -> list[str]:
        """The names of models in service whose state is LOADING."""
        return [w.name for w in self.workers.values() if w.state is State.LOADING]

    @property
    def unready(self) -> list[Absent]:
        """The models because of which this server is not ready: required models of `configured` that do not answer, except
        those in `dismissed`. If no model of the server answers, it is all of `configured`. Models of `load` are never a
        reason."""
        return self.unready_with(())

    def unready_with(self, opening: Collection[str]) -> list[Absent]:
        """Returns `unready` as it will be once the models `opening` answer."""
        absent = [self._absent(name) for name in self.configured if name not in opening]
        missed = [one for one in absent if one.why and self.configured[one.name].required and one.name not in self.dismissed]
        if not (missed or opening) and all(worker.life.absence for worker in self.workers.values()):
            missed = [one._replace(why=f"{one.why}, and no model is ready") for one in absent]
        return missed

    def _absent(self, name: str) -> Absent:
        worker = self.workers.get(name)
        if worker is not None:
            return Absent(name, worker.life.absence, worker.reason)
        if (error := self.unloadable(name)) is not None:
            return Absent(name, "could not be loaded", error)
        return Absent(name, "was unloaded" if name in self.dismissed else "is not in service", "")

    def unloadable(self, name: str) -> str | None:
        """Returns the error of the last `load` of a configured model; None if there was none, or the model is in service or
        in `dismissed`."""
        return None if name in self.workers or name in self.dismissed else self._unloadable.get(name)

    @property
    def waiting(self) -> set[Caller]:
        """Callers that wait for a slot, including those of replaced versions that still run."""
        replaced = (worker for workers in self._replaced.values() for worker in workers)
        return {caller for worker in (*self.workers.values(), *replaced) for caller in worker.slots.waiting}

    # -- at run time -------------------------------------------------------------------------------------------------

    def start_soon(self, task: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Runs a function that manages models of `load`, in a task of `run`. It is cancelled after `stop` has stopped all
        models. Unavailable before `run` and after `stop`."""
        self._start(self._beside, task, arguments)

    def _start(self, task: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        if self._nursery is None or self._stopping.is_set():
            raise Unavailable("the server loads no models now: it is starting or shutting down; try again")
        # in our context, because a model outlives the call that asked for its load
        self._context.run(self._nursery.start_soon, task, *arguments)

    async def _beside(self, task: Callable[..., Awaitable[None]], arguments: tuple[Any, ...]) -> None:
        with trio.CancelScope() as scope:
            self._aside.add(scope)
            try:
                await task(*arguments)
            finally:
                self._aside.remove(scope)

    async def load(self, spec: ModelSpec, *, lasting: bool = False) -> Worker:
        """Adds a model; returns when it is in service. If its `load()` raises, that error is raised here and nothing of the
        model is left. Conflict if one of its names is taken. If this is cancelled, the load is given up, and its clean-up
        is waited for. A model that crashes later is loaded again by its policy. If it is given up it disappears, or, if it
        is `lasting`, stays as FAILED, like those of `specs`."""
        alive = (worker.name for worker in (*self._begun, *self._added) if not worker.stopped.is_set())
        if spec.name in self.workers or spec.name in alive:
            raise Conflict(f"a model named {spec.name[:100]!r} is there already")
        self._check_names(spec)
        worker = self._worker(spec, lasting=False)
        try:
            await self._loaded(worker)
        except BaseException:
            if worker.reason and spec.name in self.configured:
                self._unloadable[spec.name] = worker.reason
            raise
        self._unloadable.pop(spec.name, None)
        worker.life.lasting = lasting
        self._take_in(worker)
        self._changed()
        return worker

    def _check_names(self, spec: ModelSpec) -> None:
        """Raises Conflict if another model has one of the model's names: one in service, being loaded or unloaded, or
        configured."""
        there = (*self.workers.values(), *(one for one in (*self._begun, *self._added) if not one.stopped.is_set()))
        if why := clash(spec, (*self.configured.values(), *(worker.spec for worker in there))):
            raise Conflict(why)

    def _take_in(self, worker: Worker) -> None:
        """Puts a model in service, in the place of its earlier version."""
        self._take_names(worker.name)
        self.workers[worker.name] = worker
        for name in worker.spec.served_names:
            if name != worker.name:
                self.served[name] = worker

    def _take_names(self, model: str) -> None:
        """Takes the served names of a model out of service."""
        if (worker := self.workers.get(model)) is not None:
            for name in worker.spec.served_names:
                self.served.pop(name, None)

    async def _loaded(self, worker: Worker) -> None:
        """Starts a new worker and waits for its first load. Raises the errors of `load`."""
        self._start(self._keep, worker)
        self._added.append(worker)
        try:
            await worker.first_load()
        except BaseException:
            worker.stop()
            with trio.CancelScope(shield=True):  # the worker bounds its own clean-up
                await worker.stopped.wait()
            raise
        if not worker.stopped.is_set():
            return
        failure, worker.failure = worker.failure, None
        try:
            raise failure or Unavailable("the server is shutting down; try another")
        finally:
            del failure

    async def _keep(self, worker: Worker) -> None:
        try:
            await worker.run()
        finally:
            self._added.remove(worker)
            self._leave_service(worker)

    def _leave_service(self, worker: Worker) -> None:
        if self.workers.get(worker.name) is worker:
            self._take_names(worker.name)
            del self.workers[worker.name]
            self._changed()

    def retire(self, worker: Worker, patience: float = 0.0) -> None:
        """Takes a model out of service at once, and begins to unload it and its replaced versions. `worker.stopped` is set
        when it is unloaded. Running sessions have `patience` seconds to end. Idempotent."""
        self._leave_service(worker)
        for one in (worker, *self._replaced.get(worker.name, ())):
            one.stop(patience)

    async def reload(self, spec: ModelSpec, patience: float) -> Worker:
        """Replaces the model of the same name that is in service; returns when the new version accepts calls.

        The new version is loaded and warmed up while the old one serves. Then it takes over at once: every call that does
        not have a slot of the old version, nor waits for one, goes to the new one. The others have `patience` seconds to
        end on the old one. If the new version cannot be loaded, its error is raised and the old one goes on. NotFound if
        there is no model to replace. Conflict while another reload runs, if another model has one of the new names, or if
        the old version was unloaded meanwhile. A caller that is cancelled before the switch gives the reload up.
        """
        name, old = spec.name, self.workers.get(spec.name)
        if old is None:
            raise NotFound(f"no model {name[:100]!r} is in service")
        if name in self.reloading:
            raise Conflict(f"model {name[:100]!r} is being reloaded")
        self._check_names(spec)
        self.reloading.add(name)
        worker = self._worker(spec, lasting=False)
        worker.replaces = True
        try:
            try:
                await self._loaded(worker)
            except BaseException:
                old.last_error = worker.last_error or old.last_error
                raise
            if self.workers.get(name) is not old:
                worker.stop()
                with trio.CancelScope(shield=True):  # the worker bounds its own clean-up
                    await worker.stopped.wait()
                raise Conflict(f"model {name[:100]!r} was unloaded while it was reloaded")
        finally:
            self.reloading.remove(name)
        self.start_soon(self._see_off, old)  # from here on nothing fails
        self._replaced.setdefault(name, set()).add(old)
        worker.life.lasting = old.life.lasting
        self._take_in(worker)
        if name in self.configured:
            self.configured[name] = spec
        old.hand_over(worker, patience)
        self._changed()
        return worker

    async def _see_off(self, worker: Worker) -> None:
        try:
            await worker.stopped.wait()
            await worker.slots.all_left()
            worker.retired()
        finally:
            self._replaced[worker.name].remove(worker)
            self._watchers.unpark_all()

    async def replaced_gone(self, name: str) -> None:
        """Waits until nothing is left of the versions of a model that `reload` has replaced."""
        while self._replaced.get(name):
            await self._watchers.park()

    @property
    def needs(self) -> dict[str, int]:
        """The bytes of memory that models declare, by name: all that are loaded, loading or being unloaded."""
        needs: dict[str, int] = {}
        for worker in (*self._configured, *self._added):
            if not worker.stopped.is_set():
                needs[worker.name] = needs.get(worker.name, 0) + worker.spec.memory
        return needs

    async def unload(self, name: str, patience: float = 0.0) -> None:
        """Unloads a model of `load` and waits for that. The unload continues if this is cancelled. NotFound if there is no
        such model."""
        worker = self.workers.get(name)
        if worker is None or worker not in self._added:
            raise NotFound(f"no model {name[:100]!r} was loaded")
        self.retire(worker, patience)
        await worker.stopped.wait()


def clash(spec: ModelSpec, others: Iterable[ModelSpec]) -> str:
    """Returns the reason why a model cannot be beside the others: one of its names is another model's too. Empty if there is
    none. Versions of the model itself, which have its own name, may be among the others."""
    served = {name for name in spec.served_names if name != spec.name}
    for other in others:
        if other.name == spec.name:
            continue
        if other.name in served:
            return f"model {show(spec.name)} has the served name {show(other.name)}, which is the name of another model"
        if not other.served_names:
            continue
        if spec.name in other.served_names:
            return f"model {show(other.name)} has the served name {show(spec.name)}, which is the name of another model"
        if both := served.intersection(other.served_names):
            return f"models {show(other.name)} and {show(spec.name)} both have the served name {show(min(both))}"
    return ""
