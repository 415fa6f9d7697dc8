"""The load client counts right, wherever the bytes are cut; and it says what it did not understand."""

from collections.abc import Callable

import pytest
from hpack import Encoder

from benchmarks import requests
from benchmarks.floors import http2, websocket
from benchmarks.load.connections import Connection, Duplex, Frames, LoadError, Streams, Tokens, Unary, frame
from benchmarks.load.plan import Kind, Plan

UNARY = b"HTTP/1.1 200 OK\r\nx-request-id: 17\r\nContent-Length: 5\r\n\r\nhello"
TOKENS = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b'26\r\n{"token": {"id": 0, "text": " token"}}\n\r\n'
    b'40\r\n{"token": {"id": 1, "text": "0\\r\\n"}, "generated_text": " token"}\n\r\n'
    b"0\r\n\r\n"
)


HEAD, BODY = requests.infer_stream(16)


def plan(kind: Kind, message: bytes = b"ask", *, answer: int = 0, streams: int = 1, in_flight: int = 1) -> Plan:
    return Plan(
        kind=kind, port=1, server=1, message=message, head=HEAD, seconds=1.0, answer=answer, streams=streams,
        in_flight=in_flight,
    )  # fmt: skip


def frames() -> Frames:
    message = requests.frame(requests.PIECE)
    return Frames(plan(Kind.FRAMES, message, in_flight=2, answer=len(requests.answer_frame(requests.PIECE))))


def sent(side: Connection) -> bytes:
    """Takes the bytes that the connection has to write."""
    out, side.out = bytes(side.out), b""
    return out


@pytest.mark.parametrize(
    ("make", "answer", "units"),
    [
        (lambda: Unary(plan(Kind.UNARY)), UNARY, 1),
        (lambda: Tokens(plan(Kind.TOKENS)), TOKENS, 2),
        (frames, requests.answer_frame(requests.PIECE), 1),
    ],
    ids=["unary", "tokens", "frames"],
)
def test_an_answer_counts_once_wherever_it_is_cut_and_is_followed_by_the_next_request(
    make: Callable[[], Connection], answer: bytes, units: int
) -> None:
    for cut in range(1, len(answer), 1 if len(answer) < 300 else 50):
        side = make()
        sent(side)
        assert side.take(answer[:cut]) + side.take(answer[cut:]) == units
        assert sent(side) in (b"ask", requests.frame(requests.PIECE))
        assert side.take(answer) == units, "the next answer counts as the first did"


def test_a_request_is_alone_on_its_connection_until_its_answer_is_whole() -> None:
    side = Unary(plan(Kind.UNARY))
    assert sent(side) == b"ask"
    side.take(UNARY[:-1])
    assert sent(side) == b""


@pytest.mark.parametrize(
    ("make", "answer", "says"),
    [
        (lambda: Unary(plan(Kind.UNARY)), b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", "503 Busy"),
        (lambda: Unary(plan(Kind.UNARY)), b"HTTP/1.1 200 OK\r\n\r\n", "content-length"),
        (lambda: Unary(plan(Kind.UNARY)), UNARY + b"more", "4 bytes longer"),
        (lambda: Tokens(plan(Kind.TOKENS)), b"HTTP/1.1 404 Not Found\r\n", "404"),
        (frames, requests.answer_frame(requests.PIECE[::-1]), "another"),
        (lambda: Streams(plan(Kind.STREAMS)), frame(1, 4, 1, b"\x8d"), "404"),
        (lambda: Duplex(plan(Kind.DUPLEX, answer=1)), frame(3, 0, 1, bytes(4)), "reset with code 0"),
        (lambda: Duplex(plan(Kind.DUPLEX, answer=1)), frame(0, 1, 1, b""), "ended stream 1"),
        (lambda: Duplex(plan(Kind.DUPLEX, answer=1)), frame(7, 0, 0, bytes(8)), "goodbye"),
        (lambda: Duplex(plan(Kind.DUPLEX, answer=1)), frame(1, 4, 1, b"\x8d"), "404"),
    ],
)
def test_what_is_no_answer_is_named(make: Callable[[], Connection], answer: bytes, says: str) -> None:
    with pytest.raises(LoadError, match=says):
        make().take(answer)


@pytest.mark.parametrize("size", [1, 7, 1000, 65_536])
def test_streams_of_a_connection_keep_their_messages_in_flight_whatever_a_read_brings(size: int) -> None:
    message = requests.duplex_message()
    client = Duplex(plan(Kind.DUPLEX, message, streams=3, in_flight=2, answer=len(message)))
    server, rest, units = http2.Echo(), sent(client)[24:], 0
    back = http2._SETTINGS
    for _ in range(3):
        for at in range(0, len(back), size):
            units += client.take(back[at : at + size])
        out, rest = server.take(rest + sent(client))
        back = b"".join(out)
    assert units == 12
    assert back.count(message) == 6, "as many as there were"


@pytest.mark.parametrize("size", [1, 7, 65_536])
def test_a_request_follows_each_answer_on_a_stream_of_its_own(size: int) -> None:
    client = Streams(plan(Kind.STREAMS, BODY, streams=3))
    server, rest, units = http2.Echo(), sent(client)[24:], 0
    for _ in range(3):
        out, rest = server.take(rest)
        back = b"".join(out)
        units += sum(client.take(back[at : at + size]) for at in range(0, len(back), size))
        rest += sent(client)
    assert units == 9
    assert rest.count(BODY) == 3


@pytest.mark.parametrize("size", [14, 30, 65_536])
def test_a_message_of_grpc_is_as_long_as_the_first_one_says(size: int) -> None:
    answer = b"\0\0\0\0\3abc"
    client = Duplex(plan(Kind.DUPLEX, requests.call_message(1), in_flight=2))
    sent(client)
    back = frame(0, 0, 1, answer + answer[:2]) + frame(0, 0, 1, answer[2:]) * 2
    assert sum(client.take(back[at : at + size]) for at in range(0, len(back), size)) == 2


def test_a_call_that_ends_well_is_one_unit_and_another_is_named() -> None:
    client, encoder = Streams(plan(Kind.STREAMS, BODY)), Encoder()
    head = frame(1, 4, 1, encoder.encode([(b":status", b"200"), (b"content-type", b"application/grpc")]))
    assert client.take(head + frame(0, 0, 1, b"12345") + frame(1, 5, 1, encoder.encode([(b"grpc-status", b"0")]))) == 1
    with pytest.raises(LoadError, match="code 3"):
        client.take(frame(1, 5, 3, encoder.encode([(b"grpc-status", b"3"), (b"grpc-message", b"no")])))


def test_no_message_is_sent_beyond_the_window_of_its_stream() -> None:
    client = Duplex(plan(Kind.DUPLEX, b"12345", in_flight=2, answer=5))
    sent(client)
    assert client.take(frame(4, 0, 0, b"\0\4" + (7).to_bytes(4, "big"))) == 0
    assert sent(client) == frame(4, 1, 0, b"") + frame(0, 0, 1, b"12345")
    client.take(frame(8, 0, 1, (3).to_bytes(4, "big")))
    assert sent(client) == frame(0, 0, 1, b"12345")


def test_the_floor_of_a_websocket_echoes_wherever_the_frames_are_cut() -> None:
    two = requests.frame(requests.PIECE) * 2
    for cut in range(0, len(two), 97):
        first, rest = websocket.echo(two[:cut])
        second, rest = websocket.echo(rest + two[cut:])
        assert b"".join(first + second) == requests.answer_frame(requests.PIECE) * 2
        assert rest == b""
