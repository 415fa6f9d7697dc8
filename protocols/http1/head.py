"""HTTP/1.1 heads and trailers: checks, reading and writing (RFC 9112 sections 2 to 7)."""

from __future__ import annotations

import http
import re
import string
from typing import NamedTuple, final

import httptools

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Head, Headers

_TOKEN = (string.digits + string.ascii_letters + "!#$%&'*+-.^_`|~").encode()  # RFC 9110 section 5.6.2
_VISIBLE = bytes(c for c in range(0x21, 0x7F) if c != ord("#"))  # a request target has no fragment (RFC 9112 section 3.2)
# Invalid in a value (RFC 9110 section 5.5).
_CONTROLS = bytes(c for c in range(0x20) if c != 0x09) + b"\x7f"

_LENGTH_LIMIT = 2**63
_REG_NAME = (
    rb"(?:[0-9A-Za-z._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+"  # RFC 3986 section 3.2.2; empty is refused: RFC 9110 section 4.2.1
)
_HOST = re.compile(rb"(?:" + _REG_NAME + rb"|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{0,5})?")
_ABSOLUTE = re.compile(rb"[Hh][Tt][Tt][Pp][Ss]?://([^/?]*)(.*)")
_TRAILER = re.compile(rb"([0-9A-Za-z!#$%&'*+.^_`|~-]+):([\t -~\x80-\xff]*)")
# The parser library sees only heads that pass these: no control character, no bare CR or LF (RFC 9112 section 2.2), no
# folded line (section 5.2), one space between the parts of a request line (section 3).
_LINE_ENDS = rb"\r\n(?![\t ])(?:[\t -~\x80-\xff]++\r\n(?![\t ]))*+\r\n"
_REQUEST = re.compile(rb"([!-~]++) ([!-~]++) HTTP/([0-9]\.[0-9])" + _LINE_ENDS)
_RESPONSE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [\t -~\x80-\xff]*+)?" + _LINE_ENDS)

# Fields that the machine needs itself. Those of them that are not in `_SHOWN` are left out of the event.
_SPECIAL = frozenset(
    b"connection content-length date expect host keep-alive proxy-connection te transfer-encoding upgrade".split()
)
_SHOWN = frozenset((b"content-length", b"date", b"expect"))
# Persistence is said with `connection` alone; host comes from the authority; the machine writes the framing.
_NOT_TO_SEND = (b"host", b"transfer-encoding", b"keep-alive", b"proxy-connection")


class _Lower(dict[bytes, bytes]):
    """Names of fields and protocols in lower case. Those that many clients send are one object for all heads."""

    def __missing__(self, name: bytes) -> bytes:
        return name.lower()


_lower = _Lower(
    (name, lower)
    for lower in (
        b"accept accept-encoding accept-language authorization cache-control connection content-encoding content-length "
        b"content-type cookie date expect host inference-header-content-length keep-alive origin pragma referer "
        b"sec-websocket-extensions sec-websocket-key sec-websocket-protocol sec-websocket-version te traceparent "
        b"transfer-encoding upgrade user-agent x-api-key x-forwarded-for x-forwarded-proto x-request-id websocket".split()
    )
    for name in (lower, lower.title(), lower.title().replace(b"Websocket", b"WebSocket"))
).__getitem__

_METHODS = {method: method for method in b"DELETE GET HEAD OPTIONS PATCH POST PUT".split()}  # one object for all heads

# RFC 9110 section 6.5.1: framing, routing, request modifiers, authentication, content processing.
FORBIDDEN_TRAILERS = frozenset(
    b"authorization cache-control connection content-encoding content-length content-range content-type cookie expect host "
    b"if-match if-modified-since if-none-match if-range if-unmodified-since keep-alive max-forwards pragma "
    b"proxy-authenticate proxy-authorization proxy-connection range set-cookie te trailer transfer-encoding upgrade "
    b"www-authenticate".split()
)

# The phrases of RFC 9110. Before 3.13, Python has older ones for three of them.
_PHRASES = {s.value: s.phrase for s in http.HTTPStatus} | {
    413: "Content Too Large", 416: "Range Not Satisfiable", 422: "Unprocessable Content",
}  # fmt: skip
_STATUS_LINES = {status: f"HTTP/1.1 {status} {phrase}\r\n".encode() for status, phrase in _PHRASES.items()}
# Status lines of answers that have a body (RFC 9112 section 6.3, rule 1), for `plain_head`. They lack the CRLF: each line
# of such a head begins with the end of the line before.
_PLAIN_LINES = {status: line[:-2] for status, line in _STATUS_LINES.items() if status >= 200 and status not in (204, 304)}
_PLAIN_LENGTH = b"\r\ncontent-length: "
# The beginnings of field lines whose names were checked. Values are not kept: they are many, and may be private.
_PLAIN_STARTS: dict[bytes, bytes] = {}
_STARTS_KEPT, _NAME_KEPT = 256, 64
# A status line and checked fields that many answers share, serialized.
_PLAIN_BLOCKS: dict[tuple[int, Headers], bytes] = {}
_BLOCKS_KEPT, _BLOCK_KEPT = 64, 512

# A transfer coding with its parameters, RFC 9112 section 7; chunked has none and is applied once.
_QUOTED = rb'"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*+"'
_WORD = rb"[0-9A-Za-z!#$%&'*+.^_`|~-]++"
_PARAMETER = rb"[ \t]*+;[ \t]*+" + _WORD + rb"[ \t]*+=[ \t]*+(?:" + _WORD + rb"|" + _QUOTED + rb")"
_CODING = rb"(?!chunked[ \t;,])" + _WORD + rb"(?:" + _PARAMETER + rb")*+"
_CODED_THEN_CHUNKED = re.compile(rb"(?:" + _CODING + rb"[ \t]*+,[ \t]*+)++chunked", re.IGNORECASE)


class RequestHead(NamedTuple):
    """A request head that has passed every check. A named tuple: one is made for each request."""

    head: Head
    """The head itself."""
    length: int
    """The length of the body; 0 if the head declares none."""
    chunked: bool
    keep_alive: bool
    http10: bool
    is_head: bool
    takes_trailers: bool
    """True if the head has `te: trailers` (RFC 9110 section 10.1.4)."""


class ResponseHead(NamedTuple):
    """A response head that has passed every check. `length` and `chunked` are as declared, whatever the status."""

    status: int
    headers: Headers
    keep_alive: bool
    length: int | None
    chunked: bool
    upgrade: bytes


class Outgoing(NamedTuple):
    """Fields ready to be written. `special` has the fields that the machine itself must know."""

    block: bytes
    special: dict[bytes, list[bytes]]

    @property
    def length(self) -> int | None:
        """The declared content-length. LocalProtocolError if it is invalid."""
        values = self.special.get(b"content-length")
        if values is None:
            return None
        length = _length(values)
        if length is None:
            raise LocalProtocolError(
                f"content-length: expected one decimal number below 2**63, got {b', '.join(values)[:40]!r}"
            )
        return length

    @property
    def upgrade(self) -> bytes:
        return b", ".join(self.special.get(b"upgrade", ()))

    @property
    def connection(self) -> list[bytes]:
        return _tokens(self.special.get(b"connection", ()))


@final
class _Fields:
    """Collects the fields that the parser library finds in a head."""

    __slots__ = ("headers", "special")

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.special: dict[bytes, list[bytes]] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        name = _lower(name)
        value = value.strip()
        if name in _SPECIAL:
            self.special.setdefault(name, []).append(value)
            if name not in _SHOWN:
                return
        self.headers.append((name, value))


def read_request(head: bytes, *, max_fields: int, scheme: bytes) -> RequestHead:
    """Reads a head, its empty line included. RemoteProtocolError with the status to refuse it with."""
    _check_count(head, max_fields)
    match = _REQUEST.fullmatch(head)
    if match is None:
        raise RemoteProtocolError(
            f"request head: expected lines of text that end in CRLF, the first a request line: {head[:40]!r}"
        )
    method, target, version = match.groups()
    if version != b"1.1" and version != b"1.0":
        raise RemoteProtocolError(f"version: expected HTTP/1.0 or HTTP/1.1, got HTTP/{version.decode()}", status=505)
    if method == b"CONNECT":
        raise RemoteProtocolError("CONNECT: this is no proxy", status=501)
    target, named = _origin(method, target)
    modern = version == b"1.1"
    fields = _Fields()
    try:
        httptools.HttpRequestParser(fields).feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # the head is complete; `_upgrade` decides about upgrades
    except httptools.HttpParserInvalidMethodError:
        # RFC 9110 section 9.1; a method is case-sensitive, so `get` is unknown and not wrong
        status = 400 if method.translate(None, _TOKEN) else 501
        raise RemoteProtocolError(f"method: unknown: {method[:40]!r}", status=status) from None
    except httptools.HttpParserError as e:
        raise _unparsed(head, modern, e) from None
    special = fields.special
    length, chunked = _framing(special, modern)
    connection = _tokens(special.get(b"connection", ()))
    has_body = bool(length or chunked)
    request = Head(
        method=_METHODS.get(method, method),
        target=target,
        headers=tuple(fields.headers),
        authority=_authority(special.get(b"host", ()), named, modern),
        scheme=scheme,
        version=b"1.1" if modern else b"1.0",  # one object for all heads
        content_length=length,
        # RFC 9110 section 10.1.1: an HTTP/1.0 client cannot expect, and neither can a request without a body
        expects_continue=modern and b"expect" in special and _expects_continue(special[b"expect"]) and has_body,
        upgrade=_upgrade(special) if modern and not has_body and method == b"GET" and b"upgrade" in connection else b"",
    )
    keep_alive = b"close" not in connection and (modern or b"keep-alive" in connection)
    takes_trailers = b"te" in special and b"trailers" in _tokens(special[b"te"])
    return RequestHead(request, length or 0, chunked, keep_alive, not modern, method == b"HEAD", takes_trailers)


def read_response(head: bytes, *, max_fields: int) -> ResponseHead:
    """Reads a head, its empty line included. RemoteProtocolError if it is malformed."""
    _check_count(head, max_fields)
    match = _RESPONSE.fullmatch(head)
    if match is None:
        raise RemoteProtocolError(
            f"response head: expected lines of text that end in CRLF, the first a status line of HTTP/1.x: {head[:40]!r}"
        )
    fields = _Fields()
    try:
        httptools.HttpResponseParser(fields).feed_data(head)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as e:
        raise RemoteProtocolError(f"response head: {e}") from None
    modern = match[1] == b"1"
    length, chunked = _framing(fields.special, modern)
    connection = _tokens(fields.special.get(b"connection", ()))
    return ResponseHead(
        int(match[2]),
        tuple(fields.headers),
        b"close" not in connection and (modern or b"keep-alive" in connection),
        length,
        chunked,
        _upgrade(fields.special) if modern and b"upgrade" in connection else b"",
    )


def read_trailer(line: bytes) -> tuple[bytes, bytes] | None:
    """Reads one line of a trailer section, without its CRLF. None for a field that is not allowed in trailers: it is
    dropped. RemoteProtocolError if the line is not a field."""
    match = _TRAILER.fullmatch(line)
    if match is None:
        raise RemoteProtocolError(f"trailer: no field: {line[:40]!r}")
    name = match[1].lower()
    return None if name in FORBIDDEN_TRAILERS else (name, match[2].strip(b" \t"))


def write_fields(headers: Headers) -> Outgoing:
    """Checks and serializes the fields of a head. LocalProtocolError if a name is not a token, if a value has control
    characters, and for fields that only the machine may write."""
    parts: list[bytes] = []
    special: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        lower = name.lower()
        if lower in _SPECIAL:
            special.setdefault(lower, []).append(value)
            if lower in _NOT_TO_SEND:
                raise LocalProtocolError(f"{lower.decode()}: is the machine's to write")
            if lower == b"connection" or lower == b"upgrade":
                if _has_controls(value):
                    raise LocalProtocolError(f"{lower.decode()}: control characters in its value")
                continue
        elif not _is_token(name):
            raise LocalProtocolError(f"field name: expected a token, got {name[:40]!r}")
        parts += (name, b": ", value, b"\r\n")
    if _has_controls(b"".join(parts[2::4])):
        bad = next(name for name, value in headers if _has_controls(value))
        raise LocalProtocolError(f"{bad[:40]!r}: control characters in a field value")
    return Outgoing(b"".join(parts), special)


def plain_head(
    status: int, headers: Headers, fresh: Headers, length: int | None, size: int, end: bytes = b"\r\n\r\n"
) -> bytes | None:
    """The head of an answer with a body of `size` bytes: `headers`, a content-length of `length` unless that is None, then
    `fresh`. `end` is how the head ends, a DateField's `end`.
    None if the fields do not declare exactly that size, or say anything else that the machine must know: `status_line` and
    `write_fields` write such a head. A tuple of `headers` that has no content-length is remembered with its status."""
    block = None
    if fresh and type(headers) is tuple:
        try:
            block = _PLAIN_BLOCKS.get((status, headers)) or _plain_block(status, headers)
        except TypeError:
            block = None  # not hashable: something in it can change
    if length is not None:
        if block is not None and len(fresh) == 1 and length == size:  # the usual answer: `fresh` has one field
            name, value = fresh[0]
            start = _PLAIN_STARTS.get(name)
            if start is not None and value.isalnum():
                return b"%b\r\ncontent-length: %d%b%b%b" % (block, size, start, value, end)
        fresh = ((b"content-length", b"%d" % length), *fresh)
    if block is None:
        block, fresh = _PLAIN_LINES.get(status), [*headers, *fresh]
        if block is None:
            return None
    parts = [block]
    declared: bytes | None = None
    for name, value in fresh:
        start = _PLAIN_STARTS.get(name)
        if start is None:
            if name == b"content-length" and declared is None:
                declared = value
                parts += (_PLAIN_LENGTH, value)
                continue
            start = _plain_start(name)
            if start is None:
                return None
        if not value.isalnum() and _has_controls(value):
            return None
        parts += (start, value)
    if declared != b"%d" % size:
        return None
    parts.append(end)
    return b"".join(parts)


def write_trailers(trailers: Headers) -> bytes:
    """Checks and serializes the fields of a trailer section. LocalProtocolError also for fields that are not allowed
    there."""
    for name, _ in trailers:
        if name.lower() in FORBIDDEN_TRAILERS:
            raise LocalProtocolError(f"{name[:40]!r}: may not be sent as a trailer (RFC 9110 section 6.5.1)")
    return write_fields(trailers).block


def status_line(status: int) -> bytes:
    """The status line. If a status has no standard phrase, the phrase is empty but its space stays (RFC 9112 section 4)."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def request_line(method: bytes, target: bytes) -> bytes:
    """The request line. LocalProtocolError if `read_request` would not accept it in origin-form."""
    if not method or method.translate(None, _TOKEN) or method == b"CONNECT":
        raise LocalProtocolError(f"method: expected a token other than CONNECT, got {method[:40]!r}")
    if target.translate(None, _VISIBLE) or not (target.startswith(b"/") or (target == b"*" and method == b"OPTIONS")):
        raise LocalProtocolError(f"target: expected a path of visible ASCII, got {target[:40]!r}")
    return b"%b %b HTTP/1.1\r\n" % (method, target)


def is_authority(value: bytes) -> bool:
    """True if the value is a host, name or address, with or without a port."""
    return _HOST.fullmatch(value) is not None


def is_protocol(value: bytes) -> bool:
    """True if the value names one protocol, with or without a version (RFC 9110 section 7.8)."""
    return bool(value) and not value.translate(None, _TOKEN + b"/")


def _plain_block(status: int, headers: tuple[tuple[bytes, bytes], ...]) -> bytes | None:
    line = _PLAIN_LINES.get(status)
    if line is None:
        return None
    parts = [line]
    for name, value in headers:
        start = _PLAIN_STARTS.get(name) or _plain_start(name)
        if start is None or _has_controls(value):
            return None
        parts += (start, value)
    block = b"".join(parts)
    if len(block) <= _BLOCK_KEPT:
        if len(_PLAIN_BLOCKS) >= _BLOCKS_KEPT:
            _PLAIN_BLOCKS.clear()
        _PLAIN_BLOCKS[status, headers] = block
    return block


def _plain_start(name: bytes) -> bytes | None:
    if not _is_token(name) or name.lower() in _SPECIAL:
        return None
    start = b"\r\n%b: " % name
    if len(name) <= _NAME_KEPT:
        if len(_PLAIN_STARTS) >= _STARTS_KEPT:
            _PLAIN_STARTS.clear()
        _PLAIN_STARTS[name] = start
    return start


def _is_token(name: bytes) -> bool:
    return bool(name) and not name.translate(None, _TOKEN)


def _has_controls(value: bytes) -> bool:
    return len(value.translate(None, _CONTROLS)) != len(value)


def _check_count(head: bytes, max_fields: int) -> None:
    fields = head.count(b"\n") - 2
    if fields > max_fields:
        raise RemoteProtocolError(f"head: {fields} fields, the limit (fields) is {max_fields}", status=431)


def _origin(method: bytes, target: bytes) -> tuple[bytes, bytes | None]:
    """The target in origin-form, and the authority of an absolute-form or None (RFC 9112 section 3.2)."""
    if b"#" in target:
        raise RemoteProtocolError(f"target: expected no fragment, got {target[:40]!r}")
    if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
        return target, None
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        raise RemoteProtocolError(f"target: expected a path or an http(s) URI, got {target[:40]!r}")
    path = match[2]
    if not path:
        return (b"*" if method == b"OPTIONS" else b"/"), match[1]  # RFC 9112 section 3.2.4
    return (path if path.startswith(b"/") else b"/" + path), match[1]


def _authority(hosts: list[bytes] | tuple[()], named: bytes | None, modern: bool) -> bytes:
    """The authority, by RFC 9112 section 3.2: one valid Host is required, and an absolute-form may not contradict it."""
    if len(hosts) > 1:
        raise RemoteProtocolError(f"host: expected one, got {len(hosts)}")
    if not hosts:
        if modern:
            raise RemoteProtocolError("host: missing")
        if named is not None and not is_authority(named):
            raise RemoteProtocolError(f"target: no host: {named[:40]!r}")
        return named or b""
    host = hosts[0]
    if not is_authority(host):
        raise RemoteProtocolError(f"host: expected a host and perhaps a port, got {host[:40]!r}")
    if named is not None and named.lower() != host.lower():
        raise RemoteProtocolError(f"host: {host[:40]!r} is not the authority of the target, {named[:40]!r}")
    return host


def _framing(special: dict[bytes, list[bytes]], modern: bool) -> tuple[int | None, bool]:
    """The declared length, and True if the body is chunked. Framing that two readers could understand differently is
    refused, never repaired (RFC 9112 section 6)."""
    lengths, codings = special.get(b"content-length"), special.get(b"transfer-encoding")
    if codings is None:
        if lengths is None:
            return None, False
        length = _length(lengths)
        if length is None:
            raise RemoteProtocolError(
                f"content-length: expected one decimal number below 2**63, got {b' and '.join(lengths)[:40]!r}",
            )
        return length, False
    if lengths is not None:
        raise RemoteProtocolError("content-length and transfer-encoding in one head")  # section 6.3, rule 3
    if not modern:
        raise RemoteProtocolError("transfer-encoding in HTTP/1.0")  # section 6.1
    if len(codings) != 1 or codings[0].lower() != b"chunked":
        coding = b", ".join(codings)
        # a coding we do not know is 501 (section 6.1); a body whose end cannot be told is 400 (section 6.3, rule 4)
        status = 501 if _CODED_THEN_CHUNKED.fullmatch(coding) else 400
        raise RemoteProtocolError(f"transfer-encoding: expected chunked, got {coding[:40]!r}", status=status)
    return None, True


def _length(values: list[bytes]) -> int | None:
    """The value of one Content-Length of digits alone, else None. Even an equal second one is refused (RFC 9110 section
    8.6)."""
    if len(values) != 1 or not values[0].isdigit():
        return None
    digits = values[0].lstrip(b"0")
    if len(digits) > 19:  # before int(), whose time is quadratic
        return None
    length = int(digits or b"0")
    return length if length < _LENGTH_LIMIT else None


def _tokens(values: list[bytes] | tuple[()]) -> list[bytes]:
    if not values:
        return []
    return [token for value in values for part in value.lower().split(b",") if (token := part.strip(b" \t"))]


def _expects_continue(values: list[bytes]) -> bool:
    if len(values) != 1 or values[0].lower() != b"100-continue":
        raise RemoteProtocolError(f"expect: only 100-continue can be met, got {b', '.join(values)[:40]!r}", status=417)
    return True


def _upgrade(special: dict[bytes, list[bytes]]) -> bytes:
    """The one protocol asked for, else empty. A choice of several is an offer that may be ignored (RFC 9110 section 7.8)."""
    values = _tokens(special.get(b"upgrade", ()))
    return _lower(values[0]) if len(values) == 1 and is_protocol(values[0]) else b""


def _unparsed(head: bytes, modern: bool, error: Exception) -> RemoteProtocolError:
    """The error for a head that the library refused. A framing error comes from our own check, because the library's verdict
    on framing differs by version."""
    special: dict[bytes, list[bytes]] = {}
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        special.setdefault(name.lower(), []).append(value.strip())
    try:
        _framing(special, modern)
    except RemoteProtocolError as own:
        return own
    return RemoteProtocolError(f"request head: {error}")
