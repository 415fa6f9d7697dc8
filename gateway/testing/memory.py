"""Runs a gateway without sockets: its connections are pairs in memory, with edges such as those of an epoll set."""

from __future__ import annotations

import itertools
import random
import select
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import trio

from gateway import client
from gateway.client import Peer
from gateway.client.conversations import Client, SocketConversation
from gateway.config import Config
from gateway.doorbell import Doorbell
from gateway.gateway import Gateway
from gateway.net.readiness import Poller
from gateway.net.transport import MemoryTransport, memory_pair
from gateway.testing.invariants import left_over
from gateway.testing.network import Link, NetworkProfile
from protocols.events import Buffer

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


@final
class MemoryEdges:
    """An epoll set for memory transports, so that a gateway's hub works as in production.

        gateway.acceptor.poller = Poller(edges := MemoryEdges())
        nursery.start_soon(gateway.acceptor.serve_watchable, edges.watchable(transport))

    Edges are reported in the order in which they happened, so that a run with a seeded scheduler is repeatable. As in the
    kernel, an edge means that bytes or an end have arrived, or that a sender has room again. A poll reports all that is
    ready at that time. A number is used again once its transport is closed.
    """

    def __init__(self) -> None:
        self._sockets: dict[int, MemorySocket] = {}
        self._registered: set[int] = set()
        self._due: dict[int, None] = {}
        self._bell = Doorbell()

    def watchable(self, transport: MemoryTransport) -> MemorySocket:
        """Makes a socket that a hub can watch from one end of a memory pair."""
        number = next(n for n in itertools.count() if n not in self._sockets)
        sock = self._sockets[number] = MemorySocket(self, number, transport)
        return sock

    def forget(self, number: int) -> None:
        """Removes a transport that is closed."""
        del self._sockets[number]
        self.unregister(number)

    def edge(self, number: int) -> None:
        """Reports a change of the transport of this number."""
        if number in self._registered:
            self._due[number] = None
            self._bell.wake()

    def register(self, descriptor: int, mask: int, /) -> None:
        self._registered.add(descriptor)
        self.edge(descriptor)

    def unregister(self, descriptor: int, /) -> None:
        self._registered.discard(descriptor)
        self._due.pop(descriptor, None)

    def poll(self, timeout: float, at_most: int, /) -> list[tuple[int, int]]:
        due = list(itertools.islice(self._due, at_most))
        for number in due:
            del self._due[number]
        return [(number, mask) for number in due if (mask := self._sockets[number].ready)]

    async def wait(self) -> None:
        if self._due:
            await trio.lowlevel.checkpoint()
        else:
            await self._bell.wait()

    def close(self) -> None:
        self._registered.clear()
        self._due.clear()


@final
class _Bell:
    """A transport's doorbell; each ring is also an edge."""

    def __init__(self, sock: MemorySocket, bell: Doorbell, *, room: bool) -> None:
        self._sock, self._bell, self._room = sock, bell, room
        self.wait = bell.wait

    def ring(self) -> None:
        self._bell.ring()
        self._sock.rung(room=self._room)


@final
class MemorySocket:
    """A memory transport that behaves as a socket: it has a number, and a receive takes all bytes that have arrived."""

    short_is_dry = True
    behind = False

    def __init__(self, edges: MemoryEdges, number: int, below: MemoryTransport) -> None:
        self._edges, self._number, self.below = edges, number, below
        self._missed_room = self._closed = False
        self.peer, self.alpn, self.pending = below.peer, below.alpn, False
        self.wait_readable, self.wait_writable = below.wait_readable, below.wait_writable
        self.hung_up = below.hung_up
        self.unsent = below.unsent
        bells: Any = below
        bells._readable = _Bell(self, below._readable, room=False)
        bells._writable = _Bell(self, below._writable, room=True)

    def fileno(self) -> int:
        return -1 if self._closed else self._number

    def receivable(self) -> bool:
        return self.below.receivable()

    def rung(self, *, room: bool) -> None:
        """Reports an edge: the other end has sent or ended its direction; `room`: it has received."""
        if not self._closed and (self._missed_room or not room):
            self._missed_room &= not room
            self._edges.edge(self._number)

    @property
    def ready(self) -> int:
        """The present events, as epoll reports them."""
        below = self.below
        other = below._other
        receives = select.EPOLLIN if below._inbox or below.hung_up() else 0
        sends = select.EPOLLOUT if below._reset or other._closed or other._held < other._capacity else 0
        gone = select.EPOLLHUP if below._reset or (below._eof and other._eof) else 0
        gone |= select.EPOLLERR if below._reset else 0
        return receives | sends | gone | (select.EPOLLRDHUP if below.hung_up() else 0)

    def try_receive_into(self, buffer: memoryview) -> int | None:
        taken = 0
        while taken < len(buffer):
            n = self.below.try_receive_into(buffer[taken:])
            if not n:
                return taken or n
            taken += n
        return taken

    def try_send(self, buffers: Sequence[Buffer]) -> int:
        n = self.below.try_send(buffers)
        if not n and buffers:
            self._missed_room = True
        return n

    def send_eof(self) -> None:
        self.below.send_eof()
        self.rung(room=False)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._edges.forget(self._number)
            self.below.close()


@final
class MemoryGateway:
    """A running gateway and connections to it. `capacity` is the bytes that each direction of a connection holds in flight,
    as a kernel's socket buffers do."""

    def __init__(self, gateway: Gateway, nursery: trio.Nursery, capacity: int, edges: MemoryEdges | None = None) -> None:
        self.gateway, self._nursery, self._capacity, self._edges = gateway, nursery, capacity, edges
        self._ours: list[MemoryTransport] = []

    def connect(self, network: NetworkProfile | None = None) -> MemoryTransport:
        """Returns the client's end of a new connection, through `network` if given."""
        return self.link(network).client if network is not None else self._serve(*memory_pair(self._capacity))

    def link(self, network: NetworkProfile | None = None) -> Link:
        """Makes a connection through a network that can be clogged, cut and reset at any time."""
        link = Link(network, self._capacity)
        self._nursery.start_soon(link.run)
        self._serve(link.client, link.server)
        return link

    def _serve(self, ours: MemoryTransport, theirs: MemoryTransport) -> MemoryTransport:
        self._ours.append(ours)
        if self._edges is None:
            self._nursery.start_soon(self.gateway.acceptor.serve_transport, theirs)
        else:
            self._nursery.start_soon(self.gateway.acceptor.serve_watchable, self._edges.watchable(theirs))
        return ours

    def client(self, wire: str = "http1", network: NetworkProfile | None = None) -> Client:
        """Returns a client for the gateway's dialects, on a new connection of "http1" or "http2"."""
        return Client((client.http2 if wire == "http2" else client.http1)(self.connect(network)))

    async def conversation(self, model: str = "", network: NetworkProfile | None = None) -> SocketConversation:
        """Opens a WebSocket to a model; without a name, to the model of the container's path."""
        path = (f"/models/{model}" if model else "") + self.gateway.config.websocket.path
        return SocketConversation(await client.websocket(self.connect(network), path))

    def http1(self, network: NetworkProfile | None = None) -> Peer:
        """Opens an HTTP/1.1 connection."""
        return client.http1(self.connect(network))

    def http2(self, network: NetworkProfile | None = None) -> Peer:
        """Opens an HTTP/2 connection."""
        return client.http2(self.connect(network))

    async def websocket(
        self, path: str = "/invocations-bidirectional-stream", network: NetworkProfile | None = None
    ) -> Peer:
        """Opens a WebSocket."""
        return await client.websocket(self.connect(network), path)

    async def check_nothing_left(self, within: float = 10.0) -> None:
        """Closes all client connections, and waits until the gateway holds nothing of them: no connection, exchange, slot,
        byte of the budget or task. If something is left after `within` seconds of the clock, an AssertionError names it."""
        for transport in self._ours:
            transport.close()
        with trio.move_on_after(within):
            while left_over(self.gateway):  # noqa: ASYNC110  # there is no event for it
                await trio.sleep(0.01)
        if found := left_over(self.gateway):
            raise AssertionError(f"{within:g} s after the last client left there are {', '.join(found)}")


@asynccontextmanager
async def memory_gateway(
    models: Iterable[Any] = (),
    config: Config | None = None,
    *,
    capacity: int = 65536,
    hub: bool = Poller.available,
    check: bool = False,
    tracer_provider: TracerProvider | None = None,
    wall_clock: Callable[[], float] = time.time,
    chance: Callable[[], float] = random.random,
) -> AsyncIterator[MemoryGateway]:
    """Runs a gateway with these models and no listener for the length of the block, and then cancels it. With `check`, it
    calls `check_nothing_left` first. An exception of the block is raised as it is, and not in a group.

    Connections are served as sockets are: by a hub if the system has epoll, which is the default there. With `hub=False`,
    each has two tasks that wait for it, as streams of an embedder have. `tracer_provider` is for spans, `wall_clock` for the
    Date of answers, and `chance` as for `Gateway`."""
    config = config or Config()
    config = replace(config, listen=replace(config.listen, port=-1, tls_port=-1))
    gateway = Gateway(config, models, chance=chance, tracer_provider=tracer_provider, wall_clock=wall_clock)
    edges = MemoryEdges() if hub else None
    if edges is not None:
        gateway.acceptor.poller = Poller(edges)
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        memory = MemoryGateway(gateway, nursery, capacity, edges)
        try:
            yield memory
            if check:
                await memory.check_nothing_left()
        except Exception as e:
            failure = e  # the nursery would wrap it
        finally:
            nursery.cancel_scope.cancel()
    if failure is not None:
        try:
            raise failure
        finally:
            failure = None
