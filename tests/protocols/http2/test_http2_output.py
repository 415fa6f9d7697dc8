"""The output of an HTTP/2 machine: fair turns, room without head-of-line blocking, few copies, and an honest account."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from protocols.errors import LocalProtocolError
from protocols.events import Data, End, Ping, Reset, Response, Sent
from protocols.http2.connection import SHARE, HTTP2Connection, HTTP2Limits
from protocols.http2.frames import Kind
from protocols.http2.output import OWN_BUFFER
from protocols.roles import Role
from tests.protocols.http2.http2_helpers import (
    END_STREAM,
    GET,
    ByHand,
    data,
    frame,
    frames,
    kinds,
    output,
    settings,
    take,
)


def answering(client: ByHand, *streams: int) -> HTTP2Connection:
    """The server, with these requests answered by a head."""
    for stream in streams:
        client.says(client.head(stream, GET, END_STREAM))
        client.server.send(Response(stream=stream, status=200))
    output(client.server)
    return client.server


def window_update(stream: int, n: int) -> bytes:
    return frame(Kind.WINDOW_UPDATE, 0, stream, n.to_bytes(4))


def test_streams_take_turns_one_frame_each() -> None:
    client = ByHand()
    client.says(window_update(0, 1_000_000))
    server = answering(client, 1, 3, 5)
    for stream, n in ((1, 60_000), (3, 20_000), (5, 40_000)):
        server.send(Data(stream=stream, buffers=(bytes(n),)))
    written, _ = take(server, 1_000_000)
    assert [(found.stream, len(found.payload)) for found in frames(written)] == [
        (1, 16_384),
        (3, 16_384),
        (5, 16_384),
        (1, 16_384),
        (3, 3616),
        (5, 16_384),
        (1, 16_384),
        (5, 7232),
        (1, 10_848),
    ]


def test_the_turn_goes_on_where_the_last_write_stopped() -> None:
    client = ByHand()
    server = answering(client, 1, 3)
    for stream in (1, 3):
        server.send(Data(stream=stream, buffers=(bytes(32_000),)))
    turns = []
    while server.has_output:
        written, _ = take(server, 16_393)
        turns += [found.stream for found in frames(written)]
    assert turns == [1, 3, 1, 3]


def test_a_stream_that_waits_for_its_window_loses_its_turn_and_no_other_does() -> None:
    client = ByHand()
    client.says(settings({4: 10}))
    server = answering(client, 1, 3)
    client.says(window_update(3, 1_000_000))
    for stream in (1, 3):
        server.send(Data(stream=stream, buffers=(bytes(30_000),)))
    written = frames(output(server))
    assert [(found.stream, len(found.payload)) for found in written] == [(1, 10), (3, 16_384), (3, 13_616)]
    client.says(window_update(1, 5))
    assert [(found.stream, len(found.payload)) for found in frames(output(server))] == [(1, 5)]


def test_a_window_made_negative_by_settings_is_respected() -> None:
    client = ByHand()
    server = answering(client, 1)
    server.send(Data(stream=1, buffers=(bytes(50_000),)))
    take(server, 16_393)
    client.says(settings({4: 0}))
    assert kinds(output(server)) == [(Kind.SETTINGS, 0)]
    client.says(window_update(1, 16_384 + 7))
    assert [len(found.payload) for found in frames(output(server))] == [7]
    client.says(settings({4: 65_535}))
    assert sum(len(found.payload) for found in frames(output(server))) == 50_000 - 16_384 - 7


def test_the_connection_window_stops_payload_and_nothing_else() -> None:
    client = ByHand()
    server = answering(client, 1, 3, 5)
    server.send(Data(stream=1, buffers=(bytes(65_535),)))
    output(server)
    server.send(Data(stream=3, buffers=(b"waits",)))
    assert not server.has_output
    server.send(End(stream=5))
    server.send(Ping(data=b"12345678"))
    assert kinds(output(server)) == [(Kind.DATA, 5), (Kind.PING, 0)]
    client.says(window_update(0, 3))
    assert [found.payload for found in frames(output(server))] == [b"wai"]


def test_a_stalled_stream_fills_its_own_room_and_takes_no_share_of_another() -> None:
    limits = HTTP2Limits(send_buffer=65_536, connection_send_buffer=131_072)
    client = ByHand(limits)
    client.says(settings({4: 0}))
    server = answering(client, 1, 3, 5, 7)
    for stream in (1, 3):
        assert server.room(stream) == 65_536
        server.send(Data(stream=stream, buffers=(bytes(65_536),)))
        assert server.room(stream) == 0
    client.says(window_update(5, 1_000_000), window_update(0, 1_000_000))
    for _ in range(20):
        assert server.room(5) == SHARE
        server.send(Data(stream=5, buffers=(bytes(SHARE),)))
        assert server.room(5) == 0
        _, sent = take(server)
        assert sent.room == [5]
    assert server.room(7) == SHARE


def test_room_comes_back_when_bytes_are_written_and_not_when_they_are_handed_out() -> None:
    client = ByHand()
    server = answering(client, 1)
    server.send(Data(stream=1, buffers=(bytes(40_000),)))
    assert server.room(1) == 25_536
    assert server.data_to_send(16_393)
    assert server.room(1) == 25_536
    assert server.data_sent() == Sent(room=[1])
    assert server.room(1) == 25_536 + 16_384
    assert server.queued(1) == 40_000 - 16_384
    assert server.queued(99) == 0


def test_a_message_larger_than_the_room_is_taken_whole() -> None:
    client = ByHand()
    server = answering(client, 1, 3)
    server.send(Data(stream=1, buffers=(bytes(1_000_000),)))
    assert server.room(1) == 0
    assert server.room(3) == SHARE


def test_there_is_no_room_where_nothing_can_be_sent() -> None:
    client = ByHand()
    server = answering(client, 1, 3)
    server.send(End(stream=1))
    server.send(Reset(stream=3, code=8))
    assert [server.room(stream) for stream in (1, 3, 5)] == [0, 0, 0]


def test_a_reset_gives_the_queue_back_to_the_connection() -> None:
    limits = HTTP2Limits(send_buffer=65_536, connection_send_buffer=65_536)
    client = ByHand(limits)
    server = answering(client, 1, 3)
    server.send(Data(stream=1, buffers=(bytes(60_000),)))
    server.data_to_send(16_393)
    server.send(Reset(stream=1, code=8))
    assert server.room(3) == 65_536 - 16_384, "what was handed out is not yet written"
    server.data_sent()
    assert server.room(3) == 65_536
    assert kinds(output(server)) == [(Kind.RST_STREAM, 1)]


def test_large_buffers_go_out_by_reference_behind_their_nine_bytes() -> None:
    client = ByHand()
    server = answering(client, 1)
    large, array = bytes(OWN_BUFFER), np.arange(5000, dtype=np.float64).reshape(50, 100)
    server.send(Data(stream=1, buffers=(large, memoryview(array))))
    first, second, *_ = server.data_to_send(65_536)
    assert bytes(first) == (16_384).to_bytes(3) + bytes(5) + b"\x01"
    assert second is large
    server.data_sent()
    buffers = server.data_to_send(65_536)
    assert buffers == [], "the window is used"


@pytest.mark.parametrize("payload_path", [True, False])
def test_a_stream_that_has_every_turn_leaves_in_full_frames(payload_path: bool) -> None:
    client = ByHand(payload_path=payload_path)
    server = answering(client, 1)
    payload = bytes(range(256)) * 240
    cuts = (0, 1, 16_384, 20_000, 50_000, 50_001, len(payload))
    server.send(Data(stream=1, buffers=[payload[at:end] for at, end in itertools.pairwise(cuts)]))
    server.send(End(stream=1))
    found = frames(b"".join(server.data_to_send(1_000_000)))
    assert [len(each.payload) for each in found] == [16_384] * 3 + [len(payload) - 3 * 16_384]
    assert [each.flags for each in found] == [0, 0, 0, END_STREAM]
    assert b"".join(each.payload for each in found) == payload
    server.data_sent()
    assert server.counters.data_sent == 4


def test_a_large_array_is_never_copied() -> None:
    client = ByHand()
    server = answering(client, 1)
    array = np.arange(8000, dtype=np.float64)
    server.send(Data(stream=1, buffers=(memoryview(array),)))
    buffers = server.data_to_send(100_000)
    payload = [buffer for buffer in buffers if isinstance(buffer, memoryview)]
    assert sum(view.nbytes for view in payload) == 64_000 - 64_000 % 16_384 + 64_000 % 16_384
    assert all(np.shares_memory(np.frombuffer(view, np.uint8), array) for view in payload)
    assert [len(buffer) for buffer in buffers] == [9, 16_384] * 3 + [9, 64_000 - 3 * 16_384]


def test_small_pieces_of_one_stream_share_a_frame_and_a_buffer() -> None:
    client = ByHand()
    server = answering(client, 1, 3)
    for _ in range(100):
        server.send(Data(stream=1, buffers=(b"token ", b"")))
    server.send(Data(stream=3, buffers=(b"x", bytearray(b"y"))))
    (buffer,) = server.data_to_send(65_536)
    assert [found.payload for found in frames(bytes(buffer))] == [b"token " * 100, b"xy"]
    server.data_sent()


def test_the_end_travels_with_the_last_payload() -> None:
    client = ByHand()
    server = answering(client, 1, 3)
    server.send(Data(stream=1, buffers=(b"last",)))
    server.send(End(stream=1))
    server.send(End(stream=3))
    assert output(server) == data(3, b"", END_STREAM) + data(1, b"last", END_STREAM)
    assert server.idle


def test_nothing_may_be_asked_for_before_the_last_was_written() -> None:
    client = ByHand()
    server = answering(client, 1)
    with pytest.raises(LocalProtocolError, match="without data_to_send"):
        server.data_sent()
    server.send(Data(stream=1, buffers=(b"x",)))
    assert not server.idle
    server.data_to_send(1000)
    assert not server.idle
    with pytest.raises(LocalProtocolError, match="before data_sent"):
        server.data_to_send(1000)
    server.data_sent()
    assert server.data_to_send(1000) == []
    assert server.data_to_send(1000) == []


def test_any_bound_of_a_write_is_kept_and_gives_the_same_bytes_of_each_stream() -> None:
    for at_most in (10, 11, 25, 100, 1033, 20_000):
        client = ByHand()
        client.says(client.head(1, GET, END_STREAM))
        server = client.server
        server.send(Response(stream=1, status=200))
        server.send(Data(stream=1, buffers=(bytes(range(256)) * 20,)))
        server.send(End(stream=1, trailers=((b"a", b"b"),)))
        written, ended = b"", []
        while server.has_output:
            piece, sent = take(server, at_most)
            assert 0 < len(piece) <= at_most
            written += piece
            ended.append(sent.ended)
        found = frames(written)
        assert b"".join(one.payload for one in found if one.kind == Kind.DATA) == bytes(range(256)) * 20
        assert found[-1].kind == Kind.HEADERS
        assert ended == [[]] * (len(ended) - 1) + [[1]]
    assert answering(client, 3).data_to_send(9) == []


def test_the_end_of_a_write_is_not_filled_with_a_crumb() -> None:
    client = ByHand()
    server = answering(client, 1)
    server.send(Data(stream=1, buffers=(bytes(20_000),)))
    written, _ = take(server, 16_393 + 9 + 1023)
    assert [len(found.payload) for found in frames(written)] == [16_384]


def test_ended_names_a_stream_once_when_its_last_byte_is_written() -> None:
    client = ByHand()
    server = answering(client, 1, 3)
    server.send(Data(stream=1, buffers=(bytes(20_000),)))
    server.send(End(stream=1))
    server.send(Reset(stream=3, code=8))
    assert take(server, 13)[1] == Sent(ended=[3])
    assert take(server, 16_393)[1] == Sent(room=[1])
    assert take(server, 16_393)[1] == Sent(room=[1], ended=[1])


def test_a_peer_that_makes_us_answer_and_does_not_read_chokes_the_connection() -> None:
    client = ByHand(HTTP2Limits(output=170))
    seen = []
    for _ in range(11):
        client.says(frame(Kind.PING, 0, 0, bytes(8)))
        seen.append(client.server.choked)
    assert kinds(output(client.server)) == [(Kind.PING, 0)] * 11
    seen.append(client.server.choked)
    assert seen == [False] * 10 + [True, False]
    assert client.server.counters.pings == 11


def test_frames_of_a_peer_with_larger_frames_stay_at_16_kib() -> None:
    client = ByHand()
    client.says(settings({5: 2**20}))
    server = answering(client, 1)
    server.send(Data(stream=1, buffers=(bytes(20_000),)))
    assert [len(found.payload) for found in frames(output(server))] == [16_384, 3616]


def test_a_peer_that_makes_its_table_smaller_is_told_once_that_we_use_none() -> None:
    client = ByHand()
    blocks = []
    for stream, sizes in ((1, (2**31, 65_536)), (3, (100, 2**20, 2000, 2000)), (5, (0,))):
        client.says(*(settings({1: size}) for size in sizes), client.head(stream, GET, END_STREAM))
        output(client.server)
        client.server.send(Response(stream=stream, status=200, headers=((b"x", b"y"),)))
        (head,) = frames(output(client.server))
        client.decoder.max_allowed_table_size = sizes[-1]
        assert list(client.decoder.decode(head.payload, raw=True)) == [(b":status", b"200"), (b"x", b"y")]
        blocks.append(head.payload)
    assert blocks == [blocks[0], b"\x20" + blocks[0], blocks[0]]
    assert not client.decoder.header_table.dynamic_entries


def test_a_client_machine_writes_by_the_same_rules() -> None:
    assert output(HTTP2Connection(Role.CLIENT)).startswith(b"PRI * HTTP/2.0")
