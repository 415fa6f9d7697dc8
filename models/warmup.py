"""The first calls of a model, made each time it was loaded and before any client is served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import trio

from models.session import Call, Session
from models.spec import Model, ModelSpec


@final
class WarmupFailed(Exception):
    """A model raised in its warm-up: it is not served."""


async def warm_up(model: Model, spec: ModelSpec) -> None:
    """Calls the model with each message of `spec.warmup`, in order and one at a time, each in a session of its own whose
    dialect is `warmup`; what the model sends is dropped. A function there is awaited with the model instead, and calls it
    as it likes.

    WarmupFailed with the number of the call and what the model raised. A model that reads on past its message has ended
    well. A model must not wait here for what only a client would send. Cancelled, the model is.
    """
    if not isinstance(spec.warmup, Sequence):
        try:
            await spec.warmup(model)
        except Exception as e:
            raise WarmupFailed(f"the warm-up raised {_told(e)}") from e
        return
    for number, message in enumerate(spec.warmup, 1):
        call = Call(id=f"warmup-{number}", model=spec.name, version=spec.version, dialect="warmup")
        try:
            await model(Session(_OneMessage(message), call))
        except trio.EndOfChannel:
            pass
        except Exception as e:
            raise WarmupFailed(f"warm-up request {number} of {len(spec.warmup)} raised {_told(e)}") from e


def _told(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@final
class _OneMessage:
    """A client that says one thing and takes all that it is told."""

    def __init__(self, message: Any) -> None:
        self._message = message
        self.exhausted = False

    async def receive(self) -> Any:
        await trio.lowlevel.checkpoint()
        if self.exhausted:
            raise trio.EndOfChannel
        self.exhausted = True
        return self._message

    async def send(self, message: Any, /) -> None:
        await trio.lowlevel.checkpoint()
