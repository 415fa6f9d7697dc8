"""What is remembered of each call, and the models: they number what they say, and keep to the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import trio

from gateway.core.exchange import Exchange
from gateway.doorbell import Doorbell
from gateway.testing.faults import ModelFaults, with_faults
from gateway.testing.stories.plan import CALM, FAULTY, Plan, TalkPlan
from gateway.testing.stories.talk import Talk, fragment, named, unmarked
from models.adapt import spec_of
from models.blocking import cancel_token
from models.messages import Family, InferRequest, InferResponse, Part, Prompt, Tensor, Token
from models.session import Call, Session
from models.spec import ModelSpec

END = b"end"
"""The last part of a duplex client: its model ends the call."""


CHAT = "User: ", "\nAssistant:"
"""Around what a chat's only message says, in its prompt."""


@final
@dataclass(slots=True, eq=False, kw_only=True)
class PlannedTalk(Talk):
    """A call that keeps to a plan. That either end gets anything but what the other said is reported at once, by the bytes:
    some forms join messages."""

    plan: TalkPlan
    report: Callable[[str], None]
    bound: int
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
    def progress(self) -> tuple[int, ...]:
        bytes_of = (len(messages.data) for messages in (self.asked, self.taken, self.said, self.heard))
        return *bytes_of, self.received, self.begun, self.over

    @property
    def lies(self) -> bool:
        """Whether what its model says is not what leaves it."""
        return self.plan.faults is not None and self.plan.faults.lie_at is not None

    def take(self, message: bytes) -> None:
        asked, at = self.asked.data, len(self.taken.data)
        if not self.garbled and asked[at : at + len(message)] != message:
            self.report(f"1: {self.name}: the model took {message[:30]!r} behind {at} of {len(asked)} bytes")
        self.taken.add(message)

    def say(self, message: bytes) -> None:
        self.said.add(message)
        said, heard = len(self.said.data), len(self.heard.data)
        if self.plan.form.streams and said - heard > self.bound + 4 * (self.plan.size + 1):
            self.report(f"6: {self.name}: the model said {said} bytes, the client has taken {heard}")

    def hear(self, message: bytes) -> None:
        said, at = self.said.data, len(self.heard.data)
        if not self.lies and said[at : at + len(message)] != message:
            self.report(f"1: {self.name}: the client heard {message[:30]!r} behind {at} of {len(said)} bytes")
        self.heard.add(message)


@final
class Cast:
    """The calls of one run by name, and the models that answer them."""

    def __init__(self, plan: Plan, report: Callable[[str], None], tell: Callable[[str], None]) -> None:
        self.plan = plan
        self.talks = {
            talk.name: PlannedTalk(
                talk.name, line.name, talk.model, plan=talk, report=report, tell=tell,
                kept=fragment if talk.form.duplex else unmarked,
                bound=plan.bound + (line.window if line.transport == "http2" else 0),
            )
            for line in plan.lines
            for talk in line.talks
        }  # fmt: skip
        self.crashes = {name: Doorbell() for name in (f"{kind}-{FAULTY}" for kind in ("text", "tensor", "parts"))}

    def named(self, query: str) -> PlannedTalk | None:
        """The call whose request has this query."""
        return self.talks.get(named(query))

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
                    talk.take(talk.kept(part.data, part.last))
                    await _say(session, talk, bytes(part.data), part.last)
                    if part.data == END:
                        break
                await _say(session, talk, b"goodbye")

    async def _listen(self, session: Session[Part, Part], talk: PlannedTalk) -> None:
        async for part in session:
            talk.take(talk.kept(part.data, part.last))
            if part.data == END:
                break

    def _called(self, session: Session[Any, Any]) -> PlannedTalk:
        talk = self.named(session.call.query)
        assert talk is not None, f"a call without a name: {session.call.query}"
        return talk


async def _say(session: Session[Part, Part], talk: PlannedTalk, data: bytes, last: bool = True) -> None:
    await _think(talk)
    await session.send(Part(data=data, last=last))
    talk.say(talk.kept(data, last))


async def _think(talk: PlannedTalk) -> None:
    if talk.plan.think:
        await trio.sleep(talk.plan.think)


def _numbered(plan: TalkPlan) -> Iterator[str]:
    for number in range(plan.messages):
        yield f"{number:04d}" + "." * plan.size + " "
