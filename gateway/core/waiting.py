"""A connection over a transport that no read hub can watch: two tasks wait for it, one in each direction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import final

import trio

from gateway.core.connection import Connection, Readiness
from gateway.doorbell import Doorbell
from gateway.net.transport import Transport


@final
class WaitedTransport(Readiness):
    """Waits for what the connection asks for: bytes when its transport is dry, room when it is full."""

    edges = False

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._dry, self._full, self._over = Doorbell(), Doorbell(), trio.Event()

    def want_readable(self) -> None:
        self._dry.ring()

    def want_writable(self) -> None:
        self._full.ring()

    def forget(self) -> None:
        self._over.set()

    async def run(self, connection: Connection) -> None:
        """Returns when the connection is over. Cancelling it does not end the connection: who cancels does."""
        transport = self._transport
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait, connection, self._dry, transport.wait_readable, connection.readable)
            nursery.start_soon(self._wait, connection, self._full, transport.wait_writable, connection.writable)
            await self._over.wait()
            nursery.cancel_scope.cancel()

    async def _wait(
        self, connection: Connection, asked: Doorbell, wait: Callable[[], Awaitable[None]], tell: Callable[[], None]
    ) -> None:
        try:
            while True:
                await asked.wait()
                await wait()
                tell()
        except Exception as e:
            connection.failed(e)
