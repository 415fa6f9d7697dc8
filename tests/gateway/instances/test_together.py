"""Both sides of an instance together: whatever clients and models do, and however they are cancelled, nothing is left."""

from __future__ import annotations

import random
import socket
from contextlib import asynccontextmanager
from typing import Any

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.errors import WorkerLost
from gateway.instances.instance import Instance, InstanceEnded
from gateway.instances.messages import Describe, Described, Load
from gateway.instances.pipe import Pipe
from gateway.instances.spawn import Exit
from gateway.instances.trio_child import TrioChild
from models.blocking import StepHolder, set_step_holder
from models.errors import ModelError
from models.messages import Family, Part
from models.spec import ModelSpec
from tests.gateway.instances.sides import PATIENCE, Client, Exchange, NoProcess

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
    instance = Instance(process, Load(4), hang_timeout=0)  # type: ignore[arg-type]
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
