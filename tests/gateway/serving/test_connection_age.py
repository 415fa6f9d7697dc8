"""A connection that is old enough sends its client elsewhere: no stream is cut, and no request is lost."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from gateway.config import Config, LimitsConfig, WebSocketConfig
from protocols.events import ConnectionEnd
from tests.gateway.promises import House, Line, Over, Probe, answering, pausing, serving
from tests.gateway.serving.test_drain import get

AGE = 60.0


def aged(**limits: Any) -> Config:
    return Config(limits=LimitsConfig(connection_age=AGE, **limits))


def count(house: House) -> dict[str, int]:
    """How many connections the server has ended, by why."""
    return {why.value: n for why, n in house.gateway.server.endings_of_connections.items() if n}


async def until(seconds: float) -> None:
    """Sleeps until 1.5 s after this time, so that a tick has looked at the connections."""
    await trio.sleep_until(seconds + 1.5)


async def test_http2_says_goaway_and_its_streams_go_on_to_their_end(autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec("bidi"), config=aged()) as house:
        line = house.line("http2")
        calls = [await house.call("bidi", line=line) for _ in range(3)]
        for call in calls:
            await call.take(3)
        await until(AGE)
        await line.read()
        assert [(g.code, g.last_stream) for g in line.goaways][:1] == [(0, 2**31 - 1)]
        await until(AGE + 2)
        await line.read()
        assert [(g.code, g.last_stream) for g in line.goaways] == [(0, 2**31 - 1), (0, calls[-1].stream)]
        await trio.sleep(10 * AGE)
        assert (probe.live, house.connections) == (3, 1)
        probe.go.set()
        for call in calls:
            numbers, over = await call.rest()
            assert (len(numbers), over) == (3, Over("complete"))
        await line.over()
        assert house.endings == {"complete": 3}
        assert count(house) == {"aged": 1}


async def test_a_stream_that_comes_between_the_two_goaways_is_served(autojump_clock: Any) -> None:
    probe = Probe(answering)
    probe.go.set()
    async with serving(probe.spec("bidi"), config=aged()) as house:
        house.gateway.server.chance = lambda: 0.0
        line = house.line("http2")
        await (await house.call("bidi", line=line)).rest()
        await trio.sleep_until(AGE + 0.5)
        assert count(house) == {"aged": 1}
        late = await house.call("bidi", line=line)  # its client has not read the first
        assert not line.goaways
        assert (await late.rest())[1] == Over("complete")
        await line.over()
        assert house.endings == {"complete": 2}


@pytest.mark.parametrize("transport", ["http1", "http2"])
async def test_an_idle_connection_is_closed_long_before_it_would_be(transport: str, autojump_clock: Any) -> None:
    async with serving(config=aged(keep_alive=10_000)) as house:
        line = house.line(transport)
        assert (await get(line, "/v2/health/live"))[0] == 200
        await trio.sleep_until(AGE * 0.8)
        assert (await get(line, "/v2/health/live"))[0] == 200
        assert isinstance(await line.event(99), ConnectionEnd)
        assert AGE * 0.9 <= trio.current_time() <= AGE + 5
        assert count(house) == {"aged": 1}


async def test_http1_says_close_with_the_next_answer_and_loses_no_request(autojump_clock: Any) -> None:
    """A client that asks again and again is told before the end."""
    async with serving(config=aged()) as house:
        line = house.line("http1")
        answered = 0
        while b"connection: close" not in line.transport.read:
            assert (await get(line, "/v2/health/live"))[0] == 200
            answered += 1
            await trio.sleep(0.5)
        assert AGE * 0.9 <= trio.current_time() <= AGE + 3
        await line.over()
        assert house.endings == {"complete": answered}
        assert count(house) == {"aged": 1}


async def test_http1_says_close_on_the_answer_under_way_where_its_head_has_not_left(autojump_clock: Any) -> None:
    probe = Probe(answering)
    async with serving(probe.spec("json-http1"), config=aged()) as house:
        call = await house.call("json-http1")
        await until(AGE)
        probe.go.set()
        _, over = await call.rest()
        assert over.how == "complete"
        assert b"connection: close" in call.line.transport.read
        assert isinstance(await call.line.event(99), ConnectionEnd)


async def test_a_stream_of_http1_goes_on_and_its_connection_ends_behind_it(autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec("lmi-http1"), config=aged()) as house:
        call = await house.call("lmi-http1")
        await call.take(3)
        await until(10 * AGE)
        assert probe.live == 1
        probe.go.set()
        numbers, over = await call.rest()
        assert (len(numbers), over.how) == (3, "complete")
        assert isinstance(await call.line.event(99), ConnectionEnd)
        assert house.endings == {"complete": 1}


async def test_a_websocket_is_left_alone(autojump_clock: Any) -> None:
    probe = Probe(pausing)
    config = Config(limits=LimitsConfig(connection_age=AGE), websocket=WebSocketConfig(ping_interval=0))
    async with serving(probe.spec("websocket"), config=config) as house:
        call = await house.call("websocket")
        await call.take(3)
        await until(10 * AGE)
        assert (probe.live, house.connections, count(house)) == (1, 1, {})
        probe.go.set()
        numbers, over = await call.rest()
        assert (len(numbers), over.how) == (3, "complete")


@pytest.mark.parametrize("wire", ["grpcstream-http2", "inferstream-http2"])
async def test_grpc_is_as_http2(wire: str, autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec(wire), config=aged(), wire=wire) as house:
        call = await house.call(wire)
        await call.take(3)
        await until(AGE + 2)
        probe.go.set()
        numbers, over = await call.rest()
        assert (len(numbers), over.how) == (3, "complete")
        await call.line.over()
        assert [g.code for g in call.line.goaways] == [0, 0]


@pytest.mark.parametrize(("chance", "share"), [(0.0, 1.0), (0.5, 0.95), (1.0, 0.9)])
async def test_each_connection_has_its_own_age_by_chance(chance: float, share: float, autojump_clock: Any) -> None:
    async with serving(config=aged()) as house:
        house.gateway.server.chance = lambda: chance
        line = house.line("http2")
        await get(line, "/v2/health/live")
        await trio.sleep_until(AGE * share - 1)
        assert count(house) == {}
        await trio.sleep_until(AGE * share + 1.5)
        assert count(house) == {"aged": 1}


async def test_without_an_age_connections_are_as_old_as_they_like(autojump_clock: Any) -> None:
    async with serving(config=Config(limits=LimitsConfig(keep_alive=1e6))) as house:
        lines: list[Line] = [house.line("http1"), house.line("http2")]
        for line in lines:
            await get(line, "/v2/health/live")
        await trio.sleep(900)
        assert (house.connections, count(house)) == (2, {})


async def test_a_drain_says_goodbye_once_to_a_connection_that_was_aged(autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec("bidi"), config=aged()) as house:
        call = await house.call("bidi")
        await call.take(3)
        await until(AGE + 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.gateway.drain)
            await trio.sleep(5)
            probe.go.set()
            assert (await call.rest())[1] == Over("complete")
            await call.line.over()
        assert len(call.line.goaways) == 2
        assert house.gateway.drain_report is not None
        assert house.gateway.drain_report.clean


async def test_a_websocket_that_waits_for_its_slot_when_its_connection_is_old_is_opened_whole(autojump_clock: Any) -> None:
    probe = Probe(pausing)
    config = Config(limits=LimitsConfig(connection_age=AGE), websocket=WebSocketConfig(ping_interval=0))
    async with serving(probe.spec("websocket", capacity=1, queue_timeout=0, idle_when_wanted=0), config=config) as house:
        first = await house.call("websocket")
        await first.take(3)
        opened = []

        async def wait() -> None:
            opened.append(await house.call("websocket"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await until(2 * AGE)
            assert not opened
            probe.go.set()
            await first.rest()
        numbers, over = await opened[0].rest()
        assert (len(numbers), over.how) == (6, "complete")
