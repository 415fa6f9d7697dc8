"""Links of several gateways to one process of a model: how one is made, handed to the process, and received there."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

import trio

from gateway.instances.memory import Arena, SharedMemory
from gateway.instances.socket_stream import SocketStream
from gateway.instances.spawn import Exit, ProcessPlan, Said

MOST = 4
"""Descriptors that a link is made of, at most: a socket, and the memory of both directions and of bodies."""
_WORD = b"l"  # descriptors do not travel alone


def hand_link(at: socket.socket, descriptors: Sequence[int]) -> None:
    """Sends a process what a link is made of, over a socket of packets. OSError; BlockingIOError where there is no room."""
    socket.send_fds(at, [_WORD], descriptors)


def receive_link(at: socket.socket) -> tuple[socket.socket, SharedMemory | None] | None:
    """Receives it: an end of the link, and the memory of it. None where no link will come any more, BlockingIOError where
    none is there. OSError or ValueError for one that cannot be used, of which nothing is kept."""
    word, descriptors, _, _ = socket.recv_fds(at, len(_WORD), MOST, socket.MSG_CMSG_CLOEXEC)
    if not word:
        return None
    if not descriptors:  # we have no room for more
        raise OSError("a link came without its descriptors")
    end = socket.socket(fileno=descriptors[0])
    end.setblocking(False)
    try:
        return end, SharedMemory.of_descriptors(*descriptors[1:]) if descriptors[1:] else None
    except BaseException:
        end.close()
        raise


@final
class LinkedProcess:
    """A process that somebody else has started, as a gateway sees it that has a link to it: an `Elsewhere`.

    It ends here at its owner's word, or when this gateway hangs up. The process itself then goes on for the others."""

    def __init__(self, plan: ProcessPlan, pid: int, kill: Callable[[], None], *, bodies: Arena | None = None) -> None:
        """`kill` asks the owner to end it. `bodies` is memory that is lent to others too. OSError."""
        self.plan, self.pid, self.tail, self._kill = plan, pid, "", kill
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.memory = SharedMemory.create(plan.shared_memory, also=bodies) if plan.shared_memory else None
        except BaseException:
            self._ours.close()
            self._theirs.close()
            raise
        self._exit, self._over = Exit(), trio.Event()

    @property
    def descriptors(self) -> list[int]:
        """The process's side of the link, for `hand_link`, before `handed`."""
        memory = () if self.memory is None else self.memory.descriptors
        return [self._theirs.fileno(), *memory]

    def handed(self) -> None:
        """The process will have its end: ours of it is not needed any more."""
        self._theirs.close()

    def stream(self) -> trio.abc.HalfCloseableStream:
        """Our end."""
        return _LinkStream(self._ours, self)

    async def ended(self) -> Exit:
        """Waits for its end as above."""
        await self._over.wait()
        return self._exit

    def end(self, end: Exit) -> None:
        """It has ended, in this way. The first word counts."""
        if not self._over.is_set():
            self._exit = end
            self._over.set()

    def kill(self) -> None:
        """Asks its owner to end it."""
        if not self._over.is_set():
            self._kill()

    def hang_up(self) -> None:
        """Ends the link: the reader of our end gets its end."""
        self.end(Exit(code=0))
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hangs up, and gives everything back."""
        self.end(Exit())
        self._theirs.close()
        if self._ours.fileno() >= 0:
            trio.lowlevel.notify_closing(self._ours)
            self._ours.close()
        if self.memory is not None:
            self.memory.close()

    async def read_output(self, said: Said) -> None:
        """Its owner hears what it says."""
        await self._over.wait()

    def used(self) -> tuple[int, float]:
        """Nothing: its owner tells that."""
        return 0, 0.0


@final
class _LinkStream(trio.abc.HalfCloseableStream):
    """The gateway's end of a link: whoever says no more on it has hung up, unless the process has before."""

    def __init__(self, end: socket.socket, process: LinkedProcess) -> None:
        self._stream, self._process, self._heard_all = SocketStream(end), process, False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        try:
            data = await self._stream.receive_some(max_bytes)
        except trio.BrokenResourceError:
            self._heard_all = True
            raise
        self._heard_all = not data
        return data

    async def send_eof(self) -> None:
        with suppress(trio.BrokenResourceError):
            await self._stream.send_eof()
        if not self._heard_all:
            self._process.end(Exit(code=0))

    async def aclose(self) -> None:
        await self._stream.aclose()
