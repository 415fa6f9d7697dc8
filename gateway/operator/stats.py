"""The figures of a gateway at one moment, for readers of the operator plane: counters, what is live, memory, who is slow."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

import msgspec
from msgspec import UNSET, UnsetType

from gateway.catalog.process_memory import resident_bytes
from gateway.config.machine import usable_memory
from gateway.errors import Ending
from gateway.histogram import Histogram
from gateway.operator.operated import Operated
from gateway.serving.timer import LAGS
from gateway.telemetry.account import PARTS
from gateway.telemetry.live_look import PeerWaits
from gateway.telemetry.loop_watch import Work
from gateway.telemetry.tallies import GAPS, LONG, Tally
from gateway.version import version
from gateway.workers.stalls import StalledModel

_PEERS = 5  # addresses that are told
_LATE = 5  # works that are told


class HistogramView(msgspec.Struct, kw_only=True, frozen=True):
    """How long things took. Counters; the bounds of the buckets are in `bounds`, and the last bucket has none."""

    buckets: list[int]
    """How many took up to each bound and longer than the one before."""
    seconds: float
    """All of them together."""


class ModelStats(msgspec.Struct, kw_only=True, frozen=True):
    """A model's streams, on all wires. Counters; all but `endings`, `duration` and `gap` have live ones so
    far."""

    endings: dict[str, int]
    items_in: int
    items_out: int
    bytes_in: int
    bytes_out: int
    spent: dict[str, float]
    """Seconds by part: begin, slot, input, room, flush, model."""
    duration: HistogramView
    """From the head of a request to its ending."""
    first: HistogramView
    """From its head until the first item of the answer had left."""
    gap: HistogramView
    """The mean time between two items of an answer."""


class PeerView(msgspec.Struct, kw_only=True, frozen=True):
    """A client's address, for which live streams have waited."""

    address: str
    streams: int
    room: float
    """Seconds for which they have waited for it to read, all together."""
    input: float
    """Seconds for which they have waited for it to send."""
    slots: int
    """Slots that are held now by those that wait for it to read."""


class LateView(msgspec.Struct, kw_only=True, frozen=True):
    """A work of the event loop that kept it, or of a thread for which it waited, while it was late."""

    work: str
    """The kind, such as `TLS records`; empty if it is not known."""
    whose: str
    """The address of the peer, the model, or the container for which it was done; empty if none is known, and for the sum of
    all others."""
    seconds: float
    """Seconds for which the loop was late by it, in the last minute."""


class StalledView(msgspec.Struct, kw_only=True, frozen=True):
    """The sessions of a model that say nothing for a minute, or for half of its `stall_timeout`; and those that have been
    ended for that in the last minute."""

    model: str
    live: int
    """Sessions that are silent now."""
    ended: int
    """Sessions that were ended for it in the last minute."""
    seconds: float
    """The longest silence of a live session, or else of one that was ended."""
    limit: float
    """The model's `stall_timeout`."""
    at: str
    """The author's line at which that session waits, or waited, as `file:line in function`; empty if it is not known."""
    stream: str
    """The id of that session."""


class MemoryView(msgspec.Struct, kw_only=True, frozen=True):
    """Bytes."""

    used: int
    """Bytes of the byte budget that are in use."""
    limit: int
    """The byte budget: limits.total_bytes."""
    refuse: int
    """Above this nothing new begins: limits.memory_refuse."""
    reset: int
    """Above this the stream that holds most is ended: limits.memory_reset."""
    held: dict[str, int]
    """Bytes that exchanges hold, by hop: received, bodies, assembling, send, large."""
    process: int
    """The memory of the server's processes; 0 where the system does not tell."""
    process_limit: int
    """The memory that the machine, or the control group, lets them have."""


class BoundsView(msgspec.Struct, kw_only=True, frozen=True):
    """The longest of each bucket but the last, in seconds."""

    duration: list[float]
    first: list[float]
    gap: list[float]
    lag: list[float]


class VerdictView(msgspec.Struct, kw_only=True, frozen=True):
    """The verdict on the last 60 seconds, or on the time since the start if that is shorter: one sentence that names who is
    slow."""

    kind: str
    """draining, unready, refusing, stalled, readers, full, failing, empty, blocked, busy, senders, healthy: the first that
    holds."""
    level: str
    """good, warn or bad."""
    sentence: str
    detail: str
    """The figures behind the sentence, as text; may be empty."""
    model: str
    """The model that the verdict is about; empty if it is about none."""
    peer: str
    """The client address that the streams wait for most, or whose work the event loop does; empty if the verdict is about
    no client."""
    incident: str
    """The id of the incident that explains the verdict; empty if there is none."""
    seconds: float
    """Length of the time that the verdict covers."""
    spent: dict[str, float]
    """Seconds of all streams in that time by part: begin, slot, input, room, flush, model."""


class StatsView(msgspec.Struct, kw_only=True, frozen=True):
    """The figures of a server at one moment."""

    at: float
    """Seconds since 1970."""
    version: str
    uptime: float
    """Seconds for which it has served."""
    address: list[str]
    """The addresses at which it listens for clients of models."""
    ready: bool
    reasons: list[str]
    """Why it is not ready."""
    live: dict[str, int]
    """Streams by wire."""
    waiting: dict[str, dict[str, int]]
    """Those that wait, by wire and part: slot, input, room."""
    connections: dict[str, int]
    """Those that are open, by wire."""
    refusals: dict[str, int]
    """Requests that were not admitted, by reason: counters."""
    memory: MemoryView
    lag: HistogramView
    """How late the event loop came to its timer."""
    starved: list[int] = []
    """The buckets of those times for which it waited for a CPU: the machine was busy."""
    late: list[LateView] = []
    """The works that kept the event loop most in the last minute, five at most; of the others, one sum for each kind."""
    stalled: list[StalledView] = []
    """The models that say nothing, the one that is silent longest first."""
    peers: list[PeerView]
    """The addresses that live streams have waited for most, five at most."""
    models: dict[str, ModelStats]
    """The models of the configuration by name; the empty name is all others."""
    bounds: BoundsView
    """The bounds of all histograms."""
    verdict: VerdictView | UnsetType = UNSET
    """The verdict on the last minute. Absent only in figures that are still to be added to those of other processes."""


class ModelPoint(msgspec.Struct, kw_only=True, frozen=True):
    """A model's counters at one moment; the differences between two points are what has happened meanwhile."""

    endings: dict[str, int]
    items_in: int
    items_out: int
    bytes_in: int
    bytes_out: int
    spent: dict[str, float]
    duration: list[int]
    """Buckets, as in stats; those at the end that are 0 are left out."""
    first: list[int]


class PointView(msgspec.Struct, kw_only=True, frozen=True):
    """The figures at one moment. Figures that grow are counters."""

    at: float
    """Seconds since 1970."""
    live: int
    waiting: dict[str, int]
    """By part."""
    connections: int
    refusals: dict[str, int]
    """Those that are not 0, by reason."""
    memory: int
    """Bytes of the byte budget that are in use."""
    process: int
    """The memory of the server's processes."""
    lag: list[int]
    """Buckets of how late the event loop came to its timer."""
    starved: list[int] = []
    """Those of them for which it waited for a CPU."""
    models: dict[str, ModelPoint]


_NO_MEMORY = MemoryView(used=0, limit=0, refuse=0, reset=0, held={}, process=0, process_limit=0)
_NOTHING = StatsView(
    at=0.0, version=version(), uptime=0.0, address=[], ready=False, reasons=[],
    live={}, waiting={}, connections={}, refusals={}, memory=_NO_MEMORY,
    lag=HistogramView(buckets=[0] * (len(LAGS) + 1), seconds=0.0), peers=[], models={},
    bounds=BoundsView(duration=list(LONG), first=list(LONG), gap=list(GAPS), lag=list(LAGS)),
)  # fmt: skip


async def stats_of(gateway: Operated, uptime: float) -> StatsView:
    """The figures of one gateway, which has served for so many seconds. Others have their turn meanwhile."""
    metrics = gateway.metrics
    look = await metrics.look_in_turns()
    reasons, budget, limits = gateway.unready, metrics.server.budget, metrics.server.limits
    return StatsView(
        at=round(time.time(), 3),
        version=version(),
        uptime=round(uptime, 3),
        address=list(gateway.addresses),
        ready=not reasons,
        reasons=list(reasons),
        live=dict(look.live),
        waiting=_nested(look.waiting),
        connections=dict(look.connections),
        refusals={refusal.value: n for refusal, n in metrics.refusals.items()},
        memory=MemoryView(
            used=budget.used,
            limit=budget.limit,
            refuse=budget.limit * limits.memory_refuse // 100,
            reset=budget.limit * limits.memory_reset // 100,
            held=dict(look.held),
            process=resident_bytes(),
            process_limit=usable_memory(),
        ),
        lag=_histogram_view([metrics.lag]),
        starved=list(metrics.starved.buckets),
        late=_latest(metrics.blocks.recent()),
        stalled=_stalled([_stalled_view(one) for one in metrics.stalls.recent()]),
        peers=_slowest([_peer_view(address, peer) for address, peer in look.peers.items()]),
        models=_models(metrics.tallies.by_key),
        bounds=BoundsView(duration=list(LONG), first=list(LONG), gap=list(GAPS), lag=list(LAGS)),
    )


def _nested(waiting: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (wire, part), n in waiting.items():
        nested.setdefault(wire, {})[part] = n
    return nested


def _peer_view(address: str, peer: PeerWaits) -> PeerView:
    room, input = round(peer.room, 3), round(peer.input, 3)
    return PeerView(address=address, streams=peer.streams, room=room, input=input, slots=peer.slots)


def _slowest(peers: Iterable[PeerView]) -> list[PeerView]:
    return sorted(peers, key=lambda peer: (-peer.room - peer.input, peer.address))[:_PEERS]


def _latest(spent: Mapping[Work, float]) -> list[LateView]:
    most = sorted(spent, key=lambda work: -spent[work])
    sums = {work: spent[work] for work in most[:_LATE]}
    for work in most[_LATE:]:
        rest = Work(work.kind, "")
        sums[rest] = sums.get(rest, 0.0) + spent[work]
    return [LateView(work=kind, whose=whose, seconds=round(seconds, 3)) for (kind, whose), seconds in sums.items()]


def _models(tallies: Mapping[tuple[str, str, str], Tally]) -> dict[str, ModelStats]:
    by_name: dict[str, list[Tally]] = {}
    for (_, _, name), tally in tallies.items():
        by_name.setdefault(name, []).append(tally)
    return {name: _model_stats(by_name[name]) for name in sorted(by_name)}


def _model_stats(tallies: Sequence[Tally]) -> ModelStats:
    ended = {ending.value: sum(tally.endings[ending] for tally in tallies) for ending in Ending}
    return ModelStats(
        endings={ending: n for ending, n in ended.items() if n},
        items_in=sum(tally.items_in for tally in tallies),
        items_out=sum(tally.items_out for tally in tallies),
        bytes_in=sum(tally.bytes_in for tally in tallies),
        bytes_out=sum(tally.bytes_out for tally in tallies),
        spent={part: round(sum(tally.spent[part] for tally in tallies), 6) for part in PARTS},
        duration=_histogram_view([tally.duration for tally in tallies]),
        first=_histogram_view([tally.first for tally in tallies]),
        gap=_histogram_view([tally.gap for tally in tallies]),
    )


def _histogram_view(histograms: Sequence[Histogram]) -> HistogramView:
    buckets = [sum(several) for several in zip(*(histogram.buckets for histogram in histograms), strict=True)]
    return HistogramView(buckets=buckets, seconds=round(sum(histogram.seconds for histogram in histograms), 6))


# -- several gateways


def stats_of_all(told: Sequence[StatsView]) -> StatsView:
    """The figures of several gateways together. The caller adds the time, the address and the readiness."""
    names = dict.fromkeys(name for view in told for name in view.models)
    peers: dict[str, PeerView] = {}
    for peer in (peer for view in told for peer in view.peers):
        peers[peer.address] = _peers_added(peers[peer.address], peer) if peer.address in peers else peer
    late: dict[Work, float] = {}
    for one in (one for view in told for one in view.late):
        work = Work(one.work, one.whose)
        late[work] = late.get(work, 0.0) + one.seconds
    wires = dict.fromkeys(wire for view in told for wire in view.waiting)
    return msgspec.structs.replace(
        _NOTHING,
        live=_added([view.live for view in told]),
        waiting={wire: _added([view.waiting.get(wire, {}) for view in told]) for wire in wires},
        connections=_added([view.connections for view in told]),
        refusals=_added([view.refusals for view in told]),
        memory=MemoryView(
            used=sum(view.memory.used for view in told),
            limit=sum(view.memory.limit for view in told),
            refuse=sum(view.memory.refuse for view in told),
            reset=sum(view.memory.reset for view in told),
            held=_added([view.memory.held for view in told]),
            process=sum(view.memory.process for view in told),
            process_limit=max((view.memory.process_limit for view in told), default=0),
        ),
        lag=_histograms_added([_NOTHING.lag, *(view.lag for view in told)]),
        starved=[sum(several) for several in zip_longest(*(view.starved for view in told), fillvalue=0)],
        late=_latest(late),
        stalled=_stalled([one for view in told for one in view.stalled]),
        peers=_slowest(peers.values()),
        models={name: models_added([view.models[name] for view in told if name in view.models]) for name in names},
    )


def check(view: StatsView) -> None:
    """ValueError for figures that another process has said, and that cannot be added to ours."""
    for model in view.models.values():
        for histogram, bounds in ((model.duration, LONG), (model.first, LONG), (model.gap, GAPS)):
            if len(histogram.buckets) != len(bounds) + 1:
                raise ValueError(f"a histogram of {len(histogram.buckets)} buckets, not {len(bounds) + 1}")
    if len(view.starved) > len(LAGS) + 1:
        raise ValueError(f"{len(view.starved)} buckets of waits for a CPU, of {len(LAGS) + 1}")
    if len(view.lag.buckets) != len(LAGS) + 1:
        raise ValueError(f"a histogram of {len(view.lag.buckets)} buckets, not {len(LAGS) + 1}")


def models_added(several: Sequence[ModelStats]) -> ModelStats:
    """The counters of one model, of several gateways together."""
    return ModelStats(
        endings=_added([one.endings for one in several]),
        items_in=sum(one.items_in for one in several),
        items_out=sum(one.items_out for one in several),
        bytes_in=sum(one.bytes_in for one in several),
        bytes_out=sum(one.bytes_out for one in several),
        spent=_seconds_added([one.spent for one in several]),
        duration=_histograms_added([one.duration for one in several]),
        first=_histograms_added([one.first for one in several]),
        gap=_histograms_added([one.gap for one in several]),
    )


def counters_of(view: StatsView) -> StatsView:
    """The counters of a gateway that is gone: nothing of it is live, and it holds nothing."""
    return msgspec.structs.replace(
        view, live={}, waiting={}, connections={}, memory=_NO_MEMORY, late=[], stalled=[], peers=[]
    )


def _stalled_view(one: StalledModel) -> StalledView:
    return StalledView(**(one._asdict() | {"seconds": round(one.seconds, 3)}))


def _stalled(several: Iterable[StalledView]) -> list[StalledView]:
    """One view for each model: that of its longest live silence, with the numbers of all."""
    found: dict[str, StalledView] = {}
    for one in sorted(several, key=lambda one: (not one.live, -one.seconds)):
        if (first := found.get(one.model)) is not None:
            one = msgspec.structs.replace(first, live=first.live + one.live, ended=first.ended + one.ended)
        found[one.model] = one
    return list(found.values())


def _peers_added(one: PeerView, other: PeerView) -> PeerView:
    return PeerView(
        address=one.address,
        streams=one.streams + other.streams,
        room=round(one.room + other.room, 3),
        input=round(one.input + other.input, 3),
        slots=one.slots + other.slots,
    )


def _added(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for one in several:
        total.update(one)
    return dict(total)


def _seconds_added(several: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in several:
        for name, seconds in one.items():
            total[name] = round(total.get(name, 0.0) + seconds, 6)
    return total


def _histograms_added(several: Sequence[HistogramView]) -> HistogramView:
    buckets = [sum(one) for one in zip(*(view.buckets for view in several), strict=True)]
    return HistogramView(buckets=buckets, seconds=round(sum(view.seconds for view in several), 6))
