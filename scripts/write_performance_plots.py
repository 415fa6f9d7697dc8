"""Writes the plots of docs/explanation/performance.md, from its first table and from docs/reference/attacks.csv:
`python scripts/write_performance_plots.py`.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TABLE = DOCS / "explanation" / "performance.md"
ATTACKS = DOCS / "reference" / "attacks.csv"
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
    }


if __name__ == "__main__":
    for path, content in written().items():
        path.write_text(content, encoding="utf-8")
