"""What a model raises to tell its client something, and how its failure is told from the program's end."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from typing import final

import trio


class ModelError(Exception):
    """An error whose text is meant for the client.

    `message` reaches the client as it is, on every wire; `code` is a short machine-readable name, `status` the HTTP
    status where a response has not begun. Any other exception out of a model reaches the client only as an id that
    the log explains.

    The code `ValidationError` says that the request is to blame: a parameter is outside the range that this model has.
    OpenAI's routes answer it with 400, whatever `status` says, and TGI's form calls it `validation`.
    """

    def __init__(self, message: str, *, code: str = "ModelError", status: int = 424) -> None:
        super().__init__(message)
        if not isinstance(message, str) or not isinstance(code, str) or not isinstance(status, int):
            raise TypeError(f"ModelError takes a text, a code that is one, and a number: {message!r}, {code!r}, {status!r}")
        if not 400 <= status <= 599:
            raise ValueError(f"status must be an error status, 400 to 599, not {status}")
        self.message = message
        self.code = code
        self.status = status


@final
class ContextLengthExceeded(ModelError):
    """A prompt that leaves no room for what is asked in the model's context: the request is to blame.

    `needed` are the tokens that prompt and output would have together, `limit` the most that they may have, and
    `prompt_tokens`, where the model knows them, those of the prompt alone. OpenAI's routes answer with 400 and the code
    `context_length_exceeded`, LMI's with their 424 (`error_type` `validation` in TGI's form), all others with 400.
    """

    def __init__(self, needed: int, limit: int, *, prompt_tokens: int | None = None) -> None:
        if prompt_tokens is None:
            said = f"the request needs {needed}"
        else:
            said = f"the prompt has {prompt_tokens} and {needed - prompt_tokens} were asked for"
        super().__init__(
            f"This model's maximum context length is {limit} tokens; {said}", code="ContextLengthExceeded", status=400
        )
        self.needed = needed
        self.limit = limit
        self.prompt_tokens = prompt_tokens


class CallLost(Exception):
    """What ran the model has ended under the call, as a process that crashed. The call is not made again: it may be why."""


_contained: contextvars.ContextVar[bool] = contextvars.ContextVar("models_interrupts_contained", default=False)


def contain_interrupts() -> None:
    """Says that KeyboardInterrupt is never Ctrl-C in this context and in the tasks that it starts, as in a program whose
    signals have a task of their own: a model that raises it has failed."""
    _contained.set(True)


_cancelled: contextvars.ContextVar[type[BaseException]] = contextvars.ContextVar("models_cancelled", default=trio.Cancelled)


def cancelled() -> type[BaseException]:
    """The exception that is raised where a cancelled task waits: Trio's, unless `set_cancelled` has said another one."""
    return _cancelled.get()


def set_cancelled(kind: type[BaseException]) -> None:
    """Says so for this context and the tasks that it starts. For `models.blocking.set_loop`."""
    _cancelled.set(kind)


def is_failure(error: BaseException) -> bool:
    """True if an exception out of a model's code is that model's failure, alone or, in a group, each of them.

    SystemExit and GeneratorExit are: a model may end its sessions, and not the program. KeyboardInterrupt is where it cannot
    be Ctrl-C, which Python raises in the main thread alone: in another thread, and after `contain_interrupts`.
    trio.Cancelled, or what the loop has in its place, never is.
    """
    return all(_is_failure(leaf) for leaf in leaves(error))


def _is_failure(error: BaseException) -> bool:
    if isinstance(error, KeyboardInterrupt):
        return _contained.get() or threading.current_thread() is not threading.main_thread()
    return not isinstance(error, _cancelled.get())


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in a group, however deep: nurseries wrap what their tasks raise."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


_OF_A_DEVICE = "torch.OutOfMemoryError"  # which is a RuntimeError


def is_out_of_memory(error: BaseException) -> bool:
    """True if an exception says that there is no memory left: MemoryError, or torch's error for a device's."""
    kind = type(error)
    return isinstance(error, MemoryError) or f"{kind.__module__}.{kind.__qualname__}" == _OF_A_DEVICE


class ModelExit(Exception):
    """A model's code raised SystemExit, KeyboardInterrupt or GeneratorExit, its cause. In place of it where it would end
    somebody else's task."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        self.__cause__ = error


def contained(error: BaseException) -> Exception:
    """The exception itself, or ModelExit in its place where it is none that `except Exception` would see."""
    return error if isinstance(error, Exception) else ModelExit(error)
