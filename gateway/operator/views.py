"""Models, incidents and live streams as the operator plane shows them: the members of its JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Protocol

import msgspec
import trio
from msgspec import UNSET, UnsetType

from gateway.addresses import split_port
from gateway.core.exchange import Exchange
from gateway.core.waits import ROOM
from gateway.operator.operated import Operated
from gateway.operator.state_changes import ChangeView
from gateway.telemetry.account import PARTS, account_of, account_so_far
from gateway.telemetry.incidents import IncidentGroup
from gateway.telemetry.observer import peer_of
from gateway.workers.snapshot import InstanceStatus, ModelStatus
from gateway.workers.stop_times import StopSummary
from protocols.request_ids import client_request_id


class ErrorView(msgspec.Struct, kw_only=True, frozen=True):
    """The last failure of a model."""

    error: str
    incident: str
    ago: float


class ModelView(msgspec.Struct, kw_only=True, frozen=True):
    """One model. Members that describe a service are left out of a model that has none. Times are in seconds."""

    name: str
    version: str
    state: str
    """One of `gateway.workers.worker.State`, or `unloading`, or `unloaded` if it is not in service."""
    reason: str
    family: str | UnsetType = UNSET
    """The kind of its messages: text, tensor or parts."""
    seconds: float | UnsetType = UNSET
    """Seconds in that state."""
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
    """The processes of a model that runs in some."""
    slots_blocked: int | UnsetType = UNSET
    """Slots in use whose clients do not read."""
    versions: list[VersionView] | UnsetType = UNSET
    """The version in service first, then older ones until their sessions are over."""
    batches: dict[str, int] | UnsetType = UNSET
    """The number of calls by batch size; only if one model is asked for."""
    history: list[ChangeView] | UnsetType = UNSET
    """The last changes of its state, the oldest first; only if one model is asked for."""
    code: str | UnsetType = UNSET
    """A remark if it was loaded again by code that was not read anew; only in the answer to a reload."""


class VersionView(msgspec.Struct, kw_only=True, frozen=True):
    """One version of a model."""

    version: str
    state: str
    sessions: int


class IncidentView(msgspec.Struct, kw_only=True, frozen=True):
    """Failures of one type, raised at one place, in one model. Times are seconds since 1970."""

    id: str
    """The number of the first one."""
    type: str
    place: str
    """The place of the raise, such as `app.py:12 in generate`."""
    model: str
    version: str
    error: str
    """The type and the text of the last one."""
    count: int
    first: float
    last: float
    stream: str
    """The id of the last one's stream; empty where it was in none."""
    told: str
    """The words that the client of that stream was told."""
    numbers: list[str]
    """The incidents that clients were told and the log has, the last ones."""
    traceback: str | UnsetType = UNSET
    """The traceback of the first one; only if one group is asked for. Empty with operator.tracebacks = false."""


def view_of_incident(group: IncidentGroup, *, whole: bool = False) -> IncidentView:
    """With its traceback, or without."""
    names = [name for name in IncidentView.__struct_fields__ if name not in ("numbers", "traceback")]
    values = {name: getattr(group, name) for name in names}
    return IncidentView(**values, numbers=list(group.numbers), traceback=group.traceback if whole else UNSET)


async def models_of(gateway: Operated) -> list[ModelView]:
    """All models by name: in service, configured, or a folder of the repository."""
    indexed, models, blocked = await gateway.control.index(), gateway.models, blocked_slots(gateway)
    return [
        view_of_model(models[entry.name], blocked[entry.name], versions_of(gateway, entry.name))
        if entry.name in models
        else ModelView(name=entry.name, version=entry.version, state=_STATES[entry.standing.value], reason=entry.reason)
        for entry in indexed
    ]


def serving_of(gateway: Operated) -> list[ModelView]:
    """The models in service, by name."""
    blocked = blocked_slots(gateway)
    return [
        view_of_model(status, blocked[name], versions_of(gateway, name)) for name, status in sorted(gateway.models.items())
    ]


_STATES = {"READY": "ready", "LOADING": "loading", "UNLOADING": "unloading", "UNAVAILABLE": "unloaded"}


def blocked_slots(gateway: Operated) -> Counter[str]:
    """The number of slots of each model that are held for clients that do not read."""
    return Counter(
        exchange.model
        for exchange in gateway.observer.live
        if exchange.waits is not None and exchange.waits.what == ROOM and exchange.model
    )


def versions_of(gateway: Operated, name: str) -> list[VersionView]:
    """The versions of a model."""
    return [
        VersionView(version=worker.spec.version, state=worker.state.value, sessions=worker.slots.in_use)
        for worker in gateway.supervisor.versions(name)
    ]


def batches_of(gateway: Operated, name: str) -> dict[str, int]:
    """The number of calls of a model in service by batch size: requests together, or sequences in a step."""
    worker = gateway.supervisor.workers[name]
    steps: dict[int, int] | None = getattr(worker.model, "__model_batches__", None)
    if steps is None:
        steps = {size: batches.count for size, batches in worker.statistics.by_size.items()}
    return {str(size): count for size, count in sorted(steps.copy().items())}


def view_of_model(status: ModelStatus, blocked: int, versions: list[VersionView]) -> ModelView:
    """One that is in service."""
    now, error = trio.current_time(), status.last_error
    return ModelView(
        name=status.name,
        version=status.version,
        state=status.state.value,
        reason=status.reason,
        family=status.family.value,
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
        slots_blocked=blocked,
        versions=versions,
    )


class HopView(msgspec.Struct, kw_only=True, frozen=True):
    """A place on the way of a stream's bytes."""

    name: str
    """`received`, `queued`, `socket` or `window`."""
    held: int
    """Bytes in it now."""
    limit: int
    """Bytes with which it is full."""


class StreamView(msgspec.Struct, kw_only=True, frozen=True):
    """One exchange: a request and its answer, live or just ended. Times are in seconds."""

    id: str
    client_request_id: str | UnsetType = UNSET
    """The id that the client has given it."""
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
    """The thing that a live stream waits for; see the function `waits_for`."""
    waited: float | UnsetType = UNSET
    """Seconds for which it has waited for that; for the model, since bytes have moved or it had its slot."""
    spent: dict[str, float]
    """Seconds by part so far: begin, slot, input, room, flush, model."""
    items_in: int
    items_out: int
    first: float | None
    """Seconds from its head until the first item had left; null where none has."""
    hops: list[HopView] | UnsetType = UNSET
    """The places of its bytes while it is live, from the model to the client; each wire has some of these places."""
    ending: str | UnsetType = UNSET
    """Once it has ended."""
    incident: str | UnsetType = UNSET


def waits_for(exchange: Exchange, queued: Collection[object]) -> str:
    """`slot` if the exchange is queued; `input`, `room` or `end` if its client must send, read, or take the rest of the
    answer; else `model`, or `gateway` if no model is known yet."""
    if exchange in queued:
        return "slot"
    return exchange.waits_for or ("model" if exchange.model else "gateway")


class Wanted(Protocol):
    """A filter of streams; an empty member matches all."""

    @property
    def waits_for(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def peer(self) -> str: ...


def matches(exchange: Exchange, waiting: str, wanted: Wanted) -> bool:
    """True if a live exchange that waits for `waiting` matches the filter."""
    if (wanted.waits_for or waiting) != waiting or (wanted.model or exchange.model) != exchange.model:
        return False
    if not wanted.peer:
        return True
    peer = peer_of(exchange)
    return wanted.peer in (peer, split_port(peer)[0])


def waited(exchange: Exchange, waiting: str, now: float) -> float:
    """Seconds that an exchange has waited for `waiting`."""
    waits, moved = exchange.waits, _moved_at(exchange)
    match waiting:
        case "slot" | "input" | "room":
            return 0.0 if waits is None else waits.lasted(now)
        case "gateway":
            return now - exchange.started_at
        case "end":
            return now - max(moved, getattr(exchange, "left_at", moved))
        case _:
            return now - max(moved, getattr(exchange, "queued_until", moved), getattr(exchange, "began_at", moved))


def _moved_at(exchange: Exchange) -> float:
    """When bytes moved last; the comments of a silent event stream do not count."""
    limits, outbound = exchange.time_limits, exchange.outbound
    sent_at = outbound.sent_at if limits is None else limits.said_at(outbound.bytes_out, outbound.sent_at)
    return max(exchange.arrived_at, sent_at)


def _hops(exchange: Exchange) -> list[HopView]:
    if exchange.ending is not None:
        return []  # its connection may be gone
    return [HopView(name=hop.name, held=hop.held, limit=hop.limit) for hop in exchange.wire.hops(exchange.stream)]


def view_of_stream(exchange: Exchange, now: float, waiting: str | UnsetType = UNSET) -> StreamView:
    """`now` is of the exchange's clock; `waiting` is what it waits for where it is live."""
    ending, live = exchange.ending, waiting is not UNSET
    account = account_so_far(exchange, now) if live or ending is None else account_of(exchange)
    return StreamView(
        id=exchange.id,
        client_request_id=client_request_id(exchange.fields) or UNSET,
        wire=exchange.wire.name,
        dialect=exchange.dialect,
        model=exchange.model[:200],
        method=exchange.request.method.decode("latin-1")[:20],
        path=exchange.path.decode("latin-1")[:200],
        peer=peer_of(exchange),
        age=round(now - exchange.started_at, 3),
        idle=round(now - _moved_at(exchange), 3),
        bytes_in=exchange.bytes_in,
        bytes_out=exchange.outbound.bytes_out,
        status=exchange.outbound.status,
        waits_for=waiting,
        waited=round(waited(exchange, waiting, now), 3) if waiting is not UNSET else UNSET,
        spent={part: round(getattr(account, part), 6) for part in PARTS},
        items_in=account.items_in,
        items_out=account.items_out,
        first=None if account.first is None else round(account.first, 6),
        hops=_hops(exchange) if live else UNSET,
        ending=ending.value if not live and ending is not None else UNSET,
        incident=exchange.incident or UNSET,
    )
