"""Rolling batches behind the whole gateway: a client's window is its sequence's credit, and what ends is nobody else's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, final

import pytest
import trio
import trio.testing

from gateway.client import Peer, post
from gateway.config import Config, LimitsConfig, LMIConfig
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.errors import ModelError
from models.library.lm import neural
from models.messages import GenerationParameters, Prompt, Token
from models.rolling import RollingBatch, rolling
from models.spec import ModelSpec, RestartPolicy
from protocols.events import Data, End, Response
from tests.models.steps import Counting

LMI = {"content-type": "application/json"}


def spec(steps: Counting, **options: Any) -> ModelSpec:
    """The counting model on a rolling batch that steps on the loop."""

    @asynccontextmanager
    async def load() -> AsyncIterator[RollingBatch[Any]]:
        async with rolling(steps, **{"blocking": False, **options}) as batch:
            yield batch

    return spec_of(load, "count", restart=RestartPolicy(backoff=0.1))


def served(*specs: ModelSpec, capacity: int = 4096, **limits: Any) -> AbstractAsyncContextManager[MemoryGateway]:
    """Small buffers, and a patience with readers that no test comes to the end of."""
    bounds = LimitsConfig(**{"send_buffer": 4096, "write_stall": 1e6, **limits})
    return memory_gateway(specs, Config(limits=bounds, lmi=LMIConfig(unsupported="ignore")), capacity=capacity)


def asking(name: str, length: int, *, stream: bool = True, **parameters: Any) -> bytes:
    return json.dumps({"inputs": name, "parameters": {"max_new_tokens": length, **parameters}, "stream": stream}).encode()


@final
class Caller:
    """A client on a connection of its own, which reads when it is told to."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.body = bytearray()
        self.status = 0
        self.over = False

    @classmethod
    async def call(cls, served: MemoryGateway, body: bytes, kind: str = "http1", model: str = "count") -> Caller:
        caller = cls(served.http1() if kind == "http1" else served.http2())
        await caller.peer.send(*post(1, f"/predictions/{model}", body))
        return caller

    async def read(self, tokens: float = float("inf")) -> list[int]:
        """Reads until there are `tokens` ids or the answer is over. Returns the ids so far."""
        while not self.over and len(self.ids) < tokens:
            event = await self.peer.next_event()
            if isinstance(event, Response):
                self.status = event.status
            elif isinstance(event, Data):
                self.body += b"".join(event.buffers)
                self.peer.credit(event)
            elif isinstance(event, End):
                self.over = True
        return self.ids

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in bytes(self.body).split(b"\n")[:-1] if line]

    @property
    def ids(self) -> list[int]:
        return [line["token"]["id"] for line in self.lines if "token" in line and line["token"]["text"]]


@pytest.mark.parametrize("kind", ["http1", "http2"])
async def test_a_client_that_stops_reading_parks_its_sequence_and_no_other(kind: str) -> None:
    steps = Counting()
    async with served(spec(steps)) as house:
        slow = await Caller.call(house, asking("s", 60_000), kind)
        await trio.testing.wait_all_tasks_blocked()
        stopped_at = steps.of("s")
        assert 0 < stopped_at < 3000
        before = len(steps.steps)
        others = [await Caller.call(house, asking(name, 40), kind) for name in "ab"]
        for other in others:
            assert await other.read() == [*range(40)]
        assert steps.of("s") == stopped_at
        assert len(steps.steps) - before <= 80, "the others go on as if it were not there"

        assert await slow.read(stopped_at + 500) == [*range(len(slow.ids))]
        assert steps.of("s") > stopped_at
    assert "s" in steps.closed


async def test_a_client_that_leaves_is_taken_out_at_the_next_step() -> None:
    steps = Counting()
    async with served(spec(steps)) as house:
        stays, leaves = [await Caller.call(house, asking(name, 60_000)) for name in "sl"]
        await leaves.read(5)
        await stays.read(5)
        leaves.peer.close()
        await trio.testing.wait_all_tasks_blocked()
        assert steps.closed == ["l"]
        seen = steps.of("l")
        await stays.read(len(stays.ids) + 200)
        assert steps.of("l") == seen
        assert house.gateway.counts().endings == {"cancelled-by-client": 1}
        assert house.gateway.counts().slots_in_use == 1


async def test_the_failure_of_one_is_its_clients_error_and_nobody_elses() -> None:
    steps = Counting()
    steps.fail["open x"] = ModelError("no x here", code="NoX", status=422)
    async with served(spec(steps)) as house:
        fine = await Caller.call(house, asking("f", 60))
        refused = await Caller.call(house, asking("x", 60))
        await refused.read()
        assert (refused.status, json.loads(refused.body)["error"]) == (422, "no x here")
        await fine.read(10)
        broken = await Caller.call(house, asking("b", 60_000))
        await broken.read(5)
        steps.fail["give b"] = ModelError("b is broken", status=424)
        await broken.read()
        assert "b is broken" in broken.body.decode()
        assert await fine.read() == [*range(60)]


async def test_a_step_that_raises_ends_all_of_its_sessions_and_the_model_comes_back(autojump_clock: Any) -> None:
    steps = Counting()
    async with served(spec(steps)) as house:
        everyone = [await Caller.call(house, asking(name, 60_000)) for name in "abc"]
        for caller in everyone:
            await caller.read(5)
        steps.fail["step"] = ZeroDivisionError("a bad kernel")
        for caller in everyone:
            await caller.read()
            assert "the worker of model 'count' ended" in caller.body.decode()
        assert house.gateway.counts().endings == {"model-error": 3}
        assert sorted(steps.closed) == ["a", "b", "c"]
        await trio.sleep(1)
        again = await Caller.call(house, asking("d", 7))
        assert await again.read() == [*range(7)]


async def test_a_long_prompt_does_not_stop_the_tokens_of_the_others() -> None:
    steps = Counting()
    async with served(spec(steps, prefill_budget=10)) as house:
        running = await Caller.call(house, asking("r", 60_000))
        await running.read(3)
        await Caller.call(house, asking("l", 1, tokens=500))
        while sum(size for _, size in steps.prefills) < 500:
            await running.read(len(running.ids) + 10)
        taken = [after - before for before, after in zip(steps.rounds, steps.rounds[1:], strict=False)]
        assert max(taken) == 10


async def test_unloading_closes_every_sequence() -> None:
    steps = Counting()
    async with served(spec(steps)) as house:
        for name in "ab":
            await (await Caller.call(house, asking(name, 60_000))).read(3)
    assert sorted(steps.closed) == ["a", "b"]


# -- the transformer -------------------------------------------------------------------------------------------------


def direct(number: int) -> list[Token]:
    """The model's tokens for one prompt without a batch."""
    model = MODEL
    (sequence,) = model.open(Prompt(text=f"Return the {number}", parameters=GenerationParameters(**parameters(number))))
    while sequence.pending:
        model.prefill(sequence, sequence.pending)
    told: list[Any] = []
    while not told or told[-1].finish is None:
        told += model.step([sequence])
    model.close(sequence)
    return told


def parameters(number: int) -> dict[str, Any]:
    return {"max_new_tokens": 10 + number, "do_sample": number % 2 == 1, "seed": number, "ignore_eos_token": True}


MODEL = neural.TransformerModel.load()


@pytest.mark.parametrize("kind", ["http1", "http2"])
async def test_many_clients_of_the_transformer_get_what_each_would_get_alone(kind: str) -> None:
    async with served(spec_of(neural.load, "tlm"), capacity=1 << 20, send_buffer=65536) as house:
        callers = []
        for number in range(9):
            asked = {"inputs": f"Return the {number}", "parameters": parameters(number), "stream": True}
            callers.append(await Caller.call(house, json.dumps(asked).encode(), kind, "tlm"))
        for number, caller in enumerate(callers):
            await caller.read()
            told: Sequence[Any] = [line["token"] for line in caller.lines]
            assert [(token["id"], token["text"], token["log_prob"]) for token in told] == [
                (token.id, token.text, token.log_prob) for token in direct(number)
            ]


async def test_what_the_transformer_does_not_do_is_refused_by_name() -> None:
    async with memory_gateway([spec_of(neural.load, "tlm")], Config(lmi=LMIConfig(unsupported="refuse"))) as house:
        caller = await Caller.call(house, asking("Return", 3, num_beams=2, stream=False), model="tlm")
        await caller.read()
        assert caller.status == 424
        assert "num_beams: model 'tlm' does not support it" in caller.body.decode()
