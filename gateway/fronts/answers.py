"""Answers for the operator plane of a parent: asks the fronts, and merges their answers."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar, final

import msgspec
import trio
from msgspec import UNSET, UnsetType
from starlette.types import ASGIApp

from gateway.config import Config, LimitsConfig
from gateway.config.text import show
from gateway.config.watched_file import WatchedFile
from gateway.errors import Conflict, NotFound, Unavailable
from gateway.fronts.link import ANSWER, FrontError, FrontLink, SilentFront
from gateway.fronts.parent import Parent
from gateway.fronts.sums import Family, families_of
from gateway.operator.events import News, event_of
from gateway.operator.operated import PlaneSite
from gateway.operator.operations import HealthView, IncidentsView, ModelsView, StreamQuery, StreamsView
from gateway.operator.state_changes import KEPT_CHANGES, ChangeView
from gateway.operator.stats import StatsView, check, counters_of, stats_of_all
from gateway.operator.views import ErrorView, IncidentView, ModelView, StreamView, VersionView, view_of_model
from gateway.serving.drain import DrainProgress, DrainReport, progress_of_all
from gateway.telemetry import logging_setup
from gateway.telemetry.incidents import GROUPS
from gateway.telemetry.logging_setup import Level
from gateway.telemetry.metrics import exposition
from gateway.workers.snapshot import InstanceStatus

log = logging.getLogger("gateway.fronts")

T = TypeVar("T")

_PARENT = 0  # the id of the parent among the fronts, whose ids begin at 1

_LOOK = 1.0  # seconds between two checks of a file
_PROBE = 0.5  # seconds for an answer about health: probes allow one, and a silent front gets no connections anyway


@final
class ParentAnswers:
    """The merged answers of all fronts. It is also the `PlaneSite` of the operator plane."""

    def __init__(self, parent: Parent) -> None:
        self.place: PlaneSite = self
        self.play: ASGIApp | None = None  # models run in the fronts
        self._parent = parent
        self.config: Config = parent.config
        self.limits: LimitsConfig = parent.config.limits
        self.operator_port = 0
        """The port of the operator plane; 0 if there is none."""
        self.metrics_port = 0
        """The port for metrics alone; 0 if there is none."""
        self._watched: list[tuple[WatchedFile, Callable[[], Awaitable[None]]]] = []
        self._beside: list[Callable[[], Awaitable[None]]] = []
        self._began = time.monotonic()
        self._figures: dict[FrontLink, StatsView] = {}  # the last figures of each front
        self._figures_before: list[StatsView] = []  # the sum over fronts that have ended, if any
        self._readers = 0
        self._reloading = trio.Lock()
        self.begin_drain, self.reported = parent.begin_drain, parent.reported

    def watch_file(self, file: WatchedFile, reload: Callable[[], Awaitable[None]]) -> None:
        """Checks a file once a second while `watch` runs, and calls `reload` if it has changed."""
        self._watched.append((file, reload))

    def each_second(self, look: Callable[[], Awaitable[None]]) -> None:
        """Awaits `look` once a second while `watch` runs. An exception of it is logged."""
        self._beside.append(look)

    async def watch(self) -> None:
        """Runs the checks of `watch_file` and `each_second` until it is cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_beside)
            while True:
                await trio.sleep(_LOOK)
                for file, reload in self._watched:
                    if file.changed:
                        await reload()

    async def _look_beside(self) -> None:
        while True:
            await trio.sleep(_LOOK)
            for look in self._beside:
                try:
                    await look()
                except Exception:  # a bug of the gateway must not end the server
                    log.exception("a check of the fronts failed")

    def operate(self) -> None:
        """Does nothing: each front keeps its own incidents."""

    @property
    def draining(self) -> bool:
        """True once a drain has begun."""
        return self._parent.draining

    @property
    def drain_report(self) -> DrainReport | None:
        """The report of all fronts after a drain; None before."""
        return self._parent.report

    # -- asking ------------------------------------------------------------------------------------------------------

    @property
    def _fronts(self) -> list[FrontLink]:
        """The fronts that serve or drain, in the order of their numbers."""
        return sorted((link for link in self._parent.links if link.listening), key=lambda link: (link.number, link.id))

    async def _ask_all(self, what: str, kind: Any, argument: Any = None, within: float = ANSWER) -> dict[FrontLink, Any]:
        """Asks all fronts. Returns the answers that arrive in time, each converted to `kind`."""
        answers: dict[FrontLink, Any] = {}

        async def ask(link: FrontLink) -> None:
            try:
                answers[link] = msgspec.convert(await link.ask(what, argument, within=within), kind)
            except SilentFront:
                pass
            except msgspec.ValidationError as e:
                link.broken(e)

        fronts = self._fronts
        async with trio.open_nursery() as nursery:
            for link in fronts:
                nursery.start_soon(ask, link)
        return {link: answers[link] for link in fronts if link in answers}

    async def health(self) -> HealthView:
        """Returns whether a front is ready, and the reasons of those that are not. If none is, each reason is there once, as
        of one server."""
        told = await self._ask_all("unready", tuple[str, ...], within=_PROBE)
        reasons = {number: self._why_unready(number, told) for number in range(self._parent.processes)}
        if ready := not (self.draining or all(reasons.values())):
            every = [f"front {number}: {reason}" for number, some in reasons.items() for reason in some]
        else:
            every = ["draining"] * self.draining + [reason for some in reasons.values() for reason in some]
        return HealthView(ready=ready, reasons=tuple(dict.fromkeys(every)))

    def _why_unready(self, number: int, told: Mapping[FrontLink, tuple[str, ...]]) -> tuple[str, ...]:
        link = self._parent.current.get(number)
        if link is None or not link.listening or link.exit is not None:
            return ("the process does not serve yet",)
        return told.get(link, ("the process does not answer",))

    async def metrics(self, accept: str) -> tuple[str, bytes]:
        """Returns the content type and the body for a scrape, with the sums over all fronts."""
        sums = self._parent.sums
        for link, families in (await self._ask_all("metrics", list[Family])).items():
            if link in self._parent.links:  # otherwise its last message has newer figures
                sums.put(link.id, families)
        sums.put(_PARENT, families_of(self._parent.owned.metrics()))
        return exposition(sums.registry, accept)

    async def stats(self) -> StatsView:
        """Returns the sums of the figures of all fronts, including those that have ended."""
        for link, view in (await self._ask_all("stats", StatsView)).items():
            if _fits(link, view):
                self._figures[link] = view
        for link in [link for link in self._figures if link not in self._parent.links]:
            last = self._figures.pop(link)
            if link.over is not None and link.over.stats is not None and _fits(link, link.over.stats):
                last = link.over.stats
            self._figures_before = [stats_of_all([counters_of(last), *self._figures_before])]
        health = await self.health()
        total = stats_of_all([*self._figures.values(), *self._figures_before])
        return msgspec.structs.replace(
            total,
            at=round(time.time(), 3),
            uptime=round(time.monotonic() - self._began, 3),
            address=list(self._parent.ports.addresses),
            ready=health.ready,
            reasons=list(health.reasons or ()),
        )

    # -- models ------------------------------------------------------------------------------------------------------

    async def serving(self) -> list[ModelView]:
        """The models in service, and those that could be loaded."""
        return (await self.models()).models

    async def models(self) -> ModelsView:
        """Returns every model, with the sums over all fronts."""
        told: dict[FrontLink, ModelsView] = await self._ask_all("models", ModelsView)
        return ModelsView(
            revision=sum(view.revision for view in told.values()),
            models=models_of_all(
                {link.number: view.models for link, view in told.items() if link.taking or self.draining}, self._owned()
            ),
        )

    def _owned(self) -> dict[str, ModelView]:
        """Returns the parent's view of the models whose processes it owns."""
        return {name: view_of_model(load.status, 0, []) for name, load in self._parent.owned.latest.items()}

    async def model(self, name: str) -> ModelView:
        """Returns one model, with the sums over all fronts. NotFound if there is none of that name."""
        told = (await self._ask_all("model", list[ModelView], name)).items()
        views_of = {link.number: views for link, views in told if link.taking or self.draining}
        for view in models_of_all(views_of, self._owned()):
            return view
        raise NotFound(f"no model {show(name[:100])}: GET /models lists those there are")

    async def load(self, name: str) -> ModelView:
        """Always raises Conflict: each front would have other models."""
        raise self._refusal("loaded")

    async def unload(self, name: str) -> ModelView:
        """Always raises Conflict: each front would have other models."""
        raise self._refusal("unloaded")

    def _refusal(self, what: str) -> Conflict:
        n = self._parent.processes
        return Conflict(
            f"no model can be {what} alone with listen.processes = {n}: each process would have its own. Change the "
            "configuration, and send SIGHUP"
        )

    async def reload(self, name: str, patience: float | None) -> ModelView:
        """Reloads a model in each front, one after the other. If one fails, the fronts after it keep the old version. If the
        fronts share the model's processes, new processes are started first, beside the old ones."""
        owned = self._parent.owned
        code: str | UnsetType = UNSET
        async with self._reloading:
            old = await owned.load_anew(name) if name in owned.latest else None
            for link in self._fronts:
                if link.taking:
                    if old is not None:
                        owned.switch(link, name)
                    code = (await self._ask_one(link, "reload", name, patience)).get("code", UNSET)
                    if old is not None:
                        owned.switched(link, old)
        return msgspec.structs.replace(await self.model(name), code=code)

    async def restart(self, name: str, number: int) -> ModelView:
        """Replaces one process of a model: the one that all fronts share, or the one of each front."""
        async with self._reloading:
            if name in self._parent.owned.latest:
                await self._parent.owned.restart(name, number)
            else:
                for link in self._fronts:
                    if link.taking:
                        await self._ask_one(link, "restart", name, number)
        return await self.model(name)

    async def _ask_one(self, link: FrontLink, what: str, name: str, argument: Any) -> Any:
        try:
            return await link.ask(what, [name, argument], within=math.inf)
        except SilentFront:
            raise Unavailable(f"front {link.number} has ended meanwhile; {what} again") from None

    # -- streams -----------------------------------------------------------------------------------------------------

    async def streams(self, query: StreamQuery) -> StreamsView:
        """Returns the live streams of all fronts that match the query."""
        told: list[StreamsView] = list((await self._ask_all("streams", StreamsView, query)).values())
        endings = Counter[str]()
        for view in told:
            endings.update(view.endings)
        rows = [row for view in told for row in view.streams]
        rows.sort(key=lambda row: -(row.waited or 0.0) if query.sort == "waited" else -row.age)
        return StreamsView(
            live=sum(view.live for view in told),
            matched=sum(view.matched for view in told),
            connections=sum(view.connections for view in told),
            endings=dict(endings),
            streams=rows[: query.limit],
        )

    async def end(self, id: str) -> StreamView:
        """Ends a live stream in any front. NotFound if there is none of that id; Conflict if its answer is complete
        already; Unavailable if a front that may have it does not answer."""
        silent = False
        for link in self._fronts:
            try:
                return msgspec.convert(await link.ask("end", id, within=ANSWER), StreamView)
            except FrontError as e:
                if e.status != 404:
                    raise
            except SilentFront:
                silent = True
            except msgspec.ValidationError as e:
                link.broken(e)
        if silent:
            raise Unavailable(f"a front that may have the stream {show(id[:100])} does not answer; try again")
        raise NotFound(f"no stream {show(id[:100])} is live: GET /streams lists those that are")

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Callable[[], Awaitable[bytearray]]]:
        """Yields a function that returns the events of all fronts since its last call. It works inside the block."""
        self._readers += 1
        reader, watch = self._readers, _Watch(self._owned)

        async def look() -> bytearray:
            return watch.events_of(await self._ask_all("look", News, reader), draining=self.draining)

        try:
            yield look
        finally:
            for link in self._fronts:
                link.tell("look away", reader)

    # -- incidents ---------------------------------------------------------------------------------------------------

    async def _incidents(self) -> list[IncidentView]:
        told = (await self._ask_all("incidents", list[IncidentView])).values()
        return sorted(incidents_of_all(view for views in told for view in views), key=lambda view: -view.last)

    async def incidents(self) -> IncidentsView:
        """Returns the incidents of all present fronts, the latest first."""
        kept = (await self._incidents())[:GROUPS]
        return IncidentsView(incidents=[msgspec.structs.replace(view, traceback=UNSET) for view in kept])

    async def incident(self, id: str) -> IncidentView:
        """Returns the group of an incident by any of its ids. NotFound if none is kept."""
        for view in await self._incidents():
            if id == view.id or id in view.numbers:
                return view
        raise NotFound(f"no incident {show(id[:100])} is kept: GET /incidents lists those that are, the log has all")

    # -- the log -----------------------------------------------------------------------------------------------------

    def level(self) -> str:
        """The level of the log."""
        return logging_setup.level()

    async def set_level(self, level: Level) -> None:
        """Changes the level of the log in all fronts, present and future."""
        self._parent.set_level(level)


def _fits(link: FrontLink, view: StatsView) -> bool:
    """True if the figures are valid; otherwise it kills the front that sent them."""
    try:
        check(view)
    except ValueError as e:
        link.broken(e)
        return False
    return True


@final
class _Watch:
    """The events that one reader has got of each front."""

    def __init__(self, owned: Callable[[], Mapping[str, ModelView]] = dict) -> None:
        self._owned = owned
        self._models: dict[FrontLink, list[ModelView]] = {}
        self._streams: dict[FrontLink, set[str]] = {}
        self._incidents: dict[FrontLink, dict[str, IncidentView]] = {}
        self._drains: dict[FrontLink, DrainProgress] = {}

    def events_of(self, told: dict[FrontLink, News], *, draining: bool) -> bytearray:
        """Merges the news of all fronts into events. The streams of a front that has ended are closed. `draining`: the
        server drains, and not only a front that is replaced."""
        models, streams, dropped, changed = self._models, bytearray(), 0, False
        for link in [link for link in self._streams if link.exit is not None]:
            changed |= models.pop(link, None) is not None
            self._incidents.pop(link, None)
            for id in self._streams.pop(link):
                streams += event_of("closed", {"id": id})
        for link, news in told.items():
            if news.models is not None:
                models[link], changed = news.models, True
            streams += news.streams
            dropped += news.dropped
            known = self._streams.setdefault(link, set())
            known.update(news.opened)
            known.difference_update(news.closed)
        listed = models_of_all({link.number: views for link, views in models.items()}, self._owned()) if changed else None
        merged = News(
            draining=self._drained(told) if draining else None,
            incidents=self._happened(told),
            models=listed,
            dropped=dropped,
            streams=bytes(streams),
            opened=[],
            closed=[],
        )
        return merged.events()

    def _drained(self, told: dict[FrontLink, News]) -> DrainProgress | None:
        """Returns the progress of the drain over all fronts; None if it has not changed."""
        changed = {link: news.draining for link, news in told.items() if news.draining is not None}
        self._drains |= changed
        return progress_of_all(self._drains.values()) if changed else None

    def _happened(self, told: dict[FrontLink, News]) -> list[IncidentView]:
        """Returns the incident groups with news, merged with the same groups of other fronts."""
        happened = set[tuple[str, str, str]]()
        for link, news in told.items():
            known = self._incidents.setdefault(link, {})
            for view in news.incidents:
                known.pop(view.id, None)
                known[view.id] = view
                happened.add(_kind_of(view))
            while len(known) > GROUPS:  # the number that each front keeps
                del known[next(iter(known))]
        every = [view for known in self._incidents.values() for view in known.values() if _kind_of(view) in happened]
        return sorted(incidents_of_all(every), key=lambda view: view.last)


def _kind_of(view: IncidentView) -> tuple[str, str, str]:
    return view.type, view.place, view.model


def incidents_of_all(told: Iterable[IncidentView]) -> list[IncidentView]:
    """Merges the incident groups of all fronts, so that each kind is there once. A merged group has the text of the latest
    group, and the id and the traceback of the first."""
    kinds: dict[tuple[str, str, str], list[IncidentView]] = {}
    for view in told:
        kinds.setdefault(_kind_of(view), []).append(view)
    merged = []
    for views in kinds.values():
        views.sort(key=lambda view: view.last)
        first = min(views, key=lambda view: view.first)
        numbers = [number for view in views for number in view.numbers]
        count = sum(view.count for view in views)
        own = {"id": first.id, "first": first.first, "traceback": first.traceback, "count": count, "numbers": numbers}
        merged.append(msgspec.structs.replace(views[-1], **own))
    return merged


def models_of_all(told: dict[int, list[ModelView]], owned: Mapping[str, ModelView] = {}) -> list[ModelView]:
    """Merges the models of all fronts, in the order of their names. `owned` is the parent's view of models whose processes
    it owns."""
    by_name: dict[str, dict[int, ModelView]] = {}
    for number, views in told.items():
        for view in views:
            by_name.setdefault(view.name, {})[number] = view
    return [
        _one_of(by_name[name]) if name not in owned else _one_shared(by_name[name], owned[name]) for name in sorted(by_name)
    ]


_SUMS = ("crashes", "restarts", "capacity", "slots_in_use", "queued", "stuck", "slots_blocked")


def _one_of(views: dict[int, ModelView]) -> ModelView:
    """Merges the views of a model in several fronts: sums, and the state of the first front in which it is not ready."""
    number, chosen = next(((n, view) for n, view in views.items() if view.state != "ready"), next(iter(views.items())))
    reason = f"front {number}: {chosen.reason}" if chosen.reason else ""
    errors = [view.last_error for view in views.values() if isinstance(view.last_error, ErrorView)]
    return msgspec.structs.replace(
        chosen,
        reason=reason,
        last_error=min(errors, key=lambda error: error.ago) if errors else chosen.last_error,
        stopping=UNSET if len(views) > 1 else chosen.stopping,
        versions=_versions_of(views.values()),
        batches=_batches_of(views.values()),
        history=_history_of(views),
        **{name: _sum([getattr(view, name) for view in views.values()]) for name in _SUMS},
    )


def _versions_of(views: Iterable[ModelView]) -> list[VersionView] | UnsetType:
    """Merges the versions of a model in all fronts, those in service first."""
    told = [view.versions for view in views if not isinstance(view.versions, UnsetType)]
    sessions = dict.fromkeys(
        ((one.version, one.state) for versions in told for one in sorted(versions, key=lambda one: one.state != "ready")), 0
    )
    for one in (one for versions in told for one in versions):
        sessions[one.version, one.state] += one.sessions
    merged = [VersionView(version=version, state=state, sessions=n) for (version, state), n in sessions.items()]
    return merged if told else UNSET


def _batches_of(views: Iterable[ModelView]) -> dict[str, int] | UnsetType:
    told = [view.batches for view in views if not isinstance(view.batches, UnsetType)]
    sizes = Counter[str]()
    for batches in told:
        sizes.update(batches)
    return {size: sizes[size] for size in sorted(sizes, key=lambda size: (len(size), size))} if told else UNSET


def _history_of(views: dict[int, ModelView]) -> list[ChangeView] | UnsetType:
    changes = [
        msgspec.structs.replace(change, front=number)
        for number, view in views.items()
        if not isinstance(view.history, UnsetType)
        for change in view.history
    ]
    told = any(not isinstance(view.history, UnsetType) for view in views.values())
    return sorted(changes, key=lambda change: change.at)[-KEPT_CHANGES:] if told else UNSET


def _one_shared(views: dict[int, ModelView], own: ModelView) -> ModelView:
    """Merges the views of a model whose processes the fronts share. The state of the processes comes from their owner."""
    one = _one_of(views)
    said: dict[str, Any] = {"crashes": own.crashes, "restarts": own.restarts}
    if own.state != "ready":
        said |= {"state": own.state, "reason": own.reason, "restart_in": own.restart_in, "seconds": own.seconds}
    linked = [each for view in views.values() if view.instances is not UNSET for each in view.instances]
    instances = [_linked(each, [one for one in linked if one.pid == each.pid]) for each in own.instances or ()]
    return msgspec.structs.replace(one, **said, instances=tuple(instances) or UNSET)


def _linked(own: InstanceStatus, fronts: list[InstanceStatus]) -> InstanceStatus:
    """Returns the owner's status of a process, with the sessions and the memory of all fronts."""
    sums = {field: getattr(own, field) + sum(getattr(one, field) for one in fronts) for field in _OF_FRONTS}
    return replace(own, **sums)


_OF_FRONTS = ("sessions", "shared_bodies_bytes", "shared_answers_bytes")


def _sum(values: Iterable[Any]) -> Any:
    known = [value for value in values if value is not UNSET]
    return sum(known) if known else UNSET
