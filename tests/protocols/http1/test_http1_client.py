"""An HTTP/1.1 client: requests and their framing, answers and where they end, and reuse."""

from __future__ import annotations

from typing import Any

import pytest

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import NEED_DATA, PAUSED, ConnectionEnd, Data, End, Event, Request, Response
from protocols.http1.connection import HTTP1Connection
from tests.protocols.http1.http1_helpers import append, body, client, cuts, get, pull, written

OK = b"HTTP/1.1 200 OK\r\n"


def asking(**fields: Any) -> HTTP1Connection:
    """A client that has sent a request whole."""
    machine = client()
    machine.send(get(**fields))
    machine.send(End(stream=1))
    written(machine)
    return machine


def answered(data: bytes, **fields: Any) -> list[Event]:
    """The events of this answer, the same wherever it is cut."""
    results = []
    for pieces in cuts(data):
        machine, events = asking(**fields), list[Any]()
        for piece in pieces:
            machine.receive_data(piece)
            for event in pull(machine):
                append(events, event)
        results.append(events)
    assert all(result == results[0] for result in results)
    return results[0]


def refused(data: bytes, **fields: Any) -> None:
    machine = asking(**fields)
    machine.receive_data(data)
    with pytest.raises(RemoteProtocolError) as caught:
        pull(machine)
    assert caught.value.status == 502
    assert machine.must_close
    with pytest.raises(RemoteProtocolError):
        machine.next_event()


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_request_is_written_with_its_host_first() -> None:
    machine = client()
    machine.send(get(target=b"/a?b", headers=((b"X-One", b"1"), (b"accept", b"*/*"))))
    machine.send(End(stream=1))
    assert written(machine) == b"GET /a?b HTTP/1.1\r\nhost: a.example\r\nX-One: 1\r\naccept: */*\r\n\r\n"


def test_a_body_of_known_length_is_declared_once() -> None:
    for fields in (
        {"content_length": 2},
        {"headers": ((b"content-length", b"2"),)},
        {"content_length": 2, "headers": ((b"Content-Length", b"2"),)},
    ):
        machine = client()
        machine.send(get(method=b"POST", **fields))
        machine.send(Data(stream=1, buffers=(b"hi",)))
        machine.send(End(stream=1))
        out = written(machine)
        assert out.lower().count(b"content-length: 2\r\n") == 1
        assert out.endswith(b"\r\n\r\nhi")


@pytest.mark.parametrize("method", [b"POST", b"PUT", b"PATCH"])
def test_a_body_of_unknown_length_is_chunked(method: bytes) -> None:
    machine = client()
    machine.send(get(method=method))
    machine.send(Data(stream=1, buffers=(b"hi",)))
    machine.send(End(stream=1, trailers=((b"x", b"y"),)))
    assert (
        written(machine)
        == method + b" / HTTP/1.1\r\nhost: a.example\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nx: y\r\n\r\n"
    )


def test_other_methods_have_a_body_only_where_its_length_is_declared() -> None:
    machine = client()
    machine.send(get(method=b"DELETE"))
    with pytest.raises(LocalProtocolError):
        machine.send(Data(stream=1, buffers=(b"x",)))
    machine.send(End(stream=1))
    assert written(machine) == b"DELETE / HTTP/1.1\r\nhost: a.example\r\n\r\n"
    machine = client()
    machine.send(get(method=b"DELETE", content_length=1))
    machine.send(Data(stream=1, buffers=(b"x",)))
    machine.send(End(stream=1))
    assert written(machine).endswith(b"\r\n\r\nx")


def test_expect_and_upgrade_are_written() -> None:
    machine = client()
    machine.send(get(method=b"POST", content_length=1, expects_continue=True))
    assert written(machine) == b"POST / HTTP/1.1\r\nhost: a.example\r\ncontent-length: 1\r\nexpect: 100-continue\r\n\r\n"
    for fields in ({"upgrade": b"websocket"}, {"headers": ((b"upgrade", b"websocket"), (b"connection", b"Upgrade"))}):
        machine = client()
        machine.send(get(**fields))
        assert written(machine) == b"GET / HTTP/1.1\r\nhost: a.example\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": 2},
        {"stream": 0},
        {"method": b"CONNECT"},
        {"method": b""},
        {"method": b"G T"},
        {"target": b""},
        {"target": b"a"},
        {"target": b"*"},
        {"target": b"/a b"},
        {"target": b"/a\r\nx: y"},
        {"target": b"/#a"},
        {"target": b"http://a/"},
        {"authority": b""},
        {"authority": b"a/b"},
        {"authority": b"a\r\nx: y"},
        {"content_length": -1},
        {"content_length": 2**63},
        {"content_length": 1, "headers": ((b"content-length", b"2"),)},
        {"headers": ((b"host", b"a"),)},
        {"headers": ((b"transfer-encoding", b"chunked"),)},
        {"headers": ((b"x", b"a\r\nb: c"),)},
        {"headers": ((b"x y", b"a"),)},
        {"upgrade": b"a\r\nx: y"},
    ],
)
def test_requests_that_cannot_be_written_are_refused_and_nothing_is_queued(fields: dict[str, Any]) -> None:
    machine = client()
    with pytest.raises(LocalProtocolError):
        machine.send(get(**{"stream": 1, **fields}))
    assert machine.idle
    machine.send(get())
    assert written(machine) == b"GET / HTTP/1.1\r\nhost: a.example\r\n\r\n"


def test_a_client_sends_no_response() -> None:
    machine = asking()
    with pytest.raises(LocalProtocolError):
        machine.send(Response(stream=1, status=200))


# -- answers -----------------------------------------------------------------------------------------------------------


def test_an_answer_of_known_length() -> None:
    data = b"HTTP/1.1 404 Not \xe9 Found\r\nContent-Length: 2\r\nX-One:  1 \r\nConnection: x\r\nKeep-Alive: 5\r\n\r\nno"
    assert answered(data) == [
        Response(stream=1, status=404, headers=((b"content-length", b"2"), (b"x-one", b"1"))),
        Data(stream=1, buffers=(b"no",)),
        End(stream=1),
    ]


def test_a_chunked_answer_with_trailers() -> None:
    data = OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n1;x\r\n!\r\n0\r\nX: y\r\n\r\n"
    assert answered(data) == [
        Response(stream=1, status=200),
        Data(stream=1, buffers=(b"hi!",)),
        End(stream=1, trailers=((b"x", b"y"),)),
    ]


@pytest.mark.parametrize("head", [b"HTTP/1.1 200\r\n", b"HTTP/1.0 200 OK\r\n", OK + b"connection: close\r\n"])
def test_an_answer_that_ends_with_the_connection(head: bytes) -> None:
    machine = asking()
    machine.receive_data(head + b"\r\nsome")
    assert body(pull(machine)) == b"some"
    machine.receive_data(b" more")
    assert machine.must_close
    machine.receive_eof()
    assert pull(machine) == [Data(stream=1, buffers=(b" more",)), End(stream=1), ConnectionEnd()]
    with pytest.raises(LocalProtocolError):
        machine.send(get(2))


@pytest.mark.parametrize(
    ("method", "status"), [(b"HEAD", b"200 OK"), (b"GET", b"204 No Content"), (b"GET", b"304 Not Modified")]
)
def test_answers_that_have_no_body_whatever_they_say(method: bytes, status: bytes) -> None:
    for field in (b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b""):
        events = answered(b"HTTP/1.1 " + status + b"\r\n" + field + b"\r\n", method=method)
        assert [type(e) for e in events] == [Response, End]


def test_interim_answers_are_events_and_the_answer_follows() -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK + b"content-length: 0\r\n\r\n"
    events = answered(data)
    assert [e.status for e in events if isinstance(e, Response)] == [100, 103, 200]
    assert isinstance(events[-1], End)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 600 X\r\n\r\n",
        b"HTTP/1.1 099 X\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1  200 OK\r\n\r\n",
        b"ICY 200 OK\r\n\r\n",
        b"\r\n" + OK + b"\r\n",
        b"HTTP/1.1 200 OK\ncontent-length: 0\n\n",
        b"HTTP/1.1 200 O\x01K\r\n\r\n",
        OK + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        OK + b"content-length: x\r\n\r\n",
        OK + b"content-length: %d\r\n\r\n" % 2**63,
        OK + b"transfer-encoding: gzip, chunked\r\n\r\n",
        OK + b"transfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        OK + b"x: y\r\n z\r\n\r\n",
        OK + b"x : y\r\n\r\n",
        OK + b"x: \0\r\n\r\n",
        OK + b"x: y\r\n" * 101 + b"\r\n",
        OK + b"x: " + b"y" * 32768,
        OK + b"transfer-encoding: chunked\r\n\r\nx\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\n0\r\nx y\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        OK + b"content-length: 0\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    ],
)
def test_answers_that_break_the_rules_are_refused(data: bytes) -> None:
    refused(data)


@pytest.mark.parametrize(
    "data", [b"", b"HTTP", OK + b"content-length: 2\r\n\r\nh", OK + b"transfer-encoding: chunked\r\n\r\n0\r\n"]
)
def test_the_peers_end_before_the_answer_is_complete_is_an_error(data: bytes) -> None:
    machine = asking()
    machine.receive_data(data)
    machine.receive_eof()
    with pytest.raises(RemoteProtocolError):
        pull(machine)


def test_a_body_lands() -> None:
    machine = asking()
    machine.receive_data(OK + b"content-length: 6\r\n\r\nab")
    machine.next_event()
    memory = bytearray(6)
    assert machine.land(1, memoryview(memory)) == 2
    target = machine.get_buffer()
    assert target is not None
    target[:] = b"cdef"
    machine.buffer_updated(4)
    assert [type(e) for e in pull(machine)] == [Data, End]
    assert memory == b"abcdef"
    assert machine.unconsumed == 6
    machine.credit(1, 6)


# -- reuse -------------------------------------------------------------------------------------------------------------


def test_requests_follow_each_other() -> None:
    machine = asking()
    before = machine.idle
    with pytest.raises(LocalProtocolError):
        machine.send(get(2))
    machine.receive_data(OK + b"content-length: 0\r\n\r\n")
    pull(machine)
    assert (before, machine.idle) == (False, True)
    with pytest.raises(LocalProtocolError):
        machine.send(get(1))
    machine.send(get(2))
    machine.send(End(stream=2))
    machine.receive_data(OK + b"content-length: 0\r\n\r\n")
    assert [e.stream for e in pull(machine)] == [2, 2]


def test_an_answer_may_be_complete_before_the_request_is() -> None:
    machine = client()
    machine.send(get(method=b"POST"))
    machine.receive_data(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 0\r\n\r\n")
    assert [type(e) for e in pull(machine)] == [Response, End]
    with pytest.raises(LocalProtocolError):
        machine.send(get(2))
    machine.send(Data(stream=1, buffers=(b"x",)))
    machine.send(End(stream=1))
    written(machine)
    assert machine.idle


@pytest.mark.parametrize(
    "answer", [OK + b"connection: close\r\ncontent-length: 0\r\n\r\n", b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n"]
)
def test_a_server_that_closes_gets_no_further_request(answer: bytes) -> None:
    machine = asking()
    machine.receive_data(answer)
    assert [type(e) for e in pull(machine)] == [Response, End]
    assert machine.must_close
    with pytest.raises(LocalProtocolError):
        machine.send(get(2))
    machine.receive_eof()
    assert machine.next_event() == ConnectionEnd()


def test_http_10_may_keep_the_connection() -> None:
    machine = asking()
    machine.receive_data(b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 0\r\n\r\n")
    pull(machine)
    assert not machine.must_close
    machine.send(get(2))


def test_our_own_close_is_kept() -> None:
    for close in (True, False):
        machine = client()
        if close:
            machine.close_after_response()
        machine.send(get(headers=() if close else ((b"connection", b"close"),)))
        machine.send(End(stream=1))
        assert b"\r\nconnection: close\r\n" in written(machine)
        assert machine.must_close
        machine.receive_data(OK + b"content-length: 0\r\n\r\n")
        pull(machine)
        with pytest.raises(LocalProtocolError):
            machine.send(get(2))


def test_bytes_that_no_request_asked_for_never_answer_the_next_one() -> None:
    machine = client()
    machine.receive_data(OK + b"content-length: 0\r\n\r\n")
    with pytest.raises(LocalProtocolError):
        machine.send(get())
    with pytest.raises(RemoteProtocolError):
        machine.next_event()
    with pytest.raises(LocalProtocolError):
        machine.send(get())


def test_an_idle_connection_may_end() -> None:
    machine = client()
    assert machine.next_event() is NEED_DATA
    machine.receive_eof()
    assert machine.next_event() == ConnectionEnd()
    with pytest.raises(LocalProtocolError):
        machine.send(get())


def test_a_switch_hands_over_what_came_behind_it() -> None:
    data = (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: WebSocket\r\nConnection: Upgrade\r\nsec-websocket-accept: k\r\n\r\n"
    )
    for pieces in cuts(data + b"\x81\x00"):
        machine, events = asking(upgrade=b"websocket"), []
        for piece in pieces:
            machine.receive_data(piece)
            events += pull(machine)
        assert events == [Response(stream=1, status=101, headers=((b"sec-websocket-accept", b"k"),))]
        assert machine.next_event() is PAUSED
        assert machine.switch() == b"\x81\x00"


def test_an_upgrade_may_be_declined_but_not_changed() -> None:
    machine = asking(upgrade=b"websocket")
    machine.receive_data(OK + b"content-length: 0\r\n\r\n")
    assert [type(e) for e in pull(machine)] == [Response, End]
    refused(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", upgrade=b"websocket")


def test_a_request_event_of_a_server_can_be_sent_on() -> None:
    from tests.protocols.http1.http1_helpers import request, server

    event = server(request(b"POST", b"/p", b"content-length: 2\r\nx: y\r\n", b"hi")).next_event()
    assert isinstance(event, Request)
    machine = client()
    machine.send(event)
    assert written(machine) == b"POST /p HTTP/1.1\r\nhost: a.example\r\ncontent-length: 2\r\nx: y\r\n\r\n"
