"""Pages: what a browser's page may ask of the server, by its origin, and what CORS (Fetch section 3.3) tells the browser."""

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
"""Methods that change nothing: a page's answer to them stays unread where its origin is foreign."""

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
    """The rules of one gateway. They look at nothing but a request's head."""

    def __init__(self, config: Config) -> None:
        access = config.access
        self._any = "*" in access.origins
        self._origins = frozenset(origin.lower().rstrip("/").encode() for origin in access.origins)
        self._hosts = frozenset(name.lower().rstrip(".").encode() for name in access.hosts)
        # on a local port only this machine can connect, but a page can too if its name resolves to it (DNS rebinding)
        self._alone = bool(open_ports(config)) and is_local(config.listen.host)
        self.told = (_VARY,) if access.origins else _NOTHING
        """The fields of an answer to a client that is no page: a page's answer may differ (`vary`)."""

    # -- how the server is called ------------------------------------------------------------------------------------

    def is_called(self, head: Head) -> bool:
        """True if a request calls the server by a name of `access.hosts`, or that is empty."""
        return not self._hosts or _host_of(head.authority) in self._hosts

    # -- origins -----------------------------------------------------------------------------------------------------

    def may_ask(self, exchange: Exchange) -> bool:
        """True if a page may ask for this. It may look from anywhere; all else, and a WebSocket, depends on its origin."""
        head = exchange.request
        if head.method in SAFE and head.upgrade != _UPGRADE:
            return True
        origins = exchange.header_values(b"origin")
        if not origins:
            return exchange.header(b"sec-fetch-site") == b"same-origin" and self._is_own(head)
        return all(self._allows(origin) or (_is_same(origin, head.authority) and self._is_own(head)) for origin in origins)

    def _allows(self, origin: bytes) -> bool:
        origin = origin.lower()
        return origin in self._origins or (self._any and b"://" in origin)  # `null` names no origin

    def _is_own(self, head: Head) -> bool:
        """True if the host of the request can be this server's, and not a foreign name that resolves to its address."""
        if not self._alone:
            return True
        host = _host_of(head.authority)
        return host == b"localhost" or host in self._hosts or _is_address(host)

    # -- CORS --------------------------------------------------------------------------------------------------------

    def fields(self, exchange: Exchange, allow: str | None) -> Headers:
        """The CORS fields of the answer to a page. `allow` are the methods of its path, where it asks for those."""
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
    """True if a browser has sent it for a page. An address that people type comes from no page."""
    fields = exchange.fields
    return b"origin" in fields or fields.get(b"sec-fetch-site", b"none") != b"none"


def is_preflight(exchange: Exchange) -> bool:
    """True if a browser asks for a page's permissions: it sends no credentials then, even if the page has some."""
    fields = exchange.fields
    return exchange.request.method == b"OPTIONS" and b"origin" in fields and b"access-control-request-method" in fields


def is_json(exchange: Exchange) -> bool:
    """True if its content type is one that no page sends to another site without asking first."""
    content_type = exchange.header(b"content-type") or b""
    return content_type.partition(b";")[0].strip(b" \t").lower() == b"application/json"


def _is_same(origin: bytes, authority: bytes) -> bool:
    """True if an origin has the host and the port of an authority, whose default port is that of the scheme."""
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
