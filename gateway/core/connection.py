"""One connection: its reader, its writer, its exchanges, and the edge that no exception crosses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol, final

from gateway.core.contracts import LAST_WORD, TURN_SECONDS, Hop, Wire
from gateway.core.exchange import Exchange
from gateway.core.linger import Linger, Parting, Swallowed
from gateway.credentials import Door
from gateway.errors import Closing, Drained, Ending, SlowReader, TransportFlooded, TransportLost
from gateway.log_limits import LogLimits
from gateway.net.certificate import read_client
from gateway.net.tls_transport import TLSTransport
from gateway.net.transport import arrived_at
from gateway.party import Party
from gateway.untrusted_text import unquoted
from protocols.errors import RemoteProtocolError
from protocols.events import Buffer, Request, Sent

if TYPE_CHECKING:
    from gateway.core.server import Server
    from gateway.credentials import Door
    from gateway.net.proxies import TrustedProxies
    from gateway.net.readiness import Readiness
    from gateway.net.transport import Transport
    from models.session import ClientCertificate

log = logging.getLogger("gateway.connection")

_NOTHING: list[Buffer] = []  # never changed
_COMPLETE = Ending.COMPLETE  # a member of an enum costs three look-ups on each use
_READS = range(4)  # receives before others get their turn
_WRITE_AT_MOST = 1024 * 1024


class ConnectionWire(Wire, Protocol):
    """A machine with its driver's rules; what a connection needs beyond what its exchanges need."""

    def receive_buffer(self, scratch: memoryview) -> memoryview | None:
        """The memory for the next bytes: `scratch`, for `receive_data`, or a buffer of their own, for `buffer_updated`. None
        while the wire takes no bytes."""
        ...

    def buffer_updated(self, n: int) -> bool:
        """Takes n bytes that are in its buffer. True if a `pump` is worthwhile: it is not for each piece of a large body
        that lands in its final buffer."""
        ...

    def receive_data(self, data: memoryview) -> None: ...
    def receive_eof(self) -> None: ...
    def pump(self, at_most: int, until: float) -> bool:
        """Takes at most `at_most` events from the machine, until `until` on Trio's clock, and hands them on. True when the
        machine has no more. Raises RemoteProtocolError."""
        ...

    def protocol_error(self, error: RemoteProtocolError) -> None:
        """Queues the wire's goodbye; the connection closes when that is written."""
        ...

    def data_to_send(self, at_most: int) -> list[Buffer]: ...
    def data_sent(self) -> Sent | None:
        """Notes that the bytes of `data_to_send`, or the connection's `whole_answer`, have left. Returns the streams that
        must be told; None if their exchange was told already."""
        ...

    def held(self) -> tuple[int, int]:
        """Bytes that were received and no exchange has taken, and bytes that wait to be written."""
        ...

    @property
    def idle_since(self) -> float | None:
        """When its last exchange was over, or it began; None if the wire always has an exchange."""
        ...

    def end_idle(self) -> None:
        """Queues the wire's goodbye while there is no exchange; the connection then closes."""
        ...

    def end_with_answer(self) -> None:
        """Makes its next answer the last one: the client is told with it that the connection ends. Other exchanges go on to
        their end. A WebSocket goes on."""
        ...

    @property
    def over(self) -> bool:
        """True if the wire will queue nothing more: the connection may close once its output has left."""
        ...

    def tick(self, now: float) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None:
        """Gives back what the machine holds of the budget: the transport is gone and no exchange runs any more."""
        ...


@final
class Connection:
    """Drives one wire over one transport, without a task of its own.

    It is called when the transport is readable or writable, and has a `turn` when it asked for one; these calls never
    wait. Each exchange has a task, which waits here only for its own input and room. The wire, the server or a failure of
    the transport ends the connection. Its exchanges then have their endings, and when the last has returned, everything
    they held is given back.
    """

    __slots__ = (  # a dict of more than 30 names has no place in CPython's inline caches
        "_blocked_since", "_certificate", "_closed", "_dirty", "_ending", "_hung_up", "_linger", "_lost", "_ready", "_rest",
        "_short_is_dry", "_soon", "_watch", "behind", "blocked", "budget", "clock", "completed", "eof", "exchanges", "heavy",
        "last_received", "last_sent", "leaves_at", "limits", "on_bidi_port", "parting", "party", "peer", "pool", "proxies",
        "reading_paused", "requests", "routed", "server", "strangers", "transport", "whole_answer", "wire",
    )  # fmt: skip

    by_operator, prefix = False, ""

    def __init__(
        self,
        server: Server,
        transport: Transport,
        make_wire: Callable[[Connection], ConnectionWire],
        watch: Readiness,
        proxies: TrustedProxies | None = None,
    ) -> None:
        """`proxies` may name clients in requests; None if the peer is not a trusted proxy."""
        self.server, self.limits, self.pool, self.clock = server, server.limits, server.pool, server.clock
        self.transport, self.peer, self.proxies = transport, transport.peer, proxies
        self.exchanges: dict[int, Exchange] = {}
        self.routed: Any = None
        self.eof, self.strangers = False, 0
        self.last_received = self.last_sent = self.clock()
        self.leaves_at = server.leaves_at(self.last_received)
        """When its wire asks its client to open another connection."""
        self.requests = self.completed = 0  # exchanges that began, and those that ended complete
        self.parting: Parting | None = None  # set once its wire refuses its exchanges, because of what the peer does
        self._watch, self._soon, self._short_is_dry = watch, server.turn_soon, transport.short_is_dry
        self._ready = True  # worth a try to receive
        self.behind = False
        """True while it has received more than it has handed on. Its next turns hand on the rest before it reads."""
        self.heavy = False
        """True from a turn that was not enough for it until one that was: it comes after all others."""
        self.reading_paused = self._dirty = self._hung_up = self._closed = False
        self._ending = False  # while the wire is told what has left; only after that is its `over` read
        self.whole_answer: bytes | None = None
        """A small whole answer, given to the wire while nothing else was to be sent: that of most unary calls over HTTP/1.1.
        The wire's machine has queued its bytes too. If the next write leaves with just these, the wire is not asked what to
        send, which is less work: it learns from `data_sent` that they have left, and tells their exchange itself."""
        self._rest = _NOTHING  # bytes that the transport did not take
        self.blocked = False
        self._blocked_since: float | None = None
        self._linger: Linger | None = None
        self._lost: Ending | None = None
        self._certificate: ClientCertificate | None = None
        known = ""
        if isinstance(transport, TLSTransport) and (certificate := self.client_certificate) is not None:
            known = certificate.subject
        self.party = server.parties.of_certificate(known) if known else Party(self.peer)
        """That of its exchanges: the subject of the client's certificate, else the connection itself."""
        self.budget = server.account_of(self.party)
        self.on_bidi_port = server.bidi_port > 0 and arrived_at(transport) == server.bidi_port
        self.wire = make_wire(self)

    @property
    def door(self) -> Door:
        """Decides which fields of a request models see."""
        return self.server.door

    @property
    def log_limits(self) -> LogLimits:
        """The limits of lines that peers can cause."""
        return self.server.log_limits

    @property
    def client_certificate(self) -> ClientCertificate | None:
        """The client's certificate, if TLS has verified one; None otherwise."""
        transport = self.transport
        if self._certificate is None and isinstance(transport, TLSTransport) and (der := transport.peer_certificate()):
            self._certificate = read_client(der)
        return self._certificate

    # -- life ------------------------------------------------------------------------------------------------------

    def begin(self, received: bytes = b"") -> None:
        """Serves from the connection's next turn on; `received` was read from the transport already."""
        self._contain(self._begin, received)

    def _begin(self, received: bytes) -> None:
        if received:
            self.wire.receive_data(memoryview(received))
            self.behind = True
        self.turn_soon()

    def readable(self, hung_up: bool = False) -> None:
        """The transport has something to receive; `hung_up` if its end or an error may be behind it."""
        if not self.eof and self._lost is None:
            self._ready = True
            if hung_up:
                self._hung_up = True
            try:
                self._read()
            except Exception as e:
                self.failed(e)

    def writable(self) -> None:
        """The transport takes bytes again."""
        if self.blocked:
            self._contain(self._write_rest)

    def turn(self) -> None:
        """Does the work that was put off: hands on events, receives, writes."""
        self._dirty = False
        if self._lost is None:
            try:
                if self.behind and not self._catch_up():
                    return
                if (self._ready and not self.behind) or self._linger is not None:
                    self._read()
                if not self.blocked and self._lost is None:
                    self._write()
            except Exception as e:
                self.failed(e)

    def _contain(self, act: Callable[..., None], *arguments: Any) -> None:
        """Calls `act` for a task of the server: an error ends this connection and not that task."""
        try:
            if self._lost is None:
                act(*arguments)
        except Exception as e:
            self.failed(e)

    def failed(self, error: Exception) -> None:
        """Ends the connection because of an error in it."""
        self.lost(_ending_by(self, error))

    def lost(self, ending: Ending | None = None) -> None:
        """Gives the transport up, if it is not gone already: every exchange ends, then the connection."""
        if self._lost is not None:
            return
        ending = ending or (Ending.CANCELLED if self.eof else Ending.LOST)
        self._lost = ending = ending if self.parting is None else Ending.REFUSED  # which its wire has told some of them
        self._rest = _NOTHING
        for act in (self._watch.forget, self.transport.close):
            self._attempt(act)
        if self.exchanges:
            tell(self, self.exchanges.values(), lambda exchange: exchange.peer_gone(ending))
        self._close_if_over()

    def _close_if_over(self) -> None:
        """Makes the machine give back what it holds, once the last exchange has returned."""
        if self._lost is not None and not self.exchanges and not self._closed:
            self._closed = True
            self._attempt(self.wire.close)
            self.server.connection_closed(self)
            del self.wire  # the wire refers to this connection: a cycle would keep the machine until the GC runs

    def _attempt(self, act: Callable[..., None], *arguments: Any) -> None:
        try:
            act(*arguments)
        except Exception as e:
            _ending_by(self, e)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        if self._linger is not None:
            self._swallow(self._linger)
            return
        transport, wire, scratch = self.transport, self.wire, self.server.scratch
        at_most, until = self.limits.checkpoint_events, 0.0
        for _ in _READS:
            buffer = None if self.behind else wire.receive_buffer(scratch)
            if buffer is None:
                self.reading_paused = True
                return
            self.reading_paused = False
            n = transport.try_receive_into(buffer)
            if n is None:
                self._dry()
                return
            self.last_received = now = self.clock()
            until = until or now + TURN_SECONDS
            if n == 0:
                self.eof, self._ready = True, False
                wire.receive_eof()
            else:
                if n < len(buffer) and self._short_is_dry and not self._hung_up:
                    self._ready = False
                    self._watch.want_readable()
                if buffer is scratch:
                    wire.receive_data(scratch[:n])
                elif not wire.buffer_updated(n):
                    if not self._ready:
                        self.heavy = False
                        return
                    if now > until:
                        break
                    continue
            del buffer  # a body must not live longer than its exchange
            try:
                done = wire.pump(at_most, until)
            except RemoteProtocolError as e:
                done = self._broken(e)
            if not done:
                self._not_enough()
                return
            if not self._ready or self._lost is not None or self._linger is not None:
                self.heavy = False
                return
            if now > until:
                break
            wire = self.wire
        self.heavy = True
        self.turn_soon()

    def _dry(self) -> None:
        self._ready = self.heavy = self.transport.behind
        if self._ready:
            self.turn_soon()
        else:
            self._watch.want_readable()

    def pump(self) -> None:
        """Hands on as much of the machine's events as a turn allows, and the rest after others had their turns."""
        if not self.behind and not self._pump_some():
            self._not_enough()

    def pump_soon(self) -> None:
        """Does what `pump` does, in this connection's next turn."""
        self.behind = True
        self.turn_soon()

    def _not_enough(self) -> None:
        """Goes on in another turn, after all connections that need less: this turn was not enough."""
        self.heavy = True
        self.pump_soon()

    def _catch_up(self) -> bool:
        """Hands on as much more as a turn allows; False if that ended the connection."""
        if self._pump_some():
            self.behind = self.heavy = False
            self.read_more()
        else:
            self.heavy = True
            self.turn_soon()
        return self._lost is None

    def _pump_some(self) -> bool:
        if self._lost is not None:
            return True
        try:
            return self.wire.pump(self.limits.checkpoint_events, self.clock() + TURN_SECONDS)
        except RemoteProtocolError as e:
            return self._broken(e)

    def _broken(self, error: RemoteProtocolError) -> bool:
        facts = {"peer": self.peer, "wire": self.wire.name, "reason": unquoted(str(error))[:300]}
        self.server.log_limits.write(log, "protocol error", facts)
        self.wire.protocol_error(error)
        self.output_ready()
        return True

    def read_more(self) -> None:
        """Reads again, if reading was paused: something was consumed."""
        if self.reading_paused:
            self.turn_soon()

    # -- writing ---------------------------------------------------------------------------------------------------

    def turn_soon(self) -> None:
        """Gives this connection a turn after others had theirs."""
        if not self._dirty and self._lost is None:
            self._dirty = True
            self._soon(self)

    def output_ready(self) -> None:
        """Writes in the next turn, with all that is ready by then: the machine may have bytes, or be over."""
        if not self._dirty and not self.blocked and self._lost is None:
            self._dirty = True
            self._soon(self)

    def _write(self) -> None:
        wire, answer, n = self.wire, self.whole_answer, None
        if answer is not None:
            self.whole_answer = None
            n = self.transport.try_send((answer,))
        if answer is not None and n == len(answer) and not self.transport.pending:
            self.last_sent = self.clock()
            size = n
        else:
            buffers = wire.data_to_send(_WRITE_AT_MOST)
            size = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
            if size and not self._send(buffers, size, n):
                self.blocked, self._blocked_since = True, self.clock()
                self._watch.want_writable()
                for exchange in () if wire.windowed else [e for e in self.exchanges.values() if not e.reserved]:
                    exchange.pay()  # its answer stays, with the body that it may view
                return
        # Also after no bytes: an end without bytes of its own, such as a declared length that is reached, shows here.
        self._ending = True
        sent = wire.data_sent()
        if sent is not None:
            self._sent(sent)
        self._ending = False
        if size >= _WRITE_AT_MOST:
            self.output_ready()
        elif self._lost is None and self.wire.over and self._linger is None:
            self._begin_linger()

    def _send(self, buffers: list[Buffer], size: int, n: int | None = None) -> bool:
        """Sends what the machine gave, of which n bytes have left already. If the transport is full, keeps the rest and
        returns False."""
        transport = self.transport
        if n is None:
            n = transport.try_send(buffers)
        while True:
            if n == size:
                self.last_sent = self.clock()
                self._rest = _NOTHING
                return not transport.pending
            if not n:
                self._rest = buffers
                return False
            self.last_sent = self.clock()
            size -= n
            buffers = _after(buffers, n)
            n = transport.try_send(buffers)

    def _write_rest(self) -> None:
        """Sends the rest: the transport was full, and may have room again."""
        if self.transport.pending:
            self.transport.try_send(())
        before = self.last_sent
        if (self._rest and not self._send(self._rest, sum(map(len, self._rest)))) or self.transport.pending:
            if self.last_sent != before:
                self._blocked_since = self.last_sent
            self._watch.want_writable()
            return
        self._blocked_since, self.blocked = None, False
        sent = self.wire.data_sent()
        if sent is not None:
            self._sent(sent)
        self.output_ready()

    def _sent(self, sent: Sent) -> None:
        exchanges = self.exchanges
        ended = sent.ended
        if sent.room != ended:  # no task waits for room in an answer that left whole
            for stream in sent.room:
                exchange = exchanges.get(stream)
                if exchange is not None:
                    exchange.outbound.room_changed()
        for stream in ended:
            exchange = exchanges.get(stream)
            if exchange is not None:
                exchange.answer_written()

    # -- the end ---------------------------------------------------------------------------------------------------

    def _begin_linger(self) -> None:
        """Everything is written: for a moment, receives and drops what the client still sends."""
        if self.eof:
            self.lost(Ending.CANCELLED)
            return
        self.reading_paused = False
        self._linger = Linger(self.clock(), brief=self.parting is Parting.BRIEF)
        self.transport.send_eof()
        self._swallow(self._linger)

    def _swallow(self, linger: Linger) -> None:
        match linger.swallow(self.transport, self.server.scratch, self.clock()):
            case Swallowed.DRY:
                self._dry()
            case Swallowed.MORE:
                self.turn_soon()
            case Swallowed.OVER:
                self.lost()

    # -- exchanges -------------------------------------------------------------------------------------------------

    def open_exchange(self, request: Request) -> Exchange:
        """Starts the exchange of a request in a task of its own; the body may still be on its way."""
        self.requests += 1
        server = self.server
        exchange = Exchange(self, self.wire, request, server.new_id(), self.last_received)
        self.exchanges[request.stream] = exchange
        server.exchange_opened(exchange)
        server.run_exchange(exchange)
        return exchange

    def exchange_closed(self, exchange: Exchange) -> None:
        """Forgets an exchange that has its ending and whose task is done."""
        del self.exchanges[exchange.stream]
        self.completed += 1 if exchange.ending is _COMPLETE else 0
        self.server.exchange_closed(exchange)
        if self._lost is not None:
            self._close_if_over()
        elif not (self._dirty or self._ending) and self.wire.over:
            self.output_ready()

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Called by the server's coarse timer: checks for stalls, silence, hang-ups, and the wire's own times."""
        self._contain(self._look_at_stamps, now)

    def drain(self) -> None:
        """Tells the client that no new requests are taken; live exchanges go on."""
        self._contain(self.wire.drain)
        self.output_ready()

    def _look_at_stamps(self, now: float) -> None:
        stall = self.limits.write_stall
        if stall and self._blocked_since is not None and now - self._blocked_since > stall:
            self._stalled(stall, now - self._blocked_since)
        elif self._linger is not None:
            if now >= self._linger.until:
                self.lost()
        else:
            if self.reading_paused and self.exchanges and self.transport.hung_up():
                self._left_unread()
            if self._lost is None:
                self.wire.tick(now)

    def _stalled(self, stall: float, waited: float) -> None:
        """Stops the exchanges that run, because the peer takes nothing. Each queues an error behind what is queued already;
        if the peer does not take that within `LAST_WORD` either, the connection ends."""
        running = [e for e in self.exchanges.values() if e.interruption is None and e.outbound.finishing is None]
        told = any(e.interruption is not None for e in self.exchanges.values())
        if running or not told:
            facts = {"peer": self.peer, "seconds": stall, "setting": "limits.write_stall"}
            self.server.log_limits.write(log, "write stalled", facts)
        tell(self, running, lambda exchange: exchange.interrupt(SlowReader(stall)))
        if waited > stall + LAST_WORD or not (running or told):
            self.server.connection_ended(Closing.STALLED)
            self.lost(Ending.LOST)

    def _left_unread(self) -> None:
        """Cuts off unfinished exchanges: the client is gone, though its end is still unread. Whole answers go out."""
        unfinished = [exchange for exchange in self.exchanges.values() if exchange.outbound.finishing is None]
        if len(unfinished) == len(self.exchanges):
            self.lost(Ending.CANCELLED)
        else:
            tell(self, unfinished, lambda exchange: exchange.peer_gone(Ending.CANCELLED))

    def drain_now(self) -> None:
        """Interrupts the exchanges that still run: the drain deadline has passed."""
        for exchange in list(self.exchanges.values()):
            exchange.interrupt(Drained("the server is shutting down and its drain deadline (drain.timeout) has passed"))


def tell(connection: Connection, exchanges: Collection[Exchange], what: Callable[[Exchange], None]) -> None:
    """Calls `what` with each of these exchanges of a connection whose peer is not gone: with some at once, with others
    in later turns, as `Tellings` does."""
    connection.server.tellings.tell(exchanges, lambda exchange: connection._attempt(what, exchange))


def _ending_by(connection: Connection, error: Exception) -> Ending:
    """Logs the error that ends a connection. Returns the ending of its exchanges."""
    server, peer = connection.server, connection.peer
    if isinstance(error, TransportFlooded):
        server.connection_ended(Closing.FLOOD)
        server.flooded(peer, "tls", error.flood, sum(e.ending is None for e in connection.exchanges.values()))
        return Ending.REFUSED
    if not isinstance(error, TransportLost):
        if server.log_limits.allows("connection failed", level=logging.ERROR):
            log.error("connection failed", extra={"peer": peer}, exc_info=error)
        return Ending.LOST
    log.debug("transport lost", extra={"peer": peer, "reason": str(error)})
    return Ending.CANCELLED if error.left or connection.eof else Ending.LOST


def socket_hop(transport: Transport) -> list[Hop]:
    """The bytes of all exchanges of a connection that its transport holds; empty if it cannot tell."""
    unsent = transport.unsent()
    return [] if unsent is None else [Hop("socket", *unsent)]


def _after(buffers: list[Buffer], n: int) -> list[Buffer]:
    """The buffers without their first n bytes."""
    for i, buffer in enumerate(buffers):
        size = len(buffer)
        if n < size:
            return [memoryview(buffer)[n:], *buffers[i + 1 :]]
        n -= size
    return []
