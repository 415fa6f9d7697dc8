"""A client that stops reading stops its model, a model that stops reading stops its client, and nobody else waits."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import trio

from gateway import client
from gateway.config import Config, HTTP2Config, LimitsConfig
from gateway.containers.connection import ContainerLimits
from gateway.core.exchange import Exchange
from gateway.core.route import Row
from gateway.errors import BadRequest
from gateway.testing.stories.talk import Leave
from models.messages import Family, Part
from models.session import Session
from protocols.aws import bidi
from protocols.events import Data, End, Frame, Opcode
from tests.gateway.promises import (
    DUPLEX,
    PADDING,
    PAYLOAD,
    STREAMS,
    WIRE,
    WIRES,
    DuplexCall,
    EventsCall,
    House,
    KiB,
    Over,
    Probe,
    SocketCall,
    answering,
    at_once,
    counting,
    deaf,
    echoing,
    pausing,
    raw,
    serving,
    silent,
)

CAPACITY = 32 * KiB
SEND_BUFFER = LimitsConfig().send_buffer
READ_AHEAD = LimitsConfig().read_ahead
WINDOW = HTTP2Config().initial_window
# Bytes that framing adds to a message's payload, at least and at most: a line's keys and a chunk's ends, an event's headers,
# frame heads, a third for base64.
LINE, EVENT, RAW, BASE64 = (60, 110), (80, 180), (0, 20), (334, 350)
REPLY = (100, 160)  # a v2 response in JSON, with all fields of an output
FRAMING = {
    "lmi": (LINE,),
    "bidi": (EVENT,),
    "websocket": ((4, 10),),
    "stream": (LINE, EVENT),
    "streamparts": (EVENT,),
    "invoke": (LINE,),
    "invokeparts": (RAW,),
    "container": (RAW,),
    "mme": (RAW,),
    "bidi-json": (BASE64, EVENT),
    "bidi-literal": (BASE64, (40, 100)),
    "bidi-signed": (EVENT,),
    "bidi-padded": (EVENT, (0, PADDING + 10)),
    "websocket-anywhere": ((4, 10),),
    "bridge": (EVENT,),
    "inferstream": (REPLY,),
    "inferframes": ((20, 80),),  # numbers are shorter in binary
    "generatestream": (LINE,),
    "v2session": (REPLY,),
    "grpcstream": ((-50, 0),),  # numbers are shorter in binary, and its framing too
}
# Bytes that a bridge holds beyond those of its platform's side: the container's transport and queue, and the frames between,
# where one read may exceed the bound.
BRIDGE = CAPACITY + SEND_BUFFER + ContainerLimits().read_ahead + 64 * KiB


def messages(wire: str, held: int) -> tuple[int, int]:
    """How many numbered messages fill `held` bytes, at least and at most. A message is let in while a byte estimate of
    it fits, so that one may reach beyond."""
    framing = FRAMING[wire.removesuffix(f"-{WIRE[wire].transport}")]
    least, most = sum(low for low, _ in framing), sum(high for _, high in framing)
    return held // (PAYLOAD + most) - 1, held // (PAYLOAD + least) + 2


@pytest.mark.parametrize("wire", STREAMS)
async def test_a_client_that_reads_nothing_stops_its_model_within_the_bound(wire: str, autojump_clock: Any) -> None:
    # produced <= (what the kernel's buffers hold + limits.send_buffer, which counts the write under way) / message
    probe = Probe(counting)
    between = BRIDGE if wire == "bridge" else 0
    least, most = messages(wire, SEND_BUFFER)[0], messages(wire, CAPACITY + SEND_BUFFER + between)[1]
    async with serving(probe.spec(wire), capacity=CAPACITY, wire=wire) as house:
        call = await house.call(wire)
        await house.still()
        assert least <= probe.sent <= most
        produced = probe.sent
        await trio.sleep(20)  # below limits.write_stall
        assert probe.sent == produced

        assert await call.take(produced + 500) == list(range(produced + 500))
        # messages that the client has read, and not taken: whole ones, the beginning of one, and those in its machine
        sent, whole, rest = probe.sent, len(call._numbers), PAYLOAD
        while isinstance(event := call.line.machine.next_event(), Data | Frame):
            rest += len(event.buffers[0] if isinstance(event, Data) else event.data)
        assert sent <= produced + 500 + whole + messages(wire, rest + CAPACITY + SEND_BUFFER + between)[1]
        await call.leave(Leave.CLOSE)


OF_HTTP2 = [w for w in STREAMS if WIRE[w].transport == "http2" and w != "bridge"]


@pytest.mark.parametrize("wire", OF_HTTP2)
async def test_a_client_that_gives_no_credit_stops_its_model_within_the_bound(wire: str, autojump_clock: Any) -> None:
    # produced <= (the client's window + limits.send_buffer) / message; the connection itself is read all the time
    probe, beside = Probe(counting), "bidi-signed" if wire == "bidi-signed" else "bidi"
    least, most = messages(wire, SEND_BUFFER)[0], messages(wire, WINDOW + SEND_BUFFER)[1]
    async with serving(probe.spec(wire), Probe(echoing, "other").spec(beside), wire=wire) as house:
        line = house.line("http2")
        call = await house.call(wire, line=line)
        await line.read()
        assert least <= probe.sent <= most
        await line.ping()
        await other_streams_go_on(house, line, beside)
        produced = probe.sent

        assert await call.take(produced + 200) == list(range(produced + 200))
        await call.leave(Leave.STREAM)


async def other_streams_go_on(house: House, line: Any, wire: str) -> None:
    with at_once():
        other = await house.call(wire, "other", line=line)
        assert isinstance(other, EventsCall)
        for number in range(3):
            await other.say()
            assert await other.next() == number
        await other.hush()
        assert await other.rest() == ([], Over("complete"))


@pytest.mark.parametrize("stalled", [4, 8])
async def test_stalled_streams_do_not_hold_the_large_messages_of_another(stalled: int, autojump_clock: Any) -> None:
    # together they queue more than limits.connection_send_buffer; a message larger than the share must still get out
    async def large(probe: Probe, session: Session[Any, Part]) -> None:
        async for _ in session:
            await session.send(Part(data=b"00000007" + bytes(40 * KiB)))

    other = Probe(large, "other")
    async with serving(Probe(counting).spec("bidi"), other.spec("bidi")) as house:
        line = house.line("http2")
        calls = [await house.call("bidi", line=line) for _ in range(stalled)]
        await line.read()
        with at_once():
            lively = await house.call("bidi", "other", line=line)
            assert isinstance(lively, EventsCall)
            for _ in range(3):
                await lively.say()
                assert await lively.next() == 7
            await lively.hush()
            assert await lively.rest() == ([], Over("complete"))
        for call in calls:
            await call.leave(Leave.STREAM)


async def test_a_message_larger_than_the_send_buffer_is_charged_until_it_has_left(autojump_clock: Any) -> None:
    size = 1024 * KiB

    async def one_large(probe: Probe, session: Session[Any, Part]) -> None:
        await session.send(Part(data=bytes(size)))
        probe.sent += 1
        await session.send(Part(data=b"after"))
        await probe.go.wait()

    probe = Probe(one_large)
    async with serving(probe.spec("websocket")) as house:
        call = await house.call("websocket")
        await house.still()
        assert probe.sent == 1
        assert house.gateway.budget.used == size
        for _ in range(2):
            await call.line.event(1)
        await house.still()
        assert house.gateway.budget.used == 0
        probe.go.set()
        assert await call.rest() == ([], Over("complete", code="1000"))


@pytest.mark.parametrize("wire", [w for w in DUPLEX if w in OF_HTTP2])
async def test_a_model_that_reads_nothing_closes_its_own_window_and_no_other(wire: str, autojump_clock: Any) -> None:
    model = Probe(deaf)
    async with serving(model.spec(wire), Probe(echoing, "other").spec(wire), wire=wire) as house:
        line = house.line("http2")
        call = await house.call(wire, line=line)
        assert isinstance(call, EventsCall)
        await line.read()  # the server's SETTINGS
        for _ in range(40):
            await call.say(16 * KiB)
        await line.read()
        (connection,) = house.gateway.server.connections
        machine = connection.wire._machine  # type: ignore[attr-defined]
        assert machine.unconsumed == WINDOW
        assert line.machine.queued(1) > 40 * 16 * KiB - WINDOW  # type: ignore[attr-defined]  # the rest waits in the client
        await line.ping()
        await other_streams_go_on(house, line, wire)

        model.go.set()
        await call.hush()
        assert await call.rest() == ([], Over("complete"))
        assert model.received == list(range(40))


async def test_a_container_that_reads_nothing_stops_the_platforms_client(autojump_clock: Any) -> None:
    model = Probe(deaf)
    async with serving(model.spec("bridge"), capacity=CAPACITY, wire="bridge") as house:
        call = await house.call("bridge")
        assert isinstance(call, EventsCall)
        await call.line.read()  # the server's SETTINGS
        for _ in range(60):
            await call.say(16 * KiB)
        await call.line.read()
        waiting = call.line.machine.queued(1)  # type: ignore[attr-defined]
        # our window, one part that the bridge could not write, its transport, and what the container reads ahead
        assert 60 * 16 * KiB - (HTTP2Config().max_window + 32 * KiB + CAPACITY + READ_AHEAD + 64 * KiB) < waiting
        await call.line.ping()
        model.go.set()
        await call.line.read()
        assert model.received == list(range(60))
        await call.leave(Leave.STREAM)


@pytest.mark.parametrize("wire", ["websocket", "websocket-anywhere"])
async def test_a_websocket_is_read_ahead_to_its_bound_and_no_further(wire: str, autojump_clock: Any) -> None:
    model, part = Probe(deaf), 16 * KiB
    async with serving(model.spec(wire), capacity=CAPACITY, wire=wire) as house:
        call = await house.call(wire)
        assert isinstance(call, SocketCall)
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def offer() -> None:
                for _ in range(40):
                    await call.say(part)

            await house.still()
            (connection,) = house.gateway.server.connections
            machine = connection.wire._machine  # type: ignore[attr-defined]
            (exchange,) = connection.exchanges.values()
            held = machine.unconsumed + machine.unread + exchange.open_inbound().waiting
            assert READ_AHEAD <= held < READ_AHEAD + 64 * KiB  # one read reaches beyond
            assert house.gateway.budget.used == machine.unconsumed + exchange.open_inbound().waiting
            assert connection.reading_paused
            model.go.set()
        await house.still()
        assert model.received == list(range(40))
        assert machine.unconsumed == 0
        await call.leave(Leave.STREAM)


EMPTY = Frame(opcode=Opcode.BINARY, fin=True, data=b"")


async def test_a_frame_that_is_larger_than_what_is_read_ahead_arrives(autojump_clock: Any) -> None:
    probe = Probe(echoing)
    config = Config(limits=LimitsConfig(read_ahead=KiB))
    async with serving(probe.spec("websocket"), config=config, capacity=4 * KiB, wire="websocket") as house:
        call = await house.call("websocket")
        assert isinstance(call, SocketCall)
        for _ in range(3):
            await call.say(40 * KiB)
            assert await call.next() == probe.sent - 1
        assert probe.received == [0, 1, 2]
        await call.leave(Leave.STREAM)


@pytest.mark.parametrize("part", ["head", "trailers"])
async def test_what_comes_only_whole_may_be_larger_than_what_is_read_ahead(part: str, autojump_clock: Any) -> None:
    probe = Probe(answering)
    probe.go.set()
    config = Config(limits=LimitsConfig(read_ahead=KiB))
    large = b"x: " + b"y" * 2000 + b"\r\n"
    head = b"POST /models/probe/invoke HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n"
    async with serving(probe.spec("container-http1"), config=config, capacity=KiB, wire="container-http1") as house:
        line = house.line("http1")
        data = head + large * (part == "head") + b"\r\n2\r\nhi\r\n0\r\n" + large * (part == "trailers") + b"\r\n"
        rest = memoryview(data)
        with at_once():
            while rest:
                sent = line.transport.try_send([rest])
                assert sent, "nobody reads on"
                rest = rest[sent:]
                await house.still()
            assert probe.returned == 1
        line.reset()


async def test_a_run_of_empty_frames_is_read_ahead_to_the_same_bound(autojump_clock: Any) -> None:
    # a frame without bytes costs its objects and a place in the queue
    async def unheard(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.go.wait()
        probe.received = [len(part.data) async for part in session]

    model, offered = Probe(unheard), 0
    async with serving(model.spec("websocket"), capacity=CAPACITY) as house:
        call = await house.call("websocket")
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def offer() -> None:
                nonlocal offered
                while offered < 200_000:
                    for _ in range(1000):
                        call.line.machine.send(EMPTY)
                    offered += 1000
                    await call.line.peer.flush()

            await house.still()
            (connection,) = house.gateway.server.connections
            (exchange,) = connection.exchanges.values()
            assert connection.reading_paused
            frames = (64 * KiB) // 6  # the frames of one read, which may exceed the bound
            inbound = exchange.inbound
            assert inbound is not None
            assert READ_AHEAD <= inbound.waiting <= READ_AHEAD + frames * inbound.waiting // len(inbound._arrived)
            assert house.gateway.budget.used == exchange.held == inbound.waiting
            nursery.cancel_scope.cancel()
            model.go.set()
        await call.line.peer.flush()
        await house.still()
        assert exchange.held == house.gateway.budget.used == 0
        await call.leave(Leave.STREAM)


@pytest.mark.parametrize("wire", [w for w in STREAMS if WIRE[w].family is Family.PARTS])
async def test_a_run_of_empty_parts_stops_at_a_client_that_reads_nothing(wire: str, autojump_clock: Any) -> None:
    # on the wires where an empty part is something; a body as it is has no bytes for it, so its model goes on for ever
    async def empties(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        while probe.sent < MOST:
            await session.send(Part(data=b""))
            probe.sent += 1

    probe, body = Probe(empties), WIRE[wire].in_band == "cut" or wire.startswith("streamparts")
    async with serving(probe.spec(wire), capacity=CAPACITY, wire=wire) as house:
        call = await house.call(wire)
        await house.still()
        if body:
            assert probe.sent == MOST
            assert await call.rest() == ([], Over("complete"))
        else:
            assert 0 < probe.sent < MOST
            await call.leave(Leave.RESET)


MOST = 200_000
"""Two bytes are the least that an empty part takes: more of them than all bounds together."""


async def test_a_chunked_upload_is_read_ahead_to_its_bound_and_no_further(autojump_clock: Any) -> None:
    go, received = trio.Event(), bytearray()

    async def slow(exchange: Exchange) -> None:
        await go.wait()
        while (piece := await exchange.open_inbound().receive()) is not None:
            assert not isinstance(piece, Frame)
            received.extend(piece)
        exchange.outbound.respond(200, [])

    async with serving(capacity=CAPACITY) as house:
        house.gateway.router.add(Row("POST", "/slow", slow))
        line = house.line("http1")
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def upload() -> None:
                await line.send(raw(1, b"POST", "/slow"))
                for number in range(40):
                    await line.send(Data(stream=1, buffers=(bytes((number,)) * 16 * KiB,)))
                await line.send(End(stream=1))

            await house.still()
            (connection,) = house.gateway.server.connections
            machine = connection.wire._machine  # type: ignore[attr-defined]
            (exchange,) = connection.exchanges.values()
            assert (
                READ_AHEAD <= machine.unconsumed + machine.unread + exchange.open_inbound().waiting < READ_AHEAD + 64 * KiB
            )
            assert house.gateway.budget.used == machine.unconsumed + exchange.open_inbound().waiting
            go.set()
        assert (await line.peer.read_answer(1))[0] == 200
        assert received == b"".join(bytes((number,)) * 16 * KiB for number in range(40))


async def test_requests_pipelined_behind_a_waiting_one_are_read_to_the_bound_and_no_further(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("lmi-http1"), capacity=CAPACITY) as house:
        call = await house.call("lmi-http1")
        transport = call.line.transport
        sent = 0
        while (n := transport.try_send([b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n" * 100])) or sent == 0:
            sent += n
            await house.still()
        assert READ_AHEAD <= sent < READ_AHEAD + 64 * KiB + CAPACITY
        await call.leave(Leave.CLOSE)
        await trio.sleep(2)  # the reader had stopped: the coarse timer looks for a hang-up
        assert house.endings == {"cancelled-by-client": 1}


@pytest.mark.parametrize("data", [np.arange(500, dtype=np.int32), np.zeros((20, 30), np.float64)], ids=["int32", "2d"])
@pytest.mark.parametrize("wire", ["bidi", "websocket"])
async def test_a_part_may_be_any_memory(wire: str, data: Any, autojump_clock: Any) -> None:
    async def arrays(probe: Probe, session: Session[Any, Any]) -> None:
        await session.send(Part(data=b"00000000" + data.tobytes()))
        await session.send(Part(data=b""))
        await session.send(Part(data=memoryview(data)))

    async with serving(Probe(arrays).spec(wire)) as house:
        call = await house.call(wire)
        received: list[bytes] = []
        if isinstance(call, EventsCall):
            decoder = bidi.ResponseDecoder()
            while not isinstance(event := await call.line.event(1), End):
                if isinstance(event, Data):
                    decoder.receive_data(event.buffers[0])
                    while isinstance(part := decoder.next_event(), bidi.PayloadPart):
                        received.append(bytes(part.data))
        else:
            while isinstance(event := await call.line.event(1), Frame):
                received.append(bytes(event.data))
        assert received == [b"00000000" + data.tobytes(), b"", data.tobytes()]


@pytest.mark.parametrize("wire", WIRES)
async def test_a_transport_that_holds_one_byte_changes_nothing(wire: str, autojump_clock: Any) -> None:
    script = pausing if wire in STREAMS else answering
    probe = Probe(script)
    probe.go.set()
    async with serving(probe.spec(wire), capacity=1, wire=wire) as house:
        call = await house.call(wire)
        numbers, over = await call.rest()
        assert (numbers, over.how) == (list(range(6)) if wire in STREAMS else [], "complete")
        await call.line.read()  # bytes behind the end
        assert house.endings == {"complete": 1}


@pytest.mark.parametrize("wire", DUPLEX)
async def test_many_sessions_at_once_are_each_whole(wire: str, autojump_clock: Any) -> None:
    # echoes, on one connection where the wire can; each message out is the one that came in
    async def echo(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        async for part in session:
            await session.send(part)

    async with serving(Probe(echo).spec(wire), capacity=CAPACITY, wire=wire) as house:
        line = house.line("http2") if WIRE[wire].transport == "http2" else None
        calls = [await house.call(wire, line=line) for _ in range(50)]
        for size in range(0, 3000, 300):
            for call in calls:
                assert isinstance(call, DuplexCall)
                await call.say(size)
        for call in calls:
            assert await call.take(10) == list(range(10))
        for call in calls:
            await call.leave(Leave.STREAM)
        await house.still()
        assert house.endings == {"cancelled-by-client": 50}


async def test_two_ends_with_full_buffers_do_not_wait_for_each_other(autojump_clock: Any) -> None:
    # an echo whose client writes without reading stops at every bound at once, and moves on when the client reads
    probe = Probe(echoing)
    async with serving(probe.spec("bidi"), capacity=CAPACITY) as house:
        call = await house.call("bidi")
        assert isinstance(call, EventsCall)
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def talk() -> None:
                for _ in range(1000):
                    await call.say()
                await call.hush()

            await house.still()
            assert probe.sent < 1000
            assert await call.rest() == (list(range(1000)), Over("complete"))


async def test_a_slow_client_costs_its_neighbour_on_another_connection_nothing(autojump_clock: Any) -> None:
    slow, quick = Probe(counting), Probe(answering, "quick")
    quick.go.set()
    async with serving(slow.spec("lmi-http1"), quick.spec("lmi-http1"), config=Config()) as house:
        call = await house.call("lmi-http1")
        await house.still()
        with at_once():
            neighbour = await house.call("lmi-http1", "quick")
            assert await neighbour.rest() == ([0], Over("complete"))
        await call.leave(Leave.RESET)


async def test_a_window_of_tiny_frames_holds_about_what_the_window_says(autojump_clock: Any) -> None:
    async def unheard(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.go.wait()
        with suppress(BadRequest):
            await session.receive()

    model = Probe(unheard)
    async with serving(model.spec("bidi")) as house:
        peer = house.memory.http2()
        head = [(b"content-type", bidi.CONTENT_TYPE.encode())]
        await peer.send(*client.post(1, "/endpoints/probe/invocations-bidirectional-stream", None, head))
        for _ in range(10_000):
            await peer.send(Data(stream=1, buffers=(b"ab",)))
        await house.still()
        (connection,) = house.gateway.server.connections
        (exchange,) = connection.exchanges.values()
        inbound: Any = exchange.inbound
        waiting = [*inbound._taking, *inbound._arrived]
        assert b"".join(waiting) == b"ab" * 10_000
        assert len(waiting) <= 20_000 // 256, "pieces of less than 512 bytes are put together"
        model.go.set()
        await house.still()
        peer.close()
