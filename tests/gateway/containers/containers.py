"""Model containers in memory for tests of the bridge: its connections, scripts that answer, and the client of a session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import trio

from gateway.client import Peer
from gateway.containers.connection import Container, ContainerLimits, container_address
from gateway.containers.model import Bridge
from gateway.errors import TransportLost
from gateway.net.transport import MemoryTransport, Transport, memory_pair
from models.messages import Part
from models.session import Call, Session
from protocols.buffers import ByteBudget
from protocols.errors import RemoteProtocolError
from protocols.events import Close, ConnectionEnd, Data, End, Frame, Headers, Opcode, Ping, Pong, Request, Response
from protocols.http1.connection import HTTP1Connection
from protocols.roles import Role
from protocols.websocket.connection import WebSocketConnection
from protocols.websocket.handshake import accept_headers
from tests.models.channels import MemoryChannel

Serve = Callable[[Transport], Awaitable[None]]
Script = Callable[[Peer], Awaitable[None]]


def text(data: bytes, *, fin: bool = True) -> Frame:
    return Frame(opcode=Opcode.TEXT, fin=fin, data=data)


def binary(data: bytes, *, fin: bool = True) -> Frame:
    return Frame(opcode=Opcode.BINARY, fin=fin, data=data)


def continuation(data: bytes, *, fin: bool = True) -> Frame:
    return Frame(opcode=Opcode.CONTINUATION, fin=fin, data=data)


class Client(MemoryChannel):
    """A client of a wire whose answer has a head. `on_accept` is called when that goes out."""

    def __init__(self, *messages: Any, ended: bool = True, room: float = float("inf")) -> None:
        super().__init__(*messages, ended=ended, room=room)
        self.reply: dict[str, str] = {}
        self.accepted = 0
        self.budget = ByteBudget(2**30)

    def accept(self) -> None:
        self.accepted += 1

    @property
    def untaken(self) -> int:
        """The number of messages fed to the session that it has not taken."""
        return len(self._inbox)


class Containers:
    """The containers that the bridge dials: `serve` answers each connection in a task of its own."""

    def __init__(self, nursery: trio.Nursery, serve: Serve, limits: ContainerLimits, capacity: int) -> None:
        self._nursery, self._serve, self._capacity = nursery, serve, capacity
        self.dialled: list[MemoryTransport] = []
        self.container = Container(container_address("ws://container:8080"), limits, self.dial)

    async def dial(self) -> Transport:
        await trio.lowlevel.checkpoint()
        ours, theirs = memory_pair(self._capacity)
        self.dialled.append(ours)
        self._nursery.start_soon(self._run, theirs)
        return ours

    async def _run(self, transport: MemoryTransport) -> None:
        with suppress(TransportLost):
            await self._serve(transport)
        transport.close()

    async def call(self, client: Client, **call: Any) -> None:
        """One session of the bridge, as a worker would call it. However it ends, it holds nothing then."""
        try:
            await Bridge(self.container)(Session(client, Call(**call)))
        finally:
            assert client.budget.used == 0

    @property
    def all_closed(self) -> bool:
        return all(transport._closed for transport in self.dialled)


@asynccontextmanager
async def containers(
    serve: Serve, limits: ContainerLimits | None = None, *, capacity: int = 65536, quiet: float = 0
) -> AsyncIterator[Containers]:
    """Containers for the length of the block, which hear Close right behind the last part, or after that quiet."""
    async with trio.open_nursery() as nursery:
        yield Containers(nursery, serve, replace(limits or ContainerLimits(), half_close_quiet=quiet), capacity)
        nursery.cancel_scope.cancel()


async def read_request(peer: Peer) -> tuple[Request, bytes]:
    """The next request with its body."""
    request, body = await peer.next_event(), bytearray()
    assert isinstance(request, Request)
    while not isinstance(event := await peer.next_event(), End):
        assert isinstance(event, Data)
        body += event.buffers[0]
        peer.credit(event)
    return request, bytes(body)


def http(*answers: tuple[int, Headers, Sequence[bytes | None]], seen: list[Any] | None = None) -> Serve:
    """A container that gives these answers, the last one again and again; None among the pieces of a body cuts it off."""
    left = list(answers)

    async def serve(transport: Transport) -> None:
        peer = Peer(transport, HTTP1Connection(Role.SERVER))
        request, body = await read_request(peer)
        if seen is not None:
            seen.append((request, body))
        status, headers, pieces = left.pop(0) if len(left) > 1 else left[0]
        await peer.send(Response(stream=request.stream, status=status, headers=headers))
        for piece in pieces:
            if piece is None:
                return
            await peer.send(Data(stream=request.stream, buffers=(piece,)))
        await peer.send(End(stream=request.stream))

    return serve


def websocket(script: Script, *, headers: Headers = (), seen: list[Request] | None = None) -> Serve:
    """A container that accepts every handshake and then does what the script says."""

    async def serve(transport: Transport) -> None:
        peer = Peer(transport, HTTP1Connection(Role.SERVER))
        request = await peer.next_event()
        if isinstance(request, ConnectionEnd):
            return
        assert isinstance(request, Request)
        if seen is not None:
            seen.append(request)
        await peer.send(Response(stream=1, status=101, headers=[*accept_headers(request.head), *headers]))
        assert isinstance(peer.machine, HTTP1Connection)
        machine = WebSocketConnection(Role.SERVER)
        machine.receive_data(peer.machine.switch())
        with suppress(RemoteProtocolError):
            await script(Peer(transport, machine))

    return serve


async def echo(peer: Peer) -> None:
    """Sends each frame back as it came."""
    while not isinstance(event := await peer.next_event(), Close | ConnectionEnd):
        if isinstance(event, Frame):
            await peer.send(event)
    await peer.flush()


async def read_frames(peer: Peer, *, into: list[Any]) -> None:
    """Reads to the end and keeps what comes."""
    while not isinstance(event := await peer.next_event(), ConnectionEnd):
        into.append(event)
        if isinstance(event, Close):
            break
    await peer.flush()


def sends(*events: Frame | Close | Ping) -> Script:
    """A script that sends these, and then listens until the end."""

    async def script(peer: Peer) -> None:
        for event in events:
            await peer.send(event)
        await read_frames(peer, into=[])

    return script


def part(data: bytes, **how: Any) -> Part:
    return Part(data=data, **how)


def told(client: Client) -> list[tuple[bytes, Any, bool]]:
    """The parts that the client received, in a form that compares."""
    return [(bytes(p.data), p.kind, p.last) for p in client.sent]


__all__ = ["Client", "Containers", "Pong", "containers", "echo", "http", "part", "read_frames", "sends", "told", "websocket"]
