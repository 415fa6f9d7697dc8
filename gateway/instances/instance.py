"""The gateway's side of one instance of a model: a process that loads the model, is called, and may end at any moment."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, final

import trio

from gateway.doorbell import Doorbell
from gateway.errors import TooLarge, WorkerLost
from gateway.instances.elsewhere import Elsewhere
from gateway.instances.memory import LargerThanMemory
from gateway.instances.messages import (
    ITEMS,
    Ask,
    Cancel,
    Credit,
    Described,
    Ended,
    EndOfInput,
    Failed,
    Forget,
    Frames,
    GivenInput,
    Head,
    Hello,
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
    Stuck,
    Write,
    beyond_64_bits,
)
from gateway.instances.pipe import BrokenPipe, Pipe, SessionLine, give_back_idle
from gateway.instances.spawn import CrashOutput, Exit, innermost_line
from gateway.log_limits import LogLimits
from models.blocking import StepHolder, step_holder, throw
from models.errors import ContextLengthExceeded, ModelError
from models.session import Session
from models.tracebacks.frames import ToldElsewhere
from models.tracebacks.parked import Parked

log = logging.getLogger("gateway.worker")

_GOODBYE = 3.5  # seconds that a model has to leave its `load()`; its worker allows five for the whole end
_LAST_WORDS = 1.0  # seconds that a process has to end after it has hung up
_ANSWERS = 0.25  # seconds in which a running loop answers a ping
_STACK = 4000  # characters of a stack that are logged, the innermost


class InstanceEnded(Exception):
    """The process of an instance has ended by itself, or was killed."""


class RaisedThere(Exception):
    """An exception that the model's code raised in its process: its type and text. A note has its traceback."""

    @property
    def kind_there(self) -> str:
        """The name of the exception's type."""
        return str(self).partition(":")[0]


@final
class _Call:
    """One session that is open in the instance."""

    __slots__ = ("ended", "headed", "holder", "id", "kept", "line", "lingers", "lost", "replaced", "scope", "stuck")

    def __init__(self, line: SessionLine, id: str) -> None:
        self.line, self.id = line, id
        self.ended: Ended | None = None
        self.lingers = False
        """True while the session has ended, but threads of it still run in the instance."""
        self.headed = self.lost = self.stuck = self.replaced = False
        self.scope = trio.CancelScope()
        """Surrounds the tasks that pass the session's messages on."""
        self.holder = step_holder()
        self.kept = False
        """True while the session holds its holder's place though its caller is gone."""

    def keep(self) -> None:
        self.kept = True
        self.holder.hold()

    @property
    def left(self) -> bool:
        """True if something of the session is left in the instance."""
        return self.ended is None or self.lingers

    def over(self) -> None:
        self.line.end(over=True)
        if self.kept:
            self.kept = False
            self.holder.release()


@final
class _Questions:
    """The questions that an instance has not answered yet."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Doorbell, list[Returned]]] = {}
        self._lost = False

    async def ask(self, message: Ask | ReadInput | Write | Locate, post: Callable[[Message], None]) -> Returned | None:
        """Asks a question and returns the answer; None if the instance ends before."""
        bell, found = self._waiting[message.number] = Doorbell(), list[Returned]()
        try:
            if not self._lost:
                post(message)
            while not found and not self._lost:
                await bell.wait()
        finally:
            del self._waiting[message.number]
        return found[0] if found else None

    def take(self, returned: Returned) -> None:
        """Takes an answer; it is ignored if its caller no longer waits."""
        if returned.number in self._waiting:
            bell, found = self._waiting[returned.number]
            found.append(returned)
            bell.ring()

    def lose(self) -> None:
        """Ends all questions without an answer: the instance is lost."""
        self._lost = True
        for bell, _ in self._waiting.values():
            bell.ring()


@final
class _Pings:
    """Pings, which show whether the loop of an instance runs."""

    def __init__(self) -> None:
        self._asked = self._answered = 0
        self._heard = trio.lowlevel.ParkingLot()

    async def are_answered(self, pipe: Pipe, seconds: float) -> bool:
        """True if a ping is answered within `seconds`. The time begins again whenever something else has arrived: the answer
        may be behind that."""
        self._asked += 1
        number, reads = self._asked, -1
        pipe.post(Ping(number))
        while reads < pipe.reads:
            reads = pipe.reads
            with trio.move_on_after(seconds):
                while self._answered < number:
                    await self._heard.park()
                return True
        return False

    def answered(self, number: int) -> None:
        """Takes the answer to a ping."""
        self._answered = number
        self.wake()

    def wake(self) -> None:
        """Wakes the tasks in `are_answered` to check again."""
        self._heard.unpark_all()


@final
class Instance:
    """A process that runs the model, from its start to its end."""

    def __init__(
        self,
        process: Elsewhere,
        load: Load,
        *,
        hang_timeout: float,
        frames: Frames | None = None,
        ask_to_kill: Callable[[str], None] | None = None,
    ) -> None:
        """`load` is the message that asks it to load its model. `hang_timeout`: seconds that its loop may be silent; 0: no
        limit. `frames` has earlier messages, if its stream was read before. `ask_to_kill` asks the owner of a process to
        kill it, with the reason; default None: this gateway owns the process."""
        self.process, self._load, self._frames, self._ask_to_kill = process, load, frames, ask_to_kill
        self.name, self.number = process.plan.name, process.plan.number
        self._hang_timeout, self._stop_within = hang_timeout, load.stop_within
        self.loaded: Loaded | None = None
        """The properties that the model has sent; None before it is loaded."""
        self.ready = False
        """True while it takes sessions. Its owner sets this once it is loaded."""
        self.worn = ""
        """The reason why it is being replaced, such as too many stuck sessions; empty if it is not."""
        self.linked = set[object]()
        """Identifiers of the other gateways that have links to its process."""
        self._left = Doorbell()  # rings when a session or a request has left
        self._log_limits = LogLimits(model=self.name)
        self._calls: dict[int, _Call] = {}
        self._on_ready: Callable[[], None]
        self._on_worn: Callable[[], None]
        self._next = 1
        self._questions = _Questions()
        self._formatted = set[int]()  # requests that use its formatters
        self._pings = _Pings()
        self._killed = ""
        self._crash = CrashOutput()
        self._failed: Failed | None = None
        self._error: Exception | None = None
        self._lost = False
        self._parted = False
        self._nursery: trio.Nursery | None = None
        self._pipe: Pipe

    @property
    def sessions(self) -> int:
        """The number of its sessions, including those that have not quite left."""
        return len(self._calls)

    @property
    def busy(self) -> int:
        """The number of its sessions plus that of the requests that use its formatters."""
        return len(self._calls) + len(self._formatted)

    @property
    def lost(self) -> bool:
        """True if its process has ended. Its open sessions are lost."""
        return self._lost

    # -- start and end -----------------------------------------------------------------------------------------------

    async def run(self, first: Sequence[Message], ready: Callable[[], None], worn: Callable[[], None]) -> NoReturn:
        """Sends the messages `first`, loads the model, calls `ready`, and serves. Calls `worn` if it has to be replaced.
        Ends only by an error: RaisedThere or MemoryError if the model's code has ended it, InstanceEnded if the process has,
        or that of `fail`. If cancelled, it gives the model 4.5 seconds to leave its `load()`, and then kills it."""
        stream = self.process.stream()
        self._pipe, self._on_ready = Pipe(stream, self._frames, self.process.memory), ready
        self._on_worn = worn
        for message in (*first, self._load):
            self._pipe.post(message)
        code, patience = Exit(), _GOODBYE + _LAST_WORDS
        try:
            async with trio.open_nursery() as outputs:
                outputs.start_soon(self.process.read_output, self._printed)
                try:
                    await self._serve()
                    if not self._parted:  # the process has hung up
                        patience = _LAST_WORDS
                finally:
                    self._lose_all()
                    with trio.CancelScope(shield=True):
                        code = await self._end(stream, patience)
                    outputs.cancel_scope.deadline = trio.current_time() + _LAST_WORDS
        finally:
            self.process.close()
            self._log_limits.flush()
        self._tell(code)

    async def _serve(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._write)
            nursery.start_soon(self._watch_exit, nursery.cancel_scope)
            if self._pipe.memory is not None:
                nursery.start_soon(give_back_idle, self._pipe.memory.arena)
            if self._hang_timeout:
                nursery.start_soon(self._watch_loop)
            try:
                await self._pipe.read(self._take)
            except BrokenPipe as e:
                self.kill(f"it sent something that is not a message: {e}")
            except trio.BrokenResourceError:
                pass
            finally:
                self._nursery = None
            nursery.cancel_scope.cancel()

    async def _write(self) -> None:
        with suppress(trio.BrokenResourceError):  # the reading task notices
            await self._pipe.write()

    async def _watch_exit(self, serving: trio.CancelScope) -> None:
        await self.process.ended()
        self.ready = False
        # its last messages are still read, to the end of the stream; the deadline is for a grandchild that keeps the socket
        serving.deadline = trio.current_time() + _LAST_WORDS

    async def _end(self, stream: trio.abc.HalfCloseableStream, patience: float) -> Exit:
        """Hangs up and waits `patience` seconds for the process to end; then kills it. A killed process that is in a call of
        a driver may end much later; that is not waited for."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hear_out)
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await stream.send_eof()
            code = await self._ended_within(patience)
            if code is None:
                self.kill("it did not end")
                code = await self._ended_within(_LAST_WORDS)
            # the stream is read to its end; the deadline is for a grandchild that keeps the socket
            nursery.cancel_scope.deadline = trio.current_time() + (_LAST_WORDS if code is not None else 0)
        return code or Exit(signal=signal.SIGKILL)

    async def _ended_within(self, seconds: float) -> Exit | None:
        with trio.move_on_after(seconds):
            return await self.process.ended()
        return None

    async def _hear_out(self) -> None:
        """Reads the last messages of a process that leaves, and logs its log records. They include those of the end of
        `load()`. A process that finds no room in the socket for its last messages would not end."""

        def take(message: Message) -> None:
            if type(message) is Log:
                self._take(message)

        with suppress(BrokenPipe, trio.BrokenResourceError):
            await self._pipe.read(take)

    def _tell(self, code: Exit) -> NoReturn:
        """Raises the reason of the end."""
        if self._error is not None:
            throw(self._error)
        if self._failed is not None and self._failed.error:
            kind = MemoryError if self._failed.memory else RaisedThere
            throw(_noted(kind(self._failed.error), self._failed.trace))
        if self._failed is not None:
            raise InstanceEnded("load() ended its context by itself")
        if self._killed:
            raise InstanceEnded(f"its process was killed: {self._killed}")
        line = innermost_line(self.process.tail)
        raise InstanceEnded(f"its process ended ({code}{' at ' if line else ''}{line})")

    def kill(self, why: str) -> None:
        """Kills the process for a reason; if another gateway owns it, asks that one to."""
        if self._ask_to_kill is not None:
            self._killed = why
            self._ask_to_kill(why)
            return
        if not self._killed:
            self._killed = why
            log.error("instance killed", extra={**self._named, "reason": why})
        self.process.kill()

    def unlinked(self, by: object) -> None:
        """Removes a gateway whose link has ended from `linked`."""
        self.linked.discard(by)
        self._left.ring()

    @property
    def _named(self) -> Mapping[str, Any]:
        return {"model": self.name, "instance": self.number, "pid": self.process.pid}

    def fail(self, error: Exception) -> None:
        """Kills the process, and `run` raises this error. Does nothing if the process has ended already."""
        if not self._lost:
            self._error = error
            self.process.kill()

    def _lose_all(self) -> None:
        self.ready, self.loaded, self._lost = False, None, True
        # messages that have arrived are passed on, but a client that does not read them must not delay the end
        told = trio.current_time() + _LAST_WORDS
        for number, call in [*self._calls.items()]:
            if call.ended is None:
                call.lost, call.scope.deadline = True, told
            if call.kept:
                del self._calls[number]
            call.over()
        self._questions.lose()
        self._pings.wake()

    # -- received messages -------------------------------------------------------------------------------------------

    def _printed(self, stream: str, line: str) -> None:
        log.log(self._crash.level(stream, line), "model output", extra={**self._named, "stream": stream, "line": line})

    def _take(self, message: Message) -> None:
        """Takes one message of the instance. ValueError if it breaks the protocol."""
        if isinstance(message, ITEMS):
            self._call(message.session).line.take_item(message)
            return
        match message:
            case Credit():
                self._call(message.session).line.take_credit(message)
            case Head():
                call = self._call(message.session)
                if call.headed:
                    raise ValueError(f"session {message.session}: a second head")
                call.headed = True
                call.line.take_aside(message)
            case PromptTokens():
                self._call(message.session).line.take_aside(message)
            case Ended():
                self._ended(self._call(message.session, left=not message.lingers), message)
            case Stuck(session=0):
                self._worn_out()
            case Stuck():
                self._stuck(self._call(message.session, left=True), message)
            case Loaded():
                if self.loaded is not None:
                    raise ValueError("it was loaded before")
                self.loaded = message
                self._on_ready()
            case Failed():
                self._failed = self._failed or message
            case Hello() | Described():
                pass  # the first process was checked; another version's later messages cannot be read
            case Pong():
                self._pings.answered(message.number)
            case Returned():
                self._questions.take(message)
            case Log():
                _log_there(message, self._named)
            case _:
                raise ValueError(f"{type(message).__name__} is not a message of an instance")

    def _call(self, session: int, *, left: bool = False) -> _Call:
        """Returns an open session; with `left`, also one that lingers. ValueError if there is none."""
        call = self._calls.get(session)
        if call is None or not (call.left if left else call.ended is None):
            raise ValueError(f"session {session} is not open")
        return call

    def _ended(self, call: _Call, ended: Ended) -> None:
        if call.ended is None:
            call.ended = ended
            if call.kept:
                self._tell_raised(call, ended)
        call.lingers = ended.lingers
        if call.lingers:
            call.line.end(over=True)
            return
        if call.kept:
            del self._calls[ended.session]
        call.over()
        self._left.ring()

    # -- sessions ----------------------------------------------------------------------------------------------------

    async def call(self, session: Session[Any, Any], first: Any = None) -> None:
        """Runs the model for one session. `first` is its first message, if that was received already. If this is cancelled,
        the model is cancelled too, and the session keeps its place until it and its threads have ended in the instance."""
        if self._lost:
            raise self._worker_lost()
        number = self.next_number()
        left = session.deadline - trio.current_time()
        opened = Open(number, session.call, max(0.0, left) if left < math.inf else -1.0)
        try:
            self._pipe.post(opened)
        except OverflowError:
            raise _too_large(session.call) from None
        self._calls[number] = call = _Call(SessionLine(self._pipe, number), session.call.id)
        call.holder.ran_in(self.number)
        try:
            with call.scope:
                if first is not None:
                    with suppress(trio.ClosedResourceError):  # the session ended before; `_answer` finds out below
                        await self._say(call, first)
                if getattr(session.channel, "exhausted", False):
                    self._pipe.post(EndOfInput(number))
                    await _answer(call, session)
                else:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._ask, call, session)
                        await _answer(call, session)
                        nursery.cancel_scope.cancel()
        finally:
            if call.ended is None and not call.lost:
                self._pipe.post(Cancel(number))
                call.keep()
                if self._stop_within and self._nursery is not None:
                    self._nursery.start_soon(self._ladder, number)
            elif call.lingers and not self._lost:
                call.keep()
            else:
                del self._calls[number]
                self._left.ring()
        if call.lost or (call.ended is not None and call.ended.kind == "cancelled"):  # it ended with its instance
            raise self._worker_lost()
        if call.ended is not None and call.ended.kind == "large":
            raise self._larger(call.ended.text)
        if call.ended is not None:
            _raise(call.ended)

    def _worker_lost(self) -> WorkerLost:
        return WorkerLost(f"the process of model {self.name!r} ended; try again")

    async def _say(self, call: _Call, message: Any) -> None:
        """Sends a client's message to the instance."""
        try:
            await call.line.send(message)
        except LargerThanMemory as e:
            raise self._larger(str(e)) from None
        except OverflowError:
            raise _too_large(message) from None

    def _larger(self, text: str) -> TooLarge:
        return TooLarge(f"{text} (models.{self.name}.process.shared_memory)")

    async def _ask(self, call: _Call, session: Session[Any, Any]) -> None:
        """Sends all of the client's messages to the instance."""
        try:
            async for message in session:
                await self._say(call, message)
        except trio.ClosedResourceError:
            if not call.line.over:
                raise
            return
        if not call.line.over:
            self._pipe.post(EndOfInput(call.line.number))

    async def ask(self, function: str, argument: Any) -> Any:
        """Calls a function of the model's code in the process and returns its result. Raises the function's error, or
        WorkerLost."""
        return await self.asked(Ask(self.next_number(), function, argument))

    async def asked(self, message: Ask | ReadInput | Write | Locate) -> Any:
        """Asks any question; returns and raises as `ask` does."""
        returned = await self._questions.ask(message, self._pipe.post)
        if returned is None:
            raise self._worker_lost()
        if returned.error is not None:
            _raise(returned.error)
        return returned.value

    def next_number(self) -> int:
        """Returns a number that no session and no question has."""
        number = self._next
        self._next += 1
        return number

    def begin_formatting(self) -> int:
        """Returns the number for a request that uses the instance's formatters, until `end_formatting`. The request may open
        a session here even if the instance takes no others any more."""
        self._formatted.add(number := self.next_number())
        return number

    def give(self, asked: GivenInput) -> None:
        """Sends a request that no input formatter has read. OverflowError for an integer of more than 64 bits."""
        if not self._lost:
            self._pipe.post(asked)

    def end_formatting(self, number: int) -> None:
        self._formatted.discard(number)
        if not self._lost:
            self._pipe.post(Forget(number))
        self._left.ring()

    def broken(self, what: str) -> WorkerLost:
        """Kills an instance that has sent something invalid, and returns the error for the caller."""
        self.kill(f"it sent something that is not a message: {what}")
        return self._worker_lost()

    # -- stuck sessions ---------------------------------------------------------------------------------------------

    def _stuck(self, call: _Call, said: Stuck) -> None:
        replaced = sum(one.replaced and one.left for one in self._calls.values())
        if call.stuck or not (self._load.step_timeout if said.step else self._load.stop_within):
            raise ValueError(f"session {said.session} cannot be stuck")
        if said.replaced and replaced >= self._load.stuck_limit:
            raise ValueError(f"session {said.session} is replaced beside {replaced} others")
        call.stuck, call.replaced = True, said.replaced
        call.holder.stuck_there(step=said.step, stack=said.stack[-_STACK:], replaced=said.replaced)
        if not said.replaced:
            self._worn_out()

    def go_on(self) -> None:
        """Takes a replacement back, because no new process could take over. Stuck sessions may begin another."""
        self.worn = ""
        if any(call.stuck and not call.replaced and call.left for call in self._calls.values()):
            self._wear()

    def _worn_out(self) -> None:
        if self.ready and not self.worn:
            self._wear()

    def _wear(self) -> None:
        self.worn = f"more than {self._load.stuck_limit} of its sessions are stuck (models.{self.name}.stuck_limit)"
        self._on_worn()

    def part(self, patience: float, then: Callable[[], None] | None = None) -> None:
        """Ends an instance that was replaced. It takes no more sessions. It ends when all sessions but the stuck ones are
        over and no gateway is linked, at the latest after `patience` seconds: its model leaves `load()`, or, if a session
        is stuck, the process is killed. If `then` is given, it is called instead."""
        if self.ready and self._nursery is not None:
            self.ready = False
            self._nursery.start_soon(self._part, patience, then)

    async def _part(self, patience: float, then: Callable[[], None] | None) -> None:
        with trio.move_on_after(patience):
            while self.linked or self._formatted or any(not call.stuck for call in self._calls.values()):
                await self._left.wait()
        if then is not None:
            then()
        elif any(call.stuck for call in self._calls.values()):
            self.kill(self.worn)
        elif self._nursery is not None:
            self._parted = True
            self._nursery.cancel_scope.cancel()

    def _tell_raised(self, call: _Call, ended: Ended) -> None:
        """Logs the error of a session whose caller is gone."""
        event = "model raised while cancelled"
        if ended.kind in ("raised", "memory") and self._log_limits.allows(event, level=logging.WARNING):
            error = _noted(RaisedThere(ended.text), ended.trace)
            log.warning(event, extra={**self._named, "id": call.id}, exc_info=error)

    # -- loops that do not answer ------------------------------------------------------------------------------------

    async def _ladder(self, number: int) -> None:
        """Kills the process if a cancelled session has not ended within `stop_within` and the loop does not answer."""
        await trio.sleep(self._stop_within)
        if number in self._calls and not await self._pings.are_answered(self._pipe, _ANSWERS) and number in self._calls:
            self.kill(f"a session had not stopped {self._stop_within:g} s after its end (models.{self.name}.stop_within)")

    async def _watch_loop(self) -> None:
        while True:
            if self.ready and not await self._pings.are_answered(self._pipe, self._hang_timeout):
                self.kill(f"its loop was silent for {self._hang_timeout:g} s (models.{self.name}.process.hang_timeout)")
            await trio.sleep(self._hang_timeout / 4)


def _log_there(message: Log, named: Mapping[str, Any]) -> None:
    """Logs a record of the instance. Its traceback is the end of the message; our formatters set it apart (`_trace`)."""
    text = f"{message.text}\n{message.trace}" if message.trace else message.text
    logging.getLogger(message.logger).log(message.level, text, extra={**named, "_trace": message.trace})


def _too_large(said: Any) -> ModelError:
    """Returns the error for a client's integer that MessagePack cannot represent."""
    name = beyond_64_bits(said)
    return ModelError(
        f"parameter {name[:60]!r} is an integer of more than 64 bits, which this model does not take",
        code="BadParameter",
        status=400,
    )


def _raise(ended: Ended) -> None:
    """Raises the error that the model raised in its process."""
    match ended.kind:
        case "" | "cancelled":
            return
        case "error":
            raise ModelError(ended.text, code=ended.code, status=ended.status)
        case "context" if ended.tokens is not None:
            needed, limit, prompt_tokens = ended.tokens
            raise ContextLengthExceeded(needed, limit, prompt_tokens=prompt_tokens)
        case "input":
            raise trio.EndOfChannel
        case "closed":
            raise trio.ClosedResourceError("the model sent on after the end")
        case "memory":
            throw(_noted(MemoryError(ended.text), ended.trace))
        case _:
            throw(_noted(RaisedThere(ended.text), ended.trace))


def _noted(error: Exception, trace: str) -> Exception:
    error.add_note(ToldElsewhere(trace))
    return error


def asking(instance: Instance) -> list[StepHolder]:
    """The holders of the sessions whose models have taken all of their clients' messages that are here. Those wait for more,
    if they wait for any."""
    return [call.holder for call in instance._calls.values() if call.line.all_taken]


async def locate(instance: Instance, caller: object) -> Parked | None:
    """Asks the process where the code of the session of this caller waits; None if it has no session of that caller."""
    for number, call in instance._calls.items():
        if call.ended is None and getattr(call.holder, "caller", None) is caller:
            match await instance.asked(Locate(instance.next_number(), number)):
                case [str(at), str(stack)]:
                    return Parked(at, stack)
            raise instance.broken("a place that is not two texts")
    return None


async def _answer(call: _Call, session: Session[Any, Any]) -> None:
    """Passes the model's messages to the session until the last one."""
    line, try_send = call.line, getattr(session.channel, "try_send", None)
    while True:
        message = line.take_at_once()
        if message is None:
            try:
                message = await line.receive()
            except trio.EndOfChannel:
                return
        if type(message) is Head:
            session.reply = message.fields
            if message.accepted:
                session.accept()
        elif type(message) is PromptTokens:
            session.prompt_tokens = message.count
        elif try_send is None or not try_send(message):
            await session.send(message)
