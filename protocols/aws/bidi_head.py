"""SageMaker's InvokeEndpointWithBidirectionalStream: its request head, parts, body forms and errors."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, TypeGuard, final

import msgspec

from protocols.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from protocols.events import Buffer, Headers


class DataType(enum.Enum):
    """The declared type of a part's bytes. The bytes are not checked against it."""

    UTF8 = "UTF8"
    BINARY = "BINARY"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call for each look-up


class Completion(enum.Enum):
    """PARTIAL if further parts continue this one. Parts are passed on as they are, never joined."""

    PARTIAL = "PARTIAL"
    COMPLETE = "COMPLETE"

    __hash__ = object.__hash__


@final
class PayloadPart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One part, with the defaults BINARY and COMPLETE for flags that the event does not have.

    Received `data` is `bytes` up to 16 KiB, or 192 KiB in the JSON forms, and a read-only memoryview above that; if JSON has
    escapes in the base64 it is always `bytes`. `content_type` is the event's own, or empty; GA clients send
    application/octet-stream.
    """

    data: Buffer
    data_type: DataType = DataType.BINARY
    completion: Completion = Completion.COMPLETE
    content_type: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFailure:
    """The exception that ends a response. `exception_type` is ModelStreamError, InternalStreamFailure, or another name that
    the server chose. `message` and `code` are empty if the server gave none."""

    exception_type: str
    message: str = ""
    code: str = ""


class StreamEnd(enum.Enum):
    """The answer of a decoder when no more parts will come."""

    END = enum.auto()


END: Final = StreamEnd.END
AtEnd: TypeAlias = Literal[StreamEnd.END]

_DATA_TYPES: dict[object, DataType] = {kind.value: kind for kind in DataType}
_COMPLETIONS: dict[object, Completion] = {state.value: state for state in Completion}


def read_flags(data_type: object, state: object, status: object) -> tuple[DataType, Completion]:
    """DataType and CompletionState for their values; None stands for the default. RemoteProtocolError for other values.

    `status` is CompletionStatus: the text of the beta document has that name, its examples and GA have CompletionState.
    Either is accepted; it is an error if both are there and differ.
    """
    kind = _DATA_TYPES.get("BINARY" if data_type is None else data_type)
    if kind is None:
        raise RemoteProtocolError(f"DataType must be 'UTF8' or 'BINARY', got {shown(data_type)}")
    if status is not None:
        if state is not None and state != status:
            raise RemoteProtocolError(f"CompletionState is {shown(state)} and CompletionStatus is {shown(status)}")
        state = status
    completion = _COMPLETIONS.get("COMPLETE" if state is None else state)
    if completion is None:
        raise RemoteProtocolError(f"CompletionState must be 'PARTIAL' or 'COMPLETE', got {shown(state)}")
    return kind, completion


def shown(value: object) -> str:
    """A peer's value, shortened for an error message."""
    return repr(value[:64] if isinstance(value, str | bytes) else value)


CONTENT_TYPE: Final = "application/vnd.amazon.eventstream"
"""The content type of a request in event-stream messages, and of its 200 response."""
JSON_CONTENT_TYPE: Final = "application/json"
"""The content type of an event in the JSON form, of a request in literal objects, and of its 200 response."""
ERROR_CONTENT_TYPE: Final = JSON_CONTENT_TYPE
"""The content type of an exception message and of an error response."""

# Request headers are keys of a mapping with lower-case names; response headers are as they are written.
TARGET_VARIANT: Final = "x-amzn-sagemaker-target-variant"
MODEL_INVOCATION_PATH: Final = "x-amzn-sagemaker-model-invocation-path"
MODEL_QUERY_STRING: Final = "x-amzn-sagemaker-model-query-string"
INVOKED_PRODUCTION_VARIANT: Final = b"x-amzn-invoked-production-variant"
REQUEST_ID: Final = b"x-amzn-requestid"
ERROR_TYPE: Final = b"x-amzn-errortype"


# ---- the request head


class BidiErrorType(enum.StrEnum):
    """The errors of the operation as HTTP responses, by their names in `x-amzn-errortype`."""

    INPUT_VALIDATION_ERROR = "InputValidationError"
    MODEL_ERROR = "ModelError"
    INTERNAL_SERVER_ERROR = "InternalServerError"
    SERVICE_UNAVAILABLE_ERROR = "ServiceUnavailableError"

    @property
    def status(self) -> int:
        return _STATUS[self]


_STATUS = {
    BidiErrorType.INPUT_VALIDATION_ERROR: 400,
    BidiErrorType.MODEL_ERROR: 424,
    BidiErrorType.INTERNAL_SERVER_ERROR: 500,
    BidiErrorType.SERVICE_UNAVAILABLE_ERROR: 503,
}


@final
class BidiInputError(ProtocolError):
    """The request head is not valid for this operation. The text is for the client: field, rule, and the value."""

    errortype: Final = BidiErrorType.INPUT_VALIDATION_ERROR
    status: Final = 400


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BidiRequest:
    """The request head. None: the choice is left to the server.

    `invocation_path` has no leading slash and may hold `.` and `..` segments. It is an opaque name and must never be
    normalised into another URL. `query_string` is for the model, byte for byte, with percent escapes untouched.
    """

    endpoint: str
    target_variant: str | None = None
    invocation_path: str | None = None
    query_string: str | None = None


# The operation's model anchors some of these and not others. All are meant for the whole value, hence fullmatch; `$` would
# accept a newline at the end.
_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")
_PATH = re.compile(r"[A-Za-z0-9\-._]+(?:/[A-Za-z0-9\-._]+)*")
_PAIR = r"[a-zA-Z0-9][A-Za-z0-9_-]*=(?:[A-Za-z0-9._~\-]|%[0-9A-Fa-f]{2})+"
_QUERY = re.compile(f"{_PAIR}(?:&{_PAIR})*")


def validate_request(endpoint: str, headers: Mapping[str, str]) -> BidiRequest:
    """Checks the endpoint name of the path and the three optional headers (lower-case names) against the lengths and
    patterns of the operation. BidiInputError for the first that is invalid.

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


_MAX_VARIANT = 1024
_NOT_PRINTED = re.compile(r"[^ -~]")


def invoked_variant(name: str) -> bytes:
    """The value of `x-amzn-invoked-production-variant`. LocalProtocolError if the name is invalid: it has at most 1024
    characters of ASCII. The operation's pattern would allow control characters, but no header can carry them.
    """
    if len(name) > _MAX_VARIANT:
        raise LocalProtocolError(f"InvokedProductionVariant has at most {_MAX_VARIANT} characters, not {len(name)}")
    if wrong := _NOT_PRINTED.search(name):
        raise LocalProtocolError(f"InvokedProductionVariant is printable ASCII, which {wrong[0]!r} is not")
    return name.encode()


# ---- the form of the body


class Form(enum.Enum):
    """The form in which parts are written. The answer has the form of the request."""

    EVENT_STREAM = "event stream"
    """GA: event-stream messages whose payload is the raw bytes."""
    JSON_EVENTS = "JSON events"
    """The beta document, read as restJson1: the same messages, with a JSON object as payload that has the bytes in
    base64."""
    LITERAL = "literal"
    """The beta document, read literally: a sequence of `{"PayloadPart": {...}}` objects, without messages."""

    __hash__ = object.__hash__

    @property
    def content_type(self) -> str:
        """The content type of the request and of its 200 response."""
        return JSON_CONTENT_TYPE if self is Form.LITERAL else CONTENT_TYPE


def is_json(content_type: object) -> TypeGuard[str]:
    """True if a content type is application/json, with or without parameters."""
    return isinstance(content_type, str) and content_type.partition(";")[0].strip().lower() == JSON_CONTENT_TYPE


def form_of(content_type: str | None) -> Form | None:
    """The form that a request's content-type announces: EVENT_STREAM, which a first JSON event turns into JSON_EVENTS (see
    PartDecoder), or LITERAL. None if the content-type is missing or empty: then the first byte decides, see `sniff_form`,
    and the head of the answer must wait for it. BidiInputError for any other type."""
    if not content_type:
        return None
    if is_json(content_type):
        return Form.LITERAL
    if content_type.partition(";")[0].strip().lower() == CONTENT_TYPE:
        return Form.EVENT_STREAM
    raise BidiInputError(
        f"content-type must be {CONTENT_TYPE} (events) or {JSON_CONTENT_TYPE} (PayloadPart objects), "
        f"got {content_type[:64]!r}"
    )


def sniff_form(body: Buffer) -> Form:
    """The form of a body by its first byte, for requests without a content-type. Bytes that can begin JSON (`{`, white
    space, a byte order mark) do not begin an event-stream message: its length would be half a gigabyte. An empty body is
    EVENT_STREAM."""
    return Form.LITERAL if len(body) and body[0] in b"{ \t\r\n\xef" else Form.EVENT_STREAM


# ---- errors


class ErrorBody(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True):
    """The members of every error, before the stream and in it. Their names are in PascalCase: with `message` in lower case
    the SDK loses the text."""

    message: str | None = None
    error_code: str | None = None
    original_status_code: int | None = None
    original_message: str | None = None
    log_stream_arn: str | None = None


_MAX_TEXT = 32 * 2**10
"""The most characters of an error text: a model's usual text is sent whole, an endless one must not fill the queue."""


def _clean(text: str | None) -> str | None:
    """`text` as UTF-8 can carry it: a lone surrogate becomes `?`. None for an empty text."""
    return text[:_MAX_TEXT].encode("utf-8", "replace").decode() if text else None


def failure_body(message: str, code: str = "") -> bytes:
    """Message and ErrorCode of an exception in the stream, as JSON. Texts are cut after 32768 characters. An empty code is
    left out."""
    return msgspec.json.encode(ErrorBody(message=_clean(message) or "", error_code=_clean(code)))


def error_body(
    errortype: BidiErrorType,
    message: str,
    *,
    code: str | None = None,
    original_status: int | None = None,
    original_message: str | None = None,
    log_stream_arn: str | None = None,
) -> tuple[int, Headers, bytes]:
    """Status, headers and body of an error response, for errors before the 200 is sent.

    `code` is the ErrorCode member; `original_status`, `original_message` and `log_stream_arn` belong to ModelError. Members
    that are None are left out. Texts are cut after 32768 characters.
    """
    body = msgspec.json.encode(
        ErrorBody(
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


def signature_error_body(status: int, code: str, message: str) -> tuple[int, Headers, bytes]:
    """The response for a missing or wrong signature, which no operation defines. AWS writes `message` in lower case here."""
    body = msgspec.json.encode({"message": _clean(message) or ""})
    headers = (
        (b"content-type", ERROR_CONTENT_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (ERROR_TYPE, code.encode()),
    )
    return status, headers, body
