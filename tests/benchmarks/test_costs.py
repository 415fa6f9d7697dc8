"""No step of a call that grows with a message takes longer than its bound, and the table of the page has all of them."""

from __future__ import annotations

import importlib
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import costs
from benchmarks.cli import program
from tests.bounds.table import TABLE, rows_of

MOST = 3.0
"""How many times its bound a step may take here: other tests run beside this one."""
SMALL = 4096
"""Bytes that no call takes long for."""
ELSEWHERE = {
    **dict.fromkeys(
        (
            "gateway.catalog.process_model:_READ", "gateway.fronts.front:_READ", "gateway.fronts.link:_READ",
            "gateway.fronts.messages:LARGEST", "gateway.fronts.messages:PACKET", "gateway.instances.links:MOST",
            "gateway.instances.messages:LARGEST", "gateway.instances.spawn:_READ", "gateway.instances.spawn:_TAIL",
            "gateway.telemetry.incidents:TRACEBACK",
        ),
        "a process of ours is the peer",
    ),
    **dict.fromkeys(
        (
            "gateway.cli.call.plan:PIECE", "gateway.cli.call.which:_MOST", "gateway.cli.keys:_LONGEST",
            "gateway.client.connection:_LARGEST_FRAME", "gateway.config.load:_FILE_BYTES", "gateway.keys:LARGEST",
            "gateway.operator.access:_LARGEST", "gateway.operator.app:_LARGEST", "protocols.aws.eventstream:MAX_PAYLOAD",
            "protocols.sse:MAX_EVENT", "gateway.testing.stories.hostile:_READ",
        ),
        "the user's or the operator's own file, body, call or test",
    ),
    **dict.fromkeys(
        (
            "gateway.containers.connection:ContainerLimits.error_text",
            "gateway.containers.connection:ContainerLimits.invocation_timeout", "gateway.containers.multi_model:_LISTED",
            "limits.max_new_tokens",
        ),
        "the container or the model is the peer, a piece at a time",
    ),
    **dict.fromkeys(
        (
            "gateway.instances.socket_stream:_LARGEST", "gateway.net.tls_transport:_CHUNK", "protocols.floods:PLANE_READ",
            "protocols.http1.reader:_SKIPPED", "http2.frame_size", "limits.read_ahead", "limits.send_buffer",
        ),
        "one copy of a piece, or less",
    ),
    **dict.fromkeys(
        ("limits.body", "limits.part", "websocket.part", "sagemaker.body"),
        "received in pieces; what reads the whole has rows of its own",
    ),
    **dict.fromkeys(
        (
            "protocols.aws.bidi_json:HEADROOM", "protocols.aws.bidi_json:_STEP", "protocols.aws.eventstream:MAX_VALUE",
            "protocols.json.strict:_AT_ONCE", "protocols.json.text:STEP", "models.convert:_MESSAGE_LIMIT",
            "gateway.dialects.v2.text:_MOST", "protocols.json.schema:LARGEST",
        ),
        "within the steps of rows that are there: parts in JSON, parts of an event stream, JSON of a text, a prompt",
    ),
}  # fmt: skip
"""The bounds of calls that take a message in, in tests/bounds/bounds.txt, which are the limit of no row, and the reason."""


@pytest.fixture(scope="module")
def all_steps() -> list[costs.Step]:
    """All steps, without their inputs, which are large."""
    return [replace(step, work=lambda: None) for step in costs.steps()]


def worst(step: costs.Step) -> float:
    """How many times its bound a step takes, in time that is scaled by the floor beside it: the least of three tries."""
    tries = []
    for _ in range(3):
        beside = costs.floor()
        tries.append(costs.measured(step) / (step.bound * max(1.0, beside / costs.FLOOR)))
        if tries[-1] <= MOST:
            break
    return min(tries)


@pytest.mark.programs
def test_no_step_on_the_loop_takes_longer_than_its_bound() -> None:
    slow = {step.call: times for step in costs.steps() if not step.thread and (times := worst(step)) > MOST}
    assert slow == {}


@pytest.mark.soak
def test_no_step_in_a_thread_takes_longer_than_its_bound() -> None:
    slow = {step.call: times for step in costs.steps() if step.thread and (times := worst(step)) > MOST}
    assert slow == {}


def spinning(milliseconds: float) -> costs.Step:
    """A step that takes so long."""

    def spin() -> None:
        until = time.thread_time_ns() + milliseconds * 1e6
        while time.thread_time_ns() < until:
            pass

    return costs.Step(call="a step that spins", limit="limits.head", nbytes=1, work=spin)


def test_a_step_that_takes_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst(spinning(40)) > MOST
    monkeypatch.setattr(costs, "steps", lambda: iter([spinning(40), spinning(0)]))
    done = CliRunner().invoke(program, ["costs", "spins"])
    assert done.exit_code == 1
    assert "above the bound: a step that spins\n" in done.output


def test_a_longer_step_of_a_thread_is_found_between_two_lines_of_python() -> None:
    step = costs.Step(call="", limit="", nbytes=1, thread=True, work=lambda: [sum(range(2_000_000)), sum(range(20))])
    assert costs.measured(step) > 1


def cells_of(page: str) -> list[list[str]]:
    """The rows of the table, by their cells."""
    table = page.partition(costs.line(costs.HEADS))[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.split("\n")[2:]]


@pytest.mark.programs
def test_the_page_has_each_step_with_its_limit_and_no_figure_above_its_bound(all_steps: list[costs.Step]) -> None:
    rows = cells_of(costs.PAGE.read_text(encoding="utf-8"))
    said = [(call, where, limit, size, most) for call, where, limit, size, _, _, most, *_ in rows]
    expected = [costs.cells(step, 0.0) for step in all_steps]
    assert said == [(call, where, limit, size, most) for call, where, limit, size, _, _, most, _ in expected]
    assert [row for row in rows if float(row[5]) > float(row[6])] == []
    assert all(why for *_, most, why in expected if float(most) not in (costs.LOOP, costs.THREAD)), "a reason is missing"


def test_the_table_is_written_into_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "PAGE", tmp_path / "page.md")
    costs.PAGE.write_text(f"before\n\n{costs.line(costs.HEADS)}\n| old |\n\nbehind\n")
    costs.write([(spinning(0), 0.5)])
    assert cells_of(costs.PAGE.read_text())[0][:3] == ["a step that spins", "loop", "`limits.head`"]
    assert costs.PAGE.read_text().endswith(" |\n\nbehind\n")
    assert "old" not in costs.PAGE.read_text()


def is_small(bound: str) -> bool:
    """True for a constant of few bytes, or for one that is no number: it is the one message that there is."""
    module, colon, name = bound.partition(":")
    if not colon:
        return bound == "bidi.padding"
    value = getattr(importlib.import_module(module), name)
    return not isinstance(value, int) or value <= SMALL


@pytest.mark.programs
def test_each_bound_of_a_call_that_takes_a_message_in_has_a_row_or_a_reason(all_steps: list[costs.Step]) -> None:
    """So that a new call that grows with a message fails here until it was measured."""
    limits = {step.limit for step in all_steps}
    bounds = {
        row.bound if not row.bound.startswith(":") else file.removesuffix(".py").replace("/", ".") + row.bound
        for file, rows in rows_of(TABLE.read_text()).items()
        for row in rows.values()
        if row.kind.split()[0] not in ("while", "async") and row.bound.split()[0] not in ("waits", "walks", "cut")
    }
    assert {bound for bound in bounds - limits - set(ELSEWHERE) if not is_small(bound)} == set()
    assert set(ELSEWHERE) <= bounds, "take away what no call names any more"
