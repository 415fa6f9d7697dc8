"""Requests that are given out whole because the connection repeats itself: the same as their events, one after another."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import NEED_DATA, PAUSED, Data, End, Request, Response, Sent
from protocols.http1.body import Chunks, Input
from protocols.http1.connection import HTTP1Connection
from protocols.http1.output import Output
from protocols.http1.reader import MessageReader
from tests.protocols.http1.http1_helpers import answer, client, cuts, pull, request, server, written

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
    halves = (machine, HTTP1Connection), (machine, MessageReader), (machine, Output)
    parts = *halves, (source, Input), (machine._chunks, Chunks)
    for part, kind in parts:
        for name in kind.__slots__ if part is not None else ():
            value = getattr(part, name)
            if not isinstance(value, Input | Chunks):
                held[f"{kind.__name__}.{name}"] = bytes(value) if isinstance(value, memoryview) else repr(value)
    assert source.unread == len(source.data) - source._pos + sum(map(len, source._more)) + len(source._carry)
    assert sum(machine._earlier.values()) <= machine.unconsumed
    return held


def pulled(machine: HTTP1Connection) -> list[Any]:
    """The events that come next, until none does."""
    events: list[Any] = []
    while True:
        try:
            event = machine.next_event()
        except (LocalProtocolError, RemoteProtocolError) as error:
            return [*events, (type(error), str(error))]
        events.append(event)
        if not isinstance(event, Request | Data | End):
            return events


def receive_alike(whole: HTTP1Connection, by_events: HTTP1Connection, data: bytes) -> bool:
    """The same bytes for both, in the two ways: what comes of them is the same. True where the first gave it out whole."""
    found = whole.receive_whole(memoryview(data))
    by_events.receive_data(data)
    events: list[Any] = []
    if found is None:
        assert state(whole) == state(by_events)
    else:
        head, body = replace(found[0], stream=whole.stream), found[1]
        events = [head, *([Data(stream=head.stream, buffers=(body,))] if body else []), End(stream=head.stream)]
    assert events + pulled(whole) == pulled(by_events)
    if found is not None:
        by_events.credit(by_events.stream, len(found[1]))
    assert state(whole) == state(by_events)
    return found is not None


def received(machine: HTTP1Connection, data: bytes = PING) -> bytes | None:
    """The body that is given out whole."""
    found = machine.receive_whole(memoryview(data))
    return None if found is None else found[1]


def test_a_request_that_comes_again_is_given_out_whole() -> None:
    machine = again()
    found = machine.receive_whole(memoryview(bytearray(PONG)))
    assert found is not None
    head, body = found
    assert (head.method, head.target, head.content_length, body) == (b"POST", b"/p", 4, b"pong")
    assert (machine.stream, machine.unread, machine.unconsumed) == (2, 0, 0)
    assert machine.next_event() is NEED_DATA
    machine.respond(2, 200, (), (b"ok",), ((b"content-length", b"2"),))
    assert written(machine) == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    assert machine.idle


def test_a_request_without_a_body_has_an_empty_one() -> None:
    for data in (request(), request(b"POST", fields=b"content-length: 0\r\n"), request(b"HEAD")):
        machine = again(data)
        assert received(machine, data) == b""
        answer(machine, 200)
        assert written(machine).endswith(b"\r\n\r\n")
        assert machine.idle


def test_requests_sent_ahead_are_given_out_in_events() -> None:
    machine = again()
    assert received(machine) == b"ping"
    assert received(machine, PONG) is None  # whose turn has not come
    assert machine.next_event() is PAUSED
    answer(machine)
    assert received(machine) is None  # there is something before it
    for body in (b"pong", b"ping"):
        assert [type(e) for e in pull(machine)] == [Request, Data, End]
        machine.credit(machine.stream, len(body))
        answer(machine)
    machine.data_to_send(1 << 20)
    assert machine.data_sent() == Sent(room=[2, 3, 4], ended=[2, 3, 4])
    assert machine.unread == machine.unconsumed == 0
    assert received(machine, PING + PONG) is None
    assert machine.unread == len(PING + PONG)


def test_a_body_of_16_kib_is_given_out_in_events() -> None:
    for size, whole in ((LARGE - 1, True), (LARGE, False)):
        data = request(b"POST", fields=b"content-length: %d\r\n" % size, body=bytes(size))
        assert (received(again(data), data) is not None) is whole


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
    assert received(machine, data) is None


def test_only_the_request_just_before_counts() -> None:
    machine = again()
    for data in (request(b"POST", fields=b"expect: 100-continue\r\ncontent-length: 1\r\n", body=b"x"), PING):
        assert received(machine, data) is None
        pull(machine)
        answer(machine)
    assert received(machine) == b"ping"


def test_a_machine_that_reads_no_request_gives_none_whole() -> None:
    assert received(server()) is None  # the first of its kind
    assert received(again(), request()) is None
    assert received(client(), b"HTTP/1.1 200 OK\r\n\r\n") is None
    begun = again()
    assert received(begun, PING[:1]) is None
    assert received(begun) is None
    broken = again()
    broken.receive_data(b"\0\r\n\r\n")
    with pytest.raises(RemoteProtocolError):
        broken.next_event()
    assert received(broken) is None
    closed = again()
    closed.close()
    with pytest.raises(LocalProtocolError):
        received(closed)
    retired = server(request(fields=b"connection: upgrade\r\nupgrade: websocket\r\n"))
    pull(retired)
    retired.send(Response(stream=1, status=101))
    retired.switch()
    with pytest.raises(LocalProtocolError):
        received(retired)


def test_a_request_that_comes_again_is_the_same_wherever_it_is_cut() -> None:
    for data in (PING, PING + PONG, b"\r\n" + PING, request(b"POST", b"/p", b"content-length: 4\r\n", b"pi")):
        for pieces in cuts(data):
            machines = again(), again()
            for piece in pieces:
                receive_alike(*machines, piece)


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


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.lists(REQUESTS, max_size=3).map(b"".join), st.lists(ACTS, max_size=3)), max_size=7),
    st.one_of(st.just(1 << 20), st.just(len(PING)), st.integers(1, 120)),
)
def test_a_conversation_is_the_same_by_whole_requests_and_by_events(told: list[tuple[bytes, list[str]]], step: int) -> None:
    machines = server(), server()
    for data, acts in told:
        for i in range(0, len(data), step):
            if not machines[0]._eof:
                receive_alike(*machines, data[i : i + step])
        for what in acts:
            assert act(machines[0], what) == act(machines[1], what)
            assert state(machines[0]) == state(machines[1])
