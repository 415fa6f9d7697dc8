"""The side of an instance that runs the model: takes messages, calls the model for each session, reports its end."""

from __future__ import annotations

import logging
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, NoReturn, final

import msgspec
import numpy as np
import trio

from gateway.codecs.formatting import Formatting
from gateway.instances.memory import LargerThanMemory
from gateway.instances.messages import (
    ITEMS,
    LARGEST,
    Ask,
    Cancel,
    Credit,
    Describe,
    Ended,
    EndOfInput,
    Failed,
    Forget,
    GivenInput,
    Head,
    Load,
    Loaded,
    Locate,
    Log,
    Message,
    Open,
    Ping,
    Pong,
    PromptTokens,
    ReadInput,
    Returned,
    Write,
    encoded,
)
from gateway.instances.pipe import Bell, Post, SessionLine, give_back_idle
from gateway.instances.steps import SessionSteps, StepWatch
from models.blocking import in_thread, running_loop, set_step_holder
from models.chat import Conversation, apply_template
from models.errors import ContextLengthExceeded, ModelError, contain_interrupts, is_failure, is_out_of_memory, leaves
from models.formatters import TextInput
from models.messages import ResponseFormat
from models.session import Call, Session
from models.spec import Model, ModelSpec, context_of, features_of, warm_up
from models.tracebacks.parked import Parked, parked
from models.tracebacks.text import text_of

_TEXT = 2000  # characters of an error
_RECORDS = 200  # log records per second
_log = logging.getLogger("gateway.worker")


def told(error: BaseException) -> str:
    """Returns the type and the text of an error."""
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be read"
    if _lacks_trio(error, text):
        text = f'{text[:100]}: this code needs Trio: give its model loop = "trio" (models.NAME.process.loop)'
    return f"{type(error).__name__}: {text}"[:_TEXT]


def _lacks_trio(error: BaseException, text: str) -> bool:
    """True if the error comes from a call of Trio's functions on another loop."""
    if trio.lowlevel.in_trio_run() or not isinstance(error, RuntimeError | AttributeError):
        return False
    *_, (last, _) = traceback.walk_tb(error.__traceback__) if error.__traceback__ else [(None, 0)]
    where: str = last.f_globals.get("__name__", "") if last is not None else ""
    return where.startswith("trio.") or text.startswith("Task got bad yield: ")  # asyncio's error for Trio's traps


def ended_by(session: int, error: BaseException) -> Ended:
    """Returns the message for a session whose model has raised. It can be sent, whatever the error contains."""
    ended = _ended_by(session, error)
    try:
        encoded(ended)
    except (TypeError, ValueError, OverflowError) as e:  # a field of a ModelError, such as a number as its text
        return Ended(session, "raised", f"{type(error).__name__}, which cannot be sent: {e}", trace=text_of(error))
    return ended


def _ended_by(session: int, error: BaseException) -> Ended:
    errors = list(leaves(error))
    said = next((one for one in errors if isinstance(one, ModelError)), None)
    if isinstance(said, ContextLengthExceeded):
        tokens = (said.needed, said.limit, said.prompt_tokens)
        return Ended(session, "context", tokens=tokens)
    if said is not None:
        return Ended(session, "error", said.message, said.code, said.status)
    first = errors[0]
    if (larger := next((one for one in errors if isinstance(one, LargerThanMemory)), None)) is not None:
        return Ended(session, "large", str(larger))
    if any(map(is_out_of_memory, errors)):
        return Ended(session, "memory", told(first), trace=text_of(error))
    if all(isinstance(one, trio.EndOfChannel) for one in errors):
        return Ended(session, "input")
    if all(isinstance(one, trio.EndOfChannel | trio.ClosedResourceError) for one in errors):
        return Ended(session, "closed")
    return Ended(session, "raised", told(first), trace=text_of(first if len(errors) == 1 else error))


@final
class _Channel:
    """The channel of a model's session."""

    complete = False

    def __init__(self, pipe: Post, line: SessionLine) -> None:
        self._pipe, self._line = pipe, line
        self.reply: dict[str, str] = {}
        self._headed = False
        self.receive = line.receive
        self.empty_array = np.empty if pipe.memory is None else pipe.memory.empty

    @property
    def exhausted(self) -> bool:
        return self._line.exhausted

    def accept(self) -> None:
        self._head(accepted=True)

    def returned(self) -> None:
        """Sends the head of an answer without a message, after the model has returned."""
        self._head(accepted=False)

    def _head(self, *, accepted: bool) -> None:
        if not self._headed and (self.reply or accepted) and not self._line.over:
            self._pipe.post(Head(self._line.number, dict(self.reply), accepted))
        self._headed = True

    def try_send(self, message: Any) -> bool:
        if not self._headed:
            self._head(accepted=False)
        return self._line.try_send(message)

    async def send(self, message: Any, /) -> None:
        if not self._headed:
            self._head(accepted=False)
        await self._line.send(message)


class _Session(Session[Any, Any]):
    """A session that sends the number of prompt tokens to the gateway as soon as the model sets it."""

    __slots__ = ("_tell",)

    def __init__(self, channel: _Channel, call: Call, deadline: float, tell: Callable[[int | None], None]) -> None:
        super().__init__(channel, call, deadline=deadline)
        self._tell = tell

    @property
    def prompt_tokens(self) -> int | None:
        return self._prompt_tokens

    @prompt_tokens.setter
    def prompt_tokens(self, count: int | None) -> None:
        Session.prompt_tokens.__set__(self, count)  # type: ignore[attr-defined]
        self._tell(self._prompt_tokens)


class _LogHandler(logging.Handler):
    """Sends log records to the gateway, from any thread: at most 200 per second. It counts the others, and sends their
    number while `run` runs."""

    def __init__(self, post: Callable[[bytes], None], drops: Bell) -> None:
        """`post` is called on the loop. `drops` wakes `run`."""
        super().__init__()
        self._post, self._drops, self._loop = post, drops, running_loop()
        self._until, self._left, self._dropped = -math.inf, 0, 0

    async def run(self) -> NoReturn:
        while True:
            await self._drops.wait()
            await self._loop.sleep(1)
            self.tell_dropped()

    def tell_dropped(self) -> None:
        """Sends the number of dropped records, if there are some. Must be called on the loop."""
        assert self.lock is not None
        with self.lock:  # `logging` holds it during `emit`
            dropped, self._dropped = self._dropped, 0
        if dropped:
            said = f"{dropped} records dropped" if dropped > 1 else "1 record dropped"
            self._post(encoded(Log(_log.name, logging.WARNING, said, "")))

    def _may_tell(self) -> bool:
        if self._dropped == 0:
            now = self._loop.current_time()
            if now >= self._until:
                self._until, self._left = now + 1, _RECORDS
            self._left -= 1
            if self._left >= 0:
                return True
            self._loop.call_soon(self._drops.ring)
        self._dropped += 1
        return False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self._may_tell():
                return
            error = record.exc_info[1] if record.exc_info else None
            trace = "" if error is None else text_of(error)
            text = record.getMessage()[: 8 * 1024]
            said = encoded(Log(record.name, record.levelno, text, trace))
            self._loop.call_soon(partial(self._post, said))
        except Exception:
            self.handleError(record)


@final
class ChildLink:
    """The link to one gateway that calls the model of this process: the pipe, and the gateway's sessions."""

    __slots__ = ("formatted", "lines", "pipe")

    def __init__(self, pipe: Post) -> None:
        self.pipe = pipe
        self.lines: dict[int, SessionLine] = {}
        self.formatted: dict[int, Formatting] = {}


class Child(ABC):
    """The model of one process, and its sessions. Subclasses start and cancel the tasks, each on its loop.

    The gateway that started the process has the first link: it decides what is loaded and receives the log, and the process
    ends with it. Once the model is loaded, other gateways may have links, each with its own sessions, credit and memory.
    When a link ends, its sessions are cancelled."""

    def __init__(self, pipe: Post, describe: Callable[[Describe], tuple[ModelSpec | None, Message]]) -> None:
        """`describe` returns the spec and the message that describes it; it must not raise."""
        self._first, self._pipe, self._describe = ChildLink(pipe), pipe, describe
        self.take: Callable[[Message], None] = partial(self._take, self._first)
        """Takes one message of the gateway that started the process."""
        self._spec: ModelSpec
        self._steps: dict[SessionLine, SessionSteps] = {}
        self._model: Model | None = None
        self._loading: Load | None = None
        self._said: Loaded | None = None
        self._stopping = False
        self._watch: StepWatch

    async def run(self) -> None:
        """Loads the model when it is asked to, and serves until the gateway hangs up. Log records go to the gateway."""
        handler = _LogHandler(self._pipe.post_encoded, self._bell())
        logging.getLogger().addHandler(handler)
        try:
            contain_interrupts()
            async with running_loop().beside(handler.run):
                await self._run(handler.tell_dropped)
        finally:
            logging.getLogger().removeHandler(handler)

    async def serve(self) -> None:
        """Does the same as `run` without sending log records: for a process that has the gateway's own log."""
        contain_interrupts()
        await self._run(lambda: None)

    # -- for subclasses to implement ---------------------------------------------------------------------------------

    _bell: type[Bell]

    @abstractmethod
    async def _run(self, last: Callable[[], None]) -> None:
        """Reads and writes messages; calls `_serve` once a load is asked for, then `last`, and writes the last messages."""

    @abstractmethod
    def _wake(self) -> None:
        """Wakes `_run`, because a load or the end was asked for."""

    @abstractmethod
    async def _sessions(self, model: Model, loaded: Loaded) -> None:
        """Sends `loaded`, runs sessions until the end is asked for, and cancels those that are left."""

    @abstractmethod
    def _start_session(self, model: Model, link: ChildLink, opened: Open) -> None:
        """Starts a task that runs `_call` for a session."""

    @abstractmethod
    async def _within(self, line: SessionLine, model: Model, session: Session[Any, Any]) -> bool:
        """Calls the model for a session. True if `_cancel` has ended it."""

    @abstractmethod
    def _cancel(self, line: SessionLine) -> None:
        """Cancels an open session. Idempotent."""

    @abstractmethod
    def _frames_of(self, line: SessionLine) -> Iterable[list[FrameType]]:
        """The stacks of the tasks of an open session, each with the innermost frame first."""

    @abstractmethod
    def _start_answer(self, link: ChildLink, ask: Ask | ReadInput) -> None:
        """Starts a task that runs `_answer`."""

    # -- the model ---------------------------------------------------------------------------------------------------

    def _over(self) -> None:
        """Asks for the end: the gateway has hung up, or the model cannot be imported."""
        self._stopping = True
        self._wake()

    async def _serve(self, load: Load) -> None:
        try:
            self._watch = StepWatch(load, self._pipe.post)
            async with self._spec.load() as model:
                await warm_up(model, self._spec)
                self._said = loaded = self._loaded_by(model)
                try:
                    async with self._watch.watching(), self._giving_back():
                        await self._sessions(model, loaded)
                finally:
                    self._model = None  # sessions opened from now on are lost with the process
            if not self._stopping:
                self._pipe.post(Failed("", "", ended=True))
        except BaseException as e:
            if not is_failure(e):
                raise
            first = next(leaves(e))
            self._pipe.post(Failed(told(first), text_of(e), memory=any(map(is_out_of_memory, leaves(e)))))

    def _giving_back(self) -> AbstractAsyncContextManager[None]:
        memory = self._pipe.memory
        return nullcontext() if memory is None else running_loop().beside(partial(give_back_idle, memory.arena))

    def _loaded_by(self, model: Model) -> Loaded:
        said = getattr(model, "parameters", None)
        parameters = sorted(map(str, said)) if isinstance(said, frozenset | set | tuple | list) else None
        return Loaded(
            parameters,
            self._function("chat_template", model) is not None,
            self._function("count_tokens", model) is not None,
            self._spec.context or context_of(model),
            sorted(features_of(model, self._spec.family)),
            callable(getattr(model, "check_format", None)),
        )

    def _function(self, name: str, model: Any) -> Callable[[Any], Any] | None:
        own: Callable[[Any], Any] | None = getattr(self._spec, name, None)
        return getattr(model, name, None) if own is None else own

    def _take(self, link: ChildLink, message: Message) -> None:
        """Takes one message of a gateway. ValueError if it breaks the protocol."""
        match message:
            case Credit():
                if (line := link.lines.get(message.session)) is not None:
                    line.take_credit(message)
            case Open():
                if self._model is not None:
                    self._start_session(self._model, link, message)
            case EndOfInput():
                if (line := link.lines.get(message.session)) is not None:
                    line.end(over=False)
            case Cancel():
                if (line := link.lines.get(message.session)) is not None:
                    self._end(line)
            case Ping():
                link.pipe.post(Pong(message.number))
            case Ask():
                if self._model is not None:
                    self._start_answer(link, message)
            case ReadInput() | GivenInput():
                if self._model is not None:
                    self._begin_formatting(link, message)
            case Write():
                if (formatting := link.formatted.get(message.request)) is not None:
                    self._format(link, message, formatting)
            case Forget():
                link.formatted.pop(message.request, None)
            case Describe() if link is self._first:
                self._import(message)
            case Load() if link is self._first:
                if not self._stopping:  # not if the import has failed
                    self._loading = message
                    self._wake()
            case Load():
                if self._said is not None:
                    link.pipe.post(self._said)
            case _:  # most messages are items: none has a case of its own below these
                if isinstance(message, ITEMS):
                    if (line := link.lines.get(message.session)) is not None:
                        line.take_item(message)
                elif isinstance(message, Locate):
                    self._locate(link, message)

    def _end(self, line: SessionLine) -> None:
        """Cancels a session that the gateway no longer wants."""
        self._cancel(line)
        self._watch.stop(self._steps[line])
        line.end(over=True)  # a model that goes on gets an error when it sends

    def _locate(self, link: ChildLink, asked: Locate) -> None:
        """Tells where the code of a session waits; not in `_take`, whose frame would be larger for every message."""
        line = link.lines.get(asked.session)
        at, stack = Parked() if line is None else self._place_of(line)
        link.pipe.post(Returned(asked.number, [at, stack], None))

    def _place_of(self, line: SessionLine) -> Parked:
        """The place where the code of a session waits: in a thread, in a task, or in a thread of the model's own work, as
        for a rolling batch."""
        steps = self._watch.frames_of(self._steps[line])
        try:
            return parked([*steps, *self._frames_of(line), *self._watch.frames_of(None)])
        except Exception as e:  # an author's objects may do anything when they are looked at
            _log.warning("the place of a session cannot be found: %s", told(e))
            return Parked()

    def _unlink(self, link: ChildLink) -> None:
        """Ends the sessions and the memory of a link that has ended, other than the first."""
        for line in [*link.lines.values()]:
            self._end(line)
        if link.pipe.memory is not None:
            link.pipe.memory.close()

    def _import(self, message: Describe) -> None:
        spec, said = self._describe(message)
        if spec is None:
            self._over()
        else:
            self._spec = spec
        self._pipe.post(said)

    # -- sessions ----------------------------------------------------------------------------------------------------

    def _opened(self, link: ChildLink, opened: Open, line: SessionLine, now: float) -> float:
        """Registers a new session with its line. Returns the session's deadline on the loop's clock."""
        link.lines[opened.session] = line
        self._steps[line] = SessionSteps(self._watch, opened.session, link.pipe.post)
        return math.inf if opened.seconds < 0 else now + opened.seconds

    async def _call(self, model: Model, link: ChildLink, call: Call, line: SessionLine, deadline: float) -> None:
        number, post = line.number, link.pipe.post
        steps = self._steps[line]
        set_step_holder(steps)
        channel = _Channel(link.pipe, line)
        session = _Session(channel, call, deadline, partial(_tell_prompt_tokens, post, line))
        ended = Ended(number)
        try:
            if await self._within(line, model, session):
                ended = Ended(number, "cancelled")
            else:
                channel.returned()
        except BaseException as e:
            if not is_failure(e):
                ended = Ended(number, "cancelled")  # together with the instance, perhaps in the middle of an answer
                raise
            ended = ended_by(number, e)
        finally:
            del link.lines[number], self._steps[line]
            line.end(over=True)
            steps.end_with(ended)

    async def _answer(self, link: ChildLink, ask: Ask | ReadInput) -> None:
        try:
            value = await (self._read_input(link, ask) if isinstance(ask, ReadInput) else self._ask(ask))
            link.pipe.post(Returned(ask.number, value, None))
        except BaseException as e:
            if not is_failure(e):
                raise
            link.pipe.post(Returned(ask.number, None, ended_by(0, e)))

    async def _ask(self, ask: Ask) -> Any:
        function = self._function(ask.function, self._model)
        assert function is not None
        argument = ask.argument
        if ask.function == "chat_template":
            said = msgspec.convert(argument, Conversation)
            return await in_thread(partial(apply_template, function, said))
        if ask.function == "check_format":
            return await in_thread(partial(function, msgspec.convert(argument, ResponseFormat)))
        return await in_thread(partial(function, argument))

    # -- formatters --------------------------------------------------------------------------------------------------

    def _begin_formatting(self, link: ChildLink, asked: ReadInput | GivenInput) -> None:
        spec = self._spec
        link.formatted[asked.number] = formatting = Formatting(asked.id, spec.input_formatter, spec.output_formatter)
        if isinstance(asked, ReadInput):
            self._start_answer(link, asked)
        else:
            formatting.take(TextInput(asked.text, asked.parameters, stream=asked.stream))

    async def _read_input(self, link: ChildLink, asked: ReadInput) -> Any:
        formatting = link.formatted.get(asked.number)
        if formatting is None:  # the gateway has forgotten the request meanwhile
            return None
        read = partial(formatting.read, asked.content, asked.properties, asked.bounds, asked.model, asked.options)
        return await in_thread(read), formatting.writes

    def _format(self, link: ChildLink, asked: Write, formatting: Formatting) -> None:
        """Calls the output formatter on the loop, as the gateway does for a model in its own process."""
        try:
            data = encoded(Returned(asked.number, formatting.write(asked.tokens), None))
            if len(data) > LARGEST:
                raise ValueError(f"a text of {len(data)} bytes is more than a model in a process can send, {LARGEST}")
            link.pipe.post_encoded(data)
        except BaseException as e:
            if not is_failure(e):
                raise
            link.pipe.post(Returned(asked.number, None, ended_by(0, e)))


def _tell_prompt_tokens(post: Callable[[Message], None], line: SessionLine, count: int | None) -> None:
    if not line.over:
        post(PromptTokens(line.number, None if count is None else int(count)))
