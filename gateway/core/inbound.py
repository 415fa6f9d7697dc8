"""The body of an exchange as it arrives: bytes in, paid for, and credit back when they are taken."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, Literal, final

import trio

from gateway.core.contracts import FEW
from gateway.core.memory import no_bytes
from gateway.core.time_limits import Pace
from gateway.core.waits import INPUT
from gateway.errors import SlowUpload
from protocols.buffers import ahead
from protocols.events import Buffer, Frame
from protocols.grpc.framing import length_of
from protocols.grpc.metadata import is_grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.core.contracts import Sink, Stream, Wire

PIECE = 128
"""Bytes that a waiting piece costs beside its own, for its objects and list entry: otherwise empty frames would be free."""
_SMALL = 512
_NOTHING: list[Buffer | Frame] = []  # never changed
_reschedule = trio.lowlevel.reschedule


class _Rests(Enum):
    """The reader of a body whose work has not begun, in place of a task. False: a look at `_reader` tells it from a task."""

    RESTS = 0

    def __bool__(self) -> Literal[False]:
        return False


_RESTS: Final = _Rests.RESTS


@final
class Inbound:
    """The body of an exchange that arrives piece by piece, or is to be taken so.

    The wire feeds it. `receive` takes a piece and gives its credit back; a cancelled `receive` has taken nothing.
    Alternatively, the whole body goes into one buffer, the `sink`: `gateway.core.whole_body`.
    """

    __slots__ = (
        "_arrived",
        "_closed",
        "_expects_continue",
        "_pace",
        "_prepaid",
        "_reader",
        "_taking",
        "assembly",
        "exchange",
        "held",
        "input_ended",
        "received",
        "sink",
        "under_way",
        "wire",
    )

    def __init__(self, exchange: Stream, wire: Wire, body: bytes | None = None, held: int = 0) -> None:
        """`body` is all of it if it came with the head: `held` was paid for it, and the wire wants no credit."""
        self.exchange, self.wire = exchange, wire
        # Pieces in the order of arrival; and pieces that `receive` takes, from the end of the list.
        self._arrived = self._taking = _NOTHING
        if body:
            self._arrived = [body]
        self.held = held
        """Bytes of the budget that pay for waiting pieces, on wires without windows."""
        self._prepaid = self.input_ended = body is not None
        """`input_ended`: true once all of the body has arrived. `_prepaid`: true if it came with the head."""
        self._expects_continue = exchange.request.expects_continue
        self.assembly = 0
        """Bytes of a message under way in a decoder, paid from the budget."""
        self.received = 0
        """Pieces that were taken. A WebSocket's pieces are frames."""
        self.sink: Sink | None = None
        self.under_way: Callable[[], tuple[object, int] | None] | None = None
        """Set by the code that puts messages together. It returns an identity of the incomplete message and how many bytes
        of it are here; None if no message has begun."""
        self._pace: Pace | None = None
        self._reader: trio.lowlevel.Task | _Rests | None = None  # waits for input
        self._closed = False

    # -- called by the wire ----------------------------------------------------------------------------------------

    def feed(self, item: Buffer | Frame, n: int, now: float) -> None:
        """Takes a piece of the body, for whose n bytes the wire wants credit."""
        exchange = self.exchange
        exchange.bytes_in += n
        exchange.arrived_at = now
        if self._closed:
            self.wire.credit(exchange.stream, n)
        elif self.sink is not None:
            assert not isinstance(item, Frame)
            self.sink.take(item, n)
            self.credit(n)
            if self.sink.landed is None:
                self._land(self.sink)  # not before: a body that is only announced takes no memory
        else:
            if self.wire.windowed:
                if n < _SMALL and self._arrived and self._joined(item, now):
                    return
            else:
                cost, budget = n + PIECE, exchange.account
                if not budget.try_reserve(cost):
                    self.wire.credit(exchange.stream, n)
                    exchange.interrupt(no_bytes(budget, cost))
                    return
                self.held += cost
            if self._arrived is _NOTHING:
                self._arrived = [item]
            else:
                self._arrived.append(item)
            if self._reader is not None:
                self.wake_reader(now)

    def _joined(self, item: Buffer | Frame, now: float) -> bool:
        """True if the small piece is now part of the last. The window bounds only bytes, and alone each small piece would
        hold thirty times its size."""
        last = self._arrived[-1]
        assert not isinstance(last, Frame)
        assert not isinstance(item, Frame)
        if len(last) >= _SMALL:
            return False
        self._arrived[-1] = whole = b"".join((last, item))
        self.exchange.copied += len(whole)
        if self._reader is not None:  # it rests: a task would have taken the last one at once
            self.wake_reader(now)
        return True

    def feed_end(self) -> None:
        """Called when the body is complete."""
        self.input_ended = True
        if self._reader is not None:
            self.wake_reader(self.exchange.owner.clock())

    @property
    def waiting(self) -> int:
        """Bytes that the pieces not taken yet cost beside their own."""
        return PIECE * (len(self._arrived) + len(self._taking))

    # -- called by the exchange's own task -------------------------------------------------------------------------

    async def receive(self) -> Buffer | Frame | None:
        """Returns the next piece of the body; None at its end, at every further call too. The piece's credit goes back to
        the peer with the return: call this when the consumer wants bytes, not before."""
        exchange = self.exchange
        if self._expects_continue:
            self.proceed()
        turn = exchange.outbound.turn
        if turn.over():
            await turn.renew()
        while not (taking := self._taking):
            if self._arrived:
                taking, self._arrived = self._arrived, _NOTHING
                if len(taking) > 1:
                    taking.reverse()
                    self._taking = taking
                break
            elif self.input_ended:
                turn.received -= 1
                return None
            elif self._closed:
                turn.received -= 1
                raise trio.ClosedResourceError("the exchange has ended")
            else:
                assert self._reader is None, "one task waits for input"
                self._reader = task = trio.lowlevel.current_task()
                exchange.parks_for(INPUT)
                await trio.lowlevel.wait_task_rescheduled(self._reader_cancelled)
                if task is not turn.task:  # else its runner has seen that it waited
                    turn.begin()
        item = taking.pop()
        n = len(item.data) if type(item) is Frame else len(item)
        turn.bytes -= n
        self.received += 1
        wire = self.wire
        if not wire.windowed:
            cost = n + PIECE
            self.held -= cost
            exchange.account.release(cost)
        if not self._prepaid:
            wire.credit(exchange.stream, n)
        return item

    def proceed(self) -> None:
        """Asks the client for the body, if it waits for that (`Expect: 100-continue`)."""
        exchange = self.exchange
        if self._expects_continue and not exchange.bytes_in and not exchange.outbound.status:
            self.wire.proceed(exchange.stream)

    async def wait_input(self) -> None:
        """Returns when the body has ended, or the sink wants no more of it."""
        assert self._reader is None, "one task waits for input"
        self._reader = task = trio.lowlevel.current_task()
        self.exchange.parks_for(INPUT)
        await trio.lowlevel.wait_task_rescheduled(self._reader_cancelled)
        if task is not self.exchange.outbound.turn.task:
            self.exchange.outbound.turn.begin()

    @property
    def waits(self) -> bool:
        """True if a task waits for input."""
        return self._reader is not None

    def wake_reader(self, now: float) -> None:
        """Wakes the task that waits, if one does. Its wait counts until `now`, even if it runs later."""
        reader, self._reader = self._reader, None
        if reader:
            self.exchange.has_waited(INPUT, now)
            _reschedule(reader)
        elif reader is not None:
            if self._work_would_wait():
                self._reader = reader
            else:
                self.exchange.has_waited(INPUT, now)
                self.exchange.owner.server.runner.start_again(self.exchange)

    def rest(self) -> bool:
        """Makes the exchange rest before its work begins, if that would only wait. It then waits for input without a task,
        and its runner starts it again when there is work, and when it ends before. False, and nothing done, if its work is
        to begin now.

        So rest requests with a Content-Length and calls of gRPC, until their body or first message is here, or a few bytes
        of it. Any other client may wait for the begin of its answer before it sends."""
        exchange = self.exchange
        if not exchange.request.content_length and (
            b"grpc-timeout" in exchange.fields or not is_grpc(exchange.fields.get(b"content-type", b""))
        ):
            return False
        if self._expects_continue or not self._work_would_wait():
            return False
        self._reader = _RESTS
        exchange.parks_for(INPUT)
        return True

    def _work_would_wait(self) -> bool:
        exchange = self.exchange
        wanted = exchange.request.content_length
        if not wanted:  # gRPC
            begin = self._arrived[0] if self._arrived else b""
            assert not isinstance(begin, Frame)
            wanted = length_of(begin)
        return not (self.input_ended or exchange.cancelled or exchange.bytes_in >= min(wanted, FEW))

    @property
    def _uploads(self) -> bool:
        """True while a whole body is under way."""
        return self.sink is not None or (self._reader is _RESTS and bool(self.exchange.request.content_length))

    def _reader_cancelled(self, _: object) -> trio.lowlevel.Abort:
        self._reader = None
        self.exchange.has_waited(INPUT)
        return trio.lowlevel.Abort.SUCCEEDED

    def credit(self, n: int) -> None:
        """Lets the wire receive n more bytes."""
        if not self._prepaid:
            self.wire.credit(self.exchange.stream, n)

    def take_whole(self, limit: int) -> Buffer | None:
        """Returns all of the body if it is here in one piece, within the limit and without a content coding; None otherwise.
        The bytes of the budget that paid for the waiting piece now pay for the body."""
        exchange, arrived = self.exchange, self._arrived
        if len(arrived) != 1 or not self.input_ended or exchange.cancelled or self._taking:
            return None
        whole = arrived[0]
        if type(whole) is Frame:
            return None
        n = len(whole)
        if n > limit or n != (exchange.request.content_length or n) or b"content-encoding" in exchange.fields:
            return None
        if self.wire.windowed:
            exchange.reserve(n)
        self.credit(n)
        exchange.reserved += self.held  # 0 on a wire with windows
        self.held, self._arrived = 0, _NOTHING
        exchange.copied += n
        return whole

    def gather(self, sink: Sink) -> None:
        """Puts all that has arrived, and all that will arrive, into the sink; the wire may receive into it."""
        self.sink = sink
        waiting = [*reversed(self._taking), *self._arrived]
        self._taking = self._arrived = _NOTHING
        for item in waiting:
            assert not isinstance(item, Frame)
            if not self.wire.windowed:
                self.held -= len(item) + PIECE
                self.exchange.account.release(len(item) + PIECE)
            sink.take(item, len(item))
            self.credit(len(item))
        if self.exchange.bytes_in or not self.wire.windowed:
            self._land(sink)

    def _land(self, sink: Sink) -> None:
        if (place := sink.place()) is not None:
            sink.landed = self.wire.land(self.exchange.stream, place)

    def gathering(self, arrived: int, length: int) -> None:
        """Pays, in steps, for a message of `length` bytes that is put together from pieces: `arrived` bytes of it are here
        or about to be taken. Raises Overloaded if the budget has no room, or never could have."""
        if arrived > self.assembly:
            self.assembling(ahead(arrived, length))
        elif length > (account := self.exchange.account).limit:
            raise no_bytes(account, length)

    def assembling(self, n: int) -> None:
        """Reserves bytes before they are taken, for a message that is being put together and now takes n bytes. Raises
        Overloaded if the budget has no room."""
        if n > self.assembly:
            extra, budget = n - self.assembly, self.exchange.account
            if not budget.try_reserve(extra):
                raise no_bytes(budget, extra)
            self.assembly = n

    def assembled(self) -> None:
        """Gives back the bytes of that message: it was taken."""
        if self.assembly:
            self.exchange.account.release(self.assembly)
            self.assembly = 0

    # -- called by the exchange ------------------------------------------------------------------------------------

    def stalled(self, now: float) -> float:
        """Seconds since the last byte of an upload that is not whole; 0 if none is under way."""
        if self.input_ended or self._closed:
            return 0.0
        if self._uploads:
            return now - self.exchange.arrived_at
        if self._reader is None or self.under_way is None or self.under_way() is None:
            return 0.0
        return now - self.exchange.arrived_at

    def too_slow(self, now: float) -> SlowUpload | None:
        """Returns the error for an upload that is silent or slower than `limits.body_rate`, None if it is neither. An upload
        is a whole body, or a message that has begun. Between messages a stream may be as slow as it likes."""
        if self.input_ended or self._closed:
            return None
        exchange = self.exchange
        if not self._uploads:
            if self.under_way is None:
                return None
            if self._reader is None or (found := self.under_way()) is None:
                self._pace = None
                return None
            self._pace = pace = self._pace or Pace()
            return pace.look(*found, now, exchange.arrived_at, exchange.owner.limits)
        limits, waited, lasted = exchange.owner.limits, now - exchange.arrived_at, now - exchange.started_at
        if waited > limits.body_silence:
            return SlowUpload(f"no byte of the body for {waited:.0f} s (limits.body_silence)")
        if lasted > limits.body_silence and exchange.bytes_in < limits.body_rate * lasted:
            return SlowUpload(f"{exchange.bytes_in} bytes of the body in {lasted:.0f} s: less than limits.body_rate allows")
        return None

    def close(self) -> None:
        """Credits and drops unread input, and gives back what was held: the exchange's task is done."""
        self._closed, self.sink, self.under_way = True, None, None
        unread = 0
        for item in (*self._taking, *self._arrived):
            unread += len(item.data) if isinstance(item, Frame) else len(item)
        self._arrived = self._taking = _NOTHING
        if self.held:
            self.exchange.account.release(self.held)
            self.held = 0
        self.assembled()
        if unread:
            self.credit(unread)
