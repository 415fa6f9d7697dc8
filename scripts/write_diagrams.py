"""Writes the diagrams of the documentation to docs/pictures: `python scripts/write_diagrams.py`.

Values come from the repository: defaults of settings, the console's words and colours, the form of the access line, the
times of the Kubernetes manifest, and the tables of docs/reference/endings.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
ENDINGS = ROOT / "docs" / "reference" / "endings.md"
CONSOLE = ROOT / "gateway" / "operator" / "console"
DEPLOYMENT = ROOT / "deploy" / "kubernetes" / "base" / "deployment.yaml"

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from gateway.config import Config  # noqa: E402
from gateway.config.text import written_size  # noqa: E402
from gateway.dialects.grpc.status import code_of  # noqa: E402
from gateway.errors import DeadlineExceeded, Drained, GatewayError, ModelFailed  # noqa: E402
from gateway.serving.drain import _GRACE  # noqa: E402
from gateway.telemetry.account import PARTS  # noqa: E402
from gateway.telemetry.log_text import access_line  # noqa: E402
from scripts.drawing import STEP, arrow, box, bracket, diagram, lines, shape, text, wrapped  # noqa: E402

_LEFT, _RIGHT = 16, 704
CONFIG = Config()


def default(name: str) -> str:
    """The default of a setting, as people write it: `64 KiB`, `30 s`."""
    section, field = name.split(".")
    value = getattr(getattr(CONFIG, section), field)
    return written_size(value).strip('"') if isinstance(value, int) else f"{value:g} s"


# -- the parts of a gateway ----------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A box on the path of a request: its name, its folder, the package it belongs to, and its left and right edge."""

    name: str
    folder: str
    kind: str
    left: int
    right: int

    @property
    def middle(self) -> float:
        """The horizontal middle of the box."""
        return (self.left + self.right) / 2


_GATEWAY, _PROTOCOLS, _MODELS, _YOURS = "blue", "green", "amber", "empty"
_PATH = (
    Place("client", "", "box", 16, 76),
    Place("Transport", "net/", _GATEWAY, 102, 186),
    Place("Connection", "core/ wires/", _GATEWAY, 212, 304),
    Place("Exchange", "core/", _GATEWAY, 330, 410),
    Place("Dialect", "dialects/", _GATEWAY, 436, 512),
    Place("Session", "models/", _MODELS, 538, 606),
    Place("model", "your code", _YOURS, 632, 704),
)


def architecture() -> str:
    """The path of a request through the packages, and what carries credit back."""
    return diagram("The path of a request", 346, _architecture())


def _architecture() -> Iterator[str]:
    at = {place.name: place for place in _PATH}
    connection, dialect, model = at["Connection"], at["Dialect"], at["model"]
    yield text(360, 52, "credit: the model receives, so the client may send more", "", "middle")
    yield from arrow(_RIGHT, 60, _LEFT, 60, "credit dashed")
    yield text(360, 82, "room: the client reads, so the model may send more", "", "middle")
    yield from arrow(_LEFT, 90, _RIGHT, 90, "credit dashed")
    yield from bracket(_LEFT, connection.middle - 4, 122, ["bytes of a connection"])
    yield from bracket(connection.middle + 4, dialect.middle - 4, 122, ["bytes of one request"])
    yield from bracket(dialect.middle + 4, _RIGHT, 122, ["messages"])
    for place in _PATH:
        said = [place.name, place.folder] if place.folder else [place.name]
        yield from box(place.left, 134, place.right - place.left, 46, said, place.kind, named=True)
    for one, other in pairwise(_PATH):
        yield from arrow(one.right + 3, 157, other.left - 3, 157, "flow", both=True)
    yield from box(connection.middle - 96, 214, 192, 46, ["Machine", "http1, http2, websocket"], _PROTOCOLS, named=True)
    yield from box(dialect.middle - 80, 214, 160, 46, ["Codec", "aws, v2, lmi, openai"], _PROTOCOLS, named=True)
    yield from box(580, 214, _RIGHT - 580, 46, ["Worker", "workers/: slots"], _GATEWAY, named=True)
    for place in (connection, dialect):
        yield from arrow(place.middle, 183, place.middle, 211, "line", both=True)
    yield from arrow(model.middle, 211, model.middle, 183)
    yield from bracket(102, connection.middle + 96, 272, ["one task for all connections"], below=True)
    yield from bracket(dialect.middle - 80, _RIGHT, 272, ["one task for each exchange"], below=True)
    x = _LEFT
    for kind, said in (
        (_GATEWAY, "gateway/: sockets and tasks"),
        (_PROTOCOLS, "protocols/: no input or output"),
        (_MODELS, "models/: interface of models"),
    ):
        yield shape(x, 318, 14, 14, kind)
        yield text(x + 21, 329, said)
        x += 240


# -- the places of bytes -------------------------------------------------------------------------------------------------


class Hop(NamedTuple):
    """A place where bytes wait: its name, its bounds, and what happens when it is full."""

    name: str
    bounds: Sequence[str]
    full: str
    kernel: bool = False


def _answer() -> Sequence[Hop]:
    return (
        Hop(
            "The queue of the stream",
            [f"`limits.send_buffer` {default('limits.send_buffer')},", "or one larger message"],
            "full: `send` waits, the model is parked",
        ),
        Hop(
            "HTTP/2: the queues of a connection",
            [f"`limits.connection_send_buffer` {default('limits.connection_send_buffer')}"],
            "full: `send` waits",
        ),
        Hop(
            "The kernel",
            [f"`limits.unsent` {default('limits.unsent')} ahead of the client"],
            "full: the connection waits, no task does",
            kernel=True,
        ),
        Hop(
            "The kernel of the client",
            ["its receive buffer; HTTP/2: its window too"],
            "full: it allows no more bytes",
            kernel=True,
        ),
    )


def _request() -> Sequence[Hop]:
    return (
        Hop(
            "A whole body, a large frame, one part",
            ["`limits.body`, `websocket.part`, `limits.part`"],
            "larger: it is refused",
        ),
        Hop(
            "HTTP/1.1, WebSocket: what was read ahead",
            [f"`limits.read_ahead` {default('limits.read_ahead')} and one read"],
            "full: the socket is not read",
        ),
        Hop(
            "HTTP/2: the window of the stream",
            [
                f"`http2.initial_window` {default('http2.initial_window')}, doubling up to",
                f"`http2.max_window` {default('http2.max_window')}",
            ],
            "full: no WINDOW_UPDATE",
        ),
        Hop("The kernel", ["its own receive buffer"], "full: TCP's window is closed", kernel=True),
    )


_TOP, _BOTTOM, _COLUMN = 100, 460, 336


def where_bytes_wait() -> str:
    """The places where bytes wait, in both directions, with the settings that bound them."""
    return diagram("Where the bytes of a stream wait", 568, _where_bytes_wait())


def _where_bytes_wait() -> Iterator[str]:
    right = _RIGHT - _COLUMN
    yield from _end(40, "model", "`send` returns when its bytes have room", "`receive` takes bytes and gives credit back")
    yield from _end(_BOTTOM + 26, "client", "reads, or does not", "writes, until it has no window or room")
    yield from _hops(_LEFT, _answer(), ["and", "down", "down"], down=True)
    yield from _hops(right, _request(), ["up", "or", "up"], down=False)
    for x, said in ((_LEFT, "The answer goes down"), (right, "The request goes up")):
        yield text(x + _COLUMN - 12, 93, said, "bold", "end")
    x = _LEFT
    for kind, said in (("blue", "in the gateway"), ("box", "in a kernel")):
        yield shape(x, 542, 14, 14, kind)
        yield text(x + 21, 553, said)
        x += 136
    for kind, said in (("flow", "bytes"), ("credit dashed", "room or credit: what starts them again")):
        yield from arrow(x, 549, x + 30, 549, kind)
        yield text(x + 38, 553, said)
        x += 106


def _end(y: float, name: str, one: str, other: str) -> Iterator[str]:
    yield shape(_LEFT, y, _RIGHT - _LEFT, 36, "empty")
    yield text(360, y + 22, name, "bold", "middle")
    yield text(_LEFT + 12, y + 22, one)
    yield text(_RIGHT - 12, y + 22, other, "", "end")


def _hops(x: float, hops: Sequence[Hop], between: Sequence[str], *, down: bool) -> Iterator[str]:
    heights = [STEP * (2 + len(hop.bounds)) + 14 for hop in hops]
    gap = (_BOTTOM - _TOP - sum(heights)) / (len(hops) - 1)
    tops = [top + gap * at for at, top in enumerate(accumulate(heights, initial=_TOP))]
    yield from _both_ways(x, 79, _TOP - 3, down=down)
    for top, height, hop in zip(tops, heights, hops, strict=False):
        yield shape(x, top, _COLUMN, height, "box" if hop.kernel else "blue")
        yield text(x + 12, top + 19, hop.name, "bold")
        yield from lines(x + 12, top + 19 + STEP, hop.bounds)
        yield text(x + 12, top + height - 11, hop.full, "muted")
    for top, height, said in zip(tops, heights, between, strict=False):
        if said in ("up", "down"):
            yield from _both_ways(x, top + height + 3, top + height + gap - 3, down=down)
        else:
            yield text(x + 30, top + height + gap / 2 + 4, said, "", "middle")
    yield from _both_ways(x, _BOTTOM + 3, _BOTTOM + 23, down=down)


def _both_ways(x: float, top: float, bottom: float, *, down: bool) -> Iterator[str]:
    """The arrow of the bytes, and beside it that of the credit."""
    for at, kind, falls in ((x + 24, "flow", down), (x + 40, "credit dashed", not down)):
        yield from arrow(at, top if falls else bottom, at, bottom if falls else top, kind)


# -- the life of a request -----------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """A time of the request, in seconds, and its name."""

    start: float
    end: float
    name: str


_LIFE = (
    Span(0.0, 0.6, "begin"),
    Span(0.6, 1.6, "input"),
    Span(1.6, 2.8, "slot"),
    Span(2.8, 4.8, "model"),
    Span(4.8, 6.6, "room"),
    Span(6.6, 7.4, "model"),
    Span(7.4, 8.0, "flush"),
)
_FIRST = 3.3
_CLIENT = (Span(0.0, 1.6, "sends"), Span(_FIRST, 4.2, "reads"), Span(4.2, 6.6, "does not read"), Span(6.6, 8.0, "reads"))
_MODEL = (Span(1.6, 2.8, "queued"), Span(2.8, 4.8, "sends items"), Span(4.8, 6.6, "parked in `send`"),
          Span(6.6, 7.4, "sends"))  # fmt: skip
_AXIS, _SECOND = 88, 77


def life_seconds() -> dict[str, float]:
    """The seconds of the drawn request in each part, in the order of the access line."""
    return {part: round(sum(span.end - span.start for span in _LIFE if span.name == part), 3) for part in PARTS}


def words_of_parts() -> dict[str, str]:
    """The console's words for each part, in the order in which the console draws them."""
    source = (CONSOLE / "figures.mjs").read_text(encoding="utf-8")
    words = dict(re.findall(r'^  (\w+): "(.+)",$', source.partition("PART_WORDS = {")[2].partition("}")[0], re.MULTILINE))
    order = re.search(r"PARTS = \[(.+?)\]", source)
    assert order is not None
    return {part: words[part] for part in re.findall(r'"(\w+)"', order[1])}


def _colours() -> tuple[str, str]:
    """The console's colours of the parts as styles, for light and for dark."""
    source = (CONSOLE / "console.css").read_text(encoding="utf-8")
    found = {part: re.search(rf"--{part}: light-dark\((#\w+), (#\w+)\)", source) for part in PARTS}
    light, dark = (" ".join(f".{part} {{ fill: {m[at]} }}" for part, m in found.items() if m) for at in (1, 2))
    return light, dark


def request_life() -> str:
    """A request from its head to its last byte, with the six parts of its time."""
    light, dark = _colours()
    return diagram("The life of a request, and the parts of its time", 350, _request_life(), light=light, dark=dark)


def _x(second: float) -> float:
    return _AXIS + _SECOND * second


def _request_life() -> Iterator[str]:
    for second in sorted({span.start for span in _LIFE} | {_LIFE[-1].end}):
        yield f'<path class="guide" d="M{_x(second):g} 42V152"/>'
    for y, name, spans in ((44, "client", _CLIENT), (80, "model", _MODEL)):
        yield text(_LEFT, y + 18, name, "bold")
        for span in spans:
            left, width = _x(span.start) + 1, _SECOND * (span.end - span.start) - 2
            yield from box(left, y, width, 26, [span.name], "red" if span.name == "does not read" else "box")
    yield text(_LEFT, 138, "parts", "bold")
    for span in _LIFE:
        yield _bar(_x(span.start), 120, span.end - span.start, span.name)
        middle = _x((span.start + span.end) / 2)
        yield text(middle, 166, span.name, "bold", "middle")
        yield text(middle, 182, f"{span.end - span.start:.1f} s", "muted", "middle")
    seconds, words = life_seconds(), words_of_parts()
    yield text(_LEFT, 223, "console", "bold")
    starts = accumulate((seconds[part] for part in words), initial=0.0)
    for start, part in zip(starts, words, strict=False):
        yield _bar(_x(start), 206, seconds[part], part)
    for at, (part, said) in enumerate(words.items()):
        x, y = _AXIS + 210 * (at % 3), 246 + 22 * (at // 3)
        yield f'<rect class="{part}" x="{x}" y="{y}" width="12" height="12" rx="2"/>'
        yield text(x + 19, y + 10, f"{part}: {said}")
    yield text(_LEFT, 314, "log", "bold")
    yield from lines(_AXIS, 314, [f"`{line}`" for line in _log_lines(seconds)])


def _bar(x: float, y: float, seconds: float, part: str) -> str:
    return f'<rect class="{part}" x="{x + 1:g}" y="{y}" width="{_SECOND * seconds - 2:g}" height="28" rx="3"/>'


def _log_lines(seconds: dict[str, float]) -> list[str]:
    """The begin of the request's access line, in pieces that fit the picture."""
    fields = {
        "status": 200, "ending": "complete", "model": "chat", "ms": 1000 * sum(seconds.values()), "ms_first": 1000 * _FIRST,
        "items_in": 1, "items_out": 180, "bytes_in": 300, "bytes_out": 9216, "method": "POST", "path": "/invocations",
        "dialect": "lmi", "wire": "http/1.1", "peer": "127.0.0.1:50150", "id": "35022308-1",
    }  # fmt: skip
    parts = {f"ms_{part}": 1000 * taken for part, taken in seconds.items()}
    pieces = access_line("05:56:34", {**fields, **parts}, colour=False, most=300).split("  ")
    return ["  ".join(pieces[:2]), f"{pieces[2]} …"]


# -- one ending on each wire ---------------------------------------------------------------------------------------------


class WireEnd(NamedTuple):
    """The end of a stream on one wire, from a row of the page: `error` after the first bytes, and then `end`."""

    wire: str
    before: str
    error: str
    end: str

    @property
    def group(self) -> str:
        """The heading below which the wire stands."""
        if self.error.startswith("none"):
            return _DOCUMENT
        if "cut off" in self.end:
            return _CUT
        return _TOLD if self.end.endswith("regular end of the body") else _OWN


_TOLD = "The error is the last message of the body"
_OWN = "The error ends the stream in the form of the protocol"
_CUT = "The body may have no place for an error"
_DOCUMENT = "The answer is one document: it has not begun, so the error has a status of its own"
_ERROR = 222
_CAUSES = (ModelFailed("", code="", status=424), DeadlineExceeded(""), Drained(""))


def _rows(heading: str) -> list[list[str]]:
    """The rows of a table of the page, by its heading's first cell; links are only their text."""
    page = ENDINGS.read_text(encoding="utf-8")
    table = page.split(f"\n| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[re.sub(r"\[(.+?)\]\(.+?\)", r"\1", cell).strip() for cell in row.strip("| ").split(" | ")] for row in table]


def wire_ends() -> list[WireEnd]:
    """The end of each wire that the page has."""
    found = []
    for wire, _, before, after in _rows("wire"):
        error, _, end = after.rpartition(", then ") if ", then " in after else after.rpartition("; otherwise ")
        if not error:
            error, end = (end, "") if "cut off" not in end else ("", end)
        found.append(WireEnd(wire, before, error, end))
    return found


def causes(errors: Sequence[GatewayError] = _CAUSES) -> list[tuple[str, str, str, str]]:
    """For each error: what happened, and how BiDi, gRPC and a WebSocket name it after the first bytes."""
    rows = {row[0].strip("`"): row for row in _rows("error")}
    found = []
    for error in errors:
        _, happened, _, _, bidi, close = rows[type(error).__name__]
        found.append((happened, bidi, f"`{code_of(error).name}`", f"Close {close}"))
    return found


def endings() -> str:
    """The end of a broken stream on each wire."""
    parts = list(_endings())
    height = max(int(found[1]) for part in parts if (found := re.search(r'<text x="[\d.]+" y="(\d+)', part))) + 22
    return diagram("What the client of each wire gets when a stream breaks off", height, parts)


def _endings() -> Iterator[str]:
    ends, y = wire_ends(), 52
    for group in (_TOLD, _OWN, _CUT, _DOCUMENT):
        yield text(_LEFT, y, group, "muted")
        y += 10
        for end in ends:
            if end.group == group:
                yield from _row(end, y)
                y += 42
        y += 22
    yield from _caused(y + 4)


def _row(end: WireEnd, y: int) -> Iterator[str]:
    yield text(_LEFT, y + 22, end.wire, "bold")
    if end.group == _DOCUMENT:
        yield from box(_ERROR, y, _RIGHT - _ERROR, 36, [end.before], "red")
        return
    for at in range(3):
        yield shape(164 + 18 * at, y + 11, 14, 14, "blue")
    if not (end.error and end.end):
        yield from box(_ERROR, y, _RIGHT - _ERROR, 36, wrapped(end.error or end.end, 470), "red")
        return
    yield from box(_ERROR, y, 312, 36, wrapped(end.error, 308), "red")
    if end.group == _CUT:
        yield from box(544, y, 160, 36, wrapped(f"or {end.end}", 152), "red")
    else:
        yield from box(544, y, 160, 36, wrapped(end.end.removeprefix("the "), 152))


def _caused(y: int) -> Iterator[str]:
    columns = (_LEFT, 232, 440, 600)
    for x, said in zip(columns, ("cause", "BiDi", "gRPC", "WebSocket"), strict=True):
        yield text(x, y, said, "bold")
    for cause in causes():
        y += 10
        yield f'<path class="line" d="M{_LEFT} {y}H{_RIGHT}"/>'
        y += 18
        most = 1
        for x, said, width in zip(columns, cause, (212, 204, 150, 104), strict=True):
            rows = wrapped(said, width)
            most = max(most, len(rows))
            yield from lines(x, y, rows)
        y += STEP * (most - 1)


# -- a drain -------------------------------------------------------------------------------------------------------------

_BEGIN, _SIGTERM, _CLOSED, _DEADLINE, _TELLING, _EXIT, _KILL = 124, 230, 322, 492, 562, 634, 704


def drain() -> str:
    """The times of a drain, with the settings that bound them."""
    return diagram("A drain from SIGTERM to the exit (not to scale)", 384, _drain())


def kubernetes_times() -> tuple[str, str]:
    """The times of the manifest: the wait before SIGTERM, and that until SIGKILL."""
    manifest = DEPLOYMENT.read_text(encoding="utf-8")
    sleep = re.search(r"preStop:\s+sleep:\s+seconds: (\d+)", manifest)
    grace = re.search(r"terminationGracePeriodSeconds: (\d+)", manifest)
    assert sleep is not None
    assert grace is not None
    return f"{sleep[1]} s", f"{grace[1]} s"


def _drain() -> Iterator[str]:
    before, kill = kubernetes_times()
    for x, y in ((_SIGTERM, 330), (_CLOSED, 330), (_DEADLINE, 330), (_EXIT, 330), (_KILL, 360)):
        yield f'<path class="guide" d="M{x} 84V{y - 12}"/>'
    spans = (
        (_BEGIN, _SIGTERM, ["`preStop`", before]),
        (_SIGTERM, _CLOSED, ["`drain.delay`", default("drain.delay")]),
        (_CLOSED, _DEADLINE, ["`drain.timeout`", default("drain.timeout")]),
        (_DEADLINE, _TELLING, ["errors", f"up to {_GRACE:g} s"]),
        (_TELLING, _EXIT, ["unload", "models"]),
    )
    for start, end, said in spans:
        yield from bracket(start + 2, end - 2, 76, said)
    lanes: tuple[tuple[str, tuple[tuple[int, int, str, str], ...]], ...] = (
        ("readiness", ((_BEGIN, _SIGTERM, "ready", "green"), (_SIGTERM, _EXIT, "503", "red"))),
        ("port", ((_BEGIN, _CLOSED, "open", "green"), (_CLOSED, _EXIT, "closed", "red"))),
        ("new requests", ((_BEGIN, _SIGTERM, "answered", "green"), (_SIGTERM, _EXIT, "503", "red"))),
        ("streams", ()),
        ("operator", ((_BEGIN, _EXIT, "open: progress and report of the drain", "green"),)),
    )
    y = 92
    for name, parts in lanes:
        yield text(_LEFT, y + 17, name, "bold")
        for start, end, said, kind in parts:
            yield from box(start + 1, y, end - start - 2, 26, [said], kind)
        if not parts:
            yield from _streams(y)
            y += 52
        y += 36
    yield text(_SIGTERM, 330, "SIGTERM", "bold", "middle")
    yield text(_CLOSED, 330, "goodbye", "", "middle")
    yield text(_DEADLINE, 330, "deadline", "bold", "middle")
    yield text(_EXIT, 330, "exit 0 or 3", "bold", "middle")
    yield from bracket(_BEGIN, _KILL, 352, [f"`terminationGracePeriodSeconds` {kill}, then SIGKILL"], below=True)


def _streams(y: float) -> Iterator[str]:
    rows = ((_SIGTERM + 46, "ends by itself"), (_CLOSED + 64, "ends by itself"), (_DEADLINE, "is live at the deadline"))
    for at, (end, said) in enumerate(rows):
        top = y + 28 * at
        yield from box(_BEGIN + 1, top, end - _BEGIN - 2, 22, [said], "blue")
    yield from box(_DEADLINE + 1, y + 56, _TELLING - _DEADLINE - 2, 22, ["`drained`"], "red")


def written() -> dict[Path, str]:
    """The diagrams, by file."""
    return {
        FOLDER / "architecture.svg": architecture(),
        FOLDER / "where-bytes-wait.svg": where_bytes_wait(),
        FOLDER / "request-life.svg": request_life(),
        FOLDER / "endings.svg": endings(),
        FOLDER / "drain.svg": drain(),
    }


if __name__ == "__main__":
    for path, content in written().items():
        path.write_text(content, encoding="utf-8")
