"""Nothing is left of a connection that has ended, even without the garbage collector."""

import gc
from typing import Any

import numpy as np
import pytest
import trio

from gateway.client import post
from gateway.client.questions import infer
from gateway.core import runner
from gateway.core.connection import Connection
from gateway.core.outbound import Outbound
from gateway.core.turn import Turn
from gateway.testing import memory_gateway
from gateway.wires.http1 import HTTP1Wire
from gateway.wires.http2 import HTTP2Wire
from gateway.wires.websocket import WebSocketWire
from models.library.tensors import identity
from protocols.events import Close, Head, Request

THEIRS = (Connection, HTTP1Wire, HTTP2Wire, WebSocketWire)
X = {"INPUT0": np.ones((1, 16), np.float32)}


@pytest.mark.parametrize("wire", ["http1", "http2", "websocket"])
@pytest.mark.parametrize("hub", [True, False], ids=["leader", "waiting"])
async def test_its_wire_and_its_machine_go_at_once(wire: str, hub: bool, autojump_clock: Any) -> None:
    async with memory_gateway([identity], hub=hub) as memory:
        if wire == "websocket":
            peer = await memory.websocket("/v2/models/identity/infer")
        else:
            peer = memory.http2() if wire == "http2" else memory.http1()
            question = infer(X, "identity")
            await peer.send(*post(1, question.path, question.body, question.headers))
            assert (await peer.read_answer(1))[0] == 200
        await trio.testing.wait_all_tasks_blocked()
        assert len(memory.gateway.server.connections) == 1
        gc.collect()
        assert any(type(found) is Connection for found in gc.get_objects())
        gc.disable()
        try:
            if wire == "websocket":
                await peer.send(Close(code=1000))
            peer.close()
            await trio.sleep(10)
            assert not memory.gateway.server.connections
            assert not [found for found in gc.get_objects() if type(found) in THEIRS]
        finally:
            gc.enable()


@pytest.mark.parametrize("hub", [True, False], ids=["leader", "waiting"])
async def test_tasks_that_are_one_too_many_keep_nothing_of_what_they_last_did(
    hub: bool, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_MOST_IDLE", 2)
    async with memory_gateway([identity], hub=hub) as memory:
        peer = memory.http2()
        target, fields = b"/v2/models/identity/infer", [(b"content-length", b"100")]
        head = Head(method=b"POST", target=target, authority=b"localhost", headers=fields)
        await peer.send(*(Request(stream=stream, head=head) for stream in range(1, 40, 2)))
        await trio.testing.wait_all_tasks_blocked()
        assert memory.gateway.counts().exchanges == 20
        gc.collect()
        gc.disable()
        try:
            peer.close()
            await trio.sleep(10)
            assert memory.gateway.counts().exchanges == 0
            assert not [found for found in gc.get_objects() if type(found) in (*THEIRS, Outbound)]
            assert len([found for found in gc.get_objects() if type(found) is Turn and found.task is not None]) <= 4
        finally:
            gc.enable()
