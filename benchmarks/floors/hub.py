"""HTTP/1.1 keep-alive behind a read hub: one epoll set holds all connections, one Trio task waits for it. Linux only.

A read costs no registration and no wait of its own; nothing is handed to another task.

    python -m benchmarks.floors.hub PORT
"""

from __future__ import annotations

import select
import socket
import sys
from contextlib import suppress

import trio

from benchmarks.floors.http1 import answer, content_length
from benchmarks.floors.sockets import READ, accept


def whole_requests(buffer: bytes) -> tuple[list[bytes], bytes]:
    """The answers to the requests that are complete, and what is left."""
    answers = []
    while (end := buffer.find(b"\r\n\r\n") + 4) >= 4:
        stop = end + content_length(buffer[:end])
        if len(buffer) < stop:
            break
        answers.append(answer(buffer[:end], buffer[end:stop]))
        buffer = buffer[stop:]
    return answers, buffer


async def run(port: int) -> None:
    connections: dict[int, tuple[socket.socket, bytes]] = {}
    hub = select.epoll()

    def opened(sock: socket.socket) -> None:
        connections[sock.fileno()] = sock, b""
        hub.register(sock.fileno(), select.EPOLLIN)

    def ready(fd: int) -> None:
        sock, buffer = connections[fd]
        data = b""
        with suppress(OSError):
            data = sock.recv(READ)
        if not data:
            del connections[fd]
            sock.close()  # epoll forgets it by itself
            return
        answers, rest = whole_requests(buffer + data if buffer else data)
        connections[fd] = sock, rest
        for reply in answers:
            sock.send(reply)  # small answers to clients that wait for them: the kernel has room

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept, port, opened)
        while True:
            await trio.lowlevel.wait_readable(hub.fileno())
            for fd, _ in hub.poll(0, 256):
                ready(fd)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        trio.run(run, int(sys.argv[1]))
