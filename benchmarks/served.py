"""Models that the benchmarks serve: a fast source of tokens, and models that are each to blame for something."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

import trio

from benchmarks.alone.everywire_tokens import tokens as tokens
from models.messages import Prompt

FLOOD = "flood ".ljust(2000, ".")
"""The text of one token of `floods`."""


async def floods(prompt: Prompt) -> AsyncIterator[str]:
    """Yields 2 KB of text for each token, as fast as the client takes it."""
    for _ in range(prompt.parameters.max_new_tokens):
        yield FLOOD


def flood_events(tokens: int) -> Iterator[bytes]:
    """The tokens of `floods` as OpenAI's events, for servers that have no text models of their own."""
    for _ in range(tokens):
        choice = b'{"index":0,"text":"%b","logprobs":null,"finish_reason":null}' % FLOOD.encode()
        yield b'data: {"id":"cmpl-1","object":"text_completion","model":"floods","choices":[%b]}\n\n' % choice
    yield b"data: [DONE]\n\n"


async def naps(prompt: Prompt) -> AsyncIterator[str]:
    """Holds its slot for half a second."""
    await trio.sleep(0.5)
    yield "slept"


async def fails(prompt: Prompt) -> AsyncIterator[str]:
    """Raises if the prompt is `fail`."""
    if prompt.text == "fail":
        raise RuntimeError("the prompt is 'fail'")
    yield "well"


async def blocks(prompt: Prompt) -> AsyncIterator[str]:
    """Sleeps on the event loop's own thread."""
    time.sleep(0.2)  # noqa: ASYNC251  # that is its fault
    yield "slept"
