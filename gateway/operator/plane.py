"""The listeners of the operator plane and of the metrics, served by hypercorn. A failure ends one connection alone."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, final

import trio
from hypercorn.config import Config as ServerConfig
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.addresses import UNIX, written_ip
from gateway.config import LimitsConfig, MetricsConfig, OperatorConfig
from gateway.doorbell import Doorbell
from gateway.hypercorn import Connection
from gateway.net.listeners import Listener, Port, Rules, open_listeners
from gateway.operator.access import Access
from gateway.operator.answers import Answers, GatewayAnswers
from gateway.operator.app import app_of, metrics_app
from gateway.operator.operated import Operated

log = logging.getLogger("gateway.operator")

_CONNECTIONS = 100  # at once: operators, scrapers and probes
_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds between attempts to listen
_LONGEST = 2**31 - 1  # milliseconds, of the option
_GRACE = 2.0  # seconds that answers under way have at the end
_PIECE = 32 * 1024  # bytes of a body, of which a client has to take some within `limits.write_stall`


def operating(gateway: Operated) -> AbstractAsyncContextManager[None]:
    """Offers `operator_app` at `operator.host` and `operator.port` for the length of the block; answers under way have 2
    seconds more. Invalid tokens raise ConfigError. Nothing else is raised: a listener that cannot listen logs that and tries
    again."""
    return operating_by(GatewayAnswers(gateway))


def operating_by(answers: Answers) -> AbstractAsyncContextManager[None]:
    """Offers the plane with the answers of one gateway or of several."""
    site, chosen = answers.place, answers.place.config.operator

    def listens(port: int) -> None:
        site.operator_port = port

    return _offered("operator plane", "operator", answers, app_of, chosen, int(chosen.unix_mode, 8), listens)


def telling_metrics(gateway: Operated) -> AbstractAsyncContextManager[None]:
    """Offers `metrics_app` at `metrics.host` and `metrics.port`, as `operating` does the plane."""
    return telling_metrics_by(GatewayAnswers(gateway))


def telling_metrics_by(answers: Answers) -> AbstractAsyncContextManager[None]:
    """Offers the metrics with the answers of one gateway or of several."""
    site, chosen = answers.place, answers.place.config.metrics

    def listens(port: int) -> None:
        site.metrics_port = port

    return _offered("metrics listener", "metrics", answers, metrics_app, chosen, 0, listens)


def _offered(
    name: str,
    section: str,
    answers: Answers,
    app: Callable[[Answers, Access], ASGIApp],
    chosen: OperatorConfig | MetricsConfig,
    unix_mode: int,
    listens: Callable[[int], None],
) -> AbstractAsyncContextManager[None]:
    access = Access(chosen)
    place = _Place(
        name=name,
        section=section,
        host=chosen.host,
        port=chosen.port,
        unix_mode=unix_mode,
        demands_token=access.demands_token,
        listens=listens,
    )
    return _running(_Plane(place, app(answers, access), answers.place.limits))


@asynccontextmanager
async def _running(plane: _Plane) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(plane.run)
        yield
        await plane.end()
        nursery.cancel_scope.cancel()


def _impatient(app: ASGIApp, stall: float) -> ASGIApp:
    """The application with a limit on clients that open no HTTP/2 window for `stall` seconds: their calls end. The kernel
    sees such clients as readers, and nothing else would end them. 0: no limit."""

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["http_version"] != "2" or not stall:
            await app(scope, receive, send)
            return
        with trio.CancelScope() as patience:

            async def within(message: Message) -> None:
                patience.deadline = trio.current_time() + stall
                await send(message)
                patience.deadline = math.inf

            async def say(message: Message) -> None:
                body = message.get("body", b"")
                while len(body) > _PIECE:
                    await within({**message, "body": body[:_PIECE], "more_body": True})
                    body = body[_PIECE:]
                await within({**message, "body": body} if "body" in message else message)

            await app(scope, receive, say)
        if patience.cancelled_caught:
            peer = written_ip(*scope["client"]) if scope["client"] else UNIX
            log.info("write stalled", extra={"peer": peer, "seconds": stall, "setting": "limits.write_stall"})

    return told


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The address of a plane, and its name in the log."""

    name: str
    section: str
    host: str | tuple[str, ...]
    port: int
    unix_mode: int
    demands_token: bool
    listens: Callable[[int], None]
    """Called with the port when it listens, and with 0 when it does not."""


@final
class _Plane:
    """Listens, and keeps its connections.

    Each is a connection of `gateway.hypercorn`, which keeps its failures. The plane accepts connections itself: it can try
    a taken port again, count connections, and at the end close the sockets of readers that have stopped.
    """

    def __init__(self, place: _Place, application: ASGIApp, limits: LimitsConfig) -> None:
        self._place, self._stall = place, limits.write_stall
        self._server = ServerConfig()
        self._server.errorlog = log
        self._server.include_server_header = False
        # hypercorn and starlette name the types of ASGI each in their own words
        app: Any = _impatient(application, limits.write_stall)
        self._app = wrap_app(app, self._server.wsgi_max_body_size, "asgi")
        self._context = WorkerContext(None)
        self._streams: set[trio.SocketStream] = set()
        self._listeners: list[Listener] = []
        self._left = Doorbell()

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Runs the plane; started when it listens, or when its first attempt has failed."""
        pause = _PAUSE
        async with trio.open_nursery() as nursery:
            try:
                listens = self._listen(pause)
                task_status.started()
                while not self._context.terminated.is_set():
                    if listens:
                        pause = _PAUSE
                        try:
                            await self._accept(nursery)
                        except Exception:
                            log.exception(f"the {self._place.name} failed, and begins anew", extra={"again_in": pause})
                    await trio.sleep(pause)
                    pause = min(pause * 2, _LONGEST_PAUSE)
                    listens = not self._context.terminated.is_set() and self._listen(pause)
            finally:
                self._close()

    def _listen(self, pause: float) -> bool:
        place = self._place
        rules = Rules(backlog=_CONNECTIONS, unix_mode=place.unix_mode, host_setting=f"{place.section}.host")
        ports = [Port(number=place.port, setting=f"{place.section}.port")] if place.port >= 0 else []
        try:
            self._listeners = listeners = open_listeners(place.host, ports, rules)
        except OSError as e:
            said = f"the {place.name} does not listen: models are served without it"
            log.error(said, extra={"reason": str(e), "again_in": pause})
            return False
        place.listens(next((listener.port for listener in listeners if listener.port), 0))
        token = "demanded" if place.demands_token else "none"
        for listener in listeners:
            log.info(place.name, extra={"at": listener.url, "token": token})
        return True

    async def _accept(self, nursery: trio.Nursery) -> None:
        def serve(sock: socket.socket) -> None:
            nursery.start_soon(self._serve, sock)

        async def accept(listener: Listener) -> None:
            await listener.accept(serve, lambda: len(self._streams) < _CONNECTIONS)
            accepting.cancel_scope.cancel()  # a listener that has failed is opened again with the others

        try:
            async with trio.open_nursery() as accepting:
                for listener in self._listeners:
                    accepting.start_soon(accept, listener)
        finally:
            self._stop_listening()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._place.listens(0)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            # hypercorn waits for ever for a reader; the kernel ends one that reads nothing, on systems that can
            if hasattr(socket, "TCP_USER_TIMEOUT") and sock.family != socket.AF_UNIX:
                stall = min(round(self._stall * 1000), _LONGEST)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall)
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        except OSError:
            sock.close()
            return  # reset before it was served
        self._streams.add(stream)
        try:
            # its type says TLS, which it finds out by asking
            connection = Connection(self._app, self._server, self._context, ConnectionState({}), stream)  # type: ignore[arg-type]
            await connection.run()
        except Exception:
            log.exception(f"a connection of the {self._place.name} failed")
        finally:
            self._streams.discard(stream)
            stream.socket.close()
            self._left.ring()

    async def end(self) -> None:
        """Stops accepting, and waits at most 2 seconds for the answers under way."""
        await self._context.terminated.set()
        for listener in self._listeners:
            listener.close()
        with trio.move_on_after(_GRACE):
            while self._streams:
                await self._left.wait()

    def _close(self) -> None:
        self._stop_listening()
        for stream in self._streams:
            stream.socket.close()
