"""Tables for people and JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.against import Change
from benchmarks.comparison import BUSY, Row
from benchmarks.guard import Verdict
from benchmarks.neighbours import Waits
from benchmarks.units import Unit


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int) -> str:
    """Aligned columns: the first `left` of them to the left, the others, which are numbers, to the right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def number(value: float) -> str:
    """A number with about three significant digits."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def servers_table(rows: Sequence[Row]) -> str:
    """A table of each server's median cost."""
    head = ("workload", "server", "unit", "median", "lowest", "highest", "x floor", "units/s", "load's share")
    lines = [
        (
            row.workload,
            row.server,
            row.figure,
            number(row.median),
            number(min(row.values)),
            number(max(row.values)),
            "-" if row.ratio is None else f"{row.ratio:.2f}",
            number(row.per_second),
            f"{row.load_share:.2f}",
        )
        for row in rows
    ]
    return table(head, lines, left=3)


def warnings(rows: Sequence[Row]) -> list[str]:
    """Warnings about rows in which the load client may have set the pace."""
    return [
        f"{row.workload} against {row.server}: the load client used {row.load_share:.2f} of its core, so that it may have "
        "set the pace; the server's cost for each unit stands"
        for row in rows
        if row.load_share > BUSY
    ]


CHANGE_HEADS = ("workload", "unit", "there", "here", "change %", "spread")


def change_cells(row: Change) -> tuple[str, ...]:
    """The figures of one workload in both checkouts, as CHANGE_HEADS names them."""
    figures = (number(row.there), number(row.here), f"{row.percent:+.1f}", f"{row.spread:.1f}")
    return row.workload, row.figure, *figures


def changes_table(rows: Sequence[Change]) -> str:
    """A table of each workload's cost in both checkouts."""
    return table(CHANGE_HEADS, [change_cells(row) for row in rows], left=2)


def units_table(units: Sequence[Unit]) -> str:
    """Unit costs, ours beside the first floor, and the others after them."""
    head = ("group", "unit", "ours", "floor", "others", "us", "floor us", "x floor")
    lines = []
    for unit in units:
        (ours, cost), (floor, floor_cost), *others = unit.microseconds.items()
        rest = ", ".join(f"{name} {number(other)}" for name, other in others)
        lines.append((unit.group, unit.case, ours, floor, rest, number(cost), number(floor_cost), f"{unit.ratio:.2f}"))
    return table(head, lines, left=5)


def waits_table(rows: Sequence[Waits]) -> str:
    """The waits of good clients, in milliseconds."""
    head = ("load", "connection", "answers", "p50 ms", "p99 ms", "worst ms")
    lines = [
        (row.load, row.connection, str(row.asked), *(number(1000 * s) for s in (row.median, row.p99, row.worst)))
        for row in rows
    ]
    return table(head, lines, left=2)


def verdicts_table(verdicts: Sequence[Verdict]) -> str:
    """A table of the guard's verdicts."""
    head = ("workload", "verdict", "us", "floor us", "x floor", "at most")
    lines = [
        (
            v.workload,
            "holds" if v.holds else "too dear",
            number(v.ours),
            number(v.floor),
            f"{v.ratio:.2f}",
            f"{v.most:.2f}",
        )
        for v in verdicts
    ]
    return table(head, lines, left=2)


def machine() -> dict[str, Any]:
    """A description of this machine and its Python."""
    return {
        "system": f"{platform.system()}-{platform.release()}-{platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def processor() -> str:
    """The processor's name, or its architecture if the system does not report the name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def write_json(file: Path, **content: Any) -> None:
    """Writes a file with the machine and the figures that were measured on it."""
    text = json.dumps({"machine": machine(), **content}, indent=2)
    file.write_text(text + "\n", encoding="utf-8")


def rows_as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every round of every server."""
    return [asdict(row) | {"median": row.median} for row in rows]


def units_as_json(units: Sequence[Unit]) -> list[dict[str, Any]]:
    """Every unit with every contender, ours first."""
    return [{"group": u.group, "unit": u.case, "microseconds": dict(u.microseconds), "ratio": u.ratio} for u in units]
