"""Every limit acts in its own words and its own time, holds nothing afterwards, and touches nobody else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trio

from gateway import client
from gateway.config import BidiConfig, Config, LimitsConfig, WebSocketConfig
from gateway.errors import Ending
from gateway.testing import memory_gateway
from gateway.testing.stories.talk import Leave
from models.messages import FinishReason, Prompt, Token
from protocols.events import ConnectionEnd, Data, End, Frame, Opcode, Reset, Response
from tests.gateway.promises import (
    CANCELLED,
    STREAMS,
    WIRE,
    DuplexCall,
    EventsCall,
    KiB,
    Line,
    Over,
    Probe,
    SocketCall,
    answering,
    at_once,
    counting,
    deaf,
    echoing,
    limits,
    pausing,
    raw,
    serving,
    silent,
)

MiB = 1024 * KiB
TICK = 1.0
EXPECT = [(b"expect", b"100-continue")]
TRANSPORTS = ("http1", "http2")
UPLOADS = [("/predictions/probe", "lmi-http1", "limits.text_json"), ("/v2/models/probe/infer", "v2-http1", "limits.body")]


async def ends(line: Line, seconds: float) -> None:
    """Checks that the server ends the connection after `seconds`, at most two ticks of the timer later."""
    began = trio.current_time()
    await line.over_raw()
    line.peer.close()
    assert seconds < trio.current_time() - began <= seconds + 2 * TICK


# -- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("allowed", "status"), [({}, 404), ({"fields": 9}, 431), ({"head": 1300}, 431)])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_head_may_be_what_is_set_and_no_more(
    transport: str, allowed: dict[str, int], status: int, autojump_clock: Any
) -> None:
    fields = [(b"x-%d" % n, b"-" * 60) for n in range(20)]
    async with memory_gateway([], config=limits(**allowed)) as served:
        peer: client.Peer = getattr(served, transport)()
        await peer.send(raw(1, b"GET", "/none", headers=fields), End(stream=1))
        assert (await peer.read_answer(1))[0] == status
        peer.close()


# -- bodies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expects", [False, True], ids=["", "expect"])
@pytest.mark.parametrize(("path", "wire", "setting"), UPLOADS)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_declared_body_over_its_limit_is_refused_before_a_byte_of_it_is_sent(
    transport: str, path: str, wire: str, setting: str, expects: bool, autojump_clock: Any
) -> None:
    probe = Probe(silent)
    async with serving(probe.spec(wire), config=limits(text_json=10 * KiB, body=20 * KiB)) as house:
        line = house.line(transport)
        with at_once():
            headers = EXPECT if expects else []
            await line.send(raw(1, b"POST", path, content_length=30 * KiB, expects_continue=expects, headers=headers))
            status, _, body = await line.peer.read_answer(1)
        assert (status, setting.encode() in body) == (413, True)
        assert b"100 Continue" not in line.transport.read
        assert house.gateway.budget.high_water <= 64 * KiB  # a window, where the wire has one
        assert house.endings == {"refused": 1}


@pytest.mark.parametrize(("path", "wire", "setting"), UPLOADS)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_body_of_unknown_length_is_refused_at_its_limit(
    transport: str, path: str, wire: str, setting: str, autojump_clock: Any
) -> None:
    async with serving(Probe(silent).spec(wire), config=limits(text_json=10 * KiB, body=10 * KiB)) as house:
        line = house.line(transport)
        await line.send(raw(1, b"POST", path), Data(stream=1, buffers=(bytes(10 * KiB),)))
        await house.still()
        assert house.gateway.counts().exchanges == 1  # not yet
        await line.send(Data(stream=1, buffers=(b"x",)))
        status, _, body = await line.peer.read_answer(1)
        assert (status, setting.encode() in body) == (413, True)
        assert house.endings == {"refused": 1}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_client_that_asks_first_is_told_to_go_on(transport: str, autojump_clock: Any) -> None:
    probe = Probe(answering)
    probe.go.set()
    body = b'{"inputs": "x"}'
    async with serving(probe.spec("json-http1")) as house:
        line = house.line(transport)
        await line.send(raw(1, b"POST", "/predictions/probe", content_length=len(body), headers=EXPECT))
        told = await line.event(1)
        assert isinstance(told, Response)
        assert told.status == 100
        await line.send(Data(stream=1, buffers=(body,)), End(stream=1))
        assert (await line.peer.read_answer(1))[0] == 200


@pytest.mark.parametrize("known", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_body_that_the_budget_cannot_hold_is_refused_and_nothing_is_held(
    transport: str, known: bool, autojump_clock: Any
) -> None:
    async with serving(Probe(silent).spec("v2-http1"), config=limits(body=1 * MiB, total_bytes=512 * KiB)) as house:
        line = house.line(transport)
        size = 600 * KiB
        await line.send(raw(1, b"POST", "/v2/models/probe/infer", content_length=size if known else None))
        async with trio.open_nursery() as nursery:
            if not known:
                nursery.start_soon(line.send, Data(stream=1, buffers=(bytes(size),)))
            status, _, body = await line.peer.read_answer(1)
            nursery.cancel_scope.cancel()
        assert (status, b"limits.total_bytes" in body) == (503, True)
        await house.still()
        assert house.gateway.budget.used == 0
        assert house.endings == {"refused": 1}


async def test_uploads_that_fill_the_budget_finish_and_the_one_too_many_does_not_wait(autojump_clock: Any) -> None:
    probe = Probe(answering)
    probe.go.set()
    body = infer_body(150 * KiB)
    config = limits(body=1 * MiB, total_bytes=512 * KiB, party_share=100, memory_refuse=100)
    async with serving(probe.spec("v2-http1"), config=config) as house:
        lines = [house.line("http1") for _ in range(4)]
        for line in lines:
            await line.send(raw(1, b"POST", "/v2/models/probe/infer", content_length=len(body), headers=BINARY))
            await house.still()
        assert house.gateway.budget.used == 0, "what is only announced takes nothing"
        for line in lines:
            await line.send(Data(stream=1, buffers=(body[:-1],)))
            await house.still()
        with at_once():
            assert (await lines[3].peer.read_answer(1))[0] == 503
        for line in lines[:3]:
            await line.send(Data(stream=1, buffers=(body[-1:],)), End(stream=1))
            assert (await line.peer.read_answer(1))[0] == 200
        assert house.endings == {"refused": 1, "complete": 3}


def infer_body(size: int) -> bytes:
    head = b'{"inputs":[{"name":"x","shape":[%d],"datatype":"UINT8","parameters":{"binary_data_size":%d}}]}' % (size, size)
    return head.ljust(JSON_LENGTH) + np.zeros(size, np.uint8).tobytes()


JSON_LENGTH = 200
BINARY = [(b"inference-header-content-length", b"%d" % JSON_LENGTH)]


@pytest.mark.parametrize("size", [100, 10 * KiB, 300 * KiB])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_body_counts_until_its_answer_is_written(transport: str, size: int, autojump_clock: Any) -> None:
    probe, body = Probe(answering), infer_body(size)
    async with serving(probe.spec("v2-http1")) as house:
        line = house.line(transport)
        head = raw(1, b"POST", "/v2/models/probe/infer", content_length=len(body), headers=BINARY)
        await line.send(head, Data(stream=1, buffers=(body,)), End(stream=1))
        await line.read()
        assert probe.live == 1
        (exchange,) = house.gateway.observer.live
        assert len(body) <= exchange.held <= house.gateway.budget.used
        probe.go.set()
        assert (await line.peer.read_answer(1))[0] == 200


async def test_above_the_first_watermark_nothing_new_begins(autojump_clock: Any) -> None:
    probe = Probe(deaf)
    async with serving(probe.spec("websocket"), config=limits(total_bytes=200 * KiB, party_share=100)) as house:
        call = await house.call("websocket")
        assert isinstance(call, SocketCall)
        for _ in range(3):
            await call.say(55 * KiB)
        await house.still()
        assert 165 * KiB <= house.gateway.budget.used < 166 * KiB
        line = house.line("http1")
        await line.send(raw(1, b"GET", "/v2"), End(stream=1))
        status, _, body = await line.peer.read_answer(1)
        assert (status, b"limits.memory_refuse" in body) == (503, True)
        probe.go.set()
        await house.still()
        await line.send(raw(2, b"GET", "/v2"), End(stream=2))
        assert (await line.peer.read_answer(2))[0] == 200
        await call.leave(Leave.STREAM)


async def test_above_the_second_watermark_the_largest_makes_room(autojump_clock: Any) -> None:
    probe = Probe(deaf)
    async with serving(probe.spec("websocket"), config=limits(total_bytes=200 * KiB)) as house:
        small, large = await house.call("websocket"), await house.call("websocket")
        assert isinstance(small, SocketCall)
        assert isinstance(large, SocketCall)
        await small.say(40 * KiB)
        for _ in range(3):
            await large.say(50 * KiB)
        await trio.sleep(2 * TICK)
        numbers, over = await large.rest()
        assert (numbers, over.how, over.code) == ([], "error", "1013")
        assert house.endings == {"refused": 1}
        probe.go.set()
        await house.still()
        assert probe.received == [0]
        await small.leave(Leave.STREAM)


# -- heads, silence, idleness ------------------------------------------------------------------------------------------

HEAD = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("said", [b"", b"G", HEAD[:-2], b"PRI * HTTP/2.0\r\n"], ids=["nothing", "a byte", "most", "PRI"])
async def test_a_head_that_is_not_complete_in_time_ends_its_connection(said: bytes, autojump_clock: Any) -> None:
    async with serving() as house:
        line = house.line("http1")
        if said:
            line.transport.try_send([said])
        began = trio.current_time()
        await line.over_raw()
        assert 10 <= trio.current_time() - began <= 10 + 2 * TICK
        assert house.endings == {}


async def test_a_head_that_drips_ends_its_connection(autojump_clock: Any) -> None:
    async with serving() as house:
        line = house.line("http1")
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def drip() -> None:
                for byte in HEAD:
                    line.transport.try_send([bytes((byte,))])
                    await trio.sleep(0.9)

            await ends(line, 10)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("idle", [30, 60, 74])
async def test_a_head_on_a_kept_connection_has_its_time_from_its_own_first_byte(idle: float, autojump_clock: Any) -> None:
    async with serving() as house:
        line = house.line("http1")
        for _ in range(2):
            line.transport.try_send([HEAD[:10]])
            await trio.sleep(9)
            line.transport.try_send([HEAD[10:]])
            await house.still()
            assert sum(house.endings.values()) == 1
            house.gateway.observer.endings.clear()
            await trio.sleep(idle)
        line.transport.try_send([HEAD[:10]])
        await ends(line, 10)


async def test_an_idle_connection_is_closed_after_its_time(autojump_clock: Any) -> None:
    async with serving() as house:
        line = house.line("http1")
        line.transport.try_send([HEAD])
        await ends(line, 75)


async def test_a_long_answer_is_not_idleness(autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec("lmi-http1")) as house:
        line = house.line("http1")
        call = await house.call("lmi-http1", line=line)
        await call.take(3)
        await trio.sleep(300)
        probe.go.set()
        assert (await call.rest())[1] == Over("complete")
        await trio.sleep(70)
        again = await house.call("lmi-http1", line=line)
        assert (await again.rest())[1] == Over("complete")


async def test_an_answer_that_was_long_under_way_is_not_idleness_either(autojump_clock: Any) -> None:
    async def brief(probe: Probe, session: Any) -> None:
        await probe.take(session)
        await probe.say(session, 20)

    probe = Probe(brief)
    async with serving(probe.spec("lmi-http1"), capacity=100) as house:
        line = house.line("http1")
        call = await house.call("lmi-http1", line=line)
        for number in range(19):
            await trio.sleep(10)
            assert await call.next() == number
        assert probe.returned == 1
        assert (await call.rest())[1] == Over("complete")
        await trio.sleep(70)
        await line.send(raw(2, b"GET", "/v2/health/live"), End(stream=2))
        assert (await line.peer.read_answer(2))[0] == 200


async def test_a_model_that_tidies_up_after_its_answer_keeps_its_connection(autojump_clock: Any) -> None:
    async def tidy(probe: Probe, session: Any) -> None:
        await probe.take(session)
        await session.send(Token(text=f"{0:08d}", finish=FinishReason.LENGTH))  # it ends its text, and so is not stopped
        await trio.sleep(100)

    async with serving(Probe(tidy).spec("lmi-http1")) as house:
        line = house.line("http1")
        call = await house.call("lmi-http1", line=line, upto=1)
        assert await call.rest() == ([0], Over("complete"))
        await trio.sleep(110)
        line.transport.try_send([HEAD])
        await house.still()
        assert house.endings == {"complete": 2}


@pytest.mark.parametrize("known", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_body_that_falls_silent_is_a_408(transport: str, known: bool, autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("v2-http1")) as house:
        line = house.line(transport)
        head = raw(1, b"POST", "/v2/models/probe/infer", content_length=100 * KiB if known else None)
        await line.send(head, Data(stream=1, buffers=(bytes(50 * KiB),)))
        began = trio.current_time()
        status, _, body = await line.peer.read_answer(1)
        assert (status, b"limits.body_silence" in body) == (408, True)
        assert 30 < trio.current_time() - began <= 30 + TICK
        assert house.endings == {"refused": 1}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_body_that_drips_is_a_408_and_a_slow_one_is_not(transport: str, autojump_clock: Any) -> None:
    async def upload(line: Line, rate: int) -> int:
        await line.send(raw(1, b"POST", "/v2/models/probe/infer", content_length=48 * KiB))
        for _ in range(0, 48 * KiB, rate):
            if not await still_open(line):
                break
            await line.send(Data(stream=1, buffers=(bytes(rate),)))
            await trio.sleep(1)
        else:
            await line.send(End(stream=1))
        return (await line.peer.read_answer(1))[0]

    async def still_open(line: Line) -> bool:
        await house.still()
        return not house.endings

    async with serving(Probe(silent).spec("v2-http1")) as house:
        assert await upload(house.line(transport), 100) == 408
        house.gateway.observer.endings.clear()
        assert await upload(house.line(transport), 2 * KiB) == 400  # whole, and no JSON


@pytest.mark.parametrize("wire", ["bidi", "websocket"])
async def test_a_stream_may_be_as_silent_as_it_likes(wire: str, autojump_clock: Any) -> None:
    probe = Probe(echoing)
    async with serving(probe.spec(wire)) as house:
        call = await house.call(wire)
        assert isinstance(call, DuplexCall)
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def talk() -> None:
                for _ in range(5):
                    await trio.sleep(200)
                    await call.say()

            nursery.start_soon(give_up_after, nursery, 990)
            assert await call.take(4) == [0, 1, 2, 3]
            nursery.cancel_scope.cancel()
        await call.leave(Leave.CLOSE)


LARGE_FRAME = b"\x82\xff" + (1 * MiB).to_bytes(8, "big") + bytes(4)
BEGUN = {
    "a header": LARGE_FRAME[:5],
    "a length": LARGE_FRAME,
    "some of it": LARGE_FRAME + b"0" * (100 * KiB),
    "a ping": b"\x89",
}


@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
async def test_a_frame_that_begins_and_does_not_come_ends_its_session(begun: bytes, autojump_clock: Any) -> None:
    config = Config(websocket=WebSocketConfig(ping_interval=0))
    async with serving(Probe(echoing).spec("websocket"), config=config) as house:
        call = await house.call("websocket")
        await trio.sleep(100)
        call.line.transport.try_send([begun])
        began = trio.current_time()
        _, over = await call.rest()
        assert (over.how, over.code, "limits.body_silence" in over.text) == ("error", "1008", True)
        assert 30 < trio.current_time() - began <= 30 + 2 * TICK
        call.line.peer.close()
        await house.still()
        assert house.endings == {"refused": 1}


async def test_a_frame_that_drips_ends_its_session_and_a_slow_one_does_not(autojump_clock: Any) -> None:
    config = Config(websocket=WebSocketConfig(ping_interval=0))
    probe = Probe(deaf)
    probe.go.set()
    async with serving(probe.spec("websocket"), config=config) as house:
        for rate, ended in ((2 * KiB, False), (500, True)):
            call = await house.call("websocket")
            call.line.transport.try_send([LARGE_FRAME[:2] + (200 * KiB).to_bytes(8, "big") + bytes(4)])
            for _ in range(100):
                if house.endings:
                    break
                call.line.transport.try_send([b"0" * rate])
                await trio.sleep(1)
            assert bool(house.endings) is ended
            if ended:
                _, over = await call.rest()
                assert (over.code, "limits.body_rate" in over.text) == ("1008", True)
                call.line.peer.close()
                await house.still()
            else:
                await house.still()
                assert len(probe.received) == 1
                await call.leave(Leave.RESET)
                await house.still()
                house.gateway.observer.endings.clear()


async def test_who_is_not_read_is_not_silent(autojump_clock: Any) -> None:
    """A model that takes nothing keeps its client in the middle of a frame for as long as it likes."""
    probe = Probe(deaf)
    config = Config(websocket=WebSocketConfig(ping_interval=0), limits=replace(LimitsConfig(), read_ahead=20 * KiB))
    async with serving(probe.spec("websocket"), config=config) as house:
        call = await house.call("websocket")
        frame = b"\x82\xfe" + (30 * KiB).to_bytes(2, "big") + bytes(4) + b"0" * (30 * KiB)
        call.line.transport.try_send([frame, frame[: 20 * KiB]])
        await house.still()
        call.line.transport.try_send([frame[20 * KiB : 21 * KiB]])
        await trio.sleep(300)
        assert house.endings == {}
        probe.go.set()
        await house.still()
        call.line.transport.try_send([frame[21 * KiB :]])
        await house.still()
        assert len(probe.received) == 2
        await call.leave(Leave.STREAM)


@pytest.mark.parametrize("size", [10 * KiB, 1 * MiB])
async def test_an_event_that_begins_and_does_not_come_ends_its_session(size: int, autojump_clock: Any) -> None:
    async with serving(Probe(echoing).spec("bidi")) as house:
        call = await house.call("bidi")
        assert isinstance(call, DuplexCall)
        line = call.line
        await call.say()
        assert await call.take(1) == [0]
        await trio.sleep(100)
        event = b"".join(call.part(size).buffers)
        await line.send(Data(stream=call.stream, buffers=(event[: 5 * KiB],)))
        began = trio.current_time()
        _, over = await call.rest()
        assert (over.how, over.code) == ("error", "InternalStreamFailure")
        assert "limits.body_silence" in over.text
        assert 30 < trio.current_time() - began <= 30 + 2 * TICK
        await house.still()
        assert house.endings == {"refused": 1}


async def give_up_after(nursery: trio.Nursery, seconds: float) -> None:
    await trio.sleep(seconds)
    nursery.cancel_scope.cancel()


# -- clients that take nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["lmi-http1", "lmi-http2", "bidi", "websocket"])
async def test_a_client_that_takes_nothing_is_given_up(wire: str, autojump_clock: Any) -> None:
    probe = Probe(counting)
    async with serving(probe.spec(wire), config=quiet_sockets()) as house:
        call = await house.call(wire)
        await trio.sleep(29)
        assert probe.live == 1
        await trio.sleep(3)
        assert (probe.live, house.connections) == (0, 1)  # its model has stopped, and it may still hear why
        await trio.sleep(5)
        assert (house.connections, house.endings) == (0, {"transport-lost": 1})
        assert (await call.rest())[1].how == "cut"


@pytest.mark.parametrize("wire", [w for w in STREAMS if w not in ("bridge", "v2session")])
async def test_a_client_that_reads_again_in_time_is_told_why_its_answer_ends(wire: str, autojump_clock: Any) -> None:
    """The reason comes behind the queued bytes; an answer whose bytes are the model's own can only be cut off."""
    probe = Probe(counting)
    async with serving(probe.spec(wire), config=quiet_sockets(), wire=wire) as house:
        call = await house.call(wire)
        await trio.sleep(32)
        assert probe.live == 0  # it does not run for nobody
        numbers, over = await call.rest()
        assert numbers == list(range(len(numbers)))
        if WIRE[wire].in_band == "cut":
            assert over.how == "cut"
        else:
            assert over.how == "error"
            assert "the client took nothing of its answer for 30 s (limits.write_stall)" in over.text
            codes = {"close": "1008", "message": "14"}
            assert over.code in ("", codes.get(WIRE[wire].in_band, "InternalStreamFailure"))
        await house.still()
        assert house.endings == {"transport-lost": 1}


async def lengthy(prompt: Prompt) -> str:
    return prompt.text * 1_000_000


async def test_an_answer_that_was_whole_when_its_client_stalled_has_no_other_word(autojump_clock: Any) -> None:
    async with memory_gateway([lengthy], capacity=MiB) as served:
        peer = served.http2()
        await peer.send(
            *client.post(1, "/predictions/lengthy", b'{"inputs": "a"}', [(b"content-type", b"application/json")])
        )
        await trio.sleep(32)
        assert served.gateway.observer.endings == {Ending.LOST: 1}
        while not isinstance(event := await peer.next_event(), Reset):
            assert not isinstance(event, ConnectionEnd)
        assert event.code == 8


def quiet_sockets(**changes: Any) -> Config:
    """No Pings, so that nothing but the limit under test acts."""
    return Config(limits=replace(LimitsConfig(), **changes), websocket=WebSocketConfig(ping_interval=0))


@pytest.mark.parametrize("wire", ["lmi-http1", "lmi-http2", "bidi", "websocket"])
async def test_without_the_limit_a_parked_client_may_stay(wire: str, autojump_clock: Any) -> None:
    probe = Probe(counting)
    async with serving(probe.spec(wire), config=quiet_sockets(write_stall=0)) as house:
        call = await house.call(wire)
        await trio.sleep(900)
        assert probe.live == 1
        assert await call.take(500) == list(range(500))
        await call.leave(Leave.RESET)


@pytest.mark.parametrize("wire", ["lmi-http1", "lmi-http2", "bidi", "websocket"])
async def test_a_client_that_takes_a_little_now_and_then_is_slow_and_not_gone(wire: str, autojump_clock: Any) -> None:
    probe = Probe(counting)
    async with serving(probe.spec(wire), config=quiet_sockets(), capacity=4 * KiB) as house:
        call = await house.call(wire)
        for number in range(0, 500, 25):
            await trio.sleep(25)
            assert await call.take(25) == list(range(number, number + 25))
        assert house.endings == {}
        await call.leave(Leave.RESET)


async def test_a_stalled_stream_is_reset_alone(autojump_clock: Any) -> None:
    probe, other = Probe(counting), Probe(echoing, "other")
    async with serving(probe.spec("bidi"), other.spec("bidi")) as house:
        line = house.line("http2")
        stalled, lively = await house.call("bidi", line=line), await house.call("bidi", "other", line=line)
        assert isinstance(lively, EventsCall)
        for number in range(10):
            await lively.say()
            assert await lively.next() == number
            await trio.sleep(4)
            await line.read()
        assert house.endings == {"transport-lost": 1}
        events = [await line.event(stalled.stream)]
        while not isinstance(events[-1], Reset | ConnectionEnd):
            events.append(await line.event(stalled.stream))
        assert events[-1] == Reset(stream=stalled.stream, code=8)
        await line.ping()
        await lively.hush()
        assert await lively.rest() == ([], Over("complete"))


async def test_a_thinking_model_beside_stalled_streams_is_not_taken_for_one(autojump_clock: Any) -> None:
    # four stalled streams fill the connection's queue; the fifth has nothing queued, for longer than the limit
    probe, other = Probe(counting), Probe(answering, "other")
    async with serving(probe.spec("bidi"), other.spec("bidi")) as house:
        line = house.line("http2")
        for _ in range(4):
            await house.call("bidi", line=line)
        thinking = await house.call("bidi", "other", line=line)
        await line.read()
        await trio.sleep(40)
        await line.read()
        assert house.endings == {"transport-lost": 4}
        other.go.set()
        assert await thinking.rest() == ([0], Over("complete"))


# -- WebSocket ----------------------------------------------------------------------------------------------------------


async def test_a_websocket_client_that_answers_no_ping_is_lost(autojump_clock: Any) -> None:
    probe = Probe(silent)
    async with serving(probe.spec("websocket")) as house:
        await house.call("websocket")
        await trio.sleep(39)
        assert house.endings == {}
        await trio.sleep(4)
        assert (house.endings, house.connections, probe.live) == ({"transport-lost": 1}, 0, 0)


async def test_a_websocket_client_that_answers_its_pings_stays(autojump_clock: Any) -> None:
    probe = Probe(answering)
    async with serving(probe.spec("websocket")) as house:
        call = await house.call("websocket")
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def wake() -> None:
                await trio.sleep(600)
                probe.go.set()

            assert await call.rest() == ([0], Over("complete", code="1000"))
        assert call.line.transport.read.count(b"\x89\x00") >= 25


async def test_a_slow_model_does_not_make_its_client_look_dead(autojump_clock: Any) -> None:
    # reading has stopped at the read-ahead, so that a pong could not be seen
    probe = Probe(deaf)
    async with serving(probe.spec("websocket")) as house:
        call = await house.call("websocket")
        assert isinstance(call, SocketCall)
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def talk() -> None:
                for _ in range(40):
                    await call.say(16 * KiB)

            nursery.start_soon(call.rest)
            await trio.sleep(300)
            assert house.endings == {}
            probe.go.set()
            await house.still()
            assert len(probe.received) == 40
            nursery.cancel_scope.cancel()
        await call.leave(Leave.STREAM)


@pytest.mark.parametrize("size", [16 * MiB + 1, 2**40])
async def test_a_frame_over_its_limit_is_refused_before_its_memory_is_taken(size: int, autojump_clock: Any) -> None:
    async with serving(Probe(echoing).spec("websocket")) as house:
        call = await house.call("websocket")
        call.line.transport.try_send([b"\x82\xff" + size.to_bytes(8, "big") + bytes(4) + bytes(100)])
        assert await call.rest() == ([], Over("error", (await call.next()).text, "1009"))  # type: ignore[union-attr]
        assert house.gateway.budget.high_water == 0
        assert house.endings == {"refused": 1}


async def test_a_frame_that_the_budget_cannot_hold_is_asked_again_later(autojump_clock: Any) -> None:
    async with serving(Probe(echoing).spec("websocket"), config=limits(total_bytes=1 * MiB)) as house:
        call = await house.call("websocket")
        call.line.transport.try_send([b"\x82\xff" + (1 * MiB).to_bytes(8, "big") + bytes(4) + bytes(100)])
        await house.still()
        assert house.gateway.budget.try_reserve(1000 * KiB)  # somebody else's
        call.line.transport.try_send([bytes(100 * KiB)])
        _, over = await call.rest()
        assert (over.how, over.code) == ("error", "1013")
        house.gateway.budget.release(1000 * KiB)
        await house.still()
        assert (house.endings, house.gateway.budget.used) == ({"refused": 1}, 0)


async def test_a_frame_that_the_budget_could_never_hold_is_refused_at_once(autojump_clock: Any) -> None:
    async with serving(Probe(echoing).spec("websocket"), config=limits(total_bytes=1 * MiB)) as house:
        call = await house.call("websocket")
        call.line.transport.try_send([b"\x82\xff" + (2 * MiB).to_bytes(8, "big") + bytes(4)])
        _, over = await call.rest()
        assert (over.how, over.code) == ("error", "1009")
        assert (house.endings, house.gateway.budget.high_water) == ({"refused": 1}, 0)


async def test_a_large_frame_lands_in_memory_reserved_first_and_a_client_that_leaves_it_unfinished_gives_it_back(
    autojump_clock: Any,
) -> None:
    async with serving(Probe(echoing).spec("websocket")) as house:
        call = await house.call("websocket")
        call.line.transport.try_send([b"\x82\xff" + (2 * MiB).to_bytes(8, "big") + bytes(4) + bytes(100)])
        await house.still()
        assert house.gateway.budget.used == 100 + 16 * KiB, "as much as has come, and a step"
        await call.leave(Leave.CLOSE)
        await house.still()
        assert house.gateway.budget.used == 0
        assert house.endings == CANCELLED


async def test_a_large_frame_begun_after_the_session_is_given_back_too(autojump_clock: Any) -> None:
    probe = Probe(answering)
    probe.go.set()
    async with serving(probe.spec("websocket")) as house:
        call = await house.call("websocket")
        await house.still()
        assert (probe.returned, house.connections) == (1, 1)  # it waits for the answer to its Close
        call.line.transport.try_send([b"\x82\xff" + (2 * MiB).to_bytes(8, "big") + bytes(4) + bytes(100)])
        await house.still()
        assert house.gateway.budget.used == 100 + 16 * KiB, "as much as has come, and a step"
        call.line.peer.close()
        await house.still()
        assert house.gateway.budget.used == 0


async def test_a_client_that_never_answers_a_close_is_not_waited_for(autojump_clock: Any) -> None:
    probe = Probe(answering)
    probe.go.set()
    async with serving(probe.spec("websocket")) as house:
        call = await house.call("websocket")
        await house.still()
        assert house.endings == {"complete": 1}
        await ends(call.line, WebSocketConfig().close_timeout)


async def test_a_model_that_returned_leaves_what_its_client_still_says_unread(autojump_clock: Any) -> None:
    probe = Probe(answering)
    probe.go.set()
    async with serving(probe.spec("websocket")) as house:
        call = await house.call("websocket")
        for _ in range(40):
            await call.line.send(Frame(opcode=Opcode.BINARY, fin=True, data=bytes(16 * KiB)))
        assert await call.rest() == ([0], Over("complete", code="1000"))
        await house.still()
        assert (house.endings, house.gateway.budget.used) == ({"complete": 1}, 0)


# -- sessions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["bidi", "websocket"])
async def test_a_session_ends_after_its_time(wire: str, autojump_clock: Any) -> None:
    config = Config(bidi=BidiConfig(session_timeout=100), websocket=WebSocketConfig(ping_interval=0))
    async with serving(Probe(silent).spec(wire), config=config) as house:
        began = trio.current_time()
        _, over = await (await house.call(wire)).rest()
        assert (over.how, trio.current_time() - began) == ("error", 100)
        assert house.endings == {"deadline": 1}


@pytest.mark.parametrize("wire", ["lmi-http1", "lmi-http2", "json-http1", "v2-http1", "bidi"])
async def test_one_call_more_than_slots_and_queue_is_refused_at_once(wire: str, autojump_clock: Any) -> None:
    probe = Probe(answering)
    async with serving(probe.spec(wire, capacity=2, queue=1)) as house:
        calls = []
        for _ in range(3):
            calls.append(await house.call(wire))
            await house.still()
        with at_once():
            _, over = await (await house.call(wire)).rest()
        assert (over.how, over.code) == ("refused", "503")
        assert "queue" in over.text
        assert (probe.live, house.gateway.counts().slots_in_use) == (2, 2)
        probe.go.set()
        for call in calls:
            assert (await call.rest())[1].how == "complete"
        assert house.endings == {"refused": 1, "complete": 3}


async def test_a_model_that_never_waits_still_meets_its_cancellation_and_lets_others_run(autojump_clock: Any) -> None:
    # json holds its answer back, so there is always room: only the turns stop it
    probe, other = Probe(counting), Probe(answering, "other")
    other.go.set()
    async with serving(probe.spec("json-http1"), other.spec("json-http1")) as house:
        call = await house.call("json-http1", upto=65536)
        neighbour = await house.call("json-http1", "other")
        assert (await neighbour.rest())[1].how == "complete"
        assert 0 < probe.sent < 5000
        await call.leave(Leave.RESET)
        await house.still()
        assert probe.live == 0
        assert house.endings == {"complete": 1, **CANCELLED}


async def test_what_json_collects_is_bounded(autojump_clock: Any) -> None:
    probe = Probe(counting)
    async with serving(probe.spec("json-http1")) as house:
        call = await house.call("json-http1", upto=65536)
        _, over = await call.rest()
        assert (over.how, over.code) == ("refused", "424")
        assert "max_text" in over.text
        assert house.endings == {"model-error": 1}


async def test_the_ledger_sees_a_leak() -> None:
    async def leak() -> None:
        async with serving() as house:
            house.gateway.budget.try_reserve(1)

    with pytest.raises(AssertionError):
        await leak()
