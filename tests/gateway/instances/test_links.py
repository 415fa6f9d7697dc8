"""Links of several gateways to one process: each has its own sessions and its own end, and the model is one."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import pytest
import trio

from gateway.instances.instance import Instance, InstanceEnded
from gateway.instances.links import LinkedProcess, hand_link, receive_link
from gateway.instances.memory import SharedMemory
from gateway.instances.messages import Credit, Describe, Load, Loaded, Log, Ping, Pong, Stuck
from gateway.instances.spawn import Exit, ProcessPlan
from models.blocking import run_step
from models.messages import Part
from models.session import Session
from tests.gateway.instances.sides import LOADED, PATIENCE, Client, Exchange, Side, cancelled, child, instance, opened

Make = Callable[..., Any]


@pytest.fixture(name="child", params=["trio", "asyncio"])
def either(request: pytest.FixtureRequest) -> Make:
    """`child`, on each loop."""
    return partial(child, loop=request.param)


@contextmanager
def packets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The socket that links come over: its owner's end, and the process's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


@asynccontextmanager
async def linked(at: socket.socket) -> AsyncIterator[Side]:
    """One more gateway's side of the process behind that socket, once it has said what is loaded."""
    ours, theirs = socket.socketpair()
    with theirs:
        hand_link(at, [theirs.fileno()])
    ours.setblocking(False)
    async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream:
        side = Side(stream)
        await side.say(Load(1))
        assert type(await side.hear()) is Loaded
        yield side


async def said(side: Side) -> Any:
    """The next of what the model says, or of something else than credit and the log."""
    while isinstance(message := await side.hear(), Credit | Log):
        pass
    return message


def part(text: str) -> Part:
    return Part(data=text.encode())


async def echo(session: Session[Any, Any]) -> None:
    async for message in session:
        await session.send(message)


async def test_each_gateway_has_its_own_sessions_though_their_numbers_are_the_same(child: Make) -> None:
    with packets() as (at, links):
        async with child(echo, links=links) as first, linked(at) as second, linked(at) as third:
            sides = {"first": first, "second": second, "third": third}
            for side in sides.values():
                await side.say(opened(1))
            for name, side in sides.items():
                await side.give(1, part(name))
            for name, side in sides.items():
                assert (await said(side)).data == name.encode()
            await third.say(Describe("m", "app:m", {}), Ping(5))  # only the first link may ask for a description
            assert await said(third) == Pong(5)


async def test_a_gateway_that_hangs_up_ends_its_sessions_and_nobody_elses(child: Make) -> None:
    ended = list[bytes]()

    async def watched(session: Session[Any, Any]) -> None:
        name = (await session.receive()).data
        try:
            await session.send(part("up"))
            await session.receive()
            await session.send(part("on"))
        finally:
            ended.append(bytes(name))

    with packets() as (at, links):
        async with child(watched, links=links) as first:
            async with linked(at) as second:
                for side, name in ((first, "first"), (second, "second")):
                    await side.say(opened(1))
                    await side.give(1, part(name))
                    await said(side)
            with trio.fail_after(PATIENCE):
                while ended != [b"second"]:  # noqa: ASYNC110  # on another loop, perhaps
                    await trio.sleep(0.001)
            await first.give(1, part("go on"))
            assert (await said(first)).data == b"on"
            async with linked(at) as again:
                await again.say(Ping(1))
                assert await again.hear() == Pong(1)


async def test_bytes_that_are_no_message_end_that_link_alone(child: Make, caplog: pytest.LogCaptureFixture) -> None:
    with packets() as (at, links):
        async with child(echo, links=links) as first, linked(at) as bad, linked(at) as good:
            await bad.stream.send_all(b"\0\0\0\1\xc1")
            assert await bad.hear() is None
            for side in (first, good):
                await side.say(opened(1))
                await side.give(1, part("still"))
                assert (await said(side)).data == b"still"
    assert any("a front is not served any more" in record.getMessage() for record in caplog.records)


async def test_the_end_of_whoever_has_started_it_is_the_end_of_all(child: Make) -> None:
    with packets() as (at, links):
        async with child(echo, links=links) as first, linked(at) as second:
            await second.say(opened(1))
            first.hang_up()
            assert [message for message in await second.rest() if message != cancelled(1)] == []


async def test_a_link_whose_descriptors_cannot_be_used_leaves_none_of_them() -> None:
    with packets() as (at, links):
        before = len(os.listdir("/proc/self/fd"))
        a, b = socket.socketpair()
        with a, b:
            hand_link(at, [a.fileno(), b.fileno(), b.fileno()])  # a socket is no memory
            with pytest.raises((OSError, ValueError)):
                receive_link(links)
        assert len(os.listdir("/proc/self/fd")) == before
        at.close()
        assert receive_link(links) is None


async def test_more_stuck_than_may_be_are_told_to_whoever_has_started_it() -> None:
    go_on = trio.Event()

    async def blocked(session: Session[Any, Any]) -> None:
        await session.send(part("up"))
        await run_step(partial(trio.from_thread.run, go_on.wait))

    with packets() as (at, links):
        async with child(blocked, links=links, limits=(4, 0.05, 0.0, 0)) as first, linked(at) as second:
            await second.say(opened(1))
            await said(second)
            told = await second.hear()
            assert isinstance(told, Stuck)
            assert (told.session, told.replaced) == (1, False)
            told = await first.hear()
            assert isinstance(told, Stuck)
            assert (told.session, told.replaced) == (0, False)
            go_on.set()


# -- the gateway's side ----------------------------------------------------------------------------------------------------


class Linked:
    """A gateway's side of a process that is another's, and what it has asked that one to end it for."""

    def __init__(self, size: int = 0) -> None:
        self.wanted = list[str]()
        plan = ProcessPlan(name="m", number=0, shared_memory=size)
        self.process = LinkedProcess(plan, 4711, lambda: self.wanted.append("killed"))
        self.instance = Instance(self.process, Load(4), hang_timeout=0.0, ask_to_kill=self.wanted.append)
        end = socket.socket(fileno=os.dup(self.process.descriptors[0]))
        end.setblocking(False)
        self.side = Side(trio.SocketStream(trio.socket.from_stdlib_socket(end)))
        self.memory = SharedMemory.of_descriptors(*map(os.dup, self.process.descriptors[1:])) if size else None
        self.process.handed()
        self.error: Exception | None = None
        self.over, self.scope = trio.Event(), trio.CancelScope()

    async def run(self) -> None:
        try:
            with self.scope:
                await self.instance.run([], self.ready, lambda: None)
        except Exception as e:
            self.error = e
        self.over.set()

    def ready(self) -> None:
        self.instance.ready = True


@asynccontextmanager
async def linked_instance() -> AsyncIterator[tuple[Linked, trio.Nursery]]:
    """One that is loaded."""
    one = Linked()
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.run)
            assert await one.side.hear() == Load(4)
            await one.side.say(LOADED)
            while not one.instance.ready:
                await trio.testing.wait_all_tasks_blocked()
            yield one, nursery
            one.process.end(Exit())
            one.side.hang_up()
            await one.over.wait()


async def lost(one: Linked, nursery: trio.Nursery) -> Exchange:
    """A session that is open there."""
    exchange = Exchange(Client(more=True))
    nursery.start_soon(exchange.run, one.instance, None, {})
    await one.side.hear()
    return exchange


async def test_a_link_that_ends_ends_its_sessions_before_its_owner_says_why() -> None:
    async with linked_instance() as (one, nursery):
        exchange = await lost(one, nursery)
        one.side.hang_up()
        assert "ended; try again" in str(await exchange.end())
        assert not one.over.is_set()
        one.process.end(Exit(signal=9))
        await one.over.wait()
        assert isinstance(one.error, InstanceEnded)
        assert "SIGKILL" in str(one.error)
        assert one.wanted == []


async def test_one_that_hangs_up_by_itself_asks_for_no_end(autojump_clock: trio.testing.MockClock) -> None:
    async with linked_instance() as (one, _):
        began = trio.current_time()
        one.scope.cancel()
        assert await one.side.hear() is None
        one.side.hang_up()
        await one.over.wait()
        assert trio.current_time() == began  # it waits for no other end of the process
        assert one.wanted == []


async def test_one_whose_loop_is_silent_after_a_cancel_is_its_owners_to_end() -> None:
    async with linked_instance() as (one, _):
        one.instance.kill("a session had not stopped")
        assert one.wanted == ["a session had not stopped"]
        assert not one.over.is_set()  # until it has ended


async def test_a_place_that_another_has_is_left_when_its_sessions_are_over() -> None:
    async with linked_instance() as (one, nursery):
        exchange = await lost(one, nursery)
        one.instance.part(60.0, one.process.hang_up)
        await trio.testing.wait_all_tasks_blocked()
        assert not one.over.is_set()
        await one.side.say(cancelled(1))
        await exchange.end()
        await one.over.wait()
        assert one.wanted == []


async def test_a_process_whose_place_another_has_goes_on_while_somebody_is_linked() -> None:
    async with instance(stop_within=1.0) as house:
        house.instance.linked.add("a front")
        house.instance.part(60.0)
        await trio.testing.wait_all_tasks_blocked()
        await house.side.say(Pong(1))
        await trio.testing.wait_all_tasks_blocked()
        assert house.instance._nursery is not None  # it serves
        house.instance.unlinked("a front")
        assert await house.side.hear() is None
        assert house.process.killed == 0


async def test_another_gateways_stuck_session_wears_it_out() -> None:
    async with instance(stop_within=1.0) as house:
        await house.side.say(Stuck(0, step=False, stack="", replaced=False))
        await trio.testing.wait_all_tasks_blocked()
        assert house.worn == 1
        assert "stuck_limit" in house.instance.worn


async def test_memory_of_a_link_is_both_sides_and_gone_with_them() -> None:
    before = len(os.listdir("/proc/self/fd"))
    one = Linked(1024 * 1024)
    assert one.memory is not None
    assert one.process.memory is not None
    place = one.process.memory.arena.take(100_000)
    assert place is not None
    place[:5] = b"hello"
    block = one.process.memory.lend(place)
    assert bytes(one.memory.window.view(block)[:5]) == b"hello"
    one.memory.close()
    one.process.close()
    one.side.hang_up()
    del place
    assert len(os.listdir("/proc/self/fd")) == before
