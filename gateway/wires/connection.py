"""One connection: its reader, its writer, its exchanges, and the edge that no exception crosses."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, final

import trio

from gateway.doorbell import Doorbell
from gateway.errors import Drained, Ending, TransportLost
from gateway.exchange import Exchange, Wire
from protocols.errors import RemoteProtocolError
from protocols.events import Buffer, Request, Sent

if TYPE_CHECKING:
    from gateway.config import Config, LimitsConfig
    from gateway.transport import Transport
    from protocols.buffers import ByteBudget

log = logging.getLogger("gateway.connection")

_WRITE_AT_MOST = 256 * 1024
# After our last byte an unread upload must be swallowed for a moment: closing over unread bytes makes the kernel
# send RST, which can destroy the answer before the client reads it (RFC 9112 section 9.6).
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 4 * 1024 * 1024


class ConnectionWire(Wire, Protocol):
    """A machine with its driver's rules; what a connection needs beyond what its exchanges need."""

    def may_read(self) -> bool: ...
    def get_buffer(self) -> memoryview | None: ...
    def buffer_updated(self, n: int) -> None: ...
    def receive_data(self, data: memoryview) -> None: ...
    def receive_eof(self) -> None: ...
    def pump(self, at_most: int) -> bool:
        """Takes events from the machine and hands them on; True when it has no more. Raises RemoteProtocolError."""
        ...

    def protocol_error(self, error: RemoteProtocolError) -> None:
        """Says goodbye as the wire does; the connection closes when that is written."""
        ...

    def data_to_send(self, at_most: int) -> list[Buffer]: ...
    def data_sent(self) -> Sent: ...
    @property
    def over(self) -> bool:
        """Nothing will be written any more: the connection may close once its output is out."""
        ...

    def tick(self, now: float) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None:
        """The transport is gone and no exchange runs any more: what the machine still holds of the budget goes back."""
        ...


class Server(Protocol):
    """What a connection needs from the server it belongs to."""

    config: Config
    limits: LimitsConfig
    budget: ByteBudget
    scratch: memoryview

    @property
    def draining(self) -> bool: ...

    def new_id(self) -> str: ...
    def flush_soon(self, connection: Connection) -> None: ...
    async def handle(self, exchange: Exchange) -> None: ...
    def exchange_opened(self, exchange: Exchange) -> None: ...
    def exchange_closed(self, exchange: Exchange) -> None: ...


@final
class Connection:
    """Drives one wire over one transport.

    One task reads, the server's flusher writes (and a task of ours while the transport is full), and each exchange has
    one; none of the first two ever waits for a model. The connection is over when the wire says so, when the transport
    fails, or when the server cancels it; its exchanges then have their endings and everything they held is given back.
    """

    def __init__(self, server: Server, transport: Transport, make_wire: Callable[[Connection], ConnectionWire]) -> None:
        self.server, self.transport = server, transport
        self.limits, self.budget = server.limits, server.budget
        self.peer = transport.peer
        self.exchanges: dict[int, Exchange] = {}
        self.nursery: trio.Nursery
        self.eof = False
        self.last_received = self.last_sent = trio.current_time()
        self.requests = 0
        self._read_bell = Doorbell()
        self._reading, self._read_over = trio.CancelScope(), trio.Event()
        self.reading_paused = self._behind = False
        self._dirty = self._blocked = self._closing = self._ended = False
        self._blocked_since: float | None = None
        self._lost: Ending | None = None
        self.wire = make_wire(self)

    # -- life ------------------------------------------------------------------------------------------------------

    async def run(self, received: bytes = b"") -> None:
        """Serves the connection to its end; `received` was read from it already. Raises nothing of its own."""
        try:
            async with trio.open_nursery() as self.nursery:
                if received:
                    self.wire.receive_data(memoryview(received))
                    self.pump()
                await self._guard(self._read)
                await trio.sleep_forever()  # whoever ends the connection cancels the nursery
        finally:
            self._ended = True
            self._cut_all(self._lost or (Ending.CANCELLED if self.eof else Ending.LOST))
            self.wire.close()
            self.transport.close()

    async def _guard(self, task: Callable[..., Awaitable[None]], *arguments: list[Buffer]) -> None:
        try:
            await task(*arguments)
        except Exception as e:
            self._fail(e)

    def _contain(self, act: Callable[..., None], *arguments: float) -> None:
        """The server's tasks come in here: what goes wrong ends this connection and not them."""
        if self._ended:
            return
        try:
            act(*arguments)
        except Exception as e:
            self._fail(e)

    def _fail(self, error: Exception) -> None:
        ending = Ending.LOST
        if isinstance(error, TransportLost):
            log.debug("transport lost", extra={"peer": self.peer, "reason": str(error)})
            if error.left or self.eof:
                ending = Ending.CANCELLED
        else:
            log.error("connection failed", extra={"peer": self.peer}, exc_info=error)
        try:
            self.lost(ending)
        except Exception:
            log.exception("connection failed", extra={"peer": self.peer})
            self.nursery.cancel_scope.cancel()

    def lost(self, ending: Ending) -> None:
        """The transport is gone: every exchange ends, then the connection. What is still scheduled reads and writes no
        more: the endings are decided."""
        self._lost = self._lost or ending
        self._cut_all(ending)
        self.nursery.cancel_scope.cancel()

    def _cut_all(self, ending: Ending) -> None:
        for exchange in list(self.exchanges.values()):
            exchange.cut(ending)

    # -- reading ---------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            with self._reading:
                await self._read_loop()
        finally:
            self._read_over.set()

    async def _read_loop(self) -> None:
        transport, scratch = self.transport, self.server.scratch
        ready = True  # worth a try without a wait
        while True:
            if self._behind or not self.wire.may_read():
                self.reading_paused = True
                await self._read_bell.wait()
                self.reading_paused = False
                continue
            if not ready:
                await transport.wait_readable()
                ready = True
                continue  # the wire may have changed its mind, or its buffer
            target = self.wire.get_buffer()
            buffer = scratch if target is None else target
            n = transport.try_receive_into(buffer)
            if n is None:
                ready = False
                continue
            self.last_received = trio.current_time()
            if n == 0:
                self.eof = True
                self.wire.receive_eof()
            elif target is None:
                self.wire.receive_data(scratch[:n])
            else:
                self.wire.buffer_updated(n)
            ready = n == len(buffer)
            del target, buffer  # a reader that waits, or that was cancelled, must not keep a body alive
            self.pump()
            if self.eof:
                return
            if ready:
                await trio.lowlevel.checkpoint()

    def pump(self) -> None:
        """Hands on what the machine has: `limits.checkpoint_events` at once, the rest when others had their turn."""
        if not self._behind and not self._pump_some():
            self._behind = True
            self.nursery.start_soon(self._guard, self._catch_up)

    def _pump_some(self) -> bool:
        if self._lost:
            return True
        try:
            done = self.wire.pump(self.limits.checkpoint_events)
        except RemoteProtocolError as e:
            log.info("protocol error", extra={"peer": self.peer, "wire": self.wire.name, "reason": str(e)[:300]})
            self.wire.protocol_error(e)
            done = True
        self.output_ready()
        return done

    async def _catch_up(self) -> None:
        await trio.lowlevel.checkpoint()
        while not self._pump_some():
            await trio.lowlevel.checkpoint()
        self._behind = False
        self.read_more()

    def read_more(self) -> None:
        """Something was consumed: a reader that had stopped looks again."""
        if self.reading_paused:
            self._read_bell.ring()

    # -- writing ---------------------------------------------------------------------------------------------------

    def output_ready(self) -> None:
        """The machine may have bytes, or be over: the server's flusher looks in its next turn, and what became ready
        until then leaves together."""
        if not self._dirty and not self._blocked:
            self._dirty = True
            self.server.flush_soon(self)

    def flush(self) -> None:
        """Writes what is ready, as far as the transport takes it. Called by the server's flusher alone."""
        self._dirty = False
        if not self._blocked:
            self._contain(self._write)

    def _write(self) -> None:
        transport, wire, written = self.transport, self.wire, 0
        while not self.nursery.cancel_scope.cancel_called:
            if written >= _WRITE_AT_MOST:
                self.output_ready()  # others have their turn first
                return
            buffers = wire.data_to_send(_WRITE_AT_MOST)
            rest = [b for b in buffers if len(b)]  # to a transport, nothing taken means that it would block
            if rest:
                n = transport.try_send(rest)
                written += n
                rest = _after(rest, n)
                self.last_sent = trio.current_time()
            if rest or transport.pending:
                self._blocked = True
                self.nursery.start_soon(self._guard, self._write_rest, rest)
                return
            # also when there was nothing: an end without bytes of its own, such as a declared length that is met, shows here
            ended = self._sent(wire.data_sent())
            if not buffers and not ended:
                if wire.over and not self._closing:
                    self._closing = True
                    self.nursery.start_soon(self._guard, self._close)
                return

    async def _write_rest(self, rest: list[Buffer]) -> None:
        """The transport is full: waits for it, and is the writer until all of this is taken."""
        transport = self.transport
        self._blocked_since = trio.current_time()
        while rest or transport.pending:
            await transport.wait_writable()
            if self._lost:
                return
            n = transport.try_send(rest)
            if n:
                self._blocked_since = self.last_sent = trio.current_time()
                rest = _after(rest, n)
        self._blocked_since, self._blocked = None, False
        self._sent(self.wire.data_sent())
        self.output_ready()

    async def _close(self) -> None:
        self._reading.cancel()
        await self._read_over.wait()
        await self._linger()
        self.nursery.cancel_scope.cancel()

    def _sent(self, sent: Sent) -> bool:
        for stream in sent.room:
            exchange = self.exchanges.get(stream)
            if exchange is not None:
                exchange.room_changed()
        for stream in sent.ended:
            exchange = self.exchanges.get(stream)
            if exchange is not None:
                exchange.ended()
        if sent.ended:
            self.pump()
        return bool(sent.ended)

    async def _linger(self) -> None:
        if self.eof:
            return
        self.transport.send_eof()
        swallowed = 0
        with trio.move_on_after(_LINGER_SECONDS):
            while swallowed < _LINGER_BYTES:
                n = self.transport.try_receive_into(self.server.scratch)
                if n == 0:
                    return
                if n is None:
                    await self.transport.wait_readable()
                else:
                    swallowed += n
                    await trio.lowlevel.checkpoint()

    # -- exchanges -------------------------------------------------------------------------------------------------

    def open_exchange(self, request: Request) -> Exchange:
        """A request head has arrived: its exchange starts in a task of its own."""
        self.requests += 1
        exchange = Exchange(self, self.wire, request, id=self.server.new_id(), now=self.last_received)
        self.exchanges[exchange.stream] = exchange
        self.server.exchange_opened(exchange)
        self.nursery.start_soon(self._run_exchange, exchange)
        return exchange

    async def _run_exchange(self, exchange: Exchange) -> None:
        try:
            await self.server.handle(exchange)
        finally:
            exchange.returned()

    def exchange_closed(self, exchange: Exchange) -> None:
        """The exchange has its ending and its task is done."""
        if self.exchanges.get(exchange.stream) is exchange:
            del self.exchanges[exchange.stream]
        self.server.exchange_closed(exchange)
        self.output_ready()

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """The server's coarse timer looks at the stamps: stalls, silence, hang-ups, and the wire's own times."""
        self._contain(self._look_at_stamps, now)

    def drain(self) -> None:
        """Says goodbye: no new requests, live exchanges go on."""
        self._contain(self.wire.drain)
        self.output_ready()

    def _look_at_stamps(self, now: float) -> None:
        stall = self.limits.write_stall
        if stall and self._blocked_since is not None and now - self._blocked_since > stall:
            log.info("write stalled", extra={"peer": self.peer, "seconds": stall, "setting": "limits.write_stall"})
            self.lost(Ending.LOST)
        elif self.reading_paused and self.exchanges and self.transport.hung_up():
            self.lost(Ending.CANCELLED)
        else:
            self.wire.tick(now)

    def drain_now(self) -> None:
        """The drain deadline has passed: what still runs gets its ending."""
        for exchange in list(self.exchanges.values()):
            exchange.interrupt(Drained("the server is shutting down and its drain deadline (drain.timeout) has passed"))


def _after(buffers: list[Buffer], n: int) -> list[Buffer]:
    """What is left of the buffers once their first n bytes are gone."""
    for i, buffer in enumerate(buffers):
        size = len(buffer)
        if n < size:
            return [memoryview(buffer)[n:], *buffers[i + 1 :]]
        n -= size
    return []
