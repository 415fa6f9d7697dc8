"""One client for each transport: it sends what a story says, and its talk hears what comes, in the client's own time."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from gateway import client
from gateway.client import Peer, questions
from gateway.client.answers import Answer, EventsAnswer
from gateway.client.conversations import CUT_OFF
from gateway.client.questions import Question
from gateway.errors import TransportLost
from gateway.net.transport import MemoryTransport
from gateway.testing.stories.talk import Form, Talk, View
from protocols.aws import bidi
from protocols.errors import RemoteProtocolError
from protocols.events import Buffer, Close, ConnectionEnd, Data, End, Frame, Headers, Opcode, Reset, Response
from protocols.http2.connection import HTTP2Connection, HTTP2Limits
from protocols.roles import Role
from protocols.websocket.connection import WebSocketConnection


def ask(
    form: Form, model: str, *, text: str = "", tokens: int = 1, tensor: npt.NDArray[Any] | None = None, body: bytes = b""
) -> Question:
    """The request of a form: a prompt for so many tokens, the tensor "x", or a body as it is."""
    match form:
        case Form.LMI | Form.LMI_JSON:
            return questions.lmi(text, model, stream=form.streams, max_new_tokens=tokens)
        case Form.OPENAI:
            return questions.openai(text, model, stream=True, max_tokens=tokens)
        case Form.INFER | Form.INFER_JSON | Form.INFER_EVENTS | Form.INFER_FRAMES:
            binary = form in (Form.INFER, Form.INFER_FRAMES)
            return questions.infer({"x": np.asarray(tensor)}, model, binary=binary, stream=form.streams)
        case Form.GRPC:
            return questions.grpc_infer({"x": np.asarray(tensor)}, model)
        case Form.GRPC_STREAM:
            return questions.grpc_infer({"x": np.asarray(tensor)}, model, stream=True)
        case Form.INVOKE | Form.STREAM:
            return questions.invoke(model, body, "application/octet-stream", stream=form is Form.STREAM)
        case Form.BIDI:
            return questions.bidirectional(model)
        case Form.SOCKET:
            path = f"/models/{model}/invocations-bidirectional-stream"
            return Question(path=path, body=None, answer=Answer, headers=())


Body = Callable[[], AsyncGenerator[Buffer, None]]
"""A request's body, piece by piece."""
Broken = Callable[[RemoteProtocolError], None]
"""Called with the error if a client cannot read its answer."""


class Hearing:
    """Reads the answer for the client of a talk. A message is heard when its last byte has arrived."""

    def __init__(self, talk: Talk, answer: Answer, pace: float | None = None) -> None:
        """`pace` is that of the client, in seconds per piece; default None: it does not pause."""
        self.talk, self.answer, self._pace = talk, answer, pace
        self.count = 0
        """The number of messages so far."""

    async def pause(self) -> None:
        """Pauses before a piece."""
        if self._pace is not None:
            await trio.sleep(self._pace)

    async def piece(self, data: Buffer) -> None:
        """Takes a piece of the body."""
        self.answer.feed(data)
        self._hear()

    async def frame(self, frame: Frame) -> None:
        """Takes a frame of a WebSocket."""
        self.talk.hear(self.talk.kept(frame.data, frame.fin))
        self.count += 1

    def end(self, trailers: Headers = ()) -> View:
        """Takes the end of the body, with the trailers. Returns how the call ended."""
        self.answer.end(trailers)
        self._hear()
        return View.COMPLETE if self.answer.complete else View.ERROR

    def _hear(self) -> None:
        messages = self.answer.messages
        while self.count < len(messages):
            at, message = self.count, messages[self.count]
            self.count += 1
            if isinstance(message, dict):
                message = message["text_output"]
            if isinstance(message, str):
                for text in self.talk.split(message):
                    self.talk.hear(text)
            elif isinstance(self.answer, EventsAnswer):
                self.talk.hear(self.talk.kept(message, self.answer.states[at] is bidi.Completion.COMPLETE))
            elif isinstance(message, bytes):
                self.talk.hear(message)
            else:
                self.talk.hear(message["y"].elements.tobytes())


async def viewed(reading: Callable[[], Awaitable[View]], broken: Broken) -> View:
    """How the call ended, as its reader sees it. Only the end of a connection may come in the middle of something."""
    try:
        return await reading()
    except TransportLost:
        return View.CUT
    except RemoteProtocolError as e:
        if CUT_OFF not in str(e):
            broken(e)
        return View.CUT


async def write(peer: Peer, stream: int, body: Body) -> None:
    """A request's body, and its end."""
    async with aclosing(body()) as pieces:
        async for piece in pieces:
            await peer.send(Data(stream=stream, buffers=(piece,)))
    await peer.send(End(stream=stream))


# -- HTTP/1.1 ----------------------------------------------------------------------------------------------------------


async def read_http1(peer: Peer, hearing: Hearing) -> View:
    """The answer that is next on a connection."""
    while True:
        match event := await peer.next_event():
            case Response() if event.status >= 200:
                hearing.answer.head(event)
            case Data():
                await hearing.pause()
                peer.credit(event)
                await hearing.piece(event.buffers[0])
            case End(trailers=trailers):
                return hearing.end(trailers)
            case ConnectionEnd():
                return View.CUT


# -- HTTP/2 ------------------------------------------------------------------------------------------------------------


class Streams:
    """A connection of HTTP/2, whose events go to the streams that they are of."""

    def __init__(self, transport: MemoryTransport, window: int, broken: Broken) -> None:
        """`window` is that of each stream, and does not grow: answers wait for their readers."""
        self.machine = HTTP2Connection(Role.CLIENT, HTTP2Limits(initial_window=window, max_window=window))
        self.peer = Peer(transport, self.machine)
        self._broken = broken
        self._inboxes: dict[int, trio.MemorySendChannel[Any]] = {}
        self._over = False

    async def deal(self) -> None:
        """Until the connection ends."""
        try:
            while not isinstance(event := await self.peer.next_event(), ConnectionEnd):
                inbox = self._inboxes.get(getattr(event, "stream", 0))
                if inbox is not None:
                    inbox.send_nowait(event)
        except TransportLost:
            pass
        except RemoteProtocolError as e:
            if CUT_OFF not in str(e):
                self._broken(e)
        finally:
            self._over = True
            for stream in list(self._inboxes):
                self.forget(stream)

    def open(self) -> tuple[int, trio.MemoryReceiveChannel[Any]]:
        """A new stream, whose request is to be sent, and what comes on it."""
        stream = self.machine.next_stream
        self._inboxes[stream], inbox = trio.open_memory_channel[Any](math.inf)
        if self._over:
            self.forget(stream)
        return stream, inbox

    def forget(self, stream: int) -> None:
        """The stream's reader hears no more."""
        inbox = self._inboxes.pop(stream, None)
        if inbox is not None:
            inbox.close()

    def reset(self, stream: int) -> bool:
        """Queues a reset of the stream by its client. True if the stream was still open."""
        if not self.machine.is_open(stream):
            return False
        self.machine.send(Reset(stream=stream, code=8))
        self.forget(stream)
        return True

    async def read(self, inbox: trio.MemoryReceiveChannel[Any], hearing: Hearing) -> View:
        """Reads the answer on a stream."""
        async for event in inbox:
            match event:
                case Response() if event.status >= 200:
                    hearing.answer.head(event)
                case Data():
                    await hearing.pause()
                    await hearing.piece(event.buffers[0])
                    self.peer.credit(event)
                    with suppress(TransportLost):  # bytes that the server wrote before are still read
                        await self.peer.flush()
                case End(trailers=trailers):
                    return hearing.end(trailers)
                case Reset():
                    return View.CUT
        return View.CUT


# -- WebSocket ---------------------------------------------------------------------------------------------------------


class Socket:
    """A WebSocket of one talk."""

    def __init__(self, peer: Peer) -> None:
        assert isinstance(peer.machine, WebSocketConnection)
        self.peer, self.machine = peer, peer.machine

    @classmethod
    async def open(cls, talk: Talk, transport: MemoryTransport, path: str) -> Socket | None:
        """Its handshake; None where there is none, which is what the talk sees."""
        try:
            return cls(await client.websocket(transport, path))
        except client.UpgradeRefused as e:
            talk.view = View.ERROR
            talk.tell(f"{talk.name} sees {talk.view.value}: {e}")
        except (TransportLost, RemoteProtocolError) as e:
            talk.view = View.CUT
            talk.tell(f"{talk.name} sees {talk.view.value}: {e}")
        return None

    async def write(self, talk: Talk, parts: Iterable[tuple[bytes, bool]], pause: float) -> None:
        """Parts, and whether others continue them, as frames; `pause` is before each."""
        first = True
        for data, last in parts:
            if pause:
                await trio.sleep(pause)
            if not self.machine.is_open:
                return
            talk.ask(talk.kept(data, last))
            await self.peer.send(Frame(opcode=Opcode.BINARY if first else Opcode.CONTINUATION, fin=last, data=data))
            first = last

    async def read(self, hearing: Hearing) -> View:
        """The answer, to the Close."""
        while True:
            match event := await self.peer.next_event():
                case Frame():
                    await hearing.pause()
                    self.machine.credit(len(event.data))
                    await hearing.frame(event)
                case Close():
                    with suppress(TransportLost):
                        await self.peer.flush()
                    if hearing.talk.left:
                        return View.CUT
                    return View.COMPLETE if event.code == 1000 else View.ERROR
                case ConnectionEnd():
                    return View.CUT
