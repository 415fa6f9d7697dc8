"""HTTP/1.1 bodies as they are received: chunks, limits, landing, the ledger, and what is copied."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import NEED_DATA, Data, End, Request
from protocols.http1.connection import HTTP1Connection
from tests.protocols.http1.http1_helpers import answer, append, body, cuts, pull, request, server, written

CHUNKED = request(b"POST", fields=b"transfer-encoding: chunked\r\n")


def sized(n: int, content: bytes = b"") -> bytes:
    return request(b"POST", fields=b"content-length: %d\r\n" % n, body=content)


def refusal(framing: bytes, **limits: int) -> int:
    """The status for this chunked body, which must be the same wherever it is cut."""
    statuses = set()
    for pieces in [*cuts(framing)] if len(framing) < 200 else [(framing,), (framing[:100], framing[100:])]:
        machine = server(CHUNKED, **limits)
        with pytest.raises(RemoteProtocolError) as caught:  # noqa: PT012
            for piece in pieces:
                machine.receive_data(piece)
                pull(machine)
        statuses.add(caught.value.status)
    assert len(statuses) == 1
    return statuses.pop()


def chunked(framing: bytes, **limits: int) -> tuple[bytes, End]:
    results = []
    for pieces in [*cuts(framing)] if len(framing) < 200 else [(framing,), (framing[:100], framing[100:])]:
        machine, events = server(CHUNKED, **limits), list[Any]()
        for piece in pieces:
            machine.receive_data(piece)
            for event in pull(machine):
                append(events, event)
        end = events[-1]
        assert isinstance(end, End)
        assert machine.unread == 0
        results.append((body(events), end))
    assert all(result == results[0] for result in results)
    return results[0]


# -- chunks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("framing", "content"),
    [
        (b"0\r\n\r\n", b""),
        (b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
        (b"A\r\n0123456789\r\na\r\n0123456789\r\n0\r\n\r\n", b"0123456789" * 2),
        (b"0000000000000002\r\n\r\n\r\n00\r\n\r\n", b"\r\n"),
        (b"1;x\r\na\r\n1;x=y;z=\"\\\"; \"\r\nb\r\n1 ; x = y\r\nc\r\n0;last\r\n\r\n", b"abc"),
    ],
)  # fmt: skip
def test_chunks_are_put_together(framing: bytes, content: bytes) -> None:
    assert chunked(framing) == (content, End(stream=1))


@pytest.mark.parametrize(
    "framing",
    [
        b"5\nhello\r\n",
        b"5\rhello\r\n",
        b"5\r\nhello\n",
        b"5\r\nhello0\r\n\r\n",
        b"5\r\nhelloX\r\n",
        b"5\r\nhello\rX\r\n",
        b"\r\n",
        b" 5\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b"5\t\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b"+5\r\nhello\r\n",
        b"-5\r\nhello\r\n",
        b"5_0\r\nhello\r\n",
        b"5g\r\nhello\r\n",
        "٥\r\n".encode(),
        b"5;\r\nhello\r\n",
        b"5;x=\r\nhello\r\n",
        b"5;x y\r\nhello\r\n",
        b'5;x="\r\nhello\r\n',
        b"5;x=\x00\r\nhello\r\n",
        b"5 x\r\nhello\r\n",
        b"00000000000000005\r\nhello\r\n",
        b"8000000000000000\r\n",
        b"ffffffffffffffff\r\n",
        b"0\r\n: x\r\n\r\n",
        b"0\r\nx y: z\r\n\r\n",
        b"0\r\nx : z\r\n\r\n",
        b"0\r\nx: y\r\n z\r\n\r\n",
        b"0\r\nx: \x00\r\n\r\n",
        b"0\r\nx: y\n\r\n",
        b"0\r\nx: y\rz\r\n\r\n",
        b"0\r\nx\r\n\r\n",
        b"0\r\n\n",
    ],
)
def test_framing_of_chunks_that_another_reader_might_see_otherwise_is_refused(framing: bytes) -> None:
    assert refusal(framing) == 400


def test_the_largest_chunk_size_is_below_2_to_the_63() -> None:
    machine = server(CHUNKED + b"7fffffffffffffff\r\nx")
    assert body(pull(machine)) == b"x"


def test_a_chunk_line_may_be_as_long_as_its_limit() -> None:
    line = b"1;" + b"x" * 254
    assert chunked(line + b"\r\na\r\n0\r\n\r\n")[0] == b"a"
    assert refusal(line + b"x\r\na\r\n0\r\n\r\n") == 400
    assert refusal(b"1;" + b"x" * 300) == 400  # without waiting for its end


def test_chunk_extensions_are_bounded_over_a_body() -> None:
    framing = b"1;xxx\r\na\r\n" * 5 + b"0\r\n\r\n"
    assert chunked(framing, chunk_extensions=20)[0] == b"aaaaa"
    assert refusal(framing, chunk_extensions=19) == 400


def test_the_bound_on_extensions_starts_anew_with_each_body() -> None:
    machine = server(chunk_extensions=8, trailers=8, trailer_fields=1)
    for stream in (1, 2, 3):
        machine.receive_data(CHUNKED + b"1;xxx\r\na\r\n0;yyy\r\nx: y\r\n\r\n")
        assert pull(machine)[-1] == End(stream=stream, trailers=((b"x", b"y"),))
        answer(machine)


def test_trailers_come_with_the_end_in_lower_case() -> None:
    framing = b"0\r\nX-Sum:  1 \r\nx-sum:2\r\nEmpty:\r\n\r\n"
    assert chunked(framing)[1].trailers == ((b"x-sum", b"1"), (b"x-sum", b"2"), (b"empty", b""))


def test_trailers_that_would_change_the_message_are_dropped() -> None:
    framing = (
        b"0\r\nContent-Length: 5\r\nHost: b\r\nx: y\r\nAuthorization: z\r\ntransfer-encoding: chunked\r\nCookie: c\r\n\r\n"
    )
    assert chunked(framing)[1].trailers == ((b"x", b"y"),)


def test_trailers_are_bounded_in_bytes_and_fields() -> None:
    framing = b"0\r\n" + b"x: y\r\n" * 4 + b"\r\n"
    assert len(chunked(framing, trailers=24, trailer_fields=4)[1].trailers) == 4
    assert refusal(framing, trailers=23) == 400
    assert refusal(framing, trailer_fields=3) == 400
    assert refusal(b"0\r\nhost: y\r\nhost: y\r\n\r\n", trailer_fields=1) == 400
    assert refusal(b"0\r\nx: " + b"y" * 5000) == 400


def test_a_pipelined_request_follows_the_last_chunk() -> None:
    for pieces in cuts(CHUNKED + b"1\r\na\r\n0\r\n\r\n" + request(target=b"/next")):
        machine, events = server(), list[Any]()
        for piece in pieces:
            machine.receive_data(piece)
            while new := pull(machine):
                for event in new:
                    append(events, event)
                if isinstance(new[-1], End):
                    answer(machine)
        assert [type(e) for e in events] == [Request, Data, End, Request, End]


def test_all_of_a_body_may_be_received_before_it_is_pulled() -> None:
    data = CHUNKED + b"5;x\r\nhello\r\n6\r\n world\r\n0\r\nx: y\r\n\r\n"
    for i in range(len(data)):
        for j in range(i, len(data)):
            machine = server(data[:i])
            machine.receive_data(data[i:j])
            machine.receive_data(data[j:])
            events = pull(machine)
            assert body(events) == b"hello world"
            assert events[-1] == End(stream=1, trailers=((b"x", b"y"),))


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_large_piece_is_copied_once_and_given_out_as_it_is() -> None:
    machine = server(sized(3_000_000))
    pull(machine)
    piece = bytes(1_000_000)
    machine.receive_data(piece)  # bytes cannot change, so that even the first copy is saved
    event = machine.next_event()
    assert isinstance(event, Data)
    assert event.buffers[0] is piece


def test_a_large_part_of_what_was_received_is_a_view_and_a_small_one_a_copy() -> None:
    machine = server(sized(50_000, bytes(50_000)) + b"GET")
    machine.next_event()
    large = machine.next_event()
    assert isinstance(large, Data)
    assert isinstance(large.buffers[0], memoryview)
    machine = server(sized(100, bytes(100)) + b"GET")
    machine.next_event()
    small = machine.next_event()
    assert isinstance(small, Data)
    assert isinstance(small.buffers[0], bytes)


def test_unread_counts_what_was_not_given_out() -> None:
    machine = server()
    data = sized(10, b"0123456789") + b"GET /"
    for i in range(len(data)):
        assert machine.unread == i
        machine.receive_data(data[i : i + 1])
    assert isinstance(machine.next_event(), Request)
    assert machine.unread == 15
    pull(machine)
    assert machine.unread == 5


def test_crumbs_received_ahead_are_kept_in_few_objects() -> None:
    machine = server(sized(20_000))
    machine.next_event()
    for _ in range(20_000):
        machine.receive_data(b"x")
    pieces = []
    while isinstance(event := machine.next_event(), Data):
        pieces.append(event.buffers[0])
    assert b"".join(pieces) == b"x" * 20_000
    assert len(pieces) < 10


def test_an_idle_connection_holds_nothing_of_what_it_received() -> None:
    for data in (sized(30_000, bytes(30_000)), CHUNKED + b"5\r\nhello\r\n0\r\n\r\n"):
        machine = server()
        before = sys.getrefcount(data)
        machine.receive_data(data)
        pull(machine)
        answer(machine)
        written(machine)
        assert machine.idle
        assert sys.getrefcount(data) == before


# -- the ledger --------------------------------------------------------------------------------------------------------


def test_the_ledger_is_what_was_given_out_less_what_was_credited() -> None:
    machine = server(sized(10, b"0123456789"))
    machine.next_event()
    with pytest.raises(LocalProtocolError):
        machine.credit(1, 1)
    pull(machine)
    assert machine.unconsumed == 10
    machine.credit(1, 4)
    machine.credit(1, 0)
    assert machine.unconsumed == 6
    for stream, n in ((1, 7), (1, -1), (2, 1)):
        with pytest.raises(LocalProtocolError):
            machine.credit(stream, n)
    machine.credit(1, 6)
    assert machine.unconsumed == 0
    machine.credit(1, 0)


def test_credit_of_one_request_may_come_during_the_next() -> None:
    machine = server(sized(3, b"abc") + sized(4, b"defg"))
    pull(machine)
    answer(machine)
    pull(machine)
    assert machine.unconsumed == 7
    with pytest.raises(LocalProtocolError):
        machine.credit(2, 5)
    machine.credit(2, 4)
    machine.credit(1, 3)
    assert machine.unconsumed == 0


# -- landing -----------------------------------------------------------------------------------------------------------


def receive(machine: HTTP1Connection, data: bytes, step: int) -> None:
    """As a driver does: into the landing body where there is one."""
    while data:
        target = machine.get_buffer()
        n = min(step, len(data), step if target is None else len(target))
        if target is None:
            machine.receive_data(data[:n])
        else:
            target[:n] = data[:n]
            machine.buffer_updated(n)
        data = data[n:]


def test_a_body_lands_wherever_landing_begins_and_however_it_arrives() -> None:
    content = b"0123456789abcdef"
    for given in range(len(content) + 1):  # bytes given out as Data before
        for here in range(given, len(content) + 1):  # bytes received before
            for step in (1, 3, 100):
                machine = server(sized(16))
                machine.next_event()
                machine.receive_data(content[:given])
                assert body(pull(machine)[:1]) == content[:given]
                machine.receive_data(content[given:here])
                if given == 16:
                    break
                memory = bytearray(20)
                assert machine.land(1, memoryview(memory)) == here - given
                receive(machine, content[here:] + request(target=b"/next"), step)
                events = pull(machine)
                assert body(events) == content[given:]
                assert memory == content[given:] + bytes(given + 4)
                assert events[-1] == End(stream=1)
                assert machine.unread == len(request(target=b"/next"))
                answer(machine)
                event = machine.next_event()
                assert isinstance(event, Request)
                assert event.head.target == b"/next"


def test_landed_data_is_a_view_of_the_memory_given() -> None:
    machine = server(sized(6, b"ab"))
    machine.next_event()
    memory = bytearray(6)
    assert machine.land(1, memoryview(memory)) == 2
    assert machine.unread == 2
    first = machine.next_event()
    assert machine.next_event() is NEED_DATA
    target = machine.get_buffer()
    assert target is not None
    assert len(target) == 4
    target[:3] = b"cde"
    machine.buffer_updated(3)
    assert machine.unread == 3
    second = machine.next_event()
    assert machine.unread == 0
    assert isinstance(first, Data)
    assert isinstance(second, Data)
    assert bytes(first.buffers[0]) + bytes(second.buffers[0]) == b"abcde"
    memory[:] = b"ABCDEF"
    assert bytes(first.buffers[0]) + bytes(second.buffers[0]) == b"ABCDE"
    assert machine.unconsumed == 5


def test_received_data_lands_too_and_what_follows_the_body_does_not() -> None:
    machine = server(sized(4))
    machine.next_event()
    memory = bytearray(4)
    machine.land(1, memoryview(memory))
    machine.receive_data(b"ab")
    machine.receive_data(memoryview(b"cdGET /"))
    assert memory == b"abcd"
    assert machine.get_buffer() is None
    assert machine.unread == 9
    assert [type(e) for e in pull(machine)] == [Data, End]
    assert machine.unread == 5


def test_the_memory_may_have_any_shape_that_is_contiguous() -> None:
    machine = server(sized(4))
    machine.next_event()
    memory = memoryview(bytearray(4)).cast("B", (2, 2))
    machine.land(1, memory)
    machine.receive_data(b"abcd")
    assert memory.tobytes() == b"abcd"
    machine = server(sized(4))
    machine.next_event()
    for bad in (memoryview(bytearray(3)), memoryview(b"abcd"), memoryview(bytearray(8))[::2]):
        with pytest.raises(LocalProtocolError):
            machine.land(1, bad)
    assert machine.land(1, memoryview(bytearray(4))) == 0


def test_an_empty_body_lands_in_no_memory() -> None:
    for data in (sized(0), request()):
        machine = server(data)
        machine.next_event()
        assert machine.land(1, memoryview(bytearray())) == 0
        assert machine.get_buffer() is None
        assert machine.next_event() == End(stream=1)


def test_only_a_body_of_known_length_under_way_lands_and_once() -> None:
    memory = memoryview(bytearray(4))
    for data, stream in ((b"", 0), (CHUNKED, 1), (sized(4), 2)):
        machine = server(data)
        machine.next_event()
        with pytest.raises(LocalProtocolError):
            machine.land(stream, memory)
    machine = server(sized(4))
    machine.next_event()
    machine.land(1, memory)
    with pytest.raises(LocalProtocolError):
        machine.land(1, memory)
    receive(machine, b"abcd", 4)
    pull(machine)
    with pytest.raises(LocalProtocolError):
        machine.land(1, memory)


def test_an_update_must_fit_the_buffer_given() -> None:
    machine = server(sized(4))
    with pytest.raises(LocalProtocolError):
        machine.buffer_updated(1)
    machine.next_event()
    machine.land(1, memoryview(bytearray(4)))
    for n in (0, -1, 5):
        with pytest.raises(LocalProtocolError):
            machine.buffer_updated(n)
    machine.buffer_updated(4)
    with pytest.raises(LocalProtocolError):
        machine.buffer_updated(1)


def test_the_peers_end_while_a_body_lands_is_an_error_after_what_landed() -> None:
    machine = server(sized(4))
    machine.next_event()
    machine.land(1, memoryview(bytearray(4)))
    machine.buffer_updated(3)
    machine.receive_eof()
    assert isinstance(machine.next_event(), Data)
    with pytest.raises(RemoteProtocolError):
        machine.next_event()
    assert machine.get_buffer() is None
