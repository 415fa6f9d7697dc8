"""Makes models that fail as declared: they raise, hang, crash in the background, block, ignore cancels, or lie."""

from __future__ import annotations

import enum
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import trio

from gateway.doorbell import Doorbell
from models.adapt import spec_of
from models.blocking import run_step
from models.errors import ModelError
from models.messages import Family, Finish, FinishReason, InferResponse, Part, Tensor, Token
from models.session import Call, Session
from models.spec import Model, ModelSpec


class Injected(RuntimeError):
    """The exception that a model with faults raises."""


class Lie(enum.Enum):
    """An invalid message that a model with faults sends."""

    FAMILY = "family"
    """A message of another family."""
    FINISH = "finish"
    """A second end of a generation. Only for text models; other models send a valid message."""
    ROWS = "rows"
    """More rows than the request has. Only for tensor models; other models send a valid message."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFaults:
    """The faults of one session. Each `_at` is a number of messages sent to the client: 0 means before the first message.
    Default None: the fault does not happen."""

    raise_at: int | None = None
    """The model raises Injected."""
    error_at: int | None = None
    """The model raises ModelError with the code "Injected" and the status 418."""
    hang_at: int | None = None
    """The model waits for ever."""
    crash_at: int | None = None
    """A background task of `load()` raises, so that the worker crashes and restarts by its policy. The session waits."""
    block_at: int | None = None
    """The model runs a step of blocking code in a thread, for `block` seconds."""
    block: float = 0.01
    lie_at: int | None = None
    """The model sends the invalid message `lie`."""
    lie: Lie = Lie.FAMILY
    stubborn: float = 0.0
    """Seconds for which the model goes on after a cancel, as clean-up under a shield does."""


def with_faults(
    model: Any, faults: ModelFaults | Callable[[Call], ModelFaults | None], *, crash: Doorbell | None = None
) -> ModelSpec:
    """Returns the spec of a model with faults. `model` is anything that `spec_of` takes. `faults` are those of each session,
    or a function that returns those of a call, or None. A ring of `crash` crashes the model's worker."""
    spec = spec_of(model)

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        bell = Doorbell()

        async def die(when: Doorbell) -> None:
            await when.wait()
            raise Injected("the worker crashed")

        async with trio.open_nursery() as nursery, spec.load() as inner:

            async def faulty(session: Session[Any, Any]) -> None:
                chosen = faults if isinstance(faults, ModelFaults) else faults(session.call)
                if chosen is None:
                    await inner(session)
                    return
                try:
                    await inner(_over(_Channel(session, chosen, spec.family, bell), session))
                except trio.Cancelled:
                    if chosen.stubborn:
                        with trio.CancelScope(shield=True, deadline=trio.current_time() + chosen.stubborn):
                            await trio.sleep_forever()
                    raise

            nursery.start_soon(die, bell)
            if crash is not None:
                nursery.start_soon(die, crash)
            yield faulty
            nursery.cancel_scope.cancel()

    return replace(spec, load=load)


def _over(channel: _Channel, session: Session[Any, Any]) -> Session[Any, Any]:
    """Puts a session over a channel. A session of a subclass is not changed, but wrapped in another session."""
    if type(session) is Session:
        session.channel = channel
        return session
    return Session(channel, lambda: session.call)


@final
class _Channel:
    """The channel of a session, with faults."""

    def __init__(self, session: Session[Any, Any], faults: ModelFaults, family: Family, crash: Doorbell) -> None:
        self._below: Any = session.channel
        self._faults, self._family, self._crash = faults, family, crash
        self._sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    async def receive(self) -> Any:
        return await self._below.receive()

    async def send(self, message: Any) -> None:
        faults, at = self._faults, self._sent
        if at == faults.block_at:
            await run_step(lambda: None if _in_a_task() else time.sleep(faults.block))
        if at == faults.raise_at:
            raise Injected(f"before message {at}")
        if at == faults.error_at:
            raise ModelError(f"refused before message {at}", code="Injected", status=418)
        if at == faults.crash_at:
            self._crash.ring()
        if at in (faults.hang_at, faults.crash_at):
            await trio.sleep_forever()
        if at == faults.lie_at:
            message = await self._lie(message)
        await self._below.send(message)
        self._sent += 1

    async def _lie(self, message: Any) -> Any:
        if self._faults.lie is Lie.FAMILY:
            return Part(data=b"a lie") if self._family is not Family.PARTS else Token(text="a lie")
        if self._faults.lie is Lie.FINISH and self._family is Family.TEXT:
            await self._below.send(Finish(reason=FinishReason.EOS_TOKEN))
            return Finish(reason=FinishReason.EOS_TOKEN)
        if self._faults.lie is Lie.ROWS and isinstance(message, InferResponse):
            outputs = [_doubled(t) for t in message.outputs]
            return InferResponse(outputs=outputs, id=message.id, parameters=message.parameters)
        return message


def _doubled(tensor: Tensor) -> Tensor:
    """Returns the tensor with twice as many rows."""
    return Tensor(name=tensor.name, data=np.concatenate([tensor.data, tensor.data]))


def _in_a_task() -> bool:
    """True if this step runs in the thread of the Trio run, as under a seed. There the step takes its time anyway."""
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True
