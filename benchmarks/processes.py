"""The cost of running a model in its own process: CPU of both processes beside the same model in the gateway's process."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import trio

from benchmarks import requests
from benchmarks.accounting import children, cores, resident_bytes
from benchmarks.comparison import load
from benchmarks.load.plan import Kind, Measure
from benchmarks.servers import EVERYWIRE, ROOT, Program, Running, started
from benchmarks.streams import PATIENCE, Stream, Victim
from benchmarks.workloads import Workload

_FRAME = requests.frame(requests.PIECE)
_ECHO = len(requests.answer_frame(requests.PIECE))
_ROUNDTRIPS = 3000
_KILLED = 20  # sessions at once


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model and its workload."""

    factory: str
    name: str
    """The model's name in the requests."""
    workload: Workload


def _case(
    factory: str,
    name: str,
    case: str,
    what: str,
    unit: str,
    kind: Kind,
    connections: int,
    message: bytes,
    least: float = 0.0,
) -> Case:
    workload = Workload(
        name=case, what=what, unit=unit, kind=kind, servers=(EVERYWIRE,), connections=connections, message=lambda: message,
        at_least=least,
    )  # fmt: skip
    return Case(factory=factory, name=name, workload=workload)


CASES = {
    case.workload.name: case
    for case in (
        _case(
            "benchmarks.victims:tokens", "tokens", "tokens", "tokens of 64 bytes, 100 streams", "token",
            Kind.TOKENS, 100, requests.generate(requests.TOKENS),
        ),
        _case(
            "models.library.echo:Echo", "echo", "echo", "1 KiB there and back, one WebSocket, one at a time", "message",
            Kind.FRAMES, 1, _FRAME,
        ),
        _case(
            "benchmarks.victims:scaled", "identity", "unary", "v2, a plain function, 16 connections", "request",
            Kind.UNARY, 16, requests.infer_binary(16),
        ),
        _case(
            "benchmarks.victims:scaled", "identity", "large", "the same with 16 MiB each way, one connection", "request",
            Kind.UNARY, 1, requests.infer_binary(4 * 2**20), 5.0,
        ),
    )
}  # fmt: skip


def program(name: str, factory: str, *settings: str) -> Program:
    """A server with this one model."""
    arguments = ["gateway", "--port", "{port}", "--log-level", "error", "--model", f"{name}={factory}"]
    every = ("capacity=20000", "restart.backoff=10ms", "restart.intensity=1000", *settings)
    for setting in (*(f"models.{name}.{one}" for one in every), "limits.requests_per_connection=1000000000"):
        arguments += ["--set", setting]
    return Program(name=name, what=factory, arguments=tuple(arguments), health=b"/v2/health/ready")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU microseconds per unit, the medians of the rounds."""

    case: str
    what: str
    unit: str
    here: float
    front: float
    child: float


def cost(case: Case, *, seconds: float, rounds: int) -> Cost:
    """Puts one load on the model in the gateway's process and in its own process, in turns. The CPU of the gateway and that
    of the model's process are measured in separate rounds."""
    server_core, load_core = cores() or (None, None)
    here, there = program(case.name, case.factory), program(case.name, case.factory, "process.enabled=true")
    found: dict[str, list[float]] = {"here": [], "front": [], "child": []}
    with started(here, core=server_core) as one, started(there, core=server_core) as other:
        (child,) = children(other.pid)
        for _ in range(rounds):
            for name, server, pid in (("here", one, one.pid), ("front", other, other.pid), ("child", other, child)):
                plan = replace(case.workload.plan(server, seconds=seconds, core=load_core), server=pid, alone=True)
                result = load(replace(plan, answer=_ECHO if plan.kind is Kind.FRAMES else 0))
                found[name].append(result.server_cpu / result.units * 1e6)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return Cost(case=case.workload.name, what=case.workload.what, unit=case.workload.unit, **medians)


COST_HEADS = ("case", "what", "us a unit here", "in a process: gateway", "its process", "both beside here")


def cost_cells(row: Cost) -> tuple[str, ...]:
    """The figures of one case, as COST_HEADS names them."""
    ratio = (row.front + row.child) / row.here
    return row.case, f"{row.what}, a {row.unit}", f"{row.here:.1f}", f"{row.front:.1f}", f"{row.child:.1f}", f"{ratio:.2f} x"


# ---- times


def _told(values: Sequence[float]) -> str:
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"p50 {statistics.median(ordered) * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms, worst {ordered[-1] * 1e3:.2f} ms"


def _roundtrips(server: Running) -> list[float]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(requests.upgrade())
        while not line.recv(65536).endswith(b"\r\n\r\n"):
            pass
        waits: list[float] = []
        for _ in range(_ROUNDTRIPS):
            began, left = time.perf_counter(), _ECHO
            line.sendall(_FRAME)
            while left:
                left -= len(line.recv(left))
            waits.append(time.perf_counter() - began)
    return waits[_ROUNDTRIPS // 10 :]


def echoes() -> Iterator[tuple[str, str]]:
    """Times of a round trip of 1 KiB."""
    for where, settings in (("here", ()), ("in a process", ("process.enabled=true",))):
        with started(program("echo", "models.library.echo:Echo", *settings)) as server:
            yield f"1 KiB there and back, {where}", _told(_roundtrips(server))


async def _cancels(port: int, folder: Path, rounds: int) -> list[float]:
    waits: list[float] = []
    async with trio.open_nursery() as nursery:
        for number in range(rounds):
            diary = folder / str(number)
            stream = Stream(port, "timed", str(diary))
            nursery.start_soon(stream.run)
            await stream.begun.wait()
            left = time.monotonic()
            stream.scope.cancel()
            with trio.fail_after(PATIENCE):
                while not (diary.exists() and diary.read_text().endswith("\n")):  # noqa: ASYNC110
                    await trio.sleep(0.001)
            waits.append(float(diary.read_text()) - left)
    return waits


def cancels(rounds: int = 200) -> Iterator[tuple[str, str]]:
    """Times from a client's leaving to the `finally` of its model."""
    with tempfile.TemporaryDirectory(prefix="everywire-bench-") as folder:
        for where, settings in (("here", ()), ("in a process", ("process.enabled=true",))):
            at = Path(folder) / where.replace(" ", "-")
            at.mkdir()
            with started(program("timed", "benchmarks.victims:timed", *settings)) as server:
                yield f"client left to the model's finally, {where}", _told(trio.run(_cancels, server.port, at, rounds))


async def _kills(port: int, pid: int, rounds: int) -> list[float]:
    waits: list[float] = []
    async with trio.open_nursery() as nursery:
        for _ in range(rounds):
            victim = Victim(port, "numbers", nursery)
            with trio.fail_after(PATIENCE):
                await victim.answers()
            sessions = [await victim.open("go") for _ in range(_KILLED)]
            (child,) = children(pid)
            killed = time.monotonic()
            os.kill(child, signal.SIGKILL)
            with trio.fail_after(PATIENCE):
                for session in sessions:
                    await session.over.wait()
            waits += [session.ended_at - killed for session in sessions]
    return waits


def kills(rounds: int = 20) -> Iterator[tuple[str, str]]:
    """Times from SIGKILL of a process to the end of each of its sessions, as their clients see it."""
    with started(program("numbers", "benchmarks.victims:numbers", "process.enabled=true")) as server:
        yield f"SIGKILL to told, {_KILLED} sessions", _told(trio.run(_kills, server.port, server.pid, rounds))


def memory() -> Iterator[tuple[str, str]]:
    """Memory of a process with a trivial model, before its first call."""
    with started(program("numbers", "benchmarks.victims:numbers", "process.enabled=true")) as server:
        (child,) = children(server.pid)
        rollup = Path(f"/proc/{child}/smaps_rollup").read_text()
        anonymous = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Anonymous"))
        yield "memory of a process", f"{resident_bytes(child) / 2**20:.0f} MiB resident, {anonymous / 1024:.0f} its own"


# ---- cores


def _rate(count: int, seconds: float) -> float:
    """Calls per second of `count` bare processes."""
    code = (
        "import sys,time,numpy as n\nfrom benchmarks.victims import busy\nx=n.zeros(1,n.float32);busy(x);print(1,flush=True)"
    )
    code += f"\nsys.stdin.read(1);e=time.monotonic()+{seconds};c=0\nwhile time.monotonic()<e:busy(x);c+=1\nprint(c)"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    bare = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(count)]
    try:
        for process in bare:
            process.stdout.readline()
        for process in bare:
            process.stdin.write("g")
            process.stdin.flush()
        return sum(int(process.communicate(timeout=seconds + PATIENCE)[0]) for process in bare) / seconds
    finally:
        for process in bare:
            process.kill()


def _served_rate(instances: int, seconds: float) -> float:
    served = program("identity", "benchmarks.victims:busy", f"process.instances={instances}", "process.enabled=true")
    with started(served) as server:
        plan = Workload(
            name="busy", what="", unit="call", kind=Kind.UNARY, servers=(served,), measure=Measure.CPU,
            connections=2 * instances, message=lambda: requests.infer_binary(1),
        ).plan(server, seconds=seconds, core=None)  # fmt: skip
        result = load(plan)
        return result.units / result.seconds


def scaling(seconds: float = 3.0, rounds: int = 3) -> Iterator[tuple[str, str]]:
    """Compares two instances of a pure Python model with one, and two bare processes with one, in turns."""
    served = [
        (_served_rate(1, seconds), _served_rate(2, seconds), _rate(1, seconds), _rate(2, seconds)) for _ in range(rounds)
    ]
    one, two, bare_one, bare_two = (statistics.median(values) for values in zip(*served, strict=True))
    yield "two instances of a model of pure Python beside one", f"{two / one:.2f} x ({one:.0f}/s, {two:.0f}/s)"
    yield "two bare processes beside one", f"{bare_two / bare_one:.2f} x ({bare_one:.0f}/s, {bare_two:.0f}/s)"


TIMES: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "echoes": echoes, "cancels": cancels, "kills": kills, "memory": memory, "scaling": scaling,
}  # fmt: skip
