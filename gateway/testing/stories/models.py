"""What is remembered of each call, and the models: they number what they say, and keep to the plan."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import trio

from gateway.core.exchange import Exchange
from gateway.doorbell import Doorbell
from gateway.testing.faults import ModelFaults, with_faults
from gateway.testing.stories.plan import CALM, FAULTY, Plan, TalkPlan
from models.adapt import spec_of
from models.blocking import cancel_token
from models.messages import Family, InferRequest, InferResponse, Part, Prompt, Tensor, Token
from models.session import Call, Session
from models.spec import ModelSpec

END = b"end"
"""The last part of a duplex client: its model ends the call."""


CHAT = "User: ", "\nAssistant:"
"""Around what a chat's only message says, in its prompt."""


class View(enum.Enum):
    """What a client made of the end of its call."""

    PENDING = "pending"
    COMPLETE = "complete"
    ERROR = "error"
    CUT = "cut"


@final
@dataclass(slots=True, eq=False)
class Talk:
    """One call as both ends remember it: the bytes of all messages, in order."""

    plan: TalkPlan
    report: Callable[[str], None]
    tell: Callable[[str], None]
    bound: int
    asked: bytearray = field(default_factory=bytearray)
    taken: bytearray = field(default_factory=bytearray)
    said: bytearray = field(default_factory=bytearray)
    heard: bytearray = field(default_factory=bytearray)
    view: View = View.PENDING
    begun: int = 0
    over: int = 0
    left: bool = False
    """The client ended it, or gave up."""
    gave_up: bool = False
    garbled: bool = False
    """Bytes that are nothing may be among those that its client has sent."""
    unopened: bool = False
    """It was never asked: its connection takes no more."""
    exchange: Exchange | None = None
    endings: list[str] = field(default_factory=list)
    opened_at: float = 0.0
    received: int = 0
    """Pieces of the answer, whole messages or not."""
    moved: tuple[int, ...] = ()
    """What the watchdog has seen."""
    moved_at: float = 0.0

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def progress(self) -> tuple[int, ...]:
        return len(self.asked), len(self.taken), len(self.said), len(self.heard), self.received, self.begun, self.over

    @property
    def lies(self) -> bool:
        """Whether what its model says is not what leaves it."""
        return self.plan.faults is not None and self.plan.faults.lie_at is not None

    def ask(self, data: bytes) -> None:
        """The client says it."""
        self.asked += data

    def take(self, data: bytes) -> None:
        """The model has it."""
        if not self.garbled and self.asked[len(self.taken) : len(self.taken) + len(data)] != data:
            self.report(f"1: {self.name}: the model took {data[:30]!r} behind {len(self.taken)} of {len(self.asked)} bytes")
        self.taken += data

    def say(self, data: bytes) -> None:
        """The model says it."""
        self.said += data
        if self.plan.form.streams and len(self.said) - len(self.heard) > self.bound + 4 * (self.plan.size + 1):
            self.report(f"6: {self.name}: the model said {len(self.said)} bytes, the client has taken {len(self.heard)}")

    def hear(self, data: bytes) -> None:
        """The client has it."""
        if not self.lies and self.said[len(self.heard) : len(self.heard) + len(data)] != data:
            self.report(f"1: {self.name}: the client heard {data[:30]!r} behind {len(self.heard)} of {len(self.said)} bytes")
        self.heard += data

    @contextmanager
    def call(self) -> Iterator[None]:
        """The model's call."""
        self.begun += 1
        self.tell(f"{self.name} model begins")
        try:
            yield
        finally:
            self.over += 1
            self.tell(f"{self.name} model ends")


def fragment(talk: Talk, data: Any, last: bool) -> bytes:
    """A part as it is remembered: where the wire keeps parts apart, with whether others continue it."""
    return bytes(data) + (b"." if last else b"+") if talk.plan.form.duplex else bytes(data)


@final
class Cast:
    """The calls of one run by name, and the models that answer them."""

    def __init__(self, plan: Plan, report: Callable[[str], None], tell: Callable[[str], None]) -> None:
        self.plan = plan
        self.talks = {
            talk.name: Talk(talk, report, tell, plan.bound + (line.window if line.transport == "http2" else 0))
            for line in plan.lines
            for talk in line.talks
        }
        self.crashes = {name: Doorbell() for name in (f"{kind}-{FAULTY}" for kind in ("text", "tensor", "parts"))}

    def named(self, query: str) -> Talk | None:
        """The call whose request has this query."""
        return self.talks.get(query.removeprefix("talk="))

    def specs(self) -> list[ModelSpec]:
        """A calm and a faulty model of each family, and one in threads."""
        made: list[ModelSpec] = []
        for model, family in ((self._text, Family.TEXT), (self._tensor, Family.TENSOR), (self._parts, Family.PARTS)):
            for letter in (CALM, FAULTY):
                name = f"{family.value}-{letter}"
                spec = spec_of(model, name, family=family, capacity=self.plan.slots, decoupled=family is Family.TENSOR)
                made.append(with_faults(spec, self._faults, crash=self.crashes[name]) if letter == FAULTY else spec)
        made.append(spec_of(self._threads, f"threads-{CALM}", family=Family.TEXT, capacity=self.plan.slots))
        return made

    def _faults(self, call: Call) -> ModelFaults | None:
        talk = self.named(call.query)
        return talk.plan.faults if talk is not None else None

    async def _text(self, session: Session[Prompt, Token]) -> None:
        talk = self._called(session)
        with talk.call():
            talk.take((await session.receive()).text.encode())
            for number, text in enumerate(_numbered(talk.plan)):
                await _think(talk)
                await session.send(Token(text=text, id=number))
                talk.say(text.encode())

    def _threads(self, prompt: Prompt) -> Iterator[str]:
        talk = self.talks[prompt.text.removeprefix(CHAT[0]).removesuffix(CHAT[1])]
        with talk.call():
            talk.take(prompt.text.encode())
            for text in _numbered(talk.plan):
                cancel_token().check()
                talk.say(text.encode())  # which of them is sent it cannot know
                yield text

    async def _tensor(self, session: Session[InferRequest, InferResponse]) -> None:
        talk = self._called(session)
        with talk.call():
            x = (await session.receive())["x"]
            talk.take(x.tobytes())
            for number in range(talk.plan.form.tensors or talk.plan.messages):
                await _think(talk)
                y = np.arange(len(x), dtype=np.int32) + 1_000_000 * number
                await session.send(InferResponse(outputs=[Tensor(name="y", data=y)]))
                talk.say(y.tobytes())

    async def _parts(self, session: Session[Part, Part]) -> None:
        talk = self._called(session)
        with talk.call():
            if talk.plan.both:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._listen, session, talk)
                    for text in _numbered(talk.plan):
                        await _say(session, talk, text.encode())
            else:
                await _say(session, talk, b"hello")
                for text in _numbered(talk.plan) if not talk.plan.form.duplex else ():
                    await _say(session, talk, text.encode())
                async for part in session:
                    talk.take(fragment(talk, part.data, part.last))
                    await _say(session, talk, bytes(part.data), part.last)
                    if part.data == END:
                        break
                await _say(session, talk, b"goodbye")

    async def _listen(self, session: Session[Part, Part], talk: Talk) -> None:
        async for part in session:
            talk.take(fragment(talk, part.data, part.last))
            if part.data == END:
                break

    def _called(self, session: Session[Any, Any]) -> Talk:
        talk = self.named(session.call.query)
        assert talk is not None, f"a call without a name: {session.call.query}"
        return talk


async def _say(session: Session[Part, Part], talk: Talk, data: bytes, last: bool = True) -> None:
    await _think(talk)
    await session.send(Part(data=data, last=last))
    talk.say(fragment(talk, data, last))


async def _think(talk: Talk) -> None:
    if talk.plan.think:
        await trio.sleep(talk.plan.think)


def _numbered(plan: TalkPlan) -> Iterator[str]:
    for number in range(plan.messages):
        yield f"{number:04d}" + "." * plan.size + " "
