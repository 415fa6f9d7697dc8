"""A WebSocket that sends every frame back: masks off, header on, all that one read brought in one write.

python -m benchmarks.floors.websocket PORT
"""

from __future__ import annotations

import base64
import hashlib
import socket

from benchmarks.floors.sockets import read, serve, write

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


async def accept_upgrade(sock: socket.socket) -> None:
    """The handshake of a client that says what ours does."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        data = await read(sock)
        if not data:
            return
        head += data
    key = head.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0]
    token = base64.b64encode(hashlib.sha1(key + _GUID).digest())
    await write(
        sock,
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-accept: %b\r\n\r\n" % token,
    )


def unmasked(payload: bytes, key: bytes) -> bytes:
    """One big exclusive or: below some tens of KiB there is nothing faster in the standard library."""
    size = len(payload)
    run = (key * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(run, "little")).to_bytes(size, "little")


def echo(buffer: bytes) -> tuple[list[bytes], bytes]:
    """The answers to the whole frames, each of 126 to 65,535 bytes, and what is left."""
    out: list[bytes] = []
    at, end = 0, len(buffer)
    while end - at >= 8:
        start = at + 8
        stop = start + (buffer[at + 2] << 8 | buffer[at + 3])
        if stop > end:
            break
        out += (b"\x82\x7e", buffer[at + 2 : at + 4], unmasked(buffer[start:stop], buffer[at + 4 : start]))
        at = stop
    return out, buffer[at:]


async def connection(sock: socket.socket) -> None:
    await accept_upgrade(sock)
    buffer = b""
    while data := await read(sock):
        out, buffer = echo(buffer + data if buffer else data)
        if out:
            await write(sock, b"".join(out))


if __name__ == "__main__":
    serve(connection)
