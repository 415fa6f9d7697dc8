"""Makes runs repeatable: one seed decides the order of tasks, ids, keys, padding, and the end of threads."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import outcome
import trio
from trio import _threads
from trio._core import _run

STEP_SECONDS = 0.001
"""Seconds of a mocked clock that a step of blocking code takes."""


@contextmanager
def seeded(seed: int, *, threads: bool = False, step: float = STEP_SECONDS) -> Iterator[None]:
    """Makes a `trio.run` within the block run in the same way each time, if it waits only for Trio's (mocked) clock. Use it
    around `trio.run`, never inside. Afterwards everything is as before.

    `random`, `os.urandom` and `secrets` follow the seed, so nothing inside is secret. Blocking code runs in the thread of
    the Trio run, as a task that takes `step` seconds: a seed cannot schedule threads, and a mocked clock does not wait for
    them. Code that waits for another thread, or calls `trio.from_thread`, cannot run in this way. `threads=True` leaves
    threads as they are.
    """
    chance = random.Random(f"everywire {seed}")
    run: Any = _run
    places: list[tuple[Any, str, Any]] = [
        (run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        (os, "urandom", chance.randbytes),
        (secrets, "token_bytes", lambda n=32: chance.randbytes(n)),
        (secrets, "token_hex", lambda n=32: chance.randbytes(n).hex()),
        (secrets, "randbelow", chance.randrange),
    ]
    if not threads:
        start = partial(_start_task_soon, step)
        places += [(_threads, "start_thread_soon", start), (trio.lowlevel, "start_thread_soon", start)]
    before = [getattr(owner, name) for owner, name, _ in places]
    state, shared = run._r.getstate(), random.getstate()
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        run._r.seed(seed)
        random.seed(f"everywire {seed}")
        yield
    finally:
        for (owner, name, _), value in zip(places, before, strict=True):
            setattr(owner, name, value)
        run._r.setstate(state)
        random.setstate(shared)


def _start_task_soon(
    step: float, fn: Callable[[], Any], deliver: Callable[[outcome.Outcome[Any]], object], name: str | None = None
) -> None:
    """Runs a function in a system task, in place of a thread."""

    async def thread() -> None:
        await trio.sleep(step)
        deliver(outcome.capture(fn))

    trio.lowlevel.spawn_system_task(thread, name="thread")
