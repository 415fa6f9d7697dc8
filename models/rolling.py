"""Rolling batches: a text model that advances many sequences by one token at a time, while sequences come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar, final

import trio

from models.blocking import StepHolder, check_trio, detached, run_step, set_step_holder, step_holder, throw
from models.errors import ModelError, contained, is_failure
from models.messages import Finish, Prompt, Token
from models.session import Session

T = TypeVar("T")
Message: TypeAlias = Token | Finish
Advanced: TypeAlias = Message | list[Message] | tuple[Message, ...] | Exception
"""What a step makes of one sequence: a message, several or none, or why this sequence alone has failed."""

MAX_BATCH = 16
MAX_SEQUENCES = 64
PREFILL_BUDGET = 256
AHEAD = 4
# Of the 5 that a worker has for unloading.
_CLOSING_SECONDS = 4.0


@final
class RoundStuck(RuntimeError):
    """A round of a rolling batch does not come back, and the model with it."""


class SequenceState(Protocol):
    """What a rolling batch looks at in the state of a sequence; all else in it is the model's own."""

    @property
    def prompt_tokens(self) -> int | None:
        """How many tokens the prompt has, for the wires that tell their clients; None: nobody knows."""

    @property
    def pending(self) -> int:
        """How many of them have to be prefilled before the first step."""


S = TypeVar("S", bound=SequenceState)


class StepModel(Protocol[S]):
    """What an author writes: sequences are opened, prefilled, advanced together, and closed.

    `prefill`, `step` and `close` are never called at the same time. `parameters`, `chat_template` and `count_tokens`,
    where it has them, are those of `ModelSpec`.
    """

    def open(self, prompt: Prompt, /) -> Sequence[S]:
        """The sequences that continue a prompt: one, or as many as it asks for, of which each numbers its tokens itself
        (`Token.sequence`). None is stepped before the first is prefilled.

        It reads, checks and encodes, and holds nothing that has to be closed: it may run at the same time as a step
        and for several prompts at once, and what it returns is dropped where the client has left meanwhile. An
        exception ends this session alone.
        """

    def prefill(self, sequence: S, at_most: int, /) -> Iterable[Message] | None:
        """Takes in at most so many of the sequence's `pending` tokens, at least one, and returns what is to be sent for
        them, if anything. An exception ends this session alone."""

    def step(self, sequences: Sequence[S], /) -> Sequence[Advanced]:
        """Advances each of these sequences by a token: what comes of each, in their order.

        A `Finish`, or a token with `finish`, is the last of its sequence. Of those given any may have been left out of
        the steps before, and any number may be new. An exception in the place of a result ends that session alone; one
        that is raised is a crash of the model.
        """

    def close(self, sequence: S, /) -> None:
        """A sequence that was given a place is over, or nobody wants it any more: lets go of what it holds. Called
        once, before the next step, also for one that was neither prefilled nor stepped. An exception is a crash."""


@final
class _Entry(Generic[S]):
    """A sequence in the batch, or on its way there."""

    __slots__ = ("ahead", "call", "over", "state")

    def __init__(self, call: _Call[S], state: S) -> None:
        self.call, self.state = call, state
        self.ahead = 0
        """Messages that its session has not sent yet."""
        self.over = False
        """Whether it has said its last word, has failed, or its session is gone."""


@final
class _Call(Generic[S]):
    """The sequences of one prompt, and the hand-over to the session's task. A flag and a reschedule in place of a channel:
    it is done for each token."""

    __slots__ = ("_task", "begun", "entries", "error", "holder", "left", "out")

    def __init__(self, states: Iterable[S]) -> None:
        self.holder = step_holder()
        self.entries = [_Entry(self, state) for state in states]
        self.left = len(self.entries)
        self.begun = not (self.entries and self.entries[0].state.pending)
        """Whether the first of them is prefilled: what that tells of the prompt comes before all tokens."""
        self.out: deque[tuple[_Entry[S], Message]] = deque()
        self.error: Exception | None = None
        self._task: trio.lowlevel.Task | None = None

    def take_error(self) -> Exception:
        """The error, to be raised, which is forgotten here: its traceback will know the session's task, which knows this."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def wake(self) -> None:
        """The session's task is to look again."""
        task = self._task
        if task is not None:
            self._task = None
            trio.lowlevel.reschedule(task)

    async def wait(self) -> None:
        """Until there is something to send, or nothing any more."""
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


@final
class RollingBatch(Generic[S]):
    """The model (family TEXT) that a StepModel is, inside `rolling`.

    One loop serves all sessions. Each round of it closes what is over, gives free places to those that wait, prefills
    within its budget and then steps those that have credit. So a sequence joins and leaves between any two steps. It
    has credit while fewer than `ahead` of its messages wait for its session to send them: the one of a client that does
    not read is parked, keeps its state, and is not stepped until its client reads on. Of more than `max_batch` that
    have credit those go first whose last step is longest ago; prompts are prefilled by turns too.
    """

    def __init__(
        self,
        model: StepModel[S],
        *,
        blocking: bool = True,
        max_batch: int = MAX_BATCH,
        max_sequences: int = MAX_SEQUENCES,
        prefill_budget: int = PREFILL_BUDGET,
        ahead: int = AHEAD,
    ) -> None:
        for name, value in (
            ("max_batch", max_batch), ("max_sequences", max_sequences), ("prefill_budget", prefill_budget), ("ahead", ahead),
        ):  # fmt: skip
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self._model, self._blocking = model, blocking
        self._max_batch, self._places, self._budget, self._ahead = max_batch, max_sequences, prefill_budget, ahead
        self.parameters = getattr(model, "parameters", None)
        self.chat_template = getattr(model, "chat_template", None)
        self.count_tokens = getattr(model, "count_tokens", None)
        # a thread for the rounds: an abandoned one keeps its place in it until it returns, so that two never overlap
        self._rounds, self._opens = trio.CapacityLimiter(1), trio.CapacityLimiter(4)
        self._waiting: deque[_Entry[S]] = deque()
        """Sequences without a place, in the order in which they came."""
        self._prefilling: deque[_Entry[S]] = deque()
        self._running: list[_Entry[S]] = []
        """Sequences that can be stepped; the one whose last step is longest ago comes first."""
        self._closing: deque[_Entry[S]] = deque()
        self._stale = False
        """Whether any of these sequences are over."""
        self._calls: set[_Call[S]] = set()
        self._bell: trio.lowlevel.Task | None = None
        self._ended = False
        self._watched: StepHolder | None = None
        """Who watches the rounds, from the first session on: those of a warm-up have the time of the load."""
        self._loop, self._stuck = trio.CancelScope(), ""

    # -- the session's side ------------------------------------------------------------------------------------------

    async def __call__(self, session: Session[Prompt, Token | Finish]) -> None:
        """Continues each prompt, one after another, until the end of input. Waits for the loop and for the session, so
        that a client that stops reading stops its own sequences alone; cancelled, it takes them out of the batch before
        the next step. RuntimeError where the batch ends meanwhile. Where a round is stuck, what holds the
        session's steps is interrupted."""
        async for prompt in session:
            if self._blocking:
                states = await run_step(partial(self._model.open, prompt), limiter=self._opens, replaced=True)
            else:
                states = self._model.open(prompt)
            if states:
                session.prompt_tokens = states[0].prompt_tokens
            call = _Call(states)
            if self._watched is None and type(call.holder) is not StepHolder:
                self._watched = call.holder.background(self._lose)
            self._waiting.extend(call.entries)
            self._calls.add(call)
            self._ring()
            try:
                await self._send_all(session, call)
            finally:
                self._end(call)
                self._calls.discard(call)

    async def _send_all(self, session: Session[Prompt, Token | Finish], call: _Call[S]) -> None:
        out = call.out
        while True:
            while out:
                entry, message = out[0]
                await session.send(message)
                out.popleft()
                entry.ahead -= 1
                if entry.ahead == self._ahead - 1:
                    self._ring()  # it was parked
            if call.error is not None:
                throw(call.take_error())
            if not call.left:
                return
            if self._ended:
                raise RuntimeError("the rolling batch has ended")
            await call.wait()

    def _end(self, call: _Call[S]) -> None:
        """What is left of it leaves the batch before the next step."""
        for entry in call.entries:
            if not entry.over:
                entry.over = self._stale = True
        if self._stale:
            self._ring()

    def _ring(self) -> None:
        task = self._bell
        if task is not None:
            self._bell = None
            trio.lowlevel.reschedule(task)

    def end(self) -> None:
        """Sessions that still wait learn that nothing will come any more. For `rolling`."""
        self._ended = True
        for call in self._calls:
            call.wake()

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serves the sessions until it is cancelled. For `rolling`; what it raises is the model's crash. At the end it
        waits a little for the round that still runs, and closes every sequence. RoundStuck where a round does not come
        back: then nothing is closed, for that round is still inside the model."""
        try:
            with self._loop:
                await self._serve()
            raise RoundStuck(self._stuck)
        finally:
            if not self._stuck:
                with trio.move_on_after(_CLOSING_SECONDS, shield=True):
                    await self._run(self._close_all)

    async def _serve(self) -> None:
        watched: StepHolder | None = None
        while True:
            self._sweep()
            self._give_places()
            if self._idle():
                await self._wait()
                continue
            if watched is not self._watched:
                watched = self._watched
                set_step_holder(watched)
            self._deliver_all(await self._run(self._round))

    def _lose(self, why: str) -> None:
        """A round is stuck. What it works on is the state of all sessions, and of those to come."""
        self._stuck = why
        for call in self._calls:
            call.holder.interrupt(why)
        self._loop.cancel()

    async def _run(self, work: Callable[[], T]) -> T:
        if self._blocking:
            return await run_step(work, limiter=self._rounds)
        done = work()
        await trio.lowlevel.checkpoint()
        return done

    async def _wait(self) -> None:
        self._bell = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._bell = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _sweep(self) -> None:
        """Takes out what is over."""
        if self._stale:
            self._stale = False
            self._closing.extend([entry for entry in (*self._prefilling, *self._running) if entry.over])
            self._waiting = deque([entry for entry in self._waiting if not entry.over])
            self._prefilling = deque([entry for entry in self._prefilling if not entry.over])
            self._running = [entry for entry in self._running if not entry.over]

    def _give_places(self) -> None:
        while self._waiting and len(self._prefilling) + len(self._running) < self._places:
            entry = self._waiting.popleft()
            (self._prefilling if entry.state.pending else self._running).append(entry)

    def _idle(self) -> bool:
        """Whether a round would have nothing to do. Else any of the lists may have grown meanwhile, and ring."""
        if self._closing or any(entry.ahead < self._ahead for entry in self._prefilling):
            return False
        return not any(entry.ahead < self._ahead and entry.call.begun for entry in self._running)

    def _round(self) -> list[tuple[_Entry[S], Advanced]]:
        """In the model's thread, while the loop waits: sessions may come, go and send, but touch none of these lists."""
        self._close()
        results: list[tuple[_Entry[S], Advanced]] = []
        if self._prefilling:
            self._prefill(results)
        ahead = self._ahead
        batch = [entry for entry in self._running if entry.ahead < ahead and entry.call.begun and not entry.over]
        if len(batch) > self._max_batch:
            batch = batch[: self._max_batch]
            stepped = set(batch)
            self._running = [entry for entry in self._running if entry not in stepped] + batch
        if batch:
            advanced = self._model.step([entry.state for entry in batch])
            if len(advanced) != len(batch):
                raise ValueError(f"step: expected {len(batch)} results, one for each sequence, got {len(advanced)}")
            results.extend(zip(batch, advanced, strict=True))
        return results

    def _close(self) -> None:
        while self._closing:
            self._model.close(self._closing.popleft().state)

    def _close_all(self) -> None:
        """After the last round, also one that was abandoned: the thread is free only then."""
        self._closing.extend((*self._prefilling, *self._running))
        self._prefilling, self._running = deque(), []
        self._close()

    def _prefill(self, results: list[tuple[_Entry[S], Advanced]]) -> None:
        """Spends the budget, first on those that have waited longest since their last turn."""
        budget, unfinished, later = self._budget, [], []
        for entry in self._prefilling:
            if not budget or entry.ahead >= self._ahead or entry.over:
                later.append(entry)
                continue
            state = entry.state
            before = state.pending
            try:
                messages = self._model.prefill(state, min(budget, before))
                left = state.pending
                if left >= before:
                    raise RuntimeError(f"prefill took none of {before} pending tokens")
            except BaseException as e:  # sys.exit() too: a sequence is all that it can end
                if not is_failure(e):
                    raise
                results.append((entry, contained(e)))
                later.append(entry)
                continue
            budget = max(0, budget - (before - left))
            if messages:
                results.append((entry, list(messages)))
            if left:
                unfinished.append(entry)
            else:
                self._running.append(entry)
                entry.call.begun |= entry is entry.call.entries[0]
        self._prefilling = deque(later + unfinished)

    def _deliver_all(self, results: list[tuple[_Entry[S], Advanced]]) -> None:
        for entry, result in results:
            self._deliver(entry, result)

    def _deliver(self, entry: _Entry[S], result: Advanced) -> None:
        if isinstance(result, Exception):
            detached(result, (ModelError,))  # a round's frames know these results
        if entry.over:
            return  # its session left during the round
        call = entry.call
        if isinstance(result, Exception):
            call.error = result
            self._end(call)
        else:
            for message in result if isinstance(result, list | tuple) else (result,):
                self._hand_over(entry, message)
        call.wake()

    def _hand_over(self, entry: _Entry[S], message: Message) -> None:
        if type(message) is not Token and type(message) is not Finish:
            raise TypeError(f"expected Tokens and Finishes, got {type(message).__name__}")
        if entry.over:
            raise ValueError("expected no message after the last of a sequence, got one")
        entry.call.out.append((entry, message))
        entry.ahead += 1
        if type(message) is Finish or message.finish is not None:
            entry.over = self._stale = True
            entry.call.left -= 1


@asynccontextmanager
async def rolling(
    model: StepModel[S],
    *,
    blocking: bool = True,
    max_batch: int = MAX_BATCH,
    max_sequences: int = MAX_SEQUENCES,
    prefill_budget: int = PREFILL_BUDGET,
    ahead: int = AHEAD,
) -> AsyncIterator[RollingBatch[S]]:
    """Runs a step model, for the length of the block, as a model of text; a loader yields what this does.

    - `blocking`: its methods run in threads: rounds of `close`, `prefill` and `step` one at a time, `open` beside them.
      False runs all of them on the event loop, which is right only for rounds of well under a millisecond.
    - `max_batch`: the most sequences in a step.
    - `max_sequences`: the most that have a place, whether they are prefilled, stepped or parked: each may hold a cache.
      More wait for a place, in the order in which they came.
    - `prefill_budget`: the most tokens of prompts that are taken in between two steps, of all prompts together.
    - `ahead`: the most messages of a sequence that its session has not sent yet. With 1 every step waits for the slowest of
      its tokens; more lets a step run while those of the last one are sent.

    An exception of `step` or `close` comes out of the block: the worker ends its sessions and decides when the model is
    loaded again. So does RoundStuck, where a round in its thread runs longer than the model's `step_timeout`: sessions that
    had prompts in the batch end of that, and no sequence is closed, since the round is still inside the model. Otherwise all
    are closed at the end. ValueError for an option below 1, RuntimeError where the event loop is not Trio's.
    """
    check_trio("a rolling batch")
    batch = RollingBatch(
        model,
        blocking=blocking,
        max_batch=max_batch,
        max_sequences=max_sequences,
        prefill_budget=prefill_budget,
        ahead=ahead,
    )
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(batch.run)
            yield batch
            nursery.cancel_scope.cancel()
    finally:
        batch.end()
