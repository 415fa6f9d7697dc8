"""Blocking steps in threads: one thread call a step, a cooperative cancel token, and a slot held until the step returns.

None of a thread's frames, nor of the objects they held, outlives its call in the exception that the call raises.
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

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

# An exception knows, by its traceback, the frames that it came through. Those of a thread's call know their callers
# (`f_back`) up to the thread's own loop, whose locals hold the outcome, which is that exception. Such a cycle keeps all that
# the call was about, a body of a gigabyte too, until the garbage collector comes by; and so does each `__cause__` and
# `__context__`, whatever `from None` hides. So nothing crosses from a thread but an exception without tracebacks.

_TEXT = 16 * 1024  # characters of a traceback that are kept, the innermost
_STACK = 4000  # and of a stack
_IN_ITS_THREAD = "In its thread:\n"


class Loop(Protocol):
    """What a model's code needs of the event loop that it runs on: Trio's, unless `set_loop` has named another one."""

    @property
    def cancelled(self) -> type[BaseException]:
        """Raised where a task waits that is cancelled."""

    def current_time(self) -> float:
        """Seconds on its clock, from any thread."""

    def call_soon(self, call: Callable[[], object], /) -> None:
        """Has something called on the loop, from any thread. Nothing where the loop is over."""

    async def checkpoint(self) -> None:
        """Lets others run."""

    async def sleep(self, seconds: float, /) -> None:
        """Waits so long."""

    def beside(self, work: Callable[[], Awaitable[NoReturn]], /) -> AbstractAsyncContextManager[None]:
        """Runs this in a task of its own for the length of a block."""

    async def around(self, text: Continuations, call: Awaitable[None], /) -> None:
        """Awaits a model's call, until it has returned, has raised, or its text has stopped it."""

    async def in_thread(self, call: Callable[[], T], limiter: trio.CapacityLimiter | None, abandon: bool, /) -> T:
        """As `trio.to_thread.run_sync`, of which `abandon` is the `abandon_on_cancel`. `call` does not raise."""

    def codec_threads(self) -> trio.CapacityLimiter:
        """Those of `codec_threads`."""

    def more_places(self, limiter: trio.CapacityLimiter, /) -> None:
        """Its `total_tokens` are more now."""


@final
class _Trio:
    """The loop of the run that this is made in."""

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
        """It has seen to that itself."""


_loop: contextvars.ContextVar[Loop | None] = contextvars.ContextVar("models_loop", default=None)


def set_loop(loop: Loop) -> None:
    """Says that this context, and the tasks that it starts, run on a loop that is not Trio's."""
    _loop.set(loop)
    set_cancelled(loop.cancelled)


def running_loop() -> Loop:
    """The loop that this is called on."""
    return _loop.get() or _Trio()


def check_trio(what: str) -> None:
    """RuntimeError for what needs Trio where the loop is another one."""
    if _loop.get() is not None:
        raise RuntimeError(f'{what} needs Trio: give its model loop = "trio" (models.NAME.process.loop)')


def start_thread(call: Callable[[], T], done: Callable[[T], object]) -> None:
    """Calls `call` in a thread, and `done` there with what it returns. Neither raises. For a `Loop`."""
    trio.lowlevel.start_thread_soon(call, lambda outcome: done(outcome.unwrap()))


async def in_thread(
    call: Callable[[], T],
    *,
    limiter: trio.CapacityLimiter | None = None,
    abandon_on_cancel: bool = False,
    expected: tuple[type[BaseException], ...] = (),
) -> T:
    """Returns what `call` returns, or raises what it raises, which then has no traceback but the caller's own. A note
    (PEP 678) has the traceback of the thread as text, so that a log shows where it was raised; not of an `expected` error.

    `limiter` and `abandon_on_cancel` are `trio.to_thread.run_sync`'s. An exception out of a call that was abandoned is
    dropped.
    """
    found = await running_loop().in_thread(partial(caught, call, expected), limiter, abandon_on_cancel)
    if type(found) is not Raised:
        return found
    error = found.error
    del found
    try:
        raise error
    finally:
        del error  # it knows this frame: a cycle would keep the caller's memory


CODEC_THREADS = 8
"""How many of them there are."""
_codecs: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("codec threads")


def codec_threads() -> trio.CapacityLimiter:
    """The few threads for pure and bounded steps that the loop would feel. None of Trio's usual forty: models may hold all
    of those."""
    return running_loop().codec_threads()


_turn: trio.lowlevel.RunVar[trio.Lock] = trio.lowlevel.RunVar("long JSON texts")


def json_turn() -> trio.Lock:
    """Whose turn it is to read a long JSON text: one is read after the other, so that what they take is there once, and
    short ones do not wait for them."""
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
    """The exception without its traceback, nor those of its causes, contexts and, of a group, members: it keeps no frame.
    One that is not `expected` has the text of its traceback as a note."""
    if not isinstance(error, expected):
        with suppress(Exception):
            _note(error)
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
    """Raises an exception that was kept as a value. For `throw(place.take())`: as an argument it has no name in the caller's
    frame, which its traceback knows, nor any more in whatever that frame knows."""
    try:
        raise error
    finally:
        del error


def _note(error: BaseException) -> None:
    # one that is raised again and again, as a constant may be, has one note
    notes = [note for note in getattr(error, "__notes__", ()) if not str(note).startswith(_IN_ITS_THREAD)]
    error.__notes__ = notes
    text = "".join(traceback.format_exception(error))[-_TEXT:]
    error.__notes__ = [*notes, f"{_IN_ITS_THREAD}{text}"]


log = logging.getLogger("models.blocking")


@final
class StepCancelled(Exception):
    """Raised by `CancelToken.check` in a blocking step whose client is gone. Let it pass: nobody reads the result."""


@final
class CancelToken:
    """Tells code in a thread that its session is over. Safe to read from any thread."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()

    def cancel(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Raises StepCancelled once the session is over; call it between the parts of a long step."""
        if self._event.is_set():
            raise StepCancelled


@final
class Step:
    """A blocking step, for whoever watches how long it takes."""

    __slots__ = ("_inside", "_interrupted", "_lock", "began", "limiter", "thread", "token")

    def __init__(self, token: CancelToken, limiter: trio.CapacityLimiter | None = None) -> None:
        self.token, self.limiter = token, limiter
        """What has one more place while this step is stuck, so that its own is somebody else's; None: nothing."""
        self.thread = 0
        """The ident of the thread that it runs in."""
        self.began = float("inf")
        """On the loop's clock; infinite until it has its thread."""
        self._lock = threading.Lock()
        self._inside = self._interrupted = False

    def call(self, fn: Callable[[], T]) -> T:
        """Calls it in this thread; meanwhile `interrupt` ends it."""
        self._inside = True
        try:
            return fn()
        finally:
            try:
                self._leave()
            except StepCancelled:  # it has come here, and comes once
                self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._inside = False
        if self._interrupted:
            # One that has not come yet comes with the next call of a function, and not in the thread's next step. It is not
            # taken back: CPython (3.11, 3.12) would look for it in all threads then, at each call, and never find it.
            _nothing()

    def interrupt(self) -> None:
        """Raises StepCancelled in the Python code that its thread is in, once. One that is in a call of C goes on there
        until that returns; one that is over, or has not begun, notices nothing."""
        with self._lock:
            if self._inside and not self._interrupted:
                self._interrupted = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), ctypes.py_object(StepCancelled))


def stack_of(steps: Iterable[Step]) -> str:
    """Where the threads of these are now, the innermost lines of it; of one that is over, nothing."""
    frames = sys._current_frames()
    stacks = ["".join(traceback.format_stack(frames[step.thread])) for step in steps if step.thread in frames]
    return "\n".join(stacks)[-_STACK:]


def _nothing() -> None:
    """Does nothing."""


class StepHolder:
    """What a running step keeps occupied after its session has ended: the worker's slot. This one is nobody's."""

    __slots__ = ()

    @property
    def limiter(self) -> trio.CapacityLimiter | None:
        """The threads of the model; None: Trio's own."""
        return None

    def hold(self, *, stopping: bool = True) -> None:
        """Something of the session goes on after it; not `stopping`: for the sake of others."""

    def release(self) -> None:
        """That is over."""

    def begin(self, step: Step) -> None:
        """A step holds it."""
        self.hold()

    def end(self, step: Step) -> None:
        """Its thread has returned, or it got none."""
        self.release()

    def waited(self, ns: int) -> None:
        """So many nanoseconds of the session were spent in a queue of the model's own."""

    def ran_in(self, instance: int) -> None:
        """What it stands for is called in that process of its model, by number."""

    def background(self, stuck: Callable[[str], None], /) -> StepHolder:
        """For steps of the model that are no session's own: `stuck` is called, with a text, when one of them is stuck."""
        return StepHolder()

    def reserve(self, n: int) -> Callable[[], None]:
        """Has n bytes counted that a call makes of what it was given, and returns what gives them back, once. An error that
        is the session's where there is no room for them."""
        return _nothing

    def interrupt(self, text: str) -> None:
        """What holds it is stuck: its sessions end, with this text."""

    def replace(self) -> None:
        """What holds it is stuck and not waited for: its place is somebody else's until it is over."""

    def stuck_there(self, *, step: bool, stack: str, replaced: bool) -> None:
        """What holds it in another process is stuck, which is known there: a `step` ran for too long, or the session goes on
        after its end. Its place is somebody else's if it is `replaced`."""


class Steps(Protocol):
    """The threads of one model, and who watches them."""

    @property
    def limiter(self) -> trio.CapacityLimiter: ...
    def begin(self, step: Step, holder: StepHolder) -> None: ...
    def end(self, step: Step) -> None: ...
    def over(self, holder: StepHolder) -> bool:
        """Nothing is left of what this one held. Whether its place was replaced meanwhile."""

    def stuck_elsewhere(self, holder: StepHolder, *, step: bool, stack: str, replaced: bool) -> None:
        """What holds this one in another process is stuck: `StepHolder.stuck_there`."""


_token: contextvars.ContextVar[CancelToken | None] = contextvars.ContextVar("models_cancel_token", default=None)
_holder: contextvars.ContextVar[StepHolder | None] = contextvars.ContextVar("models_step_holder", default=None)
_NOBODY = StepHolder()
_EXPECTED = (ModelError, StepCancelled, trio.Cancelled, trio.EndOfChannel)
"""Exceptions of a step that are nobody's bug."""


def cancel_token() -> CancelToken:
    """The token of the blocking step that is running in this thread; one that is never cancelled elsewhere."""
    return _token.get() or CancelToken()


set_step_holder = _holder.set
"""Names what the steps of the current task keep occupied; what it returns is for `reset_step_holder`. For those who run
models."""
reset_step_holder = _holder.reset


def step_holder() -> StepHolder:
    """What the steps of the current task keep occupied."""
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

    A step that is stuck is replaced: its place among the model's threads is somebody else's until it returns. Its place in a
    limiter that is given stays taken, as where that keeps two from being in one library at once, unless `replaced` is true.

    On cancel the caller goes on at once with trio.Cancelled, or what the loop has for it, and the token (the step's own,
    unless one is given) is cancelled; the thread ends at the end of its step (Python cannot stop it), and until then the
    session's slot stays occupied. What the abandoned step returns or raises is dropped.

    `ended` is called on the loop when the thread has returned, or when it is certain that none begins.

    An exception of the step comes out without the frames of its thread, which would keep what they held. Its note has the
    place of the raise, as text.
    """
    token = token or CancelToken()
    holder = step_holder()
    record = Step(token, limiter if replaced else None) if limiter is not None else Step(token, holder.limiter)
    loop = running_loop()
    holder.begin(record)
    # A cancel may come while the step waits for its thread: then either the thread or the loop owns the hold, and the
    # lock decides which, once.
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
        except KeyboardInterrupt as e:  # in a thread it is no Ctrl-C, and in the caller's task it would be taken for one
            raise ModelExit(e) from e
        finally:
            loop.call_soon(over)  # where the whole run is over no slot is left to free

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
    """What a synchronous generator yields, each step of it a `run_step` and all with one token. For contextlib.aclosing.

    The generator is closed in a thread, never while a step runs in it, and nobody waits for that; the session's slot
    stays occupied until it is closed, and `ended` is called then, on the loop.
    """
    token, one_at_a_time = CancelToken(), threading.Lock()

    def step() -> T | object:
        with one_at_a_time:
            return next(generator, _END)

    def close() -> None:
        with one_at_a_time:  # after the step that was abandoned
            generator.close()

    try:
        while (item := await run_step(step, limiter=limiter, replaced=replaced, token=token)) is not _END:
            yield item  # type: ignore[misc]  # not _END, so a T
    finally:
        if inspect.getgeneratorstate(generator) != inspect.GEN_CLOSED:  # not exhausted, nor dead of an exception
            token.cancel()
            _run_last_step(close, token, ended)
        else:
            ended()


def _run_last_step(fn: Callable[[], None], token: CancelToken, ended: Callable[[], None]) -> None:
    """Runs a step that nobody waits for: the clean-up of a session that is over. An exception of it is logged."""
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
