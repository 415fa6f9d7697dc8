"""Whole answers and pieces that are sent without an event, and heads that are read once: the same as the long way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Buffer, Data, End, Headers, Request, Response, Sent
from protocols.http1 import head as http1_head
from protocols.http1.connection import HTTP1Connection
from tests.protocols.http1.http1_helpers import HOST, answer, cuts, pull, request, server, written

LARGE = 16 * 1024
PING = request(b"POST", b"/p", b"content-length: 4\r\n", b"ping")


def asked(data: bytes = PING) -> HTTP1Connection:
    machine = server(data)
    pull(machine)
    return machine


Respond = Callable[[HTTP1Connection, int, int, Headers, tuple[Buffer, ...]], None]


def by_events(machine: HTTP1Connection, stream: int, status: int, headers: Headers, buffers: tuple[Buffer, ...]) -> None:
    machine.send(Response(stream=stream, status=status, headers=headers))
    if buffers:
        machine.send(Data(stream=stream, buffers=buffers))
    machine.send(End(stream=stream))


def in_two_parts(at: int, kind: type) -> Respond:
    """`respond` with the fields before `at` as those of many answers, and the others as those of this one."""

    def respond(machine: HTTP1Connection, stream: int, status: int, headers: Headers, buffers: tuple[Buffer, ...]) -> None:
        machine.respond(stream, status, kind(headers[:at]), buffers, kind(headers[at:]))

    return respond


def at_once(machine: HTTP1Connection, stream: int, status: int, headers: Headers, buffers: tuple[Buffer, ...]) -> None:
    answer = machine.respond(stream, status, headers, buffers)
    assert answer is None or [answer] == machine._buffers


WAYS: tuple[Respond, ...] = (
    by_events,
    at_once,
    *(in_two_parts(at, tuple) for at in range(5)),
    in_two_parts(1, list),
)


def seen(act: Callable[[], object]) -> object:
    """Returns the result of an act, or the type and text of its error."""
    try:
        return act()
    except (LocalProtocolError, RemoteProtocolError) as error:
        return type(error), str(error)


def test_a_whole_answer_that_leaves_alone_is_confirmed_alone() -> None:
    machine = asked(PING + PING)
    assert machine.answer_sent() == 0
    pong = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nx-form: 7\r\ncontent-length: 4\r\nx-request-id: a\r\n\r\npong"
    assert machine.respond(1, 200, FORM, (b"pong",), ((b"x-request-id", b"a"),), 4) == pong
    pull(machine)
    assert machine.answer_sent() == 1, "whatever stream is under way by then"
    assert machine.queued == machine.answer_sent() == 0
    assert machine.data_to_send(1 << 20) == []
    assert machine.data_sent() == Sent()
    machine.respond(2, 200, FORM, (b"pong",), ((b"x-request-id", b"a"),), 4)
    assert machine.data_to_send(1 << 20) == [pong], "as well, and then"
    assert machine.answer_sent() == 0, "it is"
    assert machine.data_sent() == Sent([2], [2])
    assert machine.answer_sent() == machine.queued == 0


def test_what_comes_behind_a_whole_answer_that_left_alone_is_still_to_be_sent() -> None:
    machine = asked(PING + PING + PING)
    assert machine.respond(1, 200, FORM, (b"pong",), ((b"x-request-id", b"a"),), 4)
    pull(machine)
    assert machine.respond(2, 200, FORM, (b"pong",), ((b"x-request-id", b"b"),), 4) is None, "it is not all there is"
    assert machine.answer_sent() == 1
    (second,) = machine.data_to_send(1 << 20)
    assert b"x-request-id: b" in bytes(second)
    assert machine.data_sent() == Sent([2], [2])


def test_a_whole_answer_that_leaves_with_others_is_one_of_their_ends() -> None:
    machine = asked(PING + PING)
    for stream in (1, 2):
        machine.respond(stream, 200, FORM, (b"pong",), ((b"x-request-id", b"a"),), 4)
        pull(machine)
    machine.data_to_send(1 << 20)
    assert machine.answer_sent() == 0
    assert machine.data_sent() == Sent(room=[1, 2], ended=[1, 2])
    assert machine.idle


def test_a_whole_answer_of_another_length_than_its_body_is_refused() -> None:
    machine = asked()
    with pytest.raises(LocalProtocolError, match="1 bytes short"):
        machine.respond(1, 200, FORM, (b"pong",), ((b"x-request-id", b"a"),), 5)


def test_a_whole_answer_is_one_buffer_and_ends_with_its_last_byte() -> None:
    machine = asked()
    machine.respond(1, 200, [(b"content-type", b"text/plain"), (b"content-length", b"4")], (b"po", memoryview(b"ng")))
    assert machine.room(1) == 65536 - len(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 4\r\n\r\npong")
    assert machine.data_to_send(1 << 20) == [b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 4\r\n\r\npong"]
    assert machine.data_sent() == Sent(room=[1], ended=[1])
    assert machine.idle
    machine.receive_data(PING)
    assert [type(e) for e in pull(machine)] == [Request, Data, End]
    machine.respond(2, 204, [])
    assert written(machine) == b"HTTP/1.1 204 No Content\r\n\r\n"
    assert machine.idle


def test_a_large_answer_goes_by_reference() -> None:
    machine = asked()
    body = memoryview(bytearray(LARGE))
    machine.respond(1, 200, [(b"content-length", b"%d" % (LARGE + 1))], (b"x", body))
    head, large = machine.data_to_send(1 << 20)
    assert bytes(head).endswith(b"\r\n\r\nx")
    assert large is body


def test_a_small_answer_is_copied_when_it_is_sent() -> None:
    machine = asked()
    body = bytearray(b"pong")
    machine.respond(1, 200, [(b"content-length", b"4")], (body,))
    assert written(machine).endswith(b"\r\n\r\npong")
    body.clear()  # nothing of it is held any more


def test_an_answer_with_fields_of_any_length_is_written() -> None:
    machine = asked()
    headers = [(b"x" * 5000, b"y" * 5000), (b"content-length", b"0")]
    machine.respond(1, 200, headers)
    assert written(machine) == b"HTTP/1.1 200 OK\r\n%b: %b\r\ncontent-length: 0\r\n\r\n" % headers[0]


def test_made_up_names_are_not_kept_for_ever() -> None:
    machine = asked()
    for i in range(600):
        name = b"x-%d" % i
        machine.respond(machine.stream, 200, [(name, b"%d" % i), (b"content-length", b"0")])
        assert b"\r\n%b: %d\r\n" % (name, i) in written(machine)
        machine.receive_data(request())
        pull(machine)
    kept = http1_head._PLAIN_STARTS
    assert len(kept) <= 256
    machine.respond(machine.stream, 200, [(b"n" * 65, b""), (b"content-length", b"0")])
    assert b"n" * 65 not in kept


FORM = ((b"content-type", b"text/plain"), (b"x-form", b"7"))


def test_what_many_answers_say_goes_before_what_one_says() -> None:
    machine = asked()
    for name in (b"one", b"two"):
        machine.respond(machine.stream, 200, FORM, (b"pong",), ((b"content-length", b"4"), (b"x-request-id", name)))
        assert written(machine) == (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nx-form: 7\r\ncontent-length: 4\r\nx-request-id: %b\r\n\r\npong"
            % name
        )
        machine.receive_data(PING)
        pull(machine)
    with pytest.raises(LocalProtocolError, match="control characters"):
        machine.respond(machine.stream, 200, FORM, (b"pong",), ((b"content-length", b"4"), (b"x-request-id", b"a\r\nb: c")))
    machine.respond(machine.stream, 404, FORM, (), ((b"content-length", b"0"),))
    assert written(machine).startswith(b"HTTP/1.1 404 Not Found\r\ncontent-type: text/plain\r\nx-form: 7\r\n")


def test_fields_of_many_answers_are_known_by_their_value() -> None:
    changing = [b"x-form", b"1"]
    for value in (b"1", b"2"):
        changing[1] = value
        for headers in (((b"x-form", value),), (changing,)):
            machine = asked()
            machine.respond(1, 200, headers, (), ((b"content-length", b"0"),))  # type: ignore[arg-type]
            assert written(machine) == b"HTTP/1.1 200 OK\r\nx-form: %b\r\ncontent-length: 0\r\n\r\n" % value


def test_few_and_small_fields_of_many_answers_are_kept() -> None:
    kept = http1_head._PLAIN_BLOCKS
    kept.clear()
    start = len(b"HTTP/1.1 200 OK\r\nx-form: ")
    for size, keeps in ((512 - start, 1), (512 - start + 1, 0)):
        machine = asked()
        machine.respond(1, 200, ((b"x-form", b"v" * size),), (), ((b"content-length", b"0"),))
        assert b"v" * size in written(machine)
        assert len(kept) == keeps
        kept.clear()
    for i in range(65):
        machine = asked()
        machine.respond(1, 200, ((b"x-form", b"%d" % i),), (), ((b"content-length", b"0"),))
        assert len(kept) == (i + 1 if i < 64 else 1)


NAMES = st.sampled_from(
    [b"content-type", b"x-request-id", b"X-Mixed", b"x%d", b"content-length", b"Content-Length", b"connection", b"upgrade",
     b"host", b"te", b"expect", b"transfer-encoding", b"keep-alive", b"", b"a b", b"a\r\nb", b"n" * 100]
)  # fmt: skip
VALUES = st.sampled_from(
    [b"", b"a", b"close", b"0", b"4", b"\t x", b"\xe9", b"a\r\nb: c", b"\0", b"\x7f", b"\n", b"%b"]
) | st.binary(max_size=8)
GIVEN: list[Buffer] = [
    b"", b"ab", bytearray(b"cd"), memoryview(b"ef"), memoryview(b"12345678").cast("q"), memoryview(b"1234").cast("B", (2, 2)),
    memoryview(b"abcd")[::2], memoryview(b"").cast("q"), bytes(LARGE), memoryview(bytes(LARGE - 1)),
]  # fmt: skip
PIECES = st.integers(0, len(GIVEN) - 1).map(lambda i: GIVEN[i])
LENGTHS = st.sampled_from(["right", "right", "right", "zeros", "wrong", "none", "twice", "bad", "huge"])
REQUESTS = st.sampled_from(
    [PING, PING, request(), request(b"HEAD"), request(version=b"1.0"), request(version=b"1.0", fields=b"connection: keep-alive\r\n"),
     request(fields=b"connection: close\r\n"), request(fields=b"connection: upgrade\r\nupgrade: websocket\r\n"), PING[:-1], PING * 2,
     request(b"POST", fields=b"expect: 100-continue\r\ncontent-length: 1\r\n"), b"GET\r\n\r\n", b"",
     request(b"POST", fields=b"transfer-encoding: chunked\r\n", body=b"1\r\na\r\n0\r\n\r\n")]
)  # fmt: skip


@st.composite
def answers(draw: st.DrawFn) -> tuple[int, list[tuple[bytes, bytes]], tuple[Buffer, ...]]:
    buffers = tuple(draw(st.lists(PIECES, max_size=4)))
    usual = st.tuples(st.sampled_from([b"content-type", b"x-request-id"]), st.sampled_from([b"text/plain", b"1", b""]))
    headers = draw(st.lists(usual, max_size=3) | st.lists(st.tuples(NAMES, VALUES), max_size=3))
    size = sum(b.nbytes if isinstance(b, memoryview) else len(b) for b in buffers)
    values = {
        "right": [b"%d" % size],
        "zeros": [b"00%d" % size],
        "wrong": [b"%d" % (size + 1)],
        "none": [],
        "twice": [b"%d" % size] * 2,
        "bad": [b"+%d" % size],
        "huge": [b"%d" % (2**62 + size)],
    }[draw(LENGTHS)]
    for value in values:
        headers.insert(draw(st.integers(0, len(headers))), (b"content-length", value))
    return draw(st.sampled_from([200, 200, 200, 404, 500, 299, 204, 304, 103, 101, 99])), headers, buffers


Answer = tuple[int, list[tuple[bytes, bytes]], tuple[Buffer, ...]]


def agree(data: bytes, pulled: int, before: str, given: list[Answer], off: int = 0) -> None:
    """Says the same by `respond` and by events, to machines in the same state, and wants all that shows to be the same."""
    outcomes: list[list[Any]] = []
    for respond in WAYS:
        machine, outcome = server(data), list[Any]()
        outcome += [seen(machine.next_event) for _ in range(pulled)]
        if before == "drain":
            machine.close_after_response()
        elif before == "close":
            machine.close()
        elif before == "eof":
            machine.receive_eof()
        elif before == "started":
            outcome.append(seen(lambda m=machine: m.send(Response(stream=m.stream, status=200))))  # type: ignore[misc]
        for status, headers, buffers in given:
            stream = machine.stream + off
            outcome.append(seen(lambda r=respond, m=machine, a=(stream, status, headers, buffers): r(m, *a)))  # type: ignore[misc]
            outcome += [machine.room(1), machine.must_close, machine.idle, machine.unread, machine.stream]
            outcome.append(b"".join(machine.data_to_send(1 << 20)))
            outcome += [machine.data_sent(), machine.idle, seen(machine.next_event), seen(machine.next_event)]
        outcomes.append(outcome)
    assert all(outcome == outcomes[0] for outcome in outcomes)


@settings(max_examples=300)
@given(
    REQUESTS,
    st.integers(0, 4),
    st.sampled_from(["", "", "drain", "close", "eof", "started"]),
    st.lists(answers(), min_size=1, max_size=2),
    st.sampled_from([0, 0, 0, 1]),
)
def test_a_whole_answer_is_exactly_its_three_events(
    data: bytes, pulled: int, before: str, given: list[Answer], off: int
) -> None:
    agree(data, pulled, before, given, off)


@pytest.mark.parametrize("data", [PING, request(b"HEAD"), request(version=b"1.0"), request(fields=b"connection: close\r\n")])
@pytest.mark.parametrize("before", ["", "drain", "started", "close", "eof"])
@pytest.mark.parametrize("pulled", [1, 2, 4])
def test_a_usual_answer_in_any_state_is_exactly_its_three_events(data: bytes, before: str, pulled: int) -> None:
    agree(data, pulled, before, [(200, [(b"content-type", b"text/plain"), (b"content-length", b"4")], (b"pong",))])


@pytest.mark.parametrize(
    ("headers", "buffers"),
    [
        ([(b"x", b"a\r\nb: c"), (b"content-length", b"0")], ()),
        ([(b"content-length", b"0"), (b"x", b"\0")], ()),
        ([(b"x", b"\x7f"), (b"content-length", b"0")], ()),
        ([(b"x", b"\n"), (b"content-length", b"0")], ()),
        ([(b"x", b"\t \xe9"), (b"content-length", b"0")], ()),
        ([(b"x%b", b"%d"), (b"content-length", b"0")], ()),
        ([(b"x y", b"z"), (b"content-length", b"0")], ()),
        ([(b"", b"z"), (b"content-length", b"0")], ()),
        ([(b"connection", b"close"), (b"content-length", b"0")], ()),
        ([(b"host", b"a"), (b"content-length", b"0")], ()),
        ([(b"content-length", b"0"), (b"content-length", b"0")], ()),
        ([(b"content-length", b"0"), (b"Content-Length", b"0")], ()),
        ([(b"Content-Length", b"1")], (b"a",)),
        ([(b"content-length", b"0001")], (b"a",)),
        ([(b"content-length", b"")], ()),
        ([(b"content-length", b"9" * 5000)], (b"a",)),
        ([(b"content-length", b"%d" % 2**63)], (b"a",)),
        ([(b"content-length", b"2")], (b"a",)),
        ([(b"content-length", b"1")], (b"a", b"b")),
        ([(b"content-length", b"1")], (memoryview(bytes(8)).cast("q"),)),
        ([(b"content-length", b"8")], (memoryview(bytes(8)).cast("q"),)),
        ([(b"content-length", b"2")], (memoryview(b"abcd")[::2],)),
        ([(b"content-length", b"4")], (memoryview(b"abcd").cast("B", (2, 2)),)),
        ([(b"content-length", b"2")], (memoryview(b"abcd").cast("B", (2, 2)),)),
        ([(b"content-length", b"%d" % (LARGE - 1))], (bytes(LARGE - 1),)),
        ([(b"content-length", b"%d" % LARGE)], (bytes(LARGE),)),
        ([], ()),
        ([], (b"chunked",)),
    ],
)
def test_an_answer_that_is_almost_usual_is_exactly_its_three_events(
    headers: list[tuple[bytes, bytes]], buffers: tuple[Buffer, ...]
) -> None:
    for status in (200, 204):
        agree(PING, 4, "", [(status, headers, buffers)] * 2)


@settings(max_examples=200)
@given(
    st.sampled_from(
        [(request(), ()), (request(), ((b"content-length", b"20"),)), (request(version=b"1.0"), ()), (request(b"HEAD"), ())]
    ),
    st.lists(st.lists(PIECES, max_size=3), max_size=5),
    st.sampled_from([1, 50, 1 << 20]),
)
def test_pieces_without_an_event_are_exactly_their_data(
    started: tuple[bytes, Headers], pieces: list[list[Buffer]], at_most: int
) -> None:
    def push(machine: HTTP1Connection, buffers: list[Buffer]) -> None:
        machine.send(Data(stream=1, buffers=tuple(buffers)))

    outcomes = []
    for act in (push, lambda machine, buffers: machine.send_data(1, buffers)):
        machine, outcome = asked(started[0]), list[Any]()
        machine.send(Response(stream=1, status=200, headers=started[1]))
        for buffers in pieces:
            outcome.append(seen(lambda a=act, m=machine, b=buffers: a(m, b)))  # type: ignore[misc]
            outcome.append(machine.room(1))
        outcome.append(seen(lambda m=machine: m.send(End(stream=1))))  # type: ignore[misc]
        while portion := machine.data_to_send(at_most):
            outcome += [[bytes(b) for b in portion], machine.data_sent()]
        outcomes.append(outcome)
    assert outcomes[0] == outcomes[1]


def test_each_piece_is_one_chunk_and_they_leave_as_one_buffer() -> None:
    machine = asked()
    machine.send(Response(stream=1, status=200))
    for token in (b"one", b"two "):
        machine.send_data(1, (token,))
    machine.send_data(1, [b"th", bytearray(b"r"), memoryview(b"ee")])
    machine.send_data(1, (b"",))
    machine.send_data(1, ())
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    assert machine.data_to_send(1 << 18) == [head + b"3\r\none\r\n4\r\ntwo \r\n5\r\nthree\r\n"]


def test_a_retired_machine_and_another_stream_take_neither() -> None:
    machine = asked()
    for stream in (0, 2):
        with pytest.raises(LocalProtocolError, match="not under way"):
            machine.respond(stream, 200, [(b"content-length", b"0")])
        with pytest.raises(LocalProtocolError, match="not under way"):
            machine.send_data(stream, (b"x",))
    machine = asked(request(fields=b"connection: upgrade\r\nupgrade: websocket\r\n"))
    machine.send(Response(stream=1, status=101))
    written(machine)
    machine.switch()
    with pytest.raises(LocalProtocolError):
        machine.respond(1, 200, [(b"content-length", b"0")])
    with pytest.raises(LocalProtocolError):
        machine.send_data(1, (b"x",))
    assert written(machine) == b""


HEADS = st.sampled_from(
    [PING, PING.replace(b"ping", b"pong"), PING.replace(b"/p", b"/q"), request(), request(b"HEAD"), request(version=b"1.0"),
     request(version=b"1.0", fields=b"connection: keep-alive\r\n"), request(fields=b"connection: close\r\n"), b"\r\n" + PING,
     request(b"POST", fields=b"expect: 100-continue\r\ncontent-length: 1\r\n", body=b"x"), request(fields=b"x: " + b"y" * 2000 + b"\r\n"),
     request(b"POST", fields=b"transfer-encoding: chunked\r\n", body=b"1\r\na\r\n0\r\n\r\n"), request(host=HOST + HOST)]
)  # fmt: skip


@settings(max_examples=150)
@given(st.lists(HEADS, min_size=1, max_size=5), st.integers(1, 80))
def test_a_connection_reads_each_request_as_a_new_one_would(heads: list[bytes], step: int) -> None:
    used = server()
    for stream, data in enumerate(heads, 1):
        if used.must_close:
            break
        fresh = server()
        events: list[list[Any]] = [[], []]
        for machine, into in zip((used, fresh), events, strict=True):
            for i in range(0, len(data), step):
                machine.receive_data(data[i : i + step])
                into += [event for event in [seen(lambda m=machine: pull(m))] if event]  # type: ignore[misc]
            into += [machine.must_close, machine.unread, machine.get_buffer()]
            answer(machine, 200, b"" if data.startswith(b"HEAD") else b"x")
            into += [written(machine), machine.must_close, machine.idle]
        assert repr(events[0]).replace(f"stream={stream},", "stream=1,").replace(f"stream={stream})", "stream=1)") == repr(
            events[1]
        )


def test_a_head_sent_again_is_read_the_same_wherever_it_is_cut() -> None:
    for pieces in cuts(PING):
        machine = asked()
        machine.respond(1, 200, [(b"content-length", b"0")])
        events: list[Any] = []
        for piece in pieces:
            machine.receive_data(piece)
            pull(machine, events)
        assert [type(e) for e in events] == [Request, Data, End]
        assert events[0].stream == 2
        assert events[1].buffers == (b"ping",)
        assert machine.unconsumed == (4 if PING in pieces else 8)  # one that comes with its head is credited
