"""The promises of every channel to a model, on any wire and converter: order, ends, cancellation, one task a direction."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from models.session import Call, Session
from tests.models.channels import WORLDS, MemoryChannel, World


@pytest.fixture(params=WORLDS)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with WORLDS[request.param]() as world:
        yield world


async def received(session: Session[Any, Any]) -> list[Any]:
    return [message async for message in session]


async def test_messages_come_in_order_and_then_the_end_again_and_again(world: World) -> None:
    world.feed()
    assert [await world.session.receive() for _ in world.inbound] == list(world.inbound)
    world.channel.end()
    for _ in range(3):
        with pytest.raises(trio.EndOfChannel):
            await world.session.receive()


async def test_iteration_gives_every_message_and_stops_at_the_end(world: World) -> None:
    world.feed()
    world.channel.end()
    assert await received(world.session) == list(world.inbound)
    assert await received(world.session) == []


async def test_a_cancelled_receive_loses_nothing(world: World) -> None:
    for _ in range(3):
        with trio.CancelScope() as scope:
            scope.cancel()
            await world.session.receive()
        assert scope.cancelled_caught
    world.feed()
    world.channel.end()
    assert await received(world.session) == list(world.inbound)


async def test_a_receive_that_is_cancelled_as_its_message_comes_loses_nothing(world: World) -> None:
    got: list[Any] = []

    async def receive() -> None:
        got.append(await world.session.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        world.feed()
        nursery.cancel_scope.cancel()
    world.channel.end()
    assert got + await received(world.session) == list(world.inbound)


async def test_answers_leave_in_order_and_whole(world: World) -> None:
    for answer in world.answers:
        await world.session.send(answer)
    assert world.seen == list(world.answers)


async def test_a_client_that_does_not_read_stops_the_sender_until_it_reads(world: World) -> None:
    world.channel.room = 1
    async with trio.open_nursery() as nursery:

        async def send_all() -> None:
            for answer in world.answers:
                await world.session.send(answer)

        nursery.start_soon(send_all)
        await wait_all_tasks_blocked()
        assert world.seen == [world.answers[0]]
        world.channel.read()
    assert world.seen == list(world.answers)


async def test_a_cancelled_send_has_sent_nothing(world: World) -> None:
    world.channel.room = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.session.send, world.answers[0])
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    world.channel.read()
    await world.session.send(world.answers[2])
    assert world.seen == [world.answers[2]]


async def test_a_second_receiver_is_refused_and_the_first_goes_on() -> None:
    channel = MemoryChannel(ended=False)
    session: Session[Any, Any] = Session(channel)
    got: list[Any] = []
    async with trio.open_nursery() as nursery:

        async def receive() -> None:
            got.append(await session.receive())

        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await session.receive()
        with pytest.raises(trio.BusyResourceError):
            await anext(aiter(session))
        channel.feed("message")
    assert got == ["message"]


async def test_a_second_sender_is_refused_and_the_first_goes_on(world: World) -> None:
    world.channel.room = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.session.send, world.answers[0])
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await world.session.send(world.answers[2])
        world.channel.read()
    assert world.seen == [world.answers[0]]


async def test_one_task_receives_while_another_sends(world: World) -> None:
    world.channel.room = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.session.send, world.answers[0])
        await wait_all_tasks_blocked()
        world.feed()
        assert await world.session.receive() == world.inbound[0]
        world.channel.read()
    assert world.seen == [world.answers[0]]


async def test_a_session_is_free_again_after_a_cancelled_call_and_after_an_error(world: World) -> None:
    world.channel.end()
    with trio.CancelScope() as scope:
        scope.cancel()
        await world.session.send(world.answers[0])
    world.channel.complete = True
    for _ in range(2):
        with pytest.raises(trio.ClosedResourceError):
            await world.session.send(world.answers[0])
    while True:
        try:
            await world.session.receive()
        except trio.EndOfChannel:
            break
    with pytest.raises(trio.EndOfChannel):
        await world.session.receive()


async def test_a_session_tells_its_call_and_deadline() -> None:
    session: Session[Any, Any] = Session(MemoryChannel(), Call(id="x-1", model="m"), deadline=7.0)
    assert (session.id, session.call.model, session.deadline) == ("x-1", "m", 7.0)
    bare: Session[Any, Any] = Session(MemoryChannel())
    assert (bare.id, dict(bare.call.headers), bare.deadline) == ("", {}, float("inf"))


def test_a_reply_can_be_added_to_and_replaced_and_stays_the_channels_own() -> None:
    class Headed(MemoryChannel):
        def __init__(self) -> None:
            super().__init__()
            self.reply: dict[str, str] = {}

    channel = Headed()
    session: Session[Any, Any] = Session(channel)
    session.reply["content-type"] = "a/b"
    session.reply |= {"x-amzn-sagemaker-custom-attributes": "c"}
    assert channel.reply == {"content-type": "a/b", "x-amzn-sagemaker-custom-attributes": "c"}
    session.reply = {"content-type": "d/e"}
    assert channel.reply == {"content-type": "d/e"}
    assert Session(MemoryChannel()).reply == {}
