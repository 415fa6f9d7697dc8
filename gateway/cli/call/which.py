"""The error of a call without a model: an example, and the models of the server if that names them."""

from __future__ import annotations

import json
import shlex
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from gateway.untrusted_text import escape

_PATIENCE = 1.0  # seconds
_MOST = 65_536  # bytes of an index
_SHOWN = 10  # names


def which_model(url: str) -> str:
    """The error text for a command line without a model."""
    names = names_at(url)
    model = "lm" if "lm" in names or not names else names[0]
    said = f'Which model? For example: everywire call {shlex.quote(model)} "Return the".'
    if not names:
        return said
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{said} This server has: {', '.join(names[:_SHOWN])}{more}."


def names_at(url: str) -> list[str]:
    """The models that `GET /` of a server in clear names; none if it demands a key, or does not answer within a second."""
    try:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            return []
        with closing(HTTPConnection(parts.hostname, parts.port, timeout=_PATIENCE)) as connection:
            connection.request("GET", f"{parts.path.rstrip('/')}/", headers={"accept": "application/json"})
            names = json.loads(connection.getresponse().read(_MOST))["models"]
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return []
    return [escape(name)[:128] for name in names if isinstance(name, str)] if isinstance(names, list) else []
