"""The end of a socket pair that carries the messages of an instance.

Trio's own stream lets all other tasks run after each system call, and tries to read before it waits. A short call of a
model would cost two more rounds of the loop on each side. This stream waits only if the kernel has no room, or nothing to
read.
"""

from __future__ import annotations

import errno
import socket
from typing import final

import trio

_LARGEST = (
    256 * 1024
)  # bytes of one read, into memory that is kept: malloc would get a new block of this size from the system each time


@final
class SocketStream(trio.abc.HalfCloseableStream):
    """A stream over a connected socket, which it owns. One task may send and one may receive.

    `send_all` is a checkpoint only if it waits."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._memory = memoryview(bytearray(_LARGEST))

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Returns once the kernel has taken all bytes. If it is cancelled, some may have been sent. trio.BrokenResourceError
        if the other end is closed."""
        with memoryview(data) as view:
            sent = 0
            while sent < len(view):
                try:
                    sent += self._socket.send(view[sent:])
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self._socket)
                except OSError as e:
                    raise _told(e) from e

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Waits for bytes and returns at most `max_bytes`, by default 256 KiB; empty once the other side has closed. A
        cancel loses no bytes. trio.BrokenResourceError if the connection is lost."""
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                n = self._socket.recv_into(self._memory, min(max_bytes or _LARGEST, _LARGEST))
            except BlockingIOError:
                continue
            except OSError as e:
                raise _told(e) from e
            return bytes(self._memory[:n])

    async def send_eof(self) -> None:
        """Signals the other side that no more bytes will come."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as e:
            raise _told(e) from e

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.wait_writable(self._socket)

    async def aclose(self) -> None:
        """Closes the socket; tasks that wait on it get trio.ClosedResourceError."""
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()
        await trio.lowlevel.checkpoint()


def _told(error: OSError) -> trio.ClosedResourceError | trio.BrokenResourceError:
    return trio.ClosedResourceError(str(error)) if error.errno == errno.EBADF else trio.BrokenResourceError(str(error))
