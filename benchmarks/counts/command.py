"""Counts in a process with a fixed hash seed, and what is said of it: `python -m benchmarks counts`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from benchmarks.counts.cases import CASES
from benchmarks.counts.ceilings import GROWTH, Ceilings, rises
from benchmarks.servers import ROOT

FIGURES = (
    "calls",
    "modules",
    "changes of room",
    "bytecodes",
    "allocations",
    "bytes allocated",
    "bytes kept",
    "system calls",
)
HEADS = ("workload", "unit", *FIGURES, "x8 growth", "instructions")
PROCESSES = 4
"""Processes that count a case that is above a ceiling, at most: some tables grow by the addresses of
functions and classes, which are the same in each run of one process."""
WHAT_TO_DO = """\
Take the work away again. If the unit must cost more, run `python -m benchmarks counts --write --raise` in the environment of
benchmarks/requirements-counts.txt, and commit benchmarks/counts/ceilings.json alone, with the reason."""


class CountsError(Exception):
    """The counts could not be made; the text says why."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The figures of one case."""

    case: str
    counts: Mapping[str, int]
    growth: float | None
    instructions: int | None

    @property
    def grows(self) -> bool:
        """True if a unit among many costs more than it may."""
        return self.growth is not None and self.growth > GROWTH


def found(
    names: Sequence[str], ceilings: Ceilings | None, note: Callable[[str], None] = lambda text: None
) -> Iterator[Found]:
    """Counts these cases. Without ceilings, each figure is the median of several runs."""
    if sys.version_info < (3, 12):
        raise CountsError("counts need Python 3.12 or newer, which has sys.monitoring")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVERYWIRE_")}
    # threads of numpy's library would allocate, as many as the machine has cores
    environment |= {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
    order = {"names": list(names), "ceilings": ceilings, "growth": GROWTH}
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.counts.measure"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin as to:
            json.dump(order, to)
        for line in process.stdout:
            told = json.loads(line)
            if "error" in told:
                process.terminate()
                raise CountsError(f"{told['case']}: {told['error']}")
            note(f"counted {told['case']}")
            yield Found(**told)
    if process.returncode:
        raise CountsError(f"counting ended with status {process.returncode}")


def least(names: Sequence[str], ceilings: Ceilings, note: Callable[[str], None] = lambda text: None) -> list[Found]:
    """The counts of these cases: of one that is above a ceiling the least of several processes."""
    told = {one.case: one for one in found(names, ceilings, note)}
    for _ in range(PROCESSES - 1):
        above = {rise.case for rise in rises({name: one.counts for name, one in told.items()}, ceilings)}
        if not above:
            break
        for again in found([name for name in told if name in above], ceilings, note):
            before = told[again.case]
            counts = {figure: min(count, again.counts.get(figure, count)) for figure, count in before.counts.items()}
            told[again.case] = replace(before, counts=counts)
    return list(told.values())


def cells(one: Found) -> tuple[str, ...]:
    """The figures of one case by unit, as HEADS names them; of modules all."""

    def cell(figure: str) -> str:
        count = one.counts.get(figure)
        return "-" if count is None else f"{count}" if figure == "modules" else _short(count / one.counts["units"])

    growth = "-" if one.growth is None else f"{one.growth:.2f}"
    instructions = "-" if one.instructions is None else f"{one.instructions:,}"
    return one.case, CASES[one.case].unit, *map(cell, FIGURES), growth, instructions


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
