"""The client for programs without an event loop: the same questions and answers, with calls that block and plain iterators.

    from gateway.client import lmi
    from gateway.client.sync import Client

    with Client("http://localhost:8080") as client:
        print(client.call(lmi("hello")).text)
        for token in client.stream(lmi("hello", stream=True)):
            print(token, end="")

Threads may share a client.
"""

from __future__ import annotations

import math
import ssl
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from copy import copy
from types import TracebackType
from typing import Any, Self, final

import trio

from gateway.client import conversations
from gateway.client.answers import Answer, CallFailed
from gateway.client.connection import Peer
from gateway.client.conversations import Conversation
from gateway.client.opening import connected
from gateway.client.portal import Closed, Portal
from gateway.client.questions import Question, bidirectional
from gateway.errors import TransportLost
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import ConnectionEnd, GoAway
from protocols.v2 import V2Error

__all__ = ["Client", "Closed", "Duplex", "Stream"]

_IDLE = 8
"""Connections kept for the next calls."""
_AHEAD = 16
"""Messages of a bidirectional stream that wait to be received."""


@final
class Client:
    """Calls of the gateway at `url`, from any thread, as many at once as there are threads: each has a connection of its
    own, and idle ones are used again. One background thread does the work.

    `url` and `tls` are as for `gateway.client.open_client`. `timeout` is how many seconds a call may take, connecting
    included, and each message of a stream; None for no limit. It is raised as TimeoutError. Other errors are the typed
    client's: OSError where there is no connection, `gateway.errors.TransportLost` where it is lost,
    `gateway.client.CallFailed` for what the server says, and Closed after `close`.

    `close`, the end of the `with` block, the end of the program, and the collection of a client that was forgotten end what
    is under way and close all connections; that takes 5 seconds at most. In a task of Trio's each call raises RuntimeError.
    """

    def __init__(self, url: str, *, tls: ssl.SSLContext | None = None, timeout: float | None = 60.0) -> None:
        self.timeout = timeout
        self._calls = _Calls(url, tls)
        self._portal = Portal(self._calls.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything. Idempotent."""
        self._portal.close()

    def call(self, question: Question) -> Answer:
        """The whole answer, where it is a success. Ctrl-C, and a time that is over, cancel its model."""
        return self._portal.call(self._calls.call, question, timeout=self.timeout)

    def stream(self, question: Question) -> Stream:
        """The answer as its messages come. It is asked for at once; a refusal is raised by the first message."""
        return Stream(self._portal, _Begun(self._calls, question), self.timeout)

    def bidirectional(self, endpoint: str) -> Duplex:
        """SageMaker's bidirectional stream, over HTTP/2."""
        return Duplex(self._portal, _Talk(self._calls, bidirectional(endpoint)), self.timeout)


class _Held:
    """Something that is under way over a connection, as its caller has it; left when it is closed, or forgotten."""

    def __init__(self, portal: Portal, begun: _Begun, timeout: float | None) -> None:
        self.timeout = timeout
        self._portal, self._begun = portal, begun
        self._leave = weakref.finalize(self, portal.detached, begun.leave)
        self._leave.atexit = False  # the client ends all
        self._call(begun.open)  # only now: who is interrupted here leaves it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def answer(self) -> Answer:
        """Its head, and how it ended; its messages are given out and not kept."""
        return self._begun.conversation.answer

    def _call(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        try:
            return self._portal.call(function, *arguments, timeout=self.timeout)
        except Exception:
            raise
        except BaseException:  # Ctrl-C, whose traceback may keep us for long
            self.close()
            raise

    def close(self) -> None:
        """Leaves: where it is not over, the server is told, and cancels its model. Idempotent."""
        self._leave()


@final
class Stream(_Held, Iterator[Any]):
    """The messages of an answer, in a `for` loop; one thread at a time. Nothing is read ahead, so that a slow loop slows its
    model. After a TimeoutError the next message may still be asked for."""

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        """The next message. At the end CallFailed where the answer is an error."""
        message = self._call(self._begun.next)
        if message is _END:
            raise StopIteration
        return message


@final
class Duplex(_Held):
    """Parts in both directions; one thread may send while another receives.

    Up to 16 parts that nobody has received are read ahead. A model that sends more waits, and may then take no more itself:
    whoever sends much from one thread must receive in between. After a TimeoutError of `receive` it may be called again; one
    of `send` leaves open whether the part was sent.
    """

    _begun: _Talk

    def send(self, data: bytes, *, last: bool = True, text: bool = False) -> None:
        """Sends a part, and returns when it is written but for a bounded rest; `last` False: the next part continues it;
        `text`: it is UTF-8. TransportLost where the answer is over, or what `receive` would raise."""
        self._call(self._begun.send, data, last, text)

    def end(self) -> None:
        """There are no more parts."""
        self._call(self._begun.end)

    def receive(self) -> bytes | None:
        """The next part; None at the end. CallFailed where the answer is an error."""
        message = self._call(self._begun.next)
        return None if message is _END else message

    def __iter__(self) -> Iterator[bytes]:
        while (part := self.receive()) is not None:
            yield part


# ---- in the run's thread ----

_END: Any = object()


@final
class _Calls:
    """The connections: those in use, and idle ones."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        self._url, self._tls = url, tls
        self._idle: list[conversations.Client] = []
        self._all: set[conversations.Client] = set()

    def close(self) -> None:
        for connection in self._all:
            connection.close()

    async def take(self, question: Question) -> conversations.Client:
        while (connection := self._idle_for(question)) is not None:
            if await _fit(connection.peer):
                return connection
            self.drop(connection)
        return await self.connect(question)

    def _idle_for(self, question: Question) -> conversations.Client | None:
        """The last that became idle, of those that can carry it."""
        for at in reversed(range(len(self._idle))):
            if self._idle[at].carries(question):
                return self._idle.pop(at)
        return None

    async def connect(self, question: Question) -> conversations.Client:
        connection = await connected(self._url, tls=self._tls, prior_knowledge=question.http2)
        self._all.add(connection)
        return connection

    def give(self, connection: conversations.Client, answer: Answer) -> None:
        """Its answer is whole: it may serve another call."""
        fields = dict(answer.headers)
        if len(self._idle) < _IDLE and b"close" not in fields.get(b"connection", b"").lower():
            self._idle.append(connection)
        else:
            self.drop(connection)

    def drop(self, connection: conversations.Client) -> None:
        self._all.discard(connection)
        connection.close()

    async def call(self, question: Question) -> Answer:
        connection = await self.take(question)
        try:
            answer = await connection.call(question)
        except BaseException:
            self.drop(connection)
            raise
        self.give(connection, answer)
        return answer


def _beside(function: Callable[[], Awaitable[None]]) -> None:
    """Runs it beside the call that says so, which is a child of the portal's own nursery."""
    nursery = trio.lowlevel.current_task().parent_nursery
    assert nursery is not None
    nursery.start_soon(function)


async def _fit(peer: Peer) -> bool:
    """Whether an idle connection may be used again: what its server has said meanwhile is heard first."""
    with trio.CancelScope(deadline=-math.inf):
        try:
            while not isinstance(await peer.next_event(), ConnectionEnd | GoAway):
                pass
        except (TransportLost, RemoteProtocolError):
            pass
        return False
    return True


class _Begun:
    """A conversation under way, on a connection of its own."""

    conversation: Conversation

    def __init__(self, calls: _Calls, question: Question) -> None:
        self._calls, self._question = calls, question
        self._connection: conversations.Client | None = None
        self._over = False

    async def open(self) -> None:
        """Connects, and begins to ask."""
        self._on(await self._calls.take(self._question))
        _beside(self.ask)

    def _on(self, connection: conversations.Client) -> None:
        self._connection, self.conversation = connection, connection.about(self._question)
        if self._over:
            self._calls.drop(connection)

    async def ask(self) -> None:
        """Sends the question, while its answer is read already."""
        with suppress(TransportLost, LocalProtocolError):  # whoever receives hears why
            await self.conversation.begin()

    async def next(self) -> Any:
        """The next message, _END after the last; after that it is for ever the same."""
        try:
            return await anext(self.conversation)
        except StopAsyncIteration:
            self._whole()
            return _END
        except CallFailed:
            self._whole()
            raise
        except (TransportLost, RemoteProtocolError, V2Error):
            self.leave()
            raise

    def _whole(self) -> None:
        if not self._over and self._connection is not None and self.conversation.said:
            self._over = True
            self._calls.give(self._connection, self.conversation.answer)
        self.leave()

    def leave(self) -> None:
        """Ends the connection, unless it serves another call by now."""
        if not self._over:
            self._over = True
            if self._connection is not None:
                self._calls.drop(self._connection)


@final
class _Talk(_Begun):
    """One that has a reader of its own, because whoever sends needs the windows that come with what is read."""

    def __init__(self, calls: _Calls, question: Question) -> None:
        super().__init__(calls, question)
        self._put, self._got = trio.open_memory_channel[bytes](_AHEAD)
        self._error: Exception | None = None
        self._sending: set[trio.CancelScope] = set()

    async def open(self) -> None:
        """Connects, and sends the head."""
        self._on(await self._calls.connect(self._question))
        await self.conversation.begin()
        _beside(self._pump)

    async def _pump(self) -> None:
        """Reads to the end, or until nobody has room."""
        try:
            async for part in self.conversation:
                await self._put.send(part)
        except Exception as e:  # raised where somebody receives
            self._error = e
        finally:
            self._put.close()
            for scope in self._sending:
                scope.cancel()
            super().leave()  # what waits may still be received

    def leave(self) -> None:
        """The same, and nothing that waits is wanted."""
        super().leave()
        self._got.close()

    async def next(self) -> Any:
        """The next part, _END after the last."""
        try:
            return await self._got.receive()
        except trio.EndOfChannel:
            if self._error is not None:
                raise copy(self._error) from None  # one that was raised would keep this, by its traceback
            return _END
        except trio.ClosedResourceError:
            raise TransportLost("it was left") from None

    async def send(self, data: bytes, last: bool, text: bool) -> None:
        """A part, and waits for its room."""
        await self._say(lambda: self.conversation.send(data, last=last, text=text), room=True)

    async def end(self) -> None:
        """The end of input."""
        await self._say(self.conversation.end, room=False)

    async def _say(self, say: Callable[[], Awaitable[None]], *, room: bool) -> None:
        with trio.CancelScope() as scope:
            self._sending.add(scope)
            try:
                if not self._over:
                    await say()
                    if room:
                        await self.conversation.wait_room()
                    return
            except (TransportLost, LocalProtocolError):
                pass  # the reader hears why
            finally:
                self._sending.discard(scope)
        if self._error is not None:
            raise copy(self._error)
        raise TransportLost("the answer is over: nothing more can be sent")
