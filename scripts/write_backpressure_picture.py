"""Writes the moving picture of docs/explanation/backpressure.md: `python scripts/write_backpressure_picture.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pictures" / "backpressure.svg"

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts.drawing import picture  # noqa: E402

SECONDS = 12


class Phase(NamedTuple):
    """A part of the story, which begins at `start` seconds."""

    start: float
    caption: str


PHASES = (
    Phase(0, "Both clients read, and both models send."),
    Phase(3, "The first client stops reading."),
    Phase(4.5, "Its window is used up: the server may send it nothing more."),
    Phase(6, "Its queue is full: send() waits, and the model is parked. The neighbour goes on."),
    Phase(10, "The client reads again: window, queue and model go on."),
)
_READS, _WINDOW, _QUEUE, _AGAIN = (phase.start for phase in PHASES[1:])
_BOXES = {"model": 20, "queue": 200, "window": 380, "client": 560}
_WIDTH, _HEIGHT, _BOX, _HOP = 700, 270, 120, 60
_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #111827 }
.back { fill: #ffffff } .box { fill: #f3f4f6; stroke: #6b7280 } .fill { fill: #93b8ea } .dot { fill: #1f5fbf }
.stop { fill: #b3261e } .fill { transform-box: fill-box; transform-origin: left }
.caption { font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb } .back { fill: #111827 } .box { fill: #1f2937; stroke: #9ca3af } .fill { fill: #2c5a9c }
  .dot { fill: #93b8ea } .stop { fill: #f2958f }
}
.phase, .flow { opacity: 0 } .still { opacity: 1 }
.window { transform: scaleX(0) }
.part { transform: scaleX(.3) }
@media (prefers-reduced-motion: no-preference) {"""


def _share(second: float) -> str:
    return f"{100 * second / SECONDS:g}%"


def _shown(name: str, start: float, end: float) -> str:
    """Keyframes of what is seen from one second to another, and not before and after."""
    steps = {0.0: int(start == 0), start: 1, end: 0} if end < SECONDS else {0.0: 0, start: 1, float(SECONDS): 1}
    return f"@keyframes {name} {{ " + " ".join(f"{_share(s)} {{ opacity: {o} }}" for s, o in steps.items()) + " }"


def _hidden(name: str, start: float, end: float) -> str:
    """Keyframes of what is not seen between two seconds."""
    steps = {0: 1, start: 0, end: 1, SECONDS: 1}
    return f"@keyframes {name} {{ " + " ".join(f"{_share(s)} {{ opacity: {o} }}" for s, o in steps.items()) + " }"


def _scaled(name: str, before: float, between: float, during: tuple[float, float]) -> str:
    """Keyframes of a filling that changes during two seconds, and changes back when the client reads again."""
    steps = {0: before, during[0]: before, during[1]: between, _AGAIN: between, _AGAIN + 1: before, SECONDS: before}
    return (
        f"@keyframes {name} {{ " + " ".join(f"{_share(s)} {{ transform: scaleX({x:g}) }}" for s, x in steps.items()) + " }"
    )


def _motion() -> Iterator[str]:
    yield f"@keyframes hop {{ to {{ transform: translateX({_HOP - 10}px) }} }}"
    yield ".dot { animation: hop 1s linear infinite } .still { opacity: 0 }"
    for at, phase in enumerate(PHASES):
        end = PHASES[at + 1].start if at + 1 < len(PHASES) else SECONDS
        yield _shown(f"phase{at}", phase.start, end)
        yield f".phase{at} {{ animation: phase{at} {SECONDS}s step-end infinite }}"
    for name, second in (("client", _READS), ("window", _WINDOW), ("queue", _QUEUE)):
        yield _hidden(f"to-{name}", second, _AGAIN)
        yield f".to-{name} {{ animation: to-{name} {SECONDS}s step-end infinite }}"
        yield _shown(f"no-{name}", second, _AGAIN)
        yield f".no-{name} {{ opacity: 0; animation: no-{name} {SECONDS}s step-end infinite }}"
    yield _scaled("window", 1, 0, (_READS, _WINDOW))
    yield f".window {{ animation: window {SECONDS}s linear infinite }}"
    yield _scaled("queue", 0.3, 1, (_WINDOW, _QUEUE))
    yield f".queue {{ animation: queue {SECONDS}s linear infinite }}"


def _lane(y: int, title: str, *, stops: bool) -> Iterator[str]:
    yield f'<text x="20" y="{y - 10}">{title}</text>'
    for name, x in _BOXES.items():
        yield f'<rect class="box" x="{x}" y="{y}" width="{_BOX}" height="46" rx="6"/>'
        if name in ("queue", "window"):
            kind = name if stops else ("part" if name == "queue" else "")
            yield f'<rect class="fill {kind}" x="{x + 4}" y="{y + 26}" width="{_BOX - 8}" height="14"/>'
        yield f'<text x="{x + _BOX / 2:g}" y="{y + 18}" text-anchor="middle">{name}</text>'
    for name, x in list(_BOXES.items())[1:]:
        flow = f"flow to-{name}" if stops else ""
        yield f'<g class="{flow}"><circle class="dot" cx="{x - _HOP + 5}" cy="{y + 23}" r="5"/></g>'
    if stops:
        for name, x, said in (("client", 560, "does not read"), ("queue", 20, "parked")):
            yield f'<text class="stop no-{name}" x="{x + _BOX / 2:g}" y="{y + 37}" text-anchor="middle">{said}</text>'


def written() -> str:
    """The picture. If the reader wants less motion, it stands still while the first model is parked."""
    parts = [
        *_lane(40, "The client that stops", stops=True),
        *_lane(140, "Its neighbour", stops=False),
        *(
            f'<text class="caption phase phase{at}{" still" * (start == _QUEUE)}" x="20" y="236">{caption}</text>'
            for at, (start, caption) in enumerate(PHASES)
        ),
    ]
    title = "A client that stops reading parks its model; the neighbour goes on"
    return picture(title, _WIDTH, _HEIGHT, parts, style="\n".join([_STYLE, *_motion(), "}"]))


if __name__ == "__main__":
    PICTURE.write_text(written(), encoding="utf-8")
