"""HTTP/2 heads and trailers: from header lists to events and back, and what is wrong with them (RFC 9113 section 8)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from protocols.errors import LocalProtocolError
from protocols.events import Headers, Refused, Request, Response
from protocols.http2_library import malformed

Fields: TypeAlias = list[tuple[bytes, bytes]]

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE = re.compile(rb"[\0\r\n]|^[ \t]|[ \t]\Z")
_TARGET = re.compile(rb"/[^\x00-\x20\x7f#]*|\*")
_AUTHORITY = re.compile(rb"[^\x00-\x20\x7f@/?#\\]+")
_STATUS = re.compile(rb"[1-9][0-9][0-9]")
_CONNECTION_FIELDS = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
_ENTRY = 32
"""RFC 9113 section 6.5.2: what each field counts beside its name and value."""


class MalformedHeadError(Exception):
    """A received header list that ends its stream (PROTOCOL_ERROR, section 8.1.1); the text says what is wrong."""


def read_request(
    stream: int, headers: Sequence[tuple[bytes, bytes]], *, ended: bool, fields: int, size: int
) -> Request | Refused:
    """The request that a header list means, or a Refused for one that can be answered.

    `ended` says that no body follows, `fields` and `size` are the limits of the fields' number and of the list's bytes
    as section 6.5.2 counts them. Raises MalformedHeadError for the rest.
    """
    pseudo, regular = _split(headers)
    refusal = _too_large(headers, regular, fields, size) or _unacceptable(pseudo, regular)
    if refusal:
        return Refused(stream=stream, status=refusal[0], message=refusal[1])
    wrong = malformed(headers)
    if wrong:
        raise MalformedHeadError(wrong)
    length = content_length(regular)
    if ended and length:
        raise MalformedHeadError(f"content-length is {length} and no body follows")
    return Request(
        stream=stream,
        method=pseudo[b":method"],
        target=pseudo[b":path"],
        headers=tuple(regular),
        authority=_authority(pseudo, regular),
        scheme=pseudo[b":scheme"],
        version=b"2",
        content_length=length,
        expects_continue=any(name == b"expect" and value.lower() == b"100-continue" for name, value in regular),
    )


def read_response(stream: int, headers: Sequence[tuple[bytes, bytes]], *, fields: int, size: int) -> Response:
    """The response head that a header list means, or MalformedHeadError."""
    pseudo, regular = _split(headers)
    refusal = _too_large(headers, regular, fields, size)
    wrong = refusal[1] if refusal else malformed(headers, response=True)
    if wrong:
        raise MalformedHeadError(wrong)
    status = pseudo[b":status"]
    if not _STATUS.fullmatch(status) or status == b"101":
        raise MalformedHeadError(":status is not an HTTP/2 status code")
    return Response(stream=stream, status=int(status), headers=tuple(regular))


def read_trailers(headers: Sequence[tuple[bytes, bytes]], *, fields: int, size: int) -> Headers:
    """The trailer fields of a header list, or MalformedHeadError."""
    _, regular = _split(headers)
    refusal = _too_large(headers, regular, fields, size)
    wrong = refusal[1] if refusal else malformed(headers, trailers=True)
    if wrong:
        raise MalformedHeadError(wrong)
    return tuple(regular)


def content_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """The value of content-length, whose form is checked elsewhere (h2 for received heads, `_check` for ours)."""
    return next((int(value) for name, value in headers if name == b"content-length"), None)


def request_fields(request: Request, scheme: bytes) -> Fields:
    """The header list of a request to send. The authority may also stand in a Host field, which does not go out itself
    (section 8.3.1). Raises LocalProtocolError for what HTTP/2 cannot carry."""
    hosts = {value for name, value in request.headers if name == b"host"}
    authorities = hosts | {request.authority} if request.authority else hosts
    if len(authorities) != 1:
        raise LocalProtocolError("a request needs one authority, in `authority` or in a Host field")
    (authority,) = authorities
    fields = [field for field in request.headers if field[0] != b"host"]
    declared = content_length(_check(fields))
    if request.content_length is not None and declared is None:
        fields.append((b"content-length", b"%d" % request.content_length))
    elif request.content_length not in (None, declared):
        raise LocalProtocolError(f"content_length is {request.content_length}, the field says {declared}")
    for what, value, pattern in (
        ("method", request.method, _TOKEN),
        ("target", request.target, _TARGET),
        ("authority", authority, _AUTHORITY),
    ):
        if not pattern.fullmatch(value):
            raise LocalProtocolError(f"{what} {value[:100]!r} cannot be sent")
    if request.method == b"CONNECT":
        raise LocalProtocolError("CONNECT is not supported")
    pseudo = [(b":method", request.method), (b":scheme", scheme), (b":authority", authority), (b":path", request.target)]
    return pseudo + fields


def response_fields(response: Response) -> Fields:
    """The header list of a response to send; LocalProtocolError for what HTTP/2 cannot carry."""
    if not 100 <= response.status <= 999 or response.status == 101:
        raise LocalProtocolError(f"status {response.status} cannot be sent; HTTP/2 has 100 to 999 without 101")
    return [(b":status", b"%d" % response.status), *_check(response.headers)]


def trailer_fields(trailers: Headers) -> Fields:
    """The header list of trailers to send; LocalProtocolError for what HTTP/2 cannot carry."""
    return list(_check(trailers))


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
        return 431, f"{len(regular)} header fields; the limit is {fields}"
    total = sum(len(name) + len(value) + _ENTRY for name, value in headers)
    if total > size:
        return 431, f"a header list of {total} bytes; the limit is {size}"
    return None


def _unacceptable(pseudo: dict[bytes, bytes], regular: Fields) -> tuple[int, str] | None:
    method = pseudo.get(b":method", b"")
    if method == b"CONNECT":
        return 501, "CONNECT is not supported"
    if sum(name == b"host" for name, _ in regular) > 1:
        return 400, "more than one Host field"
    if sum(name == b"content-length" for name, _ in regular) > 1:
        return 400, "more than one content-length field"
    host = next((value for name, value in regular if name == b"host"), None)
    if host is not None and pseudo.get(b":authority", host) != host:
        return 400, ":authority and Host disagree"
    if not _AUTHORITY.fullmatch(_authority(pseudo, regular)):
        return 400, "no valid authority: one is needed, as host and optional port"
    if method and not _TOKEN.fullmatch(method):
        return 400, ":method is not a token"
    if pseudo.get(b":path") and not _TARGET.fullmatch(pseudo[b":path"]):
        return 400, ':path must be "*" or start with "/", without fragment, spaces and control characters'
    if pseudo.get(b":scheme", b"https") not in (b"http", b"https"):
        return 400, ":scheme must be http or https"
    return None


def _authority(pseudo: dict[bytes, bytes], regular: Fields) -> bytes:
    found = pseudo.get(b":authority")
    return next((value for name, value in regular if name == b"host"), b"") if found is None else found


def _check(headers: Headers) -> Headers:
    for name, value in headers:
        if not _NAME.fullmatch(name) or name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
            raise LocalProtocolError(f"HTTP/2 cannot carry the field {name[:100]!r}; names are lower-case tokens")
        if _BAD_VALUE.search(value):
            raise LocalProtocolError(f"the value of {name[:100]!r} holds NUL, CR or LF, or starts or ends with a space")
        if name == b"content-length" and not value.isdigit():
            raise LocalProtocolError(f"content-length must be digits, not {value[:100]!r}")
    return headers
