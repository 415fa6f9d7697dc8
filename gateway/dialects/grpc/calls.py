"""The parts that all gRPC calls share: reading their heads and messages, and answering them."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol, TypeAlias, final

from gateway.codecs.threads import LONG, codec, run_in_codec_thread
from gateway.codecs.turns import INFLATED, Stage, codec_turns
from gateway.core.exchange import Exchange
from gateway.core.memory import GrowingBody
from gateway.core.route import CallKind, Needs, Row
from gateway.core.whole_body import receive_announced, whole_body
from gateway.dialects.grpc.status import CallRefused, fail, refuse
from gateway.errors import DeadlineExceeded, GatewayError, Refusal
from protocols.errors import RemoteProtocolError
from protocols.events import Buffer, Frame, Head, Signal
from protocols.floods import GRPC_AT_ONCE, SMALL_CALL
from protocols.grpc.compression import MessageInflater
from protocols.grpc.framing import PREFIX, MessageDecoder, frame
from protocols.grpc.heads import CallHead, answer_head, read_call, trailers
from protocols.grpc.metadata import CONTENT_TYPE, is_grpc
from protocols.grpc.protobuf import MessageType, ProtobufError
from protocols.grpc.status import GRPCError, StatusCode

SETTING = "limits.body"
"""The setting that limits a message."""
NAME = "grpc-timeout of the call"
_HEAD, _OK = answer_head(), trailers()
_READ = 10e-6
"""Seconds that pass, at least, before a head is read: a call with no more time than this is late."""
_SHORT_STEP, _LONG_STEP = 64 * 1024, 1024 * 1024


def _read(head: Head) -> CallHead:
    """Reads a call's head. CallRefused if it is invalid, DeadlineExceeded if it leaves the call no time."""
    try:
        call = read_call(head)
    except GRPCError as e:
        raise CallRefused.of(e) from None
    except RemoteProtocolError as e:
        raise CallRefused(StatusCode.UNIMPLEMENTED, str(e)) from None
    if call.timeout is not None and call.timeout <= _READ:
        raise DeadlineExceeded(f"no time is left ({NAME})", refusal=Refusal.NO_TIME)
    return call


KIND = CallKind(name="gRPC", media_type=CONTENT_TYPE.decode(), is_of=is_grpc, read=_read, refuse=refuse)


class Method(Protocol):
    """A handler of calls."""

    def __call__(self, exchange: Exchange, call: CallHead, /) -> Coroutine[Any, Any, None]: ...


Methods: TypeAlias = Mapping[str, Method]


def rows_of(service: str, methods: Methods, *, needs: Needs = Needs.INFER, always: bool = False) -> list[Row]:
    """The rows of a service's methods."""
    return [
        Row("POST", f"/{service}/{name}", method, dialect="grpc", refuse=refuse, kind=KIND, needs=needs, always=always)
        for name, method in methods.items()
    ]


@final
class Calls:
    """Reads the messages of calls."""

    def __init__(self, limit: int, setting: str = SETTING) -> None:
        """`limit` is the most bytes that a message may have; `setting` names it in errors."""
        self.limit, self._setting = limit, setting

    @cached_property
    def small(self) -> Calls:
        """Reads the messages of calls that only name something: at most `SMALL_CALL` bytes."""
        return self if self.limit <= SMALL_CALL else Calls(SMALL_CALL, "of this method")

    def begin(self, exchange: Exchange, call: CallHead) -> None:
        """Gives the exchange the call's deadline, if the client has set one."""
        if call.timeout is not None:
            exchange.limit_call(call.timeout, NAME)

    def plain(self, body: Buffer) -> memoryview | None:
        """The message of a whole body, if it is the only one and not compressed, as in nearly every call. Otherwise None:
        `message` then reads the body."""
        view = memoryview(body)
        if len(view) < PREFIX or view[0] or int.from_bytes(view[1:PREFIX], "big") != len(view) - PREFIX:
            return None
        return view[PREFIX:]

    def body(self, exchange: Exchange) -> Buffer | None:
        """The body of a unary call, if all of it is here."""
        return whole_body(exchange, self.limit + PREFIX)

    async def message(self, exchange: Exchange, call: CallHead, body: Buffer | None) -> memoryview:
        """The one message of a unary call, inflated if it was compressed, and paid for until the exchange ends. `body` is
        whole; None: it is still to be received. CallRefused for an invalid message, for a second one and, as soon as
        its prefix is here, for one over the limit; Overloaded."""
        if body is None:
            body = await receive_announced(
                exchange, self.limit + PREFIX, begins=PREFIX, length_of=partial(self._length, call), beyond=_second,
                setting=self._setting,
            )  # fmt: skip
        decoder = MessageDecoder(limit=self.limit, encoding=call.encoding, unary=True, setting=self._setting)
        try:
            decoder.receive_data(body)
            message = decoder.next_raw()
            if message is not Signal.NEED_DATA and PREFIX + len(message.data) < len(body):
                raise _second()  # or its beginning
            decoder.next_raw()
            decoder.receive_eof()
            assert message is not Signal.NEED_DATA, "a body without a message is refused at its end"
            if not message.compressed:
                return message.data
            assert call.encoding is not None, "the prefix is refused otherwise"
            inflater = MessageInflater(message.data, call.encoding, limit=self.limit, setting=self._setting)
            return await inflated(exchange, inflater, self.limit)
        except GRPCError as e:
            raise CallRefused.of(e) from None

    def _length(self, call: CallHead, begun: memoryview) -> int:
        """The length in bytes of a body, by its first prefix. CallRefused if the prefix is invalid."""
        decoder = MessageDecoder(limit=self.limit, encoding=call.encoding, unary=True, setting=self._setting)
        try:
            decoder.receive_data(begun)
            decoder.next_raw()
        except GRPCError as e:
            raise CallRefused.of(e) from None
        return PREFIX + decoder.wanted

    async def read(self, exchange: Exchange, call: CallHead, kind: MessageType) -> dict[str, Any]:
        """The fields of a unary call's message. CallRefused, Overloaded."""
        self.begin(exchange, call)
        body = self.body(exchange)
        message = self.plain(body) if body is not None else None
        if message is None:
            message = await self.message(exchange, call, body)
        if len(message) > LONG:
            exchange.making(len(message))  # its texts and bytes
        try:
            return await codec(len(message), partial(kind.read, message, values=GRPC_AT_ONCE), exchange.owner, Stage.READ)
        except ProtobufError as e:
            raise CallRefused.of(e) from None


@final
class Incoming:
    """The messages, as they arrive, of a call with any number of them."""

    def __init__(self, exchange: Exchange, call: CallHead, limit: int, setting: str = SETTING) -> None:
        self._setting = setting
        self._exchange, self._encoding, self._limit = exchange, call.encoding, limit
        self._inbound = exchange.open_inbound()
        self._decoder = MessageDecoder(limit=limit, encoding=call.encoding, setting=setting)
        self._inflated = 0  # bytes of the last message, where it was inflated, that its exchange has paid for
        self.count = 0
        """The number of messages that `next` has returned."""
        self._inbound.under_way = self._under_way

    async def next(self) -> memoryview | None:
        """The next message; None once the client sends no more. Its memory is paid for from its arrival until `taken`.
        CallRefused for an invalid message and, as soon as its prefix is here, for one over the limit; Overloaded."""
        decoder, inbound = self._decoder, self._inbound
        try:
            while (raw := decoder.next_raw()) is Signal.NEED_DATA:
                data = await inbound.receive()
                if data is None:
                    decoder.receive_eof()
                    return None
                assert not isinstance(data, Frame)
                if decoder.wanted:
                    inbound.gathering(min(decoder.held + len(data), decoder.wanted), decoder.wanted)
                decoder.receive_data(data)
                del data
            self.count = self._exchange.parts_in = self.count + 1
            if not raw.compressed:
                return raw.data
            assert self._encoding is not None, "the prefix is refused otherwise"
            inflater = MessageInflater(raw.data, self._encoding, limit=self._limit, setting=self._setting)
            message = await inflated(self._exchange, inflater, self._limit)
            self._inflated = len(message)
            return message
        except GRPCError as e:
            raise CallRefused.of(e) from None

    def taken(self) -> None:
        """Called when something else pays for the last message, or it is gone: this no longer pays for it."""
        if self._inbound.assembly:
            self._inbound.assembled()
        if self._inflated:
            self._exchange.unreserve(self._inflated)
            self._inflated = 0

    def _under_way(self) -> tuple[object, int] | None:
        """The number of the message that has begun, and how many of its bytes are here; None if none has."""
        decoder = self._decoder
        return (self.count, decoder.held) if decoder.wanted else None


async def inflated(exchange: Exchange, inflater: MessageInflater, limit: int) -> memoryview:
    """Inflates a message. Each step is paid for before it is made. GRPCError; Overloaded."""
    out, short, owner = GrowingBody(limit), True, exchange.owner
    try:
        while True:
            step, before = (_SHORT_STEP if short else _LONG_STEP), out.size
            if short:
                inflate = partial(_inflate_paid, exchange, inflater, out, step)
                whole = await codec(INFLATED, inflate, owner, Stage.READ if before else Stage.INFLATE)
            else:
                stage = Stage.INFLATE if before <= LONG else Stage.READ
                async with codec_turns().in_thread(owner, stage):
                    exchange.reserve(step)
                    whole = await run_in_codec_thread(partial(_inflate, inflater, out, step))
            exchange.unreserve(step - (out.size - before))
            if whole:
                exchange.copied += out.size
                return out.view().toreadonly()
            short = out.size < LONG
    except BaseException:
        out.clear()  # the error's traceback would keep it until the error is answered
        raise


def _inflate_paid(exchange: Exchange, inflater: MessageInflater, out: GrowingBody, at_most: int) -> bool:
    exchange.reserve(at_most)
    return _inflate(inflater, out, at_most)


def _inflate(inflater: MessageInflater, out: GrowingBody, at_most: int) -> bool:
    made = bytearray()
    whole = inflater.step(made, at_most)
    out.append(made)
    return whole


def _second() -> GatewayError:
    return CallRefused(StatusCode.UNIMPLEMENTED, "a unary call has exactly one message, this one has a second")


def start_stream(exchange: Exchange) -> None:
    """Begins an answer of many messages. From now on an error is written after them, as the status of the trailers."""
    exchange.words = fail
    exchange.outbound.start(200, _HEAD, trailers=True)


def end_stream(exchange: Exchange) -> None:
    """Ends an answer of any number of messages with the status OK."""
    outbound, exchange.own_status = exchange.outbound, 0
    if outbound.status:
        outbound.finish(trailers=_OK)
    else:
        outbound.respond(200, _HEAD, trailers=_OK)


def reply(exchange: Exchange, message: Sequence[Buffer]) -> None:
    """Answers a unary call with a message."""
    exchange.own_status = 0
    exchange.outbound.respond_with(200, _HEAD, frame(message), trailers=_OK)


def reply_with(exchange: Exchange, kind: MessageType, values: Mapping[str, Any]) -> None:
    """Answers a unary call with these values as a message of that kind."""
    reply(exchange, (kind.write(values),))
