"""HTTP/2 exchanges between our two machines: heads, bodies, trailers, and what may be sent when."""

from __future__ import annotations

import pytest

from protocols.errors import LocalProtocolError
from protocols.events import NEED_DATA, ConnectionEnd, Data, End, Event, Head, Ping, Request, Reset, Response
from protocols.http2.connection import HTTP2Connection, HTTP2Limits
from protocols.http2.frames import PREFACE, Kind
from protocols.roles import Role
from tests.protocols.http2.http2_helpers import (
    END_STREAM,
    GET,
    POST,
    ByHand,
    Pair,
    body,
    check,
    data,
    frame,
    heads,
    output,
    pull,
    settings,
)


def test_a_duplex_echo_runs_both_ways_at_once() -> None:
    pair = Pair()
    pair.request(1, b"one", end=False)
    pair.flow()
    pair.server.send(Response(stream=1, status=200, headers=((b"content-type", b"text/plain"),)))
    for word in (b"two", b"three", b"four"):
        pair.server.send(Data(stream=1, buffers=(body(pair.at_server),)))
        pair.server.credit(1, len(body(pair.at_server)))
        pair.at_server.clear()
        pair.client.send(Data(stream=1, buffers=(word,)))
        pair.flow()
    pair.client.send(End(stream=1))
    pair.flow()
    assert pair.at_server[-1] == End(stream=1)
    pair.server.send(End(stream=1))
    pair.flow()
    assert body(pair.at_client) == b"onetwothree"
    assert heads(pair.at_client) == [
        Response(stream=1, status=200, headers=((b"content-type", b"text/plain"),)),
        End(stream=1),
    ]
    assert not pair.client.open_streams
    assert not pair.server.open_streams


def test_the_request_head_arrives_without_pseudo_headers() -> None:
    pair = Pair()
    sent = ((b"content-length", b"3"), (b"x-a", b"1"), (b"x-a", b"2"), (b"expect", b"100-continue"))
    pair.client.send(Request(stream=1, head=Head(method=b"PUT", target=b"/a?b=c", headers=sent, authority=b"host:81")))
    pair.flow()
    assert pair.at_server == [
        Request(
            stream=1,
            head=Head(
                method=b"PUT",
                target=b"/a?b=c",
                headers=sent,
                authority=b"host:81",
                scheme=b"https",
                version=b"2",
                content_length=3,
                expects_continue=True,
            ),
        )
    ]


def test_a_host_field_becomes_the_authority() -> None:
    pair = Pair()
    pair.client.send(Request(stream=1, head=Head(method=b"GET", target=b"/", headers=((b"host", b"h"),), content_length=0)))
    pair.flow()
    (head,) = pair.at_server
    assert isinstance(head, Request)
    assert (head.head.authority, head.head.headers, head.head.content_length) == (b"h", ((b"content-length", b"0"),), 0)


def test_a_request_with_host_alone_is_a_request_for_that_authority() -> None:
    (head,) = ByHand().says(ByHand().head(1, [field for field in GET if field[0] != b":authority"] + [(b"host", b"h")]))
    assert isinstance(head, Request)
    assert head.head.authority == b"h"


def test_trailers_pass_both_ways_behind_all_payload() -> None:
    pair = Pair()
    trailers = ((b"grpc-status", b"0"),)
    pair.request(1, b"x" * 100_000, end=False)
    pair.client.send(End(stream=1, trailers=trailers))
    pair.flow()
    assert pair.at_server[-1] != End(stream=1, trailers=trailers), "the window is full, the trailers wait"
    pair.server.credit(1, pair.server.unconsumed)
    pair.flow()
    assert pair.at_server[-1] == End(stream=1, trailers=trailers)
    pair.respond(1, b"y", end=False)
    pair.server.send(End(stream=1, trailers=trailers))
    pair.flow()
    assert pair.at_client[-2:] == [Data(stream=1, buffers=(b"y",)), End(stream=1, trailers=trailers)]
    assert not pair.server.open_streams


def test_interim_responses_come_before_the_response() -> None:
    pair = Pair()
    pair.request(1)
    pair.flow()
    pair.server.send(Response(stream=1, status=100))
    pair.server.send(Response(stream=1, status=103, headers=((b"link", b"</a>"),)))
    with pytest.raises(LocalProtocolError, match="no head"):
        pair.server.send(Data(stream=1, buffers=(b"x",)))
    pair.respond(1)
    pair.flow()
    statuses = [event.status for event in pair.at_client if isinstance(event, Response)]
    assert statuses == [100, 103, 200]


@pytest.mark.parametrize("status", [99, 101, 1000])
def test_a_status_that_http2_has_not_is_refused_before_anything_is_queued(status: int) -> None:
    pair = Pair()
    pair.request(1)
    pair.flow()
    with pytest.raises(LocalProtocolError, match="status"):
        pair.server.send(Response(stream=1, status=status))
    assert not pair.server.has_output
    pair.respond(1)


def test_the_answer_to_head_has_a_length_and_no_body() -> None:
    pair = Pair()
    pair.client.send(Request(stream=1, head=Head(method=b"HEAD", target=b"/", authority=b"h")))
    pair.client.send(End(stream=1))
    pair.flow()
    pair.server.send(Response(stream=1, status=200, headers=((b"content-length", b"5"),)))
    pair.server.send(End(stream=1))
    pair.flow()
    assert pair.at_client[-1] == End(stream=1)


def test_every_cut_of_the_bytes_gives_the_same_events() -> None:
    pair = Pair(ready=False)
    written = output(pair.client)
    pair.request(1, b"hello " * 10, end=False)
    pair.client.send(End(stream=1, trailers=((b"t", b"1"),)))
    pair.request(3)
    pair.client.send(Ping(data=b"12345678"))
    written += output(pair.client)
    whole = events_of([written])
    assert [type(event) for event in whole] == [Request, Request, End, Data, End]
    assert events_of([written[i : i + 1] for i in range(len(written))]) == whole
    for cut in range(len(written)):
        assert events_of([written[:cut], written[cut:]]) == whole


def events_of(pieces: list[bytes]) -> list[Event]:
    server = HTTP2Connection(Role.SERVER)
    events = []
    for piece in pieces:
        server.receive_data(memoryview(bytearray(piece)))
        events += pull(server)
    return events


def test_what_was_received_is_a_copy() -> None:
    client = ByHand()
    memory = bytearray(client.head(1) + data(1, b"payload"))
    client.server.receive_data(memory)
    memory[:] = bytes(len(memory))
    assert body(pull(client.server)) == b"payload"


def test_events_can_be_pulled_one_at_a_time() -> None:
    client = ByHand()
    client.server.receive_data(client.head(1) + data(1, b"a") + data(1, b"b", END_STREAM))
    seen = [client.server.next_event() for _ in range(5)]
    assert [type(event) for event in seen[:4]] == [Request, Data, Data, End]
    assert seen[4] is NEED_DATA


def test_the_end_of_input_is_reported_again_and_again() -> None:
    pair = Pair()
    pair.request(1)
    pair.to_server()
    pair.server.receive_eof()
    assert pair.server.next_event() == pair.server.next_event() == ConnectionEnd()
    with pytest.raises(LocalProtocolError):
        pair.server.receive_data(b"x")
    assert not pair.server.must_close, "the answer can still be written"
    pair.respond(1)
    pair.to_client()
    assert pair.at_client[-1] == End(stream=1)
    assert pair.server.must_close


def test_illegal_sends_queue_nothing_and_break_nothing() -> None:
    pair = Pair()
    server, client = pair.server, pair.client
    head = Request(stream=1, head=Head(method=b"GET", target=b"/", authority=b"h"))
    refused = [
        (server, head),
        (server, Response(stream=1, status=200)),
        (server, Data(stream=1, buffers=(b"x",))),
        (server, Reset(stream=1)),
        (client, End(stream=1)),
        (client, Response(stream=1, status=200)),
        (client, Ping(data=b"short")),
        (client, Request(stream=2, head=Head(method=b"GET", target=b"/", authority=b"h"))),
        (client, Request(stream=1, head=Head(method=b"GET", target=b"/"))),
        (client, Request(stream=1, head=Head(method=b"GET", target=b"x", authority=b"h"))),
        (client, Request(stream=1, head=Head(method=b"G T", target=b"/", authority=b"h"))),
        (client, Request(stream=1, head=Head(method=b"CONNECT", target=b"/", authority=b"h"))),
        (client, Request(stream=1, head=Head(method=b"GET", target=b"/", authority=b"h", headers=((b"host", b"i"),)))),
        (client, Request(stream=1, head=Head(method=b"GET", target=b"/", authority=b"h", headers=((b"Upper", b"i"),)))),
        (client, Request(stream=1, head=Head(method=b"GET", target=b"/", authority=b"h", headers=((b":path", b"i"),)))),
        (client, Request(stream=1, head=Head(method=b"GET", target=b"/", authority=b"h", headers=((b"connection", b"x"),)))),
        (client, Request(stream=1, head=Head(method=b"GET", target=b"/", authority=b"h", headers=((b"a", b"x\r\nb: c"),)))),
        (
            client,
            Request(stream=1, head=Head(method=b"GET", target=b"/", authority=b"h", headers=((b"content-length", b"+1"),))),
        ),
        (
            client,
            Request(
                stream=1,
                head=Head(
                    method=b"GET", target=b"/", authority=b"h", headers=((b"content-length", b"1"),), content_length=2
                ),
            ),
        ),
    ]
    for machine, event in refused:
        with pytest.raises(LocalProtocolError):
            machine.send(event)  # type: ignore[arg-type]
        assert not machine.has_output
    client.send(head)
    client.send(End(stream=1))
    for event in (Data(stream=1, buffers=(b"x",)), End(stream=1)):
        with pytest.raises(LocalProtocolError, match="already ended"):
            client.send(event)
    pair.flow()
    with pytest.raises(LocalProtocolError, match="no head"):
        server.send(End(stream=1))
    server.send(Response(stream=1, status=200))
    with pytest.raises(LocalProtocolError, match="already has"):
        server.send(Response(stream=1, status=200))
    with pytest.raises(LocalProtocolError):
        server.send(End(stream=1, trailers=((b":status", b"200"),)))
    with pytest.raises(LocalProtocolError, match="contiguous"):
        server.send(Data(stream=1, buffers=(memoryview(b"abcdef")[::2],)))
    server.send(End(stream=1))
    pair.flow()
    assert heads(pair.at_client) == [Response(stream=1, status=200), End(stream=1)]


def test_the_first_settings_are_one_frame_with_what_the_limits_say() -> None:
    limits = HTTP2Limits(streams=7, initial_window=5000, frame_size=20_000, head=1000)
    server = output(HTTP2Connection(Role.SERVER, limits))
    assert server == settings({3: 7, 6: 1000, 4: 5000, 5: 20_000})
    client = output(HTTP2Connection(Role.CLIENT, limits))
    assert client == PREFACE + settings({3: 7, 6: 1000, 2: 0, 4: 5000, 5: 20_000})


def test_a_larger_frame_is_accepted_once_its_size_is_acknowledged() -> None:
    client = ByHand(HTTP2Limits(frame_size=20_000), ready=False)
    client.says(PREFACE, settings(), client.head(1))
    assert client.fails(data(1, bytes(16_385))) == 6, "not acknowledged, not yet in force"
    client = ByHand(HTTP2Limits(frame_size=20_000))
    assert body(client.says(client.head(1), data(1, bytes(20_000)))) == bytes(20_000)
    assert client.fails(data(1, bytes(20_001))) == 6


def test_a_smaller_first_window_holds_from_the_acknowledgement_on() -> None:
    client = ByHand(HTTP2Limits(initial_window=1000, max_window=1000), ready=False)
    client.says(PREFACE, settings(), client.head(1), data(1, bytes(10_000)))
    assert client.server.windows()[1].library == 65_535 - 10_000
    client.says(frame(Kind.SETTINGS, 0x1))
    assert client.server.windows()[1].library == 1000 - 10_000
    client.server.credit(1, 10_000)
    assert client.server.windows()[1].library == 1000
    assert body(client.says(data(1, bytes(1000)))) == bytes(1000)
    check(client.server)


def test_what_was_little_of_the_first_window_goes_back_when_it_is_all_of_the_next() -> None:
    client = ByHand(HTTP2Limits(initial_window=2048, max_window=4096), ready=False)
    client.says(PREFACE, settings(), client.head(1), data(1, bytes(7000)))
    client.server.credit(1, 7000)
    assert client.server.windows()[1].owed == 7000, "less than a quarter of 65,535"
    client.says(frame(Kind.SETTINGS, 0x1))
    assert client.server.windows()[1].available == 2048, "or the client, whose window is below zero, waits for ever"
    check(client.server)


def test_the_acknowledgement_changes_no_stream_that_h2_has_forgotten() -> None:
    client = ByHand(HTTP2Limits(initial_window=1000, max_window=1000), ready=False)
    client.says(PREFACE, settings(), client.head(1), data(1, bytes(10_000)))
    client.server.send(Reset(stream=1, code=8))
    client.says(*(client.head(stream) for stream in range(3, 203, 2)))
    assert 1 not in client.server._h2.streams
    client.says(frame(Kind.SETTINGS, 0x1))
    check(client.server)
    assert client.server.drop(1) == 10_000
    check(client.server)


def test_an_end_without_bytes_is_legal_in_a_negative_window() -> None:
    client = ByHand(HTTP2Limits(initial_window=1000, max_window=1000), ready=False)
    client.says(PREFACE, settings(), client.head(1), data(1, bytes(10_000)), frame(Kind.SETTINGS, 0x1))
    assert client.says(data(1, b"", END_STREAM)) == [End(stream=1)]


def test_limits_that_contradict_themselves_are_refused() -> None:
    for wrong in ({"initial_window": 0}, {"max_window": 2**31}, {"max_window": 10}, {"frame_size": 16_383}):
        with pytest.raises(ValueError, match=r"window|frame_size"):
            HTTP2Limits(**wrong)


def test_a_client_opens_no_more_streams_than_the_server_allows() -> None:
    pair = Pair(server=HTTP2Limits(streams=2))
    pair.request(1, end=False)
    pair.request(pair.client.next_stream, end=False)
    assert pair.client.can_open is False
    with pytest.raises(LocalProtocolError, match="can_open"):
        pair.request(5)
    pair.client.send(Reset(stream=1, code=8))
    pair.request(9)
    pair.flow()
    assert pair.server.open_streams == 2


def test_a_thousand_exchanges_leave_nothing_behind() -> None:
    pair = Pair(server=HTTP2Limits(streams=10))
    for _ in range(300):
        stream = pair.client.next_stream
        pair.request(stream, b"x")
        pair.flow()
        pair.server.credit(stream, 1)
        pair.respond(stream, b"y")
        pair.flow()
        pair.client.credit(stream, 1)
    for machine in (pair.client, pair.server):
        assert set(machine.windows()) == {0}
        assert machine.idle
        assert len(machine._h2.streams) < 100, "h2's closed streams are swept"


def test_cookie_crumbs_are_joined() -> None:
    client = ByHand()
    (head,) = client.says(client.head(1, [*POST, (b"cookie", b"a=1"), (b"cookie", b"b=2")]))
    assert isinstance(head, Request)
    assert head.head.headers == ((b"cookie", b"a=1; b=2"),)
