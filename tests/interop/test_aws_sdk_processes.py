"""The AWS SDK for Python in a process that stands still, or dies, in the middle of a session."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.interop.aws import BLOCK, QUIET, client, run
from tests.interop.servers import Server

pytestmark = QUIET

# A client that stands still gives no window back: what it has given covers 65,535 bytes that it has not got, and behind
# those its stream may queue limits.send_buffer. The sockets between them could hold some hundred times as much.
AHEAD = 65_535 + 64 * 1024


@contextmanager
def a_client(server: Server, model: str, name: str) -> Iterator[subprocess.Popen[str]]:
    """A client process that has read the first part."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.interop.aws_client", str(server.tls_port), str(server.ca), model, name],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "reading\n"
            yield process
        finally:
            process.kill()


def test_a_client_that_stands_still_for_five_seconds_stops_its_model_and_loses_nothing(service: Server) -> None:
    sent: list[int] = []

    async def watch() -> None:
        async with client(service) as aws:
            for _ in range(11):
                sent.append(int((await aws.ask("ledger", b"sent stopped"))[0]))
                await asyncio.sleep(0.5)  # five seconds in all: how long it stands still is what is shown

    with a_client(service, "flood", "stopped") as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        run(watch())
        assert sent[-1] == sent[-2], "the model goes on"
        assert (sent[-1] - sent[0]) * BLOCK <= AHEAD + BLOCK
        process.send_signal(signal.SIGCONT)
        told, _ = process.communicate("enough\n", timeout=120)
    assert process.returncode == 0
    assert int(told) >= sent[-1]


@pytest.mark.parametrize("model", ["flood", "held"])
def test_the_model_of_a_client_that_is_killed_is_cancelled(service: Server, model: str) -> None:
    with a_client(service, model, f"killed {model}") as process:
        process.kill()

    async def story() -> None:
        async with client(service) as aws:
            assert await aws.ask("ledger", b"ended killed " + model.encode()) == [b"cancelled"]

    run(story())
