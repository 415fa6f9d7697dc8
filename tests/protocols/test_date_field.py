"""The Date of answers: there once in every final head, also in those that are kept as bytes."""

from __future__ import annotations

import pytest

from protocols.date_field import DateField
from protocols.events import Data, End, Head, Headers, Request, Response
from protocols.http1.connection import HTTP1Connection
from protocols.http2.connection import HTTP2Connection
from protocols.roles import Role

FIRST, LATER = b"Sun, 06 Nov 1994 08:49:37 GMT", b"Sun, 06 Nov 1994 08:49:38 GMT"
OWN = (b"date", b"Mon, 07 Nov 1994 00:00:00 GMT")
TYPE = (b"content-type", b"text/plain")
ID = ((b"x-request-id", b"a1"),)


def http1(date: DateField, request: bytes = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n") -> HTTP1Connection:
    machine = HTTP1Connection(Role.SERVER, date=date)
    ask(machine, request)
    return machine


def ask(machine: HTTP1Connection, request: bytes = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n") -> None:
    machine.receive_data(request)
    assert isinstance(machine.next_event(), Request)
    assert isinstance(machine.next_event(), End)


def dates(machine: HTTP1Connection) -> list[bytes]:
    head = b"".join(bytes(b) for b in machine.data_to_send(1 << 20)).partition(b"\r\n\r\n")[0]
    machine.data_sent()
    return [line.partition(b": ")[2] for line in head.split(b"\r\n") if line.lower().startswith(b"date:")]


# headers that are kept as bytes, headers that are not, a body that has no length, and a head of the model's own
WAYS: list[tuple[Headers, Headers, int | None]] = [
    ((TYPE,), ID, 2),
    ([TYPE], ID, 2),
    ((TYPE,), (), 2),
    ((TYPE, (b"connection", b"close")), ID, 2),
]


@pytest.mark.parametrize(("headers", "fresh", "length"), WAYS)
def test_a_whole_answer_has_one_date_and_it_goes_on(headers: Headers, fresh: Headers, length: int) -> None:
    date = DateField(FIRST)
    for now in (FIRST, FIRST, LATER):
        machine = http1(date)
        date.tell(now)
        machine.respond(1, 200, headers, (b"ok",), fresh, length)
        assert dates(machine) == [now]


@pytest.mark.parametrize(("headers", "fresh", "length"), WAYS)
@pytest.mark.parametrize("name", [b"date", b"Date"])
def test_who_says_a_date_keeps_it_alone(name: bytes, headers: Headers, fresh: Headers, length: int) -> None:
    for kind in (tuple, list):
        for place in (0, 1):
            machine = http1(DateField(FIRST))
            own = ((name, OWN[1]),)
            said = [kind([*headers, *(own if not place else ())]), kind([*fresh, *(own if place else ())])]
            machine.respond(1, 200, said[0], (b"ok",), said[1], length)
            assert dates(machine) == [OWN[1]]


@pytest.mark.parametrize("status", [200, 204, 304, 404, 500])
def test_streamed_and_bodyless_answers_have_one_too(status: int) -> None:
    machine = http1(DateField(FIRST))
    machine.send(Response(stream=1, status=status, headers=[TYPE]))
    if status not in (204, 304):
        machine.send(Data(stream=1, buffers=(b"x",)))
    machine.send(End(stream=1))
    assert dates(machine) == [FIRST]


def test_interim_heads_have_none() -> None:
    machine = HTTP1Connection(Role.SERVER, date=DateField(FIRST))
    machine.receive_data(b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n")
    assert isinstance(machine.next_event(), Request)
    machine.send(Response(stream=1, status=100))
    assert dates(machine) == []


def test_who_has_told_no_clock_says_no_date() -> None:
    date = DateField(FIRST)
    date.tell(b"")
    for machine in (http1(date), http1(DateField())):
        machine.respond(1, 200, (TYPE,), (b"ok",), ID, 2)
        assert dates(machine) == []


def test_a_request_shows_its_own_date() -> None:
    machine = HTTP1Connection(Role.SERVER, date=DateField(FIRST))
    machine.receive_data(b"GET / HTTP/1.1\r\nhost: a\r\nDate: " + OWN[1] + b"\r\n\r\n")
    request = machine.next_event()
    assert isinstance(request, Request)
    assert list(request.head.headers) == [OWN]


def answered(client: HTTP2Connection, server: HTTP2Connection) -> list[Response]:
    client.receive_data(b"".join(bytes(b) for b in server.data_to_send(1 << 20)))
    found = []
    while isinstance(event := client.next_event(), Response | End | Data):
        if isinstance(event, Response):
            found.append(event)
    return found


@pytest.mark.parametrize("payload_path", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("own", [[], [OWN]])
def test_http2_heads_have_one_as_well(payload_path: bool, whole: bool, own: list[tuple[bytes, bytes]]) -> None:
    date = DateField(FIRST)
    client, server = (
        HTTP2Connection(Role.CLIENT, payload_path=payload_path),
        HTTP2Connection(Role.SERVER, payload_path=payload_path, date=date),
    )
    client.send(Request(stream=1, head=Head(method=b"GET", target=b"/", authority=b"a")))
    client.send(End(stream=1))
    server.receive_data(b"".join(bytes(b) for b in client.data_to_send(1 << 20)))
    assert isinstance(server.next_event(), Request)
    if whole:
        server.respond(1, 200, [TYPE, *own], (b"ok",))
    else:
        server.send(Response(stream=1, status=103))
        date.tell(LATER)
        server.send(Response(stream=1, status=200, headers=[TYPE, *own]))
    heads = answered(client, server)
    now = OWN[1] if own else FIRST if whole else LATER
    assert [[value for name, value in head.headers if name == b"date"] for head in heads] == [[]] * (not whole) + [[now]]
