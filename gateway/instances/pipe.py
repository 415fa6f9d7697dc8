"""Carries the sessions of one instance over one socket, in the gateway and in the instance alike.

Messages posted in one turn of the loop leave as one frame. A session is a `SessionLine`: it sends messages while it has
credit of the other side. It gives credit back when its reader has taken half of the messages or bytes that may be ahead, or
at once if the reader waits. A session without credit waits alone: it delays no frame and no other session.
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

_READ = 256 * 1024  # bytes of one read from the socket
_HALF, _HALF_BYTES = MESSAGES_AHEAD // 2, BYTES_AHEAD // 2  # taken messages and bytes at which credit is given back


class BrokenPipe(Exception):
    """The other side breaks the protocol."""


class Post(Protocol):
    """The sending part of a pipe: `Pipe`, or that of another loop."""

    memory: SharedMemory | None
    """The memory shared with the other side; None if all bytes go through the stream."""

    def post(self, message: Message) -> None: ...
    def post_encoded(self, message: bytes) -> None: ...


class Bell(Protocol):
    """A wake-up for one waiting task, which others ring: `Doorbell`, or that of another loop."""

    def ring(self) -> None: ...
    def wake(self) -> None: ...
    async def wait(self) -> None: ...


@final
class Pipe:
    """Sends messages to the other side and receives its messages."""

    def __init__(self, stream: trio.abc.Stream, frames: Frames | None = None, memory: SharedMemory | None = None) -> None:
        """`frames` has earlier bytes and messages, if the stream was read before. Without `memory`, all bytes go through the
        stream."""
        self._stream, self._frames, self.memory = stream, frames or Frames(), memory
        if memory is not None:
            attach(memory, self)
        self._out: list[bytes] = []
        self._bell = Doorbell()
        self._finished = False
        self.reads = 0
        """The number of reads that returned bytes. While it grows, the other side's loop runs."""

    def post(self, message: Message) -> None:
        """Sends a message with the next frame. TypeError, OverflowError or ValueError if it cannot be sent; then nothing
        is."""
        self.post_encoded(encoded(message))

    def post_encoded(self, message: bytes) -> None:
        """Sends a message that `messages.encoded` has encoded."""
        out = self._out
        out.append(message)
        if len(out) == 1:
            self._bell.ring()

    def finish(self) -> None:
        """Makes `write` return once all is written. Nothing may be posted afterwards."""
        self._finished = True
        self._bell.ring()

    async def write(self) -> None:
        """Writes posted messages until `finish`. trio.BrokenResourceError if the other side is gone."""
        while not self._finished or self._out:
            await self._bell.wait()
            out, self._out = self._out, []
            for frame in frames_of(out):
                await self._stream.send_all(frame)

    async def read(self, take: Callable[[Message], None]) -> None:
        """Calls `take` with each message, until the other side has closed. BrokenPipe for invalid bytes, or if `take` raises
        ValueError; trio.BrokenResourceError if the connection is lost."""
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
            except ValueError as e:  # the base of msgspec's errors too
                raise BrokenPipe(f"{type(e).__name__}: {str(e)[:200]}") from None


def attach(memory: SharedMemory, pipe: Post) -> None:
    """Makes the pipe tell the other side, from now on, which of its blocks this side no longer needs."""
    memory.attach(running_loop().call_soon, lambda keys: pipe.post(Free(keys)))


async def give_back_idle(arena: Arena) -> NoReturn:
    """Returns idle memory of an arena to the system, until it is cancelled."""
    loop = running_loop()
    while True:
        await loop.sleep(IDLE_SECONDS)
        while arena.give_back():
            await loop.checkpoint()


@final
class SessionLine:
    """One side of one session.

    One task may call `receive` and one may call `send`, as on a channel. `receive` raises trio.EndOfChannel after the last
    message, `send` trio.ClosedResourceError once the session is over."""

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
        """`bell` and `check` depend on the loop of the session's tasks. `bell` makes their wake-ups; `check` is a checkpoint
        for a task that sends without waiting, so that it notices a cancel."""
        self._pipe, self.number, self._check = pipe, number, check
        self._arrived: deque[tuple[Any, int]] = deque()  # messages, and the bytes that each costs; negative: no credit
        self._bell, self._room = bell(), bell()
        self._ahead = self._ahead_bytes = 0  # sent, and not yet taken by the other side
        self._here = self._here_bytes = 0  # arrived, without credit given back yet
        self._taken = self._taken_bytes = 0  # those of `_here` that the reader has taken
        self._taking = -1  # bytes of the message that the reader works on
        self.said_all = False
        """True once the other side sends no more messages."""
        self.over = False
        """True once the other side takes no more messages."""

    # -- called as messages arrive -----------------------------------------------------------------------------------

    def take_item(self, item: Item) -> None:
        """Takes a message of the session. ValueError if it is invalid, or was sent without credit."""
        memory = self._pipe.memory
        message, size = message_of(item, None if memory is None else memory.window)
        here, here_bytes = self._here, self._here_bytes
        if here >= MESSAGES_AHEAD or (here_bytes and here_bytes + size > BYTES_AHEAD) or self.said_all:
            raise ValueError(f"session {self.number}: a message without credit")
        self._here, self._here_bytes = here + 1, here_bytes + size
        self._arrived.append((message, size))
        self._bell.ring()

    def take_aside(self, message: Message) -> None:
        """Takes another message about the session, which the reader gets in order. If several of one type come in a row,
        only the last is kept."""
        if self._arrived and type(self._arrived[-1][0]) is type(message):
            self._arrived.pop()
        self._arrived.append((message, -1))
        self._bell.ring()

    def take_credit(self, credit: Credit) -> None:
        """Takes credit for messages that the other side has taken. ValueError if there are more than were sent."""
        self._ahead -= credit.messages
        self._ahead_bytes -= credit.size
        if self._ahead < 0 or self._ahead_bytes < 0 or credit.messages < 0 or credit.size < 0:
            raise ValueError(f"session {self.number}: credit for what was not sent")
        self._room.wake()

    def end(self, *, over: bool) -> None:
        """Ends the input: the other side sends no more. `over`: it takes no more messages either."""
        self.said_all = True
        self.over = self.over or over
        self._bell.ring()
        self._room.wake()

    # -- called by those that use the session ------------------------------------------------------------------------

    @property
    def exhausted(self) -> bool:
        """True if no messages are left and no more will come."""
        return self.said_all and not self._arrived

    @property
    def all_taken(self) -> bool:
        """True if the other side has taken all messages, and is done with them: its reader waits for another, or will."""
        return not self._ahead

    def take_at_once(self) -> Any:
        """Returns the next message; None if none has arrived."""
        if (size := self._taking) >= 0:  # the reader has finished with the previous message
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
        """Waits for the next message. The call also gives the credit of the previous one back."""
        while (message := self.take_at_once()) is None:
            if self.said_all:
                self._bell.ring()  # so that the wait is only a checkpoint
                await self._bell.wait()
                raise trio.EndOfChannel
            self._give_back()  # even if it is little: the other side may need room for a large message
            await self._bell.wait()
        return message

    def try_send(self, message: Any) -> bool:
        """Sends a message at once if there is credit for it; True if it was sent. Texts and arrays that a model sends in
        place of messages must be converted first, and go to `send`."""
        if self._ahead >= MESSAGES_AHEAD or self.over or type(message) not in MESSAGES:
            return False
        item, size = item_of(self.number, message)
        if not self._has_room(size) or (self._pipe.memory is not None and large_of(item)):
            return False
        self._send(item, size)
        return True

    async def send(self, message: Any) -> None:
        """Sends a message when there is credit for it, and room in the shared memory for its large buffers. ValueError if it
        is too large for any frame; LargerThanMemory."""
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
