"""What every dialect needs: the models, which of them answers, and the call's metadata."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, final

from gateway.codecs.threads import beside as beside
from gateway.config import Config
from gateway.config.load import ConfigError
from gateway.core.credentials import Door
from gateway.core.exchange import Exchange
from gateway.errors import BadRequest, Ending, GatewayError, NotFound
from gateway.workers.worker import Worker
from models.convert import convertible
from models.messages import Family
from models.session import Call, Channel, Session
from protocols.aws import invoke
from protocols.events import Buffer, Headers

log = logging.getLogger("gateway.dialects")

T = TypeVar("T")

NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({})


@final
class Models:
    """The models in service, by name; and the rule that picks one where a route names none."""

    def __init__(self, config: Config, workers: Mapping[str, Worker]) -> None:
        self.config, self.workers = config, workers

    def check_defaults(self) -> None:
        """ConfigError for a default model that is not there or cannot answer its dialect: a mistake of the operator's,
        found before any client does."""
        for setting, name, family in (
            ("lmi.default_model", self.config.lmi.default_model, Family.TEXT),
            ("openai.default_model", self.config.openai.default_model, Family.TEXT),
            ("bidi.default_model", self.config.bidi.default_model, Family.PARTS),
        ):
            if name:
                try:
                    self.named(name, family, setting.partition(".")[0])
                except GatewayError as e:
                    raise ConfigError(f"{setting}: {e.message}") from None
        name = self.config.sagemaker.default_model
        if name and name not in self.workers:
            raise ConfigError(f"sagemaker.default_model: {self._unknown(name)}")

    def _unknown(self, name: str) -> str:
        return f"no model {name[:100]!r}; there are: {', '.join(sorted(self.workers))[:1000] or 'none'}"

    def invoked(self, name: str) -> Worker:
        """The model of a route that takes every family in its own form. NotFound if there is none."""
        worker = self.workers.get(name)
        if worker is None:
            raise NotFound(self._unknown(name))
        return worker

    def of_invocations(self) -> Worker:
        """The model of /invocations where the request does not say: a default, the only one, or the only one of text."""
        name = self.config.sagemaker.default_model or self.config.lmi.default_model
        if name:
            return self.invoked(name)
        if len(self.workers) == 1:
            return next(iter(self.workers.values()))
        return self.unnamed("", Family.TEXT, "sagemaker")

    def named(self, name: str, family: Family, dialect: str) -> Worker:
        """The model a request names. NotFound if there is none, BadRequest if it cannot answer this dialect."""
        worker = self.workers.get(name)
        if worker is None:
            raise NotFound(self._unknown(name))
        self.check_family(worker, family, dialect)
        return worker

    def check_family(self, worker: Worker, family: Family, dialect: str) -> None:
        """BadRequest for a model that cannot answer a dialect of that family."""
        if not convertible(worker.spec.family, family):
            raise BadRequest(
                f"model {worker.name!r} speaks {worker.spec.family.value} and cannot answer {dialect}, "
                f"which speaks {family.value}"
            )

    def unnamed(self, default: str, family: Family, dialect: str) -> Worker:
        """The model for a request that names none: the dialect's default, else the only one that fits."""
        if default:
            return self.named(default, family, dialect)
        speakers = [w for w in self.workers.values() if w.spec.family is family]
        fitting = speakers or [w for w in self.workers.values() if convertible(w.spec.family, family)]
        if len(fitting) == 1:
            return fitting[0]
        names = ", ".join(sorted(w.name for w in fitting))
        raise BadRequest(
            f"the request names no model and {len(fitting)} could answer: {names or 'none'}; "
            f"name one in the request or set {dialect}.default_model"
        )


def session_of(
    exchange: Exchange,
    worker: Worker,
    channel: Channel[Any, Any],
    *,
    query: str | None = None,
    path: str = "",
    parameters: Mapping[str, Any] = NO_PARAMETERS,
) -> Session[Any, Any]:
    """The session a model is called with, inside its slot: the channel, the call's metadata and its deadline. `query` and
    `path` are the request's own where the dialect has no others."""
    session = Session(channel, partial(call_of, exchange, worker, query, path, parameters))
    session.deadline = exchange.deadline
    return session


def call_of(
    exchange: Exchange,
    worker: Worker,
    query: str | None = None,
    path: str = "",
    parameters: Mapping[str, Any] = NO_PARAMETERS,
) -> Call:
    """The call as a session's model sees it: without credentials, unless `access.pass_credentials` is set."""
    door = exchange.owner.door
    return Call(
        id=exchange.id,
        model=worker.name,
        version=worker.spec.version,
        dialect=exchange.dialect,
        path=path or exchange.path.decode("latin-1"),
        query=door.query(exchange.query.decode("latin-1") if query is None else query),
        headers=_Fields(exchange.request.headers, door),
        parameters=parameters,
        client_certificate=exchange.owner.client_certificate,
    )


@final
class _Fields(Mapping[str, str]):
    """A request's fields as its models are shown them, decoded when somebody looks."""

    __slots__ = ("_decoded", "_door", "_raw")

    def __init__(self, raw: Headers, door: Door) -> None:
        self._raw, self._door = raw, door
        self._decoded: dict[str, str] | None = None

    def _text(self) -> dict[str, str]:
        if self._decoded is None:
            self._decoded = self._door.fields(self._raw)
        return self._decoded

    def __getitem__(self, name: str) -> str:
        return self._text()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._text())

    def __len__(self) -> int:
        return len(self._text())

    def __repr__(self) -> str:
        return repr(self._text())


LONG = 256 * 1024
"""Above this many bytes or numbers a codec takes longer than others should wait for their turn."""


async def codec(size: int, call: Callable[[], T]) -> T:
    """Runs a pure codec step over `size` bytes or elements: here if it is short, in a thread if the loop would feel it.

    A thread is waited for also when the exchange is cancelled: until it returns it holds the body, and so must the byte
    budget. The limits on JSON and bodies bound the step; the wire's ending does not wait for it.
    """
    if size <= LONG:
        return call()
    return await beside(call)


def reply_of(exchange: Exchange) -> dict[str, str]:
    """What a channel on this exchange offers as its `reply`."""
    if exchange.reply is None:
        exchange.reply = {}
    return exchange.reply


_FIELD_VALUE = re.compile(r"[\t -~]*")
_FIELD_LENGTH = 1024


def reply_value(exchange: Exchange, name: str, default: str = "") -> str:
    """What the model has set for a field of the head; the default where it has not, or not to what a field can carry."""
    value = default if exchange.reply is None else exchange.reply.get(name, default)
    if isinstance(value, str) and len(value) <= _FIELD_LENGTH and _FIELD_VALUE.fullmatch(value):
        return value.strip()
    log.warning("a model's header field was left out", extra={"id": exchange.id, "model": exchange.model, "field": name})
    return default


# what a model's head may say beside its content type, under the same names towards the platform and from it
_PASSED = (invoke.CUSTOM_ATTRIBUTES, invoke.NEW_SESSION_ID, invoke.CLOSED_SESSION_ID)


def reply_headers(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    """The fields that the model has put into its reply, beside the content type."""
    if not exchange.reply:
        return []
    return [(name.encode(), value.encode()) for name in _PASSED if (value := reply_value(exchange, name))]


JSON = (b"content-type", b"application/json")


def refusal_headers(error: GatewayError) -> Headers:
    """The fields of an error that is said before the head, in JSON: its own, and when to try again where that may help."""
    return (JSON, *error.headers, *error.retry)


class Wrapping(Protocol):
    """What a dialect answers instead of the exchange where its answer is put into another's form."""

    def in_band(self, says: Callable[[GatewayError], bytes]) -> None:
        """From now on the dialect can say an error in the middle of its body: so."""
        ...

    async def wait_room(self, n: int = 1) -> None: ...
    def start(self, status: int, headers: Headers) -> None: ...
    def push(self, *buffers: Buffer) -> None: ...
    def finish(self, ending: Ending = Ending.COMPLETE) -> None: ...
    def respond(self, status: int, headers: Headers, *buffers: Buffer, ending: Ending = Ending.COMPLETE) -> None: ...


# What must not be there twice: two who read the head would take it for two requests.
_SINGLE = (b"x-amzn-sagemaker-", b"content-type", b"accept")


def single_fields(exchange: Exchange) -> dict[str, str]:
    """The request's fields by lower-case name. BadRequest where one that SageMaker's operations read is there twice."""
    fields: dict[str, str] = {}
    for raw, value in exchange.request.headers:
        name = raw.decode("latin-1")
        if name in fields and raw.startswith(_SINGLE):
            raise BadRequest(f"header {name[:100]} is there twice")
        fields[name] = value.decode("latin-1")
    return fields


def octets(data: Buffer) -> Buffer:
    """The bytes of a buffer of any format and shape: itself where it is bytes already, and a copy only where they do not
    lie one after the other."""
    if type(data) is bytes:
        return data
    view = memoryview(data)
    if not view.c_contiguous:
        return view.tobytes()
    return view.cast("B") if view.nbytes else b""


def text_header(exchange: Exchange, name: bytes) -> str:
    """A header's value, empty where it is absent."""
    value = exchange.header(name)
    return "" if value is None else value.decode("latin-1")
