"""Pages: decides by origin which requests a browser's page may send, and makes the fields of CORS (Fetch section 3.3)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import final

from gateway.config import Config
from gateway.config.agreement import is_local, open_ports
from gateway.core.exchange import Exchange
from gateway.core.route import WEBSOCKET
from protocols.events import Head, Headers

SAFE = frozenset((b"GET", b"HEAD", b"OPTIONS"))
"""Methods that change nothing. A page of a foreign origin may send them, but its browser does not let it read the answer."""

_UPGRADE = WEBSOCKET.encode()
_PORTS = {b"http": b"80", b"ws": b"80", b"https": b"443", b"wss": b"443"}
_AUTHORITY = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[^:\[\]/@\s]+)(?::([0-9]*))?")
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_MOST_NAMES, _MOST_BYTES = 64, 4096  # request fields that one preflight may ask for
EXPOSED: Sequence[bytes] = (
    b"x-request-id", b"x-client-request-id", b"retry-after",
    b"x-everywire-usage", b"x-everywire-passed", b"x-everywire-end-of-input",
    # for the AWS SDK, which reads its answers out of them, and for the binary tensors of v2
    b"x-amzn-requestid", b"x-amzn-errortype", b"x-amzn-invoked-production-variant", b"x-amzn-sagemaker-content-type",
    b"x-amzn-sagemaker-custom-attributes", b"x-amzn-sagemaker-new-session-id", b"x-amzn-sagemaker-closed-session-id",
    b"inference-header-content-length",
)  # fmt: skip
"""Fields of an answer that a page may read, besides those that browsers always show. CORS has no wildcard of a prefix."""
_EXPOSED = b", ".join(EXPOSED)
_METHOD = 64  # bytes of a method that is named to a page
_SECONDS = b"600"
_VARY = (b"vary", b"origin")
_NOTHING: Headers = ()


@final
class Pages:
    """The rules of one gateway for browsers' pages. They use only a request's head."""

    def __init__(self, config: Config) -> None:
        access = config.access
        self._any = "*" in access.origins
        self._origins = frozenset(origin.lower().rstrip("/").encode() for origin in access.origins)
        self._hosts = frozenset(name.lower().rstrip(".").encode() for name in access.hosts)
        # Only this machine can connect to these ports. A page of any site can then, if its name resolves to this machine
        # (DNS rebinding).
        self._alone = bool(open_ports(config)) and is_local(config.listen.host)
        self.told = (_VARY,) if access.origins else _NOTHING
        """Fields of an answer to other clients than pages: `vary: origin` if answers to pages differ."""

    # -- names of the server -----------------------------------------------------------------------------------------

    def is_called(self, head: Head) -> bool:
        """True if the request's host is in `access.hosts`, or that is empty."""
        return not self._hosts or _host_of(head.authority) in self._hosts

    # -- origins -----------------------------------------------------------------------------------------------------

    def may_ask(self, exchange: Exchange) -> bool:
        """True if a page may send the request. Any page may use a safe method; for others, and for a WebSocket, its origin
        must be allowed."""
        head = exchange.request
        if head.method in SAFE and head.upgrade != _UPGRADE:
            return True
        origins = exchange.header_values(b"origin")
        if not origins:
            return exchange.header(b"sec-fetch-site") == b"same-origin" and self._is_own(head)
        return all(self._allows(origin) or (_is_same(origin, head.authority) and self._is_own(head)) for origin in origins)

    def _allows(self, origin: bytes) -> bool:
        origin = origin.lower()
        return origin in self._origins or (self._any and b"://" in origin)  # `null` names no site

    def _is_own(self, head: Head) -> bool:
        """True if the request's host can be this server, and not a foreign name that resolves to its address."""
        if not self._alone:
            return True
        host = _host_of(head.authority)
        return host == b"localhost" or host in self._hosts or _is_address(host)

    # -- CORS --------------------------------------------------------------------------------------------------------

    def fields(self, headers: Headers, allow: str | None = None) -> Headers:
        """Returns the fields to add to the answer to a request with these headers: a page of an allowed origin may then read
        it, refusals too. `allow` are the methods of the path, for an OPTIONS request."""
        if not self.told:
            return _NOTHING
        origin = self._origin_of(headers)
        if origin is None:
            return self.told
        fields = ((b"access-control-allow-origin", origin), _VARY)
        asked = _first(headers, b"access-control-request-method") if allow is not None else None
        if asked is None or allow is None:
            return (*fields, (b"access-control-expose-headers", _EXPOSED))
        # Also a method that the path does not have: the page can then read the refusal of its request.
        methods = allow.encode()
        if _TOKEN.fullmatch(asked) and len(asked) <= _METHOD and asked not in methods.split(b", "):
            methods = b", ".join((methods, asked))
        names = _tokens(headers)
        return (
            *fields,
            (b"access-control-allow-methods", methods),
            *(((b"access-control-allow-headers", b", ".join(names)),) if names else ()),
            (b"access-control-max-age", _SECONDS),
        )

    def knows(self, exchange: Exchange) -> bool:
        """True if the request is a preflight of a page whose origin is in `access.origins`."""
        return is_preflight(exchange) and self._origin_of(exchange.request.headers) is not None

    def _origin_of(self, headers: Headers) -> bytes | None:
        """Returns the one allowed origin of a request; None if it has none, another one, or several."""
        origins = [value for name, value in headers if name == b"origin"]
        return origins[0] if len(origins) == 1 and self._allows(origins[0]) else None


def _first(headers: Headers, wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)


def _tokens(headers: Headers) -> list[bytes]:
    """Returns the names of the fields that a preflight asks for, within the bounds. A browser tells which one is missing."""
    asked = b",".join(value for name, value in headers if name == b"access-control-request-headers")[: _MOST_BYTES + 1]
    if len(asked) > _MOST_BYTES:
        asked = asked.rpartition(b",")[0]  # the last one is cut
    names = [stripped for name in asked.split(b",") if _TOKEN.fullmatch(stripped := name.strip(b" \t"))]
    return list(dict.fromkeys(names))[:_MOST_NAMES]


def is_from_page(exchange: Exchange) -> bool:
    """True if a browser sent the request for a page; an address that a user types in is not from a page."""
    fields = exchange.fields
    return b"origin" in fields or fields.get(b"sec-fetch-site", b"none") != b"none"


def is_preflight(exchange: Exchange) -> bool:
    """True if the request is a browser's CORS preflight, which never has credentials."""
    fields = exchange.fields
    return exchange.request.method == b"OPTIONS" and b"origin" in fields and b"access-control-request-method" in fields


def is_json(exchange: Exchange) -> bool:
    """True if the content type is `application/json`, which a page sends to another site only after a preflight."""
    content_type = exchange.header(b"content-type") or b""
    return content_type.partition(b";")[0].strip(b" \t").lower() == b"application/json"


def _is_same(origin: bytes, authority: bytes) -> bool:
    """True if the origin has the host and port of the authority. The default port is that of the origin's scheme."""
    scheme, found, rest = origin.lower().partition(b"://")
    usual = _PORTS.get(scheme, b"")
    theirs, ours = _AUTHORITY.fullmatch(rest), _AUTHORITY.fullmatch(authority.lower())
    if not found or theirs is None or ours is None:
        return False
    return theirs[1] == ours[1] and (theirs[2] or usual) == (ours[2] or usual)


def _host_of(authority: bytes) -> bytes:
    found = _AUTHORITY.fullmatch(authority.lower())
    return b"" if found is None else found[1].rstrip(b".")


def _is_address(host: bytes) -> bool:
    try:
        ipaddress.ip_address(host.decode("latin-1").strip("[]"))
    except ValueError:
        return False
    return True
