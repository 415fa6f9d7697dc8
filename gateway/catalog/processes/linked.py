"""A model in processes that several fronts share, as one of them has it: their parent keeps the processes, it has links."""

from __future__ import annotations

import logging
import math
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
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

_DIVIDED = ("capacity", "queue", "queue_bytes", "body_bytes")  # all fronts share these
_SEQUENCES = 100_000  # sequences of v2 whose instance a front remembers
# It is loaded again as soon as its parent has processes: that decides how often they start, and whether.
_RESTART = RestartPolicy(intensity=10**9, backoff=0.05, backoff_max=0.05, jitter=0.0)


@final
class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A process of a model that a front may have a link to."""

    id: int
    """Its number among all processes that the parent has ever started."""
    number: int
    """Which instance of its model it is."""
    pid: int
    patience: float | None = None
    """Seconds that its sessions have to end, where another has taken its place; None: it takes new ones."""


@final
class ModelNews(msgspec.Struct, frozen=True, array_like=True):
    """All that a front is to know of the processes of a model now."""

    name: str
    load: int
    """Which of all the loads: a reload makes a new one beside the old."""
    offers: list[Offer]
    failures: int
    """How often the model was lost altogether, or could not be loaded."""
    reason: str
    """Why, the last time."""
    over: bool
    """True once it is not loaded again."""
    given_up: list[int]
    """The numbers of instances that are not started again."""


class LinkOwner(Protocol):
    """The parent, which has the processes, as a front asks it."""

    def link(self, id: int, process: LinkedProcess) -> None:
        """Has it hand a link to that process. OSError."""

    def kill(self, id: int, why: str) -> None:
        """Asks it to end the process."""

    def let_go(self, id: int) -> None:
        """Tells it that there is no link to the process any more."""


@final
class SharedLoad:
    """One load of a model in shared processes, by its owner's word."""

    def __init__(self, plans: Sequence[ProcessPlan], owner: LinkOwner, news: ModelNews, front: int) -> None:
        """`plans` has that of each number. `front` is that of the front."""
        self.plans, self.news, self.front, self._owner = plans, news, front, owner
        self._processes: dict[int, LinkedProcess] = {}
        self._changed = trio.lowlevel.ParkingLot()
        self._failures = 0  # those that were told of

    def take(self, news: ModelNews) -> None:
        """Takes the owner's latest news."""
        self.news = news
        there = {offer.id for offer in news.offers}
        for id, process in self._processes.items():
            if id not in there:
                process.end(Exit())
        self._changed.unpark_all()

    async def offered(self) -> None:
        """Waits until a process takes sessions. GivenUpElsewhere where none will; InstanceEnded where the model could not
        be loaded, for each time once."""
        while not any(offer.patience is None for offer in self.news.offers):
            if self.news.over:
                raise GivenUpElsewhere(self.news.reason)
            if self.news.failures > self._failures:
                self._failures = self.news.failures
                raise _ended(self.news.reason)
            await self._changed.park()
        self._failures = self.news.failures

    async def changed(self) -> None:
        """Waits for the owner's next word."""
        await self._changed.park()

    def link(self, offer: Offer, bodies: Arena | None) -> tuple[LinkedProcess, Callable[[str], None]]:
        """A link to a process, and what asks the owner to end it for a reason. OSError."""
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
        """The link is over."""
        self._processes.pop(offer.id, None)
        self._owner.let_go(offer.id)


@final
class SharedModel:
    """A model in shared processes, and its latest load."""

    def __init__(
        self, name: str, fields: dict[str, Any], plans: Sequence[ProcessPlan], owner: LinkOwner, load: int, front: int
    ) -> None:
        """`fields` are what its code says of it, as `described_fields` has them. `front` is the number of the front."""
        self.name, self.plans, self._fields, self._owner, self._front = name, plans, fields, owner, front
        self.latest = SharedLoad(plans, owner, ModelNews(name, load, [], 0, "", False, []), front)
        self._loads = {load: self.latest}

    def take(self, news: ModelNews) -> None:
        """Takes the owner's news of one load. ValueError for an instance that the model does not have."""
        if any(not 0 <= offer.number < len(self.plans) for offer in news.offers):
            raise ValueError(f"model {self.name!r} has {len(self.plans)} instances")
        load = self._loads.get(news.load)
        if load is None:
            self.latest = load = self._loads[news.load] = SharedLoad(self.plans, self._owner, news, self._front)
        load.take(news)
        for number in [number for number, one in self._loads.items() if one is not self.latest and not one.news.offers]:
            del self._loads[number]

    def spec(self, fronts: int) -> ModelSpec:
        """The spec as its code says it, of which one of so many fronts is to serve its share."""
        return spec_of_fields(self.name, self._fields, _Share(self, fronts))


@final
class _Share(UnfinishedLoad):
    def __init__(self, model: SharedModel, fronts: int) -> None:
        self._model, self._fronts = model, fronts

    def complete(self, spec: ModelSpec) -> ModelSpec:
        """Divides the limits that all fronts share, and rounds them up. The owner of the processes has warmed them up, and
        decides how often they start."""
        batching = spec.batching
        if batching is not None:  # which counts the calls of one process
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
        """Waits until it has a link to a process."""
        await self._loaded.wait()

    async def follow(self) -> None:
        """Begins a link to each process that there is, and ends it where that takes no sessions any more."""
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
        """One link. Raises why it has ended where there is no other: that is the end of the model here, whose worker then
        waits for the next."""
        if offer not in self._shared.news.offers:  # it is gone already
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
        """The sessions and the memory that this gateway has in each. The owner tells the rest."""
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

    def _ready(self) -> list[Instance]:
        """Each front begins with another one: it does not know the sessions of the others."""
        return sorted([one for one in self._there.values() if one.ready], key=self._turn)

    def _turn(self, instance: Instance) -> int:
        return (instance.number - self._shared.front) % len(self._shared.plans)

    def _of_sequence(self, sequence: Any, request: InferRequest) -> Instance:
        """By the hash of its id, so that every front finds the same one. A sequence stays where it is when others are given
        up (rendezvous hashing)."""
        numbers = [plan.number for plan in self._shared.plans if plan.number not in self._shared.news.given_up]
        number = max(numbers, key=partial(_weight, sequence), default=0)
        known = self._sequences.pop(sequence, None)
        chosen = next((one for one in reversed(self._there.values()) if one.number == number and one.ready), None)
        if known is not None and known is not chosen and not request.parameters.get("sequence_start"):
            self._sequences[sequence] = known  # until it begins again
            raise lost_sequence(sequence)
        if chosen is None:
            raise self._none_ready()
        if not request.parameters.get("sequence_end"):
            self._sequences[sequence] = chosen
            if len(self._sequences) > _SEQUENCES:
                self._sequences.popitem(last=False)
        return chosen


def _ended(reason: str) -> InstanceEnded | RaisedThere:
    """Makes the error that the model's owner had, from its text."""
    kind, _, said = reason.partition(": ")
    if kind == RaisedThere.__name__:
        return RaisedThere(said)
    return InstanceEnded(said if kind == InstanceEnded.__name__ else reason)


def _weight(sequence: int | str, number: int) -> int:
    return zlib.crc32(f"{type(sequence).__name__} {sequence} {number}".encode())
