"""Acceptor: opens ports, accepts sockets and serves them as connections, from their first byte to their last."""

from __future__ import annotations

import logging
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import final

import trio

from gateway.core.connection import Connection, ConnectionWire
from gateway.core.server import Server, allows_request
from gateway.errors import Closing, TransportFlooded, TransportLost, spread_over
from gateway.net.listeners import Listener
from gateway.net.proxies import TrustedProxies
from gateway.net.readiness import Poller, WaitedTransport, Watchable
from gateway.net.tls_reload import ServedCertificate
from gateway.net.transport import SocketTransport, Transport
from gateway.serving.connection_table import ConnectionTable
from gateway.serving.handshakes import Handshakes
from gateway.serving.lobby import Lobby
from gateway.serving.ports import Ports, open_ports
from gateway.wires.asgi import ASGICall, Receive, Scope, Send, refuse_asgi
from gateway.wires.detect import sniff
from protocols.proxy import ProxyReceiver

log = logging.getLogger("gateway")

NOT_STARTED = (
    "the gateway was not started: mounted in another application it gets no lifespan events, so the lifespan of that "
    "application must run gateway.serve (docs/howto/embed.md, examples/under_starlette.py, examples/under_fastapi.py)"
)
"""The reason why calls of an ASGI server are refused, and the remedy."""
_Arrived = tuple[Transport, Callable[[Connection], ConnectionWire], bytes, TrustedProxies | None]


@final
class Acceptor:
    """Opens the ports, and serves their connections, and connections that others have accepted, until it is stopped."""

    def __init__(self, server: Server, ports: Ports | None = None) -> None:
        """`ports` are those of a parent, which accepts there and hands the connections over; this then opens none."""
        self._server, self._limits = server, server.limits
        self.handed = ports is not None
        """True if a parent accepts."""
        self.ports = ports or Ports()
        """The ports on which it listens, or its parent does."""
        self.certificate: ServedCertificate | None = None
        """The certificate for TLS clients; None if TLS is off, and before `listen`."""
        self.poller: Poller | None = None
        """Calls connections whose sockets are ready. `begin` makes one if the gateway has ports and none was set."""
        self.arriving: set[trio.CancelScope] = set()
        """A scope for each connection that has not sent its first request yet."""
        self._listeners: list[Listener] = []
        self._begun = self._told = False  # it was started; a call before that was logged
        self._accepting = trio.CancelScope()
        self.nursery: trio.Nursery | None = None
        """The nursery in which connections are served; None before `begin`, and once it ends."""
        self._own: frozenset[trio.lowlevel.Task] = frozenset()
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        known = None if descriptors == resource.RLIM_INFINITY else descriptors
        self.table = ConnectionTable(server, lambda: self.arriving, known)
        self.handshakes = Handshakes(server)
        self.lobby = Lobby(self.table.spare, lambda: server.chance(), lambda *head: server.beside(*head))

    # -- its life ----------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Opens the ports. Raises ConfigError or OSError if one cannot be opened."""
        tls = self._server.config.tls
        if tls.cert or tls.dev:
            self.certificate = ServedCertificate(tls)
        if not self.handed:
            self._listeners, self.ports = open_ports(self._server.config)
        self._server.bidi_port = self.ports.bidi_port

    def begin(self, nursery: trio.Nursery, beside: Callable[[], Awaitable[None]]) -> None:
        """Serves in this nursery from now on, and runs `beside` there too."""
        self.nursery, self._begun = nursery, True
        nursery.start_soon(self._accept_all)
        nursery.start_soon(beside)
        if self.certificate is not None and (self.handed or any(listener.tls for listener in self._listeners)):
            nursery.start_soon(self.certificate.watch)
        nursery.start_soon(self._turns)
        self._own = frozenset(nursery.child_tasks)
        if self.poller is None and Poller.available and (self._listeners or self.handed):
            self.poller = Poller()
        self._server.runner.begin(nursery, self.poller)

    @property
    def accepting(self) -> bool:
        """True while connections are taken."""
        return self.nursery is not None and not self._accepting.cancel_called

    @property
    def working(self) -> list[trio.lowlevel.Task]:
        """The tasks that now work for clients, without its own and those that wait for an exchange."""
        if self.nursery is None:
            return []
        return list(self.nursery.child_tasks - self._own - self._server.runner.resting)

    async def _turns(self) -> None:
        """Gives connections their turns. When this task ends, it ends all connections, even if an embedder's tasks in the
        nursery go on, because nothing new can start."""
        try:
            await self._server.runner.turns()
        finally:
            self.nursery = None
            self.disconnect()

    def stop(self) -> None:
        """Stops accepting: closes the ports, and connections that have not sent their first request yet."""
        self._accepting.cancel()
        self._close_listeners()
        for arrival in self.arriving:
            arrival.cancel()
        self.lobby.close()

    def disconnect(self) -> None:
        """Ends all connections at once."""
        for arrival in self.arriving:
            arrival.cancel()
        self.lobby.close()
        for connection in list(self._server.connections):
            connection.lost()
        self._server.tellings.end()

    async def disconnected(self) -> None:
        """Ends all connections at once, and returns when none is left."""
        self.disconnect()
        while self.busy:
            await self._server.bell.wait()

    @property
    def busy(self) -> bool:
        """True while a connection is left."""
        return bool(self._server.connections or self.arriving)

    def close(self) -> None:
        """Closes the ports and the poller."""
        self._close_listeners()
        if self.poller is not None:
            self.poller.close()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    # -- accepting ---------------------------------------------------------------------------------------------------

    async def _accept_all(self) -> None:
        with self._accepting:
            async with trio.open_nursery() as nursery:
                for listener in self._listeners:
                    take = partial(self.take, tls=listener.tls)
                    nursery.start_soon(listener.accept, take, _always, self._server.log_limits)

    def take(self, sock: socket.socket, *, tls: bool, closed: Callable[[], None] | None = None) -> None:
        """Serves a connection of one of the ports, accepted here or by a parent, and owns its socket from now on. `closed`
        is called once, when it is closed."""
        try:
            below = SocketTransport(sock, unsent=self._limits.unsent)
        except OSError:  # reset before it was served
            sock.close()
            if closed is not None:
                closed()
            return
        below.closed = closed
        self.accepted(below, self.certificate.context if tls and self.certificate is not None else None)

    def accepted(self, below: Watchable, tls: ssl.SSLContext | None = None) -> None:
        """Serves an accepted connection in a task of its own, or refuses it if all places are taken."""
        nursery, table = self.nursery, self.table
        if nursery is None:
            below.close()
        elif (why := table.refusal(below.peer)) is None:
            if (over := table.counted(below.peer)) is not None and isinstance(below, SocketTransport):
                below.closed = over if below.closed is None else partial(_both, below.closed, over)
            table.starting += 1
            nursery.start_soon(self._serve_accepted, below, tls)
        else:
            self._server.connection_ended(Closing.REFUSED)
            self._server.log_limits.write(log, "connection not established", {"peer": below.peer, "reason": why})
            self.lobby.refuse(nursery, below, why, secure=tls is not None)

    async def _serve_accepted(self, below: Watchable, tls: ssl.SSLContext | None) -> None:
        self.table.starting -= 1
        await self.serve_watchable(below, tls)

    # -- one connection ----------------------------------------------------------------------------------------------

    async def serve_watchable(self, below: Watchable, tls: ssl.SSLContext | None = None) -> None:
        """Serves one connection. If there is a poller, returns when the connection has begun. Otherwise does what
        `serve_transport` does."""
        poller = self.poller
        if poller is None:
            await self.serve_transport(below, tls)
            return
        one_answer = self._server.one_answer  # as it was accepted: its first bytes may come later
        try:
            arrived = None if self.nursery is None else await self._arrive(below, tls)
            if arrived is None or self.nursery is None:  # the server may have ended meanwhile
                below.close()
                return
            transport, make_wire, received, proxies = arrived
            watched = poller.watch(below.fileno())
            connection = Connection(self._server, transport, make_wire, watched, proxies)
            if one_answer:
                connection.wire.end_with_answer()
        except BaseException as e:
            below.close()
            if not isinstance(e, Exception):
                raise
            self._failed(below.peer)
            return
        self._server.connections.add(connection)
        connection.begin(received)
        try:
            watched.tell(connection)
        except OSError as e:  # the kernel has no room for one more
            connection.failed(e)

    async def serve_transport(self, transport: Transport, tls: ssl.SSLContext | None = None) -> None:
        """Serves one connection with two tasks that wait for its transport; closes the transport at the end."""
        one_answer = self._server.one_answer
        try:
            arrived = None if self.nursery is None else await self._arrive(transport, tls)
            if arrived is None or self.nursery is None:
                return
            transport, make_wire, received, proxies = arrived
            watch = WaitedTransport(transport)
            connection = Connection(self._server, transport, make_wire, watch, proxies)
            if one_answer:
                connection.wire.end_with_answer()
            self._server.connections.add(connection)
            connection.begin(received)
            try:
                await watch.run(connection)
            finally:
                connection.lost()
        except Exception:
            self._failed(transport.peer)
        finally:
            try:
                transport.close()
            except Exception:
                self._failed(transport.peer)

    def _failed(self, peer: str) -> None:
        if self._server.log_limits.allows("connection failed", level=logging.ERROR):
            log.exception("connection failed", extra={"peer": peer})

    async def serve_call(self, scope: Scope, receive: Receive, send: Send, *, by_operator: bool = False) -> None:
        """Serves one call that an ASGI server has accepted; if the gateway does not run, answers 503. If it was never
        started, the first such call is logged."""
        call = ASGICall(self._server, scope, by_operator=by_operator)
        if self.nursery is None:
            head = call.exchange.request
            beside = () if by_operator else self._server.beside(head.method, head.headers)
            why = "the gateway is not running; try again later"
            if not (self._begun or by_operator):  # the operator plane serves before
                why = NOT_STARTED
                if not self._told:
                    self._told = True
                    log.error(NOT_STARTED)
            why, retry_after = "" if allows_request(beside) else why, spread_over(1, self._server.chance())
            await refuse_asgi(scope, receive, send, why, retry_after=retry_after, beside=beside)
            return
        self._server.connections.add(call)
        await call.run(receive, send)

    async def _arrive(self, transport: Transport, tls: ssl.SSLContext | None) -> _Arrived | None:
        """Returns a new connection's transport, its wire, the bytes read to detect that, and the proxies that may name
        clients in its requests; None if no connection comes about."""
        limits, proxies = self._limits, self._server.proxies
        proxies = None if proxies is None or not proxies.includes(transport.peer) else proxies
        greeting, received = ProxyReceiver(limits.head), b""
        try:
            with trio.move_on_after(limits.head_timeout) as arrival:
                self.arriving.add(arrival)
                try:
                    if proxies is not None:
                        proxies = await proxies.greeted(transport, greeting)
                        received = greeting.rest
                    if tls is not None:
                        transport, received = await self.handshakes.secured(transport, tls, received), b""
                    wire = await sniff(transport, received, secure=tls is not None, log_limits=self._server.log_limits)
                    return transport, *wire, proxies
                finally:
                    self.arriving.remove(arrival)
                    self._server.bell.ring()
            if arrival in self.table.evicted:
                self.table.evicted.discard(arrival)
            elif not self._server.draining:
                self._server.connection_ended(Closing.HEAD_TIMEOUT)
                if greeting.begun:
                    raise TransportLost("the PROXY header took too long (limits.head_timeout)")
        except TransportFlooded as e:
            self._server.connection_ended(Closing.FLOOD)
            self._server.flooded(transport.peer, "tls", e.flood, 0)
        except TransportLost as e:
            # There is no exchange to end. A client without our CA, or with TLS on the wrong port, leaves only this line.
            level = logging.DEBUG if e.left else logging.INFO
            if log.isEnabledFor(level):
                facts = {"peer": transport.peer, "reason": str(e)}
                self._server.log_limits.write(log, "connection not established", facts, level)
        return None


def _always() -> bool:
    return True


def _both(one: Callable[[], None], other: Callable[[], None]) -> None:
    one()
    other()
