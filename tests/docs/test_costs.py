"""Measures the memory of idle clients, as Python counts it, against docs/explanation/costs.md."""

from __future__ import annotations

import gc
import re
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.client import post
from gateway.client.questions import grpc_request
from gateway.config import Config, LimitsConfig
from gateway.net.transport import MemoryTransport
from gateway.testing import memory_gateway
from models.adapt import spec_of
from models.messages import Family, InferRequest, InferResponse, Part, Tensor
from models.session import Session
from protocols.aws import bidi
from protocols.events import Data, Event
from protocols.http1.connection import HTTP1Connection
from protocols.http2.connection import HTTP2Connection
from protocols.roles import Role
from protocols.websocket.handshake import request_headers
from tests.docs.pages import ROOT

CLIENTS = 100
STREAMS = 20


async def echo(session: Session[Part, Part]) -> None:
    async for part in session:
        await session.send(part)


def said(machine: HTTP1Connection | HTTP2Connection, *events: Event) -> bytes:
    """The bytes that a client with this machine sends for these events."""
    for event in events:
        machine.send(event)  # type: ignore[arg-type]
    return b"".join(machine.data_to_send(2**20))


def http1() -> bytes:
    return said(HTTP1Connection(Role.CLIENT), *post(1, "/v2/health/live", b"{}"))


def http2() -> bytes:
    return said(HTTP2Connection(Role.CLIENT), *post(1, "/v2/health/live", b"{}"))


def streams() -> bytes:
    events: list[Event] = []
    for number in range(1, 2 * STREAMS, 2):
        fields = [(b"content-type", bidi.CONTENT_TYPE.encode())]
        events += post(number, "/endpoints/echo/invocations-bidirectional-stream", None, fields)
        events.append(Data(stream=number, buffers=tuple(bidi.encode_request_part(b"x", date_ms=0))))
    return said(HTTP2Connection(Role.CLIENT), *events)


def uploads() -> bytes:
    """Each sends the first byte of its body."""
    events: list[Event] = []
    for number in range(1, 2 * STREAMS, 2):
        head, *_ = post(number, "/models/echo/invoke", bytes(10_000))
        events += [head, Data(stream=number, buffers=(b"\0",))]
    return said(HTTP2Connection(Role.CLIENT), *events)


def grpc_streams(begin: bytes = b"\0") -> bytes:
    """Each sends a part of its first prefix."""
    fields = [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
    path = "/inference.GRPCInferenceService/ModelStreamInfer"
    calls: list[Event] = []
    for number in range(1, 2 * STREAMS, 2):
        calls += post(number, path, None, fields)
        calls.append(Data(stream=number, buffers=(begin,)))
    return said(HTTP2Connection(Role.CLIENT), *calls)


def answered_grpc_streams() -> bytes:
    """Each sends a request."""
    return grpc_streams(grpc_request({"x": np.array([1])}, "waits"))


def websocket() -> bytes:
    fields = b"".join(b"%s: %s\r\n" % field for field in request_headers(bytes(16)))
    head = b"GET /models/echo/invocations-bidirectional-stream HTTP/1.1\r\nhost: a\r\n" + fields
    return head + b"\r\n\x82\x81" + bytes(4) + b"x"


async def waits(session: Session[InferRequest, InferResponse]) -> None:
    x = (await session.receive())["x"]
    await trio.lowlevel.checkpoint()
    await session.send(InferResponse(outputs=[Tensor(name="y", data=x)]))


async def cost(first: Callable[[], bytes], sessions: int, clock: MockClock) -> float:
    """Bytes for each client that says this, reads what it is answered, and is silent then."""
    specs = [spec_of(echo, capacity=CLIENTS * (STREAMS + 1)), spec_of(waits, family=Family.TENSOR)]
    async with memory_gateway(specs, Config(limits=LimitsConfig(body_silence=3600))) as served:

        async def clients(n: int) -> list[MemoryTransport]:
            ours: list[MemoryTransport] = []
            for _ in range(n):
                ours.append(served.connect())
                data = first()
                assert ours[-1].try_send([data]) == len(data)
                await wait_all_tasks_blocked()
                clock.jump(0.3)
            answer = memoryview(bytearray(65536))
            for transport in ours:
                while transport.try_receive_into(answer):
                    pass
            await wait_all_tasks_blocked()
            return ours

        kept = await clients(3)  # for objects that are made once
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            kept += await clients(CLIENTS)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        counts = served.gateway.counts()
        assert (counts.connections, counts.exchanges) == (len(kept), sessions * len(kept))
        return grown / CLIENTS


@pytest.mark.parametrize(
    ("row", "first", "sessions"),
    [
        ("an idle connection of HTTP/1.1", http1, 0),
        ("an idle connection of HTTP/2", http2, 0),
        ("a stream of HTTP/2 that is open and silent, with its session", streams, STREAMS),
        ("a stream of gRPC that is open and has sent no message", grpc_streams, STREAMS),
        ("a stream of gRPC that is quiet between two messages, beside more than 256 others", answered_grpc_streams, STREAMS),
        ("an upload over HTTP/2 that has just begun, beside more than 512 tasks", uploads, STREAMS),
        ("a call of gRPC that has just begun, beside more than 512 tasks", grpc_streams, STREAMS),
        ("a silent WebSocket, with its session", websocket, 1),
    ],
)
async def test_idle_clients_cost_what_the_page_says(
    row: str, first: Callable[[], bytes], sessions: int, mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.dialects.grpc.stream._MOST_READY", STREAMS)  # a hundredth of those here
    monkeypatch.setattr("gateway.core.runner._MANY", STREAMS if "beside more than 512" in row else 10**6)
    page = (ROOT / "docs" / "explanation" / "costs.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {re.escape(row)} \| (\d+) KiB \|$", page, re.MULTILINE)
    assert found is not None
    stated = int(found[1]) * 1024
    measured = await cost(first, sessions, mock_clock)
    if sessions == STREAMS:
        measured = (measured - await cost(http2, 0, mock_clock)) / STREAMS
    assert stated / 2 < measured <= stated, f"{measured / 1024:.1f} KiB"
