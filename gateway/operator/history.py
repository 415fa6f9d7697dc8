"""The last ten minutes of a gateway's figures, for who opens a page now: a ring of points, bounded in memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import final

import msgspec
import trio
from msgspec import UNSET

from gateway.operator.stats import ModelPoint, ModelStats, PointView, StatsView
from gateway.operator.verdict import MINUTE, verdict
from gateway.operator.views import ModelView

EVERY = 2
"""Seconds between two points."""
KEPT_POINTS = 300
KEPT_MODELS = 64
"""Models in each point: those with most streams that are over. A model takes 180 KB at most, if all its points differ."""
_RECENT = 0.9  # seconds, so that who asks each second has new ones
LONGEST = EVERY * KEPT_POINTS
"""Seconds that can be asked for."""


class HistoryView(msgspec.Struct, kw_only=True, frozen=True):
    """Points, the oldest first."""

    every: float
    """Seconds between two of them."""
    points: list[PointView]


class _Told(msgspec.Struct, kw_only=True, frozen=True):
    """A HistoryView whose points are written already."""

    every: float
    points: list[msgspec.Raw]


@final
@dataclass(frozen=True, slots=True)
class _Kept:
    """A point as it is kept: its JSON without the models, and theirs. Figures that have not changed are one
    object in many points."""

    at: float
    uptime: float
    head: bytes
    models: Mapping[str, bytes]


@final
class History:
    """Keeps a point each `EVERY` seconds, the last `KEPT_POINTS` of them, and judges the last minute by them."""

    def __init__(self, stats: Callable[[], Awaitable[StatsView]], serving: Callable[[], Awaitable[list[ModelView]]]) -> None:
        """`stats` gives the figures of now, `serving` the models in service."""
        self._stats, self._serving = stats, serving
        self._points: deque[_Kept] = deque(maxlen=KEPT_POINTS)
        self._seconds = 0
        self._asking, self._asked, self._last = trio.Lock(), -math.inf, list[StatsView]()

    async def recent(self) -> StatsView:
        """The figures of now, or of less than a second ago, with the verdict: all who read them each second share one
        look."""
        async with self._asking:
            if (last := await self._look()).verdict is UNSET:
                self._last = [last := await self.judged(last)]
            return last

    async def second(self) -> None:
        """To be called each second."""
        self._seconds += 1
        if self._seconds % EVERY == 0:
            async with self._asking:
                self.add(await self._look())

    async def _look(self) -> StatsView:
        if not self._last or trio.current_time() - self._asked > _RECENT:
            asked, self._last = trio.current_time(), [await self._stats()]
            self._asked = asked
        return self._last[0]

    async def judged(self, stats: StatsView) -> StatsView:
        """These figures with the verdict on the minute before them."""
        models = await self._serving()
        before, seconds, known = None, stats.uptime, stats
        for point in reversed(self._points):
            if point.uptime <= stats.uptime - MINUTE:
                before, seconds = msgspec.json.decode(_written(point), type=PointView), stats.uptime - point.uptime
                if len(before.models) == KEPT_MODELS:  # the point has none of the others: their counters are those of ever
                    kept = {name: one for name, one in stats.models.items() if name in before.models}
                    known = msgspec.structs.replace(stats, models=kept)
                break
        return msgspec.structs.replace(stats, verdict=verdict(before, known, seconds, models))

    def add(self, stats: StatsView) -> None:
        """Keeps one more point."""
        before = self._points[-1].models if self._points else {}
        models = {}
        for name in sorted(stats.models, key=lambda name: -sum(stats.models[name].endings.values()))[:KEPT_MODELS]:
            told = msgspec.json.encode(_point_of(stats.models[name]))
            models[name] = before[name] if before.get(name) == told else told
        self._points.append(_Kept(stats.at, stats.uptime, _head_of(stats), models))

    def json(self, seconds: float) -> bytes:
        """A HistoryView of the last so many seconds, as JSON."""
        since = self._points[-1].at - seconds if self._points else 0.0
        points = [msgspec.Raw(_written(point)) for point in self._points if point.at > since]
        return msgspec.json.encode(_Told(every=float(EVERY), points=points))

    @property
    def held(self) -> int:
        """Bytes that its points take, each object once."""
        kept = {id(told): len(told) for point in self._points for told in (point.head, *point.models.values())}
        return sum(kept.values())


def _written(point: _Kept) -> bytes:
    models = msgspec.json.encode({name: msgspec.Raw(told) for name, told in point.models.items()})
    return point.head[:-1] + b',"models":' + models + b"}"


def _head_of(stats: StatsView) -> bytes:
    waiting: dict[str, int] = {}
    for parts in stats.waiting.values():
        for part, n in parts.items():
            waiting[part] = waiting.get(part, 0) + n
    return msgspec.json.encode(
        {
            "at": stats.at,
            "live": sum(stats.live.values()),
            "waiting": waiting,
            "connections": sum(stats.connections.values()),
            "refusals": {reason: n for reason, n in stats.refusals.items() if n},
            "memory": stats.memory.used,
            "process": stats.memory.process,
            "lag": _cut(stats.lag.buckets),
            "starved": _cut(stats.starved),
        }
    )


def _point_of(model: ModelStats) -> ModelPoint:
    return ModelPoint(
        endings=model.endings,
        items_in=model.items_in,
        items_out=model.items_out,
        bytes_in=model.bytes_in,
        bytes_out=model.bytes_out,
        spent={part: round(seconds, 3) for part, seconds in model.spent.items()},
        duration=_cut(model.duration.buckets),
        first=_cut(model.first.buckets),
    )


def _cut(buckets: list[int]) -> list[int]:
    last = max((number for number, n in enumerate(buckets, 1) if n), default=0)
    return buckets[:last]
