"""An instance's own side whose loop is Trio's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

import trio

from gateway.doorbell import Doorbell
from gateway.instances.child import Child
from gateway.instances.messages import Ask, Describe, Loaded, Message, Open, ReadInput
from gateway.instances.pipe import Pipe, SessionLine
from models.session import Session
from models.spec import Model, ModelSpec


@final
class TrioChild(Child):
    """A `Child` on Trio."""

    _bell = Doorbell

    def __init__(self, pipe: Pipe, describe: Callable[[Describe], tuple[ModelSpec | None, Message]]) -> None:
        super().__init__(pipe, describe)
        self._stream = pipe
        self._scopes: dict[int, trio.CancelScope] = {}
        self._asked, self._stop = trio.Event(), trio.Event()
        self._life, self._reading = trio.CancelScope(), trio.CancelScope()
        self._hung_up = False
        self._nursery: trio.Nursery

    async def _run(self, last: Callable[[], None]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write)
            nursery.start_soon(self._read)
            await self._asked.wait()
            if self._loading is not None:
                with self._life:
                    await self._serve(self._loading)
            last()
            self._reading.cancel()
            self._stream.finish()
            if self._hung_up:  # nobody reads the last words
                nursery.cancel_scope.cancel()

    async def _write(self) -> None:
        with suppress(trio.BrokenResourceError):
            await self._stream.write()
        self._over()

    async def _read(self) -> None:
        with self._reading, suppress(trio.BrokenResourceError):
            await self._stream.read(self.take)
        self._hung_up = not self._reading.cancel_called
        self._over()

    def _wake(self) -> None:
        self._asked.set()
        if self._stopping:
            self._stop.set()
            if not self._loaded:  # nobody waits for it any more
                self._life.cancel()

    async def _sessions(self, model: Model, loaded: Loaded) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery, self._model = nursery, model
            self._pipe.post(loaded)
            await self._stop.wait()
            nursery.cancel_scope.cancel()

    def _start_session(self, model: Model, opened: Open) -> None:
        number = opened.session
        line = SessionLine(self._pipe, number)
        deadline = self._opened(opened, line, trio.current_time())
        self._scopes[number] = trio.CancelScope()
        self._nursery.start_soon(self._call, model, opened.call, line, deadline)

    async def _within(self, number: int, model: Model, session: Session[Any, Any]) -> bool:
        try:
            with self._scopes[number] as scope:
                await model(session)
        finally:
            del self._scopes[number]
        return scope.cancelled_caught

    def _cancel(self, session: int) -> None:
        if (scope := self._scopes.get(session)) is not None:
            scope.cancel()

    def _start_answer(self, ask: Ask | ReadInput) -> None:
        self._nursery.start_soon(self._answer, ask)
