"""How HTTP/2 streams and connections end: early answers, resets, late frames, GOAWAY from either side, lost transports."""

from __future__ import annotations

import pytest

from protocols.buffers import ByteBudget
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import ConnectionEnd, Data, End, GoAway, Request, Reset, Response
from protocols.http2_frames import LARGEST_ID, Kind
from tests.protocols.http2_helpers import (
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


def test_an_early_answer_ends_with_end_stream_then_no_error() -> None:
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
    assert server.is_open(1)
    written, sent = take(server)
    last, reset = frames(written)
    assert (last.kind, last.flags) == (Kind.DATA, END_STREAM)
    assert (reset.kind, reset.payload) == (Kind.RST_STREAM, bytes(4))
    assert sent.ended == [1]
    assert not server.is_open(1)
    assert server.counters.resets == 0


def test_the_reset_behind_an_early_answer_waits_for_every_byte_of_it() -> None:
    client = ByHand()
    server = client.server
    client.says(settings({4: 10}), client.head(1))
    output(server)
    server.send(Response(stream=1, status=200))
    server.send(Data(stream=1, buffers=(bytes(20),)))
    server.send(End(stream=1, trailers=((b"a", b"b"),)))
    assert kinds(output(server)) == [(Kind.HEADERS, 1), (Kind.DATA, 1)]
    client.says(frame(Kind.WINDOW_UPDATE, 0, 1, (10).to_bytes(4)))
    assert kinds(output(server)) == [(Kind.DATA, 1), (Kind.HEADERS, 1), (Kind.RST_STREAM, 1)]


def test_an_answer_without_payload_is_ended_and_reset_at_once() -> None:
    client = ByHand()
    client.says(client.head(1))
    output(client.server)
    client.server.send(Response(stream=1, status=401))
    client.server.send(End(stream=1))
    written, ended = b"", []
    while client.server.has_output:
        piece, sent = take(client.server, 1)
        written += piece
        ended.append(sent.ended)
    assert kinds(written) == [(Kind.HEADERS, 1), (Kind.DATA, 1), (Kind.RST_STREAM, 1)]
    assert ended == [[]] * (len(written) - 1) + [[1]]


def test_only_so_many_closed_streams_are_remembered() -> None:
    client = ByHand()
    for stream in range(1, 3001, 2):
        client.says(client.head(stream))
        client.server.send(Reset(stream=stream, code=8))
    assert len(client.server._reset_by_us) == 1024
    assert len(client.server._h2._closed_streams) <= 1024
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
            assert (found.kind, found.stream) == (Kind.WINDOW_UPDATE, 0), "no answer but credit"
    assert client.says(data(1, b"", END_STREAM)) == []
    assert server.counters.resets == 0
    request, _ = client.says(client.head(3, GET, END_STREAM))
    assert isinstance(request, Request)


def test_trailers_after_our_complete_answer_are_ignored_and_keep_the_header_table() -> None:
    client = ByHand()
    server = client.server
    client.says(client.head(1))
    server.send(Response(stream=1, status=404))
    server.send(End(stream=1))
    output(server)
    assert client.says(client.head(1, [(b"x-new", b"value")], END_STREAM)) == []
    assert output(server) == b""
    request, _ = client.says(client.head(3, [*GET, (b"x-new", b"value")], END_STREAM))
    assert isinstance(request, Request)
    assert request.headers == ((b"x-new", b"value"),)


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
        Reset(stream=1, code=0),
    ]
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


def test_a_drain_in_two_steps_loses_no_stream() -> None:
    pair = Pair()
    pair.request(1, b"a", end=False)
    pair.flow()
    pair.server.shutdown(False)
    pair.server.shutdown(False)
    written = output(pair.server)
    assert [found.payload for found in frames(written)] == [LARGEST_ID.to_bytes(4) + bytes(4)]
    pair.request(3)  # sent before the client heard of it
    pair.to_server()
    pair.client.receive_data(written)
    assert pull(pair.client) == [GoAway(code=0, last_stream=LARGEST_ID)]
    assert not pair.client.can_open
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


def test_streams_that_come_after_the_last_goaway_are_refused_silently() -> None:
    client = ByHand()
    client.says(client.head(1))
    client.server.shutdown(True)
    output(client.server)
    assert client.says(client.head(3), data(3, bytes(1000), END_STREAM)) == []
    refusal = frames(output(client.server))[0]
    assert (refusal.kind, refusal.stream, refusal.payload) == (Kind.RST_STREAM, 3, (7).to_bytes(4))
    assert client.server.is_open(1)
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
    assert budget.used == 65_536
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
