"""An instance's own side: it takes messages, calls the model for each session, and says what became of it."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, final

import msgspec
import trio

from gateway.doorbell import Doorbell
from gateway.instances.messages import (
    ITEMS,
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
    Message,
    Open,
    Ping,
    Pong,
    PromptTokens,
    Returned,
    encoded,
)
from gateway.instances.pipe import Pipe, SessionLine
from gateway.instances.steps import SessionSteps, StepWatch
from models.blocking import in_thread, set_step_holder
from models.chat import ChatMessage
from models.errors import ContextLengthExceeded, ModelError, contain_interrupts, is_failure, is_out_of_memory, leaves
from models.session import Call, Session
from models.spec import Model, ModelSpec, warm_up

_TRACE = 16 * 1024  # characters of a traceback, the innermost
_TEXT = 2000
_RECORDS = 200  # of the log, a second
_log = logging.getLogger("gateway.worker")


def told(error: BaseException) -> str:
    """The type and text of an error."""
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be had"
    return f"{type(error).__name__}: {text}"[:_TEXT]


def trace_of(error: BaseException) -> str:
    """Its traceback, cut."""
    return "".join(traceback.format_exception(error))[-_TRACE:]


def ended_by(session: int, error: BaseException) -> Ended:
    """The end of a session whose model has raised, which can be sent."""
    ended = _ended_by(session, error)
    try:
        encoded(ended)
    except (TypeError, ValueError, OverflowError) as e:  # of what a ModelError says: no number is a text, say
        return Ended(session, "raised", f"{type(error).__name__}, which cannot be told: {e}", trace=trace_of(error))
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
    if any(map(is_out_of_memory, errors)):
        return Ended(session, "memory", told(first), trace=trace_of(error))
    if all(isinstance(one, trio.EndOfChannel) for one in errors):
        return Ended(session, "input")
    if all(isinstance(one, trio.EndOfChannel | trio.ClosedResourceError) for one in errors):
        return Ended(session, "closed")
    return Ended(session, "raised", told(first), trace=trace_of(first if len(errors) == 1 else error))


@final
class _Channel:
    """The channel that a session of the model stands on."""

    complete = False

    def __init__(self, pipe: Pipe, line: SessionLine) -> None:
        self._pipe, self._line = pipe, line
        self.reply: dict[str, str] = {}
        self._headed = False
        self.receive = line.receive

    @property
    def exhausted(self) -> bool:
        return self._line.exhausted

    def accept(self) -> None:
        self._head(accepted=True)

    def returned(self) -> None:
        """The model has: also an answer without a message has its head."""
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
    """A session whose number of prompt tokens goes to the gateway as soon as the model says it."""

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
    """Hands records on to the gateway, from any thread: 200 a second. The others are counted, and their number is told in
    their place while `run` runs."""

    def __init__(self, post: Callable[[bytes], None]) -> None:
        """`post` is called on the loop."""
        super().__init__()
        self._post, self._token = post, trio.lowlevel.current_trio_token()
        self._clock = trio.lowlevel.current_clock()
        self._until, self._left, self._dropped = -math.inf, 0, 0
        self._drops = Doorbell()

    async def run(self) -> NoReturn:
        while True:
            await self._drops.wait()
            await trio.sleep(1)
            self.tell_dropped()

    def tell_dropped(self) -> None:
        """To be called on the loop."""
        assert self.lock is not None
        with self.lock:  # as for each record
            dropped, self._dropped = self._dropped, 0
        if dropped:
            said = f"{dropped} records dropped" if dropped > 1 else "1 record dropped"
            self._post(encoded(Log(_log.name, logging.WARNING, said, "")))

    def _may_tell(self) -> bool:
        if self._dropped == 0:
            now = self._clock.current_time()
            if now >= self._until:
                self._until, self._left = now + 1, _RECORDS
            self._left -= 1
            if self._left >= 0:
                return True
            self._token.run_sync_soon(self._drops.ring)
        self._dropped += 1
        return False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self._may_tell():
                return
            trace = "" if record.exc_info is None else logging.Formatter().formatException(record.exc_info)[-_TRACE:]
            text = record.getMessage()[: 8 * 1024]
            said = encoded(Log(record.name, record.levelno, text, trace))
            self._token.run_sync_soon(self._post, said)
        except trio.RunFinishedError:
            pass  # there is nobody to tell any more
        except Exception:
            self.handleError(record)


@final
class Child:
    """The model of one process, and its sessions."""

    def __init__(self, pipe: Pipe, describe: Callable[[Describe], tuple[ModelSpec | None, Message]]) -> None:
        """`describe` makes the spec, and what is said of it; it does not err."""
        self._pipe, self._describe = pipe, describe
        self._spec: ModelSpec
        self._lines: dict[int, SessionLine] = {}
        self._scopes: dict[int, trio.CancelScope] = {}
        self._steps: dict[int, SessionSteps] = {}
        self._model: Model | None = None
        self._loading: Load | None = None
        self._stop = trio.Event()
        self._asked = trio.Event()
        self._life = trio.CancelScope()
        self._loaded = self._hung_up = False
        self._reading, self._telling = trio.CancelScope(), trio.CancelScope()
        self._nursery: trio.Nursery
        self._watch: StepWatch

    async def run(self) -> None:
        """Loads the model when it is asked to, and serves until the gateway hangs up."""
        contain_interrupts()
        handler = _LogHandler(self._pipe.post_encoded)
        logging.getLogger().addHandler(handler)
        try:
            await self._run(handler)
        finally:
            logging.getLogger().removeHandler(handler)

    async def _run(self, handler: _LogHandler) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell, handler)
            nursery.start_soon(self._write)
            nursery.start_soon(self._read)
            await self._asked.wait()
            if self._loading is not None:
                with self._life:
                    await self._serve(self._loading)
            self._telling.cancel()
            handler.tell_dropped()
            self._reading.cancel()
            self._pipe.finish()
            if self._hung_up:  # nobody reads the last words
                nursery.cancel_scope.cancel()

    async def _tell(self, handler: _LogHandler) -> None:
        with self._telling:
            await handler.run()

    async def _write(self) -> None:
        with suppress(trio.BrokenResourceError):
            await self._pipe.write()
        self._over()

    async def _read(self) -> None:
        with self._reading, suppress(trio.BrokenResourceError):
            await self._pipe.read(self.take)
        self._hung_up = not self._reading.cancel_called
        self._over()

    def _over(self) -> None:
        self._stop.set()
        self._asked.set()
        if not self._loaded:  # nobody waits for it any more
            self._life.cancel()

    async def _serve(self, load: Load) -> None:
        try:
            self._watch = StepWatch(load, self._pipe.post)
            async with self._spec.load() as model:
                await warm_up(model, self._spec)
                loaded = self._loaded_by(model)
                self._loaded = True
                try:
                    async with self._watch.watching(), trio.open_nursery() as nursery:
                        self._nursery, self._model = nursery, model
                        self._pipe.post(loaded)
                        await self._stop.wait()
                        nursery.cancel_scope.cancel()
                finally:
                    self._model = None  # what is opened now is lost with the process
            if not self._stop.is_set():
                self._pipe.post(Failed("", "", ended=True))
        except BaseException as e:
            if not is_failure(e):
                raise
            first = next(leaves(e))
            self._pipe.post(Failed(told(first), trace_of(e), memory=any(map(is_out_of_memory, leaves(e)))))

    def _loaded_by(self, model: Model) -> Loaded:
        said = getattr(model, "parameters", None)
        parameters = sorted(map(str, said)) if isinstance(said, frozenset | set | tuple | list) else None
        return Loaded(
            parameters, self._function("chat_template", model) is not None, self._function("count_tokens", model) is not None
        )

    def _function(self, name: str, model: Any) -> Callable[[Any], Any] | None:
        own: Callable[[Any], Any] | None = getattr(self._spec, name)
        return getattr(model, name, None) if own is None else own

    def take(self, message: Message) -> None:
        """One message of the gateway's, which does not err."""
        match message:
            case Credit():
                if (line := self._lines.get(message.session)) is not None:
                    line.take_credit(message)
            case Open():
                if self._model is not None:
                    self._open(message, self._model)
            case EndOfInput():
                if (line := self._lines.get(message.session)) is not None:
                    line.end(over=False)
            case Cancel():
                if (scope := self._scopes.get(message.session)) is not None:
                    scope.cancel()
                    self._watch.stop(self._steps[message.session])
                    self._lines[message.session].end(over=True)  # a model that goes on is told when it sends
            case Ping():
                self._pipe.post(Pong(message.number))
            case Ask():
                if self._model is not None:
                    self._nursery.start_soon(self._answer, message)
            case Describe():
                self._import(message)
            case Load():
                if not self._stop.is_set():  # it could be imported
                    self._loading = message
                    self._asked.set()
            case _:
                if isinstance(message, ITEMS) and (line := self._lines.get(message.session)) is not None:
                    line.take_item(message)

    def _import(self, message: Describe) -> None:
        spec, said = self._describe(message)
        if spec is None:
            self._over()
        else:
            self._spec = spec
        self._pipe.post(said)

    def _open(self, opened: Open, model: Model) -> None:
        number = opened.session
        self._lines[number] = line = SessionLine(self._pipe, number)
        self._scopes[number] = trio.CancelScope()
        self._steps[number] = SessionSteps(self._watch, number)
        deadline = math.inf if opened.seconds < 0 else trio.current_time() + opened.seconds
        self._nursery.start_soon(self._call, model, opened.call, line, deadline)

    async def _call(self, model: Model, call: Call, line: SessionLine, deadline: float) -> None:
        number = line.number
        steps = self._steps[number]
        set_step_holder(steps)
        channel = _Channel(self._pipe, line)
        session = _Session(channel, call, deadline, partial(self._tell_prompt_tokens, line))
        ended = Ended(number)
        try:
            with self._scopes[number] as scope:
                await model(session)
                channel.returned()
            if scope.cancelled_caught:
                ended = Ended(number, "cancelled")
        except BaseException as e:
            if not is_failure(e):
                ended = Ended(number, "cancelled")  # with its instance, perhaps amid its answer
                raise
            ended = ended_by(number, e)
        finally:
            del self._lines[number], self._scopes[number], self._steps[number]
            line.end(over=True)
            steps.end_with(ended)

    def _tell_prompt_tokens(self, line: SessionLine, count: int | None) -> None:
        if not line.over:
            self._pipe.post(PromptTokens(line.number, None if count is None else int(count)))

    async def _answer(self, ask: Ask) -> None:
        try:
            function = self._function(ask.function, self._model)
            assert function is not None
            argument = ask.argument
            if ask.function == "chat_template":
                argument = msgspec.convert(argument, list[ChatMessage])
            value = await in_thread(partial(function, argument))
            answer = Returned(ask.number, value, None)
            self._pipe.post(answer)
        except BaseException as e:
            if not is_failure(e):
                raise
            self._pipe.post(Returned(ask.number, None, ended_by(0, e)))
