"""Shared memory: a byte in use is never given to another, all of it comes back, and a waiting task goes on."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.errors import TooLarge, WorkerLost
from gateway.instances import pipe as pipes
from gateway.instances.instance import InstanceEnded
from gateway.instances.memory import SMALLEST, Arena, Block, LargerThanMemory, Ranges, SharedMemory, copied
from gateway.instances.messages import Array, Credit, Ended, Free, PartSaid, Tensors
from gateway.instances.pipe import Pipe, SessionLine
from models.messages import BytesTensor, InferRequest, InferResponse, Part, PartKind, Tensor
from tests.gateway.instances.sides import PATIENCE, OneMessage, instance, shared, streams

PAGE, MiB = 4096, 1024 * 1024


# -- which bytes are free --------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9 * PAGE)), max_size=60), st.integers(0, 3))
def test_what_is_taken_overlaps_nothing_and_all_that_is_released_is_one_again(steps: list[Any], patience: int) -> None:
    ranges, taken = Ranges(32 * PAGE), dict[int, int]()
    dirty = set[int]()  # pages that were touched, and not given back
    for which, n in steps:
        if which < len(taken):
            start = sorted(taken)[which]
            del taken[start]
            ranges.release(start)
        elif (start := ranges.take(n)) is not None:  # type: ignore[assignment]
            mine = set(range(start // PAGE, -(-(start + n) // PAGE)))
            assert start % PAGE == 0
            assert max(mine) < 32
            others = {page for at, size in taken.items() for page in range(at // PAGE, -(-(at + size) // PAGE))}
            assert not mine & others
            taken[start] = n
            dirty |= mine
        else:
            pages = sum(-(-size // PAGE) for size in taken.values())
            assert n > PAGE or pages == 32, "one page is always somewhere, if it is"
        if which % 4 == patience and (idle := ranges.idle(3 * PAGE)) is not None:
            given = set(range(idle[0] // PAGE, idle[1] // PAGE))
            assert len(given) <= 3
            dirty -= given
    for start in taken:
        ranges.release(start)
    for _ in range(2):  # ranges used since the last look stay warm until the next one
        while (idle := ranges.idle(3 * PAGE)) is not None:
            dirty -= set(range(idle[0] // PAGE, idle[1] // PAGE))
    assert not dirty
    assert ranges.take(32 * PAGE) == 0


def test_what_is_taken_is_never_given_back_and_the_lowest_is_taken_first() -> None:
    ranges = Ranges(8 * PAGE)
    assert [ranges.take(PAGE) for _ in range(3)] == [0, PAGE, 2 * PAGE]
    ranges.release(0)
    ranges.release(2 * PAGE)
    assert ranges.idle(8 * PAGE) is None, "all was used since the last look"
    assert ranges.idle(8 * PAGE) == (2 * PAGE, 3 * PAGE)
    assert ranges.idle(8 * PAGE) == (0, PAGE)
    assert ranges.idle(8 * PAGE) is None
    assert ranges.take(PAGE) == 0


# -- memory ----------------------------------------------------------------------------------------------------------------


def lend(memory: SharedMemory, data: bytes) -> Block:
    (place,) = memory.places([data], lambda: None) or ()
    for _ in copied(data, place):
        pass
    return memory.lend(place)


def is_all_free(memory: SharedMemory) -> bool:
    gc.collect()
    return memory.arena.take(memory.arena.size) is not None


def test_the_other_side_sees_the_same_bytes_and_cannot_write_them() -> None:
    with shared(MiB) as (ours, theirs):
        data = os.urandom(300_001)
        view = theirs.window.view(lend(ours, data))
        assert view == data
        assert view.readonly
        assert theirs.arena.take(MiB) is not None, "the other direction is another memory"


def test_what_several_lend_from_is_free_when_the_last_of_them_has_said_so() -> None:
    also = Arena.create(MiB)
    with shared(MiB, also) as (ours, theirs), shared(MiB, also) as (other, another):
        body = also.take(MiB)
        assert body is not None
        body[:] = data = os.urandom(MiB)
        part = body[1000 : 1000 + 2 * SMALLEST]
        blocks = [lend(memory, part) for memory in (ours, ours, other)]  # type: ignore[arg-type]
        assert [block.memory for block in blocks] == [1, 1, 1]
        views = [theirs.window.view(block) for block in blocks[:2]] + [another.window.view(blocks[2])]
        assert all(view == data[1000 : 1000 + 2 * SMALLEST] for view in views)
        assert ours.arena.used_bytes == 0
        del body, part
        ours.take_back([block.key for block in blocks[:2]])
        assert also.take(1) is None
        other.close()  # as its process has died
        assert also.take(MiB) is not None
    also.close()


def test_nobody_can_cut_it_off() -> None:
    with shared(MiB) as (ours, _):
        for descriptor in ours.descriptors:
            for size in (0, 2 * MiB):
                with pytest.raises(PermissionError):
                    os.ftruncate(descriptor, size)


def test_a_block_is_free_when_the_last_view_of_it_is_gone_there_and_that_is_told() -> None:
    with shared(MiB) as (ours, theirs):
        told = list[int]()
        theirs.attach(lambda call: call(), told.extend)
        block = lend(ours, bytes(MiB))
        array = np.frombuffer(theirs.window.view(block), "<f8").reshape(2, -1)
        part = array[1, 5:]
        del array
        assert not told
        assert ours.arena.take(1) is None
        del part
        assert told == [block.key]
        assert ours.arena.take(1) is None, "it was not said yet"
        ours.take_back(told)
        assert ours.arena.take(MiB) is not None


def test_and_when_nobody_here_looks_at_it_either() -> None:
    with shared(MiB) as (ours, _):
        kept = ours.arena.take(MiB)
        assert kept is not None
        block = ours.lend(kept)
        ours.take_back([block.key])
        assert ours.arena.take(1) is None
        del kept
        assert ours.arena.take(MiB) is not None


def test_views_may_die_in_any_thread() -> None:
    with shared(4 * MiB) as (ours, theirs):
        told, rung = list[int](), threading.Event()
        theirs.attach(lambda call: rung.set(), told.extend)
        views = [theirs.window.view(lend(ours, bytes(SMALLEST))) for _ in range(64)]
        threads = [threading.Thread(target=lambda: [views.pop() for _ in range(8)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert rung.is_set()
        theirs.window.tell_now()
        ours.take_back(told)
        assert sorted(told) == list(range(1, 65))
        assert is_all_free(ours)


def test_several_have_room_together_or_none_has() -> None:
    with shared(4 * SMALLEST) as (ours, _):
        woken = list[str]()
        one = ours.arena.take(2 * SMALLEST)
        assert ours.places([bytes(SMALLEST)] * 3, lambda: woken.append("three")) is None
        assert ours.places([bytes(SMALLEST)] * 2, lambda: woken.append("two")) is not None
        woken.clear()  # it has let go of them
        assert ours.places([bytes(SMALLEST)] * 3, lambda: woken.append("three")) is None
        assert not woken, "what it has not got did not come back"
        del one
        assert woken == ["three"]
        assert ours.places([bytes(SMALLEST)] * 3, lambda: None) is not None


def test_what_is_in_the_memory_already_is_not_copied() -> None:
    with shared(4 * SMALLEST) as (ours, theirs):
        place = ours.arena.take(4 * SMALLEST)
        assert place is not None
        place[SMALLEST] = 7
        part = place[SMALLEST : 3 * SMALLEST]
        (found,) = ours.places([part], lambda: None) or ()
        assert list(copied(part, found)) == []
        block = ours.lend(found)
        assert (block.offset, block.size) == (SMALLEST, 2 * SMALLEST)
        assert theirs.window.view(block)[0] == 7


def test_arrays_are_taken_in_many_threads_and_no_byte_is_in_two() -> None:
    with shared(16 * MiB) as (ours, _):
        found = list[Any]()

        def take(number: int) -> None:
            for _ in range(50):
                array = ours.empty((2, SMALLEST // 4), "u2")
                array[:] = number
                found.append((number, array))
                if len(found) > 50:
                    found.pop(0)

        threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all((array == number).all() for number, array in found)
        assert any(ours.places([array.data.cast("B")], lambda: None)[0].obj is array for _, array in found)  # type: ignore[index]
        found.clear()
        assert is_all_free(ours)


@pytest.mark.parametrize("array", [np.empty(4), np.empty(SMALLEST // 8, object)])
def test_small_arrays_and_those_of_objects_are_anywhere(array: Any) -> None:
    with shared(MiB) as (ours, _):
        assert ours.empty(array.shape, array.dtype).base is None
        assert ours.empty((), "f8").shape == ()
        assert ours.empty(2 * MiB, "u1").shape == (2 * MiB,), "there is no room"


def test_a_message_that_is_larger_than_all_of_it_is_an_error_and_one_as_large_is_none() -> None:
    with shared(4 * SMALLEST) as (ours, _):
        with pytest.raises(LargerThanMemory, match="262145 bytes is larger than all of the shared memory, 262144 bytes"):
            ours.places([bytes(2 * SMALLEST), bytes(2 * SMALLEST + 1)], lambda: None)
        assert ours.places([bytes(2 * SMALLEST), bytes(2 * SMALLEST)], lambda: None) is not None
        assert is_all_free(ours)


@pytest.mark.parametrize(
    "block",
    [
        Block(1, 0, -PAGE, SMALLEST),
        Block(1, 0, 0, -1),
        Block(1, 0, 0, 0),
        Block(1, 0, 0, SMALLEST - 1),
        Block(1, 0, MiB - SMALLEST + 1, SMALLEST),
        Block(1, 0, 0, MiB + 1),
        Block(1, 0, 2**63, SMALLEST),
        Block(7, 0, 0, SMALLEST),
        Block(1, 1, 0, SMALLEST),
        Block(1, -1, 0, SMALLEST),
    ],
    ids=repr,
)
def test_a_block_that_cannot_be_is_a_value_error(block: Block) -> None:
    with shared(MiB) as (ours, _):
        kept = ours.window.view(Block(7, 0, 0, SMALLEST))
        with pytest.raises(ValueError):
            ours.window.view(block)
        assert kept.nbytes == SMALLEST


def test_so_is_the_return_of_what_was_not_lent() -> None:
    with shared(MiB) as (ours, _):
        block = lend(ours, bytes(SMALLEST))
        ours.take_back([block.key])
        with pytest.raises(ValueError):
            ours.take_back([block.key])


def test_idle_memory_goes_back_to_the_system_and_what_is_looked_at_stays() -> None:
    with shared(64 * MiB) as (ours, theirs):
        data = os.urandom(MiB)
        gone, kept = lend(ours, bytes(32 * MiB)), lend(ours, data)
        ours.take_back([gone.key])
        while ours.arena.give_back():
            pass
        assert ours.arena.used_bytes >= 33 * MiB, "it was used since the last look"
        while ours.arena.give_back():
            pass
        assert ours.arena.used_bytes == MiB
        assert theirs.window.view(kept) == data


def test_whoever_looks_at_it_may_go_on_when_the_other_side_is_gone() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with shared(MiB) as (ours, theirs):
        view = ours.window.view(lend(theirs, b"a" * SMALLEST))
    ours.close()
    assert view == b"a" * SMALLEST
    del view, ours, theirs
    assert len(os.listdir("/proc/self/fd")) == before


# -- sessions --------------------------------------------------------------------------------------------------------------


class Ends:
    """Two pipes with shared memory, and one session between them."""

    def __init__(self, a: trio.SocketStream, b: trio.SocketStream, memory: tuple[SharedMemory, SharedMemory]) -> None:
        self.ours, self.theirs = memory
        self.pipes = Pipe(a, memory=self.ours), Pipe(b, memory=self.theirs)
        self.lines = [SessionLine(pipe, 1) for pipe in self.pipes]
        self.said = list[Any]()

    def take(self, line: SessionLine, message: Any) -> None:
        if isinstance(message, Credit):
            line.take_credit(message)
        else:
            self.said.append(message)
            line.take_item(message)


@asynccontextmanager
async def ends(size: int) -> AsyncIterator[Ends]:
    async with streams() as (a, b), trio.open_nursery() as nursery:
        with shared(size) as memory:
            both = Ends(a, b, memory)
            for pipe, line in zip(both.pipes, both.lines, strict=True):
                nursery.start_soon(pipe.write)
                nursery.start_soon(pipe.read, lambda message, line=line: both.take(line, message))
            with trio.fail_after(PATIENCE):
                yield both
            nursery.cancel_scope.cancel()


def tensors(*arrays: Any) -> InferResponse:
    return InferResponse(outputs=tuple(Tensor(name=f"x{n}", data=array) for n, array in enumerate(arrays)))


LARGE: dict[str, Any] = {
    "numbers": np.arange(100_000, dtype="<f4").reshape(100, -1),
    "booleans": np.arange(100_000) % 3 == 0,
    "bfloat16": np.arange(100_000).astype(ml_dtypes.bfloat16),
    "every second": np.arange(100_000)[::2],
    "columns": np.arange(100_000).reshape(2, -1).T,
    "big-endian": np.arange(100_000, dtype=">i4"),
    "texts": np.array(["ü" * 40, "b"] * 5000, object),
    "just as many": np.zeros(SMALLEST, "u1"),
}


@pytest.mark.parametrize("name", LARGE)
async def test_a_large_tensor_arrives_as_it_was_and_not_in_the_stream(name: str) -> None:
    array = LARGE[name]
    async with ends(4 * MiB) as both:
        await both.lines[0].send(tensors(array, np.arange(3), np.zeros((0, 4)), array))
        message = await both.lines[1].receive()
        assert [len(one.data) for one in both.said[0].arrays] == [0, 24, 0, 0]
        assert message.outputs[1].data.tolist() == [0, 1, 2]
        assert message.outputs[2].data.shape == (0, 4)
        for arrived in (message.outputs[0], message.outputs[3]):
            assert not arrived.data.flags.writeable
            if name == "texts":
                assert type(arrived) is BytesTensor
                assert arrived.data.tolist() == [text.encode() for text in array]
            else:
                assert arrived.data.dtype == array.dtype.newbyteorder("=")
                assert np.array_equal(arrived.data, array)
        del message, arrived
        await all_free(both.ours)


async def all_free(memory: SharedMemory) -> None:
    with trio.fail_after(PATIENCE):
        while not is_all_free(memory):
            await wait_all_tasks_blocked()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, "<u4").data])
async def test_a_large_part_does_too(kind: Any) -> None:
    data = os.urandom(2 * SMALLEST)
    async with ends(4 * MiB) as both:
        await both.lines[0].send(Part(data=kind(data), kind=PartKind.UTF8, last=False))
        part = await both.lines[1].receive()
        assert both.said[0].data == b""
        assert (part.data, part.kind, part.last) == (data, PartKind.UTF8, False)


async def test_what_is_sent_at_once_is_never_large() -> None:
    async with ends(4 * MiB) as both:
        assert not both.lines[0].try_send(tensors(np.zeros(SMALLEST, "u1")))
        assert not both.lines[0].try_send(Part(data=bytes(SMALLEST)))
        assert both.lines[0].try_send(Part(data=bytes(SMALLEST - 1)))
        assert (await both.lines[1].receive()).data == bytes(SMALLEST - 1)


async def test_a_small_one_is_in_the_stream() -> None:
    async with ends(4 * MiB) as both:
        await both.lines[0].send(tensors(np.zeros(SMALLEST - 1, "u1")))
        await both.lines[1].receive()
        assert both.said[0].arrays[0].block is None


async def test_who_finds_no_room_waits_and_goes_on() -> None:
    async with ends(4 * SMALLEST) as both, trio.open_nursery() as nursery:
        line, other = both.lines
        array = np.ones(3 * SMALLEST, "u1")
        await line.send(tensors(array))
        kept = await other.receive()
        nursery.start_soon(line.send, tensors(array * 2))
        await wait_all_tasks_blocked()
        assert other.take_at_once() is None
        assert kept.outputs[0].data.sum() == array.size
        del kept
        assert (await other.receive()).outputs[0].data.sum() == 2 * array.size


@pytest.mark.parametrize("how", ["cancel", "end"])
async def test_who_gives_up_while_it_waits_leaves_nothing(how: str) -> None:
    async with ends(4 * SMALLEST) as both:
        line, other = both.lines
        array = np.ones(3 * SMALLEST, "u1")
        await line.send(tensors(array))
        kept = await other.receive()
        async with trio.open_nursery() as nursery:

            async def say() -> None:
                if how == "end":
                    with pytest.raises(trio.ClosedResourceError):
                        await line.send(tensors(array))
                else:
                    await line.send(tensors(array))

            nursery.start_soon(say)
            await wait_all_tasks_blocked()
            if how == "end":
                line.end(over=True)
            else:
                nursery.cancel_scope.cancel()
        del kept
        await all_free(both.ours)
        assert len(both.said) == 1


async def test_a_message_that_cannot_be_sent_leaves_nothing() -> None:
    async with ends(4 * MiB) as both:
        wrong = InferResponse(outputs=(Tensor(name="x", data=np.zeros(MiB, "u1")),), parameters={"a": object()})  # type: ignore[dict-item]
        with pytest.raises(TypeError):
            await both.lines[0].send(wrong)
        del wrong
        await all_free(both.ours)
        assert not both.said


async def test_what_dies_in_a_thread_is_told_on_the_loop() -> None:
    async with ends(MiB) as both:
        for _ in range(3):  # each needs all of it
            await both.lines[0].send(tensors(np.zeros(MiB, "u1")))
            message = [await both.lines[1].receive()]
            assert both.lines[1].take_at_once() is None  # which gives its credit back
            await trio.to_thread.run_sync(message.clear)


async def test_what_is_idle_is_given_back_after_a_while(autojump_clock: MockClock) -> None:
    with shared(4 * MiB) as (ours, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pipes.give_back_idle, ours.arena)
            lend(ours, bytes(2 * MiB))
            ours.take_back([1])
            await trio.sleep(pipes.IDLE_SECONDS * 0.9)
            assert ours.arena.used_bytes == 2 * MiB
            await trio.sleep(pipes.IDLE_SECONDS * 2)
            assert ours.arena.used_bytes == 0
            nursery.cancel_scope.cancel()


# -- instances -------------------------------------------------------------------------------------------------------------


def said(block: Block, size: int = SMALLEST, data: bytes = b"") -> Tensors:
    return Tensors(1, [Array("x", "UINT8", (size,), data, {}, (), block)], "", {}, None, True)


GARBAGE: dict[str, list[Any]] = {
    "beyond the memory": [said(Block(1, 0, MiB, SMALLEST))],
    "before it": [said(Block(1, 0, -1, SMALLEST))],
    "small": [said(Block(1, 0, 0, 1), 1)],
    "twice": [PartSaid(1, b"", False, True, Block(1, 0, 0, SMALLEST))] * 2,
    "not the tensor's": [said(Block(1, 0, 0, SMALLEST), 2 * SMALLEST)],
    "bytes beside it": [said(Block(1, 0, 0, SMALLEST), data=b"a")],
    "bytes without credit": [PartSaid(1, b"", False, True, Block(n, 0, 0, 3 * SMALLEST)) for n in (1, 2)],
    "free, and never lent": [Free([99])],
    "free, twice": [Free([1, 1])],
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=[*GARBAGE])
async def test_a_reference_that_cannot_be_ends_the_instance(garbage: list[Any], autojump_clock: MockClock) -> None:
    with shared(MiB) as (ours, theirs):
        async with instance(memory=ours) as house:
            request = InferRequest(inputs=(Tensor(name="x", data=np.ones(SMALLEST, "u1")),))
            exchange = house.call(OneMessage(), request)
            await house.side.hear()
            block = (await house.side.hear()).arrays[0].block  # type: ignore[union-attr]
            assert theirs.window.view(block)[-1] == 1
            await house.side.say(*garbage)
            error = await house.end()
            assert type(error) is InstanceEnded
            assert "it sent something that is not a message" in str(error)
            assert type(await exchange.end()) is WorkerLost


async def test_too_large_names_the_setting_whoever_says_it(autojump_clock: MockClock) -> None:
    with shared(4 * SMALLEST) as (ours, _):
        async with instance(memory=ours) as house:
            request = InferRequest(inputs=(Tensor(name="x", data=np.ones(5 * SMALLEST, "u1")),))
            error = await house.call(OneMessage(), request).end()
            assert type(error) is TooLarge
            assert str(error) == (
                "a message with tensors or parts of 327680 bytes is larger than all of the shared memory, 262144 bytes"
                " (models.m.process.shared_memory)"
            )
            exchange = house.call(OneMessage(), InferRequest(inputs=()))
            await wait_all_tasks_blocked()
            await house.side.say(Ended(2, "large", "an answer is larger"))
            error = await exchange.end()
            assert (type(error), str(error)) == (TooLarge, "an answer is larger (models.m.process.shared_memory)")
