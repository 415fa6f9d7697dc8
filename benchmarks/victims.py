"""Models to be measured in processes, and those that do, where the prompt is `fault`, what only a process contains."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt
import trio

from models.messages import Prompt, Token

_PAUSE = 0.05
_TEXT = "token ".ljust(64, ".")


async def _told(prompt: Prompt) -> AsyncIterator[Token]:
    """Numbers, some a second; those of the prompt `fault` are two, those of `pid` are the process's."""
    for number in range(prompt.parameters.max_new_tokens):
        if prompt.text == "fault" and number == 2:
            return
        yield Token(id=number, text=f"{os.getpid() if prompt.text == 'pid' else number} ")
        await trio.sleep(_PAUSE)


async def numbers(prompt: Prompt) -> AsyncIterator[Token]:
    """Those alone."""
    async for token in _told(prompt):
        yield token


async def timed(prompt: Prompt) -> AsyncIterator[Token]:
    """Those, and its end is written to the file that the prompt names, by the clock of all processes."""
    try:
        async for token in _told(prompt):
            yield token
    finally:
        with open(prompt.text, "a") as file:  # noqa: ASYNC230  # a line
            file.write(f"{time.monotonic()}\n")


def scaled(INPUT0: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A plain function."""
    return INPUT0


def busy(INPUT0: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Pure Python for some hundredths of a second."""
    total = 0
    for number in range(400_000):
        total += number
    return INPUT0


async def tokens(prompt: Prompt) -> AsyncIterator[Token]:
    """Those that are asked for, of 64 bytes each, as fast as they are taken."""
    for number in range(prompt.parameters.max_new_tokens):
        yield Token(id=number, text=_TEXT, log_prob=-0.5)


async def crashes(prompt: Prompt) -> AsyncIterator[Token]:
    """Reads where it must not."""
    async for token in _told(prompt):
        yield token
    if prompt.text == "fault":
        ctypes.string_at(0)


async def holds(prompt: Prompt) -> AsyncIterator[Token]:
    """Keeps the interpreter for five seconds."""
    async for token in _told(prompt):
        yield token
    if prompt.text == "fault":
        ctypes.PyDLL(None).usleep(5_000_000)


async def deaf(prompt: Prompt) -> AsyncIterator[Token]:
    """Is for a minute in C code, which no cancellation reaches."""
    async for token in _told(prompt):
        yield token
    if prompt.text == "fault":
        ctypes.CDLL(None).sleep(60)


async def greedy(prompt: Prompt) -> AsyncIterator[Token]:
    """Takes memory without end, up to eight gibibytes."""
    async for token in _told(prompt):
        yield token
    if prompt.text == "fault":
        kept = [bytearray(b"x" * 2**24) for _ in range(512)]
        yield Token(id=len(kept), text="more than enough ")
