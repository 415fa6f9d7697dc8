"""Writes the plots of docs/howto/plan-capacity.md from docs/howto/fleet/figures.json: `python scripts/write_fleet_plots.py`.

With `--play` it plays the fleet first, and writes its figures too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "howto" / "fleet"
FIGURES = FOLDER / "figures.json"

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from gateway.cli.simulate_fleet import LOAD, fleet_for  # noqa: E402
from gateway.testing.fleet.record import EACH, FleetRecord  # noqa: E402
from gateway.testing.fleet.scenarios import play  # noqa: E402

SEED = 7


class Line(NamedTuple):
    """A line of a plot: what is played, and which of its figures is drawn."""

    label: str
    scenario: str
    figure: str
    changed: dict[str, Any]


class Plot(NamedTuple):
    """`unit` is what is drawn upwards, from 0 to `top`; seconds of the fleet's clock are drawn from `first` to `last`."""

    title: str
    unit: str
    top: float
    first: int
    last: int
    lines: tuple[Line, ...]


PLOTS = {
    "age": Plot(
        "A fifth of the pods is new, and ready at 90 s",
        "emptiest pod, relative to the mean of its cell", 1.0, 0, 840,
        (
            Line("connection_age 600", "age", "emptiest_pod", {}),
            Line("connection_age 0", "age", "emptiest_pod", {"age": 0}),
        ),
    ),
    "zone": Plot(
        "A zone or a cell is lost at 60 s, and is back at 390 s",
        "load of the fullest cell", 0.8, 0, 1140,
        (Line("a zone", "zone", "fullest", {}), Line("a cell", "cell", "fullest", {})),
    ),
    "rollout": Plot(
        "Every pod is replaced from 60 s on, 10 per cell at once, one cell first",
        "clients that connect, in thousands per second", 3.0, 0, 1740,
        (Line("clients", "rollout", "came", {}),),
    ),
    "storm": Plot(
        "All connections and models are lost at 60 s, and models are back at 90 s",
        "clients that connect, in thousands per second", 180.0, 55, 105,
        (
            Line("without jitter", "storm", "came", {"jitter": 0.0}),
            Line("with jitter", "storm", "came", {}),
        ),
    ),
    "echo": Plot(
        "The same, one connection age later",
        "clients that connect, in thousands per second", 10.0, 560, 760,
        (
            Line("without jitter", "storm", "came", {"jitter": 0.0}),
            Line("with jitter", "storm", "came", {}),
        ),
    ),
}  # fmt: skip
_COLOURS = ("#1f5fbf", "#b3261e")
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 260, 56, 46, 32, 40
_STEPS = 4


def figures() -> dict[str, list[list[float]]]:
    """Plays what the plots show: for each of them its lines."""
    return {name: [_played(line, plot) for line in plot.lines] for name, plot in PLOTS.items()}


def _played(line: Line, plot: Plot) -> list[float]:
    record: FleetRecord = play(line.scenario, replace(fleet_for(LOAD), **line.changed), SEED).record
    values = getattr(record, line.figure)
    by = 1000 if "thousands" in plot.unit else 1
    each = EACH if len(values) < len(record.came) else 1
    return [round(value / by, 3) for value in values[plot.first // each : plot.last // each]]


def svg(plot: Plot, lines: Sequence[Sequence[float]]) -> str:
    """The plot as a picture."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
            'font-family="system-ui, sans-serif" font-size="12" fill="#111827">',
            f"<title>{escape(plot.title)}</title>",
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
            f'<text x="{_LEFT}" y="18" font-weight="600">{escape(plot.title)}</text>',
            f'<text x="{_LEFT}" y="36">{escape(plot.unit)}</text>',
            *_axes(plot),
            *_drawn(plot, lines),
            "</svg>\n",
        ]
    )


def _x(plot: Plot, second: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (second - plot.first) / (plot.last - plot.first)


def _y(plot: Plot, value: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(value, plot.top) / plot.top


def _axes(plot: Plot) -> Iterator[str]:
    for step in range(_STEPS + 1):
        value = plot.top * step / _STEPS
        y = _y(plot, value)
        yield f'<line x1="{_LEFT}" y1="{y:.0f}" x2="{_WIDTH - _RIGHT}" y2="{y:.0f}" stroke="#e5e7eb"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{value:g}</text>'
        second = plot.first + (plot.last - plot.first) * step / _STEPS
        x = _x(plot, second)
        yield f'<text x="{x:.0f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{second:g} s</text>'


def _drawn(plot: Plot, lines: Sequence[Sequence[float]]) -> Iterator[str]:
    for at, (line, values) in enumerate(zip(plot.lines, lines, strict=True)):
        each = (plot.last - plot.first) / len(values)
        points = " ".join(f"{_x(plot, plot.first + n * each):.1f},{_y(plot, value):.1f}" for n, value in enumerate(values))
        yield f'<polyline points="{points}" fill="none" stroke="{_COLOURS[at]}" stroke-width="1.5"/>'
        if len(lines) > 1:
            x = _WIDTH - _RIGHT - 170 * (len(lines) - at)
            yield f'<line x1="{x}" y1="32" x2="{x + 20}" y2="32" stroke="{_COLOURS[at]}" stroke-width="2"/>'
            yield f'<text x="{x + 26}" y="36">{escape(line.label)}</text>'


def written() -> dict[Path, str]:
    """The plots of the stored figures, by file."""
    stored = json.loads(FIGURES.read_text(encoding="utf-8"))
    return {FOLDER / f"{name}.svg": svg(plot, stored[name]) for name, plot in PLOTS.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    if "--play" in sys.argv[1:]:
        rows = (f"{json.dumps(name)}: {json.dumps(lines)}" for name, lines in figures().items())
        FIGURES.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
