"""Runs a workload against its servers side by side, and draws conclusions from the rounds."""

from __future__ import annotations

import json
import pickle
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, final

from benchmarks.accounting import allow_descriptors, cores
from benchmarks.load.connections import LoadError
from benchmarks.load.plan import Measure, Plan, Result
from benchmarks.servers import ROOT, Program, started
from benchmarks.workloads import Workload

BUSY = 0.95
"""A share of its core above which the load client may have set the pace."""
_START_SECONDS = 60.0
_DESCRIPTORS = 4096


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One server's rounds of one workload."""

    workload: str
    server: str
    figure: str
    """The unit of each value, such as us/request."""
    values: tuple[float, ...]
    per_second: float
    """Units per second of wall-clock time, the median: of little value on a shared machine."""
    load_share: float
    """The load client's greatest share of its core."""
    ratio: float | None = None
    """This server's median divided by the floor's; None for the floor, and if it would mean nothing."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def compare(
    workload: Workload,
    *,
    seconds: float,
    rounds: int,
    programs: Sequence[Program] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Runs rounds of a workload against its servers, each server once in each round, so that other work of the machine
    affects all. `programs` replaces the workload's own servers.

    All servers run at the same time, but only one has load: an idle server costs the others nothing. Servers and load have
    one core each if the platform can pin. ServerError or LoadError if a server does not start or does not answer.
    """
    chosen = []
    for program in programs or workload.servers:
        if program.missing:
            note(f"{workload.name}: without {program.name}: {program.missing}")
        else:
            chosen.append(program)
    allow_descriptors(_DESCRIPTORS)
    results: dict[str, list[Result]] = {program.name: [] for program in chosen}
    passes = 1 if workload.repeatable else rounds
    for _ in range(passes):
        _one_pass(workload, chosen, results, seconds=seconds, rounds=rounds // passes)
    rows = [_row(workload, program.name, results[program.name]) for program in chosen]
    return with_ratios(rows)


def _one_pass(
    workload: Workload, programs: Sequence[Program], results: dict[str, list[Result]], *, seconds: float, rounds: int
) -> None:
    server_core, load_core = cores() or (None, None)
    with ExitStack() as stack:
        running = [stack.enter_context(started(program, core=server_core)) for program in programs]
        for number in range(rounds):
            for server in running[:: -1 if number % 2 else 1]:  # both ways, as the machine drifts
                plan = workload.plan(server, seconds=seconds, core=load_core)
                try:
                    results[server.program.name].append(load(plan))
                except LoadError as error:
                    text = f"{workload.name} against {server.program.name}: {error}{server.last_words()}"
                    raise LoadError(text) from None


def load(plan: Plan) -> Result:
    """Runs the load client once, in its own process."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.load"],
            cwd=ROOT,
            input=pickle.dumps(plan),
            capture_output=True,
            timeout=_START_SECONDS + plan.seconds + plan.warm_up,
        )
    except subprocess.TimeoutExpired:
        raise LoadError("the load client did not end in time") from None
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    if done.returncode or not lines:
        raise LoadError(f"the load client failed: {done.stderr.decode('utf-8', 'replace')[-800:]}")
    answer: dict[str, Any] = json.loads(lines[-1])
    if "error" in answer:
        raise LoadError(answer["error"])
    return Result(**answer)


def value(measure: Measure, result: Result) -> float:
    """The value of a round: microseconds of CPU per unit, KiB per unit, or MiB."""
    match measure:
        case Measure.CPU:
            return result.server_cpu / result.units * 1e6
        case Measure.HELD:
            return result.memory / result.units / 1024
        case Measure.STALLED:
            return result.memory / 2**20


def _row(workload: Workload, server: str, results: Sequence[Result]) -> Row:
    return Row(
        workload=workload.name,
        server=server,
        figure=workload.figure,
        values=tuple(value(workload.measure, result) for result in results),
        per_second=statistics.median(result.units / result.seconds for result in results),
        load_share=max(result.load_share for result in results),
    )


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows of one workload, each with the ratio of its median to that of the second row, which is the floor."""
    if len(rows) < 2:
        return list(rows)
    floor = rows[1]
    return [replace(row, ratio=None if row is floor else ratio(row.median, floor.median)) for row in rows]


def ratio(ours: float, floor: float) -> float | None:
    """The multiple of the floor; None if either is not positive, like the growth of memory that did not grow."""
    return ours / floor if floor > 0 and ours > 0 else None
