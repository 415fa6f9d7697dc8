"""Requests that come with their body because the connection repeats itself: the same as their events, one after another."""

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
from tests.protocols.http1.http1_helpers import answer, append, client, cuts, get, pull, request, server, written

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
    """All values of a machine, and its unread input, in whichever pieces that came. Checks the counts of both."""
    source = machine.input
    unread = source._carry + b"".join((source.data[source.pos :], *source._more))
    held: dict[str, Any] = {"unread": unread, "blank_line": source.blank_line}
    parts = (machine, HTTP1Connection), (machine, MessageReader), (machine, Output), (machine._chunks, Chunks)
    for part, kind in parts:
        for name in kind.__slots__ if part is not None else ():
            value = getattr(part, name)
            if not isinstance(value, Input | Chunks):
                held[f"{kind.__name__}.{name}"] = bytes(value) if isinstance(value, memoryview) else repr(value)
    assert source.unread == len(unread)
    assert sum(machine._earlier.values()) <= machine.unconsumed
    return held


def pulled(machine: HTTP1Connection, events: list[Any]) -> tuple[Any, list[tuple[int, int]]]:
    """Puts the events that come next into the list, and gives what comes then; and the streams and sizes of the bodies that
    came with their requests."""
    whole: list[tuple[int, int]] = []
    while True:
        try:
            event = machine.next_event()
        except (LocalProtocolError, RemoteProtocolError) as error:
            return (type(error), str(error)), whole
        if not isinstance(event, Request | Data | End):
            return event, whole
        if isinstance(event, Request) and event.body is not None:
            whole.append((event.stream, len(event.body)))
        append(events, event)


def receive_alike(at_once: HTTP1Connection, by_bytes: HTTP1Connection, data: bytes) -> bool:
    """Gives both the same bytes, one in a piece, the other byte by byte, and checks that their events and states are the
    same. True if the first has given out a request with its body."""
    if data:
        at_once.receive_data(data)
    events: list[Any] = []
    said, whole = pulled(at_once, events)
    others: list[Any] = []
    for i in range(len(data)):
        by_bytes.receive_data(data[i : i + 1])
        assert pulled(by_bytes, others)[1] == []
    finally_said, ahead = pulled(by_bytes, others)  # bytes that were sent ahead are joined: they may bring a whole one too
    assert (events, said) == (others, finally_said)
    for stream, size in whole:
        if (stream, size) not in ahead:
            by_bytes.credit(stream, size)
    for stream, size in ahead:
        if (stream, size) not in whole:
            at_once.credit(stream, size)
    assert state(at_once) == state(by_bytes)
    return bool(whole)


def received(machine: HTTP1Connection, data: bytes = PING) -> bytes | None:
    """The body that comes with the request in these bytes; None if no request comes, or one without its body."""
    machine.receive_data(data)
    event = machine.next_event()
    return event.body if isinstance(event, Request) else None


def test_a_request_that_comes_again_brings_its_body() -> None:
    machine = server(PING)
    first, *_ = pull(machine)
    machine.credit(1, 4)
    answer(machine)
    written(machine)
    machine.receive_data(bytearray(PONG))
    second = machine.next_event()
    assert isinstance(second, Request)
    assert (second.stream, second.body) == (2, b"pong")
    assert second.head is first.head
    assert (machine.stream, machine.unread, machine.unconsumed) == (2, 0, 0)
    assert machine.next_event() is NEED_DATA
    machine.respond(2, 200, (), (b"ok",), ((b"content-length", b"2"),))
    assert written(machine) == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    assert machine.idle


def test_a_body_is_not_sent_with_its_request() -> None:
    asking = client()
    with pytest.raises(LocalProtocolError, match="Data"):
        asking.send(Request(stream=1, head=get().head, body=b"ping"))
    assert written(asking) == b""


def test_a_head_knows_the_first_field_of_each_name() -> None:
    head = get(headers=((b"a", b"1"), (b"b", b"2"), (b"a", b"3"))).head
    assert head.fields == {b"a": b"1", b"b": b"2"}
    assert head.fields is head.fields
    assert replace(head, headers=((b"a", b"4"),)).fields == {b"a": b"4"}


def test_a_request_without_a_body_has_an_empty_one() -> None:
    for data in (request(), request(b"POST", fields=b"content-length: 0\r\n"), request(b"HEAD")):
        machine = again(data)
        assert received(machine, data) == b""
        answer(machine, 200)
        assert written(machine).endswith(b"\r\n\r\n")
        assert machine.idle


def test_of_requests_sent_ahead_one_that_lies_alone_brings_its_body() -> None:
    machine = again()
    assert received(machine) == b"ping"
    assert received(machine, PONG) is None  # its turn has not come
    assert machine.next_event() is PAUSED
    machine.receive_data(PING)
    answer(machine)
    event = machine.next_event()
    assert isinstance(event, Request)
    assert event.body is None  # there is something behind it
    assert [type(e) for e in pull(machine)] == [Data, End]
    machine.credit(3, 4)
    answer(machine)
    event = machine.next_event()
    assert isinstance(event, Request)
    assert event.body == b"ping"
    answer(machine)
    machine.data_to_send(1 << 20)
    assert machine.data_sent() == Sent(room=[2, 3, 4], ended=[2, 3, 4])
    assert machine.unread == machine.unconsumed == 0
    assert received(machine, PING + PONG) is None
    assert machine.unread == len(b"ping" + PONG)


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
    asking = client()
    asking.send(get())
    asking.send(End(stream=1))
    assert received(asking, b"HTTP/1.1 200 OK\r\n\r\n") is None
    begun = again()
    assert received(begun, PING[:1]) is None
    assert received(begun, PING[1:]) is None
    broken = again()
    for data in (b"\0\r\n\r\n", PING):
        broken.receive_data(data)
        with pytest.raises(RemoteProtocolError):
            broken.next_event()
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
def test_a_conversation_is_the_same_by_whole_requests_and_by_bytes(told: list[tuple[bytes, list[str]]], step: int) -> None:
    machines = server(), server()
    for data, acts in told:
        for i in range(0, len(data), step):
            if not machines[0]._eof:
                receive_alike(*machines, data[i : i + step])
        for what in acts:
            assert act(machines[0], what) == act(machines[1], what)
            receive_alike(*machines, b"")  # an act may bring the turn of a request that was sent ahead
