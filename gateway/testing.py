"""A gateway in memory, for users' tests and ours: real machines, real dialects, no socket, a clock that may be mocked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, final

import trio

from gateway import client
from gateway.client import Peer
from gateway.config import Config
from gateway.gateway import Gateway
from gateway.transport import MemoryTransport, memory_pair


@final
class MemoryGateway:
    """A running gateway and connections to it. `capacity` is what each direction of a connection holds in flight, as
    a kernel's socket buffers do."""

    def __init__(self, gateway: Gateway, nursery: trio.Nursery, capacity: int) -> None:
        self.gateway, self._nursery, self._capacity = gateway, nursery, capacity

    def connect(self) -> MemoryTransport:
        """The client's end of a new connection."""
        ours, theirs = memory_pair(self._capacity)
        self._nursery.start_soon(self.gateway.serve_transport, theirs)
        return ours

    def http1(self) -> Peer:
        """A new HTTP/1.1 client connection."""
        return client.http1(self.connect())

    def http2(self) -> Peer:
        """A new HTTP/2 client connection."""
        return client.http2(self.connect())

    async def websocket(self, path: str = "/invocations-bidirectional-stream") -> Peer:
        """A new WebSocket."""
        return await client.websocket(self.connect(), path)


@asynccontextmanager
async def memory_gateway(
    models: Iterable[Any] = (), config: Config | None = None, *, capacity: int = 65536
) -> AsyncIterator[MemoryGateway]:
    """Runs a gateway with these models and no listener for the length of the block, then cancels what is left."""
    config = config or Config()
    gateway = Gateway(replace(config, listen=replace(config.listen, port=-1)), models)
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        try:
            yield MemoryGateway(gateway, nursery, capacity)
        finally:
            nursery.cancel_scope.cancel()
