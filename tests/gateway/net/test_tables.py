"""Tables give back the room of a crowd that has gone, and keep who is there."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.core.memory import SMALLEST, BodyPool
from gateway.net.readiness import Poller
from gateway.net.tables import is_hollow, shrink, shrink_tables_of_trio, shrunk
from gateway.testing import memory_gateway
from models.library.echo import Echo

CROWD = 5000


def test_a_set_that_a_crowd_has_left_is_small_again_and_the_same() -> None:
    table = set(range(CROWD))
    joined = table.add
    table -= set(range(10, CROWD))
    assert is_hollow(table)
    same = table
    shrink(table)
    assert table is same
    assert sys.getsizeof(table) < 4096
    joined(-1)
    assert table == {*range(10), -1}


def test_a_dict_that_a_crowd_has_left_is_copied() -> None:
    table = {number: str(number) for number in range(CROWD)}
    assert shrunk(table) is table, "who is there stays"
    for number in range(10, CROWD):
        del table[number]
    after = shrunk(table)
    assert sys.getsizeof(after) < 4096
    assert after == {number: str(number) for number in range(10)}
    assert shrunk(after) is after


def test_a_table_that_has_just_grown_is_not_hollow() -> None:
    grown: set[int] = set()
    owned: dict[int, int] = {}
    for number in range(3 * CROWD):
        grown.add(number)
        owned[number] = number
        assert not is_hollow(grown)
        assert not is_hollow(owned)


def test_a_pool_whose_loans_are_back_has_a_small_table() -> None:
    pool = BodyPool(0)
    lent = [pool.take(SMALLEST, 0.0) for _ in range(2000)]
    large = sys.getsizeof(pool._loans)
    pool.rest()
    assert (len(pool._loans), sys.getsizeof(pool._loans)) == (2000, large)
    lent.clear()
    pool.rest()
    assert sys.getsizeof(pool._loans) < large / 100


async def test_trio_gives_back_the_room_of_its_tables_of_tasks() -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(CROWD):
            nursery.start_soon(trio.lowlevel.checkpoint)
        for _ in range(3):
            nursery.start_soon(trio.sleep_forever)
        await wait_all_tasks_blocked()
        hollow = hollow_sets()
        shrink_tables_of_trio(nursery)
        assert len(hollow) > 1
        assert not any(map(is_hollow, hollow))
        assert len(nursery.child_tasks) == 3
        nursery.start_soon(trio.lowlevel.checkpoint)
        nursery.cancel_scope.cancel()


def hollow_sets() -> list[set[object]]:
    return [found for found in gc.get_objects() if type(found) is set and is_hollow(found)]


@pytest.mark.skipif(not Poller.available, reason="needs epoll")
async def test_a_poller_forgets_nobody_when_it_rests() -> None:
    told: list[int] = []

    class Owner:
        blocked = False

        def readable(self, hung_up: bool) -> None:
            told.append(1)

        def writable(self) -> None: ...
        def failed(self, error: Exception) -> None: ...

    class Edges:
        def register(self, descriptor: int, mask: int, /) -> None: ...
        def unregister(self, descriptor: int, /) -> None: ...
        def poll(self, timeout: float, at_most: int, /) -> list[tuple[int, int]]:
            return [(0, 1)]

        def close(self) -> None: ...
        async def wait(self) -> None: ...

    poller = Poller(Edges())
    places = [poller.watch(descriptor) for descriptor in range(CROWD)]
    for place in places:
        place.tell(Owner())
    for place in places[1:]:
        place.forget()
    poller.look()
    poller.rest()
    assert poller.tell(10) == 1
    assert told == [1]


async def test_a_model_gives_back_the_room_of_its_tables_of_callers() -> None:
    async with memory_gateway([Echo()]) as memory:
        (worker,) = memory.gateway.supervisor.workers.values()
        tables: list[set[Any]] = [worker.slots.live, worker.slots.waiting, worker.slots.lingering]
        for table in tables:
            table.update(range(CROWD))
            table.difference_update(range(CROWD))
        memory.gateway.rest()
        assert all(sys.getsizeof(table) < 16 * 1024 for table in tables)
        for table in tables:
            table.clear()


async def test_the_acceptor_gives_back_the_room_of_its_table_of_handshakes() -> None:
    async with memory_gateway() as memory:
        handshakes: Any = memory.gateway.acceptor.handshakes
        for n in range(CROWD):
            handshakes._waiting[n] = None
        for n in range(CROWD):
            del handshakes._waiting[n]
        memory.gateway.rest()
        assert sys.getsizeof(handshakes._waiting) < 16 * 1024
