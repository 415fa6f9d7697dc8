"""HTTP/2 as a wire: many exchanges on one connection, each with its own window and its own queue."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import msgspec

from gateway.config.fields import said_of
from gateway.core.connection import socket_hop, tell
from gateway.core.contracts import EVENTS_A_LOOK, LAST_WORD, REQUESTS_AT_ONCE, Hop
from gateway.core.exchange import Exchange
from gateway.core.linger import Parting
from gateway.core.memory import no_bytes
from gateway.core.server import allows_request
from gateway.errors import Closing, Ending, SlowReader
from gateway.wires.floods import GOODBYE, allowances_of, end_exchanges, report
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import (
    NEED_DATA,
    TURN,
    Buffer,
    ConnectionEnd,
    Data,
    End,
    GoAway,
    Headers,
    NoRoom,
    Opcode,
    Refused,
    Request,
    Reset,
    Response,
    Sent,
)
from protocols.floods import Flood, FloodPolicy
from protocols.grpc.heads import trailers_only
from protocols.grpc.metadata import is_grpc
from protocols.grpc.status import StatusCode
from protocols.http2.connection import HTTP2Connection, HTTP2Limits
from protocols.http2.floods import HTTP2_FLOODS
from protocols.http2.frames import Code
from protocols.http2.unfinished import Part
from protocols.roles import Role

if TYPE_CHECKING:
    from gateway.config import HTTP2Config, LimitsConfig
    from gateway.core.connection import Connection
    from protocols.buffers import Budget

log = logging.getLogger("gateway.connection")

_INTERNAL_ERROR, _CANCEL, _ENHANCE_YOUR_CALM = 2, 8, 11  # RFC 9113 section 7
_CODES = {431: StatusCode.RESOURCE_EXHAUSTED}  # how gRPC says the statuses of a Refused; malformed ones are INTERNAL
_BEGUN = {Part.SETTINGS: "the first SETTINGS", Part.HEAD: "a header block", Part.FRAME: "the head of a frame"}
_ENDED_BY_US = (Ending.CANCELLED, Ending.DRAINED, Ending.OPERATOR, Ending.DEADLINE, Ending.LOST)


@functools.lru_cache(maxsize=8)
def _limits_of(limits: LimitsConfig, http2: HTTP2Config) -> HTTP2Limits:
    """One object for all connections."""
    return HTTP2Limits(**said_of(HTTP2Limits, limits, http2))


@final
class HTTP2Wire:
    """Serves HTTP/2. If a stream's model does not read, only the window of that stream closes; the other streams go on.
    END_STREAM is a half-close. RST_STREAM means that the client has left."""

    name = "http/2"
    windowed, exclusive = True, False

    def __init__(self, connection: Connection, *, scheme: bytes) -> None:
        self._connection, config = connection, connection.server.config.http2
        self._idle_since = now = connection.clock()
        self._machine = HTTP2Connection(
            Role.SERVER,
            _limits_of(connection.limits, config),
            budget=connection.budget,
            scheme=scheme,
            date=connection.server.date,
            now=now,
        )
        self._counters = self._machine.counters
        self._floods = FloodPolicy(allowances_of(HTTP2_FLOODS, config.floods, 2 * config.streams), now)
        # `_counted`: true once this connection is counted as one that the server ended.
        self._failed = self._gone = self._written = self._counted = False
        self._parting = False  # the GOAWAY leaves with the next answer that ends
        self._ended_at: float | None = None  # when we ended it because of what the peer does
        self._draining_since: float | None = None
        connection.output_ready()
        if connection.server.leaving:
            self.drain()

    # -- receiving -------------------------------------------------------------------------------------------------

    def receive_buffer(self, scratch: memoryview) -> memoryview | None:
        if self._machine.choked or self._ended_at is not None:
            return None  # windows bound the rest
        return self._connection.server.long_scratch if self._machine.lands else scratch

    def buffer_updated(self, n: int) -> bool:
        self.receive_data(self._connection.server.long_scratch[:n])
        return True

    def receive_data(self, data: memoryview) -> None:
        self._machine.now = self._connection.last_received
        self._machine.receive_data(data)

    def receive_eof(self) -> None:
        self._machine.receive_eof()

    def pump(self, at_most: int, until: float) -> bool:
        if self._failed:
            return True
        done = self._hand_on(at_most, until)
        return (self._counters.total >= self._floods.due and self._judge()) or done

    def _hand_on(self, at_most: int, until: float) -> bool:
        connection = self._connection
        connection.output_ready()  # acknowledgements and windows
        exchanges, next_event = connection.exchanges, self._machine.next_event
        requests = at_most if connection.heavy else REQUESTS_AT_ONCE
        while at_most > 0:
            for _ in range(min(at_most, EVENTS_A_LOOK)):
                event = next_event()
                # By exact type, the usual ones first: a `case` that does not match costs more than its branch.
                if type(event) is Data:
                    exchange = exchanges.get(event.stream)
                    piece = event.buffers[0]
                    if exchange is None:
                        self._machine.credit(event.stream, len(piece))
                    else:
                        (exchange.inbound or exchange.open_inbound()).feed(piece, len(piece), connection.last_received)
                elif event is NEED_DATA:
                    return True
                elif event is TURN:
                    if self._counters.total >= self._floods.due and self._judge():
                        return True
                    if connection.clock() > until:
                        return False
                    continue
                elif type(event) is End:
                    exchange = exchanges.get(event.stream)
                    if exchange is not None:
                        exchange.open_inbound().feed_end()
                elif type(event) is Request:
                    connection.open_exchange(event)
                    if not requests:  # one more than allowed: the events before it have been handed on
                        return False
                    requests -= 1
                elif type(event) is Reset:
                    exchange = exchanges.get(event.stream)
                    if exchange is not None:
                        exchange.peer_gone(Ending.CANCELLED)
                elif type(event) is Refused:
                    self._refuse(event)
                elif type(event) is NoRoom:
                    self._dropped(event)
                elif type(event) is ConnectionEnd:
                    self._leave()
                    return True
                else:
                    assert type(event) is GoAway  # RFC 9113 section 6.8: streams that are open go on
            at_most -= EVENTS_A_LOOK
            if connection.clock() > until:
                return False
        return False

    def _judge(self) -> bool:
        """True if the peer floods the connection, which this has ended."""
        if self._gone or self._failed:
            return False
        connection = self._connection
        return self._verdict(self._floods.judge(self._machine.flood_counters(connection.completed), connection.clock()))

    def _verdict(self, flood: Flood | None) -> bool:
        if flood is None:
            return False
        report(self._connection, flood, self._end(Closing.FLOOD, f"too many {flood.kind} frames (http2.floods)"))
        return True

    def _end(self, closing: Closing, reason: str) -> int:
        """Ends the connection because of what its peer does. Returns how many exchanges that cut."""
        self._failed, self._ended_at = True, self._connection.clock()
        self._machine.give_up(Code.ENHANCE_YOUR_CALM, reason)
        return end_exchanges(self._connection, closing)

    def _refuse(self, event: Refused) -> None:
        beside = self._connection.server.beside(event.method, event.headers)
        if any(name == b"content-type" and is_grpc(value) for name, value in event.headers):
            code = _CODES.get(event.status, StatusCode.INTERNAL)
            self._machine.respond(event.stream, 200, (*trailers_only(code, event.message[:400]), *beside))
        elif allows_request(beside):  # the request itself then gets the refusal, which its page can read
            self._machine.respond(event.stream, 204, beside)
        else:
            body = msgspec.json.encode({"error": event.message[:400]})
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *beside]
            self._machine.respond(event.stream, event.status, headers, (body,))
        self._machine.drop(event.stream)

    def _dropped(self, event: NoRoom) -> None:
        """Interrupts an exchange whose bytes were dropped because the budget has no room. If its answer has begun, resets
        the stream too. A whole answer needs no more input, and goes on."""
        exchange = self._connection.exchanges.get(event.stream)
        if exchange is None or exchange.outbound.finishing is not None:
            return
        exchange.interrupt(no_bytes(exchange.account, event.n))
        if exchange.outbound.status:
            self._cut(exchange, Ending.REFUSED, _ENHANCE_YOUR_CALM)

    def _leave(self) -> None:
        """Ends the connection's unfinished exchanges: the client sends no more, so it has left. Whole answers still go out
        as far as their windows let them."""
        self._gone = True
        exchanges = [e for e in self._connection.exchanges.values() if e.ending is None]
        unfinished = [exchange for exchange in exchanges if exchange.outbound.finishing is None]
        if len(unfinished) == len(exchanges):
            self._connection.lost(Ending.CANCELLED)
        else:
            tell(self._connection, unfinished, lambda exchange: self._cut(exchange, Ending.CANCELLED))

    def _cut(self, exchange: Exchange, ending: Ending, code: int = _CANCEL) -> None:
        exchange.peer_gone(ending)
        if self._machine.is_open(exchange.stream):
            self._machine.send(Reset(stream=exchange.stream, code=code))
            self._connection.output_ready()

    def protocol_error(self, error: RemoteProtocolError) -> None:
        self._failed = True
        connection = self._connection
        ending = Ending.CANCELLED if connection.eof else Ending.REFUSED
        if ending is Ending.REFUSED:
            connection.parting = Parting.USUAL
        tell(connection, connection.exchanges.values(), lambda exchange: exchange.peer_gone(ending))

    # -- sending ---------------------------------------------------------------------------------------------------

    def data_to_send(self, at_most: int) -> list[Buffer]:
        buffers = self._machine.data_to_send(at_most)
        self._written = bool(buffers)
        return buffers

    def data_sent(self) -> Sent:
        if not self._written:
            return Sent()
        sent = self._machine.data_sent()
        self._connection.read_more()
        return sent

    def held(self) -> tuple[int, int]:
        machine = self._machine
        return machine.unconsumed, sum(map(machine.queued, self._connection.exchanges))

    def hops(self, stream: int) -> list[Hop]:
        machine = self._machine
        left, window = machine.window(stream)  # `left` may exceed the initial `window`
        return [
            Hop("received", *machine.received(stream)),
            Hop("queued", machine.queued(stream), self._connection.limits.send_buffer),
            *socket_hop(self._connection.transport),
            Hop("window", max(0, window - left), max(window, left)),
        ]

    @property
    def idle_since(self) -> float:
        return self._idle_since

    def end_idle(self) -> None:
        self._machine.shutdown(last=True)

    @property
    def over(self) -> bool:
        return self._gone or self._failed or (self._machine.must_close and not self._connection.exchanges)

    def credit(self, stream: int, n: int) -> None:
        self._machine.credit(stream, n)
        self._connection.output_ready()

    def proceed(self, stream: int) -> None:
        if self._machine.is_open(stream):
            self._machine.send(Response(stream=stream, status=100))
            self._connection.output_ready()

    def room(self, stream: int) -> int:
        return self._machine.room(stream)

    def empty(self, stream: int) -> bool:
        return not self._machine.queued(stream)

    def takes(self, stream: int) -> bool:
        # The socket may be full of what other streams have there.
        return self.empty(stream) and self._machine.window(stream)[0] > 0

    def start(self, stream: int, status: int, headers: Headers, trailers: bool) -> None:
        if self._machine.is_open(stream):
            self._machine.send(Response(stream=stream, status=status, headers=headers))
            self._connection.output_ready()

    def push(self, stream: int, buffers: Sequence[Buffer]) -> None:
        try:
            self._machine.send_data(stream, buffers)
        except LocalProtocolError:
            if self._machine.is_open(stream):
                raise
        else:
            self._connection.output_ready()

    def push_pieces(self, stream: int, pieces: Sequence[bytes]) -> None:
        self.push(stream, pieces)

    def push_frame(self, stream: int, opcode: Opcode, fin: bool, buffers: Sequence[Buffer]) -> None:
        raise AssertionError("frames need a WebSocket")

    def finish(self, stream: int, code: int, reason: str, trailers: Headers) -> None:
        if self._machine.is_open(stream):
            self._machine.send(End(stream=stream, trailers=trailers))
            self._connection.output_ready()
            if self._parting:
                self.drain()

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
        if length is not None:
            fields = [*headers, (b"content-length", b"%d" % length), *fresh]
        elif buffers:
            fields = [*headers, *fresh]
        else:  # without a body, one frame carries head and trailers: gRPC's clients expect that of a refusal
            fields, trailers = [*headers, *fresh, *trailers], ()
        try:
            self._machine.respond(stream, status, fields, buffers, trailers)
        except LocalProtocolError:
            if self._machine.is_open(stream):
                raise
        else:
            self._connection.output_ready()
            if self._parting:
                self.drain()

    def reset(self, stream: int, ending: Ending) -> None:
        code = _CANCEL if ending in _ENDED_BY_US else _INTERNAL_ERROR
        if self._machine.is_open(stream):
            self._machine.send(Reset(stream=stream, code=code))
            self._connection.output_ready()

    def land(self, stream: int, buffer: memoryview) -> int | None:
        return 2 if self._machine.land(stream, buffer) else None

    def reserved(self, stream: int) -> int:
        return self._machine.reserved(stream)

    def charge(self, stream: int, account: Budget) -> int:
        return self._machine.charge(stream, account)

    def release(self, stream: int) -> None:
        self._idle_since = self._connection.clock()
        self._machine.drop(stream)
        self._connection.output_ready()

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        connection, limits, machine = self._connection, self._connection.limits, self._machine
        if self._ended_at is not None:
            if now - self._ended_at > GOODBYE:  # the peer has not taken even the goodbye
                connection.lost(Ending.REFUSED)
            return
        machine.now = now
        if limits.write_stall:
            stalled = [e for e in connection.exchanges.values() if self._untaken(e, now) > limits.write_stall]
            if stalled:
                tell(connection, stalled, lambda exchange: self._stalled(exchange, limits.write_stall))
        machine.trim()
        if machine.lingering and machine.tick():
            connection.output_ready()
        if self._draining_since is not None and now > self._draining_since:
            self._draining_since = None
            machine.shutdown(last=True)
            connection.output_ready()
        if self._failed or self._gone:
            return
        if now >= connection.leaves_at:
            connection.server.connection_ended(Closing.AGED)
            self._counted = True
            self.drain()
            connection.output_ready()
        if self._verdict(self._floods.tick(machine.flood_counters(connection.completed), now)):
            return
        if not connection.exchanges and self._idle_for_too_long(now):
            if self._draining_since is None:
                self.drain()  # in two steps, since a request may be on its way
                connection.output_ready()
            if not self._counted:
                self._counted = True
                connection.server.connection_ended(Closing.IDLE)
        elif not connection.behind and not connection.reading_paused:
            self._look_at_what_has_begun(now)

    def _idle_for_too_long(self, now: float) -> bool:
        """True if no request came for too long. Other bytes do not keep the connection; PINGs do, for `http2.ping_life`."""
        asked, keep, pinged = self._idle_since, self._connection.limits.keep_alive, self._machine.pinged_at
        if pinged is None or now - asked > max(keep, self._connection.server.config.http2.ping_life):
            return now - asked > keep
        return now - max(asked, pinged) > keep

    def _look_at_what_has_begun(self, now: float) -> None:
        """Ends the connection if a part of its protocol (SETTINGS, a header block, a frame) has begun and does not arrive in
        time: otherwise it would hold memory for ever."""
        begun = self._machine.waits_for
        if begun is None:
            return
        limits, lasted = self._connection.limits, now - begun.since
        if begun.what is not Part.PAYLOAD:
            if lasted > limits.head_timeout:
                self._end_slow(Closing.HEAD_TIMEOUT, f"{_BEGUN[begun.what]} took too long (limits.head_timeout)")
        elif now - self._connection.last_received > limits.body_silence:
            self._end_slow(Closing.STALLED, "no byte of a frame that has begun (limits.body_silence)")
        elif lasted > limits.body_silence and begun.nbytes < limits.body_rate * lasted:
            self._end_slow(Closing.STALLED, "a frame that has begun came too slowly (limits.body_rate)")

    def _end_slow(self, closing: Closing, reason: str) -> None:
        facts = {"peer": self._connection.peer, "wire": self.name, "reason": reason}
        self._connection.server.log_limits.write(log, "protocol error", facts)
        self._end(closing, reason)

    def _stalled(self, exchange: Exchange, stall: float) -> None:
        """Stops the model of a stalled exchange, which queues an error behind what is queued already, for a client that
        reads again. Resets the stream only if the client does not read that, or if the answer was whole: many clients take a
        bare reset for a good end."""
        waited = self._untaken(exchange, self._connection.clock())
        if waited <= stall:  # it has read again before its turn came
            return
        told = exchange.interruption is not None
        if not told:
            facts = {"peer": self._connection.peer, "id": exchange.id, "setting": "limits.write_stall"}
            self._connection.server.log_limits.write(log, "stream stalled", facts)
            exchange.interrupt(SlowReader(stall))
        if waited > stall + LAST_WORD or (not told and exchange.outbound.finishing is not None):
            self._cut(exchange, Ending.LOST)

    def _untaken(self, exchange: Exchange, now: float) -> float:
        """Returns for how many seconds the peer has taken none of the queued bytes."""
        if self.empty(exchange.stream) or exchange.ending is not None:
            exchange.outbound.moved_at = now
        elif self._machine.leaving(exchange.stream):  # part of a write that the peer takes piece by piece
            exchange.outbound.moved_at = max(exchange.outbound.moved_at, self._connection.last_sent)
        return now - max(exchange.outbound.moved_at, exchange.outbound.sent_at)

    def close(self) -> None:
        self._machine.close()
        for stream in self._machine.windows():  # streams whose bytes reached no exchange
            self._machine.drop(stream)

    def dismiss(self) -> None:
        self._machine.shutdown(last=True)
        self._connection.output_ready()

    def drain(self) -> None:
        """Sends the first GOAWAY. The machine sends the second when the peer has answered its PING, and `tick` sends it to a
        peer that does not answer."""
        self._connection.leaves_at, self._parting = math.inf, False
        self._machine.shutdown(last=False)
        self._draining_since = self._connection.clock()

    def end_with_answer(self) -> None:
        # Not at once: a client of HTTP/2 that has not sent its first request would open another connection, again and again.
        self._parting = self._draining_since is None
