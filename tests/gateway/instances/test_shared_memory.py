"""Large tensors of models in processes: equal bytes, room that is waited for, and nothing left of a process that has died."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import trio

from gateway.instances import pipe
from gateway.instances.memory import Arena
from gateway.testing import MemoryGateway
from gateway.workers.states import State
from tests.gateway.instances.test_process_models import (
    alive,
    children,
    descriptors,
    here,
    ready,
    serving,
    status,
    there,
    until,
)
from tests.gateway.telemetry.test_metrics import Scrape

pytestmark = pytest.mark.programs

MiB = 1024 * 1024


def shared(memory: MemoryGateway, name: str = "m") -> tuple[int, int, int]:
    """The bytes of bodies that were received for the model, and that its first process shares in each direction."""
    scrape = Scrape(memory.gateway.registry)
    return tuple(  # type: ignore[return-value]
        int(scrape.total("everywire_instance_shared_bytes", model=name, instance=number, direction=direction))
        for number, direction in (("", "received"), ("0", "bodies"), ("0", "answers"))
    )


async def answer(memory: MemoryGateway, x: Any, name: str = "m") -> Any:
    client = memory.client()
    try:
        return await client.infer({"x": x}, name)
    finally:
        client.close()


ARRAYS: dict[str, Any] = {
    "16 MiB": np.random.default_rng(1).random(2 * MiB),
    "bfloat16": np.arange(2**17).astype(ml_dtypes.bfloat16).reshape(2, -1),
    "texts": np.array([b"a" * 50, b"", b"\xff"] * 2000, object),
    "booleans": np.arange(2**17) % 3 == 0,
    "nothing": np.zeros((0, 2**17), "f4"),
}


@pytest.mark.parametrize("name", ARRAYS)
async def test_what_a_model_says_back_is_equal(name: str) -> None:
    x = ARRAYS[name]
    async with serving(m=there("identity")) as memory:
        for _ in range(2):
            found = await answer(memory, x)
            assert found.status == 200, found.error
            back = found.messages[0]["x-back"].elements
            assert back.dtype == x.dtype
            assert (back.reshape(x.shape) == x).all()
        received, bodies, answers = shared(memory)
        if name != "nothing":
            assert min(received, answers) >= 2**16
        assert bodies == 0, "it was copied"


@pytest.mark.parametrize("where", [here, there])
@pytest.mark.parametrize("kind", ["f4", ml_dtypes.bfloat16])
async def test_an_array_of_the_sessions_is_sent_without_a_copy(where: Any, kind: Any) -> None:
    async with serving(m=where("in_place")) as memory:
        for size in (10, 2**17):
            found = (await answer(memory, np.arange(size).astype(kind))).messages[0]
            assert (found["y"].elements == 2 * np.arange(size).astype(kind)).all()
            assert found["own"].elements[0] == (where is here or size == 10)
        if where is there:
            n = found["y"].elements.nbytes
            assert shared(memory)[2] == n, "it has its memory once"


async def test_what_a_model_keeps_stays_as_it_was() -> None:
    async with serving(m=there("Hoarder")) as memory:
        arrays = [np.full(2**15, float(n)) for n in range(1, 40)]
        before = 1
        for n, x in enumerate(arrays, 1):
            total, count = (await answer(memory, x)).messages[0]["OUTPUT0"].elements.tolist()
            assert (total, count) == (before * 2.0**15, n)
            before = n
        assert sum(shared(memory)[:2]) >= 39 * 2**18


async def test_who_finds_no_room_waits_and_all_are_answered() -> None:
    config = there("identity", capacity=40, process={"shared_memory": 3 * MiB})
    async with serving(m=config) as memory:

        async def one(n: int) -> None:
            x = np.full(2**17, float(n))
            found = await answer(memory, x)
            assert (found.messages[0]["x-back"].elements == x).all()

        async with trio.open_nursery() as nursery:
            for n in range(40):
                nursery.start_soon(one, n)
        assert max(shared(memory)) <= 3 * MiB


async def test_more_than_all_of_the_memory_is_413_in_either_direction() -> None:
    process = {"shared_memory": MiB}
    async with serving(m=there("swell", process=process), e=there("identity", process=process)) as memory:
        for name, x in (("m", np.array([MiB + 1])), ("e", np.zeros(MiB + 1, "u1"))):
            found = await answer(memory, x, name)
            assert found.status == 413
            assert (
                f"a message with tensors or parts of {MiB + 1} bytes is larger than all of the shared memory, {MiB} bytes"
                f" (models.{name}.process.shared_memory)"
            ) in found.error
        assert (await answer(memory, np.array([MiB]))).status == 200
        assert (await answer(memory, np.zeros(MiB, "u1"), "e")).status == 200
        assert shared(memory, "e") == (0, MiB, MiB), "with its head it is too large to be received there: it was copied"


async def test_nothing_is_left_of_processes_that_die_with_blocks_of_both_sides() -> None:
    async with serving(m=there("Caught", capacity=20)) as memory:
        x = np.ones(2**17)
        assert (await answer(memory, x)).status == 200
        before, processes = descriptors(), children()
        for _ in range(5):
            pid = (await ready(memory))[0]
            async with trio.open_nursery() as nursery:
                for n in range(5):
                    nursery.start_soon(answer, memory, -x if n == 3 else x)
            await until(lambda pid=pid: not alive(pid))
            await ready(memory, but=[pid])
            assert ((await answer(memory, x)).messages[0]["y"].elements == 2).all()
        await until(lambda: descriptors() <= before)
        assert len(children()) == len(processes)


async def test_an_answer_that_is_nowhere_ends_its_process_and_nobody_else() -> None:
    async with serving(m=there("liar", instances=2, capacity=10), e=there("identity")) as memory:
        both, x = await ready(memory, 2), np.ones(2**15)
        assert (await answer(memory, -x)).status == 503
        found = await answer(memory, x)
        assert found.status == 200
        assert (await answer(memory, x, "e")).status == 200
        await until(lambda: sum(map(alive, both)) == 1)
        await ready(memory, 2)


async def test_memory_is_given_back_when_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "IDLE_SECONDS", 0.02)
    async with serving(m=there("hasty")) as memory:
        assert (await answer(memory, np.ones(MiB))).status == 200
        await until(lambda: shared(memory) == (0, 0, 0))
        assert ((await answer(memory, np.ones(MiB))).messages[0]["OUTPUT0"].elements == 1).all()


async def test_an_unloaded_model_leaves_no_memory() -> None:
    async with serving(m=there("identity")) as memory:
        assert (await answer(memory, np.ones(MiB))).status == 200
        assert in_memory_files() >= 16 * MiB
        await memory.gateway.control.unload("m")
        assert in_memory_files() == 0
        await memory.gateway.control.load("m")
        assert (await answer(memory, np.ones(MiB))).status == 200


def in_memory_files() -> int:
    """The bytes in all that this process has open."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "memfd:everywire" in os.readlink(descriptor):
                found += os.stat(descriptor).st_blocks * 512
    return found


async def test_a_stopped_process_whose_memory_is_full_keeps_nobody_else_waiting() -> None:
    config = there("identity", capacity=10, process={"shared_memory": MiB})
    async with serving(m=config, e=there("identity")) as memory:
        (pid,) = await ready(memory)
        os.kill(pid, signal.SIGSTOP)
        statuses = list[int]()

        async def one() -> None:
            statuses.append((await answer(memory, np.ones(2**16))).status)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(one)
            await until(lambda: status(memory).slots_in_use == 5)
            assert (await answer(memory, np.ones(2**16), "e")).status == 200
            assert not statuses
            os.kill(pid, signal.SIGKILL)
        assert statuses == [503] * 5
        await ready(memory, but=[pid])
        await until(lambda: status(memory).state is State.READY)
        assert status(memory).crashes <= 1
        assert (await answer(memory, np.ones(2**16))).status == 200


async def test_after_a_reload_bodies_are_still_received_where_the_processes_see_them() -> None:
    async with serving(m=there("identity")) as memory:
        old = await ready(memory)
        before = memory.gateway.supervisor.workers["m"].body_memory
        await memory.gateway.reload("m", patience=1)
        await ready(memory, but=old)
        await until(lambda: not any(map(alive, old)))
        now = memory.gateway.supervisor.workers["m"].body_memory
        assert isinstance(now, Arena)
        assert now is not before
        assert (await answer(memory, np.ones(2**16))).status == 200
        assert now.used_bytes >= 2**19  # the tensor was there
