"""What every dialect needs: the models, which of them answers, and the call's metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, final

import trio

from gateway.config import Config
from gateway.errors import BadRequest, GatewayError, NotFound
from gateway.exchange import Exchange
from gateway.settings import ConfigError
from gateway.workers.worker import Worker
from models.convert import convertible
from models.messages import Family
from models.session import Call, Channel, Session
from protocols.events import Headers

T = TypeVar("T")


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
            ("bidi.default_model", self.config.bidi.default_model, Family.PARTS),
        ):
            if name:
                try:
                    self.named(name, family, setting.partition(".")[0])
                except GatewayError as e:
                    raise ConfigError(f"{setting}: {e.message}") from None

    def named(self, name: str, family: Family, dialect: str) -> Worker:
        """The model a request names. NotFound if there is none, BadRequest if it cannot answer this dialect."""
        worker = self.workers.get(name)
        if worker is None:
            raise NotFound(f"no model {name[:100]!r}; there are: {', '.join(sorted(self.workers)) or 'none'}")
        if not convertible(worker.spec.family, family):
            raise BadRequest(
                f"model {name!r} speaks {worker.spec.family.value} and cannot answer {dialect}, which speaks {family.value}"
            )
        return worker

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
    query: str = "",
    path: str = "",
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> Session[Any, Any]:
    """The session a model is called with, inside its slot: the channel, the call's metadata and its deadline."""
    return Session(channel, partial(_call_of, exchange, worker, query, path, parameters), deadline=exchange.deadline)


def _call_of(exchange: Exchange, worker: Worker, query: str, path: str, parameters: Mapping[str, Any]) -> Call:
    return Call(
        id=exchange.id,
        model=worker.name,
        version=worker.spec.version,
        dialect=exchange.dialect,
        path=path or exchange.path.decode("latin-1"),
        query=query or exchange.query.decode("latin-1"),
        headers=_Fields(exchange.request.headers),
        parameters=parameters,
    )


@final
class _Fields(Mapping[str, str]):
    """A request's fields as text, decoded when somebody looks; of fields of one name, the last."""

    __slots__ = ("_decoded", "_raw")

    def __init__(self, raw: Headers) -> None:
        self._raw = raw
        self._decoded: dict[str, str] | None = None

    def _text(self) -> dict[str, str]:
        if self._decoded is None:
            self._decoded = {name.decode("latin-1"): value.decode("latin-1") for name, value in self._raw}
        return self._decoded

    def __getitem__(self, name: str) -> str:
        return self._text()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._text())

    def __len__(self) -> int:
        return len(self._text())

    def __repr__(self) -> str:
        return repr(self._text())


# Above this many bytes or numbers a codec takes longer than others should wait for their turn.
_LONG = 256 * 1024


async def codec(size: int, call: Callable[[], T]) -> T:
    """Runs a pure codec step over `size` bytes or elements: here if it is short, in a thread if the loop would feel it.

    A thread is waited for also when the exchange is cancelled: until it returns it holds the body, and so must the byte
    budget. The limits on JSON and bodies bound the step; the wire's ending does not wait for it.
    """
    if size <= _LONG:
        return call()
    return await trio.to_thread.run_sync(call)


def text_header(exchange: Exchange, name: bytes) -> str:
    """A header's value, empty where it is absent."""
    value = exchange.header(name)
    return "" if value is None else value.decode("latin-1")
