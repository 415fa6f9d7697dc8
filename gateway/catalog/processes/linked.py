"""A model in processes that several fronts share, seen from one front: it has links to the processes of the parent."""

from __future__ import annotations

import logging
import math
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, final

import msgspec
import trio

from gateway.catalog.process_model import spec_of_fields
from gateway.catalog.processes.calls import InstanceCalls, UnfinishedLoad, lost_sequence
from gateway.config.share import share_of
from gateway.instances.instance import Instance, InstanceEnded, RaisedThere
from gateway.instances.links import LinkedProcess
from gateway.instances.memory import Arena
from gateway.instances.pipe import give_back_idle
from gateway.instances.spawn import Exit, ProcessPlan
from gateway.workers.failures import GivenUpElsewhere
from gateway.workers.snapshot import InstanceStatus
from models.messages import InferRequest
from models.spec import Model, ModelSpec, RestartPolicy

log = logging.getLogger("gateway.worker")

_DIVIDED = ("capacity", "queue", "queue_bytes", "body_bytes")  # limits that all fronts share
_SEQUENCES = 100_000  # sequences of v2 whose instance a front remembers
# A front loads the model again as soon as the parent has processes: the parent applies the model's own restart policy.
_RESTART = RestartPolicy(intensity=10**9, backoff=0.05, backoff_max=0.05, jitter=0.0)


@final
class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A process of a model that a front may have a link to."""

    id: int
    """The number of the process among all that the parent has ever started."""
    number: int
    """The number of the instance in its model."""
    pid: int
    patience: float | None = None
    """Seconds that the sessions have to end if the process was replaced; default None: it takes new sessions."""


@final
class ModelNews(msgspec.Struct, frozen=True, array_like=True):
    """The present state of the processes of a model, as the parent sends it to the fronts."""

    name: str
    load: int
    """The number of the load: a reload begins a new one beside the old."""
    offers: list[Offer]
    """The processes that fronts may have links to."""
    failures: int
    """The number of times that the model was lost, with all its processes, or could not be loaded."""
    reason: str
    """The reason of the last failure."""
    over: bool
    """True once the parent does not load the model again."""
    given_up: list[int]
    """The numbers of instances that are not started again."""


class LinkOwner(Protocol):
    """A front's connection to the parent, which owns the processes."""

    def link(self, id: int, process: LinkedProcess) -> None:
        """Asks the parent to hand a link to that process. OSError if the link cannot be sent."""

    def kill(self, id: int, why: str) -> None:
        """Asks the parent to end the process."""

    def let_go(self, id: int) -> None:
        """Tells the parent that the link to the process has ended."""


@final
class SharedLoad:
    """One load of a model in shared processes, as the parent's news tells it."""

    def __init__(self, plans: Sequence[ProcessPlan], owner: LinkOwner, news: ModelNews, front: int) -> None:
        """`plans` has the plan of each instance. `front` is the number of this front."""
        self.plans, self.news, self.front, self._owner = plans, news, front, owner
        self._processes: dict[int, LinkedProcess] = {}
        self._changed = trio.lowlevel.ParkingLot()
        self._failures = 0  # failures that `offered` has raised, or that a process has followed

    def take(self, news: ModelNews) -> None:
        """Takes the owner's latest news."""
        self.news = news
        there = {offer.id for offer in news.offers}
        for id, process in self._processes.items():
            if id not in there:
                process.end(Exit())
        self._changed.unpark_all()

    async def offered(self) -> None:
        """Waits until a process takes sessions. GivenUpElsewhere if none ever will. If the model was lost or could not be
        loaded since the last call, the error of its owner."""
        while not any(offer.patience is None for offer in self.news.offers):
            if self.news.over:
                raise GivenUpElsewhere(self.news.reason)
            if self.news.failures > self._failures:
                self._failures = self.news.failures
                raise _ended(self.news.reason)
            await self._changed.park()
        self._failures = self.news.failures

    async def changed(self) -> None:
        """Waits for the owner's next news."""
        await self._changed.park()

    def link(self, offer: Offer, bodies: Arena | None) -> tuple[LinkedProcess, Callable[[str], None]]:
        """Makes a link to a process. Returns it, and a function that asks the owner to end the process for a reason. OSError
        if the link cannot be sent."""
        owner, id = self._owner, offer.id
        kill = partial(owner.kill, id)
        process = LinkedProcess(self.plans[offer.number], offer.pid, partial(kill, "a front cannot use it"), bodies=bodies)
        try:
            owner.link(id, process)
        except BaseException:
            process.close()
            raise
        self._processes[id] = process
        return process, kill

    def let_go(self, offer: Offer) -> None:
        """Forgets a link that has ended, and tells the owner."""
        self._processes.pop(offer.id, None)
        self._owner.let_go(offer.id)


@final
class SharedModel:
    """A model in shared processes, and its latest load."""

    def __init__(
        self, name: str, fields: dict[str, Any], plans: Sequence[ProcessPlan], owner: LinkOwner, load: int, front: int
    ) -> None:
        """`fields` is the result of `described_fields` for the model's code. `front` is the number of this front."""
        self.name, self.plans, self._fields, self._owner, self._front = name, plans, fields, owner, front
        self.latest = SharedLoad(plans, owner, ModelNews(name, load, [], 0, "", False, []), front)
        self._loads = {load: self.latest}

    def take(self, news: ModelNews) -> None:
        """Takes the owner's news of one load. ValueError if they name an instance that the model does not have."""
        if any(not 0 <= offer.number < len(self.plans) for offer in news.offers):
            raise ValueError(f"model {self.name!r} has {len(self.plans)} instances")
        load = self._loads.get(news.load)
        if load is None:
            self.latest = load = self._loads[news.load] = SharedLoad(self.plans, self._owner, news, self._front)
        load.take(news)
        for number in [number for number, one in self._loads.items() if one is not self.latest and not one.news.offers]:
            del self._loads[number]

    def spec(self, fronts: int) -> ModelSpec:
        """Returns the spec that the model's code declares, of which this front serves its share: one of `fronts`."""
        return spec_of_fields(self.name, self._fields, _Share(self, fronts))


@final
class _Share(UnfinishedLoad):
    def __init__(self, model: SharedModel, fronts: int) -> None:
        self._model, self._fronts = model, fronts

    def complete(self, spec: ModelSpec) -> ModelSpec:
        """Divides the limits that all fronts share, rounded up. Warm-up and restart policy are left to the owner of the
        processes."""
        batching = spec.batching
        if batching is not None:  # its `instances` are calls of one process
            instances = share_of(batching.instances * len(self._model.plans), self._fronts)
            batching = replace(batching, instances=instances)
        divided: dict[str, Any] = {name: share_of(getattr(spec, name), self._fronts) for name in _DIVIDED}
        spec = replace(spec, **divided, batching=batching, warmup=(), load_timeout=math.inf)
        restart = replace(_RESTART, escalate=spec.restart.escalate)
        return replace(spec, restart=restart, load=partial(_linking, self._model, spec))


@asynccontextmanager
async def _linking(model: SharedModel, spec: ModelSpec) -> AsyncIterator[Model]:
    load = model.latest
    await load.offered()
    size = load.plans[0].shared_memory
    bodies = Arena.create(size) if size else None
    try:
        async with trio.open_nursery() as nursery:
            instances = LinkedInstances(load, spec, bodies, nursery)
            nursery.start_soon(instances.follow)
            if bodies is not None:
                nursery.start_soon(give_back_idle, bodies)
            await instances.loaded()
            yield instances
            nursery.cancel_scope.cancel()
    finally:
        if bodies is not None:
            bodies.close()


@final
class LinkedInstances(InstanceCalls):
    """The processes of one model that this gateway has links to, called as one."""

    def __init__(self, load: SharedLoad, spec: ModelSpec, bodies: Arena | None, nursery: trio.Nursery) -> None:
        super().__init__(spec, bodies)
        self._shared, self._nursery = load, nursery
        self._there: dict[int, Instance] = {}
        self._begun = set[int]()
        self._loaded = trio.Event()
        self._sequences: OrderedDict[int | str, Instance] = OrderedDict()

    async def loaded(self) -> None:
        """Waits until the model has a link to a process."""
        await self._loaded.wait()

    async def follow(self) -> None:
        """Begins a link to each offered process, and ends it when the process takes no more sessions."""
        while True:
            offers = self._shared.news.offers
            self._begun &= {offer.id for offer in offers}
            for offer in offers:
                if offer.patience is None and offer.id not in self._begun:
                    self._begun.add(offer.id)
                    self._nursery.start_soon(self._live, offer)
                elif offer.patience is not None and (there := self._there.get(offer.id)) is not None:
                    assert isinstance(there.process, LinkedProcess)
                    there.part(offer.patience, there.process.hang_up)
            await self._shared.changed()

    async def _live(self, offer: Offer) -> None:
        """Runs one link. If it ends and there is no other, it raises the reason. That ends the model in this front, whose
        worker then waits for the next process."""
        if offer not in self._shared.news.offers:  # the process is gone already
            return
        process, kill = self._shared.link(offer, self._bodies)
        instance = self._there[offer.id] = Instance(process, self._load, hang_timeout=0.0, ask_to_kill=kill)
        reason = ""
        try:
            await instance.run([], partial(self._link_ready, instance), lambda: None)
        except (InstanceEnded, RaisedThere, MemoryError) as e:
            reason = str(e)
        finally:
            del self._there[offer.id]
            self._shared.let_go(offer)
        if not self._there:
            raise _ended(self._shared.news.reason or reason)

    def _link_ready(self, instance: Instance) -> None:
        if self._hear(instance):
            instance.ready = True
            self._loaded.set()

    @property
    def __model_instances__(self) -> Iterator[InstanceStatus]:
        """Yields the sessions and the memory that this front has in each process. The parent reports the rest."""
        for instance in self._there.values():
            memory = instance.process.memory
            yield InstanceStatus(
                number=instance.number,
                state="linked",
                pid=instance.process.pid,
                sessions=instance.sessions,
                restarts=0,
                device="",
                resident_bytes=0,
                cpu_seconds=0.0,
                shared_bodies_bytes=memory.arena.used_bytes if memory is not None else 0,
                shared_answers_bytes=memory.window.used_bytes if memory is not None else 0,
            )

    # -- sessions ----------------------------------------------------------------------------------------------------

    def _instances(self) -> Iterable[Instance]:
        return self._there.values()

    def _ready(self) -> list[Instance]:
        """Returns the ready instances. Each front begins with a different one, since it does not know the sessions of the
        other fronts."""
        return sorted([one for one in self._there.values() if one.ready], key=self._turn)

    def _turn(self, instance: Instance) -> int:
        return (instance.number - self._shared.front) % len(self._shared.plans)

    def _of_sequence(self, sequence: Any, request: InferRequest) -> Instance:
        """Returns the instance of a sequence by the hash of its id, so that every front finds the same one. The sequence
        stays there when other instances are given up (rendezvous hashing)."""
        numbers = [plan.number for plan in self._shared.plans if plan.number not in self._shared.news.given_up]
        number = max(numbers, key=partial(_weight, sequence), default=0)
        known = self._sequences.pop(sequence, None)
        chosen = next((one for one in reversed(self._there.values()) if one.number == number and one.ready), None)
        if known is not None and known is not chosen and not request.parameters.get("sequence_start"):
            self._sequences[sequence] = known  # kept, so that every request fails until the sequence begins again
            raise lost_sequence(sequence)
        if chosen is None:
            raise self._none_ready()
        if not request.parameters.get("sequence_end"):
            self._sequences[sequence] = chosen
            if len(self._sequences) > _SEQUENCES:
                self._sequences.popitem(last=False)
        return chosen


def _ended(reason: str) -> InstanceEnded | RaisedThere:
    """Makes the error that the model's owner had from its text."""
    kind, _, said = reason.partition(": ")
    if kind == RaisedThere.__name__:
        return RaisedThere(said)
    return InstanceEnded(said if kind == InstanceEnded.__name__ else reason)


def _weight(sequence: int | str, number: int) -> int:
    return zlib.crc32(f"{type(sequence).__name__} {sequence} {number}".encode())
