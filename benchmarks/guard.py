"""The guard: fails if the server has become expensive compared with a floor that is measured in the same run.

Only ratios are judged, never times: both sides run on the same machine, in turns, and CPU time is counted, so neither a
slow machine nor a busy one can fail it. A workload that fails is measured once more.

A bound is half above the greatest ratio that was seen: on two kinds of machine, each several times, some of them beside
three busy loops. To move one, measure so, and write the range beside it. A bound that had to be raised wants a reason in the
commit. `python -m benchmarks counts` is for what is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from benchmarks import servers
from benchmarks.comparison import Row, compare
from benchmarks.load.connections import LoadError
from benchmarks.servers import Program, ServerError
from benchmarks.workloads import WORKLOADS

SECONDS = 0.4
ROUNDS = 3


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most that a workload may cost, in multiples of a floor that runs on every platform."""

    floor: Program
    most: float


BOUNDS = {
    "unary-64": Bound(floor=servers.HTTP1, most=3.5),  # 1.93 to 2.34
    "tokens-64": Bound(floor=servers.HTTP1, most=5.0),  # 2.27 to 3.29
    "websocket-pipe": Bound(floor=servers.WEBSOCKET, most=3.0),  # 1.73 to 1.97
    "duplex-pipe": Bound(floor=servers.HTTP2, most=8.0),  # 3.75 to 5.39
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One workload beside its bound."""

    workload: str
    ours: float
    floor: float
    """Both in microseconds."""
    ratio: float
    most: float

    @property
    def holds(self) -> bool:
        return self.ratio <= self.most


def verdict(name: str, rows: list[Row], most: float) -> Verdict:
    """The verdict on two rows: the server's and its floor's, in this order."""
    ours, floor = (row.median for row in rows)
    return Verdict(workload=name, ours=ours, floor=floor, ratio=ours / floor, most=most)


Measure = Callable[[str, Bound], Verdict]


def measure(name: str, bound: Bound) -> Verdict:
    """Runs one workload."""
    rows = compare(WORKLOADS[name], seconds=SECONDS, rounds=ROUNDS, programs=(servers.EVERYWIRE, bound.floor))
    return verdict(name, rows, bound.most)


def judge(measure: Measure = measure) -> Iterator[Verdict]:
    """Yields the verdict on each workload: that of a second measurement if the first failed or does not hold."""
    for name, bound in BOUNDS.items():
        found: Verdict | None = None
        with suppress(ServerError, LoadError):
            found = measure(name, bound)
        yield found if found is not None and found.holds else measure(name, bound)
