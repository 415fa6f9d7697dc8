"""Token sources for every checkout: this folder is put on the path of the servers that are measured, so that two versions
of the server serve the same model."""

from __future__ import annotations

from collections.abc import AsyncIterator

import trio

from models.messages import Prompt, Token

SECONDS = 0.02


async def tokens(prompt: Prompt) -> AsyncIterator[Token]:
    """`max_new_tokens` tokens that cost nothing to make."""
    for number in range(prompt.parameters.max_new_tokens):
        yield Token(id=number, text=" token", log_prob=-0.5)


async def paced(prompt: Prompt) -> AsyncIterator[Token]:
    """`max_new_tokens` tokens, 20 ms apart: there is never more than one to send."""
    for number in range(prompt.parameters.max_new_tokens):
        await trio.sleep(SECONDS)
        yield Token(id=number, text=" token", log_prob=-0.5)
