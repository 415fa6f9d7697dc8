"""Wires in memory for tests of models: a bounded channel, and the sessions that models are given over it."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from models.convert import convert
from models.messages import Family, Part, PartKind, Prompt, Token
from models.session import Session


class MemoryChannel:
    """A client in memory. `feed` and `end` are what it sends, `sent` is what it has read, `room` how much more it takes.

    Every call is a checkpoint, and both keep Session's cancel rules.
    """

    def __init__(self, *messages: Any, ended: bool = True, room: float = float("inf")) -> None:
        self._inbox = deque(messages)
        self._ended = ended
        self._lot = trio.lowlevel.ParkingLot()
        self.room = room
        self.sent: list[Any] = []
        self.complete = False

    def feed(self, message: Any) -> None:
        self._inbox.append(message)
        self._lot.unpark_all()

    def end(self) -> None:
        self._ended = True
        self._lot.unpark_all()

    def read(self, n: float = float("inf")) -> None:
        """The client takes n more messages."""
        self.room += n
        self._lot.unpark_all()

    async def receive(self) -> Any:
        await trio.lowlevel.checkpoint()
        while not self._inbox:
            if self._ended:
                raise trio.EndOfChannel
            await self._lot.park()
        return self._inbox.popleft()

    async def send(self, message: Any, /) -> None:
        await trio.lowlevel.checkpoint()
        if self.complete:
            raise trio.ClosedResourceError("the answer is complete")
        while self.room < 1:
            await self._lot.park()
        self.room -= 1
        self.sent.append(message)


@dataclass
class World:
    """A session as a model sees it, and the client at its other end.

    `inbound` are the messages that come out of the session, one for each `feed`; `answers` are messages to send, and
    `seen` what the client has read of them, in the same form.
    """

    session: Session[Any, Any]
    channel: MemoryChannel
    inbound: Sequence[Any]
    answers: Sequence[Any]
    fed: Sequence[Any]
    told: Callable[[Any], Any]

    def feed(self) -> None:
        for message in self.fed:
            self.channel.feed(message)

    @property
    def seen(self) -> list[Any]:
        return [self.told(message) for message in self.channel.sent]


PARTS = (Part(data=b"one", kind=PartKind.UTF8), Part(data=b"", last=False), Part(data=b"three"))


@asynccontextmanager
async def memory_world() -> AsyncIterator[World]:
    """The memory channel itself."""
    channel = MemoryChannel(ended=False)
    yield World(Session(channel), channel, PARTS, PARTS, PARTS, lambda part: part)


@asynccontextmanager
async def text_world() -> AsyncIterator[World]:
    """The session of a model of parts on a text wire."""
    channel = MemoryChannel(ended=False)
    async with given_to_a_model(Family.PARTS, Family.TEXT, channel) as session:
        prompts = [Prompt(text=text) for text in ("one", "two", "three")]
        parts = [Part(data=prompt.text.encode(), kind=PartKind.UTF8) for prompt in prompts]
        yield World(session, channel, parts, parts, prompts, _as_part)


def _as_part(token: Token) -> Part:
    return Part(data=token.text.encode(), kind=PartKind.UTF8)


@asynccontextmanager
async def parts_world() -> AsyncIterator[World]:
    """The session of a model of text on a wire of parts. Its one prompt must be there before the model is called."""
    channel = MemoryChannel(Part(data=b"one"), ended=False)
    async with given_to_a_model(Family.TEXT, Family.PARTS, channel) as session:
        tokens = [Token(text=text) for text in ("one", "two", "three")]
        yield World(session, channel, [Prompt(text="one")], tokens, [], lambda part: Token(text=part.data.decode()))


@asynccontextmanager
async def given_to_a_model(family: Family, wire: Family, channel: MemoryChannel) -> AsyncIterator[Session[Any, Any]]:
    """The session that a converted model is called with; the model returns when the block does."""
    done = trio.Event()

    async def serve(task_status: trio.TaskStatus[Session[Any, Any]]) -> None:
        async def model(session: Session[Any, Any]) -> None:
            task_status.started(session)
            await done.wait()

        await convert(model, family, wire)(Session(channel))

    async with trio.open_nursery() as nursery:
        yield await nursery.start(serve)
        nursery.cancel_scope.cancel()


WORLDS = {"memory": memory_world, "text": text_world, "parts": parts_world}
