"""The paths at which OpenAI's clients open WebSockets, and the model that a WebSocket's path or query names."""

from __future__ import annotations

import posixpath
import re
from typing import Literal, TypeAlias
from urllib.parse import unquote

from gateway.config import Config
from gateway.core.exchange import Exchange
from gateway.dialects.call import query_members
from gateway.errors import BadRequest

Reach: TypeAlias = Literal["outside-v1", "all", "none"]

_OPENAI = re.compile(r"/v1(/.*)?|/endpoints/[^/]+/(inference-components/[^/]+/)?openai(/.*)?", re.DOTALL)
_NAMING = re.compile(r"/(endpoints|models|v2/models|predictions)/([^/]+)(/.*)?", re.DOTALL)
_SHOWN = 100


def reach_of(exchange: Exchange, config: Config) -> Reach:
    """The paths at which WebSockets reach a model: `websocket.any_path`, and all on `listen.bidi_port`."""
    if exchange.owner.on_bidi_port:
        return "all"
    match config.websocket.any_path:
        case bool(written):
            return "outside-v1" if written else "none"
        case reach:
            return reach


def is_openais(exchange: Exchange) -> bool:
    """True if the path is one of OpenAI's API, however it is written."""
    return _OPENAI.fullmatch(_plain(exchange.path)) is not None


def named_by_path(exchange: Exchange) -> tuple[str, str]:
    """The endpoint and the model that the path names; empty if it names none."""
    match = _NAMING.fullmatch(_plain(exchange.path))
    if match is None:
        return "", ""
    return (match[2], "") if match[1] == "endpoints" else ("", match[2])


def named_by_query(exchange: Exchange) -> str:
    """The model that the query names; empty if it names none. BadRequest if it names two, or has too many members."""
    if not exchange.query:
        return ""
    names = sorted({value for name, value in query_members(exchange) if name == "model"})
    if len(names) > 1:
        raise BadRequest(f"the query names two models, {names[0][:_SHOWN]!r} and {names[1][:_SHOWN]!r}: name one")
    return "".join(names)


def _plain(path: bytes) -> str:
    """The path without percent-encoding, doubled slashes, and segments of dots."""
    return posixpath.normpath("/" + unquote(path.decode("latin-1")).lstrip("/"))
