"""A stream counts while it runs: each look has what came since the last one, and its end adds only the rest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.client.questions import lmi
from gateway.core.waits import INPUT, ROOM, SLOT, Waits
from gateway.telemetry.account import PARTS
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.messages import Part, Prompt, Token
from tests.gateway.telemetry.test_metrics import Samples, Scrape

KiB = 1024
X = {"x": np.zeros(4, np.float32)}


async def words(prompt: Prompt) -> AsyncIterator[Token]:
    for number in range(8):
        await trio.sleep(1)
        yield Token(text="word", id=number)


async def flood(prompt: Prompt) -> AsyncIterator[Token]:
    for number in range(5000):
        yield Token(text="x" * 100, id=number)


async def echo(part: Part) -> Part:
    return part


async def wait(x: np.ndarray) -> np.ndarray:
    await trio.sleep(3)
    return x


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_the_tokens_of_a_stream_that_runs_are_counted(wire: str, autojump_clock: Any) -> None:
    async with memory_gateway([words]) as house:
        registry = house.gateway.registry
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.client(wire).lmi, "x", "words")
            await trio.sleep(3.5)
            scrape = Scrape(registry)
            assert scrape.total("everywire_exchange_sent_items_total", model="words") == 3
            assert scrape.total("everywire_exchange_spent_seconds_total", model="words", part="model") == pytest.approx(3.5)
            assert scrape.total("everywire_exchange_received_items_total", model="words") == 1
            assert (
                scrape.total("everywire_exchanges_total") == scrape.total("everywire_exchange_duration_seconds_count") == 0
            )
            await trio.sleep(2)
            assert Scrape(registry).total("everywire_exchange_sent_items_total") == 5
        scrape = Scrape(registry)
        assert scrape.total("everywire_exchange_sent_items_total") == 8
        assert scrape.total("everywire_exchange_spent_seconds_total") == pytest.approx(8)
        assert scrape.total("everywire_exchange_first_item_seconds_count") == 1
        assert scrape.total("everywire_exchanges_total", ending="complete") == 1


async def load(house: MemoryGateway) -> None:
    """Calls of each kind: streams, a queue, a reader that stops for a while, and a WebSocket."""

    async def stalled() -> None:
        talk = house.client("http1").about(lmi("x", "flood", stream=True, max_new_tokens=5000))
        await talk.begin()
        await trio.sleep(4)
        talk.leave()

    async def socket() -> None:
        talk = await house.conversation("echo")
        for _ in range(4):
            await talk.send(b"part")
            assert await talk.receive()
            await trio.sleep(0.9)
        await talk.close()
        assert await talk.receive() is None

    async with trio.open_nursery() as nursery:
        for wire in ("http1", "http2"):
            nursery.start_soon(house.client(wire).lmi, "x", "words")
            for _ in range(2):
                nursery.start_soon(house.client(wire).infer, X, "wait")
                await wait_all_tasks_blocked()  # one after the other, or Trio chooses who is first
        nursery.start_soon(stalled)
        nursery.start_soon(socket)


async def totals(looks: float) -> Samples:
    """The counters at the end of the load, with a look each `looks` seconds; no counter may go back."""
    async with memory_gateway([words, flood, echo, spec_of(wait, capacity=1, queue=8)], capacity=KiB) as house:
        before = Scrape(house.gateway.registry)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load, house)
            while looks:
                await trio.sleep(looks)
                now = Scrape(house.gateway.registry)
                for key, value in before.counters.items():
                    assert now.samples[key] >= value, key
                before = now
                if len(nursery.child_tasks) == 0:
                    break
        await wait_all_tasks_blocked()
        counters = Scrape(house.gateway.registry).counters
        return {key: n for key, n in counters.items() if key[0].startswith("everywire_exchange") and n}


@pytest.mark.parametrize("looks", [0.37, 0.73])
async def test_looks_change_nothing_in_the_end(looks: float, autojump_clock: Any) -> None:
    unwatched, watched = await totals(0), await totals(looks)
    assert sum(n for (name, _), n in unwatched.items() if name == "everywire_exchange_spent_seconds_total") > 40
    assert {name for name, _ in watched} == {name for name, _ in unwatched}
    for key, n in unwatched.items():
        assert watched[key] == pytest.approx(n, rel=1e-6, abs=1e-3), key


async def test_what_was_counted_under_one_name_stays_there_when_the_model_is_known(autojump_clock: Any) -> None:
    async with memory_gateway([echo]) as house:
        tallies = house.gateway.metrics.tallies  # from now on exchanges are counted
        talk = await house.conversation("echo")
        await talk.send(b"part")
        await wait_all_tasks_blocked()
        (exchange,) = house.gateway.live
        known, exchange.model = exchange.model, ""
        tallies.count_live()
        exchange.model = known
        await talk.send(b"longer")
        await wait_all_tasks_blocked()
        await house.gateway.metrics.look_in_turns()
        await talk.close()
        await wait_all_tasks_blocked()
        counted = {model: tally.bytes_in for (_, _, model), tally in tallies.by_key.items()}
        assert counted == {"": len(b"part"), "echo": len(b"longer")}


@pytest.mark.parametrize(("what", "at"), [(SLOT, 0), (INPUT, 1), (ROOM, 2)])
def test_a_wait_that_goes_on_counts_so_far_and_is_not_changed_by_who_asks(what: int, at: int) -> None:
    waits = Waits()
    waits.begin(what, 10.0)
    assert waits.so_far(12.5)[at] == waits.so_far(12.5)[at] == sum(waits.so_far(12.5)) == 2.5
    assert waits.so_far(9.0)[at] == 0.0
    waits.over(what, 13.0)
    assert waits.so_far(20.0)[at] == (waits.slot, waits.input, waits.room)[at] == sum(waits.so_far(20.0)) == 3.0
    waits.begin(what, 20.0)
    waits.end(21.0)
    assert waits.so_far(30.0)[at] == sum(waits.so_far(30.0)) == 4.0


def test_the_parts_are_those_of_an_account() -> None:
    assert set(PARTS) == {"begin", "slot", "input", "room", "flush", "model"}


async def test_a_look_that_was_prepared_is_for_one_collection_alone(autojump_clock: Any) -> None:
    async with memory_gateway([words]) as house, trio.open_nursery() as nursery:
        metrics = house.gateway.metrics
        nursery.start_soon(house.client().lmi, "x", "words")
        await trio.sleep(2.5)
        await metrics.prepare()
        assert Scrape(metrics.registry).total("everywire_exchange_sent_items_total") == 2
        await trio.sleep(2)
        assert Scrape(metrics.registry).total("everywire_exchange_sent_items_total") == 4
