"""Compares this checkout with another, in turns in one run: the cost of a unit of work here and there."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from benchmarks.comparison import compare
from benchmarks.servers import EVERYWIRE
from benchmarks.workloads import WORKLOADS

WATCHED = ("unary-64", "unary-h2-64", "tokens-64", "duplex-pipe", "duplex-256")
"""The workloads that a change must not make more expensive."""


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


def changes(
    checkout: Path, names: Sequence[str], *, seconds: float, rounds: int, note: Callable[[str], None] = lambda text: None
) -> list[Change]:
    """Runs the servers of both checkouts with these workloads. ServerError or LoadError if one does not start or answer."""
    there = replace(EVERYWIRE, name="there", root=checkout.resolve())
    found: list[Change] = []
    for name in names:
        note(f"measuring {name}")
        first, second = compare(WORKLOADS[name], seconds=seconds, rounds=rounds, programs=(there, EVERYWIRE))
        found.append(change(name, first.figure, first.values, second.values))
    return found


def change(name: str, figure: str, there: Sequence[float], here: Sequence[float]) -> Change:
    """The change that the rounds of both show."""
    percents = tuple((after / before - 1) * 100 for before, after in zip(there, here, strict=True))
    medians = statistics.median(there), statistics.median(here)
    return Change(workload=name, figure=figure, there=medians[0], here=medians[1], percents=percents)
