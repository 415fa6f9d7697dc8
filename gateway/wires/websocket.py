"""WebSocket as a wire: one exchange for the connection's life, frames byte for byte, Ping, Pong and Close."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from gateway.core.connection import socket_hop
from gateway.core.contracts import EVENTS_A_LOOK, Hop
from gateway.core.exchange import Exchange
from gateway.core.inbound import PIECE
from gateway.core.time_limits import Pace
from gateway.errors import Closing, Ending, SlowUpload
from gateway.wires.floods import GOODBYE, allowances_of, end_exchanges, report
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import NEED_DATA, Buffer, Close, ConnectionEnd, Frame, Headers, Opcode, Ping, Pong, Sent
from protocols.floods import Flood, FloodPolicy
from protocols.roles import Role
from protocols.websocket.connection import WebSocketConnection, WebSocketLimits
from protocols.websocket.floods import WEBSOCKET_FLOODS, FrameCounters
from protocols.websocket.frames import FrameMemory

if TYPE_CHECKING:
    from gateway.core.connection import Connection, ConnectionWire
    from protocols.buffers import Budget
    from protocols.http1.connection import HTTP1Connection

log = logging.getLogger("gateway.connection")

_POLICY_VIOLATION = 1008  # RFC 6455 section 7.4.1


@functools.lru_cache(maxsize=8)
def _limits_of(part: int, send_buffer: int, check_utf8: bool) -> WebSocketLimits:
    """One object for all connections."""
    return WebSocketLimits(part=part, send_buffer=send_buffer, check_utf8=check_utf8)


@final
class WebSocketWire(FrameMemory):
    """Serves a connection whose upgrade was accepted.

    A Close of the client, like its FIN, means that it leaves: the model is cancelled and the Close is answered. The
    gateway's Close goes out when the exchange finishes; the client then has `websocket.close_timeout` to answer. A whole
    answer, Close included, is written even to a client that has sent its Close.
    """

    __slots__ = (  # to save memory: there may be many silent sessions
        "_before", "_choked", "_closing_since", "_config", "_connection", "_ended_at", "_exchange", "_failed",
        "_floods", "_gone", "_inbound", "_large", "_left", "_machine", "_pace", "_ping_at", "_pong_due",
    )  # fmt: skip
    name = "websocket"
    windowed, exclusive = False, False

    def __init__(self, connection: Connection, before: ConnectionWire, exchange: Exchange, machine: HTTP1Connection) -> None:
        self._connection, self._exchange, self._inbound = connection, exchange, exchange.open_inbound()
        self._config = connection.server.config.websocket
        self._before: ConnectionWire | None = before  # until its 101 is written
        self._large = 0  # bytes of the one large frame under way, paid from the budget
        self._machine = WebSocketConnection(
            Role.SERVER,
            _limits_of(self._config.part, connection.limits.send_buffer, self._config.check_utf8),
            memory=self,
        )
        self._pace: Pace | None = None  # how fast a frame under way arrives
        self._ping_at = now = connection.clock()
        self._floods = FloodPolicy(allowances_of(WEBSOCKET_FLOODS, self._config.floods), now)
        self._gone = False
        self._failed = False
        self._choked = False  # takes no input: while Pongs wait, or for good
        self._ended_at: float | None = None  # when we ended it because of what the peer does
        self._closing_since: float | None = None
        self._left = 0  # `bytes_out` of the answer when all of them had left
        self._pong_due: float | None = None
        connection.routed = None  # no further request comes
        unread = machine.switch()
        if unread:
            self._machine.receive_data(unread)
        connection.output_ready()

    def allocate(self, n: int) -> memoryview | None:
        return self._connection.server.frame_memory(n)

    def pay_landing(self, n: int) -> bool:
        if not self._exchange.account.try_reserve(n):
            return False
        self._large += n
        return True

    def _free(self) -> None:
        self._exchange.account.release(self._large)
        self._large = 0

    # -- receiving -------------------------------------------------------------------------------------------------

    def receive_buffer(self, scratch: memoryview) -> memoryview | None:
        if self._choked:
            return None
        machine = self._machine
        target = machine.get_buffer()
        if target is None:
            ahead = machine.unconsumed + self._inbound.waiting
            # If the exchange has nothing to take, the rest of a frame must come, even beyond the bound.
            return scratch if not ahead or ahead + machine.unread < self._connection.limits.read_ahead else None
        return target

    def buffer_updated(self, n: int) -> bool:
        self._machine.buffer_updated(n)
        return True

    def receive_data(self, data: memoryview) -> None:
        self._machine.receive_data(data)

    def receive_eof(self) -> None:
        self._machine.receive_eof()

    def pump(self, at_most: int, until: float) -> bool:
        if self._failed:
            return True
        done = self._hand_on(at_most, until)
        return (self._machine.counters.total >= self._floods.due and self._judge()) or done

    def _hand_on(self, at_most: int, until: float) -> bool:
        inbound, now = self._inbound, self._connection.last_received
        next_event = self._machine.next_event
        while at_most > 0:
            for _ in range(min(at_most, EVENTS_A_LOOK)):
                event = next_event()
                # By exact type, the usual ones first: a `case` that does not match costs more than its branch.
                if type(event) is Frame:
                    if self._large:
                        self._free()  # the exchange's inbox pays for it now
                    inbound.feed(event, len(event.data), now)
                elif event is NEED_DATA:
                    return True
                else:
                    self._connection.output_ready()  # for the machine's answer, or because it is over
                    match event:
                        case Close():
                            if self._exchange.outbound.finishing is None:
                                self._exchange.peer_gone(Ending.CANCELLED)
                        case ConnectionEnd():
                            self._gone = True
                            if self._exchange.outbound.finishing is None:
                                self._connection.lost(Ending.CANCELLED)
                            return True
                        case Pong():
                            self._pong_due = None
                        case _:
                            assert type(event) is Ping
                            self._choked = self._machine.choked
            at_most -= EVENTS_A_LOOK
            if self._connection.clock() > until:
                return False
        return False

    def _judge(self) -> bool:
        """True if the peer floods the connection, which this has ended."""
        if self._gone or self._failed:
            return False
        return self._verdict(self._floods.judge(self._counted(), self._connection.clock()))

    def _counted(self) -> FrameCounters:
        inbound = self._inbound
        return self._machine.flood_counters(inbound.received + inbound.waiting // PIECE + self._exchange.outbound.items_out)

    def _verdict(self, flood: Flood | None) -> bool:
        if flood is None:
            return False
        self._failed = self._choked = True
        self._ended_at = self._connection.clock()
        self._machine.give_up(_POLICY_VIOLATION, f"too many {flood.kind} frames (websocket.floods)")
        report(self._connection, flood, end_exchanges(self._connection, Closing.FLOOD))
        return True

    def protocol_error(self, error: RemoteProtocolError) -> None:
        self._failed = True
        self._free()
        self._exchange.peer_gone(Ending.CANCELLED if self._connection.eof else Ending.REFUSED)

    # -- sending ---------------------------------------------------------------------------------------------------

    def data_to_send(self, at_most: int) -> list[Buffer]:
        if self._before is not None:
            buffers = self._before.data_to_send(at_most)
            if buffers:
                return buffers
            self._before = None
            self._connection.pump_soon()  # frames that came with the handshake
        return self._machine.data_to_send(at_most)

    def data_sent(self) -> Sent | None:
        if self._before is not None:
            self._connection.output_ready()  # for bytes behind the handshake's answer
            return self._before.data_sent()
        sent = self._machine.data_sent()
        if not sent.room and not sent.ended:
            return sent
        if self._choked and self._ended_at is None:
            self._choked = False
            self._connection.read_more()
        stream, outbound = self._exchange.stream, self._exchange.outbound
        # Pings and Pongs do not count as bytes of the answer: a session that sends only these is silent.
        moved = outbound.bytes_out != self._left or outbound.waits
        if self.empty(stream):
            self._left = outbound.bytes_out
        return Sent(
            room=[stream] if sent.room and moved else [], ended=[stream] if sent.ended and outbound.finishing else []
        )

    def held(self) -> tuple[int, int]:
        machine, limits = self._machine, self._connection.limits
        return machine.unread + machine.unconsumed, limits.send_buffer - machine.room()

    def hops(self, stream: int) -> list[Hop]:
        (received, unsent), limits = self.held(), self._connection.limits
        hops = [Hop("received", received, limits.read_ahead), Hop("queued", unsent, limits.send_buffer)]
        return [*hops, *socket_hop(self._connection.transport)]

    @property
    def idle_since(self) -> None:
        return None

    def end_idle(self) -> None:
        raise AssertionError("a WebSocket is one exchange")

    @property
    def over(self) -> bool:
        return self._gone or self._failed or self._machine.closed

    def credit(self, stream: int, n: int) -> None:
        self._machine.credit(n)
        self._connection.read_more()

    def proceed(self, stream: int) -> None:
        raise AssertionError("an accepted upgrade has no Expect")

    def room(self, stream: int) -> int:
        return self._machine.room()

    def empty(self, stream: int) -> bool:
        return self._machine.room() >= self._connection.limits.send_buffer

    def takes(self, stream: int) -> bool:
        return not self._connection.blocked and self.empty(stream)

    def start(self, stream: int, status: int, headers: Headers, trailers: bool) -> None:
        raise AssertionError("the handshake is over")

    def push(self, stream: int, buffers: Sequence[Buffer]) -> None:
        self.push_frame(stream, Opcode.BINARY, True, buffers)

    def push_pieces(self, stream: int, pieces: Sequence[bytes]) -> None:
        for piece in pieces:
            self.push(stream, (piece,))

    def push_frame(self, stream: int, opcode: Opcode, fin: bool, buffers: Sequence[Buffer]) -> None:
        self._machine.send_frame(opcode, fin, buffers)
        self._connection.output_ready()

    def finish(self, stream: int, code: int, reason: str, trailers: Headers) -> None:
        self._close(code, reason)

    def _close(self, code: int, reason: str) -> None:
        try:
            self._machine.send(Close(code=code, reason=reason))
        except LocalProtocolError:
            return  # a Close is out already: the peer's, answered by the machine
        self._closing_since = self._connection.clock()
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
        raise AssertionError("the handshake is over")

    def reset(self, stream: int, ending: Ending) -> None:
        self._close(1011, "")

    def land(self, stream: int, buffer: memoryview) -> None:
        raise AssertionError("a WebSocket has no body")

    def reserved(self, stream: int) -> int:
        return self._large

    def charge(self, stream: int, account: Budget) -> int:
        return self._large

    def release(self, stream: int) -> None:
        self._connection.read_more()
        self._connection.output_ready()

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        config = self._config
        if self._ended_at is not None:
            if now - self._ended_at > GOODBYE:  # the peer has not taken even the goodbye
                self._connection.lost(Ending.REFUSED)
            return
        if not (self._gone or self._failed) and self._verdict(self._floods.tick(self._counted(), now)):
            return
        if (slow := self._too_slow(now)) is not None:
            self._exchange.interrupt(slow)
        if self._closing_since is not None:
            if now - self._closing_since > config.close_timeout:
                self._failed = True
                self._connection.output_ready()
        elif self._pong_due is not None:
            # Any received bytes count as a pong. While a slow model pauses reading, a pong cannot be read.
            if self._connection.last_received >= self._ping_at or self._connection.reading_paused:
                self._pong_due = None
            elif now > self._pong_due:
                facts = {"peer": self._connection.peer, "setting": "websocket.ping_timeout"}
                self._connection.server.log_limits.write(log, "no pong", facts)
                self._connection.lost(Ending.LOST)
        elif config.ping_interval and self._machine.is_open and now - self._heard > config.ping_interval:
            self._machine.send(Ping())
            self._ping_at, self._pong_due = now, now + config.ping_timeout
            self._connection.output_ready()

    def _too_slow(self, now: float) -> SlowUpload | None:
        """Returns the error for a frame that arrives too slowly; None if none does, or if reading is paused on this side."""
        connection, machine = self._connection, self._machine
        under_way = machine.under_way
        if under_way is None or connection.reading_paused or connection.behind:
            self._pace = None
            return None
        self._pace = pace = self._pace or Pace()
        which = self._exchange.arrived_at, machine.counters.control, self._pong_due
        return pace.look(which, under_way, now, connection.last_received, connection.limits)

    @property
    def _heard(self) -> float:
        return max(self._ping_at, self._connection.last_received)

    def close(self) -> None:
        self._free()
        self._machine.close()
        del self._exchange, self._inbound  # exchange and wire refer to each other: a cycle would keep its memory

    def dismiss(self) -> None:
        """Does nothing: a WebSocket takes no further requests."""

    def drain(self) -> None:
        return  # the client is told by Close 1001 at the drain deadline: the protocol has no earlier message

    def end_with_answer(self) -> None:
        """Does nothing: the session is the answer, and it goes on."""
