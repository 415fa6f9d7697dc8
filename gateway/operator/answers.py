"""The answers of the operator plane, apart from HTTP: those of one gateway. `gateway.fronts` has those of several."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Protocol, final

import msgspec
import trio
from msgspec import UNSET
from starlette.types import ASGIApp

from gateway.config.text import show, text_without_secrets
from gateway.core.exchange import Exchange
from gateway.errors import Conflict, EndedByOperator, GatewayError, LoadFailed, NotFound
from gateway.operator.events import StreamWatch
from gateway.operator.operated import Operated, PlaneSite
from gateway.operator.operations import HealthView, IncidentsView, ModelsView, StreamQuery, StreamsView
from gateway.operator.state_changes import StateChanges
from gateway.operator.stats import StatsView, stats_of
from gateway.operator.views import (
    IncidentView,
    ModelView,
    StreamView,
    batches_of,
    blocked_slots,
    matches,
    models_of,
    serving_of,
    versions_of,
    view_of_incident,
    view_of_model,
    view_of_stream,
    waited,
    waits_for,
)
from gateway.serving.drain import DrainReport
from gateway.telemetry import logging_setup
from gateway.telemetry.incidents import Incidents
from gateway.telemetry.logging_setup import Level
from gateway.telemetry.metrics import exposition
from models.blocking import detached
from models.errors import ModelExit

_EXCHANGES_AT_ONCE = 256  # streams that are looked at before others have their turn


class Answers(Protocol):
    """The questions of the plane's application. A refusal raises GatewayError."""

    place: PlaneSite
    """The address and the settings of the plane."""

    play: ASGIApp | None
    """Serves the calls of the playground, as the operator's; None where this process runs no models."""

    def operate(self) -> None:
        """Begins to keep incidents, because a plane asks from now on."""
        ...

    @property
    def draining(self) -> bool: ...
    @property
    def drain_report(self) -> DrainReport | None: ...
    async def health(self) -> HealthView:
        """Returns whether new calls are accepted, and the reasons why they are not, in several processes also those of the
        ones that are not ready."""
        ...

    async def metrics(self, accept: str) -> tuple[str, bytes]:
        """The content type and the body that answer a scrape."""
        ...

    async def stats(self) -> StatsView:
        """The figures of now."""
        ...

    async def serving(self) -> list[ModelView]:
        """The models in service."""
        ...

    async def models(self) -> ModelsView: ...
    async def model(self, name: str) -> ModelView: ...
    async def load(self, name: str) -> ModelView: ...
    async def unload(self, name: str) -> ModelView: ...
    async def reload(self, name: str, patience: float | None) -> ModelView: ...
    async def restart(self, name: str, number: int) -> ModelView: ...
    async def streams(self, query: StreamQuery) -> StreamsView: ...
    async def end(self, id: str) -> StreamView:
        """Ends a live stream, which is as it was then. NotFound; Conflict where its answer is complete already."""
        ...

    async def incidents(self) -> IncidentsView: ...
    async def incident(self, id: str) -> IncidentView:
        """The group of one, by any of its numbers, with the traceback. NotFound."""
        ...

    def watching(self) -> AbstractAsyncContextManager[Callable[[], Awaitable[bytearray]]]:
        """Inside the block each call gives the events since the last one."""
        ...

    def begin_drain(self, timeout: float | None) -> None: ...
    async def reported(self) -> DrainReport: ...
    def level(self) -> str: ...
    async def set_level(self, level: Level) -> None: ...


@final
class GatewayAnswers:
    """The answers of one gateway."""

    def __init__(self, gateway: Operated) -> None:
        self._gateway = gateway
        self.place: PlaneSite = gateway
        self._metrics = gateway.metrics  # from now on exchanges are counted
        self.begin_drain, self.reported = gateway.begin_drain, gateway.reported
        self.play: ASGIApp | None = partial(gateway.serve_asgi, by_operator=True)
        self._began = time.monotonic()
        self.explained = Incidents(tracebacks=gateway.config.operator.tracebacks)
        """The incidents that the log has explained since `operate`."""
        self._changes = StateChanges(())

    def operate(self) -> None:
        """Begins to keep incidents and changes of state, because a plane asks from now on."""
        supervisor = self._gateway.supervisor
        supervisor.explained.append(self.explained.add)
        self._changes = StateChanges(supervisor.workers.values())
        supervisor.noticed.append(self._changes.noticed)

    @property
    def draining(self) -> bool:
        """True once a drain has begun."""
        return self._gateway.draining

    @property
    def drain_report(self) -> DrainReport | None:
        """The drain report: how each exchange that was live ended; None before the drain is over."""
        return self._gateway.drain_report

    async def health(self) -> HealthView:
        """Returns whether new calls are accepted, and the reasons why they are not."""
        unready = self._gateway.unready
        return HealthView(ready=not unready, reasons=unready)

    async def metrics(self, accept: str) -> tuple[str, bytes]:
        """The content type and the body that answer a scrape."""
        await self._metrics.prepare()
        return exposition(self._metrics.registry, accept)

    async def stats(self) -> StatsView:
        """The figures of now."""
        return await stats_of(self._gateway, time.monotonic() - self._began)

    # -- models ------------------------------------------------------------------------------------------------------

    async def serving(self) -> list[ModelView]:
        """The models in service."""
        return serving_of(self._gateway)

    async def models(self) -> ModelsView:
        """Every model there is."""
        revision = self._gateway.models.revision
        return ModelsView(revision=revision, models=await models_of(self._gateway))

    async def model(self, name: str) -> ModelView:
        """One of them. NotFound."""
        status = self._gateway.models.get(name)
        if status is None:
            return await self._absent(name)
        view = view_of_model(status, blocked_slots(self._gateway)[name], versions_of(self._gateway, name))
        return msgspec.structs.replace(view, history=self._changes.of(name), batches=batches_of(self._gateway, name))

    async def _absent(self, name: str) -> ModelView:
        """A model that is not in service. Raises NotFound if there is none of that name."""
        for view in await models_of(self._gateway):
            if view.name == name:
                return msgspec.structs.replace(view, history=self._changes.of(name))
        raise NotFound(f"no model {show(name[:100])}: GET /models lists those there are")

    async def load(self, name: str) -> ModelView:
        """Loads a model; returns when it answers calls."""
        await self._gateway.control.load(name)
        return await self.model(name)

    async def unload(self, name: str) -> ModelView:
        """Takes a model out of service; returns when nothing of it is left."""
        if name not in self._gateway.models:
            await self._absent(name)
        await self._gateway.control.unload(name)
        return await self.model(name)

    async def reload(self, name: str, patience: float | None) -> ModelView:
        """Loads a new version beside the old one. Raises LoadFailed if the model's own code raises."""
        failure: GatewayError | None = None
        try:
            await self._gateway.reload(name, patience=patience)
        except GatewayError:
            raise
        except (Exception, SystemExit, BaseExceptionGroup) as e:  # raised by the model's own code
            if isinstance(e, BaseExceptionGroup) and e.split((Exception, SystemExit))[1] is not None:
                raise
            detached(e)  # out of a thread, or a warm-up, it is in a cycle, which would keep the model
            said = text_without_secrets(str(e) if isinstance(e, ModelExit) else f"{type(e).__name__}: {e}")[:300]
            failed = self._gateway.models[name].last_error
            where = f"; incident {failed.incident}" if failed is not None else ""
            failure = LoadFailed(f"the new version cannot be loaded, and the old one serves on: {said}{where}")
        if failure is not None:  # outside: what the traceback holds is the failed model's memory
            try:
                raise failure
            finally:
                failure = None
        return msgspec.structs.replace(await self.model(name), code=self._gateway.control.code_of(name) or UNSET)

    async def restart(self, name: str, number: int) -> ModelView:
        """Puts a new process in the place of one of the model's; returns when the new one takes calls."""
        if name not in self._gateway.models:
            await self._absent(name)
        await self._gateway.control.restart(name, number)
        return await self.model(name)

    # -- streams -----------------------------------------------------------------------------------------------------

    async def streams(self, query: StreamQuery) -> StreamsView:
        """The live streams that the query asks for."""
        gateway = self._gateway
        live, queued, now = gateway.live, gateway.supervisor.waiting, trio.current_time()
        matched: list[tuple[float, Exchange, str]] = []
        for number, exchange in enumerate(live, 1):
            waiting = waits_for(exchange, queued)
            if matches(exchange, waiting, query):
                first = waited(exchange, waiting, now) if query.sort == "waited" else now - exchange.started_at
                matched.append((first, exchange, waiting))
            if number % _EXCHANGES_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        matched.sort(key=lambda found: -found[0])
        views = []
        for number, (_, exchange, waiting) in enumerate(matched[: query.limit], 1):
            if exchange.ending is None:  # meanwhile
                views.append(view_of_stream(exchange, now, waiting))
            if number % _EXCHANGES_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        counts = gateway.counts()
        return StreamsView(
            live=len(live),
            matched=len(matched),
            connections=counts.connections,
            endings=counts.endings,
            streams=views,
        )

    async def end(self, id: str) -> StreamView:
        """Ends a live stream. NotFound; Conflict where its answer is complete already."""
        exchange = next((one for one in self._gateway.live if one.id == id and one.ending is None), None)
        if exchange is None:
            raise NotFound(f"no stream {show(id[:100])} is live: GET /streams lists those that are")
        if exchange.outbound.finishing is not None:
            raise Conflict(
                f"the answer of stream {id} is complete: it ends when its client has taken it, or after limits.write_stall"
            )
        view = view_of_stream(exchange, trio.current_time(), waits_for(exchange, self._gateway.supervisor.waiting))
        exchange.interrupt(EndedByOperator("an operator has ended this stream"))
        return view

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Callable[[], Awaitable[bytearray]]]:
        """Inside the block each call gives the events since the last one."""
        watch = StreamWatch(self._gateway, self.explained)

        async def look() -> bytearray:
            return (await watch.look()).events()

        with self._gateway.watched(watch.ended):
            yield look

    # -- incidents ---------------------------------------------------------------------------------------------------

    async def incidents(self) -> IncidentsView:
        """Exceptions that models and the server have raised."""
        return IncidentsView(incidents=[view_of_incident(group) for group in self.explained.groups])

    async def incident(self, id: str) -> IncidentView:
        """The group of one, by any of its numbers. NotFound."""
        group = self.explained.find(id)
        if group is None:
            raise NotFound(f"no incident {show(id[:100])} is kept: GET /incidents lists those that are, the log has all")
        return view_of_incident(group, whole=True)

    # -- the log -----------------------------------------------------------------------------------------------------

    def level(self) -> str:
        """The level of the log."""
        return logging_setup.level()

    async def set_level(self, level: Level) -> None:
        """Changes it."""
        logging_setup.set_level(level)
