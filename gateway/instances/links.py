"""Links of several gateways to one process of a model: makes them, hands them to the process, and receives them there."""

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
"""The most descriptors of a link: a socket, the memory of both directions, and that of bodies."""
_WORD = b"l"  # a message needs at least one byte besides its descriptors


def hand_link(at: socket.socket, descriptors: Sequence[int]) -> None:
    """Sends the descriptors of a link to a process, over a packet socket. OSError; BlockingIOError if there is no room."""
    socket.send_fds(at, [_WORD], descriptors)


def receive_link(at: socket.socket) -> tuple[socket.socket, SharedMemory | None] | None:
    """Receives a link: its socket and its memory. None if no more links will come. BlockingIOError if none has arrived.
    OSError or ValueError if a link cannot be used; then its descriptors are closed."""
    word, descriptors, _, _ = socket.recv_fds(at, len(_WORD), MOST, socket.MSG_CMSG_CLOEXEC)
    if not word:
        return None
    if not descriptors:  # this process has reached its limit of descriptors
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
    """A gateway's view of a process that another gateway has started, and to which it has a link: an `Elsewhere`.

    It ends when its owner reports the end, or when this gateway hangs up: then the process goes on for the others."""

    def __init__(self, plan: ProcessPlan, pid: int, kill: Callable[[], None], *, bodies: Arena | None = None) -> None:
        """`kill` asks the owner to end the process. `bodies` is memory that other processes of the model share. OSError."""
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
        """The descriptors of the process's side, for `hand_link`. Valid before `handed`."""
        memory = () if self.memory is None else self.memory.descriptors
        return [self._theirs.fileno(), *memory]

    def handed(self) -> None:
        """Closes our copy of the process's end, once that has been sent."""
        self._theirs.close()

    def stream(self) -> trio.abc.HalfCloseableStream:
        """Returns our end of the link."""
        return _LinkStream(self._ours, self)

    async def ended(self) -> Exit:
        """Waits until the link has ended, and returns how."""
        await self._over.wait()
        return self._exit

    def end(self, end: Exit) -> None:
        """Ends the link, with this result. Only the first call counts."""
        if not self._over.is_set():
            self._exit = end
            self._over.set()

    def kill(self) -> None:
        """Asks the owner to end the process."""
        if not self._over.is_set():
            self._kill()

    def hang_up(self) -> None:
        """Ends the link: the reader of our end gets an end of file."""
        self.end(Exit(code=0))
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hangs up and frees everything."""
        self.end(Exit())
        self._theirs.close()
        if self._ours.fileno() >= 0:
            trio.lowlevel.notify_closing(self._ours)
            self._ours.close()
        if self.memory is not None:
            self.memory.close()

    async def read_output(self, said: Said) -> None:
        """Waits for the end: only the owner gets the output."""
        await self._over.wait()

    def used(self) -> tuple[int, float]:
        """Returns zeros: the owner reports them."""
        return 0, 0.0


@final
class _LinkStream(trio.abc.HalfCloseableStream):
    """The gateway's end of a link. `send_eof` ends the link as hung up, unless the process has closed it before."""

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
