"""Clients of the dialects, models with faults, and what is left over: what users' tests are made of."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from trio.testing import wait_all_tasks_blocked

from gateway.doorbell import Doorbell
from gateway.errors import TransportLost
from gateway.testing import Lie, ModelFaults, broken_ledgers, left_over, memory_gateway, seeded, with_faults
from models.adapt import spec_of
from models.blocking import run_step
from models.library.echo import Echo
from models.messages import Family, InferRequest, InferResponse, Prompt, Tensor
from models.session import Session


async def words(prompt: Prompt) -> AsyncIterator[str]:
    for word in prompt.text.split():
        yield word + " "


async def double(session: Session[InferRequest, InferResponse]) -> None:
    x = (await session.receive())["x"]
    await session.send(InferResponse(outputs=[Tensor(name="y", data=x + x)]))


echo = spec_of(Echo(), "echo")
DOUBLE = spec_of(double, "double", family=Family.TENSOR)
X = np.array([[1, 2], [3, 4]], dtype=np.int32)


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_a_client_knows_every_dialect(wire: str, autojump_clock: Any) -> None:
    async with memory_gateway([words, DOUBLE, echo], check=True) as served:
        client = served.client(wire)
        whole = await client.lmi("a b c", "words", max_new_tokens=2)
        assert (whole.text, whole.complete, whole.status) == ("a b ", True, 200)
        assert (await client.lmi("a b", "words", stream=True)).messages == ["a ", "b "]
        assert (await client.openai("a b", "words")).text.endswith("a b Assistant: ")
        assert (await client.openai("a b", "words", stream=True)).messages[-3:] == ["a ", "b ", "Assistant: "]
        for binary in (True, False):
            (reply,) = (await client.infer({"x": X}, "double", binary=binary)).messages
            assert np.array_equal(reply.outputs[0].array, X + X)
            (reply,) = (await client.infer({"x": X}, "double", binary=binary, stream=True)).messages
            assert np.array_equal(reply.outputs[0].array, X + X)
        for stream in (False, True) if wire == "http2" else ():
            for typed in (False, True):
                answer = await client.grpc_infer({"x": X}, "double", stream=stream, typed=typed)
                assert np.array_equal(answer.check().messages[0]["y"].elements, X + X)
        assert (await client.invoke("echo", b"\x00hello")).messages == [b"\x00hello"]
        assert (await client.invoke("echo", b"\x00hello", stream=True)).messages == [b"\x00hello"]
        refused = await client.lmi("a", "nobody")
        assert (refused.status, refused.complete) == (404, False)
        assert "nobody" in refused.error


async def test_conversations_go_both_ways(autojump_clock: Any) -> None:
    async with memory_gateway([echo], check=True) as served:
        stream = await served.client("http2").bidi("echo")
        for part in (b"one", b"two"):
            await stream.send(part)
            assert await stream.receive() == part
        await stream.end()
        assert await stream.receive() is None
        assert stream.answer.complete
        socket = await served.conversation("echo")
        await socket.send("three")
        assert await socket.receive() == b"three"
        await socket.close()
        assert await socket.receive() is None
        left = await served.client("http2").bidi("echo")
        await left.send(b"x")
        left.leave()


FAULTS = [
    (ModelFaults(raise_at=1), ["a "], "incident"),
    (ModelFaults(error_at=2), ["a ", "b "], "refused before message 2"),
    (ModelFaults(crash_at=1), ["a "], "the worker"),
    (ModelFaults(lie_at=1), ["a "], "incident"),
    (ModelFaults(lie_at=1, lie=Lie.FINISH), ["a "], ""),  # the first stands
    (ModelFaults(block_at=1), ["a ", "b ", "c "], ""),
]


@pytest.mark.parametrize(("faults", "heard", "error"), FAULTS, ids=lambda f: str(f)[:40])
async def test_a_model_fails_as_it_is_told(faults: ModelFaults, heard: list[str], error: str, autojump_clock: Any) -> None:
    async with memory_gateway([with_faults(words, faults)], check=True) as served:
        answer = await served.client().lmi("a b c", stream=True)
        assert (answer.messages, bool(answer.error)) == (heard, bool(error))
        assert error.lower() in answer.error.lower()


async def test_faults_may_depend_on_the_call(autojump_clock: Any) -> None:
    def chosen(call: Any) -> ModelFaults | None:
        return ModelFaults(raise_at=0) if call.path == "/predictions/words" else None

    async with memory_gateway([with_faults(words, chosen)], check=True) as served:
        assert (await served.client().lmi("a", "words")).status == 424
        assert (await served.client().lmi("a")).text == "a "


async def test_a_model_may_hang_and_take_its_time_to_be_cancelled(autojump_clock: Any) -> None:
    async with memory_gateway([with_faults(words, ModelFaults(hang_at=1, stubborn=4))], check=True) as served:
        client = served.client()
        with trio.move_on_after(2):
            await client.lmi("a b", stream=True)
        assert served.gateway.counts().slots_in_use == 1
        client.close()
        await trio.sleep(3)
        assert left_over(served.gateway) != []
        await trio.sleep(2)
        assert left_over(served.gateway) == []


async def test_a_model_may_give_too_many_rows(autojump_clock: Any) -> None:
    async with memory_gateway([with_faults(DOUBLE, ModelFaults(lie_at=0, lie=Lie.ROWS))], check=True) as served:
        (reply,) = (await served.client().infer({"x": X}, "double")).messages
        assert reply.outputs[0].array.shape == (4, 2)


async def test_its_worker_crashes_when_it_is_told(autojump_clock: Any) -> None:
    crash = Doorbell()
    async with memory_gateway([with_faults(echo, ModelFaults(), crash=crash)], check=True) as served:
        stream = await served.client("http2").bidi("echo")
        await stream.send(b"x")
        assert await stream.receive() == b"x"
        crash.ring()
        assert (await stream.rest()).error
        await trio.sleep(1)
        assert (await served.client().invoke("echo", b"again")).messages == [b"again"]


async def test_what_is_left_is_named_and_what_a_block_raises_comes_out_alone(autojump_clock: Any) -> None:
    with pytest.raises(AssertionError, match=r"^10 s after the last client left there are 1 slots in use, 5 bytes of the"):  # noqa: PT012
        async with memory_gateway([words], check=True) as served:
            served.gateway.budget.try_reserve(5)
            served.gateway.supervisor.workers["words"].slots.free -= 1
    with pytest.raises(TransportLost, match="mine"):
        async with memory_gateway([words], check=True):
            raise TransportLost("mine")


async def test_a_broken_ledger_is_named(autojump_clock: Any) -> None:
    async with memory_gateway([echo]) as served:
        stream = await served.client("http2").bidi("echo")
        await stream.send(b"x" * 100)
        await wait_all_tasks_blocked()
        assert list(broken_ledgers(served.gateway)) == []
        (connection,) = served.gateway.server.connections
        wire: Any = connection.wire
        wire._machine._windows.connection.owed += 1
        (broken,) = broken_ledgers(served.gateway)
        assert "the window of stream 0" in broken
        wire._machine._windows.connection.owed -= 1


def test_a_seed_decides_whose_turn_it_is_and_what_is_random() -> None:
    async def shuffled() -> tuple[list[int], bytes]:
        import os

        order: list[int] = []

        async def one(i: int) -> None:
            await run_step(lambda: None)
            order.append(i)

        async with trio.open_nursery() as nursery:
            for i in range(30):
                nursery.start_soon(one, i)
        return order, os.urandom(8)

    def run(seed: int) -> Any:
        with seeded(seed):
            return trio.run(shuffled, clock=trio.testing.MockClock(autojump_threshold=0))

    assert run(1) == run(1) != run(2)
    assert run(1)[0] != run(2)[0]
