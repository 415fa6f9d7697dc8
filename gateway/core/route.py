"""Row: a method and path of a dialect, with its handler, access rule and refusals. Route: a request's row."""

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
"""Answers an error that comes before the head: it commits and finishes the exchange."""

WEBSOCKET = "websocket"
"""Stands for the method of a WebSocket upgrade."""


class Needs(enum.Enum):
    """The access that a request needs if the server requires credentials: `gateway.serving.access`."""

    NOTHING = "nothing"
    """No credentials, for health."""
    MODEL_READY = "model-ready"
    """As `INFER`, unless `access.open` lists it."""
    METADATA = "metadata"
    """As `INFER`, unless `access.open` lists it: for the list of models and their tensors."""
    INFER = "infer"
    """A key, a certificate or a signature."""
    CONTROL = "control"
    """As `INFER`, and a key must have this scope: for changes of the models or of the server."""


@final
class CallKind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of calls that have a content type of their own. A call of the kind goes to one of the kind's rows, or is
    refused in its format, whatever its path is."""

    name: str
    """The name that people read."""
    media_type: str
    is_of: Callable[[bytes], bool]
    """True if a content type is of this kind."""
    read: Callable[[Head], Any]
    """Reads a head for the handler, which takes the result as its one argument after the exchange; once for each head."""
    refuse: Refuse


@final
class Row(msgspec.Struct, frozen=True):
    """One method of one path, and the handler that answers it."""

    method: str
    """An HTTP method, or `WEBSOCKET`. A row for GET also answers HEAD."""
    path: str
    """A path. `{name}` captures one segment: `handler` takes it by that name, or, if it is the only one, as its first
    argument after the exchange. `*` is any path that has no upgrade of its own."""
    handler: Handler
    dialect: str = ""
    """The dialect of its exchanges once its handler is called. A handler that finds another one in the body claims the
    exchange for that."""
    refuse: Refuse | None = None
    """Answers errors in the format of its clients, as soon as the head is known; None: the plain format."""
    refuses_method: bool = True
    """True if `refuse` answers a wrong method too."""
    under: str = ""
    """The prefix of its API: `refuse` also answers unknown paths there and below, and names the known ones. `{name}` stands
    for any segment."""
    always: bool = False
    """True if it answers also while the server drains or is short of memory, as health does, in its own format."""
    needs: Needs = Needs.INFER
    """The access that a request needs."""
    kind: CallKind | None = None
    """The kind of its calls, if their content type decides it."""
    slashes: bool = False
    """True if a capture at the end of its path takes slashes too."""
    signed: bool = False
    """True if an AWS signature, which its handler verifies, gives access."""

    @property
    def is_health(self) -> bool:
        """True for health, which says nothing secret: probes have no key, and know no name of the server."""
        return self.needs is Needs.NOTHING


Route: TypeAlias = tuple[Row, Handler, dict[str, Any]]
"""The row of a request, its handler with what the head asks, and what the path captures."""
