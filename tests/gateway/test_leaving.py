"""A client that leaves cancels its model at once, whatever it was doing, ends once, and leaves nothing behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import trio

from gateway import client
from gateway.config import Config
from gateway.testing.stories.talk import Leave
from models.adapt import spec_of
from models.blocking import cancel_token
from models.messages import Part, Prompt
from models.session import Session
from protocols.aws import bidi
from protocols.events import Data, Frame, GoAway, Opcode
from tests.gateway.promises import (
    CANCELLED,
    DUPLEX,
    LEAVES,
    STREAMS,
    UNARY,
    WIRE,
    Call,
    DuplexCall,
    EventsCall,
    House,
    KiB,
    Over,
    Probe,
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

WAYS: dict[str, dict[str, Leave | GoAway]] = {
    "http1": {**LEAVES},
    "http2": {"reset": Leave.STREAM, "goaway": GoAway(), **LEAVES},
    "websocket": {"close": Leave.STREAM, **LEAVES},
}


def transport_of(wire: str) -> str:
    return WIRE[wire].transport


SLOTTED = [name for name in WIRE if transport_of(name) != "websocket"]
"""Those on which a client that waits for its slot has not had an answer of the wire's own yet."""


def each_way(*wires: str) -> list[Any]:
    """Every wire with every way to leave it."""
    return [pytest.param(wire, way, id=f"{wire}-{name}") for wire in wires for name, way in WAYS[transport_of(wire)].items()]


async def leaves(house: House, call: Call, how: Leave | GoAway, probe: Probe) -> None:
    """The client leaves; before any time has passed its model has stopped and the one ending is counted."""
    with at_once():
        await call.leave(how)
        await house.still()
        assert (probe.live, probe.stopped, probe.returned) == (0, probe.calls, 0)
        assert house.endings == CANCELLED
        assert house.connections == (1 if how is Leave.STREAM else 0)
        house.check_ledger()


@pytest.mark.parametrize(("wire", "how"), each_way(*STREAMS))
async def test_before_the_first_byte_of_the_answer(wire: str, how: Leave | GoAway, autojump_clock: Any) -> None:
    probe = Probe(silent)
    async with serving(probe.spec(wire), wire=wire) as house:
        call = await house.call(wire)
        await house.still()
        assert probe.live == 1
        await leaves(house, call, how, probe)


@pytest.mark.parametrize(("wire", "how"), each_way(*UNARY))
async def test_during_a_unary_call(wire: str, how: Leave | GoAway, autojump_clock: Any) -> None:
    probe = Probe(silent)
    async with serving(probe.spec(wire), wire=wire) as house:
        call = await house.call(wire)
        await house.still()
        assert probe.live == 1
        await leaves(house, call, how, probe)


@pytest.mark.parametrize(("wire", "how"), each_way(*STREAMS))
async def test_in_mid_stream(wire: str, how: Leave | GoAway, autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec(wire), wire=wire) as house:
        call = await house.call(wire)
        assert await call.take(3) == [0, 1, 2]
        await leaves(house, call, how, probe)


@pytest.mark.parametrize(("wire", "how"), each_way(*STREAMS))
async def test_while_the_model_is_blocked_in_send(wire: str, how: Leave | GoAway, autojump_clock: Any) -> None:
    probe = Probe(counting)
    async with serving(probe.spec(wire), wire=wire) as house:
        call = await house.call(wire)
        await house.still()
        assert probe.live == 1
        await leaves(house, call, how, probe)


@pytest.mark.parametrize(("wire", "how"), each_way(*DUPLEX))
async def test_while_the_model_is_blocked_in_receive(wire: str, how: Leave | GoAway, autojump_clock: Any) -> None:
    probe = Probe(echoing)
    async with serving(probe.spec(wire), wire=wire) as house:
        call = await house.call(wire)
        assert isinstance(call, DuplexCall)
        await call.say()
        assert await call.next() == 0
        await leaves(house, call, how, probe)


@pytest.mark.parametrize(("wire", "how"), each_way(*DUPLEX))
async def test_while_the_model_leaves_its_input_unread(wire: str, how: Leave | GoAway, autojump_clock: Any) -> None:
    probe = Probe(deaf)
    async with serving(probe.spec(wire), wire=wire) as house:
        call = await house.call(wire)
        assert isinstance(call, DuplexCall)
        for _ in range(20):
            await call.say()
        await house.still()
        await leaves(house, call, how, probe)


@pytest.mark.parametrize(("wire", "how"), each_way(*SLOTTED))
async def test_while_waiting_for_a_slot(wire: str, how: Leave | GoAway, autojump_clock: Any) -> None:
    probe = Probe(answering)
    async with serving(probe.spec(wire, capacity=1), wire=wire) as house:
        first = await house.call(wire)
        await house.still()
        waiting = await house.call(wire)
        await house.still()
        with at_once():
            await waiting.leave(how)
            await house.still()
            assert house.endings == CANCELLED
            assert (probe.calls, probe.live) == (1, 1)
            probe.go.set()
            over = (await first.rest())[1]
            assert over.how == "complete"


@pytest.mark.parametrize("how", LEAVES.values(), ids=LEAVES)
async def test_a_websocket_while_waiting_for_a_slot(how: Leave | GoAway, autojump_clock: Any) -> None:
    probe = Probe(answering)
    async with serving(probe.spec("websocket", capacity=1)) as house:
        first = await house.call("websocket")
        line = house.line("http1")
        await line.send(
            raw(1, b"GET", "/models/probe/invocations-bidirectional-stream", headers=UPGRADE, upgrade=b"websocket")
        )
        await house.still()
        await Call(line, 1).leave(how)
        await house.still()
        assert house.endings == CANCELLED
        probe.go.set()
        assert await first.rest() == ([0], Over("complete", code="1000"))


UPGRADE = [(b"sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ=="), (b"sec-websocket-version", b"13")]


@pytest.mark.parametrize("declared", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("path", ["/predictions/probe", "/v2/models/probe/infer"])
@pytest.mark.parametrize(
    ("transport", "how"),
    [pytest.param(t, how, id=f"{t}-{name}") for t in ("http1", "http2") for name, how in WAYS[t].items()],
)
async def test_in_mid_upload(transport: str, how: Leave | GoAway, path: str, declared: bool, autojump_clock: Any) -> None:
    probe = Probe(silent)
    wire = "lmi-http1" if "predictions" in path else "v2-http1"
    async with serving(probe.spec(wire), wire=wire) as house:
        line = house.line(transport)
        length = 100 * KiB if declared else None
        await line.send(raw(1, b"POST", path, content_length=length), Data(stream=1, buffers=(bytes(10 * KiB),)))
        await house.still()
        assert house.gateway.budget.used >= 10 * KiB
        await leaves(house, Call(line, 1), how, probe)
        assert probe.calls == 0


@pytest.mark.parametrize("transport", ["http1", "http2"])
async def test_a_request_whose_client_is_gone_before_it_is_looked_at(
    transport: str, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # head, a piece of the body and FIN are read before the exchange's task runs: nothing of it is an error of ours
    async with serving(Probe(silent).spec("v2-http1")) as house:
        paths = ("/v2/models/probe/infer", "/ping", "/none") * 5
        for path in paths:
            line = house.line(transport)
            line.send_and_close(raw(1, b"POST", path, content_length=100), Data(stream=1, buffers=(bytes(10),)))
        await house.still()
        assert sum(house.endings.values()) == len(paths)
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def returning(probe: Probe, session: Session[Any, Any]) -> None:
    """Returns when told to `go`."""
    await probe.take(session)
    await probe.go.wait()


@pytest.mark.parametrize("script", [answering, returning])
@pytest.mark.parametrize(
    ("wire", "how"),
    each_way(
        "lmi-http1",
        "bidi",
        "websocket",
        "json-http1",
        "stream-http2",
        "container-http1",
        "bidi-literal",
        "bridge",
        "inferstream-http1",
        "inferframes-http2",
        "v2session",
    ),
)
async def test_a_model_that_is_woken_and_left_in_the_same_moment_sees_cancellation(
    wire: str, how: Leave | GoAway, script: Any, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # in whichever order the two tasks run: what the model still says goes nowhere, and is an error of nobody
    probe = Probe(script)
    async with serving(probe.spec(wire), wire=wire) as house:
        for _ in range(5):
            call = await house.call(wire)
            await house.still()
            await call.leave(how)
            probe.go.set()
            await house.still()
            probe.go = trio.Event()
        assert (probe.live, sum(house.endings.values())) == (0, 5)
        assert set(house.endings) <= {"cancelled-by-client", "complete"}
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_room_that_comes_with_the_reset_is_no_error_of_the_models(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    probe = Probe(counting)
    async with serving(probe.spec("bidi")) as house:
        line = house.line("http2")
        for _ in range(20):
            call = await house.call("bidi", line=line)
            await line.read()  # up to the window
            line.peer.credit(await line.data(call.stream))
            await line.peer.flush()
            await call.leave(Leave.STREAM)
            await house.still()
        assert (probe.live, house.endings) == (0, {"cancelled-by-client": 20})
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_client_that_leaves_when_more_events_wait_than_one_turn_takes(autojump_clock: Any) -> None:
    async with serving(Probe(deaf).spec("bidi")) as house:
        for _ in range(5):
            call = EventsCall(house.line("http2"), 1)
            head = [(b"content-type", bidi.CONTENT_TYPE.encode())]
            begin = client.post(1, "/endpoints/probe/invocations-bidirectional-stream", None, head)
            call.line.send_and_close(*begin, *(Data(stream=1, buffers=(b"x",)) for _ in range(300)))
            await house.still()
            house.check_ledger()


@pytest.mark.parametrize("then", ["rst", "read"])
async def test_a_close_that_crosses_a_whole_answer_leaves_the_ending_to_its_last_byte(
    then: str, autojump_clock: Any
) -> None:
    async def brief(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.say(session, 20)

    probe = Probe(brief)
    async with serving(probe.spec("websocket"), capacity=4 * KiB) as house:
        call = await house.call("websocket")
        await house.still()
        assert (probe.returned, house.endings) == (1, {})  # queued, and not taken yet
        await call.leave(Leave.STREAM)
        await house.still()
        assert house.endings == {}
        if then == "rst":
            call.line.reset()
            await house.still()
            assert house.endings == CANCELLED
        else:
            assert await call.rest() == (list(range(20)), Over("complete", code="1000"))
            assert house.endings == {"complete": 1}


@pytest.mark.parametrize("stay", ["lmi-http2", "bidi"])
@pytest.mark.parametrize("leave", ["lmi-http2", "bidi", "v2-http2"])
async def test_a_reset_touches_no_neighbour_on_the_connection(leave: str, stay: str, autojump_clock: Any) -> None:
    gone, other = Probe(silent if leave == "v2-http2" else counting), Probe(pausing, "other")
    async with serving(gone.spec(leave), other.spec(stay)) as house:
        line = house.line("http2")
        neighbour = await house.call(stay, "other", line=line)
        assert await neighbour.take(3) == [0, 1, 2]
        for _ in range(5):
            call = await house.call(leave, line=line)
            await line.read()
            await call.leave(Leave.STREAM)
        await line.ping()
        assert gone.live == 0
        other.go.set()
        assert await neighbour.rest() == ([3, 4, 5], Over("complete"))


async def test_a_client_that_overfills_the_read_ahead_and_leaves_is_seen_by_the_timer(autojump_clock: Any) -> None:
    probe = Probe(deaf)
    async with serving(probe.spec("websocket")) as house:
        call = await house.call("websocket")
        with trio.move_on_after(1):
            while True:
                await call.line.send(Frame(opcode=Opcode.BINARY, fin=True, data=bytes(16 * KiB)))
        call.line.peer.close()
        await trio.sleep(2)
        assert probe.live == 0
        assert house.endings == CANCELLED


@pytest.mark.parametrize(("wire", "how"), each_way("lmi-http1", "lmi-http2", "bidi", "websocket", "v2-http1"))
async def test_a_blocking_step_holds_its_slot_until_it_returns_and_its_wire_no_longer(
    wire: str, how: Leave | GoAway
) -> None:
    began, go, cancelled = threading.Event(), threading.Event(), threading.Event()

    def step() -> None:
        began.set()
        token = cancel_token()
        go.wait(60)
        if token.cancelled:
            cancelled.set()

    def text(prompt: Prompt) -> str:
        step()
        return "too late"

    def parts(part: Part) -> bytes:
        step()
        return b"too late"

    def tensors(x: Any) -> Any:
        step()
        return x

    fn = text if wire.startswith("lmi") else tensors if wire.startswith("v2") else parts
    spec = spec_of(fn, "probe", family=Probe(silent).spec(wire).family, capacity=1)
    async with serving(spec) as house:  # the clock is real: a thread works in it
        call = await house.call(wire)
        if isinstance(call, DuplexCall):
            await call.say()
        await trio.to_thread.run_sync(began.wait, 60)
        await call.leave(how)
        await house.still()
        assert house.endings == CANCELLED
        assert (house.gateway.counts().exchanges, house.gateway.counts().slots_in_use) == (0, 1)
        go.set()
        with trio.fail_after(60):
            while house.gateway.counts().slots_in_use:
                await trio.lowlevel.checkpoint()
        assert cancelled.is_set()


@pytest.mark.parametrize("wire", ["bidi", "websocket"])
async def test_a_model_with_a_nursery_of_its_own_is_cancelled_as_a_whole(wire: str, autojump_clock: Any) -> None:
    stopped: list[str] = []

    async def duplex(probe: Probe, session: Session[Any, Any]) -> None:
        async def run(what: Any, name: str) -> None:
            try:
                await what(probe, session)
            finally:
                stopped.append(name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, counting, "sender")
            nursery.start_soon(run, deaf, "receiver")

    probe = Probe(duplex)
    async with serving(probe.spec(wire), config=Config()) as house:
        call = await house.call(wire)
        await house.still()
        await leaves(house, call, next(iter(WAYS[transport_of(wire)].values())), probe)
        assert sorted(stopped) == ["receiver", "sender"]


async def test_requests_sent_ahead_and_a_half_close_do_not_cut_a_whole_answer(autojump_clock: Any) -> None:
    """Nobody reads on where too much is sent ahead: the timer then sees that the client has closed its direction, while the
    answer that is whole waits for it to be read."""

    async def brief(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        await probe.say(session, 40)

    probe = Probe(brief)
    async with serving(probe.spec("lmi-http1"), capacity=KiB, config=limits(read_ahead=2 * KiB)) as house:
        line = house.line("http1")
        call = await house.call("lmi-http1", line=line)
        await house.still()
        assert (probe.returned, house.endings) == (1, {})
        below = line.peer.transport
        ahead = b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n" * 100
        while ahead and (n := below.try_send([ahead])):
            ahead = ahead[n:]
            await house.still()
        below.send_eof()
        await trio.sleep(3)
        assert house.endings == {}
        assert await call.rest() == (list(range(40)), Over("complete"))
        await house.still()
        assert house.endings["complete"] >= 1
        below.close()
        await house.still()
