"""The gateway: models behind listeners, as a library."""

from __future__ import annotations

import itertools
import logging
import random
import resource
import secrets
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, NoReturn, final
from uuid import uuid4

import trio

from gateway.catalog.factories import configured_specs
from gateway.catalog.limits import RepositoryLimits
from gateway.catalog.load_unload import ModelControl
from gateway.catalog.process_memory import resident_bytes
from gateway.catalog.repository import Repository
from gateway.catalog.warmup import answer_check
from gateway.config import Config
from gateway.config.agreement import exposed_plane, has_plane, missing_tls, shared_sockets
from gateway.config.problem import ConfigError
from gateway.config.properties import text_options
from gateway.core.connection import Connection, ConnectionWire
from gateway.core.credentials import Door
from gateway.core.exchange import Exchange
from gateway.core.memory import BodyPool
from gateway.core.route import Handler, Route, Row
from gateway.core.runner import Runner
from gateway.core.waiting import WaitedTransport
from gateway.dialects.routes import rows
from gateway.doorbell import Doorbell
from gateway.errors import (
    Conflict,
    Ending,
    GatewayError,
    InternalFailure,
    ModelGivenUp,
    NotFound,
    Overloaded,
    Refusal,
    TransportLost,
    Unavailable,
)
from gateway.histogram import Histogram
from gateway.net.certificate import Certificate
from gateway.net.listeners import Listener, Port, Rules, open_listeners
from gateway.net.proxies import TrustedProxies
from gateway.net.readiness import Poller, Watchable
from gateway.net.tls_reload import ServedCertificate
from gateway.net.tls_transport import TLSTransport
from gateway.net.transport import SocketTransport, StreamTransport, Transport
from gateway.serving.admission import Admission
from gateway.serving.drain import DrainReport, report_of
from gateway.serving.router import Router
from gateway.telemetry.loop_watch import Blocks, LoopWatch
from gateway.telemetry.observer import Counts, Observer, log_failure
from gateway.wires.asgi import ASGICall, Receive, Scope, Send, refuse_asgi
from gateway.wires.detect import sniff
from gateway.workers.snapshot import ModelsSnapshot, ModelStatus
from gateway.workers.supervisor import Supervisor
from models.adapt import spec_of
from models.spec import ModelSpec
from protocols.buffers import ByteBudget
from protocols.date_field import DateField
from protocols.proxy import ProxyReceiver

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

    from gateway.telemetry.metrics import Metrics
    from gateway.telemetry.spans import Spans

log = logging.getLogger("gateway")

_TICK = 1.0
_LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_TURN_SECONDS = 0.005  # seconds of connections' turns before tasks have theirs
_LOOK = 32  # turns between two looks at the clock
# What an interrupted exchange has for its goodbye, and a cancelled model for its clean-up, before the server stops.
_GRACE = 5.0


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
        chance: Callable[[], float] = random.random,
        tracer_provider: TracerProvider | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`chance` gives numbers from 0 to 1, for the jitter of restarts: a seeded one makes them repeatable. `wall_clock`
        gives the seconds since 1970 that the Date of answers is made of.
        `tracer_provider` is OpenTelemetry's: exchanges then have spans. Without one they have them where `tracing.enabled`
        is set, by the provider that the program has made the global one."""
        self.config = config or Config()
        self.limits = self.config.limits
        self.budget = ByteBudget(self.limits.total_bytes)
        self._refuse_above = self.limits.memory_refuse * self.limits.total_bytes // 100
        self.door = Door(passes_credentials=self.config.access.pass_credentials)
        self.pool = BodyPool(self.limits.body_pool)
        self.proxies = self._trusted_proxies()
        self.scratch = memoryview(bytearray(64 * 1024))
        self.port = self.tls_port = self.bidi_port = 0
        """The ports it listens at, once `serve` has started; 0: none. The first, of sockets that systemd has passed."""
        self.addresses: tuple[str, ...] = ()
        """All of where it listens then, such as `http://127.0.0.1:8080`, `https://[::1]:8443` and `unix:/run/served`."""
        self.operator_port = 0
        """Where the operator plane listens; 0 where it does not, also while its port is somebody else's."""
        for problem in (*exposed_plane(self.config), *missing_tls(self.config), *shared_sockets(self.config)):
            raise ConfigError(problem)
        specs: list[ModelSpec] = [*configured_specs(self.config), *(spec_of(m) for m in models)]
        for spec in specs:
            try:
                text_options(self.config.lmi, spec.options)
            except ConfigError as e:
                raise ConfigError(f"model {spec.name!r}: {e}") from None
        spans = self._make_spans(tracer_provider)
        self.supervisor = Supervisor(specs, escalated=self._escalate, chance=chance, spans=spans, check=answer_check)
        self._given_up = ""
        chosen = self.config.repository
        limits = RepositoryLimits(
            roots=chosen.roots,
            code_roots=chosen.code,
            memory=chosen.memory,
            models=chosen.models,
            unload_timeout=chosen.unload_timeout,
        )
        self.repository = Repository(self.supervisor, limits, resident=lambda: resident_bytes() - self.budget.used)
        self.control = ModelControl(self.supervisor, self.repository, limits)
        self._admission = Admission(self.config.admission)
        self._observer = Observer()
        self._connections: set[Connection | ASGICall] = set()
        self._arriving: set[trio.CancelScope] = set()
        """One for each connection that has not said yet what it wants."""
        self._stop = trio.Event()
        self.draining = False
        self._drain_bell, self._hurrying = Doorbell(), False
        self._drain_timeout, self._patience = self.config.drain.timeout, trio.CancelScope()
        self._due: list[Connection] = []
        self._turn_bell = Doorbell()
        self.hub: Poller | None = None
        """Who tells connections what is ready; made by `serve` where it listens and nobody has chosen one before."""
        # what each exchange goes through is theirs, without a call of ours between
        work: Handler = self._work
        self.exchange_opened: Callable[[Exchange], None] = self._observer.opened
        self.exchange_closed: Callable[[Exchange], None] = self._observer.closed
        if spans is not None:
            self._observer.trace_fields = spans.fields
            work, self.exchange_opened, self.exchange_closed = spans.around(work, self.exchange_opened, self.exchange_closed)
        self._tasks = Runner(work, self._blame, self._conclude, self._write)
        self.run_exchange = self._tasks.start
        # letters and digits alone: a head takes them without a look
        self.new_id = map(f"{secrets.token_hex(4)}%d".__mod__, itertools.count(1)).__next__
        self.clock: Callable[[], float] = trio.current_time
        self._wall_clock, self.date = wall_clock, DateField()
        self._turned_away = 0
        self._lag = Histogram(_LAGS)
        """How late the loop came to the coarse timer."""
        self.blocks = Blocks()
        """Steps that kept the event loop from everything else."""
        self._metrics: Metrics | None = None
        self._report: DrainReport | None = None
        self._listening, self._reported, self._over = trio.Event(), trio.Event(), trio.Event()
        self._nursery: trio.Nursery | None = None
        self._tls: ServedCertificate | None = None
        routes = rows(self.config, self.supervisor, self.repository, self.control, draining=lambda: self.draining)
        self.router = Router(routes)

    def _trusted_proxies(self) -> TrustedProxies | None:
        try:
            return TrustedProxies(listed) if (listed := self.config.listen.trusted_proxies) else None
        except ValueError as e:
            raise ConfigError(f"listen.trusted_proxies: {e}") from None

    def _make_spans(self, provider: TracerProvider | None) -> Spans | None:
        if provider is None and not self.config.tracing.enabled:
            return None
        try:
            from opentelemetry.trace import get_tracer_provider

            from gateway.telemetry.spans import Spans
        except ModuleNotFoundError as e:
            raise ConfigError(f"tracing.enabled is true and {e.name} is not installed: pip install 'everywire[otel]'") from e
        return Spans(provider or get_tracer_provider(), lambda exchange: self.router.path_of(exchange))

    # -- what connections ask ----------------------------------------------------------------------------------------

    def _work(self, exchange: Exchange) -> Coroutine[Any, Any, None]:
        """What the exchange asks for, to be awaited. What may go wrong is for `_blame`."""
        route: Route | None = exchange.route
        if route is None:
            route = exchange.route = self._route_of(exchange)
        row, handler, arguments = route
        if self.draining or self.budget.used > self._refuse_above:
            self._turn_away(exchange, row)
        exchange.dialect, exchange.words = row.dialect, row.refuse
        if len(arguments) == 1:  # as most paths have: a call by name costs as much as ten of these
            (value,) = arguments.values()
            return handler(exchange, value)
        return handler(exchange, **arguments)

    def _route_of(self, exchange: Exchange) -> Route:
        route = self.router.find(exchange)
        try:
            return self._admission.asked(exchange, route)
        except GatewayError:
            self._refuse_as(exchange, route[0])
            raise

    def _refuse_as(self, exchange: Exchange, row: Row) -> None:
        """What goes wrong before the handler is asked is said in the words of its row."""
        exchange.words = row.refuse or self.router.refuse_under(exchange.path)

    def _blame(self, exchange: Exchange, error: Exception) -> GatewayError:
        """Whatever goes wrong becomes its one honest ending."""
        if isinstance(error, GatewayError):
            return error
        exchange.incident = uuid4().hex[:12]
        log.error("exchange failed", extra={"id": exchange.id, "incident": exchange.incident}, exc_info=error)
        return InternalFailure(f"internal error; incident {exchange.incident} in the server's log")

    def _conclude(self, exchange: Exchange, error: GatewayError | None) -> None:
        """Says what is still to be said: a client that has left or has its whole answer is told nothing."""
        if error is not None:
            log_failure(exchange, error)
        if exchange.gone or exchange.outbound.finishing is not None:
            return
        if error is not None and error.refusal is not None:
            self._observer.refused(error.refusal)
        try:
            exchange.answer_error(error or InternalFailure("the exchange ended without an answer"))
        except Exception:
            log.exception("an error could not be said", extra={"id": exchange.id})
            exchange.outbound.abort(Ending.MODEL_ERROR)

    def _turn_away(self, exchange: Exchange, row: Row) -> None:
        if row.always:
            return
        budget = self.budget
        self._refuse_as(exchange, row)
        if self.draining:
            self._turned_away += 1
            raise Unavailable("the server is shutting down; try another", refusal=Refusal.DRAINING)
        raise Overloaded(
            f"{budget.used} of {budget.limit} bytes are in use (limits.total_bytes): above "
            f"{self.limits.memory_refuse} percent (limits.memory_refuse) nothing new begins; try again later",
            refusal=Refusal.MEMORY,
        )

    def _shed(self) -> None:
        """Memory runs out: the exchange that holds most makes room for the others."""
        budget = self.budget
        if budget.used * 100 > self.limits.memory_reset * budget.limit and self._observer.live:
            largest = max(self._observer.live, key=lambda exchange: exchange.held)
            said = "the server is short of memory (limits.memory_reset); try again later"
            largest.interrupt(Overloaded(said, refusal=Refusal.SHED))

    # -- serving -------------------------------------------------------------------------------------------------------

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Loads the models, listens, and serves until `drain` or cancellation. Started once every model's first load
        is decided; listeners answer (with 503 where a model is needed) from before that. One call for a gateway.

        A model that is given up, and whose policy says `escalate`, begins a drain; ModelGivenUp is raised at its end."""
        self.clock = trio.lowlevel.current_clock().current_time
        self._tell_date()
        tls = self._tls = self._served_certificate()
        listeners = self._listen(tls)
        self._listening.set()
        try:
            async with self._operated():  # it is there before the first model is, and goes last
                await self._serve(listeners, tls, task_status)
        finally:
            for listener, _ in listeners:
                listener.close()
            if self.hub is not None:
                self.hub.close()
            self._over.set()
        if self._given_up:
            raise ModelGivenUp(self._given_up)

    async def _serve(self, listeners: Any, tls: ServedCertificate | None, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as connections:
                self._nursery = connections
                accepting = trio.CancelScope()
                connections.start_soon(self._accept_all, listeners, accepting)
                connections.start_soon(self._tick)
                if tls is not None and any(shown for _, shown in listeners):
                    connections.start_soon(tls.watch)
                connections.start_soon(self._turns)
                if self.hub is None and Poller.available and listeners:
                    self.hub = Poller()
                self._tasks.begin(connections, self.hub)
                nursery.start_soon(self._load, nursery, task_status)  # a drain does not wait for it
                await self._stop.wait()
                reported = await self._drain(listeners, accepting, connections)
            await self._disconnected()
            self._report = drained = reported()
            self._reported.set()
            counts = {"live": drained.live, "endings": drained.endings, "cut": len(drained.cut)}
            log.info("drained", extra={**counts, "refused": drained.refused, "seconds": round(drained.seconds, 3)})
            await self.supervisor.stop()

    def _operated(self) -> AbstractAsyncContextManager[None]:
        if not has_plane(self.config.operator):
            return nullcontext()
        from gateway.operator.plane import operating  # whoever has none needs nothing of it

        return operating(self)

    def _escalate(self, name: str, reason: str) -> None:
        if not self._given_up and not self._stop.is_set():
            setting = f"models.{name}.restart.escalate"
            self._given_up = f"model {name!r} was given up ({reason}), and nothing goes on without it ({setting})"
            log.critical("a model was given up: draining", extra={"model": name, "reason": reason, "setting": setting})
            self.begin_drain()

    async def _load(self, nursery: trio.Nursery, task_status: trio.TaskStatus[None]) -> None:
        await nursery.start(self.supervisor.run)
        task_status.started()

    def _served_certificate(self) -> ServedCertificate | None:
        tls = self.config.tls
        return ServedCertificate(tls) if tls.cert or tls.dev else None

    def _listen(self, tls: ServedCertificate | None) -> list[tuple[Listener, ServedCertificate | None]]:
        listen = self.config.listen
        ports = [
            Port(number=listen.port, setting="listen.port or --port"),
            Port(number=listen.bidi_port, setting="listen.bidi_port"),
            Port(number=listen.tls_port if tls is not None else -1, setting="listen.tls_port or --tls-port", tls=True),
        ]
        rules = Rules(backlog=listen.backlog, keepalive=listen.tcp_keepalive, unix_mode=int(listen.unix_mode, 8))
        opened = open_listeners(listen.host, [port for port in ports if port.number >= 0], rules)
        bidi = [listener for listener in opened if listener.setting == "listen.bidi_port"]
        self.bidi_port = next((listener.port for listener in bidi), 0)
        self.port = next(
            (listener.port for listener in opened if listener.port and not listener.tls and listener not in bidi), 0
        )
        self.tls_port = next((listener.port for listener in opened if listener.port and listener.tls), 0)
        self.addresses = tuple([listener.url for listener in opened])
        return [(listener, tls if listener.tls else None) for listener in opened]

    async def _accept_all(self, listeners: list[tuple[Listener, ServedCertificate | None]], scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                for listener, tls in listeners:
                    nursery.start_soon(self._accept, listener, tls)

    async def _accept(self, listener: Listener, tls: ServedCertificate | None) -> None:
        def serve(sock: socket.socket) -> None:
            assert self._nursery is not None
            self._nursery.start_soon(self._serve_socket, sock, tls and tls.context)

        most = self.limits.connections
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors != resource.RLIM_INFINITY:
            most = min(most, max(descriptors - self.limits.descriptors_reserved, 1))
        await listener.accept(serve, lambda: len(self._connections) + len(self._arriving) < most)

    async def _serve_socket(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        try:
            below = SocketTransport(sock, unsent=self.limits.unsent)
        except OSError:
            sock.close()
            return  # reset before it was served
        await self.serve_watchable(below, tls)

    async def serve_watchable(self, below: Watchable, tls: ssl.SSLContext | None = None) -> None:
        """Serves one connection, by this gateway's hub where it has one: then it returns when the connection has begun.
        Otherwise as `serve_transport`."""
        hub = self.hub
        if hub is None:
            await self.serve_transport(below, tls)
            return
        try:
            arrived = None if self._nursery is None else await self._arrive(below, tls)
            if arrived is None or self._nursery is None:  # the server may have ended meanwhile
                below.close()
                return
            transport, make_wire, received, proxies = arrived
            watched = hub.watch(below.fileno())
            connection = Connection(self, transport, make_wire, watched, proxies)
        except BaseException as e:
            below.close()
            if not isinstance(e, Exception):
                raise
            log.exception("connection failed", extra={"peer": below.peer})
            return
        self._connections.add(connection)
        connection.begin(received)
        try:
            watched.tell(connection)
        except OSError as e:  # the kernel has no room for one more
            connection.failed(e)

    async def serve_stream(self, stream: trio.abc.Stream) -> None:
        """Serves one connection that the embedder accepted (and decrypted) itself; closes the stream at its end.
        `serve` must be running: it owns the models and the timers, and when it ends, so does this. Models run in its
        tasks: one that is cancelled with the connection may still be cleaning up there when this returns."""
        transport = StreamTransport(stream)
        try:
            await self.serve_transport(transport, None)
        finally:
            await transport.aclose()

    async def serve_asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one call that an ASGI server has accepted, HTTP or WebSocket, for `gateway.asgi.ASGIApp`. `serve` must be
        running; where it is not, the answer is 503."""
        call = ASGICall(self, scope)
        if self._nursery is None:
            await refuse_asgi(scope, send)
            return
        self._connections.add(call)
        await call.run(receive, send)

    async def serve_transport(self, transport: Transport, tls: ssl.SSLContext | None = None) -> None:
        """Serves one connection over a transport of ours; closes it at its end. As `serve_stream`."""
        try:
            arrived = None if self._nursery is None else await self._arrive(transport, tls)
            if arrived is None or self._nursery is None:
                return
            transport, make_wire, received, proxies = arrived
            watch = WaitedTransport(transport)
            connection = Connection(self, transport, make_wire, watch, proxies)
            self._connections.add(connection)
            connection.begin(received)
            try:
                await watch.run(connection)
            finally:
                connection.lost()
        except Exception:
            log.exception("connection failed", extra={"peer": transport.peer})
        finally:
            try:
                transport.close()
            except Exception:
                log.exception("connection failed", extra={"peer": transport.peer})

    async def _arrive(
        self, transport: Transport, tls: ssl.SSLContext | None
    ) -> tuple[Transport, Callable[[Connection], ConnectionWire], bytes, TrustedProxies | None] | None:
        """A new connection's transport, its wire, the bytes read to find that out, and the proxies that may name clients in
        its requests; None if no connection comes about."""
        proxies = None if self.proxies is None or not self.proxies.includes(transport.peer) else self.proxies
        greeting, received = ProxyReceiver(self.limits.head), b""
        try:
            with trio.move_on_after(self.limits.head_timeout) as arrival:
                self._arriving.add(arrival)
                try:
                    if proxies is not None:
                        proxies = await proxies.greeted(transport, greeting)
                        received = greeting.rest
                    if tls is not None:
                        secure = TLSTransport(transport, tls, received=received)
                        received = b""
                        transport = secure
                        with trio.move_on_after(self.limits.tls_handshake_timeout) as handshake:
                            await secure.handshake()
                        if handshake.cancelled_caught:
                            raise TransportLost("the TLS handshake took too long (limits.tls_handshake_timeout)")
                    return transport, *await sniff(transport, received, secure=tls is not None), proxies
                finally:
                    self._arriving.remove(arrival)
                    self._drain_bell.ring()
            if greeting.begun and not self.draining:
                raise TransportLost("the PROXY header took too long (limits.head_timeout)")
        except TransportLost as e:
            # there is no exchange to end; but a client without our CA, or with TLS on the wrong port, leaves only this
            level = logging.DEBUG if e.left else logging.INFO
            log.log(level, "no connection came about", extra={"peer": transport.peer, "reason": str(e)})
        return None

    def connection_closed(self, connection: Connection | ASGICall) -> None:
        """Everything that it held is given back."""
        self._connections.discard(connection)
        self._drain_bell.ring()

    def _disconnect(self) -> None:
        """Ends what is still connected, at once."""
        for arrival in self._arriving:
            arrival.cancel()
        for connection in list(self._connections):
            connection.lost()

    async def _disconnected(self) -> None:
        """The same, and waits for it."""
        self._disconnect()
        while self._connections or self._arriving:
            await self._drain_bell.wait()

    def turn_soon(self, connection: Connection) -> None:
        """The connection has its turn with all others that are due by then: what became ready until then leaves together."""
        self._due.append(connection)
        if not self._tasks.leading:
            self._turn_bell.wake()

    def _write(self, begin: bool = True) -> bool:
        """The turns of those that are due, by the task that made them so; True where some are due by then. Those that are
        behind come after all others, one after the other until the time of a turn is over, and without `begin` not at
        all: only what they have received makes more work."""
        due = self._due
        if not due:
            return False
        self._due, late, number = [], list[Connection](), 0
        began = self.clock() if len(due) > _LOOK else 0.0
        for number, connection in enumerate(due, 1):
            if connection.behind:
                late.append(connection)
            else:
                connection.turn()
                if not number % _LOOK and self.clock() - began > _TURN_SECONDS:
                    break
        if late and begin:
            late = self._catch_up(late)
        rest = due[number:]
        if rest or late:
            self._due = rest + late + self._due
        return bool(self._due)

    def _catch_up(self, late: list[Connection]) -> list[Connection]:
        """Gives turns to connections that are behind; returns those that had none."""
        began = self.clock()
        for number, connection in enumerate(late, 1):
            connection.turn()
            if self.clock() - began > _TURN_SECONDS:
                return late[number:]
        return []

    async def _turns(self) -> None:
        """One task, woken once for all connections that have something put off: it writes for those whose transport is
        not full. Its end is theirs, also where an embedder's tasks would go on: nothing new can start."""
        try:
            while True:
                while not self._due:
                    await self._turn_bell.wait()
                if self._write():  # again already: they are not alone
                    await trio.lowlevel.checkpoint()
        finally:
            self._nursery = None
            self._disconnect()

    async def _tick(self) -> None:
        """The one coarse timer: every connection looks at its stamps once a second."""
        limit = self.limits.loop_block
        if not limit or hasattr(trio.lowlevel.current_clock(), "jump"):  # a clock of tests, which time does not move
            await self._tick_by(trio.sleep_until)
        watch = LoopWatch(limit, self._whose, self.blocks)
        with watch.watching():
            await self._tick_by(watch.beat_until)

    def _whose(self, task: trio.lowlevel.Task) -> tuple[str, str]:
        """The model that a task works for, in a call, in its load or beside it, and the exchange's id. Called by the thread
        that watches the loop."""
        above: trio.lowlevel.Task | None = task
        workers = {worker.task: name for name, worker in list(self.supervisor.workers.items())}
        while above is not None:
            if (exchange := self._tasks.exchange_of(above)) is not None:
                return exchange.model, exchange.id
            if name := workers.get(above):
                return name, ""
            above = None if above.parent_nursery is None else above.parent_nursery.parent_task
        return "", ""

    async def _tick_by(self, sleep_until: Callable[[float], Awaitable[None]]) -> NoReturn:
        """The timer's turns: `sleep_until` is what it sleeps by."""
        while True:
            due = trio.current_time() + _TICK
            await sleep_until(due)
            now = trio.current_time()
            self._lag.observe(now - due)
            for connection in list(self._connections):
                connection.tick(now)
            for worker in self.supervisor.workers.values():
                worker.stuck.tick(now)
            self._tell_date()
            self._shed()
            self.pool.tick(now)

    def _tell_date(self) -> None:
        self.date.tell(formatdate(self._wall_clock(), usegmt=True).encode())

    # -- the end -------------------------------------------------------------------------------------------------------

    async def drain(self) -> DrainReport:
        """Stops serving with honesty: readiness off, listeners closed after `drain.delay`, goodbye on every wire, live
        exchanges finish until `drain.timeout`, the rest get their ending. Returns when `serve` has."""
        self.begin_drain()
        await self._over.wait()
        assert self._report is not None, "serve was cancelled"
        return self._report

    def begin_drain(self, timeout: float | None = None) -> None:
        """Starts what `drain` waits for; live exchanges have `timeout` seconds, `drain.timeout` unless given. A later call
        can only shorten that."""
        if timeout is not None:
            begun = self._stop.is_set()
            self._drain_timeout = min(self._drain_timeout, timeout) if begun else timeout
            self._patience.deadline = min(self._patience.deadline, trio.current_time() + timeout)
        self._stop.set()

    async def reported(self) -> DrainReport:
        """Returns what became of every exchange in a drain as soon as that is known: the models are unloaded after it."""
        await self._reported.wait()
        assert self._report is not None
        return self._report

    async def listening(self) -> None:
        """Returns when `serve` has opened its ports, while the models may still be loading."""
        await self._listening.wait()

    async def stopped(self) -> None:
        """Returns when `serve` has ended."""
        await self._over.wait()

    def hurry(self) -> None:
        """During a drain: the deadline is now."""
        self._hurrying = True
        self._drain_bell.ring()

    async def _drain(
        self, listeners: Any, accepting: trio.CancelScope, connections: trio.Nursery
    ) -> Callable[[], DrainReport]:
        """Returns what makes the report, when every connection is closed and so every exchange has its ending."""
        drain, began = self.config.drain, trio.current_time()
        self.draining = True
        live = list(self._observer.live)
        log.info("draining", extra={"live": len(live), "delay": drain.delay, "timeout": self._drain_timeout})
        with trio.move_on_after(drain.delay):
            while not self._hurrying:
                await self._drain_bell.wait()
        accepting.cancel()
        for listener, _ in listeners:
            listener.close()
        for arrival in self._arriving:
            arrival.cancel()
        for connection in list(self._connections):
            connection.drain()
        self._patience.deadline = trio.current_time() + self._drain_timeout
        with self._patience:
            await self._quiet(or_hurry=True)
        deadline, late = trio.current_time(), list(self._observer.live)
        for connection in list(self._connections):
            connection.drain_now()
        with trio.move_on_after(_GRACE):
            await self._quiet(or_hurry=False)
        connections.cancel_scope.cancel()

        def reported() -> DrainReport:
            lasted = trio.current_time() - began
            return report_of(live, late, deadline=deadline, seconds=lasted, refused=self._turned_away)

        return reported

    @property
    def drain_report(self) -> DrainReport | None:
        """What became of every exchange in the drain, once it is over; None before."""
        return self._report

    async def _quiet(self, *, or_hurry: bool) -> None:
        """Returns when no connection is left: all that was to be said is written."""
        while (self._connections or self._arriving) and not (or_hurry and self._hurrying):
            await self._drain_bell.wait()

    # -- what is there -------------------------------------------------------------------------------------------------

    @property
    def models(self) -> ModelsSnapshot:
        """The models in service and how each fares, now: a frozen snapshot."""
        return self.supervisor.models

    async def models_after(self, revision: int) -> ModelsSnapshot:
        """The same, as soon as a model's state has changed, or one has come or gone, after the snapshot of that revision.
        Changes in quick succession may be seen as one."""
        return await self.supervisor.models_after(revision)

    async def reload(self, name: str, spec: ModelSpec | None = None, *, patience: float | None = None) -> ModelStatus:
        """Loads a model anew while it serves: the same, whose `load()` is entered again, or `spec` in its place.

        The new version is loaded and warmed up beside the old one, which answers until then; the switch is one moment, and
        no call is refused for it. Calls that run, and those that wait for a slot, end on the old version, which has
        `patience` seconds for that (`repository.unload_timeout` unless given) before they are lost.

        One of the repository is read from its folder anew. Where the new version cannot be loaded, what it raised comes out
        and the old one serves on. NotFound where no such model is in service; Conflict for a spec in the place of one of the
        repository, and while it is being reloaded; InsufficientStorage where
        both declare more `memory` than there is (`repository.memory`); ValueError for a spec of another name or family.
        Cancelled before the switch, nothing has changed.
        """
        old = self.supervisor.workers.get(name)
        if old is None:
            raise NotFound(f"no model {name[:100]!r} is in service")
        if name in self.repository.names:
            if spec is not None:
                raise Conflict(f"model {name[:100]!r} is of the repository: its folder says what it is, and no other spec")
            await self.repository.reload(name, shown=f"the folder of model {name[:100]!r}", patience=patience)
            return self.models[name]
        spec = old.spec if spec is None else spec
        if spec.name != name or spec.family is not old.spec.family:
            raise ValueError(
                f"model {name!r} of {old.spec.family.value} is replaced by one of the same name and family, "
                f"not by {spec.name!r} of {spec.family.value}"
            )
        text_options(self.config.lmi, spec.options)
        self.repository.check_room(name, spec.memory)
        await self.supervisor.reload(spec, self.config.repository.unload_timeout if patience is None else patience)
        log.info("model reloaded", extra={"model": name, "version": spec.version})
        return self.models[name]

    @property
    def certificate(self) -> Certificate | None:
        """The certificate that new connections are shown; None where TLS is off, and before `serve`."""
        return None if self._tls is None else self._tls.certificate

    async def reload_certificate(self) -> Certificate:
        """Reads the files of `tls.cert`, `tls.key` and `tls.client_ca` again, and shows what they hold to every connection
        that begins from now on; those that are open go on as they are. `serve` does it by itself where the files have
        changed (`tls.reload_interval`).

        ConfigError says which file cannot be served, and why; then, and where this is cancelled, nothing has changed.
        ConfigError too where no TLS is served."""
        if self._tls is None:
            raise ConfigError("there is no certificate to reload: TLS is not served")
        return await self._tls.reload()

    @property
    def unready(self) -> tuple[str, ...]:
        """Why health answers 503 now; empty where it does not. A model that is configured, and not `required = false`, is a
        reason while it loads, after it was given up or has ended, and from 5 s on after it has crashed; each reason names
        the model, and the exception that its code has raised. Models that clients load are none."""
        if self._nursery is None and not self.draining:
            return ("nothing is served yet",)
        absent = [absent.full for absent in self.supervisor.unready]
        return ("draining", *absent) if self.draining else tuple(absent)

    @property
    def live(self) -> list[Exchange]:
        """The exchanges that have begun and not ended, the oldest first: to be looked at."""
        return sorted(self._observer.live, key=lambda exchange: exchange.started_at)

    @contextmanager
    def watched(self, ended: Callable[[Exchange], None]) -> Iterator[None]:
        """Inside the block `ended` is called with every exchange that has ended. It must be quick, and raise nothing."""
        self._observer.watchers.append(ended)
        try:
            yield
        finally:
            self._observer.watchers.remove(ended)

    @property
    def registry(self) -> CollectorRegistry:
        """What this gateway counts and holds, as metrics of Prometheus, for `gateway.telemetry.metrics.exposition` or any
        exporter of theirs: a registry of its own. Exchanges are counted from when it is first asked for, so ask before
        `serve`; to be collected on the event loop."""
        if self._metrics is None:
            from gateway.telemetry.metrics import Metrics  # who does not ask does not load it

            self._metrics = Metrics(self, self._observer, self._connections, self._arriving, self._lag)
            self.exchange_closed = self._metrics.exchange_closed
        return self._metrics.registry

    def counts(self) -> Counts:
        """What is live now, and how exchanges have ended so far."""
        return Counts(
            connections=len(self._connections),
            exchanges=len(self._observer.live),
            endings={e.value: n for e, n in self._observer.endings.items()},
            bytes_reserved=self.budget.used,
            slots_in_use=sum(w.slots.in_use for w in self.supervisor.workers.values()),
        )
