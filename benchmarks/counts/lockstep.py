"""A client that takes steps: it sends, lets all tasks of the gateway run until they wait, and reads what there is.

Nothing happens at the same time as anything else and the clock stands still, so a gateway does the same each time. The
connections are pairs in memory, or sockets of the loopback interface.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Protocol, final

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from benchmarks import requests
from benchmarks.counts.cases import Case
from benchmarks.load.connections import Connection, LoadError, connection
from benchmarks.load.plan import Kind, Plan
from gateway.config import Config
from gateway.gateway import Gateway
from gateway.net.transport import MemoryTransport
from gateway.testing import memory_gateway

_READ = 262_144
_LOOKS = 20_000
"""Looks at a connection that has no answer, after which a step has failed."""
_CUSHION = 0.002
"""Seconds without an event after which sockets are silent."""


class Line(Protocol):
    """The client's end of a connection."""

    cushion: float

    def send(self, data: bytes | memoryview) -> int:
        """Sends what there is room for."""
        ...

    def take(self) -> bytes:
        """Returns what has arrived; empty if nothing has."""
        ...


@final
class MemoryLine:
    """A pair in memory."""

    cushion = 0.0

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self._buffer = memoryview(bytearray(_READ))

    def send(self, data: bytes | memoryview) -> int:
        return self._transport.try_send([data])

    def take(self) -> bytes:
        n = self._transport.try_receive_into(self._buffer)
        if n == 0:
            raise LoadError("the server closed a connection")
        return bytes(self._buffer[:n]) if n else b""


@final
class SocketLine:
    """A socket of the loopback interface."""

    cushion = _CUSHION

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.setblocking(False)

    def send(self, data: bytes | memoryview) -> int:
        with suppress(BlockingIOError):
            return self._sock.send(data)
        return 0

    def take(self) -> bytes:
        with suppress(BlockingIOError):
            if data := self._sock.recv(_READ):
                return data
            raise LoadError("the server closed a connection")
        return b""

    def close(self) -> None:
        self._sock.close()


@final
class Client:
    """One connection of a case."""

    def __init__(self, line: Line, plan: Plan, clock: MockClock, pace: float) -> None:
        self._line, self._plan, self._clock, self._pace = line, plan, clock, pace
        self._side: Connection = connection(plan)

    async def open(self) -> None:
        """Does a WebSocket's handshake."""
        if self._plan.kind is Kind.FRAMES:
            await self._send(requests.upgrade())
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += await self._heard()
            if not head.startswith(b"HTTP/1.1 101"):
                raise LoadError(f"the WebSocket handshake was answered with {head[:200]!r}")

    async def step(self, units: int) -> None:
        """Sends what is due and waits for that many units. A stream of tokens is done at its end."""
        side, whole, got = self._side, self._plan.kind is Kind.TOKENS, 0
        await self._flush()
        while not (side.out if whole else got >= units):
            got += side.take(await self._heard())
            if not whole and got < units:
                await self._flush()

    async def _flush(self) -> None:
        out, self._side.out = self._side.out, b""
        if out:
            await self._send(out)

    async def _send(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        for _ in range(_LOOKS):
            rest = rest[self._line.send(rest) :]
            if not rest:
                return
            await wait_all_tasks_blocked(self._line.cushion)
        raise LoadError("the server did not read a request")

    async def _heard(self) -> bytes:
        for _ in range(_LOOKS):
            await wait_all_tasks_blocked(self._line.cushion)
            if data := self._line.take():
                return data
            self._clock.jump(self._pace)
        raise LoadError("the server did not answer")


@final
class Steps:
    """A case as its client goes through it."""

    def __init__(self, case: Case, connect: Callable[[], Line], clock: MockClock) -> None:
        self._case, self._connect, self._clock = case, connect, clock
        self._client: Client | None = None

    async def opened(self, plan: Plan | None = None) -> Client:
        """Returns a client on a new connection."""
        client = Client(self._connect(), plan or self._case.plan(), self._clock, self._case.pace)
        await client.open()
        return client

    async def take(self, count: int) -> None:
        """Takes that many steps, on the connection of the last one if the case does not want a new one for each."""
        for _ in range(count):
            if self._client is None or self._case.fresh:
                self._client = await self.opened()
            await self._client.step(self._case.each)
        await wait_all_tasks_blocked(0.0)


@asynccontextmanager
async def running(case: Case, *, sockets: bool = False) -> AsyncIterator[Steps]:
    """Runs a gateway with the models of a case for the length of the block. The run must have a MockClock."""
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, MockClock)
    config = Config()
    config = replace(
        config,
        limits=replace(config.limits, requests_per_connection=10**9, connections=10**6),
        listen=replace(config.listen, host="127.0.0.1", port=0 if sockets else -1),
    )
    if not sockets:
        async with memory_gateway(case.models(), config) as memory:
            yield Steps(case, lambda: MemoryLine(memory.connect()), clock)
        return
    gateway = Gateway(config, case.models())
    lines: list[SocketLine] = []

    def connected() -> SocketLine:
        lines.append(SocketLine(gateway.port))
        return lines[-1]

    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        try:
            yield Steps(case, connected, clock)
        finally:
            nursery.cancel_scope.cancel()
            for line in lines:
                line.close()
