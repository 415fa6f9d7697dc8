"""An instance as the gateway sees it: each session has one ending, whatever its process says or does, and when."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.catalog.processes.formatting import InstanceFormatting
from gateway.errors import WorkerLost
from gateway.instances.instance import InstanceEnded, RaisedThere
from gateway.instances.messages import (
    BYTES_AHEAD,
    MESSAGES_AHEAD,
    Ask,
    Cancel,
    Credit,
    Ended,
    EndOfInput,
    Failed,
    Forget,
    GivenInput,
    Head,
    Load,
    Log,
    Message,
    Open,
    PartSaid,
    Ping,
    Pong,
    PromptTokens,
    Returned,
    Said,
    Stuck,
    Tensors,
    Write,
)
from gateway.instances.messages import Array as ArrayOf
from gateway.instances.spawn import Exit
from gateway.telemetry.logging_setup import JSONFormatter, TextFormatter
from models.blocking import StepHolder, set_step_holder
from models.errors import ContextLengthExceeded, ModelError
from models.formatters import TextInput
from models.messages import GenerationParameters, Part, Prompt, Token
from models.session import Call
from tests.gateway.instances.sides import LOADED, Client, Exchange, House, OneMessage, instance


def part(n: int = 0) -> Part:
    return Part(data=b"%d" % n)


async def begun(house: House, client: Client | None = None, **named: Any) -> tuple[Exchange, int]:
    """A session that the process knows."""
    exchange = house.call(client or Client(more=True), **named)
    opened = await house.side.hear()
    assert type(opened) is Open
    return exchange, opened.session


# -- sessions --------------------------------------------------------------------------------------------------------------


async def test_a_session_goes_there_and_back(autojump_clock: MockClock) -> None:
    async with instance() as house:
        exchange = house.call(Client(part(2), part(3)), part(1), call=Call(id="7", path="/p"))
        assert await house.side.hear() == Open(1, Call(id="7", path="/p"), -1.0)
        assert [await house.side.take() for _ in range(3)] == [part(1), part(2), part(3)]
        assert await house.side.hear() == EndOfInput(1)
        await house.side.give(1, part(4))
        await house.side.say(Ended(1))
        assert await exchange.end() is None
        assert exchange.client.log == [part(4)]
        assert house.instance.sessions == 0


async def test_one_with_a_single_message_is_whole_at_once(autojump_clock: MockClock) -> None:
    async with instance() as house:
        exchange = house.call(OneMessage(), Prompt(text="a"), deadline=trio.current_time() + 2.5)
        assert await house.side.hear() == Open(1, Call(), 2.5)
        assert await house.side.take() == Prompt(text="a")
        assert await house.side.hear() == EndOfInput(1)
        await house.side.say(Ended(1))
        assert await exchange.end() is None


async def test_heads_and_numbers_of_prompt_tokens_come_in_order(autojump_clock: MockClock) -> None:
    async with instance() as house:
        exchange, _ = await begun(house)
        await house.side.say(PromptTokens(1, 3), Head(1, {"a": "b"}, True))
        await house.side.give(1, part(1))
        await house.side.say(PromptTokens(1, 4), Ended(1))
        assert await exchange.end() is None
        assert exchange.client.log == [{"a": "b"}, part(1)]
        assert exchange.session.prompt_tokens == 4


async def test_a_head_that_is_not_accepted_is_there_for_the_first_message(autojump_clock: MockClock) -> None:
    async with instance() as house:
        exchange, _ = await begun(house)
        await house.side.say(Head(1, {"a": "b"}, False), Ended(1))
        assert await exchange.end() is None
        assert (exchange.session.reply, exchange.client.log) == ({"a": "b"}, [])


async def test_a_client_that_does_not_read_gets_no_more_than_the_credit(autojump_clock: MockClock) -> None:
    async with instance() as house:
        client = Client(more=True)
        client.reads = trio.Event()
        exchange, _ = await begun(house, client)
        await house.side.say(Head(1, {"a": "b"}, False))
        await house.side.give(1, *map(part, range(MESSAGES_AHEAD)))
        await house.side.say(PromptTokens(1, 1))
        await wait_all_tasks_blocked()
        assert house.error is None
        client.reads.set()
        assert await house.side.hear() == Credit(1, MESSAGES_AHEAD // 2, MESSAGES_AHEAD // 2)
        await house.side.say(Ended(1))
        assert await exchange.end() is None
        assert client.log == [*map(part, range(MESSAGES_AHEAD))]


async def test_and_where_the_process_ends_it_learns_of_that_as_the_others_do(autojump_clock: MockClock) -> None:
    async with instance() as house:
        client = Client(more=True)
        client.reads = trio.Event()
        exchange, _ = await begun(house, client)
        await house.side.give(1, *map(part, range(3)))
        await wait_all_tasks_blocked()
        began = trio.current_time()
        house.process.end(Exit(signal=9))
        assert type(await exchange.end()) is WorkerLost
        assert trio.current_time() - began <= 1


async def test_what_a_client_says_waits_for_credit(autojump_clock: MockClock) -> None:
    async with instance() as house:
        exchange, _ = await begun(house, Client(*map(part, range(40))))
        for n in range(MESSAGES_AHEAD):
            assert await house.side.take() == part(n)
        await wait_all_tasks_blocked()
        await house.side.say(Credit(1, 1, 1))
        assert await house.side.take() == part(MESSAGES_AHEAD)
        await house.side.say(Ended(1))
        assert await exchange.end() is None


# -- how sessions end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ended", "kind", "fields"),
    [
        (Ended(1, "error", "no", "C", 409), ModelError, {"message": "no", "code": "C", "status": 409}),
        (Ended(1, "context", tokens=(9, 8, 5)), ContextLengthExceeded, {"needed": 9, "limit": 8, "prompt_tokens": 5}),
        (
            Ended(1, "memory", "MemoryError: big", trace="T"),
            MemoryError,
            {"args": ("MemoryError: big",), "__notes__": ["T"]},
        ),
        (Ended(1, "input"), trio.EndOfChannel, {}),
        (Ended(1, "closed"), trio.ClosedResourceError, {}),
        (Ended(1, "raised", "KeyError: a", trace="T"), RaisedThere, {"args": ("KeyError: a",), "__notes__": ["T"]}),
        (Ended(1, "anything"), RaisedThere, {}),
        (Ended(1, "error", "no", "C", 200), ValueError, {}),
        (Ended(1, "cancelled"), WorkerLost, {}),  # which nobody had asked for
    ],
    ids=lambda value: value.kind if isinstance(value, Ended) else "",
)
async def test_a_session_ends_with_what_the_model_raised(
    ended: Ended, kind: type, fields: dict[str, Any], autojump_clock: MockClock
) -> None:
    async with instance() as house:
        exchange, _ = await begun(house)
        await house.side.give(1, part(1))
        await house.side.say(ended)
        error = await exchange.end()
        assert (type(error), {name: getattr(error, name) for name in fields}) == (kind, fields)
        assert exchange.client.log == [part(1)]
        assert house.error is None


class Place(StepHolder):
    """A place in a worker."""

    def __init__(self) -> None:
        self.holds = 0

    def hold(self, *, stopping: bool = True) -> None:
        self.holds += 1

    def release(self) -> None:
        self.holds -= 1


async def test_a_cancelled_session_keeps_its_place_until_it_has_ended_there(autojump_clock: MockClock) -> None:
    place = Place()
    set_step_holder(place)
    async with instance() as house:
        exchange, _ = await begun(house)
        exchange.scope.cancel()
        assert await exchange.end() is trio.Cancelled
        assert await house.side.hear() == Cancel(1)
        await house.side.give(1, *map(part, range(MESSAGES_AHEAD)))  # that was under way
        await house.side.say(Head(1, {}, True), PromptTokens(1, 1))
        await wait_all_tasks_blocked()
        assert (place.holds, house.instance.sessions, house.error) == (1, 1, None)
        await house.side.say(Ended(1, "cancelled"))
        await wait_all_tasks_blocked()
        assert (place.holds, house.instance.sessions) == (0, 0)


async def test_one_that_ends_as_it_is_cancelled_keeps_nothing(autojump_clock: MockClock) -> None:
    place = Place()
    set_step_holder(place)
    async with instance() as house:
        client = Client(more=True)
        client.reads = trio.Event()
        exchange, _ = await begun(house, client)
        await house.side.give(1, part())
        await house.side.say(Ended(1))
        await wait_all_tasks_blocked()
        exchange.scope.cancel()
        assert await exchange.end() is trio.Cancelled
        assert (place.holds, house.instance.sessions) == (0, 0)


async def test_one_that_waits_for_its_end_is_over_with_the_process(autojump_clock: MockClock) -> None:
    place = Place()
    set_step_holder(place)
    async with instance() as house:
        exchange, _ = await begun(house)
        exchange.scope.cancel()
        assert await exchange.end() is trio.Cancelled
        assert place.holds == 1
        house.process.end(Exit(code=1))
        await house.end()
        assert (place.holds, house.instance.sessions) == (0, 0)


async def test_a_call_that_cannot_be_told_keeps_nothing(autojump_clock: MockClock) -> None:
    place = Place()
    set_step_holder(place)
    async with instance() as house:
        exchange = house.call(call=Call(parameters={"a": object()}))
        assert isinstance(await exchange.end(), TypeError)
        assert (place.holds, house.instance.sessions) == (0, 0)
        _, number = await begun(house)  # the first that the process hears of
        assert number == 2


@pytest.mark.parametrize("parameters", [{"n": 2**64}, {"a": 2**64 - 1, "n": -(2**63) - 1}, {"a": {"n": [1, 2**70]}}])
async def test_an_integer_that_cannot_be_told_is_a_mistake_of_the_clients(
    parameters: dict[str, Any], autojump_clock: MockClock
) -> None:
    async with instance() as house:
        error = await house.call(call=Call(parameters=parameters)).end()
        assert (error.status, error.message) == (
            400, "parameter 'n' is an integer of more than 64 bits, which this model does not take"
        )  # fmt: skip
        assert house.instance.sessions == 0


@pytest.mark.parametrize("first", [True, False])
async def test_a_message_that_cannot_be_told_ends_its_session_alone(first: bool, autojump_clock: MockClock) -> None:
    async with instance() as house:
        other, _ = await begun(house)
        odd = Prompt(text="a", parameters=GenerationParameters(extra={"n": 2**70}))
        exchange = house.call(Client(more=True), odd) if first else house.call(Client(odd))
        error = await exchange.end()
        if isinstance(error, ExceptionGroup):
            (error,) = error.exceptions
        assert (error.status, "parameter 'n'" in error.message) == (400, True)
        assert [type(await house.side.hear()) for _ in range(2)] == [Open, Cancel]
        await house.side.say(Ended(2, "cancelled"), Ended(1))
        assert await other.end() is None


async def test_an_error_of_the_clients_side_cancels_the_model(autojump_clock: MockClock) -> None:
    class Refusing(Client):
        async def send(self, message: Any) -> None:
            raise TypeError("no message of this family")

    async with instance() as house:
        exchange, _ = await begun(house, Refusing(more=True))
        await house.side.give(1, part())
        assert isinstance((await exchange.end()).exceptions[0], TypeError)
        assert await house.side.hear() == Cancel(1)
        await house.side.say(Ended(1, "cancelled"))


# -- when the process goes -------------------------------------------------------------------------------------------------


POINTS: dict[str, list[Message]] = {
    "at its beginning": [],
    "after its head": [Head(1, {"a": "b"}, True)],
    "amid its answer": [PartSaid(1, b"a", False, True)],
    "after all that credit allows": [PartSaid(1, b"a", False, True)] * MESSAGES_AHEAD,
    "before its end": [PromptTokens(1, 1), PartSaid(1, b"a", False, True)],
}


@pytest.mark.parametrize("said", POINTS.values(), ids=[*POINTS])
@pytest.mark.parametrize("first", ["the socket", "the process", "both"])
async def test_its_sessions_are_lost_once_each(said: list[Message], first: str, autojump_clock: MockClock) -> None:
    async with instance() as house:
        one, _ = await begun(house)
        other, _ = await begun(house)
        await house.side.say(*said)
        if first != "both":
            await wait_all_tasks_blocked()
        if first == "the socket":
            house.side.hang_up()
            await wait_all_tasks_blocked()
        house.process.end(Exit(signal=11), hang_up=first != "the process")
        for exchange in (one, other):
            error = await exchange.end()
            assert (type(error), str(error)) == (WorkerLost, "the process of model 'm' ended; try again")
        error = await house.end()
        assert (type(error), str(error)) == (InstanceEnded, "its process ended (SIGSEGV)")
        assert house.process.killed == 0
        assert not house.instance.ready


async def test_one_that_had_ended_is_not_lost(autojump_clock: MockClock) -> None:
    async with instance() as house:
        exchange, _ = await begun(house)
        await house.side.say(PartSaid(1, b"a", False, True), Ended(1))
        house.side.hang_up()
        assert await exchange.end() is None
        assert len(exchange.client.log) == 1


async def test_and_none_begins_then(autojump_clock: MockClock) -> None:
    async with instance() as house:
        house.process.end(Exit(code=3), hang_up=False)
        await wait_all_tasks_blocked()
        assert type(await house.call().end()) is WorkerLost
        error = await house.end()
        assert str(error) == "its process ended (exit status 3)", "though something that it has started has the socket still"
        assert type(await house.call().end()) is WorkerLost


async def test_what_it_had_said_before_is_heard(autojump_clock: MockClock) -> None:
    async with instance() as house:
        one, _ = await begun(house)
        other, _ = await begun(house)
        house.process.end(Exit(signal=9), hang_up=False)  # the kernel reports this before the messages are read
        await wait_all_tasks_blocked()
        await house.side.give(1, part())
        await house.side.say(Ended(1), PartSaid(2, b"a", False, True))
        house.side.hang_up()
        assert str(await house.end()) == "its process ended (SIGKILL)"
        assert (await one.end(), one.client.log) == (None, [part()])
        assert (type(await other.end()), len(other.client.log)) == (WorkerLost, 1)


async def test_the_line_is_told_where_it_died(autojump_clock: MockClock) -> None:
    async with instance() as house:
        house.process.tail = (
            "Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first):\n"
            '  File "/app.py", line 12 in f\n'
        )
        house.process.end(Exit(signal=11))
        assert str(await house.end()) == "its process ended (SIGSEGV at /app.py line 12)"


async def test_one_that_hangs_up_and_does_not_end_is_killed(autojump_clock: MockClock) -> None:
    async with instance() as house:
        house.side.hang_up()
        assert str(await house.end()) == "its process was killed: it did not end"
        assert house.process.killed == 1


async def test_one_that_cannot_even_be_killed_keeps_nobody(autojump_clock: MockClock) -> None:
    async with instance() as house:
        house.process.kill = lambda: None  # type: ignore[method-assign]
        house.side.hang_up()
        assert str(await house.end()) == "its process was killed: it did not end"
        assert house.process.closed
        house.process.over.set()


async def test_where_nobody_wants_it_any_more_it_has_time_to_leave(autojump_clock: MockClock) -> None:
    async with instance() as house:
        exchange, _ = await begun(house)
        began = trio.current_time()
        house.scope.cancel()
        assert await house.side.hear() is None
        assert type(await exchange.end()) is WorkerLost
        assert await house.end() is None
        assert (house.process.killed, trio.current_time() - began) == (1, 4.5)


async def test_or_leaves(autojump_clock: MockClock) -> None:
    async with instance() as house:
        house.scope.cancel()
        assert await house.side.hear() is None
        house.process.end(Exit(code=0))
        assert await house.end() is None
        assert house.process.killed == 0


async def test_and_what_it_says_as_it_leaves_is_read_whose_log_is_told(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.INFO)
    async with instance() as house:
        house.scope.cancel()
        assert await house.side.hear() is None
        await house.side.say(*[Failed("large" * 2000, "")] * 1000, Log("app", 20, "goodbye", ""))
        house.process.end(Exit(code=0))
        assert await house.end() is None
    assert "goodbye" in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        ([Failed("KeyError: a", "T")], RaisedThere, "KeyError: a"),
        ([Failed("KeyError: a", "T"), Failed("AttributeError: b", "U")], RaisedThere, "KeyError: a"),
        ([Failed("", "", ended=True)], InstanceEnded, "load() ended its context by itself"),
    ],
)
@pytest.mark.parametrize("dead", [True, False])
async def test_what_its_load_raised_is_the_reason(
    said: list[Message], kind: type, text: str, dead: bool, autojump_clock: MockClock
) -> None:
    async with instance() as house:
        if dead:  # the kernel reports its end before its last messages are read
            house.process.end(Exit(code=0), hang_up=False)
            await wait_all_tasks_blocked()
        await house.side.say(*said)
        house.process.end(Exit(code=0))
        house.side.hang_up()
        error = await house.end()
        assert (type(error), str(error)) == (kind, text)
        assert kind is InstanceEnded or error.__notes__ == ["T"]  # type: ignore[union-attr]


async def test_who_has_it_may_end_it_with_a_reason(autojump_clock: MockClock) -> None:
    async with instance() as house:
        house.instance.fail(KeyError("a"))
        assert type(await house.end()) is KeyError
        assert house.process.killed == 1


async def test_but_not_where_it_has_ended_by_itself(autojump_clock: MockClock) -> None:
    async with instance() as house:
        house.process.end(Exit(code=3))
        await house.end()
        house.instance.fail(KeyError("a"))
        assert str(await house.end()) == "its process ended (exit status 3)"


# -- messages that a process must not send ---------------------------------------------------------------------------------


BROKEN: dict[str, list[Message]] = {
    "an item of no session": [PartSaid(9, b"", False, True)],
    "an item of session 0": [PartSaid(0, b"", False, True)],
    "an item of a session below": [PartSaid(-1, b"", False, True)],
    "credit of no session": [Credit(9, 0, 0)],
    "the end of no session": [Ended(9)],
    "a head of no session": [Head(9, {}, True)],
    "an item after the end": [Ended(2), PartSaid(2, b"", False, True)],
    "an end after the end": [Ended(2), Ended(2)],
    "items without credit": [PartSaid(2, b"", False, True)] * (2 * MESSAGES_AHEAD + 2),
    "bytes without credit": [PartSaid(2, bytes(BYTES_AHEAD // 2 + 1), False, True)] * 2,
    "credit for what was not sent": [Credit(2, 1, 0)],
    "a second head": [Head(2, {}, False), Head(2, {}, True)],
    "an item without a message": [Said(2, None, None)],
    "a tensor of no datatype": [Tensors(2, [ArrayOf("a", "X", (1,), b"a", {}, ())], "", {}, None, True)],
    "a tensor without its bytes": [Tensors(2, [ArrayOf("a", "FP32", (9,), b"a", {}, ())], "", {}, None, True)],
    "a session of its own": [Open(3, Call(), 1.0)],
    "a cancel": [Cancel(2)],
    "a step that may take any time": [Stuck(2, True, "", False)],
    "the end of its input": [EndOfInput(2)],
    "a load": [Load(1)],
    "a ping": [Ping(1)],
    "a question": [Ask(1, "count_tokens", "")],
    "that it has loaded, again": [LOADED],
}


@pytest.mark.parametrize("said", BROKEN.values(), ids=[*BROKEN])
async def test_what_breaks_the_rules_ends_the_instance_and_each_session_once(
    said: list[Message], autojump_clock: MockClock
) -> None:
    async with instance() as house:
        one, _ = await begun(house)
        client = Client(more=True)
        client.reads = trio.Event()
        other, _ = await begun(house, client)
        await house.side.say(*said)
        error = await house.end()
        assert type(error) is InstanceEnded
        assert str(error).startswith("its process was killed: it sent something that is not a message: ValueError: ")
        assert type(await one.end()) is WorkerLost
        client.reads.set()
        assert type(await other.end()) is WorkerLost or said[0] == Ended(2)
        assert house.process.killed == 1


@pytest.mark.parametrize("data", [b"\0\0\0\1\xc0", b"\xff\xff\xff\xff", b"\0\0\0\0"])
async def test_so_do_bytes_that_are_none(data: bytes, autojump_clock: MockClock) -> None:
    async with instance() as house:
        exchange, _ = await begun(house)
        await house.side.stream.send_all(data)
        assert type(await house.end()) is InstanceEnded
        assert type(await exchange.end()) is WorkerLost


# -- functions -------------------------------------------------------------------------------------------------------------


async def asked(house: House) -> Any:
    try:
        return await house.instance.ask("count_tokens", "abc")
    except Exception as e:
        return e


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda n: Returned(n, 3, None), lambda found: found == 3),
        (lambda n: Returned(n, None, None), lambda found: found is None),
        (
            lambda n: Returned(n, None, Ended(0, "raised", "KeyError: a", trace="T")),
            lambda found: type(found) is RaisedThere,
        ),
        (lambda n: Returned(n, None, Ended(0, "error", "no", "C", 409)), lambda found: found.status == 409),
    ],
)
async def test_a_function_answers(
    answer: Callable[[int], Returned], expected: Callable[[Any], bool], autojump_clock: MockClock
) -> None:
    found = []
    async with instance() as house, trio.open_nursery() as nursery:

        async def ask() -> None:
            found.append(await asked(house))

        nursery.start_soon(ask)
        question = await house.side.hear()
        assert question == Ask(question.number, "count_tokens", "abc")  # type: ignore[union-attr]
        await house.side.say(Returned(99, 1, None), answer(question.number))  # type: ignore[union-attr]
    assert expected(found[0])


async def test_several_are_asked_at_once_and_one_is_given_up(autojump_clock: MockClock) -> None:
    found = dict[int, Any]()
    async with instance() as house, trio.open_nursery() as nursery:

        async def ask(n: int) -> None:
            with scopes[n]:
                found[n] = await house.instance.ask("count_tokens", str(n))

        scopes = [trio.CancelScope() for _ in range(3)]
        for n in range(3):
            nursery.start_soon(ask, n)
        questions = [await house.side.hear() for _ in range(3)]
        scopes[1].cancel()
        await wait_all_tasks_blocked()
        await house.side.say(*[Returned(question.number, question.argument, None) for question in reversed(questions)])  # type: ignore[union-attr]
    assert found == {0: "0", 2: "2"}


async def test_a_question_is_lost_with_the_process(autojump_clock: MockClock) -> None:
    async with instance() as house, trio.open_nursery() as nursery:
        found = []

        async def ask() -> None:
            found.append(await asked(house))

        nursery.start_soon(ask)
        assert type(await house.side.hear()) is Ask
        house.process.end(Exit(code=1))
        await house.end()
        nursery.start_soon(ask)
    assert [type(error) for error in found] == [WorkerLost, WorkerLost]


# -- stuck processes -------------------------------------------------------------------------------------------------------


class Told(Place):
    """A place that knows what was stuck."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []

    def stuck_there(self, *, step: bool, stack: str, replaced: bool) -> None:
        self.said.append((step, stack, replaced))


LIMITS: Any = {"step_timeout": 1.0, "stop_within": 1000.0}


@pytest.mark.parametrize(
    "said",
    [
        [Stuck(1, True, "", True), Stuck(1, True, "", False)],
        [Stuck(1, True, "", True), Stuck(2, False, "", True)],
        [Ended(1), Stuck(1, True, "", True)],
    ],
)
async def test_it_cannot_have_more_replaced_than_may_be(said: list[Message], autojump_clock: MockClock) -> None:
    async with instance(**LIMITS, stuck_limit=1) as house:
        for _ in range(2):
            await begun(house)
        await house.side.say(*said)
        assert "it sent something that is not a message" in str(await house.end())


@pytest.mark.parametrize("ends", ["returns", "dies"])
async def test_a_session_that_has_ended_keeps_its_place_until_its_threads_have_returned(
    ends: str, autojump_clock: MockClock
) -> None:
    place = Told()
    set_step_holder(place)
    async with instance(**LIMITS, stuck_limit=1) as house:
        exchange, _ = await begun(house)
        await house.side.give(1, part(1))
        await house.side.say(Ended(1, lingers=True))
        assert await exchange.end() is None
        assert (exchange.client.log, place.holds, house.instance.sessions) == ([part(1)], 1, 1)
        await house.side.say(Stuck(1, False, "in a step", True))
        await wait_all_tasks_blocked()
        assert place.said == [(False, "in a step", True)]
        if ends == "returns":
            await house.side.say(Ended(1))
            await wait_all_tasks_blocked()
            assert house.error is None
        else:
            house.process.end(Exit(signal=9))
            await house.end()
        assert (place.holds, house.instance.sessions) == (0, 0)


@pytest.mark.parametrize("said", [Ended(1, lingers=True), part(1), Credit(1, 0, 0), EndOfInput(1)])
async def test_such_a_session_says_nothing_else(said: Any, autojump_clock: MockClock) -> None:
    async with instance(**LIMITS) as house:
        await begun(house)
        await house.side.say(Ended(1, lingers=True))
        if isinstance(said, Part):
            await house.side.give(1, said)
        else:
            await house.side.say(said)
        assert "it sent something that is not a message" in str(await house.end())


async def test_what_is_stuck_there_is_told_to_its_place(autojump_clock: MockClock) -> None:
    place = Told()
    set_step_holder(place)
    async with instance(**LIMITS, stuck_limit=2) as house:
        await begun(house)
        other, _ = await begun(house)
        other.scope.cancel()
        await other.end()
        await house.side.say(Stuck(1, True, "in a step", True), Stuck(2, False, "", True))
        await wait_all_tasks_blocked()
        assert place.said == [(True, "in a step", True), (False, "", True)]
        assert (house.worn, house.instance.worn, place.holds) == (0, "", 1)


async def test_one_in_which_too_much_is_stuck_is_worn_and_killed_when_the_others_are_over(autojump_clock: MockClock) -> None:
    place = Told()
    set_step_holder(place)
    async with instance(**LIMITS, stuck_limit=1) as house:
        for _ in range(2):
            exchange, number = await begun(house)
            exchange.scope.cancel()
            await exchange.end()
            assert await house.side.hear() == Cancel(number)
            await house.side.say(Stuck(number, False, "", number == 1))
        await wait_all_tasks_blocked()
        assert house.worn == 1
        survivor, number = await begun(house)
        house.instance.part(100)
        house.instance.part(1)
        assert not house.instance.ready
        await trio.sleep(50)
        assert house.error is None
        assert place.holds == 2
        await house.side.say(Ended(number))
        assert await survivor.end() is None
        assert str(await house.end()) == (
            "its process was killed: more than 1 of its sessions are stuck (models.m.stuck_limit)"
        )
        assert place.holds == 0


async def test_or_when_their_patience_is_over(autojump_clock: MockClock) -> None:
    async with instance(**LIMITS) as house:
        _, number = await begun(house)
        survivor, _ = await begun(house)
        await house.side.say(Stuck(number, True, "", False))
        await wait_all_tasks_blocked()
        began = trio.current_time()
        house.instance.part(30)
        assert type(await survivor.end()) is WorkerLost
        assert trio.current_time() - began == 30


async def test_one_in_which_nothing_is_stuck_is_asked_to_leave_when_its_sessions_are_over(autojump_clock: MockClock) -> None:
    async with instance(**LIMITS) as house:
        survivor, number = await begun(house)
        house.instance.worn = "for a reason"
        house.instance.part(30)
        await wait_all_tasks_blocked()
        assert (house.instance.ready, house.error) == (False, None)
        await house.side.say(Ended(number))
        assert await survivor.end() is None
        assert await house.side.hear() is None, "it has hung up"
        house.process.end(Exit(code=0))
        assert str(await house.end()) == "its process ended (exit status 0)"
        assert house.process.killed == 0


async def test_it_waits_for_a_request_that_it_has_read_and_that_has_no_session_yet(autojump_clock: MockClock) -> None:
    async with instance(**LIMITS) as house:
        formatting = InstanceFormatting(house.instance, "id", writes=True)
        formatting.take(TextInput("x"))
        assert await house.side.hear() == GivenInput(1, "id", "x", {}, True)
        house.instance.part(30)
        await trio.sleep(20)
        assert house.error is None
        exchange, number = await begun(house)
        formatting.forget()
        assert await house.side.hear() == Forget(1)
        await wait_all_tasks_blocked()
        assert house.error is None
        await house.side.say(Ended(number))
        assert await exchange.end() is None
        assert await house.side.hear() is None


@pytest.mark.parametrize("said", [7, None, ["x"]])
async def test_a_text_that_is_none_ends_the_instance(said: Any, autojump_clock: MockClock) -> None:
    async with instance() as house, trio.open_nursery() as nursery:
        formatting, caught = InstanceFormatting(house.instance, "id", writes=True), list[Exception]()

        async def write() -> None:
            with pytest.raises(WorkerLost) as found:
                await formatting.write([Token(text="a")])
            caught.append(found.value)

        nursery.start_soon(write)
        assert await house.side.hear() == Write(2, 1, [Token(text="a")])
        await house.side.say(Returned(2, said, None))
        assert "it sent something that is not a message" in str(await house.end())
        await wait_all_tasks_blocked()
        assert len(caught) == 1
        with pytest.raises(WorkerLost):
            await formatting.write([])
        formatting.forget()


async def test_who_waits_for_a_text_learns_that_the_instance_has_ended(autojump_clock: MockClock) -> None:
    async with instance() as house, trio.open_nursery() as nursery:
        caught = list[Exception]()

        async def write() -> None:
            try:
                await InstanceFormatting(house.instance, "id", writes=True).write([])
            except WorkerLost as e:
                caught.append(e)

        nursery.start_soon(write)
        await house.side.hear()
        house.process.end(Exit(signal=11))
        await house.end()
        await wait_all_tasks_blocked()
        assert len(caught) == 1


async def test_one_that_goes_on_after_all_says_then_that_too_much_is_stuck(autojump_clock: MockClock) -> None:
    async with instance(**LIMITS) as house:
        house.instance.worn = "an operator wants another"
        _, number = await begun(house)
        await house.side.say(Stuck(number, True, "", False))
        await wait_all_tasks_blocked()
        assert house.worn == 0
        house.instance.go_on()
        assert (house.worn, "stuck_limit" in house.instance.worn) == (1, True)


async def test_what_is_raised_when_nobody_waits_is_logged(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with instance() as house:
        for n, kind in enumerate(("raised", "memory", "cancelled", "error", "input", "closed")):
            exchange = house.call(Client(more=True), call=Call(id=f"id{n}"))
            await wait_all_tasks_blocked()
            exchange.scope.cancel()
            await exchange.end()
            await house.side.say(Ended(n + 1, kind, "ValueError: no", trace="Traceback: there", status=500))
        await wait_all_tasks_blocked()
        said = [record for record in caplog.records if record.getMessage() == "model raised while cancelled"]
        assert [vars(record)["id"] for record in said] == ["id0", "id1"]
        assert "Traceback: there" in caplog.text


# -- loops that do not answer ----------------------------------------------------------------------------------------------


async def answering(house: House, until: float) -> int:
    """Answers pings, as a loop does that runs."""
    count = 0
    with trio.move_on_at(until):
        while True:
            message = await house.side.hear()
            if type(message) is Ping:
                count += 1
                await house.side.say(Pong(message.number))
    return count


async def test_a_loop_that_is_silent_is_killed(autojump_clock: MockClock) -> None:
    async with instance(hang_timeout=2) as house:
        exchange, _ = await begun(house)
        assert await answering(house, trio.current_time() + 30) > 10
        assert house.error is None
        error = await house.end()
        assert str(error) == "its process was killed: its loop was silent for 2 s (models.m.process.hang_timeout)"
        assert type(await exchange.end()) is WorkerLost
        assert house.process.killed == 1


async def test_one_whose_answer_is_behind_much_else_is_not(autojump_clock: MockClock) -> None:
    async with instance(hang_timeout=2) as house:
        for _ in range(20):
            await trio.sleep(1.9)
            await house.side.say(Log("app", 20, "busy", ""))
        assert house.error is None
        last = trio.current_time()
        assert "its loop was silent for 2 s" in str(await house.end())
        assert trio.current_time() - last <= 4


async def test_a_session_that_does_not_end_kills_a_process_that_is_stuck_and_no_other(autojump_clock: MockClock) -> None:
    async with instance(stop_within=2) as house:
        exchange, _ = await begun(house)
        exchange.scope.cancel()
        assert await exchange.end() is trio.Cancelled
        await answering(house, trio.current_time() + 30)
        assert (house.error, house.instance.sessions) == (None, 1)
        other, _ = await begun(house)
        other.scope.cancel()
        began = trio.current_time()
        error = await house.end()
        assert str(error) == ("its process was killed: a session had not stopped 2 s after its end (models.m.stop_within)")
        assert trio.current_time() - began == 2.25


async def test_one_that_ends_in_time_kills_nothing(autojump_clock: MockClock) -> None:
    async with instance(stop_within=2) as house:
        exchange, _ = await begun(house)
        exchange.scope.cancel()
        await exchange.end()
        assert await house.side.hear() == Cancel(1)
        await house.side.say(Ended(1, "cancelled"))
        await trio.sleep(60)
        assert house.error is None


# -- the log ---------------------------------------------------------------------------------------------------------------


async def test_its_log_and_its_output_are_told_as_its(caplog: pytest.LogCaptureFixture, autojump_clock: MockClock) -> None:
    caplog.set_level(logging.INFO)
    async with instance() as house:
        await house.side.say(Log("app.x", 30, "100 %s", ""), Log("app.x", 40, "no", "Traceback"))
        await wait_all_tasks_blocked()
    said = {(record.name, record.levelno, record.getMessage()) for record in caplog.records}
    assert {("app.x", 30, "100 %s"), ("app.x", 40, "no\nTraceback"), ("gateway.worker", 20, "model output")} <= said
    for formatter in (TextFormatter(), JSONFormatter()):
        (line,) = [formatter.format(record) for record in caplog.records if record.levelno == 40]
        assert line.endswith("\n    Traceback" if isinstance(formatter, TextFormatter) else '"exc_info": "Traceback"}')
    for record in caplog.records:
        if record.name != "trio":
            assert (vars(record)["model"], vars(record)["instance"], vars(record)["pid"]) == ("m", 0, 4711)
