"""SageMaker bidirectional streaming: the event stream over HTTP/2, and the container's WebSocket."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, final

import trio

from gateway.codecs.prompts import read_prompt
from gateway.codecs.threads import run_in_codec_thread
from gateway.config import Config, LimitsConfig
from gateway.config.fields import SETTINGS
from gateway.config.problem import ConfigError
from gateway.config.text import show
from gateway.core.exchange import Exchange
from gateway.core.route import WEBSOCKET, Row
from gateway.credentials import SUBPROTOCOL, offered_protocols
from gateway.dialects.answers import accepted_handshake, close, octets, reply_of, reply_value
from gateway.dialects.aws.endpoints import Endpoints
from gateway.dialects.aws.error_origin import ErrorOrigin, blame
from gateway.dialects.aws.signatures import Signatures, forbidden_of, refusal
from gateway.dialects.aws.upgrades import is_openais, named_by_path, named_by_query, reach_of
from gateway.dialects.call import NO_PARAMETERS, session_of, single_fields
from gateway.dialects.model_choice import ModelChoice
from gateway.dialects.text import openai
from gateway.dialects.text.requests import decided_own, tell_passed, within_ceiling
from gateway.errors import (
    BadRequest,
    DeadlineExceeded,
    Ending,
    Forbidden,
    GatewayError,
    NoSuchPath,
    OthersWait,
)
from gateway.workers.worker import Worker
from models.messages import Family, Part, PartKind, Prompt
from protocols import lmi
from protocols.aws import bidi, eventstream
from protocols.aws.bidi import Form
from protocols.buffers import Budget
from protocols.errors import RemoteProtocolError
from protocols.events import Buffer, Frame, Headers, Opcode
from protocols.text_members import Decided
from protocols.websocket import handshake

_DATA_TYPE = {PartKind.UTF8: bidi.DataType.UTF8, PartKind.BINARY: bidi.DataType.BINARY}
_KIND = {v: k for k, v in _DATA_TYPE.items()}
_OPCODE = {PartKind.UTF8: Opcode.TEXT, PartKind.BINARY: Opcode.BINARY}
# named once: a member costs three look-ups where it is used, and more than those before Python 3.12
_PARTIAL, _COMPLETE = bidi.Completion.PARTIAL, bidi.Completion.COMPLETE
_UTF8, _BINARY = PartKind.UTF8, PartKind.BINARY
_TEXT, _CONTINUATION = Opcode.TEXT, Opcode.CONTINUATION
_SMALL = 64 * 1024
_PATH = SETTINGS["websocket", "path"]
_LONG = 384 * 1024  # bytes of a message that are a millisecond's work at most: checksums, a digest, base64
_OBJECT = 256  # bytes that the JSON of a part has beside its data, at most
_PADDING = "abcdefghijklmnopqrstuvwxyzABCDEF" * 128


@final
class BidiDialect:
    """Serves models of parts to the AWS SDK and to whatever speaks to a container."""

    def __init__(self, models: ModelChoice, endpoints: Endpoints, signatures: Signatures) -> None:
        self._models, self._endpoints, self._signatures = models, endpoints, signatures

    def rows(self) -> list[Row]:
        """The platform's operation, and the container's WebSocket: at its own path, below each model, and at the other paths
        that `websocket.any_path` allows. ConfigError for an invalid `websocket.path`."""
        operation = "/endpoints/{endpoint}/invocations-bidirectional-stream"
        websocket, container = self._models.config.websocket, partial(Row, WEBSOCKET, dialect="websocket")
        if not re.fullmatch(_PATH.pattern, websocket.path):  # not checked before if a program has made the configuration
            raise ConfigError(f"{_PATH.key} must be {_PATH.expected}, not {show(websocket.path)}")
        return [
            # The operation has no error for a wrong method: the plain one answers it.
            Row("POST", operation, self.event_stream, dialect="bidi", refuse=refuse, refuses_method=False, signed=True),
            container("*", self.elsewhere),
            container(websocket.path, self.container),
            container("/models/{name}" + websocket.path, self.container),
        ]

    async def event_stream(self, exchange: Exchange, endpoint: str) -> None:
        """POST /endpoints/{endpoint}/invocations-bidirectional-stream over HTTP/2, GA form and both readings of the seed's
        JSON form."""
        if exchange.wire.name != "http/2":
            raise BadRequest("bidirectional streaming needs HTTP/2: connect with ALPN h2, or by prior knowledge in clear")
        asked, worker, channel = self._asked(exchange, endpoint)
        self._limit_wait(exchange)
        with await worker.slots.take(exchange):
            exchange.fail = channel.fail
            self._limit(exchange, worker)
            if channel.form is None:
                await channel.choose_form()
            if not worker.spec.accepts:
                # the head goes out at once: clients wait for it before their first part
                channel.accept()
            parameters = {"invocation_path": asked.invocation_path} if asked.invocation_path else NO_PARAMETERS
            session = session_of(
                exchange,
                worker,
                channel,
                query=asked.query_string or "",
                path=asked.invocation_path or "",
                parameters=parameters,
            )
            del asked  # it would be kept for as long as the session lasts
            await worker.call(session, exchange, Family.PARTS, self._read_prompt(exchange, worker))
        channel.accept()
        exchange.outbound.finish()

    def _asked(self, exchange: Exchange, endpoint: str) -> tuple[bidi.BidiRequest, Worker, _EventStreamChannel]:
        """The operation's input, the model, and a channel in the request's form. BadRequest for an invalid request. Not in
        `event_stream`, whose frame would keep all of these variables for as long as the session lasts."""
        claim = self._signatures.claim(exchange, streaming=True)
        headers = single_fields(exchange)
        try:
            asked = bidi.validate_request(endpoint, headers)
            form = bidi.form_of(headers.get("content-type", ""))
        except bidi.BidiInputError as e:
            raise BadRequest(str(e)) from None
        if claim is not None and form is Form.LITERAL:
            raise unsigned_form()
        worker, variant = self._endpoints.choose(exchange.permit, asked.endpoint, asked.target_variant)
        self._models.check_family(worker, Family.PARTS, "bidi")
        exchange.model = worker.name
        verify = self._signatures.events(claim)
        return asked, worker, _EventStreamChannel(exchange, self._models.config, form, variant, verify)

    async def elsewhere(self, exchange: Exchange) -> None:
        """A WebSocket at a path that has none of its own. NoSuchPath if `websocket.any_path` leaves the path out."""
        reach, of_openai = reach_of(exchange, self._models.config), is_openais(exchange)
        if reach == "none" or (of_openai and reach != "all"):
            if of_openai:
                exchange.words = openai.refuse
                if name := named_by_query(exchange):
                    self._models.called(exchange.permit, name)  # its absence is the nearer reason
            own, asked = self._models.config.websocket.path, exchange.path.decode("latin-1")[:100]
            raise NoSuchPath(
                f"no WebSocket at {asked}; models answer at {own} and /models/{{name}}{own}, and at the paths that "
                "websocket.any_path allows"
            )
        await self.container(exchange)

    async def container(self, exchange: Exchange, name: str = "") -> None:
        """The container's WebSocket: a frame for each part, byte for byte."""
        worker = self._worker(exchange, name)
        exchange.model = worker.name
        try:  # no names for these values: the frame would keep them for as long as the session lasts
            channel = _FrameChannel(
                exchange,
                accepted_handshake(exchange, worker.spec.subprotocols),
                handshake.end_of_input(exchange.request.headers),
            )
        except RemoteProtocolError as e:
            exchange.outbound.respond(e.status, handshake.refusal_headers(e), str(e).encode(), ending=Ending.REFUSED)
            return
        self._limit_wait(exchange)
        with await worker.slots.take(exchange):
            exchange.words = _end_frames
            self._limit(exchange, worker)
            if not worker.spec.accepts:
                channel.accept()
            session = session_of(exchange, worker, channel, parameters=_invocation_path)
            await worker.call(session, exchange, Family.PARTS, self._read_prompt(exchange, worker))
        channel.accept()
        exchange.outbound.finish()

    def _worker(self, exchange: Exchange, name: str) -> Worker:
        """The model of a WebSocket: the one that its path or its query names, else the default. If callers choose both for
        the model alone, only `name` counts, which the route has captured."""
        models, permit, endpoint, asked = self._models, exchange.permit, "", ""
        if reach_of(exchange, models.config) != "all":
            asked = named_by_query(exchange)
            if not name:
                endpoint, name = named_by_path(exchange)
        if endpoint:
            worker, _ = self._endpoints.choose(permit, endpoint, None)
            models.check_family(worker, Family.PARTS, "bidi")
        elif name or asked:
            worker = models.named(permit, name or asked, Family.PARTS, "bidi")
        else:
            worker = models.unnamed(permit, models.config.bidi.default_model, Family.PARTS, "bidi")
        if asked not in ("", worker.name):
            raise BadRequest(f"the path names the model {worker.name!r}, and the query {asked[:100]!r}: name one")
        return worker

    def _read_prompt(self, exchange: Exchange, worker: Worker) -> Callable[[bytes], Prompt] | None:
        """The function that makes prompts of parts; None if the model is not a text model."""
        if worker.spec.family is not Family.TEXT:
            return None
        limits = self._models.config.limits
        return partial(
            read_prompt,
            judge=partial(_judged, exchange, worker, limits),
            containers=limits.json_containers,
            values=limits.json_values,
        )

    def _limit_wait(self, exchange: Exchange) -> None:
        """Limits the wait for a slot to `bidi.session_timeout`: clients have no limit of their own before the head."""
        exchange.limit_time(self._models.config.bidi.session_timeout, "bidi.session_timeout")

    def _limit(self, exchange: Exchange, worker: Worker) -> None:
        config = self._models.config.bidi
        if not worker.spec.timeout:
            exchange.limit_time(config.session_timeout, "bidi.session_timeout")
        if config.idle_timeout:
            exchange.limit_silence(config.idle_timeout, "bidi.idle_timeout")


def _judged(
    exchange: Exchange, worker: Worker, limits: LimitsConfig, request: lmi.TextRequest, document: dict[str, Any]
) -> tuple[lmi.TextRequest, Decided]:
    """A prompt's request as the model may get it, and the judgement on its members. LMIError."""
    request, said = decided_own(worker, request, document, judges=False)
    tell_passed(exchange, worker, said.unknown)
    return within_ceiling(worker, limits, request), said


@final
class _EventStreamChannel:
    """The channel of an event stream: parts from the request's body and parts to the response's, in the request's form."""

    complete = False  # its model says by its return that there is no more

    __slots__ = (
        "_assembling",
        "_decoder",
        "_ended",
        "_exchange",
        "_inbound",
        "_limits",
        "_outbound",
        "_padding",
        "_variant",
        "_verify",
        "form",
    )

    def __init__(
        self, exchange: Exchange, config: Config, form: Form | None, variant: str, verify: bidi.Verify | None
    ) -> None:
        self._exchange, self._limits, self._variant, self._verify = exchange, config.limits, variant, verify
        self._inbound, self._outbound, self._padding = exchange.open_inbound(), exchange.outbound, config.bidi.padding
        self.form = form
        self._decoder: bidi.PartDecoder | bidi.LiteralDecoder | None = None
        self._ended = self._assembling = False
        exchange.parts_in = 0
        self._inbound.under_way = self._under_way
        if form is not None:
            self._decode()

    async def choose_form(self) -> None:
        """Reads the form from the body's first byte, for a request without a content type."""
        data = await self._inbound.receive()
        assert not isinstance(data, Frame)
        self.form = bidi.sniff_form(data or b"")
        if self._verify is not None and self.form is not Form.EVENT_STREAM:
            raise unsigned_form()
        decoder = self._decode()
        if data is None:
            self._ended = True
            decoder.receive_eof()
        else:
            decoder.receive_data(data)

    def _decode(self) -> bidi.PartDecoder | bidi.LiteralDecoder:
        limits = self._limits
        if self.form is Form.LITERAL:
            self._decoder = bidi.LiteralDecoder(limits.part)
        else:
            self._decoder = bidi.PartDecoder(
                limits.part, max_headers=limits.event_headers, max_fields=limits.event_fields, verify=self._verify
            )
        return self._decoder

    @property
    def reply(self) -> dict[str, str]:
        return reply_of(self._exchange)

    @property
    def budget(self) -> Budget:
        """The session's budget, for a model that itself holds bytes of the session."""
        return self._exchange.account

    def awaits(self, whom: Callable[[], str]) -> None:
        """Called by a model that waits for another party: if the session's time runs out meanwhile, the error names it."""
        self._exchange.awaited = whom

    def accept(self) -> None:
        exchange, form = self._exchange, self.form
        if not self._outbound.status:
            self._outbound.start(
                200,
                [
                    (b"content-type", (form or Form.EVENT_STREAM).content_type.encode()),
                    (bidi.INVOKED_PRODUCTION_VARIANT, self._variant.encode()),
                    (bidi.REQUEST_ID, exchange.id.encode()),
                ],
            )

    async def receive(self) -> Part:
        decoder, exchange = self._decoder, self._exchange
        assert decoder is not None, "the form is chosen before the model is called"
        if decoder.buffered:
            await exchange.turn.checkpoint()  # a piece may hold thousands of small parts
        try:
            while True:
                # a large message, whole now, is taken apart beside the loop; nothing else touches the decoder meanwhile
                part = await run_in_codec_thread(decoder.next_part) if decoder.work > _LONG else decoder.next_part()
                if isinstance(part, bidi.PayloadPart):
                    exchange.parts_in += 1
                    if self._assembling:
                        self._inbound.assembled()
                        self._assembling = False
                    return Part(data=part.data, kind=_KIND[part.data_type], last=part.completion is _COMPLETE)
                if self._ended:
                    raise trio.EndOfChannel
                need = decoder.need
                if need > _SMALL:
                    self._assembling = True
                    self._assemble(decoder, decoder.buffered, need)
                data = await self._inbound.receive()
                if data is None:
                    self._ended = True
                    decoder.receive_eof()
                else:
                    assert not isinstance(data, Frame)
                    if need > _SMALL:
                        self._assemble(decoder, min(decoder.buffered + len(data), need), need)
                    decoder.receive_data(data)
        except RemoteProtocolError as e:
            raise self._broken(BadRequest(f"bad event stream: {e}")) from None
        except Forbidden as e:
            raise self._broken(e) from None

    def _under_way(self) -> tuple[object, int] | None:
        """How many messages came before the one that has begun, and how many of its bytes are here; None if none has."""
        decoder = self._decoder
        return (self._exchange.parts_in, decoder.buffered) if decoder is not None and decoder.buffered else None

    def _assemble(self, decoder: bidi.PartDecoder | bidi.LiteralDecoder, arrived: int, need: int) -> None:
        """Pays for the arrived bytes of a large message; for a message in JSON, for all that the decoder needs for it."""
        self._inbound.gathering(need if isinstance(decoder, bidi.LiteralDecoder) else arrived, need)

    def _broken(self, error: GatewayError) -> GatewayError:
        """Interrupts the exchange and returns the error to raise: a model that catches it and goes on is cancelled."""
        self._exchange.interrupt(error)
        return error

    async def send(self, message: Part, /) -> None:
        data = getattr(message, "data", None)
        if type(data) is not bytes:
            data = _octets(message)
        size = len(data)
        if self._padding or self._decoder is None or self._decoder.form is not Form.EVENT_STREAM:
            await self._send_otherwise(message, data)
            return
        if size > eventstream.MAX_PAYLOAD:
            raise _too_large(size, eventstream.MAX_PAYLOAD)
        buffers = bidi.encode_part(data, _DATA_TYPE[message.kind], _COMPLETE if message.last else _PARTIAL)
        outbound = self._outbound
        await outbound.wait_room(size)
        if not outbound.status:
            self.accept()
        outbound.push(*buffers)

    async def _send_otherwise(self, message: Part, data: Buffer) -> None:
        """With padding, or in one of the JSON forms."""
        form = Form.EVENT_STREAM if self._decoder is None else self._decoder.form
        padding = _PADDING[: secrets.randbelow(self._padding + 1)] if self._padding else ""
        size, at_most = len(data), eventstream.MAX_PAYLOAD
        if form is Form.JSON_EVENTS:  # its payload is the whole object, whose data are base64
            at_most = (at_most - _OBJECT - self._padding) // 4 * 3
        if size > at_most:
            raise _too_large(size, at_most)
        if form is not Form.EVENT_STREAM:
            size = size * 4 // 3 + _OBJECT
        await self._outbound.wait_room(size + len(padding))
        self.accept()
        completion = _COMPLETE if message.last else _PARTIAL
        self._outbound.push(*bidi.ENCODERS[form].part(data, _DATA_TYPE[message.kind], completion, padding))

    def fail(self, error: GatewayError) -> None:
        """Answers an HTTP status before the head. After it, writes an exception event and ends the body whole: the SDK takes
        a reset alone for a clean end."""
        if not self._outbound.status:
            refuse(self._exchange, error)
            return
        form = Form.EVENT_STREAM if self._decoder is None else self._decoder.form
        encoder = bidi.ENCODERS[form]
        if blame(error) is ErrorOrigin.MODEL or isinstance(error, OthersWait):
            event = encoder.model_stream_error(error.message, error.code)
        elif (forbidden := forbidden_of(error)) is not None and form is not Form.LITERAL:
            event = bidi.encode_error(forbidden.code, forbidden.message)
        else:
            event = encoder.internal_stream_failure(error.message)
        self._outbound.push(*event)
        self._outbound.finish(error.ending)


def unsigned_form() -> BadRequest:
    """The error for a request in the literal JSON form if signatures are verified."""
    return BadRequest(f"content-type must be {bidi.CONTENT_TYPE} where signatures are verified: it is events that they sign")


def _too_large(size: int, at_most: int) -> ValueError:
    return ValueError(f"a part holds at most {at_most} bytes, this one has {size}: send it in fragments")


def _octets(message: Part) -> Buffer:
    """The bytes of a message of the model's. TypeError if it is not a Part."""
    if not isinstance(message, Part):
        raise TypeError(f"a call of parts is answered with Part, not {type(message).__name__}")
    return octets(message.data)


_ERRORS = {
    ErrorOrigin.CALLER: bidi.BidiErrorType.INPUT_VALIDATION_ERROR,
    ErrorOrigin.LOADING: bidi.BidiErrorType.SERVICE_UNAVAILABLE_ERROR,
    ErrorOrigin.BUSY: bidi.BidiErrorType.SERVICE_UNAVAILABLE_ERROR,
    ErrorOrigin.PLATFORM: bidi.BidiErrorType.INTERNAL_SERVER_ERROR,
}


def refuse(exchange: Exchange, error: GatewayError) -> None:
    """Answers an error before the head in the shapes of the operation."""
    # Before the head, a deadline is usually that of a wait for a slot: a model is called before it only if it `accepts`.
    whose = ErrorOrigin.BUSY if isinstance(error, DeadlineExceeded) else blame(error)
    if (forbidden := forbidden_of(error)) is not None:
        status, headers, body = refusal(forbidden)
    elif whose is ErrorOrigin.MODEL:
        status, headers, body = bidi.error_body(
            bidi.BidiErrorType.MODEL_ERROR,
            error.message,
            code=error.code,
            original_status=error.status,
            original_message=error.message,
        )
    else:
        status, headers, body = bidi.error_body(_ERRORS[whose], error.message)
    named = [*headers, *error.retry, (bidi.REQUEST_ID, exchange.id.encode())]
    exchange.outbound.respond(status, [h for h in named if h[0] != b"content-length"], body, ending=error.ending)


def _end_frames(exchange: Exchange, error: GatewayError) -> None:
    """Answers an HTTP status before the handshake's answer, and a Close after it."""
    if exchange.outbound.status:
        close(exchange, error)
    else:
        exchange.answer_plain_error(error)


def _invocation_path(exchange: Exchange) -> dict[str, str]:
    return {"invocation_path": exchange.path[1:].decode("latin-1")}


@final
class _FrameChannel:
    """The channel of a WebSocket: a frame for each part. Opcode and FIN carry kind and last; a continuation has no kind.

    If the client's handshake names a text for the end of its input, a message of that text is the end, not a part.
    """

    complete = False  # its model says by its return that there is no more

    __slots__ = ("_continuing", "_end", "_ended", "_exchange", "_handshake", "_inbound", "_kind", "_outbound")

    def __init__(self, exchange: Exchange, accepted: Headers, end: bytes | None) -> None:
        self._exchange, self._inbound, self._outbound, self._end = exchange, exchange.open_inbound(), exchange.outbound, end
        self._handshake: Headers = accepted if end is None else (*accepted, (handshake.END_OF_INPUT, end))
        self._kind = _BINARY
        self._continuing = self._ended = False

    async def receive(self) -> Part:
        if self._ended:
            await self._exchange.turn.checkpoint()
            raise trio.EndOfChannel
        frame = await self._inbound.receive()
        if frame is None:
            raise trio.EndOfChannel
        assert isinstance(frame, Frame)
        if frame.opcode is not _CONTINUATION:
            self._kind = _UTF8 if frame.opcode is _TEXT else _BINARY
            if self._end is not None and self._kind is _UTF8 and frame.fin and frame.data == self._end:
                self._ended = True
                raise trio.EndOfChannel
        return Part(data=frame.data, kind=self._kind, last=frame.fin)

    @property
    def reply(self) -> dict[str, str]:
        return reply_of(self._exchange)

    @property
    def budget(self) -> Budget:
        """The session's budget, for a model that itself holds bytes of the session."""
        return self._exchange.account

    def awaits(self, whom: Callable[[], str]) -> None:
        """Called by a model that waits for another party: if the session's time runs out meanwhile, the error names it."""
        self._exchange.awaited = whom

    def accept(self) -> None:
        if not self._outbound.status:
            self._outbound.start(101, self._handshake if self._exchange.reply is None else self._replied())
            self._handshake = ()  # so that the session does not keep it

    def _replied(self) -> Headers:
        """The fields of the 101, with the subprotocol that the model has put into its reply, if the client offers it."""
        exchange = self._exchange
        chosen = reply_value(exchange, SUBPROTOCOL.decode()).encode()
        if chosen not in offered_protocols(exchange.request.headers):
            return self._handshake
        return [*(field for field in self._handshake if field[0] != SUBPROTOCOL), (SUBPROTOCOL, chosen)]

    async def send(self, message: Part, /) -> None:
        outbound, data = self._outbound, getattr(message, "data", None)  # one call less for bytes, which most models send
        if type(data) is not bytes:
            data = _octets(message)
        await outbound.wait_room(len(data))
        if not outbound.status:
            self.accept()
        opcode = _CONTINUATION if self._continuing else _OPCODE[message.kind]
        outbound.push_frame(opcode, message.last, data)
        self._continuing = not message.last
