"""The length of a request's path: the calls of the gateway's functions, and the modules and rooms that they are in.

`python -m benchmarks.trips` profiles a warm gateway in memory, without its client's calls. A room is a folder, or a module
alone in its package. The figures do not depend on the machine or its load: they show the cost of splitting a module or
adding a hop on the path of a request.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, final

import numpy as np
import trio
from trio.testing import MockClock

import gateway
import models
import protocols
from gateway.client.questions import infer, lmi
from gateway.testing import memory_gateway
from gateway.testing.seeding import seeded
from models.adapt import spec_of
from models.library.echo import Echo
from models.library.tensors import identity
from models.messages import Prompt

PACKAGES = (gateway, models, protocols)
WARM, TOKENS = 8, 6

Once = Callable[[], Awaitable[None]]


@final
class Trip:
    """Counts the calls that tasks make, without the client's."""

    def __init__(self) -> None:
        self.modules: list[str] = []
        self._client = trio.lowlevel.current_task()
        self._names: dict[str, str] = {}

    def seen(self, frame: FrameType, event: str, _: object) -> None:
        """Takes one event, as `sys.setprofile` gives it."""
        if event != "call":
            return
        file = frame.f_code.co_filename
        name = self._names.get(file)
        if name is None:
            name = self._names[file] = _module(file)
        if not name or name.startswith(("gateway.testing", "gateway.client")):
            return
        try:
            task = trio.lowlevel.current_task()
        except RuntimeError:  # between two tasks
            return
        if task is not self._client:
            self.modules.append(name)

    def told(self) -> dict[str, int]:
        rooms = [_room(module) for module in self.modules]
        changes = [sum(a != b for a, b in pairwise(them)) for them in (self.modules, rooms)]
        return {
            "calls": len(self.modules),
            "modules": len(set(self.modules)),
            "rooms": len(set(rooms)),
            "changes of module": changes[0],
            "changes of room": changes[1],
        }


def _module(file: str) -> str:
    path = Path(file)
    for package in PACKAGES:
        home = Path(package.__path__[0])
        if path.is_relative_to(home):
            return ".".join((package.__name__, *path.relative_to(home).with_suffix("").parts))
    return ""


def _room(module: str) -> str:
    folder, _, name = module.rpartition(".")
    return folder if "." in folder else f"{folder}.{name}"


async def words(prompt: Prompt) -> Any:
    """A token every ten milliseconds."""
    for _ in range(prompt.parameters.max_new_tokens):
        await trio.sleep(0.01)
        yield "a "


async def v2_infer(stack: AsyncExitStack) -> Once:
    """v2 infer, binary, FP32 [1,16]"""
    memory = await stack.enter_async_context(memory_gateway([spec_of(identity, "identity")]))
    client, values = memory.client(), {"INPUT0": np.ones((1, 16), np.float32)}

    async def once() -> None:
        answer = await client.ask(infer(values, "identity"))
        assert answer.complete, answer.error

    return once


async def bidi_part(stack: AsyncExitStack) -> Once:
    """a part over a WebSocket, echoed"""
    memory = await stack.enter_async_context(memory_gateway([spec_of(Echo(), "echo")]))
    talk = await memory.conversation("echo")

    async def once() -> None:
        await talk.send(b"x" * 1024)
        assert await talk.receive() == b"x" * 1024

    return once


async def text(stack: AsyncExitStack) -> Once:
    """text, 6 tokens 10 ms apart, as lines"""
    memory = await stack.enter_async_context(memory_gateway([spec_of(words, "words")]))
    client = memory.client()

    async def once() -> None:
        answer = await client.ask(lmi("a", "words", stream=True, max_new_tokens=TOKENS))
        assert answer.complete, answer.error

    return once


async def measured(way: Callable[[AsyncExitStack], Awaitable[Once]]) -> dict[str, int]:
    """Profiles one warm request, and the work after it until all tasks wait."""
    async with AsyncExitStack() as stack:
        once = await way(stack)
        for _ in range(WARM):
            await once()
        trip = Trip()
        await trio.testing.wait_all_tasks_blocked(0.001)
        sys.setprofile(trip.seen)
        try:
            await once()
            await trio.testing.wait_all_tasks_blocked(0.001)
        finally:
            sys.setprofile(None)
        return trip.told()
    raise AssertionError


def seen_from(way: Callable[[AsyncExitStack], Awaitable[Once]]) -> dict[str, int]:
    """The figures of one trip. Chance decides if an exchange runs in the leading task or in its own, so the seed is
    fixed."""
    with seeded(0, threads=True):
        return trio.run(measured, way, clock=MockClock(autojump_threshold=0.01))


def main() -> None:
    for way in (v2_infer, bidi_part, text):
        figures = seen_from(way)
        print(f"{(way.__doc__ or '').strip():42}", ", ".join(f"{n} {what}" for what, n in figures.items()))


if __name__ == "__main__":
    main()
