"""Writes the plots of docs/explanation/performance.md, from its first table and from docs/reference/attacks.csv, and that of
docs/explanation/costs.md, from docs/reference/stalled-readers.json: `python scripts/write_performance_plots.py`.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TABLE = DOCS / "explanation" / "performance.md"
ATTACKS = DOCS / "reference" / "attacks.csv"
STALLED = DOCS / "reference" / "stalled-readers.json"
FOLDER = DOCS / "pictures"

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts.drawing import picture, text  # noqa: E402

SHOWN_ATTACKS = 6
_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 720, 190, 70, 58, 26
_STYLE = (
    "text { font: 12px system-ui, sans-serif; fill: #111827 } .back { fill: #ffffff } .ours { fill: #1f5fbf } "
    ".other { fill: #9ca3af } .title { font-weight: 600 } @media (prefers-color-scheme: dark) { text { fill: #e5e7eb } "
    ".back { fill: #111827 } .ours { fill: #93b8ea } .other { fill: #6b7280 } }"
)
_AREA_WIDTH, _AREA_HEIGHT, _AREA_LEFT, _AREA_TOP = 500, 260, 60, 82
_LABEL = 16  # the height of a label at the end of a line
_LINES = (
    "text { font: 12px system-ui, sans-serif; fill: #111827 } .back { fill: #ffffff } .title { font-weight: 600 } "
    ".grid { stroke: #e5e7eb } .line { fill: none; stroke-width: 2 } .ours { stroke: #1f5fbf } .other { stroke: #6b7280 } "
    ".second { stroke-dasharray: 6 4 } .end { stroke: #ffffff; stroke-width: 4; paint-order: stroke } "
    "@media (prefers-color-scheme: dark) { text { fill: #e5e7eb } .back { fill: #111827 } .end { stroke: #111827 } "
    ".grid { stroke: #374151 } .ours { stroke: #93b8ea } .other { stroke: #9ca3af } }"
)

Line = tuple[str, list[tuple[float, float]]]
"""The words at the end of a line, and its points."""
Bar = tuple[str, float]


def svg(title: str, unit: str, bars: Sequence[Bar], *, all_ours: bool = False) -> str:
    """A bar for each figure, from 0; those of everywire have a colour of their own."""
    height = _TOP + _ROW * len(bars) + 8
    scale = (_WIDTH - _LEFT - _RIGHT) / max(value for _, value in bars)
    rows = []
    for at, (label, value) in enumerate(bars):
        y = _TOP + _ROW * at
        kind = "ours" if label.startswith("everywire") or all_ours else "other"
        rows += [
            text(_LEFT - 8, y + 13, label, anchor="end"),
            f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{value * scale:.1f}" height="18"/>',
            f'<text x="{_LEFT + value * scale + 6:.1f}" y="{y + 13}">{value:g}</text>',
        ]
    return picture(title, _WIDTH, height, [text(20, 20, title, "title"), text(20, 40, unit), *rows], style=_STYLE)


def lines_svg(title: str, unit: str, measured: str, below: str, lines: Sequence[Line]) -> str:
    """Lines from 0 on both axes, each with its words at its end; those of everywire have a colour of their own."""
    x_end, most = (max(point[axis] for _, line in lines for point in line) for axis in (0, 1))
    x_step, y_step = _step(x_end), _step(most)
    y_end = y_step * math.ceil(most / y_step)
    bottom, height = _AREA_TOP + _AREA_HEIGHT, _AREA_TOP + _AREA_HEIGHT + 52

    def at(x: float, y: float) -> tuple[float, float]:
        return _AREA_LEFT + x / x_end * _AREA_WIDTH, bottom - y / y_end * _AREA_HEIGHT

    parts = []
    for number in range(y_end // y_step + 1):
        x, y = at(0, number * y_step)
        parts.append(f'<path class="grid" d="M{x:.1f} {y:.1f}h{_AREA_WIDTH}"/>')
        parts.append(f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{number * y_step:,g}</text>')
    for number in range(int(x_end // x_step) + 1):
        x, _ = at(number * x_step, 0)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{number * x_step:,g}</text>')
    parts.append(f'<text x="{_AREA_LEFT + _AREA_WIDTH / 2:g}" y="{bottom + 40}" text-anchor="middle">{escape(below)}</text>')
    seen = {"ours": 0, "other": 0}
    for label, line in lines:
        kind = "ours" if label.startswith("everywire") else "other"
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (at(*point) for point in line))
        parts.append(f'<path class="line {kind}{" second" if seen[kind] else ""}" d="M{path}"/>')
        seen[kind] += 1
    lowest = float("inf")
    for (x, y), label in sorted(((at(*line[-1]), label) for label, line in lines), key=lambda end: -end[0][1]):
        lowest = min(y, lowest - _LABEL)
        parts.append(f'<text class="end" x="{x + 8:.1f}" y="{lowest + 4:.1f}">{escape(label)}</text>')
    head = [text(20, 20, title, "title"), text(20, 40, unit), text(20, 58, measured)]
    return picture(title, _WIDTH, height, [*head, *parts], style=_LINES)


def _step(most: float) -> int:
    """A round number of which at most eight make the range."""
    steps: list[int] = [base * 10**power for power in range(9) for base in (1, 2, 5)]
    return next(step for step in steps if most <= 8 * step)


def stalled() -> list[Line]:
    """The growth of each server's memory and of its sockets' send queues in MiB, by the number of clients."""
    lines: list[Line] = []
    for series in json.loads(STALLED.read_text(encoding="utf-8"))["series"]:
        sizes = [(point["readers"], point["memory"] + point["kernel"]) for point in series["points"]]
        grown = [(readers, (size - sizes[0][1]) / 2**20) for readers, size in sizes]
        lines.append((f"{series['server']}, {series['wire']}", grown))
    return lines


def _measured(stored: dict[str, Any]) -> str:
    """The date and the machine of a stored measurement."""
    machine = stored["machine"]
    system = machine["system"].partition("-")[0]
    processor = " ".join(machine["processor"].split()[:2])
    return f"{stored['date']}; {processor}, {machine['cores']} cores, {machine['python']}, {system}"


def tokens() -> list[Bar]:
    """The CPU of a streamed token, from the rows of the first table whose unit is a token."""
    bars: list[Bar] = []
    table = TABLE.read_text(encoding="utf-8").partition("On another machine")[0]
    for name, said, ours, beside in re.findall(r"^\| (w4-[\w-]+): (.*?) \| ([\d.]+) \| (.*) \|$", table, re.MULTILINE):
        if "99th" in said:
            continue
        kind = name.removeprefix("w4-")
        bars.append((f"everywire, {kind}", float(ours)))
        bars += [(f"{peer}, {kind}", float(value)) for peer, value in re.findall(r"([A-Za-z][\w-]*) ([\d.]+)", beside)
                 if peer not in ("of", "rounds")]  # fmt: skip
    return bars


def neighbours() -> list[Bar]:
    """The attacks during which good clients waited longest, by the 99th percentile, with the garbage collector on."""
    with ATTACKS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    waits = [(row["attack"], float(row["kept p50/p99/worst ms"].split("/")[1])) for row in rows if row["gc"] == "on"]
    return sorted(waits, key=lambda bar: -bar[1])[:SHOWN_ATTACKS]


def written() -> dict[Path, str]:
    """The plots, by file."""
    stored = json.loads(STALLED.read_text(encoding="utf-8"))
    machine = ATTACKS.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return {
        FOLDER / "cpu-per-token.svg": svg(
            "CPU of a streamed token",
            "microseconds, less is better; 2026-11-22, AMD EPYC, 2 shared cores, CPython 3.12.1, Linux 6.18",
            tokens(),
        ),
        FOLDER / "neighbour-waits.svg": svg(
            "How long good clients wait during the worst attacks",
            f"milliseconds, 99th percentile; {machine}",
            neighbours(),
            all_ours=True,
        ),
        FOLDER / "memory-stalled-readers.svg": lines_svg(
            "Memory against stalled readers",
            "MiB of the server's processes and of its sockets' send queues, less those without clients",
            _measured(stored),
            f"clients that ask for 8 MiB, read the head and no more; everywire refuses those after {stored['capacity']:,}",
            stalled(),
        ),
    }


if __name__ == "__main__":
    for path, content in written().items():
        path.write_text(content, encoding="utf-8")
