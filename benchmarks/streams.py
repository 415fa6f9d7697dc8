"""Streams of numbers from the models of `benchmarks.victims`, read by a client that knows whether each has come."""

from __future__ import annotations

import time
from typing import final

import trio

from gateway import client
from gateway.client import questions
from gateway.client.answers import Answer
from gateway.client.conversations import Client
from gateway.errors import TransportLost

FOREVER = 60_000  # tokens
PATIENCE = 60.0


@final
class Stream:
    """One answer that goes on, and whether each of its numbers has come."""

    def __init__(self, port: int, model: str, prompt: str) -> None:
        self._port, self._model, self._prompt = port, model, prompt
        self.answer = Answer()
        self.begun = trio.Event()
        self.count, self.gap = 0, False
        self.over = trio.Event()
        self.ended_at = 0.0
        self.scope = trio.CancelScope()
        self.texts: list[str] = []

    async def run(self) -> None:
        with self.scope:
            try:
                await self._read()
            except (TransportLost, OSError) as e:
                self.answer.error = f"connection lost: {e}"
        self.ended_at = time.monotonic()
        self.over.set()

    async def _read(self) -> None:
        async with client.connect("127.0.0.1", self._port) as transport:
            asked = Client(client.http1(transport))
            question = questions.lmi(self._prompt, self._model, stream=True, max_new_tokens=FOREVER)
            conversation = asked.about(question)
            self.answer = conversation.answer
            await conversation.begin()
            while (message := await conversation.receive()) is not None:
                self.gap |= message.strip() != str(self.count) and self._prompt == "go"
                self.count += 1
                self.texts.append(message)
                self.begun.set()

    async def goes_on(self) -> bool:
        """Waits for one more number; True if all before it have come too."""
        count = self.count
        with trio.move_on_after(PATIENCE):
            while self.count == count and not self.over.is_set():  # noqa: ASYNC110  # either
                await trio.sleep(0.005)
        return self.count > count and not self.gap

    @property
    def ending(self) -> str:
        if self.scope.cancelled_caught:
            return "left"
        return (self.answer.error or "complete")[:70]


@final
class Victim:
    """The sessions of a model that is about to do its worst."""

    def __init__(self, port: int, name: str, nursery: trio.Nursery) -> None:
        self.port, self.name, self._nursery = port, name, nursery
        self.sessions: list[Stream] = []
        self.began = 0.0

    async def open(self, prompt: str) -> Stream:
        stream = Stream(self.port, self.name, prompt)
        self._nursery.start_soon(stream.run)
        with trio.fail_after(PATIENCE):
            await stream.begun.wait()
        return stream

    async def fault(self) -> None:
        """A session more, whose prompt brings it."""
        self.began = time.monotonic()
        self.sessions.append(await self.open("fault"))

    async def answers(self) -> None:
        while True:
            stream = Stream(self.port, self.name, "again")
            self._nursery.start_soon(stream.run)
            while not (stream.begun.is_set() or stream.over.is_set()):  # noqa: ASYNC110  # either
                await trio.sleep(0.002)
            if stream.begun.is_set():
                stream.scope.cancel()
                return
            await trio.sleep(0.005)
