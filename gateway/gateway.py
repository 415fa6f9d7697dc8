"""The gateway: models behind listeners, as a library."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any, final

import trio

from gateway.catalog.factories import DescribesProcesses, configured_specs
from gateway.catalog.limits import RepositoryLimits
from gateway.catalog.load_unload import ModelControl
from gateway.catalog.process_memory import resident_bytes
from gateway.catalog.process_model import process_spec
from gateway.catalog.repository import Repository
from gateway.catalog.warmup import answer_check
from gateway.config import Config, ModelConfig
from gateway.config.agreement import (
    exposed_plane,
    has_plane,
    missing_tls,
    several_processes,
    shared_sockets,
    unsupported_processes,
)
from gateway.config.exposure import wrong_access
from gateway.config.problem import ConfigError
from gateway.config.properties import text_options
from gateway.config.watched_file import WatchedFile
from gateway.core.exchange import Exchange
from gateway.core.route import Handler
from gateway.core.runner import Runner
from gateway.core.server import Server
from gateway.dialects.routes import rows
from gateway.errors import (
    ModelGivenUp,
)
from gateway.net.certificate import Certificate
from gateway.net.transport import StreamTransport
from gateway.serving.acceptor import Acceptor
from gateway.serving.access import ClientAccess
from gateway.serving.dispatcher import Dispatcher
from gateway.serving.drain import Drain, DrainProgress, DrainReport
from gateway.serving.ports import Ports
from gateway.serving.router import Router
from gateway.serving.timer import CoarseTimer
from gateway.telemetry.observer import Counts, Observer
from gateway.wires.asgi import Receive, Scope, Send
from gateway.workers.snapshot import ModelsSnapshot, ModelStatus
from gateway.workers.supervisor import Supervisor
from models.adapt import spec_of
from models.spec import ModelSpec
from protocols.buffers import ByteBudget

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

    from gateway.telemetry.metrics import Metrics
    from gateway.telemetry.spans import Spans

log = logging.getLogger("gateway")


@final
class Gateway:
    """Serves models on every wire.

        async with trio.open_nursery() as nursery:
            await nursery.start(gateway.serve)

    `models` are what `models.adapt.spec_of` takes (functions, generators, ModelSpec), added to those that `config`
    names. `serve` returns after `drain`, or is cancelled: cancelling ends every exchange at once. No signal handler,
    no logging set-up and no global state: an embedder has as many gateways as it likes, one `serve` each.
    """

    def __init__(
        self,
        config: Config | None = None,
        models: Iterable[Any] = (),
        *,
        ports: Ports | None = None,
        processes: DescribesProcesses = process_spec,
        chance: Callable[[], float] = random.random,
        tracer_provider: TracerProvider | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`ports` are those of a parent, which hands over what it accepts there (`gateway.fronts`). Without them it opens
        those of `config`; ConfigError then where `listen.processes` is not 1. `processes` describes the models that run in
        processes, where a parent has those.
        `chance` gives numbers from 0 to 1, for the jitter of restarts, of the age of connections and of Retry-After: a
        seeded one makes them repeatable. `wall_clock` gives the seconds since 1970 that the Date of answers is made of.
        `tracer_provider` is OpenTelemetry's: exchanges then have spans. Without one they have them where `tracing.enabled`
        is set, by the provider that the program has made the global one."""
        config = self.config = config or Config()
        self.limits = config.limits
        self.observer = Observer(config.log.access)
        server = self.server = Server(config, self.observer.opened, self.observer.closed, chance)
        self.operator_port = 0
        """The port of the operator plane; 0 where it does not listen, also while another process has its port."""
        self.metrics_port = 0
        """The port of `metrics.port`; 0 where it does not listen."""
        for problem in (
            *exposed_plane(config),
            *missing_tls(config),
            *shared_sockets(config),
            *wrong_access(config, os.environ),
            *unsupported_processes(config),
            *(several_processes(config) if ports is None else ()),
        ):
            raise ConfigError(problem)
        specs = self._specs(models, processes)
        spans = self._make_spans(tracer_provider)
        self._given_up = ""
        self.supervisor = Supervisor(specs, escalated=self._escalate, chance=chance, spans=spans, check=answer_check)
        limits = RepositoryLimits(
            roots=config.repository.roots,
            code_roots=config.repository.code,
            memory=config.repository.memory,
            models=config.repository.models,
            unload_timeout=config.repository.unload_timeout,
            defaults=ModelConfig(factory="", process=config.repository.process),
        )
        self.repository = Repository(self.supervisor, limits, resident=lambda: resident_bytes() - server.budget.used)
        self.control = ModelControl(self.supervisor, self.repository, limits, config.lmi)
        self.router = Router(rows(config, self.supervisor, self.repository, self.control, draining=lambda: server.draining))
        self.access = ClientAccess(config, server, wall_clock)
        server.exchange_closed = self.access.around(server.exchange_closed)
        self.dispatcher = Dispatcher(server, self.router, self.observer, self.access, self.supervisor.explain)
        # each exchange goes through functions of the parts that own them: a method here would cost each one another call
        work: Handler = self.dispatcher.work
        if spans is not None:
            self.observer.trace_fields = spans.fields
            traced = spans.around(work, server.exchange_opened, server.exchange_closed)
            work, server.exchange_opened, server.exchange_closed = traced
        server.run_by(Runner(work, self.dispatcher.blame, self.dispatcher.conclude))
        self.acceptor = Acceptor(server, ports)
        self.timer = CoarseTimer(server, self.observer, self.supervisor, wall_clock)
        self.timer.looked.append(self.access.tick)
        if config.metrics.emf:
            from gateway.telemetry.embedded_metrics import EmbeddedMetrics  # loaded only where it is used

            embedded = EmbeddedMetrics(server, self.supervisor, self.observer, wall_clock)
            self.timer.looked.append(embedded.look)
        if self.access.file is not None:
            self.watch_file(self.access.file, self.access.reload)
        self.shutdown = Drain(server, self.acceptor, self.dispatcher, self.observer)
        self._metrics: Metrics | None = None
        self._listening, self._over = trio.Event(), trio.Event()

    def _specs(self, models: Iterable[Any], processes: DescribesProcesses) -> list[ModelSpec]:
        specs: list[ModelSpec] = [*configured_specs(self.config, processes), *(spec_of(m) for m in models)]
        for spec in specs:
            try:
                text_options(self.config.lmi, spec.options)
            except ConfigError as e:
                raise ConfigError(f"model {spec.name!r}: {e}") from None
        return specs

    def _make_spans(self, provider: TracerProvider | None) -> Spans | None:
        if provider is None and not self.config.tracing.enabled:
            return None
        try:
            from opentelemetry.trace import get_tracer_provider

            from gateway.telemetry.spans import Spans
        except ModuleNotFoundError as e:
            raise ConfigError(f"tracing.enabled is true and {e.name} is not installed: pip install 'everywire[otel]'") from e
        return Spans(provider or get_tracer_provider(), lambda exchange: self.router.path_of(exchange))

    # -- serving -------------------------------------------------------------------------------------------------------

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Loads the models, listens, and serves until `drain` or cancellation. Started once every model's first load
        is decided; listeners answer (with 503 where a model is needed) from before that. One call for a gateway.

        A model that is given up, and whose policy says `escalate`, begins a drain; ModelGivenUp is raised at its end."""
        self.server.begin()
        self.timer.tell_date()
        self.acceptor.listen()
        self._listening.set()
        try:
            async with AsyncExitStack() as planes:  # they are there before the first model is, and go last
                for plane in self._planes():
                    await planes.enter_async_context(plane)
                await self._serve(task_status)
        finally:
            self.acceptor.close()
            self._over.set()
        if self._given_up:
            raise ModelGivenUp(self._given_up)

    async def _serve(self, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as connections:
                self.acceptor.begin(connections, self.timer.run)
                nursery.start_soon(self._load, nursery, task_status)  # a drain does not wait for it
                report = await self.shutdown.run(connections)
            await self.acceptor.disconnected()
            report()
            await self.supervisor.stop()

    async def _load(self, nursery: trio.Nursery, task_status: trio.TaskStatus[None]) -> None:
        await nursery.start(self.supervisor.run)
        task_status.started()

    def _planes(self) -> Iterator[AbstractAsyncContextManager[None]]:
        if self.acceptor.handed:  # the parent that accepts has the planes
            return
        # a gateway without planes does not load their modules
        if has_plane(self.config.operator):
            from gateway.operator.plane import operating

            yield operating(self)
        if self.config.metrics.port >= 0:
            from gateway.operator.plane import telling_metrics

            yield telling_metrics(self)

    def _escalate(self, name: str, reason: str) -> None:
        if not self._given_up and not self.shutdown.begun:
            setting = f"models.{name}.restart.escalate"
            self._given_up = f"model {name!r} was given up ({reason}), and nothing goes on without it ({setting})"
            log.critical("a model was given up: draining", extra={"model": name, "reason": reason, "setting": setting})
            self.begin_drain()

    async def serve_stream(self, stream: trio.abc.Stream) -> None:
        """Serves one connection that the embedder accepted (and decrypted) itself; closes the stream at its end.
        `serve` must be running: it owns the models and the timers, and when it ends, so does this. Models run in its
        tasks: one that is cancelled with the connection may still be cleaning up there when this returns."""
        transport = StreamTransport(stream)
        try:
            await self.acceptor.serve_transport(transport)
        finally:
            await transport.aclose()

    async def serve_asgi(self, scope: Scope, receive: Receive, send: Send, *, by_operator: bool = False) -> None:
        """Serves one call that an ASGI server has accepted, HTTP or WebSocket, for `gateway.asgi.ASGIApp`. `serve` must be
        running; where it is not, the answer is 503. `by_operator`: whoever calls this has checked who asks, and neither a
        key nor a signature is looked for."""
        await self.acceptor.serve_call(scope, receive, send, by_operator=by_operator)

    async def listening(self) -> None:
        """Returns when `serve` has opened its ports, while the models may still be loading."""
        await self._listening.wait()

    @property
    def over(self) -> bool:
        """True if `serve` has ended."""
        return self._over.is_set()

    async def stopped(self) -> None:
        """Returns when `serve` has ended."""
        await self._over.wait()

    # -- the end -------------------------------------------------------------------------------------------------------

    async def drain(self) -> DrainReport:
        """Stops serving with honesty: readiness off, listeners closed after `drain.delay`, goodbye on every wire, live
        exchanges finish until `drain.timeout`, the rest get their ending. Returns when `serve` has."""
        self.begin_drain()
        await self._over.wait()
        assert self.shutdown.report is not None, "serve was cancelled"
        return self.shutdown.report

    def begin_drain(self, timeout: float | None = None) -> None:
        """Starts what `drain` waits for; live exchanges have `timeout` seconds, `drain.timeout` unless given. A later call
        can only shorten that."""
        self.shutdown.begin(timeout)

    def retire(self) -> None:
        """Drains where another process has taken this one's place: what is on its way is answered, not refused."""
        self.shutdown.retire()

    async def drain_begun(self) -> None:
        """Returns when a drain was asked for, by whomever."""
        await self.shutdown.wanted()

    def hurry(self) -> None:
        """During a drain: the deadline is now."""
        self.shutdown.hurry()

    async def reported(self) -> DrainReport:
        """Returns what became of every exchange in a drain as soon as that is known: the models are unloaded after it."""
        return await self.shutdown.reported()

    @property
    def draining(self) -> bool:
        """True if a drain has begun: new requests are refused."""
        return self.server.draining

    @property
    def drain_progress(self) -> DrainProgress | None:
        """How far a drain is that has begun; None before."""
        return self.shutdown.progress

    @property
    def drain_report(self) -> DrainReport | None:
        """How each exchange ended in the drain, once it is over; None before."""
        return self.shutdown.report

    # -- addresses -----------------------------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """The port of plain HTTP, once `serve` has started; 0: none. The first, of sockets that systemd has passed."""
        return self.acceptor.ports.port

    @property
    def tls_port(self) -> int:
        """The port of TLS, once `serve` has started; 0: none."""
        return self.acceptor.ports.tls_port

    @property
    def bidi_port(self) -> int:
        """The port of `listen.bidi_port`, once `serve` has started; 0: none."""
        return self.acceptor.ports.bidi_port

    @property
    def grpc_port(self) -> int:
        """The port of `listen.grpc_port`, once `serve` has started; 0: none."""
        return self.acceptor.ports.grpc_port

    @property
    def addresses(self) -> tuple[str, ...]:
        """All of where it listens then, such as `http://127.0.0.1:8080`, `https://[::1]:8443` and `unix:/run/served`."""
        return self.acceptor.ports.addresses

    @property
    def certificate(self) -> Certificate | None:
        """The certificate that new connections are shown; None where TLS is off, and before `serve`."""
        served = self.acceptor.certificate
        return None if served is None else served.certificate

    async def reload_certificate(self) -> Certificate:
        """Reads the files of `tls.cert`, `tls.key` and `tls.client_ca` again, and shows what they hold to every connection
        that begins from now on; those that are open go on as they are. `serve` does it by itself where the files have
        changed (`tls.reload_interval`).

        ConfigError says which file cannot be served, and why; then, and where this is cancelled, nothing has changed.
        ConfigError too where no TLS is served."""
        if self.acceptor.certificate is None:
            raise ConfigError("there is no certificate to reload: TLS is not served")
        return await self.acceptor.certificate.reload()

    # -- models --------------------------------------------------------------------------------------------------------

    @property
    def models(self) -> ModelsSnapshot:
        """The models in service and how each fares, now: a frozen snapshot."""
        return self.supervisor.models

    async def models_after(self, revision: int) -> ModelsSnapshot:
        """Waits until a model's state has changed, or a model has come or gone, after the snapshot of that revision, and
        returns a new snapshot. Changes in quick succession may be seen as one."""
        return await self.supervisor.models_after(revision)

    async def reload(self, name: str, spec: ModelSpec | None = None, *, patience: float | None = None) -> ModelStatus:
        """Loads a model anew while it serves: the same, whose `load()` is entered again, or `spec` in its place.

        The new version is loaded and warmed up beside the old one, which answers until then; the switch is one moment, and
        no call is refused for it. Calls that run, and those that wait for a slot, end on the old version, which has
        `patience` seconds for that (`repository.unload_timeout` unless given) before they are lost.

        A model of the repository is read from its folder anew. If the new version cannot be loaded, its error is raised and
        the old version serves on. NotFound where no such model is in service; Conflict for a `spec` in the place of a model
        of the repository, and while the model is being reloaded; InsufficientStorage where both versions declare more
        `memory` than there is (`repository.memory`); ValueError for a spec of another name or family. Cancelled before the
        switch, nothing has changed.
        """
        return await self.control.reload(name, spec, patience)

    def watch_file(self, file: WatchedFile, reload: Callable[[], Awaitable[None]]) -> None:
        """Looks at a file once a second while `serve` runs: `reload` is awaited when it has changed, and raises nothing."""
        self.timer.watch(file, reload)

    def each_second(self, look: Callable[[], Awaitable[None]]) -> None:
        """It is awaited once a second while `serve` runs, one at a time; what it raises is a line of the log."""
        self.timer.beside.append(look)

    @property
    def budget(self) -> ByteBudget:
        """The bytes that all clients together can make it hold."""
        return self.server.budget

    @property
    def unready(self) -> tuple[str, ...]:
        """Why health answers 503 now; empty where it does not. A model that is configured, and not `required = false`, is a
        reason while it loads, after it was given up or has ended, and from 5 s on after it has crashed; each reason names
        the model, and the exception that its code has raised. Models that clients load are none."""
        if self.acceptor.nursery is None and not self.draining:
            return ("nothing is served yet",)
        absent = [absent.full for absent in self.supervisor.unready]
        return ("draining", *absent) if self.draining else tuple(absent)

    @property
    def live(self) -> list[Exchange]:
        """The exchanges that have begun and not ended, the oldest first: to be looked at."""
        return sorted(self.observer.live, key=lambda exchange: exchange.started_at)

    @contextmanager
    def watched(self, ended: Callable[[Exchange], None]) -> Iterator[None]:
        """Inside the block `ended` is called with every exchange that has ended. It must be quick, and raise nothing."""
        self.observer.watchers.append(ended)
        try:
            yield
        finally:
            self.observer.watchers.remove(ended)

    @property
    def registry(self) -> CollectorRegistry:
        """The Prometheus registry of this gateway alone, for `gateway.telemetry.metrics.exposition` or any Prometheus
        exporter. Exchanges are counted from the first use of this attribute, so use it before `serve`. It must be
        collected on the event loop."""
        return self.metrics.registry

    @property
    def metrics(self) -> Metrics:
        """The source of `registry`: exchanges are counted from the first use of either."""
        if self._metrics is None:
            from gateway.telemetry.metrics import Metrics  # loaded only where it is used

            self._metrics = Metrics(
                self.server,
                self.supervisor,
                self.observer,
                arriving=self.acceptor.arriving,
                lag=self.timer.lag,
                blocks=self.timer.blocks,
                access=self.access,
            )
            self.server.exchange_closed = self._metrics.tallies.exchange_closed
        return self._metrics

    def counts(self) -> Counts:
        """Counts the live connections and exchanges, the slots and bytes in use, and the endings so far."""
        return Counts(
            connections=len(self.server.connections),
            exchanges=len(self.observer.live),
            endings={e.value: n for e, n in self.observer.endings.items()},
            bytes_reserved=self.server.budget.used,
            slots_in_use=sum(w.slots.in_use for w in self.supervisor.workers.values()),
        )
