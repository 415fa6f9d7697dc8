"""A connection with a wire that has no protocol, over real sockets, and the source that tells it when they are ready."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from gateway.config import Config
from gateway.core.connection import Connection
from gateway.core.runner import Runner
from gateway.core.server import Server
from gateway.errors import GatewayError
from gateway.net.readiness import Poller, WaitedTransport
from gateway.net.tls_transport import TLSTransport
from gateway.net.transport import SocketTransport, Transport
from protocols.events import Buffer, Sent

KiB, MiB = 1024, 1024 * 1024


class Wire:
    """Keeps what is received, sends what it is given."""

    name, windowed, exclusive, over = "bytes", True, False, False

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.received = bytearray()
        self.may, self.eof, self.echo = True, False, False
        self.outgoing: list[bytes] = []
        self.said = 0
        self.closed = False

    def receive_buffer(self, scratch: memoryview) -> memoryview | None:
        return scratch if self.may else None

    def buffer_updated(self, n: int) -> None: ...

    def receive_data(self, data: memoryview) -> None:
        self.received += data
        if self.echo:
            self.outgoing.append(bytes(data))
            self.connection.output_ready()

    def receive_eof(self) -> None:
        self.eof = True

    def pump(self, at_most: int, until: float) -> bool:
        return True

    def protocol_error(self, error: Exception) -> None: ...

    def data_to_send(self, at_most: int) -> list[Buffer]:
        data = b"".join(self.outgoing)
        self.outgoing = [data[at_most:]] if len(data) > at_most else []
        self.said += len(data[:at_most])
        return [data[:at_most]] if data else []

    def data_sent(self) -> Sent:
        return Sent()

    def tick(self, now: float) -> None: ...
    def drain(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class House:
    """Tells connections that they are ready and gives them turns, without exchanges."""

    def __init__(self, hub: Poller | None) -> None:
        self.hub = hub
        self.nursery: trio.Nursery
        self._runs = 0
        self.server = Server(Config(), nothing, nothing)
        self.server.begin()
        self.server.run_by(Runner(self.work, lambda _, e: GatewayError(str(e)), nothing))
        self.connections = self.server.connections
        self.turn_soon = self.server.turn_soon

    async def work(self, exchange: Any) -> None: ...

    def write(self) -> None:
        while self.server.runner.write():
            pass

    async def _tell(self, place: WaitedTransport, connection: Connection) -> None:
        self._runs += 1
        await place.run(connection)
        self._runs -= 1

    @property
    def telling(self) -> int:
        """The number of connections that are told when they are ready."""
        return self._runs if self.hub is None else len(self.hub._owners)

    def serve(self, transport: Transport, descriptor: int, *, begin: bool = True) -> Wire:
        """Serves a transport by the poller; without one, two tasks wait for the transport."""
        place = WaitedTransport(transport) if self.hub is None else self.hub.watch(descriptor)
        connection = Connection(self.server, transport, Wire, place)  # type: ignore[arg-type]
        self.connections.add(connection)
        if begin:
            connection.begin()
            if isinstance(place, WaitedTransport):
                self.nursery.start_soon(self._tell, place, connection)
            else:
                place.tell(connection)
        return connection.wire  # type: ignore[return-value]


def nothing(*_: object) -> None:
    """Nobody is told."""


@asynccontextmanager
async def serving(source: str = "polled") -> AsyncIterator[House]:
    hub = Poller() if source == "polled" else None
    server = House(hub)
    try:
        async with trio.open_nursery() as nursery:
            server.nursery = nursery
            server.server.runner.begin(nursery, hub)
            if hub is None:
                nursery.start_soon(server.server.runner.turns)
            yield server
            for connection in list(server.connections):
                connection.lost()
            nursery.cancel_scope.cancel()
    finally:
        if hub is not None:
            hub.close()


def unix_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def tcp_pair(**options: int) -> tuple[socket.socket, socket.socket]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        for name, value in options.items():
            listener.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        listener.listen()
        theirs = socket.socket()
        for name, value in options.items():
            theirs.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        theirs.connect(listener.getsockname())
        ours, _ = listener.accept()
    theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def served(server: Server, ours: socket.socket, **options: int) -> Wire:
    return server.serve(SocketTransport(ours, **options), ours.fileno())


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


async def until(true: Callable[[], bool]) -> None:
    """Waits for a condition, since the kernel needs time between two sockets. Fails after 60 s."""
    with trio.fail_after(60):
        while not true():
            await trio.lowlevel.checkpoint()


def pattern(size: int) -> bytes:
    return b"".join(struct.pack(">I", n) for n in range(size // 4))


async def secured(ours: socket.socket, theirs: socket.socket, contexts: Any) -> tuple[TLSTransport, TLSTransport]:
    a = TLSTransport(SocketTransport(ours), contexts[0])
    b = TLSTransport(SocketTransport(theirs), contexts[1], server_side=False, hostname="localhost")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.handshake)
        await b.handshake()
    return a, b


class Straddling:
    """Ciphertext that arrives in pieces of another size than its records."""

    def __init__(self, below: SocketTransport, bite: int) -> None:
        self.below, self.bite = below, bite
        self.peer, self.alpn = below.peer, below.alpn
        self.short_is_dry = self.behind = False
        self.wait_readable, self.wait_writable, self.hung_up = below.wait_readable, below.wait_writable, below.hung_up
        self.try_send, self.send_eof, self.close = below.try_send, below.send_eof, below.close
        self.pending = False

    def try_receive_into(self, buffer: memoryview) -> int | None:
        return self.below.try_receive_into(buffer[: self.bite])
