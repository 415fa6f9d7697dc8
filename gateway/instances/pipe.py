"""Carries the sessions of one instance over one socket: in the gateway and in the instance alike.

Whatever is posted in one turn of the loop leaves as one frame. A session is a `SessionLine`: it sends its messages while
the other side has given it credit, and gives credit back as its own reader takes them, at half of what may be ahead, or at
once where the reader waits for more. A session without credit waits by itself; it holds no frame, and nobody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, Protocol, final

import trio

from gateway.doorbell import Doorbell
from gateway.instances.memory import IDLE_SECONDS, Arena, SharedMemory, copied
from gateway.instances.messages import (
    BYTES_AHEAD,
    LARGEST,
    MESSAGES,
    MESSAGES_AHEAD,
    Credit,
    Frames,
    Free,
    Item,
    Message,
    encoded,
    frames_of,
    item_of,
    large_of,
    lent_in,
    message_of,
)
from models.blocking import running_loop
from protocols.events import Buffer

_READ = 256 * 1024  # bytes of one look at the socket
_HALF, _HALF_BYTES = MESSAGES_AHEAD // 2, BYTES_AHEAD // 2  # of what may be ahead: so much is told at once


class BrokenPipe(Exception):
    """The other side does not speak as it should."""


class Post(Protocol):
    """What takes messages for the other side: `Pipe`, or another loop's."""

    memory: SharedMemory | None
    """Of both sides; None where all goes through the stream."""

    def post(self, message: Message) -> None: ...
    def post_encoded(self, message: bytes) -> None: ...


class Bell(Protocol):
    """What one task waits for, and others ring: `Doorbell`, or another loop's."""

    def ring(self) -> None: ...
    def wake(self) -> None: ...
    async def wait(self) -> None: ...


@final
class Pipe:
    """Messages to and from the other side."""

    def __init__(self, stream: trio.abc.Stream, frames: Frames | None = None, memory: SharedMemory | None = None) -> None:
        """`frames` are of whoever has read from the stream before. Without `memory` all goes through the stream."""
        self._stream, self._frames, self.memory = stream, frames or Frames(), memory
        if memory is not None:
            attach(memory, self)
        self._out: list[bytes] = []
        self._bell = Doorbell()
        self._finished = False
        self.reads = 0
        """How often something has come: where it grows, the other side's loop runs."""

    def post(self, message: Message) -> None:
        """Sends it with the next frame. TypeError, OverflowError or ValueError for what cannot be sent: nothing was."""
        self.post_encoded(encoded(message))

    def post_encoded(self, message: bytes) -> None:
        """Sends what `messages.encoded` has made."""
        out = self._out
        out.append(message)
        if len(out) == 1:
            self._bell.ring()

    def finish(self) -> None:
        """Nothing is posted any more: `write` returns once all is written."""
        self._finished = True
        self._bell.ring()

    async def write(self) -> None:
        """Writes what is posted, until `finish`. trio.BrokenResourceError where the other side is gone."""
        while not self._finished or self._out:
            await self._bell.wait()
            out, self._out = self._out, []
            for frame in frames_of(out):
                await self._stream.send_all(frame)

    async def read(self, take: Callable[[Message], None]) -> None:
        """Calls `take` with each message, until the other side has closed. BrokenPipe for bytes that are none, or where
        `take` raises ValueError; trio.BrokenResourceError where the connection is lost."""
        frames, stream = self._frames, self._stream
        for message in frames.unread:
            take(message)
        frames.unread.clear()
        memory = self.memory
        while data := await stream.receive_some(_READ):
            self.reads += 1
            try:
                for messages in frames.feed(data):
                    for message in messages:
                        if type(message) is Free and memory is not None:
                            memory.take_back(message.keys)
                        else:
                            take(message)
            except ValueError as e:  # msgspec's errors are
                raise BrokenPipe(f"{type(e).__name__}: {str(e)[:200]}") from None


def attach(memory: SharedMemory, pipe: Post) -> None:
    """From now on the other side is told, through the pipe, what this side looks at no more."""
    memory.attach(running_loop().call_soon, lambda keys: pipe.post(Free(keys)))


async def give_back_idle(arena: Arena) -> NoReturn:
    """Gives memory that is idle back to the system, until it is cancelled."""
    loop = running_loop()
    while True:
        await loop.sleep(IDLE_SECONDS)
        while arena.give_back():
            await loop.checkpoint()


@final
class SessionLine:
    """One side of one session.

    `receive` and `send` are a channel's: one task each. They raise trio.EndOfChannel and trio.ClosedResourceError once the
    session is over."""

    __slots__ = (
        "_ahead", "_ahead_bytes", "_arrived", "_bell", "_check", "_here", "_here_bytes", "_pipe", "_room", "_taken",
        "_taken_bytes", "_taking", "number", "over", "said_all",
    )  # fmt: skip

    def __init__(
        self,
        pipe: Post,
        number: int,
        bell: Callable[[], Bell] = Doorbell,
        check: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint_if_cancelled,
    ) -> None:
        """`bell` and `check` are of the loop that its users run on: how they wait, and how one that sends without waiting
        notices that it is cancelled."""
        self._pipe, self.number, self._check = pipe, number, check
        self._arrived: deque[tuple[Any, int]] = deque()  # and the bytes that each costs; below zero: no credit
        self._bell, self._room = bell(), bell()
        self._ahead = self._ahead_bytes = 0  # sent, and not taken by the other side yet
        self._here = self._here_bytes = 0  # arrived, and no credit given back yet
        self._taken = self._taken_bytes = 0  # of these, taken
        self._taking = -1  # bytes of the message that the reader has
        self.said_all = False
        """True once the other side says no more."""
        self.over = False
        """True once the other side hears no more."""

    # -- called as messages arrive -----------------------------------------------------------------------------------

    def take_item(self, item: Item) -> None:
        """A message of the session. ValueError where it cannot be, or was sent without credit."""
        memory = self._pipe.memory
        message, size = message_of(item, None if memory is None else memory.window)
        here, here_bytes = self._here, self._here_bytes
        if here >= MESSAGES_AHEAD or (here_bytes and here_bytes + size > BYTES_AHEAD) or self.said_all:
            raise ValueError(f"session {self.number}: a message without credit")
        self._here, self._here_bytes = here + 1, here_bytes + size
        self._arrived.append((message, size))
        self._bell.ring()

    def take_aside(self, message: Message) -> None:
        """Something else about the session, which its reader is to have in order; of several in a row the last is enough."""
        if self._arrived and type(self._arrived[-1][0]) is type(message):
            self._arrived.pop()
        self._arrived.append((message, -1))
        self._bell.ring()

    def take_credit(self, credit: Credit) -> None:
        """The other side has taken messages. ValueError for more than were sent."""
        self._ahead -= credit.messages
        self._ahead_bytes -= credit.size
        if self._ahead < 0 or self._ahead_bytes < 0 or credit.messages < 0 or credit.size < 0:
            raise ValueError(f"session {self.number}: credit for what was not sent")
        self._room.wake()

    def end(self, *, over: bool) -> None:
        """The other side says no more; `over`: and hears no more."""
        self.said_all = True
        self.over = self.over or over
        self._bell.ring()
        self._room.wake()

    # -- called by those that use the session ------------------------------------------------------------------------

    @property
    def exhausted(self) -> bool:
        """True if no more messages will come, and none is there."""
        return self.said_all and not self._arrived

    def take_at_once(self) -> Any:
        """The next message, where there is one; None otherwise."""
        if (size := self._taking) >= 0:  # the one before it is taken
            self._taken += 1
            self._taken_bytes += size
            self._taking = -1
            if self._taken >= _HALF or self._taken_bytes >= _HALF_BYTES:
                self._give_back()
        if not self._arrived:
            return None
        message, self._taking = self._arrived.popleft()
        return message

    async def receive(self) -> Any:
        """The next message; the one before it is taken by that."""
        while (message := self.take_at_once()) is None:
            if self.said_all:
                self._bell.ring()  # a checkpoint, and no more
                await self._bell.wait()
                raise trio.EndOfChannel
            self._give_back()  # all of it: the other side may need room for a large one
            await self._bell.wait()
        return message

    def try_send(self, message: Any) -> bool:
        """Sends a message if there is credit for it; True if it has. What a model gives in place of a
        message, as a text or an array, is for `send`, once it is one."""
        if self._ahead >= MESSAGES_AHEAD or self.over or type(message) not in MESSAGES:
            return False
        item, size = item_of(self.number, message)
        if not self._has_room(size) or (self._pipe.memory is not None and large_of(item)):
            return False
        self._send(item, size)
        return True

    async def send(self, message: Any) -> None:
        """Sends a message when there is credit for it, and room in the shared memory for what is large in it. ValueError for
        one that is too large for any frame; LargerThanMemory."""
        await self._check()
        item, size = item_of(self.number, message)
        memory = self._pipe.memory
        if memory is not None and (large := large_of(item)):
            await self._send_large(memory, item, size, large)
            return
        while not self.over and not self._has_room(size):
            await self._room.wait()
        if self.over:
            raise trio.ClosedResourceError("the session is over")
        self._send(item, size)

    async def _send_large(self, memory: SharedMemory, item: Item, size: int, large: Sequence[Buffer]) -> None:
        places = None
        try:
            while not self.over and not (self._has_room(size) and (places := memory.places(large, self._room.wake))):
                await self._room.wait()
        finally:
            memory.arena.forget(self._room.wake)
        for source, target in zip(large, places or (), strict=False):
            for _ in copied(source, target):
                await running_loop().checkpoint()
        if self.over or places is None:
            raise trio.ClosedResourceError("the session is over")
        blocks = [memory.lend(place) for place in places]
        try:
            self._send(lent_in(item, blocks), size)
        except BaseException:
            memory.take_back([block.key for block in blocks])
            raise

    def _has_room(self, size: int) -> bool:
        return self._ahead < MESSAGES_AHEAD and (not self._ahead_bytes or self._ahead_bytes + size <= BYTES_AHEAD)

    def _send(self, item: Item, size: int) -> None:
        data = encoded(item)
        if len(data) > LARGEST:
            raise ValueError(f"a message of {len(data)} bytes is more than a model in a process can have, {LARGEST}")
        self._pipe.post_encoded(data)
        self._ahead += 1
        self._ahead_bytes += size

    def _give_back(self) -> None:
        if self._taken and not self.over:
            self._pipe.post(Credit(self.number, self._taken, self._taken_bytes))
            self._here -= self._taken
            self._here_bytes -= self._taken_bytes
            self._taken = self._taken_bytes = 0
