"""The allowances: each row at its burst and one above, after a pause, and with what earns; what every row keeps to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.floods import BYTES, Allowance, Allowances, Flood, FloodPolicy
from protocols.http2.floods import HTTP2_FLOODS, FloodCounters
from protocols.websocket.floods import WEBSOCKET_FLOODS, FrameCounters


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the tables of floods, as a test expects it."""

    table: Allowances[Any]
    kind: str
    counter: str
    burst: int
    rate: float
    earns: tuple[str, int, int] | None = None
    """A counter, an amount of it, and the number that this amount allows beside the burst."""


ROWS = [
    Row(HTTP2_FLOODS, "reset", "resets", 200, 33, ("completed", 7, 7)),
    Row(HTTP2_FLOODS, "refused", "refused", 2000, 100),
    Row(HTTP2_FLOODS, "ping", "pings", 200, 10, ("data_sent", 50, 100)),
    Row(HTTP2_FLOODS, "ping", "pings", 200, 10, ("heads_sent", 50, 100)),
    Row(HTTP2_FLOODS, "settings", "settings", 50, 1),
    Row(HTTP2_FLOODS, "empty", "empty_data", 200, 20, ("fed", 30, 30)),
    Row(HTTP2_FLOODS, "empty", "empty_data", 200, 20, ("data_sent", 30, 30)),
    Row(HTTP2_FLOODS, "window", "window_updates", 500, 10, ("opened", 10, 20)),
    Row(HTTP2_FLOODS, "window", "window_updates", 500, 10, ("data_sent", 10, 200)),
    Row(HTTP2_FLOODS, "priority", "priority", 500, 50, ("opened", 10, 20)),
    Row(HTTP2_FLOODS, "cramped", "cramped", 1000, 100),
    Row(HTTP2_FLOODS, "waste", "waste", 4 * 1024 * 1024, 16 * 1024, ("payload_in", 1000, 16_000)),
    Row(HTTP2_FLOODS, "waste", "waste", 4 * 1024 * 1024, 16 * 1024, ("payload_out", 1000, 16_000)),
    Row(WEBSOCKET_FLOODS, "control", "control", 100, 10, ("frames", 160, 10)),
    Row(WEBSOCKET_FLOODS, "hollow", "hollow", 200, 100, ("payload", 5 * 1024, 5)),
]
by_kind = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kind}-{row.earns and row.earns[0]}")


def counters_of(row: Row) -> Any:
    return FloodCounters() if row.table is HTTP2_FLOODS else FrameCounters()


def did(counters: Any, row: Row, n: int) -> Any:
    """Adds n of the row's kind to the counters, and to `total`, by which the policy knows that it is due."""
    setattr(counters, row.counter, getattr(counters, row.counter) + n)
    counters.total += n
    return counters


def test_the_rows_are_all_of_the_tables() -> None:
    for table in (HTTP2_FLOODS, WEBSOCKET_FLOODS):
        said = {(row.kind, row.burst, row.rate) for row in ROWS if row.table is table}
        assert said == {(row.kind, row.burst, row.rate) for row in table}
        assert {row.kind for row in ROWS if row.table is table and row.earns} == {row.kind for row in table if row.earned}


@by_kind
def test_a_burst_is_allowed_and_one_more_is_a_flood(row: Row) -> None:
    policy = FloodPolicy(row.table, 100.0)
    counters = did(counters_of(row), row, row.burst)
    assert policy.judge(counters, 100.0) is None
    assert policy.judge(did(counters, row, 1), 100.5 if row.rate < 2 else 100.0) == Flood(
        kind=row.kind, count=row.burst + 1, seconds=0.5 if row.rate < 2 else 0.0
    )


@by_kind
def test_after_a_pause_a_rate_is_allowed_and_never_more_than_a_burst(row: Row) -> None:
    policy = FloodPolicy(row.table, 0.0)
    counters = did(counters_of(row), row, row.burst)
    assert policy.judge(counters, 0.0) is None
    assert policy.judge(did(counters, row, int(2 * row.rate)), 2.0) is None
    spent = FloodPolicy(row.table, 0.0)
    assert spent.judge(did(counters_of(row), row, row.burst), 0.0) is None
    more = did(did(counters_of(row), row, row.burst), row, int(2 * row.rate) + 1)
    assert spent.judge(more, 2.0) is not None
    # an hour later a whole burst is there again; another one at once is not
    assert policy.judge(did(counters, row, row.burst), 3600.0) is None
    assert policy.judge(did(counters, row, row.burst), 3600.0) is None, "what came in the hour may have come evenly"
    assert policy.judge(did(counters, row, row.burst + 1), 3600.0) is not None


@by_kind
def test_a_pause_in_which_nothing_came_is_worth_one_burst(row: Row) -> None:
    policy = FloodPolicy(row.table, 0.0)
    counters = did(counters_of(row), row, row.burst)
    assert policy.tick(counters, 0.0) is None
    assert policy.tick(counters, 3600.0) is None
    assert policy.tick(did(counters, row, row.burst), 3600.0) is None
    assert policy.tick(did(counters, row, 1), 3600.0) is not None


@pytest.mark.parametrize("row", [row for row in ROWS if row.earns], ids=lambda row: f"{row.kind}-{row.earns[0]}")
def test_what_is_earned_comes_on_top(row: Row) -> None:
    assert row.earns is not None
    counter, n, more = row.earns
    counters = counters_of(row)
    setattr(counters, counter, n)
    policy = FloodPolicy(row.table, 0.0)
    assert policy.judge(did(counters, row, row.burst + more), 0.0) is None
    assert policy.judge(did(counters, row, 1), 0.0) is not None


def test_completed_exchanges_earn_two_hundred_in_hand_at_most() -> None:
    policy, counters = FloodPolicy(HTTP2_FLOODS, 0.0), FloodCounters(completed=100_000, total=1000)
    assert policy.judge(counters, 0.0) is None
    counters.resets = 400
    counters.total += 400
    assert policy.judge(counters, 0.0) is None
    counters.resets += 1
    counters.total += 1
    assert policy.judge(counters, 0.0) == Flood(kind="reset", count=401, seconds=0.0)


def test_rows_are_bounded_whatever_was_earned() -> None:
    counters = FloodCounters(empty_data=10, empty_row=10, fed=1000, total=10)
    policy = FloodPolicy(HTTP2_FLOODS, 0.0)
    assert policy.judge(counters, 0.0) is None
    counters.empty_data = counters.empty_row = counters.total = 11
    assert policy.judge(counters, 0.0) == Flood(kind="empty", count=11, seconds=0.0)
    frames = FrameCounters(longest_row=1024, payload=10**9, total=1024)
    assert FloodPolicy(WEBSOCKET_FLOODS, 0.0).judge(frames, 0.0) is None
    frames.longest_row = frames.total = 1025
    assert FloodPolicy(WEBSOCKET_FLOODS, 0.0).judge(frames, 0.0) == Flood(kind="hollow", count=0, seconds=0.0)


def test_bursts_and_rates_can_be_set_and_what_earns_cannot() -> None:
    table = HTTP2_FLOODS.with_limits({"ping_burst": 5, "ping_rate": 0, "none_burst": 1})
    policy, counters = FloodPolicy(table, 0.0), FloodCounters(pings=7, data_sent=1, total=7)
    assert table.due == 6
    assert policy.judge(counters, 3600.0) is None
    counters.pings, counters.total = 8, 8
    assert policy.judge(counters, 7200.0) == Flood(kind="ping", count=8, seconds=7200.0)
    assert [row.burst for row in table if row.kind != "ping"] == [row.burst for row in HTTP2_FLOODS if row.kind != "ping"]


# -- any sequence of counts

TOY: Allowances[FrameCounters] = Allowances(
    (
        Allowance(kind="a", counts="", count=lambda c: c.control, burst=7, rate=2, earned=lambda c: c.frames, most_earned=5),
        Allowance(kind="b", counts="", count=lambda c: c.hollow, burst=20, rate=0.5, earned=lambda c: 2 * c.payload),
        Allowance(
            kind="c", counts="", count=lambda c: c.longest_row, burst=50_000, rate=100, in_bytes=True, earned=lambda c: c.row
        ),
    )
)
steps = st.lists(
    st.tuples(
        st.sampled_from(["control", "hollow", "longest_row", "frames", "payload", "row"]), st.integers(0, 12),
        st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0, 30.0, 3600.0]),
    ),
    max_size=60,
)  # fmt: skip


def played(
    steps: list[tuple[str, int, float]], ask: Callable[[int], bool], *, gate: bool = True
) -> list[tuple[int, Flood | None]]:
    """Returns the verdicts of the policy, each with its step. The policy is asked at the steps that `ask` accepts."""
    policy, counters, now, said = FloodPolicy(TOY, 0.0), FrameCounters(), 0.0, list[tuple[int, Flood | None]]()
    for number, (counter, n, pause) in enumerate(steps):
        now += pause
        n = n * 5000 if counter in ("longest_row", "row") else n
        setattr(counters, counter, getattr(counters, counter) + n)
        counters.total += 0 if counter in ("frames", "payload", "row") else 1 + n // BYTES if n > 12 else n
        if ask(number):
            if not gate:
                policy.due = 0
            said.append((number, policy.judge(counters, now)))
            if said[-1][1] is not None:
                break
    return said


@given(steps)
def test_the_gate_hides_no_flood(steps: list[tuple[str, int, float]]) -> None:
    """The gate hides steps from the policy. Without it the policy finds the same floods, and none of them later."""
    gated = played(steps, lambda _: True)
    open_ = played(steps, lambda _: True, gate=False)
    if gated and gated[-1][1] is not None:
        assert open_[-1][1] is not None
        assert open_[-1][0] <= gated[-1][0]


@given(steps, st.sampled_from(["control", "hollow", "longest_row"]), st.integers(1, 100))
def test_more_of_a_kind_is_never_less_of_a_flood(steps: list[tuple[str, int, float]], counter: str, more: int) -> None:
    said = played(steps, lambda _: True, gate=False)
    if said and said[-1][1] is not None:
        at = said[-1][0]
        worse = [*steps[:at], (counter, more, 0.0), *steps[at:]]
        again = played(worse, lambda number: number != at, gate=False)
        assert again[-1][1] is not None
        assert again[-1][0] <= at + 1


@given(steps, st.sampled_from(["frames", "payload", "row"]), st.integers(1, 100))
def test_more_that_earns_is_never_more_of_a_flood(steps: list[tuple[str, int, float]], counter: str, more: int) -> None:
    said = played(steps, lambda _: True, gate=False)
    if said and said[-1][1] is None:
        better = [(counter, more, 0.0), *steps]
        assert played(better, lambda number: number > 0, gate=False)[-1][1] is None


@given(
    st.sampled_from([row for row in ROWS if row.kind != "waste"]), st.integers(0, 40), st.integers(1, 30),
    st.sampled_from([0.0, 0.001, 0.02, 1.0]), st.sampled_from([0.0, 1.0, 3600.0]),
)  # fmt: skip
def test_a_tenth_beyond_the_allowance_is_a_flood_within_twice_the_burst(
    row: Row, before: int, at_once: int, pause: float, quiet: float
) -> None:
    policy, counters, now = FloodPolicy(row.table, 0.0), counters_of(row), 0.0
    assert policy.judge(did(counters, row, min(before, row.burst)), now) is None
    start, now = getattr(counters, row.counter), now + quiet
    began = now
    policy.tick(counters, now)
    for _ in range(4 * row.burst):
        now += pause
        n = max(at_once, int(1.1 * row.rate * pause) + 1)
        if policy.judge(did(counters, row, n), now) is not None:
            break
    sent = getattr(counters, row.counter) - start
    assert sent <= 1.1 * (row.burst + row.rate * (now - began)) + 2 * n


@given(st.lists(st.tuples(st.sampled_from(ROWS), st.sampled_from([0.0, 0.1, 1.0, 3600.0])), max_size=200))
def test_who_earns_each_frame_before_it_is_never_judged(frames: list[tuple[Row, float]]) -> None:
    """Before each counted frame something earns it: an exchange completes, a DATA frame of ours leaves, or the like."""
    policies = {table: FloodPolicy(table, 0.0) for table in (HTTP2_FLOODS, WEBSOCKET_FLOODS)}
    counters: dict[Any, Any] = {HTTP2_FLOODS: FloodCounters(), WEBSOCKET_FLOODS: FrameCounters()}
    now = 0.0
    for row, pause in frames * 10:
        now += pause
        counted = counters[row.table]
        if row.earns is not None:
            counter, n, more = row.earns
            setattr(counted, counter, getattr(counted, counter) + n)
            did(counted, row, more)
        assert policies[row.table].judge(counted, now) is None
