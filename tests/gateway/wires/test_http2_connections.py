"""HTTP/2 as its streams see it: half-closes, early answers, late DATA, GOAWAY, and errors of one stream or of all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from gateway.config import Config, HTTP2Config
from gateway.core.connection import Connection
from gateway.core.contracts import REQUESTS_AT_ONCE
from gateway.testing.stories.talk import Leave
from gateway.wires.http2 import HTTP2Wire
from models.messages import Part
from models.session import Session
from protocols.aws import bidi, eventstream
from protocols.errors import RemoteProtocolError
from protocols.events import ConnectionEnd, Data, End, GoAway, Reset, Response
from protocols.floods import Flood
from protocols.http2.frames import LARGEST_ID, Kind
from protocols.http2.windows import FLOOR, STEP
from tests.gateway.promises import (
    CANCELLED,
    EventsCall,
    House,
    KiB,
    Line,
    Over,
    Probe,
    answering,
    at_once,
    deaf,
    echoing,
    limits,
    pausing,
    raw,
    serving,
    silent,
)


async def bidi_call(house: House, line: Line, model: str = "probe") -> EventsCall:
    call = await house.call("bidi", model, line=line)
    assert isinstance(call, EventsCall)
    return call


async def works(house: House, line: Line) -> None:
    """Another stream of the connection is served at once."""
    with at_once():
        call = await bidi_call(house, line, "other")
        await call.say()
        assert await call.next() == 0
        await call.leave(Leave.STREAM)
    await line.ping()


async def test_the_clients_half_close_ends_the_input_and_not_the_answer(autojump_clock: Any) -> None:
    async def summing(probe: Probe, session: Session[Any, Any]) -> None:
        async for part in session:
            probe.received.append(int(bytes(part.data[:8])))
        with pytest.raises(trio.EndOfChannel):  # again and again
            await session.receive()
        await probe.go.wait()
        await probe.say(session, 5)

    probe = Probe(summing)
    async with serving(probe.spec("bidi")) as house:
        call = await bidi_call(house, house.line("http2"))
        for _ in range(3):
            await call.say()
        await call.hush()
        await house.still()
        assert probe.received == [0, 1, 2]
        probe.go.set()
        assert await call.rest() == ([0, 1, 2, 3, 4], Over("complete"))
        assert house.endings == {"complete": 1}


async def test_a_client_without_the_closing_envelope_ends_its_input_too(autojump_clock: Any) -> None:
    probe = Probe(echoing)
    async with serving(probe.spec("bidi")) as house:
        call = await bidi_call(house, house.line("http2"))
        await call.line.send(call.part(), End(stream=call.stream))
        assert await call.rest() == ([0], Over("complete"))


async def test_a_model_that_returns_with_input_unread_gets_its_answer_through(autojump_clock: Any) -> None:
    async def brief(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.go.wait()
        await probe.say(session, 3)

    probe, other = Probe(brief), Probe(echoing, "other")
    async with serving(probe.spec("bidi"), other.spec("bidi")) as house:
        line = house.line("http2")
        call = await bidi_call(house, line)
        for _ in range(20):
            await call.say()
        await house.still()
        probe.go.set()
        assert await call.rest() == ([0, 1, 2], Over("complete"))
        assert await line.event(call.stream) == Reset(stream=call.stream, code=0)
        assert house.endings == {"complete": 1}
        house.check_ledger()
        other.sent = 0
        await works(house, line)


async def test_data_after_the_answer_is_credited_and_dropped(autojump_clock: Any) -> None:
    # each call leaves 60 KiB behind that nobody reads; if one of them were not credited, the connection's window would
    # be gone long before the last
    async def curt(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.say(session)

    probe, other = Probe(curt), Probe(echoing, "other")
    async with serving(probe.spec("bidi"), other.spec("bidi")) as house:
        line = house.line("http2")
        for number in range(30):
            call = await bidi_call(house, line)
            await house.still()  # the answer is written, and not read yet
            await line.send(Data(stream=call.stream, buffers=(bytes(60 * KiB),)))
            assert await call.rest() == ([number], Over("complete"))
            assert (await line.event(call.stream)).code == 0
        await house.still()
        house.check_ledger()
        other.sent = 0
        await works(house, line)
        assert house.endings == {"complete": 30, **CANCELLED}


@pytest.mark.parametrize("path", ["/none", "/endpoints/none/invocations-bidirectional-stream", "/v2/models/none/infer"])
async def test_an_early_refusal_is_whole_though_the_client_still_uploads(path: str, autojump_clock: Any) -> None:
    async with serving(Probe(echoing, "other").spec("bidi")) as house:
        line = house.line("http2")
        stream = line.next_stream()
        await line.send(raw(stream, b"POST", path))
        response = await line.event(stream)
        assert isinstance(response, Response)
        assert response.status in (400, 404)
        await line.send(Data(stream=stream, buffers=(bytes(40 * KiB),)))
        while not isinstance(event := await line.event(stream), Reset):
            assert isinstance(event, Data | End)
        assert event.code == 0
        await works(house, line)
        assert not line.goaways
        assert house.endings == {"refused": 1, **CANCELLED}


async def test_a_clients_goaway_lets_its_streams_finish(autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec("bidi")) as house:
        line = house.line("http2")
        calls = [await bidi_call(house, line) for _ in range(2)]
        for call in calls:
            await call.take(3)
        await line.send(GoAway())
        await house.still()
        assert (probe.live, house.connections) == (2, 1)
        probe.go.set()
        for call in calls:
            numbers, over = await call.rest()
            assert (len(numbers), over) == (3, Over("complete"))
        await line.over()
        assert house.endings == {"complete": 2}


@pytest.mark.parametrize("late", ["a part after END", "bytes after the empty envelope"])
async def test_bytes_after_the_end_of_the_event_stream_are_an_error_in_band(late: str, autojump_clock: Any) -> None:
    probe = Probe(echoing)
    async with serving(probe.spec("bidi")) as house:
        call = await bidi_call(house, house.line("http2"))
        await call.say()
        end = tuple(bidi.encode_request_end(date_ms=0))
        more = call.part().buffers if "part" in late else (b"x",)
        await call.line.send(Data(stream=call.stream, buffers=(*end, *more)), End(stream=call.stream))
        numbers, over = await call.rest()
        assert (numbers, over.how, over.code) == ([0], "error", "InternalStreamFailure")
        assert "after the end" in over.text
        assert house.endings == {"refused": 1}


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda whole: whole[:-20], id="cut off"),
        pytest.param(lambda whole: whole[:-1] + bytes((whole[-1] ^ 1,)), id="checksum"),
        pytest.param(lambda whole: b"GET / HTTP/1.1\r\n\r\n", id="another protocol"),
    ],
)
async def test_a_broken_event_stream_ends_in_band(broken: Any, autojump_clock: Any) -> None:
    probe, other = Probe(echoing), Probe(echoing, "other")
    async with serving(probe.spec("bidi"), other.spec("bidi")) as house:
        line = house.line("http2")
        call = await bidi_call(house, line)
        data = broken(b"".join(call.part().buffers))
        await line.send(Data(stream=call.stream, buffers=(data,)), End(stream=call.stream))
        numbers, over = await call.rest()
        assert (numbers, over.how, over.code) == ([], "error", "InternalStreamFailure")
        assert house.endings == {"refused": 1}
        await works(house, line)


async def test_a_part_over_its_limit_is_refused_before_its_memory_is_taken(autojump_clock: Any) -> None:
    async with serving(Probe(echoing).spec("bidi")) as house:
        call = await bidi_call(house, house.line("http2"))
        event = b"".join(eventstream.encode_buffers({}, bytes(16 * 1024 * KiB)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(eventstream, "MAX_PAYLOAD", 2**30)
            event = b"".join(bidi.encode_envelope(event, date_ms=0))
        await call.line.send(Data(stream=call.stream, buffers=(event[: 10 * KiB],)))
        numbers, over = await call.rest()
        assert (numbers, over.how, over.code) == ([], "error", "InternalStreamFailure")
        assert "limit" in over.text
        assert house.gateway.budget.high_water == FLOOR + STEP
        assert house.endings == {"refused": 1}


async def test_a_large_part_is_taken_piecewise_into_memory_reserved_first(autojump_clock: Any) -> None:
    size, probe = 320 * KiB, Probe(deaf)  # a longer one is read in a thread
    probe.go.set()
    async with serving(probe.spec("bidi")) as house:
        call = await bidi_call(house, house.line("http2"))
        await call.line.read()
        event = b"".join(call.part(size).buffers)
        await call.line.send(Data(stream=call.stream, buffers=(event[: len(event) // 2],)))
        await call.line.read()
        arrived = len(event) // 2
        assert arrived < house.gateway.budget.used < arrived + arrived + 256 * KiB  # a step, and what its window has grown
        await call.line.send(Data(stream=call.stream, buffers=(event[len(event) // 2 :],)))
        await call.line.read()
        assert probe.received == [0]
        assert house.gateway.budget.used < size  # the growth of the window alone
        await call.hush()
        assert await call.rest() == ([], Over("complete"))


async def test_a_part_that_the_budget_cannot_hold_ends_its_session_alone(autojump_clock: Any) -> None:
    probe, other = Probe(echoing), Probe(echoing, "other")
    config = limits(total_bytes=1024 * KiB)
    async with serving(probe.spec("bidi"), other.spec("bidi"), config=config) as house:
        line = house.line("http2")
        call = await bidi_call(house, line)
        await call.say(2048 * KiB)
        numbers, over = await call.rest()
        assert (numbers, over.how, over.code) == ([], "error", "InternalStreamFailure")
        assert "limits.total_bytes" in over.text
        await works(house, line)


@asynccontextmanager
async def no_room(house: House) -> AsyncIterator[None]:
    """Others hold all of the budget but a few bytes."""
    budget = house.gateway.budget
    n = budget.limit - budget.used - 100
    assert budget.try_reserve(n)
    yield
    budget.release(n)


async def test_a_stream_whose_bytes_find_no_room_is_answered_503_and_its_neighbours_go_on(autojump_clock: Any) -> None:
    probe = Probe(silent)
    config = limits(total_bytes=200 * KiB, body=100 * KiB, memory_refuse=100, memory_reset=100, party_share=100)
    async with serving(probe.spec("v2-http2"), Probe(echoing, "other").spec("bidi"), config=config) as house:
        line = house.line("http2")
        stream = line.next_stream()
        await line.send(raw(stream, b"POST", "/v2/models/probe/infer", content_length=50 * KiB))
        await house.still()
        async with no_room(house):
            await line.send(Data(stream=stream, buffers=(bytes(50 * KiB),)), End(stream=stream))
            response = await line.event(stream)
            assert response.status == 503
            assert b"limits.total_bytes" in (await line.event(stream)).buffers[0]
            assert await line.event(stream) == End(stream=stream)
            await line.ping()
        assert house.endings == {"refused": 1}
        await works(house, line)
        house.check_ledger()


async def test_a_stream_whose_bytes_find_no_room_is_reset_where_its_answer_has_begun(autojump_clock: Any) -> None:
    probe = Probe(echoing)
    config = limits(total_bytes=200 * KiB, memory_refuse=100, memory_reset=100, party_share=100)
    async with serving(probe.spec("bidi"), Probe(echoing, "other").spec("bidi"), config=config) as house:
        line = house.line("http2")
        calls = [await bidi_call(house, line) for _ in range(2)]
        for call in calls:
            await call.say()
            await call.take(1)
        async with no_room(house):
            await calls[0].say(10 * KiB)
            assert await calls[0].rest() == ([], Over("cut", code="11")), "ENHANCE_YOUR_CALM"
            await calls[1].say()
            await calls[1].take(1)
        assert house.endings == {"refused": 1}
        await calls[1].leave(Leave.RESET)
        await house.still()
        house.check_ledger()


async def test_a_stream_that_the_budget_has_no_window_for_is_refused_and_its_neighbours_are_not(autojump_clock: Any) -> None:
    probe = Probe(answering)
    config = limits(total_bytes=3 * FLOOR + 100, party_share=100, memory_refuse=100)
    async with serving(probe.spec("bidi"), config=config) as house:
        line = house.line("http2")
        calls = [await bidi_call(house, line) for _ in range(4)]
        await line.read()
        refused = await calls[3].rest()
        assert refused == ([], Over("cut", code="7"))  # REFUSED_STREAM: safe to send again
        probe.go.set()
        for call in calls[:3]:
            numbers, over = await call.rest()
            assert (len(numbers), over) == (1, Over("complete")), over.text
        again = await bidi_call(house, line)
        assert (await again.rest())[1] == Over("complete")


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        pytest.param(bytes((0, 0, 1, Kind.WINDOW_UPDATE, 0, 0, 0, 0, 0, 0)), 6, id="FRAME_SIZE_ERROR"),
        pytest.param(bytes((0, 0, 0, Kind.DATA, 0, 0, 0, 0, 99)), 1, id="PROTOCOL_ERROR"),
    ],
)
async def test_a_broken_connection_says_why_and_ends_its_streams_alone(frame: bytes, code: int, autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec("bidi")) as house:
        line, other = house.line("http2"), await bidi_call(house, house.line("http2"))
        calls = [await bidi_call(house, line) for _ in range(3)]
        for call in (*calls, other):
            await call.take(3)
        with at_once():
            line.transport.try_send([frame])
            await line.read()
            assert [goaway.code for goaway in line.goaways] == [code]
            assert probe.live == 1
        await line.over()
        assert house.endings == {"refused": 3}
        probe.go.set()
        assert (await other.rest())[1] == Over("complete")


async def test_a_malformed_head_is_answered_and_ends_its_stream_alone(autojump_clock: Any) -> None:
    probe = Probe(echoing, "other")
    async with serving(probe.spec("bidi")) as house:
        line = house.line("http2")
        await line.read()
        h2 = line.machine._h2  # type: ignore[attr-defined]  # our own machine refuses to send this
        h2.config.validate_outbound_headers = False
        stream = line.next_stream()
        with pytest.MonkeyPatch.context() as patch:
            fields = [(b":method", b"GET"), (b":scheme", b"http"), (b":authority", b"a@b"), (b":path", b"/")]
            patch.setattr("protocols.http2.connection.request_fields", lambda *_: fields)
            await line.send(raw(stream, b"GET", "/"))
        status, _, body = await line.peer.read_answer(stream)
        assert (status, b"error" in body) == (400, True)
        await works(house, line)


async def test_more_streams_than_allowed_are_refused_one_by_one(autojump_clock: Any) -> None:
    probe = Probe(answering)
    async with serving(probe.spec("bidi"), config=Config(http2=HTTP2Config(streams=2))) as house:
        line = house.line("http2")
        calls = [await bidi_call(house, line) for _ in range(3)]  # before the server's SETTINGS are read
        await line.read()
        assert await calls[2].rest() == ([], Over("cut", code="7"))
        probe.go.set()
        for call in calls[:2]:
            assert (await call.rest())[1] == Over("complete")


async def test_a_unary_answer_waits_for_its_window_and_nobody_else(autojump_clock: Any) -> None:
    async def large(probe: Probe, session: Session[Any, Part]) -> None:
        await session.send(Part(data=b"00000000" + bytes(300 * KiB)))

    probe, other = Probe(large), Probe(echoing, "other")
    async with serving(probe.spec("bidi"), other.spec("bidi")) as house:
        line = house.line("http2")
        call = await bidi_call(house, line)
        await line.read()
        assert probe.returned == 1
        assert house.gateway.counts().exchanges == 1  # its last byte is not out
        await works(house, line)
        assert await call.rest() == ([0], Over("complete"))
        assert house.endings == {"complete": 1, **CANCELLED}


async def test_an_answer_whose_client_hangs_up_before_it_gave_the_window_was_cancelled(autojump_clock: Any) -> None:
    async def large(probe: Probe, session: Session[Any, Part]) -> None:
        await session.send(Part(data=bytes(300 * KiB)))

    async with serving(Probe(large).spec("bidi")) as house:
        line = house.line("http2")
        call = await bidi_call(house, line)
        await line.read()
        with at_once():
            await call.leave(Leave.HALF)
            await line.read()
            assert (house.connections, house.endings) == (0, CANCELLED)


async def test_an_idle_connection_says_goodbye_before_it_closes(autojump_clock: Any) -> None:
    probe = Probe(answering)
    probe.go.set()
    async with serving(probe.spec("lmi-http2")) as house:
        line = house.line("http2")
        assert (await (await house.call("lmi-http2", line=line)).rest())[1] == Over("complete")
        began = trio.current_time()
        assert isinstance(await line.event(99), ConnectionEnd)
        assert 75 < trio.current_time() - began < 80  # limits.keep_alive, and the timer's second
        assert [goaway.code for goaway in line.goaways] == [0, 0]


async def test_a_request_on_its_way_when_an_idle_connection_says_goodbye_is_answered(autojump_clock: Any) -> None:
    probe = Probe(answering)
    probe.go.set()
    async with serving(probe.spec("lmi-http2")) as house:
        line = house.line("http2")
        assert (await (await house.call("lmi-http2", line=line)).rest())[1] == Over("complete")
        await trio.sleep(76.5)  # limits.keep_alive, and the timer's second
        assert (await (await house.call("lmi-http2", line=line)).rest())[1] == Over("complete")
        assert isinstance(await line.event(99), ConnectionEnd)
        assert [goaway.last_stream for goaway in line.goaways] == [LARGEST_ID, 3]


async def test_a_silent_model_keeps_its_connection_and_pings_keep_an_idle_one(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("bidi")) as house:
        line, idle = house.line("http2"), house.line("http2")
        call = await bidi_call(house, line)
        for _ in range(5):
            await idle.ping()
            await trio.sleep(60)
        assert house.connections == 2
        await line.ping()
        await call.leave(Leave.STREAM)


@pytest.mark.parametrize(("number", "enough"), [(REQUESTS_AT_ONCE, True), (REQUESTS_AT_ONCE + 1, False)])
async def test_a_turn_takes_a_whole_batch_of_requests_with_their_bodies(
    number: int, enough: bool, monkeypatch: pytest.MonkeyPatch, autojump_clock: Any
) -> None:
    more, whole = [], Connection._not_enough
    monkeypatch.setattr(Connection, "_not_enough", lambda self: (more.append(self), whole(self)))
    async with serving(Probe(silent, "tensors").spec("v2-http2")) as house:
        line = house.line("http2")
        await line.read()
        streams = [line.next_stream() for _ in range(number)]
        for stream in streams:
            line.machine.send(raw(stream, b"POST", "/v2/models/none/infer"))
            line.machine.send(Data(stream=stream, buffers=(b"{}",)))
            line.machine.send(End(stream=stream))
        await line.peer.flush()
        assert [(await line.event(stream)).status for stream in streams] == [404] * number
    assert bool(more) is not enough


async def connected(house: House, streams: int) -> Connection:
    """A connection with so many calls that wait for their model."""
    line = house.line("http2")
    for _ in range(streams):
        await bidi_call(house, line)
    await house.still()
    (connection,) = house.gateway.server.connections
    assert isinstance(connection, Connection)
    return connection


def ended_by_a_flood(connection: Connection) -> None:
    assert isinstance(connection.wire, HTTP2Wire)
    connection.wire._verdict(Flood(kind="ping", count=1, seconds=1.0))


def broken_by_its_client(connection: Connection) -> None:
    connection.wire.receive_data(memoryview(b"\0\0\1\0\0\0\0\0\0x"))  # DATA of no stream
    with pytest.raises(RemoteProtocolError) as found:
        connection.wire.pump(1000, trio.current_time() + 1.0)
    connection.wire.protocol_error(found.value)


@pytest.mark.parametrize(
    ("end", "ending"),
    [(Connection.lost, "transport-lost"), (ended_by_a_flood, "refused"), (broken_by_its_client, "refused")],
)
async def test_the_streams_of_a_connection_that_ends_are_cancelled_some_in_each_turn(
    end: Callable[[Connection], None], ending: str, autojump_clock: Any
) -> None:
    probe, streams = Probe(silent), 100
    async with serving(probe.spec("bidi", capacity=streams)) as house:
        connection = await connected(house, streams)
        end(connection)
        assert sum(exchange.gone for exchange in connection.exchanges.values()) == 32
        await house.still()
        assert house.endings == {ending: streams}
        assert (probe.live, probe.stopped) == (0, streams)


async def test_streams_of_a_flood_whose_client_hangs_up_meanwhile_are_refused_all_the_same(autojump_clock: Any) -> None:
    probe, streams = Probe(silent), 100
    async with serving(probe.spec("bidi", capacity=streams)) as house:
        connection = await connected(house, streams)
        ended_by_a_flood(connection)
        connection.lost()
        await house.still()
        assert house.endings == {"refused": streams}
