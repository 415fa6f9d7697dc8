"""However a server ends, each of its exchanges has its one ending, however many there are."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.config import Config, DrainConfig
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.messages import Part
from models.session import Session
from protocols.aws import bidi
from protocols.events import Head, Request

STREAMS = 100  # more than are told of their end in one turn


async def shielded(session: Session[Part, Part]) -> None:
    """A model that is cleaning up when the server ends."""
    try:
        await session.receive()
    finally:
        with trio.move_on_after(3600, shield=True):
            await trio.sleep_forever()


async def silent(session: Session[Part, Part]) -> None:
    await session.receive()


async def streams(served: MemoryGateway) -> None:
    peer, fields = served.http2(), [(b"content-type", bidi.CONTENT_TYPE.encode())]
    target = b"/endpoints/model/invocations-bidirectional-stream"
    head = Head(method=b"POST", target=target, authority=b"localhost", headers=fields)
    await peer.send(*(Request(stream=stream, head=head) for stream in range(1, 2 * STREAMS, 2)))
    await wait_all_tasks_blocked()
    assert served.gateway.counts().exchanges == STREAMS


@pytest.mark.parametrize("hub", [True, False], ids=["led", "streams"])
async def test_a_server_that_is_cancelled(hub: bool, autojump_clock: Any) -> None:
    async with memory_gateway([spec_of(silent, "model", capacity=STREAMS)], hub=hub) as served:
        await streams(served)
    counts = served.gateway.counts()
    assert (counts.connections, counts.exchanges, sum(counts.endings.values())) == (0, 0, STREAMS)


@pytest.mark.parametrize("hub", [True, False], ids=["led", "streams"])
async def test_a_drain_that_models_do_not_heed(hub: bool, autojump_clock: Any) -> None:
    config = Config(drain=DrainConfig(timeout=1))
    async with memory_gateway([spec_of(shielded, "model", capacity=STREAMS)], config, hub=hub) as served:
        await streams(served)
        with trio.fail_after(7200):
            report = await served.gateway.drain()
        assert sum(report.endings.values()) == STREAMS
