"""A frozen snapshot of the models in service, for embedders, with a number that grows with each change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

from gateway.workers.failures import LastError
from gateway.workers.states import State
from gateway.workers.stop_times import StopSummary
from gateway.workers.worker import Worker
from models.messages import Family


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStatus:
    """One process that a model runs in, at one moment."""

    number: int
    """The number of the instance, from 0; EVERYWIRE_INSTANCE has it in the process."""
    state: str
    """`loading`, `ready`, `restarting` while it waits for its next start, or `given-up` if it is not started again. A front
    that shares processes reports `linked`."""
    pid: int
    """The id of the process; 0 if there is none."""
    sessions: int
    """Open sessions."""
    restarts: int
    """Restarts since the model came into service."""
    device: str
    """The device of the process; empty if it was given none."""
    resident_bytes: int
    """Bytes of memory that the process has."""
    cpu_seconds: float
    """CPU time that the process has used."""
    shared_bodies_bytes: int
    """Bytes of shared memory for large tensors and parts that the gateway sends to it, in use or kept. Bodies that were
    received for any process of the model do not count."""
    shared_answers_bytes: int
    """Bytes of shared memory for large tensors and parts that it answers with, in use or kept."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One model at one moment."""

    name: str
    version: str
    state: State
    reason: str
    """The reason why the model is not ready, if something went wrong; otherwise empty."""
    crashes: int
    """Crashes within the period of the model's restart policy."""
    restarts: int
    """All restarts since the model came into service."""
    restart_at: float | None
    """The time at which it is loaded again, on Trio's clock, while it is RESTARTING; otherwise None."""
    capacity: int
    """The number of concurrent sessions."""
    slots_in_use: int
    """Slots that are taken, including those of stuck sessions."""
    queued: int
    """Exchanges that wait for a slot."""
    since: float | None
    """The time of the last change of state, on Trio's clock; None before the model runs."""
    last_error: LastError | None
    """The last failure that the log explains, of the model or one of its sessions. It stays after a recovery."""
    stuck: int
    """Sessions that do not come back."""
    stopping: StopSummary
    """The times that sessions took to stop after they were told to."""
    family: Family = Family.TEXT
    """The family of the model's messages."""
    instances: tuple[InstanceStatus, ...] = ()
    """The model's processes while it is loaded; empty if it runs in the gateway's own process."""

    @property
    def ready(self) -> bool:
        """True if the model accepts calls."""
        return self.state is State.READY


@final
class ModelsSnapshot(Mapping[str, ModelStatus]):
    """The models in service by name, at one moment. `revision` grows when a model changes its state, appears or disappears,
    but not when only `slots_in_use` or `queued` change."""

    __slots__ = ("_models", "revision")

    def __init__(self, workers: Mapping[str, Worker], revision: int) -> None:
        self._models = MappingProxyType({name: _status_of(worker) for name, worker in workers.items()})
        self.revision = revision

    def __getitem__(self, name: str) -> ModelStatus:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __repr__(self) -> str:
        return f"<ModelsSnapshot {self.revision}: {', '.join(f'{m.name} {m.state.value}' for m in self.values())}>"


def _status_of(worker: Worker) -> ModelStatus:
    return ModelStatus(
        name=worker.name,
        version=worker.spec.version,
        family=worker.spec.family,
        state=worker.state,
        reason=worker.reason,
        crashes=len(worker.crashes),
        restarts=max(worker.life.starts - 1, 0),
        restart_at=worker.life.restart_at,
        capacity=worker.spec.capacity,
        slots_in_use=worker.slots.in_use,
        queued=worker.slots.queued,
        since=worker.life.since,
        last_error=worker.last_error,
        stuck=worker.stuck.now,
        stopping=worker.stopping.summary,
        instances=tuple(getattr(worker.model, "__model_instances__", ())),
    )
