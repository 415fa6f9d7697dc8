"""An instance's own side whose loop is asyncio's: models written for that, with all that `child` does for those on Trio."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, final

from gateway.instances.asyncio_loop import AsyncioLoop
from gateway.instances.asyncio_pipe import AsyncioBell, AsyncioPipe, asyncio_line
from gateway.instances.child import Child, ChildLink, told, trace_of
from gateway.instances.links import receive_link
from gateway.instances.memory import SharedMemory
from gateway.instances.messages import Ask, Describe, Failed, Loaded, Message, Open, ReadInput
from gateway.instances.pipe import SessionLine, give_back_idle
from models.blocking import running_loop, set_loop, throw
from models.errors import ModelExit, is_failure
from models.session import Session
from models.spec import Model, ModelSpec

log = logging.getLogger("gateway.worker")

_GOODBYE = 3.0  # seconds in which sessions are to end when the gateway has hung up


async def serve_on_asyncio(
    ours: socket.socket,
    first: Message,
    describe: Callable[[Describe], tuple[ModelSpec | None, Message]],
    memory: SharedMemory | None = None,
    links: socket.socket | None = None,
) -> None:
    """Says what is first, loads the model that it is asked for, and serves until the gateway hangs up. `describe` makes the
    spec, and what is said of it; it does not err. `links` is where those of other gateways come. BrokenPipe where the
    gateway does not speak as it should."""
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
    """A `Child` on asyncio. Each session has a task of its own, and the model's `load()` is entered and left in one."""

    _bell = AsyncioBell

    def __init__(
        self,
        pipe: AsyncioPipe,
        ours: socket.socket,
        describe: Callable[[Describe], tuple[ModelSpec | None, Message]],
        links: socket.socket | None = None,
    ) -> None:
        """`links` is where those of other gateways come; None: there are none."""
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
            if error is not None and not self._stopping:  # by its own doing
                self._pipe.post(Failed(told(error), trace_of(error)))
            del error
        last()
        await self._stream.finish(_GOODBYE)

    def _wake(self) -> None:
        self._asked.set()
        if self._stopping:
            self._stop.set()
            if self._life is not None and self._said is None:  # nobody waits for it any more
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
        """Serves one more gateway, until it hangs up."""
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
            raise ModelExit(e) from e  # a task that it waited for was cancelled, and by none of us
        finally:
            del self._calls[line]
        return False

    def _cancel(self, line: SessionLine) -> None:
        call = self._calls.get(line)
        if call is not None and not call.cancelled:
            call.cancelled = True
            if call.begun:  # a task that is cancelled before never runs, and could not say so
                call.task.cancel()

    def _start_answer(self, link: ChildLink, ask: Ask | ReadInput) -> None:
        task = asyncio.create_task(self._answer(link, ask))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)
