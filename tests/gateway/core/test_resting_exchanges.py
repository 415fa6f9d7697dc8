"""Among many tasks, an exchange whose body has yet to come has none: it holds little, and is served as any other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.client import post
from gateway.client.connection import Peer
from gateway.config import Config, LimitsConfig
from gateway.core import inbound, runner
from gateway.errors import TransportLost
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.library.tensors import identity
from models.messages import Part
from protocols.events import ConnectionEnd, Data, End, GoAway, Head, Headers, Request, Reset, Response
from protocols.grpc.framing import frame

MANY, UPLOADS = 4, 40
FEW = MANY + 8  # with the leader, and those in which it finds out that exchanges wait: after 1, 3, 7, 15 others
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
GRPC: Headers = [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
BODY = b"ten bytes!"


@pytest.fixture(autouse=True)
def _few_tasks_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_MANY", MANY)
    monkeypatch.setattr(inbound, "FEW", 200)  # not 4,096, for which the windows have no room


@pytest.fixture(name="hub", params=[True, False], ids=["led", "streams"])
def _hub(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def echo(part: Part) -> Part:
    return part


def gateway(*, hub: bool = True, check: bool = True, **limits: Any) -> Any:
    config = Config(limits=replace(LimitsConfig(), **limits))
    specs = [spec_of(echo, "echo", capacity=1000), spec_of(identity, "identity", capacity=1000)]
    return memory_gateway(specs, config, hub=hub, check=check)


def streams() -> Iterator[int]:
    return iter(range(1, 2 * UPLOADS, 2))


def tasks(served: MemoryGateway) -> int:
    """How many tasks the exchanges have."""
    return len(served.gateway.server.runner._places)


async def uploads(served: MemoryGateway, body: bytes = BODY, sent: int = 1, fields: Headers = ()) -> Peer:
    """A client with many uploads, of each of which a byte has come."""
    peer = served.http2()
    for stream in streams():
        head, *_ = post(stream, "/models/echo/invoke", body, fields)
        await peer.send(head, Data(stream=stream, buffers=(body[:sent],)))
    await wait_all_tasks_blocked()
    assert served.gateway.counts().exchanges == UPLOADS
    return peer


async def calls(served: MemoryGateway, message: bytes, fields: Headers = ()) -> Peer:
    """A client with many calls of gRPC, each of which has sent these bytes."""
    peer, head = served.http2(), Head(method=b"POST", target=STREAM.encode(), authority=b"x", headers=[*GRPC, *fields])
    for stream in streams():
        await peer.send(Request(stream=stream, head=head))
        if message:
            await peer.send(Data(stream=stream, buffers=(message,)))
    await wait_all_tasks_blocked()
    return peer


async def answers(peer: Peer) -> dict[int, tuple[int, bytes]]:
    """The status and body of each answer, once all have ended."""
    status: dict[int, int] = {}
    bodies = {stream: bytearray() for stream in streams()}
    open_ones = set(bodies)
    while open_ones:
        event = await peer.next_event()
        assert not isinstance(event, Reset | ConnectionEnd)
        if type(event) is Response:
            status[event.stream] = event.status
        elif type(event) is Data:
            bodies[event.stream] += event.buffers[0]
        elif type(event) is End:
            open_ones.discard(event.stream)
    return {stream: (status[stream], bytes(body)) for stream, body in bodies.items()}


async def statuses(peer: Peer) -> set[int]:
    return {status for status, _ in (await answers(peer)).values()}


# -- it is served as any other -------------------------------------------------------------------------------------------


async def test_it_has_no_task_until_its_body_is_here(hub: bool) -> None:
    async with gateway(hub=hub) as served:
        peer = await uploads(served)
        assert tasks(served) <= FEW
        for stream in streams():
            await peer.send(Data(stream=stream, buffers=(BODY[1:],)), End(stream=stream))
        assert set((await answers(peer)).values()) == {(200, BODY)}
        await wait_all_tasks_blocked()
        assert served.gateway.counts().endings == {"complete": UPLOADS}


async def test_bodies_in_single_bytes_are_whole(hub: bool) -> None:
    async with gateway(hub=hub) as served:
        peer = await uploads(served)
        for n in range(1, len(BODY)):
            for stream in streams():
                await peer.send(Data(stream=stream, buffers=(BODY[n : n + 1],)))
        for stream in streams():
            await peer.send(End(stream=stream))
        assert set((await answers(peer)).values()) == {(200, BODY)}


async def test_its_wait_is_counted_as_one_for_input(autojump_clock: Any) -> None:
    async with gateway() as served:
        peer = await uploads(served)
        await trio.sleep(3)
        live = list(served.gateway.observer.live)
        assert {exchange.waits_for for exchange in live} == {"input"}
        for stream in streams():
            await peer.send(Data(stream=stream, buffers=(BODY[1:],)), End(stream=stream))
        assert await statuses(peer) == {200}
        assert {round(exchange.waits.input) for exchange in live} == {3}


async def test_a_large_body_begins_its_work_with_its_first_kilobytes() -> None:
    async with gateway() as served:
        peer = await uploads(served, bytes(90_000), sent=150)
        assert tasks(served) <= FEW
        for stream in streams():
            await peer.send(Data(stream=stream, buffers=(bytes(50),)))
        await wait_all_tasks_blocked()
        assert tasks(served) >= UPLOADS


async def test_a_client_that_waits_for_100_continue_gets_it() -> None:
    async with gateway() as served:
        await uploads(served)
        other = served.http2()
        head, *rest = post(1, "/models/echo/invoke", BODY, [(b"expect", b"100-continue")])
        await other.send(head)
        event = await other.next_event()
        assert type(event) is Response
        assert event.status == 100
        await other.send(*rest)
        assert (await other.read_answer(1))[2] == BODY


@pytest.mark.parametrize("begun", [b"", b"\0", frame([bytes(100)])[0][:50]])
async def test_a_call_of_grpc_rests_before_its_first_message(begun: bytes, hub: bool) -> None:
    async with gateway(hub=hub) as served:
        peer = await calls(served, begun)
        assert tasks(served) <= FEW
        for stream in streams():
            await peer.send(Data(stream=stream, buffers=(frame([bytes(100)])[0][len(begun) :],)))
        await wait_all_tasks_blocked()
        assert not served.gateway.server.runner._resting
        for stream in streams():
            await peer.send(End(stream=stream))
        assert await statuses(peer) == {200}  # with the status of the invalid message


@pytest.mark.parametrize("message", [frame([b""])[0], frame([b"x" * 5000])[0][:200]])
async def test_a_call_of_grpc_begins_with_its_first_message_or_much_of_it(message: bytes) -> None:
    async with gateway() as served:
        peer = await calls(served, message)
        assert not served.gateway.server.runner._resting
        for stream in streams():
            await peer.send(End(stream=stream))
        assert await statuses(peer) == {200}


async def test_a_call_of_grpc_keeps_its_deadline(autojump_clock: Any) -> None:
    async with gateway() as served:
        peer, began = await calls(served, b"", [(b"grpc-timeout", b"2S")]), trio.current_time()
        await peer.read_answer(1)
        assert trio.current_time() - began == pytest.approx(2)


# -- it ends as any other ------------------------------------------------------------------------------------------------


async def resets(peer: Peer) -> None:
    await peer.send(*(Reset(stream=stream, code=8) for stream in streams()))


async def says_goodbye(peer: Peer) -> None:
    await peer.send(GoAway())
    peer.transport.send_eof()


async def closes(peer: Peer) -> None:
    peer.close()


@pytest.mark.parametrize("leave", [resets, says_goodbye, closes])
async def test_it_ends_with_its_client(leave: Callable[[Peer], Awaitable[None]], hub: bool) -> None:
    async with gateway(hub=hub) as served:
        peer = await uploads(served)
        await leave(peer)
        await wait_all_tasks_blocked()
        assert served.gateway.counts().endings == {"cancelled-by-client": UPLOADS}


async def test_an_upload_that_stops_is_refused_in_time(autojump_clock: Any) -> None:
    async with gateway(body_silence=5) as served:
        peer, began = await uploads(served), trio.current_time()
        assert await statuses(peer) == {408}
        assert 5 < trio.current_time() - began <= 7


async def test_it_may_finish_while_the_server_drains(hub: bool, autojump_clock: Any) -> None:
    async with gateway(hub=hub) as served, trio.open_nursery() as nursery:
        peer = await uploads(served)
        await trio.sleep(1)
        nursery.start_soon(served.gateway.drain)
        await wait_all_tasks_blocked()
        for stream in streams():
            await peer.send(Data(stream=stream, buffers=(BODY[1:],)), End(stream=stream))
        assert await statuses(peer) == {200}


async def test_the_deadline_of_the_drain_ends_it(hub: bool, autojump_clock: Any) -> None:
    async with gateway(hub=hub) as served, trio.open_nursery() as nursery:
        peer = await uploads(served)
        nursery.start_soon(served.gateway.drain)
        assert await statuses(peer) == {503}


async def test_the_end_of_the_server_leaves_nothing(hub: bool) -> None:
    async with gateway(hub=hub, check=False) as served:
        peer = await uploads(served)
    counts = served.gateway.counts()
    assert (counts.exchanges, counts.bytes_reserved) == (0, 0)
    assert sum(counts.endings.values()) == UPLOADS
    with suppress(TransportLost):
        await peer.read_answer(1)


async def test_a_lost_connection_after_the_end_starts_nothing() -> None:
    async with gateway(check=False) as served:
        await uploads(served)
        connections = list(served.gateway.server.connections)
    for connection in connections:
        connection.lost()
    assert served.gateway.counts().exchanges == 0
