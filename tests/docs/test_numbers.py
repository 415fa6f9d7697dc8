"""The numbers in the pages are the program's: defaults of settings wherever a page states them, sums of bounds, and constants."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from gateway.config import Config
from gateway.config.fields import SETTINGS
from gateway.config.text import dotted, parse_duration, parse_size
from gateway.containers.connection import ContainerLimits
from gateway.core import inbound, turn
from gateway.core.memory import _IDLE_SECONDS
from gateway.gateway import Gateway
from gateway.net import tls_transport, transport
from gateway.serving import drain
from gateway.workers import worker
from models import rolling
from models.spec import ModelSpec
from protocols import buffers
from protocols.http2 import connection, windows
from protocols.websocket import connection as websocket
from tests.docs.pages import PAGES, ROOT

KiB, MiB = 1024, 1024**2
CONFIG = Config()
NAMES = {dotted(path): setting for path, setting in SETTINGS.items()}
# These settings of a model default to the model's own values, which ModelSpec sets.
OF_A_MODEL = {"capacity": 64, "queue": 1000, "stuck_limit": 4}
_NUMBER = r"(\d[\d.,]*(?: ?(?:KiB|MiB|GiB|s|seconds|percent))?)\b"
_NAME = r"`([a-z0-9_]+(?:\.[A-Za-z0-9_]+)+)`"
_STATED = re.compile(rf"{_NAME} \({_NUMBER}|\({_NAME}, {_NUMBER}")


def default_of(name: str) -> Any:
    """The default of a setting; None where the name is none, or it has no number for one."""
    *section, field = name.split(".")
    if section[:1] == ["models"]:
        return OF_A_MODEL.get(field)
    value: Any = CONFIG
    for key in (*section, field):
        value = getattr(value, key, None)
    return value if isinstance(value, int | float) else None


def number(text: str) -> float:
    """The value of a page's number: in bytes, in seconds, or as it is."""
    text = text.replace(",", "").removesuffix("seconds").removesuffix("percent").strip()
    if text.endswith("iB"):
        return parse_size(text)
    return parse_duration(text) if text.endswith("s") else float(text)


def stated(page: str) -> list[tuple[str, str]]:
    """Settings with what the page says is their default: in brackets after the name, and in tables."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [(a or c, b or d) for a, b, c, d in _STATED.findall(text)]
    for heading, rows in re.findall(
        r"^(\| setting \| (?:default|unless set) \|.*)\n\|[-| ]+\|\n((?:\|.*\n)*)", text, re.MULTILINE
    ):
        assert heading
        for row in rows.splitlines():
            name, said = (cell.strip().strip("`") for cell in row.strip("|").split(" | ")[:2])
            if re.match(r"\d", said) and "." in name:
                found.append((name, said))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_a_default_that_a_page_states_is_the_default(page: str) -> None:
    wrong = [
        (name, said, default_of(name))
        for name, said in stated(page)
        if said != "0" and default_of(name) is not None and number(said) != default_of(name)  # 0 is what it may be set to
    ]
    assert wrong == []


def test_defaults_are_found_where_pages_state_them() -> None:
    assert ("http2.max_window", "256 KiB") in stated("docs/explanation/backpressure.md")
    assert ("limits.write_stall", "30 s") in stated("docs/explanation/cancellation.md")
    assert ("limits.keep_alive", "75 s") in stated("docs/explanation/costs.md")
    assert ("models.NAME.queue", "1000") in stated("docs/reference/admission.md")
    assert len(stated("docs/explanation/costs.md")) > 20


@pytest.mark.parametrize(
    "page", ["docs/explanation/costs.md", "docs/explanation/backpressure.md", "docs/explanation/cancellation.md"]
)
def test_every_setting_that_these_pages_name_is_one(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    sections = {name.partition(".")[0] for name in NAMES} - {"models"}
    named = re.findall(rf"`((?:{'|'.join(sections)})\.[a-z0-9_.]+)`", text)
    named += re.findall(r"(?<![\w/.])((?:limits|http2)\.[a-z_]+)", text)
    assert len(named) > 5
    assert [name for name in named if name not in NAMES] == []
    for field in re.findall(r"`models\.NAME\.([a-z_]+)`", text):
        assert f"models.*.{field}" in NAMES


def test_the_defaults_of_a_model_are_those_of_its_spec() -> None:
    fields: Any = ModelSpec.__dataclass_fields__
    assert {name: fields[name].default for name in OF_A_MODEL} == OF_A_MODEL


def evaluated(expression: str) -> float:
    """The value of a sum of settings and sizes, as the pages write them."""
    text = re.sub(r"(\d+) (KiB|MiB)", lambda size: str(parse_size(size[0])), expression)
    text = re.sub(r"[a-z0-9]+\.[a-z_]+", lambda name: str(default_of(name[0])), text)

    def value(node: ast.expr) -> float:
        match node:
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value(left) * value(right)
            case ast.Constant(value=int(constant)):
                return constant
        raise AssertionError(f"{ast.dump(node)} in {expression}")

    return value(ast.parse(text, mode="eval").body)


def test_the_sums_of_bounds_are_the_sums() -> None:
    text = (ROOT / "docs/explanation/backpressure.md").read_text(encoding="utf-8")
    sums = re.findall(r"^\| .* \| `([a-z0-9][^`]*[+*][^`]*)` \| ([\d.]+ [KMG]iB) \|$", text, re.MULTILINE)
    assert len(sums) == 5
    for expression, said in sums:
        size, unit = said.split()
        places = len(size.partition(".")[2])
        assert f"{evaluated(expression) / parse_size(f'1 {unit}'):.{places}f}" == size, expression


# Numbers that are not settings: the page, its text around the number, the number there, and that in the program.
SAID = [
    ("explanation/backpressure.md", "one read of {} KiB", 64, lambda: len(Gateway(models=[]).server.scratch) / KiB),
    ("explanation/backpressure.md", "a frame\n  of less than {} KiB", 64, lambda: websocket.LARGE / KiB),
    ("explanation/backpressure.md", "at least {} KiB and at most", 16, lambda: buffers._FIRST_STEP / KiB),
    ("explanation/backpressure.md", "and at most {} MiB. A length", 1, lambda: buffers._LARGEST_STEP / MiB),
    ("explanation/backpressure.md", "a stream beyond its first {} KiB", 4, lambda: windows.FLOOR / KiB),
    ("explanation/backpressure.md", "of one read, at most {} KiB", 64, lambda: tls_transport._CHUNK / KiB),
    ("explanation/backpressure.md", "but {} KiB are each stream's own", 16, lambda: connection.SHARE / KiB),
    ("explanation/backpressure.md", "at most {} KiB each", 16, lambda: connection.LARGEST_DATA / KiB),
    ("explanation/backpressure.md", "{} MiB while a mebibyte", 1, lambda: transport._BULK / MiB),
    ("explanation/backpressure.md", "after {} messages", 64, lambda: turn.TURN_UNITS // turn.SENT - 2),
    ("explanation/backpressure.md", "fewer than `ahead` ({})", 4, lambda: rolling.AHEAD),
    (
        "explanation/backpressure.md",
        "Above {} percent (`limits.memory_refuse`)",
        75,
        lambda: CONFIG.limits.memory_refuse,
    ),
    ("explanation/backpressure.md", "(`limits.party_share`, {} percent)", 12, lambda: CONFIG.limits.party_share),
    ("explanation/backpressure.md", "Above {} (`limits.memory_reset`)", 90, lambda: CONFIG.limits.memory_reset),
    ("explanation/backpressure.md", "`read_ahead` of its options, {} KiB", 256, lambda: ContainerLimits().read_ahead / KiB),
    ("explanation/cancellation.md", "after {} messages sent", 64, lambda: turn.TURN_UNITS // turn.SENT - 2),
    ("explanation/cancellation.md", "sent, {} received", 64, lambda: turn._RECEIVED),
    ("explanation/cancellation.md", "Close 1001, within {} seconds", 5, lambda: drain._GRACE),
    ("explanation/cancellation.md", "then {} seconds for threads", 5, lambda: worker._SHUTDOWN_SECONDS),
    ("explanation/cancellation.md", "`stuck_limit` ({} unless set)", 4, lambda: OF_A_MODEL["stuck_limit"]),
    ("explanation/costs.md", "each piece counts {} bytes more", 128, lambda: inbound.PIECE),
    ("explanation/costs.md", "for some {} seconds after the last", 10, lambda: _IDLE_SECONDS),
    ("explanation/costs.md", "as much ahead as has come, {} KiB to 1 MiB; once", 16, lambda: buffers._FIRST_STEP / KiB),
    (
        "explanation/costs.md",
        "{} KiB of `limits.total_bytes` from the stream's first moment",
        4,
        lambda: windows.FLOOR / KiB,
    ),
    ("explanation/costs.md", "in steps of {} KiB, as it arrives", 16, lambda: windows.STEP / KiB),
]


@pytest.mark.parametrize(("page", "said", "stated_number", "real"), SAID)
def test_a_number_that_is_no_setting_is_the_programs(page: str, said: str, stated_number: int, real: Any) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert said.format(stated_number) in text
    assert real() == stated_number


def test_the_numbers_of_the_first_page_are_measured_ones() -> None:
    def rows(page: str) -> list[list[str]]:
        lines = re.findall(r"^\| (.*) \|$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
        return [[cell.strip(" |") for cell in cells] for line in lines if len(cells := line.split(" | ")) > 1]

    measured = {row[0].partition(":")[0]: row[1] for row in reversed(rows("explanation/performance.md"))}
    shown = [row for row in rows("tutorial/is-this-for-me.md") if row[-1] != "workload"]
    shown = [row for row in shown if not row[0].startswith("-")]
    assert len(shown) > 5
    assert [row for row in shown if measured[row[2]] != row[1]] == []
