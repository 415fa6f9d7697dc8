"""A call as its model sees it: its session, and the metadata of its request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias, final
from urllib.parse import parse_qsl

import msgspec

from gateway.core.exchange import Exchange
from gateway.credentials import Door, chosen_protocol
from gateway.errors import BadRequest
from gateway.workers.worker import Worker
from models.session import Call, Channel, Session
from protocols.events import Headers
from protocols.floods import QUERY_MEMBERS
from protocols.grpc.metadata import decode_metadata

NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({})
Parameters: TypeAlias = Mapping[str, Any] | Callable[[Exchange], Mapping[str, Any]]
"""The parameters of a call, or the function that makes them."""


def session_of(
    exchange: Exchange,
    worker: Worker,
    channel: Channel[Any, Any],
    *,
    query: str | None = None,
    path: str = "",
    parameters: Parameters = NO_PARAMETERS,
) -> Session[Any, Any]:
    """The session that a model is called with, inside its slot: the channel, the call's metadata and its deadline. Without
    `query` and `path`, the session has the request's own. `parameters` may be a function, which is called once the model
    reads the call."""
    session = Session(channel, _CallOf(exchange, worker, query, path, parameters))
    session.deadline = exchange.deadline
    return session


@final
class _CallOf(msgspec.Struct, frozen=True):
    """`call_of` with its arguments. A partial would take three times the memory, for as long as the session lasts."""

    exchange: Exchange
    worker: Worker
    query: str | None
    path: str
    parameters: Parameters

    def __call__(self) -> Call:
        exchange, parameters = self.exchange, self.parameters
        made = parameters(exchange) if callable(parameters) else parameters
        return call_of(exchange, self.worker, self.query, self.path, made)


def call_of(
    exchange: Exchange,
    worker: Worker,
    query: str | None = None,
    path: str = "",
    parameters: Mapping[str, Any] = NO_PARAMETERS,
) -> Call:
    """The call as its model sees it: without credentials, unless `access.pass_credentials` is set."""
    door = exchange.owner.door
    return Call(
        id=exchange.id,
        model=worker.name,
        version=worker.spec.version,
        dialect=exchange.dialect,
        path=path or exchange.path.decode("latin-1"),
        query=door.query(exchange.query.decode("latin-1") if query is None else query),
        headers=_Fields(exchange.request.headers, door, metadata=exchange.dialect == "grpc"),
        parameters=parameters,
        party="" if exchange.key is None else exchange.key.name,
        client_certificate=exchange.owner.client_certificate,
        subprotocol=_subprotocol(exchange, worker) if exchange.request.upgrade else "",
    )


def _subprotocol(exchange: Exchange, worker: Worker) -> str:
    return chosen_protocol(exchange.request.headers, worker.spec.subprotocols)


@final
class _Fields(Mapping[str, str]):
    """A request's fields as its model sees them, decoded on the first access. The bytes of a `-bin` field of gRPC's metadata
    are shown as characters of Latin-1; a value that is not base64 is shown as it came."""

    __slots__ = ("_decoded", "_door", "_metadata", "_raw")

    def __init__(self, raw: Headers, door: Door, *, metadata: bool) -> None:
        self._raw, self._door, self._metadata = raw, door, metadata
        self._decoded: dict[str, str] | None = None

    def _text(self) -> dict[str, str]:
        if self._decoded is None:
            self._decoded = self._door.fields(self._raw)
            if self._metadata:
                binary = decode_metadata(tuple(field for field in self._raw if field[0].endswith(b"-bin")))
                self._decoded |= {name: str(value, "latin-1") for name, value in binary if type(value) is bytes}
        return self._decoded

    def __getitem__(self, name: str) -> str:
        return self._text()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._text())

    def __len__(self) -> int:
        return len(self._text())

    def __repr__(self) -> str:
        return repr(self._text())


# Fields, by how their names begin, that a request must not have twice: two readers of the head may each take another one.
_SINGLE = (b"x-amzn-sagemaker-", b"content-type", b"accept")


def single_fields(exchange: Exchange) -> dict[str, str]:
    """The request's fields by lower-case name. BadRequest if a field that SageMaker's operations read is there twice."""
    fields: dict[str, str] = {}
    for raw, value in exchange.request.headers:
        name = raw.decode("latin-1")
        if name in fields and raw.startswith(_SINGLE):
            raise BadRequest(f"header {name[:100]} is there twice")
        fields[name] = value.decode("latin-1")
    return fields


def text_header(exchange: Exchange, name: bytes) -> str:
    """A header's value, empty where it is absent."""
    value = exchange.header(name)
    return "" if value is None else value.decode("latin-1")


def query_members(exchange: Exchange) -> list[tuple[str, str]]:
    """The members of a request's query that have a value, in their order. BadRequest for too many."""
    try:
        return parse_qsl(exchange.query.decode("latin-1"), max_num_fields=QUERY_MEMBERS)
    except ValueError:  # the only one that it raises for a text of latin-1
        raise BadRequest(f"the query has more than {QUERY_MEMBERS} members") from None
