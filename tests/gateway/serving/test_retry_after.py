"""Retry-After: a client is never told to return too early, and clients refused together do not return together."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import trio

from gateway.config import Config, ListenConfig
from gateway.errors import GatewayError, Overloaded, Unavailable, spread_over
from gateway.gateway import Gateway
from tests.gateway.promises import House, Probe, answering, serving
from tests.gateway.serving.test_connection_table import REQUEST, arrive, limits, read


@pytest.mark.parametrize(
    ("seconds", "least", "most"), [(0, 1, 2), (0.2, 1, 2), (1, 1, 2), (3.1, 4, 5), (8, 8, 10), (60, 60, 75)]
)
def test_it_is_up_to_a_quarter_later_and_never_earlier(seconds: float, least: int, most: int) -> None:
    chance = random.Random(1)
    said = Counter(spread_over(seconds, chance.random()) for _ in range(1000))
    assert sorted(said) == list(range(least, most + 1))
    assert min(said.values()) * len(said) > 700  # each about as often
    assert (spread_over(seconds, 0.0), spread_over(seconds, 1.0)) == (least, most)


def test_an_error_says_it_by_the_chance_it_was_given() -> None:
    for error, retry in ((Overloaded("busy", retry_after=8), b"10"), (Unavailable("gone", retry_after=None), None)):
        error.chance = 0.9
        assert dict(error.retry).get(b"retry-after") == retry
    assert GatewayError("no use to try again").retry == ()


async def refusals(house: House, model: str, times: int) -> list[str]:
    return [(await house.ask(f"/predictions/{model}", b'{"inputs": "x"}'))[1]["retry-after"] for _ in range(times)]


async def test_clients_that_are_refused_together_do_not_come_back_together(autojump_clock: Any) -> None:
    told = []
    for _ in range(2):
        probe = Probe(answering)
        async with serving(probe.spec("lmi-http1", capacity=1, queue=0)) as house:
            house.gateway.server.chance = random.Random(7).random
            live = await house.call("lmi-http1")
            await house.still()
            told.append(await refusals(house, "probe", 20))
            probe.go.set()
            await live.rest()
    assert set(told[0]) == {"1", "2"}
    assert told[0] == told[1]  # by a seed all of it comes again


async def test_who_comes_when_every_place_is_taken_is_told_by_chance_too(autojump_clock: Any) -> None:
    probe = Probe(answering)
    async with serving(probe.spec("json-http1"), config=limits(connections=1)) as house:
        live = await house.call("json-http1")
        await house.still()
        for chance, seconds in ((0.0, b"1"), (0.9, b"2")):
            house.gateway.server.chance = lambda chance=chance: chance
            refused = arrive(house)
            refused.try_send([REQUEST])
            refused.send_eof()
            assert b"\r\nretry-after: %b\r\n" % seconds in await read(refused)
        probe.go.set()
        await live.rest()


async def test_an_asgi_server_says_it_for_a_gateway_that_does_not_run(autojump_clock: Any) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    gateway = Gateway(Config(listen=ListenConfig(port=-1)), chance=lambda: 0.9)
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    await gateway.serve_asgi(scope, trio.sleep_forever, send)
    assert (b"retry-after", b"2") in sent[0]["headers"]
