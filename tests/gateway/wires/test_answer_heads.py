"""Heads of answers beside their dialect's own fields: when each was made, for whom it may be kept, how it streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from email.utils import formatdate
from typing import Any

import pytest
import trio

from gateway.client import Peer, post
from gateway.config import Config, SageMakerConfig, V2Config
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.library.echo import Echo
from models.library.tensors import identity
from models.messages import Family, Prompt
from protocols.aws import bidi
from protocols.events import End, Head, Request, Response
from tests.gateway.dialects.every_route import EVERY_ROUTE

EPOCH = 784111777.0  # Sun, 06 Nov 1994 08:49:37 GMT
WIRES = ["http1", "http2"]


def wall_clock() -> float:
    return EPOCH + trio.current_time()


def connect(served: MemoryGateway, wire: str) -> Peer:
    return served.http1() if wire == "http1" else served.http2()


async def head(peer: Peer, method: str, path: str, *headers: tuple[bytes, bytes], body: bytes = b"") -> Response:
    """The head of the answer to the only request of a connection."""
    if method == "POST":
        await peer.send(*post(1, path, body, headers))
    else:
        await peer.send(
            Request(
                stream=1, head=Head(method=method.encode(), target=path.encode(), authority=b"localhost", headers=headers)
            ),
            End(stream=1),
        )
    while not isinstance(event := await peer.next_event(), Response):
        pass
    peer.close()
    return event


def values(answer: Response, name: bytes) -> list[bytes]:
    return [value for key, value in answer.headers if key == name]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/ping"),
        ("HEAD", "/ping"),
        ("GET", "/none"),
        ("DELETE", "/ping"),
        ("POST", "/invocations"),
        ("OPTIONS", "/ping"),
    ],
)
async def test_answers_say_when_they_were_made(wire: str, method: str, path: str, autojump_clock: Any) -> None:
    async with memory_gateway([Echo()], wall_clock=wall_clock) as served:
        for pause in (0, 0.3, 61):
            await trio.sleep(pause)
            answer = await head(connect(served, wire), method, path, body=b"x")
            told = {formatdate(wall_clock() - late, usegmt=True).encode() for late in (0, 1)}
            (date,) = values(answer, b"date")
            assert date in told


@pytest.mark.parametrize(
    "request_line", [b"GET / HTTP/1.1\r\n\r\n", b"nonsense\r\n\r\n", b"GET / HTTP/3.7\r\nhost: a\r\n\r\n"]
)
async def test_what_the_connection_refuses_itself_says_it_too(request_line: bytes, autojump_clock: Any) -> None:
    async with memory_gateway([Echo()], wall_clock=wall_clock) as served:
        transport = served.connect()
        transport.try_send([request_line])
        received, buffer = b"", memoryview(bytearray(4096))
        while (n := transport.try_receive_into(buffer)) != 0:
            if n is None:
                await transport.wait_readable()
            else:
                received += bytes(buffer[:n])
        assert received.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 505 "))
        assert received.count(b"\r\ndate: ") == 1


async def test_what_http2_refuses_itself_says_it_too(autojump_clock: Any) -> None:
    async with memory_gateway([Echo()], wall_clock=wall_clock) as served:
        peer = served.http2()
        answer = await head(peer, "GET", "/ping", *[(b"x-%d" % n, b"1") for n in range(400)])
        assert answer.status == 431
        assert len(values(answer, b"date")) == 1


# -- streams, and what could have been compressed ----------------------------------------------------------------------


async def words(prompt: Prompt) -> AsyncIterator[str]:
    for word in str(prompt.text).split():
        yield word + " "


STREAMS = {
    "infer_stream", "infer_stream, frames", "generate_stream", "generate_stream, tensors", "invocations, jsonlines",
    "predictions, jsonlines", "predictions, sse", "chat, stream", "completions, stream", "response stream",
    "response stream, text", "invoke, parts", "platform", "predictions, batch",
}  # fmt: skip
COMPRESSIBLE = {
    "infer", "infer, version", "infer, binary", "infer, small", "generate", "generate, tensors", "invoke, tensors",
}  # fmt: skip


CONFIG = Config(sagemaker=SageMakerConfig(default_model="lm"))


def specs() -> list[Any]:
    text = spec_of(words, "lm", family=Family.TEXT)
    batch = replace(text, name="batch", options={"rolling_batch": "disable", "enable_streaming": "true"})
    return [text, batch, spec_of(identity, "id"), spec_of(Echo(), "echo")]


async def test_the_table_has_every_route_that_calls_a_model() -> None:
    async with memory_gateway(specs()) as served:
        router = served.gateway.router
        posts = {row.path for row in router.rows if row.method == "POST" and row.kind is None}
        found = {router.path_at(path.encode()) for path, _, _ in EVERY_ROUTE.values()}
        left = {path for path in posts - found if not path.startswith(("/v2/repository", "/v2/logging", "/v2/systemshared"))}
        left = {path for path in left if "/versions/" not in path and "sharedmemory" not in path}
        assert left == {"/endpoints/{endpoint}/invocations-bidirectional-stream"}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("route", EVERY_ROUTE)
async def test_a_stream_says_that_proxies_should_not_hold_it_back(wire: str, route: str, autojump_clock: Any) -> None:
    path, body, headers = EVERY_ROUTE[route]
    async with memory_gateway(specs(), CONFIG) as served:
        answer = await head(connect(served, wire), "POST", path, *headers, body=body)
        assert answer.status == 200
        streams = not values(answer, b"content-length")
        assert streams or route not in STREAMS
        assert values(answer, b"x-accel-buffering") == [b"no"] * streams


async def test_a_bidirectional_stream_says_so_as_well(autojump_clock: Any) -> None:
    async with memory_gateway(specs()) as served:
        opened = [(b"content-type", bidi.CONTENT_TYPE.encode())]
        path = "/endpoints/echo/invocations-bidirectional-stream"
        answer = await head(served.http2(), "POST", path, *opened)
        assert (answer.status, values(answer, b"x-accel-buffering")) == (200, [b"no"])


@pytest.mark.parametrize("accepted", [None, b"identity", b"gzip;q=0", b"br", b"gzip", b"deflate"])
@pytest.mark.parametrize("route", EVERY_ROUTE)
async def test_what_could_have_been_compressed_says_what_it_depends_on(
    route: str, accepted: bytes | None, autojump_clock: Any
) -> None:
    path, body, headers = EVERY_ROUTE[route]
    if accepted is not None:
        headers = (*headers, (b"accept-encoding", accepted))
    for level in (1, 0):
        config = replace(CONFIG, v2=V2Config(compression=level))
        async with memory_gateway(specs(), config) as served:
            answer = await head(served.http1(), "POST", path, *headers, body=body)
            assert answer.status == 200
            varies = route in COMPRESSIBLE and level > 0
            assert values(answer, b"vary") == [b"accept-encoding"] * varies
            if accepted in (b"gzip", b"deflate") and route != "infer, small":
                assert values(answer, b"content-encoding") == [accepted] * varies
