"""The network between a client and a gateway in memory: bytes arrive in order, and faults happen where they are declared."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.errors import TransportLost
from gateway.net.transport import MemoryTransport
from gateway.testing import Link, NetworkProfile, Way, memory_gateway
from models.adapt import spec_of
from models.library.echo import Echo

echo = spec_of(Echo(), "echo")
HELLO = bytes(range(100))


@asynccontextmanager
async def linked(profile: NetworkProfile | None = None, capacity: int = 65536) -> AsyncIterator[Link]:
    link = Link(profile, capacity)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        yield link
        nursery.cancel_scope.cancel()


def receive(end: MemoryTransport, most: int = 1000) -> bytes | None:
    """The bytes of one receive; None if it would wait."""
    buffer = memoryview(bytearray(most))
    n = end.try_receive_into(buffer)
    return None if n is None else bytes(buffer[:n])


async def test_both_ways_carry_in_order_and_each_end_is_seen(autojump_clock: Any) -> None:
    async with linked() as link:
        link.client.try_send([HELLO])
        link.server.try_send([b"hi"])
        link.client.send_eof()
        await wait_all_tasks_blocked()
        assert (receive(link.server), receive(link.server), receive(link.client)) == (HELLO, b"", b"hi")
        link.server.close()
        await wait_all_tasks_blocked()
        assert receive(link.client) == b""
        assert link.carried == (100, 2)


async def test_what_is_sent_to_an_end_that_has_closed_is_answered_with_a_reset(autojump_clock: Any) -> None:
    async with linked() as link:
        link.client.close()
        await wait_all_tasks_blocked()
        assert receive(link.server) == b""
        link.server.try_send([HELLO])
        await wait_all_tasks_blocked()
        with pytest.raises(TransportLost, match="reset"):
            receive(link.server)


@pytest.mark.parametrize("closed", [True, False])
async def test_who_has_closed_does_not_wait_for_ever_to_be_taken(closed: bool, autojump_clock: Any) -> None:
    async with linked(capacity=100) as link:
        for _ in range(4):
            link.client.try_send([HELLO])
            await wait_all_tasks_blocked()
        if closed:
            link.client.close()
        await trio.sleep(25)
        if closed:
            with pytest.raises(TransportLost, match="reset"):
                receive(link.server)
        else:
            assert receive(link.server) == HELLO


async def test_a_byte_at_a_time_is_a_byte_at_a_time(autojump_clock: Any) -> None:
    async with linked(NetworkProfile(up=Way(piece=1))) as link:
        link.client.try_send([HELLO])
        got = bytearray()
        while len(got) < 100:
            await link.server.wait_readable()
            piece = receive(link.server)
            assert piece is not None
            assert len(piece) == 1
            got += piece
        assert got == HELLO


@pytest.mark.parametrize(("way", "arrives"), [(Way(delay=3), 3), (Way(rate=50), 2), (Way(delay=3, rate=50), 5)])
async def test_it_takes_its_time(way: Way, arrives: float, autojump_clock: Any) -> None:
    async with linked(NetworkProfile(down=way)) as link:
        link.server.try_send([HELLO])
        began = trio.current_time()
        await link.client.wait_readable()
        assert trio.current_time() - began == pytest.approx(arrives)
        assert receive(link.client) == HELLO


async def test_no_more_is_under_way_than_it_holds(autojump_clock: Any) -> None:
    async with linked(NetworkProfile(up=Way(delay=3600)), capacity=30) as link:
        sent = 0
        while n := link.client.try_send([HELLO]):
            sent += n
            await wait_all_tasks_blocked()
        assert sent == 60, "what it holds, and what its end holds"


@pytest.mark.parametrize("at", [0, 1, 37, 99])
async def test_it_cuts_and_resets_at_that_byte(at: int, autojump_clock: Any) -> None:
    async with linked(NetworkProfile(up=Way(cut_at=at))) as link:
        link.client.try_send([HELLO])
        await wait_all_tasks_blocked()
        assert link.disturbed
        assert (receive(link.server) or b"") + (receive(link.server) or b"") == HELLO[:at]
        assert receive(link.client) == b""
        with pytest.raises(TransportLost):
            link.client.try_send([HELLO])
    async with linked(NetworkProfile(up=Way(reset_at=at))) as link:
        link.client.try_send([HELLO])
        await wait_all_tasks_blocked()
        for end in (link.client, link.server):
            with pytest.raises(TransportLost, match="reset"):
                receive(end)


async def test_it_stalls_at_that_byte_and_goes_on(autojump_clock: Any) -> None:
    async with linked(NetworkProfile(up=Way(stall_at=40, stall=9))) as link:
        link.client.try_send([HELLO])
        await wait_all_tasks_blocked()
        assert receive(link.server) == HELLO[:40]
        began = trio.current_time()
        await link.server.wait_readable()
        assert trio.current_time() - began == 9
        assert receive(link.server) == HELLO[40:]


async def test_a_clogged_one_carries_nothing_until_it_is_let_go(autojump_clock: Any) -> None:
    async with linked() as link:
        link.clog()
        link.client.try_send([HELLO])
        link.server.try_send([HELLO])
        await trio.sleep(60)
        assert (receive(link.server), receive(link.client)) == (None, None)
        link.unclog()
        await wait_all_tasks_blocked()
        assert (receive(link.server), receive(link.client)) == (HELLO, HELLO)


async def test_a_clogged_one_that_is_cut_is_over(autojump_clock: Any) -> None:
    async with linked() as link:
        link.clog()
        link.client.try_send([HELLO])
        await wait_all_tasks_blocked()
        link.cut()
        await wait_all_tasks_blocked()
        assert (receive(link.server), receive(link.client)) == (b"", b"")


async def test_clients_of_a_gateway_in_memory_go_through_it(autojump_clock: Any) -> None:
    slow = NetworkProfile(up=Way(piece=1, delay=0.25), down=Way(piece=7, delay=0.25))
    async with memory_gateway([echo], check=True) as served:
        for wire in ("http1", "http2"):
            began = trio.current_time()
            answer = await served.client(wire, slow).invoke("echo", HELLO)
            assert (answer.status, answer.body) == (200, HELLO)
            assert trio.current_time() - began >= 0.5
        lost = served.client("http1", NetworkProfile(up=Way(reset_at=60)))
        with pytest.raises(TransportLost):
            await lost.invoke("echo", HELLO)


@pytest.mark.parametrize("wrong", [{"piece": 0}, {"rate": 0}, {"delay": -1}, {"stall": -1}])
def test_what_no_network_does_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a piece has a byte"):
        Way(**wrong)
