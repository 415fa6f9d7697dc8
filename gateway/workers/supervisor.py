"""The workers of a gateway: started in order, stopped in reverse, replaced by a reload; each fails alone."""

from __future__ import annotations

import contextvars
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, final

import trio

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
    """The model."""
    why: str
    """The reason why it does not answer, in words for anybody who may ask for health."""
    error: str
    """The exception that the model's own code raised, as text for operators; empty where there is none."""

    @property
    def public(self) -> str:
        """The reason, without the text of an exception."""
        return f"model {self.name!r} {self.why}"

    @property
    def full(self) -> str:
        """The reason, with it."""
        return f"{self.public}: {self.error}" if self.error else self.public


@final
class Supervisor:
    """Runs a worker per model. One that cannot load or keeps crashing is given up; the others never notice.

    `workers` are the models in service, by name: those of `specs`, and those that `load` has added. A model of `load` is
    there only while it is loaded: it appears when it is ready, and goes when it is unloaded or given up. `configured` are
    `specs` by name, whether they are in service or not.

    `escalated` is called when a model is given up whose policy says so, with its name and the reason. `chance` gives
    numbers from 0 to 1, for the jitter of restarts. `spans` makes those of calls, where there are some. `check` makes what
    looks at the answers of a model's warm-up.
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
        self._escalated, self._chance, self._spans, self._check = escalated, chance, spans, check
        self.explained: list[Callable[[Failure], None]] = []
        """Each is called with every failure of a model that the log explains."""
        self.noticed: list[Callable[[Worker], None]] = []
        """Each is called after every change of a worker's state, of those too that are not in service yet or any more."""
        self._revision = 0
        self._watchers = trio.lowlevel.ParkingLot()
        for spec in specs:
            if spec.name in self.workers:
                raise ValueError(f"two models are named {spec.name!r}: give one another name")
            self.workers[spec.name] = self._worker(spec)
        self.configured = {name: worker.spec for name, worker in self.workers.items()}
        self._configured = list(self.workers.values())
        self._begun: list[Worker] = []
        self._added: list[Worker] = []
        self._nursery: trio.Nursery | None = None
        self.reloading: set[str] = set()
        """The names of models of which another version is on its way."""
        self.dismissed: set[str] = set()
        """Models of `configured` that are not in service because somebody has asked for that: readiness does not wait for
        them."""
        self._unloadable: dict[str, str] = {}
        """Why those of `configured` are not in service whose last `load` has failed."""
        self._replaced: dict[str, set[Worker]] = {}
        self._aside: set[trio.CancelScope] = set()
        self._stopping = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Runs until `stop` or cancelled. Started when the first load of each model is decided."""
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
        """Unloads every model and waits for each: those in processes at once, side by side, the others one by one, the last
        started first. Those that wait to be started never are."""
        self._stopping.set()
        workers = [*reversed([*self._configured, *self._added])]
        for worker in workers:
            if worker.in_processes:  # none of them needs another, and one that hangs takes its seconds
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
        )

    def explain(self, failure: Failure) -> None:
        """The log explains a failure."""
        for told in self.explained:
            try:
                told(failure)
            except Exception:  # the error's own code, which may be anything: its client hears of it all the same
                log.exception("an incident cannot be kept", extra={"incident": failure.incident})

    def _changed(self, worker: Worker | None = None) -> None:
        self._revision += 1
        self._watchers.unpark_all()
        if worker is not None:
            for noticed in self.noticed:
                noticed(worker)
        if worker is not None and worker.given_up and worker.spec.restart.escalate and self._escalated is not None:
            self._escalated(worker.name, worker.reason)

    # -- what is there -----------------------------------------------------------------------------------------------

    @property
    def models(self) -> ModelsSnapshot:
        """The models in service, now."""
        return ModelsSnapshot(self.workers, self._revision)

    def versions(self, name: str) -> list[Worker]:
        """The model of that name in service, then what else of it is loading, or has not ended yet."""
        serving = self.workers.get(name)
        others = [worker for worker in self._added if worker.name == name and not worker.stopped.is_set()]
        every = dict.fromkeys((*([] if serving is None else [serving]), *others, *self._replaced.get(name, ())))
        return list(every)

    async def models_after(self, revision: int) -> ModelsSnapshot:
        """The models in service, as soon as there was a change after that revision. A checkpoint always."""
        await trio.lowlevel.checkpoint()
        while self._revision <= revision:
            await self._watchers.park()
        return self.models

    @property
    def loading(self) -> list[str]:
        """Models whose first load is not decided yet."""
        return [w.name for w in self.workers.values() if w.state is State.LOADING]

    @property
    def unready(self) -> list[Absent]:
        """The models for which no load balancer should choose this server: those of `configured` that are required and do
        not answer, but for the `dismissed`; all of `configured` where no model of the server answers. Models of `load` are
        never a reason."""
        absent = [self._absent(name) for name in self.configured]
        missed = [one for one in absent if one.why and self.configured[one.name].required and one.name not in self.dismissed]
        if not missed and all(worker.life.absence for worker in self.workers.values()):
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
        """The failure of the last `load` of a model of `configured`; None where it has not, or the model is in service
        or `dismissed`."""
        return None if name in self.workers or name in self.dismissed else self._unloadable.get(name)

    @property
    def waiting(self) -> set[Caller]:
        """Callers that wait for a slot, of versions too that have been replaced and are not gone yet."""
        replaced = (worker for workers in self._replaced.values() for worker in workers)
        return {caller for worker in (*self.workers.values(), *replaced) for caller in worker.slots.waiting}

    # -- at run time -------------------------------------------------------------------------------------------------

    def start_soon(self, task: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        """Runs what manages models of `load`, in a task of `run`'s; it is cancelled when `stop` has stopped them all.
        Unavailable where nothing runs."""
        self._start(self._beside, task, arguments)

    def _start(self, task: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        if self._nursery is None or self._stopping.is_set():
            raise Unavailable("the server loads no models now: it is starting or shutting down; try again")
        # in our context: a model outlives the call that had it loaded
        self._context.run(self._nursery.start_soon, task, *arguments)

    async def _beside(self, task: Callable[..., Awaitable[None]], arguments: tuple[Any, ...]) -> None:
        with trio.CancelScope() as scope:
            self._aside.add(scope)
            try:
                await task(*arguments)
            finally:
                self._aside.remove(scope)

    async def load(self, spec: ModelSpec, *, lasting: bool = False) -> Worker:
        """Adds a model, and returns when it is in service. What its `load()` raised comes out, and then there is nothing
        left of it; Conflict where the name is taken. When cancelled the load is given up, and its clean-up waited for.
        A model that crashes later is loaded again by its policy; one that is given up is gone, or, where it is to be
        `lasting`, stays as FAILED, as those of `specs` do."""
        alive = (worker.name for worker in (*self._begun, *self._added) if not worker.stopped.is_set())
        if spec.name in self.workers or spec.name in alive:
            raise Conflict(f"a model named {spec.name[:100]!r} is there already")
        worker = self._worker(spec, lasting=False)
        try:
            await self._loaded(worker)
        except BaseException:
            if worker.reason and spec.name in self.configured:
                self._unloadable[spec.name] = worker.reason
            raise
        self._unloadable.pop(spec.name, None)
        worker.life.lasting = lasting
        self.workers[spec.name] = worker
        self._changed()
        return worker

    async def _loaded(self, worker: Worker) -> None:
        """Has a new worker load its model; the errors of `load`."""
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
            del self.workers[worker.name]
            self._changed()

    def retire(self, worker: Worker, patience: float = 0.0) -> None:
        """Takes a model out of service at once, and begins to unload it, with what is left of versions before it:
        `worker.stopped` says when it is. Sessions that run have `patience` seconds to end. Idempotent."""
        self._leave_service(worker)
        for one in (worker, *self._replaced.get(worker.name, ())):
            one.stop(patience)

    async def reload(self, spec: ModelSpec, patience: float) -> Worker:
        """Puts a model in the place of the one of its name that is in service, and returns when it answers.

        It is loaded and warmed up while the old one serves; then all calls that have no slot yet are the new one's, at
        once. Sessions of the old one, and those that wait for a slot of it, have `patience` seconds to end there. What the
        new one's load raised comes out, and the old one serves on. NotFound where there is none to replace, Conflict while
        another is on its way or where the old one went meanwhile. A caller who is cancelled before the switch has given it
        up.
        """
        name, old = spec.name, self.workers.get(spec.name)
        if old is None:
            raise NotFound(f"no model {name[:100]!r} is in service")
        if name in self.reloading:
            raise Conflict(f"model {name[:100]!r} is being reloaded")
        self.reloading.add(name)
        worker = self._worker(spec, lasting=False)
        worker.replaces = True
        try:
            try:
                await self._loaded(worker)
            except BaseException:
                old.last_error = worker.last_error or old.last_error  # the log explains it
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
        self.workers[name] = worker
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
        """Returns when nothing is left of those that `reload` has put another in the place of."""
        while self._replaced.get(name):
            await self._watchers.park()

    @property
    def needs(self) -> dict[str, int]:
        """What the models that are loaded, or on their way in or out, declare to need: bytes by their names."""
        needs: dict[str, int] = {}
        for worker in (*self._configured, *self._added):
            if not worker.stopped.is_set():
                needs[worker.name] = needs.get(worker.name, 0) + worker.spec.memory
        return needs

    async def unload(self, name: str, patience: float = 0.0) -> None:
        """Unloads a model of `load`. Cancelled, it goes on without us. NotFound where there is none."""
        worker = self.workers.get(name)
        if worker is None or worker not in self._added:
            raise NotFound(f"no model {name[:100]!r} was loaded")
        self.retire(worker, patience)
        await worker.stopped.wait()
