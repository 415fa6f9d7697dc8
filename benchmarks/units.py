"""Unit costs: CPU time of a step that is repeated, and the table of what is compared with what."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

ROUNDS = 5
ROUND_SECONDS = 0.03

Cost: TypeAlias = Callable[[], float]
"""Measures: CPU microseconds of one unit."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One unit of work and those who do it. The first is ours; the others are the floors."""

    name: str
    costs: Mapping[str, Cost]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What a case cost: microseconds by contender, ours first."""

    group: str
    case: str
    microseconds: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Ours beside the first floor."""
        ours, floor, *_ = self.microseconds.values()
        return ours / floor


def repeated(step: Callable[[], object], *, units: int = 1) -> Cost:
    """The cost of a step that does so many units: the best of several rounds, in process CPU time."""

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
