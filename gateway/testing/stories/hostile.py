"""The hostile clients of a simulation: the bytes that they send, and how the gateway must end their connections."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Protocol, final

import trio

from gateway.errors import TransportLost
from gateway.net.transport import MemoryTransport
from gateway.testing.stories.models import VICTIM
from gateway.testing.stories.plan import CALM, HostilePlan
from gateway.testing.stories.talk import Hostility
from protocols.http2.hpack import RememberingDecoder, StatelessEncoder

ENDS: dict[tuple[Hostility, str], str] = {
    (Hostility.STOPS, "http1"): "status 408",
    (Hostility.STOPS, "http2"): "status 408",
    (Hostility.STOPS, "websocket"): "close 1008",
    (Hostility.FLOOD, "http2"): "goaway 11",
    (Hostility.FLOOD, "websocket"): "close 1008",
}
"""How a hostile client's connection, or its request, must end."""
UNANSWERED = Hostility.STOPS, "websocket", "fin"
"""Another valid end if the server sends Pings: a client that stops in the middle of a frame answers none."""
DRAINED = frozenset(("status 503", "goaway 0", "close 1001", "fin"))
"""Other valid ends if the server drains, or accepts no more connections."""
_READ = 4096
_MOST = 20_000
"""Pieces after which a flood ebbs: it must have been ended long before."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


# -- received bytes ----------------------------------------------------------------------------------------------------


class _Ear(Protocol):
    def take(self, data: bytes) -> str:
        """Takes bytes. Returns the words for the message that ends the client, such as `goaway 11`; empty before it."""
        ...


@final
class _HTTP1Ear:
    def __init__(self) -> None:
        self._head = b""

    def take(self, data: bytes) -> str:
        self._head += data
        head, end, _ = self._head.partition(b"\r\n\r\n")
        return f"status {head.split()[1].decode()}" if end else ""


@final
class _HTTP2Ear:
    def __init__(self) -> None:
        self._buffer, self._decoder = b"", RememberingDecoder()

    def take(self, data: bytes) -> str:
        buffer = self._buffer + data
        said = ""
        while len(buffer) >= 9 and len(buffer) >= (end := 9 + int.from_bytes(buffer[:3], "big")):
            said = said or self._frame(buffer[3], buffer[9:end])
            buffer = buffer[end:]
        self._buffer = buffer
        return said

    def _frame(self, kind: int, payload: bytes) -> str:
        match kind:
            case 1:
                return f"status {bytes(dict(self._decoder.decode(payload, raw=True))[b':status']).decode()}"
            case 3:
                return f"rst {int.from_bytes(payload, 'big')}"
            case 7:
                return f"goaway {int.from_bytes(payload[4:8], 'big')}"
            case _:
                return ""


@final
class _WebSocketEar:
    def __init__(self) -> None:
        self._buffer, self._open = b"", False

    def take(self, data: bytes) -> str:
        buffer = self._buffer + data
        if not self._open:
            head, end, rest = buffer.partition(b"\r\n\r\n")
            if end and not head.startswith(b"HTTP/1.1 101"):
                return f"status {head.split()[1].decode()}"
            self._open, buffer = bool(end), rest if end else buffer
        said = ""
        while self._open and len(buffer) >= 2 and len(buffer) >= (end_ := 2 + buffer[1]):  # it has control frames alone
            if buffer[0] & 15 == 8:
                said = f"close {int.from_bytes(buffer[2:4], 'big')}"
            buffer = buffer[end_:]
        self._buffer = buffer
        return said


_EARS: dict[str, type[_HTTP1Ear] | type[_HTTP2Ear] | type[_WebSocketEar]] = {
    "http1": _HTTP1Ear,
    "http2": _HTTP2Ear,
    "websocket": _WebSocketEar,
}


# -- sent bytes --------------------------------------------------------------------------------------------------------


def opening(plan: HostilePlan) -> bytes:
    """Returns the first bytes of a client's connection."""
    match plan.transport:
        case "http1":
            return b""
        case "http2":
            return _PREFACE
        case _:
            key = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            return b"GET %b HTTP/1.1\r\nHost: there\r\n%bSec-WebSocket-Version: 13\r\n\r\n" % (_path(plan).encode(), key)


def _path(plan: HostilePlan) -> str:
    if plan.transport == "websocket":
        return f"/models/{VICTIM}/invocations-bidirectional-stream?talk={plan.name}"
    return f"/v2/models/text-{CALM}/generate?talk={plan.name}"


def pieces(plan: HostilePlan) -> Iterator[bytes]:
    """Yields the pieces that the client sends after `opening`."""
    chance = random.Random(f"{plan.name} {plan.size}")
    match plan.hostility, plan.transport:
        case Hostility.STOPS, "http1":
            yield b"POST %b HTTP/1.1\r\nHost: there\r\nContent-Length: %d\r\n\r\n" % (_path(plan).encode(), plan.size)
            yield b"." * min(20, plan.size - 1)
        case Hostility.STOPS, "http2":
            fields = {":method": "POST", ":scheme": "http", ":authority": "there", ":path": _path(plan)}
            encoder, fields = StatelessEncoder(), {**fields, "content-length": str(plan.size)}
            block = encoder.opening() + encoder.encode([(name.encode(), value.encode()) for name, value in fields.items()])
            yield frame(1, 4, 1, block)
            yield frame(0, 0, 1, b"." * min(20, plan.size - 1))
        case Hostility.STOPS, _:
            yield b"\x82" + _length(plan.size) + bytes(4) + b"." * min(20, plan.size - 1)
        case Hostility.FLOOD, "websocket":
            while True:
                yield b"\x89\x84" + bytes(4) + chance.randbytes(4)
        case _:
            kinds = (frame(6, 0, 0, bytes(8)), frame(4, 0, 0, b""), frame(2, 0, 1, b"\0\0\0\0\x10"), frame(0xF0, 0, 0, b"-"))
            of = chance.choice(kinds)
            while True:
                yield of


def _length(size: int) -> bytes:
    """Encodes the length of a masked WebSocket frame."""
    if size < 126:
        return bytes((128 + size,))
    return b"\xfe" + size.to_bytes(2, "big") if size < 1 << 16 else b"\xff" + size.to_bytes(8, "big")


@final
class Hostile:
    """One connection of a hostile client."""

    def __init__(self, plan: HostilePlan, transport: MemoryTransport) -> None:
        self.plan, self._transport = plan, transport
        self._ear: _Ear = _EARS[plan.transport]()
        self.ended = ""
        """The end of the connection: `goaway CODE`, `close CODE`, `status CODE`, `rst CODE` or `fin`. `open` means that the
        client left because its time was over."""

    async def run(self) -> None:
        """Runs until the gateway has ended the connection, or the client's time is over."""
        await trio.sleep(self.plan.start)
        with trio.move_on_after(self.plan.patience):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
                await self._hear()
                nursery.cancel_scope.cancel()
        self.ended = self.ended or "open"
        self._transport.close()

    async def _hear(self) -> None:
        buffer = memoryview(bytearray(_READ))
        try:
            while not self.ended and (n := self._transport.try_receive_into(buffer)) != 0:
                if n is None:
                    await self._transport.wait_readable()
                else:
                    self.ended = self._ear.take(bytes(buffer[:n]))
        except TransportLost:
            pass
        self.ended = self.ended or "fin"

    async def _send(self) -> None:
        with suppress(TransportLost):
            await self._sent(opening(self.plan))
            for number, piece in enumerate(islice(pieces(self.plan), _MOST), 1):
                await self._sent(piece)
                if number % self.plan.at_once == 0:
                    await trio.sleep(self.plan.pause)
        await trio.sleep_forever()

    async def _sent(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            taken = self._transport.try_send([rest])
            if not taken:
                await self._transport.wait_writable()
            else:
                rest = rest[taken:]
