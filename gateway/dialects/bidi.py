"""SageMaker bidirectional streaming: the event stream over HTTP/2, and the container's WebSocket."""

from __future__ import annotations

from typing import final
from urllib.parse import unquote

import trio

from gateway.dialects.base import Models, session_of
from gateway.dialects.lmi import read_prompt
from gateway.errors import (
    BadRequest,
    DeadlineExceeded,
    Drained,
    Ending,
    GatewayError,
    ModelCrashed,
    ModelFailed,
    NotFound,
    Overloaded,
    Unavailable,
)
from gateway.exchange import Exchange
from gateway.workers.worker import Worker
from models.messages import Family, Part, PartKind
from models.session import Channel
from protocols import bidi, eventstream, websocket_handshake
from protocols.errors import RemoteProtocolError
from protocols.events import Frame, Opcode

_DATA_TYPE = {PartKind.UTF8: bidi.DataType.UTF8, PartKind.BINARY: bidi.DataType.BINARY}
_KIND = {v: k for k, v in _DATA_TYPE.items()}
_OPCODE = {PartKind.UTF8: Opcode.TEXT, PartKind.BINARY: Opcode.BINARY}
# named once: a member costs three look-ups where it is used, and more than those before Python 3.12
_PARTIAL, _COMPLETE = bidi.Completion.PARTIAL, bidi.Completion.COMPLETE
_UTF8, _BINARY = PartKind.UTF8, PartKind.BINARY
_TEXT, _CONTINUATION = Opcode.TEXT, Opcode.CONTINUATION
# RFC 6455 section 7.4.1 and the IANA registry
_GOING_AWAY, _INVALID, _INTERNAL, _TRY_AGAIN = 1001, 1007, 1011, 1013
_SMALL = 64 * 1024


@final
class BidiDialect:
    """Serves models of parts to the AWS SDK and to whatever speaks to a container."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def event_stream(self, exchange: Exchange, endpoint: str) -> None:
        """POST /endpoints/{endpoint}/invocations-bidirectional-stream over HTTP/2, GA event-stream form."""
        exchange.dialect = "bidi"
        exchange.fail = lambda error: _refuse(exchange, error)
        if exchange.wire.name != "http/2":
            raise BadRequest("bidirectional streaming needs HTTP/2: connect with ALPN h2, or by prior knowledge in clear")
        worker, query, path = self._asked(exchange, endpoint)
        exchange.model = worker.name
        with await worker.slot(exchange):
            channel = _EventStreamChannel(exchange, self._models)
            # the head goes out at once: clients wait for it before their first part
            exchange.start(
                200,
                [
                    (b"content-type", bidi.CONTENT_TYPE.encode()),
                    (bidi.INVOKED_PRODUCTION_VARIANT, self._models.config.bidi.variant.encode()),
                    (bidi.REQUEST_ID, exchange.id.encode()),
                ],
            )
            exchange.fail = channel.fail
            self._limit(exchange, worker)
            session = session_of(exchange, worker, channel, query=query, path=path)
            await worker.call(session, exchange, Family.PARTS, read_prompt)
        exchange.finish()

    def _asked(self, exchange: Exchange, endpoint: str) -> tuple[Worker, str, str]:
        """Whom the request asks, with which query and path; BadRequest for what it says wrong. Not in `event_stream`,
        which would keep all of this for as long as the session lasts."""
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in exchange.request.headers}
        try:
            asked = bidi.validate_request(unquote(endpoint), headers)
        except bidi.BidiInputError as e:
            raise BadRequest(str(e)) from None
        content_type = headers.get("content-type", bidi.CONTENT_TYPE)
        if content_type.partition(";")[0].strip().lower() != bidi.CONTENT_TYPE:
            raise BadRequest(f"content-type must be {bidi.CONTENT_TYPE}, got {content_type[:100]!r}")
        worker = self._models.named(asked.endpoint, Family.PARTS, "bidi")
        return worker, asked.query_string or "", asked.invocation_path or ""

    async def container(self, exchange: Exchange, name: str = "") -> None:
        """The container's WebSocket: a frame for each part, byte for byte."""
        exchange.dialect = "websocket"
        models = self._models
        if name:
            worker = models.named(name, Family.PARTS, "bidi")
        else:
            worker = models.unnamed(models.config.bidi.default_model, Family.PARTS, "bidi")
        exchange.model = worker.name
        try:
            headers = websocket_handshake.accept_headers(exchange.request)
        except RemoteProtocolError as e:
            exchange.respond(e.status, websocket_handshake.refusal_headers(e), str(e).encode(), ending=Ending.REFUSED)
            return
        with await worker.slot(exchange):
            channel = _FrameChannel(exchange)
            exchange.start(101, headers)
            exchange.fail = channel.fail
            self._limit(exchange, worker)
            await worker.call(session_of(exchange, worker, channel), exchange, Family.PARTS, read_prompt)
        exchange.finish()

    def _limit(self, exchange: Exchange, worker: Worker) -> None:
        if not worker.spec.timeout:
            exchange.limit_time(self._models.config.bidi.session_timeout, "bidi.session_timeout")


@final
class _EventStreamChannel(Channel[Part, Part]):
    """Parts from the request's events, parts to the response's."""

    def __init__(self, exchange: Exchange, models: Models) -> None:
        limits = models.config.limits
        self._exchange = exchange
        self._decoder = bidi.PartDecoder(limits.part, max_headers=limits.event_headers, max_fields=limits.event_fields)
        self._ended = self._assembling = False

    async def receive(self) -> Part:
        decoder, exchange = self._decoder, self._exchange
        try:
            while True:
                part = decoder.next_part()
                if isinstance(part, bidi.PayloadPart):
                    if self._assembling:
                        exchange.assembled()
                        self._assembling = False
                    return Part(data=part.data, kind=_KIND[part.data_type], last=part.completion is _COMPLETE)
                if self._ended:
                    raise trio.EndOfChannel
                if decoder.need > _SMALL:
                    self._assembling = True
                    exchange.assembling(decoder.need)
                data = await exchange.receive()
                if data is None:
                    self._ended = True
                    decoder.receive_eof()
                else:
                    assert not isinstance(data, Frame)
                    decoder.receive_data(data)
        except RemoteProtocolError as e:
            raise BadRequest(f"bad event stream: {e}") from None

    async def send(self, message: Part, /) -> None:
        size = _size(message)
        if size > eventstream.MAX_PAYLOAD:
            raise ValueError(
                f"a part holds at most {eventstream.MAX_PAYLOAD} bytes, this one has {size}: send it in fragments"
            )
        buffers = bidi.encode_part(message.data, _DATA_TYPE[message.kind], _COMPLETE if message.last else _PARTIAL)
        await self._exchange.wait_room(size)
        self._exchange.push(*buffers)

    def fail(self, error: GatewayError) -> None:
        """An exception event, then a whole end of the stream: a bare reset reads as a clean end in the SDK."""
        match error:
            case ModelFailed() | ModelCrashed() | DeadlineExceeded():
                event = bidi.encode_model_stream_error(error.message, error.code)
            case _:
                event = bidi.encode_internal_stream_failure(error.message)
        self._exchange.push(*event)
        self._exchange.finish(error.ending)


def _size(message: Part) -> int:
    """The bytes of what a model sends, if it sends the right thing."""
    if not isinstance(message, Part):
        raise TypeError(f"a call of parts is answered with Part, not {type(message).__name__}")
    data = message.data
    return len(data) if type(data) is bytes else memoryview(data).nbytes


def _refuse(exchange: Exchange, error: GatewayError) -> None:
    match error:
        case BadRequest() | NotFound():
            status, headers, body = bidi.error_body(bidi.ErrorType.INPUT_VALIDATION_ERROR, error.message)
        case ModelFailed():
            status, headers, body = bidi.error_body(
                bidi.ErrorType.MODEL_ERROR,
                error.message,
                code=error.code,
                original_status=error.status,
                original_message=error.message,
            )
        case Overloaded() | Unavailable() | Drained():
            status, headers, body = bidi.error_body(bidi.ErrorType.SERVICE_UNAVAILABLE_ERROR, error.message)
        case _:
            status, headers, body = bidi.error_body(bidi.ErrorType.INTERNAL_SERVER_ERROR, error.message)
    named = [*headers, (bidi.REQUEST_ID, exchange.id.encode())]
    exchange.respond(status, [h for h in named if h[0] != b"content-length"], body, ending=error.ending)


@final
class _FrameChannel(Channel[Part, Part]):
    """A frame for each part and a part for each frame: opcode and FIN carry kind and last, continuations have no kind."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._kind = _BINARY
        self._continuing = False

    async def receive(self) -> Part:
        frame = await self._exchange.receive()
        if frame is None:
            raise trio.EndOfChannel
        assert isinstance(frame, Frame)
        if frame.opcode is not _CONTINUATION:
            self._kind = _UTF8 if frame.opcode is _TEXT else _BINARY
        return Part(data=frame.data, kind=self._kind, last=frame.fin)

    async def send(self, message: Part, /) -> None:
        await self._exchange.wait_room(_size(message))
        opcode = _CONTINUATION if self._continuing else _OPCODE[message.kind]
        self._exchange.push_frame(opcode, message.last, message.data)
        self._continuing = not message.last

    def fail(self, error: GatewayError) -> None:
        """A Close whose code says whose fault it was and whose reason is the message, cut to what a Close holds."""
        match error:
            case Drained():
                code = _GOING_AWAY
            case Overloaded() | Unavailable():
                code = _TRY_AGAIN
            case BadRequest():
                code = _INVALID
            case _:
                code = _INTERNAL
        reason = error.message.encode()[:123].decode(errors="ignore")  # RFC 6455 section 5.5: 125 bytes with the code
        self._exchange.finish(error.ending, code=code, reason=reason)
