"""SageMaker's InvokeEndpointWithBidirectionalStream: parts as event-stream messages, GA form and JSON, either role."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple, Protocol, TypeAlias, final
from zlib import crc32

import msgspec

from protocols.aws.bidi_head import (
    CONTENT_TYPE,
    END,
    ERROR_CONTENT_TYPE,
    ERROR_TYPE,
    INVOKED_PRODUCTION_VARIANT,
    JSON_CONTENT_TYPE,
    MODEL_INVOCATION_PATH,
    MODEL_QUERY_STRING,
    REQUEST_ID,
    TARGET_VARIANT,
    AtEnd,
    BidiErrorType,
    BidiInputError,
    BidiRequest,
    Completion,
    DataType,
    ErrorBody,
    Form,
    PayloadPart,
    StreamEnd,
    StreamFailure,
    error_body,
    failure_body,
    form_of,
    invoked_variant,
    is_json,
    read_flags,
    shown,
    signature_error_body,
    sniff_form,
    validate_request,
)
from protocols.aws.bidi_json import (
    LONG,
    LiteralDecoder,
    encode_json_event,
    encode_literal_internal_stream_failure,
    encode_literal_model_stream_error,
    encode_literal_part,
    read_json_event,
)
from protocols.aws.eventstream import (
    LARGE,
    MAX_FIELDS,
    MAX_HEADERS,
    MAX_PAYLOAD,
    OVERHEAD,
    HeaderValue,
    Limits,
    NeedData,
    Raw,
    Reader,
    Timestamp,
    decode_headers,
    encode_block,
    encode_buffers,
    encode_head,
    encode_headers,
    split,
)
from protocols.errors import RemoteProtocolError
from protocols.events import Buffer, Signal

__all__ = [
    "CONTENT_TYPE",
    "ENCODERS",
    "END",
    "ENVELOPE_OVERHEAD",
    "ERROR_CONTENT_TYPE",
    "ERROR_TYPE",
    "INVOKED_PRODUCTION_VARIANT",
    "JSON_CONTENT_TYPE",
    "MODEL_INVOCATION_PATH",
    "MODEL_QUERY_STRING",
    "PART_CONTENT_TYPE",
    "REQUEST_ID",
    "TARGET_VARIANT",
    "AtEnd",
    "BidiErrorType",
    "BidiInputError",
    "BidiRequest",
    "Completion",
    "DataType",
    "Encoder",
    "Form",
    "LiteralDecoder",
    "PartDecoder",
    "PartEncoder",
    "PayloadPart",
    "ResponseDecoder",
    "StreamEnd",
    "StreamFailure",
    "Verify",
    "encode_envelope",
    "encode_error",
    "encode_internal_stream_failure",
    "encode_json_event",
    "encode_literal_internal_stream_failure",
    "encode_literal_model_stream_error",
    "encode_literal_part",
    "encode_model_stream_error",
    "encode_part",
    "encode_request_end",
    "encode_request_event",
    "encode_request_part",
    "error_body",
    "form_of",
    "invoked_variant",
    "signature_error_body",
    "sniff_form",
    "validate_request",
]

PART_CONTENT_TYPE: Final = "application/octet-stream"
"""The content type of a PayloadPart in the GA form: its payload is the raw bytes."""


# ---- the server's output

_EVENT: dict[str, HeaderValue] = {":message-type": "event", ":event-type": "PayloadPart"}


def _part_headers(data_type: DataType | None, completion: Completion | None, padding: str = "") -> dict[str, HeaderValue]:
    headers: dict[str, HeaderValue] = {}
    if data_type is not None:
        headers["DataType"] = data_type.value
    if completion is not None:
        headers["CompletionState"] = completion.value
    if padding:
        headers["P"] = padding
    return headers


_RESPONSE_BLOCKS = {
    (data_type, completion): encode_headers(
        _EVENT | {":content-type": PART_CONTENT_TYPE} | _part_headers(data_type, completion)
    )
    for data_type in (None, *DataType)
    for completion in (None, *Completion)
}


def encode_part(
    data: Buffer,
    data_type: DataType | None = None,
    completion: Completion | None = Completion.COMPLETE,
    padding: str = "",
) -> list[Buffer]:
    """A PayloadPart of a response in the GA form, as the buffers to write: raw bytes, not signed. A header that is None is
    left out. `padding` is the member P, which hides the length of `data` from observers of the wire.

    `data` of 16 KiB and more is passed by reference and must not change until it is written. LocalProtocolError for more
    than 16 MiB of data or 32767 bytes of padding.
    """
    if padding:
        return encode_block(_RESPONSE_BLOCKS[data_type, completion] + encode_headers({"P": padding}), data)
    size = len(data) if type(data) is bytes else memoryview(data).nbytes
    if size >= LARGE:
        return encode_block(_RESPONSE_BLOCKS[data_type, completion], data)
    head, crc = _response_head(data_type, completion, size)
    return [b"".join((head, data, crc32(data, crc).to_bytes(4, "big")))]


@lru_cache(maxsize=256)
def _response_head(data_type: DataType | None, completion: Completion | None, size: int) -> tuple[bytes, int]:
    """The bytes before a payload of `size` bytes, and their CRC, which the message's CRC continues."""
    head = encode_head(_RESPONSE_BLOCKS[data_type, completion], size)
    return head, crc32(head)


def encode_model_stream_error(message: str, code: str = "") -> list[Buffer]:
    """The exception for a fault of the model: it raised, timed out or closed abnormally. `code` is for programs, such as
    ModelInvocationTimeExceeded or StreamBroken. The stream must end after it."""
    return _encode_exception("ModelStreamError", message, code)


def encode_internal_stream_failure(message: str) -> list[Buffer]:
    """The exception for a fault of the platform: a limit, a drain, a lost worker, a bug. The stream must end after it."""
    return _encode_exception("InternalStreamFailure", message, "")


def encode_error(code: str, message: str) -> list[Buffer]:
    """An error that the operation's model does not define, such as a wrong signature. SDKs raise it by its code, while an
    exception with an unknown name would break them. The stream must end after it."""
    text = message[:_LONGEST_HEADER].encode("ascii", "replace").decode()
    return encode_buffers({":message-type": "error", ":error-code": code, ":error-message": text}, b"")


_LONGEST_HEADER = 1024


def _encode_exception(exception_type: str, message: str, code: str) -> list[Buffer]:
    headers = {":message-type": "exception", ":exception-type": exception_type, ":content-type": ERROR_CONTENT_TYPE}
    return encode_buffers(headers, failure_body(message, code))


class PartEncoder(Protocol):
    """The signature of `encode_part` and of the same functions of other forms."""

    def __call__(
        self,
        data: Buffer,
        data_type: DataType | None = None,
        completion: Completion | None = Completion.COMPLETE,
        padding: str = "",
    ) -> list[Buffer]: ...


class Encoder(NamedTuple):
    """The functions that answer in one form. In every form, the stream must end after an exception."""

    part: PartEncoder
    model_stream_error: Callable[[str, str], list[Buffer]]
    """Takes message and code."""
    internal_stream_failure: Callable[[str], list[Buffer]]


ENCODERS: Final[Mapping[Form, Encoder]] = {
    Form.EVENT_STREAM: Encoder(encode_part, encode_model_stream_error, encode_internal_stream_failure),
    # exceptions are JSON events in the GA form already
    Form.JSON_EVENTS: Encoder(encode_json_event, encode_model_stream_error, encode_internal_stream_failure),
    Form.LITERAL: Encoder(encode_literal_part, encode_literal_model_stream_error, encode_literal_internal_stream_failure),
}
"""The encoder for each form of a request."""


# ---- the client's output


def encode_request_event(
    data: Buffer, data_type: DataType | None = None, completion: Completion | None = None, *, padding: str = ""
) -> bytes:
    """A PayloadPart as the SDK puts it inside an envelope: with the content type last, and without one for an empty part. A
    chunk signature covers exactly these bytes."""
    content_type: dict[str, HeaderValue] = {":content-type": PART_CONTENT_TYPE} if len(data) else {}
    return b"".join(encode_buffers(_EVENT | _part_headers(data_type, completion, padding) | content_type, data))


def encode_envelope(event: Buffer, *, date_ms: int, signature: bytes = bytes(32)) -> list[Buffer]:
    """The signed message around an event. `date_ms` is milliseconds since 1970. `signature` is the 32 bytes of the chunk
    signature; the default is no valid signature, for servers that do not verify."""
    return encode_buffers({":date": Timestamp(date_ms), ":chunk-signature": signature}, event)


def encode_request_part(
    data: Buffer,
    data_type: DataType | None = None,
    completion: Completion | None = None,
    *,
    padding: str = "",
    date_ms: int,
    signature: bytes = bytes(32),
) -> list[Buffer]:
    """A PayloadPart of a request, in its envelope. LocalProtocolError if the event is larger than 16 MiB."""
    event = encode_request_event(data, data_type, completion, padding=padding)
    return encode_envelope(event, date_ms=date_ms, signature=signature)


def encode_request_end(*, date_ms: int, signature: bytes = bytes(32)) -> list[Buffer]:
    """The envelope without an event that ends the input; END_STREAM must follow."""
    return encode_envelope(b"", date_ms=date_ms, signature=signature)


# ---- input

_ENVELOPE_DATE = b"\x05:date\x08"
_ENVELOPE_SIGNATURE = b"\x10:chunk-signature\x06\x00\x20"
_ENVELOPE_HEADERS = len(_ENVELOPE_DATE) + 8 + len(_ENVELOPE_SIGNATURE) + 32
ENVELOPE_OVERHEAD: Final = OVERHEAD + _ENVELOPE_HEADERS
"""Bytes that the SDK's envelope adds to an event: 83."""
_ENVELOPE = struct.Struct(">III7s8x20s32xIII")
"""The SDK's envelope: prelude, date and signature, and the prelude of the event inside."""
_CRCS = struct.Struct(">II")
"""The end of an envelope: the CRC of the event, then that of the envelope."""

_SIGNATURE_SIZE = 32

Verify: TypeAlias = Callable[[int, bytes, Buffer], None]
"""Verifies a signed message by its `:date` (milliseconds since 1970), its 32 bytes of `:chunk-signature` and its payload. It
raises an error if the message must not be accepted."""


def _seal(block: bytes, fields: int) -> tuple[int, bytes] | None:
    """The date and signature of an envelope; None if these are not the headers of an envelope."""
    if len(block) == _ENVELOPE_HEADERS and block.startswith(_ENVELOPE_DATE) and block[15:35] == _ENVELOPE_SIGNATURE:
        # the bytes that every SDK writes; decoding them as headers would cost more than the event inside
        return int.from_bytes(block[7:15], "big", signed=True), block[35:]
    headers = decode_headers(block, fields)
    if ":chunk-signature" not in headers and ":date" not in headers:
        return None
    date, signature = headers.get(":date"), headers.get(":chunk-signature")
    if not isinstance(date, Timestamp) or not isinstance(signature, bytes):
        raise RemoteProtocolError("a signed event needs :date (a timestamp) and :chunk-signature (bytes)")
    return date.value, signature


class _Head(NamedTuple):
    """The meaning of the headers of a PayloadPart."""

    data_type: DataType
    completion: Completion
    content_type: str


# Header blocks that were decoded before. Only blocks with nothing but the dialect's own names and values are kept: they
# are short, contain nothing of a request, and all clients together use only a few.
_HEADS: dict[bytes, _Head] = {}
_HEADS_KEPT = 64
_HEAD_SIZE = 256
_FLAGS = ("DataType", "CompletionState", "CompletionStatus")
_OWN_FIELDS = frozenset((*_EVENT, *_FLAGS, ":content-type"))


def _learn(block: bytes, headers: Mapping[str, HeaderValue]) -> _Head:
    head = _read_head(headers)
    own = headers.keys() <= _OWN_FIELDS and headers.get(":content-type", PART_CONTENT_TYPE) == PART_CONTENT_TYPE
    if own and len(block) <= _HEAD_SIZE:
        if len(_HEADS) >= _HEADS_KEPT:
            _HEADS.clear()
        _HEADS[block] = head
    return head


def _read_head(headers: Mapping[str, HeaderValue]) -> _Head:
    _check_event(headers)
    data_type, completion = read_flags(*map(headers.get, _FLAGS))
    content_type = headers.get(":content-type")
    return _Head(data_type, completion, content_type if isinstance(content_type, str) else "")


def _check_event(headers: Mapping[str, HeaderValue]) -> None:
    for name, value in _EVENT.items():
        if headers.get(name) != value:
            raise RemoteProtocolError(f"{name} must be {value!r}, got {_shown(headers.get(name))}")


def _shown(value: HeaderValue | None) -> str:
    return "no such header" if value is None else shown(value)


class _Incremental(Reader):
    """The common part of both directions: events in either form, and an end after which no byte may come."""

    __slots__ = ("_ended", "form")

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._ended = False
        self.form = Form.EVENT_STREAM
        """EVENT_STREAM until a JSON event has come, then JSON_EVENTS: the peer has shown that it uses them."""

    @property
    def work(self) -> int:
        """The bytes that the next pull processes in one step, because a message of more than 256 KiB is whole: checksum,
        signature, base64. Otherwise 0. That pull may run in another thread if there is no other pull meanwhile."""
        return self._whole_message() if self.buffered > LONG else 0

    def _whole_message(self) -> int:
        size = self.need or int.from_bytes(self._buffer[self._at : self._at + 4], "big")
        return size if LONG < size <= self.buffered else 0

    def receive_eof(self) -> None:
        """Tells that the wire has ended. RemoteProtocolError if a message is cut off or bytes follow the end. Whole parts
        can still be pulled, then END."""
        if self._ended:
            self._eof = True
            self._refuse_more()
        super().receive_eof()

    def _next_or_end(self) -> Raw | NeedData | AtEnd:
        if self._ended:
            self._refuse_more()
        raw = self._next_raw()
        return END if raw is Signal.NEED_DATA and (self._ended or self._eof) else raw

    def _refuse_more(self) -> None:
        if self.buffered:
            raise self._fail(RemoteProtocolError(f"{self.buffered} bytes after the end of the event stream"))

    def _read(self, raw: Raw, headers: Mapping[str, HeaderValue] | None = None) -> PayloadPart:
        """The part of an event. `headers` are its headers if they are decoded already."""
        head = _HEADS.get(raw.headers)
        if head is None or len(_OWN_FIELDS) > self._limits.fields:
            headers = headers or decode_headers(raw.headers, self._limits.fields)
            if is_json(content_type := headers.get(":content-type")):
                _check_event(headers)
                part = read_json_event(raw.payload, headers, content_type)
                self.form = Form.JSON_EVENTS
                return part
            head = _learn(raw.headers, headers)
        return PayloadPart(
            data=raw.payload, data_type=head.data_type, completion=head.completion, content_type=head.content_type
        )


@lru_cache(maxsize=8)
def _limits_of(max_part: int, max_headers: int, max_fields: int) -> Limits:
    """One object for all streams."""
    return Limits(message=max_part + ENVELOPE_OVERHEAD, headers=max_headers, fields=max_fields)


@final
class PartDecoder(_Incremental):
    """Reads the body of a request: events in signed envelopes, as the SDKs send them, or bare.

    Call `receive_data`, then `next_part` until NEED_DATA, and so on. END comes after the empty envelope, or after
    `receive_eof` if a client ends without one (SDKs before 0.5). Bytes after the empty envelope are an error, so go on until
    the wire has ended. RemoteProtocolError is final.

    **Signatures** are verified by `verify`; without it they are ignored. It is called for every envelope whose checksums
    hold, in order and including the empty one at the end, before anything of the payload is used. An error that it raises is
    raised here and ends the decoder. With `verify`, a bare event is an error. An end without the empty envelope is still
    accepted: an attacker who can cut the connection can remove the last parts, but cannot change, add or reorder any.

    `max_part` bounds the event with its headers, in its envelope or bare; the envelope may have 83 bytes more. It bounds a
    JSON event as it is sent, so its decoded bytes are at most three quarters of that. They are decoded within one pull,
    which then releases all the memory of `need`.
    """

    __slots__ = ("_max_part", "_short", "_verify")

    def __init__(
        self,
        max_part: int = MAX_PAYLOAD,
        *,
        max_headers: int = MAX_HEADERS,
        max_fields: int = MAX_FIELDS,
        verify: Verify | None = None,
    ) -> None:
        super().__init__(_limits_of(max_part, max_headers, max_fields))
        self._max_part = max_part
        self._verify = verify
        # Up to this size `next_part` opens an envelope itself. 0 if a block of `_HEADS` could break a limit.
        roomy = max_headers >= _HEAD_SIZE and max_fields >= len(_OWN_FIELDS)
        self._short = min(max_part + ENVELOPE_OVERHEAD, LARGE) if roomy and verify is None else 0

    def next_part(self) -> PayloadPart | NeedData | AtEnd:
        """The next part; NEED_DATA; or END, at each call."""
        buffer, at = self._buffer, self._at
        left = len(buffer) - at
        if not left and self._target is None and self._error is None and not (self._ended or self._eof):
            return Signal.NEED_DATA
        # The quick way: an envelope exactly as every SDK writes it, whole, around an event whose headers were seen before.
        # `_next_part` handles everything else, and all errors.
        if left >= _ENVELOPE.size and type(buffer) is bytes and self._target is None and not self._ended:
            total, headers, crc, date, signature, event, block, event_crc = _ENVELOPE.unpack_from(buffer, at)
            event_at, data_at, end = at + 79, at + 91 + block, at + total - 8
            if (
                total <= left
                and total <= self._short
                and headers == _ENVELOPE_HEADERS
                and date == _ENVELOPE_DATE
                and signature == _ENVELOPE_SIGNATURE
                and event == total - ENVELOPE_OVERHEAD
                and data_at <= end
                and (head := _HEADS.get(buffer[at + 91 : data_at])) is not None
                and crc32(buffer[at : at + 8]) == crc
                and crc32(buffer[event_at : event_at + 8]) == event_crc
            ):
                event_crc, crc = crc32(buffer[event_at + 8 : end], event_crc), crc32(buffer[at + 8 : end + 4], crc)
                if _CRCS.unpack_from(buffer, end) == (event_crc, crc):
                    self._buffer, self._at = (b"", 0) if total == left else (buffer, end + 8)
                    self.need = 0
                    data_type, completion, content_type = head
                    return PayloadPart(
                        data=buffer[data_at:end], data_type=data_type, completion=completion, content_type=content_type
                    )
        return self._next_part()

    def _next_part(self) -> PayloadPart | NeedData | AtEnd:
        try:
            raw = self._next_or_end()
            return raw if raw is Signal.NEED_DATA or raw is END else self._open(raw)
        except RemoteProtocolError as error:
            raise self._fail(error) from None

    def _open(self, event: Raw) -> PayloadPart | AtEnd:
        if event.headers not in _HEADS and (seal := _seal(event.headers, self._limits.fields)) is not None:
            if self._verify is not None:
                self._check(self._verify, *seal, event.payload)
            if not event.payload:
                self._ended = True
                return END
            event = split(event.payload, self._limits)
        elif self._verify is not None:
            raise RemoteProtocolError("an event without :date and :chunk-signature: signatures are verified here")
        size = OVERHEAD + len(event.headers) + len(event.payload)
        if size > self._max_part:
            raise RemoteProtocolError(f"event of {size} bytes with its headers, the limit of a part is {self._max_part}")
        return self._read(event)

    def _check(self, verify: Verify, date_ms: int, signature: bytes, payload: Buffer) -> None:
        if len(signature) != _SIGNATURE_SIZE:
            raise RemoteProtocolError(f":chunk-signature must have {_SIGNATURE_SIZE} bytes, got {len(signature)}")
        try:
            verify(date_ms, signature, payload)
        except Exception as error:
            # An error of any type: no message may follow one that was not verified.
            final = error if isinstance(error, RemoteProtocolError) else RemoteProtocolError("a signature was not verified")
            self._fail(final)
            raise


@final
class ResponseDecoder(_Incremental):
    """Reads the body of a 200 response: parts, and at most one failure, which ends it.

    Call `receive_data`, then `next_event` until NEED_DATA, and so on. END comes after `receive_eof`, or after a failure. A
    reset is not an end: do not call `receive_eof` then. RemoteProtocolError is final.
    """

    __slots__ = ()

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits or Limits())

    def next_event(self) -> PayloadPart | StreamFailure | NeedData | AtEnd:
        """The next part; the failure; NEED_DATA; or END, at each call."""
        try:
            raw = self._next_or_end()
            return raw if raw is Signal.NEED_DATA or raw is END else self._open(raw)
        except RemoteProtocolError as error:
            raise self._fail(error) from None

    def _open(self, raw: Raw) -> PayloadPart | StreamFailure:
        if raw.headers in _HEADS:
            return self._read(raw)
        headers = decode_headers(raw.headers, self._limits.fields)
        match headers.get(":message-type"):
            case "exception":
                event = _failure(headers, raw.payload)
            case "error":  # a failure that the operation's model does not define; it has no payload
                event = StreamFailure(
                    exception_type=_string(headers, ":error-code"), message=_string(headers, ":error-message")
                )
            case _:
                return self._read(raw, headers)
        self._ended = True
        return event


def _failure(headers: Mapping[str, HeaderValue], payload: Buffer) -> StreamFailure:
    try:
        body = msgspec.json.decode(payload, type=ErrorBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"exception payload must be a JSON object with Message and ErrorCode: {error}") from None
    return StreamFailure(
        exception_type=_string(headers, ":exception-type"), message=body.message or "", code=body.error_code or ""
    )


def _string(headers: Mapping[str, HeaderValue], name: str) -> str:
    value = headers.get(name)
    if not isinstance(value, str):
        raise RemoteProtocolError(f"{name} must be a string, got {_shown(value)}")
    return value
