"""A session whose client is silent keeps its slot as long as nobody wants it, and then no longer than it may."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gateway.config import Config, WebSocketConfig
from gateway.errors import Refusal
from gateway.testing.stories.talk import Leave
from models.session import Session
from tests.gateway.promises import WIRE, DuplexCall, House, Over, Probe, at_once, counting, echoing, serving, silent

QUIET = Config(websocket=WebSocketConfig(ping_interval=0))
"""No client here reads while it waits, so none would answer a Ping."""
SAID = "others wait: no message in either direction for 30 s (models.probe.idle_when_wanted)"


async def wait_for_a_slot(house: House) -> DuplexCall:
    """One who comes, when the others have what they want, and must wait."""
    await house.still()
    line = house.line("http2")
    call = await house.call("bidi", line=line)
    await house.still()
    assert house.gateway.models["probe"].queued
    assert isinstance(call, DuplexCall)
    return call


def said_of(wire: str) -> Over:
    if WIRE[wire].transport == "websocket":
        return Over("error", SAID, "1013")
    return Over("error", SAID, "ModelStreamError")


async def hung(probe: Probe, session: Session[Any, Any]) -> None:
    """Neither reads nor speaks."""
    await trio.sleep_forever()


@pytest.mark.parametrize(
    ("wire", "script"),
    [("bidi", echoing), ("bidi-json", echoing), ("websocket", echoing), ("bidi", hung), ("websocket", hung)],
)
async def test_a_silent_session_is_ended_as_soon_as_another_waits_for_its_slot_and_not_before(
    wire: str, script: Any, autojump_clock: MockClock
) -> None:
    probe = Probe(script)
    async with serving(probe.spec(wire, capacity=1), config=QUIET, wire=wire) as house:
        call = await house.call(wire)
        await trio.sleep(200)
        assert probe.live == 1
        began = trio.current_time()
        second = await wait_for_a_slot(house)
        assert (await call.rest())[1] == said_of(wire)
        assert trio.current_time() - began <= 1.0
        await house.still()
        assert (probe.calls, probe.live, house.endings) == (2, 1, {"refused": 1})
        assert house.gateway.observer.refusals == {Refusal.IDLE_WHEN_WANTED: 1}
        await second.leave(Leave.CLOSE)


async def test_a_ping_of_ours_and_its_pong_are_no_messages(autojump_clock: MockClock) -> None:
    probe, over = Probe(echoing), list[Over]()
    async with serving(probe.spec("websocket", capacity=1), wire="websocket") as house:
        call = await house.call("websocket")

        async def read() -> None:
            over.append((await call.rest())[1])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)  # which answers Pings
            await trio.sleep(200)
            assert probe.live == 1
            assert not over
            began = trio.current_time()
            second = await wait_for_a_slot(house)
        assert over == [said_of("websocket")]
        assert trio.current_time() - began <= 1.0
        await second.leave(Leave.CLOSE)


@pytest.mark.parametrize("wire", ["bidi", "websocket"])
async def test_its_silence_counts_from_when_it_had_its_slot(wire: str, autojump_clock: MockClock) -> None:
    probe = Probe(echoing)
    async with serving(probe.spec(wire, capacity=1), config=QUIET, wire=wire) as house:
        first = await house.call(wire)
        assert isinstance(first, DuplexCall)
        began = trio.current_time()
        second = await wait_for_a_slot(house)
        assert (await first.rest())[1] == said_of(wire)
        assert 30 <= trio.current_time() - began <= 31
        await house.still()
        third = await wait_for_a_slot(house)
        began = trio.current_time()
        assert (await second.rest())[1] == said_of("bidi")
        assert 30 <= trio.current_time() - began <= 31  # though it was there, and silent, before
        await third.leave(Leave.CLOSE)


@pytest.mark.parametrize("wire", ["bidi", "websocket"])
async def test_one_that_says_something_now_and_then_keeps_its_slot(wire: str, autojump_clock: MockClock) -> None:
    probe = Probe(echoing)
    async with serving(probe.spec(wire, capacity=1, queue_timeout=0), config=QUIET, wire=wire) as house:
        call = await house.call(wire)
        assert isinstance(call, DuplexCall)
        second = await wait_for_a_slot(house)
        for number in range(10):
            await trio.sleep(29)
            await call.say()
            assert await call.next() == number
        assert (probe.calls, house.endings) == (1, {})
        assert (await call.rest())[1] == said_of(wire)
        await second.leave(Leave.CLOSE)


async def test_one_whose_client_reads_slowly_is_not_silent(autojump_clock: MockClock) -> None:
    probe = Probe(counting)
    async with serving(probe.spec("bidi", capacity=1, queue_timeout=0), wire="bidi") as house:
        call = await house.call("bidi")
        second = await wait_for_a_slot(house)
        for _ in range(8):
            await trio.sleep(25)
            await call.take(100)
        assert (probe.calls, house.endings) == (1, {})
        await call.leave(Leave.CLOSE)
        await second.leave(Leave.CLOSE)


@pytest.mark.parametrize("wire", ["json-http1", "v2session", "bidi"])
async def test_one_whose_model_is_at_work_is_not_silent(wire: str, autojump_clock: MockClock) -> None:
    async def work(probe: Probe, session: Session[Any, Any]) -> None:
        await session.receive()
        await trio.sleep(100)
        await probe.say(session)

    probe = Probe(work)
    async with serving(probe.spec(wire, capacity=1, queue_timeout=0), config=QUIET, wire=wire) as house:
        call = await house.call(wire)
        if wire == "bidi":
            assert isinstance(call, DuplexCall)
            await call.say()
        await house.still()
        waits = await house.call(wire)
        await house.still()
        answer = await call.next()
        assert answer == 0 or (isinstance(answer, Over) and answer.how == "complete")
        assert trio.current_time() == pytest.approx(100, abs=0.5)
        await waits.leave(Leave.CLOSE)
        await call.leave(Leave.CLOSE)


async def test_no_more_are_ended_than_wait_and_the_longest_silent_first(autojump_clock: MockClock) -> None:
    probe = Probe(echoing)
    async with serving(probe.spec("bidi", capacity=3, queue_timeout=0), wire="bidi") as house:
        calls = []
        for _ in range(3):
            calls.append(await house.call("bidi"))
            await trio.sleep(40)
        with at_once():
            await house.still()
        waits = await wait_for_a_slot(house)
        assert (await calls[0].rest())[1] == said_of("bidi")
        await trio.sleep(200)
        assert (house.endings, probe.live) == ({"refused": 1}, 3)
        for call in (*calls[1:], waits):
            await call.leave(Leave.CLOSE)


async def test_who_waits_for_his_own_share_alone_has_nobody_elses_silent_session_ended(autojump_clock: MockClock) -> None:
    probe = Probe(echoing)
    async with serving(probe.spec("bidi", capacity=4, party_share=50, queue_timeout=0), wire="bidi") as house:
        other = await house.call("bidi")
        await trio.sleep(50)
        line = house.line("http2")
        own = []
        for _ in range(3):
            own.append(await house.call("bidi", line=line))
            await trio.sleep(2)
        assert house.gateway.models["probe"].queued == 1
        await trio.sleep(40)
        assert house.endings == {"refused": 1}
        assert (await own[0].rest())[1] == said_of("bidi")
        assert probe.live == 3
        for call in (other, own[1]):
            await call.leave(Leave.CLOSE)


async def test_zero_is_never(autojump_clock: MockClock) -> None:
    probe = Probe(silent)
    async with serving(probe.spec("bidi", capacity=1, idle_when_wanted=0, queue_timeout=0), wire="bidi") as house:
        call = await house.call("bidi")
        second = await wait_for_a_slot(house)
        await trio.sleep(500)
        assert (probe.calls, house.endings) == (1, {})
        await call.leave(Leave.CLOSE)
        await second.leave(Leave.CLOSE)
