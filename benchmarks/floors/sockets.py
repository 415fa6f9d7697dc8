"""The parts that floors share: listening on the loopback interface, and reading and writing with Trio's bare waits."""

from __future__ import annotations

import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio
from trio.lowlevel import wait_readable, wait_writable

READ = 65_536


def serve(handle: Callable[[socket.socket], Awaitable[None]]) -> None:
    """Runs a floor as a program: one task for each connection to the port that its one argument names."""
    with suppress(KeyboardInterrupt):
        trio.run(listen, int(sys.argv[1]), handle)


async def listen(port: int, handle: Callable[[socket.socket], Awaitable[None]]) -> None:
    """Accepts forever. A connection that fails ends alone."""

    async def one(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            await handle(sock)

    async with trio.open_nursery() as nursery:
        await accept(port, lambda sock: nursery.start_soon(one, sock))


async def accept(port: int, opened: Callable[[socket.socket], None]) -> None:
    """Hands out each new connection, non-blocking and without Nagle's delay."""
    listener = socket.create_server(("127.0.0.1", port), backlog=2048)
    listener.setblocking(False)
    with listener:
        while True:
            await wait_readable(listener)
            sock, _ = listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened(sock)


async def read(sock: socket.socket) -> bytes:
    """Waits for bytes and reads them; b"" at the end."""
    await wait_readable(sock)
    return sock.recv(READ)


async def write(sock: socket.socket, data: bytes | memoryview) -> None:
    """Writes all bytes; waits while the kernel takes no more."""
    while True:
        try:
            n = sock.send(data)
        except BlockingIOError:
            n = 0
        if n == len(data):
            return
        data = memoryview(data)[n:]
        await wait_writable(sock)
