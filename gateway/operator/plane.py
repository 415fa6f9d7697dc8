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
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.config import LimitsConfig, MetricsConfig, OperatorConfig
from gateway.doorbell import Doorbell
from gateway.hypercorn import Connection, HTTP1Connection, HTTP1OnlyConnection
from gateway.log_limits import LogLimits
from gateway.net.listeners import Listener, Port, Rules, open_listeners
from gateway.operator.access import Access
from gateway.operator.answers import Answers, GatewayAnswers
from gateway.operator.app import app_of, metrics_app
from gateway.operator.operated import Operated
from protocols.floods import METRICS_BYTES, PLANE_CONNECTIONS, PLANE_READ

log = logging.getLogger("gateway.operator")

_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds between attempts to listen
_LONGEST = 2**31 - 1  # milliseconds, of the option
_GRACE = 2.0  # seconds that answers under way have at the end


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
        # no request for metrics has a body; the playground's have, and are a WebSocket's too
        kind=HTTP1OnlyConnection if section == "metrics" else HTTP1Connection,
        most=METRICS_BYTES if section == "metrics" else math.inf,
        listens=listens,
    )
    return _running(_Plane(place, app(answers, access), answers.place.limits, access.log_limits))


@asynccontextmanager
async def _running(plane: _Plane) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(plane.run)
        yield
        await plane.end()
        nursery.cancel_scope.cancel()


@final
class _Turns:
    """Lets one connection of the plane at a time do a step, and other tasks of the loop have theirs in between: however many
    callers there are, they delay a client of the models by a step."""

    def __init__(self) -> None:
        self._lock = trio.StrictFIFOLock()

    async def turn(self) -> None:
        """Returns when the next step may be done."""
        async with self._lock:
            await trio.lowlevel.checkpoint()

    def application(self, app: ASGIApp) -> ASGIApp:
        """The application, of which each call begins in a turn."""

        async def called(scope: Scope, receive: Receive, send: Send) -> None:
            await self.turn()
            await app(scope, receive, send)

        return called


@final
class _Stream:
    """A connection's stream, read in turns. One that has sent `most` bytes is read no further, as if it had ended."""

    def __init__(self, stream: trio.SocketStream, turns: _Turns, most: float) -> None:
        self.socket, self._stream, self._turns, self._left = stream.socket, stream, turns, most
        self.send_all, self.send_eof, self.aclose = stream.send_all, stream.send_eof, stream.aclose

    async def receive_some(self, most: int) -> bytes | bytearray:
        if self._left <= 0:
            return b""
        data = await self._stream.receive_some(min(most, PLANE_READ))
        self._left -= len(data)
        await self._turns.turn()
        return data


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
    kind: type[Connection]
    """The connections that it serves."""
    most: float
    """Bytes that one of them may send."""
    listens: Callable[[int], None]
    """Called with the port when it listens, and with 0 when it does not."""


@final
class _Plane:
    """Listens, and keeps its connections.

    Each is a connection of `gateway.hypercorn` for HTTP/1.1 alone, which keeps its failures. The plane accepts connections
    itself: it can try a taken port again, count connections, give each its turn, and at the end close the sockets of readers
    that have stopped.
    """

    def __init__(self, place: _Place, application: ASGIApp, limits: LimitsConfig, log_limits: LogLimits) -> None:
        self._place, self._stall, self._log_limits = place, limits.write_stall, log_limits
        self._server = ServerConfig()
        self._server.errorlog = log
        self._server.include_server_header = False
        self._turns = _Turns()
        # hypercorn and starlette name the types of ASGI each in their own words
        app: Any = self._turns.application(application)
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
        rules = Rules(backlog=PLANE_CONNECTIONS, unix_mode=place.unix_mode, host_setting=f"{place.section}.host")
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
            await listener.accept(serve, lambda: len(self._streams) < PLANE_CONNECTIONS, self._log_limits)
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
            await self._turns.turn()
            place = self._place
            read: Any = _Stream(stream, self._turns, place.most)  # its type says TLS, which it finds out by asking
            connection = place.kind(self._app, self._server, self._context, ConnectionState({}), read)
            try:
                await connection.run()
            finally:
                vars(connection).clear()  # hypercorn's parts know each other: the cycle would keep them until the GC runs
        except Exception:
            if self._log_limits.allows("a connection failed", level=logging.ERROR):
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
