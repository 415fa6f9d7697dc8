"""Models for tests/interop/test_stalled_clients.py: two that say 100 MB to each client, and one that tells where those are."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from models.messages import Part, Prompt, Token

WANTED = 100_000_000
PART, TEXT = 4_000, 500
waiting: set[object] = set()
"""Sessions whose model is not running: it has given a message and is not asked for the next."""
told = 0


async def parts(part: Part) -> AsyncIterator[Part]:
    global told
    me = object()
    try:
        for _ in range(WANTED // PART):
            told += PART
            waiting.add(me)
            yield Part(data=b"x" * PART)
            waiting.remove(me)
    finally:
        waiting.discard(me)


async def tokens(prompt: Prompt) -> AsyncIterator[Token]:
    global told
    me = object()
    try:
        for number in range(WANTED // TEXT):
            told += TEXT
            waiting.add(me)
            yield Token(text="x" * TEXT, id=number)
            waiting.remove(me)
    finally:
        waiting.discard(me)


async def state(part: Part) -> bytes:
    """How many sessions wait for their clients, and how much all were told."""
    return json.dumps({"waiting": len(waiting), "told": told}).encode()
