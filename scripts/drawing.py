"""Parts of the pictures that scripts draw: a frame with its title, text, boxes, arrows and brackets, in light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from xml.sax.saxutils import escape

WIDTH = 720
SIZE = 12
STEP = 16
"""Pixels from one line of text to the next."""
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #111827 } .back { fill: #ffffff } .muted { fill: #4b5563 }
.title { font-size: 13px; font-weight: 600 } .bold { font-weight: 600 }
.code { font-family: ui-monospace, monospace; white-space: pre }
.line { stroke: #6b7280; fill: none } .guide { stroke: #9ca3af; stroke-dasharray: 2 3; fill: none }
.flow { stroke: #1f5fbf; fill: none } .credit { stroke: #1b7f3b; fill: none } .dashed { stroke-dasharray: 5 4 }
.tip.line { fill: #6b7280 } .tip.flow { fill: #1f5fbf } .tip.credit { fill: #1b7f3b }
.box { fill: #f3f4f6; stroke: #9ca3af } .empty { fill: none; stroke: #9ca3af; stroke-dasharray: 4 3 }
.blue { fill: #dbe8fa; stroke: #1f5fbf } .green { fill: #dcf3e3; stroke: #1b7f3b }
.amber { fill: #fdeecb; stroke: #a15c00 } .red { fill: #fbe0de; stroke: #b3261e }"""
_DARK = """\
text { fill: #e5e7eb } .back { fill: #111827 } .muted { fill: #aab2be }
.line { stroke: #9ca3af } .guide { stroke: #6b7280 } .flow { stroke: #93b8ea } .credit { stroke: #6fcf8e }
.tip.line { fill: #9ca3af } .tip.flow { fill: #93b8ea } .tip.credit { fill: #6fcf8e }
.box { fill: #1f2937; stroke: #6b7280 } .empty { stroke: #6b7280 }
.blue { fill: #1b3454; stroke: #93b8ea } .green { fill: #163a27; stroke: #6fcf8e }
.amber { fill: #45320f; stroke: #e5b567 } .red { fill: #4c2220; stroke: #f2958f }"""


def picture(title: str, width: int, height: int, parts: Iterable[str], *, style: str) -> str:
    """A picture with its title, its style and a background."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{style}\n</style>",
            f'<rect class="back" width="{width}" height="{height}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def diagram(title: str, height: int, parts: Iterable[str], *, light: str = "", dark: str = "") -> str:
    """A picture in the look of the diagrams, with its title above it. `light` and `dark` are further styles."""
    style = "\n".join(filter(None, [STYLE, light, f"@media (prefers-color-scheme: dark) {{\n{_DARK}", dark, "}"]))
    return picture(title, WIDTH, height, [text(16, 24, title, "title"), *parts], style=style)


def width_of(said: str, *, bold: bool = False) -> float:
    """An estimate of the width of a line, rather too large than too small."""
    return (0.7 if bold else 0.6) * SIZE * len(said.replace("`", ""))


def text(x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text whose words between backticks are code."""
    marks = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    pieces = [f'<tspan class="code">{escape(p)}</tspan>' if at % 2 else escape(p) for at, p in enumerate(said.split("`"))]
    return f'<text x="{x:g}" y="{y:g}"{marks}>{"".join(pieces)}</text>'


def lines(x: float, y: float, said: Iterable[str], kind: str = "", anchor: str = "start") -> Iterator[str]:
    """Lines of text, one below the other."""
    for at, line in enumerate(said):
        yield text(x, y + STEP * at, line, kind, anchor)


def wrapped(said: str, width: float) -> list[str]:
    """The text in as few lines as fit the width, of about the same length. Code that continues on another line has backticks
    on both."""
    best = narrower = _filled(said, width)
    while len(narrower) == len(best) and width > SIZE:
        best, width = narrower, width - SIZE
        narrower = _filled(said, width)
    return best


def _filled(said: str, width: float) -> list[str]:
    rows = [""]
    for word in said.split():
        longer = f"{rows[-1]} {word}".strip()
        if rows[-1] and width_of(longer) > width:
            is_open = rows[-1].count("`") % 2
            rows[-1] += "`" * is_open
            rows.append("`" * is_open + word)
        else:
            rows[-1] = longer
    return rows


def shape(x: float, y: float, w: float, h: float, kind: str = "box") -> str:
    """A rectangle with round corners."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="5"/>'


def box(
    x: float, y: float, w: float, h: float, said: Sequence[str], kind: str = "box", *, named: bool = False
) -> Iterator[str]:
    """A rectangle with lines in its middle; if it is `named`, the first is bold. ValueError if a line is too long."""
    if too_long := [line for line in said if width_of(line, bold=named and line is said[0]) > w]:
        raise ValueError(f"wider than its box of {w:g} pixels: {too_long}")
    yield shape(x, y, w, h, kind)
    top = y + h / 2 + SIZE / 3 - STEP * (len(said) - 1) / 2
    for at, line in enumerate(said):
        yield text(x + w / 2, top + STEP * at, line, "bold" if named and not at else "", "middle")


def arrow(x1: float, y1: float, x2: float, y2: float, kind: str = "line", *, both: bool = False) -> Iterator[str]:
    """An arrow from one point to another, with a tip at its end or at `both` ends."""
    yield f'<path class="{kind}" stroke-width="1.5" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>'
    angle = math.atan2(y2 - y1, x2 - x1)
    yield _tip(x2, y2, angle, kind)
    if both:
        yield _tip(x1, y1, angle + math.pi, kind)


def _tip(x: float, y: float, angle: float, kind: str) -> str:
    sides = (angle + 2.65, angle - 2.65)
    points = [(x, y), *((x + 8 * math.cos(side), y + 8 * math.sin(side)) for side in sides)]
    return f'<polygon class="tip {kind.split()[0]}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}"/>'


def bracket(x1: float, x2: float, y: float, said: Sequence[str], *, below: bool = False) -> Iterator[str]:
    """A span of the horizontal axis with its text above it, or below."""
    end = -5 if below else 5
    yield f'<path class="line" d="M{x1:g} {y + end:g}V{y:g}H{x2:g}V{y + end:g}"/>'
    top = y + SIZE + 4 if below else y - 7 - STEP * (len(said) - 1)
    yield from lines((x1 + x2) / 2, top, said, "", "middle")
