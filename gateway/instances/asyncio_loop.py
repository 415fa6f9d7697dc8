"""An asyncio event loop as the code of models sees it: threads for blocking steps, and texts that end their calls."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import NoReturn, TypeVar, final

import trio

from models.blocking import CODEC_THREADS, start_thread
from models.continuations import Continuations

T = TypeVar("T")


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


_THREADS = 40  # threads of calls without a limiter, as in Trio


@final
class AsyncioLoop:
    """The running asyncio loop, as a `models.blocking.Loop`.

    Trio's `CapacityLimiter`s limit the threads, so that models use the same API on both loops. The limiters count without
    Trio; only waiting for a place is done here."""

    cancelled = asyncio.CancelledError

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._codecs, self._others = trio.CapacityLimiter(CODEC_THREADS), trio.CapacityLimiter(_THREADS)
        self._queues: dict[trio.CapacityLimiter, deque[asyncio.Future[None]]] = {}
        """The tasks that wait for a place, first come, first served. Each task's future is the borrower of its place."""

    def current_time(self) -> float:
        return self._loop.time()

    def call_soon(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    async def checkpoint(self) -> None:
        await asyncio.sleep(0)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @asynccontextmanager
    async def beside(self, work: Callable[[], Awaitable[NoReturn]]) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(_awaited(work))
            try:
                yield
            finally:
                task.cancel()

    async def around(self, text: Continuations, call: Awaitable[None]) -> None:
        text.scope = task = asyncio.ensure_future(call)
        try:
            await task
        except asyncio.CancelledError:
            here = asyncio.current_task()
            if not text.stopped or (here is not None and here.cancelling()):
                raise

    def more_places(self, limiter: trio.CapacityLimiter) -> None:
        self._hand_on(limiter)

    def codec_threads(self) -> trio.CapacityLimiter:
        return self._codecs

    async def in_thread(self, call: Callable[[], T], limiter: trio.CapacityLimiter | None, abandon: bool) -> T:
        limiter = limiter or self._others
        place = await self._place_in(limiter)
        result: asyncio.Future[T] = self._loop.create_future()

        def returned(found: T) -> None:
            self._give_back(limiter, place)
            if not result.done():  # otherwise the caller was cancelled
                result.set_result(found)

        try:
            start_thread(
                partial(contextvars.copy_context().run, call), lambda found: self.call_soon(partial(returned, found))
            )
        except BaseException:
            self._give_back(limiter, place)
            raise
        if abandon:
            return await result
        cancelled = False
        while not result.done():
            try:
                await asyncio.wait([result])
            except asyncio.CancelledError:
                cancelled = True  # raised below, once the thread has returned
        if cancelled:
            raise asyncio.CancelledError
        return result.result()

    async def _place_in(self, limiter: trio.CapacityLimiter) -> object:
        place: asyncio.Future[None] = self._loop.create_future()
        if limiter not in self._queues:
            with suppress(trio.WouldBlock):
                limiter.acquire_on_behalf_of_nowait(place)
                return place
        queue = self._queues.setdefault(limiter, deque())
        queue.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                with suppress(ValueError):
                    queue.remove(place)
                self._hand_on(limiter)
            else:  # the place was given in the same moment
                self._give_back(limiter, place)
            raise
        return place

    def _give_back(self, limiter: trio.CapacityLimiter, place: object) -> None:
        limiter.release_on_behalf_of(place)
        self._hand_on(limiter)

    def _hand_on(self, limiter: trio.CapacityLimiter) -> None:
        """Gives free places to waiting tasks."""
        queue = self._queues.get(limiter)
        if queue is None:
            return
        with suppress(trio.WouldBlock):
            while queue:
                place = queue[0]
                if not place.done():  # otherwise its task was cancelled
                    limiter.acquire_on_behalf_of_nowait(place)
                    place.set_result(None)
                queue.popleft()
        if not queue:
            del self._queues[limiter]
