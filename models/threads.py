"""One call in a thread: none of its frames, nor of the objects they held, outlives it in the exception that it raises."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn, TypeVar, final

import trio

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

# An exception knows, by its traceback, the frames that it came through. Those of a thread's call know their callers
# (`f_back`) up to the thread's own loop, whose locals hold the outcome, which is that exception. Such a cycle keeps all that
# the call was about, a body of a gigabyte too, until the garbage collector comes by; and so does each `__cause__` and
# `__context__`, whatever `from None` hides. So nothing crosses from a thread but an exception without tracebacks.

_TEXT = 16 * 1024  # characters of a traceback that are kept, the innermost
_IN_ITS_THREAD = "In its thread:\n"


async def in_thread(
    call: Callable[[], T],
    *,
    limiter: trio.CapacityLimiter | None = None,
    abandon_on_cancel: bool = False,
    expected: tuple[type[BaseException], ...] = (),
) -> T:
    """Returns what `call` returns, or raises what it raises, which then has no traceback but the caller's own. A note
    (PEP 678) has the traceback of the thread as text, so that a log shows where it was raised; not of an `expected` error.

    `limiter` and `abandon_on_cancel` are `trio.to_thread.run_sync`'s. An exception out of a call that was abandoned is
    dropped.
    """
    found = await trio.to_thread.run_sync(
        partial(caught, call, expected), limiter=limiter, abandon_on_cancel=abandon_on_cancel
    )
    if type(found) is not Raised:
        return found
    error = found.error
    del found
    try:
        raise error
    finally:
        del error  # it knows this frame: a cycle would keep the caller's memory


_THREADS = 8
_codecs: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("codec threads")


def codec_threads() -> trio.CapacityLimiter:
    """The few threads for pure and bounded steps that the loop would feel. None of Trio's usual forty: models may hold all
    of those."""
    try:
        return _codecs.get()
    except LookupError:
        limiter = trio.CapacityLimiter(_THREADS)
        _codecs.set(limiter)
        return limiter


@final
class Raised:
    """An exception of a call, as a value."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


def caught(call: Callable[[], T], expected: tuple[type[BaseException], ...] = ()) -> T | Raised:
    """The result of `call`, or its exception, `detached`."""
    try:
        return call()
    except BaseException as error:
        return Raised(detached(error, expected))


def detached(error: E, expected: tuple[type[BaseException], ...] = (BaseException,)) -> E:
    """The exception without its traceback, nor those of its causes, contexts and, of a group, members: it keeps no frame.
    One that is not `expected` has the text of its traceback as a note."""
    if not isinstance(error, expected):
        with suppress(Exception):
            _note(error)
    waiting: list[BaseException] = [error]
    seen = set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        waiting += [other for other in (one.__cause__, one.__context__) if other is not None]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    return error


def throw(error: BaseException) -> NoReturn:
    """Raises an exception that was kept as a value. For `throw(place.take())`: as an argument it has no name in the caller's
    frame, which its traceback knows, nor any more in whatever that frame knows."""
    try:
        raise error
    finally:
        del error


def _note(error: BaseException) -> None:
    # one that is raised again and again, as a constant may be, has one note
    notes = [note for note in getattr(error, "__notes__", ()) if not str(note).startswith(_IN_ITS_THREAD)]
    error.__notes__ = notes
    text = "".join(traceback.format_exception(error))[-_TEXT:]
    error.__notes__ = [*notes, f"{_IN_ITS_THREAD}{text}"]
