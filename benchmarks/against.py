"""Compares this checkout with another, in turns in one run: the cost of a unit of work here and there."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from benchmarks.checkouts import PRODUCT
from benchmarks.comparison import compare
from benchmarks.load.plan import Measure
from benchmarks.servers import ROOT
from benchmarks.workloads import WORKLOADS

WATCHED = (
    "unary-64", "unary-h2-64", "grpc-unary", "grpc-stream", "unary-json-16", "json-large", "process-tensor", "tokens-64",
    "paced-256", "websocket-pipe", "duplex-256", "duplex-pipe", "duplex-pipe-tls", "idle-http2",
)  # fmt: skip
"""The workloads that a change must not make more expensive."""
COMPARED = {name: workload for name, workload in WORKLOADS.items() if workload.measure is not Measure.STALLED}
"""The workloads whose figures can be compared: a growth of memory may be 0."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One workload: medians there and here, and the change of each pair of rounds, in percent."""

    workload: str
    figure: str
    there: float
    here: float
    percents: tuple[float, ...]

    @property
    def percent(self) -> float:
        """The median of the pairs: an effect of the machine on both rounds of a pair cancels out."""
        return statistics.median(self.percents)

    @property
    def spread(self) -> float:
        """The distance between the first and the third quartile of the pairs, in points of percent."""
        if len(self.percents) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.percents, n=4, method="inclusive")
        return third - first


def prepare(checkout: Path) -> None:
    """Compiles the product of a checkout and of this one. Else only the fresh one would compile at its start: it would
    start slowly, and what that leaves in its heap may be used for its streams."""
    for root in (checkout, ROOT):
        command = [sys.executable, "-m", "compileall", "-q", *PRODUCT]
        subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def changed(checkout: Path, name: str, *, seconds: float, rounds: int) -> Change:
    """Runs the servers of both checkouts with one workload. The load, the settings and the source of tokens are those of
    this checkout; echo and identity are those of each. ServerError or LoadError if a server does not start or answer."""
    workload = WORKLOADS[name]
    here = workload.servers[0]
    there = replace(here, name="there", root=checkout.resolve())
    first, second = compare(workload, seconds=seconds, rounds=rounds, programs=(there, here))
    return change(name, first.figure, first.values, second.values)


def change(name: str, figure: str, there: Sequence[float], here: Sequence[float]) -> Change:
    """The change that the rounds of both show."""
    percents = tuple((after / before - 1) * 100 for before, after in zip(there, here, strict=True))
    medians = statistics.median(there), statistics.median(here)
    return Change(workload=name, figure=figure, there=medians[0], here=medians[1], percents=percents)
