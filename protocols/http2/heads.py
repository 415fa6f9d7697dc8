"""HTTP/2 heads and trailers: converts header lists to events and back, and checks them (RFC 9113 section 8)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeAlias

from h2.exceptions import ProtocolError
from h2.utilities import HeaderValidationFlags, normalize_inbound_headers, validate_headers

from protocols.errors import LocalProtocolError
from protocols.events import Head, Headers, Refused, Request, Response

Fields: TypeAlias = list[tuple[bytes, bytes]]

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_TOKEN_BYTES = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz"
_TARGET = re.compile(rb"/[^\x00-\x20\x7f#]*|\*")
_AUTHORITY = re.compile(rb"[^\x00-\x20\x7f@/?#\\]+")
_CALL = re.compile(rb"application/grpc([+;].*)?", re.IGNORECASE)  # as `grpc.metadata.is_grpc`, which is not of this room
_VISIBLE = re.compile(rb"[^\x00-\x20\x7f]*")
_NAMELESS = (b"host", b"-")
"""Stands for the authority of a request that names none, for h2: it has no way to let such a request pass."""
_STATUS = re.compile(rb"[1-9][0-9][0-9]")
_CONNECTION_FIELDS = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
_NEEDED = frozenset((b":method", b":scheme", b":path"))
_ENTRY = 32
"""The overhead that each field counts beside its name and value (RFC 9113 section 6.5.2)."""
LENGTH = "content-length: expected one number in digits"
_REQUEST = HeaderValidationFlags(is_client=False, is_trailer=False, is_response_header=False, is_push_promise=False)


class MalformedHeadError(Exception):
    """A received header list that ends its stream with PROTOCOL_ERROR (section 8.1.1). The text gives the reason."""


def read_request(
    stream: int, headers: Sequence[tuple[bytes, bytes]], *, ended: bool, fields: int, size: int
) -> Request | Refused:
    """The request of a header list, or a Refused if the request is wrong but can be answered.

    `ended` tells that no body follows. `fields` limits the number of fields, and `size` the bytes of the list as section
    6.5.2 counts them. MalformedHeadError if the list is wrong and cannot be answered.
    """
    pseudo, regular = _split(headers)
    names = [name for name, _ in regular]
    if b"content-length" in names and lies_about_length(regular):
        return _refused(stream, (400, LENGTH), pseudo, regular)
    authority = _authority(pseudo, regular) if b"host" in names else pseudo.get(b":authority")
    refusal = _too_large(headers, regular, fields, size) or _unacceptable(pseudo, regular, names, authority)
    if refusal:
        return _refused(stream, refusal, pseudo, regular)
    if _certainly_fine(headers, pseudo, names):
        wrong = ""
    else:
        wrong = malformed(headers if authority is not None else [*headers, _NAMELESS])
    if wrong:
        raise MalformedHeadError(wrong)
    length = content_length(regular) if b"content-length" in names else None
    if ended and length:
        raise MalformedHeadError(f"content-length is {length} and no body follows")
    head = Head(
        method=pseudo[b":method"],
        target=pseudo[b":path"],
        headers=tuple(regular),
        authority=authority or b"",
        scheme=pseudo[b":scheme"],
        version=b"2",
        content_length=length,
        expects_continue=b"expect" in names and _expects_continue(regular),
    )
    return Request(stream=stream, head=head)


def _refused(
    stream: int, refusal: tuple[int, str], pseudo: Mapping[bytes, bytes], regular: Sequence[tuple[bytes, bytes]]
) -> Refused:
    status, message = refusal
    method = pseudo.get(b":method", b"")
    return Refused(stream=stream, status=status, message=message, method=method, headers=tuple(regular))


def plain_request(headers: Sequence[tuple[bytes, bytes]], *, fields: int, size: int) -> Head | None:
    """The head of a request whose header list comes straight from HPACK and whose body follows. None if anything is wrong
    with it, also what `read_request` leaves to h2."""
    names = [name for name, _ in headers]
    if b"cookie" in names:
        headers = joined_cookies(headers)
    try:
        request = read_request(0, headers, ended=False, fields=fields, size=size)
    except MalformedHeadError:
        return None
    return request.head if isinstance(request, Request) else None


def read_response(stream: int, headers: Sequence[tuple[bytes, bytes]], *, fields: int, size: int) -> Response:
    """The response head of a header list. MalformedHeadError if it is wrong."""
    pseudo, regular = _split(headers)
    refusal = _too_large(headers, regular, fields, size)
    wrong = refusal[1] if refusal else malformed(headers, response=True) or _wrong_length(headers)
    if wrong:
        raise MalformedHeadError(wrong)
    status = pseudo[b":status"]
    if not _STATUS.fullmatch(status) or status == b"101":
        raise MalformedHeadError(":status is not an HTTP/2 status code")
    return Response(stream=stream, status=int(status), headers=tuple(regular))


def read_trailers(headers: Sequence[tuple[bytes, bytes]], *, fields: int, size: int) -> Headers:
    """The trailer fields of a header list. MalformedHeadError if it is wrong."""
    _, regular = _split(headers)
    refusal = _too_large(headers, regular, fields, size)
    wrong = refusal[1] if refusal else malformed(headers, trailers=True) or _wrong_length(headers)
    if wrong:
        raise MalformedHeadError(wrong)
    return tuple(regular)


def joined_cookies(headers: Sequence[tuple[bytes, bytes]]) -> Sequence[tuple[bytes, bytes]]:
    """A received header list with its cookie fields joined into one, as h2 reports it (RFC 9113 section 8.2.3)."""
    return list(normalize_inbound_headers(headers, _REQUEST))


def malformed(headers: Iterable[tuple[bytes, bytes]], *, response: bool = False, trailers: bool = False) -> str:
    """The error that h2 finds in a received header list, cut to 200 characters. Empty if there is none."""
    flags = HeaderValidationFlags(is_client=False, is_trailer=trailers, is_response_header=response, is_push_promise=False)
    try:
        for _ in validate_headers(headers, flags):
            pass
    except ProtocolError as error:
        return str(error)[:200] or "malformed header list"
    return ""


def lies_about_length(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True if a content-length is not a number, or if several differ."""
    values = {value for name, value in headers if name == b"content-length"}
    return len(values) > 1 or any(not value.isdigit() or len(value) > 18 for value in values)


def _wrong_length(headers: Iterable[tuple[bytes, bytes]]) -> str:
    return LENGTH if lies_about_length(headers) else ""


def content_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """The value of content-length, which must be checked before."""
    return next((int(value) for name, value in headers if name == b"content-length"), None)


def request_fields(request: Head, scheme: bytes) -> Fields:
    """The header list of a request to send. The authority may be in a Host field, which is not sent itself (section 8.3.1).
    LocalProtocolError for a head that HTTP/2 cannot carry."""
    hosts = {value for name, value in request.headers if name == b"host"}
    authorities = hosts | {request.authority} if request.authority else hosts
    if len(authorities) != 1:
        raise LocalProtocolError("a request needs one authority, in `authority` or in a Host field")
    (authority,) = authorities
    fields = [field for field in request.headers if field[0] != b"host"]
    declared = content_length(check_fields(fields))
    if request.content_length is not None and declared is None:
        fields.append((b"content-length", b"%d" % request.content_length))
    elif request.content_length not in (None, declared):
        raise LocalProtocolError(f"content_length is {request.content_length}, the field says {declared}")
    for what, value, pattern in (
        ("method", request.method, _TOKEN),
        ("target", request.target, _TARGET),
        ("authority", authority, _VISIBLE if _is_of_a_call(authority, fields) else _AUTHORITY),
    ):
        if not pattern.fullmatch(value):
            raise LocalProtocolError(f"{what} {value[:100]!r} cannot be sent")
    if request.method == b"CONNECT":
        raise LocalProtocolError("CONNECT is not supported")
    pseudo = [(b":method", request.method), (b":scheme", scheme), (b":authority", authority), (b":path", request.target)]
    return pseudo + fields


def response_fields(status: int, headers: Headers) -> Fields:
    """The header list of a response to send. LocalProtocolError for fields that HTTP/2 cannot carry."""
    check_status(status)
    return [(b":status", b"%d" % status), *check_fields(headers)]


def _split(headers: Sequence[tuple[bytes, bytes]]) -> tuple[dict[bytes, bytes], Fields]:
    pseudo: dict[bytes, bytes] = {}
    regular: Fields = []
    for name, value in headers:
        if name.startswith(b":"):
            pseudo[name] = value
        else:
            regular.append((name, value))
    return pseudo, regular


def _too_large(headers: Sequence[tuple[bytes, bytes]], regular: Fields, fields: int, size: int) -> tuple[int, str] | None:
    if len(regular) > fields:
        return 431, f"{len(regular)} header fields; the limit is {fields} (limits.fields)"
    total = sum(map(len, chain.from_iterable(headers))) + _ENTRY * len(headers)
    if total > size:
        return 431, f"a header list of {total} bytes; the limit is {size} (limits.head)"
    return None


def _expects_continue(regular: Fields) -> bool:
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in regular)


def _unacceptable(
    pseudo: dict[bytes, bytes], regular: Fields, names: list[bytes], authority: bytes | None
) -> tuple[int, str] | None:
    method = pseudo.get(b":method", b"")
    if method == b"CONNECT":
        return 501, "CONNECT is not supported"
    if names.count(b"host") > 1:
        return 400, "more than one Host field"
    if names.count(b"content-length") > 1:
        return 400, "more than one content-length field"
    if b"host" in names and regular[names.index(b"host")][1] != authority:
        return 400, ":authority and Host disagree"
    if authority is not None and not _AUTHORITY.fullmatch(authority) and not _is_of_a_call(authority, regular):
        return 400, ":authority: expected a host and perhaps a port, or none at all"
    if method and not _TOKEN.fullmatch(method):
        return 400, ":method is not a token"
    if pseudo.get(b":path") and not _TARGET.fullmatch(pseudo[b":path"]):
        return 400, ':path must be "*" or start with "/", without fragment, spaces and control characters'
    if pseudo.get(b":scheme", b"https") not in (b"http", b"https"):
        return 400, ":scheme must be http or https"
    return None


def _is_of_a_call(authority: bytes, regular: Fields) -> bool:
    """True for a gRPC call's: its client may send the path of a socket or nothing, and a proxy the name of a cluster."""
    return bool(_VISIBLE.fullmatch(authority)) and any(
        name == b"content-type" and _CALL.fullmatch(value) for name, value in regular
    )


def _authority(pseudo: dict[bytes, bytes], regular: Fields) -> bytes:
    found = pseudo.get(b":authority")
    return next(value for name, value in regular if name == b"host") if found is None else found


def _certainly_fine(headers: Sequence[tuple[bytes, bytes]], pseudo: dict[bytes, bytes], names: list[bytes]) -> bool:
    """True if h2 would surely accept a request that is not `_unacceptable`; this check costs less than h2's. `names` are the
    names of the ordinary fields."""
    values = [value for _, value in headers]
    text = b"".join(values)
    return (
        len(pseudo) + len(names) == len(headers)
        and [name for name, _ in headers[: len(pseudo)]] == list(pseudo)
        and pseudo.keys() - {b":authority"} == _NEEDED
        and pseudo[b":path"] != b""
        and _CONNECTION_FIELDS.isdisjoint(names)
        and b"te" not in names
        and all(names)
        and not b"".join(names).translate(None, _TOKEN_BYTES)
        and len(text.translate(None, b"\0\r\n")) == len(text)
        and [value.strip(b" \t") for value in values] == values
    )


def check_status(status: int) -> None:
    """Raises LocalProtocolError if HTTP/2 has no such status."""
    if not 100 <= status <= 999 or status == 101:
        raise LocalProtocolError(f"status {status} cannot be sent; HTTP/2 has 100 to 999 without 101")


def check_fields(headers: Headers) -> Headers:
    """Returns the fields unchanged. LocalProtocolError if HTTP/2 cannot carry them."""
    for name, value in headers:
        if not _NAME.fullmatch(name) or name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
            raise LocalProtocolError(f"HTTP/2 cannot carry the field {name[:100]!r}; names are lower-case tokens")
        if value.strip(b" \t\v\f") != value or b"\0" in value or b"\r" in value or b"\n" in value:
            raise LocalProtocolError(f"the value of {name[:100]!r} holds NUL, CR or LF, or starts or ends with a space")
        if name == b"content-length" and not value.isdigit():
            raise LocalProtocolError(f"content-length must be digits, not {value[:100]!r}")
    return headers
