"""The answer of an exchange, with a bound on the bytes that wait for a slow client: first room, then bytes, then one end."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import trio

from gateway.core.contracts import FRAMING
from gateway.core.memory import no_bytes
from gateway.core.turn import BETWEEN, NO_TURN, PAST, SENT, TURN_UNITS
from gateway.core.waits import ROOM
from gateway.errors import Ending
from protocols.events import Buffer, Headers, Opcode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.core.contracts import Owner, Stream, Wire
    from gateway.core.turn import Turn

_LONG = 4096  # bytes: a turn's messages below this are few bytes together
# nginx, and proxies that act like it, collect an answer before they pass it on, unless it has this field.
_UNBUFFERED = (b"x-accel-buffering", b"no")
_WITHOUT_LENGTH = frozenset((204, 304))  # RFC 9110 section 8.6: of a 304 it would be that of another answer


@final
class Outbound:
    """The answer of an exchange to its client.

    First `await wait_room(n)`, then `start`, `push` and `finish`, which are synchronous, so no cancellation comes between
    them; or `respond` in place of the three. The end names the ending that the last byte stands for, trailers included.
    Calls are ignored if the client is gone. Calls after the end raise trio.ClosedResourceError.

    Pieces (`push_piece`) are many and short. If the wire is `exclusive`, they wait here, in order, until the wire writes and
    takes all of them. Other calls hand them to the wire first. If the wire refuses pieces, for example bytes beyond the
    declared length, that call raises its error. Pieces for a client that is gone are dropped.
    """

    __slots__ = (
        "_stream",
        "_writer",
        "beside",
        "bytes_out",
        "charged",
        "exchange",
        "finishing",
        "first_at",
        "items",
        "moved_at",
        "open",
        "owner",
        "pieces",
        "room_left",
        "sent_at",
        "status",
        "turn",
        "wire",
    )

    exchange: Stream
    """The exchange that it answers; not set once that is over: a cycle would keep both until the GC runs."""
    open: bool
    """True while more may be sent: the end is not queued, and the client is not gone."""
    finishing: Ending | None
    """The ending that is queued."""
    charged: int
    """Bytes of the budget for a message larger than the send buffer, until it has left."""
    beside: Headers
    """Fields that are added to the head of its answer: those of CORS."""
    pieces: list[bytes] | tuple[()]
    """The pieces that wait; only the Outbound itself adds to them."""
    first_at: float | None
    """When the first bytes of its body had left; None before, and if all of the answer left at once."""
    moved_at: float
    """When its wire last saw it move, for wires on which each exchange stalls by itself."""

    verbatim = True  # see `Wrapping.verbatim`

    def __init__(self, exchange: Stream, owner: Owner, wire: Wire, stream: int, now: float) -> None:
        self._stream = stream
        self.exchange = exchange
        self.owner, self.wire = owner, wire
        self.open = True
        self.finishing = None
        self.status = self.bytes_out = self.charged = 0
        self.items = 0  # units that turns have counted for its messages, without the current turn
        self.room_left = 0  # while `bytes_out` is below this, there is room and no checkpoint is due
        self.turn: Turn = NO_TURN
        self.moved_at = self.sent_at = now
        self.first_at = None
        self._writer: trio.lowlevel.Task | None = None  # waits for room
        self.beside = self.pieces = ()

    @property
    def items_out(self) -> int:
        """Messages of the model that got room: tokens, parts, responses. If the answer is one document, the messages that it
        was made of; 0 for a unary call."""
        turn = self.turn
        return (self.items + TURN_UNITS - turn.left if turn.of is self else self.items) // SENT

    @property
    def at_rest(self) -> bool:
        """True if more may be sent, nothing waits to be, and the client takes more."""
        return self.open and not self.pieces and self.wire.takes(self._stream)

    @property
    def waits(self) -> bool:
        """True if a task waits for room."""
        return self._writer is not None

    # -- room ------------------------------------------------------------------------------------------------------

    async def wait_room(self, n: int = 1) -> None:
        """Returns when n bytes may be pushed: they fit, or the queue is empty and takes one large message whole. If there is
        no room at all, an empty message waits too, because its framing takes bytes. A cancelled call has changed nothing;
        the push after it cannot be cancelled. One task at a time."""
        if (n > _LONG and self.turn.due(n)) or not self.try_room(n or 1):
            await self._wait_room(n or 1)

    def try_room(self, n: int) -> bool:
        """True if n bytes may be pushed at once: `wait_room` need not be called. If false, call `wait_room`. n is at
        least 1."""
        turn = self.turn
        turn.left = left = turn.left - SENT
        # The path of most messages: it reads the clock for every fourth one.
        if self.bytes_out + n < self.room_left and (left in BETWEEN or (left and self.owner.clock() <= turn.ends)):
            return True
        if left in BETWEEN or not turn.due(n):
            room = self.wire.room(self._stream)
            if self.pieces:
                room = self._room_behind_pieces(n, room)
            if n <= room and self.finishing is None:
                if self.status and self.wire.exclusive:
                    sent = self.bytes_out  # the room is counted without the framing of a turn's pieces
                    self.room_left = min(
                        sent + room - TURN_UNITS // SENT * FRAMING, turn.bytes + self.owner.limits.checkpoint_bytes
                    )
                return True
        turn.left += SENT  # the message got no room: it counts once it does
        return False

    async def _wait_room(self, n: int) -> None:
        turn = self.turn
        if turn.ends == PAST:
            await turn.renew()
        while n > (room := self._room()) and self.open and not self.wire.empty(self._stream):
            assert self._writer is None, "one task waits for room"
            self._writer = task = trio.lowlevel.current_task()
            self.exchange.parks_for(ROOM)
            await trio.lowlevel.wait_task_rescheduled(self._writer_cancelled)
            if task is not turn.task:  # else its runner has seen that it waited
                turn.begin()
        if not self.open:
            if self.finishing is None:
                await trio.lowlevel.checkpoint()  # our own cancellation, unless the model has shielded itself from it
            raise trio.ClosedResourceError("the exchange has ended" if self.finishing is not None else "the client is gone")
        if n > room:
            if not self.exchange.account.try_reserve(n):
                raise no_bytes(self.exchange.account, n)
            self.charged += n
        turn.left -= SENT

    def _room_behind_pieces(self, n: int, room: int) -> int:
        """The room that the waiting pieces leave of `room`: at least that, and exactly if it is less than n."""
        room -= sum(map(len, self.pieces)) + len(self.pieces) * FRAMING
        return room if n <= room else self._room()  # hands them over: their framing may take less

    def _room(self) -> int:
        if self.pieces:
            self._hand_over()
        return self.wire.room(self._stream)

    def _writer_cancelled(self, _: object) -> trio.lowlevel.Abort:
        self._writer = None
        self.exchange.has_waited(ROOM)
        return trio.lowlevel.Abort.SUCCEEDED

    def room_changed(self) -> None:
        """Called by the wire when bytes of this exchange have left."""
        self.sent_at = self.owner.last_sent
        if self.first_at is None and self.bytes_out:
            self.first_at = self.sent_at
        if self.charged and self.wire.empty(self._stream):
            self.uncharge()
        writer = self._writer
        if writer is not None:
            self._writer = None
            self.exchange.has_waited(ROOM, self.sent_at)
            trio.lowlevel.reschedule(writer)

    def uncharge(self) -> None:
        """Gives back the bytes of the large message: it has left, or never will."""
        self.exchange.account.release(self.charged)
        self.charged = 0

    # -- sending ---------------------------------------------------------------------------------------------------

    def start(self, status: int, headers: Headers, *, trailers: bool = False) -> None:
        """Queues the head. It also gets `x-request-id`, and that of a stream gets `x-accel-buffering: no`, so that proxies
        do not hold the stream back. With `trailers`, the caller must `finish` with trailers."""
        if not self.open:
            return self._closed()
        if self.pieces:
            self._hand_over()
        self.status = status
        streams = () if status < 200 or status == 204 else (_UNBUFFERED,)
        fields = [*headers, *streams, *self.beside, (b"x-request-id", self.exchange.id.encode())]
        self.wire.start(self._stream, status, fields, trailers)

    def push(self, *buffers: Buffer) -> None:
        """Queues one piece of the body, by reference: its memory must not change until it is written."""
        if not self.open:
            return self._closed()
        if self.pieces:
            self._hand_over()
        self.bytes_out += len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
        self.room_left -= FRAMING
        self.wire.push(self._stream, buffers)

    def comment(self, line: bytes) -> None:
        """Queues a comment between two events, behind the head, while the answer is `at_rest`. It is neither a part of the
        body that is counted nor its first byte."""
        self.room_left -= FRAMING + len(line)
        self.wire.push(self._stream, (line,))

    def push_piece(self, piece: bytes) -> None:
        """Queues one of many short pieces of the body. Call it only right after `try_room` or `wait_room`."""
        pieces = self.pieces
        self.bytes_out += len(piece)
        if pieces:
            pieces.append(piece)
        elif self.wire.exclusive:
            self.pieces = [piece]
            self.owner.output_ready()
        else:
            self.wire.push_pieces(self._stream, (piece,))

    def take_pieces(self) -> Sequence[bytes]:
        """Gives the waiting pieces to the wire, which writes them now."""
        pieces, self.pieces = self.pieces, ()
        return pieces

    def _hand_over(self) -> None:
        self.wire.push_pieces(self._stream, self.take_pieces())

    def drop_pieces(self) -> None:
        """Drops the waiting pieces: no client will read them."""
        self.pieces = ()

    def push_frame(self, opcode: Opcode, fin: bool, *buffers: Buffer) -> None:
        """Queues one WebSocket frame."""
        if not self.open:
            return self._closed()
        self.bytes_out += len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
        self.wire.push_frame(self._stream, opcode, fin, buffers)

    def finish(
        self, ending: Ending = Ending.COMPLETE, *, trailers: Headers = (), code: int = 1000, reason: str = ""
    ) -> None:
        """Queues the end of the answer (`code` and `reason` are for a WebSocket only). Unread input is dropped.

        `trailers` are fields behind the body; `Wire.finish` tells which wires carry them; others drop them. The ending is
        decided when the kernel has taken the last byte, trailers included. Raises LocalProtocolError for fields that the
        wire cannot carry there: then nothing is ended, and another end may be queued."""
        if not self.open:
            return self._closed()
        if self.pieces:
            self._hand_over()
        self.finishing, self.open, self.room_left = ending, False, 0  # the wire may write the end at once
        try:
            self.wire.finish(self._stream, code, reason, trailers)
        except BaseException:
            self._unfinish()
            raise

    def respond(
        self,
        status: int,
        headers: Headers,
        *buffers: Buffer,
        ending: Ending = Ending.COMPLETE,
        trailers: Headers | None = None,
    ) -> None:
        """Queues a whole answer: head, body and end in one call, which leave in one write. See `respond_with`."""
        self.respond_with(status, headers, buffers, ending, trailers)

    def respond_with(
        self,
        status: int,
        headers: Headers,
        buffers: Sequence[Buffer],
        ending: Ending = Ending.COMPLETE,
        trailers: Headers | None = None,
    ) -> None:
        """Queues a whole answer, whose body is in `buffers`: head, body and end in one call, which leave in one write.

        The head declares the length of the body, unless `trailers` are given, even empty ones: they end it as in `finish`.
        Without a body, HTTP/2 sends one HEADERS frame, which has the fields of the trailers too."""
        if not self.open:
            return self._closed()
        if self.pieces:
            self._hand_over()
        length = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
        exchange = self.exchange
        self.status = status
        self.finishing, self.open = ending, False  # the wire may write it at once
        if not length or exchange.request.method == b"HEAD":
            buffers = ()
        else:
            self.bytes_out += length
        try:
            fresh: Headers = ((b"x-request-id", exchange.id.encode()),)
            if self.beside:
                fresh = (*fresh, *self.beside)
            if trailers is None and status not in _WITHOUT_LENGTH:
                self.wire.respond(self._stream, status, headers, length, fresh, buffers, ())
            else:
                self.wire.respond(self._stream, status, headers, None, fresh, buffers, trailers or ())
        except BaseException:
            self._unfinish()
            raise

    def abort(self, ending: Ending) -> None:
        """Cuts the answer off, by RST_STREAM or the connection's end: use it if no ending can be sent in-band any more."""
        if self.open:
            self.finishing, self.open, self.room_left = ending, False, 0
            self.drop_pieces()
            self.wire.reset(self._stream, ending)

    def _unfinish(self) -> None:
        """Opens the answer again: its end could not be queued, and another may be."""
        self.finishing = None
        self.open = not self.exchange.gone

    def _closed(self) -> None:
        """Raises if the answer has ended. If the client is gone, does nothing: the work is being cancelled already."""
        if self.finishing is not None:
            raise trio.ClosedResourceError("the exchange has ended")
