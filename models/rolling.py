"""Rolling batches: a text model that advances many sequences by one token at a time, while sequences join and leave."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar, final

import trio

from models.blocking import StepHolder, check_trio, detached, run_step, set_step_holder, step_holder, throw
from models.errors import ModelError, contained, is_failure
from models.messages import Finish, Prompt, Token, ToolCall
from models.session import Session
from models.spec import context_of
from models.tracebacks.frames import blamed

T = TypeVar("T")
Message: TypeAlias = Token | ToolCall | Finish
Advanced: TypeAlias = Message | list[Message] | tuple[Message, ...] | Exception
"""The result of a step for one sequence: one message, several or none, or the error of this sequence alone."""

MAX_BATCH = 16
MAX_SEQUENCES = 64
PREFILL_BUDGET = 256
AHEAD = 4
# less than the 5 s that a worker has for unloading
_CLOSING_SECONDS = 4.0


@final
class RoundStuck(RuntimeError):
    """A round of a rolling batch does not return, so the model is stuck."""


class SequenceState(Protocol):
    """The attributes of a sequence's state that a rolling batch reads; all others belong to the model."""

    @property
    def prompt_tokens(self) -> int | None:
        """The number of the prompt's tokens, for wires that report it. None: unknown."""

    @property
    def pending(self) -> int:
        """The number of them that must be prefilled before the first step."""


S = TypeVar("S", bound=SequenceState)


class StepModel(Protocol[S]):
    """The interface that an author implements: sequences are opened, prefilled, advanced together, and closed. If a prompt's
    `max_new_tokens` is 0, its first sequence is prefilled, and none is stepped; if nothing is pending, that one is stepped
    once, and its token dropped.

    `prefill`, `step` and `close` are never called at the same time. The optional attributes `parameters`, `chat_template`,
    `count_tokens` and `context` are those of `ModelSpec`.
    """

    def open(self, prompt: Prompt, /) -> Sequence[S]:
        """The sequences that continue a prompt: one, or as many as it requests, each with its number in its tokens
        (`Token.sequence`). None is stepped before the first is prefilled.

        It parses, checks and encodes, and must hold nothing that needs closing: it may run at the same time as a step and
        for several prompts at once, and its result is dropped if the client leaves meanwhile. An exception ends this session
        alone.
        """

    def prefill(self, sequence: S, at_most: int, /) -> Iterable[Message] | None:
        """Takes in at most `at_most` of the sequence's `pending` tokens, and at least one. Returns the messages to send for
        them, if any. An exception ends this session alone."""

    def step(self, sequences: Sequence[S], /) -> Sequence[Advanced]:
        """Advances each of these sequences by a token. Returns the result of each, in the same order.

        A `Finish`, or a token with `finish`, is the last message of its sequence. Any of the sequences may have been left
        out of earlier steps, and any may be new. An exception in place of a result ends that session alone; a raised
        exception is a crash of the model.
        """

    def close(self, sequence: S, /) -> None:
        """Releases a sequence that was given a place and is over or abandoned. It is called once, before the next step, also
        for a sequence that was neither prefilled nor stepped. An exception is a crash."""


@final
class _Entry(Generic[S]):
    """A sequence in the batch, or on its way there."""

    __slots__ = ("ahead", "call", "over", "state")

    def __init__(self, call: _Call[S], state: S) -> None:
        self.call, self.state = call, state
        self.ahead = 0
        """Messages that its session has not sent yet."""
        self.over = False
        """True if it has sent its last message, has failed, or its session is gone."""


@final
class _Call(Generic[S]):
    """The sequences of one prompt, and the hand-over to the session's task. It is a flag and a reschedule instead of a
    channel, because it happens for each token."""

    __slots__ = ("_task", "begun", "entries", "error", "holder", "left", "only_prompt", "out")

    def __init__(self, states: Iterable[S], *, only_prompt: bool = False) -> None:
        self.holder = step_holder()
        self.entries = [_Entry(self, state) for state in states]
        self.left = len(self.entries)
        self.only_prompt = only_prompt
        """True if no tokens are wanted: its one sequence is over when the prompt is taken in."""
        self.begun = not (self.entries and self.entries[0].state.pending)
        """True if the sequences may be stepped: the first is prefilled, as messages about the prompt come before all tokens,
        and tokens are wanted."""
        self.out: deque[tuple[_Entry[S], Message]] = deque()
        self.error: Exception | None = None
        self._task: trio.lowlevel.Task | None = None

    def take_error(self) -> Exception:
        """Returns the error for raising, and drops it here: its traceback will refer to the session's task, which refers to
        this."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def wake(self) -> None:
        """Makes the session's task check again."""
        task = self._task
        if task is not None:
            self._task = None
            trio.lowlevel.reschedule(task)

    async def wait(self) -> None:
        """Waits until there is something to send, or nothing more can come."""
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


@final
class RollingBatch(Generic[S]):
    """The text model that `rolling` makes of a StepModel.

    One loop serves all sessions. Each round closes sequences that are over, gives free places to waiting ones, prefills
    within its budget, and steps the sequences that have credit. A sequence can therefore join and leave between any two
    steps. It has credit while its session has fewer than `ahead` unsent messages of it. If a client does not read, its
    sequence is parked: it keeps its state and is not stepped until the client reads on. If more than `max_batch` have
    credit, those with the oldest last step go first. Prompts are prefilled in turns too.
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
        self.features = getattr(model, "features", None)
        self.check_format = getattr(model, "check_format", None)
        self.context = context_of(model)
        # one thread for the rounds: an abandoned round keeps its place until it returns, so two never overlap
        self._rounds, self._opens = trio.CapacityLimiter(1), trio.CapacityLimiter(4)
        self._waiting: deque[_Entry[S]] = deque()
        """Sequences without a place, in order of arrival."""
        self._prefilling: deque[_Entry[S]] = deque()
        self._running: list[_Entry[S]] = []
        """Sequences that can be stepped, the one with the oldest last step first."""
        self._closing: deque[_Entry[S]] = deque()
        self._stale = False
        """True if any of these sequences are over."""
        self._calls: set[_Call[S]] = set()
        self._bell: trio.lowlevel.Task | None = None
        self._ended = False
        self._watched: StepHolder | None = None
        """The watcher of the rounds, from the first session on. The rounds of a warm-up are within the load's time limit."""
        self._loop, self._stuck = trio.CancelScope(), ""
        self.__model_batches__: dict[int, int] = {}
        """How often so many sequences were stepped at once; written by the thread of the rounds."""

    # -- the session's side ------------------------------------------------------------------------------------------

    async def __call__(self, session: Session[Prompt, Message]) -> None:
        """Continues each prompt, one after another, until the end of input. It waits for the loop and for the session, so a
        client that stops reading stops only its own sequences. If it is cancelled, its sequences leave the batch before the
        next step. RuntimeError if the batch ends meanwhile. If a round is stuck, the session's blocking steps are
        interrupted."""
        async for prompt in session:
            if self._blocking:
                states = await run_step(partial(self._model.open, prompt), limiter=self._opens, replaced=True)
            else:
                states = self._model.open(prompt)
            if states:
                session.prompt_tokens = states[0].prompt_tokens
            only_prompt = not prompt.parameters.max_new_tokens
            call = _Call(states[:1] if only_prompt else states, only_prompt=only_prompt)
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

    async def _send_all(self, session: Session[Prompt, Message], call: _Call[S]) -> None:
        out = call.out
        while True:
            while out:
                entry, message = out[0]
                await session.send(message)
                out.popleft()
                entry.ahead -= 1
                if entry.ahead == self._ahead - 1:
                    self._ring()  # the sequence was parked
            if call.error is not None:
                throw(call.take_error())
            if not call.left:
                return
            if self._ended:
                raise RuntimeError("the rolling batch has ended")
            await call.wait()

    def _end(self, call: _Call[S]) -> None:
        """Removes the call's remaining sequences from the batch before the next step."""
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
        """Tells waiting sessions that nothing more will come. For `rolling`."""
        self._ended = True
        for call in self._calls:
            call.wake()

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serves the sessions until it is cancelled. For `rolling`. An exception is a crash of the model. At the end it
        waits a little for a running round, and closes every sequence. RoundStuck if a round does not return: nothing is
        closed then, because that round is still inside the model."""
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
        """Ends the batch because a round is stuck: it works on the state of all sessions, and of later ones."""
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
        """Takes out sequences that are over."""
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
        """True if a round would have nothing to do. A change of any of the lists rings the bell."""
        if self._closing or any(entry.ahead < self._ahead for entry in self._prefilling):
            return False
        return not any(entry.ahead < self._ahead and entry.call.begun for entry in self._running)

    def _round(self) -> list[tuple[_Entry[S], Advanced]]:
        """Runs one round in the model's thread, while the loop waits. Sessions may come, go and send, but change none of the
        lists."""
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
            sizes, size = self.__model_batches__, len(batch)
            sizes[size] = sizes.get(size, 0) + 1
            advanced = self._model.step([entry.state for entry in batch])
            if len(advanced) != len(batch):
                said = f"step: expected {len(batch)} results, one for each sequence, got {len(advanced)}"
                throw(blamed(ValueError(said), self._model.step))
            results.extend(zip(batch, advanced, strict=True))
        return results

    def _close(self) -> None:
        while self._closing:
            self._model.close(self._closing.popleft().state)

    def _close_all(self) -> None:
        """Closes all sequences, in the thread after the last round, which may be an abandoned one."""
        self._closing.extend((*self._prefilling, *self._running))
        self._prefilling, self._running = deque(), []
        self._close()

    def _prefill(self, results: list[tuple[_Entry[S], Advanced]]) -> None:
        """Spends the budget, first on the sequences whose last turn is oldest."""
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
                    throw(blamed(RuntimeError(f"prefill took none of {before} pending tokens"), self._model.prefill))
            except BaseException as e:  # SystemExit too: a sequence can end only itself
                if not is_failure(e):
                    raise
                results.append((entry, contained(e)))
                later.append(entry)
                continue
            budget = max(0, budget - (before - left))
            if messages or (entry.call.only_prompt and not left):
                results.append((entry, list(messages or ())))
            if left:
                unfinished.append(entry)
            else:
                self._running.append(entry)
                entry.call.begun |= entry is entry.call.entries[0] and not entry.call.only_prompt
        self._prefilling = deque(later + unfinished)

    def _deliver_all(self, results: list[tuple[_Entry[S], Advanced]]) -> None:
        for entry, result in results:
            self._deliver(entry, result)

    def _deliver(self, entry: _Entry[S], result: Advanced) -> None:
        if isinstance(result, Exception):
            detached(result, (ModelError,))  # the frames of a round refer to these results
        if entry.over:
            return  # its session left during the round
        call = entry.call
        if isinstance(result, Exception):
            call.error = result
            self._end(call)
        else:
            for message in result if isinstance(result, list | tuple) else (result,):
                self._hand_over(entry, message)
            if call.only_prompt and not entry.state.pending and not entry.over:
                entry.over = self._stale = True
                call.left -= 1
        call.wake()

    def _hand_over(self, entry: _Entry[S], message: Message) -> None:
        if type(message) is not Token and type(message) is not Finish and type(message) is not ToolCall:
            said = f"expected Tokens, ToolCalls and Finishes, got {type(message).__name__}"  # type: ignore[unreachable]
            throw(blamed(TypeError(said), self._model.step))
        if entry.over:
            throw(blamed(ValueError("expected no message after the last of a sequence, got one"), self._model.step))
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
    """Runs a step model as a text model for the length of the block; a loader yields the result.

    - `blocking`: True runs its methods in threads: rounds of `close`, `prefill` and `step` one at a time, and `open` beside
      them. False runs all of them on the event loop, which they block: use it only for rounds well under 1 ms.
    - `max_batch`: the most sequences in a step.
    - `max_sequences`: the most sequences with a place, whether prefilling, stepped or parked: each may hold a cache. Others
      wait for a place, in order of arrival.
    - `prefill_budget`: the most prompt tokens that are taken in between two steps, of all prompts together.
    - `ahead`: the most messages of a sequence that its session has not sent yet. With 1, every step waits for the slowest
      session; with more, a step can run while the messages of the last one are sent.

    An exception of `step` or `close` comes out of the block: the worker ends its sessions, and decides when the model is
    loaded again. RoundStuck comes out if a round in its thread runs longer than the model's `step_timeout`: sessions with
    prompts in the batch end, and no sequence is closed, because the round is still inside the model. Otherwise all are
    closed at the end. ValueError for an option below 1, RuntimeError if the event loop is not Trio's.
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
