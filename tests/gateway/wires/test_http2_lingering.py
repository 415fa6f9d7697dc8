"""Answers over HTTP/2 that are whole before the upload is: they arrive, the connection goes on, and nothing is held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio

from gateway.config import Config, HTTP2Config
from gateway.testing.stories.talk import Leave
from gateway.wires.http2 import HTTP2Wire
from models.errors import ModelError
from models.session import Session
from protocols.events import Data, End, GoAway, Reset, Response
from protocols.http2.connection import LOOKS, HTTP2Connection
from tests.gateway.promises import LEAVES, Call, House, KiB, Line, Probe, at_once, echoing, limits, raw, serving, silent

WINDOW = HTTP2Config().initial_window
FIRST = 65_535
"""The connection's window, and each stream's, until the server's SETTINGS and WINDOW_UPDATE are read."""
SIZES = (1, FIRST - 1, FIRST, FIRST + 1, WINDOW + 1, 2 * WINDOW, 300 * KiB, 1024 * KiB)


async def brief(probe: Probe, session: Session[Any, Any]) -> None:
    """Answers without a look at its input."""
    await probe.say(session)


async def unwilling(probe: Probe, session: Session[Any, Any]) -> None:
    """Refuses without a look at its input."""
    raise ModelError("not today", status=409)


_EVENTS = [("content-type", "application/vnd.amazon.eventstream")]
EARLY = {
    "no such path": ("POST", "/none", 404, []),
    "no such model": ("POST", "/v2/models/none/infer", 404, []),
    "no such endpoint": ("POST", "/endpoints/none/invocations-bidirectional-stream", 400, []),
    "no such method": ("PUT", "/v2/models/tensors/infer", 405, []),
    "no such coding": ("POST", "/v2/models/tensors/infer", 415, [("content-encoding", "br")]),
    "too large": ("POST", "/v2/models/tensors/infer", 413, [("content-length", "{}")]),
    "no such length": ("POST", "/v2/models/tensors/infer", 400, [("inference-header-content-length", "x")]),
    "a head over its limit": ("POST", "/v2/models/tensors/infer", 431, [("x", "y")] * 101),
    "answered early": ("POST", "/endpoints/brief/invocations-bidirectional-stream", 200, _EVENTS),
    "refused by the model": ("POST", "/endpoints/unwilling/invocations-bidirectional-stream", 200, _EVENTS),
}


def house_of(config: Config | None = None) -> Any:
    """A house that serves the requests of EARLY."""
    tensors = Probe(silent, "tensors").spec("v2-http2")
    parts = [
        Probe(script, name).spec("bidi") for script, name in ((brief, "brief"), (unwilling, "unwilling"), (echoing, "other"))
    ]
    return serving(tensors, *parts, config=config or limits(json=0, body=0), capacity=20 * KiB)


async def head(line: Line, what: str, size: int) -> tuple[int, int]:
    """Sends the head of one of EARLY: its stream, and the status that is due."""
    method, path, status, headers = EARLY[what]
    stream = line.next_stream()
    fields = [(name.encode(), value.format(size).encode()) for name, value in headers]
    await line.send(raw(stream, method.encode(), path, headers=fields))
    return stream, status


async def answer(line: Line, stream: int) -> int:
    """Reads to END_STREAM, and says the status."""
    response = await line.event(stream)
    assert isinstance(response, Response)
    while not isinstance(event := await line.event(stream), End):
        assert isinstance(event, Data)
        line.peer.credit(event)
    return response.status


async def works(house: House, line: Line) -> None:
    """Another stream of the connection is served at once."""
    with at_once():
        stream = line.next_stream()
        await line.send(raw(stream, b"GET", "/v2/health/live"), End(stream=stream))
        assert await answer(line, stream) == 200
        await line.ping()


def machine(house: House, line: Line) -> HTTP2Connection:
    """The server's."""
    wire = house.connection(line).wire
    assert isinstance(wire, HTTP2Wire)
    return wire._machine


async def refused(house: House, line: Line) -> int:
    """A stream that lingers: its answer is read, its request is not over."""
    stream, status = await head(line, "no such path", 0)
    assert await answer(line, stream) == status
    assert machine(house, line).lingering
    return stream


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("what", EARLY)
async def test_who_uploads_to_the_end_reads_the_answer_and_no_reset(what: str, size: int, autojump_clock: Any) -> None:
    async with house_of() as house:
        line = house.line("http2")
        with at_once():
            stream, status = await head(line, what, size)
            await line.send(Data(stream=stream, buffers=(bytes(size),)), End(stream=stream))
            assert await answer(line, stream) == status
            while line.machine.queued(stream):
                await line.read()
            await house.still()
            await line.read()
            house.check_ledger()
            assert machine(house, line).lingering == 0
            assert not line._kept[stream], "not even a reset"
        await works(house, line)
        assert not line.goaways


@pytest.mark.parametrize("sent", [0, 1, FIRST, WINDOW])
@pytest.mark.parametrize("what", EARLY)
async def test_who_waits_for_the_streams_end_is_asked_to_stop_a_moment_after_the_answer(
    what: str, sent: int, autojump_clock: Any
) -> None:
    async with house_of() as house:
        line = house.line("http2")
        await line.read()
        stream, status = await head(line, what, 10**9)
        if sent:
            await line.send(Data(stream=stream, buffers=(bytes(sent),)))
        with at_once():
            assert await answer(line, stream) == status
            house.check_ledger()
            assert house.gateway.counts().exchanges == 0
            await works(house, line)
        began = trio.current_time()
        assert await line.event(stream) == Reset(stream=stream, code=0)
        assert 1 <= trio.current_time() - began <= 3  # the coarse timer looks twice
        house.check_ledger()
        await works(house, line)
        assert not line.goaways


async def test_who_goes_on_slowly_may_and_has_an_end(autojump_clock: Any) -> None:
    async with house_of() as house:
        line = house.line("http2")
        stream = await refused(house, line)
        began = trio.current_time()
        while line.machine.is_open(stream):
            await line.send(Data(stream=stream, buffers=(bytes(KiB),)))
            await trio.sleep(0.5)
            await line.read()
        assert await line.event(stream) == Reset(stream=stream, code=0)
        assert LOOKS - 1 <= trio.current_time() - began <= LOOKS + 2
        await works(house, line)


async def test_a_flood_behind_the_answer_is_dropped_beside_its_neighbours_and_ends_at_its_bound(autojump_clock: Any) -> None:
    bound = 1024 * KiB
    async with house_of() as house:
        line = house.line("http2")
        await line.read()
        machine(house, line).limits = replace(machine(house, line).limits, linger=bound)
        with at_once():
            stream = await refused(house, line)
            await line.send(Data(stream=stream, buffers=(bytes(bound // 2),)))
            while line.machine.queued(stream):
                await line.read()
                assert house.gateway.counts().bytes_reserved == 0
            await works(house, line)
            await line.send(Data(stream=stream, buffers=(bytes(2 * bound),)))
            while line.machine.queued(stream):
                await line.read()
            assert await line.event(stream) == Reset(stream=stream, code=0)
            await works(house, line)
            house.check_ledger()
        assert house.gateway.budget.high_water < 2 * WINDOW


@pytest.mark.parametrize("streams", [2, 3, 10])
async def test_streams_that_linger_leave_the_places_to_new_ones(streams: int, autojump_clock: Any) -> None:
    async with house_of(Config(http2=HTTP2Config(streams=streams))) as house:
        line = house.line("http2")
        with at_once():
            for _ in range(10 * streams):
                await refused(house, line)
                await line.read()
                assert machine(house, line).lingering <= streams // 2
            calls: list[Call] = []
            while len(calls) < streams:
                calls.append(await house.call("bidi", "other", line))
                await line.read()
            assert [call.over for call in calls] == [None] * streams, "all places are theirs"
            assert machine(house, line).lingering == 0
            assert house.gateway.counts().exchanges == streams
            for call in calls:
                await call.leave(Leave.STREAM)
            await house.still()
        assert house.endings == {"refused": 10 * streams, "cancelled-by-client": streams}


@pytest.mark.parametrize("how", [*LEAVES.values(), GoAway()], ids=[*LEAVES, "goaway"])
async def test_a_client_that_leaves_behind_its_answer_leaves_nothing(how: Leave | GoAway, autojump_clock: Any) -> None:
    async with house_of() as house:
        call = await house.call("bidi", "brief")
        assert await call.next() == 0
        await call.rest()
        with at_once():
            assert machine(house, call.line).lingering == 1
            await call.leave(how)
            await house.still()
            assert house.endings == {"complete": 1}


async def test_the_clients_own_reset_behind_its_answer_is_not_leaving(autojump_clock: Any) -> None:
    async with house_of() as house:
        call = await house.call("bidi", "brief")
        await call.rest()
        with at_once():
            await call.leave(Leave.STREAM)
            await house.still()
            assert machine(house, call.line).lingering == 0
            await works(house, call.line)
        await trio.sleep(3)
        await call.line.read()
        assert house.endings == {"complete": 2}


async def test_a_drain_does_not_wait_for_uploads_whose_answer_is_written(autojump_clock: Any) -> None:
    async with house_of() as house:
        line = house.line("http2")
        await refused(house, line)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.gateway.drain)
            await line.over()
        assert trio.current_time() - began < 5
        assert house.endings == {"refused": 1}
        assert house.connections == 0
        line.peer.close()
