"""Unit costs: the CPU time of a repeated step, and the cases that are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

ROUNDS = 5
ROUND_SECONDS = 0.03

Cost: TypeAlias = Callable[[], float]
"""Measures and returns the CPU microseconds of one unit."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One unit of work and its contenders. The first is everywire's; the others are the floors."""

    name: str
    costs: Mapping[str, Cost]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The cost of a case: microseconds by contender, everywire's first."""

    group: str
    case: str
    microseconds: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """The cost of everywire's contender divided by that of the first floor."""
        ours, floor, *_ = self.microseconds.values()
        return ours / floor


def repeated(step: Callable[[], object], *, units: int = 1) -> Cost:
    """The cost of a step that does `units` units: the best of several rounds, in process CPU time."""

    def cost() -> float:
        count, best = 1, float("inf")
        for _ in range(ROUNDS):
            started = time.process_time()
            for _ in range(count):
                step()
            spent = max(time.process_time() - started, 1e-9)
            best = min(best, spent / count)
            count = max(1, int(ROUND_SECONDS / best))
        return best / units * 1e6

    return cost


def measured(group: str, case: Case) -> Unit:
    """Runs a case."""
    return Unit(group=group, case=case.name, microseconds={name: cost() for name, cost in case.costs.items()})
