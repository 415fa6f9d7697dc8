"""HTTP/1.1 machines against each other, and against garbage."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import RemoteProtocolError
from protocols.events import ConnectionEnd, Data, End, Head, Request, Response, Signal
from protocols.http1.connection import HTTP1Connection
from protocols.roles import Role
from tests.protocols.http1.http1_helpers import append, pull, request

NAMES = st.from_regex(rb"x-[a-z0-9!#$%&'*+.^_`|~-]{1,12}", fullmatch=True)
TEXT = st.from_regex(rb"(?:[!-~\x80-\xff](?:[\t -~\x80-\xff]{0,20}[!-~\x80-\xff])?)?", fullmatch=True)
HEADERS = st.lists(st.tuples(NAMES, TEXT), max_size=6).map(tuple)
PIECES = st.lists(st.binary(max_size=40) | st.integers(1, 3).map(lambda n: bytes(n * 20_000)), max_size=5)
TARGETS = st.from_regex(rb"/[!\"$-~]{0,30}", fullmatch=True)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    pieces = draw(PIECES)
    return {
        "headers": draw(HEADERS),
        "pieces": pieces,
        "length": draw(st.sampled_from([None, sum(map(len, pieces))])),
        "trailers": draw(HEADERS),
    }


def send(machine: HTTP1Connection, head: Request | Response, message: dict[str, Any], *, has_body: bool) -> None:
    machine.send(head)
    if has_body:
        for piece in message["pieces"]:
            machine.send(Data(stream=head.stream, buffers=(piece[:7], piece[7:])))
    chunked = has_body and message["length"] is None
    machine.send(End(stream=head.stream, trailers=message["trailers"] if chunked else ()))


def carry(data: st.DataObject, sender: HTTP1Connection, receiver: HTTP1Connection, seen: list[Any]) -> list[int]:
    """Takes the sender's output across in portions and pieces of any size; returns the streams that ended."""
    ended: list[int] = []
    while buffers := sender.data_to_send(data.draw(st.sampled_from([1, 100, 20_000, 1 << 20]))):
        rest = memoryview(b"".join(buffers))
        while rest:
            target = receiver.get_buffer()
            n = data.draw(
                st.sampled_from([1, 2, 17, 4096, 1 << 20]) if len(rest) < 500 else st.sampled_from([17_000, 1 << 20])
            )
            n = min(n, len(rest), n if target is None else len(target))
            if target is None:
                scratch = bytearray(rest[:n])
                receiver.receive_data(memoryview(scratch))
                scratch[:] = bytes(n)
            else:
                target[:n] = rest[:n]
                receiver.buffer_updated(n)
            rest = rest[n:]
            collect(data, receiver, seen)
        ended += sender.data_sent().ended
    return ended + sender.data_sent().ended


def collect(data: st.DataObject, machine: HTTP1Connection, seen: list[Any]) -> None:
    while not isinstance(event := machine.next_event(), Signal):
        if isinstance(event, Data):
            machine.credit(event.stream, len(event.buffers[0]))
        append(seen, event)
        if isinstance(event, Request | Response):
            head = event.head if isinstance(event, Request) else event
            length = int(dict(head.headers).get(b"content-length", b"0"))
            if length and data.draw(st.booleans()):
                machine.land(event.stream, memoryview(bytearray(length)))


@settings(max_examples=120)
@given(st.data())
def test_what_one_machine_sends_the_other_sees(data: st.DataObject) -> None:
    client, server = HTTP1Connection(Role.CLIENT), HTTP1Connection(Role.SERVER)
    at_server: list[Any] = []
    at_client: list[Any] = []
    for stream in range(1, data.draw(st.integers(1, 3)) + 1):
        method = data.draw(st.sampled_from([b"GET", b"POST", b"PUT", b"HEAD", b"DELETE"]))
        asked, answered = data.draw(messages()), data.draw(messages())
        has_body = method in (b"POST", b"PUT")
        head = Request(
            stream=stream,
            head=Head(
                method=method,
                target=data.draw(TARGETS),
                authority=b"a.example:80",
                headers=asked["headers"],
                content_length=asked["length"] if has_body else None,
            ),
        )
        send(client, head, asked, has_body=has_body)
        assert carry(data, client, server, at_server) == [stream]
        status = data.draw(st.sampled_from([200, 204, 304, 404, 500]))
        has_answer = method != b"HEAD" and status not in (204, 304)
        fields = answered["headers"]
        if has_answer and answered["length"] is not None:
            fields = (*fields, (b"content-length", b"%d" % answered["length"]))
        if data.draw(st.booleans()):
            server.send(Response(stream=stream, status=103))
        send(server, Response(stream=stream, status=status, headers=fields), answered, has_body=has_answer)
        assert carry(data, server, client, at_client) == [stream]

        seen = at_server.pop(0)
        assert isinstance(seen, Request)
        assert (seen.stream, seen.head.method, seen.head.target, seen.head.authority) == (
            stream,
            method,
            head.head.target,
            head.head.authority,
        )
        assert tuple(h for h in seen.head.headers if h[0] != b"content-length") == head.head.headers
        assert seen.head.content_length == head.head.content_length
        expect(at_server, stream, asked, has_body)
        while isinstance(at_client[0], Response) and at_client[0].status == 103:
            at_client.pop(0)
        assert at_client.pop(0) == Response(stream=stream, status=status, headers=fields)
        expect(at_client, stream, answered, has_answer)
        assert client.idle
        assert server.idle
        assert client.unconsumed == server.unconsumed == client.unread == server.unread == 0
        assert client.room(stream) == server.room(stream) == 65536
    client.receive_eof()
    server.receive_eof()
    assert client.next_event() == server.next_event() == ConnectionEnd()


def expect(seen: list[Any], stream: int, message: dict[str, Any], has_body: bool) -> None:
    content = b"".join(message["pieces"]) if has_body else b""
    if content:
        assert seen.pop(0) == Data(stream=stream, buffers=(content,))
    chunked = has_body and message["length"] is None
    assert seen == [End(stream=stream, trailers=message["trailers"] if chunked else ())]
    seen.clear()


CHUNKED = request(b"POST", fields=b"transfer-encoding: chunked\r\n")
WORDS = st.sampled_from(
    [b"\r\n", b"\n", b"\r", b" ", b":", b"\0", b"\xff", b"HTTP/1.1", b"HTTP/1.0", b"GET ", b"POST / HTTP/1.1\r\n", b"Host: a\r\n", b"0\r\n\r\n",
     b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"Connection: upgrade\r\n", b"Upgrade: x\r\n", b"5\r\nhello\r\n", b";x=y", b"ffff",
     b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 101 X\r\n", b"\r\n\r\n", b"Expect: 100-continue\r\n", b"9" * 30, request(), CHUNKED]
)  # fmt: skip
GARBAGE = st.lists(WORDS | st.binary(max_size=8), max_size=25)


def outcome(machine: HTTP1Connection, pieces: list[bytes], *, answers: bool) -> list[Any]:
    """The events, then the error if there was one; with `answers` each request is answered when its end is seen."""
    events: list[Any] = []
    try:
        for piece in pieces:
            machine.receive_data(piece)
            advance(machine, events, answers)
        machine.receive_eof()
        advance(machine, events, answers)
    except RemoteProtocolError as error:
        events.append(type(error))
        assert machine.must_close
        assert machine.unread == 0
    return events


def advance(machine: HTTP1Connection, events: list[Any], answers: bool) -> None:
    while True:
        before = len(events)
        pull(machine, events)
        if not answers or not any(isinstance(event, End) for event in events[before:]):
            return
        machine.send(Response(stream=machine.stream, status=204))
        machine.send(End(stream=machine.stream))


@settings(max_examples=300)
@given(GARBAGE, st.sampled_from([b"", request(), CHUNKED, b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n"]))
def test_garbage_to_a_server_is_events_or_an_error_and_the_same_in_crumbs(garbage: list[bytes], before: bytes) -> None:
    data = before + b"".join(garbage)
    whole = outcome(HTTP1Connection(Role.SERVER), [data], answers=True)
    assert outcome(HTTP1Connection(Role.SERVER), [before, *garbage], answers=True) == whole
    assert outcome(HTTP1Connection(Role.SERVER), [data[i : i + 1] for i in range(len(data))], answers=True) == whole


@settings(max_examples=300)
@given(GARBAGE, st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"]))
def test_garbage_to_a_client_is_events_or_an_error_and_the_same_in_crumbs(garbage: list[bytes], before: bytes) -> None:
    def asking() -> HTTP1Connection:
        machine = HTTP1Connection(Role.CLIENT)
        machine.send(Request(stream=1, head=Head(method=b"GET", target=b"/", authority=b"a", upgrade=b"x")))
        return machine

    data = before + b"".join(garbage)
    whole = outcome(asking(), [data], answers=False)
    assert outcome(asking(), [before, *garbage], answers=False) == whole
    assert outcome(asking(), [data[i : i + 1] for i in range(len(data))], answers=False) == whole
