"""The output of an HTTP/1.1 machine: joining, references, portions, room and endings."""

from __future__ import annotations

import array

import pytest

from protocols.errors import LocalProtocolError
from protocols.events import Data, End, Response, Sent
from protocols.http1.connection import HTTP1Connection
from tests.protocols.http1.http1_helpers import answer, pull, request, server, written

LARGE = 16 * 1024


def started(*headers: tuple[bytes, bytes], data: bytes = b"") -> HTTP1Connection:
    """A server whose answer has begun and whose head is written."""
    machine = server(data or request())
    pull(machine)
    machine.send(Response(stream=1, status=200, headers=headers))
    written(machine)
    return machine


def push(machine: HTTP1Connection, *buffers: bytes | bytearray | memoryview) -> None:
    machine.send(Data(stream=1, buffers=buffers))


def test_small_buffers_leave_as_one() -> None:
    machine = server(request() + request())
    pull(machine)
    answer(machine, 200, b"one")
    pull(machine)
    answer(machine, 200, b"two")
    buffers = machine.data_to_send(1 << 20)
    assert len(buffers) == 1
    assert bytes(buffers[0]).count(b"HTTP/1.1 200") == 2


def test_large_buffers_leave_by_reference_between_joined_small_ones() -> None:
    machine = started()
    first, second = bytearray(LARGE), memoryview(bytes(2 * LARGE))
    push(machine, b"a", b"b", first, second, b"c")
    push(machine, b"d")
    machine.send(End(stream=1))
    head, one, two, tail = machine.data_to_send(1 << 20)
    assert (head, tail) == (b"c003\r\nab", b"c\r\n1\r\nd\r\n0\r\n\r\n")
    assert one is first
    assert two is second


def test_what_is_just_below_large_is_joined() -> None:
    machine = started((b"content-length", b"%d" % (2 * LARGE - 1)))
    push(machine, bytes(LARGE - 1), bytes(LARGE))
    assert [len(b) for b in machine.data_to_send(1 << 20)] == [LARGE - 1, LARGE]
    machine.data_sent()
    machine = started((b"content-length", b"%d" % (2 * LARGE - 2)))
    push(machine, bytes(LARGE - 1), bytes(LARGE - 1))
    assert [len(b) for b in machine.data_to_send(1 << 20)] == [2 * LARGE - 2]


def test_buffers_of_any_item_are_counted_in_bytes() -> None:
    machine = started((b"content-length", b"24"))
    numbers = array.array("q", [1, 2])
    push(machine, memoryview(numbers), memoryview(bytes(8)).cast("B", (2, 2, 2)), memoryview(b"").cast("q"))
    machine.send(End(stream=1))
    assert written(machine) == numbers.tobytes() + bytes(8)
    machine = started()
    with pytest.raises(LocalProtocolError):
        push(machine, memoryview(b"abcd")[::2])
    assert machine.room(1) == 65536


def test_portions_are_about_as_large_as_asked_for_and_add_up() -> None:
    content = bytes(range(256)) * 400
    for at_most in (1, 1000, LARGE, 40_000, 102_399, 102_400, 1 << 30):
        machine = started((b"content-length", b"%d" % (len(content) + 2)))
        push(machine, b"<", content, b">")
        machine.send(End(stream=1))
        out, ended = bytearray(), []
        while buffers := machine.data_to_send(at_most):
            portion = b"".join(buffers)
            assert len(portion) < at_most + LARGE
            out += portion
            ended += machine.data_sent().ended
        assert bytes(out) == b"<" + content + b">"
        assert ended == [1]


def test_nothing_asked_for_gives_nothing() -> None:
    machine = started()
    assert machine.data_to_send(1 << 20) == []
    push(machine, b"x" * 100_000)
    assert machine.data_to_send(0) == []
    assert machine.data_to_send(1 << 20)


def test_a_portion_must_be_confirmed_before_the_next() -> None:
    machine = started()
    push(machine, b"x")
    machine.data_to_send(1 << 20)
    with pytest.raises(LocalProtocolError):
        machine.data_to_send(1 << 20)
    machine.data_sent()
    assert machine.data_to_send(1 << 20) == []


def test_room_is_what_the_send_buffer_lacks_until_the_kernel_has_it() -> None:
    machine = started((b"content-length", b"100000"))
    assert machine.room(1) == 65536
    push(machine, bytes(60_000))
    assert machine.room(1) == 5536
    push(machine, bytes(40_000))
    assert machine.room(1) == -34464
    machine.data_to_send(50_000)
    assert machine.room(1) == -34464
    assert machine.data_sent() == Sent(room=[1], ended=[])
    assert machine.room(1) == 15536
    assert not machine.idle


def test_the_ending_is_reported_with_the_last_byte() -> None:
    machine = started()
    push(machine, b"x")
    written(machine)
    machine.send(End(stream=1))
    assert machine.data_to_send(1 << 20) == [b"0\r\n\r\n"]
    assert not machine.idle
    assert machine.data_sent() == Sent(room=[1], ended=[1])
    assert machine.idle


def test_an_end_without_bytes_is_reported_though_nothing_is_left_to_write() -> None:
    for data, headers in ((request(), ((b"content-length", b"1"),)), (request(version=b"1.0"), ())):
        machine = started(*headers, data=data)
        push(machine, b"x")
        machine.data_to_send(1 << 20)
        assert machine.data_sent() == Sent(room=[1], ended=[])
        machine.send(End(stream=1))
        assert machine.data_to_send(1 << 20) == []
        assert machine.data_sent() == Sent(room=[], ended=[1])
        assert machine.data_sent() == Sent()


def test_an_end_that_comes_while_its_last_byte_is_in_flight_is_reported_with_it() -> None:
    machine = started((b"content-length", b"1"))
    push(machine, b"x")
    machine.data_to_send(1 << 20)
    machine.send(End(stream=1))
    assert machine.data_sent() == Sent(room=[1], ended=[1])


def test_several_answers_written_at_once_all_end() -> None:
    machine = server(request() * 3)
    pull(machine)
    answer(machine)
    pull(machine)
    answer(machine)
    pull(machine)
    machine.send(Response(stream=3, status=200))
    machine.data_to_send(1 << 20)
    assert machine.data_sent() == Sent(room=[1, 2, 3], ended=[1, 2])


def test_only_streams_that_had_bytes_in_a_portion_are_reported() -> None:
    machine = server(request() * 2)
    pull(machine)
    machine.send(Response(stream=1, status=200, headers=((b"content-length", b"%d" % (2 * LARGE)),)))
    push(machine, bytes(2 * LARGE))
    machine.send(End(stream=1))
    pull(machine)
    answer(machine)
    machine.data_to_send(LARGE)
    assert machine.data_sent() == Sent(room=[1], ended=[])
    machine.data_to_send(1 << 20)
    assert machine.data_sent() == Sent(room=[1, 2], ended=[1, 2])


def test_a_portion_that_ends_with_an_answer_reports_that_one() -> None:
    machine = server(request() * 2)
    pull(machine)
    answer(machine, 200, bytes(2 * LARGE))
    pull(machine)
    answer(machine)
    first = len(b"HTTP/1.1 200 OK\r\ncontent-length: 32768\r\n\r\n") + 2 * LARGE
    assert sum(map(len, machine.data_to_send(first))) == first
    assert machine.data_sent() == Sent(room=[1], ended=[1])
    machine.data_to_send(1 << 20)
    assert machine.data_sent() == Sent(room=[2], ended=[2])


def test_what_is_queued_is_written_though_the_peer_has_broken_the_protocol() -> None:
    machine = server(request() + b"\0\r\n\r\n")
    pull(machine)
    answer(machine, 200, b"x")
    with pytest.raises(Exception, match="request head"):
        machine.next_event()
    assert written(machine).endswith(b"\r\n\r\nx")


@pytest.mark.parametrize("size", [0, 1, 15, 16, 511, 512, 513, LARGE])
@pytest.mark.parametrize("neighbours", [[], [b"a", b"bc"]], ids=["alone", "between others"])
def test_a_piece_is_the_chunk_that_a_data_event_makes(size: int, neighbours: list[bytes]) -> None:
    pieces, events = started(), started()
    texts = [*neighbours[:1], b"x" * size, *neighbours[1:]]
    pieces.send_pieces(1, texts)
    for text in texts:
        push(events, text)
    assert pieces.room(1) == events.room(1)
    assert written(pieces) == written(events)


def test_pieces_stay_in_order_with_whatever_is_sent_beside_them() -> None:
    pieces, events = started(), started()
    for texts in ([b"a", b"bc", b"d" * 511], [b"e" * 512], [b"f", b"", b"g" * 20], [], [b"h"], [b""]):
        pieces.send_pieces(1, texts)
        for text in texts:
            push(events, text)
    assert pieces.data_to_send(1 << 20) == events.data_to_send(1 << 20)
    pieces.send_pieces(1, [b"i", b"j"])  # while the others are on their way
    push(events, b"i")
    push(events, b"j")
    pieces.data_sent(), events.data_sent()
    for machine in (pieces, events):
        push(machine, b"k" * LARGE)
    pieces.send_pieces(1, [b"l", b"m"])
    push(events, b"l")
    push(events, b"m")
    for machine in (pieces, events):
        machine.send(End(stream=1))
    assert pieces.room(1) == events.room(1)
    assert written(pieces) == written(events)


def test_pieces_are_given_up_with_the_connection() -> None:
    machine = started()
    machine.send_pieces(1, [b"x", b"y"])
    machine.close()
    assert machine.data_to_send(100) == []
    assert machine.room(1) == 65536


def test_a_piece_of_another_stream_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="stream 2"):
        started().send_pieces(2, [b"x", b"y"])


def test_pieces_before_the_head_are_refused() -> None:
    machine = server(request())
    pull(machine)
    with pytest.raises(LocalProtocolError, match="needs a head first"):
        machine.send_pieces(1, [b"x", b"y"])


def test_of_pieces_longer_than_the_head_declares_those_that_fit_are_queued() -> None:
    machine = started((b"content-length", b"5"))
    with pytest.raises(LocalProtocolError, match="2 bytes of body, the head leaves 1"):
        machine.send_pieces(1, [b"ab", b"cd", b"ef"])
    assert written(machine) == b"abcd"
