"""Pages: decides by origin which requests a browser's page may send, and makes the fields of CORS (Fetch section 3.3)."""

from __future__ import annotations

import ipaddress
import re
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
_HEADERS = b"authorization, content-type, x-api-key, x-request-timeout, inference-header-content-length, accept"
_EXPOSED = b"x-request-id, inference-header-content-length, retry-after"
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

    def fields(self, exchange: Exchange, allow: str | None) -> Headers:
        """Returns the fields to add to the answer to a page. `allow` are the methods of the path, for an OPTIONS request."""
        if not self.told:
            return _NOTHING
        origins = exchange.header_values(b"origin")
        if len(origins) != 1 or not self._allows(origins[0]):
            return self.told
        fields = ((b"access-control-allow-origin", origins[0]), _VARY)
        if allow is None or not is_preflight(exchange):
            return (*fields, (b"access-control-expose-headers", _EXPOSED))
        return (
            *fields,
            (b"access-control-allow-methods", allow.encode()),
            (b"access-control-allow-headers", _HEADERS),
            (b"access-control-max-age", _SECONDS),
        )


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
