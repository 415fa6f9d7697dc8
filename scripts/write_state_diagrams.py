"""Writes the pages docs/reference/state-machines*.md and their diagrams: `python scripts/write_state_diagrams.py`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
DIAGRAMS = REFERENCE / "states"

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from gateway.workers.states import TRANSITIONS, State  # noqa: E402
from scripts.explored import Found, Transition, View, Who, explore  # noqa: E402
from scripts.explored_machines import BROKEN, Machine, machines  # noqa: E402

_COMMENT = "<!-- Written by scripts/write_state_diagrams.py from the machines themselves. Do not edit. -->\n"

_FIRST_PAGE = f"""\
{_COMMENT}
# State machines

This page shows the states and transitions of an exchange and of a model's worker. Further pages have those of
[HTTP/1.1](state-machines-http1.md), [HTTP/2](state-machines-http2.md), and
[WebSocket, event streams and BiDi](state-machines-messages.md).

The diagrams are generated from the program: a script gives the real machines all inputs of `scripts/explored_machines.py` in
every state that these reach. Inputs that change no state are left out.

In a diagram each column is a state and each arrow a transition: blue for received input, green for our own output, grey for
neither. *A protocol error* is any input that the machine answers with `RemoteProtocolError`, or on HTTP/2 with a reset of
the stream.
"""

_OTHER_PAGE = f"""\
{_COMMENT}
# State machines of {{wire}}

[The first page](state-machines.md) explains the diagrams and their words.
"""

_PAGES = {
    "http1": ("state-machines-http1.md", "HTTP/1.1"),
    "http2": ("state-machines-http2.md", "HTTP/2"),
    "websocket": ("state-machines-messages.md", "WebSocket, event streams and BiDi"),
    "eventstream": ("state-machines-messages.md", "WebSocket, event streams and BiDi"),
    "bidi": ("state-machines-messages.md", "WebSocket, event streams and BiDi"),
}
"""The page of each machine and the page's wire, by the first word of the machine's name; others are on the first page."""

_STATES_OF_A_WORKER = {
    State.LOADING: "the model is being loaded and warmed up",
    State.READY: "sessions are admitted",
    State.DRAINING: "running sessions may end; no new ones are admitted",
    State.RESTARTING: "the model crashed or ended, and the policy decides or waits",
    State.FAILED: "given up: the model crashed, and is not loaded again",
    State.ENDED: "the model ended by itself, and the policy permits that",
    State.STOPPED: "the worker is over",
}

_COLOURS = {Who.PEER.value: "#1f5fbf", Who.WE.value: "#2e7d32", Who.TIME.value: "#616161"}
_COLUMN, _ROW, _TOP, _MARGIN, _LETTER = 148, 30, 46, 12, 6.6


def svg(title: str, states: Sequence[str], transitions: Sequence[Transition]) -> str:
    """A diagram: a column for each state, a row for each transition, in the order of the states that they leave."""
    column = {state: _MARGIN + _COLUMN * at + _COLUMN // 2 for at, state in enumerate(states)}
    width = 2 * _MARGIN + _COLUMN * len(states)
    rows: list[str] = []
    bands: list[str] = []
    y, before, shaded = _TOP, "", False
    for transition in transitions:
        lines = wrap(", ".join(transition.inputs), int((width - 2 * _MARGIN) / _LETTER))
        height = _ROW + 14 * (len(lines) - 1)
        if transition.start != before:
            before, shaded = transition.start, not shaded
        if shaded:
            bands.append(f'<rect x="0" y="{y}" width="{width}" height="{height}" fill="#f3f4f6"/>')
        rows += _arrow(column[transition.start], column[transition.end], y + height - 8, lines, transition.who, width)
        y += height
    heads = [_head(column[state], state) for state in states]
    lifelines = [
        f'<line x1="{x}" y1="{_TOP - 8}" x2="{x}" y2="{y}" stroke="#c4c8cf" stroke-dasharray="3 3"/>'
        for x in column.values()
    ]
    markers = [
        f'<marker id="{who}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{colour}"/></marker>'
        for who, colour in _COLOURS.items()
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + _MARGIN}" width="{width}" '
            f'height="{y + _MARGIN}" font-family="system-ui, sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            f"<defs>{''.join(markers)}</defs>",
            f'<rect width="{width}" height="{y + _MARGIN}" fill="#ffffff"/>',
            *bands,
            *lifelines,
            *heads,
            *rows,
            "</svg>\n",
        ]
    )


def _head(x: int, state: str) -> str:
    lines = wrap(state, 20)
    top = _TOP - 23 - 6 * (len(lines) - 1)
    text = "".join(
        f'<text x="{x}" y="{top + 13 * at}" text-anchor="middle" font-weight="600" fill="#111827">{escape(line)}</text>'
        for at, line in enumerate(lines)
    )
    place = f'x="{x - _COLUMN // 2 + 4}" y="4" width="{_COLUMN - 8}" height="{_TOP - 12}"'
    box = f'<rect {place} rx="8" fill="#e8eefc" stroke="#4b5563"/>'
    return box + text


def _arrow(start: int, end: int, y: int, lines: Sequence[str], who: str, width: int) -> list[str]:
    colour = _COLOURS[who]
    path = f"M{start} {y - 8} h24 v8 h-22" if start == end else f"M{start} {y} H{end - 1 if end > start else end + 1}"
    # above the arrow's left end, or as far left of it as the page demands
    longest = max(map(len, lines)) * _LETTER
    left = max(_MARGIN, min(min(start, end) + (6 if end > start else 34 if end == start else 20), width - _MARGIN - longest))
    texts = [
        f'<text x="{left:.0f}" y="{y - 5 - 14 * (len(lines) - 1 - at)}" {paint}>{escape(line)}</text>'
        for at, line in enumerate(lines)
        for paint in ('stroke="#ffffff" stroke-width="3" stroke-opacity="0.85"', f'fill="{colour}"')  # a halo, then the text
    ]
    dot = f'<circle cx="{start}" cy="{y if start != end else y - 8}" r="3" fill="{colour}"/>'
    return [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6" marker-end="url(#{who})"/>', dot, *texts]


def worker_transitions() -> list[Transition]:
    """Those of a worker, from its own table."""
    return [
        Transition(start=start.value, end=end.value, who=Who.TIME.value, inputs=(why,))
        for start, ends in TRANSITIONS.items()
        for end, why in ends.items()
    ]


def _rows(transitions: Sequence[Transition]) -> list[str]:
    rows = ["| from | to | by | received or sent |", "| --- | --- | --- | --- |"]
    return rows + [f"| {t.start} | {t.end} | {', '.join(t.inputs)} | {t.who} |" for t in transitions]


def _states(view: View[object], found: Found) -> list[str]:
    heads = [
        "state",
        "meaning",
        *(["may be sent"] * (Who.WE in view.tells)),
        *(["the peer may not send"] * (Who.PEER in view.tells)),
    ]
    rows = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for state, meaning in view.states.items():
        cells = [state, meaning]
        if Who.WE in view.tells:
            cells.append(", ".join(found.may_send[state]) or "nothing")
        if Who.PEER in view.tells:
            cells.append(", ".join(name for name in found.never[state] if name != BROKEN))
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _section(machine: Machine, found: Mapping[str, Found], drawn: dict[str, str]) -> list[str]:
    lines = [f"## {machine.title}", "", *wrap(f"{machine.about} (`{machine.source}`)", 130, break_on_hyphens=False), ""]
    for view in machine.views:
        result = found[view.name]
        title = f"{machine.title}: {view.title}"
        drawn[f"{view.name}.svg"] = svg(title, list(view.states), result.transitions)
        heading = [f"### {title}", ""] if len(machine.views) > 1 else []
        lines += [
            *heading,
            f"![{title}](states/{view.name}.svg)",
            "",
            *_states(view, result),
            "",
            *_rows(result.transitions),
            "",
        ]
    return lines


def written() -> dict[Path, str]:
    """Each file with its text."""
    drawn: dict[str, str] = {}
    lines = [_FIRST_PAGE]
    pages = {"state-machines.md": lines}
    for machine in machines():
        page, wire = _PAGES.get(machine.name.partition("-")[0], ("state-machines.md", ""))
        section = _section(machine, explore(machine.make, machine.inputs, machine.key, machine.views), drawn)
        pages.setdefault(page, [_OTHER_PAGE.format(wire=wire)]).extend(section)
    transitions = worker_transitions()
    title = "A model's worker"
    drawn["worker.svg"] = svg(title, [state.value for state in _STATES_OF_A_WORKER], transitions)
    lines += [
        f"## {title}",
        "",
        "`Worker` (`gateway/workers/states.py`). [Workers](../explanation/workers.md) has its restart policy.",
        "",
        "A worker is *lasting* if its model is configured: it stays, as failed, when the model is given up. The worker of a "
        "model from a folder stops then. If a model is added while the server runs, its worker stops if the first load "
        "fails.",
        "",
        f"![{title}](states/worker.svg)",
        "",
        "| state | meaning |",
        "| --- | --- |",
        *(f"| {state.value} | {meaning} |" for state, meaning in _STATES_OF_A_WORKER.items()),
        "",
        "| from | to | by |",
        "| --- | --- | --- |",
        *(f"| {t.start} | {t.end} | {', '.join(t.inputs)} |" for t in transitions),
        "",
    ]
    texts = {REFERENCE / page: "\n".join(lines) for page, lines in pages.items()}
    return texts | {DIAGRAMS / name: text for name, text in drawn.items()}


if __name__ == "__main__":
    DIAGRAMS.mkdir(exist_ok=True)
    texts = written()
    for old in set(DIAGRAMS.glob("*.svg")) - set(texts):
        old.unlink()
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
