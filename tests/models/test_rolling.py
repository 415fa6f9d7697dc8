"""Rolling batches: who is in each step, whom a reader stops, and what is left when one leaves or fails."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, final

import pytest
import trio
import trio.testing

from models.adapt import spec_of
from models.errors import ModelError
from models.messages import Family, Finish, FinishReason, Prompt, Token, ToolCall
from models.rolling import RollingBatch, rolling
from models.session import Session
from tests.models.steps import Counting, asking

LOOP: dict[str, Any] = {"blocking": False}


@final
class Client:
    """A channel with one prompt, whose reader takes so many messages and then waits to be told to read on."""

    def __init__(self, prompt: Prompt, room: float = float("inf")) -> None:
        self._prompts = [prompt]
        self.room = room
        self.got: list[Token | ToolCall | Finish] = []
        self.over = trio.Event()
        self.error: BaseException | None = None
        self.scope = trio.CancelScope()
        self._more = trio.Event()

    async def receive(self) -> Prompt:
        await trio.lowlevel.checkpoint()
        if not self._prompts:
            raise trio.EndOfChannel
        return self._prompts.pop()

    async def send(self, message: Token | ToolCall | Finish, /) -> None:
        await trio.lowlevel.checkpoint()
        while len(self.got) >= self.room:
            await self._more.wait()
        self.got.append(message)

    def read(self, more: float = float("inf")) -> None:
        self.room += more
        self._more.set()
        self._more = trio.Event()

    @property
    def text(self) -> str:
        return "".join(message.text for message in self.got if isinstance(message, Token))

    async def talk(self, model: Callable[[Session[Any, Any]], Any]) -> None:
        with self.scope:
            try:
                await model(Session(self))
            except Exception as e:
                self.error = e
        self.over.set()


@asynccontextmanager
async def clients(model: Any) -> AsyncIterator[Callable[..., Client]]:
    """Starts sessions of the model; cancels those that are left."""
    async with trio.open_nursery() as nursery:

        def start(prompt: Prompt, room: float = float("inf")) -> Client:
            client = Client(prompt, room)
            nursery.start_soon(client.talk, model)
            return client

        yield start
        nursery.cancel_scope.cancel()


def count(number: int) -> str:
    return "".join(f"{i} " for i in range(number))


async def still() -> None:
    """Until nothing moves; threads are not seen, so these tests step on the loop."""
    await trio.testing.wait_all_tasks_blocked()


# -- joining and leaving ---------------------------------------------------------------------------------------------


async def test_one_prompt_is_continued_to_its_end_and_closed() -> None:
    steps = Counting()
    async with rolling(steps, **LOOP) as model, clients(model) as start:
        client = start(asking("a", 3))
        await client.over.wait()
        await still()
        assert client.text == count(3)
        assert (steps.steps, steps.closed) == (["a", "a", "a"], ["a"])


async def test_a_sequence_joins_and_leaves_between_any_two_steps() -> None:
    # each client is let in when the one before has come so far, so that every step has other neighbours
    steps = Counting()
    async with rolling(steps, ahead=1, **LOOP) as model, clients(model) as start:
        a = start(asking("a", 6), room=2)
        await still()
        assert steps.steps == ["a", "a", "a"]  # the third waits for its reader
        b = start(asking("b", 2))
        await b.over.wait()
        a.read()
        c = start(asking("c", 1))
        for client in (a, c):
            await client.over.wait()
        await still()
        assert [a.text, b.text, c.text] == [count(6), count(2), count(1)]
        assert sorted(steps.closed) == ["a", "b", "c"]
        assert steps.steps[:5] == ["a", "a", "a", "b", "b"]
        assert sum(map(len, steps.steps)) == 9, "nobody is stepped in vain"


async def test_many_sequences_share_every_step() -> None:
    steps = Counting()
    async with rolling(steps, **LOOP) as model, clients(model) as start:
        everyone = [start(asking(name, 20)) for name in "abcdefgh"]
        for client in everyone:
            await client.over.wait()
        assert {client.text for client in everyone} == {count(20)}
        assert len(steps.steps) < 30
        assert max(map(len, steps.steps)) == 8


async def test_each_of_n_sequences_is_a_place_in_the_batch() -> None:
    steps = Counting()
    async with rolling(steps, **LOOP) as model, clients(model) as start:
        client = start(asking("a", 3, n=3))
        await client.over.wait()
        await still()
        told = [(message.sequence, message.id) for message in client.got if isinstance(message, Token)]
        assert sorted(told) == [(sequence, i) for sequence in range(3) for i in range(3)]
        assert steps.steps == ["a0a1a2"] * 3
        assert steps.closed == ["a0", "a1", "a2"]


@pytest.mark.parametrize("prompt", [0, 1, 700])
async def test_a_prompt_of_which_no_token_is_wanted_is_taken_in_and_leaves(prompt: int) -> None:
    steps = Counting()
    async with rolling(steps, **LOOP) as model, clients(model) as start:
        client = start(asking("a", 0, prompt=prompt, n=2))
        other = start(asking("b", 5))
        for one in (client, other):
            await one.over.wait()
        await still()
        assert client.error is None
        assert sum(count for _, count in steps.prefills) == prompt
        assert steps.of("a") == (not prompt)  # only a model that takes its prompts in by steps is stepped
        assert (client.text, other.text) == ("", count(5))
        assert sorted(steps.closed) == ["a0", "b"]


async def test_a_step_may_tell_nothing_or_several_messages_of_a_sequence() -> None:
    steps, held = Counting(), []

    def in_pairs(sequences: Any) -> list[Any]:
        held.extend(steps.step(sequences))
        if len(held) % 2 and held[-1].finish is None:
            return [[]]
        told = held.copy()
        held.clear()
        return [told]

    async with rolling(_With(steps, step=in_pairs), **LOOP) as model, clients(model) as start:
        client = start(asking("a", 5))
        await client.over.wait()
        assert client.text == count(5)


# -- credit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [1, 3])
async def test_a_reader_that_stops_parks_its_own_sequence_and_costs_the_others_no_step(ahead: int) -> None:
    steps = Counting()
    async with rolling(steps, ahead=ahead, **LOOP) as model, clients(model) as start:
        parked = start(asking("p", 50), room=2)
        await still()
        assert steps.of("p") == 2 + ahead  # those that were read, and those that wait for the reader
        before = len(steps.steps)
        other = start(asking("o", 40))
        await other.over.wait()
        assert other.text == count(40)
        assert steps.steps[before:] == ["o"] * 40, "the parked one is in no step"
        assert not steps.closed.count("p"), "and keeps its state"

        parked.read()
        await parked.over.wait()
        assert parked.text == count(50)


async def test_a_reader_that_reads_one_token_gets_one_more_step() -> None:
    steps = Counting()
    async with rolling(steps, ahead=2, **LOOP) as model, clients(model) as start:
        client = start(asking("a", 50), room=0)
        for read in range(10):
            await still()
            assert steps.of("a") == read + 2
            client.read(1)


async def test_the_other_sequences_of_a_session_wait_for_the_same_reader() -> None:
    steps = Counting()
    async with rolling(steps, ahead=1, **LOOP) as model, clients(model) as start:
        client = start(asking("a", 9, n=2), room=3)
        await still()
        assert len(client.got) == 3
        assert (steps.of("a0"), steps.of("a1")) in {(3, 2), (2, 3)}
        client.read()
        await client.over.wait()
        assert len(client.got) == 18


# -- fairness --------------------------------------------------------------------------------------------------------


async def test_more_sequences_than_a_step_takes_have_their_turns() -> None:
    steps = Counting()
    async with rolling(steps, max_batch=3, **LOOP) as model, clients(model) as start:
        everyone = [start(asking(name, 30)) for name in "abcdefgh"]
        for client in everyone:
            await client.over.wait()
        assert all(len(step) <= 3 for step in steps.steps)
        assert {client.text for client in everyone} == {count(30)}
        for done in range(3, len(steps.steps) - 20):  # at any time nobody is behind by more than a turn
            so_far = [sum(name in step for step in steps.steps[:done]) for name in "abcdefgh"]
            assert max(so_far) - min(so_far) <= 2


async def test_newcomers_do_not_starve_those_that_have_come_far() -> None:
    steps = Counting()
    async with rolling(steps, max_batch=1, **LOOP) as model, clients(model) as start:
        old = start(asking("o", 20))
        while not old.over.is_set():
            new = start(asking("n", 1))
            await new.over.wait()
        assert old.text == count(20)
        assert steps.of("n") <= 3 * steps.of("o")


async def test_sequences_without_a_place_wait_in_order_and_get_it_when_one_is_closed() -> None:
    steps = Counting()
    async with rolling(steps, max_sequences=2, **LOOP) as model, clients(model) as start:
        everyone = []
        for name in "abcde":
            everyone.append(start(asking(name, 9), room=0))
            await still()
        assert set("".join(steps.steps)) == {"a", "b"}
        assert steps.opened == [*"abcde"]
        for client in everyone:
            client.read()
        for client in everyone:
            await client.over.wait()
        await still()
        assert steps.closed == [*"abcde"]
        held = 0
        for step in steps.steps:
            held = max(held, len(step))
        assert held == 2


# -- prompts ---------------------------------------------------------------------------------------------------------


async def test_a_long_prompt_is_taken_in_chunks_between_the_steps_of_the_others() -> None:
    steps = Counting()
    async with rolling(steps, prefill_budget=10, **LOOP) as model, clients(model) as start:
        running = start(asking("r", 1000))
        await steps_of(steps, "r", 3)
        long = start(asking("l", 2, prompt=95))
        await long.over.wait()
        assert running.got
        assert [(name, size) for name, size in steps.prefills] == [("l", 10)] * 9 + [("l", 5)]
        taken = [after - before for before, after in zip(steps.rounds, steps.rounds[1:], strict=False)]
        assert max(taken) == 10, "between two steps no more than the budget"


async def test_the_budget_is_shared_and_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    steps = Counting()
    async with rolling(steps, prefill_budget=10, **LOOP) as model, clients(model) as start:
        start(asking("r", 10_000))
        start(asking("l", 1, prompt=10_000))
        await steps_of(steps, "r", 3)
        before = len(steps.prefills)
        short = [start(asking(name, 1, prompt=4)) for name in "abcd"]
        for client in short:
            await client.over.wait()
        last = max(index for index, (name, _) in enumerate(steps.prefills) if name != "l")
        assert sum(size for name, size in steps.prefills[before:last] if name == "l") <= 100
        taken = [after - before for before, after in zip(steps.rounds, steps.rounds[1:], strict=False)]
        assert max(taken) == 10, "of all prompts together"


async def test_the_session_knows_how_many_tokens_its_prompt_has() -> None:
    async with rolling(Counting(), **LOOP) as model:
        session: Session[Any, Any] = Session(Client(asking("a", 1, prompt=7)))
        await model(session)
        assert session.prompt_tokens == 7


async def steps_of(steps: Counting, name: str, number: int) -> None:
    while steps.of(name) < number:
        await trio.lowlevel.checkpoint()


async def test_no_sequence_of_a_prompt_is_stepped_before_the_first_is_prefilled() -> None:
    steps = Counting()

    def opened(prompt: Prompt) -> list[Any]:
        first, second = steps.open(prompt)
        first.pending = 30
        return [first, second]

    async with (
        rolling(_With(steps, open=opened), prefill_budget=10, **LOOP) as model,
        clients(model) as start,
    ):
        client = start(asking("a", 2, n=2))
        await client.over.wait()
        assert (len(steps.prefills), steps.rounds) == (3, [30, 30])
        assert [sorted(step[i : i + 2] for i in (0, 2)) for step in steps.steps] == [["a0", "a1"]] * 2


# -- leaving ---------------------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_is_in_no_further_step_and_its_state_is_closed() -> None:
    steps = Counting()
    async with rolling(steps, **LOOP) as model, clients(model) as start:
        stays, leaves = start(asking("s", 1000)), start(asking("l", 1000))
        await steps_of(steps, "l", 5)
        leaves.scope.cancel()
        await leaves.over.wait()
        seen = steps.of("l")
        await steps_of(steps, "s", steps.of("s") + 20)
        assert steps.of("l") <= seen + 1
        assert steps.closed == ["l"]
        assert stays.error is None


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("prompt", [0, 5])
async def test_cancelled_at_any_checkpoint_nothing_stays_in_the_batch(blocking: bool, prompt: int) -> None:
    steps = Counting()
    async with rolling(steps, blocking=blocking, prefill_budget=2, ahead=1) as model, clients(model) as start:
        other = start(asking("o", 100_000))

        complete, tried = False, 0
        while not complete:
            complete = await Cancelling(tried).run(model, Client(asking("x", 3, prompt=prompt)))
            tried += 1
        assert tried > 3
        mark = steps.of("o")
        await steps_of(steps, "o", mark + 3)
        batch: Any = model
        assert [entry.state.name for entry in batch._running] == ["o"]
        assert not batch._waiting
        assert not batch._prefilling
        assert len(batch._calls) == 1
        assert other.error is None
        assert set(steps.closed) == {"x"}


@final
class Cancelling(trio.abc.Instrument):
    """Runs a session and cancels it right before it would be scheduled for the given time."""

    def __init__(self, after: int) -> None:
        self._left = after
        self._scope = trio.CancelScope()
        self._task: trio.lowlevel.Task | None = None

    async def run(self, model: Any, client: Client) -> bool:
        """Runs a session of the client. True if it ended before it was cancelled."""
        self._task = trio.lowlevel.current_task()
        trio.lowlevel.add_instrument(self)
        try:
            with self._scope:
                await model(Session(client))
        finally:
            trio.lowlevel.remove_instrument(self)
        return not self._scope.cancelled_caught

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            if not self._left:
                self._scope.cancel()
            self._left -= 1


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["open b", "prefill b", "give b"])
async def test_the_failure_of_one_sequence_ends_its_session_alone(where: str) -> None:
    steps = Counting()
    steps.fail[where] = ModelError("no more b")
    async with rolling(steps, **LOOP) as model, clients(model) as start:
        others = [start(asking(name, 30, prompt=3)) for name in "ac"]
        failing = start(asking("b", 30, prompt=3))
        for client in (*others, failing):
            await client.over.wait()
        await still()
        assert isinstance(failing.error, ModelError)
        assert [client.text for client in others] == [count(30)] * 2
        assert sorted(steps.closed) == (["a", "c"] if where == "open b" else ["a", "b", "c"])


async def test_what_was_made_before_a_failure_is_still_sent() -> None:
    steps = Counting()
    async with rolling(steps, ahead=8, **LOOP) as model, clients(model) as start:
        client = start(asking("a", 100), room=1)
        await still()
        steps.fail["give a"] = ModelError("enough")
        client.read()
        await client.over.wait()
        assert str(client.error) == "enough"
        assert client.text == count(len(client.got))
        assert len(client.got) >= 9


async def test_a_prefill_that_takes_nothing_fails_alone_instead_of_turning_forever() -> None:
    steps = Counting()
    async with rolling(_With(steps, prefill=lambda sequence, at_most: None), **LOOP) as model, clients(model) as start:
        lazy, other = start(asking("l", 3, prompt=5)), start(asking("o", 3))
        await lazy.over.wait()
        await other.over.wait()
        assert str(lazy.error) == "prefill took none of 5 pending tokens"
        assert other.text == count(3)


@final
class _With:
    """A step model with some of its methods replaced."""

    def __init__(self, below: Counting, **methods: Any) -> None:
        self.open, self.prefill, self.step, self.close = below.open, below.prefill, below.step, below.close
        for name, method in methods.items():
            setattr(self, name, method)


@pytest.mark.parametrize("what", ["step", "close a"])
@pytest.mark.parametrize("blocking", [False, True])
async def test_a_step_that_raises_ends_the_block_and_everybody_in_the_batch(what: str, blocking: bool) -> None:
    steps = Counting()
    async with trio.open_nursery() as nursery:
        everyone = [Client(asking(name, 2 + 1000 * (name != "a"))) for name in "abc"]
        model: Any = None

        async def life() -> None:
            nonlocal model
            async with rolling(steps, blocking=blocking) as model:
                for client in everyone[1:]:
                    nursery.start_soon(client.talk, model)
                for name in "bc":
                    await steps_of(steps, name, 1)
                steps.fail[what] = ZeroDivisionError("a bad kernel")
                nursery.start_soon(everyone[0].talk, model)
                await trio.sleep_forever()

        with pytest.RaisesGroup(ZeroDivisionError):
            await life()
        for client in everyone:
            await client.over.wait()
        for client in everyone[1:]:
            assert str(client.error) == "the rolling batch has ended"
        assert {"b", "c"} <= set(steps.closed)
        with pytest.raises(RuntimeError, match="has ended"):
            await model(Session(Client(asking("late", 1))))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "expected 1 results, one for each sequence, got 0"),
        (["text"], "expected Tokens, ToolCalls and Finishes, got str"),
        ([[None]], "expected Tokens, ToolCalls and Finishes, got NoneType"),
        ([[Finish(reason=FinishReason.LENGTH)] * 2], "expected no message after the last of a sequence, got one"),
    ],
)
async def test_a_step_that_does_not_keep_its_word_is_a_crash_that_says_so(given: list[Any], said: str) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc((ValueError, TypeError), match=said)):
        async with rolling(_With(Counting(), step=lambda sequences: given), **LOOP) as model:
            await model(Session(Client(asking("a", 1))))


# -- threads ---------------------------------------------------------------------------------------------------------


async def test_blocking_steps_run_in_threads_one_at_a_time() -> None:
    steps = Counting()
    async with rolling(steps) as model, clients(model) as start:
        everyone = [start(asking(name, 10, prompt=3)) for name in "abc"]
        for client in everyone:
            await client.over.wait()
        assert {client.text for client in everyone} == {count(10)}
        assert threading.get_ident() not in steps.threads


async def test_at_the_end_it_waits_for_the_step_that_runs_and_closes_what_is_open() -> None:
    steps, began, go_on = Counting(), threading.Event(), threading.Event()

    def slow(sequences: Any) -> Any:
        began.set()
        go_on.wait(60)
        return steps.step(sequences)

    async with trio.open_nursery() as nursery:
        async with rolling(_With(steps, step=slow)) as model:
            nursery.start_soon(Client(asking("a", 5)).talk, model)
            await trio.to_thread.run_sync(began.wait)
            nursery.start_soon(trio.to_thread.run_sync, go_on.set)
        assert steps.closed == ["a"]
        assert not steps.inside


async def test_a_step_that_never_returns_does_not_keep_the_model_from_unloading(autojump_clock: Any) -> None:
    began, go_on = threading.Event(), threading.Event()

    def stuck(sequences: Any) -> Any:
        began.set()
        go_on.wait(60)
        return []

    client = Client(asking("a", 5))
    async with trio.open_nursery() as nursery:
        async with rolling(_With(Counting(), step=stuck)) as model:
            nursery.start_soon(client.talk, model)
            autojump_clock.autojump_threshold = float("inf")
            await trio.to_thread.run_sync(began.wait)
            autojump_clock.autojump_threshold = 0
        assert trio.current_time() >= 4
        autojump_clock.autojump_threshold = float("inf")
        go_on.set()
        await client.over.wait()


# -- the model that it is --------------------------------------------------------------------------------------------


def test_a_loader_that_yields_one_is_a_model_of_text() -> None:
    @asynccontextmanager
    async def load(max_batch: int = 2) -> AsyncIterator[RollingBatch[Any]]:
        async with rolling(Counting(), max_batch=max_batch) as model:
            yield model

    assert spec_of(load).family is Family.TEXT


async def test_it_says_of_itself_what_the_step_model_says() -> None:
    async with rolling(Counting(), **LOOP) as model:
        assert model.parameters == {"max_new_tokens", "n"}
        assert model.chat_template is model.count_tokens is None


@pytest.mark.parametrize("option", ["max_batch", "max_sequences", "prefill_budget", "ahead"])
def test_options_below_1_are_refused(option: str) -> None:
    options: dict[str, Any] = {option: 0}
    with pytest.raises(ValueError, match=f"{option}: expected at least 1, got 0"):
        RollingBatch(Counting(), **options)


async def test_a_step_may_send_pieces_of_calls(autojump_clock: trio.testing.MockClock) -> None:
    class Caller:
        features = frozenset({"tools"})

        def open(self, prompt: Prompt) -> list[Any]:
            return [SimpleNamespace(pending=0, prompt_tokens=None, step=0)]

        def prefill(self, state: Any, budget: int) -> list[Any]:
            return []

        def step(self, states: list[Any]) -> list[Any]:
            for state in states:
                state.step += 1
            pieces = [ToolCall(name="f", arguments="{"), ToolCall(arguments="}", finish=FinishReason.TOOL_CALLS)]
            return [pieces[state.step - 1] for state in states]

        def close(self, state: Any) -> None:
            pass

    async with rolling(Caller(), blocking=False) as model:
        assert model.features == {"tools"}
        client = Client(Prompt(text="x"))
        await client.talk(model)
        assert client.got == [ToolCall(name="f", arguments="{"), ToolCall(arguments="}", finish=FinishReason.TOOL_CALLS)]
