"""The verdict: one sentence that says if a server is well, or names who is slow. A pure function of two looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import final

from gateway.errors import Ending, Refusal
from gateway.operator.stats import LateView, PeerView, PointView, StalledView, StatsView, VerdictView
from gateway.operator.views import ErrorView, ModelView
from gateway.telemetry.account import PARTS
from gateway.telemetry.loop_watch import MODEL_CODE, NO_CPU

MINUTE = 60.0
"""Seconds that a verdict covers, if the server is as old."""
REFUSED, ROOM, SLOT, FAILED, INPUT = 0.01, 0.30, 0.20, 0.05, 0.50
"""Shares from which on a verdict blames: of requests, of time, of time, of one model's requests, of time."""
LAG = 0.05
"""Seconds by which one in a hundred of the event loop's timers is late."""
BUSY_WITH = 0.1
"""The least share of a work in the time for which the loop was late: a busy machine is not blamed on one that took less."""
_WORTH = 1.0  # seconds of streams: a share of less means nothing
_FAILED = (Ending.MODEL_ERROR, Ending.DEADLINE)
_WHY = {
    Refusal.QUEUE: "queue of {model} is full",
    Refusal.QUEUE_TIMEOUT: "calls wait too long for a slot of {model}",
    Refusal.PARTY_SHARE: "a client has its share already",
    Refusal.IDLE_WHEN_WANTED: "silent streams are ended for those that wait for {model}",
    Refusal.RATE: "a key calls too often",
    Refusal.CONNECTIONS: "too many connections",
    Refusal.MEMORY: "memory is short",
    Refusal.SHED: "memory is short, and streams are ended for it",
    Refusal.DRAINING: "the server is draining",
    Refusal.NOT_READY: "{model} is not ready",
    Refusal.NO_PLACE: "{model} finds no memory beside the other models",
    Refusal.NO_TIME: "calls come with too little time left",
    Refusal.IN_FLIGHT: "a key has too many calls at once",
}


def verdict(before: PointView | None, now: StatsView, seconds: float, models: Sequence[ModelView]) -> VerdictView:
    """The verdict on what happened between two looks that many seconds apart, or since the server began if there is no
    earlier look. It is the first condition that holds: the server is not ready; it refuses calls; a model says nothing;
    clients do not read; a model is full; a model fails; the event loop is blocked; the machine is busy; clients do not send,
    and no model talks with them both ways."""
    return _Minute(before, now, seconds, models).verdict()


@final
class _Minute:
    """The changes between two looks."""

    def __init__(self, before: PointView | None, now: StatsView, seconds: float, models: Sequence[ModelView]) -> None:
        self._now, self._seconds, self._models = now, seconds, {model.name: model for model in models}
        known = {} if before is None else before.models
        self._spent = {n: _grown(one.spent, known[n].spent if n in known else {}) for n, one in now.models.items()}
        self._endings = {n: _grown(one.endings, known[n].endings if n in known else {}) for n, one in now.models.items()}
        self._durations = {
            n: _grown_each(one.duration.buckets, known[n].duration if n in known else []) for n, one in now.models.items()
        }
        self._refusals = _grown(now.refusals, {} if before is None else before.refusals)
        self._lag = _grown_each(now.lag.buckets, [] if before is None else before.lag)
        self._starved = _grown_each(now.starved, [] if before is None else before.starved)
        self._total = {part: round(sum(spent.get(part, 0.0) for spent in self._spent.values()), 3) for part in PARTS}
        self._ended = int(sum(sum(endings.values()) for endings in self._endings.values()))
        self._refused = int(sum(self._refusals.values()))

    def verdict(self) -> VerdictView:
        now = self._now
        if not now.ready:
            return self._unready()
        asked = max(self._ended, self._refused)
        if self._refused > REFUSED * asked:
            return self._refusing(self._refused, asked)
        if now.stalled:
            return self._stalled(now.stalled[0])
        if self._share("room") >= ROOM:
            return self._readers(self._share("room"))
        if self._share("slot") >= SLOT:
            return self._full(self._share("slot"))
        name = self._most(self._failed_share)
        if name and self._failed_share(name) >= FAILED:
            return self._failing(name)
        if not sum(now.live.values()) + sum(sum(one.endings.values()) for one in now.models.values()):
            return self._said("empty", "good", "Ready. Nothing has called yet.")
        late, own = self._late(self._lag), self._late(self._own_lag)
        if own >= LAG:
            return self._blocked(own)
        if late >= LAG:
            return self._busy(late)
        if self._share("input") >= INPUT and not any(model.family == "parts" for model in self._models.values()):
            return self._senders(self._share("input"))
        return self._healthy()

    def _said(
        self, kind: str, level: str, sentence: str, detail: str = "", *, model: str = "", peer: str = "", incident: str = ""
    ) -> VerdictView:
        return VerdictView(
            kind=kind, level=level, sentence=sentence, detail=detail, model=model, peer=peer, incident=incident,
            seconds=round(self._seconds, 3), spent=self._total,
        )  # fmt: skip

    # -- each kind of verdict

    def _unready(self) -> VerdictView:
        reasons = list(self._now.reasons)
        if "draining" in reasons:
            others = "; ".join(reason for reason in reasons if reason != "draining")
            return self._said("draining", "warn", "Draining: new requests are refused", others)
        return self._said("unready", "bad", f"Not ready: {'; '.join(reasons) or 'no reason is given'}")

    def _refusing(self, refused: int, asked: int) -> VerdictView:
        reason = max(self._refusals, key=lambda reason: self._refusals[reason])
        why = _WHY[Refusal(reason)] if reason in {refusal.value for refusal in Refusal} else reason
        name = self._most(lambda name: self._endings[name].get(Ending.REFUSED.value, 0)) if "{model}" in why else ""
        detail = f"{_several(refused, 'request')} of {asked}."
        if name:
            detail += f" {name} has {self._slots(name)}."
        if others := [f"{other} {n:g}" for other, n in self._refusals.items() if n and other != reason]:
            detail += f" Also: {', '.join(others)}."
        if self._now.stalled:
            detail += f" {_silence(self._now.stalled[0])}."
        sentence = f"Refusing: {why.format(model=name or 'a model')} ({_percent(refused / asked)})"
        return self._said("refusing", "bad", sentence, detail, model=name)

    def _stalled(self, silent: StalledView) -> VerdictView:
        setting, limit = f"models.{silent.model}.stall_timeout", _time(silent.limit)
        if silent.live:
            are = "is" if silent.live == 1 else "are"
            detail = (
                f"{_several(silent.live, 'stream')} {are} silent, {silent.stream} longest; {setting} ends it after {limit}."
            )
        else:
            detail = f"{_several(silent.ended, 'stream')} ended in the last minute ({setting}), {silent.stream} last."
        detail += f" {silent.model} has {self._slots(silent.model)}."
        if others := [other.model for other in self._now.stalled[1:]]:
            detail += f" Also: {', '.join(others)}."
        model = self._models.get(silent.model)
        error = None if model is None else model.last_error
        incident = error.incident if silent.ended and isinstance(error, ErrorView) else ""
        return self._said("stalled", "bad", _silence(silent), detail, model=silent.model, incident=incident)

    def _readers(self, share: float) -> VerdictView:
        sentence = f"Slow readers: {_percent(share)} of time"
        blocked = {name: n for name, model in self._models.items() if (n := model.slots_blocked or 0)}
        name, detail = max(blocked, key=lambda name: blocked[name], default=""), ""
        peer = self._peer(lambda peer: peer.room)
        if peer is not None:
            held = _several(peer.slots, "slot")
            if name and len(blocked) == 1:
                held = f"{peer.slots} of {_several(self._capacity(name), 'slot')} of {name}"
            sentence += f"; {peer.address} holds {held}"
            part = peer.room / sum(one.room for one in self._now.peers)
            detail = f"{peer.address} accounts for {_percent(part)} of it, with {_several(peer.streams, 'live stream')}."
        if name:
            of = _several(self._capacity(name), "slot")
            detail += f" Clients that do not read hold {blocked[name]} of the {of} of {name}."
        detail = detail.strip() or "The streams that waited have ended."
        return self._said("readers", "warn", sentence, detail, model=name, peer="" if peer is None else peer.address)

    def _full(self, share: float) -> VerdictView:
        name = self._most(lambda name: self._spent[name].get("slot", 0.0))
        endings = self._endings.get(name, {})
        served = sum(endings.values()) - endings.get(Ending.REFUSED.value, 0)
        each = f", {_time(self._spent[name]['slot'] / served)} for a slot" if name and served else ""
        sentence = f"{name or 'A model'} is full: {self._slots(name)}{each}"
        detail = f"{_percent(share)} of the time of all streams is spent in queues for a slot."
        return self._said("full", "warn", sentence, detail, model=name)

    def _failing(self, name: str) -> VerdictView:
        endings = self._endings[name]
        failed = sum(endings.get(ending.value, 0) for ending in _FAILED)
        sentence = f"{name} fails {_percent(self._failed_share(name))} of its requests"
        detail, incident = f"{failed:g} of {_several(int(sum(endings.values())), 'request')}.", ""
        model = self._models.get(name)
        if model is not None and isinstance(model.last_error, ErrorView):
            detail += f" The last error: {model.last_error.error[:200]}"
            incident = model.last_error.incident
        return self._said("failing", "bad", sentence, detail, model=name, incident=incident)

    def _blocked(self, late: float) -> VerdictView:
        detail = f"Its timer is {_time(late)} late (p99)."
        culprit, share = self._culprit(0.0)
        if culprit is None:
            detail += " All streams wait while a model or a thread holds the interpreter."
            return self._said("blocked", "warn", "Something blocks the event loop", detail)
        detail += f" This had {_percent(share)} of the time for which it was late. All streams wait meanwhile."
        return self._blames("blocked", f"The event loop is blocked: {_named(culprit)}", detail, culprit)

    def _busy(self, late: float) -> VerdictView:
        sentence = "The machine is busy: the server waits for a CPU"
        detail = (
            f"The event loop's timer is {_time(late)} late (p99): it waits for a CPU. Other processes or threads have "
            "them, or the limit of the container is reached. Nothing blocks the loop."
        )
        culprit, share = self._culprit(BUSY_WITH)
        if culprit is None:
            return self._said("busy", "warn", sentence, detail)
        detail += f" {_percent(share)} of the CPU that it gets while it is late goes to {_named(culprit)}."
        return self._blames("busy", f"{sentence}; most of its own goes to {_named(culprit)}", detail, culprit)

    def _blames(self, kind: str, sentence: str, detail: str, culprit: LateView) -> VerdictView:
        model = culprit.whose if culprit.work == MODEL_CODE else ""
        return self._said(kind, "warn", sentence, detail, model=model, peer="" if model else culprit.whose)

    def _culprit(self, least: float) -> tuple[LateView | None, float]:
        """The kind of work that had at least half of the time for which the event loop was late and did not wait for a CPU,
        and a share of `least` of all that time; its peer, if at least half of it was for one; and its share."""
        late = [one for one in self._now.late if one.work != NO_CPU.kind]
        total, kinds = sum(one.seconds for one in late), dict[str, float]()
        for one in late:
            kinds[one.work] = kinds.get(one.work, 0.0) + one.seconds
        kind = max(kinds, key=lambda kind: kinds[kind], default="")
        if not kind or kinds[kind] < max(total / 2, least * sum(one.seconds for one in self._now.late)):
            return None, 0.0
        most = max((one for one in late if one.work == kind), key=lambda one: one.seconds)
        if not most.whose or most.seconds < kinds[kind] / 2:
            most = LateView(work=kind, whose="", seconds=kinds[kind])
        return most, most.seconds / total

    def _senders(self, share: float) -> VerdictView:
        detail = f"{_percent(share)} of the time of all streams is spent waiting for the rest of requests."
        peer = self._peer(lambda peer: peer.input)
        if peer is None:
            return self._said("senders", "warn", "Clients send slowly", detail)
        detail += f" Most of it for {peer.address} ({_several(peer.streams, 'stream')})."
        return self._said("senders", "warn", "Clients send slowly", detail, peer=peer.address)

    def _healthy(self) -> VerdictView:
        live = sum(self._now.live.values())
        detail = f"{_several(live, 'stream')} {'is' if live == 1 else 'are'} live." if live else ""
        if not self._ended:
            return self._said("healthy", "good", "Healthy: no request has ended in the last minute", detail)
        said = [f"{_rate(self._ended / self._seconds) if self._seconds > 0 else self._ended} requests/s"]
        name = self._most(lambda name: sum(self._endings[name].values()))
        if name and (p99 := _quantile(self._durations[name], self._now.bounds.duration, 0.99)) is not None:
            said.append(f"p99 of {name} {_time(p99)}")
        # An invalid request ends as refused too, and admission has not refused it.
        ended = int(sum(one.get(Ending.REFUSED.value, 0) for one in self._endings.values()))
        asked, invalid = max(self._ended, self._refused), ended - self._refused
        said.append(f"{_percent(self._refused / asked)} refused" if self._refused else "no refusals")
        if invalid > 0:
            said.append(f"{_percent(invalid / asked)} invalid")
        return self._said("healthy", "good", f"Healthy: {', '.join(said)}", detail, model=name)

    # -- figures

    @property
    def _own_lag(self) -> list[int]:
        """The lags, with those for which the loop waited for a CPU as if it had been in time."""
        own = [max(n - m, 0) for n, m in zip_longest(self._lag, self._starved, fillvalue=0)]
        return [own[0] + sum(self._starved), *own[1:]]

    def _late(self, lags: Sequence[int]) -> float:
        return _quantile(lags, self._now.bounds.lag, 0.99) or 0.0

    def _share(self, part: str) -> float:
        """The share of all streams' time that was this part."""
        total = sum(self._total.values())
        return self._total[part] / total if total >= _WORTH else 0.0

    def _most(self, of: Callable[[str], float]) -> str:
        """The model of the configuration that has most of something; empty where none has any."""
        name = max((name for name in self._endings if name), key=of, default="")
        return name if name and of(name) > 0 else ""

    def _failed_share(self, name: str) -> float:
        endings = self._endings[name]
        total = sum(endings.values())
        return sum(endings.get(ending.value, 0) for ending in _FAILED) / total if total else 0.0

    def _peer(self, seconds: Callable[[PeerView], float]) -> PeerView | None:
        peer = max(self._now.peers, key=seconds, default=None)
        return peer if peer is not None and seconds(peer) > 0 else None

    def _capacity(self, name: str) -> int:
        return self._models[name].capacity or 0

    def _slots(self, name: str) -> str:
        model = self._models.get(name)
        if model is None or not isinstance(model.capacity, int):
            return "not in service"
        return f"{model.slots_in_use} of {_several(model.capacity, 'slot')}, {model.queued} queued"


def _silence(silent: StalledView) -> str:
    """`chat has sent nothing for 4 min, at /srv/app.py:12 in generate`."""
    at = f", at {silent.at}" if silent.at else ""
    return f"{silent.model} {'has sent' if silent.live else 'sent'} nothing for {_time(silent.seconds)}{at}"


def _named(late: LateView) -> str:
    """`TLS records of 127.0.0.1`, `model code of chat`, `JSON bodies`."""
    return f"{late.work} of {late.whose}" if late.whose else late.work


def _grown(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """The differences; none is below 0, also if a counter has begun anew."""
    return {name: max(n - before.get(name, 0), 0) for name, n in now.items()}


def _grown_each(now: Iterable[int], before: Iterable[int]) -> list[int]:
    """The differences of buckets; those at the end of `before` may be missing."""
    return [max(n - m, 0) for n, m in zip_longest(now, before, fillvalue=0)]


def _quantile(buckets: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """A quantile by linear interpolation; None without counts. Beyond the last bound it is that bound."""
    wanted, below = share * sum(buckets), 0
    if not wanted:
        return None
    for number, (n, bound) in enumerate(zip(buckets, bounds, strict=False)):
        if n and below + n >= wanted:
            lower = bounds[number - 1] if number else 0.0
            return lower + (bound - lower) * (wanted - below) / n
        below += n
    return bounds[-1]


def _percent(share: float) -> str:
    """`48 %`, `1.5 %`."""
    return f"{share * 100:.{0 if share >= 0.0995 else 1}f} %"


def _several(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


def _rate(value: float) -> str:
    """`111`, `4.1`, `0.05`."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.095 else f"{value:.2f}"


def _time(seconds: float) -> str:
    """`14 ms`, `5.8 s`, `12 s`, `4 min`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.{0 if seconds >= 0.00995 else 1}f} ms"
    if seconds < 120:
        return f"{seconds:.{0 if seconds >= 9.95 else 1}f} s"
    return f"{seconds / 60:.0f} min"
