"""SageMaker's InvokeEndpointWithBidirectionalStream, GA form: what its requests, parts and errors are as bytes."""

from __future__ import annotations

import enum
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, NamedTuple, TypeAlias, final
from zlib import crc32

import msgspec

from protocols.errors import ProtocolError, RemoteProtocolError
from protocols.events import Buffer, Headers, Signal
from protocols.eventstream import (
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

CONTENT_TYPE: Final = "application/vnd.amazon.eventstream"
"""Of the request and of its 200 response."""
PART_CONTENT_TYPE: Final = "application/octet-stream"
"""Of a PayloadPart: its payload is the raw bytes."""
ERROR_CONTENT_TYPE: Final = "application/json"
"""Of an exception message and of an error response."""

# Request headers, as keys of a mapping with lower-case names; response headers as they are written.
TARGET_VARIANT: Final = "x-amzn-sagemaker-target-variant"
MODEL_INVOCATION_PATH: Final = "x-amzn-sagemaker-model-invocation-path"
MODEL_QUERY_STRING: Final = "x-amzn-sagemaker-model-query-string"
INVOKED_PRODUCTION_VARIANT: Final = b"x-amzn-invoked-production-variant"
REQUEST_ID: Final = b"x-amzn-requestid"
ERROR_TYPE: Final = b"x-amzn-errortype"


# ---- the request head


class ErrorType(enum.StrEnum):
    """The errors that the operation has as an HTTP response, by the name that `x-amzn-errortype` carries."""

    INPUT_VALIDATION_ERROR = "InputValidationError"
    MODEL_ERROR = "ModelError"
    INTERNAL_SERVER_ERROR = "InternalServerError"
    SERVICE_UNAVAILABLE_ERROR = "ServiceUnavailableError"

    @property
    def status(self) -> int:
        return _STATUS[self]


_STATUS = {
    ErrorType.INPUT_VALIDATION_ERROR: 400,
    ErrorType.MODEL_ERROR: 424,
    ErrorType.INTERNAL_SERVER_ERROR: 500,
    ErrorType.SERVICE_UNAVAILABLE_ERROR: 503,
}


@final
class BidiInputError(ProtocolError):
    """The request head is not one of this operation. The text is for the client: field, rule, and what came."""

    errortype: Final = ErrorType.INPUT_VALIDATION_ERROR
    status: Final = 400


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BidiRequest:
    """What the request head asks for; None where it leaves the choice to the server.

    `invocation_path` has no leading slash and may hold `.` and `..` segments: it is an opaque name, never to be
    normalised into another URL. `query_string` is for the model byte for byte, percent escapes untouched.
    """

    endpoint: str
    target_variant: str | None = None
    invocation_path: str | None = None
    query_string: str | None = None


# The operation's model anchors some of these and not others; all are meant for the whole value, hence fullmatch. (`$`
# would admit a newline at the end.)
_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")
_PATH = re.compile(r"[A-Za-z0-9\-._]+(?:/[A-Za-z0-9\-._]+)*")
_PAIR = r"[a-zA-Z0-9][A-Za-z0-9_-]*=(?:[A-Za-z0-9._~\-]|%[0-9A-Fa-f]{2})+"
_QUERY = re.compile(f"{_PAIR}(?:&{_PAIR})*")


def validate_request(endpoint: str, headers: Mapping[str, str]) -> BidiRequest:
    """Checks the endpoint name of the path and the three optional headers (lower-case names) against the lengths and
    patterns of the operation. BidiInputError for the first that does not fit.

    An empty header counts as absent: the SDK sends empty ones for members set to "".
    """
    return BidiRequest(
        endpoint=_checked("EndpointName", endpoint, 63, _NAME),
        target_variant=_optional("TargetVariant", headers.get(TARGET_VARIANT), 63, _NAME),
        invocation_path=_optional("ModelInvocationPath", headers.get(MODEL_INVOCATION_PATH), 100, _PATH),
        query_string=_optional("ModelQueryString", headers.get(MODEL_QUERY_STRING), 2048, _QUERY),
    )


def _optional(member: str, value: str | None, longest: int, pattern: re.Pattern[str]) -> str | None:
    return _checked(member, value, longest, pattern) if value else None


def _checked(member: str, value: str, longest: int, pattern: re.Pattern[str]) -> str:
    if len(value) > longest:
        raise BidiInputError(f"{member} has at most {longest} characters, got {len(value)}: {value[:64]!r}...")
    if not pattern.fullmatch(value):
        shown = repr(value) if len(value) <= 64 else f"{value[:64]!r}..."
        raise BidiInputError(f"{member} must match ^{pattern.pattern}$ as a whole, got {shown}")
    return value


# ---- errors before the stream


class _ErrorBody(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True):
    """Member names in PascalCase: with `message` in lower case the SDK loses the text."""

    message: str | None = None
    error_code: str | None = None
    original_status_code: int | None = None
    original_message: str | None = None
    log_stream_arn: str | None = None


_MAX_TEXT = 32 * 2**10
"""Characters of an error text that are sent: a model's own text goes out whole, a runaway one must not fill the queue."""


def _clean(text: str | None) -> str | None:
    """`text` as UTF-8 can carry it: a lone surrogate becomes `?`. Empty is absent."""
    return text[:_MAX_TEXT].encode("utf-8", "replace").decode() if text else None


def error_body(
    errortype: ErrorType,
    message: str,
    *,
    code: str | None = None,
    original_status: int | None = None,
    original_message: str | None = None,
    log_stream_arn: str | None = None,
) -> tuple[int, Headers, bytes]:
    """Status, headers and body of an error response, for errors before the 200 is sent.

    `code` is the ErrorCode member; `original_status`, `original_message` and `log_stream_arn` belong to ModelError.
    Members that are None are left out; a text is cut after 32768 characters.
    """
    body = msgspec.json.encode(
        _ErrorBody(
            message=_clean(message) or "",
            error_code=_clean(code),
            original_status_code=original_status,
            original_message=_clean(original_message),
            log_stream_arn=_clean(log_stream_arn),
        )
    )
    headers = (
        (b"content-type", ERROR_CONTENT_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (ERROR_TYPE, errortype.encode()),
    )
    return errortype.status, headers, body


# ---- parts


class DataType(enum.Enum):
    """What the bytes of a part claim to be. Nobody inspects them."""

    UTF8 = "UTF8"
    BINARY = "BINARY"

    __hash__ = object.__hash__  # members are single; Enum's own is a Python call for each look-up


class Completion(enum.Enum):
    """Whether further parts continue this one (PARTIAL). Parts are passed on as they are, never aggregated."""

    PARTIAL = "PARTIAL"
    COMPLETE = "COMPLETE"

    __hash__ = object.__hash__


@final
class PayloadPart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One part, with the defaults filled in: BINARY and COMPLETE where the event says nothing.

    Received `data` is `bytes` up to 16 KiB and a read-only memoryview above. `content_type` is the event's own, empty
    where it has none; GA clients send application/octet-stream.
    """

    data: Buffer
    data_type: DataType = DataType.BINARY
    completion: Completion = Completion.COMPLETE
    content_type: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFailure:
    """The exception that ends a response. `exception_type` is ModelStreamError, InternalStreamFailure, or another name
    that the server chose; `message` and `code` are empty where it gave none."""

    exception_type: str
    message: str = ""
    code: str = ""


class StreamEnd(enum.Enum):
    """What a decoder says when no more parts will come."""

    END = enum.auto()


END: Final = StreamEnd.END
AtEnd: TypeAlias = Literal[StreamEnd.END]

_EVENT: dict[str, HeaderValue] = {":message-type": "event", ":event-type": "PayloadPart"}


def _part_headers(data_type: DataType | None, completion: Completion | None) -> dict[str, HeaderValue]:
    headers: dict[str, HeaderValue] = {}
    if data_type is not None:
        headers["DataType"] = data_type.value
    if completion is not None:
        headers["CompletionState"] = completion.value
    return headers


_RESPONSE_BLOCKS = {
    (data_type, completion): encode_headers(
        _EVENT | {":content-type": PART_CONTENT_TYPE} | _part_headers(data_type, completion)
    )
    for data_type in (None, *DataType)
    for completion in (None, *Completion)
}


def encode_part(
    data: Buffer, data_type: DataType | None = None, completion: Completion | None = Completion.COMPLETE
) -> list[Buffer]:
    """A PayloadPart of a response, as the buffers to write: raw bytes, not signed, a header left out where it is None.
    From 16 KiB on `data` goes by reference and must not change until it is written. LocalProtocolError over 16 MiB."""
    size = len(data) if type(data) is bytes else memoryview(data).nbytes
    if size >= LARGE:
        return encode_block(_RESPONSE_BLOCKS[data_type, completion], data)
    head, crc = _response_head(data_type, completion, size)
    return [b"".join((head, data, crc32(data, crc).to_bytes(4, "big")))]


@lru_cache(maxsize=256)
def _response_head(data_type: DataType | None, completion: Completion | None, size: int) -> tuple[bytes, int]:
    """What stands before a payload of `size` bytes, and its CRC, from which that of the message goes on."""
    head = encode_head(_RESPONSE_BLOCKS[data_type, completion], size)
    return head, crc32(head)


def encode_model_stream_error(message: str, code: str = "") -> list[Buffer]:
    """The exception for what the model did: it raised, timed out or closed abnormally. `code` is for programs to read,
    such as ModelInvocationTimeExceeded or StreamBroken. The stream's end must follow."""
    return _encode_exception("ModelStreamError", message, code)


def encode_internal_stream_failure(message: str) -> list[Buffer]:
    """The exception for what the platform did: a limit, a drain, a lost worker, a bug. The stream's end must follow."""
    return _encode_exception("InternalStreamFailure", message, "")


def _encode_exception(exception_type: str, message: str, code: str) -> list[Buffer]:
    headers = {":message-type": "exception", ":exception-type": exception_type, ":content-type": ERROR_CONTENT_TYPE}
    return encode_buffers(headers, msgspec.json.encode(_ErrorBody(message=_clean(message) or "", error_code=_clean(code))))


# ---- the client's way out


def encode_request_event(data: Buffer, data_type: DataType | None = None, completion: Completion | None = None) -> bytes:
    """A PayloadPart as the SDK puts it inside an envelope: the content type last, and none for an empty part. These
    are the bytes that a chunk signature covers."""
    content_type: dict[str, HeaderValue] = {":content-type": PART_CONTENT_TYPE} if len(data) else {}
    return b"".join(encode_buffers(_EVENT | _part_headers(data_type, completion) | content_type, data))


def encode_envelope(event: Buffer, *, date_ms: int, signature: bytes = bytes(32)) -> list[Buffer]:
    """The signed message around an event: `date_ms` since 1970, and the 32 raw bytes of the chunk signature (the
    default is none at all, for servers that do not look)."""
    return encode_buffers({":date": Timestamp(date_ms), ":chunk-signature": signature}, event)


def encode_request_part(
    data: Buffer,
    data_type: DataType | None = None,
    completion: Completion | None = None,
    *,
    date_ms: int,
    signature: bytes = bytes(32),
) -> list[Buffer]:
    """A PayloadPart of a request, in its envelope. LocalProtocolError if the event is larger than 16 MiB."""
    return encode_envelope(encode_request_event(data, data_type, completion), date_ms=date_ms, signature=signature)


def encode_request_end(*, date_ms: int, signature: bytes = bytes(32)) -> list[Buffer]:
    """The envelope without an event that ends the input; END_STREAM follows."""
    return encode_envelope(b"", date_ms=date_ms, signature=signature)


# ---- the way in

_ENVELOPE_DATE = b"\x05:date\x08"
_ENVELOPE_SIGNATURE = b"\x10:chunk-signature\x06\x00\x20"
_ENVELOPE_HEADERS = len(_ENVELOPE_DATE) + 8 + len(_ENVELOPE_SIGNATURE) + 32
ENVELOPE_OVERHEAD: Final = OVERHEAD + _ENVELOPE_HEADERS
"""Bytes that the SDK's envelope puts around an event: 83."""
_ENVELOPE = struct.Struct(">III7s8x20s32xIII")
"""The SDK's envelope: prelude, date, signature; and the prelude of the event inside."""
_CRCS = struct.Struct(">II")
"""How it ends: the CRC of the event, then that of the envelope."""


def _is_envelope(block: bytes, fields: int) -> bool:
    if len(block) == _ENVELOPE_HEADERS and block.startswith(_ENVELOPE_DATE) and block[15:35] == _ENVELOPE_SIGNATURE:
        return True  # as every SDK writes it; reading it as headers would cost more than the event inside
    headers = decode_headers(block, fields)
    if ":chunk-signature" not in headers and ":date" not in headers:
        return False
    if not isinstance(headers.get(":date"), Timestamp) or not isinstance(headers.get(":chunk-signature"), bytes):
        raise RemoteProtocolError("a signed event needs :date (a timestamp) and :chunk-signature (bytes)")
    return True


_DATA_TYPES: dict[HeaderValue, DataType] = {kind.value: kind for kind in DataType}
_COMPLETIONS: dict[HeaderValue, Completion] = {state.value: state for state in Completion}


class _Head(NamedTuple):
    """What the headers of a PayloadPart say."""

    data_type: DataType
    completion: Completion
    content_type: str


# Header blocks that were read before. Only such as hold nothing but the dialect's own names and values: none of them is
# long or tells anything about a request, and all clients together write a few.
_HEADS: dict[bytes, _Head] = {}
_HEADS_KEPT = 64
_HEAD_SIZE = 256
_OWN_FIELDS = frozenset((*_EVENT, "DataType", "CompletionState", "CompletionStatus", ":content-type"))


def _head(block: bytes, fields: int) -> _Head:
    known = _HEADS.get(block)
    if known is not None and len(_OWN_FIELDS) <= fields:
        return known
    return _learn(block, decode_headers(block, fields))


def _learn(block: bytes, headers: Mapping[str, HeaderValue]) -> _Head:
    head = _read_head(headers)
    own = headers.keys() <= _OWN_FIELDS and headers.get(":content-type", PART_CONTENT_TYPE) == PART_CONTENT_TYPE
    if own and len(block) <= _HEAD_SIZE:
        if len(_HEADS) >= _HEADS_KEPT:
            _HEADS.clear()
        _HEADS[block] = head
    return head


def _read_head(headers: Mapping[str, HeaderValue]) -> _Head:
    if headers.get(":message-type") != "event":
        raise RemoteProtocolError(f":message-type must be 'event', got {_shown(headers.get(':message-type'))}")
    if headers.get(":event-type") != "PayloadPart":
        raise RemoteProtocolError(f":event-type must be 'PayloadPart', got {_shown(headers.get(':event-type'))}")
    data_type = _DATA_TYPES.get(headers.get("DataType", "BINARY"))
    if data_type is None:
        raise RemoteProtocolError(f"DataType must be 'UTF8' or 'BINARY', got {_shown(headers['DataType'])}")
    state = headers.get("CompletionState")
    if "CompletionStatus" in headers:
        # The seed's text says CompletionStatus and its examples CompletionState, which is what GA sends.
        status = headers["CompletionStatus"]
        if state is not None and state != status:
            raise RemoteProtocolError(f"CompletionState is {_shown(state)} and CompletionStatus is {_shown(status)}")
        state = status
    completion = _COMPLETIONS.get("COMPLETE" if state is None else state)
    if completion is None:
        raise RemoteProtocolError(f"CompletionState must be 'PARTIAL' or 'COMPLETE', got {_shown(state)}")
    content_type = headers.get(":content-type")
    return _Head(data_type, completion, content_type if isinstance(content_type, str) else "")


def _shown(value: HeaderValue | None) -> str:
    match value:
        case None:
            return "no such header"
        case str() | bytes():
            return repr(value[:64])
        case _:
            return repr(value)


def _part(head: _Head, data: Buffer) -> PayloadPart:
    return PayloadPart(data=data, data_type=head.data_type, completion=head.completion, content_type=head.content_type)


class _Incremental(Reader):
    """What both directions share: an end after which no byte may come."""

    __slots__ = ("_ended",)

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._ended = False

    def receive_eof(self) -> None:
        """The wire has ended. RemoteProtocolError if a message is cut off or bytes follow the end; parts that are whole
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


@final
class PartDecoder(_Incremental):
    """Reads the body of a request: events in signed envelopes, as the SDKs send them, or bare.

    **Signatures are ignored**: neither `:date` nor `:chunk-signature` is verified here.

    Feed `receive_data`, pull `next_part` until NEED_DATA, feed again. END comes after the empty envelope, or after
    `receive_eof` where a client ends without one (SDKs before 0.5); bytes after the empty envelope are an error,
    so go on feeding and pulling until the wire has ended. RemoteProtocolError is final.

    `max_part` bounds the event with its headers, in its envelope or bare; the envelope may have 83 bytes more.
    """

    __slots__ = ("_max_part", "_short")

    def __init__(self, max_part: int = MAX_PAYLOAD, *, max_headers: int = MAX_HEADERS, max_fields: int = MAX_FIELDS) -> None:
        super().__init__(Limits(message=max_part + ENVELOPE_OVERHEAD, headers=max_headers, fields=max_fields))
        self._max_part = max_part
        # Up to this size `next_part` opens an envelope itself; never, where a block of `_HEADS` could break a limit.
        roomy = max_headers >= _HEAD_SIZE and max_fields >= len(_OWN_FIELDS)
        self._short = min(max_part + ENVELOPE_OVERHEAD, LARGE) if roomy else 0

    def next_part(self) -> PayloadPart | NeedData | AtEnd:
        """The next part; NEED_DATA; or END, again and again."""
        buffer, at = self._buffer, self._at
        left = len(buffer) - at
        if not left and self._target is None and self._error is None and not (self._ended or self._eof):
            return Signal.NEED_DATA
        # An envelope as every SDK writes it, whole, around an event whose headers were seen before. What is not exactly
        # that, or not sound, is left to `_next_part`, where the rules are.
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
        fields = self._limits.fields
        if event.headers not in _HEADS and _is_envelope(event.headers, fields):
            if not event.payload:
                self._ended = True
                return END
            event = split(event.payload, self._limits)
        size = OVERHEAD + len(event.headers) + len(event.payload)
        if size > self._max_part:
            raise RemoteProtocolError(f"event of {size} bytes with its headers, the limit of a part is {self._max_part}")
        return _part(_head(event.headers, fields), event.payload)


@final
class ResponseDecoder(_Incremental):
    """Reads the body of a 200 response: parts, and at most one failure, which is the end of it.

    Feed `receive_data`, pull `next_event` until NEED_DATA, feed again; END comes after `receive_eof`, or after a
    failure. A reset is not an end: then leave `receive_eof` out. RemoteProtocolError is final.
    """

    __slots__ = ()

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits or Limits())

    def next_event(self) -> PayloadPart | StreamFailure | NeedData | AtEnd:
        """The next part; the failure; NEED_DATA; or END, again and again."""
        try:
            raw = self._next_or_end()
            return raw if raw is Signal.NEED_DATA or raw is END else self._open(raw)
        except RemoteProtocolError as error:
            raise self._fail(error) from None

    def _open(self, raw: Raw) -> PayloadPart | StreamFailure:
        if raw.headers in _HEADS:
            return _part(_head(raw.headers, self._limits.fields), raw.payload)
        headers = decode_headers(raw.headers, self._limits.fields)
        match headers.get(":message-type"):
            case "exception":
                event = _failure(headers, raw.payload)
            case "error":  # a failure that the operation's model does not name; no payload
                event = StreamFailure(
                    exception_type=_string(headers, ":error-code"), message=_string(headers, ":error-message")
                )
            case _:
                return _part(_learn(raw.headers, headers), raw.payload)
        self._ended = True
        return event


def _failure(headers: Mapping[str, HeaderValue], payload: Buffer) -> StreamFailure:
    try:
        body = msgspec.json.decode(payload, type=_ErrorBody)
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
