"""The WebSocket opening handshake on heads that an HTTP/1.1 machine has read (RFC 6455 section 4)."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence

from wsproto.utilities import generate_accept_token

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Head, Headers, Response

VERSION = b"13"

END_OF_INPUT = b"x-everywire-end-of-input"
"""The field that defines an end of input for a WebSocket session, which RFC 6455 does not have. A server names a text in
its 101: a TEXT message of exactly these bytes tells that the client has no more input. The server then sends the rest of
its answers, and a Close. A client may offer a text in its request, for servers that name none. It should be a text that
no one sends by chance."""

_END_OF_INPUT = re.compile(rb"[!-~](?:[ -~]{0,254}[!-~])?")


def accept_headers(request: Head, *, subprotocols: Sequence[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """The headers of the 101 that accepts `request`. No extension is ever accepted.

    `subprotocols` are ours in the order of preference; the first one that the client offers is chosen, if any.
    RemoteProtocolError if the request is not a WebSocket handshake: its `status` is 400, or 426 if only the version is
    wrong. `refusal_headers` has the headers of that answer.
    """
    if request.method != b"GET" or request.upgrade != b"websocket":
        raise RemoteProtocolError("a WebSocket handshake is a GET with upgrade: websocket")
    version = _only(request.headers, b"sec-websocket-version")
    if version != VERSION:
        raise RemoteProtocolError(f"sec-websocket-version: expected 13, got {version[:20]!r}", status=426)
    key = _only(request.headers, b"sec-websocket-key")
    if not _is_nonce(key):
        raise RemoteProtocolError("sec-websocket-key: expected 16 bytes in base64")
    headers = [
        (b"upgrade", b"websocket"),
        (b"connection", b"Upgrade"),
        (b"sec-websocket-accept", generate_accept_token(key)),
    ]
    offered = {
        token.strip(b" \t")
        for name, value in request.headers
        if name == b"sec-websocket-protocol"
        for token in value.split(b",")
    }
    chosen = next((name for name in subprotocols if name in offered), None)
    return headers if chosen is None else [*headers, (b"sec-websocket-protocol", chosen)]


def refusal_headers(error: RemoteProtocolError) -> list[tuple[bytes, bytes]]:
    """The headers of the answer to a refused handshake: for status 426 the version we support (RFC 6455 section 4.4)."""
    return [(b"sec-websocket-version", VERSION)] if error.status == 426 else []


def request_headers(key: bytes, *, subprotocols: Sequence[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """The headers of a client's GET. `key` is 16 random bytes, new for each connection. `subprotocols` are offered in this
    order. Pass the same arguments to `check_response`."""
    headers = [
        (b"upgrade", b"websocket"),
        (b"connection", b"Upgrade"),
        (b"sec-websocket-key", _encoded(key)),
        (b"sec-websocket-version", VERSION),
    ]
    return [*headers, (b"sec-websocket-protocol", b", ".join(subprotocols))] if subprotocols else headers


def check_response(key: bytes, response: Response, *, subprotocols: Sequence[bytes] = ()) -> bytes | None:
    """The subprotocol that the server chose, or None; frames follow. RemoteProtocolError if `response` does not accept the
    handshake of `key`: another status, a wrong or missing sec-websocket-accept, an extension, or a subprotocol that was not
    offered (RFC 6455 section 4.1)."""
    if response.status != 101:
        raise RemoteProtocolError(f"WebSocket handshake: expected status 101, got {response.status}")
    if _only(response.headers, b"sec-websocket-accept") != generate_accept_token(_encoded(key)):
        raise RemoteProtocolError("sec-websocket-accept: not the answer to our key")
    names = [name for name, _ in response.headers]
    if b"sec-websocket-extensions" in names:
        raise RemoteProtocolError("sec-websocket-extensions: expected none, as none was offered")
    if b"sec-websocket-protocol" not in names:
        return None
    chosen = _only(response.headers, b"sec-websocket-protocol")
    if chosen not in subprotocols:
        raise RemoteProtocolError(f"sec-websocket-protocol: {chosen[:50]!r} was not offered")
    return chosen


def offered_end_of_input(nonce: bytes) -> tuple[bytes, bytes]:
    """The `END_OF_INPUT` field of a client's request. `nonce` is at most 121 random bytes, new for each connection."""
    return END_OF_INPUT, b"end-of-input-" + nonce.hex().encode()


def end_of_input(headers: Headers) -> bytes | None:
    """The text that a head's `END_OF_INPUT` field names, or None without such a field. RemoteProtocolError if the field is
    there twice, or if its value is not 1 to 256 characters of visible ASCII and inner spaces."""
    values = [value for name, value in headers if name == END_OF_INPUT]
    if not values:
        return None
    value = _only(headers, END_OF_INPUT)
    if _END_OF_INPUT.fullmatch(value) is None:
        wanted = f"{END_OF_INPUT.decode()}: expected 1 to 256 characters of visible ASCII"
        raise RemoteProtocolError(f"{wanted}, got {value[:50]!r} ({len(value)} bytes)")
    return value


def _only(headers: Headers, wanted: bytes) -> bytes:
    values = [value for name, value in headers if name == wanted]
    if len(values) != 1:
        raise RemoteProtocolError(f"{wanted.decode()}: expected exactly one, got {len(values)}")
    return values[0]


def _is_nonce(key: bytes) -> bool:
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except binascii.Error:
        return False


def _encoded(key: bytes) -> bytes:
    if len(key) != 16:
        raise LocalProtocolError(f"key: expected 16 random bytes, got {len(key)}")
    return base64.b64encode(key)
