"""The few threads in which codecs work through what the loop would feel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")

_THREADS = 8
_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("gateway codec threads")


async def beside(call: Callable[[], T]) -> T:
    """Runs a pure and bounded step in a thread. Not in one of Trio's usual forty: models may hold all of those."""
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(_THREADS)
        _limiter.set(limiter)
    return await trio.to_thread.run_sync(call, limiter=limiter)
