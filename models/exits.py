"""Tells a model's failure from the program's end: KeyboardInterrupt, SystemExit, GeneratorExit, raised by a model's code."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator

import trio

_contained: contextvars.ContextVar[bool] = contextvars.ContextVar("models_interrupts_contained", default=False)


def contain_interrupts() -> None:
    """Says that KeyboardInterrupt is never Ctrl-C in this context and in the tasks that it starts, as in a program whose
    signals have a task of their own: a model that raises it has failed."""
    _contained.set(True)


def is_failure(error: BaseException) -> bool:
    """True if an exception out of a model's code is that model's failure, alone or, in a group, each of them.

    SystemExit and GeneratorExit are: a model may end its sessions, and not the program. KeyboardInterrupt is where it cannot
    be Ctrl-C, which Python raises in the main thread alone: in another thread, and after `contain_interrupts`.
    trio.Cancelled never is.
    """
    return all(_is_failure(leaf) for leaf in leaves(error))


def _is_failure(error: BaseException) -> bool:
    if isinstance(error, KeyboardInterrupt):
        return _contained.get() or threading.current_thread() is not threading.main_thread()
    return not isinstance(error, trio.Cancelled)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in a group, however deep: nurseries wrap what their tasks raise."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


class ModelExit(Exception):
    """A model's code raised SystemExit, KeyboardInterrupt or GeneratorExit, its cause. In place of it where it would end
    somebody else's task."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        self.__cause__ = error


def contained(error: BaseException) -> Exception:
    """The exception itself, or ModelExit in its place where it is none that `except Exception` would see."""
    return error if isinstance(error, Exception) else ModelExit(error)
