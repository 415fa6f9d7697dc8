"""Receives the whole body of an exchange into one buffer: reserved before it is taken, and inflated if it is compressed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, final

import msgspec
import trio

from gateway.codecs.threads import codec, run_in_codec_thread
from gateway.codecs.turns import INFLATED, Stage, codec_turns
from gateway.core.contracts import FEW, LANDED
from gateway.core.memory import SMALLEST, BodyMemory, GrowingBody, no_bytes
from gateway.errors import BadRequest, GatewayError, Overloaded, Refusal, TooLarge, UnsupportedEncoding
from models.blocking import throw
from protocols.buffers import ahead
from protocols.content_coding import Coding, Inflater, parse_content_encoding
from protocols.errors import RemoteProtocolError
from protocols.events import Buffer, Frame

if TYPE_CHECKING:
    from gateway.core.exchange import Exchange
    from gateway.core.inbound import Inbound

# A body is inflated in steps: a few short ones in this task, enough for most bodies, then long ones in a thread.
_SHORT_STEP, _SHORT_STEPS, _LONG_STEP = 64 * 1024, 4, 1024 * 1024


def whole_body(exchange: Exchange, limit: int) -> Buffer | None:
    """Returns all of the body if it is here already, in one piece, within the limit and without a content coding; None
    otherwise. The bytes of the budget that paid for it while it waited now pay for the whole body."""
    body = exchange.body
    if not body:
        inbound = exchange.inbound
        return None if inbound is None else inbound.take_whole(limit)
    if exchange.cancelled or len(body) > limit or b"content-encoding" in exchange.fields:
        return None
    exchange.body = None
    exchange.copied += len(body)
    return body


async def receive_body(
    exchange: Exchange, limit: int, *, setting: str, as_sent: bool = False, memory: BodyMemory | None = None
) -> memoryview:
    """Receives the whole body into one buffer. The memory is reserved before it is taken, and credit returns as the bytes
    land there.

    A body with a content coding is inflated: body and content must be within the limit, and both are paid for while both
    are there. The request then loses its content-encoding and content-length fields. `as_sent`: refuses a body with a
    content coding, for example because its exact bytes are signed. A body of known length is received into `memory`, if
    that has room.

    Raises TooLarge, before reading if Content-Length is over the limit, else at the limit. Raises Overloaded if the byte
    budget has no room, UnsupportedEncoding before reading for an unknown coding, and BadRequest for damaged data. Call it
    once for an exchange, instead of `receive`.
    """
    whole = whole_body(exchange, limit)
    if whole is not None:
        return memoryview(whole)
    codings = _codings(exchange, as_sent)
    if exchange.cancelled:
        await trio.lowlevel.checkpoint()
    length = exchange.request.content_length
    if length is not None:
        if length > limit:
            raise _too_large(length, limit, setting)
        if length > exchange.account.limit:
            raise no_bytes(exchange.account, length)
    inbound = exchange.open_inbound()
    gathering = Gathering(exchange, inbound, limit, setting, length, memory=None if codings else memory)
    inbound.gather(gathering)
    inbound.proceed()
    while not inbound.input_ended and gathering.error is None:
        await inbound.wait_input()
    inbound.sink = None
    if gathering.error is not None:
        throw(gathering.take_error())
    body = gathering.body()
    return await _inflated(exchange, body, codings, limit, setting) if codings else body


async def receive_announced(
    exchange: Exchange,
    limit: int,
    *,
    begins: int,
    length_of: Callable[[memoryview], int],
    beyond: Callable[[], GatewayError],
    setting: str,
) -> memoryview:
    """Does what `receive_body` does, for a body without Content-Length whose first `begins` bytes hold its length.
    `length_of` reads the length from them, and may raise. If the body is longer, the error of `beyond` is raised; if it is
    shorter, all that came is returned.
    """
    if exchange.cancelled:
        await trio.lowlevel.checkpoint()
    inbound, begun = exchange.open_inbound(), b""
    while len(begun) < begins:
        piece = await inbound.receive()
        if piece is None:
            return memoryview(begun)
        assert not isinstance(piece, Frame)
        begun = b"".join((begun, piece))
    length = length_of(memoryview(begun)[:begins])
    if length > limit:
        raise _too_large(length, limit, setting)
    if length > exchange.account.limit:
        raise no_bytes(exchange.account, length)
    gathering = Gathering(exchange, inbound, limit, setting, length, beyond)
    gathering.take(begun, len(begun))
    del begun, piece
    inbound.gather(gathering)
    while not inbound.input_ended and gathering.error is None:
        await inbound.wait_input()
    inbound.sink = None
    if gathering.error is not None:
        throw(gathering.take_error())
    return gathering.body()


@final
class Gathering:
    """A whole body on its way into one buffer: the sink of its Inbound."""

    __slots__ = (
        "_beyond",
        "_buffer",
        "_exchange",
        "_filled",
        "_growing",
        "_inbound",
        "_length",
        "_limit",
        "_memory",
        "_setting",
        "error",
        "landed",
    )

    def __init__(
        self,
        exchange: Exchange,
        inbound: Inbound,
        limit: int,
        setting: str,
        length: int | None,
        beyond: Callable[[], GatewayError] | None = None,
        *,
        memory: BodyMemory | None = None,
    ) -> None:
        """`length` is that of the body, None if it is not known. `beyond` makes the error for a longer body, if the wire
        does not check that."""
        self._memory = memory
        self._beyond = beyond
        self._exchange, self._inbound = exchange, inbound
        self._limit, self._setting, self._length = limit, setting, length
        self._buffer: memoryview | None = None  # for a known length, once more than a few bytes have arrived
        self._growing = bytearray()  # those few, or the body if its length is not known
        self._filled = 0
        self.landed: int | None = None
        """How often the wire copies each byte that it puts into the buffer itself; None if it does not."""
        self.error: GatewayError | None = None

    def place(self) -> memoryview | None:
        """Returns memory for the rest of the body; None if its length is not known, if nothing is left, and while only a few
        bytes have come."""
        filled, length = self._filled, self._length
        if not length or filled == length or self.error is not None or self._growing:
            return None
        buffer = self._made(length)
        return None if buffer is None else buffer[filled:]

    def take(self, item: Buffer, n: int) -> None:
        """Takes the next n bytes; those after an error are dropped."""
        exchange, length = self._exchange, self._length
        if self.error is not None:
            return
        if length is not None:
            arrived = (filled := self._filled) + n
            if arrived > length and self._beyond is not None:
                self._refuse(self._beyond())
                return
            # Bytes that the wire lands without telling us are paid for in advance: up to LANDED, as it tells us then.
            landed = self.landed
            if (arrived if landed is None else arrived + min(arrived, LANDED)) > exchange.reserved:
                step = ahead(arrived, length) - exchange.reserved
                if step > 0:
                    if not exchange.account.try_reserve(step):
                        self._refuse(no_bytes(exchange.account, step))
                        return
                    exchange.reserved += step
            if landed is None:
                if arrived <= FEW and self._buffer is None:
                    self._growing += item
                elif (buffer := self._made(length)) is None:
                    return
                else:
                    buffer[filled:arrived] = item
                    if self._growing:  # the few bytes before
                        self._move(buffer)
                landed = 2  # copied out of the wire's receive buffer, and from there into this one
            exchange.copied += landed * n
            self._filled = arrived
        else:
            growing = self._growing
            if len(growing) + n > self._limit:
                self._refuse(_too_large(len(growing) + n, self._limit, self._setting))
            elif not exchange.account.try_reserve(n):
                self._refuse(no_bytes(exchange.account, n))
            else:
                exchange.reserved += n
                growing += item
                exchange.copied += 2 * n

    def _refuse(self, error: GatewayError) -> None:
        self.error = error
        self._inbound.wake_reader(self._exchange.arrived_at)

    def take_error(self) -> GatewayError:
        """Returns the error to be raised, and forgets it: its traceback will refer to this object and the body."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def body(self) -> memoryview:
        """Returns all of the body that came; nothing may be taken afterwards."""
        return memoryview(self._growing) if self._buffer is None else self._buffer[: self._filled]

    def _made(self, length: int) -> memoryview | None:
        """Returns memory for `length` bytes; the budget pays only for those that have arrived. If the system has none, it
        refuses the body and returns None: that is an error of this exchange, not of the wire that feeds it."""
        buffer, exchange = self._buffer, self._exchange
        if buffer is None:
            try:
                if self._memory is not None and length >= SMALLEST:
                    buffer = self._memory.take(length)
                buffer = self._buffer = buffer or exchange.owner.pool.take(length, exchange.arrived_at)
            except (OSError, MemoryError) as e:
                said = f"the system has no memory for a body of {length} bytes ({e}); try again later"
                self._refuse(Overloaded(said, refusal=Refusal.MEMORY))
        return buffer

    def _move(self, buffer: memoryview) -> None:
        few, self._growing = self._growing, bytearray()
        buffer[: len(few)] = few
        self._exchange.copied += len(few)


def _codings(exchange: Exchange, as_sent: bool) -> tuple[Coding, ...]:
    try:
        codings = parse_content_encoding(exchange.header_values(b"content-encoding"))
    except RemoteProtocolError as e:
        if not as_sent:
            raise UnsupportedEncoding(str(e)) from None
    else:
        if not (as_sent and codings):
            return codings
    encoding = exchange.header(b"content-encoding") or b""
    raise UnsupportedEncoding(
        f"content-encoding {encoding[:40].decode('latin-1')!r} is not accepted: send the body as it is",
        accepted=b"identity",
    )


async def _inflated(
    exchange: Exchange, body: memoryview, codings: tuple[Coding, ...], limit: int, setting: str
) -> memoryview:
    """Inflates a body that is all here. Each step is paid for before it is made, and the body until the last step."""
    inflater, out, sent, steps = Inflater(codings, limit=limit), GrowingBody(limit), exchange.reserved, 0
    owner = exchange.owner
    inflater.feed(body)
    try:
        while not inflater.hungry:
            steps += 1
            short = steps <= _SHORT_STEPS
            step = min(_SHORT_STEP if short else _LONG_STEP, max(limit - out.size, 1))
            if short:
                stage = Stage.INFLATE if steps == 1 else Stage.READ
                await codec(INFLATED, partial(_inflate, exchange, inflater, out, step), owner, stage)
            else:
                stage = Stage.INFLATE if steps == _SHORT_STEPS + 1 else Stage.READ
                async with codec_turns().in_thread(owner, stage):
                    exchange.reserve(step)
                    await run_in_codec_thread(partial(_append, inflater, out, step))
            exchange.unreserve(exchange.reserved - sent - out.size)
        inflater.finish()
    except BaseException as e:
        out.clear()  # the error's traceback would keep it until the error is sent
        if isinstance(e, RemoteProtocolError):
            raise TooLarge(f"{e} ({setting})") if e.status == 413 else BadRequest(str(e)) from None
        raise
    exchange.unreserve(sent)
    exchange.copied += out.size
    # The body is now the content: the fields of its coded form no longer apply.
    gone = (b"content-encoding", b"content-length")
    exchange.request = msgspec.structs.replace(
        exchange.request, headers=[field for field in exchange.request.headers if field[0] not in gone]
    )
    exchange.fields = exchange.request.fields
    return out.view()


def _inflate(exchange: Exchange, inflater: Inflater, out: GrowingBody, at_most: int) -> None:
    exchange.reserve(at_most)
    _append(inflater, out, at_most)


def _append(inflater: Inflater, out: GrowingBody, at_most: int) -> None:
    made = bytearray()
    inflater.inflate_into(made, at_most)
    out.append(made)


def _too_large(n: int, limit: int, setting: str) -> TooLarge:
    return TooLarge(f"the body of {n} bytes is over the limit of {limit} bytes ({setting})")
