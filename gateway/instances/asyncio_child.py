"""An instance's own side whose loop is asyncio's: models written for that, with all that `child` does for those on Trio."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, final

from gateway.instances.asyncio_loop import AsyncioLoop
from gateway.instances.asyncio_pipe import AsyncioBell, AsyncioPipe, asyncio_line
from gateway.instances.child import Child, told, trace_of
from gateway.instances.memory import SharedMemory
from gateway.instances.messages import Ask, Describe, Failed, Loaded, Message, Open, ReadInput
from models.blocking import set_loop, throw
from models.errors import ModelExit, is_failure
from models.session import Session
from models.spec import Model, ModelSpec

_GOODBYE = 3.0  # seconds in which sessions are to end when the gateway has hung up


async def serve_on_asyncio(
    ours: socket.socket,
    first: Message,
    describe: Callable[[Describe], tuple[ModelSpec | None, Message]],
    memory: SharedMemory | None = None,
) -> None:
    """Says what is first, loads the model that it is asked for, and serves until the gateway hangs up. `describe` makes the
    spec, and what is said of it; it does not err. BrokenPipe where the gateway does not speak as it should."""
    set_loop(AsyncioLoop())
    pipe = AsyncioPipe(memory)
    pipe.post(first)
    await AsyncioChild(pipe, ours, describe).run()
    if pipe.broken is not None:
        throw(pipe.broken)


@final
class _Call:
    """The task of one session."""

    __slots__ = ("begun", "cancelled", "task")

    def __init__(self) -> None:
        self.begun = self.cancelled = False
        self.task: asyncio.Task[None]


@final
class AsyncioChild(Child):
    """A `Child` on asyncio. Each session has a task of its own, and the model's `load()` is entered and left in one."""

    _bell = AsyncioBell

    def __init__(
        self,
        pipe: AsyncioPipe,
        ours: socket.socket,
        describe: Callable[[Describe], tuple[ModelSpec | None, Message]],
    ) -> None:
        super().__init__(pipe, describe)
        self._stream, self._socket = pipe, ours
        self._calls: dict[int, _Call] = {}
        self._answers = set[asyncio.Task[None]]()
        self._asked, self._stop = asyncio.Event(), asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    async def _run(self, last: Callable[[], None]) -> None:
        await self._stream.open(self._socket, self.take, self._over)
        await self._asked.wait()
        if self._loading is not None and not self._stopping:
            self._life = life = asyncio.create_task(self._serve(self._loading))
            await asyncio.wait([life])
            error = asyncio.CancelledError() if life.cancelled() else life.exception()
            if error is not None and not self._stopping:  # by its own doing
                self._pipe.post(Failed(told(error), trace_of(error)))
            del error
        last()
        await self._stream.finish(_GOODBYE)

    def _wake(self) -> None:
        self._asked.set()
        if self._stopping:
            self._stop.set()
            if self._life is not None and not self._loaded:  # nobody waits for it any more
                self._life.cancel()

    async def _sessions(self, model: Model, loaded: Loaded) -> None:
        self._model = model
        self._pipe.post(loaded)
        try:
            await self._stop.wait()
        finally:
            self._model = None
            tasks = [*(call.task for call in self._calls.values()), *self._answers]
            for session in [*self._calls]:
                self._cancel(session)
            if tasks:
                await asyncio.wait(tasks, timeout=_GOODBYE)

    def _start_session(self, model: Model, opened: Open) -> None:
        number = opened.session
        line = asyncio_line(self._pipe, number)
        deadline = self._opened(opened, line, asyncio.get_running_loop().time())
        self._calls[number] = call = _Call()
        call.task = asyncio.create_task(self._call(model, opened.call, line, deadline))

    async def _within(self, number: int, model: Model, session: Session[Any, Any]) -> bool:
        call = self._calls[number]
        call.begun = True
        try:
            if call.cancelled:
                return True
            await model(session)
        except BaseException as e:
            if is_failure(e):
                raise
            if call.cancelled:
                return True
            raise ModelExit(e) from e  # a task that it waited for was cancelled, and by none of us
        finally:
            del self._calls[number]
        return False

    def _cancel(self, session: int) -> None:
        call = self._calls.get(session)
        if call is not None and not call.cancelled:
            call.cancelled = True
            if call.begun:  # a task that is cancelled before never runs, and could not say so
                call.task.cancel()

    def _start_answer(self, ask: Ask | ReadInput) -> None:
        task = asyncio.create_task(self._answer(ask))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)
