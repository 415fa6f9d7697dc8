"""A broken or hostile peer gets an answer, the end of its stream or of its connection, and never crashes the machine."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import RemoteProtocolError
from protocols.events import Data, End, Event, Head, Refused, Request, Reset, Response, Signal
from protocols.http2.connection import HTTP2Connection, HTTP2Limits
from protocols.http2.frames import PREFACE, Kind
from protocols.roles import Role
from tests.protocols.http2 import http2_helpers as wire
from tests.protocols.http2.http2_helpers import (
    END_HEADERS,
    END_STREAM,
    GET,
    PADDED,
    POST,
    WITH_PRIORITY,
    ByHand,
    Pair,
    body,
    check,
    data,
    frame,
    frames,
    output,
    pull,
    take,
    told,
)

PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR, COMPRESSION_ERROR, CALM = 1, 3, 5, 6, 9, 11


def without(name: bytes) -> list[tuple[bytes, bytes]]:
    return [field for field in POST if field[0] != name]


def with_(name: bytes, value: bytes) -> list[tuple[bytes, bytes]]:
    return [*without(name), (name, value)] if not name.startswith(b":") else [(name, value), *without(name)]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([*POST, *((b"x", b"y"),) * 101], 431),
        ([*POST, (b"x", b"y" * 32_768)], 431),
        ([*POST, (b"host", b"example"), (b"host", b"example")], 400),
        ([*POST, (b"host", b"other")], 400),
        (with_(b":authority", b""), 400),
        (with_(b":authority", b"/run/s.sock"), 400),
        ([*with_(b":authority", b"/run/s.sock"), (b"content-type", b"application/grpc-web")], 400),
        ([*with_(b":authority", b"a b"), (b"content-type", b"application/grpc")], 400),
        (with_(b":authority", b"user@example"), 400),
        (with_(b":method", b"CONNECT"), 501),
        ([(b":method", b"CONNECT"), (b":authority", b"example")], 501),
        ([*with_(b":method", b"CONNECT"), (b":protocol", b"websocket")], 501),
        (with_(b":method", b"G T"), 400),
        (with_(b":path", b"x"), 400),
        (with_(b":path", b"http://example/"), 400),
        (with_(b":path", b"/a b"), 400),
        (with_(b":path", b"/a#b"), 400),
        (with_(b":scheme", b"ftp"), 400),
        ([*POST, (b"content-length", b"1"), (b"content-length", b"1")], 400),
    ],
)
def test_a_request_that_can_be_answered_is_refused_and_its_body_dropped(
    headers: list[tuple[bytes, bytes]], status: int
) -> None:
    client = ByHand()
    (event,) = client.says(client.head(1, headers))
    assert isinstance(event, Refused)
    assert (event.stream, event.status) == (1, status)
    assert client.says(data(1, bytes(16_384)), data(1, b"", END_STREAM)) == []
    assert client.server.unconsumed == 0
    client.server.send(Response(stream=1, status=status))
    client.server.send(End(stream=1))
    output(client.server)
    assert client.server.idle
    assert isinstance(client.says(client.head(3))[0], Request), "the connection lives"


@pytest.mark.parametrize(
    "headers",
    [
        [*POST, *((b"x", b"y"),) * 100],
        [*POST, (b"x", b"y" * (32_768 - 33 - sum(len(n) + len(v) + 32 for n, v in POST)))],
        with_(b":path", b"*"),
        [*POST, (b"host", b"example")],
        [*POST, (b"te", b"trailers")],
        without(b":authority"),
        [*without(b":authority"), (b"te", b"trailers")],
        with_(b":path", "/ü".encode()),
    ],
)
def test_a_request_at_the_limit_is_a_request(headers: list[tuple[bytes, bytes]]) -> None:
    client = ByHand()
    (event,) = client.says(client.head(1, headers))
    assert isinstance(event, Request)


@pytest.mark.parametrize("kind", [b"application/grpc", b"Application/GRPC+proto", b"application/grpc;x=y"])
@pytest.mark.parametrize("authority", [b"", b"/run/s.sock", b"route/default/models/0", b"unix:///run/s", b"a@b", b"?#\\"])
@pytest.mark.parametrize("payload_path", [True, False])
def test_a_call_of_grpc_has_whatever_authority_its_client_makes_of_its_target(
    authority: bytes, kind: bytes, payload_path: bool
) -> None:
    client = ByHand(payload_path=payload_path)
    headers = [*with_(b":authority", authority), (b"te", b"trailers"), (b"content-type", kind)]
    (event,) = client.says(client.head(1, headers))
    assert isinstance(event, Request)
    assert event.head.authority == authority
    if not authority:
        return  # which our client does not send
    pair = Pair()
    pair.client.send(Request(stream=1, head=Head(method=b"POST", target=b"/", authority=authority, headers=headers[4:])))
    pair.flow()
    assert [type(event) for event in pair.at_server] == [Request]


@pytest.mark.parametrize("payload_path", [True, False])
def test_a_request_without_a_name_for_the_server_has_none(payload_path: bool) -> None:
    """HAProxy's health checks send neither :authority nor Host."""
    client = ByHand(payload_path=payload_path)
    (event,) = client.says(client.head(1, without(b":authority")))
    assert isinstance(event, Request)
    assert (event.head.authority, event.head.headers) == (b"", ())


def test_a_refusal_has_the_fields_of_its_request() -> None:
    client = ByHand()
    (event,) = client.says(client.head(1, [*POST, (b"content-type", b"application/grpc"), (b"x", b"y" * 32_768)]))
    assert isinstance(event, Refused)
    assert event.headers[0] == (b"content-type", b"application/grpc")
    assert "(limits.head)" in event.message


@pytest.mark.parametrize("payload_path", [True, False])
@pytest.mark.parametrize(
    ("setting", "written"),
    [
        (
            b"limits.head",
            lambda _: frame(Kind.HEADERS, 0, 3, bytes(16_384)) + frame(Kind.CONTINUATION, 0, 3, bytes(16_384)) * 4,
        ),
        (b"limits.head", lambda client: client.head(3, [*POST, *((b"x", b"y" * 1024),) * 70])),  # short before decoding
        (
            b"http2.continuations",
            lambda client: frame(Kind.HEADERS, 0, 3, client.block(POST)) + frame(Kind.CONTINUATION, 0, 3) * 9,
        ),
        (b"http2.settings_entries", lambda client: frame(Kind.SETTINGS, payload=bytes(6 * 33))),
    ],
)
def test_the_goaway_over_a_limit_says_which_one(setting: bytes, written: Any, payload_path: bool) -> None:
    client = ByHand(payload_path=payload_path)
    client.says(client.head(1))
    with pytest.raises(RemoteProtocolError) as caught:
        client.says(written(client))
    goaway = frames(output(client.server))[-1]
    assert (goaway.kind, caught.value.wire_code) == (Kind.GOAWAY, CALM)
    assert goaway.payload[:8] == (1).to_bytes(4) + CALM.to_bytes(4)
    assert setting in goaway.payload[8:]


@pytest.mark.parametrize("payload_path", [True, False])
def test_the_goaway_for_a_block_that_cannot_be_decoded_tells_no_address_of_memory(payload_path: bool) -> None:
    client = ByHand(payload_path=payload_path)
    client.says(client.head(1))
    with pytest.raises(RemoteProtocolError):
        client.says(frame(Kind.HEADERS, END_HEADERS, 3, client.block(POST) + b"\xff\xff\xff\xff"))
    said = frames(output(client.server))[-1].payload[8:]
    assert said == b"Error decoding header block: Unable to decode HPACK integer representation"


@pytest.mark.parametrize(
    "headers",
    [
        without(b":method"),
        without(b":path"),
        without(b":scheme"),
        with_(b":path", b""),
        [*POST, (b":method", b"GET")],
        [*POST, (b"x", b"y"), (b":late", b"z")],
        [*POST, (b":status", b"200")],
        [*POST, (b"Upper", b"x")],
        [*POST, (b"", b"x")],
        [*POST, (b"a b", b"x")],
        [*POST, (b"x", b"a\r\nb: c")],
        [*POST, (b"x", b"nul\0")],
        [*POST, (b"x", b" space")],
        [*POST, (b"connection", b"close")],
        [*POST, (b"transfer-encoding", b"chunked")],
        [*POST, (b"te", b"gzip")],
    ],
)
def test_a_malformed_head_ends_its_stream_alone(headers: list[tuple[bytes, bytes]]) -> None:
    client = ByHand()
    client.says(client.head(1))
    output(client.server)
    assert client.says(client.head(3, headers)) == [Reset(stream=3, code=PROTOCOL_ERROR)]
    (reset,) = frames(output(client.server))
    assert (reset.kind, reset.stream, reset.payload) == (Kind.RST_STREAM, 3, PROTOCOL_ERROR.to_bytes(4))
    assert client.server.counters.resets == 1
    assert client.says(data(3, b"its body")) == []
    assert body(client.says(data(1, b"the other"))) == b"the other"
    check(client.server)


@pytest.mark.parametrize("value", [b"-1", b"1x", b"", b"1, 1", b"9" * 19])
@pytest.mark.parametrize("end", [0, END_STREAM])
def test_a_content_length_that_is_no_number_refuses_its_request_alone(value: bytes, end: int) -> None:
    client = ByHand()
    client.says(client.head(1))
    (refused,) = client.says(client.head(3, [*POST, (b"content-length", value)], end))
    assert isinstance(refused, Refused)
    assert (refused.stream, refused.status) == (3, 400)
    assert body(client.says(data(1, b"the other"))) == b"the other"
    check(client.server)


def test_content_lengths_that_differ_refuse_their_request_alone() -> None:
    client = ByHand()
    client.says(client.head(1))
    (refused,) = client.says(client.head(3, [*POST, (b"content-length", b"1"), (b"content-length", b"2")]))
    assert isinstance(refused, Refused)
    assert refused.status == 400


@pytest.mark.parametrize("payload_path", [True, False])
def test_a_content_length_in_two_frames_is_no_worse_than_in_one(payload_path: bool) -> None:
    client = ByHand()
    client.server = HTTP2Connection(Role.SERVER, payload_path=payload_path)
    client.says(*ByHand.OPENING, client.head(1))
    block = client.block([*POST, (b"content-length", b"+1")])
    (refused,) = client.says(
        frame(Kind.HEADERS, 0, 3, block[:5]) + frame(Kind.CONTINUATION, END_HEADERS, 3, block[5:]), data(3, b"123456")
    )
    assert isinstance(refused, Refused)
    assert client.says(client.head(1, [(b"content-length", b"x")], END_STREAM)) == [Reset(stream=1, code=PROTOCOL_ERROR)]
    check(client.server)


@pytest.mark.parametrize("payload_path", [True, False])
def test_padding_is_checked_also_where_the_data_comes_too_late(payload_path: bool) -> None:
    client = ByHand()
    client.server = HTTP2Connection(Role.SERVER, payload_path=payload_path)
    client.says(*ByHand.OPENING, client.head(1))
    client.server.send(Reset(stream=1, code=8))
    assert client.says(data(1, b"\x01ab", PADDED)) == []
    assert client.fails(data(1, b"\x03ab", PADDED)) == PROTOCOL_ERROR


def length(n: int) -> list[tuple[bytes, bytes]]:
    return [*POST, (b"content-length", b"%d" % n)]


def test_content_length_is_checked_wherever_a_body_ends() -> None:
    client = ByHand()
    error = [Reset(stream=1, code=PROTOCOL_ERROR)]
    wrong: list[tuple[int, list[bytes]]] = [
        (0, [client.head(1, length(5), END_STREAM)]),
        (1, [client.head(3, length(5)), client.head(3, [(b"t", b"1")], END_STREAM)]),
        (2, [client.head(5, length(5)), data(5, b"1234"), client.head(5, [(b"t", b"1")], END_STREAM)]),
        (2, [client.head(7, length(5)), data(7, b"1234", END_STREAM)]),
        (2, [client.head(9, length(5)), data(9, b"123456")]),
    ]
    for n, (given_before, written) in enumerate(wrong):
        stream = 1 + 2 * n
        events = client.says(*written)
        assert events[-1] == Reset(stream=stream, code=error[0].code)
        assert len(events) <= given_before + 1
        assert not client.server.is_open(stream)
        assert client.server.unconsumed == len(body(events, stream)), "what was not given out is not owed"
        client.server.drop(stream)
    assert client.server.unconsumed == 0
    assert set(client.server.windows()) == {0}
    right = client.says(
        client.head(11, length(5)), data(11, b"12"), data(11, b"345"), client.head(11, [(b"t", b"1")], END_STREAM)
    )
    assert right[-1] == End(stream=11, trailers=((b"t", b"1"),))


def test_a_body_that_nobody_reads_may_be_shorter_than_it_said() -> None:
    client = ByHand()
    client.says(client.head(1, length(5)))
    client.server.drop(1)
    assert client.says(data(1, b"12", END_STREAM)) == []
    assert client.server.is_open(1)


def test_malformed_trailers_end_their_stream() -> None:
    for trailers in ([(b":path", b"/")], [(b"Upper", b"x")], [(b"x", b"y")] * 101):
        client = ByHand()
        events = client.says(client.head(1), client.head(1, trailers, END_STREAM))
        assert events[1:] == [Reset(stream=1, code=PROTOCOL_ERROR)]


def by_server(*written: bytes) -> tuple[HTTP2Connection, list[Event]]:
    """A client that has sent one complete and one open request, and what it makes of these bytes of a server."""
    pair = Pair()
    pair.request(1)
    pair.request(3, end=False)
    pair.flow()
    for piece in written:
        pair.client.receive_data(piece)
    return pair.client, pull(pair.client)


@pytest.mark.parametrize(
    "headers",
    [
        [(b":status", b"abc")],
        [(b":status", b"20")],
        [(b":status", b"101")],
        [(b":path", b"/")],
        [(b":status", b"200"), (b"Upper", b"x")],
        [(b":status", b"200"), *((b"x", b"y"),) * 101],
        [(b":status", b"200"), (b"content-length", b"1")],
    ],
)
def test_a_malformed_response_ends_its_stream_alone(headers: list[tuple[bytes, bytes]]) -> None:
    flags = END_STREAM if (b"content-length", b"1") in headers else 0
    client, events = by_server(ByHand().head(1, headers, flags))
    assert events == [Reset(stream=1, code=PROTOCOL_ERROR)]
    assert not client.is_open(1)
    assert client.is_open(3)


def test_a_response_whose_length_is_no_number_ends_its_stream_alone() -> None:
    client, events = by_server(ByHand().head(1, [(b":status", b"200"), (b"content-length", b"+1")]))
    assert events == [Reset(stream=1, code=PROTOCOL_ERROR)]
    assert client.is_open(3)


def test_a_response_longer_than_it_said_ends_its_stream() -> None:
    head = ByHand().head(3, [(b":status", b"200"), (b"content-length", b"1")])
    _, events = by_server(head, data(3, b"12"))
    assert events[-1] == Reset(stream=3, code=PROTOCOL_ERROR)


def test_a_response_without_body_may_name_a_length() -> None:
    _, events = by_server(ByHand().head(1, [(b":status", b"304"), (b"content-length", b"5")], END_STREAM))
    assert events[-1] == End(stream=1)


def test_push_is_not_accepted() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        by_server(frame(Kind.PUSH_PROMISE, END_HEADERS, 1, (2).to_bytes(4) + ByHand().block(GET)))
    assert caught.value.wire_code == PROTOCOL_ERROR


def test_more_streams_than_allowed_are_refused_one_by_one() -> None:
    client = ByHand(HTTP2Limits(streams=2))
    events = client.says(*(client.head(stream) for stream in (1, 3, 5, 7)))
    assert [event.stream for event in events if isinstance(event, Request)] == [1, 3]
    refused = [found for found in frames(output(client.server)) if found.kind == Kind.RST_STREAM]
    assert [(found.stream, found.payload) for found in refused] == [(5, (7).to_bytes(4)), (7, (7).to_bytes(4))]
    client.server.send(Reset(stream=1, code=8))
    assert isinstance(client.says(client.head(9))[0], Request)


def test_more_streams_than_h2_would_take_before_the_acknowledgement_are_taken() -> None:
    client = ByHand(ready=False)
    events = client.says(PREFACE, wire.settings(), *(client.head(stream) for stream in range(1, 601, 2)))
    assert len(events) == 300


@pytest.mark.parametrize(
    ("code", "written"),
    [
        (PROTOCOL_ERROR, data(0, b"x")),
        (PROTOCOL_ERROR, data(3, b"x")),
        (PROTOCOL_ERROR, data(2, b"x")),
        (PROTOCOL_ERROR, data(1, b"\x05abcd", PADDED)),
        (FRAME_SIZE_ERROR, data(1, b"", PADDED)),
        (FLOW_CONTROL_ERROR, data(1, bytes(16_384)) * 5),
        (FRAME_SIZE_ERROR, frame(99, 0, 0, bytes(16_385))),
        (FRAME_SIZE_ERROR, frame(Kind.DATA, 0, 1, bytes(16_385))[:9]),
        (PROTOCOL_ERROR, frame(Kind.DATA, 0, 0, bytes(16_385))[:9]),
        (FRAME_SIZE_ERROR, frame(Kind.PING, 0, 0, bytes(7))),
        (PROTOCOL_ERROR, frame(Kind.PING, 0, 1, bytes(8))),
        (PROTOCOL_ERROR, frame(Kind.PRIORITY, 0, 0, bytes(5))),
        (FRAME_SIZE_ERROR, frame(Kind.PRIORITY, 0, 1, bytes(4))),
        (PROTOCOL_ERROR, frame(Kind.WINDOW_UPDATE, 0, 0, bytes(4))),
        (FLOW_CONTROL_ERROR, frame(Kind.WINDOW_UPDATE, 0, 0, (2**31 - 1).to_bytes(4))),
        (PROTOCOL_ERROR, frame(Kind.WINDOW_UPDATE, 0, 9, bytes([0, 0, 0, 1]))),
        (PROTOCOL_ERROR, frame(Kind.CONTINUATION, END_HEADERS, 1, b"")),
        (PROTOCOL_ERROR, frame(Kind.HEADERS, 0, 3, b"") + frame(Kind.PING, 0, 0, bytes(8))),
        (PROTOCOL_ERROR, frame(Kind.HEADERS, 0, 3, b"") + data(1, b"x")),
        (PROTOCOL_ERROR, frame(Kind.HEADERS, 0, 3, b"") + frame(99)),
        (PROTOCOL_ERROR, frame(Kind.HEADERS, 0, 3, b"") + frame(Kind.GOAWAY, 0, 0, bytes(8))),
        (COMPRESSION_ERROR, frame(Kind.HEADERS, END_HEADERS, 3, b"\xff\xff\xff\xff")),
        (PROTOCOL_ERROR, frame(Kind.HEADERS, END_HEADERS, 2, ByHand().block(GET))),
        (PROTOCOL_ERROR, frame(Kind.HEADERS, END_HEADERS | WITH_PRIORITY, 3, (3).to_bytes(4) + b"\0" + ByHand().block(GET))),
        (FLOW_CONTROL_ERROR, wire.settings({4: 2**31})),
        (PROTOCOL_ERROR, wire.settings({5: 100})),
        (FRAME_SIZE_ERROR, frame(Kind.SETTINGS, 0, 0, b"12345")),
        (CALM, wire.settings(dict.fromkeys(range(100, 133), 0))),
    ],
)
def test_a_broken_connection_keeps_the_events_before_it_and_says_why(code: int, written: bytes) -> None:
    client = ByHand()
    server = client.server
    server.receive_data(client.head(1) + data(1, b"good") + written)
    first, second = server.next_event(), server.next_event()
    assert isinstance(first, Request)
    assert isinstance(second, Data)
    assert client.fails() == code


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n", b"PRI * HTTP/2.1", b"\x16\x03\x01", PREFACE[:10] + b"x"])
def test_a_wrong_preface_is_seen_at_its_first_wrong_byte(garbage: bytes) -> None:
    assert ByHand(ready=False).fails(garbage) == PROTOCOL_ERROR


def test_the_first_frame_must_be_settings() -> None:
    for first in (frame(Kind.PING, 0, 0, bytes(8)), frame(Kind.SETTINGS, 0x1)):
        assert ByHand(ready=False).fails(PREFACE + first) == PROTOCOL_ERROR


@pytest.mark.parametrize("cut", [1, 23, 24 + 3, 24 + 9 + 4])
def test_a_connection_that_ends_inside_a_frame_did_not_end_in_order(cut: int) -> None:
    client = ByHand(ready=False)
    client.says((PREFACE + wire.settings({3: 1}))[:cut])
    client.server.receive_eof()
    assert client.fails() == PROTOCOL_ERROR


def test_a_connection_that_ends_inside_a_header_block_did_not_end_in_order() -> None:
    client = ByHand()
    client.says(frame(Kind.HEADERS, 0, 1, b""))
    client.server.receive_eof()
    assert client.fails() == PROTOCOL_ERROR


def continued(client: ByHand, stream: int, pieces: int) -> bytes:
    block = client.block(POST)
    cuts = [*range(pieces), len(block)]
    parts = [block[a:b] for a, b in itertools.pairwise(cuts)]
    middle = b"".join(frame(Kind.CONTINUATION, 0, stream, part) for part in parts[1:-1])
    return frame(Kind.HEADERS, 0, stream, parts[0]) + middle + frame(Kind.CONTINUATION, END_HEADERS, stream, parts[-1])


def test_eight_continuations_are_a_head_and_nine_are_a_flood() -> None:
    client = ByHand()
    assert isinstance(client.says(continued(client, 1, 9))[0], Request)
    assert client.fails(continued(client, 3, 10)) == CALM


def test_a_header_block_is_refused_before_it_is_buffered() -> None:
    limits = HTTP2Limits(head=1000)
    assert ByHand(limits).fails(frame(Kind.HEADERS, 0, 1, bytes(2001))[:9]) == CALM
    client = ByHand(limits)
    client.says(frame(Kind.HEADERS, 0, 1, bytes(1000)), frame(Kind.CONTINUATION, 0, 1, bytes(1000)))
    assert client.fails(frame(Kind.CONTINUATION, 0, 1, bytes(1))[:9]) == CALM


def test_a_header_bomb_ends_the_connection() -> None:
    client = ByHand()
    bomb = client.block([*POST, (b"x", b"y" * 3000)])
    client.says(frame(Kind.HEADERS, END_HEADERS, 1, bomb))
    assert client.fails(frame(Kind.HEADERS, END_HEADERS, 3, client.block(POST) + b"\xbe" * 1000)) == CALM


def test_a_head_up_to_twice_the_limit_is_answered() -> None:
    client = ByHand(HTTP2Limits(head=1000))
    (event,) = client.says(client.head(1, [*POST, (b"x", b"y" * 1500)]))
    assert isinstance(event, Refused)
    assert event.status == 431
    assert client.fails(client.head(3, [*POST, (b"x", b"y" * 2000)])) == CALM


def test_settings_at_the_limit_are_taken() -> None:
    client = ByHand()
    assert client.says(wire.settings(dict.fromkeys(range(100, 132), 0))) == []
    assert client.server.counters.settings == 2


def test_data_on_a_half_closed_stream_ends_that_stream() -> None:
    client = ByHand()
    client.says(client.head(1, GET, END_STREAM), client.head(3))
    output(client.server)
    assert client.says(data(1, b"more")) == [Reset(stream=1, code=STREAM_CLOSED)]
    assert body(client.says(data(3, b"fine")), 3) == b"fine"
    assert client.says(data(1, b"more")) == [], "our reset is on its way"
    check(client.server)


def test_data_on_a_stream_that_is_long_complete_is_answered_and_counted() -> None:
    client = ByHand(HTTP2Limits(frame_size=200_000))
    client.says(client.head(1, GET, END_STREAM))
    client.server.send(Response(stream=1, status=200))
    client.server.send(End(stream=1))
    output(client.server)
    assert client.says(data(1, b"more"), data(1, b"")) == []
    assert [found.payload for found in frames(output(client.server))] == [STREAM_CLOSED.to_bytes(4)] * 2
    assert client.server.counters.resets == 2
    assert client.server.counters.empty_data == 1
    assert client.fails(data(1, bytes(150_000))) == FLOW_CONTROL_ERROR


def test_a_stream_window_that_overflows_ends_the_stream() -> None:
    client = ByHand()
    client.says(client.head(1))
    assert client.says(frame(Kind.WINDOW_UPDATE, 0, 1, (2**31 - 1).to_bytes(4))) == [
        Reset(stream=1, code=FLOW_CONTROL_ERROR)
    ]
    assert not client.server.is_open(1)
    assert client.server.counters.resets == 1
    assert take(client.server)[1].ended == [1]


def test_frames_that_cost_us_more_than_the_peer_are_counted() -> None:
    client = ByHand()
    client.says(client.head(1))
    for _ in range(3):
        client.says(
            frame(Kind.PRIORITY, 0, 7, bytes(5)),
            frame(Kind.PRIORITY, 0, 7, (7).to_bytes(4) + b"\0"),
            frame(Kind.PING, 0, 0, bytes(8)),
            frame(Kind.WINDOW_UPDATE, 0, 0, bytes([0, 0, 0, 1])),
            wire.settings(),
            frame(Kind.SETTINGS, 0x1),
            data(1, b""),
            data(1, bytes([3]) + bytes(3), PADDED),
        )
    client.says(frame(Kind.RST_STREAM, 0, 1, bytes(4)), data(1, b""))
    counters = client.server.counters
    assert (counters.priority, counters.pings, counters.window_updates) == (9, 3, 3), "three acknowledge nothing"
    assert (counters.settings, counters.resets) == (4, 2), "the last is our answer to DATA after their reset"
    assert counters.empty_data == 7


def test_ten_thousand_priority_frames_cost_nothing() -> None:
    client = ByHand()
    for stream in range(1, 20_001, 2):
        assert client.says(frame(Kind.PRIORITY, 0, stream, bytes(5))) == []
    assert not client.server.has_output
    assert len(client.server._h2.streams) == 0


def test_unknown_frames_are_ignored() -> None:
    client = ByHand()
    assert client.says(frame(10, 255, 1, b"altsvc"), frame(200, 0, 0, bytes(100))) == []
    assert not client.server.has_output


def test_an_error_message_never_repeats_the_peer_at_length() -> None:
    client = ByHand()
    client.says(client.head(1))
    (refused,) = client.says(client.head(3, [*POST, (b"content-length", b"x" * 5000)]))
    assert isinstance(refused, Refused)
    assert len(refused.message) <= 200


def pieces() -> st.SearchStrategy[bytes]:
    """A frame that is often almost right."""
    hand = ByHand()
    blocks = [hand.block(POST), hand.block(GET), hand.block([(b"t", b"1")]), b"\x82", b"\xff\xff", b""]
    payload = st.one_of(
        st.sampled_from(
            [*blocks, bytes(4), bytes(5), bytes(8), bytes(2000), bytes([0, 0, 0, 1]), bytes([0, 4, 0, 0, 0, 9])]
        ),
        st.binary(max_size=20),
    )
    kind = st.one_of(st.sampled_from(list(Kind)), st.integers(0, 255))
    flags = st.one_of(st.sampled_from([0, 1, 4, 5, 8, 0x20, 0x25, 0x2D]), st.integers(0, 255))
    stream = st.one_of(st.sampled_from([0, 1, 1, 3, 3, 5, 2]), st.integers(0, 2**32 - 1))
    return st.one_of(st.builds(frame, kind, flags, stream, payload), st.binary(max_size=12))


@settings(max_examples=250)
@given(written=st.lists(pieces(), max_size=12), role=st.sampled_from(list(Role)), answer=st.booleans())
def test_garbage_raises_nothing_but_remote_protocol_error(written: list[bytes], role: Role, answer: bool) -> None:
    machine = HTTP2Connection(role)
    machine.receive_data((PREFACE if role is Role.SERVER else b"") + wire.settings())
    if role is Role.CLIENT:
        for stream in (1, 3):
            machine.send(Request(stream=stream, head=Head(method=b"POST", target=b"/", authority=b"h")))
        machine.send(End(stream=1))
    for piece in written:
        machine.receive_data(piece)
        try:
            while not isinstance(event := told(machine), Signal):
                check(machine)
                if answer and isinstance(event, Request) and machine.is_open(event.stream):
                    machine.send(Response(stream=event.stream, status=200))
                    machine.send(End(stream=event.stream))
        except RemoteProtocolError as error:
            assert error.wire_code in range(14)  # noqa: PT017 (the loop ends here)
            break
        check(machine)
        output(machine)
    for stream in machine.windows():
        machine.drop(stream)
    machine.close()
    assert machine.unconsumed == 0
    assert set(machine.windows()) == {0}
