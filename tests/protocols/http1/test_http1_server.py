"""An HTTP/1.1 server: answers and their framing, order, pipelining, and when the connection ends."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import NEED_DATA, PAUSED, ConnectionEnd, Data, End, Head, Request, Response
from protocols.http1.body import Chunks
from protocols.http1.connection import HTTP1Connection
from protocols.roles import Role
from tests.protocols.http1.http1_helpers import answer, append, body, cuts, pull, request, server, written

PING = request(b"POST", b"/p", b"content-length: 4\r\n", b"ping")
UPGRADE = request(fields=b"connection: upgrade\r\nupgrade: websocket\r\n")


def asked(data: bytes = b"", **limits: int) -> HTTP1Connection:
    """A server that has given out a request whole."""
    machine = server(data or request(), **limits)
    pull(machine)
    return machine


def start(machine: HTTP1Connection, status: int = 200, *headers: tuple[bytes, bytes]) -> None:
    machine.send(Response(stream=machine.stream, status=status, headers=headers))


def push(machine: HTTP1Connection, *buffers: bytes) -> None:
    machine.send(Data(stream=machine.stream, buffers=buffers))


def finish(machine: HTTP1Connection, *trailers: tuple[bytes, bytes]) -> None:
    machine.send(End(stream=machine.stream, trailers=trailers))


# -- framing -----------------------------------------------------------------------------------------------------------


def test_an_answer_with_a_length_is_written_as_it_is() -> None:
    machine = asked(PING)
    start(machine, 200, (b"Content-Type", b"text/plain"), (b"content-length", b"4"))
    push(machine, b"po", b"", b"ng")
    finish(machine)
    assert written(machine) == b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\ncontent-length: 4\r\n\r\npong"
    assert not machine.must_close
    assert machine.idle


def test_an_answer_without_a_length_is_chunked_one_chunk_for_each_data() -> None:
    machine = asked()
    start(machine)
    push(machine, b"hello ", b"world")
    push(machine)
    push(machine, b"", b"")
    push(machine, b"!" * 16)
    finish(machine)
    assert written(machine) == (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nb\r\nhello world\r\n10\r\n!!!!!!!!!!!!!!!!\r\n0\r\n\r\n"
    )


def test_trailers_follow_the_last_chunk() -> None:
    machine = asked()
    start(machine)
    finish(machine, (b"x-checksum", b"1"), (b"x-two", b""))
    assert written(machine).endswith(b"\r\n\r\n0\r\nx-checksum: 1\r\nx-two: \r\n\r\n")


def test_for_http_10_a_body_without_length_ends_with_the_connection() -> None:
    machine = asked(request(version=b"1.0", fields=b"connection: keep-alive\r\n"))
    before = machine.must_close
    start(machine)
    assert (before, machine.must_close) == (False, True)
    push(machine, b"a")
    push(machine, b"b")
    finish(machine)
    assert written(machine) == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nab"


def test_http_10_keeps_the_connection_where_it_asks_for_that_and_the_length_is_known() -> None:
    machine = asked(request(version=b"1.0", fields=b"connection: keep-alive\r\n", host=b""))
    answer(machine, 200, b"a")
    assert written(machine) == b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nconnection: keep-alive\r\n\r\na"
    machine.receive_data(request(version=b"1.0", host=b""))
    assert pull(machine)
    answer(machine, 200, b"a")
    assert b"\r\nconnection: close\r\n" in written(machine)
    assert machine.must_close


@pytest.mark.parametrize(("method", "status"), [(b"HEAD", 200), (b"GET", 204), (b"GET", 304), (b"HEAD", 404)])
def test_answers_without_a_body_have_none_and_no_transfer_encoding(method: bytes, status: int) -> None:
    machine = asked(request(method))
    start(machine, status)
    push(machine, b"")
    with pytest.raises(LocalProtocolError):
        push(machine, b"x")
    finish(machine)
    head = written(machine)
    assert head.endswith(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert not machine.must_close


@pytest.mark.parametrize(("method", "status"), [(b"HEAD", 200), (b"GET", 304)])
def test_they_may_declare_the_length_they_would_have(method: bytes, status: int) -> None:
    machine = asked(request(method))
    start(machine, status, (b"content-length", b"1000"))
    finish(machine)
    assert b"content-length: 1000\r\n" in written(machine)


def test_a_status_without_a_standard_phrase_has_none() -> None:
    machine = asked()
    answer(machine, 299)
    assert written(machine).startswith(b"HTTP/1.1 299 \r\n")
    machine = asked()
    answer(machine, 413)
    assert written(machine).startswith(b"HTTP/1.1 413 Content Too Large\r\n")


# -- order -------------------------------------------------------------------------------------------------------------


def test_nothing_can_be_sent_before_a_request() -> None:
    machine = server()
    for event in (Response(stream=0, status=200), Data(stream=0, buffers=(b"x",)), End(stream=0)):
        with pytest.raises(LocalProtocolError):
            machine.send(event)
    assert written(machine) == b""


def test_a_second_head_or_a_body_before_the_head_is_refused() -> None:
    machine = asked()
    with pytest.raises(LocalProtocolError):
        push(machine, b"x")
    with pytest.raises(LocalProtocolError):
        finish(machine)
    start(machine)
    with pytest.raises(LocalProtocolError):
        start(machine)
    finish(machine)
    for late in (Response(stream=1, status=200), Data(stream=1, buffers=(b"x",)), End(stream=1)):
        with pytest.raises(LocalProtocolError):
            machine.send(late)


def test_another_stream_than_the_one_under_way_is_refused() -> None:
    machine = asked()
    for stream in (0, 2):
        with pytest.raises(LocalProtocolError):
            machine.send(Response(stream=stream, status=200))
    assert written(machine) == b""


def test_a_server_sends_no_request() -> None:
    with pytest.raises(LocalProtocolError):
        server().send(Request(stream=1, head=Head(method=b"GET", target=b"/", authority=b"a")))


def test_a_declared_length_is_kept() -> None:
    machine = asked()
    start(machine, 200, (b"content-length", b"4"))
    push(machine, b"po")
    before = machine.room(1)
    with pytest.raises(LocalProtocolError):
        push(machine, b"n", b"g!")
    with pytest.raises(LocalProtocolError):
        finish(machine)
    assert machine.room(1) == before
    push(machine, b"ng")
    finish(machine)
    assert written(machine).endswith(b"\r\n\r\npong")


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, [(b"x", b"a\r\nb: c")]),
        (200, [(b"x", b"a\nb")]),
        (200, [(b"x", b"a\rb")]),
        (200, [(b"x", b"a\0b")]),
        (200, [(b"x", b"\x7f")]),
        (200, [(b"x", b"\r\n")]),
        (200, [(b"x y", b"a")]),
        (200, [(b"x: y", b"a")]),
        (200, [(b"", b"a")]),
        (200, [(b"x\r\ny", b"a")]),
        (200, [(b"connection", b"close\r\nx: y")]),
        (200, [(b"upgrade", b"a\r\nx: y")]),
        (200, [(b"content-length", b"1\r\nx: y")]),
        (200, [(b"content-length", b"-1")]),
        (200, [(b"content-length", b"x")]),
        (200, [(b"content-length", b"1"), (b"Content-Length", b"1")]),
        (200, [(b"content-length", b"%d" % 2**63)]),
        (200, [(b"Transfer-Encoding", b"chunked")]),
        (200, [(b"keep-alive", b"timeout=5")]),
        (200, [(b"proxy-connection", b"close")]),
        (200, [(b"host", b"a")]),
        (204, [(b"content-length", b"0")]),
        (103, [(b"content-length", b"0")]),
        (99, []),
        (600, []),
        (101, []),
    ],
)
def test_heads_that_cannot_be_written_are_refused_and_nothing_is_queued(
    status: int, headers: list[tuple[bytes, bytes]]
) -> None:
    machine = asked()
    with pytest.raises(LocalProtocolError):
        start(machine, status, *headers)
    assert written(machine) == b""
    answer(machine, 200, b"x")
    assert written(machine) == b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx"


@pytest.mark.parametrize(
    "trailers",
    [
        ((b"content-length", b"1"),),
        ((b"Host", b"a"),),
        ((b"authorization", b"a"),),
        ((b"x", b"a\r\nb: c"),),
        ((b"x y", b"z"),),
    ],
)
def test_trailers_that_may_not_be_sent_are_refused(trailers: tuple[tuple[bytes, bytes], ...]) -> None:
    machine = asked()
    start(machine)
    written(machine)
    with pytest.raises(LocalProtocolError):
        finish(machine, *trailers)
    finish(machine)
    assert written(machine) == b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "headers"), [(request(), ((b"content-length", b"0"),)), (request(b"HEAD"), ()), (request(version=b"1.0"), ())]
)
def test_trailers_need_chunks(data: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    machine = asked(data)
    start(machine, 200, *headers)
    with pytest.raises(LocalProtocolError):
        finish(machine, (b"x", b"y"))


def test_interim_answers_come_any_number_before_the_answer() -> None:
    machine = server(request(b"POST", fields=b"expect: 100-continue\r\ncontent-length: 2\r\n"))
    event = machine.next_event()
    assert isinstance(event, Request)
    assert event.head.expects_continue
    assert machine.next_event() is NEED_DATA
    start(machine, 100)
    start(machine, 103, (b"link", b"</x>"))
    start(machine, 103)
    machine.receive_data(b"hi")
    assert [type(e) for e in pull(machine)] == [Data, End]
    answer(machine)
    assert written(machine) == (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    )
    assert not machine.must_close


def test_http_10_knows_no_interim_answers() -> None:
    machine = asked(request(version=b"1.0"))
    with pytest.raises(LocalProtocolError):
        start(machine, 103)


# -- one after the other -----------------------------------------------------------------------------------------------


def test_a_pipelined_request_waits_for_our_answer() -> None:
    machine = server(PING + request(target=b"/second"))
    assert [type(e) for e in pull(machine)] == [Request, Data, End]
    assert machine.next_event() is PAUSED
    start(machine)
    assert machine.next_event() is PAUSED
    finish(machine)
    event = machine.next_event()
    assert isinstance(event, Request)
    assert (event.stream, event.head.target) == (2, b"/second")


def test_without_more_bytes_it_needs_data_instead() -> None:
    machine = asked(PING)
    assert machine.next_event() is NEED_DATA


def test_an_answer_may_begin_and_end_around_the_body_of_its_request() -> None:
    machine = server(request(b"POST", fields=b"transfer-encoding: chunked\r\n"))
    machine.next_event()
    start(machine)
    machine.receive_data(b"2\r\nhi\r\n")
    assert body(pull(machine)) == b"hi"
    push(machine, b"hi")
    machine.receive_data(b"0\r\n\r\n")
    assert pull(machine) == [End(stream=1)]
    finish(machine)
    assert not machine.must_close


def test_an_answer_that_is_complete_first_ends_the_reuse_and_the_rest_is_dropped() -> None:
    machine = server(request(b"POST", fields=b"content-length: 10\r\n", body=b"12345"))
    assert body(pull(machine)) == b"12345"
    start(machine, 413, (b"content-length", b"0"))
    before = machine.must_close
    finish(machine)
    assert (before, machine.must_close) == (False, True)
    machine.receive_data(b"67890" + request())
    assert machine.unread == 0
    assert machine.next_event() is NEED_DATA
    machine.receive_eof()
    assert machine.next_event() == ConnectionEnd()
    assert machine.unconsumed == 5


@pytest.mark.parametrize(
    "upload",
    [
        request(b"POST", fields=b"content-length: 5\r\n", body=b"12345"),
        request(b"POST", fields=b"transfer-encoding: chunked\r\n", body=b"2;x=y\r\n12\r\n3\r\n345\r\n0\r\nx: y\r\n\r\n"),
        request(b"POST", fields=b"content-length: 0\r\n"),
        request(b"POST"),
    ],
)
def test_a_body_that_is_here_but_was_not_pulled_is_skipped_and_the_connection_goes_on(upload: bytes) -> None:
    machine = server(upload + request(target=b"/next"))
    machine.next_event()
    answer(machine, 404)
    assert not machine.must_close
    event = machine.next_event()
    assert isinstance(event, Request)
    assert (event.stream, event.head.target) == (2, b"/next")
    assert machine.unconsumed == 0


def test_a_body_whose_end_cannot_be_found_ends_the_connection_instead() -> None:
    machine = server(request(b"POST", fields=b"transfer-encoding: chunked\r\n", body=b"xyz\r\n"))
    machine.next_event()
    answer(machine, 404)
    assert machine.must_close
    assert machine.next_event() is NEED_DATA


@pytest.mark.parametrize("chunks", [20, 20_000])
def test_a_body_in_many_small_chunks_that_nobody_wants_is_not_read_to_its_end(chunks: int) -> None:
    body = b"1\r\nx\r\n" * chunks + b"0\r\n\r\n"
    machine = server(request(b"POST", fields=b"transfer-encoding: chunked\r\n", body=body))
    machine.next_event()
    with mock.patch.object(Chunks, "read", autospec=True, side_effect=Chunks.read) as read:
        answer(machine, 404)
    assert read.call_count == min(chunks + 1, 64)
    assert machine.must_close is (chunks > 64)
    assert machine.unread == 0


def test_a_landing_body_is_abandoned_with_its_answer() -> None:
    machine = server(request(b"POST", fields=b"content-length: 10\r\n", body=b"123"))
    machine.next_event()
    machine.land(1, memoryview(bytearray(10)))
    answer(machine, 404)
    assert machine.get_buffer() is None
    assert machine.must_close
    assert machine.unread == 0


def test_a_landed_body_that_was_not_pulled_is_skipped() -> None:
    machine = server(request(b"POST", fields=b"content-length: 3\r\n", body=b"123"))
    machine.next_event()
    machine.land(1, memoryview(bytearray(3)))
    answer(machine, 404)
    assert not machine.must_close
    assert machine.idle is False
    written(machine)
    assert machine.idle


# -- the end of the connection -----------------------------------------------------------------------------------------


def test_a_client_that_says_close_is_answered_with_close_and_read_no_further() -> None:
    machine = asked(request(fields=b"connection: foo, CLOSE\r\n") + request(target=b"/more"))
    assert machine.must_close
    answer(machine)
    assert written(machine) == b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    assert machine.next_event() is NEED_DATA


def test_http_10_alone_means_close() -> None:
    machine = asked(request(version=b"1.0"))
    assert machine.must_close
    answer(machine)
    assert b"\r\nconnection: close\r\n" in written(machine)


def test_our_own_close_ends_the_reuse() -> None:
    machine = asked()
    answer(machine, 200, b"", (b"connection", b"x-hop, close"), (b"x-hop", b"1"))
    assert machine.must_close
    assert b"\r\nconnection: x-hop, close\r\n" in written(machine)


def test_our_own_keep_alive_does_not_contradict_the_end() -> None:
    machine = asked(request(fields=b"connection: close\r\n"))
    answer(machine, 200, b"", (b"connection", b"keep-alive"))
    assert b"\r\nconnection: close\r\n" in written(machine)


def test_an_upgrade_may_be_offered() -> None:
    machine = asked()
    answer(machine, 426, b"", (b"upgrade", b"websocket"), (b"connection", b"Upgrade"))
    assert b"\r\nconnection: upgrade\r\nupgrade: websocket\r\n" in written(machine)


def test_a_drain_closes_with_the_answer_under_way() -> None:
    machine = asked()
    machine.close_after_response()
    assert not machine.must_close
    start(machine, 103)
    answer(machine)
    assert written(machine).endswith(b"content-length: 0\r\nconnection: close\r\n\r\n")
    assert machine.must_close


def test_a_drain_after_the_head_closes_with_the_next_answer() -> None:
    machine = asked()
    start(machine)
    machine.close_after_response()
    finish(machine)
    assert not machine.must_close
    machine.receive_data(request())
    pull(machine)
    answer(machine)
    assert written(machine).count(b"connection: close") == 1
    assert machine.must_close


def test_an_expectation_that_is_not_met_closes() -> None:
    upload = request(b"POST", fields=b"expect: 100-continue\r\ncontent-length: 2\r\n")
    machine = server(upload)
    machine.next_event()
    answer(machine, 403)
    assert b"\r\nconnection: close\r\n" in written(machine)
    machine = server(upload + b"hi")  # it did not wait
    pull(machine)
    answer(machine)
    assert b"connection" not in written(machine)
    assert not machine.must_close


def test_the_peers_end_between_messages_is_an_event() -> None:
    machine = server(request())
    machine.receive_eof()
    assert [type(e) for e in pull(machine)] == [Request, End, ConnectionEnd]
    answer(machine)
    assert machine.next_event() == ConnectionEnd()
    assert machine.next_event() == ConnectionEnd()
    with pytest.raises(LocalProtocolError):
        machine.receive_data(b"x")


def test_pipelined_requests_before_the_peers_end_are_still_given_out() -> None:
    machine = server(request() + request())
    machine.receive_eof()
    pull(machine)
    assert machine.next_event() is PAUSED
    answer(machine)
    assert [type(e) for e in pull(machine)] == [Request, End, ConnectionEnd]


@pytest.mark.parametrize(
    "data",
    [b"G", request()[:-1], PING[:-1], request(b"POST", fields=b"transfer-encoding: chunked\r\n", body=b"2\r\nhi\r\n0\r\n")],
)
def test_the_peers_end_within_a_message_is_an_error_after_what_came(data: bytes) -> None:
    machine = server(data)
    events: list[Any] = []
    with pytest.raises(RemoteProtocolError):  # noqa: PT012
        machine.receive_eof()
        while True:
            append(events, machine.next_event())
    assert body(events) in (b"", b"pin", b"hi")
    assert (b"hi" in data or b"pin" in data) == bool(body(events))


def test_an_error_in_a_body_leaves_the_answer_possible() -> None:
    machine = server(request(b"POST", fields=b"transfer-encoding: chunked\r\n", body=b"zz\r\n"))
    machine.next_event()
    with pytest.raises(RemoteProtocolError):
        machine.next_event()
    answer(machine, 400, b"no")
    assert written(machine) == b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno"
    with pytest.raises(RemoteProtocolError):
        machine.next_event()


# -- upgrade -----------------------------------------------------------------------------------------------------------


def test_a_switch_hands_over_what_the_other_protocol_sent() -> None:
    for pieces in cuts(b"\x81\x00frames"):
        machine = asked(UPGRADE)
        machine.receive_data(pieces[0])
        start(machine, 101, (b"sec-websocket-accept", b"k"))
        for piece in pieces[1:]:
            machine.receive_data(piece)
        assert machine.next_event() is PAUSED
        assert machine.switch() == b"\x81\x00frames"
        assert machine.unread == 0
        assert written(machine) == (
            b"HTTP/1.1 101 Switching Protocols\r\nsec-websocket-accept: k\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
        )


def test_the_callers_own_upgrade_fields_are_written_once() -> None:
    machine = asked(UPGRADE)
    start(machine, 101, (b"upgrade", b"websocket"), (b"connection", b"Upgrade"), (b"x", b"y"))
    assert (
        written(machine) == b"HTTP/1.1 101 Switching Protocols\r\nx: y\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    )


def test_a_retired_machine_only_writes_what_it_has() -> None:
    machine = asked(UPGRADE)
    with pytest.raises(LocalProtocolError):
        machine.switch()
    start(machine, 101)
    machine.switch()
    for call in (machine.switch, machine.next_event, lambda: machine.receive_data(b"x"), lambda: finish(machine)):
        with pytest.raises(LocalProtocolError):
            call()
    assert written(machine).startswith(b"HTTP/1.1 101 ")


def test_a_request_to_upgrade_may_be_answered_as_any_other() -> None:
    machine = asked(UPGRADE)
    answer(machine)
    machine.receive_data(request())
    assert [type(e) for e in pull(machine)] == [Request, End]


# -- every cut ---------------------------------------------------------------------------------------------------------

CONVERSATION = (
    PING
    + b"\r\n"
    + request(b"POST", b"/c", b"transfer-encoding: chunked\r\n", b"5\r\nhello\r\n6;a=b\r\n world\r\n0\r\nX-T: 1\r\n\r\n")
    + request(b"HEAD", b"/h")
    + request(b"PUT", b"http://a.example/u", b"expect: 100-continue\r\ncontent-length: 3\r\n", b"put")
    + b"GET /last HTTP/1.0\r\n\r\n"
)


def serve(pieces: tuple[bytes, ...], *, eof: bool = True) -> tuple[list[object], bytes]:
    machine = HTTP1Connection(Role.SERVER, scheme=b"https")
    events: list[object] = []
    for piece in pieces:
        scratch = bytearray(piece)
        machine.receive_data(memoryview(scratch))
        scratch[:] = bytes(len(scratch))  # the memory is ours again at once
        while new := pull(machine):
            for event in new:
                append(events, event)
            if isinstance(new[-1], End):
                answer(machine, 200, b"" if machine.stream == 3 else b"x%d" % machine.stream)
    return events, written(machine)


def test_a_conversation_gives_the_same_events_and_answers_wherever_it_is_cut() -> None:
    whole = serve((CONVERSATION,))
    assert [type(e).__name__ for e in whole[0]] == ["Request", "Data", "End"] * 2 + ["Request", "End"] + [
        "Request",
        "Data",
        "End",
    ] + ["Request", "End"]
    assert whole[0][5] == End(stream=2, trailers=((b"x-t", b"1"),))
    for pieces in cuts(CONVERSATION):
        assert serve(pieces) == whole


@pytest.mark.parametrize(
    ("line", "headers", "taken"),
    [
        (b"GET / HTTP/1.1\r\nte: trailers", [], True),
        (b"GET / HTTP/1.1\r\nTE: gzip , Trailers\r\nte: x", [], True),
        (b"GET / HTTP/1.1\r\nte: x\r\nte:trailers", [], True),
        (b"GET / HTTP/1.1\r\nte: trailers;q=1", [], False),
        (b"GET / HTTP/1.1\r\nte: gzip", [], False),
        (b"GET / HTTP/1.1\r\nte:", [], False),
        (b"GET / HTTP/1.1\r\nx: te, trailers", [], False),
        (b"GET / HTTP/1.1\r\nte: trailers", [(b"content-length", b"0")], False),
        (b"GET / HTTP/1.0\r\nte: trailers", [], False),
        (b"HEAD / HTTP/1.1\r\nte: trailers", [], False),
    ],
)
def test_an_answer_may_have_trailers_where_its_request_says_so_and_it_has_chunks(
    line: bytes, headers: list[tuple[bytes, bytes]], taken: bool
) -> None:
    machine = HTTP1Connection(Role.SERVER)
    machine.receive_data(line + b"\r\nhost: x\r\n\r\n")
    machine.next_event()
    assert not machine.takes_trailers, "its head says whether there are chunks"
    machine.send(Response(stream=1, status=200, headers=headers))
    assert machine.takes_trailers is taken
    finish(machine)
    assert not machine.takes_trailers
