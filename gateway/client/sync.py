"""The client for programs without an event loop: the typed client's questions and answers, with blocking calls.

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
"""Idle connections that are kept for later calls, at most."""
_AHEAD = 16
"""Messages of a bidirectional stream that are read ahead, at most."""


@final
class Client:
    """Calls the gateway at `url`. Threads may call at the same time: each call has its own connection, and idle ones are
    used again. One background thread does the work.

    `url` and `tls` are as for `gateway.client.open_client`. `timeout` is the time in seconds for a call, connecting
    included, and for each message of a stream: default 60, None for no limit. TimeoutError if it is over. Other errors are
    the typed client's: OSError if there is no connection, `gateway.errors.TransportLost` if it is lost,
    `gateway.client.CallFailed` if the server answers with an error; and Closed after `close`.

    `close`, the end of the `with` block, the end of the program and the collection of the client end all calls and close all
    connections, within 5 seconds. In a task of Trio, each call raises RuntimeError.
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
        """Ends all calls and closes all connections. A second call does nothing."""
        self._portal.close()

    def call(self, question: Question) -> Answer:
        """The whole answer; CallFailed if it is an error. Ctrl-C and the timeout abandon the call, which cancels its
        model."""
        return self._portal.call(self._calls.call, question, timeout=self.timeout)

    def stream(self, question: Question) -> Stream:
        """The answer as its messages arrive. The request is sent at once; the first message raises a refusal."""
        return Stream(self._portal, _Begun(self._calls, question), self.timeout)

    def bidirectional(self, endpoint: str) -> Duplex:
        """Opens SageMaker's bidirectional stream, over HTTP/2."""
        return Duplex(self._portal, _Talk(self._calls, bidirectional(endpoint)), self.timeout)


class _Held:
    """A call under way, as its caller holds it; abandoned when it is closed or collected."""

    def __init__(self, portal: Portal, begun: _Begun, timeout: float | None) -> None:
        self.timeout = timeout
        self._portal, self._begun = portal, begun
        self._leave = weakref.finalize(self, portal.detached, begun.leave)
        self._leave.atexit = False  # at the end of the program the client ends all calls
        self._call(begun.open)  # last: an interrupt from here on abandons the call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def answer(self) -> Answer:
        """The answer's head, and its error if there is one. It does not keep the messages."""
        return self._begun.conversation.answer

    def _call(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        try:
            return self._portal.call(function, *arguments, timeout=self.timeout)
        except Exception:
            raise
        except BaseException:  # Ctrl-C: its traceback may keep this object for long
            self.close()
            raise

    def close(self) -> None:
        """Abandons the call unless it is over: the server then cancels its model. A second call does nothing."""
        self._leave()


@final
class Stream(_Held, Iterator[Any]):
    """The messages of an answer, for a `for` loop in one thread at a time. Nothing is read ahead, so a slow loop slows the
    model. After a TimeoutError the iteration may go on."""

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        """The next message. At the end, CallFailed if the answer is an error."""
        message = self._call(self._begun.next)
        if message is _END:
            raise StopIteration
        return message


@final
class Duplex(_Held):
    """Parts in both directions; one thread may send while another receives.

    At most 16 parts are read ahead. A model that sends more waits, and may then take no more parts: a thread that sends much
    must receive in between, or leave that to another one. After a TimeoutError, `receive` may be called again; after one of
    `send`, it is unknown whether the part was sent.
    """

    _begun: _Talk

    def send(self, data: bytes, *, last: bool = True, text: bool = False) -> None:
        """Sends a part; returns when all but a bounded rest is written. `last` False: the next part continues it. `text`: it
        is UTF-8. If the answer is over, raises its error like `receive`, or TransportLost."""
        self._call(self._begun.send, data, last, text)

    def end(self) -> None:
        """Ends the input: there are no more parts."""
        self._call(self._begun.end)

    def receive(self) -> bytes | None:
        """The next part; None at the end. CallFailed if the answer is an error."""
        message = self._call(self._begun.next)
        return None if message is _END else message

    def __iter__(self) -> Iterator[bytes]:
        while (part := self.receive()) is not None:
            yield part


# ---- in the run's thread ----

_END: Any = object()


@final
class _Calls:
    """The connections of a client, in use and idle."""

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
        """The connection that became idle last, of those that can carry the question; None if there is none."""
        for at in reversed(range(len(self._idle))):
            if self._idle[at].carries(question):
                return self._idle.pop(at)
        return None

    async def connect(self, question: Question) -> conversations.Client:
        connection = await connected(self._url, tls=self._tls, prior_knowledge=question.http2)
        self._all.add(connection)
        return connection

    def give(self, connection: conversations.Client, answer: Answer) -> None:
        """Takes back a connection whose answer is whole, for another call; closes it if enough are idle or the server closes
        it."""
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
    """Runs a function beside the current call, in the portal's nursery."""
    nursery = trio.lowlevel.current_task().parent_nursery
    assert nursery is not None
    nursery.start_soon(function)


async def _fit(peer: Peer) -> bool:
    """True if an idle connection may be used again, after reading the events that have arrived meanwhile."""
    with trio.CancelScope(deadline=-math.inf):
        try:
            while not isinstance(await peer.next_event(), ConnectionEnd | GoAway):
                pass
        except (TransportLost, RemoteProtocolError):
            pass
        return False
    return True


class _Begun:
    """A conversation under way, on its own connection."""

    conversation: Conversation

    def __init__(self, calls: _Calls, question: Question) -> None:
        self._calls, self._question = calls, question
        self._connection: conversations.Client | None = None
        self._over = False

    async def open(self) -> None:
        """Connects, and begins to send the question."""
        self._on(await self._calls.take(self._question))
        _beside(self.ask)

    def _on(self, connection: conversations.Client) -> None:
        self._connection, self.conversation = connection, connection.about(self._question)
        if self._over:
            self._calls.drop(connection)

    async def ask(self) -> None:
        """Sends the question, while its answer is already being read."""
        with suppress(TransportLost, LocalProtocolError):  # the receiver raises the reason
            await self.conversation.begin()

    async def next(self) -> Any:
        """The next message; _END after the last, and on every later call."""
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
        """Closes the connection, unless it was given back."""
        if not self._over:
            self._over = True
            if self._connection is not None:
                self._calls.drop(self._connection)


@final
class _Talk(_Begun):
    """A bidirectional conversation. It has its own reading task, as sending needs the window updates that reading brings."""

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
        """Reads parts to the end; waits while the receiver is 16 parts behind."""
        try:
            async for part in self.conversation:
                await self._put.send(part)
        except Exception as e:  # `next` and `send` raise it
            self._error = e
        finally:
            self._put.close()
            for scope in self._sending:
                scope.cancel()
            super().leave()  # the parts read ahead may still be received

    def leave(self) -> None:
        """Closes the connection, and drops the parts that were read ahead."""
        super().leave()
        self._got.close()

    async def next(self) -> Any:
        """The next part, _END after the last."""
        try:
            return await self._got.receive()
        except trio.EndOfChannel:
            if self._error is not None:
                raise copy(self._error) from None  # a copy, as the traceback of the raised one would keep this object
            return _END
        except trio.ClosedResourceError:
            raise TransportLost("it was left") from None

    async def send(self, data: bytes, last: bool, text: bool) -> None:
        """Sends a part, and waits for room."""
        await self._say(lambda: self.conversation.send(data, last=last, text=text), room=True)

    async def end(self) -> None:
        """Ends the input."""
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
                pass  # the reader has the reason
            finally:
                self._sending.discard(scope)
        if self._error is not None:
            raise copy(self._error)
        raise TransportLost("the answer is over: nothing more can be sent")
