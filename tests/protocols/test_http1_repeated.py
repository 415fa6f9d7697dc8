"""Requests that are given out whole because the connection repeats itself: the same as their events, one after another."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import NEED_DATA, PAUSED, Data, End, Request, Response, Sent
from protocols.http1 import HTTP1Connection
from protocols.http1_chunks import Chunks
from protocols.http1_input import Input
from protocols.http1_output import Output
from tests.protocols.http1_helpers import answer, client, cuts, pull, request, server, written

LARGE = 16 * 1024
PING = request(b"POST", b"/p", b"content-length: 4\r\n", b"ping")
PONG = request(b"POST", b"/p", b"content-length: 4\r\n", b"pong")


def again(data: bytes = PING) -> HTTP1Connection:
    """A server that has answered this request once, and credited it."""
    machine = server(data)
    pull(machine)
    machine.credit(1, machine.unconsumed)
    answer(machine, 200, b"" if data.startswith(b"HEAD") else b"ok")
    written(machine)
    return machine


def state(machine: HTTP1Connection) -> dict[str, Any]:
    """All that a machine is, as values; what it counts of its input is what is there."""
    held: dict[str, Any] = {}
    source = machine.input
    parts = (machine, HTTP1Connection), (machine, Output), (source, Input), (machine._chunks, Chunks)
    for part, kind in parts:
        for name in kind.__slots__ if part is not None else ():
            value = getattr(part, name)
            if not isinstance(value, Input | Chunks):
                held[f"{kind.__name__}.{name}"] = bytes(value) if isinstance(value, memoryview) else repr(value)
    assert source.unread == len(source.data) - source._pos + sum(map(len, source._more)) + len(source._carry)
    assert sum(machine._earlier.values()) <= machine.unconsumed
    return held


def pulled(machine: HTTP1Connection, consumed: list[tuple[int, int]], whole: bool) -> list[Any]:
    """What comes next, until nothing does: as events, whichever way it is given out. What counts as credited when it is
    given out whole is added to `consumed`."""
    events: list[Any] = []
    while True:
        if whole:
            before = state(machine)
            found = machine.next_whole()
            if found is None:
                assert state(machine) == before
            else:
                head, body = replace(found[0], stream=machine.stream), found[1]
                consumed.append((head.stream, len(body)))
                events += [head, *([Data(stream=head.stream, buffers=(body,))] if body else []), End(stream=head.stream)]
                continue
        try:
            event = machine.next_event()
        except (LocalProtocolError, RemoteProtocolError) as error:
            return [*events, (type(error), str(error))]
        events.append(event)
        if not isinstance(event, Request | Data | End):
            return events


def pull_alike(whole: HTTP1Connection, by_events: HTTP1Connection) -> None:
    consumed: list[tuple[int, int]] = []
    assert pulled(whole, consumed, whole=True) == pulled(by_events, [], whole=False)
    for stream, size in consumed:
        by_events.credit(stream, size)
    assert state(whole) == state(by_events)


def test_a_request_that_comes_again_is_given_out_whole() -> None:
    machine = again()
    assert machine.next_whole() is None
    machine.receive_data(PONG)
    assert machine.unread + machine.unconsumed == len(PONG)
    found = machine.next_whole()
    assert found is not None
    head, body = found
    assert (head.method, head.target, head.content_length, body) == (b"POST", b"/p", 4, b"pong")
    assert (machine.stream, machine.unread, machine.unconsumed) == (2, 0, 0)
    assert machine.next_whole() is None
    assert machine.next_event() is NEED_DATA
    machine.respond(2, 200, (), (b"ok",), ((b"content-length", b"2"),))
    assert written(machine) == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    assert machine.idle


def test_a_request_without_a_body_has_an_empty_one() -> None:
    for data in (request(), request(b"POST", fields=b"content-length: 0\r\n"), request(b"HEAD")):
        machine = again(data)
        machine.receive_data(data)
        found = machine.next_whole()
        assert found is not None
        assert found[1] == b""
        answer(machine, 200)
        assert written(machine).endswith(b"\r\n\r\n")
        assert machine.idle


def test_requests_sent_ahead_are_given_out_whole_each_in_its_turn() -> None:
    machine = again()
    machine.receive_data(PING + PONG + PING[:-1])
    assert machine.next_whole() is not None
    assert machine.next_whole() is None
    assert machine.next_event() is PAUSED
    answer(machine)
    found = machine.next_whole()
    assert found is not None
    assert found[1] == b"pong"
    answer(machine)
    assert machine.next_whole() is None
    machine.receive_data(PING[-1:])
    assert machine.next_whole() is None  # it has come in two pieces
    assert [type(e) for e in pull(machine)] == [Request, Data, End]
    machine.data_to_send(1 << 20)
    assert machine.data_sent() == Sent(room=[2, 3], ended=[2, 3])
    assert machine.unconsumed == 4, "of the third, which came as events"
    machine.credit(4, 4)
    assert machine.unread == machine.unconsumed == 0


def test_a_body_of_16_kib_is_given_out_in_events() -> None:
    for size, whole in ((LARGE - 1, True), (LARGE, False)):
        data = request(b"POST", fields=b"content-length: %d\r\n" % size, body=bytes(size))
        machine = again(data)
        machine.receive_data(data)
        assert (machine.next_whole() is not None) is whole


@pytest.mark.parametrize(
    "data",
    [
        request(b"POST", fields=b"expect: 100-continue\r\ncontent-length: 1\r\n", body=b"x"),
        request(b"POST", fields=b"transfer-encoding: chunked\r\n", body=b"1\r\na\r\n0\r\n\r\n"),
        request(fields=b"connection: upgrade\r\nupgrade: websocket\r\n"),
        request(fields=b"connection: close\r\n"),
        request(version=b"1.0"),
        request(fields=b"x: " + b"y" * 1000 + b"\r\n"),
        b"\r\n" + PING,
    ],
)
def test_a_request_of_another_kind_is_given_out_in_events(data: bytes) -> None:
    machine = server(data)
    pull(machine)
    machine.send(Response(stream=1, status=200, headers=((b"content-length", b"0"),)))
    machine.send(End(stream=1))
    written(machine)
    machine.receive_data(data)
    assert machine.next_whole() is None


def test_only_the_request_just_before_counts() -> None:
    machine = again()
    for data in (request(b"POST", fields=b"expect: 100-continue\r\ncontent-length: 1\r\n", body=b"x"), PING):
        machine.receive_data(data)
        assert machine.next_whole() is None
        pull(machine)
        answer(machine)
    machine.receive_data(PING)
    assert machine.next_whole() is not None


def test_input_that_carries_the_start_of_a_line_has_nothing_whole_next() -> None:
    source = Input()
    source.feed(b"1;")
    assert source.line(10, "too long") is None
    source.feed(PING)
    assert source.accept_whole(PING[:-4], 4) is None
    assert source.unread == 2 + len(PING)


def test_a_machine_that_reads_no_request_gives_none_whole() -> None:
    assert server(PING).next_whole() is None  # the first of its kind
    other = again()
    other.receive_data(request())
    assert other.next_whole() is None
    assert client().next_whole() is None
    closed = again()
    closed.receive_data(PING)
    closed.close()
    assert closed.next_whole() is None
    broken = again()
    broken.receive_data(b"\0\r\n\r\n")
    with pytest.raises(RemoteProtocolError):
        broken.next_event()
    assert broken.next_whole() is None
    retired = server(request(fields=b"connection: upgrade\r\nupgrade: websocket\r\n"))
    pull(retired)
    retired.send(Response(stream=1, status=101))
    retired.switch()
    assert retired.next_whole() is None


def test_a_request_before_the_end_of_the_connection_is_given_out_whole() -> None:
    machine = again()
    machine.receive_data(PING)
    machine.receive_eof()
    assert machine.next_whole() is not None


def test_a_request_that_comes_again_is_the_same_wherever_it_is_cut() -> None:
    for data in (PING, PING + PONG, b"\r\n" + PING, request(b"POST", b"/p", b"content-length: 4\r\n", b"pi")):
        for pieces in cuts(data):
            machines = again(), again()
            for piece in pieces:
                for machine in machines:
                    machine.receive_data(piece)
                pull_alike(*machines)


REQUESTS = st.sampled_from(
    [PING, PING, PING, PONG, PING.replace(b"/p", b"/q"), request(), request(b"HEAD"), b"\r\n" + PING, PING[:-2], b"\0",
     request(version=b"1.0", fields=b"connection: keep-alive\r\n"), request(fields=b"connection: close\r\n"),
     request(b"POST", fields=b"expect: 100-continue\r\ncontent-length: 1\r\n", body=b"x"), PING.replace(b"4", b"04"),
     request(b"POST", fields=b"transfer-encoding: chunked\r\n", body=b"1;a=b\r\na\r\n0\r\nx: y\r\n\r\n"), b"GET\r\n\r\n"]
)  # fmt: skip
ACTS = st.sampled_from(
    ["", "", "", "answer", "answer", "answer", "answer", "respond", "credit", "early", "drain", "eof", "land"]
)


def act(machine: HTTP1Connection, what: str) -> Any:
    stream = machine.stream
    try:
        match what:
            case "answer":
                answer(machine)
            case "respond":
                machine.respond(stream, 200, ((b"a", b"b"),), (b"ok",), ((b"content-length", b"2"),))
            case "credit":
                machine.credit(stream, 1)
                machine.credit(stream - 1, 3)
            case "early":
                machine.send(Response(stream=stream, status=200))
            case "drain":
                machine.close_after_response()
            case "eof":
                machine.receive_eof()
            case "land":
                machine.land(stream, memoryview(bytearray(100)))
    except LocalProtocolError as error:
        return str(error)
    return written(machine), machine.must_close, machine.idle


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.lists(REQUESTS, max_size=3).map(b"".join), st.lists(ACTS, max_size=3)), max_size=7),
    st.one_of(st.just(1 << 20), st.integers(1, 120)),
)
def test_a_conversation_is_the_same_by_whole_requests_and_by_events(told: list[tuple[bytes, list[str]]], step: int) -> None:
    machines = server(), server()
    for data, acts in told:
        for i in range(0, len(data), step):
            for machine in machines:
                if not machine._eof:
                    machine.receive_data(data[i : i + step])
            pull_alike(*machines)
        for what in acts:
            assert act(machines[0], what) == act(machines[1], what)
            assert state(machines[0]) == state(machines[1])
