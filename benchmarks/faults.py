"""Runs models that fail in their own processes, one at a time, and reports how their sessions and all others end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import trio

from benchmarks.servers import ROOT, Program, started
from benchmarks.streams import PATIENCE, Stream, Victim

SESSIONS = 5
"""Sessions of each victim."""
STREAMS = 100
"""Streams of other models: half of them in the gateway's process, half in a process."""
_PAUSE = 0.005  # seconds between two pings

Fault: TypeAlias = Callable[["Victim"], Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fared:
    """The results of one fault."""

    fault: str
    what: str
    endings: dict[str, int]
    """The number of the victim's sessions by ending."""
    told: tuple[float, ...]
    """Seconds from the fault, or from the request that brings it, to the end of each."""
    back: float
    """Seconds from the last of these ends until the model answers again."""
    pings: tuple[float, float, float]
    """Median, 99th percentile and worst of `/ping` meanwhile, in seconds."""
    lost: int
    """Streams of other models that ended, or had a gap."""


def _program(fault: str) -> Program:
    models = {
        "here": ("numbers", ()),
        "there": ("numbers", ("process.enabled=true",)),
        "crash": ("crashes", ("process.enabled=true",)),
        "kill": ("numbers", ("process.enabled=true",)),
        "gil": ("holds", ("process.enabled=true",)),
        "hang": ("holds", ("process.enabled=true", "process.hang_timeout=1s")),
        "deaf": ("deaf", ("process.enabled=true", "stop_within=1s")),
        "memory": ("greedy", ("process.enabled=true", "process.memory_limit=512MiB")),
    }
    settings = ["restart.backoff=10ms", "capacity=1000"]
    arguments = ["gateway", "--port", "{port}", "--log-level", "error", "--log-format", "text"]
    for name in ("here", "there", fault):
        attribute, own = models[name]
        arguments += ["--model", f"{name}=benchmarks.victims:{attribute}"]
        for setting in (*settings, *own):
            arguments += ["--set", f"models.{name}.{setting}"]
    return Program(name="faults", what="models that do their worst", arguments=tuple(arguments), health=b"/v2/health/ready")


async def _killed(victim: Victim) -> None:
    stream = await victim.open("pid")
    stream.scope.cancel()
    await stream.over.wait()
    victim.began = time.monotonic()
    os.kill(int(stream.texts[0]), signal.SIGKILL)


async def _by_itself(victim: Victim) -> None:
    await victim.fault()


async def _and_leaves(victim: Victim) -> None:
    """Brings the fault and then leaves as its client: the model must stop, but does not."""
    await victim.fault()
    await trio.sleep(0.5)
    victim.began = time.monotonic()
    victim.sessions[-1].scope.cancel()


FAULTS: dict[str, tuple[str, Fault, bool]] = {
    "crash": ("it reads at address 0 (SIGSEGV)", _by_itself, True),
    "kill": ("SIGKILL from outside, as by the kernel's OOM killer", _killed, True),
    "gil": ("it holds the GIL for 5 s, without hang_timeout", _by_itself, False),
    "hang": ("the same with hang_timeout = 1s", _by_itself, True),
    "deaf": ("C code on its loop for a minute; its client leaves; stop_within = 1s", _and_leaves, True),
    "memory": ("it allocates without end; memory_limit = 512MiB", _by_itself, False),
}
"""The faults by name: a description, the function that brings the fault, and True if it ends all sessions of its process."""


async def _play(port: int, name: str) -> Fared:
    what, fault, all_end = FAULTS[name]
    pings = subprocess.Popen(  # noqa: ASYNC220  # before there is anything to wait for
        [sys.executable, "-m", "benchmarks.faults", str(port)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert pings.stdout is not None
    pings.stdout.readline()
    try:
        async with trio.open_nursery() as nursery:
            victim = Victim(port, name, nursery)
            victim.sessions = [await victim.open("go") for _ in range(SESSIONS)]
            streams = [Stream(port, "there" if number % 2 else "here", "go") for number in range(STREAMS)]
            for stream in streams:
                nursery.start_soon(stream.run)
            with trio.fail_after(PATIENCE):
                for stream in streams:
                    await stream.begun.wait()
            await fault(victim)
            ended = victim.sessions if all_end else victim.sessions[SESSIONS:]
            with trio.fail_after(PATIENCE):
                for session in ended:
                    await session.over.wait()
                last = max(session.ended_at for session in ended)
                await victim.answers()
            back = time.monotonic() - last
            lost = sum([not await stream.goes_on() for stream in streams])
            endings = Counter(one.ending if one.over.is_set() else "goes on" for one in victim.sessions)
            told = tuple(session.ended_at - victim.began for session in ended)
            nursery.cancel_scope.cancel()
        output, _ = pings.communicate("over\n", timeout=PATIENCE)
    finally:
        pings.kill()
        pings.wait()
    median, p99, worst = json.loads(output)
    return Fared(
        fault=name, what=what, endings=dict(endings), told=told, back=back, pings=(median, p99, worst), lost=lost
    )  # fmt: skip


def measure(names: Sequence[str], note: Callable[[str], None]) -> list[Fared]:
    """Plays each of these faults beside the streams of other models, each in a new server."""
    rows = list[Fared]()
    for name in names:
        note(f"playing {name}: {FAULTS[name][0]}")
        with started(_program(name)) as server:
            rows.append(trio.run(_play, server.port, name))
    return rows


HEADS = (
    "fault",
    "sessions of the victim",
    "told after ms",
    "answers again after ms",
    "/ping p50/p99/worst ms",
    "others lost",
)


def cells(row: Fared) -> tuple[str, ...]:
    """The figures of one fault, as HEADS names them."""
    told = sorted(1000 * seconds for seconds in row.told)
    pings = "/".join(f"{1000 * seconds:.1f}" for seconds in row.pings)
    endings = ", ".join(f"{count} x {ending}" for ending, count in row.endings.items())
    return (
        row.fault,
        endings,
        f"{told[0]:.0f} to {told[-1]:.0f}",
        f"{1000 * row.back:.0f}",
        pings,
        f"{row.lost} of {STREAMS}",
    )


def _ping(port: int) -> list[float]:
    """Requests /ping until there is input on stdin; returns the median, 99th percentile and worst wait in seconds."""
    import select

    line = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    waits: list[float] = []
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], _PAUSE)[0]:
        began = time.perf_counter()
        line.request("GET", "/ping")
        line.getresponse().read()
        waits.append(time.perf_counter() - began)
    return [statistics.median(waits), statistics.quantiles(waits, n=100)[98], max(waits)]


if __name__ == "__main__":
    print(json.dumps(_ping(int(sys.argv[1]))))
