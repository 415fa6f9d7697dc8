"""The event stream of the operator plane: what opens, changes and closes, as fast as its reader takes it and no faster."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, final

import msgspec
import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.core.exchange import Exchange
from gateway.operator.operated import Operated
from gateway.operator.stats import StatsView
from gateway.operator.views import (
    IncidentView,
    ModelView,
    StreamView,
    blocked_slots,
    versions_of,
    view_of_incident,
    view_of_model,
    view_of_stream,
    waits_for,
)
from gateway.serving.drain import DrainProgress, DrainReport
from gateway.telemetry.incidents import Incidents
from protocols.sse import CONTENT_TYPE, encode_event

KEPT = 1000
"""Exchanges that have ended between two looks and are told; of more only their number is."""
_PIECE = 32 * 1024  # bytes that are written at once
_EXCHANGES_AT_ONCE = 256  # exchanges that are looked at before others have their turn
_STATS = 1.0  # seconds, at least, between two events of figures


class Reported(Protocol):
    """The source of the events, and of the drain report that ends them."""

    @property
    def drain_report(self) -> DrainReport | None: ...
    async def reported(self) -> DrainReport: ...
    def watching(self) -> AbstractAsyncContextManager[Callable[[], Awaitable[bytearray]]]: ...


@final
class News(msgspec.Struct, frozen=True, kw_only=True):
    """The news that one look has found."""

    models: list[ModelView] | None
    """All models if one has changed, else None."""
    incidents: list[IncidentView]
    """The incidents since the last look, the oldest first."""
    draining: DrainProgress | None
    """The progress of a drain if it has changed, else None."""
    dropped: int
    """The number of ended exchanges of which nothing else is told."""
    streams: bytes
    """Events of streams."""
    opened: list[str]
    closed: list[str]
    """The streams that are known now and were not, and those that are no more."""

    def events(self) -> bytearray:
        """All of it, in order."""
        told = bytearray()
        if self.models is not None:
            told += event_of("models", self.models)
        if self.draining is not None:
            told += event_of("draining", self.draining)
        if self.dropped:
            told += event_of("dropped", {"closed": self.dropped})
        told += self.streams
        for incident in self.incidents:
            told += event_of("incident", incident)
        return told


@final
class StreamWatch:
    """The news for one reader.

    It keeps a few figures of each live exchange, and at most `KEPT` exchanges that have ended since the last look. Its
    memory does not grow while the reader does not read.
    """

    def __init__(self, gateway: Operated, incidents: Incidents) -> None:
        self._gateway, self._incidents = gateway, incidents
        self._told = 0  # incidents, by their revision
        self._progress: DrainProgress | None = None
        self._known: dict[str, tuple[object, ...]] = {}
        self._ended: deque[StreamView] = deque()
        self._dropped = 0
        self._models: object = None  # the models as they were told last

    def ended(self, exchange: Exchange) -> None:
        """An exchange has ended."""
        if len(self._ended) < KEPT:
            self._ended.append(view_of_stream(exchange, exchange.owner.clock()))
        else:
            self._dropped += 1

    async def look(self) -> News:
        """All since the last look: nothing of it is told twice, and no exchange is held on to."""
        streams, before = bytearray(), set(self._known)
        gateway, blocked = self._gateway, blocked_slots(self._gateway)
        models = [(status, blocked[name], versions_of(gateway, name)) for name, status in sorted(gateway.models.items())]
        changed, self._models = models != self._models, models
        ended, dropped = self._ended, self._dropped
        self._ended, self._dropped = deque(), 0
        for view in ended:
            self._known.pop(view.id, None)
            streams += event_of("closed", view)
        for number, event in enumerate(self._live(), 1):
            streams += event
            if number % _EXCHANGES_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        happened, self._told = self._incidents.since(self._told), self._incidents.revision
        before_that, self._progress = self._progress, gateway.drain_progress
        return News(
            draining=None if self._progress == before_that else self._progress,
            incidents=[view_of_incident(group) for group in happened],
            models=[view_of_model(*model) for model in models] if changed else None,
            dropped=dropped,
            streams=bytes(streams),
            opened=list(self._known.keys() - before),
            closed=list(before - self._known.keys()),
        )

    def _live(self) -> Iterator[bytes]:
        """The events of each exchange that has changed."""
        live, queued, now = self._gateway.live, self._gateway.supervisor.waiting, trio.current_time()
        gone = self._known.keys() - {exchange.id for exchange in live}
        for exchange in live:
            if exchange.ending is not None:
                continue  # meanwhile, and the next look tells
            waiting = waits_for(exchange, queued)
            figures = (waiting, exchange.bytes_in, exchange.outbound.bytes_out, exchange.outbound.status, exchange.model)
            before = self._known.get(exchange.id)
            if figures == before:
                yield b""
            else:
                self._known[exchange.id] = figures
                yield event_of("opened" if before is None else "changed", view_of_stream(exchange, now, waiting))
        # how the others have ended was dropped, or comes with the next look
        for id in gone - {view.id for view in self._ended}:
            del self._known[id]
            yield event_of("closed", {"id": id})


def event_of(name: str, data: object) -> bytes:
    """One event."""
    return b"event: %s\n" % name.encode() + encode_event(msgspec.json.encode(data))


@final
class EventStream(Response):
    """Looks again and again, `interval` seconds after the reader has taken what there was. Ends with the report of a drain,
    with its reader, or with its task."""

    media_type = CONTENT_TYPE

    def __init__(
        self,
        answers: Reported,
        stats: Callable[[], Awaitable[StatsView]],
        interval: float,
        readers: trio.Semaphore,
        headers: dict[str, str],
    ) -> None:
        """`stats` gives the figures of now; `readers` has a place for it now."""
        super().__init__(headers={"x-accel-buffering": "no", **headers})  # or a proxy collects what it should pass on
        del self.headers["content-length"]
        self._answers, self._stats, self._interval, self._readers = answers, stats, interval, readers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._readers.acquire_nowait()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_leave_with_reader, receive, nursery.cancel_scope)
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._tell(send)
                await send(_body(b"", more=False))
                nursery.cancel_scope.cancel()
        finally:
            self._readers.release()

    async def _tell(self, send: Send) -> None:
        due = trio.current_time()
        async with self._answers.watching() as look:
            report = None
            while report is None:
                report = self._answers.drain_report
                events = await look()
                if report is not None:
                    events += event_of("drained", report)
                elif trio.current_time() >= due:
                    due = trio.current_time() + _STATS
                    events += event_of("stats", await self._stats())
                if events:
                    await _write(send, events)
                with trio.move_on_after(self._interval):
                    await self._answers.reported()


async def _leave_with_reader(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _write(send: Send, events: bytearray) -> None:
    for at in range(0, len(events), _PIECE):
        await send(_body(bytes(events[at : at + _PIECE]), more=True))


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
