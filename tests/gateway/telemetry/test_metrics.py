"""A scrape is true: it agrees with the clients, its counters never go back, and no peer can make it grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import trio
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from trio.testing import wait_all_tasks_blocked

from gateway.client import post
from gateway.client.conversations import Client
from gateway.client.questions import infer, lmi
from gateway.config import Config, DrainConfig, LimitsConfig
from gateway.errors import Refusal
from gateway.gateway import Gateway
from gateway.telemetry.metrics import exposition
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.messages import Part, Prompt, Token
from models.session import Session

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
KiB = 1024
X = {"x": np.zeros(4, np.float32)}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Scrape:
    """One exposition, read by the official parser of its format."""

    def __init__(self, registry: CollectorRegistry, accept: str = "") -> None:
        content_type, body = exposition(registry, accept)
        openmetrics = content_type.startswith("application/openmetrics-text")
        assert openmetrics == ("openmetrics" in accept)
        parse = parse_openmetrics if openmetrics else parse_text
        self.samples: Samples = {}
        for family in parse(body.decode()):
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in self.samples
                self.samples[key] = sample.value

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name that have these labels."""
        wanted = set(labels.items())
        return sum(value for (found, has), value in self.samples.items() if found == name and wanted <= has)

    def values(self, label: str) -> set[str]:
        """All that a label is, anywhere."""
        return {value for _, labels in self.samples for name, value in labels if name == label}

    @property
    def counters(self) -> Samples:
        return {
            key: value for key, value in self.samples.items() if key[0].endswith(("_total", "_bucket", "_count", "_sum"))
        }


async def add(x: np.ndarray) -> np.ndarray:
    return x


async def words(prompt: Prompt) -> AsyncIterator[Token]:
    for number in range(5):
        await trio.sleep(1)
        yield Token(text="word", id=number)


async def echo(part: Part) -> Part:
    return part


async def fails(prompt: Prompt) -> AsyncIterator[Token]:
    yield Token(text="word")
    raise RuntimeError("broken")


async def wait(x: np.ndarray) -> np.ndarray:
    await trio.sleep(3)
    return x


async def flood(prompt: Prompt) -> AsyncIterator[Token]:
    for number in range(5000):
        yield Token(text="x" * 100, id=number)


async def test_both_formats_agree_with_what_the_clients_saw_while_load_runs(autojump_clock: Any) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    received: Counter[str] = Counter()

    async def unary(house: MemoryGateway, wire: str) -> None:
        answer = await house.client(wire).infer(X, "add")
        assert answer.complete
        seen[wire, "complete"] += 1
        received["add"] += answer.received

    async def stream(house: MemoryGateway, wire: str, model: str) -> None:
        answer = await house.client(wire).lmi("x", model, stream=True)
        seen[wire, "model-error" if answer.error else "complete"] += 1
        received[model] += answer.received

    async def socket(house: MemoryGateway) -> None:
        talk = await house.conversation("echo")
        for _ in range(4):
            await talk.send(b"part")
            part = await talk.receive()
            assert part is not None
            received["echo"] += len(part)
        await talk.close()
        assert await talk.receive() is None
        seen["websocket", "cancelled-by-client"] += 1

    async with memory_gateway([add, words, echo, fails]) as house:
        registry = house.gateway.registry
        before = Scrape(registry)
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                for wire in ("http1", "http2"):
                    nursery.start_soon(unary, house, wire)
                    nursery.start_soon(stream, house, wire, "words")
                    nursery.start_soon(stream, house, wire, "fails")
                nursery.start_soon(socket, house)
            for accept in ("", OPENMETRICS) * 4:
                await trio.sleep(0.7)
                now = Scrape(registry, accept)
                for key, value in before.counters.items():
                    assert now.samples[key] >= value, key
                before = now
            assert before.total("everywire_live_exchanges") == 0
        await wait_all_tasks_blocked()
        for accept in ("", OPENMETRICS):
            scrape = Scrape(registry, accept)
            for (wire, ending), n in seen.items():
                name = {"http1": "http/1.1", "http2": "http/2"}.get(wire, wire)
                assert scrape.total("everywire_exchanges_total", wire=name, ending=ending) == n
            assert scrape.total("everywire_exchanges_total") == seen.total()
            for model, n in received.items():
                assert scrape.total("everywire_exchange_sent_bytes_total", model=model) == n
            assert scrape.total("everywire_exchange_sent_items_total", model="words") == 20 * 5
            assert scrape.total("everywire_exchange_received_items_total", model="echo") == 10 * 4
            assert scrape.total("everywire_exchange_received_bytes_total", model="echo") == 10 * 4 * len(b"part")
            assert scrape.total("everywire_model_calls_total", model="words", outcome="success") == 20
            assert scrape.total("everywire_model_calls_total", model="fails", outcome="failure") == 20
            assert scrape.total("everywire_exchange_first_item_seconds_count", model="words") == 20
            assert scrape.total("everywire_exchange_first_item_seconds_sum", model="words") == pytest.approx(20)
            assert scrape.total("everywire_exchange_first_item_seconds_bucket", model="words", le="0.5") == 0
            assert scrape.total("everywire_exchange_item_gap_seconds_sum", model="words") == pytest.approx(20)
            assert scrape.total("everywire_exchange_duration_seconds_sum", model="words") == pytest.approx(20 * 5)
            assert scrape.total("everywire_exchange_spent_seconds_total", model="words", part="model") == pytest.approx(100)


async def test_the_time_is_told_by_whom_it_was_spent_on(autojump_clock: Any) -> None:
    async with memory_gateway([spec_of(wait, capacity=1, queue=8)]) as house:
        registry = house.gateway.registry
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(house.client().infer, X, "wait")
            await trio.sleep(1)
            scrape = Scrape(registry)
            assert scrape.total("everywire_waiting_exchanges", wire="http/1.1", part="slot") == 2
            assert scrape.total("everywire_live_exchanges", wire="http/1.1") == 3
            assert scrape.total("everywire_model_queued", model="wait") == 2
            assert scrape.total("everywire_model_slots_in_use", model="wait") == scrape.total("everywire_model_slots") == 1
        scrape = Scrape(registry)
    assert scrape.total("everywire_waiting_exchanges") == 0
    assert scrape.total("everywire_exchange_spent_seconds_total", part="slot") == pytest.approx(9)
    assert scrape.total("everywire_exchange_spent_seconds_total", part="model") == pytest.approx(9)


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_what_a_client_that_does_not_read_makes_the_server_hold_is_seen(wire: str, autojump_clock: Any) -> None:
    async with memory_gateway([flood], capacity=KiB) as house:
        talk = house.client(wire).about(lmi("x", "flood", stream=True, max_new_tokens=5000))
        await talk.begin()
        await trio.sleep(5)
        scrape = Scrape(house.gateway.registry)
        assert scrape.total("everywire_held_bytes", hop="send") == pytest.approx(LimitsConfig().send_buffer, rel=0.1)
        assert scrape.total("everywire_waiting_exchanges", part="room") == 1
        talk.leave()


@pytest.mark.parametrize("wire", ["bidi", "websocket"])
async def test_what_a_model_that_does_not_read_leaves_is_seen(wire: str, autojump_clock: Any) -> None:
    async def deaf(session: Session[Part, Part]) -> None:
        await trio.sleep_forever()

    async with memory_gateway([deaf]) as house:
        if wire == "bidi":
            bidi = await house.client("http2").bidi("deaf")
            await bidi.send(bytes(20 * KiB))
        else:
            await (await house.conversation("deaf")).send(bytes(20 * KiB))
        await wait_all_tasks_blocked()
        scrape = Scrape(house.gateway.registry)
        assert scrape.total("everywire_held_bytes", hop="received") == pytest.approx(20 * KiB, rel=0.1)
        assert scrape.total("everywire_reserved_bytes") >= 20 * KiB


async def test_a_body_and_its_memory_are_seen(autojump_clock: Any) -> None:
    asked = infer({"x": np.zeros(64 * KiB, np.float32)}, "wait")
    assert asked.body is not None
    async with memory_gateway([wait]) as house, trio.open_nursery() as nursery:
        nursery.start_soon(house.client().ask, asked)
        await trio.sleep(1)
        scrape = Scrape(house.gateway.registry)
        assert scrape.total("everywire_held_bytes", hop="bodies") == len(asked.body)
        assert scrape.total("everywire_body_pool_bytes", state="lent") == len(asked.body)


async def test_refusals_are_counted_by_their_reason(autojump_clock: Any) -> None:
    gone = (b"x-request-timeout", b"0")
    limits = LimitsConfig(body=2048 * KiB, total_bytes=1024 * KiB, party_share=100)
    small = Config(limits=limits, drain=DrainConfig(timeout=20, delay=20))
    one = spec_of(wait, "one", capacity=1, queue=1, queue_timeout=1)
    async with memory_gateway([one, add], small) as house:
        registry, asking = house.gateway.registry, house.client()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.client().infer, X, "one")
            await wait_all_tasks_blocked()
            nursery.start_soon(house.client().infer, X, "one")  # for as long as it may
            await wait_all_tasks_blocked()
            assert (await asking.infer(X, "one")).status == 503
            asked = infer(X, "add")
            peer = house.http1()
            await peer.send(*post(1, asked.path, asked.body, [*asked.headers, gone]))
            assert (await peer.read_answer(1))[0] == 504
            large = {"x": np.zeros(300 * KiB, np.float32)}
            assert (await house.client().infer(large, "add")).status == 503
            nursery.start_soon(house.gateway.drain)
            await wait_all_tasks_blocked()
            assert (await asking.infer(X, "add")).status == 503
            scrape = Scrape(registry)
            assert scrape.total("everywire_draining") == 1
    counted = {reason: scrape.total("everywire_refusals_total", reason=reason.value) for reason in Refusal}
    happened = {Refusal.QUEUE, Refusal.NO_TIME, Refusal.MEMORY, Refusal.DRAINING}
    assert counted == {reason: int(reason in happened) for reason in Refusal}
    after = Scrape(registry)
    assert after.total("everywire_refusals_total", reason="queue-timeout") == 1


async def test_names_that_peers_make_up_are_no_labels(autojump_clock: Any) -> None:
    async with memory_gateway([add]) as house:
        registry = house.gateway.registry
        for number in range(50):
            garbage = f"made-up-{number}"
            for wire in ("http1", "http2"):
                client: Client = house.client(wire)
                assert (await client.infer(X, garbage)).status == 404
                assert (await client.lmi("x", garbage)).status == 404
                assert (await client.openai("x", garbage)).status == 404
                assert (await client.invoke(garbage, b"{}")).status >= 400
                peer = house.http1()
                await peer.send(*post(1, f"/v2/repository/models/{garbage}/load", b"{}"))
                assert (await peer.read_answer(1))[0] == 403
        scrape = Scrape(registry)
        sizes = len(scrape.samples)
        assert scrape.values("model") == {"", "add"}
        assert scrape.total("everywire_exchanges_total", model="") == 50 * 2 * 5
        assert (await house.client().infer(X, "made-up-anew")).status == 404
        assert len(Scrape(registry).samples) == sizes


async def test_two_gateways_share_nothing(autojump_clock: Any) -> None:
    async with memory_gateway([add]) as one, memory_gateway([add]) as other:
        first, second = one.gateway.registry, other.gateway.registry
        assert first is one.gateway.registry
        await one.client().infer(X, "add")
        assert Scrape(first).total("everywire_exchanges_total") == 1
        assert Scrape(second).total("everywire_exchanges_total") == 0
    assert not [family.name for family in REGISTRY.collect() if family.name.startswith("everywire")]


async def test_a_gateway_that_nobody_asks_counts_no_exchange_for_it(autojump_clock: Any) -> None:
    async with memory_gateway([add]) as house:
        await house.client().infer(X, "add")
        assert Scrape(house.gateway.registry).total("everywire_exchanges_total") == 0
        assert house.gateway.counts().endings == {"complete": 1}
        await house.client().infer(X, "add")
        assert Scrape(house.gateway.registry).total("everywire_exchanges_total") == 1


async def test_a_reload_turns_no_counter_back(autojump_clock: Any) -> None:
    async with memory_gateway([add, wait]) as house:
        registry = house.gateway.registry
        for number in range(1, 5):
            await house.client().infer(X, "add")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(house.client().infer, X, "wait")
                await wait_all_tasks_blocked()
                for name in ("add", "wait"):
                    await house.gateway.reload(name)
                assert Scrape(registry).total("everywire_model_slots_in_use", model="wait") == 1
            scrape = Scrape(registry)
            for name in ("add", "wait"):
                assert scrape.total("everywire_model_calls_total", model=name, outcome="success") == number
                assert scrape.total("everywire_model_state", model=name, state="ready") == 1
                assert scrape.total("everywire_model_state", model=name) == 1


async def test_a_model_that_has_instances_of_its_own_has_no_processes(autojump_clock: Any) -> None:
    class Counting:
        instances = 3  # an attribute of the author's, without a meaning for the gateway

        async def __call__(self, session: Session[Prompt, Token]) -> None:
            await session.send(Token(text="one"))

    async with memory_gateway([spec_of(Counting(), "counting")]) as house:
        assert house.gateway.models["counting"].instances == ()
        assert Scrape(house.gateway.registry).total("everywire_instance_up") == 0


async def test_stopping_is_a_histogram_from_the_leaving_to_the_return(autojump_clock: Any) -> None:
    async def lingers(prompt: Prompt) -> AsyncIterator[Token]:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(2)
        yield Token(text="")

    async with memory_gateway([lingers]) as house:
        talk = house.client("http1").about(lmi("x", "lingers"))
        await talk.begin()
        await trio.sleep(1)
        talk.leave()
        await trio.sleep(5)
        scrape = Scrape(house.gateway.registry)
    assert scrape.total("everywire_model_stop_seconds_sum", model="lingers") == pytest.approx(2)
    assert scrape.total("everywire_model_stop_seconds_bucket", model="lingers", le="2.5") == 1
    assert scrape.total("everywire_model_stop_seconds_bucket", model="lingers", le="1.0") == 0


def test_a_gateway_that_does_not_serve_can_be_scraped() -> None:
    scrape = Scrape(Gateway(models=[add]).registry)
    assert scrape.total("everywire_model_state", model="add", state="loading") == 1
    assert scrape.total("everywire_build_info") == 1
