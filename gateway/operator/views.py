"""What the operator plane tells of models and of live streams: the members of its JSON."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import trio
from msgspec import UNSET, UnsetType

from gateway.core.exchange import Exchange
from gateway.operator.operated import Operated
from gateway.telemetry.observer import peer_of
from gateway.workers.snapshot import InstanceStatus, ModelStatus
from gateway.workers.stop_times import StopSummary


class ErrorView(msgspec.Struct, kw_only=True, frozen=True):
    """The last failure of a model."""

    error: str
    incident: str
    ago: float


class ModelView(msgspec.Struct, kw_only=True, frozen=True):
    """One model. What there is only while it is in service is missing where it is not. Times are in seconds."""

    name: str
    version: str
    state: str
    """As `gateway.workers.worker.State` has it, and `unloading`; `unloaded` where it is not in service."""
    reason: str
    seconds: float | UnsetType = UNSET
    """In that state."""
    crashes: int | UnsetType = UNSET
    restarts: int | UnsetType = UNSET
    restart_in: float | UnsetType | None = UNSET
    capacity: int | UnsetType = UNSET
    slots_in_use: int | UnsetType = UNSET
    queued: int | UnsetType = UNSET
    stuck: int | UnsetType = UNSET
    last_error: ErrorView | UnsetType | None = UNSET
    stopping: StopSummary | UnsetType = UNSET
    instances: tuple[InstanceStatus, ...] | UnsetType = UNSET
    """Of a model that runs in processes."""


async def models_of(gateway: Operated) -> list[ModelView]:
    """Every model there is, by name: in service, configured, or a folder of the repository."""
    indexed = await gateway.control.index()
    return [
        view_of_model(gateway.models[entry.name])
        if entry.name in gateway.models
        else ModelView(name=entry.name, version=entry.version, state=_STATES[entry.standing.value], reason=entry.reason)
        for entry in indexed
    ]


_STATES = {"READY": "ready", "LOADING": "loading", "UNLOADING": "unloading", "UNAVAILABLE": "unloaded"}


def view_of_model(status: ModelStatus) -> ModelView:
    """One that is in service."""
    now, error = trio.current_time(), status.last_error
    return ModelView(
        name=status.name,
        version=status.version,
        state=status.state.value,
        reason=status.reason,
        seconds=0.0 if status.since is None else round(now - status.since, 3),
        crashes=status.crashes,
        restarts=status.restarts,
        restart_in=None if status.restart_at is None else round(max(status.restart_at - now, 0), 3),
        capacity=status.capacity,
        slots_in_use=status.slots_in_use,
        queued=status.queued,
        stuck=status.stuck,
        last_error=error and ErrorView(error=error.error, incident=error.incident, ago=round(now - error.at, 3)),
        stopping=status.stopping,
        instances=status.instances or UNSET,
    )


class StreamView(msgspec.Struct, kw_only=True, frozen=True):
    """One exchange: a request and its answer, live or just ended. Times are in seconds."""

    id: str
    wire: str
    dialect: str
    model: str
    method: str
    path: str
    peer: str
    age: float
    idle: float
    """Since bytes have moved, in either direction."""
    bytes_in: int
    bytes_out: int
    status: int
    """0 where no head has been sent."""
    waits_for: str | UnsetType = UNSET
    """While it is live: see `waits_for`."""
    ending: str | UnsetType = UNSET
    """Once it has ended."""
    incident: str | UnsetType = UNSET


def waits_for(exchange: Exchange, queued: Collection[object]) -> str:
    """`slot` where it is one of the queued; `input`, `room` or `end` where the client is to send, to read, or to take the
    last of its answer; else `model`, or `gateway` where no model is known yet."""
    if exchange in queued:
        return "slot"
    return exchange.waits_for or ("model" if exchange.model else "gateway")


def view_of_stream(exchange: Exchange, now: float, waiting: str | UnsetType = UNSET) -> StreamView:
    """`now` is of the exchange's clock; `waiting` is what it waits for where it is live."""
    ending = exchange.ending
    return StreamView(
        id=exchange.id,
        wire=exchange.wire.name,
        dialect=exchange.dialect,
        model=exchange.model[:200],
        method=exchange.request.method.decode("latin-1")[:20],
        path=exchange.path.decode("latin-1")[:200],
        peer=peer_of(exchange),
        age=round(now - exchange.started_at, 3),
        idle=round(now - max(exchange.arrived_at, exchange.outbound.sent_at), 3),
        bytes_in=exchange.bytes_in,
        bytes_out=exchange.outbound.bytes_out,
        status=exchange.outbound.status,
        waits_for=waiting,
        ending=ending.value if waiting is UNSET and ending is not None else UNSET,
        incident=exchange.incident or UNSET,
    )
