"""The token source that the benchmarks serve: as many tokens as are asked for, as fast as they are taken."""

from __future__ import annotations

from collections.abc import AsyncIterator

from models.messages import Prompt, Token


async def tokens(prompt: Prompt) -> AsyncIterator[Token]:
    """`max_new_tokens` tokens that cost nothing to make."""
    for number in range(prompt.parameters.max_new_tokens):
        yield Token(id=number, text=" token", log_prob=-0.5)
