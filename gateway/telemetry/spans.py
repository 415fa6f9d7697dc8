"""OpenTelemetry spans: one for each exchange, with child spans for its wait for a slot and its model's work."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any, TypeAlias, final

import trio
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.addresses import UNIX, ip_address, split_port
from gateway.core.exchange import Exchange
from gateway.errors import Ending
from gateway.telemetry.observer import peer_of
from gateway.telemetry.trace_fields import made_by
from gateway.version import version
from gateway.wires.asgi import ASGICall
from models.spec import Model, ModelSpec
from protocols.events import Headers
from protocols.request_ids import client_request_id

if TYPE_CHECKING:
    from models.session import Session

log = logging.getLogger("gateway.spans")

# RFC 9110 section 9, RFC 5789: all other methods share a name, or a client could make any number of names
_METHODS = {m.encode(): m for m in ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH")}
_VERSIONS = {b"1.0": "1.0", b"1.1": "1.1", b"2": "2", b"2.0": "2", b"3": "3", b"3.0": "3"}
_SCHEMES = {b"http": "http", b"https": "https", b"ws": "ws", b"wss": "wss"}
# Failures that are not the client's fault. LMI and SageMaker answer 424 if the model has failed.
_FAILED_DEPENDENCY = 424
# The gRPC status codes that OpenTelemetry's conventions count as errors of a server.
_GRPC_FAILURES = frozenset({2, 4, 12, 13, 14, 15})
_FAILURES = frozenset({Ending.MODEL_ERROR, Ending.DEADLINE, Ending.DRAINED, Ending.OPERATOR, Ending.LOST})
# W3C Trace Context, section 3.3.1. An invalid list is dropped here: OpenTelemetry would log its text, which a client
# chooses, as often as it likes.
_TRACESTATE_LENGTH, _TRACESTATE_MEMBERS = 512, 32
_MEMBER = re.compile(
    rb"([a-z][_0-9a-z*/-]{0,255}|[a-z0-9][_0-9a-z*/-]{0,240}@[a-z][_0-9a-z*/-]{0,13})="
    rb"[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)
_TRACEPARENT_LENGTH = 512  # OpenTelemetry's limit; version 00 has 55 characters, later versions may have more
_W3C = TraceContextTextMapPropagator()

Work: TypeAlias = Callable[[Exchange], Coroutine[Any, Any, None]]
Tell: TypeAlias = Callable[[Exchange], None]


@final
class Spans:
    """Makes the spans of one gateway, from a provider of the program around it.

    A gateway that traces wraps its work on exchanges with `around`; without tracing that work runs bare. Workers call
    `model`, `batched` and `waited`. A span is current in its task's context. Each exchange has a context of its own, so a
    span need not be detached from it. Errors of a provider, a sampler or a processor are logged, and never fail an
    exchange.
    """

    def __init__(
        self, provider: TracerProvider, route_of: Callable[[Exchange], str], is_probe: Callable[[Exchange], bool]
    ) -> None:
        """`route_of` returns the path of an exchange's route; empty if it has none. `is_probe` returns True for a request
        for health: it has no span, unless its client's trace is sampled."""
        self._tracer = provider.get_tracer("everywire", version())
        self._route_of, self._is_probe = route_of, is_probe
        self._exchanges: dict[Exchange, Span] = {}
        self._batched: dict[Session[Any, Any], Span] = {}
        """The spans of calls whose requests run in batches."""

    # -- an exchange -------------------------------------------------------------------------------------------------

    def around(self, work: Work, opened: Tell, closed: Tell) -> tuple[Work, Tell, Tell]:
        """Wraps the three functions: each exchange has a span from its opening to its closing, current while `work` runs.
        `work` must run in a context that is the exchange's alone."""

        def opened_span(exchange: Exchange) -> None:
            opened(exchange)
            try:
                if (span := self._start(exchange)) is not None:
                    self._exchanges[exchange] = span
            except Exception:
                _log_failure()

        async def work_in_span(exchange: Exchange) -> None:
            span = self._exchanges.get(exchange)
            if span is not None:
                contexts.attach(trace.set_span_in_context(span, Context()))
                made_by(_outgoing)
            await work(exchange)

        def closed_span(exchange: Exchange) -> None:
            closed(exchange)
            span = self._exchanges.pop(exchange, None)
            if span is not None:
                try:
                    if span.is_recording():
                        _tell(span, exchange)
                    span.end()
                except Exception:
                    _log_failure()

        return work_in_span, opened_span, closed_span

    def _start(self, exchange: Exchange) -> Span | None:
        parent = _parent_of(exchange)
        if self._is_probe(exchange) and not trace.get_current_span(parent).get_span_context().trace_flags.sampled:
            return None
        request, route = exchange.request, self._route_of(exchange)
        method = _METHODS.get(request.method, "_OTHER")
        attributes: dict[str, str | int] = {
            "http.request.method": method,
            "url.scheme": _SCHEMES.get(request.scheme, "http"),
            "network.protocol.version": _VERSIONS.get(request.version, "1.1"),
            "everywire.exchange": exchange.id,
        }
        if own := client_request_id(exchange.fields):
            attributes["client_request_id"] = own
        name = _METHODS.get(request.method, "HTTP")
        if route:
            attributes["http.route"] = route
            name = f"{name} {route}"
        client, port = split_port(peer_of(exchange))
        if ip_address(client) is not None or client.startswith(UNIX):
            attributes["client.address"] = client
        if port is not None:
            attributes["client.port"] = port
        ago = exchange.owner.clock() - exchange.started_at
        since = time_ns() - int(ago * 1e9)
        return self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=since)

    def fields(self, exchange: Exchange) -> Mapping[str, str]:
        """Returns the fields that name the exchange's span in its access line."""
        span = self._exchanges.get(exchange)
        context = trace.INVALID_SPAN_CONTEXT if span is None else span.get_span_context()
        if not context.is_valid:
            return {}
        return {"trace_id": trace.format_trace_id(context.trace_id), "span_id": trace.format_span_id(context.span_id)}

    # -- a model -----------------------------------------------------------------------------------------------------

    def waited(self, model: str, asked: int) -> None:
        """Makes a span for the current exchange's wait for a slot, which began at `asked` on `perf_counter_ns`."""
        try:
            now = time_ns()
            since = now - (perf_counter_ns() - asked)
            self._tracer.start_span("wait for slot", attributes={"everywire.model": model}, start_time=since).end(now)
        except Exception:
            _log_failure()

    def model(self, spec: ModelSpec, model: Model) -> Model:
        """Wraps the model with a span around each call."""
        name, attributes = f"model {spec.name}", _attributes(spec)

        async def traced(session: Session[Any, Any], /) -> None:
            span = self._child(name, attributes)
            if span is None:
                await model(session)
                return
            below: Any = session.channel
            if below is not session and span.is_recording():  # a channel that is the session has one answer: its end
                session.channel = (_FirstItemAtOnce if hasattr(below, "try_send") else _FirstItem)(session, span)
            if spec.batching is not None:
                self._batched[session] = span
            try:
                await _inside(span, model, session)
            finally:
                self._batched.pop(session, None)
                if isinstance(session.channel, _FirstItem):  # it refers to the session: a cycle would keep memory
                    session.channel = below

        return traced

    def batched(self, spec: ModelSpec) -> ModelSpec:
        """Wraps a model that is called with batches, with a span around each batch. That span begins a new trace, and is
        linked with the spans of its calls, in both directions."""

        @asynccontextmanager
        async def load() -> AsyncIterator[Model]:
            async with spec.load() as model:
                yield _Batches(model, partial(self._batch_span, f"batch {spec.name}", _attributes(spec)))

        return replace(spec, load=load)

    def _batch_span(self, name: str, attributes: Mapping[str, Any], joined: Sequence[Session[Any, Any]]) -> Span | None:
        calls = [self._batched[asked] for asked in joined if asked in self._batched]
        return self._child(name, {**attributes, "everywire.batch.requests": len(joined)}, calls)

    def _child(self, name: str, attributes: Mapping[str, Any], calls: Sequence[Span] | None = None) -> Span | None:
        """Makes a child span of the current one. With `calls`, makes a span of a new trace, linked with theirs. None if that
        fails."""
        try:
            if calls is None:
                return self._tracer.start_span(name, attributes=attributes)
            links = [Link(call.get_span_context()) for call in calls]
            span = self._tracer.start_span(name, Context(), attributes=attributes, links=links)
            for call in calls:
                call.add_link(span.get_span_context())
            return span
        except Exception:
            _log_failure()
            return None


async def _inside(span: Span, model: Model, session: Session[Any, Any]) -> None:
    """Calls the model with the span current, and restores the context afterwards: a model may leave its own span current."""
    before = contexts.get_current()
    contexts.attach(trace.set_span_in_context(span, before))
    try:
        await model(session)
    except BaseException as e:
        if span.is_recording():
            _blame(span, e, session)
        raise
    finally:
        contexts.attach(before)
        try:
            span.end()
        except Exception:
            _log_failure()


def _blame(span: Span, error: BaseException, session: Session[Any, Any]) -> None:
    """Records the type of the model's exception, not its text, which may have a client's data."""
    kinds = {type(leaf) for leaf in _leaves(error)}
    complete = session.channel.complete
    if kinds == {trio.Cancelled}:
        if complete:
            return  # the gateway stopped it because its text was complete
        span.set_attribute("everywire.cancelled", True)
        return
    kinds -= {trio.Cancelled, trio.EndOfChannel}  # it read past the end of input, as many loops do
    if complete:
        kinds.discard(trio.ClosedResourceError)  # it sent more after its answer was complete
    if kinds:
        span.set_status(StatusCode.ERROR)
        span.set_attribute("error.type", ", ".join(sorted(kind.__name__ for kind in kinds)))


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def _attributes(spec: ModelSpec) -> dict[str, str]:
    attributes = {"everywire.model": spec.name}
    if spec.version:
        attributes["everywire.model.version"] = spec.version
    return attributes


def _tell(span: Span, exchange: Exchange) -> None:
    ending, status = exchange.ending, exchange.outbound.status
    assert ending is not None
    attributes: dict[str, str | int] = {"everywire.wire": exchange.wire.name, "everywire.ending": ending.value}
    if exchange.dialect:
        attributes["everywire.dialect"] = exchange.dialect
    if exchange.model:
        attributes["everywire.model"] = exchange.model
    if (instance := getattr(exchange, "instance", None)) is not None:
        attributes["everywire.instance"] = instance
    if status:
        attributes["http.response.status_code"] = status
    if status >= 500 or status == _FAILED_DEPENDENCY or (ending in _FAILURES and status < 400):
        attributes["error.type"] = str(status) if status >= 400 else ending.value
        span.set_status(StatusCode.ERROR)
    if exchange.dialect and (called := getattr(exchange, "own_status", None)) is not None:  # else its path has no route
        service, _, method = exchange.path[1:].decode("latin-1").rpartition("/")
        attributes |= {
            "rpc.system": "grpc", "rpc.service": service, "rpc.method": method, "rpc.grpc.status_code": int(called)
        }  # fmt: skip
        if called in _GRPC_FAILURES:
            attributes["error.type"] = str(int(called))
            span.set_status(StatusCode.ERROR)
    span.set_attributes(attributes)


@final
class _Batches:
    """A model that is called with batches, each in a span. Its other attributes are the model's."""

    def __init__(self, model: Model, span: Callable[[Sequence[Session[Any, Any]]], Span | None]) -> None:
        """`span` makes the span of a batch of sessions."""
        self._model, self._span = model, span

    async def __call__(self, session: Session[Any, Any], /) -> None:
        channel: Any = session.channel
        span = self._span(channel.joined)
        if span is None:
            await self._model(session)
        else:
            await _inside(span, self._model, session)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _FirstItem:
    """A session's channel until the model's first message is sent: it adds an event to the span then."""

    def __init__(self, session: Session[Any, Any], span: Span) -> None:
        below: Any = session.channel
        self._session, self._below, self._span = session, below, span
        self._told, self.receive = False, below.receive

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    async def send(self, message: Any, /) -> None:
        await self._below.send(message)
        if not self._told:
            self._tell()

    def _tell(self) -> None:
        self._told = True
        if self._session.channel is self:
            self._session.channel = self._below
        try:
            self._span.add_event("first item")
        except Exception:
            _log_failure()


@final
class _FirstItemAtOnce(_FirstItem):
    """A `_FirstItem` for a channel that can also send without waiting."""

    def try_send(self, message: Any, /) -> bool:
        sent: bool = self._below.try_send(message)
        if sent and not self._told:
            self._tell()
        return sent


# -- from and to others ------------------------------------------------------------------------------------------------


def _parent_of(exchange: Exchange) -> Context:
    """Returns the context of the exchange's parent span: of the ASGI application around the gateway, or the client's.
    Nothing else of the current context is kept."""
    if type(exchange.owner) is ASGICall:
        span = trace.get_current_span()
        if span.get_span_context().is_valid:
            return trace.set_span_in_context(span, Context())
    if b"traceparent" not in exchange.fields:
        return Context()
    parents = exchange.header_values(b"traceparent")
    if len(parents) > 1 or len(parents[0]) > _TRACEPARENT_LENGTH:
        return Context()
    carrier = {"traceparent": parents[0].decode("latin-1")}
    state = b",".join(exchange.header_values(b"tracestate"))
    if state and _is_tracestate(state):
        carrier["tracestate"] = state.decode("latin-1")
    return _W3C.extract(carrier, Context())


def _is_tracestate(value: bytes) -> bool:
    if len(value) > _TRACESTATE_LENGTH:
        return False
    members = [stripped for member in value.split(b",") if (stripped := member.strip(b" \t"))]
    keys = {member.partition(b"=")[0] for member in members}
    return len(keys) == len(members) <= _TRACESTATE_MEMBERS and all(map(_MEMBER.fullmatch, members))


def _outgoing() -> Headers:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return [(name.encode(), value.encode()) for name, value in carrier.items()]


def _log_failure() -> None:
    log.exception("a span could not be made or completed")
