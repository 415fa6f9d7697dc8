"""HTTP/1.1 as a wire: one exchange at a time, no window, and a FIN that means the client has left."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import msgspec

from gateway.config.fields import said_of
from gateway.core.connection import socket_hop
from gateway.core.contracts import EVENTS_A_LOOK, LANDED, Hop
from gateway.core.exchange import Exchange
from gateway.core.inbound import Inbound
from gateway.core.server import allows_request
from gateway.errors import BadRequest, Closing, Ending
from gateway.wires.websocket import WebSocketWire
from protocols.errors import RemoteProtocolError
from protocols.events import (
    PAUSED,
    Buffer,
    ConnectionEnd,
    Data,
    End,
    Headers,
    Opcode,
    Request,
    Response,
    Sent,
)
from protocols.http1.connection import HTTP1Connection, HTTP1Limits
from protocols.http1.refused import RefusedHead
from protocols.roles import Role

if TYPE_CHECKING:
    from gateway.config import LimitsConfig
    from gateway.core.connection import Connection
    from protocols.buffers import Budget


# Seconds without a request after which a connection that parts is closed: a request is hardly on its way then.
_QUIET = 1.0
# The one upgrade that is served. Any other is ignored, and its request answered as if it had asked for none (RFC 9110
# section 7.8). One of them is h2c, which curl and Java's client ask for with their first request.
_WEBSOCKET = b"websocket"


@functools.lru_cache(maxsize=8)
def _limits_of(limits: LimitsConfig) -> HTTP1Limits:
    """One object for all connections."""
    return HTTP1Limits(**said_of(HTTP1Limits, limits))


_TOO_LARGE = (414, 431)
_METHOD = 32  # bytes of a head in which its method is looked for


@final
class _Refused:
    """A head that is refused: the answer, and what can be read of the head."""

    __slots__ = ("head", "message", "method", "status")

    def __init__(self, status: int, message: str, method: bytes) -> None:
        self.status, self.message, self.method = status, message, method
        self.head = RefusedHead()


@final
class HTTP1Wire:
    """Serves HTTP/1.0 and 1.1 on one connection, pipelined requests in turn."""

    name = "http/1.1"
    windowed, exclusive = False, True

    def __init__(self, connection: Connection, *, scheme: bytes) -> None:
        limits = connection.limits
        self._connection = connection
        self._machine = HTTP1Connection(
            Role.SERVER,
            _limits_of(limits),
            scheme=scheme,
            date=connection.server.date,
        )
        self._input = self._machine.input
        self._last_request = limits.requests_per_connection - 1
        self._current: Exchange | None = None
        self._inbound: Inbound | None = None  # its body, if that did not come with its head
        self._failed = self._gone = self._draining = self._parting = False
        self._refused: _Refused | None = None  # the answer that waits for the end of the head
        self._idle_since = self._head_since = connection.clock()

    # -- receiving -------------------------------------------------------------------------------------------------

    def receive_buffer(self, scratch: memoryview) -> memoryview | None:
        machine = self._machine
        if machine.landing is not None and (target := machine.get_buffer()) is not None:
            return target
        unread = self._input.unread
        ahead = unread + machine.unconsumed
        if not ahead:  # as before most requests
            return scratch
        current, inbound = self._current, self._inbound
        if inbound is not None:
            ahead += inbound.waiting
        if ahead < self._connection.limits.read_ahead:
            return scratch
        # If the exchange has nothing to take, the rest of a head or line must come, even beyond the bound.
        begun = ahead == unread and (
            current is None or not (inbound is None or inbound.input_ended or current.request.upgrade == _WEBSOCKET)
        )
        return scratch if begun else None

    def buffer_updated(self, n: int) -> bool:
        machine = self._machine
        machine.buffer_updated(n)
        landed, heard = machine.unread, LANDED if self._current is None else self._current.bytes_in
        return landed >= heard or landed >= LANDED or machine.get_buffer() is None

    def receive_data(self, data: memoryview) -> None:
        if self._failed:
            if self._refused is not None:
                self._refused.head.feed(data)
                self._refuse_when_read()
            return
        self._machine.receive_data(data)
        if self._input.unread == len(data):
            self._head_since = self._connection.last_received

    def receive_eof(self) -> None:
        self._machine.receive_eof()
        if self._refused is not None:
            self._refuse(self._refused)

    def pump(self, at_most: int, until: float) -> bool:
        if self._failed:
            return True
        connection, machine = self._connection, self._machine
        inbound = self._inbound
        while at_most > 0:
            at_most -= 1
            event = machine.next_event()
            if type(event) is Request:
                if connection.requests >= self._last_request or connection.server.leaving:
                    machine.close_after_response()
                self._current = exchange = connection.open_exchange(event)
                self._inbound = inbound = exchange.inbound
                if event.body is not None:  # the machine has nothing more now
                    return True
            elif type(event) is Data:
                if inbound is not None:
                    piece = event.buffers[0]
                    inbound.feed(piece, len(piece), connection.last_received)
            elif type(event) is End:
                # A WebSocket's input goes on behind its handshake.
                if inbound is not None and inbound.exchange.request.upgrade != _WEBSOCKET:
                    inbound.feed_end()
            else:
                if type(event) is ConnectionEnd or (event is PAUSED and connection.eof):
                    self._leave()
                    connection.output_ready()
                return True
            if not at_most % EVENTS_A_LOOK and connection.clock() > until:
                return False
        return False

    def _leave(self) -> None:
        # RFC 9112 section 9.6 lets a client half-close after its request. But every real client that half-closes while
        # it waits for an answer has given up, and nothing else tells a leaving client from a waiting one.
        # A whole answer still goes out.
        self._gone = True
        exchanges = [e for e in self._connection.exchanges.values() if e.ending is None]
        unfinished = [e for e in exchanges if e.outbound.finishing is None]
        for exchange in unfinished:
            exchange.peer_gone(Ending.CANCELLED)
        if unfinished and unfinished == exchanges:
            self._connection.lost(Ending.CANCELLED)

    def protocol_error(self, error: RemoteProtocolError) -> None:
        self._failed = True
        current = self._current
        if self._connection.eof:
            self._leave()
        elif current is not None and current.ending is None and current.outbound.finishing is None:
            if current.outbound.status:
                self._machine.send_pieces(current.stream, current.outbound.take_pieces())  # they still go out
                current.peer_gone(Ending.REFUSED)
            else:
                current.interrupt(BadRequest(str(error), status=error.status))
        else:
            self._refused = refused = _Refused(error.status, str(error)[:400], error.head[:_METHOD].partition(b" ")[0])
            refused.head.feed(error.head)
            self._refuse_when_read()

    def _refuse_when_read(self) -> None:
        """Refuses the head that is malformed or too large. The Origin of a page may stand behind the part that is too much:
        the answer then waits for the rest of the head, within bounds."""
        refused = self._refused
        assert refused is not None
        limits, head = self._connection.limits, refused.head
        waits = refused.status in _TOO_LARGE and self._connection.server.config.access.origins
        if not waits or head.over or head.size > 2 * limits.head + limits.request_line:
            self._refuse(refused)

    def _refuse(self, refused: _Refused) -> None:
        self._refused = None
        beside = self._connection.server.beside(refused.method, refused.head.headers)
        status, body, headers = refused.status, msgspec.json.encode({"error": refused.message}), [*beside]
        if allows_request(beside):  # the request itself then gets the refusal, which its page can read
            status, body = 204, b""
        else:
            headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        stream = self._machine.stream
        self._machine.send(Response(stream=stream, status=status, headers=headers))
        if body:
            self._machine.send(Data(stream=stream, buffers=(body,)))
        self._machine.send(End(stream=stream))
        self._connection.output_ready()

    # -- sending ---------------------------------------------------------------------------------------------------

    def data_to_send(self, at_most: int) -> list[Buffer]:
        machine, current = self._machine, self._current
        if current is not None and current.outbound.pieces:
            machine.send_pieces(current.stream, current.outbound.take_pieces())
        return machine.data_to_send(at_most)

    def data_sent(self) -> Sent | None:
        machine, current = self._machine, self._current
        stream = machine.answer_sent()
        sent = None if stream else machine.data_sent()
        if sent is None or sent.ended:
            connection = self._connection
            self._idle_since = connection.last_sent
            if self._input.unread or connection.eof:
                connection.pump_soon()  # a request that was sent ahead, or the client's leaving
            if sent is None:
                if machine.queued:
                    connection.output_ready()  # for bytes that were queued behind it meanwhile
                if current is not None and current.stream == stream:
                    current.answer_written()
                    return None
                sent = Sent([stream], [stream])
            if current is not None and current.stream not in sent.ended:
                sent.room.append(current.stream)  # it shares the queue with the answer that has left
        return sent

    def held(self) -> tuple[int, int]:
        machine, limits = self._machine, self._connection.limits
        unsent = limits.send_buffer - machine.room(machine.stream)
        if self._current is not None:
            unsent += sum(map(len, self._current.outbound.pieces))
        return machine.unread + machine.unconsumed, unsent

    def hops(self, stream: int) -> list[Hop]:
        (received, unsent), limits = self.held(), self._connection.limits
        hops = [Hop("received", received, limits.read_ahead), Hop("queued", unsent, limits.send_buffer)]
        return [*hops, *socket_hop(self._connection.transport)]

    @property
    def idle_since(self) -> float:
        return self._idle_since

    def end_idle(self) -> None:
        self.drain()

    @property
    def over(self) -> bool:
        if not (self._machine.must_close or self._gone or self._failed or self._draining) or self._refused is not None:
            return False
        # An answer may have left, with a refusal still queued behind it.
        return (self._current is None or self._current.ending is not None) and not self._machine.queued

    def credit(self, stream: int, n: int) -> None:
        self._machine.credit(stream, n)
        if self._connection.reading_paused:
            self._connection.read_more()

    def proceed(self, stream: int) -> None:
        if not self._gone:
            self._machine.send(Response(stream=stream, status=100))
            self._connection.output_ready()

    def room(self, stream: int) -> int:
        return self._machine.room(stream)  # all streams share it

    def empty(self, stream: int) -> bool:
        return self._machine.room(stream) >= self._connection.limits.send_buffer

    def takes(self, stream: int) -> bool:
        connection = self._connection
        unsent = connection.transport.unsent()
        return not (connection.blocked or (unsent is not None and unsent[0])) and self.empty(stream)

    def start(self, stream: int, status: int, headers: Headers, trailers: bool) -> None:
        exchange, inbound = self._current, self._inbound  # the next one is not opened before this one's answer is whole
        assert exchange is not None
        if inbound is not None and not inbound.input_ended and exchange.request.upgrade != _WEBSOCKET:
            self._machine.close_after_response()  # it will close, and the client should know before its next request
        self._machine.send(Response(stream=stream, status=status, headers=headers))
        if status == 101:
            self._connection.wire = WebSocketWire(self._connection, self, exchange, self._machine)
            exchange.switch(self._connection.wire)
            return
        self._connection.output_ready()

    def push(self, stream: int, buffers: Sequence[Buffer]) -> None:
        self._machine.send_data(stream, buffers)
        self._connection.output_ready()

    def push_pieces(self, stream: int, pieces: Sequence[bytes]) -> None:
        self._machine.send_pieces(stream, pieces)
        self._connection.output_ready()

    def push_frame(self, stream: int, opcode: Opcode, fin: bool, buffers: Sequence[Buffer]) -> None:
        raise AssertionError("frames need a WebSocket")

    def finish(self, stream: int, code: int, reason: str, trailers: Headers) -> None:
        self._machine.send(End(stream=stream, trailers=trailers if trailers and self._machine.takes_trailers else ()))
        self._connection.output_ready()

    def respond(
        self,
        stream: int,
        status: int,
        headers: Headers,
        length: int | None,
        fresh: Headers,
        buffers: Sequence[Buffer],
        trailers: Headers,
    ) -> None:
        inbound = self._inbound  # the next request is not opened before the answer to this one is whole
        # A refused handshake closes too: its client has no other use for the connection.
        if inbound is not None and not inbound.input_ended:
            self._machine.close_after_response()
        connection = self._connection
        if length is not None:
            connection.whole_answer = self._machine.respond(stream, status, headers, buffers, fresh, length)
            connection.output_ready()
            return
        self._machine.send(Response(stream=stream, status=status, headers=[*headers, *fresh]))
        if buffers:
            self._machine.send_data(stream, buffers)
        self.finish(stream, 1000, "", trailers)

    def reset(self, stream: int, ending: Ending) -> None:
        # HTTP/1.1 can only say "not complete" by ending the connection before the last chunk or byte.
        self._connection.lost(ending)

    def land(self, stream: int, buffer: memoryview) -> int:
        self._machine.land(stream, buffer)
        self._connection.read_more()
        return 0

    def reserved(self, stream: int) -> int:
        return 0

    def charge(self, stream: int, account: Budget) -> int:
        return 0

    def release(self, stream: int) -> None:
        connection, current = self._connection, self._current
        if current is None or current.stream != stream or current.ending is not None:  # else idle from its last byte on
            self._idle_since = connection.clock()
        if connection.reading_paused:
            connection.read_more()

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        connection, limits, current = self._connection, self._connection.limits, self._current
        if self._refused is not None and now - self._head_since > limits.head_timeout:
            self._refuse(self._refused)
        if now >= connection.leaves_at:
            connection.leaves_at = math.inf
            connection.server.connection_ended(Closing.AGED)
            self.end_with_answer()
        keep_alive = min(limits.keep_alive, _QUIET) if self._parting else limits.keep_alive
        if current is not None and current.ending is None:
            if self._machine.unread:
                connection.pump()  # for bytes that have landed meanwhile
        elif self._machine.unread or not connection.requests:
            if now - max(self._idle_since, self._head_since) > limits.head_timeout:
                self._end(Closing.HEAD_TIMEOUT)
        elif now - self._idle_since > keep_alive and not connection.exchanges:
            self._end(Closing.IDLE)
        if self._failed:
            connection.output_ready()

    def end_with_answer(self) -> None:
        """Makes an answer announce the connection's close: the current one if its head has not left, else the next. Unlike
        a drain, it does not close a connection without a request: the client may be about to send one, and must be told
        before."""
        self._parting, self._last_request = True, 0
        current = self._current
        if current is not None and current.ending is None and not current.outbound.status:
            self._machine.close_after_response()

    def _end(self, closing: Closing) -> None:
        if not self._failed:
            self._failed = True
            if not self._parting:
                self._connection.server.connection_ended(closing)

    def close(self) -> None:
        self._machine.close()
        self._current = self._inbound = None  # connection and wire form a cycle, which would keep the exchange's memory

    def drain(self) -> None:
        self._connection.leaves_at = math.inf
        self._machine.close_after_response()
        self._draining = True
        if self._refused is not None:
            self._refuse(self._refused)

    def dismiss(self) -> None:
        self.drain()
        self._connection.output_ready()
