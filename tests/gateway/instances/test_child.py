"""An instance's own side: what a model in a process meets, and what is said of how it ended."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.instances.messages import (
    MESSAGES_AHEAD,
    Ask,
    Cancel,
    Credit,
    Describe,
    Ended,
    EndOfInput,
    Failed,
    Head,
    Load,
    Loaded,
    Log,
    PartSaid,
    Ping,
    Pong,
    PromptTokens,
    Returned,
    Stuck,
)
from gateway.instances.pipe import BrokenPipe, Pipe
from gateway.instances.trio_child import TrioChild
from models.blocking import StepCancelled, in_thread, run_step, running_loop, start_thread, step_holder
from models.chat import ChatMessage, Conversation
from models.errors import ContextLengthExceeded, ModelError
from models.messages import Family, InferResponse, Part, Prompt, Token
from tests.gateway.instances.sides import PATIENCE, Side, cancelled, child, opened, streams
from tests.gateway.instances.test_messages import UNSENDABLE

Sess = Any
Make = Callable[..., Any]


@pytest.fixture(name="child", params=["trio", "asyncio"])
def either(request: pytest.FixtureRequest) -> Make:
    """`child`, on each loop: for tests whose models wait for nothing but their session."""
    return partial(child, loop=request.param)


def part(n: int = 0) -> Part:
    return Part(data=b"%d" % n)


async def echo(session: Sess) -> None:
    async for message in session:
        await session.send(message)


# -- sessions --------------------------------------------------------------------------------------------------------------


async def test_a_session_runs_until_the_client_says_no_more(child: Make) -> None:
    async with child(echo) as side:
        await side.say(opened(1), opened(2))
        for n in range(3):
            await side.give(2, part(n))
            assert await side.take() == part(n)
            assert await side.hear() == Credit(2, 1, 1)
        await side.say(EndOfInput(2))
        assert await side.hear() == Ended(2)
        await side.give(1, part(7))
        assert await side.take() == part(7)


async def test_the_model_knows_the_call_and_its_deadline(mock_clock: MockClock) -> None:
    mock_clock.jump(100)

    async def model(session: Sess) -> None:
        await session.send(part(int(session.deadline)) if session.deadline < 1e9 else Part(data=session.call.path.encode()))

    async with child(model) as side:
        await side.say(opened(1, 2.5, path="/p"), opened(2, path="/q"))
        said = [await side.hear() for _ in range(4)]
        assert {message.data for message in said if type(message) is PartSaid} == {b"102", b"/q"}


async def test_a_model_without_credit_waits_and_is_told_of_the_end() -> None:
    raised = list[BaseException]()

    async def model(session: Sess) -> None:
        try:
            for n in range(100):
                await session.send(part(n))
        except BaseException as e:
            raised.append(e)
            raise

    async with child(model) as side:
        await side.say(opened(1))
        for n in range(MESSAGES_AHEAD):
            assert await side.take() == part(n)
        await wait_all_tasks_blocked()
        await side.say(Cancel(1))
        assert await side.hear() == cancelled(1)
    assert [type(error) for error in raised] == [trio.Cancelled]


async def test_the_head_comes_before_the_first_message_and_once(child: Make) -> None:
    async def model(session: Sess) -> None:
        session.reply["content-type"] = "a/b"
        if session.call.path == "accepts":
            session.accept()
        await session.send(part(1))
        session.accept()
        session.prompt_tokens = 5
        await session.send(part(2))

    async with child(model) as side:
        for number, path in ((1, ""), (2, "accepts")):
            await side.say(opened(number, path=path))
            assert await side.hear() == Head(number, {"content-type": "a/b"}, path == "accepts")
            assert await side.take() == part(1)
            assert await side.hear() == PromptTokens(number, 5)
            assert await side.take() == part(2)
            assert await side.hear() == Ended(number)


async def test_a_head_that_cannot_be_said_is_the_error_of_its_session(child: Make) -> None:
    async def model(session: Sess) -> None:
        session.reply["x"] = 5
        await session.send(part())

    async with child(model) as side:
        await side.say(opened(1))
        ended = await side.hear()
        assert (ended.kind, ended.text.partition(":")[0]) == ("raised", "ValidationError")
        await side.say(Ping(1))
        assert await side.hear() == Pong(1)


async def test_numbers_of_prompt_tokens_are_numbers(child: Make) -> None:
    async def model(session: Sess) -> None:
        for count in (True, None, 2**60):
            session.prompt_tokens = count
        session.prompt_tokens = 2**70

    async with child(model) as side:
        await side.say(opened(1))
        assert [await side.hear() for _ in range(3)] == [PromptTokens(1, 1), PromptTokens(1, None), PromptTokens(1, 2**60)]
        assert (await side.hear()).text.startswith("OverflowError: ")


@pytest.mark.parametrize("message", UNSENDABLE.values(), ids=[*UNSENDABLE])
async def test_a_message_that_cannot_be_sent_ends_its_session_alone(child: Make, message: Any) -> None:
    async def model(session: Sess) -> None:
        await session.receive()
        await session.send(message if session.call.path == "odd" else part())

    async with child(model) as side:
        await side.say(opened(1), opened(2, path="odd"))
        await side.give(2, part())
        ended = await side.hear()
        # an array that does not fit its datatype is the model's bad output; each other message is an exception
        said = "error" if ended.code == "BadOutput" else "raised"
        assert (ended.session, ended.kind, ended.code == "BadOutput") == (2, said, bad_array(message))
        await side.give(1, part())
        assert await side.take() == part()
        assert await side.hear() == Ended(1)


def bad_array(message: Any) -> bool:
    """True if a response has an array that does not fit its datatype."""
    return isinstance(message, InferResponse) and any(not tensor.parameters for tensor in message.outputs)


# -- how it ended ----------------------------------------------------------------------------------------------------------


class Odd(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def changed(error: ModelError, **named: Any) -> ModelError:
    for name, value in named.items():
        setattr(error, name, value)
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ModelError("no"), Ended(1, "error", "no", "ModelError", 424)),
        (ModelError("no ü", code="C", status=409), Ended(1, "error", "no ü", "C", 409)),
        (ModelError("\ud800a"), Ended(1, "error", "\ufffda", "ModelError", 424)),
        (ContextLengthExceeded(9, 8, prompt_tokens=5), Ended(1, "context", tokens=(9, 8, 5))),
        (ContextLengthExceeded(9, 8), Ended(1, "context", tokens=(9, 8, None))),
        (trio.EndOfChannel(), Ended(1, "input")),
        (trio.ClosedResourceError(), Ended(1, "closed")),
        (ExceptionGroup("g", [trio.EndOfChannel(), ExceptionGroup("h", [trio.EndOfChannel()])]), Ended(1, "input")),
        (ExceptionGroup("g", [trio.EndOfChannel(), trio.ClosedResourceError()]), Ended(1, "closed")),
        (ExceptionGroup("g", [ValueError(), ModelError("no")]), Ended(1, "error", "no", "ModelError", 424)),
    ],
    ids=repr,
)
async def test_what_a_model_raises_for_its_client_is_said_as_it_was(child: Make, error: Exception, expected: Ended) -> None:
    async def model(session: Sess) -> None:
        raise error

    async with child(model) as side:
        await side.say(opened(1))
        assert await side.hear() == expected


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (KeyError("a"), "raised", "KeyError: 'a'"),
        (MemoryError("big"), "memory", "MemoryError: big"),
        (type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})("CUDA"), "memory", "OutOfMemoryError: CUDA"),
        (ExceptionGroup("g", [ValueError("x"), MemoryError("big")]), "memory", "ValueError: x"),
        (ExceptionGroup("g", [ValueError("x"), trio.EndOfChannel()]), "raised", "ValueError: x"),
        (SystemExit(3), "raised", "SystemExit: 3"),
        (KeyboardInterrupt(), "raised", "KeyboardInterrupt: "),
        (FileNotFoundError("\udcff"), "raised", "FileNotFoundError: \ufffd"),
        (ValueError("x" * 100_000), "raised", "ValueError: " + "x" * 1988),
        (Odd(), "raised", "Odd: its text cannot be read"),
    ],
    ids=lambda value: repr(value)[:40] if not isinstance(value, Odd) else "odd",
)
async def test_what_else_it_raises_comes_with_its_traceback(child: Make, error: BaseException, kind: str, text: str) -> None:
    async def model(session: Sess) -> None:
        raise error

    async with child(model) as side:
        await side.say(opened(1), opened(2))
        for _ in range(2):
            ended = await side.hear()
            assert (ended.kind, ended.text) == (kind, text)
            assert "in model" in ended.trace or len(ended.trace) == 16 * 1024
        await side.say(Ping(1))
        assert await side.hear() == Pong(1)


@pytest.mark.parametrize(
    "error",
    [
        changed(ModelError("no"), status="409"),
        changed(ModelError("no"), status=2**70),
        ContextLengthExceeded(1.5, 1),  # type: ignore[arg-type]
    ],
)
async def test_an_error_whose_fields_cannot_be_said_is_that_of_its_session_alone(child: Make, error: Exception) -> None:
    async def model(session: Sess) -> None:
        raise error

    async with child(model, count_tokens=lambda text: model_raises()) as side:

        def model_raises() -> int:
            raise error

        await side.say(opened(1), Ask(1, "count_tokens", "a"))
        answers = [await side.hear(), await side.hear()]
        ended, answer = sorted(answers, key=lambda message: type(message) is Returned)
        for said in (ended, answer.error):
            assert (said.kind, said.text.partition(",")[0]) == ("raised", type(error).__name__)


# -- cancels ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before it begins", "receives", "sends", "sleeps"])
async def test_a_cancelled_session_says_that_it_was(when: str) -> None:
    async def model(session: Sess) -> None:
        if when == "sends":
            for n in range(MESSAGES_AHEAD + 1):
                await session.send(part(n))
        if when == "receives":
            await session.receive()
        await trio.sleep_forever()

    async with child(model) as side:
        await side.say(opened(1))
        if when != "before it begins":
            await wait_all_tasks_blocked()
        await side.say(Cancel(1))
        while type(message := await side.hear()) is PartSaid:
            pass
        assert message == cancelled(1)
        await side.say(Ping(1))
        assert await side.hear() == Pong(1), "it says so once"


async def test_a_model_that_goes_on_after_the_cancel_is_told_when_it_sends() -> None:
    told = list[type]()

    async def model(session: Sess) -> None:
        try:
            await session.receive()
        finally:
            with trio.CancelScope(shield=True):
                session.accept()
                session.prompt_tokens = 5
                for call in (lambda: session.send(part()), session.receive):
                    try:
                        await call()
                    except Exception as e:
                        told.append(type(e))

    async with child(model) as side:
        await side.say(opened(1))
        await wait_all_tasks_blocked()
        await side.say(Cancel(1))
        assert await side.hear() == cancelled(1)
    assert told == [trio.ClosedResourceError, trio.EndOfChannel]


async def test_a_task_that_outlives_its_session_says_nothing_in_it() -> None:
    done = trio.Event()

    async def model(session: Sess) -> None:
        nursery.start_soon(later, session)

    async def later(session: Sess) -> None:
        await wait_all_tasks_blocked()
        session.reply["a"] = "b"
        session.accept()
        session.prompt_tokens = 5
        with pytest.raises(trio.ClosedResourceError):
            await session.send(part())
        async for _ in session:
            pass
        done.set()

    async with trio.open_nursery() as nursery, child(model) as side:
        await side.say(opened(1))
        await side.give(1, *map(part, range(10)))
        assert await side.hear() == Ended(1)
        with trio.fail_after(PATIENCE):
            await done.wait()
        await side.say(Ping(1))
        assert await side.hear() == Pong(1)


async def test_what_comes_for_a_session_that_is_over_is_dropped(child: Make) -> None:
    async def model(session: Sess) -> None:
        pass

    async with child(model) as side:
        await side.say(opened(1))
        assert await side.hear() == Ended(1)
        await side.give(1, part())
        await side.say(Credit(1, 3, 3), EndOfInput(1), Cancel(1), Ping(1))
        assert await side.hear() == Pong(1)


# -- blocking steps --------------------------------------------------------------------------------------------------------


async def test_a_session_is_over_when_its_last_step_has_returned(child: Make) -> None:
    began, go = threading.Event(), threading.Event()

    def step() -> None:
        began.set()
        go.wait(PATIENCE)

    async def model(session: Sess) -> None:
        await run_step(step)

    async with child(model) as side:
        await side.say(opened(1))
        await trio.to_thread.run_sync(began.wait, PATIENCE)
        await side.say(Cancel(1), Ping(1))
        assert await side.hear() == Pong(1)
        await wait_all_tasks_blocked()
        await side.say(Ping(2))
        assert await side.hear() == Pong(2), "it has not ended"
        go.set()
        assert await side.hear() == cancelled(1)


async def test_the_answer_of_a_model_that_leaves_a_thread_behind_is_complete_before_that_returns(child: Make) -> None:
    began, go = threading.Event(), threading.Event()

    def step() -> None:
        began.set()
        go.wait(PATIENCE)

    async def model(session: Sess) -> None:
        holder, loop = step_holder(), running_loop()
        holder.hold()
        start_thread(step, lambda _: loop.call_soon(holder.release))

    async with child(model) as side:
        await side.say(opened(1))
        assert await side.hear() == Ended(1, lingers=True)
        await side.say(Ping(1))
        assert await side.hear() == Pong(1), "the thread runs still"
        go.set()
        assert await side.hear() == Ended(1)


async def test_what_holds_it_later_ends_it_no_second_time(child: Make) -> None:
    holders = []

    async def model(session: Sess) -> None:
        holders.append(step_holder())

    async with child(model) as side:
        await side.say(opened(1))
        assert await side.hear() == Ended(1)
        holders[0].hold()
        holders[0].release()
        await side.say(Ping(1))
        assert await side.hear() == Pong(1)


# -- steps that take too long, and sessions that do not stop -------------------------------------------------------------


class Threads:
    """Steps that are in a call of C, each until it is let go."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)
        self._waits, self._lets = os.pipe()

    def step(self) -> None:
        self.began.release()
        os.read(self._waits, 1)

    def let(self, steps: int) -> None:
        os.write(self._lets, bytes(steps))

    async def model(self, session: Sess) -> None:
        await run_step(self.step)

    async def has_begun(self) -> None:
        assert await trio.to_thread.run_sync(lambda: self.began.acquire(timeout=PATIENCE))


async def test_half_of_its_time_after_the_cancel_python_code_in_a_thread_is_ended(child: Make) -> None:
    began, raised = threading.Event(), list[type[BaseException]]()

    def step() -> None:
        began.set()
        try:
            while True:
                time.sleep(0.001)
        except BaseException as e:
            raised.append(type(e))
            raise

    async def model(session: Sess) -> None:
        await run_step(step)

    async with child(model, limits=(4, 0.0, 0.4, 1)) as side:
        await side.say(opened(1))
        await trio.to_thread.run_sync(began.wait, PATIENCE)
        since = trio.current_time()
        await side.say(Cancel(1))
        assert await side.hear() == cancelled(1), "it is not stuck"
        assert raised == [StepCancelled]
        assert trio.current_time() - since >= 0.2


async def test_a_session_that_goes_on_is_stuck_and_its_thread_somebody_elses(child: Make) -> None:
    threads = Threads()
    async with child(threads.model, limits=(1, 0.0, 0.1, 1)) as side:
        await side.say(opened(1))
        await threads.has_begun()
        await side.say(opened(2), Cancel(1))
        match await side.hear():
            case Stuck(session=1, step=False, stack=stack, replaced=True):
                assert "os.read(self._waits, 1)" in stack
            case other:
                raise AssertionError(other)
        await threads.has_begun()  # the other's step has its thread
        await side.say(Cancel(2))
        match await side.hear():
            case Stuck(session=2, step=False, replaced=False):
                pass
            case other:
                raise AssertionError(other)
        threads.let(2)
        assert {await side.hear(), await side.hear()} == {cancelled(1), cancelled(2)}
        await side.say(opened(3), opened(4))
        await threads.has_begun()
        await side.say(Ping(1))
        assert await side.hear() == Pong(1)
        assert not threads.began.acquire(blocking=False), "there is one thread as before"
        threads.let(2)
        assert {await side.hear(), await side.hear()} == {Ended(3), Ended(4)}


async def test_a_step_that_takes_too_long_is_stuck_while_its_session_runs(child: Make) -> None:
    threads = Threads()
    async with child(threads.model, limits=(1, 0.1, 0.0, 1)) as side:
        await side.say(opened(1))
        match await side.hear():
            case Stuck(session=1, step=True, stack=stack, replaced=True):
                assert "os.read(self._waits, 1)" in stack
            case other:
                raise AssertionError(other)
        await side.say(Cancel(1))
        threads.let(1)
        assert await side.hear() == cancelled(1), "once"


async def test_what_stops_in_time_is_not_stuck(autojump_clock: MockClock) -> None:
    async def model(session: Sess) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1.9)

    async with child(model, limits=(4, 1.0, 2.0, 1)) as side:
        await side.say(opened(1))
        await trio.sleep(100)
        await side.say(Cancel(1))
        assert await side.hear() == cancelled(1)
        await trio.sleep(100)
        await side.say(Ping(1))
        assert await side.hear() == Pong(1)


async def test_a_session_that_holds_out_without_a_thread_is_stuck_too(autojump_clock: MockClock) -> None:
    async def model(session: Sess) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(10)

    async with child(model, limits=(4, 0.0, 2.0, 1)) as side:
        await side.say(opened(1))
        await wait_all_tasks_blocked()
        began = trio.current_time()
        await side.say(Cancel(1))
        assert await side.hear() == Stuck(1, False, "", True)
        assert 2 <= trio.current_time() - began <= 2.05
        assert await side.hear() == Ended(1)


# -- functions -------------------------------------------------------------------------------------------------------------


async def test_functions_of_the_author_are_called(child: Make) -> None:
    def template(messages: Any) -> str:
        return "|".join(f"{message.role}:{message.content}" for message in messages)

    async with child(echo, family=Family.TEXT, count_tokens=len, chat_template=template) as side:
        await side.say(Ask(1, "count_tokens", "abc"))
        assert await side.hear() == Returned(1, 3, None)
        said = Conversation(messages=(ChatMessage(role="user", content="hi"),))
        await side.say(Ask(2, "chat_template", said))
        assert await side.hear() == Returned(2, "user:hi", None)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(lambda text: 1 / 0, "raised"), (lambda text: object(), "raised"), (lambda text: 2**70, "raised")],
)
async def test_one_that_errs_or_returns_what_cannot_be_said_is_an_error(child: Make, answer: Any, kind: str) -> None:
    async with child(echo, count_tokens=answer) as side:
        await side.say(Ask(1, "count_tokens", "abc"))
        answered = await side.hear()
        assert (answered.number, answered.value, answered.error.kind) == (1, None, kind)
        await side.say(Ask(2, "chat_template", "abc"))
        assert (await side.hear()).error.text.startswith("AssertionError")


async def test_what_a_model_has_of_its_own_is_said(child: Make) -> None:
    class Model:
        parameters = ("top_k", "seed")

        def count_tokens(self, text: str) -> int:
            return 7

        async def __call__(self, session: Sess) -> None:
            pass

    async with child(Model(), loaded=False) as side:
        assert await side.hear() == Loaded(["seed", "top_k"], False, True)
        await side.say(Ask(1, "count_tokens", "abc"))
        assert await side.hear() == Returned(1, 7, None)


# -- its life --------------------------------------------------------------------------------------------------------------


async def test_a_load_that_raises_is_told_with_its_traceback(child: Make) -> None:
    @asynccontextmanager
    async def load() -> AsyncIterator[Any]:
        raise FileNotFoundError("no weights in \udcff")
        yield

    async with child(load=load, loaded=False) as side:
        failed = await side.hear()
        assert (failed.error, failed.ended) == ("FileNotFoundError: no weights in \ufffd", False)
        assert "in load" in failed.trace
        assert await side.hear() is None


async def test_so_is_a_warm_up_that_does(child: Make) -> None:
    async def model(session: Sess) -> None:
        raise KeyError("a")

    async with child(model, family=Family.TEXT, warmup=(Prompt(text=""),), loaded=False) as side:
        assert (await side.hear()).error == "WarmupFailed: warm-up request 1 of 1 raised KeyError: 'a'"


@asynccontextmanager
async def crashing(raises: bool) -> AsyncIterator[Any]:
    """A loader whose background work ends at the first message of a session, and that takes its time to leave."""
    crash = trio.Event()

    async def background(scope: trio.CancelScope) -> None:
        await crash.wait()
        if raises:
            raise ZeroDivisionError("in the background")
        scope.cancel()

    async def model(session: Sess) -> None:
        await session.send(part())
        await session.receive()
        crash.set()
        await trio.sleep_forever()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(background, nursery.cancel_scope)
            yield model
    finally:
        with trio.CancelScope(shield=True):
            await trio.sleep(3)


@pytest.mark.parametrize("raises", [True, False])
async def test_sessions_are_cut_where_its_background_work_ends(raises: bool, autojump_clock: MockClock) -> None:
    async with child(load=lambda: crashing(raises)) as side:
        await side.say(opened(1))
        assert await side.take() == part()
        await side.give(1, part())
        assert await side.hear() == cancelled(1), "it has not returned from it"
        await side.say(opened(2), Ask(1, "count_tokens", ""), Cancel(2), Ping(1))  # nobody takes these any more
        assert await side.hear() == Pong(1)
        failed = await side.hear()
        assert (failed.error, failed.ended) == (("ZeroDivisionError: in the background", False) if raises else ("", True))
        assert await side.hear() is None


async def test_where_the_gateway_hangs_up_the_model_leaves_its_load() -> None:
    seen = []

    @asynccontextmanager
    async def load() -> AsyncIterator[Any]:
        seen.append("in")
        yield echo
        await trio.lowlevel.checkpoint()
        seen.append("out")

    async with child(load=load) as side:
        await side.say(opened(1))
        await wait_all_tasks_blocked()
        await side.stream.send_eof()
        assert await side.rest() == [cancelled(1)]
    assert seen == ["in", "out"]


async def test_and_where_it_still_loads_it_is_cancelled(autojump_clock: MockClock) -> None:
    seen = []

    @asynccontextmanager
    async def load() -> AsyncIterator[Any]:
        try:
            await trio.sleep(1000)
        finally:
            seen.append(trio.current_time() - began)
        yield

    began = trio.current_time()
    async with child(load=load, loaded=False) as side:
        await wait_all_tasks_blocked()
        await side.stream.send_eof()
        assert await side.rest() == []
    assert seen == [0]


async def test_a_factory_that_cannot_be_imported_is_told_once_though_it_is_to_be_loaded() -> None:
    async with streams() as (ours, theirs), trio.open_nursery() as nursery:
        said = Failed("ImportError: no app", "trace")
        nursery.start_soon(TrioChild(Pipe(theirs), lambda describe: (None, said)).run)
        side = Side(ours)
        await side.say(Describe("m", "app:m", {}), Load(4))
        assert await side.hear() == said
        with trio.fail_after(PATIENCE):
            while nursery.child_tasks:
                await wait_all_tasks_blocked(0.001)
        theirs.socket.close()
        assert await side.hear() is None


async def test_bytes_that_are_no_messages_end_it(child: Make) -> None:
    with pytest.RaisesGroup(BrokenPipe, flatten_subgroups=True):
        async with child(echo) as side:
            await side.stream.send_all(b"\0\0\0\1\xc0")
            await side.hear()


# -- the log ---------------------------------------------------------------------------------------------------------------


async def test_what_is_logged_is_told(child: Make) -> None:
    def log() -> None:
        record = logging.makeLogRecord({"name": "app.x", "levelno": 30, "msg": "half %s", "args": ("\udcff",)})
        logging.getLogger().handlers[-1].handle(record)  # pytest's own could not say it

    async def model(session: Sess) -> None:
        try:
            raise KeyError("a")
        except KeyError:
            logging.getLogger("app").error("no %s", "luck", exc_info=True)
        await in_thread(log)
        logging.getLogger("app").warning("x" * 20_000)
        logging.getLogger("app").log(50, "%d", 7)

    async with child(model) as side:
        await side.say(opened(1))
        found = [await side.hear() for _ in range(5)]
    logs = [message for message in found if type(message) is Log]
    first, *rest = logs
    assert (first.logger, first.level, first.text) == ("app", 40, "no luck")
    assert "KeyError: 'a'" in first.trace
    assert rest == [Log("app.x", 30, "half \ufffd", ""), Log("app", 30, "x" * 8192, ""), Log("app", 50, "7", "")]


async def test_more_than_200_records_a_second_are_counted(autojump_clock: MockClock) -> None:
    log = logging.getLogger("app.flood")

    async def model(session: Sess) -> None:
        for n in range(1000):
            log.warning("%d", n)
        await trio.sleep(10)
        log.warning("later")

    async with child(model) as side:
        await side.say(opened(1))
        heard = []
        while type(message := await side.hear()) is Log:
            heard.append(message.text)
        assert heard == [*map(str, range(200)), "800 records dropped"]
        assert message == Ended(1)
        assert await side.hear() == Log("app.flood", 30, "later", "")


async def test_and_no_more_when_it_is_over(child: Make) -> None:
    before = list(logging.getLogger().handlers)
    async with child(echo):
        assert len(logging.getLogger().handlers) == len(before) + 1
    assert logging.getLogger().handlers == before


async def test_text_streams_as_fast_as_credit_goes(child: Make) -> None:
    async def model(session: Sess) -> None:
        prompt = await session.receive()
        for n in range(200):
            await session.send(Token(text=prompt.text, id=n))

    async with child(model, family=Family.TEXT) as side:
        await side.say(opened(1))
        await side.give(1, Prompt(text="a"))
        for n in range(200):
            assert await side.take() == Token(text="a", id=n)
            await side.say(Credit(1, 1, 1))
        assert await side.hear() == Ended(1)
