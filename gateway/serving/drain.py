"""Drain: stops the server in order, and reports how each exchange ended."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import final

import msgspec
import trio

from gateway.core.connection import Connection
from gateway.core.exchange import Exchange
from gateway.core.server import Server
from gateway.errors import Ending
from gateway.serving.acceptor import Acceptor
from gateway.serving.dispatcher import Dispatcher
from gateway.telemetry.observer import Observer

log = logging.getLogger("gateway")

# Seconds for an interrupted exchange to send its error, and for a cancelled model to clean up, before the server stops.
_GRACE = 5.0
# Seconds of those for clients to take the last bytes and to close, once no exchange is left: one that still sends may not
# close at all.
_GOODBYES, _LOOK = 0.5, 0.1
# Seconds for connections to leave by themselves, if another server takes this one's place.
_LINGER = 3.0
_CUT = (Ending.DRAINED, Ending.LOST)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CutExchange:
    """An exchange that was still live at the deadline of a drain, and was ended by it."""

    id: str
    wire: str
    dialect: str
    model: str
    ending: str
    """`drained` if the client was told, `transport-lost` if it did not take even that."""
    age: float
    """Seconds from its request to the deadline."""
    bytes_in: int
    bytes_out: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """The report of a drain: how the exchanges that were live when it began ended."""

    live: int
    """How many exchanges were live."""
    endings: dict[str, int]
    """How many had each ending."""
    seconds: float
    clean: bool
    """True if no exchange was live at the deadline."""
    finished: int = 0
    """How many ended by themselves, with any ending."""
    refused: int = 0
    """How many requests came during the drain and were refused; no other number includes them."""
    cut: tuple[CutExchange, ...] = field(default=())
    """The exchanges that the drain ended, the oldest first."""

    def to_json(self) -> bytes:
        """Returns the report as one line of JSON."""
        return msgspec.json.encode(self)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainProgress:
    """A drain that goes on. Times are seconds since 1970."""

    began: float
    deadline: float
    """When the exchanges that are still live are ended."""
    live: int
    """How many exchanges were live when the drain began."""
    ended: dict[str, int]
    """How many of them have ended, by their ending."""
    refused: int
    """How many requests have come since, and were refused."""


def progress_of_all(told: Collection[DrainProgress]) -> DrainProgress:
    """Sums up the drains of several servers, at least one: from the first begin to the last deadline."""
    ended = Counter[str]()
    for one in told:
        ended.update(one.ended)
    return DrainProgress(
        began=min(one.began for one in told),
        deadline=max(one.deadline for one in told),
        live=sum(one.live for one in told),
        ended=dict(ended),
        refused=sum(one.refused for one in told),
    )


@final
class Drain:
    """The drain of one server. First readiness turns off. After `drain.delay` the ports close, and every wire tells its
    client. Live exchanges may finish for `drain.timeout`; the rest are then ended."""

    def __init__(self, server: Server, acceptor: Acceptor, dispatcher: Dispatcher, observer: Observer) -> None:
        self._server, self._acceptor, self._dispatcher, self._observer = server, acceptor, dispatcher, observer
        self._timeout, self._patience = server.config.drain.timeout, trio.CancelScope()
        self._wanted, self._reported = trio.Event(), trio.Event()
        self._hurrying = self._gently = False
        self._live: list[Exchange] = []  # exchanges that were live when it began
        self._began = self._deadline = 0.0
        self._since_1970 = 0.0  # seconds from 1970 to the zero of Trio's clock
        self.report: DrainReport | None = None
        """The report; None until the drain is over."""

    @property
    def begun(self) -> bool:
        """True once `begin` or `retire` was called."""
        return self._wanted.is_set()

    def begin(self, timeout: float | None = None) -> None:
        """Asks for the drain. Live exchanges have `timeout` seconds, `drain.timeout` by default. A later call can only
        shorten that."""
        if timeout is not None:
            self._timeout = min(self._timeout, timeout) if self.begun else timeout
            self._patience.deadline = min(self._patience.deadline, trio.current_time() + timeout)
            self._deadline = min(self._deadline, trio.current_time() + timeout)
        self._wanted.set()

    def retire(self) -> None:
        """Asks for the drain because another server has taken this one's place, so no new connections come. Requests are
        still answered for a while, each as the last of its connection, so that none that was on its way is refused."""
        self._gently = not self.begun
        self._wanted.set()

    async def wanted(self) -> None:
        """Returns when the drain was asked for."""
        await self._wanted.wait()

    def hurry(self) -> None:
        """Moves the deadline to now."""
        self._hurrying = True
        self._deadline = min(self._deadline, trio.current_time())
        self._server.bell.ring()

    @property
    def progress(self) -> DrainProgress | None:
        """The progress of the drain; None before it has begun."""
        if not self._server.draining:
            return None
        return DrainProgress(
            began=round(self._since_1970 + self._began, 3),
            deadline=round(self._since_1970 + self._deadline, 3),
            live=len(self._live),
            ended=dict(Counter(exchange.ending.value for exchange in self._live if exchange.ending is not None)),
            refused=self._dispatcher.turned_away,
        )

    async def reported(self) -> DrainReport:
        """Waits for the report and returns it."""
        await self._reported.wait()
        assert self.report is not None
        return self.report

    async def run(self, connections: trio.Nursery) -> Callable[[], None]:
        """Waits until the drain is asked for, drains, and cancels the nursery of the connections. Returns a function that
        makes the report: call it when every connection is closed, so that every exchange has its ending."""
        await self._wanted.wait()
        server, acceptor = self._server, self._acceptor
        began, delay = trio.current_time(), server.config.drain.delay
        server.leaving = True
        if self._gently:
            delay = 0.0
            await self._let_go()
        now = trio.current_time()
        self._since_1970, self._began, self._deadline = time.time() - now, now, now + delay + self._timeout
        server.draining, server.draining_since = True, now
        live = self._live = list(self._observer.live)
        log.info("draining", extra={"live": len(live), "delay": delay, "timeout": self._timeout})
        with trio.move_on_after(delay):
            while not self._hurrying:
                await server.bell.wait()
        acceptor.stop()
        for connection in list(server.connections):
            connection.drain()
        self._patience.deadline = self._deadline = trio.current_time() + self._timeout
        with self._patience:
            while acceptor.busy and not self._hurrying:
                await server.bell.wait()
        deadline, late = trio.current_time(), list(self._observer.live)
        for connection in list(server.connections):
            connection.drain_now()
        with trio.move_on_after(_GRACE) as grace:
            while acceptor.busy:  # until all errors are written
                if not self._observer.live:
                    grace.deadline = min(grace.deadline, trio.current_time() + _GOODBYES)
                with trio.move_on_after(_LOOK):
                    await server.bell.wait()
        connections.cancel_scope.cancel()

        def report() -> None:
            lasted, refused = trio.current_time() - began, self._dispatcher.turned_away
            drained = self.report = report_of(live, late, deadline=deadline, seconds=lasted, refused=refused)
            self._reported.set()
            counts = {"live": drained.live, "endings": drained.endings, "cut": len(drained.cut)}
            log.info("drained", extra={**counts, "refused": drained.refused, "seconds": round(drained.seconds, 3)})

        return report

    async def _let_go(self) -> None:
        """Waits until connections have left by themselves, at most `_LINGER` seconds."""
        for connection in list(self._server.connections):
            # HTTP/1 tells the client with its next answer, because a request may be on its way.
            if isinstance(connection, Connection) and connection.wire.name == "http/2":
                connection.drain()
        with trio.move_on_after(_LINGER):
            while self._acceptor.busy and not self._hurrying:
                await self._server.bell.wait()


def report_of(
    live: Collection[Exchange], late: Iterable[Exchange], *, deadline: float, seconds: float, refused: int
) -> DrainReport:
    """Makes the report of a drain that is over: each of `live` has its ending. `late` are the exchanges that were live at
    the `deadline`, on Trio's clock."""
    late = set(late)
    cut = sorted((exchange for exchange in live if exchange in late and exchange.ending in _CUT), key=lambda e: e.started_at)
    return DrainReport(
        live=len(live),
        endings=dict(Counter(exchange.ending.value for exchange in live if exchange.ending is not None)),
        seconds=round(seconds, 3),
        clean=not late,
        finished=len(live) - len(cut),
        refused=refused,
        cut=tuple([_row(exchange, deadline) for exchange in cut]),
    )


def _row(exchange: Exchange, deadline: float) -> CutExchange:
    assert exchange.ending is not None
    return CutExchange(
        id=exchange.id,
        wire=exchange.wire.name,
        dialect=exchange.dialect,
        model=exchange.model,
        ending=exchange.ending.value,
        age=round(deadline - exchange.started_at, 3),
        bytes_in=exchange.bytes_in,
        bytes_out=exchange.outbound.bytes_out,
    )
