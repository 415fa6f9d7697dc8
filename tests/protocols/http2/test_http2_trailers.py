"""How an answer ends over HTTP/2: on its head, with its last payload, or with trailers, each at its moment and on both paths."""

from __future__ import annotations

import pytest

from protocols.errors import LocalProtocolError
from protocols.events import Data, End, Event, Headers, Ping, Request, Reset, Response
from protocols.http2.connection import HTTP2Connection, HTTP2Limits
from protocols.http2.frames import Kind
from protocols.http2.hpack import StatelessEncoder
from protocols.http2.output import ControlQueue
from tests.protocols.http2.http2_helpers import (
    END_HEADERS,
    END_STREAM,
    GET,
    POST,
    ByHand,
    Pair,
    check,
    data,
    frame,
    frames,
    kinds,
    output,
    pull,
    settings,
    take,
)

HEAD, TRAILERS = ((b"x", b"y"),), ((b"grpc-status", b"0"),)
HEAD_BLOCK, TRAILER_BLOCK = b"\x88\x00\x01x\x01y", b"\x00\x0bgrpc-status\x010"
both_paths = pytest.mark.parametrize("payload_path", [True, False], ids=["payload", "library"])


def asked(*streams: int, payload_path: bool = True, flags: int = END_STREAM) -> ByHand:
    """A client that has asked on these streams, and reads the same bytes whichever path the server is on."""
    client = ByHand(payload_path=payload_path)
    client.server._h2.encoder = StatelessEncoder()
    for stream in streams:
        client.says(client.head(stream, POST, flags))
    output(client.server)
    return client


def window_update(stream: int, n: int) -> bytes:
    return frame(Kind.WINDOW_UPDATE, 0, stream, n.to_bytes(4))


def head(stream: int, block: bytes, flags: int = 0) -> bytes:
    return frame(Kind.HEADERS, END_HEADERS | flags, stream, block)


# -- trailers ----------------------------------------------------------------------------------------------------------


@both_paths
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("flags", [END_STREAM, 0], ids=["asked to the end", "still asking"])
def test_an_answer_with_trailers_is_head_data_and_headers_that_end_it(payload_path: bool, whole: bool, flags: int) -> None:
    client = asked(1, payload_path=payload_path, flags=flags)
    server = client.server
    if whole:
        server.respond(1, 200, HEAD, (b"hello",), TRAILERS)
    else:
        server.send(Response(stream=1, status=200, headers=HEAD))
        server.send_data(1, (b"hello",))
        server.send(End(stream=1, trailers=TRAILERS))
    written, sent = take(server)
    assert written == head(1, HEAD_BLOCK) + data(1, b"hello") + head(1, TRAILER_BLOCK, END_STREAM)
    assert (sent.room, sent.ended) == ([1], [1])
    assert not server.is_open(1)
    assert server.lingering == (not flags)
    check(server)


@both_paths
def test_trailers_without_payload_are_a_frame_behind_the_head(payload_path: bool) -> None:
    client = asked(1, payload_path=payload_path)
    client.server.respond(1, 200, HEAD, (), TRAILERS)
    assert output(client.server) == head(1, HEAD_BLOCK) + head(1, TRAILER_BLOCK, END_STREAM)


@both_paths
@pytest.mark.parametrize("length", [1, 16_378, 16_379, 50_000])
def test_long_trailers_go_on_in_continuation_writtenand_their_first_frame_ends_the_stream(
    payload_path: bool, length: int
) -> None:
    client = asked(1, payload_path=payload_path)
    client.server.respond(1, 200, (), (b"x",), ((b"t", b"z" * length),))
    _, payload, first, *rest = frames(output(client.server))
    assert (payload.kind, payload.flags, payload.payload) == (Kind.DATA, 0, b"x")
    assert (first.kind, first.flags) == (Kind.HEADERS, END_STREAM | (0 if rest else END_HEADERS))
    assert [(each.kind, each.flags) for each in rest] == [(Kind.CONTINUATION, 0)] * (len(rest) - 1) + [
        (Kind.CONTINUATION, END_HEADERS)
    ] * bool(rest)
    block = b"".join(each.payload for each in (first, *rest))
    assert len(rest) == (len(block) - 1) // 16_384
    assert list(client.decoder.decode(block, raw=True)) == [(b"t", b"z" * length)]


@both_paths
def test_any_split_of_the_writes_gives_the_same_bytes_and_their_end_once(payload_path: bool) -> None:
    def answered() -> HTTP2Connection:
        server = asked(1, payload_path=payload_path).server
        server.respond(1, 200, HEAD, (b"hello",), TRAILERS)
        return server

    whole = output(answered())
    for first in range(10, len(whole)):
        server = answered()
        pieces = [take(server, first), take(server, len(whole))]
        while server.has_output:
            pieces.append(take(server, len(whole)))
        written = b"".join(piece for piece, _ in pieces)
        assert b"".join(each.payload for each in frames(written) if each.kind == Kind.DATA) == b"hello"
        assert frames(written)[-1] == frames(whole)[-1]
        assert [sent.ended for _, sent in pieces if sent.ended] == [[1]]
        assert pieces[-1][1].ended == [1]


@both_paths
def test_a_client_reads_them_at_any_split(payload_path: bool) -> None:
    def asking() -> Pair:
        pair = Pair(payload_path=payload_path)
        pair.request(1)
        pair.to_server()
        return pair

    pair = asking()
    pair.server.respond(1, 200, HEAD, (b"hello",), TRAILERS)
    written = output(pair.server)
    for at in range(len(written) + 1):
        pair = asking()
        events: list[Event] = []
        for piece in (written[:at], written[at:]):
            pair.client.receive_data(piece)
            events += pull(pair.client)
        assert events == [
            Response(stream=1, status=200, headers=HEAD),
            Data(stream=1, buffers=(b"hello",)),
            End(stream=1, trailers=TRAILERS),
        ]


@both_paths
def test_trailers_wait_for_the_last_payload_that_a_window_lets_go(payload_path: bool) -> None:
    client = ByHand(payload_path=payload_path)
    client.says(settings({4: 3}), client.head(1, POST, END_STREAM))
    server = client.server
    output(server)
    server.respond(1, 200, (), (b"hello",), TRAILERS)
    assert kinds(output(server)) == [(Kind.HEADERS, 1), (Kind.DATA, 1)]
    assert (server.queued(1), server.room(1), server.is_open(1)) == (2, 0, True)
    client.says(window_update(1, 1))
    assert output(server) == data(1, b"l")
    client.says(window_update(1, 9))
    assert kinds(output(server)) == [(Kind.DATA, 1), (Kind.HEADERS, 1)]
    assert not server.is_open(1)


def test_what_the_peer_is_told_of_the_table_goes_ahead_of_the_next_block_and_trailers_that_wait_are_not_it() -> None:
    client = ByHand()
    client.says(settings({4: 0}), client.head(1, POST, END_STREAM), client.head(3, POST, END_STREAM))
    server = client.server
    server.respond(1, 200, HEAD, (b"hello",), TRAILERS)
    output(server)
    client.says(settings({1: 0}))
    output(server)
    server.respond(3, 200, HEAD, (), TRAILERS)
    assert output(server) == head(3, b"\x20" + HEAD_BLOCK) + head(3, TRAILER_BLOCK, END_STREAM)
    client.says(window_update(1, 5))
    assert output(server) == data(1, b"hello") + head(1, TRAILER_BLOCK, END_STREAM)


def test_trailers_tell_the_peer_of_the_table_where_they_are_the_next_block() -> None:
    client = asked(1)
    server = client.server
    server.send(Response(stream=1, status=200, headers=HEAD))
    output(server)
    client.says(settings({1: 0}))
    output(server)
    server.send(End(stream=1, trailers=TRAILERS))
    assert output(server) == head(1, b"\x20" + TRAILER_BLOCK, END_STREAM)


@both_paths
@pytest.mark.parametrize("whose", ["the client's", "ours"])
def test_trailers_that_wait_when_the_stream_is_reset_are_never_written(payload_path: bool, whose: str) -> None:
    client = ByHand(payload_path=payload_path)
    client.says(settings({4: 3}), client.head(1, POST, END_STREAM), client.head(3, POST, END_STREAM))
    server = client.server
    server.respond(1, 200, (), (b"hello",), TRAILERS)
    output(server)
    if whose == "ours":
        server.send(Reset(stream=1, code=8))
        assert kinds(output(server)) == [(Kind.RST_STREAM, 1)]
    else:
        assert client.says(frame(Kind.RST_STREAM, 0, 1, (8).to_bytes(4))) == [Reset(stream=1, code=8)]
    client.says(window_update(0, 1000))
    assert not server.has_output
    server.respond(3, 200, HEAD, (), TRAILERS)
    assert kinds(output(server)) == [(Kind.HEADERS, 3)] * 2
    check(server)


WRONG: list[Headers] = [
    ((b":status", b"200"),),
    ((b"grpc-status", b"0"), (b":path", b"/")),
    ((b"Grpc-Status", b"0"),),
    ((b"grpc-status", b"0\n"),),
    ((b"grpc-status", b" 0"),),
    ((b"", b"0"),),
    ((b"a b", b"0"),),
    ((b"connection", b"close"),),
    ((b"keep-alive", b"5"),),
    ((b"proxy-connection", b"close"),),
    ((b"transfer-encoding", b"chunked"),),
    ((b"upgrade", b"h2c"),),
    ((b"te", b"gzip"),),
    ((b"grpc-message", b"x" * 40_000 + b"\0"),),
]


@both_paths
@pytest.mark.parametrize("wrong", WRONG, ids=lambda fields: repr(fields[-1])[:30])
def test_trailers_that_http2_cannot_carry_are_refused_and_nothing_of_their_answer_is_written(
    payload_path: bool, wrong: Headers
) -> None:
    client = asked(1, 3, payload_path=payload_path)
    server = client.server
    for _ in range(2):
        with pytest.raises(LocalProtocolError):
            server.respond(1, 200, HEAD, (b"hello",), wrong)
        assert not server.has_output
        assert not server.queued(1)
    server.send(Response(stream=3, status=200))
    server.send_data(3, (b"hello",))
    with pytest.raises(LocalProtocolError):
        server.send(End(stream=3, trailers=wrong))
    assert output(server) == head(3, b"\x88") + data(3, b"hello")
    server.respond(1, 200, HEAD, (b"hello",), TRAILERS)
    server.send(End(stream=3, trailers=TRAILERS))
    assert output(server) == (
        head(1, HEAD_BLOCK) + head(3, TRAILER_BLOCK, END_STREAM) + data(1, b"hello") + head(1, TRAILER_BLOCK, END_STREAM)
    )


def test_trailers_are_what_they_were_when_they_were_said() -> None:
    client = ByHand()
    client.says(settings({4: 0}), client.head(1, POST, END_STREAM))
    said = list(TRAILERS)
    client.server.respond(1, 200, HEAD, (b"x",), said)
    output(client.server)
    said[0] = (b"Other", b"1")
    client.says(window_update(1, 1))
    assert output(client.server) == data(1, b"x") + head(1, TRAILER_BLOCK, END_STREAM)


@both_paths
def test_a_client_ends_its_request_with_trailers_too(payload_path: bool) -> None:
    pair = Pair(payload_path=payload_path)
    pair.request(1, b"hello", end=False)
    pair.client.send(End(stream=1, trailers=TRAILERS))
    pair.flow()
    assert pair.at_server[-1] == End(stream=1, trailers=TRAILERS)
    assert pair.client.is_open(1)
    pair.respond(1)
    pair.flow()
    assert not pair.client.is_open(1)


# -- answers without a body --------------------------------------------------------------------------------------------


@both_paths
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("flags", [END_STREAM, 0], ids=["asked to the end", "still asking"])
@pytest.mark.parametrize(
    ("status", "said"), [(200, b"\x88"), (204, b"\x89"), (304, b"\x8b"), (400, b"\x8c"), (415, b"\x08\x03415")]
)
def test_an_answer_without_a_body_is_one_frame(
    payload_path: bool, whole: bool, flags: int, status: int, said: bytes
) -> None:
    client = asked(1, payload_path=payload_path, flags=flags)
    server = client.server
    if whole:
        server.respond(1, status, HEAD, (b"",))
    else:
        server.send(Response(stream=1, status=status, headers=HEAD))
        server.send(End(stream=1))
    written, sent = take(server)
    assert written == head(1, said + HEAD_BLOCK[1:], END_STREAM)
    assert (sent.room, sent.ended) == ([], [1])
    assert not server.is_open(1)
    assert server.lingering == (not flags)
    check(server)


@both_paths
def test_the_head_before_which_others_came_is_the_one_that_ends_it(payload_path: bool) -> None:
    client = asked(1, payload_path=payload_path)
    client.server.send(Response(stream=1, status=103, headers=HEAD))
    client.server.respond(1, 200, HEAD)
    assert output(client.server) == head(1, b"\x08\x03103" + HEAD_BLOCK[1:]) + head(1, HEAD_BLOCK, END_STREAM)


@both_paths
def test_a_long_head_that_ends_its_stream_says_so_in_its_first_frame(payload_path: bool) -> None:
    client = asked(1, payload_path=payload_path)
    client.server.respond(1, 200, ((b"t", b"z" * 40_000),))
    assert [(each.kind, each.flags) for each in frames(output(client.server))] == [
        (Kind.HEADERS, END_STREAM),
        (Kind.CONTINUATION, 0),
        (Kind.CONTINUATION, END_HEADERS),
    ]


@both_paths
@pytest.mark.parametrize("behind", ["its first byte has left", "it has left", "another head", "a ping", "a window"])
def test_an_end_that_comes_too_late_for_its_head_is_an_empty_frame(payload_path: bool, behind: str) -> None:
    client = asked(1, 3, payload_path=payload_path, flags=0)
    server = client.server
    client.says(data(3, bytes(40_000 // 3)), data(3, bytes(40_000 // 3)), data(3, bytes(40_000 // 3)))
    server.send(Response(stream=1, status=200, headers=HEAD))
    written = b""
    match behind:
        case "its first byte has left":
            written, sent = take(server, 1)
            assert not sent.ended
        case "it has left":
            written, _ = take(server)
        case "another head":
            server.send(Response(stream=3, status=200, headers=HEAD))
        case "a ping":
            server.send(Ping(data=bytes(8)))
        case _:
            server.credit(3, 3 * (40_000 // 3))
    server.send(End(stream=1))
    rest, sent = take(server)
    assert sent.ended == [1]
    found = [each for each in frames(written + rest) if each.stream == 1]
    assert [(each.kind, each.flags) for each in found] == [(Kind.HEADERS, END_HEADERS), (Kind.DATA, END_STREAM)]


def test_only_the_whole_head_of_a_stream_can_end_it() -> None:
    queue = ControlQueue()
    assert not queue.end_head(1)
    for written in (b"", window_update(1, 5), data(1, b"\x01" * 20), head(3, HEAD_BLOCK)):
        queue.put(written)
        assert not queue.end_head(1)
    queue.clear()
    queue.put(frame(Kind.HEADERS, END_HEADERS, 7, head(1, HEAD_BLOCK)))  # without 9 bytes it looks like another head
    out: list[bytes | memoryview] = []
    queue.take(9, out, [])
    assert not queue.end_head(1)
    queue.put(head(1, HEAD_BLOCK))
    assert queue.end_head(1)
    ended: list[int] = []
    queue.take(1000, out, ended)
    assert b"".join(out) == frame(Kind.HEADERS, END_HEADERS, 7, head(1, HEAD_BLOCK)) + head(1, HEAD_BLOCK, END_STREAM)
    assert ended == [1]


@both_paths
def test_payload_that_was_said_and_waits_for_its_window_is_no_empty_answer(payload_path: bool) -> None:
    client = ByHand(payload_path=payload_path)
    client.says(settings({4: 0}), client.head(1, GET, END_STREAM))
    output(client.server)
    client.server.respond(1, 200, (), (b"x",))
    assert [each.flags for each in frames(output(client.server))] == [END_HEADERS]


@both_paths
def test_a_request_without_a_body_is_one_frame(payload_path: bool) -> None:
    pair = Pair(payload_path=payload_path)
    pair.request(1)
    written = output(pair.client)
    assert [(each.kind, each.flags) for each in frames(written)] == [
        (Kind.WINDOW_UPDATE, 0),
        (Kind.HEADERS, END_HEADERS | END_STREAM),
    ]
    pair.server.receive_data(written)
    request, end = pull(pair.server)
    assert isinstance(request, Request)
    assert end == End(stream=1)


def test_a_client_with_many_answers_of_one_frame_hears_each_to_its_end() -> None:
    pair = Pair(server=HTTP2Limits(streams=10))
    for stream in range(1, 21, 2):
        pair.request(stream)
    pair.flow()
    for stream in range(1, 21, 2):
        pair.server.respond(stream, 204, HEAD)
    pair.flow()
    assert pair.at_client == [
        event
        for stream in range(1, 21, 2)
        for event in (Response(stream=stream, status=204, headers=HEAD), End(stream=stream))
    ]
    assert (pair.client.open_streams, pair.server.open_streams) == (0, 0)
