"""The gateway as a library: serves models on its listeners."""

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
from gateway.dialects.answers import EventStreams
from gateway.dialects.routes import rows
from gateway.dialects.silence import Silence
from gateway.errors import (
    ModelGivenUp,
)
from gateway.net.certificate import Certificate
from gateway.net.tables import shrink, shrink_tables_of_trio
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

    `models` are values that `models.adapt.spec_of` takes (functions, generators, ModelSpec), in addition to the models of
    `config`. `serve` returns after `drain`. Cancelling it ends every exchange at once. A gateway sets no signal handler,
    no logging and no global state: an embedder can have any number of gateways, with one `serve` for each.
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
        """`ports` are a parent's, which hands over the connections that it accepts (`gateway.fronts`). By default the
        gateway opens the ports of `config`; ConfigError then if `listen.processes` is not 1. `processes` describes the
        models that run in processes, if a parent has those.
        `chance` returns numbers from 0 to 1, for the jitter of restarts, of the age of connections and of Retry-After. A
        seeded one makes the jitter repeatable. `wall_clock` returns seconds since 1970, for the Date field among others.
        With a `tracer_provider`, of OpenTelemetry, exchanges have spans. Without one they have spans if `tracing.enabled`
        is set, from the process's global provider. ConfigError for settings that do not fit together."""
        config = self.config = config or Config()
        self.limits = config.limits
        self.observer = Observer(config.log.access)
        server = self.server = Server(config, self.observer.opened, self.observer.closed, chance)
        self.operator_port = 0
        """The port of the operator plane; 0: it does not listen, or another program has the port."""
        self.metrics_port = 0
        """The port of `metrics.port`; 0: it does not listen, or another program has the port."""
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
        streams = EventStreams()
        routes = rows(config, self.supervisor, self.repository, self.control, streams, draining=lambda: server.draining)
        self.router = Router(routes)
        self.access = ClientAccess(config, server, wall_clock)
        server.beside = self.access.beside
        server.exchange_closed = self.access.around(server.exchange_closed)
        self.dispatcher = Dispatcher(server, self.router, self.observer, self.access, self.supervisor.explain)
        # exchanges call these directly, without a method of this class in between
        work: Handler = self.dispatcher.work
        if spans is not None:
            self.observer.trace_fields = spans.fields
            traced = spans.around(work, server.exchange_opened, server.exchange_closed)
            work, server.exchange_opened, server.exchange_closed = traced
        server.run_by(Runner(work, self.dispatcher.blame, self.dispatcher.conclude))
        self.acceptor = Acceptor(server, ports)
        self.timer = CoarseTimer(server, self.observer, self.supervisor, wall_clock)
        self.timer.looked.append(self.access.tick)
        self.timer.finer = Silence(streams, config.sse.silence)
        if config.metrics.emf:
            from gateway.telemetry.embedded_metrics import EmbeddedMetrics  # imported only if used

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
            from gateway.telemetry.span_export import INSTALL

            raise ConfigError(f"tracing.enabled is true and {e.name} is not installed: {INSTALL}") from e
        provider = provider or get_tracer_provider()
        return Spans(
            provider, lambda exchange: self.router.path_of(exchange), lambda exchange: self.router.is_health(exchange)
        )

    # -- serving -------------------------------------------------------------------------------------------------------

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Loads the models, listens, and serves until `drain` or cancellation. `task_status` is started once every model's
        first load has succeeded or failed. Listeners answer before that, with 503 for models. Call it once for a gateway.

        If a model with the restart policy `escalate` is given up, a drain begins, and ModelGivenUp is raised at its end."""
        self.server.begin()
        self.timer.tell_date()
        self.acceptor.listen()
        self._listening.set()
        try:
            async with AsyncExitStack() as planes:  # the planes open before the first model loads, and close last
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
                nursery.start_soon(self._load, nursery, task_status)  # a drain does not wait for loads
                report = await self.shutdown.run(connections)
            await self.acceptor.disconnected()
            report()
            await self.supervisor.stop()

    async def _load(self, nursery: trio.Nursery, task_status: trio.TaskStatus[None]) -> None:
        await nursery.start(self.supervisor.run)
        task_status.started()

    def _planes(self) -> Iterator[AbstractAsyncContextManager[None]]:
        if self.acceptor.handed:  # the parent, which hands connections over, has the planes
            return
        # imported only if used
        if has_plane(self.config.operator):
            from gateway.operator.plane import operating

            yield operating(self)
        if self.config.metrics.port >= 0:
            from gateway.operator.plane import telling_metrics

            yield telling_metrics(self)

    def _escalate(self, name: str, reason: str) -> None:
        if not self._given_up and not self.shutdown.begun:
            setting = f"models.{name}.restart.escalate"
            self._given_up = f"model {name!r} was given up ({reason}), which ends the gateway ({setting})"
            log.critical("a model was given up: draining", extra={"model": name, "reason": reason, "setting": setting})
            self.begin_drain()

    async def serve_stream(self, stream: trio.abc.Stream) -> None:
        """Serves one connection that the embedder has accepted (and decrypted) itself. Closes the stream at its end.
        `serve` must be running, because models and timers run there; when `serve` ends, this ends too. A model that is
        cancelled with the connection may still be cleaning up when this returns."""
        transport = StreamTransport(stream)
        try:
            await self.acceptor.serve_transport(transport)
        finally:
            await transport.aclose()

    async def serve_asgi(self, scope: Scope, receive: Receive, send: Send, *, by_operator: bool = False) -> None:
        """Serves one HTTP or WebSocket call of an ASGI server, for `gateway.asgi.ASGIApp`. If `serve` is not running, the
        answer is 503. `by_operator`: the caller has authenticated the request, so no key or signature is needed."""
        await self.acceptor.serve_call(scope, receive, send, by_operator=by_operator)

    async def listening(self) -> None:
        """Returns when `serve` has opened its ports. The models may still be loading then."""
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
        """Shuts down in order. Readiness goes off, listeners close after `drain.delay`, and clients are told on every wire.
        Live exchanges may finish until `drain.timeout`; the rest are ended with an error. Returns when `serve` has ended."""
        self.begin_drain()
        await self._over.wait()
        assert self.shutdown.report is not None, "serve was cancelled"
        return self.shutdown.report

    def begin_drain(self, timeout: float | None = None) -> None:
        """Starts a drain without waiting for it. Live exchanges have `timeout` seconds, by default `drain.timeout`. A later
        call can only shorten that."""
        self.shutdown.begin(timeout)

    def retire(self) -> None:
        """Drains after another process has replaced this one: requests under way are answered, not refused."""
        self.shutdown.retire()

    async def drain_begun(self) -> None:
        """Returns when a drain has been requested."""
        await self.shutdown.wanted()

    def hurry(self) -> None:
        """Moves the deadline of a drain to now."""
        self.shutdown.hurry()

    async def reported(self) -> DrainReport:
        """Returns the report of a drain as soon as every exchange has ended. The models are unloaded after that."""
        return await self.shutdown.reported()

    @property
    def draining(self) -> bool:
        """True if a drain has begun: new requests are refused."""
        return self.server.draining

    @property
    def drain_progress(self) -> DrainProgress | None:
        """The progress of a drain; None before one has begun."""
        return self.shutdown.progress

    @property
    def drain_report(self) -> DrainReport | None:
        """The report of the drain: how each exchange ended. None before the drain is over."""
        return self.shutdown.report

    # -- addresses and certificate -------------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """The port of HTTP without TLS, once `serve` has started; 0: none. The first, if systemd has passed several."""
        return self.acceptor.ports.port

    @property
    def tls_port(self) -> int:
        """The port of TLS, as `port`."""
        return self.acceptor.ports.tls_port

    @property
    def bidi_port(self) -> int:
        """The port of `listen.bidi_port`, as `port`."""
        return self.acceptor.ports.bidi_port

    @property
    def grpc_port(self) -> int:
        """The port of `listen.grpc_port`, as `port`."""
        return self.acceptor.ports.grpc_port

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses that it listens on, such as `http://127.0.0.1:8080`, `https://[::1]:8443` and `unix:/run/served`.
        Empty before `serve`."""
        return self.acceptor.ports.addresses

    @property
    def certificate(self) -> Certificate | None:
        """The certificate that new connections are shown; None if TLS is off, and before `serve`."""
        served = self.acceptor.certificate
        return None if served is None else served.certificate

    async def reload_certificate(self) -> Certificate:
        """Reads the files of `tls.cert`, `tls.key` and `tls.client_ca` again, for every connection that begins from now on.
        Open connections keep theirs. `serve` does this itself when the files have changed (`tls.reload_interval`).

        ConfigError says which file cannot be served, and why, or that TLS is off. Then, and if this is cancelled, nothing
        has changed."""
        if self.acceptor.certificate is None:
            raise ConfigError("there is no certificate to reload: TLS is not served")
        return await self.acceptor.certificate.reload()

    # -- models, exchanges and metrics ---------------------------------------------------------------------------------

    @property
    def models(self) -> ModelsSnapshot:
        """A frozen snapshot of the models in service and their states."""
        return self.supervisor.models

    async def models_after(self, revision: int) -> ModelsSnapshot:
        """Returns a snapshot once models have changed since the snapshot of that revision: a state, or a model added or
        removed. Quick changes may be seen as one."""
        return await self.supervisor.models_after(revision)

    async def reload(self, name: str, spec: ModelSpec | None = None, *, patience: float | None = None) -> ModelStatus:
        """Reloads a model while it serves: enters its `load()` again, or loads `spec` in its place.

        The new version is loaded and warmed up beside the old one, which answers until then. The switch is atomic, and no
        call is refused for it. Calls that run or wait for a slot end on the old version. They have `patience` seconds, by
        default `repository.unload_timeout`, before they are lost.

        A model of the repository is read from its folder again. If the new version cannot be loaded, its exception is
        raised and the old one keeps serving. NotFound if no such model is in service. Conflict for a `spec` in place of a
        model of the repository, and while the model is being reloaded. InsufficientStorage if both versions declare more
        `memory` than there is (`repository.memory`). ValueError for a spec of another name or family. If this is cancelled
        before the switch, nothing has changed.
        """
        return await self.control.reload(name, spec, patience)

    def watch_file(self, file: WatchedFile, reload: Callable[[], Awaitable[None]]) -> None:
        """Checks a file once a second while `serve` runs, and awaits `reload` if it has changed. `reload` may not raise."""
        self.timer.watch(file, reload)

    def each_second(self, look: Callable[[], Awaitable[None]]) -> None:
        """Awaits `look` once a second while `serve` runs, one at a time. Its exceptions are logged."""
        self.timer.beside.append(look)

    @property
    def budget(self) -> ByteBudget:
        """The budget of bytes that all clients together can make the gateway hold."""
        return self.server.budget

    @property
    def unready(self) -> tuple[str, ...]:
        """The reasons for which health answers 503 now; empty if it answers 200. A configured model, unless it has
        `required = false`, is a reason while it loads, after it was given up or has ended, and from 5 s after a crash on.
        Each reason names the model and the exception that its code has raised. Models that clients load never count."""
        if self.acceptor.nursery is None and not self.draining:
            return ("nothing is served yet",)
        absent = [absent.full for absent in self.supervisor.unready]
        return ("draining", *absent) if self.draining else tuple(absent)

    def rest(self) -> None:
        """Gives back the room of its tables that a crowd has needed and that is empty now. Call it when there is little to
        do, on the event loop."""
        shrink(self.server.connections)
        shrink(self.observer.live)
        shrink(self.acceptor.arriving)
        self.acceptor.handshakes.rest()
        self.server.runner.rest()
        self.server.pool.rest()
        for worker in self.supervisor.workers.values():
            for callers in (worker.slots.live, worker.slots.waiting):
                shrink(callers)
            shrink(worker.slots.lingering)
        if self._metrics is not None:
            self._metrics.tallies.rest()
        if self.acceptor.poller is not None:
            self.acceptor.poller.rest()
        if self.acceptor.nursery is not None:
            shrink_tables_of_trio(self.acceptor.nursery)

    @property
    def live(self) -> list[Exchange]:
        """The exchanges that have begun and not ended, the oldest first. Callers must not change them."""
        return sorted(self.observer.live, key=lambda exchange: exchange.started_at)

    @contextmanager
    def watched(self, ended: Callable[[Exchange], None]) -> Iterator[None]:
        """Calls `ended` with each exchange that ends inside the block. `ended` must be quick, and raise nothing."""
        self.observer.watchers.append(ended)
        try:
            yield
        finally:
            self.observer.watchers.remove(ended)

    @property
    def registry(self) -> CollectorRegistry:
        """The Prometheus registry of this gateway, for `gateway.telemetry.metrics.exposition` or any Prometheus exporter.
        Exchanges are counted from the first use of this property on: use it before `serve`. It must be collected on the
        event loop."""
        return self.metrics.registry

    @property
    def metrics(self) -> Metrics:
        """The collector behind `registry`. Exchanges are counted from the first use of either property on."""
        if self._metrics is None:
            from gateway.telemetry.metrics import Metrics  # imported only if used

            self._metrics = Metrics(
                self.server,
                self.supervisor,
                self.observer,
                arriving=self.acceptor.arriving,
                lag=self.timer.lag,
                starved=self.timer.starved,
                blocks=self.timer.blocks,
                stalls=self.timer.stalls,
                access=self.access,
            )
            self.server.exchange_closed = self._metrics.tallies.exchange_closed
        return self._metrics

    def counts(self) -> Counts:
        """Counts live exchanges and connections, and the endings so far."""
        return Counts(
            connections=len(self.server.connections),
            exchanges=len(self.observer.live),
            endings={e.value: n for e, n in self.observer.endings.items()},
            bytes_reserved=self.server.budget.used,
            slots_in_use=sum(w.slots.in_use for w in self.supervisor.workers.values()),
        )
