"""The id that a client gives its own request: the fields that have it, and those of the answer that repeat it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from protocols.events import Headers

FIELDS = (b"x-client-request-id", b"x-request-id")
"""The fields that may have it, the first that is valid counts: OpenAI's clients name the one, proxies the other."""
_ID = re.compile(rb"[!-~]{1,128}")


def client_request_id(fields: Mapping[bytes, bytes]) -> str:
    """Returns the client's id of a request with these fields: 1 to 128 visible ASCII characters; empty if it has none."""
    for name in FIELDS:
        value = fields.get(name)
        if value is not None and _ID.fullmatch(value):
            return value.decode("ascii")
    return ""


def echoed(fields: Mapping[bytes, bytes]) -> Headers:
    """Returns the fields of an answer that repeat the client's id; none if it has given none."""
    if FIELDS[0] not in fields and FIELDS[1] not in fields:
        return ()
    own = client_request_id(fields)
    return ((FIELDS[0], own.encode("ascii")),) if own else ()
