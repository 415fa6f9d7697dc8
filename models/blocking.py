"""Runs blocking steps in threads: one call for each step, a cooperative cancel token, and a slot held until the step
returns.

An exception of a call in a thread keeps none of the thread's frames alive, nor the objects in them.
"""

from __future__ import annotations

import contextvars
import ctypes
import inspect
import logging
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import NoReturn, Protocol, TypeVar, final

import trio

from models.continuations import Continuations
from models.errors import ModelError, ModelExit, cancelled, set_cancelled
from models.tracebacks.frames import folded
from models.tracebacks.text import keep_frames

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

# An exception refers through its traceback to the frames it came through. Those of a call in a thread refer to their callers
# (`f_back`) up to the thread's own loop, whose locals hold the outcome: the same exception. This cycle keeps all objects of
# the call alive, even a body of 1 GiB, until the garbage collector runs. So do `__cause__` and `__context__`, whatever `from
# None` hides. An exception therefore leaves a thread without tracebacks.

_STACK = 4000  # characters of a stack


class Loop(Protocol):
    """The functions of the event loop that a model's code needs: Trio's, unless `set_loop` has set another."""

    @property
    def cancelled(self) -> type[BaseException]:
        """The exception that a cancelled task gets where it waits."""

    def current_time(self) -> float:
        """The time of its clock in seconds; callable from any thread."""

    def call_soon(self, call: Callable[[], object], /) -> None:
        """Schedules a call on the loop, from any thread. It is ignored if the loop is over."""

    async def checkpoint(self) -> None:
        """Lets other tasks run."""

    async def sleep(self, seconds: float, /) -> None:
        """Waits for `seconds`."""

    def beside(self, work: Callable[[], Awaitable[NoReturn]], /) -> AbstractAsyncContextManager[None]:
        """Runs `work` in a separate task for the length of a block."""

    async def around(self, text: Continuations, call: Awaitable[None], /) -> None:
        """Awaits a model's call until it has returned, has raised, or has been stopped by its text."""

    async def in_thread(self, call: Callable[[], T], limiter: trio.CapacityLimiter | None, abandon: bool, /) -> T:
        """Does `trio.to_thread.run_sync`, with `abandon` as its `abandon_on_cancel`. `call` must not raise."""

    def codec_threads(self) -> trio.CapacityLimiter:
        """The limiter of the function `codec_threads`."""

    def more_places(self, limiter: trio.CapacityLimiter, /) -> None:
        """Tells that the limiter's `total_tokens` were raised."""


@final
class _Trio:
    """The loop of the Trio run in which it is made."""

    __slots__ = ("_clock", "_token")
    cancelled = trio.Cancelled

    def __init__(self) -> None:
        self._token, self._clock = trio.lowlevel.current_trio_token(), trio.lowlevel.current_clock()

    def current_time(self) -> float:
        return self._clock.current_time()

    def call_soon(self, call: Callable[[], object]) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(call)

    async def checkpoint(self) -> None:
        await trio.lowlevel.checkpoint()

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)

    @asynccontextmanager
    async def beside(self, work: Callable[[], Awaitable[NoReturn]]) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            yield
            nursery.cancel_scope.cancel()

    async def around(self, text: Continuations, call: Awaitable[None]) -> None:
        await text.around(call)

    async def in_thread(self, call: Callable[[], T], limiter: trio.CapacityLimiter | None, abandon: bool) -> T:
        return await trio.to_thread.run_sync(call, limiter=limiter, abandon_on_cancel=abandon)

    def codec_threads(self) -> trio.CapacityLimiter:
        try:
            return _codecs.get()
        except LookupError:
            limiter = trio.CapacityLimiter(CODEC_THREADS)
            _codecs.set(limiter)
            return limiter

    def more_places(self, limiter: trio.CapacityLimiter) -> None:
        """Does nothing: Trio's limiter handles that itself."""


_loop: contextvars.ContextVar[Loop | None] = contextvars.ContextVar("models_loop", default=None)


def set_loop(loop: Loop) -> None:
    """Declares that this context, and tasks started from it, run on a loop other than Trio's."""
    _loop.set(loop)
    set_cancelled(loop.cancelled)


def running_loop() -> Loop:
    """The loop that runs the caller."""
    return _loop.get() or _Trio()


def check_trio(what: str) -> None:
    """Raises RuntimeError if the loop is not Trio's; `what` names the feature that needs it."""
    if _loop.get() is not None:
        raise RuntimeError(f'{what} needs Trio: give its model loop = "trio" (models.NAME.process.loop)')


def start_thread(call: Callable[[], T], done: Callable[[T], object]) -> None:
    """Calls `call` in a thread, and there `done` with its result. Neither may raise. For a `Loop`."""
    trio.lowlevel.start_thread_soon(call, lambda outcome: done(outcome.unwrap()))


async def in_thread(
    call: Callable[[], T],
    *,
    limiter: trio.CapacityLimiter | None = None,
    abandon_on_cancel: bool = False,
    expected: tuple[type[BaseException], ...] = (),
) -> T:
    """Runs `call` in a thread; returns its result, or raises its exception, whose traceback then has only the caller's
    frames. A note (PEP 678) has the thread's traceback as text, so that a log shows the origin; an `expected` error gets no
    note.

    `limiter` and `abandon_on_cancel` are those of `trio.to_thread.run_sync`. An exception of an abandoned call is dropped.
    """
    found = await running_loop().in_thread(partial(caught, call, expected), limiter, abandon_on_cancel)
    if type(found) is not Raised:
        return found
    error = found.error
    del found
    try:
        raise error
    finally:
        del error  # it refers to this frame, and the cycle would keep the caller's memory alive


CODEC_THREADS = 8
"""The number of codec threads."""
_codecs: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("codec threads")


def codec_threads() -> trio.CapacityLimiter:
    """The limiter of the few threads for pure and bounded steps that would delay the loop. They are separate from Trio's
    usual forty, all of which models may occupy."""
    return running_loop().codec_threads()


_turn: trio.lowlevel.RunVar[trio.Lock] = trio.lowlevel.RunVar("long JSON texts")


def json_turn() -> trio.Lock:
    """The lock for reading long JSON texts. They are read one at a time, so that the memory for it is needed once, and short
    texts do not wait for them."""
    try:
        return _turn.get()
    except LookupError:
        lock = trio.Lock()
        _turn.set(lock)
        return lock


@final
class Raised:
    """An exception of a call, as a value."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


def caught(call: Callable[[], T], expected: tuple[type[BaseException], ...] = ()) -> T | Raised:
    """The result of `call`, or its exception, `detached`."""
    try:
        return call()
    except BaseException as error:
        return Raised(detached(error, expected))


def detached(error: E, expected: tuple[type[BaseException], ...] = (BaseException,)) -> E:
    """Removes the tracebacks of the exception, its causes and contexts, and a group's members, and returns it: it keeps no
    frame alive. If it is not `expected`, a note of each has its traceback as text."""
    if not isinstance(error, expected):
        with suppress(Exception):
            keep_frames(error)
    waiting: list[BaseException] = [error]
    seen = set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        waiting += [other for other in (one.__cause__, one.__context__) if other is not None]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    return error


def throw(error: BaseException) -> NoReturn:
    """Raises an exception that was kept as a value. Use it as `throw(place.take())`: passed as an argument, the exception
    has no name in the caller's frame, to which its traceback refers, and none in the objects of that frame."""
    try:
        raise error
    finally:
        del error


log = logging.getLogger("models.blocking")


@final
class StepCancelled(Exception):
    """Raised by `CancelToken.check` in a blocking step whose client has left. Let it pass: the result is not used."""


@final
class CancelToken:
    """Tells code in a thread that its session is over. It may be read from any thread."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()

    def cancel(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Raises StepCancelled once the session is over. Call it between the parts of a long step."""
        if self._event.is_set():
            raise StepCancelled


@final
class Step:
    """The record of a blocking step, for code that watches how long it takes."""

    __slots__ = ("_inside", "_interrupted", "_lock", "began", "limiter", "thread", "token")

    def __init__(self, token: CancelToken, limiter: trio.CapacityLimiter | None = None) -> None:
        self.token, self.limiter = token, limiter
        """The limiter that gets one more token while this step is stuck, so that another step can use its place. None:
        none."""
        self.thread = 0
        """The ident of the thread that it runs in."""
        self.began = float("inf")
        """The start time on the loop's clock; infinite until it has its thread."""
        self._lock = threading.Lock()
        self._inside = self._interrupted = False

    def call(self, fn: Callable[[], T]) -> T:
        """Calls `fn` in this thread. Meanwhile `interrupt` can end it."""
        self._inside = True
        try:
            return fn()
        finally:
            try:
                self._leave()
            except StepCancelled:  # the interrupt came here; it comes only once
                self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._inside = False
        if self._interrupted:
            # An interrupt that has not come yet comes with the next call of a function, and so not in the thread's next
            # step. It is not taken back: CPython (3.11, 3.12) would then look for it at each call in all threads, and never
            # find it.
            _nothing()

    def interrupt(self) -> None:
        """Raises StepCancelled once in the Python code that its thread runs. Code in a C call goes on until that call
        returns. A step that is over, or has not begun, is not affected."""
        with self._lock:
            if self._inside and not self._interrupted:
                self._interrupted = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), ctypes.py_object(StepCancelled))


def stack_of(steps: Iterable[Step]) -> str:
    """The innermost lines of the current stacks of these steps' threads; nothing for a step that is over."""
    frames = sys._current_frames()
    stacks = [traceback.extract_stack(frames[step.thread]) for step in steps if step.thread in frames]
    return "\n\n".join("\n".join(folded(stack)) for stack in stacks)[-_STACK:]


def _nothing() -> None:
    """Does nothing."""


class StepHolder:
    """The resource that a running step occupies even after its session has ended: the worker's slot. This one has no
    owner."""

    __slots__ = ()

    @property
    def limiter(self) -> trio.CapacityLimiter | None:
        """The limiter of the model's threads. None: Trio's own."""
        return None

    def hold(self, *, stopping: bool = True) -> None:
        """Tells that some work goes on after the session's end; with `stopping` False, for the sake of other sessions."""

    def release(self) -> None:
        """Tells that the work is over."""

    def begin(self, step: Step) -> None:
        """Tells that a step occupies the slot."""
        self.hold()

    def end(self, step: Step) -> None:
        """Tells that the step's thread has returned, or that it got none."""
        self.release()

    def waited(self, ns: int) -> None:
        """Tells that the session spent `ns` nanoseconds in the model's own queue."""

    def ran_in(self, instance: int) -> None:
        """Tells that the call runs in this process of its model, by number."""

    def background(self, stuck: Callable[[str], None], /) -> StepHolder:
        """The holder for steps of the model that belong to no session. `stuck` is called with a text when one of them is
        stuck."""
        return StepHolder()

    def reserve(self, n: int) -> Callable[[], None]:
        """Reserves n bytes for objects that a call makes of its input, and returns the function that releases them once. If
        there is no room, it raises an error for the session."""
        return _nothing

    def interrupt(self, text: str) -> None:
        """Tells that the step is stuck: its sessions end, with this text."""

    def replace(self) -> None:
        """Tells that the stuck step is not waited for: another may use its place until it is over."""

    def stuck_there(self, *, step: bool, stack: str, replaced: bool) -> None:
        """Tells that the step is stuck in another process, which has found out: a `step` ran for too long, or the session
        goes on after its end. If it is `replaced`, another may use its place."""


class WatchedThreads(Protocol):
    """The threads of one model, and the code that watches them."""

    @property
    def limiter(self) -> trio.CapacityLimiter: ...
    def begin(self, step: Step, holder: StepHolder) -> None: ...
    def end(self, step: Step) -> None: ...
    def over(self, holder: StepHolder) -> object:
        """Tells that nothing more occupies this slot."""


class Steps(WatchedThreads, Protocol):
    """Watched threads where another may use the place of a step that is stuck."""

    def over(self, holder: StepHolder) -> bool:
        """Tells that nothing more occupies this slot. True if its place was replaced meanwhile."""

    def stuck_elsewhere(self, holder: StepHolder, *, step: bool, stack: str, replaced: bool) -> None:
        """Tells that the step of this holder is stuck in another process: `StepHolder.stuck_there`."""


@final
class BackgroundSteps(StepHolder):
    """Holds nothing for steps that are no session's own, but has them watched."""

    __slots__ = ("_holds", "_stuck", "_watch")

    def __init__(self, watch: WatchedThreads, stuck: Callable[[str], None]) -> None:
        """`stuck` is called, with a text, when one of them is stuck."""
        self._watch, self._stuck, self._holds = watch, stuck, 0

    @property
    def limiter(self) -> trio.CapacityLimiter:
        return self._watch.limiter

    def begin(self, step: Step) -> None:
        self._holds += 1
        self._watch.begin(step, self)

    def end(self, step: Step) -> None:
        self._watch.end(step)
        self._holds -= 1
        if not self._holds:
            self._watch.over(self)

    def interrupt(self, text: str) -> None:
        self._stuck(text)


_token: contextvars.ContextVar[CancelToken | None] = contextvars.ContextVar("models_cancel_token", default=None)
_holder: contextvars.ContextVar[StepHolder | None] = contextvars.ContextVar("models_step_holder", default=None)
_NOBODY = StepHolder()
_EXPECTED = (ModelError, StepCancelled, trio.Cancelled, trio.EndOfChannel)
"""Exceptions of a step that are not bugs."""


def cancel_token() -> CancelToken:
    """The token of the blocking step that runs in this thread. Outside of one, a token that is never cancelled."""
    return _token.get() or CancelToken()


set_step_holder = _holder.set
"""Sets the holder for the steps of the current task. The result is for `reset_step_holder`. For code that runs models."""
reset_step_holder = _holder.reset


def step_holder() -> StepHolder:
    """The holder for the steps of the current task."""
    return _holder.get() or _NOBODY


async def run_step(
    fn: Callable[[], T],
    *,
    limiter: trio.CapacityLimiter | None = None,
    replaced: bool = False,
    token: CancelToken | None = None,
    ended: Callable[[], None] = _nothing,
) -> T:
    """Runs one blocking step in a thread, one of the model's unless a limiter is given, and returns its result.

    A stuck step is replaced: another may use its place among the model's threads until it returns. Its place in a given
    limiter stays taken, unless `replaced` is True. Such a limiter may ensure that two steps never use a library at once.

    On cancel the caller gets trio.Cancelled at once, or the loop's own exception for it, and the token is cancelled (the
    step's own, unless one is given). Python cannot stop the thread, so it runs to the end of its step, and until then the
    session's slot stays occupied. The result or exception of the abandoned step is dropped.

    `ended` is called on the loop when the thread has returned, or when it is certain that none will start.

    An exception of the step comes without the frames of its thread, which would keep objects alive. A note has the traceback
    as text.
    """
    token = token or CancelToken()
    holder = step_holder()
    record = Step(token, limiter if replaced else None) if limiter is not None else Step(token, holder.limiter)
    loop = running_loop()
    holder.begin(record)
    # A cancel may come while the step waits for its thread. Then either the thread or the loop must release the holder, and
    # the lock decides which of them does, once.
    lock, begun, abandoned = threading.Lock(), False, False

    def step() -> T:
        nonlocal begun
        with lock:
            if abandoned:
                raise StepCancelled
            begun = True
        _token.set(token)
        record.thread, record.began = threading.get_ident(), loop.current_time()
        try:
            return record.call(fn)
        except KeyboardInterrupt as e:  # in a thread it is not Ctrl-C, but the caller's task would treat it as such
            raise ModelExit(e) from e
        finally:
            loop.call_soon(over)  # if the whole run is over, there is no slot to free

    def over() -> None:
        holder.end(record)
        ended()

    try:
        return await in_thread(step, abandon_on_cancel=True, limiter=limiter or holder.limiter, expected=_EXPECTED)
    except cancelled():
        token.cancel()
        raise
    finally:
        with lock:
            abandoned = not begun
        if abandoned:
            over()


_END = object()


async def iterate_steps(
    generator: Generator[T, None, None],
    *,
    limiter: trio.CapacityLimiter | None = None,
    replaced: bool = False,
    ended: Callable[[], None] = _nothing,
) -> AsyncGenerator[T, None]:
    """Yields the items of a synchronous generator. Each step of it is a `run_step`, and all share one token. Use it with
    contextlib.aclosing.

    The generator is closed in a thread, never while a step runs in it, and nothing waits for that. The session's slot stays
    occupied until it is closed; then `ended` is called, on the loop.
    """
    token, one_at_a_time = CancelToken(), threading.Lock()

    def step() -> T | object:
        with one_at_a_time:
            return next(generator, _END)

    def close() -> None:
        with one_at_a_time:  # after the abandoned step
            generator.close()

    try:
        while (item := await run_step(step, limiter=limiter, replaced=replaced, token=token)) is not _END:
            yield item  # type: ignore[misc]  # not _END, so a T
    finally:
        if inspect.getgeneratorstate(generator) != inspect.GEN_CLOSED:  # neither exhausted nor ended by an exception
            token.cancel()
            _run_last_step(close, token, ended)
        else:
            ended()


def _run_last_step(fn: Callable[[], None], token: CancelToken, ended: Callable[[], None]) -> None:
    """Runs a step that nothing waits for: the clean-up of a session that is over. Its exception is logged."""
    holder, record = step_holder(), Step(token)
    loop = running_loop()
    context = contextvars.copy_context()
    context.run(_token.set, token)

    def step() -> None:
        record.thread, record.began = threading.get_ident(), loop.current_time()
        fn()

    def last() -> None:
        raised = caught(step, _EXPECTED)
        if raised is not None and not isinstance(raised.error, _EXPECTED):
            log.warning("a generator raised as it was closed", exc_info=raised.error)

    def over() -> None:
        holder.end(record)
        ended()

    holder.begin(record)
    try:
        start_thread(lambda: context.run(last), lambda _: loop.call_soon(over))
    except BaseException:
        over()
        raise
