"""gRPC metadata: `grpc-timeout`, the content type, and custom metadata with `-bin` values, decoded and encoded."""

from __future__ import annotations

import binascii
import math
import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from protocols.errors import LocalProtocolError
from protocols.events import Headers
from protocols.grpc.status import GRPCError, StatusCode

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]
"""Custom metadata in order: `bytes` for a name that ends with `-bin`, else `str`. Names may repeat."""

CONTENT_TYPE = b"application/grpc"

MAX_TIMEOUT = 99_999_999 * 3600.0
"""The longest `grpc-timeout`, in seconds."""

_UNITS = {b"H": 3600 * 10**9, b"M": 60 * 10**9, b"S": 10**9, b"m": 10**6, b"u": 1000, b"n": 1}  # in nanoseconds
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_COARSER = ((1000, b"u"), (1000, b"m"), (1000, b"S"), (60, b"M"), (60, b"H"))  # how many of the finer unit each has
_MOST = 99_999_999

# Names with a meaning in gRPC are not custom metadata (Call-Definition, Response-Headers and Trailers in PROTOCOL-HTTP2),
# nor are the fields that frame an HTTP message. Applications get `user-agent`, as from C-core.
_RESERVED = frozenset((
    b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding", b"grpc-message-type", b"grpc-status", b"grpc-message",
    b"te", b"content-type", b"content-length", b"host", b"connection", b"proxy-connection", b"keep-alive",
    b"transfer-encoding", b"upgrade", b"trailer",
))  # fmt: skip
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")  # wider than Header-Name of PROTOCOL-HTTP2: all that HTTP/2 allows
_VALUE = re.compile(rb"[^\0\r\n]*")  # RFC 9113 section 8.2.1, likewise
_SPACE = b" \t\v\f"


def is_grpc(content_type: bytes) -> bool:
    """True if a content type is gRPC's: `application/grpc`, in any case, followed by nothing, `+` or `;`. False for other
    types that begin with it, such as `application/grpc-web`, and for an empty value."""
    kind = content_type[: len(CONTENT_TYPE)].lower()
    return kind == CONTENT_TYPE and content_type[len(CONTENT_TYPE) :][:1] in (b"", b"+", b";")


def parse_timeout(value: bytes) -> float:
    """Returns the seconds of a `grpc-timeout`, counted from the arrival of the head. It has 1 to 8 digits and a unit: H, M,
    S, m (milliseconds), u or n. 0 is a deadline that has passed. GRPCError with INTERNAL if it is malformed."""
    found = _TIMEOUT.fullmatch(value)
    if found is None:
        raise GRPCError(
            StatusCode.INTERNAL,
            f"grpc-timeout: expected 1 to 8 digits and one of H, M, S, m, u, n, got {value[:40].decode('latin-1')!r}",
        )
    digits, unit = found.groups()
    return int(digits) * _UNITS[unit] / 10**9


def encode_timeout(seconds: float) -> bytes:
    """Encodes a `grpc-timeout`, rounded up, in the finest unit that 8 digits can hold, or in a coarser one if that is exact.
    A deadline that has passed is `1n`, because the value must be positive. A longer time than MAX_TIMEOUT becomes
    MAX_TIMEOUT."""
    if seconds < 1e-9:
        return b"1n"
    if seconds >= MAX_TIMEOUT:
        return b"%dH" % _MOST
    amount, unit = math.ceil(round(seconds * 1e9, 3)), b"n"  # less than a thousandth is a rounding error of floats
    for step, coarser in _COARSER:
        if amount <= _MOST and amount % step:
            break
        amount, unit = -(-amount // step), coarser
    return b"%d%b" % (amount, unit)


def decode_metadata(fields: Headers) -> Metadata:
    """Returns the custom metadata among the fields of a head or of trailers: all fields without a meaning in gRPC or HTTP.

    The values of a `-bin` field are split at commas and decoded, with or without padding. A value that is not base64 is left
    out, because a call should not fail over metadata that may not even be read. Other values are text, with bytes above 0x7E
    as Latin-1, without white space at their ends. All received metadata can therefore be sent again (PROTOCOL-HTTP2,
    ASCII-Value).
    """
    metadata: list[tuple[str, str | bytes]] = []
    for raw, value in fields:
        if raw in _RESERVED:
            continue
        name = raw.decode("latin-1")
        if raw.endswith(b"-bin"):
            metadata += [(name, one) for one in _decode_binary(value)]
        else:
            metadata.append((name, value.strip(_SPACE).decode("latin-1")))
    return tuple(metadata)


def _decode_binary(value: bytes) -> Iterable[bytes]:
    for part in value.split(b","):
        bare = part.strip(b" \t")
        try:
            yield binascii.a2b_base64(bare + b"=" * (-len(bare) % 4), strict_mode=True)
        except binascii.Error:
            continue


def encode_metadata(metadata: Metadata) -> tuple[tuple[bytes, bytes], ...]:
    """Returns the fields for this metadata: `-bin` values as base64 without padding (PROTOCOL-HTTP2), others unchanged.

    LocalProtocolError for a name that is not a lower-case HTTP/2 field name or has a meaning in gRPC; for a value of the
    wrong type (`bytes` for `-bin` names, `str` for others); and for text that no field value can hold: characters above
    U+00FF, NUL, CR, LF, and white space at either end.
    """
    fields = []
    for name, value in metadata:
        raw = name.encode("ascii", "replace")
        if not _NAME.fullmatch(raw):
            raise LocalProtocolError(f"metadata: {name[:64]!r} is no lower-case field name")
        if raw in _RESERVED:
            raise LocalProtocolError(f"metadata: {name} has a meaning in gRPC or HTTP, it cannot be custom metadata")
        fields.append((raw, _encode_value(name, value)))
    return tuple(fields)


def _encode_value(name: str, value: str | bytes) -> bytes:
    if name.endswith("-bin"):
        if not isinstance(value, bytes):
            raise LocalProtocolError(f"metadata {name[:64]}: expected bytes, got {type(value).__name__}")
        return binascii.b2a_base64(value, newline=False).rstrip(b"=")
    if not isinstance(value, str):
        raise LocalProtocolError(f"metadata {name[:64]}: expected str, got {type(value).__name__} (-bin names carry bytes)")
    try:
        raw = value.encode("latin-1")
    except UnicodeEncodeError:
        raw = b"\0"
    if not _VALUE.fullmatch(raw) or raw != raw.strip(_SPACE):
        raise LocalProtocolError(
            f"metadata {name[:64]}: {value[:64]!r} cannot be a field value (-bin names carry any bytes)"
        )
    return raw
