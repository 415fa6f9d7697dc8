"""The first calls of a model, made each time it was loaded and before any client is served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import trio

from models.continuations import Continuations
from models.exits import is_failure, leaves
from models.messages import Family, Finish, GenerationParameters, Prompt, Token
from models.session import Call, Session
from models.spec import Model, ModelSpec

Check: TypeAlias = Callable[[Any, Any], object]
"""A function of a message and a model's answer to it, which raises if the answer is wrong."""


@final
class WarmupFailed(Exception):
    """A model raised in its warm-up, or gave a wrong answer: it is not served."""


async def warm_up(model: Model, spec: ModelSpec, check: Check | None = None) -> None:
    """Calls the model with each message of `spec.warmup`, in order and one at a time, each in a session of its own whose
    dialect is `warmup`; what the model sends is dropped, once `check` has looked at it. A function there is awaited with the
    model instead, and calls it as it likes.

    WarmupFailed with the number of the call and what the model raised, or what is wrong with its answer; also where a model
    of tensors gives none, unless it is decoupled. A model that reads on past its message has ended well. A model must not
    wait here for a message that only a client would send. If this is cancelled, the model is.
    """
    if not isinstance(spec.warmup, Sequence):
        try:
            await spec.warmup(model)
        except BaseException as e:
            if not is_failure(e):
                raise
            raise WarmupFailed(f"the warm-up raised {_told(e)}") from e
        return
    for number, message in enumerate(spec.warmup, 1):
        call = Call(id=f"warmup-{number}", model=spec.name, version=spec.version, dialect="warmup")
        channel = _OneMessage(message, check)
        try:
            await channel.text.around(model(Session(channel, call)))
        except BaseException as e:
            if not is_failure(e):
                raise
            if channel.wrong is None and not all(isinstance(leaf, trio.EndOfChannel) for leaf in leaves(e)):
                raise WarmupFailed(f"warm-up request {number} of {len(spec.warmup)} raised {_told(e)}") from e
        if channel.wrong is not None:
            said = f"the answer to warm-up request {number} of {len(spec.warmup)} is wrong: {channel.wrong}"
            raise WarmupFailed(said) from channel.wrong
        if spec.family is Family.TENSOR and not (spec.decoupled or channel.answered):
            said = f"warm-up request {number} of {len(spec.warmup)} has no answer, and the model is not decoupled"
            raise WarmupFailed(said)


def _told(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@final
class _OneMessage:
    """A client that says one thing and takes all that it is told: of a text no more than a client would get."""

    def __init__(self, message: Any, check: Check | None) -> None:
        self._message, self._check = message, check
        self.exhausted = self.answered = False
        self.text = Continuations(message.parameters if isinstance(message, Prompt) else GenerationParameters())
        self.wrong: Exception | None = None
        """The first exception of the check, even if the model has gone on after it."""

    @property
    def complete(self) -> bool:
        return self.text.complete

    async def receive(self) -> Any:
        await trio.lowlevel.checkpoint()
        if self.exhausted:
            raise trio.EndOfChannel
        self.exhausted = True
        return self._message

    async def send(self, message: Any, /) -> None:
        await trio.lowlevel.checkpoint()
        self.answered = True
        if self._check is not None:
            try:
                self._check(self._message, message)
            except Exception as e:
                self.wrong = self.wrong or e
                raise
        if type(message) in (Token, Finish) and self.text.passes(message):
            self.text.take(message)
            self.text.sent()
