"""Sessions in memory for the library's tests: what goes in, what comes out, and in which order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import trio
import trio.testing

from models.session import Session


class Tape:
    """A channel over a list of inputs that records its traffic as ("in", message) and ("out", message).

    `room` is how many messages may be sent before the client stops reading.
    """

    def __init__(self, inputs: Iterable[Any], room: float = float("inf")) -> None:
        self._inputs = iter(inputs)
        self._room = room
        self.log: list[tuple[str, Any]] = []

    @property
    def sent(self) -> list[Any]:
        return [message for way, message in self.log if way == "out"]

    async def receive(self) -> Any:
        await trio.lowlevel.checkpoint()
        for message in self._inputs:
            self.log.append(("in", message))
            return message
        raise trio.EndOfChannel

    async def send(self, message: Any, /) -> None:
        await trio.lowlevel.checkpoint()
        if len(self.sent) >= self._room:
            await trio.sleep_forever()
        self.log.append(("out", message))


async def converse(model: Callable[[Session[Any, Any]], Awaitable[None]], *inputs: Any) -> list[Any]:
    """Returns the messages that the model sends for these inputs."""
    tape = Tape(inputs)
    await model(Session(tape))
    return tape.sent


async def stalled(model: Callable[[Session[Any, Any]], Awaitable[None]], *inputs: Any, room: int) -> Tape:
    """The traffic until nothing moves any more, with a client that reads `room` messages and then stops."""
    tape = Tape(inputs, room)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(model, Session(tape))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return tape
