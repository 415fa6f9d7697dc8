"""The side of an instance that runs the model, on a Trio loop."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, final

import trio

from gateway.doorbell import Doorbell
from gateway.instances.child import Child, ChildLink
from gateway.instances.links import receive_link
from gateway.instances.memory import SharedMemory
from gateway.instances.messages import Ask, Describe, Loaded, Message, Open, ReadInput
from gateway.instances.pipe import BrokenPipe, Pipe, SessionLine, give_back_idle
from gateway.instances.socket_stream import SocketStream
from models.session import Session
from models.spec import Model, ModelSpec
from models.tracebacks.parked import local, stacks_of

log = logging.getLogger("gateway.worker")


@final
class TrioChild(Child):
    """A `Child` on Trio."""

    _bell = Doorbell

    def __init__(
        self,
        pipe: Pipe,
        describe: Callable[[Describe], tuple[ModelSpec | None, Message]],
        links: socket.socket | None = None,
    ) -> None:
        """`links` receives the links of other gateways; default None: there are none."""
        super().__init__(pipe, describe)
        self._stream, self._links = pipe, links
        self._scopes: dict[SessionLine, trio.CancelScope] = {}
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
            if self._hung_up:  # the last messages have no reader
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
            if self._said is None:  # the load is no longer wanted
                self._life.cancel()

    async def _sessions(self, model: Model, loaded: Loaded) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery, self._model = nursery, model
            if self._links is not None:
                nursery.start_soon(self._receive_links, self._links)
            self._pipe.post(loaded)
            await self._stop.wait()
            nursery.cancel_scope.cancel()

    async def _receive_links(self, links: socket.socket) -> None:
        while True:
            await trio.lowlevel.wait_readable(links)
            try:
                link = receive_link(links)
            except BlockingIOError:
                continue
            except (OSError, ValueError) as e:
                log.error("a link to a front cannot be used", extra={"reason": str(e)})
                continue
            if link is None:
                return
            end, memory = link
            self.link(SocketStream(end), memory)

    def link(self, stream: trio.abc.Stream, memory: SharedMemory | None = None) -> None:
        """Starts to serve one more gateway, until its stream ends. The model must be loaded."""
        self._nursery.start_soon(self._serve_link, stream, memory)

    async def _serve_link(self, stream: trio.abc.Stream, memory: SharedMemory | None) -> None:
        pipe = Pipe(stream, memory=memory)
        link = ChildLink(pipe)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_link, pipe)
                if memory is not None:
                    nursery.start_soon(give_back_idle, memory.arena)
                try:
                    await pipe.read(partial(self._take, link))
                except BrokenPipe as e:
                    log.error("a front is not served any more: %s", e)
                except trio.BrokenResourceError:
                    pass
                nursery.cancel_scope.cancel()
        finally:
            self._unlink(link)
            await stream.aclose()

    async def _write_link(self, pipe: Pipe) -> None:
        with suppress(trio.BrokenResourceError):  # the reading task notices
            await pipe.write()

    def _start_session(self, model: Model, link: ChildLink, opened: Open) -> None:
        line = SessionLine(link.pipe, opened.session)
        deadline = self._opened(link, opened, line, trio.current_time())
        self._scopes[line] = trio.CancelScope()
        self._nursery.start_soon(self._call, model, link, opened.call, line, deadline)

    async def _within(self, line: SessionLine, model: Model, session: Session[Any, Any]) -> bool:
        try:
            with self._scopes[line] as scope:
                await model(session)
        finally:
            del self._scopes[line]
        return scope.cancelled_caught

    def _cancel(self, line: SessionLine) -> None:
        if (scope := self._scopes.get(line)) is not None:
            scope.cancel()

    def _frames_of(self, line: SessionLine) -> Iterator[list[FrameType]]:
        for task in self._nursery.child_tasks:
            outermost = getattr(task.coro, "cr_frame", None)
            if outermost is not None and outermost.f_code is Child._call.__code__ and local(outermost, "line") is line:
                yield from stacks_of(task)

    def _start_answer(self, link: ChildLink, ask: Ask | ReadInput) -> None:
        self._nursery.start_soon(self._answer, link, ask)
