"""The gain of a rolling batch: CPU microseconds of a token of the library's transformer, with 16 sequences and with one.

    python -m benchmarks micro rolling-batch

The figures include everything but a wire: the rounds' threads, the hand-over to sessions, and the choice and text of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, final

import trio

from benchmarks.units import Case, Cost
from models.library.lm import neural
from models.messages import Finish, GenerationParameters, Prompt, Token
from models.rolling import RollingBatch
from models.session import Session

TOGETHER = 16
LENGTH = 64
ROUNDS = 8
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "sampled, top_p 0.9": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
}


@final
class Reader:
    """A client that sends one request and counts the tokens of the answer."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompts = [prompt]
        self.received = 0

    async def receive(self) -> Prompt:
        if not self._prompts:
            raise trio.EndOfChannel
        return self._prompts.pop()

    async def send(self, _: Token | Finish, /) -> None:
        self.received += 1


def token(together: int, parameters: Mapping[str, Any]) -> Cost:
    """The cost of a token if `together` sequences are generated at once: the best of several rounds, in CPU time of the
    process."""

    def cost() -> float:
        return trio.run(_best, together, parameters)

    return cost


async def _best(together: int, parameters: Mapping[str, Any]) -> float:
    async with neural.load() as batch:
        return min([await _round(batch, together, parameters) for _ in range(ROUNDS)])


async def _round(batch: RollingBatch[Any], together: int, parameters: Mapping[str, Any]) -> float:
    readers = [
        Reader(
            Prompt(
                text="Return the value of the",
                parameters=GenerationParameters(
                    max_new_tokens=LENGTH, ignore_eos_token=True, seed=number, details=True, **parameters
                ),
            )
        )
        for number in range(together)
    ]
    began = time.process_time()
    async with trio.open_nursery() as nursery:
        for reader in readers:
            nursery.start_soon(batch, Session(reader))
    return (time.process_time() - began) / sum(reader.received for reader in readers) * 1e6


def cases() -> Iterator[Case]:
    """A token of the transformer on a rolling batch: one of 16 sequences at once, and one alone."""
    for name, parameters in KINDS.items():
        yield Case(
            name=f"token, {name}",
            costs={f"{TOGETHER} at once": token(TOGETHER, parameters), "one alone": token(1, parameters)},
        )
