"""The doorbell: remembered when nobody waits, one wake-up for one waiter, and a cancelled wait changes nothing."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.doorbell import Doorbell


async def test_a_ring_wakes_the_waiting_task() -> None:
    bell, woken = Doorbell(), trio.Event()

    async def wait() -> None:
        await bell.wait()
        woken.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        before = (bell.waiting, woken.is_set())
        bell.ring()
        assert (*before, bell.waiting) == (True, False, False)
    assert woken.is_set()


async def test_a_ring_that_nobody_heard_lets_the_next_wait_return_once() -> None:
    bell = Doorbell()
    bell.ring()
    bell.ring()
    await bell.wait()
    await assert_blocked(bell)


async def assert_blocked(bell: Doorbell) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bell.wait)
        await wait_all_tasks_blocked()
        assert bell.waiting
        nursery.cancel_scope.cancel()
    assert not bell.waiting


async def test_two_rings_wake_one_wait() -> None:
    bell = Doorbell()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bell.wait)
        await wait_all_tasks_blocked()
        bell.ring()
        bell.ring()
    await bell.wait()
    await assert_blocked(bell)


async def test_a_wait_is_always_a_checkpoint() -> None:
    bell = Doorbell()
    bell.ring()
    with trio.testing.assert_checkpoints():
        await bell.wait()


async def test_a_cancelled_wait_leaves_a_silent_bell_silent() -> None:
    bell = Doorbell()
    await assert_blocked(bell)
    bell.ring()
    await bell.wait()
    await assert_blocked(bell)


async def test_a_cancelled_wait_leaves_a_rung_bell_rung() -> None:
    bell = Doorbell()
    bell.ring()
    with trio.CancelScope() as scope:
        scope.cancel()
        await bell.wait()
    assert scope.cancelled_caught
    await bell.wait()


async def test_a_ring_before_a_cancel_in_the_same_tick_still_returns() -> None:
    # rescheduled is rescheduled: whoever was woken looks again before it is cancelled at its next checkpoint
    bell, looked = Doorbell(), []

    async def wait() -> None:
        await bell.wait()
        looked.append(True)
        await trio.lowlevel.checkpoint()
        looked.append(False)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        bell.ring()
        nursery.cancel_scope.cancel()
    assert looked == [True]


async def test_a_ring_after_a_cancel_in_the_same_tick_is_kept_for_the_next_wait() -> None:
    bell = Doorbell()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bell.wait)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        bell.ring()
    await bell.wait()


async def test_a_second_waiter_is_a_mistake_that_shows() -> None:
    bell = Doorbell()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bell.wait)
        await wait_all_tasks_blocked()
        with pytest.raises(AssertionError, match="one waiter"):
            await bell.wait()
        assert bell.waiting
        bell.ring()


async def test_no_item_is_lost_between_a_ringer_and_a_waiter_that_is_cancelled_at_any_moment() -> None:
    bell, items, got = Doorbell(), [], []
    wanted = 50

    async def ringer() -> None:
        for i in range(wanted):
            items.append(i)
            bell.ring()
            if i % 3:
                await trio.lowlevel.checkpoint()

    async def take() -> None:
        while not items:
            await bell.wait()
        got.append(items.pop(0))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ringer)
        for i in range(10 * wanted):
            with trio.CancelScope() as scope:
                if i % 2:
                    scope.cancel()
                await take()
            if len(got) == wanted:
                break
            if i % 5 == 0:
                await trio.lowlevel.checkpoint()
    assert got == list(range(wanted))
