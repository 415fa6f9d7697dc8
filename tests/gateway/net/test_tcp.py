"""Promises that need a kernel: a client that leaves a model that never waits, and one that never reads."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio

from gateway.config import Config, LimitsConfig
from gateway.gateway import Gateway
from models.adapt import spec_of
from models.library.tensors import identity
from models.messages import Prompt, Token

ENDLESS = b'{"inputs":"x","parameters":{"max_new_tokens":65536},"stream":true}'
ASK = b"POST /predictions/hot HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(ENDLESS),
    ENDLESS,
)
SOON = 400
"""Messages that a model makes in a few of its turns, of 33 at most; the send buffer alone takes nearly a thousand."""
ALIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


class Hot:
    """Makes tokens without ever waiting for anything but room."""

    def __init__(self, text: str = "token ") -> None:
        self.made, self.text = 0, text
        self.over = trio.Event()

    async def __call__(self, prompt: Prompt) -> AsyncIterator[Token]:
        try:
            for number in range(prompt.parameters.max_new_tokens):
                self.made += 1
                yield Token(text=self.text, id=number)
        finally:
            self.over.set()


@asynccontextmanager
async def serving(model: Hot, **limits: Any) -> AsyncIterator[Gateway]:
    config = Config(limits=replace(LimitsConfig(), **limits))
    gateway = Gateway(
        replace(config, listen=replace(config.listen, port=0)), [spec_of(model, "hot"), spec_of(identity, "identity")]
    )
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(gateway.serve)
            yield gateway
            nursery.cancel_scope.cancel()


async def connect(gateway: Gateway, **options: int) -> trio.SocketStream:
    sock = trio.socket.socket()
    for name, value in options.items():
        sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    await sock.connect(("127.0.0.1", gateway.port))
    return trio.SocketStream(sock)


async def answered(client: trio.SocketStream) -> None:
    await client.send_all(ALIVE)
    came = b""
    while not came.endswith(b'{"live":true}'):
        came += (piece := bytes(await client.receive_some()))
        assert piece
    assert came.startswith(b"HTTP/1.1 200 ")


async def test_a_generator_that_never_waits_stops_soon_after_its_client_has_left_and_others_are_answered() -> None:
    model = Hot()
    async with serving(model) as gateway:
        client, neighbour = await connect(gateway), await connect(gateway)
        await client.send_all(ASK)
        read = 0
        while read < 1_000_000:
            read += len(await client.receive_some())
        for _ in range(10):
            before = model.made
            await answered(neighbour)
            read += len(await client.receive_some())
        before = model.made
        await client.aclose()
        with trio.fail_after(60):
            await model.over.wait()
        assert model.made - before < SOON
        await answered(neighbour)
        await neighbour.aclose()


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="the system has no such bound")
async def test_the_kernel_holds_little_of_what_a_client_does_not_read() -> None:
    model = Hot(text="x" * 1000)
    async with serving(model) as gateway:
        client = await connect(gateway, SO_RCVBUF=65536)
        await client.send_all(ASK)
        made = -1
        while made != model.made:  # until nothing moves any more
            made = model.made
            await trio.sleep(0.3)
        held = model.made * 1000
        limits = gateway.limits
        # twice the client's buffer (the kernel doubles what is asked for), ours, and what the kernel may take ahead
        assert held < 2 * 65536 + limits.send_buffer + 2 * limits.unsent + 65536
        await client.aclose()
        with trio.fail_after(60):
            await model.over.wait()
