"""Both sides of an instance together: whatever clients and models do, and whatever a process says, nothing is left."""

from __future__ import annotations

import random
import socket
from contextlib import asynccontextmanager, suppress
from typing import Any

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.errors import WorkerLost
from gateway.instances.instance import Instance, InstanceEnded, RaisedThere
from gateway.instances.messages import (
    Array,
    Credit,
    Describe,
    Described,
    Ended,
    Head,
    Load,
    Log,
    Message,
    PartSaid,
    Pong,
    PromptTokens,
    Returned,
    Said,
    Tensors,
    Text,
    encoded,
    frames_of,
)
from gateway.instances.pipe import Pipe
from gateway.instances.spawn import Exit
from gateway.instances.trio_child import TrioChild
from models.blocking import StepHolder, set_step_holder
from models.errors import ModelError
from models.messages import Family, Finish, FinishReason, Part
from models.spec import ModelSpec
from tests.gateway.instances.sides import PATIENCE, Client, Exchange, NoProcess, instance

SIZES = (0, 1, 5000, 70_000, 300_000)


class Place(StepHolder):
    holds = 0

    def hold(self, *, stopping: bool = True) -> None:
        Place.holds += 1

    def release(self) -> None:
        Place.holds -= 1


async def story(chance: random.Random, count: int, *, dies: bool) -> None:
    async def echo(session: Any) -> None:
        async for message in session:
            await session.send(message)
            if chance.random() < 0.05:
                raise ModelError("no")

    @asynccontextmanager
    async def load() -> Any:
        yield echo

    def described(message: Describe) -> Any:
        return ModelSpec(name="m", family=Family.PARTS, load=load), Described({}, False)

    process, loaded, reasons = NoProcess(), trio.Event(), list[str]()
    instance = Instance(process, Load(4), hang_timeout=0)
    process.side.hang_up, hang_up = (lambda: None), process.side.hang_up  # type: ignore[method-assign]
    set_step_holder(Place())
    Place.holds = 0

    async def run() -> None:
        try:
            await instance.run([Describe("m", "app:m", {})], loaded.set, loaded.set)
        except InstanceEnded as e:
            reasons.append(str(e))

    async def child() -> None:
        with died:
            await TrioChild(Pipe(process.side.stream), described).run()
        hang_up()
        process.end(Exit(code=0))

    async def speak(exchange: Exchange) -> None:
        for n in range(chance.randrange(30)):
            exchange.client.says.send_nowait(Part(data=b"%d" % n + bytes(chance.choice(SIZES))))
            if chance.random() < 0.3:
                await trio.lowlevel.checkpoint()
        if chance.random() < 0.3:
            exchange.scope.cancel()
        exchange.client.says.close()

    async with trio.open_nursery() as nursery:
        died, exchanges = trio.CancelScope(), list[Exchange]()
        nursery.start_soon(run)
        nursery.start_soon(child)
        with trio.fail_after(PATIENCE):
            await loaded.wait()
            async with trio.open_nursery() as sessions:
                for _ in range(count):
                    exchange = Exchange(Client(more=True))
                    exchanges.append(exchange)
                    sessions.start_soon(exchange.run, instance, None, {})
                    sessions.start_soon(speak, exchange)
                    if chance.random() < 0.5:
                        await trio.lowlevel.checkpoint()
                if dies:
                    for _ in range(chance.randrange(40)):
                        await trio.lowlevel.checkpoint()
                    died.cancel()
            await wait_all_tasks_blocked()
            assert Place.holds == 0
            assert instance.sessions == 0
            for exchange in exchanges:
                (ending,) = exchange.endings
                assert ending in (None, trio.Cancelled) or type(ending) in (ModelError, *([WorkerLost] if dies else []))
                said = [int(message.data.partition(b"\0")[0]) for message in exchange.client.log]
                assert said == [*range(len(said))]
            process.side.hang_up = hang_up  # type: ignore[method-assign]
            if not dies:
                process.socket.shutdown(socket.SHUT_WR)
    assert reasons == ["its process ended (exit status 0)"]


@given(st.integers(0, 2**32), st.integers(1, 12), st.booleans())
def test_each_session_has_one_ending_and_leaves_nothing(seed: int, count: int, dies: bool) -> None:
    trio.run(lambda: story(random.Random(seed), count, dies=dies), clock=MockClock(autojump_threshold=0))


# -- invalid messages of a process -------------------------------------------------------------------------------------

GOOD: list[Message] = [
    Head(1, {"a": "b"}, True), Credit(1, 1, 1), PartSaid(1, b"data", False, True), PromptTokens(2, 3), Head(2, {}, False),
    Text(2, "text", 1, -0.5), Said(2, None, Finish(reason=FinishReason.EOS_TOKEN)), Credit(2, 0, 0), Pong(1), Ended(2),
    Tensors(1, [Array("y", "INT32", (1,), bytes(4), {}, ())], "", {}, None, True), Log("app", 20, "text", ""),
    Returned(7, None, None), Ended(1, "error", "no", "No", 400),
]  # fmt: skip
"""Messages that a process may send for two open sessions, each of which has sent a message."""
FRAMES = [b"".join(frames_of([encoded(message)])) for message in GOOD]


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """Good frames, some of them changed, lost, said twice or in another order, or bytes between them."""
    frames = draw(st.lists(st.sampled_from(FRAMES), min_size=1, max_size=12))
    data = bytearray(b"".join(frames))
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    at = draw(st.integers(0, len(data)))
    return bytes(data[:at]) + draw(st.binary(max_size=8)) + bytes(data[at:])


async def hear(data: bytes) -> None:
    async with instance() as bystander, instance() as house:
        sessions = [house.call(Client(Part(data=b"1"), more=True)) for _ in range(2)]
        other = bystander.call(Client(Part(data=b"1"), more=True))
        for _ in range(4):
            await house.side.hear()
        with suppress(trio.BrokenResourceError):  # it had enough
            await house.side.stream.send_all(data)
        await wait_all_tasks_blocked()
        house.process.end(Exit(code=0))
        error = await house.end()
        assert type(error) in (InstanceEnded, RaisedThere)
        for session in sessions:
            await session.end()  # one each
        assert house.instance.sessions == 0
        assert (bystander.error, other.endings) == (None, [])
        await bystander.side.say(Ended(1))
        assert await other.end() is None


@given(spoilt())
def test_whatever_a_process_says_ends_it_and_its_sessions_at_most(data: bytes) -> None:
    trio.run(hear, data, clock=MockClock(autojump_threshold=0))


async def test_what_it_may_say_is_heard(autojump_clock: MockClock) -> None:
    async with instance() as house:
        one, two = (house.call(Client(Part(data=b"1"), more=True)) for _ in range(2))
        for _ in range(4):
            await house.side.hear()
        await house.side.stream.send_all(b"".join(FRAMES))
        ends = [await one.end(), await two.end()]  # whichever was the first
        assert sorted(type(end).__name__ for end in ends) == ["ModelError", "NoneType"]
        assert house.error is None
