"""Row: a method and a path of a dialect, its handler, who may ask, how its clients are refused. Route: a request's row."""

from __future__ import annotations

import enum
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, final

import msgspec

from gateway.core.exchange import Exchange
from gateway.errors import GatewayError
from protocols.events import Head

Handler: TypeAlias = Callable[..., Coroutine[Any, Any, None]]
"""Answers an exchange: called with it and what its path captures, and awaited."""
Refuse: TypeAlias = Callable[[Exchange, GatewayError], None]
"""Says an error that comes before the head: it commits and finishes the exchange."""

WEBSOCKET = "websocket"
"""Stands for the method of a WebSocket upgrade."""


class Needs(enum.Enum):
    """The credentials that a request needs where the server does not answer everybody (`gateway.serving.access`)."""

    NOTHING = "nothing"
    """Health: anybody may ask."""
    MODEL_READY = "model-ready"
    """As `INFER`, unless `access.open` has it."""
    METADATA = "metadata"
    """As `INFER`, unless `access.open` has it: which models there are, and what they take."""
    INFER = "infer"
    """A key, a certificate or a signature."""
    CONTROL = "control"
    """As `INFER`, with a key of that scope: for requests that change the models in service, or the server itself."""


@final
class CallKind(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that are told from all others by their content type. A call of a kind, at any path, is one of the rows of its
    kind, or refused in the words of its kind."""

    name: str
    """As people say it."""
    media_type: str
    is_of: Callable[[bytes], bool]
    """True if a content type is that of these calls."""
    read: Callable[[Head], Any]
    """Reads a head for the handler, which takes the result as its one argument after the exchange; read once for each
    head."""
    refuse: Refuse


@final
class Row(msgspec.Struct, frozen=True):
    """One method of one path, with the handler that answers it."""

    method: str
    """An HTTP method, or `WEBSOCKET`. GET is HEAD too."""
    path: str
    """`{name}` captures one segment, which `handler` takes under that name; one that is the only one, as its first argument
    after the exchange. `*` is any path that has no upgrade of its own."""
    handler: Handler
    dialect: str = ""
    """The dialect of its exchanges once the handler is called: a handler that finds another one in the body claims it."""
    refuse: Refuse | None = None
    """How its clients read an error, from the head on; None for the plain one."""
    refuses_method: bool = True
    """True if a wrong method is refused in those words too."""
    under: str = ""
    """The prefix of its API: `refuse` says also that nothing is answered there or below, and names what is."""
    always: bool = False
    """True if it answers while the server drains or is short of memory: a health check needs its answer then, in its own
    words."""
    needs: Needs = Needs.INFER
    """The credentials that a request needs."""
    kind: CallKind | None = None
    """The kind of its calls, where that is told by their content type."""
    signed: bool = False
    """True if an AWS signature, which the handler verifies, is enough to call it."""


Route: TypeAlias = tuple[Row, Handler, dict[str, Any]]
"""The answer to a head: the row, its handler with what the head asks, and what the path captures."""
