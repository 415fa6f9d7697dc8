"""The pipe of an instance on an asyncio loop: the frames and the credit of `pipe`, over a transport."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import cast, final

from gateway.instances.memory import SharedMemory
from gateway.instances.messages import Frames, Free, Message, encoded, frames_of
from gateway.instances.pipe import BrokenPipe, SessionLine, attach


@final
class AsyncioBell:
    """A wake-up for at most one waiting task, with the methods and the guarantees of a `Doorbell`."""

    __slots__ = ("_rung", "_waiter")

    def __init__(self) -> None:
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        if self._waiter is None:
            self._rung = True
        else:
            self.wake()

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        if self._rung:
            await asyncio.sleep(0)
            self._rung = False
            return
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            if self._waiter is waiter:  # this task was cancelled
                self._waiter = None


async def _unchecked() -> None:
    """Does nothing: asyncio has no checkpoint for cancels, which a task notices only where it waits."""


asyncio_line = partial(SessionLine, bell=AsyncioBell, check=_unchecked)
"""Makes one side of a session for tasks on asyncio."""


@final
class AsyncioPipe(asyncio.Protocol):
    """Messages to and from the other side. Messages posted in one turn of the loop leave as one frame; so do those posted
    while the socket has no room."""

    def __init__(self, memory: SharedMemory | None = None) -> None:
        """Without `memory`, all bytes go through the socket."""
        self.memory = memory
        if memory is not None:
            attach(memory, self)
        self._take: Callable[[Message], None]
        self._over: Callable[[], None]
        self._frames = Frames()
        self._out: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # before `open`
        self._paused = True  # until there is a transport
        self._closed = self._loop.create_future()
        self.broken: BrokenPipe | None = None
        """The error if the other side broke the protocol."""

    async def open(self, ours: socket.socket, take: Callable[[Message], None], over: Callable[[], None]) -> None:
        """Begins to read and write. `take` is called with each message; `over` when no more will come, perhaps more than
        once."""
        self._take, self._over = take, over
        await self._loop.create_unix_connection(lambda: self, sock=ours)

    # -- sending -----------------------------------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        """Sends a message with the next frame. TypeError, OverflowError or ValueError if it cannot be sent; then nothing
        is."""
        self.post_encoded(encoded(message))

    def post_encoded(self, message: bytes) -> None:
        """Sends a message that `messages.encoded` has encoded."""
        out = self._out
        out.append(message)
        if len(out) == 1 and not self._paused:
            self._loop.call_soon(self._flush)

    async def finish(self, seconds: float) -> None:
        """Writes the messages that are left, for at most `seconds`, and closes. Nothing may be posted afterwards."""
        self._paused = False
        self._flush()
        self._transport.close()
        await asyncio.wait([self._closed], timeout=seconds)
        self._transport.abort()

    def abort(self) -> None:
        """Hangs up at once; does nothing before `open`."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        if not self._paused:
            out, self._out = self._out, []
            for frame in () if self._closed.done() else frames_of(out):
                self._transport.write(frame)

    # -- for the transport -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self.broken is not None:
            return
        try:
            for messages in self._frames.feed(data):
                for message in messages:
                    if type(message) is Free and self.memory is not None:
                        self.memory.take_back(message.keys)
                    else:
                        self._take(message)
        except ValueError as e:  # the base of msgspec's errors too
            self.broken = BrokenPipe(f"{type(e).__name__}: {str(e)[:200]}")
            self._over()

    def eof_received(self) -> bool:
        self._over()
        return True  # keeps the transport open, so that remaining messages can be written

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set_result(None)
        self._over()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()
