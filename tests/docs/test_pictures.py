"""The pictures of the pages are what their scripts write."""

import json
import re
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest

from gateway.config.fields import SETTINGS
from gateway.config.text import dotted
from gateway.errors import Ending
from gateway.telemetry.account import PARTS
from scripts import drawing
from scripts import write_backpressure_picture as moving
from scripts import write_diagrams as diagrams
from scripts import write_performance_plots as plots
from tests.docs.pages import PAGES, ROOT

DIAGRAMS = diagrams.written()
NAMES = {path.name for path in DIAGRAMS}
_SVG = "{http://www.w3.org/2000/svg}"


def test_the_moving_picture_is_what_its_script_writes() -> None:
    assert moving.PICTURE.read_text(encoding="utf-8") == moving.written(), "run scripts/write_backpressure_picture.py"


def test_it_moves_only_where_motion_is_wanted() -> None:
    before, _, wanted = moving.written().partition("@media (prefers-reduced-motion: no-preference) {")
    assert "animation" not in before
    assert "@keyframes" not in before
    assert wanted.count("infinite") > len(moving.PHASES)


def test_its_phases_follow_each_other_within_its_time() -> None:
    starts = [phase.start for phase in moving.PHASES]
    assert starts == sorted(set(starts))
    assert starts[0] == 0
    assert starts[-1] < moving.SECONDS
    text = moving.written()
    assert [phase.caption for phase in moving.PHASES if f">{phase.caption}</text>" not in text] == []
    assert len(re.findall(r'class="caption [^"]*still"', text)) == 1


def test_the_plots_are_those_of_the_stored_figures() -> None:
    for path, text in plots.written().items():
        assert path.read_text(encoding="utf-8") == text, "run scripts/write_performance_plots.py"


def test_a_plot_has_every_figure_with_its_peer() -> None:
    bars = dict(plots.tokens())
    assert (bars["everywire, lines-64"], bars["LitServe, lines-64"]) == (2.7, 186)
    assert len(bars) == 7
    waits = [value for _, value in plots.neighbours()]
    assert waits == sorted(waits, reverse=True)
    assert len(waits) == plots.SHOWN_ATTACKS


class Line(NamedTuple):
    """A line of text in a picture: its words, and an estimate of the place that it takes."""

    said: str
    left: float
    right: float
    base: float


def lines_of(picture: str) -> list[Line]:
    """All lines of text that a picture shows."""
    found = []
    for element in ET.fromstring(picture).iter(f"{_SVG}text"):
        said = "".join(element.itertext())
        width, x = drawing.width_of(said, bold=element.get("class") in ("bold", "title")), float(element.attrib["x"])
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[element.get("text-anchor", "start")]
        found.append(Line(said, left, left + width, float(element.attrib["y"])))
    return found


def code_of(picture: str) -> list[str]:
    """The words that a picture shows as code."""
    return [e.text or "" for e in ET.fromstring(picture).iter(f"{_SVG}tspan") if e.get("class") == "code"]


def shown() -> dict[str, list[tuple[str, str]]]:
    """The pages that show each picture, by its name, each with the alternative text."""
    found: dict[str, list[tuple[str, str]]] = {}
    for page in PAGES:
        for alternative, name in re.findall(
            r"!\[([^\]]*)\]\([^)]*pictures/([\w-]+\.svg)\)", (ROOT / page).read_text("utf-8")
        ):
            found.setdefault(name, []).append((page, alternative))
    return found


def test_the_diagrams_are_what_their_script_writes() -> None:
    for path, text in DIAGRAMS.items():
        assert path.read_text(encoding="utf-8") == text, "run scripts/write_diagrams.py"


@pytest.mark.parametrize("path", DIAGRAMS, ids=lambda path: path.stem)
def test_a_diagram_is_a_picture_with_a_title_for_light_and_dark(path: Path) -> None:
    root = ET.fromstring(DIAGRAMS[path])
    assert root.tag == f"{_SVG}svg"
    assert float(root.attrib["width"]) <= 720
    title = root.find(f"{_SVG}title")
    assert title is not None
    assert len(title.text or "") > 10
    assert "prefers-color-scheme: dark" in DIAGRAMS[path]


@pytest.mark.parametrize("path", DIAGRAMS, ids=lambda path: path.stem)
def test_no_text_of_a_diagram_leaves_the_frame_or_lies_on_other_text(path: Path) -> None:
    root, lines = ET.fromstring(DIAGRAMS[path]), lines_of(DIAGRAMS[path])
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert len(lines) > 20
    assert [line for line in lines if line.left < 0 or line.right > width or not 12 < line.base < height - 4] == []
    overlaps = [
        (one.said, other.said)
        for one, other in combinations(lines, 2)
        if abs(one.base - other.base) < 12 and one.left < other.right and other.left < one.right
    ]
    assert overlaps == []


@pytest.mark.parametrize("path", DIAGRAMS, ids=lambda path: path.stem)
def test_every_class_of_a_diagram_has_a_style(path: Path) -> None:
    style = ET.fromstring(DIAGRAMS[path]).findtext(f"{_SVG}style") or ""
    used = {name for e in ET.fromstring(DIAGRAMS[path]).iter() for name in e.get("class", "").split()}
    assert [name for name in used if f".{name}" not in style] == []


def test_every_picture_is_shown_with_words_that_say_what_it_shows() -> None:
    pages = shown()
    assert {path.name for path in (ROOT / "docs" / "pictures").glob("*.svg")} == pages.keys()
    for name in NAMES:
        for page, alternative in pages[name]:
            assert len(alternative.split()) > 12, f"{page}: {name}"


def test_every_setting_that_a_diagram_names_is_one() -> None:
    names = {dotted(path) for path in SETTINGS}
    sections = {name.partition(".")[0] for name in names}
    named = [c for picture in DIAGRAMS.values() for c in code_of(picture) if re.fullmatch(r"[a-z0-9]+\.[a-z_]+", c)]
    assert {"limits.send_buffer", "http2.max_window", "drain.delay", "drain.timeout"} <= set(named)
    assert [name for name in named if name.partition(".")[0] in sections and name not in names] == []


def test_a_line_that_is_wider_than_its_box_is_an_error() -> None:
    with pytest.raises(ValueError, match="wider than its box of 30 pixels"):
        list(drawing.box(0, 0, 30, 20, ["too long"]))


def test_code_that_is_wrapped_is_code_on_both_lines() -> None:
    assert drawing.wrapped("an event `{a b}` and", 110) == ["an event", "`{a b}` and"]
    assert drawing.wrapped("an event `{a b}`", 90) == ["an event", "`{a b}`"]
    assert drawing.wrapped("`{aaaa bbbb}`", 60) == ["`{aaaa`", "`bbbb}`"]


def test_the_diagram_of_endings_has_every_wire_of_the_page_with_its_words() -> None:
    rows = re.findall(
        r"^\| (.+?) \| .+? \| .+? \| (.+) \|$",
        diagrams.ENDINGS.read_text("utf-8").split("| wire | a good end |")[1].split("\n\n")[0],
        re.MULTILINE,
    )[1:]
    drawn = " ".join(line.said for line in lines_of(diagrams.endings()))
    ends = diagrams.wire_ends()
    assert len(ends) == len(rows) > 10
    for end in ends:
        assert end.wire in drawn
        assert end.error or end.end
        for said in (end.error, end.end) if end.group != diagrams._DOCUMENT else (end.before,):
            assert said.replace("`", "").removeprefix("the ") in drawn
    groups = {end.wire: end.group for end in ends}
    assert groups["OpenAI"] == groups["response stream"] == diagrams._TOLD
    assert groups["gRPC"] == groups["WebSocket"] == groups["BiDi"] == diagrams._OWN
    assert groups["InvokeEndpoint"] == groups["container, PARTS"] == diagrams._CUT
    assert groups["v2"] == groups["LMI json"] == groups["multi-model API"] == diagrams._DOCUMENT


def test_the_diagram_of_endings_names_each_cause_as_the_wires_do() -> None:
    assert [(bidi, grpc, close) for _, bidi, grpc, close in diagrams.causes()] == [
        ("`ModelStreamError`, its code", "`INTERNAL`", "Close 1011"),
        ("`ModelStreamError`, `ModelInvocationTimeExceeded`", "`DEADLINE_EXCEEDED`", "Close 1011"),
        ("`InternalStreamFailure`", "`UNAVAILABLE`", "Close 1001"),
    ]


def test_the_life_of_a_request_has_every_part_and_the_line_of_the_log_says_the_same() -> None:
    seconds = diagrams.life_seconds()
    assert list(seconds) == list(PARTS)
    assert all(seconds.values())
    assert diagrams.words_of_parts().keys() == seconds.keys()
    drawn = [line.said for line in lines_of(diagrams.request_life())]
    assert f"8.00s ({', '.join(f'{part} {taken:.2f}s' for part, taken in seconds.items())}) …" in drawn
    assert {f"{part}: {words}" for part, words in diagrams.words_of_parts().items()} <= set(drawn)


def test_the_diagram_of_a_drain_has_the_defaults_and_the_times_of_the_manifest() -> None:
    drawn = [line.said for line in lines_of(diagrams.drain())]
    before, kill = diagrams.kubernetes_times()
    page = (ROOT / "docs/howto/deploy.md").read_text(encoding="utf-8")
    for name, said in (("preStop", before), ("drain.delay", "0 s"), ("drain.timeout", "30 s")):
        assert drawn[drawn.index(name) + 1] == said
        assert f"| `{name}` | {said} |" in page
    assert f"| `terminationGracePeriodSeconds` | {kill} |" in page
    assert f"terminationGracePeriodSeconds {kill}, then SIGKILL" in drawn
    assert Ending.DRAINED.value in drawn


def test_a_line_of_the_stalled_readers_has_every_stored_point() -> None:
    lines = dict(plots.stalled())
    text = plots.written()[plots.FOLDER / "memory-stalled-readers.svg"]
    assert {"everywire, HTTP/1.1", "everywire, HTTP/2"} < lines.keys()
    for label, points in lines.items():
        assert f">{label}</text>" in text
        assert points[0] == (0, 0)
    paths = re.findall(r'<path class="line [^"]*" d="M([^"]*)"/>', text)
    assert [path.count("L") + 1 for path in paths] == [len(points) for points in lines.values()]


def test_the_page_beside_that_plot_has_the_stored_figures() -> None:
    stored = json.loads(plots.STALLED.read_text(encoding="utf-8"))
    page = " ".join((plots.DOCS / "explanation" / "costs.md").read_text(encoding="utf-8").split())
    assert f"`python -m benchmarks stalled`, {stored['date']}" in page
    for series in stored["series"]:
        memory, kernel = (f"{size / 1024:,.0f}" for size in series["each"])
        assert f"| {series['server']}, {series['wire']} | {memory} | {kernel} |" in page
