"""Models as their authors write them, for tests that run them in processes: only those import this module.

A prompt says what becomes of the session, or of the process; a diary is a file that says what has happened there.
"""

# ruff: noqa: ASYNC110, ASYNC220, ASYNC240, ASYNC251  # what a model blocks is its own loop

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from gateway.instances import pipe
from gateway.instances.memory import Block, SharedMemory
from models.adapt import spec_of
from models.errors import ModelError
from models.messages import Finish, InferRequest, InferResponse, Part, Prompt, Tensor, Token
from models.rolling import RollingBatch, rolling
from models.session import Session
from models.spec import Batching, ModelSpec, RestartPolicy, TensorSpec, declare
from tests.models.steps import Counted, Counting

log = logging.getLogger("app.words")
PAYLOAD = 1000


# -- each shape of a model -------------------------------------------------------------------------------------------------


def double(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Twice as much."""
    return x * 2


@declare(inputs=[TensorSpec(name="x", datatype="FP64", shape=(-1, 2))], outputs=[TensorSpec(name="y", datatype="FP64")])
async def declared(request: InferRequest) -> InferResponse:
    return InferResponse(outputs=(Tensor(name="y", data=request["x"].sum(axis=1)),))


def words(prompt: str) -> Iterator[str]:
    for word in prompt.split():
        yield f"{word} "


def trimmed_words(prompt: str) -> Iterator[str]:
    """The words; where it is to `trim`, the process gives back what memory it can."""
    if prompt == "trim":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        prompt = "trimmed"
    yield from words(prompt)


async def letters(prompt: Prompt) -> AsyncIterator[str]:
    for letter in prompt.text:
        await trio.lowlevel.checkpoint()
        yield letter


async def parrot(session: Session[Part, Part]) -> None:
    """Speaks first, then says back what it hears."""
    session.accept()
    await session.send(Part(data=b"hello"))
    async for part in session:
        await session.send(part)


async def mute(prompt: str) -> AsyncIterator[str]:
    """Says one word, and then nothing."""
    yield "one "
    await trio.sleep_forever()


class Shouter:
    """Says it loud."""

    context = 6
    parameters = frozenset({"temperature", "max_new_tokens"})

    def __init__(self, end: str = "!") -> None:
        self._end = end

    def __call__(self, prompt: str) -> Iterator[str]:
        yield prompt.upper() + self._end

    @staticmethod
    def count_tokens(text: str) -> int:
        return len(text.split())

    @staticmethod
    def chat_template(messages: Any) -> str:
        return " / ".join(f"{one.role}: {one.content}" for one in messages)


@asynccontextmanager
async def loader(diary: str = "") -> AsyncIterator[Callable[[Prompt], AsyncIterator[str]]]:
    """Writes to its diary when it is left."""
    write(diary, "loaded")
    try:
        yield letters
    finally:
        write(diary, "unloaded")


def _rows(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.full((len(x), 1), len(x), np.float32)


batched = ModelSpec(
    name="batched",
    family=spec_of(_rows).family,
    load=spec_of(_rows).load,
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(1,)),),
    outputs=(TensorSpec(name="OUTPUT0", datatype="FP32", shape=(1,)),),
    version="7",
    capacity=32,
    max_batch_size=8,
    batching=Batching(max_delay=0.2, instances=1),
    restart=RestartPolicy(intensity=7, backoff=0.05),
    warmup=(InferRequest(inputs=(Tensor(name="x", data=np.ones((1, 1), np.float32)),)),),
    timeout=50.0,
    required=False,
    memory=1000,
)
"""The number of rows that are with it in one call."""


@asynccontextmanager
async def counting() -> AsyncIterator[RollingBatch[Counted]]:
    async with rolling(Counting()) as batch:
        yield batch


# -- the process that a model sees -----------------------------------------------------------------------------------------

SEEN = ("EVERYWIRE_INSTANCE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OF_OURS", "EVERYWIRE_SECRET")


async def seen(prompt: str) -> AsyncIterator[str]:
    """Its process id, and the values of SEEN in its environment."""
    yield " ".join([str(os.getpid()), *(os.environ.get(name, "-") for name in SEEN)])


async def telling(prompt: str) -> AsyncIterator[str]:
    print(f"printed {prompt}")
    print(f"complained {prompt}", file=sys.stderr)
    log.warning("warned of %s", prompt)
    try:
        raise KeyError(prompt)
    except KeyError:
        log.exception("caught")
    log.warning("half of a pair: \udc80")
    yield "told"


# -- models that end, fail or wait -----------------------------------------------------------------------------------------


def write(diary: str, line: str) -> None:
    """One line, at once."""
    if diary:
        with open(diary, "a") as file:
            file.write(f"{line}\n")


def hold_the_interpreter() -> None:
    """A C call that keeps the GIL, for as long as anybody would wait."""
    ctypes.PyDLL(None).sleep(3600)


@asynccontextmanager
async def slow_loader(diary: str) -> AsyncIterator[Callable[[Prompt], AsyncIterator[str]]]:
    """Loads for ever, in a call that holds the interpreter."""
    write(diary, f"loads {os.getpid()}")
    hold_the_interpreter()
    yield letters


class Meeting:
    """Waits until there is a file, once it has said who it is."""

    def __init__(self, diary: str, gate: str) -> None:
        self._diary, self._gate = diary, gate

    def __call__(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        write(self._diary, f"meets {os.getpid()}")
        while not os.path.exists(self._gate):
            time.sleep(0.01)
        return x


class Killed:
    """Ends with any batch that has a negative number, once it has said who it is and how many rows there are."""

    def __init__(self, diary: str) -> None:
        self._diary = diary

    def __call__(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        write(self._diary, f"called {os.getpid()} {len(x)}")
        if (x < 0).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return x


class Doomed:
    """Sends its pid, then acts as the prompt says after its first word. If that is `before`, it does not send its pid."""

    def __init__(self, diary: str = "") -> None:
        self._diary, self._kept = diary, list[bytes]()
        write(diary, f"loaded {os.getpid()}")

    async def __call__(self, session: Session[Prompt, Token | Finish]) -> None:
        prompt = await session.receive()
        when, _, what = prompt.text.partition(" ")
        write(self._diary, f"called {os.getpid()}")
        try:
            if when != "before":
                await session.send(Token(text=str(os.getpid())))
            if when == "after":
                await session.send(Token(text=" and"))
            await self._do(what)
            await session.send(Token(text=" done"))
        finally:
            write(self._diary, f"finally {os.getpid()}")

    async def _do(self, what: str) -> None:
        await trio.sleep(0.02)  # the tokens sent so far leave
        match what.split():
            case ["segv"]:
                faulthandler._sigsegv()  # type: ignore[attr-defined]
            case ["_exit", code]:
                os._exit(int(code))
            case ["exit", code]:
                sys.exit(int(code))
            case ["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["stop"]:
                os.kill(os.getpid(), signal.SIGSTOP)
            case ["abort"]:
                os.abort()
            case ["gil"]:
                write(self._diary, f"holds {os.getpid()}")
                hold_the_interpreter()
            case ["memory"]:
                self._kept.append(bytes(8 << 30))
            case ["daemon"]:
                if not os.fork():
                    os.setsid()  # it keeps the socket for a while, and nobody else ends it
                    time.sleep(3)
                    os._exit(0)
                os._exit(5)
            case ["wait"]:
                await trio.sleep_forever()
            case ["surrogate"]:
                raise ValueError("no file named \udc80")
            case ["error"]:
                raise ModelError("no such \udc80 voice", code="Voice", status=422)
            case []:
                pass


async def ticking(prompt: str) -> AsyncIterator[str]:
    """Numbers, for ever."""
    number = 0
    while True:
        yield f"{number} "
        number += 1
        await trio.sleep(0.002)


@asynccontextmanager
async def mortal(diary: str) -> AsyncIterator[Callable[[Session[Prompt, Token | Finish]], Awaitable[None]]]:
    """Its background work raises as soon as its diary says "die", and once."""
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def work() -> None:
            while True:
                await trio.sleep(0.02)
                if os.path.exists(diary):
                    os.unlink(diary)
                    raise RuntimeError("the background work has ended")

        async def saying(session: Session[Prompt, Token | Finish]) -> None:
            await session.receive()
            await session.send(Token(text="begun"))
            await trio.sleep_forever()

        yield saying
        nursery.cancel_scope.cancel()


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


class Held:
    """Is held in a call of C until somebody writes to the pipe that is its gate; or spins in Python; or goes on."""

    def __init__(self, diary: str, gate: str) -> None:
        self._diary, self._gate = diary, gate

    def __call__(self, prompt: str) -> Iterator[str]:
        yield f"{os.getpid()} "
        write(self._diary, f"{prompt} {os.getpid()}")
        try:
            if prompt == "held":
                os.close(os.open(self._gate, os.O_RDONLY))
            while prompt == "spins":
                pass
            while prompt == "ticks":
                time.sleep(0.01)
                yield "tick "
            yield "over"
        except BaseException as e:
            write(self._diary, f"raised {type(e).__name__}")
            raise


class HeldRows:
    """Holds each batch until somebody opens its gate, if one of its rows is above 0."""

    max_batch_size = 8
    batching = Batching(max_delay=0.1)
    inputs = (TensorSpec(name="x", datatype="FP32", shape=(1,)),)
    outputs = (TensorSpec(name="OUTPUT0", datatype="FP32", shape=(1,)),)

    def __init__(self, gate: str) -> None:
        self._gate = gate

    def __call__(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if (x > 0).any():
            os.close(os.open(self._gate, os.O_RDONLY))
        return np.full((len(x), 1), len(x), np.float32)


async def raising(session: Session[Prompt, Token | Finish]) -> None:
    """Errs in its clean-up."""
    await session.receive()
    await session.send(Token(text="begun"))
    try:
        await trio.sleep_forever()
    finally:
        raise ValueError("no clean-up")


class Counter:
    """Counts what it has sent, or heard, in a file of eight bytes."""

    def __init__(self, file: str, size: int = PAYLOAD) -> None:
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


class Deaf:
    """Reads nothing until there is a file."""

    def __init__(self, gate: str) -> None:
        self._gate = gate

    async def __call__(self, session: Session[Part, Part]) -> None:
        while not os.path.exists(self._gate):
            await trio.sleep(0.01)
        async for part in session:
            await session.send(Part(data=bytes(part.data[:8])))


async def identity(request: InferRequest) -> InferResponse:
    return InferResponse(outputs=tuple(Tensor(name=f"{one.name}-back", data=one.data) for one in request.inputs))


class Remembering:
    """Adds up what each sequence has said."""

    def __init__(self) -> None:
        self._sums: dict[Any, float] = {}

    async def __call__(self, request: InferRequest) -> InferResponse:
        sequence = request.parameters["sequence_id"]
        if request.parameters.get("sequence_start"):
            self._sums[sequence] = 0
        self._sums[sequence] += float(request["x"].sum())
        both = np.array([self._sums[sequence], os.getpid()])
        return InferResponse(outputs=(Tensor(name="y", data=both),))


async def unfit(prompt: str) -> AsyncIterator[Any]:
    """Yields a token that is invalid in the way the prompt names. It must end its own session alone."""
    match prompt:
        case "id":
            yield Token(text="x", id=None)  # type: ignore[arg-type]
        case "log_prob":
            yield Token(text="x", log_prob="much")  # type: ignore[arg-type]
        case "text":
            yield Token(text=7)  # type: ignore[arg-type]
        case "surrogate":
            yield Token(text="\udc80")
        case "top":
            yield Token(text="x", top="none")  # type: ignore[arg-type]
        case "str":
            yield Token(text=np.str_("fine"))
        case "object":
            yield object()
        case _:
            yield "fine"


async def brief(session: Session[Part, Part]) -> None:
    """Answers with its head alone."""
    session.reply["content-type"] = "text/x-own"


async def beheaded(session: Session[Part, Part]) -> None:
    """Its head is invalid."""
    session.reply["content-type"] = 7  # type: ignore[assignment]
    await session.send(Part(data=b"x"))


def crashing_loads(diary: str) -> Callable[[str], AsyncIterator[str]]:
    """Its process ends each time it loads, once it has been called."""
    if os.path.exists(diary):
        os._exit(7)

    async def fine(prompt: str) -> AsyncIterator[str]:
        if prompt == "die":
            Path(diary).touch()
            os._exit(9)
        yield "fine"

    return fine


def patient(gate: str) -> Callable[[str], AsyncIterator[str]]:
    """Loads at once, for the first time; later when the file is there."""
    begun = Path(f"{gate}.{os.environ['EVERYWIRE_INSTANCE']}")
    while begun.exists() and not os.path.exists(gate):
        time.sleep(0.01)
    begun.touch()

    async def fine(prompt: str) -> AsyncIterator[str]:
        yield "fine"

    return fine


class Loud:
    """Has much to say while it is imported and loaded, and a thread that goes on."""

    def __init__(self) -> None:
        for number in range(200):
            log.warning("%d %s", number, "x" * 2000)

        def go_on() -> None:
            while True:
                log.warning("again %s", "y" * 2000)
                time.sleep(0.001)

        threading.Thread(target=go_on, daemon=True).start()

    async def __call__(self, prompt: str) -> AsyncIterator[str]:
        yield "quiet"


async def parent(prompt: str) -> AsyncIterator[str]:
    """Has a program of its own, and is killed."""
    yield str(subprocess.Popen(["sleep", "3600"]).pid)
    if prompt == "die":
        await trio.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    await trio.sleep_forever()


# -- large tensors ---------------------------------------------------------------------------------------------------------


class Hoarder:
    """Keeps each array, and answers with the sum of the one before."""

    def __init__(self) -> None:
        self._kept: list[npt.NDArray[np.float64]] = []

    def __call__(self, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        self._kept.append(x)
        return np.array([self._kept[-2:][0].sum(), len(self._kept)])


def swell(x: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """As many bytes as the first number says."""
    return np.ones(int(x[0]), np.uint8)


class Caught:
    """Ends its process while it has a large array, and has answered with another, when the first number is below 0."""

    async def __call__(self, session: Session[InferRequest, InferResponse]) -> None:
        request = await session.receive()
        await session.send(InferResponse(outputs=(Tensor(name="y", data=request["x"] + 1),)))
        if request["x"][0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)


async def in_place(session: Session[InferRequest, InferResponse]) -> None:
    """Twice as much, in memory that needs not be copied; and whether it is that."""
    async for request in session:
        y = session.empty(request["x"].shape, request["x"].dtype)
        np.multiply(request["x"], 2, out=y)
        outputs = (Tensor(name="y", data=y), Tensor(name="own", data=np.array([y.base is None])))
        await session.send(InferResponse(outputs=outputs))


def liar(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Says once that its answer is where no memory is, when the first number is below 0."""
    if x[0] < 0:
        lend = SharedMemory.lend
        SharedMemory.lend = lambda self, place: Block(lend(self, place).key, 0, 2**40, place.nbytes)  # type: ignore[method-assign]
    return x


def hasty() -> Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]:
    """One whose process gives idle memory back soon."""
    pipe.IDLE_SECONDS = 0.02
    return lambda x: x
