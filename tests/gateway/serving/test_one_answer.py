"""A server that is not the right one for its clients: each connection ends with its next answer, and nothing of it is lost."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from gateway.config import Config, WebSocketConfig
from protocols.events import ConnectionEnd
from tests.gateway.promises import Over, Probe, pausing, serving
from tests.gateway.serving.test_drain import get


@pytest.mark.parametrize("transport", ["http1", "http2"])
async def test_a_connection_ends_with_its_first_answer(transport: str, autojump_clock: Any) -> None:
    async with serving() as house:
        house.gateway.server.one_answer = True
        line = house.line(transport)
        assert (await get(line, "/v2/health/live"))[0] == 200
        assert isinstance(await line.event(5), ConnectionEnd)


async def test_http2_says_goaway_with_the_answer_and_not_before_a_request(autojump_clock: Any) -> None:
    async with serving() as house:
        house.gateway.server.one_answer = True
        line = house.line("http2")
        await line.peer.flush()
        await trio.sleep(2)
        await line.read()
        assert not line.goaways  # a client that gets one before its first request would only connect again
        assert (await get(line, "/v2/health/live"))[0] == 200
        await line.read()
        assert [goaway.last_stream for goaway in line.goaways][-1:] == [1]


@pytest.mark.parametrize("transport", ["http1", "http2"])
async def test_a_connection_that_waits_as_the_server_becomes_the_right_one_still_ends_with_its_answer(
    transport: str, autojump_clock: Any
) -> None:
    async with serving() as house:
        house.gateway.server.one_answer = True
        line = house.line(transport)
        await trio.sleep(1)
        house.gateway.server.one_answer = False
        assert (await get(line, "/v2/health/live"))[0] == 200
        assert isinstance(await line.event(5), ConnectionEnd)
        other = house.line(transport)
        for _ in range(3):
            assert (await get(other, "/v2/health/live"))[0] == 200
            await trio.sleep(5)


async def test_streams_of_http2_run_to_their_end_beside_the_answer_that_ends_the_connection(autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec("bidi")) as house:
        house.gateway.server.one_answer = True
        line = house.line("http2")
        call = await house.call("bidi", line=line)
        await call.take(3)
        assert (await get(line, "/v2/health/live"))[0] == 200
        await trio.sleep(60)
        probe.go.set()
        numbers, over = await call.rest()
        assert (len(numbers), over) == (3, Over("complete"))
        await line.over()
        assert house.endings == {"complete": 2}


async def test_a_websocket_goes_on(autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec("websocket"), config=Config(websocket=WebSocketConfig(ping_interval=0))) as house:
        house.gateway.server.one_answer = True
        call = await house.call("websocket")
        await call.take(3)
        await trio.sleep(60)
        probe.go.set()
        numbers, over = await call.rest()
        assert (len(numbers), over.how) == (3, "complete")
