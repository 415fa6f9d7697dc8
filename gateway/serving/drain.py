"""Drain: the server stops with honesty, and reports what became of every exchange: for people, and for programs."""

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

# Seconds for an interrupted exchange's last bytes, and for a cancelled model's clean-up, before the server stops.
_GRACE = 5.0
# Seconds before a connection that may still send a request is closed, where another server takes this one's place.
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
    """`drained` where the client was told so, `transport-lost` where it did not take even that."""
    age: float
    """Seconds from its request to the deadline."""
    bytes_in: int
    bytes_out: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """How the exchanges that were live when the drain began have ended."""

    live: int
    endings: dict[str, int]
    """How many had each ending."""
    seconds: float
    clean: bool
    """True if all of them ended by themselves before the deadline."""
    finished: int = 0
    """How many ended by themselves, whatever their ending."""
    refused: int = 0
    """How many requests came during the drain and were told to go elsewhere: they are not among the others."""
    cut: tuple[CutExchange, ...] = field(default=())
    """The rest, the oldest first."""

    def to_json(self) -> bytes:
        """One line."""
        return msgspec.json.encode(self)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainProgress:
    """A drain that goes on. Times are seconds since 1970."""

    began: float
    deadline: float
    """When what is live then gets its ending."""
    live: int
    """Exchanges that were live when it began."""
    ended: dict[str, int]
    """How many of them have ended, by their ending."""
    refused: int
    """Requests that have come since, and were told to go elsewhere."""


def progress_of_all(told: Collection[DrainProgress]) -> DrainProgress:
    """The drains of several servers, at least one, as one: from the first begin to the last deadline."""
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
    """One drain of one server: readiness off, listeners closed after `drain.delay`, goodbye on every wire, live exchanges
    finish until `drain.timeout`, the rest get their ending."""

    def __init__(self, server: Server, acceptor: Acceptor, dispatcher: Dispatcher, observer: Observer) -> None:
        self._server, self._acceptor, self._dispatcher, self._observer = server, acceptor, dispatcher, observer
        self._timeout, self._patience = server.config.drain.timeout, trio.CancelScope()
        self._wanted, self._reported = trio.Event(), trio.Event()
        self._hurrying = self._gently = False
        self._live: list[Exchange] = []  # those that were live when it began
        self._began = self._deadline = 0.0
        self._since_1970 = 0.0  # seconds since 1970 when Trio's clock was at 0
        self.report: DrainReport | None = None
        """How each exchange ended, once that is known; None before."""

    @property
    def begun(self) -> bool:
        """True if `begin` was called."""
        return self._wanted.is_set()

    def begin(self, timeout: float | None = None) -> None:
        """Asks for it; live exchanges have `timeout` seconds, `drain.timeout` unless given. A later call can only shorten
        that."""
        if timeout is not None:
            self._timeout = min(self._timeout, timeout) if self.begun else timeout
            self._patience.deadline = min(self._patience.deadline, trio.current_time() + timeout)
            self._deadline = min(self._deadline, trio.current_time() + timeout)
        self._wanted.set()

    def retire(self) -> None:
        """Asks for it because another server has taken this one's place: nobody new comes. Requests are answered for a while
        yet, each as the last of its connection, so that none is refused that was on its way."""
        self._gently = not self.begun
        self._wanted.set()

    async def wanted(self) -> None:
        """Returns when it was asked for."""
        await self._wanted.wait()

    def hurry(self) -> None:
        """The deadline is now."""
        self._hurrying = True
        self._deadline = min(self._deadline, trio.current_time())
        self._server.bell.ring()

    @property
    def progress(self) -> DrainProgress | None:
        """How far it is; None before it has begun."""
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
        """Returns the report as soon as there is one."""
        await self._reported.wait()
        assert self.report is not None
        return self.report

    async def run(self, connections: trio.Nursery) -> Callable[[], None]:
        """Waits until it is asked for, and drains; then the nursery of the connections is cancelled. Returns what makes the
        report, when every connection is closed and so every exchange has its ending."""
        await self._wanted.wait()
        server, acceptor = self._server, self._acceptor
        began, delay = trio.current_time(), server.config.drain.delay
        server.leaving = True
        if self._gently:
            delay = 0.0
            await self._let_go()
        now = trio.current_time()
        self._since_1970, self._began, self._deadline = time.time() - now, now, now + delay + self._timeout
        server.draining = True
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
        with trio.move_on_after(_GRACE):
            while acceptor.busy:  # until all that was to be said is written
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
        """Waits until connections have left by themselves, `_LINGER` seconds at most."""
        for connection in list(self._server.connections):
            # HTTP/1 says goodbye with its next answer: a request may be on its way
            if isinstance(connection, Connection) and connection.wire.name == "http/2":
                connection.drain()
        with trio.move_on_after(_LINGER):
            while self._acceptor.busy and not self._hurrying:
                await self._server.bell.wait()


def report_of(
    live: Collection[Exchange], late: Iterable[Exchange], *, deadline: float, seconds: float, refused: int
) -> DrainReport:
    """The report of a drain that is over: each of `live` has its ending. `late` are those that were live at the `deadline`,
    on Trio's clock."""
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
