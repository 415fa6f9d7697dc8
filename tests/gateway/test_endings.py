"""Exactly one ending, said on the wire in its own words, however a model misbehaves; and nobody else notices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.testing.stories.talk import Leave
from gateway.wires.http1 import HTTP1Wire
from models.errors import ModelError
from models.messages import Family, Finish, FinishReason
from models.session import Session
from models.spec import Model, ModelSpec
from tests.gateway.promises import (
    DUPLEX,
    STREAMS,
    UNARY,
    WIRE,
    WIRES,
    Call,
    DuplexCall,
    House,
    Over,
    Probe,
    answering,
    at_once,
    pausing,
    serving,
    silent,
)

OF_ONE_REQUEST = [w for w in WIRES if not WIRE[w].survives]
"""Wires on which an error of the model ends the exchange; on the others it ends a request (test_v2_sessions)."""
SECRET = "the password is swordfish"
ERRORS = [pytest.param(ModelError("no such voice", code="Voice", status=422), id="ModelError"), RuntimeError(SECRET)]


def said(wire: str, over: Over, error: Exception, *, in_band: bool) -> None:
    """The wire says what happened: a ModelError's own text; of any other error only where to look it up."""
    about = WIRE[wire]
    text, status = (error.message, about.code("422")) if isinstance(error, ModelError) else ("incident", about.crash)
    assert SECRET not in over.text
    if in_band:
        about.failed(over, text)
    else:
        assert (over.how, over.code) == ("refused", "424" if about.blames else status)
        assert text in over.text


@asynccontextmanager
async def with_a_neighbour(wire: str, spec: ModelSpec) -> AsyncIterator[tuple[House, Call]]:
    """A call of the model under test, and beside it a stream of another model (on the same connection where the wire is
    HTTP/2), which must go on as if nothing had happened."""
    beside = wire if wire == "lmi-http2" or (WIRE[wire].duplex and WIRE[wire].transport == "http2") else "websocket"
    if WIRE[wire].transport == "http2" and beside != wire:
        beside = "bidi"
    other = Probe(pausing, "other")
    async with serving(spec, other.spec(beside), wire=wire) as house:
        line = house.line("http2") if beside != "websocket" else None
        neighbour = await house.call(beside, "other", line=line)
        assert await neighbour.take(3) == [0, 1, 2]
        call = await house.call(wire, line=line)
        yield house, call
        other.go.set()
        numbers, over = await neighbour.rest()
        assert (numbers, over.how) == ([3, 4, 5], "complete")


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("wire", OF_ONE_REQUEST)
async def test_a_model_that_raises_before_its_first_message(wire: str, error: Exception, autojump_clock: Any) -> None:
    async def fail(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        raise error

    async with with_a_neighbour(wire, Probe(fail).spec(wire)) as (house, call):
        with at_once():
            numbers, over = await call.rest()
        assert numbers == []
        said(wire, over, error, in_band=WIRE[wire].accepted or WIRE[wire].apart)
        assert house.endings == WIRE[wire].ended("model-error")


@pytest.mark.parametrize("background", [False, True], ids=["itself", "in its own nursery"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("wire", [w for w in OF_ONE_REQUEST if WIRE[w].family is not Family.TENSOR or w in STREAMS])
async def test_a_model_that_raises_in_mid_stream(wire: str, error: Exception, background: bool, autojump_clock: Any) -> None:
    async def fail(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        await probe.say(session, 3)
        if not background:
            raise error
        async with trio.open_nursery() as nursery:
            nursery.start_soon(explode)
            nursery.start_soon(trio.sleep_forever)

    async def explode() -> None:
        raise error

    async with with_a_neighbour(wire, Probe(fail).spec(wire)) as (house, call):
        with at_once():
            numbers, over = await call.rest()
        if WIRE[wire].in_band == "cut":  # unwritten messages are lost with it
            assert numbers == list(range(len(numbers)))
        else:
            assert numbers == ([0, 1, 2] if wire in STREAMS else [])
        said(wire, over, error, in_band=wire in STREAMS)
        assert house.endings == WIRE[wire].ended("model-error")


@pytest.mark.parametrize("wire", WIRES)
async def test_a_model_whose_background_work_crashes_ends_its_own_sessions_and_starts_again(
    wire: str, autojump_clock: Any
) -> None:
    script = pausing if wire in STREAMS else silent
    probe, boom = Probe(script), [trio.Event()]

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(explode)
            yield probe
            nursery.cancel_scope.cancel()

    async def explode() -> None:
        await boom[0].wait()
        boom[0] = trio.Event()
        raise RuntimeError(SECRET)

    probe.speak(wire)
    spec = ModelSpec(name="probe", family=probe.family, load=load, decoupled=WIRE[wire].decoupled)
    async with with_a_neighbour(wire, spec) as (house, call):
        again = await house.call(wire)
        for live in (call, again):
            if wire in STREAMS:
                await live.take(3)
        await house.still()
        with at_once():
            boom[0].set()
            for live in (call, again):
                _, over = await live.rest()
                assert SECRET not in over.text
                if wire in STREAMS:
                    WIRE[wire].failed(over, "probe", lost=wire != "bridge")  # the platform's model is the container
                else:
                    assert (over.how, over.code) == ("refused", WIRE[wire].lost)
                    assert "probe" in over.text
            await house.still()
            assert probe.live == 0
            assert house.endings == WIRE[wire].ended("model-error", 2)

        await trio.sleep(1)
        probe.go.set()
        probe.script = pausing if wire in STREAMS else answering
        _, over = await (await house.call(wire)).rest()
        assert over.how == "complete"


@pytest.mark.parametrize("wire", WIRES)
async def test_a_model_that_never_answers_meets_its_deadline(wire: str, autojump_clock: Any) -> None:
    async with with_a_neighbour(wire, Probe(silent).spec(wire, timeout=5)) as (house, call):
        began = trio.current_time()
        _, over = await call.rest()
        assert trio.current_time() - began == 5
        if WIRE[wire].accepted or WIRE[wire].apart:
            WIRE[wire].failed(over, "timeout")
        else:
            assert (over.how, over.code) == ("refused", "424" if WIRE[wire].blames else WIRE[wire].code("504"))
            assert "timeout" in over.text
        assert house.endings == WIRE[wire].ended("deadline")


@pytest.mark.parametrize("wire", STREAMS)
async def test_a_model_that_never_ends_meets_its_deadline_in_band(wire: str, autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with with_a_neighbour(wire, probe.spec(wire, timeout=5)) as (house, call):
        numbers, over = await call.rest()
        assert numbers == [0, 1, 2]
        WIRE[wire].failed(over, "timeout")
        await house.still()
        assert (probe.live, probe.returned) == (0, 0)
        assert house.endings == WIRE[wire].ended("deadline")


@pytest.mark.parametrize("wire", STREAMS)
async def test_a_deadline_reaches_a_client_that_did_not_read(wire: str, autojump_clock: Any) -> None:
    # the ending is queued behind what the client has not taken yet, and is whole when it does; a body without words for
    # an ending is cut off
    async def endless(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        while True:
            await probe.say(session)

    probe = Probe(endless)
    async with serving(probe.spec(wire, timeout=5), wire=wire) as house:
        call = await house.call(wire)
        await trio.sleep(10)
        assert probe.live == 0
        numbers, over = await call.rest()
        assert numbers == list(range(len(numbers)))
        if over.how == "error" and wire != "bridge":  # a bridge's container has said more than its client heard
            assert len(numbers) == probe.sent
        WIRE[wire].failed(over, "timeout")
        assert house.endings == WIRE[wire].ended("deadline")


@pytest.mark.parametrize("wire", WIRES)
async def test_a_model_that_returns_without_an_answer(wire: str, autojump_clock: Any) -> None:
    async def mute(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)

    async with with_a_neighbour(wire, Probe(mute).spec(wire)) as (house, call):
        numbers, over = await call.rest()
        assert numbers == []
        if WIRE[wire].family is Family.TENSOR and wire not in STREAMS:
            assert (over.how, over.code) == ("refused", WIRE[wire].crash)
            assert "without an answer" in over.text
            assert house.endings == {"model-error": 1}
        else:
            assert over.how == "complete"
            assert house.endings == {"complete": 1}


@pytest.mark.parametrize("wire", [w for w in WIRES if WIRE[w].family is Family.TEXT or w in UNARY])
async def test_a_model_that_sends_on_after_its_answer_is_told_so_or_stopped(wire: str, autojump_clock: Any) -> None:
    tensors = WIRE[wire].family is Family.TENSOR

    async def endless(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        with pytest.raises(trio.ClosedResourceError if tensors else trio.Cancelled):
            await probe.say(session, 100)
        raise RuntimeError(SECRET)  # too late for anyone

    probe = Probe(endless)
    options: dict[str, Any] = {} if tensors else {"upto": 3}
    async with serving(probe.spec(wire), wire=wire) as house:
        call = await house.call(wire, **options)
        numbers, over = await call.rest()
        assert probe.sent == 1 if tensors else 3 <= probe.sent < 3 + 16  # a turn's messages are dropped
        if wire in STREAMS:
            assert (numbers, over) == ([0, 1, 2], Over("complete"))
            await house.still()
            assert house.endings == {"complete": 1}


@pytest.mark.parametrize(
    "wire", ["lmi-http1", "lmi-http2", "json-http1", "stream-http2", "invoke-http1", "invokejson-http1"]
)
async def test_a_model_that_sends_on_after_finish_is_told_so(wire: str, autojump_clock: Any) -> None:
    async def stubborn(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        await probe.say(session, 2)
        await session.send(Finish(reason=FinishReason.STOP_SEQUENCE))
        await probe.say(session)

    probe = Probe(stubborn)
    async with serving(probe.spec(wire), wire=wire) as house:
        numbers, over = await (await house.call(wire)).rest()
        assert numbers == ([0, 1] if wire in STREAMS else [])
        assert over.how == "complete"
        assert house.endings == {"complete": 1}


@pytest.mark.parametrize("wire", STREAMS)
async def test_a_session_kept_beyond_its_end_is_closed(wire: str, autojump_clock: Any) -> None:
    kept: list[Session[Any, Any]] = []

    async def keep(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        await probe.say(session, 2)
        kept.append(session)

    probe = Probe(keep)
    async with serving(probe.spec(wire), wire=wire) as house:
        call = await house.call(wire)
        numbers, over = await call.rest()
        assert (numbers, over.how) == ([0, 1], "complete")
        await house.still()
        with pytest.raises(trio.ClosedResourceError):
            await kept[0].send(probe.message(2))
        with at_once(), pytest.raises((trio.ClosedResourceError, trio.EndOfChannel)):
            await kept[0].receive()
        assert house.endings == {"complete": 1}


@pytest.mark.parametrize("wire", OF_ONE_REQUEST)
async def test_a_model_that_says_what_the_wire_cannot_carry(wire: str, autojump_clock: Any) -> None:
    async def confused(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        await session.send(object())

    async with with_a_neighbour(wire, Probe(confused).spec(wire)) as (house, call):
        _, over = await call.rest()
        assert "incident" in over.text
        assert house.endings == WIRE[wire].ended("model-error")


@pytest.mark.parametrize("wire", DUPLEX)
async def test_two_receivers_are_one_too_many_and_the_first_goes_on(wire: str, autojump_clock: Any) -> None:
    async def doubled(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(probe.hear, session)
            await wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await session.receive()
        await probe.say(session)

    probe = Probe(doubled)
    async with serving(probe.spec(wire), wire=wire) as house:
        call = await house.call(wire)
        await house.still()
        assert isinstance(call, DuplexCall)
        await call.say()
        numbers, over = await call.rest()
        assert (numbers, over.how, probe.received) == ([0], "complete", [0])


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("wire", STREAMS)
async def test_a_model_that_raises_while_it_is_cancelled_ends_its_session_once(
    wire: str, error: Exception, autojump_clock: Any
) -> None:
    async def sore(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        await probe.say(session)
        try:
            await trio.sleep_forever()
        finally:
            raise error

    probe = Probe(sore)
    async with serving(probe.spec(wire), wire=wire) as house:
        call = await house.call(wire)
        assert await call.next() == 0
        await call.leave(Leave.CLOSE)
        await house.still()
        assert house.endings == {"cancelled-by-client": 1}


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("wire", OF_ONE_REQUEST)
async def test_a_text_that_utf8_cannot_carry_still_reaches_the_client(wire: str, started: bool, autojump_clock: Any) -> None:
    # as in the message of an exception about a file name
    async def fail(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        if started and wire in STREAMS:
            await probe.say(session)
        raise ModelError("no such file: caf\udce9.wav")

    async with with_a_neighbour(wire, Probe(fail).spec(wire)) as (house, call):
        _, over = await call.rest()
        assert "no such file: caf" in over.text or (started and over.how == WIRE[wire].in_band == "cut")
        assert house.endings == WIRE[wire].ended("model-error")


@pytest.mark.parametrize("wire", WIRES)
async def test_a_long_text_reaches_the_client_as_far_as_the_wire_carries_it(wire: str, autojump_clock: Any) -> None:
    async def fail(probe: Probe, session: Session[Any, Any]) -> None:
        raise ModelError("no such voice" + " é" * 100_000)

    async with with_a_neighbour(wire, Probe(fail).spec(wire)) as (house, call):
        _, over = await call.rest()
        assert "no such voice é" in over.text
        assert house.endings == WIRE[wire].ended("model-error")


# -- an exception in a connection ---------------------------------------------------------------------------------------

READING = ("wire.receive_data", "wire.pump", "wire.receive_buffer", "transport.try_receive_into")
WRITING = ("wire.data_to_send", "wire.data_sent", "wire.room", "transport.try_send")
ENDING = ("wire.finish", "wire.credit", "wire.release", "wire.close", "transport.close")
TIMED = ("wire.tick", "wire.drain")


@pytest.mark.parametrize("point", [*READING, *WRITING, *ENDING, *TIMED])
@pytest.mark.parametrize("wire", STREAMS)
async def test_an_exception_in_a_connection_ends_that_connection_alone(
    wire: str, point: str, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec(wire), wire=wire) as house:
        calls = [await house.call(wire) for _ in range(3)]
        for call in calls:
            assert len(await call.take(3)) == 3
        if isinstance(calls[1], DuplexCall):
            await calls[1].say()  # which its model leaves unread
            await house.still()
        broken = house.connection(calls[1].line)
        wire = broken.wire
        where, _, name = point.partition(".")
        target = getattr(broken, where)

        def fail(self: Any, *arguments: Any) -> Any:
            if self is target:
                raise ZeroDivisionError(point)
            return whole(self, *arguments)

        whole = getattr(type(target), name, None)
        if whole is None:  # an attribute that it takes from its machine, not a method
            monkeypatch.setattr(target, name, partial(fail, target))
        else:
            monkeypatch.setattr(type(target), name, fail)
        if point in READING:
            calls[1].line.transport.try_send([b"\0"])
        elif point in TIMED:
            broken.drain()
        await trio.sleep(2)
        probe.go.set()
        await trio.sleep(5)
        calls[1].line.peer.close()
        for call in (calls[0], calls[2]):
            numbers, over = await call.rest()
            assert (len(numbers), over.how) == (3, "complete")
        await house.still()
        counts = house.gateway.counts()
        assert (counts.exchanges, counts.slots_in_use, sum(counts.endings.values())) == (0, 0, 3)
        assert broken not in house.gateway.server.connections
        if point == "wire.close":
            monkeypatch.undo()
            wire.close()  # gives back what the broken call did not


async def test_an_exception_at_the_end_of_an_exchange_does_not_keep_it(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # its ending was decided before its task was done: a model that ends its text itself may tidy up
    async def tidy(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        await session.send(msgspec.structs.replace(probe.message(0), finish=FinishReason.EOS_TOKEN))
        await trio.sleep(1)

    failed = 0

    def fail(*_: Any) -> None:
        nonlocal failed
        failed += 1
        raise ZeroDivisionError

    async with serving(Probe(tidy).spec("lmi-http1")) as house:
        call = await house.call("lmi-http1", upto=3)
        assert await call.rest() == ([0], Over("complete"))
        monkeypatch.setattr(HTTP1Wire, "release", fail)
        await trio.sleep(2)
        assert failed == 1
        counts = house.gateway.counts()
        assert (counts.exchanges, counts.connections, counts.endings) == (0, 0, {"complete": 1})
