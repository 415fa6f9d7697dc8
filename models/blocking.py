"""Blocking steps in threads: one thread call a step, a cooperative cancel token, and a slot held until the step returns."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar, final

import trio

T = TypeVar("T")


@final
class StepCancelled(Exception):
    """Raised by `CancelToken.check` in a blocking step whose client is gone. Let it pass: nobody reads the result."""


@final
class CancelToken:
    """Tells code in a thread that its session is over. Safe to read from any thread."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()

    def cancel(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Raises StepCancelled once the session is over; call it between the parts of a long step."""
        if self._event.is_set():
            raise StepCancelled


class StepHolder(Protocol):
    """What a running step keeps occupied after its session has ended: the worker's slot."""

    def hold(self) -> None: ...
    def release(self) -> None: ...


_token: contextvars.ContextVar[CancelToken | None] = contextvars.ContextVar("models_cancel_token", default=None)
_holder: contextvars.ContextVar[StepHolder | None] = contextvars.ContextVar("models_step_holder", default=None)


def cancel_token() -> CancelToken:
    """The token of the blocking step that is running in this thread; one that is never cancelled elsewhere."""
    return _token.get() or CancelToken()


def set_step_holder(holder: StepHolder) -> contextvars.Token[StepHolder | None]:
    """Names what the steps of the current task keep occupied. For whoever runs models; reset with `reset_step_holder`."""
    return _holder.set(holder)


def reset_step_holder(token: contextvars.Token[StepHolder | None]) -> None:
    _holder.reset(token)


async def run_step(fn: Callable[[], T], *, limiter: trio.CapacityLimiter | None = None) -> T:
    """Runs one blocking step in a thread and returns its result.

    On cancel the caller goes on at once with trio.Cancelled and the step's token is cancelled; the thread ends at
    the end of its step (Python cannot stop it), and until then the session's slot stays occupied. What the abandoned
    step returns or raises is dropped.
    """
    token = CancelToken()
    holder = _holder.get()
    loop = trio.lowlevel.current_trio_token()
    if holder is not None:
        holder.hold()
    # A cancel may come while the step waits for its thread: then either the thread or the loop owns the hold, and the
    # lock decides which, once.
    lock, begun, abandoned = threading.Lock(), False, False

    def step() -> T:
        nonlocal begun
        with lock:
            if abandoned:
                raise StepCancelled
            begun = True
        _token.set(token)
        try:
            return fn()
        finally:
            if holder is not None:
                with contextlib.suppress(trio.RunFinishedError):  # the whole run is over: no slot is left to free
                    loop.run_sync_soon(holder.release)

    try:
        return await trio.to_thread.run_sync(step, abandon_on_cancel=True, limiter=limiter)
    finally:
        token.cancel()
        with lock:
            abandoned = not begun
        if abandoned and holder is not None:
            holder.release()
