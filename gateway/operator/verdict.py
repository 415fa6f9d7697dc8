"""The one sentence that says whether a server is well, or who is slow: a pure function of two looks at its figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from gateway.errors import Ending, Refusal
from gateway.operator.stats import ModelStats, StatsView
from gateway.operator.views import ErrorView, ModelView

REFUSED, ROOM, SLOT, FAILED, INPUT = 0.01, 0.30, 0.20, 0.05, 0.50
"""From these shares on something is said: of requests, of time, of time, of one model's requests, of time."""
LAG = 0.05
"""Seconds, of the slowest hundredth of the event loop's timers."""
_WHY = {
    Refusal.QUEUE: "the queue of {model} is full",
    Refusal.QUEUE_TIMEOUT: "calls wait too long for a slot of {model}",
    Refusal.PARTY_SHARE: "a client has its share",
    Refusal.IDLE_WHEN_WANTED: "clients are silent while others wait for {model}",
    Refusal.RATE: "a key asks too often",
    Refusal.CONNECTIONS: "there are too many connections",
    Refusal.MEMORY: "memory is short",
    Refusal.SHED: "memory is short",
    Refusal.DRAINING: "the server is shutting down",
    Refusal.NOT_READY: "{model} is not ready",
    Refusal.NO_PLACE: "a model has no place beside the others",
    Refusal.NO_TIME: "calls come too late",
    Refusal.IN_FLIGHT: "a key has as many calls as it may",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The sentence, and what it is about."""

    kind: str
    """unready, refusing, readers, full, failing, blocked, senders or healthy."""
    sentence: str
    model: str = ""
    """The model that it is about, where it is about one."""
    incident: str = ""
    """The incident that explains it, where there is one."""


def verdict(before: StatsView | None, now: StatsView, models: Sequence[ModelView]) -> Verdict:
    """The first that holds of what has happened between two looks, or since the server began where there was none before:
    it is not ready; it refuses; clients do not read; a model is full; one fails; the event loop is blocked; clients do not
    send, where no model talks with them both ways; else it is healthy."""
    seen = _Seen(before, now, models)
    if not now.ready:
        return Verdict(kind="unready", sentence=f"Not ready: {'; '.join(now.reasons)}")
    if (share := seen.refused_share) > REFUSED:
        why, model = seen.refusal
        return Verdict(kind="refusing", sentence=f"Refusing: {why} ({_percent(share)})", model=model)
    if (share := seen.share("room")) >= ROOM:
        return Verdict(kind="readers", sentence=seen.slow_readers(share))
    if seen.share("slot") >= SLOT:
        model = seen.most("slot")
        return Verdict(kind="full", sentence=seen.full(model), model=model)
    name, share = seen.failing
    if share >= FAILED:
        said = f"{name} fails {_percent(share)} of its requests"
        return Verdict(kind="failing", sentence=said, model=name, incident=seen.incident_of(name))
    if (late := _quantile(seen.lag, now.bounds.lag, 0.99)) >= LAG:
        return Verdict(kind="blocked", sentence=f"Something blocks the event loop: it is {_time(late)} late")
    if seen.share("input") >= INPUT and not any(model.family == "parts" for model in models):
        return Verdict(kind="senders", sentence=f"Clients send slowly: {_percent(seen.share('input'))} of time")
    return Verdict(kind="healthy", sentence=seen.healthy, model=seen.busiest)


@final
class _Seen:
    """The differences between two looks."""

    def __init__(self, before: StatsView | None, now: StatsView, models: Sequence[ModelView]) -> None:
        self._now, self._by_name = now, {model.name: model for model in models}
        self._seconds = now.uptime if before is None else now.at - before.at
        known = {} if before is None else before.models
        self.spent = {name: _less(one.spent, known[name].spent if name in known else {}) for name, one in now.models.items()}
        self.ended = {
            name: _less(one.endings, known[name].endings if name in known else {}) for name, one in now.models.items()
        }
        self._durations = {name: _buckets(one, known.get(name)) for name, one in now.models.items()}
        self._refusals = _less(now.refusals, {} if before is None else before.refusals)
        was = [0] * len(now.lag.buckets) if before is None else before.lag.buckets
        self.lag = [n - m for n, m in zip(now.lag.buckets, was, strict=True)]

    @property
    def _requests(self) -> float:
        return sum(sum(endings.values()) for endings in self.ended.values())

    @property
    def refused_share(self) -> float:
        refused = sum(self._refusals.values())
        return refused / max(self._requests, refused) if refused else 0.0

    @property
    def refusal(self) -> tuple[str, str]:
        """Why most were refused, and the model with most refusals."""
        reason = max(self._refusals, key=lambda reason: self._refusals[reason])
        model = max(self.ended, key=lambda name: self.ended[name].get(Ending.REFUSED.value, 0), default="")
        why = _WHY.get(Refusal(reason), reason) if reason in {refusal.value for refusal in Refusal} else reason
        return why.format(model=model or "a model"), model if "{model}" in why else ""

    def share(self, part: str) -> float:
        """The share of all time that was this part."""
        total = sum(sum(parts.values()) for parts in self.spent.values())
        return sum(parts.get(part, 0.0) for parts in self.spent.values()) / total if total else 0.0

    def most(self, part: str) -> str:
        """The model with most of it."""
        return max(self.spent, key=lambda name: self.spent[name].get(part, 0.0))

    def slow_readers(self, share: float) -> str:
        said = f"Slow readers: {_percent(share)} of time"
        peer = max(self._now.peers, key=lambda peer: peer.room, default=None)
        if peer is None:
            return said
        slots = sum(model.capacity for model in self._by_name.values() if isinstance(model.capacity, int))
        return f"{said}; {peer.address} has {_number(peer.streams, 'stream')} and holds {peer.slots} of {slots} slots"

    def full(self, name: str) -> str:
        ended, model = sum(self.ended[name].values()), self._by_name.get(name)
        waited = self.spent[name]["slot"] / max(ended, 1)
        if model is None or not isinstance(model.capacity, int):
            return f"{name or 'A model'} is full: {_time(waited)} for a slot"
        slots = f"{model.slots_in_use} of {model.capacity} slots, {model.queued} queued"
        return f"{name} is full: {slots}, {_time(waited)} for a slot"

    @property
    def failing(self) -> tuple[str, float]:
        """The model that fails most of its requests, and which part of them."""
        shares = {
            name: endings.get(Ending.MODEL_ERROR.value, 0) / total
            for name, endings in self.ended.items()
            if name and (total := sum(endings.values()))
        }
        name = max(shares, key=lambda name: shares[name], default="")
        return name, shares.get(name, 0.0)

    def incident_of(self, name: str) -> str:
        model = self._by_name.get(name)
        return model.last_error.incident if model is not None and isinstance(model.last_error, ErrorView) else ""

    @property
    def busiest(self) -> str:
        """The model that most requests were for."""
        asked = {name: sum(endings.values()) for name, endings in self.ended.items() if name}
        return max(asked, key=lambda name: asked[name], default="")

    @property
    def healthy(self) -> str:
        name, rate = self.busiest, self._requests / self._seconds if self._seconds > 0 else 0.0
        if not self._requests:
            return "Healthy: no requests"
        refused = sum(self._refusals.values())
        said = [f"{rate:.3g} requests/s"]
        if name and any(self._durations[name]):
            said.append(f"p99 of {name} {_time(_quantile(self._durations[name], self._now.bounds.duration, 0.99))}")
        said.append(_number(int(refused), "refusal") if refused else "no refusals")
        return f"Healthy: {', '.join(said)}"


def _less(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """The differences; a server that has begun anew has none below 0."""
    return {name: max(n - before.get(name, 0), 0) for name, n in now.items()}


def _buckets(now: ModelStats, before: ModelStats | None) -> list[int]:
    was: Iterable[int] = [0] * len(now.duration.buckets) if before is None else before.duration.buckets
    return [max(n - m, 0) for n, m in zip(now.duration.buckets, was, strict=True)]


def _quantile(buckets: Sequence[int], bounds: Sequence[float], share: float) -> float:
    """The bound of the bucket in which it is; of the last one, which has none, that of the one before."""
    wanted, below = share * sum(buckets), 0
    if not wanted:
        return 0.0
    for n, bound in zip(buckets, bounds, strict=False):
        below += n
        if below >= wanted:
            return bound
    return bounds[-1]


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _number(n: int, of: str) -> str:
    return f"{n} {of}{'' if n == 1 else 's'}"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.0f} min"
