"""Refusals before there is a request: a browser lets its page read them, if the page's origin is allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.asgi import ASGIApp
from gateway.config import AccessConfig, Config, LimitsConfig, ListenConfig
from gateway.gateway import Gateway
from gateway.testing import memory_gateway
from models.library.echo import Echo
from tests.gateway.wires.test_answer_heads import head
from tests.gateway.wires.test_asgi import Server

ORIGIN = b"Origin: https://app.example\r\n"
ALLOWED = b"\r\naccess-control-allow-origin: https://app.example\r\n"
BEGIN = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
LIMIT = 4096


def config(**limits: Any) -> Config:
    return Config(
        listen=ListenConfig(port=-1),
        access=AccessConfig(origins=("https://app.example",)),
        limits=LimitsConfig(**{"head": LIMIT, "request_line": 1024, **limits}),
    )


def large(size: int) -> bytes:
    return b"X-Large: %b\r\n" % (b"x" * size)


class Client:
    """Sends bytes and reads until the server ends the connection."""

    def __init__(self, served: Any) -> None:
        self.transport = served.connect()

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.transport.try_send([piece])

    async def answer(self) -> bytes:
        received, buffer = b"", memoryview(bytearray(4096))
        while (n := self.transport.try_receive_into(buffer)) != 0:
            if n is None:
                await self.transport.wait_readable()
            else:
                received += bytes(buffer[:n])
        return received


BAD: dict[str, tuple[int, bytes]] = {
    "two hosts": (400, BEGIN + b"Host: b\r\n" + ORIGIN + b"\r\n"),
    "a length that is no number": (400, BEGIN + b"Content-Length: x\r\n" + ORIGIN + b"\r\n"),
    "a name that is no token": (400, BEGIN + b"x y: z\r\n" + ORIGIN + b"\r\n"),
    "a coding that is unknown": (501, BEGIN + b"Transfer-Encoding: gzip, chunked\r\n" + ORIGIN + b"\r\n"),
    "an expectation that is unknown": (417, BEGIN + b"Content-Length: 1\r\nExpect: x\r\n" + ORIGIN + b"\r\n"),
    "a version that is unknown": (505, BEGIN.replace(b"/1.1", b"/3.1") + ORIGIN + b"\r\n"),
    "too many fields": (431, BEGIN + b"x: y\r\n" * 101 + ORIGIN + b"\r\n"),
    "the origin before what is too large": (431, BEGIN + ORIGIN + large(LIMIT) + b"\r\n"),
    "the origin behind what is too large": (431, BEGIN + large(LIMIT) + ORIGIN + b"\r\n"),
    "a large field of many kinds": (431, BEGIN + large(LIMIT // 2) * 3 + ORIGIN + large(10) + b"\r\n"),
    "a long path": (414, BEGIN.replace(b"/v1", b"/" + b"x" * 2000) + ORIGIN + b"\r\n"),
}


@pytest.mark.parametrize("kind", BAD)
async def test_a_page_can_read_why_its_head_is_refused(kind: str, autojump_clock: MockClock) -> None:
    status, head = BAD[kind]
    async with memory_gateway([Echo()], config()) as served:
        client = Client(served)
        client.send(head)
        said = await client.answer()
        assert said.startswith(b"HTTP/1.1 %d " % status)
        assert said.count(ALLOWED) == 1
        assert b"\r\naccess-control-expose-headers: x-request-id, " in said
        for other in (b"https://evil.example", b"null", b"https://app.example, https://app.example"):
            client = Client(served)
            client.send(head.replace(b"https://app.example", other))
            said = await client.answer()
            assert said.startswith(b"HTTP/1.1 %d " % status)
            assert b"access-control" not in said
            assert b"\r\nvary: origin\r\n" in said
        client = Client(served)
        client.send(head.replace(ORIGIN, ORIGIN * 2))
        assert b"access-control" not in await client.answer()


async def test_a_preflight_with_a_long_path_is_answered_so_that_the_page_can_read_its_414(autojump_clock: MockClock) -> None:
    path = b"OPTIONS /" + b"x" * 2000 + b" HTTP/1.1\r\nHost: a\r\nAccess-Control-Request-Method: POST\r\n"
    async with memory_gateway([Echo()], config()) as served:
        for origin, status in ((ORIGIN, 204), (b"Origin: https://evil.example\r\n", 414), (b"", 414)):
            client = Client(served)
            client.send(path + origin + b"\r\n")
            said = await client.answer()
            assert said.startswith(b"HTTP/1.1 %d " % status)
            assert (b"access-control-allow-methods: OPTIONS, POST" in said) == (status == 204)


async def test_a_later_head_of_a_connection_is_refused_alike(autojump_clock: MockClock) -> None:
    async with memory_gateway([Echo()], config()) as served:
        client = Client(served)
        client.send(b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n", BEGIN + large(LIMIT) + ORIGIN + b"\r\n")
        said = await client.answer()
        assert said.startswith(b"HTTP/1.1 200 ")
        assert b"HTTP/1.1 431 " in said
        assert said.count(ALLOWED) == 1


async def test_the_rest_of_a_head_that_is_too_large_is_waited_for_within_bounds(autojump_clock: MockClock) -> None:
    """Browsers write the origin behind the fields of the page."""
    async with memory_gateway([Echo()], config()) as served:
        client = Client(served)
        client.send(BEGIN + large(LIMIT))
        await wait_all_tasks_blocked()
        for byte in ORIGIN:
            client.send(bytes([byte]))
            await wait_all_tasks_blocked()
        client.send(b"\r\n")
        assert ALLOWED in await client.answer()

        endless = Client(served)  # a head without an end is refused before it is thrice the limit
        began = trio.current_time()
        for _ in range(3):
            endless.send(BEGIN + large(LIMIT))
            await wait_all_tasks_blocked()
        assert (await endless.answer()).startswith(b"HTTP/1.1 431 ")
        assert trio.current_time() - began < 5  # the linger

        silent = Client(served)
        silent.send(BEGIN + large(LIMIT))
        began = trio.current_time()
        assert (await silent.answer()).startswith(b"HTTP/1.1 431 ")
        assert trio.current_time() - began >= served.gateway.limits.head_timeout

        leaving = Client(served)
        leaving.send(BEGIN + large(LIMIT))
        leaving.transport.send_eof()
        assert (await leaving.answer()).startswith(b"HTTP/1.1 431 ")
    async with memory_gateway([Echo()], replace(config(), access=AccessConfig())) as served:
        client = Client(served)  # no page is allowed, so it does not wait
        began = trio.current_time()
        client.send(BEGIN + large(LIMIT))
        assert (await client.answer()).startswith(b"HTTP/1.1 431 ")
        assert trio.current_time() - began < served.gateway.limits.head_timeout


async def test_http2_refuses_a_head_so_that_a_page_can_read_it(autojump_clock: MockClock) -> None:
    async with memory_gateway([Echo()], config()) as served:
        for origin, named in ((b"https://app.example", [b"https://app.example"]), (b"https://evil.example", [])):
            for headers in ([(b"x-%d" % n, b"1") for n in range(120)], [(b"x-large", b"x" * LIMIT)]):
                answer = await head(served.http2(), "GET", "/ping", *headers, (b"origin", origin))
                assert answer.status == 431
                fields = [value for name, value in answer.headers if name == b"access-control-allow-origin"]
                assert fields == named


async def test_a_preflight_whose_head_http2_refuses_is_answered(autojump_clock: MockClock) -> None:
    asked = (b"access-control-request-method", b"POST")
    async with memory_gateway([Echo()], config()) as served:
        for origin, status in ((b"https://app.example", 204), (b"https://evil.example", 431)):
            answer = await head(served.http2(), "OPTIONS", "/" + "x" * LIMIT, asked, (b"origin", origin))
            allowed = [value for name, value in answer.headers if name == b"access-control-allow-methods"]
            assert (answer.status, allowed) == (status, [b"OPTIONS, POST"] if status == 204 else [])


async def test_a_call_of_grpc_whose_head_is_refused_has_the_fields_of_its_client_too(autojump_clock: MockClock) -> None:
    fields = ((b"content-type", b"application/grpc"), (b"x-client-request-id", b"mine"), (b"x-large", b"x" * LIMIT))
    async with memory_gateway([Echo()], config()) as served:
        answer = await head(served.http2(), "POST", "/inference.GRPCInferenceService/ModelInfer", *fields)
        told = dict(answer.headers)
        assert (answer.status, told[b"grpc-status"], told[b"x-client-request-id"]) == (200, b"8", b"mine")


async def test_a_page_can_read_that_the_gateway_of_an_application_does_not_run() -> None:
    app = ASGIApp(Gateway(config(), [Echo()]))
    origin = (b"origin", b"https://app.example")
    server = Server(app, path="/v1/completions", headers=[(b"host", b"a"), origin])
    await server.run()
    assert (server.told[0]["status"], dict(server.told[0]["headers"])[b"access-control-allow-origin"]) == (503, origin[1])
    headers = [(b"host", b"a"), origin, (b"access-control-request-method", b"POST")]
    server = Server(app, path="/v1/completions", method="OPTIONS", headers=headers)
    await server.run()
    assert (server.told[0]["status"], dict(server.told[0]["headers"])[b"access-control-allow-methods"]) == (
        204,
        b"OPTIONS, POST",
    )
