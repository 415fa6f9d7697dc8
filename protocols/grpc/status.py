"""gRPC status: the codes, the error that has one, and the encoding of `grpc-message` (PROTOCOL-HTTP2, statuscodes.md)."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import final
from urllib.parse import unquote_to_bytes

MAX_MESSAGE = 4096
"""The most bytes of an encoded `grpc-message`. Clients may limit trailers to 8 KiB (PROTOCOL-HTTP2), metadata included."""

_ENCODED = re.compile(rb"[^\x20-\x24\x26-\x7e]")
_CUT = re.compile(rb"%[0-9A-F]?\Z")
_ESCAPES = tuple(b"%%%02X" % byte for byte in range(256))
_CODE = re.compile(rb"[0-9]{1,10}")


class StatusCode(enum.IntEnum):
    """The status codes of gRPC (statuscodes.md)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


@final
class GRPCError(Exception):
    """A call that ends with a status other than OK. A server sends `code` and `message`; a client receives them."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def again(self) -> GRPCError:
        """Returns a new error like this one, to be raised. A failed decoder keeps one error and raises copies: the traceback
        of a raised error keeps its frames alive, and through them the decoder and its input."""
        return GRPCError(self.code, self.message)


def encode_text(text: str) -> bytes:
    """Encodes a `grpc-message`: UTF-8, with `%XX` for `%` and for each byte outside 0x20 to 0x7E.

    Spaces at either end are encoded too, because an HTTP/2 field value must not begin or end with one (RFC 9113 section
    8.2.1). A text that encodes to more than MAX_MESSAGE bytes is cut after a whole character and ends with `...`. A lone
    surrogate, which UTF-8 cannot carry, becomes `?`.
    """
    encoded = _escaped(text[: MAX_MESSAGE + 1].encode("utf-8", "replace"))
    if len(encoded) <= MAX_MESSAGE:
        return encoded
    # At most 2 bytes of an escape and 3 of a character are cut off. A final space would be encoded, so it is removed.
    kept = unquote_to_bytes(_CUT.sub(b"", encoded[: MAX_MESSAGE - 3])).decode("utf-8", "ignore")
    return _escaped(kept.rstrip(" ").encode()) + b"..."


def _escaped(raw: bytes) -> bytes:
    inner = raw.strip(b" ")
    before = len(raw) - len(raw.lstrip(b" "))
    after = len(raw) - len(inner) - before
    return b"%20" * before + _ENCODED.sub(lambda found: _ESCAPES[found[0][0]], inner) + b"%20" * after


def decode_text(value: bytes) -> str:
    """Decodes a `grpc-message`. Any bytes are accepted, as PROTOCOL-HTTP2 requires: an invalid escape stays as it is, and
    bytes that are not UTF-8 become U+FFFD."""
    return unquote_to_bytes(value).decode("utf-8", "replace")


def parse_code(value: bytes) -> StatusCode:
    """Returns the code of a `grpc-status`. UNKNOWN for a number without a name, and if it is not a number."""
    number = int(value) if _CODE.fullmatch(value) else -1
    return StatusCode(number) if 0 <= number <= StatusCode.UNAUTHENTICATED else StatusCode.UNKNOWN


_FROM_HTTP: Mapping[int, StatusCode] = MappingProxyType({
    400: StatusCode.INTERNAL,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.UNIMPLEMENTED,
    429: StatusCode.UNAVAILABLE,
    431: StatusCode.INTERNAL,
    502: StatusCode.UNAVAILABLE,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.UNAVAILABLE,
})  # fmt: skip

# RFC 9113 section 7 has the numbers. PROTOCOL-HTTP2 has no code for STREAM_CLOSED, nor for numbers without a name.
_FROM_RESET: Mapping[int, StatusCode] = MappingProxyType({
    0x0: StatusCode.INTERNAL,  # NO_ERROR
    0x1: StatusCode.INTERNAL,  # PROTOCOL_ERROR
    0x2: StatusCode.INTERNAL,  # INTERNAL_ERROR
    0x3: StatusCode.INTERNAL,  # FLOW_CONTROL_ERROR
    0x4: StatusCode.INTERNAL,  # SETTINGS_TIMEOUT
    0x6: StatusCode.INTERNAL,  # FRAME_SIZE_ERROR
    0x7: StatusCode.UNAVAILABLE,  # REFUSED_STREAM: nothing was processed, a retry is safe
    0x8: StatusCode.CANCELLED,  # CANCEL
    0x9: StatusCode.INTERNAL,  # COMPRESSION_ERROR
    0xA: StatusCode.INTERNAL,  # CONNECT_ERROR
    0xB: StatusCode.RESOURCE_EXHAUSTED,  # ENHANCE_YOUR_CALM
    0xC: StatusCode.PERMISSION_DENIED,  # INADEQUATE_SECURITY
})  # fmt: skip


def code_of_http_status(status: int) -> StatusCode:
    """Returns the code that a client reports for an answer without `grpc-status` (http-grpc-status-mapping.md): UNKNOWN for
    each HTTP status that the table does not list, including 200. A server must not use it."""
    return _FROM_HTTP.get(status, StatusCode.UNKNOWN)


def code_of_reset(wire_code: int) -> StatusCode:
    """Returns the code that a client reports for a stream that the server reset with this HTTP/2 error code (PROTOCOL-HTTP2,
    Errors): UNKNOWN for a code that the table does not map."""
    return _FROM_RESET.get(wire_code, StatusCode.UNKNOWN)
