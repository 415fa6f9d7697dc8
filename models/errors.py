"""The errors that models raise for their clients, and the distinction between a model's failure and the program's end."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from typing import Final, final

import trio


class ModelError(Exception):
    """An error whose text is for the client.

    `message` reaches the client unchanged, on every wire. `code` is a short machine-readable name. `status` is the HTTP
    status if the response has not begun. For any other exception of a model the client gets only an id, which the log
    explains.

    The code `ValidationError` blames the request: a parameter is outside this model's range. OpenAI's routes answer it with
    400 whatever `status` is, and TGI's form calls it `validation`.
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


BAD_INPUTS: Final = "BadInputs"
"""The code of the ModelError for arrays that a function cannot be called with. It was not called."""


@final
class ContextLengthExceeded(ModelError):
    """The prompt leaves too little room in the model's context; the request is at fault.

    `needed` is the number of tokens of prompt and output together, `limit` the most that are allowed, and `prompt_tokens`
    the number of the prompt alone, if the model knows it. OpenAI's routes answer with 400 and the code
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
    """The process or thread that ran the call has ended, for example by a crash. The call is not repeated: it may be the
    cause."""


_contained: contextvars.ContextVar[bool] = contextvars.ContextVar("models_interrupts_contained", default=False)


def contain_interrupts() -> None:
    """Declares that KeyboardInterrupt is never Ctrl-C in this context and in tasks started from it: the program handles
    signals in a separate task. A model that raises it has then failed."""
    _contained.set(True)


_cancelled: contextvars.ContextVar[type[BaseException]] = contextvars.ContextVar("models_cancelled", default=trio.Cancelled)


def cancelled() -> type[BaseException]:
    """The exception that a cancelled task gets where it waits: trio.Cancelled, or the one of `set_cancelled`."""
    return _cancelled.get()


def set_cancelled(kind: type[BaseException]) -> None:
    """Sets the exception of `cancelled` for this context and tasks started from it. For `models.blocking.set_loop`."""
    _cancelled.set(kind)


def is_failure(error: BaseException) -> bool:
    """True if an exception out of a model's code is a failure of that model. For a group, all its members must be.

    SystemExit and GeneratorExit are failures: a model may end its sessions, but not the program. KeyboardInterrupt is a
    failure where it cannot be Ctrl-C: outside the main thread, and after `contain_interrupts`. trio.Cancelled, or the loop's
    own exception for it, never is.
    """
    return all(_is_failure(leaf) for leaf in leaves(error))


def _is_failure(error: BaseException) -> bool:
    if isinstance(error, KeyboardInterrupt):
        return _contained.get() or threading.current_thread() is not threading.main_thread()
    return not isinstance(error, _cancelled.get())


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yields the exceptions in a group, at any depth: nurseries wrap the exceptions of their tasks."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


_OF_A_DEVICE = "torch.OutOfMemoryError"  # a RuntimeError


def is_out_of_memory(error: BaseException) -> bool:
    """True if an exception means that no memory is left: MemoryError, or torch's error for a device."""
    kind = type(error)
    return isinstance(error, MemoryError) or f"{kind.__module__}.{kind.__qualname__}" == _OF_A_DEVICE


class ModelExit(Exception):
    """A model's code raised SystemExit, KeyboardInterrupt or GeneratorExit, its cause. It replaces them where they would end
    another task."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        self.__cause__ = error


def contained(error: BaseException) -> Exception:
    """The exception itself, or ModelExit in its place if `except Exception` would not catch it."""
    return error if isinstance(error, Exception) else ModelExit(error)
