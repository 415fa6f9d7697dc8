"""Spans have the right parent on every wire and driver, also if exchanges share a connection, task, thread or batch."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
from opentelemetry import baggage, trace
from opentelemetry import context as contexts
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode
from trio.testing import wait_all_tasks_blocked

from gateway import client
from gateway.asgi import ASGIApp
from gateway.client.conversations import Conversation, SocketConversation
from gateway.client.questions import Question, bidirectional, infer, invoke, lmi
from gateway.config import BidiConfig, Config, ListenConfig, TracingConfig
from gateway.containers.connection import ContainerLimits
from gateway.containers.model import container_spec
from gateway.gateway import Gateway
from gateway.net.transport import MemoryTransport
from gateway.testing import memory_gateway
from gateway.testing.memory import MemoryGateway
from models.adapt import spec_of
from models.errors import ModelError
from models.messages import Family, InferRequest, InferResponse, Part, Prompt, Tensor, Token
from models.rolling import RollingBatch, rolling
from models.session import Session
from models.spec import Batching, ModelSpec
from protocols.events import Data, End, Response
from tests.gateway.sweep import SCENARIOS, TARGETS, sweep
from tests.gateway.ways import DRIVERS
from tests.models.steps import Counting

JSON: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)
EMPTY = contexts.Context()


class Traces:
    """A provider, and what became of its spans."""

    def __init__(self) -> None:
        self.provider = TracerProvider(shutdown_on_exit=False)
        self._ended = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._ended))
        self.tracer = self.provider.get_tracer("the model's own")

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._ended.get_finished_spans()

    def named(self, name: str, trace_id: int = 0) -> list[ReadableSpan]:
        return [s for s in self.spans if s.name == name and trace_id in (0, s.context.trace_id)]

    def one(self, name: str, trace_id: int = 0) -> ReadableSpan:
        (span,) = self.named(name, trace_id)
        return span

    def servers(self) -> list[ReadableSpan]:
        return [span for span in self.spans if span.kind is SpanKind.SERVER]

    def server(self) -> ReadableSpan:
        (span,) = self.servers()
        return span


@pytest.fixture(name="traces")
def _traces() -> Traces:
    return Traces()


@pytest.fixture(params=[True, False], ids=["leader", "waiting"], name="hub")
def _hub(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def parent(number: int, flags: int = 1) -> tuple[bytes, bytes]:
    """The field of a caller, whose trace and span have this number."""
    return b"traceparent", b"00-%032x-%016x-%02x" % (number, number, flags)


def traced(question: Question, number: int) -> Question:
    return replace(question, headers=(*question.headers, parent(number)))


def is_child(span: ReadableSpan, of: ReadableSpan) -> bool:
    return span.parent is not None and (span.parent.trace_id, span.parent.span_id) == (
        of.context.trace_id,
        of.context.span_id,
    )


def is_of_caller(span: ReadableSpan, number: int) -> bool:
    above = span.parent
    return above is not None and above.is_remote and (above.trace_id, above.span_id, span.context.trace_id) == (number,) * 3


def error_of(span: ReadableSpan) -> Any:
    assert span.attributes is not None
    assert (span.status.status_code is StatusCode.ERROR) == ("error.type" in span.attributes)
    assert span.status.description is None
    return span.attributes.get("error.type")


async def still() -> None:
    """Answers are read, and what comes after them is done."""
    await wait_all_tasks_blocked()


@asynccontextmanager
async def serving(
    traces: Traces, *models: Any, hub: bool = True, config: Config | None = None
) -> AsyncIterator[MemoryGateway]:
    """A gateway that traces; at the end nothing is left, of its spans neither."""
    async with memory_gateway(models, config, hub=hub, tracer_provider=traces.provider, check=True) as memory:
        yield memory
        spans: Any = memory.gateway.supervisor._spans
    assert (spans._exchanges, spans._batched) == ({}, {})


async def shout(prompt: Prompt) -> AsyncIterator[str]:
    for word in prompt.text.split():
        yield word.upper()


async def double(session: Session[InferRequest, InferResponse]) -> None:
    async for request in session:
        await session.send(InferResponse(outputs=(Tensor(name="y", data=2 * request["x"]),)))


async def echo(session: Session[Part, Part]) -> None:
    async for part in session:
        await session.send(part)


X = {"x": np.array([1.0], np.float32)}

# -- every wire ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_an_exchange_is_a_child_of_its_callers_span(wire: str, hub: bool, traces: Traces) -> None:
    async with serving(traces, spec_of(double, "double"), hub=hub) as memory:
        answer = await memory.client(wire).ask(traced(infer(X, "double"), 7))
        assert answer.complete
        await still()
        span = traces.server()
        assert (span.name, span.kind) == ("POST /v2/models/{name}/infer", SpanKind.SERVER)
        assert is_of_caller(span, 7)
        assert dict(span.attributes or {}) == {
            "http.request.method": "POST",
            "http.route": "/v2/models/{name}/infer",
            "http.response.status_code": 200,
            "url.scheme": "https" if wire == "http2" else "http",  # which is what the client says
            "network.protocol.version": "2" if wire == "http2" else "1.1",
            "everywire.exchange": dict(answer.headers)[b"x-request-id"].decode(),
            "everywire.wire": "http/2" if wire == "http2" else "http/1.1",
            "everywire.dialect": "v2",
            "everywire.model": "double",
            "everywire.ending": "complete",
        }
        assert error_of(span) is None
        model = traces.one("model double")
        assert is_child(model, span)
        assert (model.attributes or {})["everywire.model"] == "double"


@pytest.mark.parametrize("blocking", [True, False])
async def test_the_first_item_is_an_event(blocking: bool, hub: bool, traces: Traces) -> None:
    def counting(prompt: Prompt) -> Iterator[str]:
        yield from prompt.text.split()

    async def talking(session: Session[Prompt, Token]) -> None:
        async for prompt in session:
            for number, word in enumerate(prompt.text.split()):
                await session.send(Token(text=word, id=number))

    async with serving(traces, spec_of(counting if blocking else talking, "model"), hub=hub) as memory:
        answer = await memory.client().ask(lmi("a b c", "model", stream=True, max_new_tokens=3))
        assert answer.text == "abc"
    model = traces.one("model model")
    (event,) = model.events
    assert event.name == "first item"
    assert model.start_time is not None
    assert model.start_time <= event.timestamp


async def test_a_websocket_is_one_exchange_of_its_handshakes_caller(hub: bool, traces: Traces) -> None:
    config = Config(bidi=BidiConfig(default_model="echo"))
    async with serving(traces, spec_of(echo, "echo"), hub=hub, config=config) as memory:
        path = "/invocations-bidirectional-stream"
        talk = SocketConversation(await client.websocket(memory.connect(), path, headers=(parent(7),)))
        await talk.send(b"one")
        assert await talk.receive() == b"one"
        await talk.close()
        await talk.receive()
        await still()
        span = traces.server()
        assert span.name == f"GET {path}"
        assert is_of_caller(span, 7)
        attributes = span.attributes or {}
        assert (attributes["everywire.wire"], attributes["http.response.status_code"]) == ("websocket", 101)
        assert (attributes["everywire.ending"], error_of(span)) == ("cancelled-by-client", None)
        model = traces.one("model echo")
        assert is_child(model, span)
        assert (model.attributes or {})["everywire.cancelled"] is True
        assert error_of(model) is None


async def test_a_websocket_at_any_path_has_a_name_without_it(hub: bool, traces: Traces) -> None:
    config = Config(bidi=BidiConfig(default_model="echo"))
    async with serving(traces, spec_of(echo, "echo"), hub=hub, config=config) as memory:
        talk = SocketConversation(await client.websocket(memory.connect(), "/secret"))
        await talk.close()
        await talk.receive()
        await still()
        assert traces.server().name == "GET /*"


async def test_a_v2_session_is_one_exchange_and_one_call(hub: bool, traces: Traces) -> None:
    async def inner(session: Session[InferRequest, InferResponse]) -> None:
        async for request in session:
            with traces.tracer.start_as_current_span("request"):
                await session.send(InferResponse(outputs=(Tensor(name="y", data=request["x"]),)))

    async with serving(traces, spec_of(inner, "double"), hub=hub) as memory:
        talks = [
            SocketConversation(
                await client.websocket(memory.connect(), "/v2/models/double/infer", headers=(parent(number),))
            )
            for number in (7, 8)
        ]
        body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]})
        for talk in (*talks, *talks):
            await talk.send(body)
            assert b'"y"' in (await talk.receive() or b"")
        for talk in talks:
            await talk.close()
            await talk.receive()
        await still()
        for number in (7, 8):
            model = traces.one("model double", number)
            assert is_child(model, traces.one("GET /v2/models/{name}/infer", number))
            requests = traces.named("request", number)
            assert len(requests) == 2
            assert all(is_child(span, model) for span in requests)


async def test_a_v2_session_whose_model_failed_has_a_call_for_each_time_it_is_called(hub: bool, traces: Traces) -> None:
    async def failing(session: Session[InferRequest, InferResponse]) -> None:
        async for request in session:
            raise RuntimeError(request.id)

    async with serving(traces, spec_of(failing, "failing"), hub=hub) as memory:
        talk = SocketConversation(await client.websocket(memory.connect(), "/v2/models/failing/infer"))
        for _ in range(2):
            await talk.send(json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}))
            assert b"error" in (await talk.receive() or b"")
        await talk.close()
        await talk.receive()
        await still()
        calls = traces.named("model failing")
        assert [(is_child(call, traces.server()), error_of(call)) for call in calls] == [
            (True, "RuntimeError"),
            (True, "RuntimeError"),
            (True, None),
        ]


async def test_a_bidirectional_stream_is_one_exchange(hub: bool, traces: Traces) -> None:
    async with serving(traces, spec_of(echo, "echo"), hub=hub) as memory:
        streams = Streams(memory)
        talks = await streams.begin(traced(bidirectional("echo"), 7), traced(bidirectional("echo"), 8))
        for n, talk in enumerate((*talks, *reversed(talks)), 1):
            await talk.send(b"part")
            await streams.until(lambda n=n: sum(len(talk.answer.messages) for talk in talks) == n)  # type: ignore[misc]
        for talk in talks:
            await talk.end()
        await streams.complete()
        await still()
        for number in (7, 8):
            span = traces.one("POST /endpoints/{endpoint}/invocations-bidirectional-stream", number)
            assert is_of_caller(span, number)
            assert is_child(traces.one("model echo", number), span)


class Streams:
    """Conversations on one HTTP/2 connection, all at once."""

    def __init__(self, memory: MemoryGateway) -> None:
        self.connection = memory.client("http2")
        self.talks: dict[int, Conversation] = {}

    async def begin(self, *questions: Question) -> list[Conversation]:
        for question in questions:
            talk = self.connection.about(question)
            await talk.begin()
            self.talks[talk._stream] = talk
        return list(self.talks.values())

    async def until(self, done: Callable[[], bool]) -> None:
        with trio.fail_after(60):
            while not done():
                event = await self.connection.peer.next_event()
                talk = self.talks.get(getattr(event, "stream", 0))
                if talk is None:
                    continue
                match event:
                    case Response():
                        talk.answer.head(event)
                    case Data():
                        self.connection.peer.credit(event)
                        talk.answer.feed(event.buffers[0])
                    case End():
                        talk.answer.end()

    async def complete(self) -> None:
        await self.until(lambda: all(talk.answer.over for talk in self.talks.values()))
        assert all(talk.answer.complete for talk in self.talks.values())


async def answered(memory: MemoryGateway, *questions: Question) -> None:
    """Asked at once on one HTTP/2 connection, and each answered whole."""
    streams = Streams(memory)
    await streams.begin(*questions)
    await streams.complete()
    await still()


async def test_an_application_of_asgi_is_traced_below_what_is_around_it(traces: Traces) -> None:
    """A framework that traces has taken the caller's span already; alone, the caller's field counts."""
    gateway = Gateway(Config(listen=ListenConfig(port=-1)), [shout], tracer_provider=traces.provider)
    body = lmi("a b", "shout").body
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": "/mounted/predictions/shout",
        "query_string": b"", "root_path": "/mounted", "scheme": "https", "headers": [*JSON, parent(7)], "client": None, "extensions": {},
    }  # fmt: skip

    async def call() -> None:
        give, given = trio.open_memory_channel[dict[str, Any]](1)
        give.send_nowait({"type": "http.request", "body": body, "more_body": False})

        async def send(message: dict[str, Any]) -> None:
            await trio.lowlevel.checkpoint()

        await ASGIApp(gateway)(scope, given.receive, send)
        await still()

    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        await call()
        (alone,) = traces.servers()
        with traces.tracer.start_as_current_span("framework"):
            await call()
        mounted = traces.servers()[1]
        nursery.cancel_scope.cancel()
    assert is_of_caller(alone, 7)
    assert (alone.name, (alone.attributes or {})["url.scheme"]) == ("POST /predictions/{name}", "https")
    assert is_child(mounted, traces.one("framework"))


# -- names and what is not told ----------------------------------------------------------------------------------------


async def test_nothing_that_a_client_says_is_in_a_span(hub: bool, traces: Traces) -> None:
    async def refusing(prompt: Prompt) -> AsyncIterator[str]:
        raise ModelError(f"not this: {prompt.text}", status=400)
        yield ""

    async with serving(traces, spec_of(refusing, "refusing"), hub=hub) as memory:
        asked = lmi("secret", "refusing")
        fields = ((b"authorization", b"secret"), (b"user-agent", b"secret"), (b"tracestate", b"secret secret"))
        one = memory.client()
        for path in (asked.path + "?key=secret", "/secret/path", "/predictions/secret"):
            await one.ask(replace(asked, path=path, headers=(*asked.headers, *fields, parent(7))))
        await memory.http1().send(*client.post(1, "/secret", b""))
        await still()
        names = [span.name for span in traces.servers()]
        assert sorted(names) == ["POST", "POST", "POST /predictions/{name}", "POST /predictions/{name}"]
        assert "secret" not in "".join(span.to_json() for span in traces.spans)


async def test_a_method_of_the_clients_own_is_no_name(hub: bool, traces: Traces) -> None:
    async with serving(traces, shout, hub=hub) as memory:
        peer = memory.http2()
        request, *rest = client.post(1, "/ping", b"")
        head = msgspec.structs.replace(request.head, method=b"SECRET")
        await peer.send(msgspec.structs.replace(request, head=head), *rest)
        await still()
        span = traces.server()
        assert (span.name, (span.attributes or {})["http.request.method"]) == ("HTTP /ping", "_OTHER")


MALFORMED = [
    b"", b"00", b"00-" + b"0" * 32 + b"-" + b"1" * 16 + b"-01", b"00-" + b"1" * 32 + b"-" + b"0" * 16 + b"-01",
    b"ff-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01", b"00-" + b"A" * 32 + b"-" + b"1" * 16 + b"-01",
    b"00-" + b"1" * 32 + b"-" + b"1" * 16 + b"-01-more", b"x" * 2000, b"\xff\xfe",
]  # fmt: skip


@pytest.mark.parametrize("value", MALFORMED)
async def test_a_malformed_parent_is_none(value: bytes, traces: Traces, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(traces, shout) as memory:
        asked = lmi("a b", "shout")
        answer = await memory.client().ask(replace(asked, headers=(*asked.headers, (b"traceparent", value))))
        assert answer.complete
        await still()
        assert traces.server().parent is None
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


async def test_two_parents_are_none(traces: Traces) -> None:
    async with serving(traces, shout) as memory:
        assert (await memory.client().ask(traced(traced(lmi("a", "shout"), 7), 8))).complete
        await still()
        assert traces.server().parent is None


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([b"a=1,b@c=2"], {"a": "1", "b@c": "2"}),
        ([b"a=1", b" b=2 ,,"], {"a": "1", "b": "2"}),
        ([b"a=1,a=2"], {}),
        ([b"a"], {}),
        ([b"A=1"], {}),
        ([b"a=\xff"], {}),
        ([b"a=" + b"1" * 600], {}),
        ([b",".join(b"a%d=1" % n for n in range(33))], {}),
    ],
)
async def test_a_callers_state_is_kept_where_it_is_one(
    values: list[bytes], kept: dict[str, str], traces: Traces, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(traces, shout) as memory:
        asked = traced(lmi("a", "shout"), 7)
        fields = [(b"tracestate", value) for value in values]
        assert (await memory.client().ask(replace(asked, headers=(*asked.headers, *fields)))).complete
        await still()
        span = traces.server()
        assert is_of_caller(span, 7)
        assert dict(span.context.trace_state) == kept
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


async def test_a_caller_who_does_not_sample_is_followed(traces: Traces) -> None:
    async with serving(traces, shout) as memory:
        asked = lmi("a b", "shout")
        assert (await memory.client().ask(replace(asked, headers=(*asked.headers, parent(7, 0))))).complete
        await still()
        assert traces.spans == ()


# -- contexts ----------------------------------------------------------------------------------------------------------


async def waiting_model(traces: Traces, prompt: Prompt) -> AsyncIterator[str]:
    """Waits before and between its words, each time with a span of its own."""
    for number, word in enumerate(prompt.text.split()):
        with traces.tracer.start_as_current_span(f"before {word}"):
            await trio.sleep(0.01 * (number + 1))
        yield word


async def test_streams_of_one_connection_have_each_their_own_spans(hub: bool, traces: Traces, autojump_clock: Any) -> None:
    async def model(prompt: Prompt) -> AsyncIterator[str]:
        async for word in waiting_model(traces, prompt):
            yield word

    async with serving(traces, spec_of(model, "model"), hub=hub) as memory:
        numbers = range(1, 9)
        await answered(memory, *(traced(lmi(f"a{n} b{n}", "model"), n) for n in numbers))
        for n in numbers:
            span = traces.one("POST /predictions/{name}", n)
            assert is_of_caller(span, n)
            below = traces.one("model model", n)
            assert is_child(below, span)
            for word in (f"before a{n}", f"before b{n}"):
                assert is_child(traces.one(word), below)
        assert len(traces.spans) == 4 * 8


async def test_requests_of_one_connection_do_not_inherit_from_one_another(
    hub: bool, traces: Traces, autojump_clock: Any
) -> None:
    """Neither one that waits nor one that does not leaves its span to the next, even where it leaves its own current."""

    async def untidy(prompt: Prompt) -> AsyncIterator[str]:
        seen.append(trace.get_current_span().get_span_context())
        contexts.attach(trace.set_span_in_context(traces.tracer.start_span("left"), EMPTY))
        if "wait" in prompt.text:
            await trio.sleep(1)
            seen.append(trace.get_current_span().get_span_context())
        yield "x"

    seen: list[SpanContext] = []
    async with serving(traces, spec_of(untidy, "untidy"), hub=hub) as memory:
        one = memory.client()
        for text in ("at once", "wait", "wait", "at once", "at once", "wait"):
            assert (await one.ask(lmi(text, "untidy"))).complete
        await still()
        servers = traces.servers()
        assert [span.parent for span in servers] == [None] * 6
        assert len({span.context.trace_id for span in servers}) == 6
        models = traces.named("model untidy")
        assert [is_child(model, span) for model, span in zip(models, servers, strict=True)] == [True] * 6
        assert [context.span_id for context in seen if context.span_id in {m.context.span_id for m in models}] == [
            model.context.span_id for model in models
        ]
        assert len(seen) == 9


async def test_nothing_is_current_where_no_exchange_is_worked_at(hub: bool, traces: Traces) -> None:
    async with serving(traces, shout, hub=hub) as memory:
        assert (await memory.client().ask(lmi("a", "shout"))).complete
        await still()
        assert not trace.get_current_span().get_span_context().is_valid
        task = trio.lowlevel.current_root_task()
        assert task is not None
        for living in set(descendants(task)) - {trio.lowlevel.current_task()}:
            span = living.context.run(trace.get_current_span)
            assert not span.get_span_context().is_valid, living


def descendants(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield child
            yield from descendants(child)


async def test_tasks_of_a_models_own_nursery_have_its_span_above_them(
    hub: bool, traces: Traces, autojump_clock: Any
) -> None:
    async def model(session: Session[Prompt, Token]) -> None:
        async def step(name: str) -> None:
            with traces.tracer.start_as_current_span(name):
                await trio.sleep(1)

        async for prompt in session:
            async with trio.open_nursery() as nursery:
                for word in prompt.text.split():
                    nursery.start_soon(step, word)
            await session.send(Token(text="x", id=0))

    async with serving(traces, spec_of(model, "model"), hub=hub) as memory:
        await answered(memory, traced(lmi("a b", "model"), 1), traced(lmi("c d", "model"), 2))
        for number, words in ((1, "ab"), (2, "cd")):
            above = traces.one("model model", number)
            assert all(is_child(traces.one(word), above) for word in words)


async def test_a_thread_has_the_span_of_the_call_it_works_for(hub: bool, traces: Traces) -> None:
    def model(prompt: Prompt) -> Iterator[str]:
        for word in prompt.text.split():
            with traces.tracer.start_as_current_span(word):
                pass
            yield word

    async with serving(traces, spec_of(model, "model"), hub=hub) as memory:
        await answered(memory, traced(lmi("a b", "model"), 1), traced(lmi("c d", "model"), 2))
    for number, words in ((1, "ab"), (2, "cd")):
        above = traces.one("model model", number)
        assert all(is_child(traces.one(word), above) for word in words)


async def test_a_client_that_leaves_in_the_middle_of_a_generators_span(
    hub: bool, traces: Traces, autojump_clock: Any
) -> None:
    async def model(prompt: Prompt) -> AsyncIterator[str]:
        with traces.tracer.start_as_current_span("generator"):
            while True:
                yield prompt.text
                await trio.sleep(1)

    async with serving(traces, spec_of(model, "model"), hub=hub) as memory:
        one = memory.client("http2")
        talk = one.about(traced(lmi("a", "model", stream=True, max_new_tokens=1000), 7))
        await talk.begin()
        assert await talk.receive()
        talk.leave()
        await one.peer.flush()
        await still()
        span = traces.server()
        assert ((span.attributes or {})["everywire.ending"], error_of(span)) == ("cancelled-by-client", None)
        call = traces.one("model model")
        assert ((call.attributes or {})["everywire.cancelled"], error_of(call)) == (True, None)
        assert is_child(call, span)
        assert is_child(traces.one("generator"), call)
        assert (await one.ask(lmi("a", "model", stream=True, max_new_tokens=1))).complete
        await trio.sleep(2)
        assert traces.servers()[1].parent is None


async def test_a_model_that_a_call_has_loaded_does_not_live_in_that_calls_context(
    traces: Traces, autojump_clock: Any
) -> None:
    loaded: list[bool] = []

    @asynccontextmanager
    async def load() -> AsyncIterator[Any]:
        loaded.append(trace.get_current_span().get_span_context().is_valid)
        yield shout

    async with serving(traces, spec_of(load, "shout", family=Family.TEXT)) as memory:
        with traces.tracer.start_as_current_span("operator"):
            await memory.gateway.reload("shout")
        assert (await memory.client().ask(lmi("a", "shout"))).complete
    assert loaded == [False, False]


async def test_what_is_current_around_serve_is_nobodys_parent(hub: bool, traces: Traces, autojump_clock: Any) -> None:
    seen = []

    async def looking(prompt: Prompt) -> AsyncIterator[str]:
        seen.append(dict(baggage.get_all()))
        yield "x"

    batched = spec_of(double, "double", max_batch_size=8, batching=Batching())
    with traces.tracer.start_as_current_span("program"):
        contexts.attach(baggage.set_baggage("whose", "the program's"))
        async with serving(traces, batched, looking, hub=hub) as memory:
            one = memory.client()
            assert (await one.ask(infer({"x": np.ones((1, 1), np.float32)}, "double"))).complete
            assert (await one.ask(lmi("a", "looking"))).complete
            await still()
    assert [span.parent for span in traces.servers()] == [None, None]
    assert traces.one("batch double").parent is None
    assert seen == [{}]


# -- waits, batches, failures ------------------------------------------------------------------------------------------


async def test_who_waits_for_a_slot_has_a_span_of_that(hub: bool, traces: Traces, autojump_clock: Any) -> None:
    async def slow(prompt: Prompt) -> AsyncIterator[str]:
        await trio.sleep(1)
        yield "x"

    async with serving(traces, spec_of(slow, "slow", capacity=1), hub=hub) as memory:
        await answered(memory, traced(lmi("a", "slow"), 1), traced(lmi("b", "slow"), 2))
        wait = traces.one("wait for slot")
        number = wait.context.trace_id  # the trace of the call that came second
        assert is_child(wait, traces.one("POST /predictions/{name}", number))
        model = traces.one("model slow", number)
        assert wait.start_time is not None
        assert wait.end_time is not None
        assert model.start_time is not None
        assert wait.start_time < wait.end_time <= model.start_time


async def test_a_batch_is_nobodys_child_and_linked_with_all_of_its_calls(
    hub: bool, traces: Traces, autojump_clock: Any
) -> None:
    async def model(session: Session[InferRequest, InferResponse]) -> None:
        async for request in session:
            with traces.tracer.start_as_current_span("step"):
                await trio.sleep(1)
            await session.send(InferResponse(outputs=(Tensor(name="y", data=2 * request["x"]),)))

    batching = Batching(max_delay=0.5)
    async with serving(traces, spec_of(model, "model", max_batch_size=8, batching=batching), hub=hub) as memory:
        rows = {"x": np.ones((1, 2), np.float32)}
        await answered(memory, *(traced(infer(rows, "model"), n) for n in (1, 2, 3)))
        batch = traces.one("batch model")
        assert batch.parent is None
        assert batch.context.trace_id > 3
        assert (batch.attributes or {})["everywire.batch.requests"] == 3
        calls = [traces.one("model model", n) for n in (1, 2, 3)]
        assert {link.context.span_id for link in batch.links} == {call.context.span_id for call in calls}
        assert [[link.context.span_id for link in call.links] for call in calls] == [[batch.context.span_id]] * 3
        assert all(is_child(call, traces.one("POST /v2/models/{name}/infer", n)) for n, call in enumerate(calls, 1))
        assert is_child(traces.one("step"), batch)


async def test_a_round_of_a_rolling_batch_is_nobodys_child(hub: bool, traces: Traces) -> None:
    class Traced(Counting):
        def open(self, prompt: Prompt) -> Any:
            with traces.tracer.start_as_current_span("open"):
                return super().open(prompt)

        def step(self, sequences: Any) -> Any:
            with traces.tracer.start_as_current_span("step"):
                return super().step(sequences)

    @asynccontextmanager
    async def load() -> AsyncIterator[RollingBatch[Any]]:
        async with rolling(Traced()) as batch:
            yield batch

    async with serving(traces, spec_of(load, "count", family=Family.TEXT), hub=hub) as memory:
        await answered(memory, *(traced(lmi(name, "count", max_new_tokens=3), n) for n, name in ((1, "a"), (2, "b"))))
    steps = traces.named("step")
    assert steps
    assert all(step.parent is None and step.context.trace_id > 2 for step in steps)
    assert [is_child(span, traces.one("model count", span.context.trace_id)) for span in traces.named("open")] == [True] * 2


async def crashing(prompt: Prompt) -> AsyncIterator[str]:
    if prompt.text != "first":
        raise RuntimeError("secret")
    yield "a"
    raise RuntimeError("secret")


async def erring(prompt: Prompt) -> AsyncIterator[str]:
    raise ModelError("secret", status=422 if prompt.text == "client" else 503)
    yield ""


async def hanging(prompt: Prompt) -> AsyncIterator[str]:
    await trio.sleep_forever()
    yield ""


@pytest.mark.parametrize(
    ("model", "text", "ending", "error", "kind"),
    [
        (crashing, "x", "model-error", "424", "RuntimeError"),
        (crashing, "first", "model-error", "model-error", "RuntimeError"),
        (erring, "client", "model-error", None, "ModelError"),
        (erring, "server", "model-error", "503", "ModelError"),
        (hanging, "x", "deadline", "504", None),
    ],
)
async def test_a_failure_is_one_by_its_ending(
    model: Any, text: str, ending: str, error: str | None, kind: str | None, hub: bool, traces: Traces, autojump_clock: Any
) -> None:
    async with serving(traces, spec_of(model, "model", timeout=5.0), hub=hub) as memory:
        await memory.client().ask(lmi(text, "model", stream=True, max_new_tokens=9))
        await still()
        span, call = traces.server(), traces.one("model model")
        assert ((span.attributes or {})["everywire.ending"], error_of(span)) == (ending, error)
        assert error_of(call) == kind
        assert (call.attributes or {}).get("everywire.cancelled", False) is (kind is None)
        assert "secret" not in span.to_json() + call.to_json()


async def test_a_refusal_has_a_span_and_no_error(hub: bool, traces: Traces) -> None:
    async with serving(traces, shout, hub=hub) as memory:
        await memory.client().ask(replace(lmi("a", "shout"), path="/nowhere"))
        await still()
        span = traces.server()
        assert (span.name, (span.attributes or {})["http.response.status_code"]) == ("POST", 404)
        assert ((span.attributes or {})["everywire.ending"], error_of(span)) == ("refused", None)


# -- the bridge --------------------------------------------------------------------------------------------------------


def bridged(container: MemoryGateway) -> ModelSpec:
    async def dial() -> MemoryTransport:
        await trio.lowlevel.checkpoint()
        return container.connect()

    return container_spec("ws://container", name="far", limits=ContainerLimits(health_interval=0), dial=dial)


@pytest.mark.parametrize("how", ["invocation", "socket"])
async def test_a_container_is_called_in_the_trace_of_its_caller(how: str, hub: bool, traces: Traces) -> None:
    """Its server's span is a child of the bridge's call, which is one of the exchange, which is one of the client."""
    far, config = Traces(), Config(bidi=BidiConfig(default_model="echo"))
    async with serving(far, spec_of(echo, "echo"), hub=hub, config=config) as container:
        async with serving(traces, bridged(container), hub=hub) as memory:
            asked = bidirectional("far") if how == "socket" else invoke("far", b"a")
            state = (b"tracestate", b"vendor=1")
            streams = Streams(memory)
            talks = await streams.begin(*(replace(asked, headers=(*asked.headers, parent(n), state)) for n in (7, 8)))
            if how == "socket":
                for talk in talks:
                    await talk.send(b"part")
                    await talk.end()
            await streams.complete()
            await still()
        for number in (7, 8):
            call = traces.one("model far", number)
            (beyond,) = [span for span in far.servers() if span.context.trace_id == number]
            assert is_child(beyond, call)
            assert dict(beyond.context.trace_state) == {"vendor": "1"}
            assert is_of_caller(traces.one(f"POST {route_of(how)}", number), number)
        assert not [span for span in far.servers() if span.name == "GET /ping"], "the bridge's probes"


def route_of(how: str) -> str:
    return "/endpoints/{endpoint}/invocations" + ("-bidirectional-stream" if how == "socket" else "")


# -- off, and in the hands of others -----------------------------------------------------------------------------------


async def test_a_gateway_that_does_not_trace_has_nothing_around_an_exchange() -> None:
    async with memory_gateway([shout]) as memory:
        gateway = memory.gateway
        server = gateway.server
        assert (server.exchange_opened, server.exchange_closed) == (gateway.observer.opened, gateway.observer.closed)
        assert server.runner.work == gateway.dispatcher.work
        (worker,) = gateway.supervisor.workers.values()
        assert worker._called is worker._model


@pytest.mark.programs
def test_the_gateway_needs_no_opentelemetry_until_it_traces() -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None
from gateway.config import Config, TracingConfig
from gateway.gateway import Gateway
from gateway.config.problem import ConfigError
import gateway.containers.model, gateway.cli.serve, gateway.testing
Gateway()
try:
    Gateway(Config(tracing=TracingConfig(enabled=True)))
except ConfigError as e:
    print(e)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http" in ran.stdout


async def test_the_global_provider_is_used_where_the_configuration_says_so_and_never_set(
    traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: traces.provider)
    monkeypatch.setattr(trace, "set_tracer_provider", None)
    async with memory_gateway([shout], Config(tracing=TracingConfig(enabled=True))) as memory:
        assert (await memory.client().ask(lmi("a", "shout"))).complete
        await still()
    assert traces.server().name == "POST /predictions/{name}"


async def test_a_processor_that_raises_is_no_exchanges_trouble(hub: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            if self.early:
                raise RuntimeError("processor")

        def on_end(self, span: Any) -> None:
            raise RuntimeError("processor")

        early = True

    traces, broken = Traces(), Broken()
    traces.provider.add_span_processor(broken)
    async with serving(traces, shout, hub=hub) as memory:
        one = memory.client()
        assert (await one.ask(lmi("a", "shout"))).complete
        broken.early = False
        assert (await one.ask(lmi("a", "shout"))).complete
        await still()
        assert memory.gateway.counts().endings == {"complete": 2}
    assert {record.name for record in caplog.records if record.levelno >= logging.ERROR} == {"gateway.spans"}


async def test_the_line_of_an_exchange_names_its_span(hub: bool, traces: Traces, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.exchange")
    async with serving(traces, shout, hub=hub) as memory:
        assert (await memory.client().ask(traced(lmi("a", "shout"), 7))).complete
        await still()
    (line,) = [record for record in caplog.records if record.name == "gateway.exchange"]
    context = traces.server().context
    assert (line.trace_id, line.span_id) == (f"{7:032x}", f"{context.span_id:016x}")  # type: ignore[attr-defined]


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("target", ["close", "interrupt", "worker", "serve"])
@pytest.mark.parametrize(
    ("scenario", "stride"), [("v2", 5), ("queue", 17), ("nursery", 43), ("websocket", 29), ("bridge", 199)]
)
def test_a_cancellation_at_any_step_leaves_no_span_open(
    scenario: str, stride: int, target: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Open(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            spans.add(span.context.span_id)
            began.append(span.name)

        def on_end(self, span: Any) -> None:
            spans.remove(span.context.span_id)

    spans: set[int] = set()
    began: list[str] = []
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Open())
    make = Gateway._make_spans
    monkeypatch.setattr(Gateway, "_make_spans", lambda gateway, _: make(gateway, provider))
    swept = sweep(SCENARIOS[scenario], TARGETS[target], seed=0, driver=driver, steps=count(1, stride))
    assert not swept.failures
    assert swept.runs > 1
    assert began
    assert not spans
