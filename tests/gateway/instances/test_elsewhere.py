"""The contract of every place that a model runs at: a process of this machine, and a stand-in in memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import trio

from gateway.catalog.process_model import CHILD
from gateway.instances.elsewhere import Elsewhere, Start
from gateway.instances.messages import Describe, Described, Hello, Load, Loaded, Message, encoded, frames_of
from gateway.instances.pipe import Pipe
from gateway.instances.spawn import Exit, Process, ProcessPlan
from gateway.testing import MemoryPlace, in_memory_processes
from models.library.echo import Echo

PATIENCE = 60


def of_this_machine() -> Start:
    return lambda plan: Process.start(plan, str(plan.memory_limit), plan.loop)


def in_memory() -> Start:
    _, processes = in_memory_processes(Echo())
    return processes.start


def narrow() -> Start:
    _, processes = in_memory_processes(Echo(), place=MemoryPlace(capacity=20, piece=7, notice=0.01))
    return processes.start


@pytest.fixture(params=[pytest.param(of_this_machine, marks=pytest.mark.programs), in_memory, narrow])
def start(request: pytest.FixtureRequest) -> Start:
    places: Callable[[], Start] = request.param
    return places()


def begun(start: Start) -> Elsewhere:
    return start(ProcessPlan(name="m", number=3, module=CHILD))


async def hear(stream: trio.abc.Stream, until: type[Message]) -> list[Message]:
    """All that it says, up to a message of that kind or to its end."""
    heard: list[Message] = []
    with trio.fail_after(PATIENCE), trio.CancelScope() as scope:

        def take(message: Message) -> None:
            heard.append(message)
            if type(message) is until:
                scope.cancel()

        with suppress(trio.BrokenResourceError):
            await Pipe(stream).read(take)
    return heard


async def say(stream: trio.abc.Stream, *messages: Message) -> None:
    for frame in frames_of([encoded(message) for message in messages]):
        await stream.send_all(frame)


async def test_it_says_hello_loads_its_model_and_leaves_when_the_gateway_hangs_up(start: Start) -> None:
    place = begun(start)
    assert (place.plan.name, place.plan.number, place.pid > 0) == ("m", 3, True)
    stream = place.stream()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(place.read_output, lambda name, line: None)
        assert [type(message) for message in await hear(stream, Hello)] == [Hello]
        await say(stream, Describe("m", "models.library.echo:Echo", {}), Load(4))
        assert [type(message) for message in await hear(stream, Loaded)] == [Described, Loaded]
        assert min(place.used()) >= 0
        await stream.send_eof()
        with trio.fail_after(PATIENCE):
            assert await place.ended() == Exit(code=0)
        assert await hear(stream, Hello) == []
    place.close()


async def test_one_that_is_killed_says_so_to_all_who_wait_and_its_stream_ends(start: Start) -> None:
    place, ends = begun(start), list[Exit]()
    stream = place.stream()

    async def wait() -> None:
        ends.append(await place.ended())

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait)
            nursery.start_soon(place.read_output, lambda name, line: None)
            await hear(stream, Hello)
            with trio.move_on_after(0):  # one who leaves changes nothing
                await place.ended()
            place.kill()
        await wait()
    assert ends == [Exit(signal=9)] * 4
    assert await hear(stream, Hello) == []
    place.kill()
    place.close()
    place.close()


async def test_close_kills_it_and_releases_whoever_reads_its_output(start: Start) -> None:
    place = begun(start)
    stream = place.stream()
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(place.read_output, lambda name, line: None)
            await hear(stream, Hello)
            place.close()
        assert await place.ended() == Exit(signal=9)
    with pytest.raises((trio.ClosedResourceError, trio.BrokenResourceError)):
        await stream.send_all(b"more")
