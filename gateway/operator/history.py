"""The last ten minutes of a gateway's figures, for who opens a page now: a ring of points, bounded in memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import final

import msgspec
import trio

from gateway.operator.stats import ModelStats, StatsView

EVERY = 2
"""Seconds between two points."""
KEPT_POINTS = 300
KEPT_MODELS = 64
"""Models in each point: those with most streams that are over. A model takes 180 KB at most, if all its points differ."""
_RECENT = 0.9  # seconds, so that who asks each second has new ones
LONGEST = EVERY * KEPT_POINTS
"""Seconds that can be asked for."""


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
    models: dict[str, ModelPoint]


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
    head: bytes
    models: Mapping[str, bytes]


@final
class History:
    """Keeps a point each `EVERY` seconds, the last `KEPT_POINTS` of them."""

    def __init__(self, stats: Callable[[], Awaitable[StatsView]]) -> None:
        self._stats = stats
        self._points: deque[_Kept] = deque(maxlen=KEPT_POINTS)
        self._seconds = 0
        self._asking, self._last = trio.Lock(), (-math.inf, list[StatsView]())

    async def recent(self) -> StatsView:
        """The figures of now, or of less than a second ago: all who read them each second share one look."""
        async with self._asking:
            asked, last = self._last
            if not last or trio.current_time() - asked > _RECENT:
                self._last = asked, last = trio.current_time(), [await self._stats()]
            return last[0]

    async def second(self) -> None:
        """To be called each second."""
        self._seconds += 1
        if self._seconds % EVERY == 0:
            self.add(await self.recent())

    def add(self, stats: StatsView) -> None:
        """Keeps one more point."""
        before = self._points[-1].models if self._points else {}
        models = {}
        for name in sorted(stats.models, key=lambda name: -sum(stats.models[name].endings.values()))[:KEPT_MODELS]:
            told = msgspec.json.encode(_point_of(stats.models[name]))
            models[name] = before[name] if before.get(name) == told else told
        self._points.append(_Kept(stats.at, _head_of(stats), models))

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
