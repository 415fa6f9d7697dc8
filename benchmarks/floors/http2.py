"""HTTP/2 that sends every DATA frame back, frames cut by hand: no header is read, no window is counted but given back.

python -m benchmarks.floors.http2 PORT
"""

from __future__ import annotations

import socket

from benchmarks.floors.sockets import read, serve, write

_PREFACE = 24
_SETTINGS = b"\0\0\6\4\0\0\0\0\0\0\4\0\x10\0\0"  # an initial window of 1 MiB
_ACK = b"\0\0\0\4\1\0\0\0\0"
_HEAD = b"\x88"  # ":status: 200" in HPACK's static table
_OWED = 32_768


def window_update(stream: bytes, size: int) -> bytes:
    return b"\0\0\4\x08\0" + stream + size.to_bytes(4, "big")


class Echo:
    """One connection, after its preface."""

    def __init__(self) -> None:
        self._owed: dict[bytes, int] = {b"\0\0\0\0": 0}

    def take(self, buffer: bytes) -> tuple[list[bytes], bytes]:
        """The answers to the whole frames, and what is left."""
        out: list[bytes] = []
        at, end = 0, len(buffer)
        while end - at >= 9:
            stop = at + 9 + int.from_bytes(buffer[at : at + 3], "big")
            if stop > end:
                break
            kind, stream = buffer[at + 3], buffer[at + 5 : at + 9]
            if kind == 0:
                ends = buffer[at + 4] & 1
                out += (buffer[at : at + 4], b"\1" if ends else b"\0", buffer[at + 5 : stop])
                self._give_back(b"\0\0\0\0", stop - at - 9, out)
                if ends:
                    del self._owed[stream]
                else:
                    self._give_back(stream, stop - at - 9, out)
            elif kind == 1:
                self._owed[stream] = 0
                out += (b"\0\0\1\1\4", stream, _HEAD)
            elif kind == 4 and not buffer[at + 4]:
                out.append(_ACK)
            at = stop
        return out, buffer[at:]

    def _give_back(self, stream: bytes, size: int, out: list[bytes]) -> None:
        owed = self._owed[stream] + size
        if owed >= _OWED:
            out.append(window_update(stream, owed))
            owed = 0
        self._owed[stream] = owed


async def connection(sock: socket.socket) -> None:
    buffer = b""
    while len(buffer) < _PREFACE:
        data = await read(sock)
        if not data:
            return
        buffer += data
    await write(sock, _SETTINGS)
    echo = Echo()
    out, buffer = echo.take(buffer[_PREFACE:])
    while True:
        if out:
            await write(sock, b"".join(out))
        data = await read(sock)
        if not data:
            return
        out, buffer = echo.take(buffer + data)


if __name__ == "__main__":
    serve(connection)
