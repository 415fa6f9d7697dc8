"""The counts of a unit of work are the same each time, and faults that are planted are found and named."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.counts import ceilings, instructions, measure
from benchmarks.counts.cases import CASES, Case
from benchmarks.counts.ceilings import Rise, rises
from benchmarks.counts.counters import Counts
from gateway.core.exchange import Exchange
from gateway.dialects.aws.bidi import _EventStreamChannel
from gateway.dialects.text.lmi import _TextChannel
from gateway.net.transport import SocketTransport
from protocols.v2.codec import InferCodec

pytestmark = [
    pytest.mark.programs,
    pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is not here"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not here"),
]
needs_memray = pytest.mark.skipif(measure.find_spec("memray") is None, reason="memray is not installed")


def found(case: str, counter: str, plant: Callable[[], None] = lambda: None) -> Counts:
    """The counts of a case in a fork, with that planted in it."""

    def work() -> Counts:
        plant()
        return measure.counted(CASES[case], counter)

    counts: Counts = measure.in_a_copy(work)
    return {"units": CASES[case].units, **counts}


def wrapped(owner: Any, name: str, more: Callable[..., object]) -> Callable[[], None]:
    """Plants a call of `more` with the same arguments before each call of a method."""

    def plant() -> None:
        method = getattr(owner, name)

        def changed(*args: Any, **named: Any) -> Any:
            more(*args, **named)
            return method(*args, **named)

        setattr(owner, name, changed)

    return plant


def rise(case: str, counter: str, figure: str, plant: Callable[[], None]) -> Rise:
    """The rise of a figure by what is planted, beside the least of three runs without it and three with."""
    plain = [found(case, counter) for _ in range(3)]
    most = {figure: min(one[figure] for one in plain) for figure in plain[0]}
    planted = min((found(case, counter, plant) for _ in range(3)), key=lambda one: one[figure])
    (told,) = (one for one in rises({case: planted}, {case: most}) if one.figure == figure)
    return told


@pytest.mark.parametrize("counter", ["calls", "bytecodes", "system calls"])
def test_counts_are_the_same_each_time(counter: str) -> None:
    first, again = found("unary-binary", counter), found("unary-binary", counter)
    assert first == again
    assert len(first) > 1
    assert all(first.values())


@pytest.mark.parametrize(
    ("figure", "count", "is_told"),
    [("calls", 1281, True), ("bytes allocated", 1407, False), ("bytes allocated", 1408, True)],
)
def test_a_count_rises_by_one_and_bytes_allocated_by_one_a_unit(figure: str, count: int, is_told: bool) -> None:
    told = rises({"lines": {"units": 128, figure: count}}, {"lines": {"units": 128, figure: 1280}})
    assert [one.figure for one in told] == [figure] * is_told


def test_instructions_are_counted_where_the_kernel_and_the_machine_do() -> None:
    def work() -> list[int | None]:
        told: list[int | None] = []
        for event in ((0, 1), (1, 1)):  # instructions, and nanoseconds of the thread, which every machine has
            with instructions.counted_instructions(*event) as count:
                sum(range(10_000))
                told.append(count())
        return told

    found, clock = measure.in_a_copy(work)
    assert found is None or found > 10_000
    assert clock is None or clock > 0


def test_one_more_call_a_token_is_found() -> None:
    more = rise("lines", "calls", "calls", wrapped(_TextChannel, "try_send", lambda self, token: self._exchange.turn))
    assert more.found - more.most >= more.units
    assert str(more).startswith(f"lines: calls rose from {more.most:,} to {more.found:,} in 128 tokens, +1.")


@needs_memray
def test_one_copy_of_a_body_is_found_by_its_bytes() -> None:
    kept: list[bytes] = []
    copies = wrapped(InferCodec, "parse", lambda self, body, length: kept.append(bytes(memoryview(body))))
    more = rise("json-large", "allocations", "bytes allocated", copies)
    assert more.found - more.most > more.units * 400_000


@needs_memray
def test_one_allocation_a_stream_is_found() -> None:
    kept: list[bytearray] = [bytearray()] * 1000
    number = iter(range(1000))

    def keep(*args: Any) -> None:
        kept[next(number)] = bytearray(100)

    more = rise("idle-http2", "allocations", "allocations", wrapped(Exchange, "__init__", keep))
    assert more.found - more.most >= more.units
    assert more.case == "idle-http2"


def test_one_system_call_a_message_is_found() -> None:
    asks = wrapped(SocketTransport, "try_send", lambda self, buffers: self._sock.getsockopt(6, 1))
    more = rise("duplex", "system calls", "system calls", asks)
    assert more.found - more.most == more.units


def test_a_list_that_is_searched_at_each_message_is_found_by_eight_times_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def search(*args: Any) -> None:
        if (one := object()) not in seen:
            seen.append(one)

    case, cost = CASES["duplex"], measure.cost

    def with_a_search(case: Case, units: int) -> tuple[float, int | None]:
        wrapped(_EventStreamChannel, "receive", search)()
        return cost(case, units)

    plain, _ = measure.growth(case, ceilings.GROWTH)
    monkeypatch.setattr(measure, "cost", with_a_search)
    monkeypatch.setattr(measure, "GROWTH_ROUNDS", (2, 6))
    planted, _ = measure.growth(case, ceilings.GROWTH)
    assert plain is not None
    assert planted is not None
    assert plain < ceilings.GROWTH < planted
