"""SageMaker's InvokeEndpoint and InvokeEndpointWithResponseStream: their heads, errors and response stream as bytes."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import msgspec

from protocols.aws import bidi
from protocols.errors import ProtocolError
from protocols.events import Buffer, Headers

CONTENT_TYPE: Final = "content-type"
CUSTOM_ATTRIBUTES: Final = "x-amzn-sagemaker-custom-attributes"
NEW_SESSION_ID: Final = "x-amzn-sagemaker-new-session-id"
CLOSED_SESSION_ID: Final = "x-amzn-sagemaker-closed-session-id"
_STREAM_CONTENT_TYPE = "x-amzn-sagemaker-content-type"
_VARIANT = bidi.INVOKED_PRODUCTION_VARIANT.decode()


class InvokeOperation(enum.Enum):
    """The operations by name; they differ in headers and in the form of the answer."""

    INVOKE_ENDPOINT = "InvokeEndpoint"
    INVOKE_ENDPOINT_WITH_RESPONSE_STREAM = "InvokeEndpointWithResponseStream"


class InvokeErrorType(enum.StrEnum):
    """The errors that are HTTP responses, by their names in `x-amzn-errortype`, which clients raise."""

    VALIDATION_ERROR = "ValidationError"
    MODEL_ERROR = "ModelError"
    MODEL_NOT_READY = "ModelNotReadyException"
    INTERNAL_FAILURE = "InternalFailure"
    SERVICE_UNAVAILABLE = "ServiceUnavailable"
    INTERNAL_DEPENDENCY = "InternalDependencyException"

    @property
    def status(self) -> int:
        return _STATUS[self]


_STATUS = {
    InvokeErrorType.VALIDATION_ERROR: 400,
    InvokeErrorType.MODEL_ERROR: 424,
    InvokeErrorType.MODEL_NOT_READY: 429,
    InvokeErrorType.INTERNAL_FAILURE: 500,
    InvokeErrorType.SERVICE_UNAVAILABLE: 503,
    InvokeErrorType.INTERNAL_DEPENDENCY: 530,
}


# ---- the request head


@final
class InvokeInputError(ProtocolError):
    """The request head is not valid for this operation. The text is for the client: member, rule, and the value."""

    errortype: Final = InvokeErrorType.VALIDATION_ERROR
    status: Final = 400


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InvokeRequest:
    """The request head. None: the head does not have the member, or the operation does not.

    Values are as they came. `target_model` is not interpreted here: it may hold slashes and dot segments.
    """

    operation: InvokeOperation
    endpoint: str
    content_type: str | None = None
    accept: str | None = None
    custom_attributes: str | None = None
    target_model: str | None = None
    target_variant: str | None = None
    target_container_hostname: str | None = None
    inference_id: str | None = None
    enable_explanations: str | None = None
    inference_component: str | None = None
    session_id: str | None = None
    """`NEW_SESSION` asks InvokeEndpoint for a new one."""
    prefix_aware_id: str | None = None


class _Rule(NamedTuple):
    """A shape of the operations' model: its length, its published pattern, and that pattern for Python.

    Some patterns are anchored and some are not. All are meant for the whole value, hence fullmatch; `$` would accept a
    newline at the end. Java's \\p{ASCII}, \\p{Print}, \\S and `.` differ from Python's classes, so they are written as
    ranges.
    """

    longest: int
    published: str
    pattern: re.Pattern[str]
    sensitive: bool = False  # AWS keeps its values out of logs, and errors are logged


_ID = r"[a-zA-Z0-9](-*[a-zA-Z0-9])*"
_LINE_ENDS = r"\n\r\x85\u2028\u2029"
_ASCII = (r"\p{ASCII}*", re.compile(r"[\x00-\x7f]*"))
_PRINT = (r"\A\S[\p{Print}]*\z", re.compile(r"[^ \t\n\x0b\f\r][ -~]*"))

_NAME = _Rule(63, rf"^{_ID}", re.compile(_ID))
_HEADER = _Rule(1024, *_ASCII)
_ATTRIBUTES = _Rule(1024, *_ASCII, sensitive=True)
_COMPONENT = _Rule(63, r"^[a-zA-Z0-9]([\-a-zA-Z0-9]*[a-zA-Z0-9])?$", re.compile(r"[a-zA-Z0-9]([\-a-zA-Z0-9]*[a-zA-Z0-9])?"))
_SESSION = _Rule(256, rf"^{_ID}$", re.compile(_ID))
_SESSION_OR_NEW = _Rule(256, rf"^(NEW_SESSION)$|^{_ID}$", re.compile(rf"NEW_SESSION|{_ID}"))

_BOTH = (
    ("content_type", "ContentType", "content-type", _HEADER),
    ("custom_attributes", "CustomAttributes", CUSTOM_ATTRIBUTES, _ATTRIBUTES),
    ("target_variant", "TargetVariant", "x-amzn-sagemaker-target-variant", _NAME),
    ("target_container_hostname", "TargetContainerHostname", "x-amzn-sagemaker-target-container-hostname", _NAME),
    ("inference_id", "InferenceId", "x-amzn-sagemaker-inference-id", _Rule(64, *_PRINT)),
    ("inference_component", "InferenceComponentName", "x-amzn-sagemaker-inference-component", _COMPONENT),
    ("prefix_aware_id", "PrefixAwareId", "x-amzn-sagemaker-prefix-aware-id", _Rule(64, *_PRINT)),
)
_MEMBERS = {
    InvokeOperation.INVOKE_ENDPOINT: (
        *_BOTH,
        ("accept", "Accept", "accept", _HEADER),
        ("target_model", "TargetModel", "x-amzn-sagemaker-target-model", _Rule(1024, *_PRINT)),
        (
            "enable_explanations",
            "EnableExplanations",
            "x-amzn-sagemaker-enable-explanations",
            _Rule(64, ".*", re.compile(f"[^{_LINE_ENDS}]*")),
        ),
        ("session_id", "SessionId", "x-amzn-sagemaker-session-id", _SESSION_OR_NEW),
    ),
    InvokeOperation.INVOKE_ENDPOINT_WITH_RESPONSE_STREAM: (
        *_BOTH,
        ("accept", "Accept", "x-amzn-sagemaker-accept", _HEADER),
        ("session_id", "SessionId", "x-amzn-sagemaker-session-id", _SESSION),
    ),
}


def read_request(operation: InvokeOperation, endpoint: str, headers: Mapping[str, str]) -> InvokeRequest:
    """Checks the endpoint name of the path and the operation's headers (lower-case names) against its lengths and patterns.
    InvokeInputError for the first that is invalid.

    An empty header counts as absent. A header that the operation does not have, such as Target-Model with a response stream,
    is ignored, as by the service.
    """
    _check("EndpointName", endpoint, _NAME)
    members: dict[str, str] = {}
    for field, member, header, rule in _MEMBERS[operation]:
        if value := headers.get(header):
            _check(member, value, rule)
            members[field] = value
    return InvokeRequest(operation=operation, endpoint=endpoint, **members)


def _check(member: str, value: str, rule: _Rule) -> None:
    if len(value) > rule.longest:
        raise InvokeInputError(f"{member} has at most {rule.longest} characters, got {len(value)}{_shown(value, rule)}")
    if not rule.pattern.fullmatch(value):
        raise InvokeInputError(f"{member} must match {rule.published} as a whole, it does not{_shown(value, rule)}")


def _shown(value: str, rule: _Rule) -> str:
    if rule.sensitive:
        return ""
    return f": {value!r}" if len(value) <= 64 else f": {value[:64]!r}..."


# ---- the response head


@final
class ReplyError(ProtocolError):
    """A header value from a model that the answer cannot have. The fault is the model's."""

    errortype: Final = InvokeErrorType.MODEL_ERROR
    status: Final = 424


# RFC 9110 section 5.5, the ASCII part. With \p{ASCII} alone, CR and LF could add further headers.
_NO_FIELD = re.compile(r"[^\t -~]")
_LONGEST_FIELD = 1024
_SESSION_REPLIES = {
    NEW_SESSION_ID: (
        256,
        re.compile(rf"{_ID};[ \t]Expires=[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}T[0-9]{{2}}:[0-9]{{2}}:[0-9]{{2}}Z"),
    ),
    CLOSED_SESSION_ID: (256, re.compile(_ID)),
}


def response_headers(
    operation: InvokeOperation, reply: Mapping[str, str], *, content_type: str, variant: str = "", request_id: str = ""
) -> Headers:
    """The head of a 200 response. `reply` has the model's header values by lower-case names. Only the operation's own are
    sent: `content-type`, the custom attributes and, for InvokeEndpoint, the ids of the new and the closed session.
    `content_type` is that of the body if the model gives none. With a response stream it goes into a separate header,
    because the HTTP one is the event stream's. Empty values are left out.

    ReplyError for a value that is not text, has more than 1024 characters, has other characters than printable ASCII, or
    should be a session id and is not.
    """
    own = reply.get(CONTENT_TYPE) or content_type
    if operation is InvokeOperation.INVOKE_ENDPOINT:
        values = {CONTENT_TYPE: own} | {name: reply.get(name, "") for name in _SESSION_REPLIES}
    else:
        values = {CONTENT_TYPE: bidi.CONTENT_TYPE, _STREAM_CONTENT_TYPE: own}
    values |= {
        CUSTOM_ATTRIBUTES: reply.get(CUSTOM_ATTRIBUTES, ""),
        _VARIANT: variant,
        bidi.REQUEST_ID.decode(): request_id,
    }
    return [(name.encode(), raw) for name, value in values.items() if (raw := _field_value(name, value))]


def _field_value(name: str, value: object) -> bytes:
    if not isinstance(value, str):
        raise ReplyError(f"response header {name} is text, the model gave {type(value).__name__}")
    value = value.strip(" \t")  # RFC 9110: not part of a value, and malformed at its ends in HTTP/2
    longest, pattern = _SESSION_REPLIES.get(name, (_LONGEST_FIELD, None))
    if len(value) > longest:
        raise ReplyError(f"response header {name} has at most {longest} characters, the model gave {len(value)}")
    if found := _NO_FIELD.search(value):
        came = f"U+{ord(found[0]):04X} at position {found.start()}"
        raise ReplyError(f"response header {name} must be printable ASCII, the model gave {came}")
    if value and pattern and not pattern.fullmatch(value):
        raise ReplyError(f"response header {name} must match {pattern.pattern} as a whole, the model gave {value[:64]!r}")
    return value.encode()


# ---- errors before a stream


class _ErrorBody(msgspec.Struct, rename="pascal", omit_defaults=True, kw_only=True):
    """The body of an error. botocore reads Message in either case, and the other members in this case only."""

    message: str
    original_status_code: int | None = None
    original_message: str | None = None
    log_stream_arn: str | None = None


_LONGEST_TEXT = 2048  # the limit of the Message shape, which OriginalMessage and the stream's errors have too


def _text(text: str) -> str:
    """`text`, cut to the limit of the shape. A lone surrogate, which UTF-8 cannot carry, becomes `?`."""
    if len(text) > _LONGEST_TEXT:
        text = text[: _LONGEST_TEXT - 3] + "..."
    return text.encode("utf-8", "replace").decode()


def error_response(
    errortype: InvokeErrorType,
    message: str,
    *,
    original_status: int | None = None,
    original_message: str | None = None,
    log_stream_arn: str | None = None,
) -> tuple[int, Headers, bytes]:
    """Status, headers and body of an error response, for errors before the 200 is sent.

    `original_status`, `original_message` and `log_stream_arn` belong to MODEL_ERROR; None leaves a member out. Texts longer
    than 2048 characters, which the members cannot have, are cut and end in `...`.
    """
    body = msgspec.json.encode(
        _ErrorBody(
            message=_text(message),
            original_status_code=original_status,
            original_message=None if original_message is None else _text(original_message),
            log_stream_arn=log_stream_arn,
        )
    )
    headers = (
        (b"content-type", bidi.ERROR_CONTENT_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (bidi.ERROR_TYPE, errortype.encode()),
    )
    return errortype.status, headers, body


# ---- the response stream: messages as in the bidirectional operation, whose `ResponseDecoder` reads these too

MODEL_INVOCATION_TIME_EXCEEDED: Final = "ModelInvocationTimeExceeded"
"""ErrorCode of a model that did not finish its response in time."""
STREAM_BROKEN: Final = "StreamBroken"
"""ErrorCode of a model whose connection was reset or closed."""

PART_SIZE: Final = 64 * 2**10
"""The size of the parts that a body is split into, in bytes. AWS names no size, and botocore accepts 24 MiB. At this size
one part is checksummed while the one before is written, and neither takes long."""


def split_body(data: Buffer, at_most: int = PART_SIZE) -> Iterator[memoryview]:
    """The bytes of a contiguous buffer as views of at most `at_most` bytes; no view for an empty buffer."""
    view = memoryview(data)
    if not view.nbytes:
        return  # numpy's empty arrays cannot be cast
    octets = view.cast("B")
    for at in range(0, len(octets), at_most):
        yield octets[at : at + at_most]


def encode_payload_part(data: Buffer) -> list[Buffer]:
    """A PayloadPart as the buffers to write. `data` of 16 KiB and more is passed by reference and must not change until it
    is written. LocalProtocolError for more than 16 MiB."""
    return bidi.encode_part(data, None, None)


def encode_model_stream_error(message: str, code: str) -> list[Buffer]:
    """The exception for a fault of the model after the 200. `code` is for programs: one of the two documented codes, or the
    model's own. The body must end after it."""
    return bidi.encode_model_stream_error(_text(message), code)


def encode_internal_stream_failure(message: str) -> list[Buffer]:
    """The exception for a fault of the platform: a limit, a drain, a lost worker, a bug. The body must end after it."""
    return bidi.encode_internal_stream_failure(_text(message))


# ---- v2 bodies with binary tensors: the service strips the header that has the length of their JSON

BINARY_JSON: Final = "application/vnd.sagemaker-triton.binary+json"
"""The content type of such a body, without the parameter that tells where its tensors begin."""
_HEADER_SIZE = "json-header-size"
_MAX_HEADER_SIZE = 2**31 - 1  # Triton and its clients read it as an int32
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
# RFC 9110 section 5.6.6. Possessive: characters that a parameter has taken are never matched another way.
_PARAMETER = re.compile(rf'[ \t]*+;[ \t]*+(?:({_TOKEN})=(?:({_TOKEN})|"((?:[^"\\]|\\.)*+)"))?')


def json_header_size(content_type: str, body_size: int | None = None) -> int | None:
    """The number of bytes of JSON before the tensors of a v2 body, from the parameter `json-header-size` of its
    `application/vnd.sagemaker-triton.binary+json`. None for any other content type, which has no such parameter.

    Type and parameter are read in any case, and the value as a token or quoted. Other parameters are ignored.
    InvokeInputError if the parameter is missing, duplicate, anything but ASCII digits, above 2**31 - 1, or above
    `body_size`, if that is known.
    """
    media_type = content_type.partition(";")[0]
    if media_type.strip(" \t").lower() != BINARY_JSON:
        return None
    found = [value for name, value in _parameters(content_type, len(media_type)) if name == _HEADER_SIZE]
    if len(found) != 1:
        came = "it is there twice" if found else "there is none"
        raise InvokeInputError(f"ContentType {BINARY_JSON} needs one parameter {_HEADER_SIZE}, {came}")
    value = found[0]
    # At most 20 digits are parsed: CPython takes quadratic time, and no valid length has more.
    if not (value.isascii() and value.isdecimal() and len(value) <= 20 and int(value) <= _MAX_HEADER_SIZE):
        raise InvokeInputError(f"{_HEADER_SIZE} must be a number of bytes up to {_MAX_HEADER_SIZE}, got {value[:64]!r}")
    size = int(value)
    if body_size is not None and size > body_size:
        raise InvokeInputError(f"{_HEADER_SIZE} is {size}, but the body has {body_size} bytes")
    return size


def _parameters(content_type: str, at: int) -> Iterator[tuple[str, str]]:
    """The parameters from `at` on, names in lower case."""
    end = len(content_type.rstrip(" \t"))
    while at < end:
        found = _PARAMETER.match(content_type, at, end)
        if found is None or (found.end() < end and content_type[found.end()] not in "; \t"):
            raise InvokeInputError(f"ContentType must be {BINARY_JSON};{_HEADER_SIZE}=N, got {content_type[at : at + 64]!r}")
        name, token, quoted = found.groups()
        if name is not None:
            yield name.lower(), re.sub(r"\\(.)", r"\1", quoted) if token is None else token
        at = found.end()


def binary_json_content_type(size: int) -> str:
    """The content type of a v2 body whose tensors begin after `size` bytes of JSON. It has no space, because clients look
    for exactly this text before the number."""
    return f"{BINARY_JSON};{_HEADER_SIZE}={size}"
