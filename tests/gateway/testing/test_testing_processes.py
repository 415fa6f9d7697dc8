"""Processes that are played in memory: they answer as real ones do, and whatever befalls one is told to whom it concerns."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import trio

from gateway.gateway import Gateway
from gateway.instances.messages import Credit, Ended, Message, Ping, encoded, frames_of
from gateway.instances.spawn import Exit
from gateway.testing import MemoryGateway, MemoryPlace, MemoryProcess, Moment, in_memory_processes, memory_gateway, seeded
from models.adapt import spec_of
from models.library.echo import Echo
from models.messages import Family, InferRequest, InferResponse, Prompt, Tensor
from models.session import Session
from models.spec import ModelSpec, RestartPolicy

PATIENCE = 30
X = np.arange(20_000, dtype=np.int32)


async def words(prompt: Prompt) -> AsyncIterator[str]:
    """Those of the prompt, one a second; the word "stay" is not over."""
    for word in prompt.text.split():
        await trio.sleep(1)
        if word == "stay":
            await trio.sleep_forever()
        yield word + " "


async def double(session: Session[InferRequest, InferResponse]) -> None:
    x = (await session.receive())["x"]
    await session.send(InferResponse(outputs=[Tensor(name="y", data=x + x)]))


async def until(true: Callable[[], Any]) -> None:
    with trio.fail_after(PATIENCE):
        while not true():  # noqa: ASYNC110  # nothing tells when
            await trio.sleep(0.01)


def ready(memory: MemoryGateway, name: str) -> int:
    return sum(one.state == "ready" for one in memory.gateway.models[name].instances)


def busy(memory: MemoryGateway) -> list[int]:
    return [one.number for one in memory.gateway.models["m"].instances if one.sessions]


PLACES = [MemoryPlace(), MemoryPlace(capacity=100), MemoryPlace(piece=7000, rest=0.01), MemoryPlace(notice=0.3)]


@pytest.mark.parametrize("place", PLACES, ids=["plain", "narrow", "slow", "noticed-late"])
async def test_a_model_there_answers_as_it_does_here(place: MemoryPlace, autojump_clock: Any) -> None:
    models = [words, spec_of(double, "double", family=Family.TENSOR), spec_of(Echo(), "echo")]
    there = [in_memory_processes(model, instances=2, place=place)[0] for model in models]
    async with memory_gateway(there, check=True) as memory:
        client = memory.client()
        assert (await client.lmi("a b c", "words", stream=True)).messages == ["a ", "b ", "c "]
        (reply,) = (await client.infer({"x": X}, "double")).messages
        assert np.array_equal(reply.outputs[0].array, X + X)
        assert b"".join((await client.invoke("echo", bytes(30_000), stream=True)).messages) == bytes(30_000)
        assert [one.state for one in memory.gateway.models["words"].instances] == ["ready", "ready"]


def _garbage(process: MemoryProcess) -> None:
    process.spoil(b"\x00\x00\x00\x01\xc1")


def said(*messages: Message) -> Callable[[MemoryProcess], None]:
    data = b"".join(frames_of([encoded(message) for message in messages]))
    return lambda process: process.spoil(data)


BEFALLS: dict[str, tuple[Callable[[MemoryProcess], None], str]] = {
    "killed": (MemoryProcess.kill, "InstanceEnded: its process ended (SIGKILL)"),
    "crashed": (lambda process: process.die(Exit(signal=11)), "InstanceEnded: its process ended (SIGSEGV)"),
    "left": (lambda process: process.die(Exit(code=3)), "InstanceEnded: its process ended (exit status 3)"),
    "hung up": (MemoryProcess.hang_up, "InstanceEnded: its process ended (exit status 0)"),
    "stopped": (MemoryProcess.stop, "its loop was silent for 2 s"),
    "no frame": (_garbage, "it sent something that is not a message: "),
    "a frame without end": (lambda process: process.spoil(struct.pack(">I", 2**32 - 1)), "a frame of 4294967299 bytes"),
    "a session that nobody opened": (said(Ended(99)), "session 99 is not open"),
    "too much credit": (said(Credit(1, 1000, 0)), "session 1: credit for what was not sent"),
    "credit below zero": (said(Credit(1, -1, 0)), "session 1: credit for what was not sent"),
    "a message of the other side": (said(Ping(1)), "Ping is not a message of an instance"),
}  # fmt: skip


@pytest.mark.parametrize("name", BEFALLS)
async def test_what_befalls_one_process_is_its_own_sessions_end_and_nobody_elses(
    name: str, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    befall, reason = BEFALLS[name]
    spec, processes = in_memory_processes(spec_of(words, "m"), instances=2, hang_timeout=2.0)
    async with memory_gateway([spec], check=True) as memory, trio.open_nursery() as nursery:
        answers: dict[str, Any] = {}

        async def ask(name: str, prompt: str) -> None:
            answers[name] = await memory.client().lmi(prompt, "m", stream=True)

        nursery.start_soon(ask, "first", "a b stay")
        await until(lambda: busy(memory))
        (victim,) = busy(memory)
        nursery.start_soon(ask, "second", "a b c d e f g h")
        await until(lambda: len(busy(memory)) == 2)
        befall(processes.last[victim])
        await until(lambda: "first" in answers)
        assert "second" not in answers  # it goes on
        await until(lambda: "second" in answers)
        await until(lambda: ready(memory, "m") == 2)
    assert not answers["first"].complete
    assert answers["second"].text == "a b c d e f g h "
    (ended,) = [record for record in caplog.records if record.message == "instance ended"]
    assert reason in ended.__dict__["reason"]


async def test_a_stopped_one_goes_on_where_it_was(autojump_clock: Any) -> None:
    spec, processes = in_memory_processes(spec_of(words, "m"))
    async with memory_gateway([spec], check=True) as memory, trio.open_nursery() as nursery:

        async def disturb() -> None:
            await until(lambda: memory.gateway.models["m"].instances[0].sessions)
            processes.last[0].stop()
            await trio.sleep(600)
            processes.last[0].go_on()

        nursery.start_soon(disturb)
        assert (await memory.client().lmi("a b c", "m", stream=True)).text == "a b c "
        assert trio.current_time() > 600


async def test_a_model_whose_only_process_ends_is_loaded_again_and_told_of_all_its_starts(autojump_clock: Any) -> None:
    heard = list[tuple[int, Moment]]()

    def told(process: MemoryProcess, moment: Moment) -> None:
        heard.append((process.pid, moment))

    model = ModelSpec(name="m", family=Family.TEXT, load=spec_of(words).load, restart=RestartPolicy(backoff=0.5))
    spec, processes = in_memory_processes(model, told=told)
    async with memory_gateway([spec], check=True) as memory:
        for _ in range(2):
            processes.last[0].kill()
            await until(lambda: not ready(memory, "m"))
            await until(lambda: ready(memory, "m"))
        assert (await memory.client().lmi("a", "m", stream=True)).text == "a "
    lives = [(pid, moment) for pid in (1, 2, 3) for moment in (Moment.STARTED, Moment.ENDED)]
    assert [one for one in heard if one[1] is not Moment.SENT] == lives
    assert not processes.last[0].alive


def test_a_seed_decides_all_that_happens() -> None:
    async def main() -> list[str]:
        spec, _ = in_memory_processes(spec_of(words, "m"), instances=3)
        found: list[str] = []
        gateway: Gateway
        async with memory_gateway([spec], check=True) as memory, trio.open_nursery() as nursery:
            gateway = memory.gateway

            async def ask(number: int) -> None:
                await memory.client().lmi("a", "m", stream=True)
                found.append(f"{number} {[one.sessions for one in gateway.models['m'].instances]}")

            for number in range(9):
                nursery.start_soon(ask, number)
        return found

    def played(seed: int) -> list[str]:
        with seeded(seed):
            return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))

    assert played(1) == played(1) != played(2)
