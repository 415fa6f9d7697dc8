"""Pipes and their sessions: credit stops a sender and nobody else, nothing waits for ever, and a cancel changes nothing."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.instances import pipe as pipes
from gateway.instances.messages import (
    BYTES_AHEAD,
    MESSAGES,
    MESSAGES_AHEAD,
    Credit,
    Frames,
    Head,
    Message,
    PartSaid,
    Ping,
    PromptTokens,
    encoded,
    frames_of,
    item_of,
)
from gateway.instances.pipe import BrokenPipe, Pipe, SessionLine
from models.errors import ModelError
from models.messages import Part, Prompt, Token
from tests.gateway.instances.sides import PATIENCE, streams
from tests.gateway.instances.test_messages import UNSENDABLE


class End:
    """A pipe, and the sessions in it."""

    def __init__(self, stream: Any, count: int) -> None:
        self.pipe = Pipe(stream)
        self.lines = [SessionLine(self.pipe, number) for number in range(count)]
        self.credits: list[Credit] = []

    def take(self, message: Message) -> None:
        if isinstance(message, Credit):
            self.credits.append(message)
            self.lines[message.session].take_credit(message)
        elif isinstance(message, Head | PromptTokens):
            self.lines[message.session].take_aside(message)
        else:
            self.lines[message.session].take_item(message)  # type: ignore[union-attr, arg-type]


@asynccontextmanager
async def ends(count: int = 1) -> AsyncIterator[tuple[End, End]]:
    """Both ends of some sessions."""
    async with streams() as (a, b), trio.open_nursery() as nursery:
        ours, theirs = End(a, count), End(b, count)
        for end in (ours, theirs):
            nursery.start_soon(end.pipe.write)
            nursery.start_soon(end.pipe.read, end.take)
        with trio.fail_after(PATIENCE):
            yield ours, theirs
        nursery.cancel_scope.cancel()


def part(size: int = 1, fill: int = 0) -> Part:
    return Part(data=bytes([fill]) * size)


async def sent(line: SessionLine, *messages: Any) -> int:
    """How many of these leave before the sender waits."""
    count = 0
    for message in messages:
        if not line.try_send(message):
            break
        count += 1
    await wait_all_tasks_blocked()
    return count


async def say(line: SessionLine, messages: Sequence[Any]) -> None:
    for message in messages:
        await line.send(message)


# -- credit ----------------------------------------------------------------------------------------------------------------


async def test_a_reader_that_does_not_take_stops_the_sender_after_so_many_messages_and_nobody_else() -> None:
    async with ends(2) as (ours, theirs):
        assert await sent(ours.lines[0], *[part()] * 30) == MESSAGES_AHEAD
        assert await sent(ours.lines[1], *[part()] * 30) == MESSAGES_AHEAD
        async with trio.open_nursery() as nursery:
            nursery.start_soon(say, ours.lines[1], [part()] * 50)
            for _ in range(50 + MESSAGES_AHEAD):
                await theirs.lines[1].receive()
        assert await sent(ours.lines[0], part()) == 0
        assert await sent(theirs.lines[0], *[part()] * 30) == MESSAGES_AHEAD, "the other way is another's"


@pytest.mark.parametrize(("size", "count"), [(64 * 1024, 4), (64 * 1024 + 1, 3), (BYTES_AHEAD, 1), (4 * BYTES_AHEAD, 1)])
async def test_and_after_so_many_bytes_a_larger_message_going_alone(size: int, count: int) -> None:
    async with ends() as (ours, theirs):
        assert await sent(ours.lines[0], *[part(size)] * 9) == count
        async with trio.open_nursery() as nursery:
            nursery.start_soon(say, ours.lines[0], [part(size)] * (9 - count))
            for _ in range(9):
                assert len((await theirs.lines[0].receive()).data) == size


async def test_a_large_message_waits_until_all_before_it_are_taken() -> None:
    async with ends() as (ours, theirs):
        assert await sent(ours.lines[0], part(), part(BYTES_AHEAD)) == 1
        await theirs.lines[0].receive()
        assert await sent(ours.lines[0], part(BYTES_AHEAD)) == 0, "the reader has it still"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.lines[0].send, part(BYTES_AHEAD))
            assert len((await theirs.lines[0].receive()).data) == BYTES_AHEAD


async def test_messages_of_no_bytes_hold_up_no_large_one() -> None:
    async with ends() as (ours, theirs):
        assert await sent(ours.lines[0], part(0), part(0), part(2 * BYTES_AHEAD), part(1)) == 3
        assert [len((await theirs.lines[0].receive()).data) for _ in range(3)] == [0, 0, 2 * BYTES_AHEAD]


async def test_credit_is_given_back_at_half() -> None:
    async with ends() as (ours, theirs):
        await sent(ours.lines[0], *[part(3)] * MESSAGES_AHEAD)
        for taken in range(1, MESSAGES_AHEAD + 1):
            assert theirs.lines[0].take_at_once() == part(3)  # which is when those before it are taken
            await wait_all_tasks_blocked()
            assert ours.credits == ([] if taken <= MESSAGES_AHEAD // 2 else [Credit(0, MESSAGES_AHEAD // 2, 24)])


async def test_and_at_half_of_the_bytes() -> None:
    async with ends() as (ours, theirs):
        await sent(ours.lines[0], *[part(BYTES_AHEAD // 4)] * 4)
        for _ in range(4):
            theirs.lines[0].take_at_once()
        await wait_all_tasks_blocked()
        assert ours.credits == [Credit(0, 2, BYTES_AHEAD // 2)]


async def test_and_at_once_where_the_reader_waits_for_more() -> None:
    async with ends() as (ours, theirs):
        await sent(ours.lines[0], part(3))
        await theirs.lines[0].receive()
        await wait_all_tasks_blocked()
        assert ours.credits == []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(theirs.lines[0].receive)
            await wait_all_tasks_blocked()
            assert ours.credits == [Credit(0, 1, 3)]
            nursery.cancel_scope.cancel()


async def test_what_is_said_beside_the_messages_comes_in_order_and_costs_no_credit() -> None:
    async with ends() as (ours, theirs):
        ours.pipe.post(Head(0, {"a": "b"}, True))
        assert await sent(ours.lines[0], *[part(n) for n in range(30)]) == MESSAGES_AHEAD
        for n in range(10_000):
            ours.pipe.post(PromptTokens(0, n))
        await wait_all_tasks_blocked()
        line = theirs.lines[0]
        found = [await line.receive() for _ in range(MESSAGES_AHEAD + 2)]
        expected = [Head(0, {"a": "b"}, True), *[part(n) for n in range(MESSAGES_AHEAD)], PromptTokens(0, 9999)]
        assert found == expected, "of what is said again and again the last is enough"
        assert line.take_at_once() is None


SIZES = st.lists(st.sampled_from([0, 1, 100, 20_000, 70_000, 131_072, 200_000, 262_144, 262_145, 600_000]), max_size=40)


@given(SIZES, SIZES, st.integers(0, 2**32))
@example([1] * 15 + [600_000] * 3 + [0] * 20, [262_144, 1, 262_144, 0, 262_145] * 4, 0)
def test_no_sequence_of_sizes_and_takes_is_a_deadlock(one: list[int], other: list[int], seed: int) -> None:
    chance = random.Random(seed)

    async def send(line: SessionLine, sizes: Sequence[int]) -> None:
        for n, size in enumerate(sizes):
            while chance.random() < 0.3:
                await trio.lowlevel.checkpoint()
            message = part(size, n)
            if not (chance.random() < 0.5 and line.try_send(message)):
                await line.send(message)

    async def hear(line: SessionLine, sizes: Sequence[int]) -> None:
        for n, size in enumerate(sizes):
            while chance.random() < 0.3:
                await trio.lowlevel.checkpoint()
            message = (line.take_at_once() if chance.random() < 0.5 else None) or await line.receive()
            assert message == part(size, n)

    async def both() -> None:
        async with ends(2) as (ours, theirs), trio.open_nursery() as nursery:
            for number, there, back in ((0, one, other), (1, other, one)):
                nursery.start_soon(send, ours.lines[number], there)
                nursery.start_soon(hear, theirs.lines[number], there)
                nursery.start_soon(send, theirs.lines[number], back)
                nursery.start_soon(hear, ours.lines[number], back)

    trio.run(both, clock=MockClock(autojump_threshold=0))


# -- a side that does not do as it should ----------------------------------------------------------------------------------


def alone() -> SessionLine:
    """A side whose other never answers."""
    return SessionLine(Pipe(None), 1)  # type: ignore[arg-type]


def test_a_message_beyond_the_credit_is_an_error() -> None:
    line = alone()
    for _ in range(MESSAGES_AHEAD):
        line.take_item(PartSaid(1, b"", False, True))
    with pytest.raises(ValueError, match="without credit"):
        line.take_item(PartSaid(1, b"", False, True))


@pytest.mark.parametrize("sizes", [(BYTES_AHEAD, 1), (1, BYTES_AHEAD), (9 * BYTES_AHEAD, 1), (BYTES_AHEAD // 2 + 1,) * 2])
def test_so_is_one_beyond_the_bytes(sizes: Sequence[int]) -> None:
    line = alone()
    *allowed, beyond = [PartSaid(1, bytes(size), False, True) for size in sizes]
    for each in allowed:
        line.take_item(each)
    with pytest.raises(ValueError, match="without credit"):
        line.take_item(beyond)


async def test_so_it_is_while_the_reader_has_those_before_it() -> None:
    line = alone()
    for _ in range(MESSAGES_AHEAD):
        line.take_item(PartSaid(1, b"", False, True))
    for taken in range(MESSAGES_AHEAD // 2):
        assert line.take_at_once() is not None, taken
    with pytest.raises(ValueError, match="without credit"):
        line.take_item(PartSaid(1, b"", False, True))


def test_so_is_one_after_the_last() -> None:
    line = alone()
    line.end(over=False)
    with pytest.raises(ValueError, match="without credit"):
        line.take_item(PartSaid(1, b"", False, True))


@pytest.mark.parametrize(
    "credit", [Credit(1, 3, 0), Credit(1, 0, 21), Credit(1, -1, 0), Credit(1, 0, -1), Credit(1, 2**63, 2**63)]
)
async def test_so_is_credit_for_what_was_not_sent(credit: Credit) -> None:
    line = alone()
    line.try_send(part(10))
    line.try_send(part(10))
    with pytest.raises(ValueError, match="credit for what was not sent"):
        line.take_credit(credit)


async def test_an_error_of_who_takes_ends_the_reading() -> None:
    async with streams() as (a, b):
        for data in (b"\xff\xff\xff\xff", b"\0\0\0\1\xc0", *frames_of([encoded(Ping(1))])):
            await a.send_all(data)
            with pytest.raises(BrokenPipe) as raised, trio.fail_after(PATIENCE):
                await Pipe(b).read(lambda message: exec("raise ValueError('x' * 1000)"))
            assert len(str(raised.value)) < 300


# -- frames ----------------------------------------------------------------------------------------------------------------


class Noted:
    """A stream that notes each frame."""

    def __init__(self) -> None:
        self.frames: list[list[Message]] = []
        self.takes = trio.Event()
        self.takes.set()

    async def send_all(self, data: bytes) -> None:
        await self.takes.wait()
        self.frames += Frames().feed(data)


@asynccontextmanager
async def noted() -> AsyncIterator[tuple[Pipe, Noted]]:
    stream = Noted()
    async with trio.open_nursery() as nursery:
        pipe = Pipe(stream)  # type: ignore[arg-type]
        nursery.start_soon(pipe.write)
        await wait_all_tasks_blocked()
        yield pipe, stream
        nursery.cancel_scope.cancel()


async def test_what_is_posted_in_one_turn_is_one_frame() -> None:
    async with noted() as (pipe, stream):

        async def say(number: int) -> None:
            pipe.post(Ping(number))

        async with trio.open_nursery() as nursery:
            for number in range(9):
                nursery.start_soon(say, number)
        await wait_all_tasks_blocked()
        pipe.post(Ping(10))
        await wait_all_tasks_blocked()
        assert [sorted(ping.number for ping in frame) for frame in stream.frames] == [[*range(9)], [10]]  # type: ignore[union-attr]


async def test_what_is_posted_while_one_is_written_is_the_next() -> None:
    async with noted() as (pipe, stream):
        stream.takes = trio.Event()
        pipe.post(Ping(0))
        await wait_all_tasks_blocked()
        for number in range(1, 4):
            pipe.post(Ping(number))
            await wait_all_tasks_blocked()
        stream.takes.set()
        await wait_all_tasks_blocked()
        assert stream.frames == [[Ping(0)], [Ping(1), Ping(2), Ping(3)]]


async def test_what_cannot_be_sent_is_not_and_all_else_is() -> None:
    async with noted() as (pipe, stream):
        pipe.post(Ping(0))
        with pytest.raises(TypeError):
            pipe.post(Head(1, {"a": object()}, False))  # type: ignore[dict-item]
        pipe.post(Ping(1))
        await wait_all_tasks_blocked()
        assert stream.frames == [[Ping(0), Ping(1)]]


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("waiting", [True, False])
async def test_finish_writes_all_that_was_posted(before: int, waiting: bool) -> None:
    stream = Noted()
    pipe = Pipe(stream)  # type: ignore[arg-type]
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            if waiting:
                nursery.start_soon(pipe.write)
                await wait_all_tasks_blocked()
            for number in range(before):
                pipe.post(Ping(number))
            pipe.finish()
            if not waiting:
                nursery.start_soon(pipe.write)
    assert [message for frame in stream.frames for message in frame] == [Ping(number) for number in range(before)]


async def test_finish_while_one_is_written_writes_the_rest_too() -> None:
    stream = Noted()
    stream.takes = trio.Event()
    pipe = Pipe(stream)  # type: ignore[arg-type]
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pipe.write)
            pipe.post(Ping(0))
            await wait_all_tasks_blocked()
            pipe.post(Ping(1))
            pipe.finish()
            stream.takes.set()
    assert stream.frames == [[Ping(0)], [Ping(1)]]


async def test_the_other_side_may_be_gone() -> None:
    async with streams() as (a, b):
        pipe = Pipe(a)
        b.socket.close()
        pipe.post(Ping(0))
        with pytest.raises(trio.BrokenResourceError), trio.fail_after(PATIENCE):
            await pipe.write()
        with trio.fail_after(PATIENCE):
            await pipe.read(lambda message: None)


# -- cancels and ends ------------------------------------------------------------------------------------------------------


async def test_a_cancelled_receive_loses_nothing() -> None:
    async with ends() as (ours, theirs):
        for n in range(20):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(theirs.lines[0].receive)
                    await wait_all_tasks_blocked()
                    scope.cancel()
                    if n % 2:  # at the moment at which it is cancelled
                        theirs.lines[0].take_item(item_of(0, part(1, n))[0])  # type: ignore[arg-type]
                        ours.lines[0]._ahead += 1
                        ours.lines[0]._ahead_bytes += 1
            if not n % 2:
                await ours.lines[0].send(part(1, n))
            assert await theirs.lines[0].receive() == part(1, n)


async def test_a_cancelled_send_sends_nothing() -> None:
    async with ends() as (ours, theirs):
        count = await sent(ours.lines[0], *[part(1, n) for n in range(30)])
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ours.lines[0].send, part(1, 99))
                await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
        with trio.CancelScope() as scope:
            scope.cancel()
            await ours.lines[0].send(part(1, 99))
        assert scope.cancelled_caught
        for n in range(count):
            assert await theirs.lines[0].receive() == part(1, n)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.lines[0].send, part(1, 77))
            assert await theirs.lines[0].receive() == part(1, 77)


async def test_after_the_end_all_that_came_is_there_and_nothing_more() -> None:
    async with ends() as (ours, theirs):
        await sent(ours.lines[0], part(), part())
        line = theirs.lines[0]
        assert not line.exhausted
        line.end(over=False)
        assert [await line.receive(), await line.receive()] == [part(), part()]
        assert line.exhausted
        for _ in range(2):
            with pytest.raises(trio.EndOfChannel):
                await line.receive()
        assert line.try_send(part()), "the other side hears"


async def test_whoever_waits_learns_of_the_end() -> None:
    async with ends() as (ours, _):
        line = ours.lines[0]
        await sent(line, *[part()] * MESSAGES_AHEAD)
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await line.send(part())

            async def receive() -> None:
                with pytest.raises(trio.EndOfChannel):
                    await line.receive()

            nursery.start_soon(send)
            nursery.start_soon(receive)
            await wait_all_tasks_blocked()
            line.end(over=True)
        assert not line.try_send(part())
        await send()


async def test_a_session_that_is_over_gives_no_credit() -> None:
    async with ends() as (ours, theirs):
        await sent(ours.lines[0], *[part()] * MESSAGES_AHEAD)
        theirs.lines[0].end(over=True)
        while theirs.lines[0].take_at_once() is not None:
            pass
        await wait_all_tasks_blocked()
        assert ours.credits == []


# -- messages that cannot be sent ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", UNSENDABLE.values(), ids=[*UNSENDABLE])
async def test_what_cannot_be_sent_is_the_error_of_its_session_alone(message: Any) -> None:
    async with ends(2) as (ours, theirs):
        await ours.lines[1].send(part(1, 1))
        if type(message) in MESSAGES:
            with pytest.raises((TypeError, ValueError, OverflowError, ModelError)):
                ours.lines[0].try_send(message)
        else:  # a value that a model sends in place of a message
            assert not ours.lines[0].try_send(message)
        with pytest.raises((TypeError, ValueError, OverflowError, ModelError)):
            await ours.lines[0].send(message)
        await ours.lines[1].send(part(1, 2))
        assert [await theirs.lines[1].receive() for _ in range(2)] == [part(1, 1), part(1, 2)]
        assert await sent(ours.lines[0], *[Token(text="a")] * 30) == MESSAGES_AHEAD, "it has cost no credit"
        assert await theirs.lines[0].receive() == Token(text="a")


async def test_so_is_a_message_too_large_for_any_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "LARGEST", 1000)
    async with ends(2) as (ours, theirs):
        with pytest.raises(ValueError, match="more than a model in a process can have"):
            await ours.lines[0].send(part(1001))
        await ours.lines[0].send(Prompt(text="a"))
        assert await theirs.lines[0].receive() == Prompt(text="a")
