"""Credit: it follows the consumer, one stalled stream starves nobody, windows grow with use, and a budget bounds them."""

from __future__ import annotations

import pytest

from protocols.buffers import ByteBudget
from protocols.errors import LocalProtocolError
from protocols.events import Data, End, Event, Head, NoRoom, Ping, Request, Reset, Response
from protocols.http2.connection import HTTP2Connection, HTTP2Limits
from protocols.http2.frames import Kind
from protocols.http2.windows import FIRST_CONNECTION_WINDOW, FLOOR, STEP, ReceiveWindows
from protocols.roles import Role
from tests.protocols.http2.http2_helpers import (
    END_STREAM,
    PADDED,
    ByHand,
    Pair,
    body,
    check,
    data,
    frame,
    frames,
    output,
    pull,
)

SMALL = HTTP2Limits(initial_window=1000, max_window=4000)


def updates(written: bytes) -> dict[int, int]:
    """The credit in the WINDOW_UPDATE frames of these bytes, by stream."""
    given: dict[int, int] = {}
    for found in frames(written):
        if found.kind == Kind.WINDOW_UPDATE:
            given[found.stream] = given.get(found.stream, 0) + int.from_bytes(found.payload)
    return given


def test_a_consumer_that_takes_nothing_closes_its_window_and_nobody_elses() -> None:
    pair = Pair()
    pair.request(1, bytes(1_000_000), end=False)
    pair.flow()
    assert len(body(pair.at_server, 1)) == 65_536
    assert pair.server.unconsumed == 65_536
    for stream in (3, 5):
        pair.request(stream, bytes(200_000))
    for _ in range(10):
        pair.flow()
        for stream in (3, 5):
            pair.server.credit(stream, pair.server.windows()[stream].unread)
    assert len(body(pair.at_server, 3)) == len(body(pair.at_server, 5)) == 200_000
    assert len(body(pair.at_server, 1)) == 65_536
    pair.client.send(Ping(data=b"are you?"))
    pair.to_server()
    assert (Kind.PING, 0) in [(found.kind, found.stream) for found in frames(output(pair.server))]
    pair.client.send(Reset(stream=1, code=8))
    pair.flow()
    assert Reset(stream=1, code=8) in pair.at_server


def test_a_hundred_stalled_streams_do_not_starve_the_last_one() -> None:
    pair = Pair(server=SMALL)
    for stream in range(1, 200, 2):
        pair.request(stream, bytes(2000), end=False)
    pair.flow()
    assert pair.server.unconsumed == 100_000
    pair.request(201, bytes(50_000))
    got = 0
    while End(stream=201) not in pair.at_server:
        pair.flow()
        unread = pair.server.windows()[201].unread
        assert unread, "the last stream stands still"
        pair.server.credit(201, min(unread, 100))
        got += min(unread, 100)
    assert len(body(pair.at_server, 201)) == 50_000


def test_credit_goes_back_at_a_quarter_of_the_window_and_not_before() -> None:
    client = ByHand(SMALL)
    client.says(client.head(1), data(1, bytes(500)))
    output(client.server)
    client.server.credit(1, 249)
    assert not client.server.has_output
    client.server.credit(1, 1)
    assert updates(output(client.server)) == {1: 250, 0: 250}


def test_over_credit_is_refused_and_changes_nothing() -> None:
    client = ByHand(SMALL)
    client.says(client.head(1), data(1, bytes(500)))
    for wrong in (501, -1):
        with pytest.raises(LocalProtocolError, match="credit"):
            client.server.credit(1, wrong)
    with pytest.raises(LocalProtocolError, match="credit"):
        client.server.credit(3, 1)
    client.server.credit(1, 500)
    with pytest.raises(LocalProtocolError, match="credit"):
        client.server.credit(1, 1)
    client.server.credit(99, 0)
    check(client.server)


def test_the_window_doubles_up_to_its_limit_for_a_consumer_that_keeps_up() -> None:
    client = ByHand(SMALL)
    client.says(client.head(1))
    seen = []
    for _ in range(4):
        window = client.server.windows()[1].library
        seen.append(window)
        client.says(data(1, bytes(window)))
        client.server.credit(1, window)
    assert seen == [1000, 2000, 4000, 4000]


def test_the_window_does_not_grow_for_a_slow_consumer_nor_for_a_peer_that_uses_little() -> None:
    slow = ByHand(SMALL)
    slow.says(slow.head(1), data(1, bytes(1000)))
    for _ in range(10):
        slow.server.credit(1, 400)
        slow.says(data(1, bytes(400)))
    assert slow.server.windows()[1].granted == 1000
    idle = ByHand(SMALL)
    idle.says(idle.head(1))
    for _ in range(50):
        idle.says(data(1, bytes(100)))
        idle.server.credit(1, 100)
    assert idle.server.windows()[1].granted == 1000


def test_a_window_grows_only_as_far_as_the_budget_has_room() -> None:
    budget = ByteBudget(FLOOR + 1500)
    client = ByHand(SMALL, budget=budget)
    client.says(client.head(1))
    for _ in range(3):
        window = client.server.windows()[1].library
        client.says(data(1, bytes(window)))
        client.server.credit(1, window)
    assert client.server.windows()[1].granted == 2000
    assert budget.used == FLOOR + 1000
    client.server.send(Reset(stream=1, code=8))
    assert budget.used == 0


def test_a_stream_without_budget_is_refused_without_an_event() -> None:
    budget = ByteBudget(2 * FLOOR)
    pair = Pair(budget=budget)
    for stream in (1, 3, 5):
        pair.request(stream, b"x")
    pair.flow()
    assert [event.stream for event in pair.at_server if isinstance(event, Request)] == [1, 3]
    assert pair.at_client == [Reset(stream=5, code=7)]
    assert budget.used == 2 * FLOOR
    pair.respond(1)
    pair.flow()
    assert budget.used == 2 * FLOOR, "a byte is unread"
    pair.server.credit(1, 1)
    assert budget.used == FLOOR
    pair.request(7)
    pair.flow()
    assert Request in [type(event) for event in pair.at_server if event.stream == 7]  # type: ignore[union-attr]
    pair.server.close()
    pair.server.drop(3)
    assert budget.used == 0
    assert budget.high_water == 2 * FLOOR


def test_a_window_alone_takes_nothing_and_what_is_unread_is_paid_for_in_steps() -> None:
    budget = ByteBudget(1_000_000)
    client = ByHand(budget=budget)
    client.says(client.head(1), data(1, bytes(FLOOR)))
    assert budget.used == FLOOR
    client.says(data(1, b"x"))
    assert budget.used == FLOOR + STEP
    client.says(data(1, bytes(16_384)), data(1, bytes(16_384)))
    assert budget.used == FLOOR + 3 * STEP
    client.server.credit(1, 2 * 16_384)
    assert budget.used == FLOOR + STEP
    client.server.credit(1, 4000)
    assert budget.used == FLOOR + STEP, "a step stays for the next frame"
    client.server.trim()
    assert budget.used == FLOOR
    client.server.credit(1, FLOOR + 1 - 4000)
    client.server.trim()
    assert budget.used == FLOOR + max(0, client.server.windows()[1].granted - 65_536)
    client.server.send(Reset(stream=1, code=8))
    assert budget.used == 0


def test_who_takes_frame_after_frame_asks_the_budget_once() -> None:
    budget = Counting(1_000_000)
    client = ByHand(budget=budget)  # type: ignore[arg-type]
    client.says(client.head(1))
    for _ in range(50):
        client.says(data(1, bytes(10_000)))
        client.server.credit(1, 10_000)
    assert client.server.windows()[1].granted == 65_536, "which did not grow"
    assert budget.asked == 2, "at the beginning of the stream, and for its first frame"


class Counting:
    """A budget that counts how often it is asked."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.asked = limit, 0, 0

    @property
    def held(self) -> int:
        return self.used

    def try_reserve(self, n: int) -> bool:
        self.asked += 1
        self.used += n
        return True

    def release(self, n: int) -> None:
        self.used -= n


@pytest.mark.parametrize("payload_path", [True, False])
def test_what_finds_no_budget_is_dropped_and_credited_and_its_neighbour_goes_on(payload_path: bool) -> None:
    budget = ByteBudget(3 * FLOOR + STEP)
    client = ByHand()
    client.server = server = HTTP2Connection(Role.SERVER, budget=budget, payload_path=payload_path)
    client.says(*ByHand.OPENING, client.head(1), client.head(3))
    output(server)
    assert client.says(data(1, bytes(10_000))) == [Data(stream=1, buffers=(bytes(10_000),))]
    assert client.says(data(3, bytes(4000))) == [Data(stream=3, buffers=(bytes(4000),))]
    assert client.says(data(3, bytes(100))) == [NoRoom(stream=3, n=100)]
    assert client.says(data(3, bytes(16_384)), data(3, b"", END_STREAM)) == [], "nothing more is told of it"
    assert server.unconsumed == 14_000
    assert updates(output(server)).get(0, 0) == 100 + 16_384
    assert client.says(data(1, b"x")) == [Data(stream=1, buffers=(b"x",))]
    check(server)
    server.respond(3, 503, ())
    server.credit(3, 4000)
    output(server)
    assert 3 not in server.windows()
    check(server)


def test_another_budget_may_pay_for_a_stream_that_has_begun() -> None:
    first, second = ByteBudget(1_000_000), ByteBudget(1_000_000)
    client = ByHand(budget=first)
    client.says(client.head(1), data(1, bytes(5000)))
    moved = client.server.charge(1, second)
    first.release(moved)
    assert second.try_reserve(moved)
    client.says(data(1, bytes(16_000)))
    assert (first.used, second.used) == (0, FLOOR + 2 * STEP)
    client.server.credit(1, 21_000)
    client.server.send(Reset(stream=1, code=8))
    assert (first.used, second.used) == (0, 0)
    assert client.server.charge(1, first) == 0


def test_a_client_without_budget_cannot_open() -> None:
    client = HTTP2Connection(Role.CLIENT, budget=ByteBudget(FLOOR - 1))
    assert not client.can_open
    with pytest.raises(LocalProtocolError, match="can_open"):
        client.send(Request(stream=1, head=Head(method=b"GET", target=b"/", authority=b"h")))


def test_padding_is_credited_at_once() -> None:
    client = ByHand(SMALL)
    client.says(client.head(1))
    output(client.server)
    events = client.says(data(1, bytes([200]) + b"x" * 10 + bytes(200), PADDED), data(1, bytes([99]) + bytes(99), PADDED))
    assert events == [Data(stream=1, buffers=(b"x" * 10,))]
    assert client.server.unconsumed == 10
    assert updates(output(client.server)) == {1: 301, 0: 301}
    check(client.server)


@pytest.mark.parametrize("ending", ["peer resets", "we reset"])
def test_unread_bytes_of_a_reset_stream_are_credited_to_the_connection_exactly_once(ending: str) -> None:
    client = ByHand()
    client.says(client.head(1), data(1, bytes(16_384)), data(1, bytes(16_384)))
    output(client.server)
    before = client.server.windows()[0].library
    if ending == "we reset":
        client.server.send(Reset(stream=1, code=8))
    else:
        assert client.says(frame(Kind.RST_STREAM, 0, 1, (8).to_bytes(4))) == [Reset(stream=1, code=8)]
    client.server.credit(1, 20_000)
    client.server.credit(1, 2768)
    assert client.server.drop(1) == 10_000
    assert client.server.drop(1) == 0
    with pytest.raises(LocalProtocolError):
        client.server.credit(1, 1)
    assert set(client.server.windows()) == {0}
    connection = client.server.windows()[0]
    assert connection.unread == 0
    assert updates(output(client.server)).keys() <= {0}
    assert connection.granted - connection.owed == connection.library <= before + 32_768
    check(client.server)


def test_credit_for_streams_that_h2_has_forgotten_still_counts() -> None:
    pair = Pair()
    pair.request(1, bytes(60_000))
    pair.flow()
    pair.respond(1)
    pair.flow()
    for stream in range(3, 403, 2):
        pair.request(stream)
        pair.to_server()
        pair.respond(stream)
        pair.flow()
    assert 1 not in pair.server._h2.streams
    for _ in range(60):
        pair.server.credit(1, 1000)
        check(pair.server)
    assert pair.server.unconsumed == 0


def test_drop_credits_what_is_unread_and_what_still_comes() -> None:
    client = ByHand(SMALL)
    client.says(client.head(1), data(1, bytes(900)))
    assert client.server.drop(1) == 900
    for _ in range(20):
        assert client.says(data(1, bytes(800))) == []
        assert client.server.unconsumed == 0
    assert client.server.windows()[1].granted == 1000, "a window that nobody reads does not grow"
    assert client.says(data(1, b"", END_STREAM)) == []
    assert client.server.drop(77) == 0
    client.server.send(Response(stream=1, status=200))
    client.server.send(End(stream=1))
    assert client.server.open_streams == 0


def test_the_connection_window_shrinks_by_withholding_when_streams_leave() -> None:
    client = ByHand()
    client.says(*(client.head(stream, flags=0) for stream in range(1, 21, 2)))
    grown = client.server.windows()[0].granted
    assert grown == 11 * 65_536
    client.says(*(data(stream, bytes(16_384)) for stream in range(1, 21, 2)))
    for stream in range(1, 21, 2):
        client.server.send(Reset(stream=stream, code=8))
        client.server.drop(stream)
    output(client.server)
    left = client.server.windows()[0]
    assert left.granted == grown - 9 * 16_384, "all but what one more stream may need"
    assert left.library == left.granted - left.owed
    (request,) = client.says(client.head(21))
    assert isinstance(request, Request)
    check(client.server)


def test_the_pure_policy_never_owes_more_than_a_quarter() -> None:
    windows = ReceiveWindows(initial=1000, maximum=1000, budget=None)
    assert windows.connection_increment() == 0
    assert windows.ledger(None, 0).granted == FIRST_CONNECTION_WINDOW
    opened = [windows.open(1000) for _ in range(100)]
    window = opened[0]
    assert window is not None
    assert windows.connection_increment() == 101_000 - FIRST_CONNECTION_WINDOW
    windows.received(window, 1000)
    for _ in range(1000):
        if windows.consumed(window, 1):
            windows.stream_increment(window, grow=True)
            windows.connection_increment()
        assert windows.ledger(window, 0).owed < 250
        assert windows.ledger(None, 0).owed < 250


def test_response_windows_work_the_same_for_a_client() -> None:
    pair = Pair(client=SMALL)
    pair.request(1)
    pair.flow()
    pair.respond(1, bytes(20_000))
    pair.flow()
    assert pair.client.unconsumed == 1000
    events: list[Event] = []
    while pair.client.unconsumed:
        pair.client.credit(1, pair.client.unconsumed)
        pair.flow()
        events += pull(pair.client)
    assert len(body(pair.at_client)) == 20_000
    assert pair.at_client[-1] == End(stream=1)


def test_what_a_window_has_grown_is_given_back_when_the_peer_has_said_all() -> None:
    budget = ByteBudget(100_000)
    client = ByHand(SMALL, budget=budget)
    client.says(client.head(1), data(1, bytes(900)))
    client.server.credit(1, 900)
    assert client.server.windows()[1].granted > 1000
    assert budget.used > FLOOR
    client.says(data(1, bytes(500), END_STREAM))
    assert budget.used == client.server.reserved(1) == FLOOR
    client.server.credit(1, 500)
    client.server.respond(1, 204, ())
    output(client.server)
    assert budget.used == 0
