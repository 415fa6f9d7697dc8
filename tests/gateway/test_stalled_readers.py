"""A thousand clients that each want 100 MB and read nothing: together they cost what the documentation says of one, a
thousand times."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from trio.testing import wait_all_tasks_blocked

from gateway.client import post, questions
from gateway.config import LimitsConfig
from gateway.net.transport import MemoryTransport
from gateway.testing import MemoryGateway, memory, memory_gateway
from models.adapt import spec_of
from models.messages import InferRequest, InferResponse, Part, Prompt, Tensor, Token
from protocols.aws import bidi
from protocols.events import Data
from protocols.http1.connection import HTTP1Connection
from protocols.http2.connection import HTTP2Connection
from protocols.roles import Role
from protocols.websocket.handshake import request_headers

CLIENTS, WANTED = 1000, 100_000_000
CAPACITY = 4096
"""Bytes that a connection in memory holds on their way, as a kernel would."""
SEND_BUFFER = LimitsConfig().send_buffer
CONNECTION = {"http1": 16 * 1024, "http2": 36 * 1024, "websocket": 16 * 1024}
"""docs/explanation/costs.md: at most what a connection with one exchange costs beside what is queued."""
PART, TEXT = 10_000, 100
TOLD: Counter[str] = Counter()
"""The number of messages that each model has made."""


async def much(part: Part) -> AsyncIterator[Part]:
    for _ in range(WANTED // PART):
        TOLD["much"] += 1
        yield Part(data=bytes(PART))


async def long(prompt: Prompt) -> AsyncIterator[Token]:
    for number in range(WANTED // TEXT):
        TOLD["long"] += 1
        yield Token(text="x" * TEXT, id=number)


async def vast(request: InferRequest) -> AsyncIterator[InferResponse]:
    for _ in range(WANTED // PART):
        TOLD["vast"] += 1
        yield InferResponse(outputs=[Tensor(name="y", data=np.zeros(PART, np.uint8))])


def _machine(kind: str) -> Any:
    return (HTTP1Connection if kind == "http1" else HTTP2Connection)(Role.CLIENT)


def _lines(kind: str) -> bytes:
    asked = {"inputs": "x", "stream": True, "parameters": {"max_new_tokens": 65536}}
    return _said(_machine(kind), *post(1, "/predictions/long", json.dumps(asked).encode()))


def _bidi(kind: str) -> bytes:
    (head,) = post(
        1, "/endpoints/much/invocations-bidirectional-stream", None, [(b"content-type", bidi.CONTENT_TYPE.encode())]
    )
    return _said(_machine(kind), head, Data(stream=1, buffers=tuple(bidi.encode_request_part(b"much", date_ms=0))))


def _socket(kind: str) -> bytes:
    fields = b"".join(b"%s: %s\r\n" % field for field in request_headers(bytes(16)))
    head = b"GET /models/much/invocations-bidirectional-stream HTTP/1.1\r\nhost: localhost\r\n" + fields + b"\r\n"
    return head + b"\x82\x84" + bytes(4) + b"much"


def _grpc(kind: str) -> bytes:
    asked = questions.grpc_infer({"x": np.zeros(1)}, "vast", stream=True)
    head, body, _ = post(1, asked.path, asked.body, asked.headers, declares=asked.declares)
    return _said(_machine(kind), head, body)


def _said(machine: Any, *events: Any) -> bytes:
    for event in events:
        machine.send(event)
    return b"".join(machine.data_to_send(2**20))


STORIES: dict[str, tuple[str, Callable[[str], bytes]]] = {
    "lines-http1": ("http1", _lines),
    "lines-http2": ("http2", _lines),
    "bidi": ("http2", _bidi),
    "grpc": ("http2", _grpc),
    "websocket": ("websocket", _socket),
}
EACH = CLIENTS // len(STORIES)


def held() -> int:
    """The traced bytes, without those of the sockets in memory, which stand for the kernel's."""
    taken = tracemalloc.take_snapshot()
    return sum(trace.size for trace in taken.filter_traces([tracemalloc.Filter(False, memory.__file__)]).traces)


@pytest.mark.sweep
async def test_readers_that_stop_cost_a_send_buffer_and_a_connection_each(mock_clock: Any) -> None:
    TOLD.clear()
    specs = [spec_of(model, capacity=CLIENTS + 1) for model in (much, long, vast)]
    async with memory_gateway(specs, capacity=CAPACITY) as served:
        for kind, opening in STORIES.values():
            asked(served, opening(kind))  # makes the objects that are made once
        await wait_all_tasks_blocked()
        gc.collect()
        tracemalloc.start()
        try:
            before, told = held(), Counter(TOLD)
            clients = [asked(served, opening(kind)) for kind, opening in STORIES.values() for _ in range(EACH)]
            await wait_all_tasks_blocked()
            gc.collect()
            grown = held() - before
        finally:
            tracemalloc.stop()
        told = TOLD - told
        assert served.gateway.counts().exchanges == CLIENTS + len(STORIES)
        assert ((told["much"] + told["vast"]) * PART + told["long"] * TEXT) >= CLIENTS * SEND_BUFFER // 2, (
            "the models did begin"
        )
        connections = sum(EACH * CONNECTION[kind] for kind, _ in STORIES.values())
        repeated = told["long"] * TEXT  # `generated_text`, which `lmi.max_text` bounds
        assert grown <= CLIENTS * (SEND_BUFFER * 7 // 6 + PART + CAPACITY) + connections + repeated
        for client in clients:
            client.close()
        await wait_all_tasks_blocked()
        assert served.gateway.counts().exchanges == len(STORIES)


def asked(served: MemoryGateway, said: bytes) -> MemoryTransport:
    """A client that has asked and reads nothing."""
    transport = served.connect()
    assert transport.try_send([said]) == len(said)
    return transport
