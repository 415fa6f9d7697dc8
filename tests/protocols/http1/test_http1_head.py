"""HTTP/1.1 request heads: what is read from them, and what is refused with which status."""

from __future__ import annotations

import pytest

from protocols.errors import RemoteProtocolError
from protocols.events import NEED_DATA, End, Head, Request
from tests.protocols.http1.http1_helpers import HOST, answer, cuts, pull, request, server, written


def refusal(data: bytes, **limits: int) -> int:
    with pytest.raises(RemoteProtocolError) as caught:
        pull(server(data, **limits))
    return caught.value.status


def one(data: bytes) -> Request:
    event = server(data).next_event()
    assert isinstance(event, Request)
    return event


def test_a_request_is_read_as_it_was_sent_without_its_connection_fields() -> None:
    data = (
        b"POST /v2/models/m/infer?x=%20y HTTP/1.1\r\nHost: A.example:8080\r\nX-One:  1 \t\r\nConnection: Keep-Alive, X-One\r\n"
        b"Keep-Alive: timeout=5\r\nProxy-Connection: keep-alive\r\nTE: trailers\r\nX-Two:\r\nx-one: \xe9\r\nContent-Length: 0\r\n\r\n"
    )
    assert pull(server(data)) == [
        Request(
            stream=1,
            head=Head(
                method=b"POST",
                target=b"/v2/models/m/infer?x=%20y",
                headers=((b"x-one", b"1"), (b"x-two", b""), (b"x-one", b"\xe9"), (b"content-length", b"0")),
                authority=b"A.example:8080",
                version=b"1.1",
                content_length=0,
            ),
        ),
        End(stream=1),
    ]


@pytest.mark.parametrize(
    ("what", "data", "status"),
    [
        (
            "content-length and transfer-encoding",
            request(b"POST", fields=b"content-length: 3\r\ntransfer-encoding: chunked\r\n"),
            400,
        ),
        (
            "the same, the other way round",
            request(b"POST", fields=b"transfer-encoding: chunked\r\ncontent-length: 3\r\n"),
            400,
        ),
        (
            "content-length and another coding",
            request(b"POST", fields=b"transfer-encoding: gzip\r\ncontent-length: 3\r\n"),
            400,
        ),
        ("two lengths that differ", request(b"POST", fields=b"content-length: 3\r\ncontent-length: 4\r\n"), 400),
        ("two lengths that agree", request(b"POST", fields=b"content-length: 3\r\ncontent-length: 3\r\n"), 400),
        ("a list of lengths", request(b"POST", fields=b"content-length: 5, 5\r\n"), 400),
        ("a length with a sign", request(b"POST", fields=b"content-length: +5\r\n"), 400),
        ("a negative length", request(b"POST", fields=b"content-length: -5\r\n"), 400),
        ("a length in hexadecimal", request(b"POST", fields=b"content-length: 0x5\r\n"), 400),
        ("a length with an underscore", request(b"POST", fields=b"content-length: 1_0\r\n"), 400),
        ("a length of no digit", request(b"POST", fields=b"content-length:\r\n"), 400),
        ("a length of other digits", request(b"POST", fields="content-length: ٣\r\n".encode()), 400),
        ("a length of 2**63", request(b"POST", fields=b"content-length: %d\r\n" % 2**63), 400),
        ("a length of 5,000 digits", request(b"POST", fields=b"content-length: %b\r\n" % (b"9" * 5000)), 400),
        ("another coding", request(b"POST", fields=b"transfer-encoding: gzip\r\n"), 400),
        ("another coding and chunked", request(b"POST", fields=b"transfer-encoding: gzip, chunked\r\n"), 501),
        ("chunked and another coding", request(b"POST", fields=b"transfer-encoding: chunked, gzip\r\n"), 400),
        ("chunked twice", request(b"POST", fields=b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n"), 400),
        ("identity", request(b"POST", fields=b"transfer-encoding: identity\r\n"), 400),
        ("xchunked", request(b"POST", fields=b"transfer-encoding: xchunked\r\n"), 400),
        ("an empty coding", request(b"POST", fields=b"transfer-encoding:\r\n"), 400),
        ("a vertical tab before chunked", request(b"POST", fields=b"transfer-encoding: \x0bchunked\r\n"), 400),
        ("a coding in HTTP/1.0", request(b"POST", fields=b"transfer-encoding: chunked\r\n", version=b"1.0"), 400),
        ("no host", request(host=b""), 400),
        ("two hosts", request(host=HOST + HOST), 400),
        ("two hosts in HTTP/1.0", request(host=HOST + HOST, version=b"1.0"), 400),
        ("an empty host", request(host=b"host:\r\n"), 400),
        ("a host with a path", request(host=b"host: a/b\r\n"), 400),
        ("a host with a user", request(host=b"host: u@a\r\n"), 400),
        ("a host with a space", request(host=b"host: a b\r\n"), 400),
        ("a host with a comma list of ports", request(host=b"host: a:1:2\r\n"), 400),
        ("an absolute target that is not the host", request(target=b"http://b.example/"), 400),
        ("an absolute target with another port", request(target=b"http://a.example:81/"), 400),
        ("an absolute target with a user", request(target=b"http://u@a.example/"), 400),
        ("an absolute target without a host, in HTTP/1.0", request(target=b"http:///x", version=b"1.0", host=b""), 400),
        ("a space before the colon", request(fields=b"x : y\r\n"), 400),
        ("a tab before the colon", request(fields=b"x\t: y\r\n"), 400),
        ("a folded line", request(fields=b"x: y\r\n z\r\n"), 400),
        ("a folded line with a tab", request(fields=b"x: y\r\n\tz\r\n"), 400),
        ("a fold right after the request line", b"GET / HTTP/1.1\r\n x: y\r\n" + HOST + b"\r\n", 400),
        ("a NUL in a value", request(fields=b"x: y\0z\r\n"), 400),
        ("a bell in a value", request(fields=b"x: y\x07z\r\n"), 400),
        ("a DEL in a value", request(fields=b"x: y\x7fz\r\n"), 400),
        ("a bare CR in a value", request(fields=b"x: y\rz\r\n"), 400),
        ("a bare LF", request(fields=b"x: y\nz: a\r\n"), 400),
        ("bare LF alone", b"GET / HTTP/1.1\nhost: a\n\n", 400),
        ("a NUL in a name", request(fields=b"x\0: y\r\n"), 400),
        ("a name that is no token", request(fields=b"x[y]: z\r\n"), 400),
        ("an empty name", request(fields=b": z\r\n"), 400),
        ("a field without colon", request(fields=b"x\r\n"), 400),
        ("HTTP/0.9", b"GET /\r\n\r\n", 400),
        ("version 2.0", request(version=b"2.0"), 505),
        ("version 1.2", request(version=b"1.2"), 505),
        ("version 0.9 in full", request(version=b"0.9"), 505),
        ("version 11", request(version=b"11"), 400),
        ("another protocol", b"GET / RTSP/1.0\r\n\r\n", 400),
        ("lower-case http", b"GET / http/1.1\r\n" + HOST + b"\r\n", 400),
        ("two spaces", b"GET  / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        ("a tab for a space", b"GET\t/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        ("a space at the end", b"GET / HTTP/1.1 \r\n" + HOST + b"\r\n", 400),
        ("a space at the start", b" GET / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        ("a space in the target", b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        ("a relative target", request(target=b"x"), 400),
        ("an authority as target", request(target=b"a.example:80"), 400),
        ("another scheme", request(target=b"ftp://a.example/"), 400),
        ("a fragment", request(target=b"/a#b"), 400),
        ("a byte above ASCII in the target", request(target=b"/\xe9"), 400),
        ("an asterisk for GET", request(target=b"*"), 400),
        ("CONNECT", b"CONNECT a.example:80 HTTP/1.1\r\n" + HOST + b"\r\n", 501),
        ("an unknown method", request(b"FROB"), 501),
        ("a lower-case method", request(b"get"), 501),
        ("a method that is no token", request(b"G(ET"), 400),
        ("another expectation", request(b"POST", fields=b"expect: 200-ok\r\ncontent-length: 1\r\n"), 417),
        ("two expectations", request(b"POST", fields=b"expect: 100-continue, x\r\ncontent-length: 1\r\n"), 417),
        ("an expectation twice", request(b"POST", fields=b"expect: 100-continue\r\nexpect: 100-continue\r\n"), 417),
        ("two empty lines before a request", b"\r\n\r\n" + request(), 400),
        ("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(what: str, data: bytes, status: int) -> None:
    assert refusal(data) == status


@pytest.mark.parametrize(
    ("codings", "status"),
    [
        # RFC 9112 section 6.1: a coding that we do not understand, while chunked still says where the body ends
        ([b"gzip, chunked"], 501),
        ([b"gzip", b"chunked"], 501),
        ([b"gzip ,\tdeflate, CHUNKED"], 501),
        ([b'x;q=1 ; r="a, \\" b", chunked'], 501),
        ([b"chunkedx, chunked"], 501),
        # section 6.3, rule 4: chunked is not the final coding, so that nobody can tell where the body ends
        ([b"gzip"], 400),
        ([b"chunked, gzip"], 400),
        ([b"chunked", b"gzip"], 400),
        ([b"gzip, xchunked"], 400),
        ([b"gzip, chunkedx"], 400),
        ([b'gzip;x=", chunked"'], 400),
        # section 7: chunked once, and without parameters; and what is no list of codings
        ([b"chunked, chunked"], 400),
        ([b"gzip, chunked, chunked"], 400),
        ([b"Chunked;x=y, chunked"], 400),
        ([b"chunked;x=y"], 400),
        ([b"gzip, chunked;x=y"], 400),
        ([b", chunked"], 400),
        ([b"gzip chunked"], 400),
        ([b'gzip;x="y, chunked'], 400),
        ([b"gzip;x, chunked"], 400),
        ([b"gzip, chunked,"], 400),
        ([b"", b"chunked"], 400),
    ],
)
def test_a_coding_we_do_not_know_is_501_only_where_the_end_of_the_body_could_be_told(
    codings: list[bytes], status: int
) -> None:
    data = request(b"POST", fields=b"".join(b"transfer-encoding: %b\r\n" % coding for coding in codings))
    assert refusal(data) == status
    machine = server(data)
    with pytest.raises(RemoteProtocolError):
        machine.next_event()
    assert machine.must_close


@pytest.mark.parametrize("data", [request(host=b"host: a/b\r\n"), request(version=b"2.0"), request(b"FROB"), b"GET /\n\n"])
def test_a_refusal_is_the_same_wherever_the_input_is_cut(data: bytes) -> None:
    whole = refusal(data)
    for pieces in cuts(data):
        machine = server()
        with pytest.raises(RemoteProtocolError) as caught:  # noqa: PT012
            for piece in pieces:
                machine.receive_data(piece)
                pull(machine)
        assert caught.value.status == whole


def test_an_error_is_raised_for_ever_and_nothing_more_is_read() -> None:
    machine = server(request(version=b"3.0"))
    errors = []
    for _ in range(3):
        with pytest.raises(RemoteProtocolError) as caught:
            machine.next_event()
        errors.append((str(caught.value), caught.value.status))
        machine.receive_data(request())
    assert errors == [errors[0]] * 3
    assert machine.unread == 0
    assert machine.must_close


def test_a_refused_head_can_still_be_answered_and_the_answer_closes() -> None:
    machine = server(request() + request(version=b"2.0"))
    pull(machine)
    answer(machine)
    with pytest.raises(RemoteProtocolError):
        machine.next_event()
    assert machine.stream == 2
    answer(machine, 505)
    assert written(machine) == (
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
        b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    )


def test_one_empty_line_before_each_request_is_ignored() -> None:
    data = b"\r\n" + request()
    for pieces in cuts(data + data):
        machine, events = server(), []
        for piece in pieces:
            machine.receive_data(piece)
            while new := pull(machine):
                events += new
                answer(machine)
        assert [type(e) for e in events] == [Request, End, Request, End]


def test_an_empty_line_alone_is_no_message_under_way() -> None:
    machine = server(b"\r\n")
    assert not machine.idle
    assert machine.next_event() is NEED_DATA
    assert machine.idle


@pytest.mark.parametrize(
    ("target", "method", "seen"),
    [
        (b"http://a.example/x?y", b"GET", b"/x?y"),
        (b"HTTPS://A.EXAMPLE", b"GET", b"/"),
        (b"http://a.example?y", b"GET", b"/?y"),
        (b"http://a.example", b"OPTIONS", b"*"),
        (b"*", b"OPTIONS", b"*"),
        (b"//double", b"GET", b"//double"),
    ],
)
def test_targets_come_out_in_origin_form(target: bytes, method: bytes, seen: bytes) -> None:
    event = one(request(method, target))
    assert (event.head.target, event.head.authority, event.head.scheme) == (seen, b"a.example", b"http")


@pytest.mark.parametrize("host", [b"a", b"a.b:1", b"a.b:", b"127.0.0.1:8080", b"[::1]:8080", b"[fe80::1]", b"x_y~%41"])
def test_hosts_of_every_form_are_taken(host: bytes) -> None:
    assert one(request(host=b"Host: " + host + b"\r\n")).head.authority == host


def test_http_10_needs_no_host_and_names_one_by_an_absolute_target() -> None:
    assert one(request(version=b"1.0", host=b"")).head.authority == b""
    assert one(request(target=b"http://b.example/", version=b"1.0", host=b"")).head.authority == b"b.example"


@pytest.mark.parametrize("value", [b"0", b"00000000000000000000000000000005", b"%d" % (2**63 - 1)])
def test_lengths_are_any_decimal_number_below_2_to_the_63(value: bytes) -> None:
    event = one(request(b"POST", fields=b"content-length: " + value + b"\r\n"))
    assert event.head.content_length == int(value)
    assert event.head.headers == ((b"content-length", value),)


def test_expect_is_met_by_a_flag_where_a_body_follows_in_http_11() -> None:
    fields = b"Expect: 100-Continue\r\n"
    assert one(request(b"POST", fields=fields + b"content-length: 1\r\n")).head.expects_continue
    assert one(request(b"POST", fields=fields + b"transfer-encoding: chunked\r\n")).head.expects_continue
    assert not one(request(b"POST", fields=fields + b"content-length: 0\r\n")).head.expects_continue
    assert not one(request(b"GET", fields=fields)).head.expects_continue
    assert not one(request(b"POST", fields=fields + b"content-length: 1\r\n", version=b"1.0")).head.expects_continue


@pytest.mark.parametrize(
    ("fields", "upgrade"),
    [
        (b"connection: keep-alive, Upgrade\r\nupgrade: WebSocket\r\n", b"websocket"),
        (b"connection: x\r\nconnection: upgrade\r\nupgrade: a/1.0\r\n", b"a/1.0"),
        (b"upgrade: websocket\r\n", b""),
        (b"connection: upgrade\r\n", b""),
        (b"connection: upgrade\r\nupgrade: h2c, websocket\r\n", b""),
        (b"connection: upgrade\r\nupgrade: web socket\r\n", b""),
        (b"connection: upgrade\r\nupgrade: websocket\r\ncontent-length: 2\r\n", b""),
        (b"connection: upgrade\r\nupgrade: websocket\r\ntransfer-encoding: chunked\r\n", b""),
    ],
)
def test_an_upgrade_is_shown_where_it_is_well_formed(fields: bytes, upgrade: bytes) -> None:
    event = one(request(fields=fields + b"sec-websocket-key: k\r\n"))
    assert event.head.upgrade == upgrade
    assert (b"sec-websocket-key", b"k") in event.head.headers
    assert b"upgrade" not in dict(event.head.headers)


def test_only_get_in_http_11_can_upgrade() -> None:
    fields = b"connection: upgrade\r\nupgrade: websocket\r\n"
    assert one(request(b"POST", fields=fields)).head.upgrade == b""
    assert one(request(fields=fields, version=b"1.0")).head.upgrade == b""


def test_limits_of_a_head_are_exact() -> None:
    line = b"GET /" + b"x" * (100 - len(b"GET / HTTP/1.1")) + b" HTTP/1.1\r\n"
    assert one(line + HOST + b"\r\n").head.method == b"GET"
    assert refusal(line + HOST + b"\r\n", request_line=99) == 414
    head = request(fields=b"x: y\r\n")
    assert pull(server(head, request_line=20, head=len(head)))
    assert refusal(head, request_line=20, head=len(head) - 1) == 431
    assert pull(server(request(fields=b"x: y\r\n" * 4), fields=5))
    assert refusal(request(fields=b"x: y\r\n" * 5), fields=5) == 431


def test_limits_of_a_head_hold_before_it_is_complete() -> None:
    machine = server(b"G" * 101, request_line=100)
    assert machine.next_event() is NEED_DATA  # the 101st byte could have been the CR
    machine.receive_data(b"\r")
    with pytest.raises(RemoteProtocolError) as caught:
        machine.next_event()
    assert caught.value.status == 414
    half = request(fields=b"x: " + b"y" * 100)[:-2]
    assert server(half, head=len(half) + 1).next_event() is NEED_DATA
    assert refusal(half, head=len(half)) == 431


def test_limits_of_a_head_do_not_depend_on_where_it_is_cut() -> None:
    head = request(fields=b"x: y\r\n")
    for pieces in cuts(head):
        machine, events = server(request_line=14, head=len(head), fields=2), []
        for piece in pieces:
            machine.receive_data(piece)
            events += pull(machine)
        assert [type(e) for e in events] == [Request, End]


def test_a_head_sent_again_is_read_the_same_and_belongs_to_the_next_stream() -> None:
    head = request(b"POST", b"/p", b"content-length: 2\r\nx: y\r\n")
    machine = server(head + b"ab" + head + b"cd")
    first = pull(machine)
    answer(machine)
    second = pull(machine)
    assert [e.stream for e in first] == [1, 1, 1]
    assert [e.stream for e in second] == [2, 2, 2]
    assert first[0].head is second[0].head


def test_a_head_that_begins_as_the_last_one_did_is_another() -> None:
    machine = server(request())
    pull(machine)
    answer(machine)
    machine.receive_data(request(fields=b"x: y\r\n"))
    assert pull(machine)[0].head.headers == ((b"x", b"y"),)


def test_messages_never_echo_much_of_what_came() -> None:
    for data in (
        request(target=b"/#" + b"x" * 5000),
        request(host=b"host: /" + b"x" * 5000 + b"\r\n"),
        b"\x01" * 5000 + b"\r\n\r\n",
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            pull(server(data))
        assert len(str(caught.value)) < 300
