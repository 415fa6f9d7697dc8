"""A refused body is gone once that is said: no exception keeps it, a request or its exchange until the collector comes."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
import trio.lowlevel

from gateway import client
from gateway.config import Config, V2Config
from gateway.errors import DeadlineExceeded, TransportLost
from models.adapt import spec_of
from models.errors import ModelError
from models.messages import Family, InferRequest
from models.spec import Model, ModelSpec, Restart, RestartPolicy
from protocols import v2
from protocols.aws import bidi
from protocols.errors import LocalProtocolError
from protocols.events import Data, End, Frame, Opcode
from tests.gateway.core.refused_bodies import (
    config_of,
    growth,
    kept_by,
    lying,
    numbers,
    of_a_model,
    refusals,
    server,
    signature,
    specs,
)
from tests.gateway.dialects.v2.test_v2_pieces import Taker
from tests.gateway.promises import WIRES, House, Probe, raw, serving, silent

MiB = 1024 * 1024
SIZE = 8 * MiB
KINDS = refusals(SIZE)


@pytest.fixture
def uncollected() -> Iterator[Callable[[], list[str]]]:
    """Nothing is collected meanwhile. Its function tells the collector's findings then: each exception that is in a cycle and
    knows the frames it came through, and each piece of memory of more than 64 KiB."""
    logging.disable(logging.CRITICAL)  # pytest keeps what is logged, tracebacks and all
    gc.collect()
    gc.freeze()  # objects that exist already are pytest's: this test leaves them out
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)

    def found() -> list[str]:
        gc.collect()
        garbage, gc.garbage[:] = gc.garbage[:], []
        return kept_by(garbage)

    yield found
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("kind", ["http1", "http2"])
async def test_no_exception_of_a_refusal_keeps_memory(
    kind: str, what: str, tmp_path: Path, uncollected: Callable[[], list[str]]
) -> None:
    refused = KINDS[what]()
    fields = [(name, value) for name, value in signature(refused, b"localhost") if name != b"content-length"]
    async with serving(*specs(), config=config_of(SIZE, str(tmp_path / "keys.ini"))) as house:
        for _ in range(3):
            line = house.line(kind)
            head = raw(
                1, b"POST", refused.path, headers=fields, content_length=None if refused.chunked else len(refused.body)
            )
            with suppress(TransportLost, LocalProtocolError):  # the answer may come before the body is sent
                await line.send(head, Data(stream=1, buffers=(refused.body,)), End(stream=1))
            if refused.status:
                status, _, said = await line.peer.read_answer(1)
                assert status == refused.status, said[:300]
            else:
                await house.still()  # until somebody works for it
            line.peer.close()
            await house.still()
            while house.gateway.counts().exchanges:  # one that was left is at work in a thread
                await trio.lowlevel.checkpoint()
        found = uncollected()
    assert not found, found


@pytest.mark.programs
@pytest.mark.parametrize(
    "what",
    [
        "an inflated body that is too large",
        "an inflated body whose client has left",
        "bad JSON of v2",
        "numbers that are none",
        "elements that lie",
        "a function that fails",
    ],
)
def test_a_server_that_collects_nothing_is_as_large_after_many_refusals_as_after_a_few(what: str) -> None:
    size = 16 * MiB
    with server(size) as served:
        first, second = growth(served, refusals(size)[what](), 10)
        assert first <= 32 * MiB
        assert second <= 32 * MiB
        assert served.found() == []


async def raising(probe: Probe, session: Any) -> None:
    await probe.take(session)
    raise ModelError("no such number")


async def crashing_late(probe: Probe, session: Any) -> None:
    await probe.take(session)
    await probe.say(session)
    raise ZeroDivisionError


async def answering_wrong(probe: Probe, session: Any) -> None:
    await probe.take(session)
    await session.send(object())


@pytest.mark.parametrize("behaviour", [raising, crashing_late, answering_wrong, silent])
@pytest.mark.parametrize("wire", WIRES)
async def test_no_exception_of_a_failed_call_is_in_a_cycle(
    wire: str, behaviour: Any, uncollected: Callable[[], list[str]], autojump_clock: Any
) -> None:
    probe = Probe(behaviour)
    async with serving(probe.spec(wire), wire=wire) as house:
        for how in ("read", "deadline", "leave"):
            call = await house.call(wire)
            await house.still()
            if behaviour is not silent:
                with suppress(v2.V2Error):
                    await call.rest()
            elif how == "deadline":
                (exchange,) = house.gateway.observer.live
                exchange.interrupt(DeadlineExceeded("time is over"))
                await call.rest()
            call.line.peer.close()
            await house.still()
        del call
        found = uncollected()
    assert not found, found


async def sent(house: House, kind: str, path: str, body: bytes, fields: Any = ()) -> tuple[int, bytes]:
    """A body whose length nobody says."""
    line = house.line(kind)
    stream = line.next_stream()
    with suppress(TransportLost, LocalProtocolError):  # the answer may come before the body is sent
        await line.send(raw(stream, b"POST", path, headers=fields), Data(stream=stream, buffers=(body,)), End(stream=stream))
    status, _, said = await line.peer.read_answer(stream)
    line.peer.close()
    await house.still()
    return status, said


async def test_a_broken_event_stream_is_gone_with_its_session(uncollected: Callable[[], list[str]]) -> None:
    event = b"".join(bidi.encode_part(bytes(2 * MiB), bidi.DataType.BINARY, bidi.Completion.COMPLETE))
    broken = event[:-1] + bytes([event[-1] ^ 1])
    async with serving(*specs()) as house:
        for body in (broken, event[:-100], b'{"x":', b"\xff" * MiB):
            fields = [(b"content-type", bidi.CONTENT_TYPE.encode())]
            await sent(house, "http2", "/endpoints/speaking/invocations-bidirectional-stream", body, fields)
        found = uncollected()
    assert not found, found


async def test_bad_messages_of_a_session_are_gone_when_they_are_refused(uncollected: Callable[[], list[str]]) -> None:
    async with serving(*specs()) as house:
        peer = await client.websocket(house.memory.connect(), "/v2/models/total/infer")
        for text in (numbers(100_000, '"a"'), b'{"id":"' + b"x" * MiB):
            await peer.send(Frame(opcode=Opcode.TEXT, fin=True, data=text))
            answer = await peer.next_event()
            assert b"error" in bytes(answer.data)
        del answer
        peer.close()
        await house.still()
        found = uncollected()
    assert not found, found


async def test_bad_pieces_are_gone_with_their_refusal(uncollected: Callable[[], list[str]]) -> None:
    taker = spec_of(Taker(), "m", family=Family.TENSOR, pieces=True)
    lie = lying(200_000)
    async with serving(taker) as house:
        for kind in ("http1", "http2"):
            got, said = await sent(house, kind, "/v2/models/m/infer", lie.body, lie.fields)
            assert got == 400, said
        found = uncollected()
    assert not found, found


@pytest.mark.parametrize("where", ["a thread of the load", "the warm-up's answer"])
async def test_a_load_that_fails_keeps_nothing_of_its_model(where: str, uncollected: Callable[[], list[str]]) -> None:
    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        weights = np.zeros(MiB, np.uint8)
        if where == "a thread of the load":
            await trio.to_thread.run_sync(lambda: weights[MiB])

        async def model(session: Any) -> None:
            await session.receive()
            await session.send(weights)

        yield model

    once = RestartPolicy(kind=Restart.TEMPORARY)
    spec = ModelSpec(name="m", family=Family.TENSOR, load=load, warmup=(InferRequest(inputs=()),), restart=once)
    async with serving(spec, config=Config(v2=V2Config(model_control=True))) as house:
        assert (await sent(house, "http1", "/v2/repository/models/m/load", b""))[0] == 500  # once more
        found = uncollected()
        await house.gateway.drain()
    assert not found, found


async def test_a_step_that_fails_after_its_client_has_left_keeps_nothing(uncollected: Callable[[], list[str]]) -> None:
    began, go, over = threading.Event(), threading.Event(), threading.Event()

    def late(x: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        copied = x.copy()
        began.set()
        go.wait(60)
        over.set()
        raise ZeroDivisionError(copied.size)

    asked = of_a_model("late", 500, (MiB,))
    async with serving(spec_of(late)) as house:
        line = house.line("http1")
        await line.send(*house.posted(1, asked.path, asked.body, headers=asked.fields))
        await trio.to_thread.run_sync(began.wait)
        line.peer.close()
        await house.still()
        go.set()
        await trio.to_thread.run_sync(over.wait)
        while house.gateway.counts().slots_in_use:  # nothing tells when
            await trio.lowlevel.checkpoint()
        found = uncollected()
    assert not found, found
