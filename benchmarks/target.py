"""The models that a side-by-side benchmark asks for, on our own types.

The harness puts its `model` module on the path: the token source that every peer serves, with the probe through which
it sees from outside how far a model ran.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import trio
from model import source  # type: ignore[import-not-found]

from models.messages import Prompt, Token


async def tokens(prompt: Prompt) -> AsyncIterator[Token]:
    """`max_new_tokens` tokens, `delay_ms` apart."""
    parameters = prompt.parameters
    delay = float(parameters.extra.get("delay_ms", 0)) / 1e3
    for item in source(parameters.max_new_tokens, delay):
        if delay:
            await trio.sleep(delay)
        token = item["token"]
        yield Token(id=token["id"], text=token["text"], log_prob=token["log_prob"])
