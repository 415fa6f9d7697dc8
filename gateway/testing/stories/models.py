"""The records of calls, and the models of a simulation: they number their messages, and follow the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Generic, TypeVar, final

import numpy as np
import trio

from gateway.core.exchange import Exchange
from gateway.doorbell import Doorbell
from gateway.instances.messages import MESSAGES_AHEAD
from gateway.instances.spawn import Exit
from gateway.testing.faults import ModelFaults, with_faults
from gateway.testing.processes import MemoryProcess, Moment, current_process, in_memory_processes
from gateway.testing.stories.plan import CALM, FAULTY, KINDS, THERE, Fate, Mishap, Plan, TalkPlan
from gateway.testing.stories.talk import Talk, fragment, named, unmarked
from models.adapt import spec_of
from models.blocking import cancel_token
from models.messages import Family, InferRequest, InferResponse, Part, Prompt, Tensor, Token
from models.session import Call, Session
from models.spec import ModelSpec

In = TypeVar("In")
Out = TypeVar("Out")

END = b"end"
"""The last part of a duplex client: its model ends the call."""


VICTIM = "victim"
"""The model that hostile clients keep busy: it takes whatever comes."""


CHAT = "User: ", "\nAssistant:"
"""Around what a chat's only message says, in its prompt."""


@final
@dataclass(slots=True, eq=False, kw_only=True)
class PlannedTalk(Talk):
    """A call that follows a plan. If either end receives other bytes than the other has sent, it is reported at once. Bytes
    are compared, and not messages, because some forms join messages."""

    plan: TalkPlan
    report: Callable[[str], None]
    bound: int
    gave_up: bool = False
    garbled: bool = False
    """True if garbage may be among the bytes that its client has sent."""
    unopened: bool = False
    """True if the call was never made, because its connection takes no more calls."""
    exchange: Exchange | None = None
    endings: list[str] = field(default_factory=list)
    opened_at: float = 0.0
    received: int = 0
    """Pieces of the answer, whole messages or not."""
    moved: tuple[int, ...] = ()
    """The `progress` at the watchdog's last check."""
    moved_at: float = 0.0

    @property
    def progress(self) -> tuple[int, ...]:
        bytes_of = (len(messages.data) for messages in (self.asked, self.taken, self.said, self.heard))
        return *bytes_of, self.received, self.begun, self.over

    @property
    def lies(self) -> bool:
        """True if the model sends invalid messages, so that its client cannot get what it sent."""
        return self.plan.faults is not None and self.plan.faults.lie_at is not None

    def take(self, message: bytes) -> None:
        asked, at = self.asked.data, len(self.taken.data)
        if not self.garbled and asked[at : at + len(message)] != message:
            self.report(f"1: {self.name}: the model took {message[:30]!r} behind {at} of {len(asked)} bytes")
        self.taken.add(message)

    def say(self, message: bytes) -> None:
        self.said.add(message)
        said, heard = len(self.said.data), len(self.heard.data)
        # messages after a false end are dropped at once, so they are not on their way
        if self.plan.form.streams and not self.lies and said - heard > self.bound + 4 * (self.plan.size + 1):
            self.report(f"6: {self.name}: the model said {said} bytes, the client has taken {heard}")

    def hear(self, message: bytes) -> None:
        said, at = self.said.data, len(self.heard.data)
        if not self.lies and said[at : at + len(message)] != message:
            self.report(f"1: {self.name}: the client heard {message[:30]!r} behind {at} of {len(said)} bytes")
        self.heard.add(message)


def said(talk: Talk, message: Any) -> bytes:
    """The bytes by which a message is remembered."""
    match message:
        case Part():
            return talk.kept(message.data, message.last)
        case Prompt() | Token():
            return message.text.encode()
        case InferRequest():
            return bytes(message["x"].tobytes())
        case InferResponse():
            return bytes(message.outputs[0].data.tobytes())
        case _:
            raise TypeError(message)


class Watched(Generic[In, Out]):
    """A model's session, whose messages its talk remembers."""

    def __init__(self, session: Session[In, Out], talk: Talk) -> None:
        self._session, self.talk = session, talk

    async def receive(self) -> In:
        message = await self._session.receive()
        self.talk.take(said(self.talk, message))
        return message

    async def send(self, message: Out) -> None:
        await self._session.send(message)
        self.talk.say(said(self.talk, message))


async def echo(me: Watched[Part, Part], *more: Part, goodbye: Part) -> None:
    """Says hello and more, sends every part back, says goodbye at the end of input or after the part `end`."""
    for part in (Part(data=b"hello"), *more):
        await me.send(part)
    with suppress(trio.EndOfChannel):
        while True:
            part = await me.receive()
            await me.send(part)
            if part.data == END:
                break
    await me.send(goodbye)


async def listen(me: Watched[Part, Part]) -> None:
    """Reads to the end of input, or to the part `end`."""
    with suppress(trio.EndOfChannel):
        while (await me.receive()).data != END:
            pass


@final
class Thinking(Watched[In, Out]):
    """A session of a planned talk: its model thinks before it says anything."""

    def __init__(self, session: Session[In, Out], talk: PlannedTalk) -> None:
        super().__init__(session, talk)
        self.plan = talk.plan

    async def send(self, message: Out) -> None:
        if self.plan.think:
            await trio.sleep(self.plan.think)
        await super().send(message)


@final
class Cast:
    """The calls of one run by name, and the models that answer them."""

    def __init__(self, plan: Plan, report: Callable[[str], None], tell: Callable[[str], None]) -> None:
        self.plan = plan
        self.talks = {
            talk.name: PlannedTalk(
                talk.name, line.name, talk.model, plan=talk, report=report, tell=tell,
                kept=fragment if talk.form.duplex else unmarked,
                bound=plan.bound + (line.window if line.transport == "http2" else 0) + _ahead(talk),
            )
            for line in plan.lines
            for talk in line.talks
        }  # fmt: skip
        self.crashes = {name: Doorbell() for name in (f"{kind}-{FAULTY}" for kind in KINDS)}
        self.processes: dict[MemoryProcess, set[PlannedTalk]] = {}
        """Each that was started, and the calls that its model is in."""
        self.lost: Callable[[MemoryProcess, list[PlannedTalk]], None] = lambda process, talks: None
        """Told of a process that has ended, and of those calls."""
        self._tell = tell
        self._mishaps = [mishap for mishap in plan.mishaps if mishap.at is None]

    def named(self, query: str) -> PlannedTalk | None:
        """The call whose request has this query."""
        return self.talks.get(named(query))

    def specs(self) -> list[ModelSpec]:
        """A calm and a faulty model of each kind, and one in threads."""
        made: list[ModelSpec] = []
        models = (
            (self._text, Family.TEXT),
            (self._tensor, Family.TENSOR),
            (self._tensor, Family.TENSOR),
            (self._parts, Family.PARTS),
        )
        for kind, (model, family) in zip(KINDS, models, strict=True):
            for letter in (CALM, FAULTY):
                name = f"{kind}-{letter}"
                spec = spec_of(model, name, family=family, capacity=self.plan.slots, decoupled=kind == "tensor")
                made.append(with_faults(spec, self._faults, crash=self.crashes[name]) if letter == FAULTY else spec)
                if (there := f"{kind}-{THERE}-{letter}") in self.plan.there:
                    made.append(self._there(replace(spec, name=there, stop_within=1.0), faulty=letter == FAULTY))
        made.append(spec_of(self._threads, f"threads-{CALM}", family=Family.TEXT, capacity=self.plan.slots))
        if self.plan.hostile:
            made.append(spec_of(_victim, VICTIM, family=Family.PARTS, capacity=self.plan.slots))
        return made

    # -- models in processes -------------------------------------------------------------------------------------------

    def _there(self, spec: ModelSpec, *, faulty: bool) -> ModelSpec:
        return in_memory_processes(
            with_faults(spec, self._faults) if faulty else spec,
            instances=self.plan.instances, hang_timeout=self.plan.hang_timeout, place=self.plan.place, told=self._told,
        )[0]  # fmt: skip

    def _told(self, process: MemoryProcess, moment: Moment) -> None:
        match moment:
            case Moment.STARTED:
                self.processes[process] = set()
            case Moment.ENDED:
                self._tell(f"process {process.plan.number} of {process.plan.name} ends")
                self.lost(process, sorted(self.processes[process], key=attrgetter("name")))
            case Moment.SENT:
                for mishap in [one for one in self._mishaps if self._is_of(one, process) and one.frames == process.frames]:
                    self._mishaps.remove(mishap)
                    self.befall(mishap, process)

    @staticmethod
    def _is_of(mishap: Mishap, process: MemoryProcess) -> bool:
        return (mishap.model, mishap.number) == (process.plan.name, process.plan.number)

    def befalls(self, mishap: Mishap) -> None:
        """Makes a mishap happen to the present process of its number, if there is one."""
        for process in self.processes:
            if process.alive and self._is_of(mishap, process):
                self.befall(mishap, process)
                return

    def befall(self, mishap: Mishap, process: MemoryProcess) -> None:
        """Makes a mishap happen to this process."""
        self._tell(f"process {mishap.number} of {mishap.model} is {mishap.fate.value}")
        match mishap.fate:
            case Fate.KILLED:
                process.kill()
            case Fate.CRASHED:
                process.die(Exit(signal=11))
            case Fate.LEFT:
                process.die(Exit(code=3))
            case Fate.HUNG_UP:
                process.hang_up()
            case Fate.NONSENSE:
                process.spoil(mishap.nonsense)
            case Fate.STOPPED:
                process.stop()
                trio.lowlevel.spawn_system_task(_go_on, process, mishap.lasts)

    # -- the models ----------------------------------------------------------------------------------------------------

    def _faults(self, call: Call) -> ModelFaults | None:
        talk = self.named(call.query)
        return talk.plan.faults if talk is not None else None

    async def _text(self, session: Session[Prompt, Token]) -> None:
        with self._called(session) as me:
            await me.receive()
            for number, text in enumerate(_numbered(me.plan)):
                await me.send(Token(text=text, id=number))

    def _threads(self, prompt: Prompt) -> Iterator[str]:
        talk = self.talks[prompt.text.removeprefix(CHAT[0]).removesuffix(CHAT[1])]
        with talk.call():
            talk.take(prompt.text.encode())
            for text in _numbered(talk.plan):
                cancel_token().check()
                talk.say(text.encode())  # which of them is sent it cannot know
                yield text

    async def _tensor(self, session: Session[InferRequest, InferResponse]) -> None:
        with self._called(session) as me:
            x = (await me.receive())["x"]
            for number in range(me.plan.form.tensors or me.plan.messages):
                y = np.arange(len(x), dtype=np.int32) + 1_000_000 * number
                await me.send(InferResponse(outputs=[Tensor(name="y", data=y)]))

    async def _parts(self, session: Session[Part, Part]) -> None:
        with self._called(session) as me:
            numbered = [Part(data=text.encode()) for text in _numbered(me.plan)]
            if me.plan.both:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(listen, me)
                    for part in numbered:
                        await me.send(part)
            else:
                await echo(me, *([] if me.plan.form.duplex else numbered), goodbye=Part(data=b"goodbye"))

    @contextmanager
    def _called(self, session: Session[In, Out]) -> Iterator[Thinking[In, Out]]:
        talk = self.named(session.call.query)
        assert talk is not None, f"a call without a name: {session.call.query}"
        process = current_process()
        calls = self.processes[process] if process is not None else set()
        calls.add(talk)
        try:
            with talk.call():
                yield Thinking(session, talk)
        finally:
            calls.discard(talk)


async def _go_on(process: MemoryProcess, after: float) -> None:
    await trio.sleep(after)
    process.go_on()


def _ahead(talk: TalkPlan) -> int:
    """Bytes that a model in a process may have said, and its client's wire not have taken."""
    return (MESSAGES_AHEAD + 1) * 4 * (talk.size + 8) if f"-{THERE}-" in talk.model else 0


async def _victim(session: Session[Part, Part]) -> None:
    with suppress(trio.EndOfChannel):
        while True:
            await session.receive()


def _numbered(plan: TalkPlan) -> Iterator[str]:
    for number in range(plan.messages):
        yield f"{number:04d}" + "." * plan.size + " "
