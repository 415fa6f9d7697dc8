"""The side of an instance that runs the model, on an asyncio loop: `child` for models written for asyncio."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any, final

from gateway.instances.asyncio_loop import AsyncioLoop
from gateway.instances.asyncio_pipe import AsyncioBell, AsyncioPipe, asyncio_line
from gateway.instances.child import Child, ChildLink, told
from gateway.instances.links import receive_link
from gateway.instances.memory import SharedMemory
from gateway.instances.messages import Ask, Describe, Failed, Loaded, Message, Open, ReadInput
from gateway.instances.pipe import SessionLine, give_back_idle
from models.blocking import running_loop, set_loop, throw
from models.errors import ModelExit, is_failure
from models.session import Session
from models.spec import Model, ModelSpec
from models.tracebacks.parked import await_frames
from models.tracebacks.text import text_of

log = logging.getLogger("gateway.worker")

_GOODBYE = 3.0  # seconds that sessions have to end after the gateway has hung up


async def serve_on_asyncio(
    ours: socket.socket,
    first: Message,
    describe: Callable[[Describe], tuple[ModelSpec | None, Message]],
    memory: SharedMemory | None = None,
    links: socket.socket | None = None,
) -> None:
    """Sends the message `first`, loads the requested model, and serves until the gateway hangs up. `describe` returns the
    spec and the message that describes it; it must not raise. `links` receives the links of other gateways. BrokenPipe if
    the gateway breaks the protocol."""
    set_loop(AsyncioLoop())
    pipe = AsyncioPipe(memory)
    pipe.post(first)
    await AsyncioChild(pipe, ours, describe, links).run()
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
    """A `Child` on asyncio. Each session has a separate task; one task enters and leaves the model's `load()`."""

    _bell = AsyncioBell

    def __init__(
        self,
        pipe: AsyncioPipe,
        ours: socket.socket,
        describe: Callable[[Describe], tuple[ModelSpec | None, Message]],
        links: socket.socket | None = None,
    ) -> None:
        """`links` receives the links of other gateways; default None: there are none."""
        super().__init__(pipe, describe)
        self._stream, self._socket, self._links = pipe, ours, links
        self._calls: dict[SessionLine, _Call] = {}
        self._answers = set[asyncio.Task[None]]()
        self._linked = set[asyncio.Task[None]]()
        self._asked, self._stop = asyncio.Event(), asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    async def _run(self, last: Callable[[], None]) -> None:
        await self._stream.open(self._socket, self.take, self._over)
        await self._asked.wait()
        if self._loading is not None and not self._stopping:
            self._life = life = asyncio.create_task(self._serve(self._loading))
            await asyncio.wait([life])
            error = asyncio.CancelledError() if life.cancelled() else life.exception()
            if error is not None and not self._stopping:  # the model's fault
                self._pipe.post(Failed(told(error), text_of(error)))
            del error
        last()
        await self._stream.finish(_GOODBYE)

    def _wake(self) -> None:
        self._asked.set()
        if self._stopping:
            self._stop.set()
            if self._life is not None and self._said is None:  # the load is no longer wanted
                self._life.cancel()

    async def _sessions(self, model: Model, loaded: Loaded) -> None:
        self._model, loop, links = model, asyncio.get_running_loop(), self._links
        if links is not None:
            loop.add_reader(links, self._receive_link, links)
        self._pipe.post(loaded)
        try:
            await self._stop.wait()
        finally:
            self._model = None
            if links is not None:
                loop.remove_reader(links)
            tasks = [*(call.task for call in self._calls.values()), *self._answers, *self._linked]
            for line in [*self._calls]:
                self._cancel(line)
            for task in self._linked:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_GOODBYE)

    def _receive_link(self, links: socket.socket) -> None:
        try:
            link = receive_link(links)
        except BlockingIOError:
            return
        except (OSError, ValueError) as e:
            log.error("a link to a front cannot be used", extra={"reason": str(e)})
            return
        if link is None:
            asyncio.get_running_loop().remove_reader(links)
            return
        task = asyncio.create_task(self._serve_link(*link))
        self._linked.add(task)
        task.add_done_callback(self._linked.discard)

    async def _serve_link(self, end: socket.socket, memory: SharedMemory | None) -> None:
        """Serves one more gateway until it hangs up."""
        pipe, over = AsyncioPipe(memory), asyncio.Event()
        link = ChildLink(pipe)
        try:
            idle = nullcontext() if memory is None else running_loop().beside(partial(give_back_idle, memory.arena))
            async with idle:
                await pipe.open(end, partial(self._take, link), over.set)
                await over.wait()
            if pipe.broken is not None:
                log.error("a front is not served any more: %s", pipe.broken)
        finally:
            self._unlink(link)
            pipe.abort()

    def _start_session(self, model: Model, link: ChildLink, opened: Open) -> None:
        line = asyncio_line(link.pipe, opened.session)
        deadline = self._opened(link, opened, line, asyncio.get_running_loop().time())
        self._calls[line] = call = _Call()
        call.task = asyncio.create_task(self._call(model, link, opened.call, line, deadline))

    async def _within(self, line: SessionLine, model: Model, session: Session[Any, Any]) -> bool:
        call = self._calls[line]
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
            raise ModelExit(e) from e  # the model's code cancelled a task that it waited for
        finally:
            del self._calls[line]
        return False

    def _cancel(self, line: SessionLine) -> None:
        call = self._calls.get(line)
        if call is not None and not call.cancelled:
            call.cancelled = True
            if call.begun:  # a task that is cancelled earlier never runs, and could not report its end
                call.task.cancel()

    def _frames_of(self, line: SessionLine) -> list[list[FrameType]]:
        return [await_frames(self._calls[line].task.get_coro())]

    def _start_answer(self, link: ChildLink, ask: Ask | ReadInput) -> None:
        task = asyncio.create_task(self._answer(link, ask))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)
