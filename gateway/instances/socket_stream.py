"""The end of a socket pair that the messages of an instance go over.

Trio's own stream lets all other tasks run after each call of the kernel, and asks for bytes before it waits for them. So a
short call of a model costs two more rounds of the loop on each side. This one waits only where the kernel has no room, or
nothing to read.
"""

from __future__ import annotations

import errno
import socket
from typing import final

import trio

_LARGEST = (
    256 * 1024
)  # bytes of one read: into memory that is there, as a block of that size comes from the system each time


@final
class SocketStream(trio.abc.HalfCloseableStream):
    """A connected stream socket, which it closes. One task sends, and one receives.

    `send_all` is a checkpoint only where it waits."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._memory = memoryview(bytearray(_LARGEST))

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Returns once the kernel has all of it; a cancelled one may have sent some. trio.BrokenResourceError where nobody
        reads any more."""
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
        """What is there, of that size at most, as soon as there is something; nothing once the other side has closed. A
        cancelled one has taken nothing. trio.BrokenResourceError where the connection is lost."""
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
        """The other side hears that no more will come."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError as e:
            raise _told(e) from e

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.wait_writable(self._socket)

    async def aclose(self) -> None:
        """Closes it; whoever waits for it gets trio.ClosedResourceError."""
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()
        await trio.lowlevel.checkpoint()


def _told(error: OSError) -> trio.ClosedResourceError | trio.BrokenResourceError:
    return trio.ClosedResourceError(str(error)) if error.errno == errno.EBADF else trio.BrokenResourceError(str(error))
