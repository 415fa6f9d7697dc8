"""The table against the last release that is kept in the documentation, so that a slow drift is a line in a diff."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks import report
from benchmarks.against import Change
from benchmarks.checkouts import release
from benchmarks.costs import line
from benchmarks.servers import ROOT

PAGE = ROOT / "docs" / "reference" / "against-release.md"
HEADING = "## Figures\n\n"


def write(changes: Sequence[Change], *, there: str, here: str, seconds: float, rounds: int, load: float) -> None:
    """Writes the figures into the page, in place of those that are there. They are the end of the page. `load` is the load
    average before the run."""
    machine, (tag, _) = report.machine(), release()
    system = " ".join(machine["system"].split("-")[:2])
    told = (
        f"{time.strftime('%Y-%m-%d')}; {machine['processor']}, {machine['cores']} cores, {machine['python']}, {system}; "
        f"{rounds} rounds of {seconds:g} s; load average before {load:.1f}.\nThere: {tag}, {there}. Here: {here}."
    )
    heads = report.CHANGE_HEADS
    rows = [line(heads), line(["---"] * len(heads)), *(line(report.change_cells(change)) for change in changes)]
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    PAGE.write_text(f"{before}{HEADING}{told}\n\n" + "\n".join(rows) + "\n", encoding="utf-8")
