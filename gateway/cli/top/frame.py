"""A frame of `everywire top`: lines made of the figures of now and a minute ago. A pure function, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, final

from gateway.addresses import split_port
from gateway.telemetry.log_text import size_text, spoken_time
from gateway.untrusted_text import escape

PARTS = ("room", "slot", "input", "model", "flush", "begin")
WAITS = ("", "slot", "model", "input", "room", "end")
"""The streams that are shown: all, or those that wait for one of these."""
SORTS = ("waited", "age", "items_out", "bytes_out")
_FAILED = ("model-error", "deadline", "transport-lost")
_BAR = 25  # characters of a whole one
_KEPT = 64  # models that a point of the history has: of others there is no rate
_COLUMN = 24  # characters of a name


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The answers of a plane at one moment: `GET /stats`, `/models` and `/streams`."""

    stats: Mapping[str, Any]
    models: Sequence[Mapping[str, Any]]
    streams: Sequence[Mapping[str, Any]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The choices of the user: which streams, in which order."""

    sort: str = SORTS[0]
    waits_for: str = WAITS[0]
    paused: bool = False


def frame(before: Look | None, now: Look, shown: Shown, *, width: int, height: int) -> list[str]:
    """The lines, none wider than `width` and at most `height` of them. The verdict and its bar are the server's, of the last
    minute. The columns cover the same time: `before` has the figures at its begin, None if that is the server's start."""
    stats = now.stats
    earlier = None if before is None else before.stats
    seconds = stats["uptime"] if earlier is None else max(stats["at"] - earlier["at"], 0.001)
    known = stats["models"] if earlier is None or len(earlier["models"]) < _KEPT else earlier["models"]
    changes = {name: _Change(one, earlier, name, stats["bounds"]) for name, one in stats["models"].items() if name in known}
    lines = [_head(stats, now.models, width), escape(stats["verdict"]["sentence"]), _parts(stats, changes, seconds), ""]
    lines += _table(_MODELS, [_model_row(model, changes.get(model["name"]), seconds) for model in now.models])
    streams = [stream for stream in now.streams if shown.waits_for in ("", stream["waits_for"])]
    streams.sort(key=lambda stream: -float(stream[shown.sort]))
    room = height - len(lines) - 3
    lines += ["", *_table(_STREAMS, [_stream_row(stream) for stream in streams[: max(room, 0)]])]
    lines.append(_foot(shown, len(streams)))
    return [line if len(line) <= width else line[: width - 1] + "…" for line in lines[:height]]


_MODELS = ("MODEL", "STATE", "SLOTS>", "QUEUED>", "REQ/S>", "FIRST p50/p99>", "p99>", "ERR>")
_STREAMS = ("STREAM", "MODEL", "WAITS FOR", "AGE>", "ITEMS>", "OUT>", "PEER")
"""Headings; those of columns that are written to the right end with `>`."""


@final
class _Change:
    """The changes of one model between two looks."""

    def __init__(
        self, now: Mapping[str, Any], earlier: Mapping[str, Any] | None, name: str, bounds: Mapping[str, Any]
    ) -> None:
        was = {} if earlier is None else earlier["models"].get(name, {})
        self.endings = _less(now["endings"], was.get("endings", {}))
        self.items = max(now["items_out"] - was.get("items_out", 0), 0)
        self._buckets = {key: _less_each(now[key], was.get(key)) for key in ("first", "duration")}
        self._bounds = bounds

    @property
    def requests(self) -> float:
        return sum(self.endings.values())

    @property
    def failed(self) -> float:
        return sum(self.endings.get(ending, 0) for ending in _FAILED)

    def quantile(self, of: str, share: float) -> str:
        """`first` or `duration`, as text: the bound of the bucket in which that share is."""
        buckets, bounds = self._buckets[of], self._bounds[of]
        wanted, below = share * sum(buckets), 0
        if not wanted:
            return "-"
        for count, bound in zip(buckets, bounds, strict=False):
            below += count
            if below >= wanted:
                return _quick(bound)
        return f">{_quick(bounds[-1])}"


def _head(stats: Mapping[str, Any], models: Sequence[Mapping[str, Any]], width: int) -> str:
    reasons = "; ".join(stats["reasons"])
    ready = f"NOT READY: {reasons or 'not ready'}"
    if stats["ready"]:  # some of several processes may not be
        ready = f"READY, but {reasons}" if reasons else "READY"
    restarting = [
        f"{model['name']} restarting in {model['restart_in']:.0f} s"
        for model in models
        if model.get("restart_in") is not None
    ]
    state = ", ".join([ready, *restarting])
    left = escape(f"everywire {stats['version']}  {', '.join(stats['address'])}  {state}")
    right = f"up {spoken_time(stats['uptime'])}"
    return f"{left}{right.rjust(max(width - len(left), len(right) + 2))}"


def _parts(stats: Mapping[str, Any], changes: Mapping[str, _Change], seconds: float) -> str:
    """The shares of all streams' time by part, in percent, as the verdict has them; then rates."""
    spent = {part: stats["verdict"]["spent"].get(part, 0.0) for part in PARTS}
    total = sum(spent.values())
    said = []
    for part, taken in sorted(spent.items(), key=lambda one: -one[1]):
        if total and (percent := round(100 * taken / total)):
            said.append(f"{part} {'█' * max(round(_BAR * taken / total), 1)} {percent}")
    requests = sum(change.requests for change in changes.values())
    failed = sum(change.failed for change in changes.values())
    items = sum(change.items for change in changes.values())
    figures = [
        f"{sum(stats['live'].values())} live",
        f"{_short(requests / seconds)} req/s",
        f"{_short(items / seconds)} items/s",
        f"{100 * failed / requests if requests else 0.0:.1f} % err",
    ]
    return "  ".join([*said, "", *figures]) if said else "  ".join(figures)


def _model_row(model: Mapping[str, Any], change: _Change | None, seconds: float) -> tuple[str, ...]:
    if "capacity" not in model:
        return (model["name"], model["state"], *[""] * (len(_MODELS) - 2))
    known = (model["name"], model["state"], f"{model['slots_in_use']}/{model['capacity']}", str(model["queued"]))
    if change is None:
        return (*known, "", "", "", "")
    first = f"{change.quantile('first', 0.5)}/{change.quantile('first', 0.99)}"
    errors = f"{100 * change.failed / change.requests:.1f}%" if change.requests else "-"
    return (*known, _short(change.requests / seconds), first, change.quantile("duration", 0.99), errors)


def _stream_row(stream: Mapping[str, Any]) -> tuple[str, ...]:
    waits = f"{stream['waits_for']} {spoken_time(stream['waited'])}"
    out = size_text(stream["bytes_out"])
    peer = split_port(stream["peer"])[0]
    return (stream["id"], stream["model"], waits, spoken_time(stream["age"]), str(stream["items_out"]), out, peer)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    table = [[head.removesuffix(">") for head in heads], *([escape(cell)[:_COLUMN] for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = [head.endswith(">") for head in heads]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        ).rstrip()
        for cells in table
    ]


def _foot(shown: Shown, streams: int) -> str:
    chosen = f"those that wait for {shown.waits_for}" if shown.waits_for else "all"
    paused = "  PAUSED" if shown.paused else ""
    return f"{streams} stream{'s' * (streams != 1)}: {chosen}, by {shown.sort}   q quit  s sort  f filter  p pause{paused}"


def _less(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """The differences; a server that has begun anew has none below 0."""
    return {name: max(value - before.get(name, 0), 0) for name, value in now.items()}


def _less_each(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[int]:
    was = [0] * len(now["buckets"]) if before is None else before["buckets"]
    # buckets at the end that are 0 are left out of a history
    return [max(count - known, 0) for count, known in zip_longest(now["buckets"], was, fillvalue=0)]


def _short(value: float) -> str:
    """A rate: `0.4`, `111`, `2.2k`."""
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _quick(seconds: float) -> str:
    return f"{seconds * 1000:.3g}ms" if seconds < 1 else f"{seconds:.3g}s"
