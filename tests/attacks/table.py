"""The results as a table: for a terminal, and as the CSV file of the documentation, of which its page has a summary."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.good import CLIENTS, Waits
from tests.attacks.run import MiB, Row

_KINDS = tuple(CLIENTS)
HEADS = (
    "attack", "gc", *(f"{kind} p50/p99/worst ms" for kind in _KINDS), "failed", "MiB peak", "MiB after", "CPU s", "log KiB",
    "ended by", "stop s",
)  # fmt: skip
MORE = ("loop p99/worst ms", "MiB second", "large objects")
"""The CPU time of the server's loop while a good request waited, the worst of the kinds; what a second round has added to what
stays, where that is more than the attack's limit; and the large objects that were there then."""


def cells(row: Row) -> tuple[str, ...]:
    """The figures of one row, as HEADS names them."""
    good = {waits.connection: waits for waits in row.good}
    times = (
        "/".join(f"{value * 1000:.0f}" for value in (waits.median, waits.p99, waits.worst))
        if (waits := good.get(kind))
        else ""
        for kind in _KINDS
    )
    failed = sum(waits.failed for waits in row.good)
    figures = (failed, f"{row.peak / MiB:.0f}", f"{row.after / MiB:.0f}", f"{row.cpu:.1f}", f"{row.log_bytes / 1024:.0f}")
    stop = f"{row.stop:.1f}" if row.alive else "died"
    return (row.attack, "on" if row.collector else "off", *times, *map(str, figures), ended_by(row), stop)


def more_cells(row: Row) -> tuple[str, ...]:
    """The figures that only the terminal shows, as MORE names them."""
    good = row.good or (Waits(load="", connection="", asked=0, median=0, p99=0, worst=0),)
    loop = f"{max(waits.loop_p99 for waits in good) * 1000:.0f}/{max(waits.loop_worst for waits in good) * 1000:.0f}"
    return (loop, "-" if row.second is None else f"{row.second / MiB:+.0f}", ", ".join(row.large[:3]) or "-")


def ended_by(row: Row) -> str:
    """The ways in which the attack's connections ended, most frequent first, with how many frames and seconds the longest of
    the most frequent had."""
    if not row.ends:
        return "-"
    ways = sorted(row.ends.items(), key=lambda way: -way[1])
    told = ", ".join(f"{by} x {count}" for by, count in ways[:3]) + (" ..." if len(ways) > 3 else "")
    longest = [ended for ended in row.endings if ended.by == ways[0][0]]
    if not longest:
        return told
    frames, seconds = max(ended.frames for ended in longest), max(ended.seconds for ended in longest)
    return f"{told} (<= {frames} frames, {seconds:.2f} s)"


def text(rows: Sequence[Row]) -> str:
    """For a terminal."""
    return report.table((*HEADS, *MORE), [(*cells(row), *more_cells(row)) for row in rows], left=2)


def as_csv(rows: Sequence[Row], machine: Mapping[str, Any]) -> str:
    """The figures for the documentation, below a line with the day and the machine, as the benchmarks' report names it."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = io.StringIO()
    text.write(f"# {today}; {machine['processor']}, {machine['cores']} cores, {machine['python']}, {machine['system']}\n")
    csv.writer(text, lineterminator="\n").writerows([HEADS, *map(cells, rows)])
    return text.getvalue()


def summary(figures: str, what: Mapping[str, str]) -> str:
    """The table of the page: `what` each attack does, and the larger of its figures with the collector on and off."""
    rows = list(csv.DictReader(figures.splitlines()[1:]))
    lines = ["| attack | description | p99 ms | worst ms | failed | MiB after |", "|" + " --- |" * 6]
    for name in sorted({row["attack"] for row in rows}):
        runs = [row for row in rows if row["attack"] == name]
        waits = [row[head].split("/") for row in runs for head in HEADS if "p50" in head and row[head]]
        p99, worst = (max((int(wait[at]) for wait in waits), default=0) for at in (1, 2))
        others = (max(int(row[head]) for row in runs) for head in ("failed", "MiB after"))
        lines.append(f"| {name} | {what[name]} | {' | '.join(map(str, (p99, worst, *others)))} |")
    return "\n".join(lines)
