"""The event stream of the operator plane: what opens, changes and closes, as fast as its reader takes it and no faster."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, final

import msgspec
import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.core.exchange import Exchange
from gateway.operator.operated import Operated
from gateway.operator.views import StreamView, view_of_model, view_of_stream, waits_for
from gateway.workers.snapshot import ModelStatus
from protocols.sse import encode_event

KEPT = 1000
"""Exchanges that have ended between two looks and are told; of more only their number is."""
_PIECE = 32 * 1024  # bytes that are written at once
_EXCHANGES_AT_ONCE = 256  # exchanges that are looked at before others have their turn
_QUIET = 15.0  # seconds without news after which a stream says that it is there


@final
class StreamWatch:
    """What one reader has been told, and what it is to be told next.

    It keeps a few figures of each exchange that is live, and what has ended since the last look, `KEPT` at most. Nothing
    grows with the time that its reader does not read.
    """

    def __init__(self, gateway: Operated) -> None:
        self._gateway = gateway
        self._known: dict[str, tuple[object, ...]] = {}
        self._ended: deque[StreamView] = deque()
        self._dropped = 0
        self._models: list[ModelStatus] | None = None

    def ended(self, exchange: Exchange) -> None:
        """An exchange has ended."""
        if len(self._ended) < KEPT:
            self._ended.append(view_of_stream(exchange, exchange.owner.clock()))
        else:
            self._dropped += 1

    async def look(self) -> bytearray:
        """All events since the last look, in order: nothing of it is told twice, and no exchange is held on to."""
        events, models = bytearray(), [status for _, status in sorted(self._gateway.models.items())]
        if models != self._models:
            self._models = models
            events += _event("models", [view_of_model(status) for status in models])
        ended, dropped = self._ended, self._dropped
        self._ended, self._dropped = deque(), 0
        if dropped:
            events += _event("dropped", {"closed": dropped})
        for view in ended:
            self._known.pop(view.id, None)
            events += _event("closed", view)
        for number, event in enumerate(self._live(), 1):
            events += event
            if number % _EXCHANGES_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        return events

    def _live(self) -> Iterator[bytes]:
        """What there is to tell of each exchange, which may be nothing."""
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
                yield _event("opened" if before is None else "changed", view_of_stream(exchange, now, waiting))
        # how the others have ended was dropped, or comes with the next look
        for id in gone - {view.id for view in self._ended}:
            del self._known[id]
            yield _event("closed", {"id": id})


def _event(name: str, data: object) -> bytes:
    return b"event: %s\n" % name.encode() + encode_event(msgspec.json.encode(data))


@final
class EventStream(Response):
    """Looks again and again, `interval` seconds after the reader has taken what there was. Ends with the report of a drain,
    with its reader, or with its task."""

    media_type = "text/event-stream"

    def __init__(self, gateway: Operated, interval: float, readers: trio.Semaphore, headers: dict[str, str]) -> None:
        """`readers` has a place for it now."""
        super().__init__(headers={"x-accel-buffering": "no", **headers})  # or a proxy collects what it should pass on
        del self.headers["content-length"]
        self._gateway, self._interval, self._readers = gateway, interval, readers

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
        watch, told = StreamWatch(self._gateway), trio.current_time()
        with self._gateway.watched(watch.ended):
            report = None
            while report is None:
                report = self._gateway.drain_report
                events = await watch.look()
                if report is not None:
                    events += _event("drained", report)
                elif not events and trio.current_time() - told >= _QUIET:
                    events += b": nothing new\n\n"
                if events:
                    await _write(send, events)
                    told = trio.current_time()
                with trio.move_on_after(self._interval):
                    await self._gateway.reported()


async def _leave_with_reader(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _write(send: Send, events: bytearray) -> None:
    for at in range(0, len(events), _PIECE):
        await send(_body(bytes(events[at : at + _PIECE]), more=True))


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
