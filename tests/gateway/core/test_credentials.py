"""Credentials stop at the door: no model sees them, on whatever wire they come, in the process or behind a bridge."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trio
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway import client
from gateway.client import Peer, post
from gateway.client.questions import infer
from gateway.config import AccessConfig, Config, ListenConfig, SageMakerConfig
from gateway.containers.connection import ContainerLimits
from gateway.containers.model import container_spec
from gateway.credentials import without_credentials
from gateway.net.transport import MemoryTransport
from gateway.operator.views import view_of_stream
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.formatters import Input, TextInput
from models.library.tensors import identity
from models.messages import Family, InferRequest, InferResponse, Part, Prompt, Token
from models.session import Call, Session
from models.spec import ModelSpec
from protocols.aws import bidi
from protocols.events import End, Frame, Headers, Opcode
from tests.gateway.dialects.every_route import EVERY_ROUTE
from tests.gateway.wires.test_asgi import HANDSHAKE, Server, served

SECRET = b"s3cr3t"
VERIFIED: Headers = (
    (b"authorization", b"Bearer s3cr3t"),
    (b"x-amz-security-token", b"s3cr3t"),
    (b"cookie", b"session=s3cr3t"),
)
NEVER: Headers = ((b"proxy-authorization", b"Basic s3cr3t"), (b"x-api-key", b"s3cr3t"))
PROTOCOLS: Headers = ((b"sec-websocket-protocol", b"everywire.key.s3cr3t, real.v1,everywire.key.s3cr3t-too"),)
CREDENTIALS = (*VERIFIED, *NEVER, *PROTOCOLS)
SIGNED = "a=1&X-Amz-Signature=s3cr3t&x-amz-security-token=s3cr3t&X%2DAmz-Credential=s3cr3t&X-Amz-Date=20260101T000000Z&b=%20"
UNSIGNED = "a=1&X-Amz-Date=20260101T000000Z&b=%20"
CONFIG = Config(sagemaker=SageMakerConfig(default_model="lm"))
PASSING = replace(CONFIG, access=AccessConfig(pass_credentials=True))


def looking(seen: list[Any]) -> list[ModelSpec]:
    """A model of each kind, each of which notes how it was asked."""

    async def text(session: Session[Prompt, Token]) -> None:
        seen.append(session.call)
        await session.receive()
        await session.send(Token(text="x"))

    async def tensors(session: Session[InferRequest, InferResponse]) -> None:
        seen.append(session.call)
        await identity(session)

    async def parts(session: Session[Part, Part]) -> None:
        seen.append(session.call)
        async for part in session:
            await session.send(part)

    def reads(item: Input, **how: Any) -> TextInput:
        seen.append(item.properties)
        return TextInput(item.as_text())

    lm = spec_of(text, "lm", family=Family.TEXT)
    return [
        lm,
        replace(lm, name="batch", options={"rolling_batch": "disable"}),
        replace(lm, name="formatted", input_formatter=reads),
        spec_of(tensors, "id", family=Family.TENSOR),
        spec_of(parts, "echo", family=Family.PARTS),
    ]


def nothing_seen(seen: list[Any]) -> None:
    assert seen
    for item in seen:
        shown = repr(item)
        assert SECRET.decode() not in shown
        assert "everywire.key" not in shown


class Listened:
    """A container's end of the network: what is sent to it."""

    def __init__(self, below: MemoryTransport, heard: bytearray) -> None:
        self._below, self._heard = below, heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def try_send(self, buffers: Any) -> int:
        n = self._below.try_send(buffers)
        self._heard += b"".join(bytes(buffer) for buffer in buffers)[:n]
        return n


@asynccontextmanager
async def bridged(config: Config = CONFIG) -> AsyncIterator[tuple[MemoryGateway, list[Any], bytearray]]:
    """A gateway whose one model is another's behind a bridge; what that one sees, and what was sent to it."""
    seen, heard = list[Any](), bytearray()
    async with memory_gateway([looking(seen)[-1]], replace(PASSING, sagemaker=SageMakerConfig())) as container:

        async def dial() -> Any:
            await trio.lowlevel.checkpoint()
            return Listened(container.connect(), heard)

        shown = container_spec("ws://container", name="echo", limits=ContainerLimits(health_interval=0), dial=dial)
        async with memory_gateway([shown], replace(config, sagemaker=SageMakerConfig())) as front:
            yield front, seen, heard


def connect(served: MemoryGateway, wire: str) -> Peer:
    return served.http1() if wire == "http1" else served.http2()


@pytest.mark.parametrize("wire", ["http1", "http2"])
@pytest.mark.parametrize("route", EVERY_ROUTE)
async def test_no_route_shows_them_to_a_model(wire: str, route: str, caplog: Any) -> None:
    path, body, headers = EVERY_ROUTE[route]
    caplog.set_level(logging.DEBUG)
    seen, spans, live = list[Any](), InMemorySpanExporter(), list[Any]()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    async with memory_gateway(looking(seen), CONFIG, tracer_provider=provider) as served:
        with served.gateway.watched(lambda exchange: live.append(view_of_stream(exchange, 0.0))):
            peer = connect(served, wire)
            await peer.send(*post(1, f"{path}?{SIGNED}", body, (*headers, *CREDENTIALS)))
            status, answered, said = await peer.read_answer(1)
            peer.close()
            await trio.testing.wait_all_tasks_blocked()
    assert status == 200, said
    nothing_seen(seen)
    calls = [item for item in seen if isinstance(item, Call)]
    for call in calls:
        assert call.headers["sec-websocket-protocol"] == "real.v1"
        assert call.query in (UNSIGNED, "")
    assert live
    nothing_seen([live, *[span.to_json() for span in spans.get_finished_spans()]])
    nothing_seen([record.__dict__ for record in caplog.records if record.name.startswith("gateway")])
    assert SECRET not in repr(answered).encode()


async def test_an_input_formatter_is_not_shown_them_either() -> None:
    seen = list[Any]()
    async with memory_gateway(looking(seen), CONFIG) as served:
        peer = served.http1()
        await peer.send(*post(1, "/predictions/formatted", b"how", CREDENTIALS))
        assert (await peer.read_answer(1))[0] == 200
        peer.close()
    assert len(seen) == 2
    nothing_seen(seen)


async def converse(peer: Peer, *messages: bytes) -> None:
    """Says so much over a WebSocket, and hears as many messages."""
    for message in messages:
        await peer.send(Frame(opcode=Opcode.TEXT, fin=True, data=message))
    for _ in messages:
        while not isinstance(await peer.next_event(), Frame):
            pass
    peer.close()


SOCKETS = [
    "/invocations-bidirectional-stream",
    "/models/echo/invocations-bidirectional-stream",
    "/v2/models/id/infer",
    "/any",
]


@pytest.mark.parametrize("path", SOCKETS)
async def test_a_websocket_does_not_show_them(path: str) -> None:
    seen = list[Any]()
    config = replace(CONFIG, bidi=replace(CONFIG.bidi, default_model="echo"))
    async with memory_gateway(looking(seen), config) as served:
        headers = [field for field in CREDENTIALS if field[0] != b"sec-websocket-protocol"]
        for offered in (PROTOCOLS[0][1], b"everywire.key.s3cr3t"):
            peer = await client.websocket(
                served.connect(), f"{path}?{SIGNED}", headers=[*headers, (b"sec-websocket-protocol", offered)]
            )
            asked = infer({"x": np.zeros(1, "f4")}, "id", binary=False).body
            await converse(peer, asked or b"")
        await trio.testing.wait_all_tasks_blocked()
    nothing_seen(seen)
    assert [call.headers.get("sec-websocket-protocol") for call in seen] == ["real.v1", None]
    assert {call.query for call in seen} == {UNSIGNED}


async def bidirectional(served: MemoryGateway, *headers: tuple[bytes, bytes]) -> None:
    peer = served.http2()
    opened = [(b"content-type", bidi.CONTENT_TYPE.encode()), *CREDENTIALS, *headers]
    path = f"/endpoints/echo/invocations-bidirectional-stream?{SIGNED}"
    await peer.send(*post(1, path, None, opened), End(stream=1))
    assert (await peer.read_answer(1))[0] == 200
    peer.close()
    await trio.testing.wait_all_tasks_blocked()


QUERY = (b"x-amzn-sagemaker-model-query-string", b"a=1&X-Amz-Signature=s3cr3t&b=2")


async def test_a_bidirectional_stream_does_not_show_them() -> None:
    seen = list[Any]()
    async with memory_gateway(looking(seen), CONFIG) as served:
        await bidirectional(served)
        await bidirectional(served, QUERY)
    nothing_seen([call for call in seen if "x-amzn-sagemaker-model-query-string" not in call.headers])
    assert [call.query for call in seen] == ["", "a=1&b=2"]


@pytest.mark.parametrize("config", [CONFIG, PASSING], ids=["stopped", "passed"])
@pytest.mark.parametrize("way", ["invoke", "stream", "container", "websocket", "bidi"])
async def test_a_container_is_never_sent_them(way: str, config: Config) -> None:
    async with bridged(config) as (front, seen, heard):
        if way == "websocket":
            headers = [field for field in CREDENTIALS if field[0] != b"sec-websocket-protocol"]
            path = f"/models/echo/invocations-bidirectional-stream?{SIGNED}"
            await converse(await client.websocket(front.connect(), path, headers=[*headers, *PROTOCOLS]), b"x")
        elif way == "bidi":
            await bidirectional(front, QUERY)
        else:
            paths = {"invoke": "/endpoints/echo/invocations", "container": "/invocations"}
            path = paths.get(way, "/endpoints/echo/invocations-response-stream")
            peer = front.http1()
            await peer.send(*post(1, f"{path}?{SIGNED}", b"x", CREDENTIALS))
            assert (await peer.read_answer(1))[0] == 200
            peer.close()
        await trio.testing.wait_all_tasks_blocked()
        assert seen
        assert heard
        assert SECRET not in heard
        assert b"everywire.key" not in heard


@pytest.mark.parametrize("http_version", ["1.1", "2"])
async def test_the_mounted_application_does_not_show_them(http_version: str) -> None:
    seen = list[Any]()
    config = replace(CONFIG, listen=ListenConfig(port=-1))
    async with served(*looking(seen), config=config) as (app, calls):
        for route, (path, body, headers) in EVERY_ROUTE.items():
            query, fields = SIGNED.encode(), [(b"host", b"x"), *headers, *CREDENTIALS]
            server = Server(app, path=path, http_version=http_version, headers=fields, query_string=query)
            server.body(body)
            calls.start_soon(server.run)
            await server.over.wait()
            assert server.told[0]["status"] == 200, route
        server = Server(app, type="websocket", path=SOCKETS[1], headers=[*HANDSHAKE, *CREDENTIALS], query_string=query)
        server.give({"type": "websocket.connect"}, {"type": "websocket.receive", "text": "x"})
        calls.start_soon(server.run)
        await trio.testing.wait_all_tasks_blocked()
        server.give({"type": "websocket.disconnect", "code": 1000})
    assert len(seen) > len(EVERY_ROUTE)
    nothing_seen(seen)


async def test_who_verifies_its_callers_itself_may_ask_for_some() -> None:
    seen = list[Any]()
    async with memory_gateway(looking(seen), PASSING) as served:
        for wire in ("http1", "http2"):
            peer = connect(served, wire)
            await peer.send(*post(1, f"/models/echo/invoke?{SIGNED}", b"x", CREDENTIALS))
            assert (await peer.read_answer(1))[0] == 200
            peer.close()
    for call in seen:
        assert call.query == SIGNED
        for name, value in (*VERIFIED, *PROTOCOLS):
            assert call.headers[name.decode()] == value.decode()
        assert not {name.decode() for name, _ in NEVER} & call.headers.keys()


@pytest.mark.parametrize(
    ("query", "left"),
    [
        ("", ""),
        ("a=b&c", "a=b&c"),
        ("X-Amz-Signature=1", ""),
        ("x-amz-signature=1&x-amz-signature=2&a", "a"),
        ("a&X%2dAMZ%2DSecurity%2dToken", "a"),
        ("a=X-Amz-Signature&&b=%ff", "a=X-Amz-Signature&&b=%ff"),
        ("X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Expires=60", "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Expires=60"),
    ],
)
def test_the_members_of_a_query_that_sign_it_are_left_out(query: str, left: str) -> None:
    assert without_credentials(query) == left
