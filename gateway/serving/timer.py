"""CoarseTimer: the one timer of a gateway, which checks all time stamps once a second."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from email.utils import formatdate
from typing import Any, NoReturn, Protocol, final

import trio

from gateway.config.watched_file import WatchedFile
from gateway.core.contracts import TURN_SECONDS
from gateway.core.exchange import Exchange
from gateway.core.server import Server
from gateway.core.waits import INPUT
from gateway.errors import Overloaded, Refusal
from gateway.histogram import Histogram
from gateway.log_limits import LogLimits
from gateway.serving.loop_work import LoopWork
from gateway.telemetry.loop_watch import Blocks, LoopWatch
from gateway.telemetry.observer import Observer
from gateway.workers.stalls import Sign, Stalls
from gateway.workers.supervisor import Supervisor
from protocols.floods import STALLED_UPLOAD

log = logging.getLogger("gateway")

_TICK = 1.0
LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Histogram bounds, in seconds, for how late the event loop comes to its timer."""


class Finer(Protocol):
    """Something that looks at more precise moments than once a second."""

    due: float
    """When it is to look next, on Trio's clock; each look makes it later."""

    async def look(self, sleep_until: Callable[[float], Awaitable[None]], /) -> None:
        """Looks. If that takes long, it sleeps by this function in between, so that other tasks run."""
        ...


@final
class CoarseTimer:
    """Runs once a second: connections and workers check their time stamps, the Date field is set, an exchange is ended if
    memory runs out, and idle memory is given back. A thread reports steps that block the loop (`limits.loop_block`)."""

    def __init__(self, server: Server, observer: Observer, supervisor: Supervisor, wall_clock: Callable[[], float]) -> None:
        """`wall_clock` returns the seconds since 1970, for the Date field of answers."""
        self._server, self._observer, self._supervisor = server, observer, supervisor
        self._wall_clock = wall_clock
        self.lag = Histogram(LAGS)
        """Seconds by which the loop came late to the timer."""
        self.starved = Histogram(LAGS)
        """Those of them for which it waited for a CPU, on a busy machine."""
        self.blocks = Blocks()
        """Steps that blocked the event loop, and the works that kept it."""
        self.looked: list[Callable[[float], None]] = []
        """Functions that are called once a second, with the time on Trio's clock."""
        self.beside: list[Callable[[], Awaitable[None]]] = []
        """Functions that are awaited once a second, one after the other in another task, unless the last round goes on."""
        self.stalls = Stalls(supervisor.workers, sign_of)
        """The sessions of models that say nothing."""
        self.finer: Finer | None = None
        """Looks in the timer's task too, at moments of its own."""
        self._looking = False
        self._files: list[tuple[WatchedFile, Callable[[], Awaitable[None]]]] = []
        self._reading = False

    def watch(self, file: WatchedFile, reload: Callable[[], Awaitable[None]]) -> None:
        """Checks a file once a second from now on. If it has changed, `reload` is awaited, which should raise nothing."""
        self._files.append((file, reload))

    async def run(self) -> None:
        """Ticks until it is cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                await self._watched()
        finally:
            for limits in self._log_limits:
                limits.flush()

    async def _watched(self) -> None:
        limit = self._server.limits.loop_block
        if not limit or hasattr(trio.lowlevel.current_clock(), "jump"):  # a test's clock does not follow real time
            await self._tick_by(self._sleep_until)
        work = LoopWork(self._server.runner, self._supervisor)
        watch = LoopWatch(limit, work.whose, self.blocks, self._late, work.of)
        with watch.watching():
            await self._tick_by(watch.beat_until)
        raise AssertionError("it ticks until it is cancelled")

    def _late(self, seconds: float, starved: bool) -> None:
        self.lag.observe(seconds)
        if starved:
            self.starved.observe(seconds)

    async def _sleep_until(self, due: float) -> None:
        await trio.sleep_until(due)
        self.lag.observe(trio.current_time() - due)

    async def _tick_by(self, sleep_until: Callable[[float], Awaitable[None]]) -> NoReturn:
        """Ticks for ever, and sleeps between ticks by `sleep_until`."""
        while True:
            due, finer = trio.current_time() + _TICK, self.finer
            while finer is not None and finer.due < due:
                if finer.due > trio.current_time():
                    await sleep_until(finer.due)
                await finer.look(sleep_until)
            await sleep_until(due)
            now = trio.current_time()
            for connection in list(self._server.connections):
                connection.tick(now)
            await self._look_at_exchanges(now, sleep_until)
            if now >= self.stalls.due:
                await self._look_for_stalls(now, sleep_until)
            for worker in self._supervisor.workers.values():
                worker.stuck.tick(now)
                worker.slots.tick(now)
                worker.log_limits.tick(now)
            self._server.log_limits.tick(now)
            self._observer.log_limits.tick(now)
            self.tell_date()
            self._shed(now)
            self._server.pool.tick(now)
            for look in self.looked:
                look(now)
            if not self._reading and any(file.changed for file, _ in self._files):
                self._nursery.start_soon(self.read_changed)
            if self.beside and not self._looking:
                self._looking = True
                self._nursery.start_soon(self._look_beside)

    async def _look_at_exchanges(self, now: float, sleep_until: Callable[[float], Awaitable[None]]) -> None:
        """Checks the time stamps of all exchanges. Thousands may be too late at once, and ending each takes time and memory,
        so other tasks run after each turn of this."""
        waiting, until = list(self._observer.live), now + TURN_SECONDS
        while waiting:
            exchange = waiting.pop()
            if exchange.ending is None:
                try:
                    exchange.check_stamps(now)
                except Exception as e:
                    exchange.owner.failed(e)
            del exchange  # it may end before the rest are checked, and must not be kept until then
            if trio.current_time() > until:
                await sleep_until(trio.current_time() + TURN_SECONDS)
                until = trio.current_time() + TURN_SECONDS

    async def _look_for_stalls(self, now: float, sleep_until: Callable[[float], Awaitable[None]]) -> None:
        """Looks for models that say nothing, in turns as well."""
        until = now + TURN_SECONDS
        for _ in self.stalls.look(now):
            if trio.current_time() > until:
                await sleep_until(trio.current_time() + TURN_SECONDS)
                until = trio.current_time() + TURN_SECONDS
        if self.stalls.sought:
            self._nursery.start_soon(self._locate_stalls)

    async def _locate_stalls(self) -> None:
        try:
            await self.stalls.locate()
        except Exception:  # a bug of the gateway must not end the server
            log.exception("silent sessions cannot be located")

    async def _look_beside(self) -> None:
        try:
            for look in self.beside:
                try:
                    await look()
                except Exception:  # a bug of the gateway must not end the server
                    log.exception("a periodic check failed")
        finally:
            self._looking = False

    async def read_changed(self) -> None:
        """Reads changed files again."""
        self._reading = True
        try:
            for file, reload in self._files:
                if file.changed:
                    try:
                        await reload()
                    except Exception:  # no content of a file may end the server
                        log.exception("a file cannot be reloaded", extra={"file": file.path})
        finally:
            self._reading = False

    @property
    def _log_limits(self) -> Iterator[LogLimits]:
        yield from (self._server.log_limits, self._observer.log_limits)
        yield from (worker.log_limits for worker in self._supervisor.workers.values())

    def tell_date(self) -> None:
        """Sets the Date field of answers to the current time."""
        self._server.date.tell(formatdate(self._wall_clock(), usegmt=True).encode())

    def _shed(self, now: float) -> None:
        """If memory runs out, interrupts an exchange: of the party that holds most, the one that holds most. If a party was
        refused memory in the last second, interrupts one of another party whose upload has stalled."""
        budget, live = self._server.budget, self._observer.live
        wanted, budget.wanted = budget.wanted, None
        if budget.used * 100 > self._server.limits.memory_reset * budget.limit and live:
            said = "the server is short of memory (limits.memory_reset); try again later"
            max(live, key=_holds).interrupt(Overloaded(said, refusal=Refusal.SHED))
        elif wanted is not None:
            stalled = [exchange for exchange in live if exchange.account is not wanted and _has_stalled(exchange, now)]
            if stalled:
                said = f"no byte of the body for {STALLED_UPLOAD:g} s, and others need the memory that it holds"
                max(stalled, key=_holds).interrupt(Overloaded(f"{said}; try again later", refusal=Refusal.SHED))


def sign_of(caller: Any) -> Sign:
    """Looks at a model's call: an exchange's only one, or one of several."""
    alone = isinstance(caller, Exchange)
    exchange: Exchange = caller if alone else caller.exchange
    outbound, inbound, waits = exchange.outbound, exchange.inbound, exchange.waits
    taken = (
        getattr(exchange, "parts_in", 0),
        0 if inbound is None else inbound.received,
        0.0 if waits is None else waits.input,
    )
    return Sign(
        task=exchange.turn.task,
        held=outbound.waits or outbound.finishing is not None or exchange.cancelled,
        asks=alone and waits is not None and waits.what == INPUT,
        sent=outbound.items_out,
        taken=taken,
        alone=alone,
    )


def _holds(exchange: Exchange) -> tuple[int, int]:
    return exchange.account.held, exchange.held_with_wire


def _has_stalled(exchange: Exchange, now: float) -> bool:
    return exchange.inbound is not None and exchange.inbound.stalled(now) >= STALLED_UPLOAD
