"""The memory of a connection is free as soon as it is gone, without the garbage collector."""

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from gateway.client import post
from gateway.core import server
from gateway.core.exchange import Exchange
from gateway.core.memory import BodyPool
from gateway.errors import Ending
from gateway.testing import memory_gateway
from models.adapt import spec_of
from models.errors import ModelError
from models.library.echo import Echo
from models.library.tensors import identity
from models.messages import Part
from protocols import v2
from tests.gateway.promises import WIRES, Probe, answering, serving, silent

LARGE = 4 * 1024 * 1024


@pytest.fixture
def arrays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list["weakref.ref[Any]"]]:
    """Every buffer that is allocated or lent while the garbage collector rests."""
    seen: list[weakref.ref[Any]] = []
    empty, take, plain = np.empty, BodyPool.take, server.untouched

    def noted(*arguments: Any, **named: Any) -> Any:
        array = empty(*arguments, **named)
        seen.append(weakref.ref(array))
        return array

    def lent(*arguments: Any) -> memoryview:
        view = take(*arguments)
        seen.append(weakref.ref(view.obj))
        return view

    def untouched(n: int) -> memoryview:
        view = plain(n)
        seen.append(weakref.ref(view.obj))
        return view

    monkeypatch.setattr(np, "empty", noted)
    monkeypatch.setattr(server, "untouched", untouched)
    monkeypatch.setattr(BodyPool, "take", lent)
    gc.collect()
    gc.disable()
    yield seen
    gc.enable()


async def test_the_memory_of_a_frame_under_way_goes_with_its_connection(arrays: list["weakref.ref[Any]"]) -> None:
    async with memory_gateway([spec_of(Echo(), "echo")]) as served:
        peer = await served.websocket()
        peer.transport.try_send([b"\x82\xff" + LARGE.to_bytes(8, "big") + bytes(4) + b"the first bytes"])
        await trio.testing.wait_all_tasks_blocked()
        assert [ref() is None for ref in arrays] == [False]
        assert served.gateway.budget.used >= len(b"the first bytes")
        peer.close()
        await trio.testing.wait_all_tasks_blocked()
        assert [ref() is None for ref in arrays] == [True]
        assert served.gateway.budget.used == 0


async def test_the_memory_of_an_upload_goes_with_its_connection(arrays: list["weakref.ref[Any]"]) -> None:
    async with memory_gateway([spec_of(identity, "identity")]) as served:
        peer = served.http1()
        head, *_ = post(1, "/v2/models/identity/infer", bytes(LARGE))
        await peer.send(head)
        peer.transport.try_send([bytes(5000)])
        await trio.testing.wait_all_tasks_blocked()
        assert [ref() is None for ref in arrays] == [False]
        peer.close()
        await trio.testing.wait_all_tasks_blocked()
        assert [ref() is None for ref in arrays] == [True]
        assert served.gateway.budget.used == 0


async def test_the_memory_of_a_request_goes_with_its_answer_though_the_model_raises(
    arrays: list["weakref.ref[Any]"],
) -> None:
    async def failing(part: Part) -> Part:
        raise ModelError("no such sound")

    async with memory_gateway([spec_of(failing, "failing")]) as served:
        peer = served.http1()
        await peer.send(*post(1, "/models/failing/invoke", bytes(LARGE)))
        assert b"no such sound" in (await peer.read_answer(1))[2]
        await trio.testing.wait_all_tasks_blocked()
        assert [ref() is None for ref in arrays] == [True]


async def test_a_body_that_is_only_announced_holds_no_more_than_a_step_of_the_budget() -> None:
    async with memory_gateway([spec_of(identity, "identity")]) as served:
        peer = served.http1()
        head, *_ = post(1, "/v2/models/identity/infer", bytes(64 * LARGE))
        await peer.send(head)
        await trio.testing.wait_all_tasks_blocked()
        assert served.gateway.budget.used <= 1024 * 1024


async def test_a_body_counts_until_the_codec_that_reads_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go = threading.Event(), threading.Event()

    def reading(*arguments: Any) -> Any:
        began.set()
        go.wait(60)
        raise v2.V2Error("read at last")

    monkeypatch.setattr(v2.InferCodec, "parse", reading)
    async with memory_gateway([spec_of(identity, "identity")]) as served:
        over, closed = trio.Event(), served.gateway.server.exchange_closed

        def noticed(exchange: Any) -> None:
            closed(exchange)
            over.set()

        monkeypatch.setattr(served.gateway.server, "exchange_closed", noticed)
        peer = served.http1()
        await peer.send(*post(1, "/v2/models/identity/infer", bytes(LARGE)))
        await trio.to_thread.run_sync(began.wait)
        peer.close()
        await trio.testing.wait_all_tasks_blocked()
        (exchange,) = served.gateway.observer.live
        assert exchange.ending is Ending.CANCELLED, "the ending does not wait for the thread"
        assert served.gateway.budget.used >= LARGE
        go.set()
        with trio.fail_after(60):
            await over.wait()
        assert served.gateway.budget.used == 0


async def raising(probe: Probe, session: Any) -> None:
    await probe.take(session)
    raise ModelError("no such number")


async def crashing(probe: Probe, session: Any) -> None:
    await probe.take(session)
    raise ZeroDivisionError


@pytest.mark.parametrize("behaviour", [answering, raising, crashing, silent])
@pytest.mark.parametrize("wire", WIRES)
async def test_no_exchange_outlives_its_connection_until_the_collector_comes(
    wire: str, behaviour: Any, autojump_clock: Any
) -> None:
    def kept() -> int:
        return sum(type(thing) is Exchange for thing in gc.get_objects())

    probe = Probe(behaviour)
    probe.go.set()
    logging.disable(logging.CRITICAL)  # pytest keeps what is logged, tracebacks and all
    gc.collect()
    gc.disable()
    try:
        before = kept()
        async with serving(probe.spec(wire), wire=wire) as house:
            for _ in range(3):
                call = await house.call(wire)
                await house.still()
                if behaviour is answering:  # the silent model's client leaves during the call
                    await call.rest()
                call.line.peer.close()
                await house.still()
            del call
            assert house.connections == 0
            assert kept() == before
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)
