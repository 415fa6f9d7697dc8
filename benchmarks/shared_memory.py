"""The extra cost of a large tensor if its model runs in its own process: `python -m benchmarks.shared_memory [CALLS]`.

One gateway serves each model twice: in its own process and in another one. One client sends a tensor in v2's binary form and
gets one as large back. The output is the lowest of five medians of the time, and the lowest of five means of the CPU of both
processes together.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.accounting import cpu_seconds
from models.messages import InferRequest, InferResponse, Tensor
from models.session import Session

ROUNDS, SIZES, MiB = 5, (64 * 1024, 1024 * 1024, 16 * 1024 * 1024), 1024 * 1024
MODELS = ("same", "more", "in_place")


def same(x: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return x


def more(x: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return x + np.uint8(1)


async def in_place(session: Session[InferRequest, InferResponse]) -> None:
    """Computes like `more`, into an array of the session."""
    async for request in session:
        y = session.empty(request["x"].shape, np.uint8)
        np.add(request["x"], np.uint8(1), out=y)
        await session.send(InferResponse(outputs=(Tensor(name="y", data=y),)))


@contextmanager
def served(port: int) -> Iterator[list[int]]:
    """Runs a gateway with each model twice; yields the ids of the gateway's process and of those that it has started."""
    command = [sys.executable, "-m", "gateway", "--set", "listen.host=127.0.0.1", "--set", f"listen.port={port}"]
    for name in MODELS:
        factory = f"benchmarks.shared_memory:{name}"
        command += ["--model", f"{name}-here={factory}", "--model", f"{name}-there={factory}"]
        command += ["--set", f"models.{name}-there.process.enabled=true"]
    gateway = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[1])
    try:
        for _ in range(300):
            time.sleep(0.1)
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                continue
        children = [
            int(pid)
            for task in Path(f"/proc/{gateway.pid}/task").iterdir()
            for pid in (task / "children").read_text().split()
        ]
        yield [gateway.pid, *children]
    finally:
        gateway.send_signal(signal.SIGTERM)
        gateway.wait(30)


def called(connection: socket.socket, model: str, x: bytes, buffer: memoryview) -> float:
    """The seconds of one call."""
    tensor = {"name": "x", "datatype": "UINT8", "shape": [len(x)], "parameters": {"binary_data_size": len(x)}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: localhost\r\ninference-header-content-length: {len(text)}\r\n"
        f"content-length: {len(text) + len(x)}\r\n\r\n"
    )
    began, received, wanted = time.perf_counter(), 0, len(buffer)
    connection.sendall(head.encode() + text)
    connection.sendall(x)
    while received < wanted:
        received += connection.recv_into(buffer[received:])
        begin, found, _ = bytes(buffer[: min(received, 2048)]).partition(b"\r\n\r\n")
        if wanted == len(buffer) and found:
            assert begin.startswith(b"HTTP/1.1 200"), begin
            wanted = len(begin) + 4 + int(begin.lower().partition(b"\r\ncontent-length: ")[2].split()[0])
    return time.perf_counter() - began


def main() -> None:
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    buffer = memoryview(bytearray(32 * MiB))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with served(port) as pids, socket.create_connection(("127.0.0.1", port)) as connection:
        for model in MODELS:
            for size in SIZES:
                x, found = os.urandom(size), dict[str, tuple[float, float]]()
                for _ in range(ROUNDS):
                    for where in ("here", "there"):
                        for _ in range(3):
                            called(connection, f"{model}-{where}", x, buffer)
                        before = sum(map(cpu_seconds, pids))
                        times = [called(connection, f"{model}-{where}", x, buffer) for _ in range(calls)]
                        cpu = (sum(map(cpu_seconds, pids)) - before) / calls
                        wall, least = found.get(where, (float("inf"), float("inf")))
                        found[where] = min(wall, statistics.median(times)), min(least, cpu)
                (here, cpu_here), (there, cpu_there) = found["here"], found["there"]
                print(
                    f"{model:9}{size // 1024:6} KiB: {here * 1e3:6.2f} ms here, {there * 1e3:6.2f} in a process"
                    f" ({(there - here) * 1e3:+.2f}); CPU {cpu_here * 1e3:5.2f} and {cpu_there * 1e3:5.2f} ms"
                    f" ({(cpu_there - cpu_here) * 1e3:+.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
