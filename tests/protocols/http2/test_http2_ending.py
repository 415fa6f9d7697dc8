"""How HTTP/2 streams and connections end: early answers, resets, late frames, GOAWAY from either side, lost transports."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protocols.buffers import ByteBudget
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import ConnectionEnd, Data, End, GoAway, Ping, Request, Reset, Response
from protocols.http2.connection import LOOKS, HTTP2Connection, HTTP2Limits
from protocols.http2.frames import ACK, GOODBYES, LARGEST_ID, Kind
from protocols.http2.windows import FLOOR
from protocols.roles import Role
from tests.protocols.http2.http2_helpers import (
    DEFAULT,
    END_STREAM,
    GET,
    POST,
    ByHand,
    Pair,
    body,
    check,
    data,
    frame,
    frames,
    kinds,
    output,
    pull,
    settings,
    take,
)


def rst(stream: int, code: int) -> bytes:
    return frame(Kind.RST_STREAM, 0, stream, code.to_bytes(4))


def goaway(last: int, code: int = 0, debug: bytes = b"") -> bytes:
    return frame(Kind.GOAWAY, 0, 0, last.to_bytes(4) + code.to_bytes(4) + debug)


def early(limits: HTTP2Limits = DEFAULT, *, status: int = 404, budget: ByteBudget | None = None) -> ByHand:
    """A client whose request is answered before its end, the answer written."""
    client = ByHand(limits, budget=budget)
    client.says(client.head(1))
    client.server.respond(1, status, ())
    output(client.server)
    return client


def ticks(server: HTTP2Connection, times: int) -> list[list[tuple[Kind, int]]]:
    """The kinds and streams of the frames that go out after each tick."""
    written = []
    for _ in range(times):
        server.tick()
        written.append(kinds(output(server)))
    return written


def test_an_early_answer_ends_with_end_stream_and_no_error_in_a_later_write() -> None:
    client = ByHand()
    server = client.server
    client.says(client.head(1), data(1, b"first"))
    output(server)
    server.send(Response(stream=1, status=413))
    server.send(Data(stream=1, buffers=(bytes(30_000),)))
    server.send(End(stream=1))
    written, sent = take(server, 16_500)
    assert kinds(written)[:2] == [(Kind.HEADERS, 1), (Kind.DATA, 1)]
    assert sent.ended == []
    assert (server.is_open(1), server.open_streams) == (True, 1)
    server.tick()
    written, sent = take(server)
    (last,) = frames(written)
    assert (last.kind, last.flags) == (Kind.DATA, END_STREAM)
    assert sent.ended == [1]
    assert (server.is_open(1), server.open_streams, server.lingering) == (False, 0, 1)
    assert not server.tick(), "a moment has not passed"
    assert not server.has_output
    assert server.tick()
    written, sent = take(server)
    (reset,) = frames(written)
    assert (reset.kind, reset.payload) == (Kind.RST_STREAM, bytes(4))
    assert sent.ended == [], "it has had its end"
    assert server.lingering == server.counters.resets == 0
    assert ticks(server, 3) == [[], [], []]


def test_the_end_of_an_early_answer_waits_for_every_byte_of_it() -> None:
    client = ByHand()
    server = client.server
    client.says(settings({4: 10}), client.head(1))
    output(server)
    server.send(Response(stream=1, status=200))
    server.send(Data(stream=1, buffers=(bytes(20),)))
    server.send(End(stream=1, trailers=((b"a", b"b"),)))
    assert kinds(output(server)) == [(Kind.HEADERS, 1), (Kind.DATA, 1)]
    assert ticks(server, 3) == [[], [], []]
    client.says(frame(Kind.WINDOW_UPDATE, 0, 1, (10).to_bytes(4)))
    assert kinds(output(server)) == [(Kind.DATA, 1), (Kind.HEADERS, 1)]
    assert ticks(server, 2) == [[], [(Kind.RST_STREAM, 1)]]


def test_an_answer_without_payload_is_ended_byte_by_byte_and_reset_only_then() -> None:
    client = ByHand()
    server = client.server
    client.says(client.head(1))
    output(server)
    server.send(Response(stream=1, status=401))
    server.send(End(stream=1))
    written, ended = b"", []
    while server.has_output:
        assert not server.tick()
        piece, sent = take(server, 1)
        written += piece
        ended.append(sent.ended)
    assert kinds(written) == [(Kind.HEADERS, 1)]
    assert ended == [[]] * (len(written) - 1) + [[1]]
    assert ticks(server, 2) == [[], [(Kind.RST_STREAM, 1)]]


def test_what_is_handed_out_and_not_written_is_not_reset() -> None:
    client = ByHand()
    server = client.server
    client.says(client.head(1))
    output(server)
    server.respond(1, 413, (), (bytes(10_000),))
    assert server.data_to_send(65_536)
    assert (server.is_open(1), server.lingering) == (False, 0)
    assert ticks_of(server, 5) == 0
    assert server.data_sent().ended == [1]
    assert server.lingering == 1


def ticks_of(server: HTTP2Connection, times: int) -> int:
    """Ticks the server `times` times, and returns how many of the ticks have reset something."""
    return sum(server.tick() for _ in range(times))


@pytest.mark.parametrize("payload_path", [True, False])
@pytest.mark.parametrize("at_most", [16, 100, 65_536])
def test_reset_and_end_stream_never_share_a_write_wherever_the_upload_is_cut(payload_path: bool, at_most: int) -> None:
    upload = b"".join(data(1, bytes(n)) for n in (0, 1, 100, 20))
    for cut in range(len(upload) + 1):
        client = ByHand()
        client.server = server = HTTP2Connection(Role.SERVER, HTTP2Limits(linger=50), payload_path=payload_path)
        client.says(*ByHand.OPENING, client.head(1), upload[:cut])
        output(server)
        server.respond(1, 404, (), (b"nobody",))
        writes, rest = [], upload[cut:]
        while server.has_output or rest or server.lingering:
            if server.has_output:
                writes.append(take(server, at_most)[0])
            elif rest:
                assert client.says(rest[:1]) == []
                rest = rest[1:]
            else:
                server.tick()
        found = kinds(b"".join(writes))
        assert [each for each in found if each[1]] == [(Kind.HEADERS, 1), (Kind.DATA, 1), (Kind.RST_STREAM, 1)]
        answered = max(at for at, each in enumerate(writes) if each.endswith(b"nobody"[-len(each) :]))
        reset = b"".join(writes[answered + 1 :])
        assert reset == rst(1, 0), "and nothing of it before"
        server.drop(1)
        assert (server.unconsumed, set(server.windows())) == (0, {0})
        check(server)


def test_a_peer_that_goes_on_is_not_reset_until_it_stops() -> None:
    client = early()
    server = client.server
    for _ in range(10):
        assert client.says(data(1, b"more")) == []
        assert ticks(server, 1) == [[]]
    assert ticks(server, 1) == [[(Kind.RST_STREAM, 1)]]


def test_a_peer_that_never_stops_is_reset_after_so_many_ticks() -> None:
    client = early()
    for _ in range(LOOKS):
        client.says(data(1, b"x"))
        assert not client.server.tick()
    client.says(data(1, b"x"))
    assert client.server.tick()
    assert kinds(output(client.server)) == [(Kind.RST_STREAM, 1)]


@pytest.mark.parametrize("payload_path", [True, False])
@pytest.mark.parametrize("padding", [0, 9])
def test_a_flood_after_the_answer_is_credited_to_its_limit_and_costs_no_memory(payload_path: bool, padding: int) -> None:
    budget, limit = ByteBudget(1_000_000), 100_000
    client = ByHand()
    client.server = server = HTTP2Connection(
        Role.SERVER, HTTP2Limits(linger=limit), budget=budget, payload_path=payload_path
    )
    client.says(*ByHand.OPENING, client.head(1))
    server.respond(1, 413, ())
    output(server)
    assert budget.used == 0
    content = bytes((padding,)) * bool(padding) + bytes(1000)
    swallowed, written = 0, []
    while swallowed <= limit:
        assert (Kind.RST_STREAM, 1) not in written, "not before the limit"
        assert client.says(data(1, content, 8 * bool(padding))) == []
        swallowed += len(content)
        check(server)
        written += kinds(output(server))
    assert written[-1] == (Kind.RST_STREAM, 1)
    assert (Kind.WINDOW_UPDATE, 1) in written
    assert (budget.used, server.unconsumed, server.lingering, set(server.windows())) == (0, 0, 0, {0})
    assert client.says(data(1, content, 8 * bool(padding))) == [], "as after any reset of ours"
    assert budget.high_water == FLOOR


def test_a_flood_of_empty_frames_after_the_answer_is_counted_and_does_not_hold_the_stream() -> None:
    client = early()
    for _ in range(100):
        assert client.says(data(1, b"")) == []
    assert client.server.counters.empty_data == 100
    assert not client.server.tick()
    client.says(data(1, b""))
    assert client.server.tick()


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(lambda client: data(1, b"", END_STREAM), id="END_STREAM"),
        pytest.param(lambda client: data(1, b"last", END_STREAM), id="the last DATA"),
        pytest.param(lambda client: client.head(1, [(b"x-new", b"value")], END_STREAM), id="trailers"),
        pytest.param(lambda client: rst(1, 0), id="RST_STREAM(NO_ERROR)"),
        pytest.param(lambda client: rst(1, 8), id="RST_STREAM(CANCEL)"),
    ],
)
def test_the_peers_end_or_reset_ends_a_lingering_stream_silently(last: Callable[[ByHand], bytes]) -> None:
    client = early()
    server = client.server
    assert client.says(data(1, b"more"), last(client)) == []
    assert output(server) == b""
    assert (server.lingering, server.open_streams, set(server.windows())) == (0, 0, {0})
    assert ticks(server, 3) == [[], [], []]
    request, end = client.says(client.head(3, [*GET, (b"x-new", b"value")], END_STREAM))
    assert isinstance(request, Request)
    assert request.head.headers == ((b"x-new", b"value"),), "the header table was kept"
    assert end == End(stream=3)


def test_malformed_trailers_of_an_answered_request_end_it_as_silently() -> None:
    client = early()
    assert client.says(client.head(1, [(b"Upper", b"x")], END_STREAM)) == []
    assert output(client.server) == b""
    assert (client.server.lingering, set(client.server.windows())) == (0, {0})


def test_a_lingering_stream_takes_no_more_than_its_window() -> None:
    client = early(HTTP2Limits(initial_window=1000, max_window=1000))
    client.says(data(1, bytes(200)), data(1, bytes(800)))  # 1,000 were credited, and are in no write yet
    assert client.fails(data(1, bytes(1001))) == 3


def test_lingering_streams_never_keep_a_new_one_out() -> None:
    client = ByHand(HTTP2Limits(streams=10))
    server = client.server
    numbers = range(1, 41, 2)
    resets = []
    for stream in numbers:
        client.says(client.head(stream))
        server.respond(stream, 404, ())
        resets += [stream for kind, stream in kinds(output(server)) if kind is Kind.RST_STREAM]
        assert server.lingering <= 5
        assert server.must_close is False
    assert resets == list(numbers)[:-5], "the oldest first"
    for stream in range(41, 61, 2):  # all ten places
        (request,) = client.says(client.head(stream))
        assert isinstance(request, Request)
        assert server.lingering <= (10 - server.open_streams) // 2
    assert client.says(client.head(61)) == []
    *_, last = frames(output(server))
    assert (last.kind, last.stream, last.payload) == (Kind.RST_STREAM, 61, (7).to_bytes(4))


def test_where_one_stream_is_allowed_one_lingers_until_the_next_comes() -> None:
    client = early(HTTP2Limits(streams=1))
    server = client.server
    assert server.lingering == 1
    (request,) = client.says(client.head(3))
    assert isinstance(request, Request)
    assert server.lingering == 0
    assert kinds(output(server)) == [(Kind.RST_STREAM, 1)]
    server.respond(3, 404, ())
    assert kinds(output(server)) == [(Kind.HEADERS, 3)]
    assert server.lingering == 1


def test_neither_a_drain_nor_the_peers_end_waits_for_a_lingering_stream() -> None:
    client = early()
    assert client.server.idle
    client.server.shutdown(True)
    assert client.server.must_close
    gone = early()
    gone.server.receive_eof()
    assert gone.server.must_close
    assert pull(gone.server) == [ConnectionEnd()]
    gone.server.close()
    assert (gone.server.lingering, gone.server.tick(), set(gone.server.windows())) == (0, False, {0})


def test_what_was_given_out_before_the_answer_is_credited_though_the_stream_lingers() -> None:
    budget = ByteBudget(1_000_000)
    client = ByHand(budget=budget)
    server = client.server
    client.says(client.head(1), data(1, bytes(100)))
    server.respond(1, 404, ())
    output(server)
    assert budget.used == FLOOR
    server.credit(1, 40)
    assert server.drop(1) == 60
    assert (budget.used, server.lingering) == (0, 1)
    assert server.drop(1) == 0
    assert ticks(server, 2)[-1] == [(Kind.RST_STREAM, 1)]
    assert set(server.windows()) == {0}
    check(server)


@pytest.mark.parametrize("payload_path", [True, False])
def test_only_so_many_closed_streams_are_remembered(payload_path: bool) -> None:
    client = ByHand(payload_path=payload_path)
    for stream in range(1, 3001, 2):
        client.says(client.head(stream))
        client.server.send(Reset(stream=stream, code=8))
    assert len(client.server._reset_by_us) == 1024
    assert len(client.server._h2._closed_streams) == 1024
    assert client.says(data(2999, b"late")) == []
    output(client.server)
    assert client.says(data(1, b"very late")) == []
    assert kinds(output(client.server)) == [(Kind.RST_STREAM, 1)]


def test_no_reset_follows_when_the_request_became_whole_in_time() -> None:
    client = ByHand()
    server = client.server
    client.says(settings({4: 0}), client.head(1))
    output(server)
    server.send(Response(stream=1, status=200))
    server.send(Data(stream=1, buffers=(b"x",)))
    server.send(End(stream=1))
    assert client.says(data(1, b"late", END_STREAM)) == [], "after its End nobody reads the request"
    client.says(frame(Kind.WINDOW_UPDATE, 0, 1, (10).to_bytes(4)))
    assert kinds(output(server)) == [(Kind.HEADERS, 1), (Kind.DATA, 1)]
    assert server.unconsumed == 0


def test_data_after_our_complete_answer_is_counted_credited_and_dropped() -> None:
    client = ByHand()
    server = client.server
    client.says(client.head(1), data(1, bytes(100)))
    server.send(Response(stream=1, status=404))
    server.send(End(stream=1))
    output(server)
    assert server.drop(1) == 100
    for _ in range(50):
        assert client.says(data(1, bytes(16_384))) == []
        check(server)
        for found in frames(output(server)):
            assert found.kind == Kind.WINDOW_UPDATE, "no answer but credit"
    assert server.windows()[1].available > 49_000
    assert client.says(data(1, b"", END_STREAM)) == []
    assert server.counters.resets == 0
    request, _ = client.says(client.head(3, GET, END_STREAM))
    assert isinstance(request, Request)


def test_trailers_after_the_reset_behind_our_answer_are_ignored_and_keep_the_header_table() -> None:
    client = early()
    server = client.server
    assert ticks_of(server, 2)
    output(server)
    assert client.says(client.head(1, [(b"x-new", b"value")], END_STREAM)) == []
    assert output(server) == b""
    request, _ = client.says(client.head(3, [*GET, (b"x-new", b"value")], END_STREAM))
    assert isinstance(request, Request)
    assert request.head.headers == ((b"x-new", b"value"),)


def test_an_early_answer_reaches_our_client_whole_and_frees_the_stream() -> None:
    pair = Pair()
    pair.request(1, bytes(500_000), end=False)
    pair.flow()
    pair.respond(1, b"too much")
    pair.flow()
    assert pair.at_client == [
        Response(stream=1, status=200),
        Data(stream=1, buffers=(b"too much",)),
        End(stream=1),
    ]
    assert pair.client.is_open(1), "it may send the rest"
    while pair.server.lingering:
        pair.server.tick()
        pair.flow()
    assert pair.at_client[3:] == [Reset(stream=1, code=0)]
    assert not pair.client.is_open(1)
    assert pair.client.room(1) == 0
    assert not pair.client.has_output, "what was queued of the request is dropped"
    with pytest.raises(LocalProtocolError, match="not open"):
        pair.client.send(Data(stream=1, buffers=(b"more",)))


def test_a_client_reads_an_answer_that_comes_before_its_own_end() -> None:
    client = ByHand()
    client.says(client.head(1))
    pair = Pair()
    pair.request(1, end=False)
    pair.flow()
    pair.server.send(Response(stream=1, status=200))
    pair.flow()
    pair.client.send(End(stream=1))
    pair.flow()
    assert pair.client.is_open(1)
    pair.server.send(End(stream=1))
    pair.flow()
    assert pair.at_client[-1] == End(stream=1)


def test_sending_on_a_stream_that_the_peer_reset_is_a_local_error() -> None:
    client = ByHand()
    server = client.server
    client.says(client.head(1))
    server.send(Response(stream=1, status=200))
    server.send(Data(stream=1, buffers=(bytes(10),)))
    assert client.says(rst(1, 8)) == [Reset(stream=1, code=8)]
    for event in (Data(stream=1, buffers=(b"x",)), End(stream=1), Reset(stream=1), Response(stream=1, status=200)):
        with pytest.raises(LocalProtocolError, match="not open"):
            server.send(event)
    assert (Kind.DATA, 1) not in kinds(output(server))
    assert server.counters.resets == 1
    assert client.says(rst(1, 8)) == []


def test_our_reset_discards_what_is_queued() -> None:
    pair = Pair()
    pair.request(1)
    pair.flow()
    pair.respond(1, bytes(100_000), end=False)
    take(pair.server, 20_000)
    pair.server.send(Reset(stream=1, code=2))
    assert kinds(output(pair.server)) == [(Kind.RST_STREAM, 1)]
    with pytest.raises(LocalProtocolError):
        pair.server.send(Reset(stream=1, code=2**32))


def test_an_error_code_out_of_range_is_a_local_error() -> None:
    pair = Pair()
    pair.request(1)
    pair.flow()
    with pytest.raises(LocalProtocolError, match="not an error code"):
        pair.server.send(Reset(stream=1, code=2**32))
    with pytest.raises(LocalProtocolError, match="out of range"):
        pair.server.send(GoAway(code=-1))


@pytest.mark.parametrize("answers", [True, False])
def test_a_drain_in_two_steps_loses_no_stream(answers: bool) -> None:
    pair = Pair()
    pair.request(1, b"a", end=False)
    pair.flow()
    pair.server.shutdown(False)
    pair.server.shutdown(False)
    written = output(pair.server)
    goodbye, ping = frames(written)
    assert goodbye.payload == LARGEST_ID.to_bytes(4) + bytes(4)
    assert (ping.kind, ping.flags) == (Kind.PING, 0)
    pair.request(3)  # sent before the client heard of it
    pair.to_server()
    pair.client.receive_data(written)
    assert pull(pair.client) == [GoAway(code=0, last_stream=LARGEST_ID)]
    assert not pair.client.can_open
    if answers:  # its acknowledgement of the second PING is the second step
        pair.to_server()
        pair.to_client()
        pair.to_server()
    else:
        pair.server.shutdown(True)
    pair.server.shutdown(True)
    pair.server.shutdown(False)
    written = output(pair.server)
    *_, last = frames(written)
    assert kinds(written).count((Kind.GOAWAY, 0)) == 1
    assert last.payload == (3).to_bytes(4) + bytes(4)
    pair.client.receive_data(written)
    assert pair.server.must_close is False
    pair.client.send(Data(stream=1, buffers=(b"b",)))
    pair.client.send(End(stream=1))
    for stream in (1, 3):
        pair.flow()
        pair.respond(stream, b"answer")
    pair.flow()
    assert body(pair.at_server, 1) == b"ab"
    for stream in (1, 3):
        assert body(pair.at_client, stream) == b"answer"
        assert End(stream=stream) in pair.at_client
    assert (pair.server.must_close, pair.client.must_close) == (True, True)


def test_only_the_answers_to_its_own_pings_are_the_second_step() -> None:
    client = ByHand()
    client.says(client.head(1))
    client.server.send(Ping(data=b"an other"))
    client.server.shutdown(False)
    output(client.server)
    client.says(frame(Kind.PING, ACK, 0, b"an other"), client.head(3))
    assert (Kind.GOAWAY, 0) not in kinds(output(client.server))
    # the first answer may overtake a head that waits to be written
    client.says(*[frame(Kind.PING, ACK, 0, GOODBYES[0])] * 2, client.head(5))
    written = [(found.kind, found.payload) for found in frames(output(client.server))]
    assert [each for each in written if each[0] != Kind.WINDOW_UPDATE] == [(Kind.PING, GOODBYES[1])]
    client.says(*[frame(Kind.PING, ACK, 0, GOODBYES[1])] * 2)
    assert [found.payload for found in frames(output(client.server))] == [(5).to_bytes(4) + bytes(4)]


def test_a_connection_on_which_nothing_is_open_is_over_when_its_pings_are_answered() -> None:
    pair = Pair()
    pair.server.shutdown(False)
    assert not pair.server.must_close
    pair.flow()
    assert pair.server.must_close


def test_streams_that_come_after_the_last_goaway_are_ignored() -> None:
    client = ByHand()
    client.says(client.head(1))
    client.server.shutdown(True)
    output(client.server)
    # a client may have forgotten them, so even an RST_STREAM would be an error of the connection
    assert client.says(client.head(3), data(3, bytes(1000)), client.head(5), data(3, b"", END_STREAM)) == []
    assert {found.stream for found in frames(output(client.server))} <= {0}
    assert client.says(data(1, b"goes on", END_STREAM)) == [Data(stream=1, buffers=(b"goes on",)), End(stream=1)]
    assert client.server.counters.resets == 0


def test_a_clients_goaway_lets_its_streams_finish() -> None:
    client = ByHand()
    server = client.server
    client.says(client.head(1))
    server.send(Response(stream=1, status=200))
    assert client.says(goaway(0, debug=b"bye")) == [GoAway(code=0, last_stream=0, debug=b"bye")]
    seen = [server.must_close]
    assert body(client.says(data(1, b"still", END_STREAM))) == b"still"
    server.send(Data(stream=1, buffers=(b"here",)))
    server.send(End(stream=1))
    assert data(1, b"here", END_STREAM) in output(server), "what h2 held was not cleared"
    assert [*seen, server.must_close] == [False, True]
    assert client.says(client.head(3)) == []
    assert kinds(output(server))[-1] == (Kind.RST_STREAM, 3)


def test_a_goaway_with_an_error_is_reported_and_the_streams_finish_too() -> None:
    client = ByHand()
    client.says(client.head(1, GET, END_STREAM))
    assert client.says(goaway(0, 11)) == [GoAway(code=11, last_stream=0)]
    client.server.send(Response(stream=1, status=200))
    client.server.send(End(stream=1))
    assert client.server.must_close


def test_a_client_fails_the_streams_that_the_server_never_took() -> None:
    pair = Pair()
    for stream in (1, 3, 5):
        pair.request(stream, end=False)
    output(pair.client)
    pair.client.receive_data(goaway(3))
    assert pull(pair.client) == [GoAway(last_stream=3), Reset(stream=5, code=7)]
    assert pair.client.is_open(3)
    assert output(pair.client) == b"", "to the server that stream is idle"
    with pytest.raises(LocalProtocolError, match="can_open"):
        pair.request(7)


def test_our_goaway_with_an_error_code_must_close_at_once() -> None:
    pair = Pair()
    pair.request(1)
    pair.flow()
    pair.server.send(GoAway(code=11, last_stream=0, debug=b"calm"))
    assert pair.server.must_close
    (last,) = frames(output(pair.server))
    assert last.payload == (1).to_bytes(4) + (11).to_bytes(4) + b"calm", "stream 1 was accepted"


def test_a_goaway_that_is_no_goaway_is_a_connection_error() -> None:
    assert ByHand().fails(frame(Kind.GOAWAY, 0, 0, b"short")) == 6
    assert ByHand().fails(frame(Kind.GOAWAY, 0, 1, bytes(8))) == 1


def test_a_lost_transport_ends_every_stream_and_returns_the_budget_as_it_is_read() -> None:
    budget = ByteBudget(1_000_000)
    pair = Pair(budget=budget)
    pair.request(1, b"unread", end=False)
    pair.request(3, end=False)
    pair.flow()
    pair.respond(3, b"unwritten", end=False)
    pair.server.data_to_send(100)
    pair.server.close()
    pair.server.close()
    assert pair.server.must_close
    assert not pair.server.has_output
    assert pair.server.next_event() == ConnectionEnd()
    assert not pair.server.is_open(1)
    assert budget.used == FLOOR
    pair.server.credit(1, 2)
    assert pair.server.drop(1) == 4
    assert budget.used == 0
    with pytest.raises(LocalProtocolError, match="over"):
        pair.server.send(End(stream=3))
    pair.server.shutdown(True)
    assert pair.server.data_to_send(100) == []


def test_after_a_protocol_error_goaway_can_still_be_written_and_streams_are_over() -> None:
    budget = ByteBudget(1_000_000)
    client = ByHand(budget=budget)
    server = client.server
    client.says(client.head(1, POST), data(1, b"abc"))
    server.send(Response(stream=1, status=200))
    server.send(Data(stream=1, buffers=(b"queued",)))
    assert client.fails(data(0, b"x")) == 1
    for _ in range(3):
        with pytest.raises(RemoteProtocolError, match="frame with invalid header"):
            server.next_event()
    assert not server.is_open(1)
    assert server.must_close
    with pytest.raises(LocalProtocolError):
        server.send(End(stream=1))
    server.credit(1, 1)
    server.receive_data(bytes(1000))
    assert server._splitter.at_boundary, "what comes now is not even stored"
    assert server.drop(1) == 2
    assert budget.used == 0
