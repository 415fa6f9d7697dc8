"""Models as their authors write them for asyncio, for tests that run them in processes: only those import this module.

A prompt says what becomes of the session, or of the process; a diary is a file that says what has happened there.
"""

# ruff: noqa: ASYNC240, ASYNC251  # what a model blocks is its own loop

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.adapt import spec_of
from models.errors import ModelError
from models.messages import Finish, InferRequest, InferResponse, Part, Prompt, Tensor, Token
from models.rolling import RollingBatch, rolling
from models.session import Session
from models.spec import Batching, ModelSpec, TensorSpec
from tests.models.steps import Counted, Counting

log = logging.getLogger("app.words")


def write(diary: str, line: str) -> None:
    """One line, at once."""
    if diary:
        with open(diary, "a") as file:
            file.write(f"{line}\n")


# -- each shape of a model -------------------------------------------------------------------------------------------------


async def double(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    await asyncio.sleep(0)
    return x * 2


def halve(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """In a thread."""
    assert threading.current_thread() is not threading.main_thread()
    return x / 2


def words(prompt: str) -> Iterator[str]:
    """In a thread."""
    for word in prompt.split():
        yield f"{word} "


async def letters(prompt: Prompt) -> AsyncIterator[str]:
    for letter in prompt.text:
        await asyncio.sleep(0.001)
        yield letter


async def whole(prompt: str) -> str:
    async with asyncio.timeout(60):
        return "".join(await asyncio.gather(asyncio.sleep(0.001, prompt), asyncio.to_thread(str.upper, prompt)))


async def parrot(session: Session[Part, Part]) -> None:
    """Speaks first, then says back what it hears, from a task of its own."""
    session.accept()
    await session.send(Part(data=b"hello"))
    heard = asyncio.Queue[Part | None]()

    async def hear() -> None:
        async for part in session:
            await heard.put(part)
        await heard.put(None)

    async with asyncio.TaskGroup() as group:
        group.create_task(hear())
        while (part := await heard.get()) is not None:
            await session.send(part)


async def mute(prompt: str) -> AsyncIterator[str]:
    """Says one word, and then nothing."""
    yield "one "
    await asyncio.Event().wait()


class Shouter:
    """Says it loud."""

    context = 6
    parameters = frozenset({"temperature", "max_new_tokens"})

    def __init__(self, end: str = "!") -> None:
        self._end = end

    async def __call__(self, prompt: str) -> AsyncIterator[str]:
        await asyncio.sleep(0)
        yield prompt.upper() + self._end

    @staticmethod
    def count_tokens(text: str) -> int:
        return len(text.split())

    @staticmethod
    def chat_template(messages: Any) -> str:
        return " / ".join(f"{one.role}: {one.content}" for one in messages)


async def _rows(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    await asyncio.sleep(0)
    return np.full((len(x), 1), len(x), np.float32)


batched = ModelSpec(
    name="batched",
    family=spec_of(_rows).family,
    load=spec_of(_rows).load,
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(1,)),),
    outputs=(TensorSpec(name="OUTPUT0", datatype="FP32", shape=(1,)),),
    max_batch_size=8,
    batching=Batching(max_delay=0.5),
    warmup=(InferRequest(inputs=(Tensor(name="x", data=np.ones((1, 1), np.float32)),)),),
)
"""The number of rows that are with it in one call."""


class Engine:
    """An engine with background work: requests queue, and one task makes the tokens of all, a round at a time."""

    def __init__(self, diary: str) -> None:
        self._diary, self._waiting = diary, dict[asyncio.Queue[str | None], list[str]]()
        self._work = asyncio.Event()

    async def run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            for queue, left in [*self._waiting.items()]:
                if left:
                    queue.put_nowait(left.pop(0))
                    self._work.set()
                else:
                    queue.put_nowait(None)
                    del self._waiting[queue]
            await asyncio.sleep(0.001)

    async def generate(self, prompt: str) -> AsyncIterator[str]:
        if prompt == "break":
            self._waiting[None] = []  # type: ignore[index]
        queue = asyncio.Queue[str | None]()
        self._waiting[queue] = [f"{word} " for word in prompt.split()]
        self._work.set()
        try:
            while (token := await queue.get()) is not None:
                yield token
        finally:
            self._waiting.pop(queue, None)
            write(self._diary, f"left {prompt.split()[0]} {len(self._waiting)}")


@asynccontextmanager
async def engine(diary: str = "") -> AsyncIterator[Callable[[str], AsyncIterator[str]]]:
    """Its background work belongs to a task group: the loader ends with it."""
    made = Engine(diary)
    write(diary, "loaded")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(made.run())
        yield made.generate
        task.cancel()
    write(diary, "unloaded")


@asynccontextmanager
async def counting() -> AsyncIterator[RollingBatch[Counted]]:
    async with rolling(Counting()) as batch:
        yield batch


# -- models that end, fail or wait -----------------------------------------------------------------------------------------

_session: contextvars.ContextVar[str] = contextvars.ContextVar("session", default="nobody")


class Doomed:
    """Sends its pid, then acts as the prompt says after its first word. If that is `before`, it does not send its pid."""

    def __init__(self, diary: str = "") -> None:
        self._diary = diary
        write(diary, f"loaded {os.getpid()}")

    async def __call__(self, session: Session[Prompt, Token | Finish]) -> None:
        prompt = await session.receive()
        when, _, what = prompt.text.partition(" ")
        write(self._diary, f"called {_session.get()}")
        _session.set(prompt.text)
        try:
            if when != "before":
                await session.send(Token(text=str(os.getpid())))
            await asyncio.sleep(0.02)  # the tokens sent so far leave
            await self._do(what)
            await session.send(Token(text=" done"))
        finally:
            write(self._diary, f"finally {type(sys.exception()).__name__}")

    async def _do(self, what: str) -> None:
        match what.split():
            case ["segv"]:
                faulthandler._sigsegv()  # type: ignore[attr-defined]
            case ["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["exit", code]:
                sys.exit(int(code))
            case ["block"]:
                write(self._diary, "blocks")
                time.sleep(3600)
            case ["wait"]:
                await asyncio.sleep(3600)
            case ["deaf"]:
                while True:  # it will not be told
                    with suppress(asyncio.CancelledError):
                        await asyncio.sleep(3600)
                    write(self._diary, "goes on")
                    break
            case ["error"]:
                raise ModelError("no such voice", code="Voice", status=422)
            case ["raise"]:
                raise KeyError(what)
            case ["background"]:
                asyncio.create_task(self._lost()).set_name("lost")
                await asyncio.sleep(0.02)
            case ["log"]:
                print("printed it")
                log.warning("warned of it")

    async def _lost(self) -> None:
        raise ZeroDivisionError("nobody looks")


async def ticking(prompt: str) -> AsyncIterator[str]:
    """Numbers, for ever."""
    number = 0
    while True:
        yield f"{number} "
        number += 1
        await asyncio.sleep(0.002)


class Counter:
    """Counts what it has sent, in a file."""

    def __init__(self, file: str, size: int = 1000) -> None:
        self._file, self._size = file, size

    async def __call__(self, session: Session[Part, Part]) -> None:
        number = 0
        try:
            while True:
                await session.send(Part(data=f"{number:08d}".encode().ljust(self._size, b".")))
                number += 1
                Path(self._file).write_text(str(number))
        finally:
            Path(self._file).write_text(f"{number} over")


class Sitting:
    """Sits in a thread until there is the file that it waits for."""

    def __init__(self, diary: str, gate: str) -> None:
        self._diary, self._gate = diary, gate

    def __call__(self, prompt: str) -> Iterator[str]:
        write(self._diary, f"sits {os.getpid()}")
        while not os.path.exists(self._gate):
            time.sleep(0.01)
        write(self._diary, "rises")
        yield "sat"


async def identity(request: InferRequest) -> InferResponse:
    return InferResponse(outputs=tuple(Tensor(name=f"{one.name}-back", data=one.data) for one in request.inputs))
