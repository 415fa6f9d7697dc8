"""Credentials of requests: finds a request's key, and keeps credentials from the models."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Collection
from typing import final
from urllib.parse import unquote_plus

from gateway.errors import BadRequest
from protocols.events import Headers

_VERIFIED_BY_A_MODEL = frozenset((b"authorization", b"x-amz-security-token", b"cookie"))
"""Fields that models in the process see only with `access.pass_credentials`, to verify their callers themselves."""
_NEVER = frozenset((b"proxy-authorization", b"x-api-key"))
_AUTHORIZATION, _API_KEY = b"authorization", b"x-api-key"
SUBPROTOCOL = b"sec-websocket-protocol"
"""The field of the subprotocols that a WebSocket offers, and of the one that is chosen."""
_KEY_PROTOCOL = b"everywire.key."
"""The prefix of a subprotocol that holds a key: browsers cannot send a header with a WebSocket."""
_MEMBERS = frozenset(("x-amz-credential", "x-amz-signature", "x-amz-security-token"))
"""Query members of a presigned URL (Signature Version 4): signer, signature and session token."""


_SIGNATURE = b"AWS4-HMAC-SHA256"
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")


def shown_key(headers: Headers, *, beside: bool = False) -> bytes | None:
    """Returns the key that a request shows; None if there is none. It is a bearer token, the password of HTTP's Basic
    (RFC 7617), an X-Api-Key, or a WebSocket subprotocol. BadRequest for two different keys. With `beside`, an X-Api-Key is
    the key, and other credentials beside it are for the model to verify."""
    found = set[bytes]()
    named = set[bytes]()
    for name, value in headers:
        if name == _AUTHORIZATION:
            if (key := _authorized(value)) is not None:
                found.add(key)
        elif name == _API_KEY:
            named.add(value.strip(b" \t"))
        elif name == SUBPROTOCOL:
            found |= {offer.removeprefix(_KEY_PROTOCOL) for offer in _offers(value) if offer.startswith(_KEY_PROTOCOL)}
    if named and beside:
        found = named
    found |= named
    if len(found) > 1:
        raise BadRequest(
            "the request shows two keys that differ: send one, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
        )
    return found.pop() if found else None


def _authorized(value: bytes) -> bytes | None:
    scheme, _, said = value.partition(b" ")
    match scheme.lower():
        case b"bearer":
            return said.strip(b" \t")
        case b"basic":
            try:
                return base64.b64decode(said.strip(b" \t"), validate=True).partition(b":")[2]
            except binascii.Error:
                return b""  # no client has the empty key
        case _:
            return None


def is_signed(authorization: bytes) -> bool:
    """True if an Authorization field is an AWS signature, valid or not."""
    return authorization.startswith(_SIGNATURE)


def offered_protocols(headers: Headers) -> list[bytes]:
    """Returns the subprotocols that a WebSocket offers, in its order, without keys."""
    return [offer for offer in _all_offers(headers) if _TOKEN.fullmatch(offer) and not offer.startswith(_KEY_PROTOCOL)]


def chosen_protocol(headers: Headers, spoken: Collection[str]) -> str:
    """Returns the subprotocol to choose for a WebSocket: the first of its offers that its model speaks; empty: none. If the
    model names none and a key is offered, the first other one: browsers fail if none of their offers is chosen."""
    offered = offered_protocols(headers)
    if spoken:
        return next((name for offer in offered if (name := offer.decode()) in spoken), "")
    shows_key = any(offer.startswith(_KEY_PROTOCOL) for offer in _all_offers(headers))
    return offered[0].decode() if offered and shows_key else ""


def _all_offers(headers: Headers) -> list[bytes]:
    return [offer for name, value in headers if name == SUBPROTOCOL for offer in _offers(value)]


def _offers(protocols: bytes) -> list[bytes]:
    return [offer.strip(b" \t") for offer in protocols.split(b",")]


@final
class Door:
    """Decides which fields and query members of a request the models of the process see.

    `passes_credentials` is `access.pass_credentials`. `keys` and `signatures`: the gateway verifies them itself. Models
    never see a credential that the gateway has verified."""

    __slots__ = ("_keys", "_passes", "_signatures", "_stopped")

    def __init__(self, *, passes_credentials: bool = False, keys: bool = False, signatures: bool = False) -> None:
        self._passes, self._keys, self._signatures = passes_credentials, keys, signatures
        self._stopped = _NEVER if passes_credentials else _NEVER | _VERIFIED_BY_A_MODEL

    def fields(self, headers: Headers) -> dict[str, str]:
        """Returns a request's fields as text, by lower-case name. If a name is there twice, its last value."""
        shown: dict[str, str] = {}
        for name, value in headers:
            if name in self._stopped or (name == _AUTHORIZATION and self._opens(value, headers)):
                continue
            if name == SUBPROTOCOL and (self._keys or not self._passes):
                value = _without_keys(value)
                if not value:
                    continue
            if name == SUBPROTOCOL and (before := shown.get(SUBPROTOCOL.decode())):
                value = b"%b, %b" % (before.encode("latin-1"), value)  # one list in several fields (RFC 6455 section 11.3.4)
            shown[name.decode("latin-1")] = value.decode("latin-1")
        return shown

    def _opens(self, authorization: bytes, headers: Headers) -> bool:
        """True if the gateway verifies this field itself. A key in it is for the model if there is an X-Api-Key too."""
        if is_signed(authorization):
            return self._signatures
        return self._keys and _authorized(authorization) is not None and all(name != _API_KEY for name, _ in headers)

    def query(self, query: str) -> str:
        """Returns a query as it was sent, without credentials unless they pass."""
        return query if self._passes else without_credentials(query)


def without_credentials(query: str) -> str:
    """Returns the query without the credentials of a presigned URL. Other members stay as they were sent."""
    if "amz" not in unquote_plus(query).lower():
        return query
    return "&".join(member for member in query.split("&") if unquote_plus(member.partition("=")[0]).lower() not in _MEMBERS)


def _without_keys(protocols: bytes) -> bytes:
    offered = _offers(protocols)
    real = [offer for offer in offered if not offer.startswith(_KEY_PROTOCOL)]
    return protocols if len(real) == len(offered) else b", ".join(real)
