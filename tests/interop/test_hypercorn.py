"""What is weaker under hypercorn than on our own listeners, each point pinned: where one of these fails, docs/reference/asgi.md
may promise more."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from hypercorn.config import Config as ServerConfig
from hypercorn.trio import serve

from gateway import client
from gateway.asgi import ASGIApp
from gateway.client import Peer, post
from gateway.config import Config, DrainConfig, LimitsConfig, ListenConfig
from gateway.gateway import Gateway
from models.messages import Part, Prompt, Token
from protocols.errors import RemoteProtocolError
from protocols.events import ConnectionEnd, Data, End, Reset, Response

PIECE = 1000
told = 0


async def cut(part: Part) -> AsyncIterator[bytes]:
    """A body that fails in its middle."""
    yield bytes(PIECE)
    await trio.sleep(0.2)
    raise RuntimeError("secret")


async def endless(prompt: Prompt) -> AsyncIterator[Token]:
    """Two megabytes of tokens."""
    global told
    for told in range(2000):
        yield Token(text="x" * PIECE, id=told)


@asynccontextmanager
async def mounted() -> AsyncIterator[tuple[Gateway, int]]:
    """A gateway under hypercorn, and its port."""
    config = Config(listen=ListenConfig(port=-1), drain=DrainConfig(timeout=1), limits=LimitsConfig(write_stall=2))
    gateway = Gateway(config, [cut, endless])
    server = ServerConfig()
    server.bind, server.errorlog = ["127.0.0.1:0"], None
    stop = trio.Event()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            run = partial(serve, ASGIApp(gateway), server, shutdown_trigger=stop.wait)
            (where,) = await nursery.start(run)
            yield gateway, int(where.rpartition(":")[2])
            stop.set()
        counts = gateway.counts()
        assert (counts.connections, counts.exchanges, counts.bytes_reserved, counts.slots_in_use) == (0, 0, 0, 0)


async def rest(peer: Peer) -> list[Any]:
    """The events of an answer up to its end."""
    events: list[Any] = []
    while not (events and isinstance(events[-1], End | Reset | ConnectionEnd)):
        event = await peer.next_event()
        if isinstance(event, Data):
            peer.credit(event)
        events.append(event)
    return events


async def test_over_http1_a_body_that_cannot_be_completed_ends_with_its_connection() -> None:
    async with mounted() as (_, port), client.connect("127.0.0.1", port) as transport:
        peer = client.http1(transport)
        await peer.send(*post(1, "/models/cut/invoke", b"x"))
        with pytest.raises(RemoteProtocolError, match="in the middle of a message"):
            await rest(peer)


async def test_over_http2_its_client_waits_for_an_end_that_never_comes() -> None:
    async with mounted() as (gateway, port), client.connect("127.0.0.1", port) as transport:
        peer = client.http2(transport)
        await peer.send(*post(1, "/models/cut/invoke", b"x"))
        with trio.move_on_after(2) as patience:
            await rest(peer)
        assert patience.cancelled_caught
        assert gateway.counts().endings == {"model-error": 1}


@pytest.mark.parametrize("kind", ["http1", "http2"])
async def test_over_http2_a_reader_that_stops_does_not_stop_its_model(kind: str) -> None:
    global told
    told = 0
    asked = {"inputs": "x", "stream": True, "parameters": {"max_new_tokens": 10_000}}
    async with mounted() as (_, port), client.connect("127.0.0.1", port) as transport:
        peer = getattr(client, kind)(transport)
        await peer.send(*post(1, "/predictions/endless", json.dumps(asked).encode()))
        assert isinstance(await peer.next_event(), Response) or kind == "http2"
        with trio.move_on_after(3):
            while told < 1999:  # noqa: ASYNC110  # nothing tells when it does not come to that
                await trio.sleep(0.05)
        assert (told == 1999) == (kind == "http2")


async def test_a_client_that_resets_its_stream_stops_its_model() -> None:
    async with mounted() as (gateway, port), client.connect("127.0.0.1", port) as transport:
        peer = client.http2(transport)
        await peer.send(*post(1, "/models/cut/invoke", b"x"))
        while not isinstance(await peer.next_event(), Data):
            pass
        await peer.send(Reset(stream=1, code=8))
        while not gateway.counts().endings:  # noqa: ASYNC110  # nothing tells
            await trio.sleep(0.01)
        assert gateway.counts().endings == {"cancelled-by-client": 1}
