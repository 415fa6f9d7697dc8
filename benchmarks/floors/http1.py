"""HTTP/1.1 keep-alive with one wait a read: binary bodies come back, JSON is read and written, tokens are streamed.

python -m benchmarks.floors.http1 PORT
"""

from __future__ import annotations

import socket

import msgspec
import numpy as np
import trio

from benchmarks.floors.sockets import read, serve, write

_BATCH = 16  # tokens that share a send
_LARGE = 65_536
_CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: application/jsonlines\r\ntransfer-encoding: chunked\r\n\r\n"


def content_length(head: bytes) -> int:
    """As our load clients spell it."""
    at = head.find(b"Content-Length: ") + 16
    return int(head[at : head.find(b"\r", at)])


def answer(head: bytes, body: bytes | memoryview) -> bytes:
    """The head of the answer, and the body too where it is small."""
    if b"/json" in head:
        body = msgspec.json.encode(msgspec.json.decode(body))
    start = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: %d\r\n\r\n" % len(body)
    return start if len(body) >= _LARGE else start + body


async def connection(sock: socket.socket) -> None:
    buffer = b""
    while True:
        while (end := buffer.find(b"\r\n\r\n") + 4) < 4:
            data = await read(sock)
            if not data:
                return
            buffer += data
        head = buffer[:end]
        size = content_length(head)
        if size < _LARGE:
            while len(buffer) < end + size:
                buffer += await read(sock)
            body, buffer = buffer[end : end + size], buffer[end + size :]
            if head.startswith(b"POST /invocations"):
                await tokens(sock, body)
            else:
                await write(sock, answer(head, body))
        else:
            large = await upload(sock, buffer[end:], size)
            buffer = b""
            await write(sock, answer(head, large))
            await write(sock, large)


async def upload(sock: socket.socket, begun: bytes, size: int) -> memoryview:
    """A large body in memory that was never zeroed."""
    body = memoryview(np.empty(size, np.uint8).data)
    body[: len(begun)] = begun
    at = len(begun)
    while at < size:
        await trio.lowlevel.wait_readable(sock)
        at += sock.recv_into(body[at:])
    return body


async def tokens(sock: socket.socket, body: bytes) -> None:
    """As many as asked for, each a chunk of its own."""
    pieces = [_CHUNKED]
    for number in range(msgspec.json.decode(body)["parameters"]["max_new_tokens"]):
        line = b'{"token": {"id": %d, "text": " token", "log_prob": -0.5}}\n' % number
        pieces.append(b"%x\r\n%b\r\n" % (len(line), line))
        if len(pieces) == _BATCH:
            await write(sock, b"".join(pieces))
            pieces.clear()
            await trio.lowlevel.checkpoint()
    pieces.append(b"0\r\n\r\n")
    await write(sock, b"".join(pieces))


if __name__ == "__main__":
    serve(connection)
