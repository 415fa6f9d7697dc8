"""Nothing is left of very many sessions in a process, nor of a gateway that is killed amid them."""

from __future__ import annotations

import ctypes
import gc
import os
import random
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from gateway.client import connect, http1
from gateway.client.conversations import Client
from gateway.config import Config
from gateway.errors import TransportLost
from gateway.testing import MemoryGateway, memory_gateway
from tests.gateway.instances.test_process_models import (
    MODELS,
    PATIENCE,
    alive,
    descriptors,
    pids,
    program,
    there,
    until,
)

pytestmark = pytest.mark.programs

MiB = 1024 * 1024
ROUND = 5_000
GROWS = 4 * MiB
"""The most bytes that a heap may grow by in ROUND sessions: a leak of 1 KiB a session exceeds it."""


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def many(memory: MemoryGateway, count: int) -> None:
    """Runs `count` sessions, twenty at once: whole ones, and ones whose client leaves amid them."""
    left = iter(range(count))

    async def some() -> None:
        client = memory.client("http2")
        for number in left:
            with trio.move_on_after(0 if number % 10 == 0 else PATIENCE):
                answer = await client.lmi("a b c", "m", stream=True, max_new_tokens=100)
                assert answer.text == "a b c "
            if number % 10 == 0:
                client.peer.close()
                client = memory.client("http2")
        client.peer.close()

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(some)


@pytest.mark.soak
async def test_ten_thousand_sessions_leave_neither_memory_nor_descriptors() -> None:
    trim = ctypes.CDLL(None).malloc_trim

    async def settled(memory: MemoryGateway) -> tuple[int, int, int, int]:
        """Resident memory and descriptors, of the gateway and of the process."""
        (pid,) = pids(memory)
        answer = await memory.client().lmi("trim", "m", stream=True, max_new_tokens=10)
        assert answer.text == "trimmed "
        gc.collect()
        trim(0)
        return resident(os.getpid()), resident(pid), descriptors(), descriptors_of(pid)

    config = Config(models={"m": there("trimmed_words", capacity=100)})
    async with memory_gateway((), config, check=True) as memory:
        await many(memory, ROUND // 5)
        before = await settled(memory)
        for _ in range(2):
            await many(memory, ROUND)
        after = await settled(memory)
        assert [after[at] - before[at] < 2 * GROWS for at in (0, 1)] == [True, True], (before, after)
        assert after[2:] == before[2:]


# -- the gateway is killed ---------------------------------------------------------------------------------------------


def started_by(pid: int) -> set[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def listens(port: int) -> bool:
    return any(f":{port:04X} " in line and " 0A " in line for line in Path("/proc/net/tcp").read_text().splitlines())


@pytest.mark.parametrize("number", range(20))
async def test_a_gateway_that_is_killed_amid_its_load_leaves_nothing(number: int, tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    flags = ["--model", f"m={MODELS}:words", "--set", "models.m.process.instances=2", "--set", "models.m.capacity=100"]
    with program(tmp_path, *flags) as (process, log):
        port = int(next(said["at"][0] for said in log if said["event"] == "serving").rpartition(":")[2])
        started = started_by(process.pid)
        assert len(started) == 2
        assert listens(port)

        async def ask() -> None:
            with suppress(TransportLost, OSError):
                while True:
                    async with connect("127.0.0.1", port) as transport:
                        await Client(http1(transport)).lmi("a b c " * 50, "m", stream=True, max_new_tokens=1000)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask)
            await trio.sleep(random.Random(number).uniform(0, 0.5))  # a moment is what is asked for
            process.kill()
    # memory that they share has no name: it is gone with the last of them
    await until(lambda: not any(map(alive, started)))
    assert not listens(port)
    assert set(os.listdir("/dev/shm")) <= shared
