"""What an embedder sees of the models in service: a frozen snapshot, numbered by the changes there were."""

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
    """From 0, as EVERYWIRE_INSTANCE says in it."""
    state: str
    """`loading`, `ready`, or `restarting` while it waits for its next start; `given-up` where there is none."""
    pid: int
    """0 where it has no process."""
    sessions: int
    restarts: int
    """Since the model came into service."""
    device: str
    """Empty where none was given to it."""
    resident_bytes: int
    cpu_seconds: float
    shared_bodies_bytes: int
    """Memory where the gateway has put large tensors and parts for it, in use or warm, but bodies that were received for any
    process of the model."""
    shared_answers_bytes: int
    """The same of what it answers."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One model at one moment."""

    name: str
    version: str
    state: State
    reason: str
    """What went wrong last, where the model is not ready for it; empty otherwise."""
    crashes: int
    """Within the period of its restart policy."""
    restarts: int
    """All of them, since it came into service."""
    restart_at: float | None
    """When it is loaded again, on Trio's clock, while it is RESTARTING; None otherwise."""
    capacity: int
    slots_in_use: int
    queued: int
    """Exchanges that wait for a slot."""
    since: float | None
    """When it came into its state, on Trio's clock; None before it runs."""
    last_error: LastError | None
    """The last failure that the log explains, of the model or of a session of it; it stays when the model is well again."""
    stuck: int
    """Sessions that do not come back."""
    stopping: StopSummary
    """How long sessions that were told to stop took for it."""
    family: Family = Family.TEXT
    """Which messages it speaks."""
    instances: tuple[InstanceStatus, ...] = ()
    """The processes that it runs in, while it is loaded; none where it runs in the gateway's own."""

    @property
    def ready(self) -> bool:
        """Whether it can be called."""
        return self.state is State.READY


@final
class ModelsSnapshot(Mapping[str, ModelStatus]):
    """The models in service by their names, at one moment. `revision` grows with each change of a model's state, and when
    one comes or goes; what `slots_in_use` and `queued` say changes without it."""

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
