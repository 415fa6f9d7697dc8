"""The id that a client gives its request: it comes back, is in log, spans and console, and the model sees it."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.core.route import WEBSOCKET
from gateway.telemetry.log_text import access_line
from gateway.testing import memory_gateway
from models.messages import Part
from models.session import Session
from protocols.events import Headers
from tests.gateway.access.asked import WIRES, asking, asks, config, path_of, rows

EVERY_WIRE = pytest.mark.parametrize("wire", WIRES)
ROWS = rows()
JSON = (b"content-type", b"application/json")


@EVERY_WIRE
async def test_it_comes_back_in_every_answer_beside_our_own(wire: str) -> None:
    """A WebSocket, a stream, a gRPC call and a refusal have it too."""
    async with asking(wire, config()) as (_, ask):
        for n, row in enumerate(row for row in ROWS if asks(wire, row)):
            own = b"of-%d" % n
            given = ((b"x-client-request-id", own), (b"x-request-id", b"another"))
            _, headers, _ = await ask(row.method, path_of(row), given, b"{}" if row.method == "POST" else b"")
            assert headers[b"x-client-request-id"] == own, row
            assert headers[b"x-request-id"] not in (own, b"another")
        _, headers, _ = await ask("POST", "/none", ((b"x-request-id", b"0"), JSON), b"{}")
        assert headers[b"x-client-request-id"] == b"0"
        assert b"x-client-request-id" not in (await ask("GET", "/v2"))[1]


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ([(b"x-client-request-id", b"a")], "a"),
        ([(b"x-request-id", b"b")], "b"),
        ([(b"x-request-id", b"b"), (b"x-client-request-id", b"a")], "a"),
        ([(b"x-client-request-id", b"~" * 128)], "~" * 128),
        ([(b"x-client-request-id", b"a" * 129)], ""),
        ([(b"x-client-request-id", b"a" * 129), (b"x-request-id", b"b")], "b"),
        ([(b"x-client-request-id", b"two words")], ""),
        ([(b"x-client-request-id", b"\xc3\xa9")], ""),
        ([(b"x-client-request-id", b"")], ""),
        ([(b"x-request-id", b"<b>\"';--")], "<b>\"';--"),
        ([(b"request-id", b"a")], ""),
    ],
)
@EVERY_WIRE
async def test_it_is_1_to_128_visible_ascii_characters(
    wire: str, given: Headers, taken: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with asking(wire, config()) as (_, ask):
        with caplog.at_level(logging.INFO, "gateway.exchange"):
            _, headers, _ = await ask("GET", "/v2", given)
        assert headers.get(b"x-client-request-id", b"").decode() == taken
        (line,) = [record for record in caplog.records if record.message == "exchange"]
        assert getattr(line, "client_request_id", "") == taken


async def seen(session: Session[Part, Part]) -> None:
    headers = session.call.headers
    await session.receive()
    told = {name: headers.get(name) for name in ("x-client-request-id", "x-request-id")}
    await session.send(Part(data=json.dumps(told).encode()))


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_a_repeated_head_repeats_it_and_the_model_sees_both_fields(wire: str) -> None:
    async with memory_gateway([seen]) as memory:
        client = memory.http1() if wire == "http1" else memory.http2()
        from gateway.client import post

        for n in range(3):
            stream = n + 1 if wire == "http1" else 2 * n + 1
            fields = [(b"x-client-request-id", b"mine"), (b"x-request-id", b"the proxy's")]
            await client.send(*post(stream, "/invocations", b"x", fields))
            status, headers, body = await client.read_answer(stream)
            assert (status, headers[b"x-client-request-id"]) == (200, b"mine")
            assert json.loads(body) == {"x-client-request-id": "mine", "x-request-id": "the proxy's"}


async def test_a_span_has_it() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with asking("http1", config(), tracer_provider=provider) as (_, ask):
        await ask("GET", "/v2", ((b"x-request-id", b"mine"),))
        await ask("GET", "/v2")
    named: list[Any] = [
        span.attributes.get("client_request_id") for span in exporter.get_finished_spans() if span.attributes
    ]
    assert named == ["mine", None]


@pytest.mark.parametrize("wire", ["http1", "asgi/1.1"])
async def test_a_refused_websocket_and_an_open_one_repeat_it(wire: str) -> None:
    async with asking(wire, config()) as (_, ask):
        own = (b"x-client-request-id", b"mine")
        for path, status, fields in (
            ("/v2/models/id/infer", 101, (own,)),
            ("/v2/models/id/infer", 403, (own, (b"origin", b"https://evil.example"))),
        ):
            answered = await ask(WEBSOCKET, path, fields)
            assert (answered[0], answered[1][b"x-client-request-id"]) == (status, b"mine")


async def test_a_refused_head_repeats_it() -> None:
    async with memory_gateway([seen]) as memory:
        transport, buffer = memory.connect(), memoryview(bytearray(4096))
        transport.try_send([b"GET / HTTP/1.1\r\nX-Client-Request-Id: mine\r\nHost: a\r\nHost: b\r\n\r\n"])
        await transport.wait_readable()
        n = transport.try_receive_into(buffer)
        said = bytes(buffer[:n])
        assert said.startswith(b"HTTP/1.1 400 ")
        assert b"\r\nx-client-request-id: mine\r\n" in said


def test_the_line_for_people_has_as_much_of_it_as_a_uuid() -> None:
    fields = {
        "id": "0a1b2c3d-7", "wire": "http/1.1", "dialect": "v2", "model": "id", "method": "POST", "path": "/v2", "status": 200,
        "ending": "complete", "ms": 3.0, "ms_model": 3.0, "ms_first": None, "items_in": 1, "items_out": 1, "bytes_in": 1,
        "bytes_out": 1, "peer": "127.0.0.1:1",
    }  # fmt: skip
    uuid = "6b1f3d1e-5a0c-4c1e-9d5f-0b7a4e1c2d3f"
    assert f"client's id {uuid} " in access_line("00:00:00", {**fields, "client_request_id": uuid}, colour=False)
    long = access_line("00:00:00", {**fields, "client_request_id": "x" * 128}, colour=False)
    assert "x" * 35 + "… " in long
    assert long.endswith("0a1b2c3d-7")
