"""The processes of models that several fronts share: the parent starts and restarts them, and hands out links."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import trio
from prometheus_client.metrics_core import Metric

from gateway.catalog.factories import library_model, load_spec, served_spec
from gateway.catalog.process_model import Instances, described_fields, discard, process_spec, started_spec
from gateway.catalog.processes.linked import ModelNews, Offer
from gateway.catalog.warmup import answer_check
from gateway.config import Config, ModelConfig
from gateway.config.problem import ConfigError
from gateway.config.text import text_without_secrets
from gateway.errors import Conflict, GatewayError, LoadFailed, NotFound, Unavailable
from gateway.fronts.link import FrontLink
from gateway.fronts.messages import KillWanted, LetGo, SharedBegin
from gateway.instances.instance import Instance
from gateway.instances.links import hand_link
from gateway.instances.spawn import Process
from gateway.telemetry.metrics import metrics_of_instances
from gateway.workers.snapshot import ModelsSnapshot, ModelStatus
from gateway.workers.states import State
from gateway.workers.worker import Worker
from models.spec import ModelSpec

log = logging.getLogger("gateway.fronts")

_WHY = 300  # characters of a reason that a front sends
_OVER = frozenset((State.FAILED, State.ENDED))


def in_processes(config: Config) -> dict[str, ModelConfig]:
    """Returns the configured models that run in separate processes."""
    return {name: model for name, model in config.models.items() if model.process.wanted}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedSpec:
    """A model in processes, as its first process has described it."""

    spec: ModelSpec
    """The spec with what the configuration sets."""
    fields: dict[str, Any]
    """The fields of the spec that the code declares, for the fronts."""
    instances: int
    shared_memory: int


def owned_specs(config: Config) -> list[OwnedSpec]:
    """Describes all configured models that run in processes. Blocks; for callers without a loop. If it raises ConfigError,
    no process is left."""
    specs, patience = list[OwnedSpec](), config.repository.unload_timeout
    try:
        for name, model in in_processes(config).items():
            fields: dict[str, Any] = {}
            spec = load_spec(name, model, patience=patience, processes=partial(_shared_spec, fields))
            specs.append(_owned(spec, fields, model))
    except BaseException:
        for owned in specs:
            discard(owned.spec)
        raise
    return specs


def _shared_spec(fields: dict[str, Any], name: str, config: ModelConfig, patience: float) -> ModelSpec:
    own = process_spec(name, config, patience, shared=True)
    fields.update(described_fields(own))
    return own


def _owned(spec: ModelSpec, fields: dict[str, Any], model: ModelConfig) -> OwnedSpec:
    return OwnedSpec(spec=spec, fields=fields, instances=model.process.count, shared_memory=model.process.shared_memory)


async def _owned_soon(name: str, model: ModelConfig, patience: float) -> OwnedSpec:
    """Describes one model without blocking the loop."""
    own = await started_spec(name, model, patience, shared=True)
    try:
        return _owned(served_spec(name, model, own), described_fields(own), model)
    except BaseException:
        discard(own)
        raise


@final
class OwnedLoad:
    """One load of a model: its processes, which a worker keeps as in a single gateway. The parent never calls them."""

    def __init__(self, id: int, owned: OwnedSpec, changed: Callable[[OwnedLoad], None], *, lasting: bool = True) -> None:
        self.id, self.owned, self._changed = id, owned, changed
        spec = replace(owned.spec, batching=None)  # the fronts batch
        self.worker = Worker(spec, lasting=lasting, changed=self._noticed, check=answer_check)
        self._failures = 0

    @property
    def instances(self) -> Instances | None:
        """The processes while the model is loaded; otherwise None."""
        model = self.worker.model
        return model if isinstance(model, Instances) else None

    @property
    def there(self) -> list[Instance]:
        """The instances that take sessions, or did until they were replaced."""
        return self.instances.there if self.instances is not None else []

    @property
    def linked(self) -> bool:
        """True while a front has a link to one of the processes."""
        return any(instance.linked for instance in self.there)

    @property
    def status(self) -> ModelStatus:
        """The present status of the model, without the sessions of the fronts."""
        return ModelsSnapshot({self.worker.name: self.worker}, 0)[self.worker.name]

    def news(self, id_of: Callable[[Instance], int]) -> ModelNews:
        """Returns the present state for the fronts."""
        instances, worker = self.instances, self.worker
        offers = [
            Offer(id_of(one), one.number, one.process.pid, None if one.ready or instances is None else instances.patience)
            for one in self.there
        ]
        over = worker.state in _OVER
        given_up = sorted(instances.given_up) if instances is not None else []
        return ModelNews(worker.name, self.id, offers, self._failures, worker.reason, over, given_up)

    def _noticed(self, worker: Worker) -> None:
        if self.instances is not None:
            self.instances.changed = self._tell
        if worker.state in _OVER or worker.life.restart_at is not None:
            self._failures = worker.life.starts
        self._tell()

    def _tell(self) -> None:
        self._changed(self)


@final
class OwnedModels:
    """All loads of the models that fronts share. New fronts use the latest load of each model. An earlier load stays while a
    front uses it."""

    def __init__(self, specs: Iterable[OwnedSpec], links: Sequence[FrontLink]) -> None:
        """`links` is the parent's list of the present fronts; it changes."""
        self._links = links
        self._loads, self._ids = 0, 0
        self._numbered: dict[Instance, int] = {}
        self._earlier = list[OwnedLoad]()
        self._before: dict[str, OwnedLoad] = {}
        self._reloading = set[str]()
        self.latest = {owned.spec.name: self._new(owned) for owned in specs}
        """The latest load of each model, by name: new fronts use it."""
        self._nursery: trio.Nursery

    def _new(self, owned: OwnedSpec, *, lasting: bool = True) -> OwnedLoad:
        self._loads += 1
        return OwnedLoad(self._loads, owned, self._told, lasting=lasting)

    # -- start and end -----------------------------------------------------------------------------------------------

    def start(self, nursery: trio.Nursery) -> None:
        """Begins to load all models."""
        self._nursery = nursery
        for load in self.latest.values():
            nursery.start_soon(load.worker.run)

    async def stop(self) -> None:
        """Unloads all models. No front may use them any more."""
        loads = [*self.latest.values(), *self._earlier]
        for load in loads:
            load.worker.stop()
        for load in loads:
            await load.worker.stopped.wait()

    @property
    def all(self) -> list[OwnedLoad]:
        """The latest loads, and earlier ones that are still used."""
        return [*self.latest.values(), *self._earlier]

    def begins(self) -> list[SharedBegin]:
        """Describes the models for a front that starts."""
        return [
            SharedBegin(
                name,
                load.id,
                load.owned.fields,
                load.owned.instances,
                load.owned.shared_memory,
                load.owned.spec.input_formatter is not None,
                load.owned.spec.output_formatter is not None,
            )
            for name, load in self.latest.items()
        ]

    def welcome(self, link: FrontLink) -> None:
        """Registers a front that starts with the result of `begins`, and sends it the news of all models."""
        for load in self.latest.values():
            link.loads.add(load.id)
            link.tell_news(load.news(self._id_of))

    def _told(self, load: OwnedLoad) -> None:
        """Sends the news of a load to the fronts that use it."""
        news = load.news(self._id_of)
        for link in self._links:
            if load.id in link.loads:
                link.tell_news(news)
        there = {one for load in self.all for one in load.there}
        self._numbered = {one: id for one, id in self._numbered.items() if one in there}

    def _id_of(self, instance: Instance) -> int:
        if instance not in self._numbered:
            self._ids += 1
            self._numbered[instance] = self._ids
        return self._numbered[instance]

    # -- requests of fronts ------------------------------------------------------------------------------------------

    def _found(self, link: FrontLink, id: int) -> Instance | None:
        """Returns an instance that a front was told of; None if it is gone."""
        loads = [load for load in self.all if load.id in link.loads]
        return next((one for load in loads for one in load.there if self._numbered.get(one) == id), None)

    def link(self, link: FrontLink, id: int, descriptors: Sequence[int]) -> None:
        """Hands a front's link to a process, and closes the descriptors. If the process is gone, the front's end of the link
        ends."""
        instance = self._found(link, id)
        try:
            if instance is not None and isinstance(instance.process, Process) and instance.process.links is not None:
                hand_link(instance.process.links, descriptors)
                instance.linked.add(link.id)
        except OSError as e:
            log.warning("a front cannot be linked", extra={"front": link.number, "instance": id, "reason": str(e)})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def asked(self, link: FrontLink, message: KillWanted | LetGo) -> None:
        """Takes a front's request to kill a process, or its message that a link has ended. It is ignored if the process has
        ended."""
        instance = next((one for one, id in self._numbered.items() if id == message.id), None)
        if instance is not None and link.id in instance.linked:
            if isinstance(message, KillWanted):
                instance.kill(message.why[:_WHY])
            else:
                instance.unlinked(link.id)
                self.prune()

    def gone(self, link: FrontLink) -> None:
        """Removes a front that has ended, and all of its links."""
        link.loads.clear()
        for load in self.all:
            for instance in load.there:
                instance.unlinked(link.id)
        self.prune()

    def prune(self) -> None:
        """Unloads earlier loads that no front uses."""
        for load in list(self._earlier):
            if not load.linked and not any(load.id in link.loads for link in self._links):
                load.worker.stop()
                self._earlier.remove(load)

    # -- reload ------------------------------------------------------------------------------------------------------

    async def load_anew(self, name: str) -> OwnedLoad:
        """Loads a model again beside its old processes, and makes that the latest load. Returns the previous one. NotFound
        if the model does not run in processes; Conflict while it is being reloaded; LoadFailed if the new version cannot be
        loaded: then nothing has changed."""
        old = self.latest.get(name)
        if old is None:
            raise NotFound(f"no model {name[:100]!r} runs in processes")
        if name in self._reloading:
            raise Conflict(f"model {name[:100]!r} is being reloaded")
        self._reloading.add(name)
        new = self._new(old.owned, lasting=False)
        new.worker.replaces = True
        try:
            await self._loaded([new])
            if not new.worker.ready:
                said = new.worker.reason or "it was stopped"
                raise LoadFailed(f"the new version cannot be loaded, and the old one serves on: {said}")
            if self.latest.get(name) is not old:
                raise Conflict(f"model {name[:100]!r} was replaced while it was reloaded")
        except BaseException:
            new.worker.stop()
            raise
        finally:
            self._reloading.discard(name)
        new.worker.life.lasting = True
        self._earlier.append(old)
        self.latest[name] = new
        return old

    async def restart(self, name: str, number: int) -> None:
        """Replaces one process of a model. Raises the errors of `__model_restart__`; Unavailable if the model is not
        loaded."""
        instances = self.latest[name].instances
        if instances is None:
            raise Unavailable(f"model {name[:100]!r} is not loaded")
        await instances.__model_restart__(number)

    def switch(self, link: FrontLink, name: str) -> None:
        """Sends a front the news of the latest load of a model, which it uses from now on."""
        new = self.latest[name]
        link.loads.add(new.id)
        link.tell_news(new.news(self._id_of))

    def switched(self, link: FrontLink, old: OwnedLoad) -> None:
        """Notes that a front begins no more sessions in an earlier load."""
        link.loads.discard(old.id)
        self.prune()

    async def renew(self, config: Config) -> str:
        """Loads all models of a new configuration beside the old ones, for the fronts that start from now on. Returns an
        empty text, or the reason why it failed: then nothing has changed."""
        fresh: dict[str, OwnedLoad] = {}
        try:
            for name, model in in_processes(config).items():
                fresh[name] = self._new(await _owned_soon(name, library_model(model), config.repository.unload_timeout))
            await self._loaded(fresh.values())
            reasons = [
                f"model {name!r}: {load.worker.reason}"
                for name, load in fresh.items()
                if load.owned.spec.required and not load.worker.ready and not self._fails(name)
            ]
        except (ConfigError, GatewayError, OSError) as e:
            reasons = [text_without_secrets(str(e))]
        except BaseException:
            self._drop(fresh.values())
            raise
        if reasons:
            self._drop(fresh.values())
            return "; ".join(reasons)[:2000]
        self._before, self.latest = self.latest, fresh
        self._earlier += self._before.values()
        return ""

    def _fails(self, name: str) -> bool:
        return name in self.latest and not self.latest[name].worker.ready

    def take_back(self) -> None:
        """Undoes `renew` if no front uses its loads."""
        fresh = list(self.latest.values())
        if not any(load.id in link.loads for load in fresh for link in self._links):
            self.latest, self._before = self._before, {}
            self._earlier = [load for load in self._earlier if load not in self.latest.values()]
            self._drop(fresh)

    # -- metrics -----------------------------------------------------------------------------------------------------

    def metrics(self) -> Iterator[Metric]:
        """Returns the metrics of the latest processes, without those that the fronts count."""
        return metrics_of_instances({
            (name, str(one.number)): one for name, load in self.latest.items() for one in load.status.instances
        })  # fmt: skip

    async def _loaded(self, loads: Iterable[OwnedLoad]) -> None:
        loads = list(loads)
        for load in loads:
            self._nursery.start_soon(load.worker.run)
        for load in loads:
            await load.worker.first_load()

    def _drop(self, loads: Iterable[OwnedLoad]) -> None:
        for load in loads:
            discard(load.owned.spec)  # ends its process if it was never loaded
            load.worker.stop()
