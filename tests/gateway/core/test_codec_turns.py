"""Codec steps have turns: a round of the loop has few, connections come round robin, and what was begun is finished first."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import trio
from trio.testing import assert_no_checkpoints, wait_all_tasks_blocked

from gateway.codecs.threads import FREE, codec, long_codec
from gateway.codecs.turns import Stage, codec_turns
from protocols.floods import CODEC_ROUND

SIZE = CODEC_ROUND // 2
READ, USE, INFLATE = Stage.READ, Stage.USE, Stage.INFLATE


class Rounds:
    """Notes what is done in which round of the loop."""

    def __init__(self) -> None:
        self.now = 0
        self.done: list[Any] = []
        self.at: list[int] = []

    def note(self, name: Any = None) -> None:
        self.done.append(name)
        self.at.append(self.now)

    async def count(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            self.now += 1
            await trio.lowlevel.checkpoint()


async def test_steps_of_one_round_wait_for_a_look_at_the_kernel() -> None:
    rounds, begin = Rounds(), trio.Event()

    async def one() -> None:
        await begin.wait()
        await codec(SIZE, rounds.note)

    async with trio.open_nursery() as nursery:
        await nursery.start(rounds.count)
        async with trio.open_nursery() as inner:
            for _ in range(40):
                inner.start_soon(one)
            for _ in range(5):  # until all of them wait
                await trio.lowlevel.checkpoint()
            begin.set()
        nursery.cancel_scope.cancel()
    assert len(rounds.at) == 40
    assert max(map(rounds.at.count, rounds.at)) <= 2


async def test_a_step_alone_does_not_wait() -> None:
    with assert_no_checkpoints():
        assert await codec(FREE, lambda: 7) == 7
        assert await codec(SIZE - 1, lambda: 8, None, READ) == 8
        assert await codec(SIZE - 1, lambda: 9, None, INFLATE) == 9


async def test_short_steps_are_not_counted() -> None:
    with assert_no_checkpoints():
        for _ in range(100):
            await codec(FREE, lambda: None)


async def order_of(steps: list[tuple[str, Any, Stage]]) -> list[str]:
    """The order in which steps are made that come in this order while another one is made."""
    done, turns = list[str](), codec_turns()
    turns._busy = 1
    async with trio.open_nursery() as nursery:
        for name, owner, stage in steps:
            nursery.start_soon(turns.step, CODEC_ROUND, partial(done.append, name), owner, stage)
            await wait_all_tasks_blocked()
        turns._busy = 0
        turns._wake()
    return done


async def test_connections_come_round_robin() -> None:
    steps = [*[(f"a{n}", "a", READ) for n in range(4)], ("b0", "b", READ), ("b1", "b", READ), ("c0", "c", READ)]
    assert await order_of(steps) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


async def test_what_was_read_is_used_first_and_what_was_inflated_is_read_first() -> None:
    steps = [
        ("a inflates", "a", INFLATE),
        ("a reads", "a", READ),
        ("b inflates", "b", INFLATE),
        ("a uses", "a", USE),
        ("c uses", None, USE),
    ]
    assert await order_of(steps) == ["a uses", "c uses", "a reads", "b inflates", "a inflates"]


async def test_a_connection_whose_bodies_wait_for_the_thread_inflates_no_more() -> None:
    turns, done, release = codec_turns(), list[str](), threading.Event()

    def reading(name: str) -> None:
        assert release.wait(60)
        done.append(name)

    async with trio.open_nursery() as nursery:
        for name in ("first", "second", "third"):
            nursery.start_soon(long_codec, partial(reading, name), "a", READ)
            await trio.lowlevel.checkpoint()
        while turns._thread.of("a") < 2:
            await trio.lowlevel.checkpoint()
        nursery.start_soon(codec, SIZE, partial(done.append, "a inflates"), "a", INFLATE)
        nursery.start_soon(codec, SIZE, partial(done.append, "b inflates"), "b", INFLATE)
        nursery.start_soon(codec, SIZE, partial(done.append, "a reads"), "a", READ)
        while len(done) < 2:
            await trio.lowlevel.checkpoint()
        assert sorted(done) == ["a reads", "b inflates"]
        release.set()
    assert sorted(done) == ["a inflates", "a reads", "b inflates", "first", "second", "third"]


async def test_one_that_is_cancelled_no_longer_waits_and_the_others_go_on() -> None:
    turns, done = codec_turns(), list[str]()
    turns._busy = 1
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                for name, stage in (("x", READ), ("y", INFLATE), ("z", USE)):
                    inner.start_soon(turns.step, SIZE, partial(done.append, name), "a", stage)
                await wait_all_tasks_blocked()
                nursery.start_soon(turns.step, SIZE, partial(done.append, "b"), "b", READ)
                await wait_all_tasks_blocked()
                scope.cancel()
        turns._busy = 0
        turns._wake()
    assert done == ["b"]
    assert turns._loop.wake() is None


async def test_a_step_that_raises_gives_the_turn_on() -> None:
    done, errors = list[int](), list[Exception]()

    def wrong() -> None:
        raise ValueError("wrong")

    async def one(n: int) -> None:
        try:
            await codec(CODEC_ROUND, wrong if n % 2 else partial(done.append, n), n, READ)
        except ValueError as e:
            errors.append(e)

    async with trio.open_nursery() as nursery:
        for n in range(10):
            nursery.start_soon(one, n)
    assert (sorted(done), len(errors)) == ([0, 2, 4, 6, 8], 5)


async def test_long_steps_are_made_one_after_the_other_and_connections_come_round_robin() -> None:
    running, most, done = 0, 0, list[str]()
    first = threading.Event()

    def step(name: str) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert first.wait(60)
        done.append(name)
        running -= 1

    async with trio.open_nursery() as nursery:
        for name in ("a0", "a1", "a2", "b0"):
            nursery.start_soon(long_codec, partial(step, name), name[0], READ)
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
        first.set()
    assert most == 1
    assert done == ["a0", "a1", "b0", "a2"]
