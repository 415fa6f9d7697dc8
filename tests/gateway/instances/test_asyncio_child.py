"""An instance's own side on an asyncio loop: what a model written for that meets there, beside what `test_child` tells of both."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio

from gateway.instances.asyncio_child import serve_on_asyncio
from gateway.instances.asyncio_pipe import AsyncioPipe
from gateway.instances.messages import (
    MESSAGES_AHEAD,
    Ask,
    Cancel,
    Credit,
    Describe,
    Ended,
    EndOfInput,
    Failed,
    Frames,
    Load,
    Log,
    PartSaid,
    Ping,
    Pong,
    Text,
)
from models.adapt import adapt
from models.blocking import cancel_token, in_thread, run_step
from models.messages import Family, GenerationParameters, Part, Prompt, Token
from models.rolling import rolling
from models.spec import Model, ModelSpec
from tests.gateway.instances import sides
from tests.gateway.instances.sides import HELLO, PATIENCE, Side, cancelled, opened, streams
from tests.models.steps import Counting

Sess = Any


def child(model: Any = None, **more: Any) -> Any:
    """The side of a gateway to a child on asyncio."""
    return sides.child(model, loop="asyncio", **more)


def part(n: int = 0) -> Part:
    return Part(data=b"%d" % n)


def adapted(function: Any) -> Model:
    """The model that a function stands for."""
    return adapt(function)[0]


async def answers(side: Side, number: int = 1) -> None:
    """Waits until the loop has been there."""
    await side.say(Ping(number))
    assert await side.hear() == Pong(number)


async def whistle(gate: threading.Event) -> None:
    assert await trio.to_thread.run_sync(gate.wait, PATIENCE)


# -- cancels ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before it begins", "receives", "sends", "sleeps"])
async def test_a_cancelled_session_says_that_it_was(when: str) -> None:
    raised = list[type]()

    async def model(session: Sess) -> None:
        try:
            if when == "sends":
                for n in range(MESSAGES_AHEAD + 1):
                    await session.send(part(n))
            if when == "receives":
                await session.receive()
            await asyncio.sleep(1000)
        except BaseException as e:
            raised.append(type(e))
            raise

    async with child(model) as side:
        if when == "before it begins":
            await side.say(opened(1), Cancel(1))
        else:
            await side.say(opened(1))
            if when == "sends":
                for n in range(MESSAGES_AHEAD):
                    assert await side.take() == part(n)
            await answers(side)
            await side.say(Cancel(1))
        assert await side.hear() == cancelled(1)
        await answers(side, 2)
    assert raised == [asyncio.CancelledError] * (when != "before it begins")


async def test_a_model_that_goes_on_after_the_cancel_is_told_when_it_sends() -> None:
    told = list[type]()

    async def model(session: Sess) -> None:
        with suppress(asyncio.CancelledError):
            await session.receive()
        session.accept()
        session.prompt_tokens = 5
        for call in (lambda: session.send(part()), session.receive):
            try:
                await call()
            except Exception as e:
                told.append(type(e))

    async with child(model) as side:
        await side.say(opened(1))
        await answers(side)
        await side.say(Cancel(1), Cancel(1))
        assert await side.hear() == Ended(1)
    assert told == [trio.ClosedResourceError, trio.EndOfChannel]


async def test_a_cancel_of_the_models_own_is_its_failure() -> None:
    async def model(session: Sess) -> None:
        task = asyncio.create_task(asyncio.sleep(1000))
        asyncio.get_running_loop().call_soon(task.cancel)
        await task

    async with child(model) as side:
        await side.say(opened(1))
        ended = await side.hear()
        assert (ended.kind, ended.text) == ("raised", "ModelExit: CancelledError")
        assert "in model" in ended.trace


@pytest.mark.parametrize("when", ["waits", "sends"])
async def test_an_async_generator_that_is_cancelled_is_closed_with_its_clean_up(when: str) -> None:
    seen = list[str]()

    async def letters(prompt: str) -> AsyncIterator[str]:
        try:
            for letter in prompt * 100:
                yield letter
                if when == "waits":
                    await asyncio.sleep(1000)
        except BaseException as e:
            seen.append(type(e).__name__)
            raise
        finally:
            await asyncio.sleep(0)
            seen.append("closed")

    async with child(adapted(letters), family=Family.TEXT) as side:
        await side.say(opened(1))
        await side.give(1, Prompt(text="a"))
        for n in range(1 if when == "waits" else MESSAGES_AHEAD):
            assert await side.take() == Token(text="a", id=n)
        await answers(side)
        await side.say(Cancel(1))
        assert await side.hear() == cancelled(1)
        assert seen == ["CancelledError" if when == "waits" else "GeneratorExit", "closed"]


async def test_a_receive_that_is_given_up_loses_nothing() -> None:
    async def model(session: Sess) -> None:
        for _ in range(50):
            with suppress(TimeoutError):
                await asyncio.wait_for(session.receive(), 0)
        heard = []
        while len(heard) < 5:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.0005):
                    heard.append(int((await session.receive()).data))
        await session.send(Part(data=str(heard).encode()))

    async with child(model) as side:
        await side.say(opened(1))
        for n in range(5):
            await side.give(1, part(n))
        while type(message := await side.hear()) is Credit:
            pass
        assert message == PartSaid(1, b"[0, 1, 2, 3, 4]", utf8=False, last=True)


# -- sessions --------------------------------------------------------------------------------------------------------------


async def test_the_deadline_is_on_the_loops_clock() -> None:
    async def model(session: Sess) -> None:
        left = session.deadline - asyncio.get_running_loop().time()
        await session.send(Part(data=b"none" if left == float("inf") else b"%d" % round(left / 1000)))

    async with child(model) as side:
        await side.say(opened(1, 7000.0))
        assert (await side.take()).data == b"7"
        assert await side.hear() == Ended(1)
        await side.say(opened(2))
        assert (await side.take()).data == b"none"


async def test_each_session_has_context_variables_of_its_own() -> None:
    mine = contextvars.ContextVar("mine", default="nobody")

    async def model(session: Sess) -> None:
        before = mine.get()
        mine.set(session.call.path)
        await session.receive()
        seen = await asyncio.gather(asyncio.to_thread(mine.get), in_thread(mine.get))
        await session.send(Part(data=f"{before} {mine.get()} {seen}".encode()))

    async with child(model) as side:
        await side.say(opened(1, path="a"), opened(2, path="b"))
        await answers(side)
        for number, path in ((1, "a"), (2, "b")):
            await side.give(number, part())
            assert (await side.take()).data == f"nobody {path} ['{path}', '{path}']".encode()
            assert await side.hear() == Ended(number)


async def test_what_is_sent_in_one_turn_is_one_frame() -> None:
    async def model(session: Sess) -> None:
        await session.receive()
        for n in range(10):
            await session.send(part(n))

    async with streams() as (ours, theirs), trio.open_nursery() as nursery:
        nursery.cancel_scope.deadline = trio.current_time() + PATIENCE
        side, frames = Side(ours), Frames()
        nursery.start_soon(serve_here, theirs, model)
        await side.say(Describe("m", "app:m", {}), Load(4), opened(1))
        while type(await side.hear()) is not sides.Loaded:
            pass
        await side.say(opened(1), opened(2))
        await side.give(1, part())
        await side.give(2, part())
        found = list[list[Any]]()
        while sum(type(one) is Ended for messages in found for one in messages) < 2:
            found += frames.feed(await ours.receive_some(65536))
        assert sorted(len([one for one in messages if type(one) is PartSaid]) for messages in found) in ([10, 10], [20])
        side.hang_up()


async def serve_here(theirs: trio.SocketStream, model: Any) -> None:
    @asynccontextmanager
    async def load() -> AsyncIterator[Any]:
        yield model

    def described(_: Describe) -> Any:
        return ModelSpec(name="m", family=Family.PARTS, load=load), sides.Described({}, False)

    own = socket.socket(fileno=os.dup(theirs.socket.fileno()))
    await trio.to_thread.run_sync(asyncio.run, serve_on_asyncio(own, HELLO, described), abandon_on_cancel=True)


def test_and_while_the_socket_takes_no_more_so_is_all_that_is_posted_meanwhile() -> None:
    async def post_and_read() -> list[Any]:
        loop, frames, found = asyncio.get_running_loop(), Frames(), list[list[Any]]()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        pipe = AsyncioPipe()
        await pipe.open(theirs, lambda message: None, lambda: None)
        pipe.post(Log("app", 20, "x" * 8_000_000, ""))
        for number in range(10):
            await asyncio.sleep(0)
            pipe.post(Pong(number))
        while sum(map(len, found)) < 11:
            found += frames.feed(await asyncio.wait_for(loop.sock_recv(ours, 1 << 20), PATIENCE))
        await pipe.finish(PATIENCE)
        ours.close()
        return found

    assert [len(messages) for messages in asyncio.run(post_and_read())] in ([1, 10], [2, 9])


async def test_a_model_that_asks_for_more_again_and_again_lets_others_run() -> None:
    async def model(session: Sess) -> None:
        others = list[int]()
        task = asyncio.create_task(asyncio.sleep(0))
        task.add_done_callback(lambda _: others.append(1))
        for _ in range(100):
            with suppress(trio.EndOfChannel):
                await session.receive()
        await session.send(part(len(others)))

    async with child(model) as side:
        await side.say(opened(1), EndOfInput(1))
        assert await side.take() == part(1)


async def test_a_gateway_that_does_not_read_for_a_while_gets_all_of_it_in_order() -> None:
    sessions, size = 60, 60_000

    async def model(session: Sess) -> None:
        for n in range(4):
            await session.send(Part(data=b"%d" % n + bytes(size)))

    async with child(model) as side:
        await side.say(*map(opened, range(1, sessions + 1)))
        for number in range(1, 20):
            await side.say(Ping(number))
        heard = dict[int, list[int]]()
        over = 0
        while over < sessions:
            match await side.hear():
                case PartSaid() as said:
                    heard.setdefault(said.session, []).append(int(said.data[:1]))
                case Ended(kind=""):
                    over += 1
                case Pong():
                    pass
        assert heard == {number: [0, 1, 2, 3] for number in range(1, sessions + 1)}


# -- blocking steps --------------------------------------------------------------------------------------------------------


async def test_no_more_steps_run_at_once_than_may_and_those_that_wait_come_in_turn() -> None:
    gates, running = [threading.Event() for _ in range(8)], list[int]()

    def step(number: int) -> None:
        running.append(number)
        gates[number].wait(PATIENCE)

    async def model(session: Sess) -> None:
        number = int(session.call.path)
        await run_step(lambda: step(number))
        await session.send(part(number))

    async with child(model) as side:  # runs at most 4 steps at once
        for number in range(8):
            await side.say(opened(number + 1, path=str(number)))
            await answers(side)
        await side.say(Cancel(6))  # its step, number 5, still waits
        assert await side.hear() == cancelled(6)

        async def begun(steps: int) -> None:
            with trio.fail_after(PATIENCE):
                while len(running) < steps:  # noqa: ASYNC110
                    await trio.sleep(0.001)

        await begun(4)
        assert sorted(running) == [0, 1, 2, 3]
        for ended, number in enumerate((0, 1, 2, 3, 4, 6, 7), 1):
            gates[number].set()
            assert await side.take() == part(number)
            assert await side.hear() == Ended(number + 1)
            await begun(min(4 + ended, 7))  # its thread may be slower than that of the next
    assert running[4:] == [4, 6, 7]


async def test_a_step_that_nobody_waits_for_keeps_its_place_until_it_returns() -> None:
    gate, begun, told = threading.Event(), threading.Event(), list[bool]()

    def first() -> None:
        token = cancel_token()
        begun.set()
        gate.wait(PATIENCE)
        told.append(token.cancelled)

    async def model(session: Sess) -> None:
        await run_step(first if session.call.path == "first" else lambda: None, limiter=only)

    only = trio.CapacityLimiter(1)
    async with child(model) as side:
        await side.say(opened(1, path="first"))
        await whistle(begun)
        await side.say(opened(2), Cancel(1))
        await answers(side)
        gate.set()
        assert {await side.hear(), await side.hear()} == {cancelled(1), Ended(2)}
    assert told == [True]
    assert only.borrowed_tokens == 0


async def test_a_step_that_nobody_can_leave_is_waited_for() -> None:
    gate, seen = threading.Event(), list[str]()

    async def model(session: Sess) -> None:
        try:
            await in_thread(lambda: gate.wait(PATIENCE))
        except asyncio.CancelledError:
            seen.append("told")
            raise

    async with child(model) as side:
        await side.say(opened(1))
        await answers(side)
        await side.say(Cancel(1), Ping(2))
        assert await side.hear() == Pong(2)
        assert not seen
        gate.set()
        assert await side.hear() == cancelled(1)
    assert seen == ["told"]


async def test_a_sync_generator_runs_in_a_thread_and_is_closed_there() -> None:
    seen = list[Any]()

    def letters(prompt: str) -> Iterator[str]:
        try:
            yield from prompt * 100
        finally:
            seen.append(threading.current_thread() is not loop)

    loop: threading.Thread

    @asynccontextmanager
    async def load() -> AsyncIterator[Any]:
        nonlocal loop
        loop = threading.current_thread()
        yield adapted(letters)

    async with child(load=load, family=Family.TEXT) as side:
        await side.say(opened(1))
        await side.give(1, Prompt(text="a"))
        for n in range(MESSAGES_AHEAD):
            assert await side.take() == Token(text="a", id=n)
        await side.say(Cancel(1))
        assert await side.hear() == cancelled(1)
        assert seen == [True]


# -- its life --------------------------------------------------------------------------------------------------------------


async def test_a_loader_is_entered_and_left_in_one_task_after_the_sessions() -> None:
    seen = list[Any]()

    async def model(session: Sess) -> None:
        try:
            await session.receive()
        finally:
            seen.append("session")

    @asynccontextmanager
    async def load() -> AsyncIterator[Any]:
        before = asyncio.current_task()
        async with asyncio.timeout(1000), asyncio.TaskGroup() as group:
            worker = group.create_task(asyncio.sleep(1000))
            yield model
            await asyncio.sleep(0)
            seen.append(asyncio.current_task() is before)
            worker.cancel()

    async with child(load=load) as side:
        await side.say(opened(1))
        await answers(side)
        await side.stream.send_eof()
        assert await side.rest() == [cancelled(1)]
    assert seen == ["session", True]


async def test_a_session_that_does_not_end_keeps_the_loader_for_some_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.instances.asyncio_child._GOODBYE", 0.05)
    seen, stubborn = list[str](), True

    async def model(session: Sess) -> None:
        while stubborn:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)

    @asynccontextmanager
    async def load() -> AsyncIterator[Any]:
        nonlocal stubborn
        yield model
        seen.append("out")
        stubborn = False

    async with child(load=load) as side:
        await side.say(opened(1))
        await answers(side)
        await side.stream.send_eof()
        await side.rest()
    assert seen == ["out"]


@pytest.mark.parametrize("how", ["raises", "raises in a group", "exits", "is cancelled"])
async def test_sessions_are_cut_where_its_background_work_ends_it(how: str) -> None:
    async def background(crash: asyncio.Event) -> None:
        await crash.wait()
        if how == "exits":
            raise KeyError("x")
        raise ZeroDivisionError("in the background")

    @asynccontextmanager
    async def load() -> AsyncIterator[Any]:
        crash = asyncio.Event()
        life = asyncio.current_task()
        assert life is not None

        async def model(session: Sess) -> None:
            await session.send(part())
            await session.receive()
            if how == "is cancelled":
                life.cancel()
            crash.set()
            await asyncio.sleep(1000)

        if how == "is cancelled":
            yield model
        elif how == "raises in a group":
            async with asyncio.TaskGroup() as group:
                group.create_task(background(crash))
                yield model
        else:
            task = asyncio.create_task(background(crash))
            task.add_done_callback(lambda _: life.cancel())
            try:
                yield model
            except asyncio.CancelledError:
                if how == "raises":
                    await task
                with suppress(KeyError):
                    await task

    async with child(load=load) as side:
        await side.say(opened(1))
        assert await side.take() == part()
        await side.give(1, part())
        assert await side.hear() == cancelled(1), "it has not returned from it"
        failed = await side.hear()
        assert (failed.error, failed.ended) == {
            "raises": ("ZeroDivisionError: in the background", False),
            "raises in a group": ("ZeroDivisionError: in the background", False),
            "exits": ("", True),
            "is cancelled": ("CancelledError: ", False),
        }[how]
        assert await side.hear() is None


@pytest.mark.parametrize("moment", ["before", "while it waits", "while it warms up"])
async def test_a_gateway_that_hangs_up_while_it_loads_cancels_that(moment: str) -> None:
    seen, begun = list[str](), threading.Event()

    async def model(session: Sess) -> None:
        begun.set()
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    @asynccontextmanager
    async def load() -> AsyncIterator[Any]:
        try:
            if moment != "while it warms up":
                await model(None)
            yield model
        finally:
            seen.append("left")

    async with child(load=load, family=Family.TEXT, warmup=(Prompt(text=""),), loaded=False) as side:
        if moment != "before":
            await whistle(begun)
        await side.stream.send_eof()
        assert await side.rest() == []
    assert seen in ([], ["cancelled", "left"]) if moment == "before" else seen == ["cancelled", "left"]


async def test_a_factory_that_cannot_be_imported_is_told_once_though_it_is_to_be_loaded() -> None:
    said = Failed("ImportError: no app", "trace")
    async with streams() as (ours, theirs), trio.open_nursery() as nursery:
        own = socket.socket(fileno=os.dup(theirs.socket.fileno()))
        theirs.socket.close()
        nursery.start_soon(trio.to_thread.run_sync, asyncio.run, serve_on_asyncio(own, HELLO, lambda _: (None, said)))
        side = Side(ours)
        await side.say(Describe("m", "app:m", {}), Load(4))
        assert await side.rest() == [HELLO, said]


@pytest.mark.parametrize("what", ["a nursery", "a rolling batch", "a sleep"])
async def test_what_needs_trio_says_so_when_it_is_loaded(what: str) -> None:
    @asynccontextmanager
    async def load() -> AsyncIterator[Any]:
        match what:
            case "a nursery":
                async with trio.open_nursery():
                    yield
            case "a rolling batch":
                async with rolling(Counting()) as batch:
                    yield batch
            case _:
                await trio.lowlevel.checkpoint()
                yield

    async with child(load=load, loaded=False, family=Family.TEXT) as side:
        failed = await side.hear()
        assert 'loop = "trio"' in failed.error


async def test_and_so_does_a_session() -> None:
    async def model(session: Sess) -> None:
        await trio.sleep(1)

    async with child(model) as side:
        await side.say(opened(1))
        ended = await side.hear()
        assert 'loop = "trio"' in ended.text


# -- warm-up ---------------------------------------------------------------------------------------------------------------


async def test_a_text_that_would_not_end_is_stopped_in_the_warm_up() -> None:
    seen = list[Any]()

    async def endless(prompt: Prompt) -> AsyncIterator[str]:
        try:
            while True:
                seen.append(0)
                yield "a"
        finally:
            seen.append("stopped")

    prompt = Prompt(text="", parameters=GenerationParameters(max_new_tokens=5))
    async with child(adapted(endless), family=Family.TEXT, warmup=(prompt, prompt)) as side:
        await answers(side)
    assert seen.count("stopped") == 2
    assert 10 <= len(seen) <= 20


async def test_a_warm_up_function_calls_the_model_as_it_likes() -> None:
    seen = list[Any]()

    async def warm(model: Callable[[Any], Awaitable[None]]) -> None:
        await asyncio.sleep(0)
        seen.append(model)

    async def model(session: Sess) -> None:
        pass

    async with child(model, warmup=warm):
        pass
    assert seen == [model]


# -- the log ---------------------------------------------------------------------------------------------------------------


async def test_a_task_whose_exception_nobody_took_is_in_the_log() -> None:
    async def boom() -> None:
        raise ZeroDivisionError("nobody looks")

    async def model(session: Sess) -> None:
        asyncio.create_task(boom()).set_name("work")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async with child(model) as side:
        await side.say(opened(1))
        found = [await side.hear(), await side.hear()]
        (record,) = [message for message in found if type(message) is Log]
        assert (record.logger, record.level) == ("asyncio", logging.ERROR)
        assert "never retrieved" in record.text
        assert "ZeroDivisionError: nobody looks" in record.trace


async def test_more_than_200_records_a_second_are_counted() -> None:
    async def model(session: Sess) -> None:
        for n in range(1000):
            logging.getLogger("app.flood").warning("%d", n)

    async with child(model) as side:
        await side.say(opened(1))
        heard = [await side.hear() for _ in range(201)]
        assert Ended(1) in heard
        await side.stream.send_eof()
        texts = [message.text for message in (*heard, *await side.rest()) if type(message) is Log]
        assert texts == [*map(str, range(200)), "800 records dropped"]


async def test_a_function_of_the_authors_keeps_nobody_waiting() -> None:
    gate = threading.Event()

    async def model(session: Sess) -> None:
        await session.send(part())

    async with child(model, count_tokens=lambda text: int(gate.wait(PATIENCE))) as side:
        await side.say(Ask(1, "count_tokens", ""), opened(1))
        assert await side.take() == part()
        assert await side.hear() == Ended(1)
        gate.set()
        assert (await side.hear()).value == 1


async def test_text_is_ahead_by_its_credit_and_no_further() -> None:
    sent = list[float]()

    async def letters(prompt: str) -> AsyncIterator[str]:
        for _ in range(1000):
            sent.append(time.monotonic())
            yield prompt

    async with child(adapted(letters), family=Family.TEXT) as side:
        await side.say(opened(1))
        await side.give(1, Prompt(text="a"))
        await side.say(EndOfInput(1))
        for n in range(MESSAGES_AHEAD):
            assert await side.take() == Token(text="a", id=n)
        await answers(side)
        assert len(sent) == MESSAGES_AHEAD + 1
        await side.say(Credit(1, 8, 8))
        for _ in range(8):
            assert type(await side.hear()) is Text
        await answers(side, 2)
        assert len(sent) == MESSAGES_AHEAD + 1 + 8
        await side.say(Cancel(1))
        assert await side.hear() == cancelled(1)
