"""Credentials stop at the door: the fields and query members of a request that no model is shown."""

from __future__ import annotations

from typing import final
from urllib.parse import unquote_plus

from protocols.events import Headers

_VERIFIED_BY_A_MODEL = frozenset((b"authorization", b"x-amz-security-token", b"cookie"))
"""Fields that `access.pass_credentials` shows to a model in the process, which then verifies its callers itself."""
_NEVER = frozenset((b"proxy-authorization", b"x-api-key"))
_PROTOCOLS = b"sec-websocket-protocol"
_KEY_PROTOCOL = b"everywire.key."
"""The prefix of a subprotocol that is a key: browsers cannot send a header with a WebSocket."""
_MEMBERS = frozenset(("x-amz-credential", "x-amz-signature", "x-amz-security-token"))
"""Query members of a presigned URL (Signature Version 4): signer, signature and session token."""


@final
class Door:
    """Lets fields and queries pass to the models of the process; `passes_credentials` is `access.pass_credentials`."""

    __slots__ = ("_passes", "_stopped")

    def __init__(self, *, passes_credentials: bool = False) -> None:
        self._passes = passes_credentials
        self._stopped = _NEVER if passes_credentials else _NEVER | _VERIFIED_BY_A_MODEL

    def fields(self, headers: Headers) -> dict[str, str]:
        """A request's fields as text, by lower-case name; of fields of one name, the last."""
        shown: dict[str, str] = {}
        for name, value in headers:
            if name in self._stopped:
                continue
            if name == _PROTOCOLS and not self._passes:
                value = _without_keys(value)
                if not value:
                    continue
            shown[name.decode("latin-1")] = value.decode("latin-1")
        return shown

    def query(self, query: str) -> str:
        """A query as it was sent, without the members that are credentials."""
        return query if self._passes else without_credentials(query)


def without_credentials(query: str) -> str:
    """The query without the members of a presigned URL that are credentials; the others as they were sent."""
    if "amz" not in unquote_plus(query).lower():
        return query
    return "&".join(member for member in query.split("&") if unquote_plus(member.partition("=")[0]).lower() not in _MEMBERS)


def _without_keys(protocols: bytes) -> bytes:
    offered = [offer.strip(b" \t") for offer in protocols.split(b",")]
    real = [offer for offer in offered if not offer.startswith(_KEY_PROTOCOL)]
    return protocols if len(real) == len(offered) else b", ".join(real)
