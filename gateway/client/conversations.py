"""Calls in the words of the dialects, over whatever connection they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy.typing as npt

from gateway.client.answers import Answer
from gateway.client.connection import Peer, post
from gateway.client.questions import Question, bidirectional, infer, invoke, lmi, openai
from gateway.errors import TransportLost
from protocols import bidi
from protocols.errors import RemoteProtocolError
from protocols.events import Close, ConnectionEnd, Data, End, Frame, Opcode, Reset, Response
from protocols.http1 import HTTP1Connection
from protocols.http2 import HTTP2Connection

CUT_OFF = "the connection ended"
"""In what a machine says where its peer has left in the middle of something: no other violation is the network's."""


@final
class Client:
    """One connection, and calls one after the other; each returns its whole Answer.

    For more than one at a time, for pauses, and for what is no proper request, there is the Peer itself.
    """

    def __init__(self, peer: Peer, *, authority: bytes = b"localhost", scheme: bytes = b"http") -> None:
        self.peer = peer
        self._authority, self._scheme = authority, scheme
        self._requests = 0

    async def lmi(self, prompt: str, model: str = "", *, stream: bool = False, **parameters: Any) -> Answer:
        """Text generation; the parameters are LMI's, such as `max_new_tokens`."""
        return await self.ask(lmi(prompt, model, stream=stream, **parameters))

    async def openai(
        self, messages: str | Sequence[Mapping[str, str]], model: str = "", *, stream: bool = False, **parameters: Any
    ) -> Answer:
        """A chat completion; the parameters are OpenAI's, such as `max_tokens`."""
        return await self.ask(openai(messages, model, stream=stream, **parameters))

    async def infer(
        self, inputs: Mapping[str, npt.NDArray[Any]], model: str, *, binary: bool = True, stream: bool = False
    ) -> Answer:
        """v2's infer, or infer_stream. Each message has `outputs`."""
        return await self.ask(infer(inputs, model, binary=binary, stream=stream))

    async def invoke(
        self, endpoint: str, body: bytes, content_type: str = "application/json", *, stream: bool = False
    ) -> Answer:
        """SageMaker's runtime."""
        return await self.ask(invoke(endpoint, body, content_type, stream=stream))

    async def ask(self, question: Question) -> Answer:
        """Any question that has its body. TransportLost where the connection ends before the answer does."""
        conversation = self.about(question)
        await conversation.begin()
        return await conversation.rest()

    async def bidi(self, endpoint: str) -> Conversation:
        """A bidirectional stream over HTTP/2."""
        conversation = self.about(bidirectional(endpoint))
        await conversation.begin()
        return conversation

    def about(self, question: Question) -> Conversation:
        """A conversation on the next stream of the connection; nothing is sent yet."""
        machine = self.peer.machine
        if isinstance(machine, HTTP2Connection):
            stream = machine.next_stream
        else:
            assert isinstance(machine, HTTP1Connection)
            stream = self._requests = self._requests + 1
        return Conversation(self.peer, stream, question, authority=self._authority, scheme=self._scheme)

    def close(self) -> None:
        """Leaves."""
        self.peer.close()


@final
class Conversation:
    """A request and its answer on one stream; of a bidirectional one, both as they go on."""

    def __init__(
        self, peer: Peer, stream: int, question: Question, *, authority: bytes = b"localhost", scheme: bytes = b"http"
    ) -> None:
        self._peer, self._stream, self._question = peer, stream, question
        self._authority, self._scheme = authority, scheme
        self.answer = question.answer()
        self._taken = 0

    async def begin(self) -> None:
        """Sends the head, and the body where there is one."""
        question = self._question
        head = post(
            self._stream, question.path, question.body, question.headers, authority=self._authority, scheme=self._scheme
        )
        await self._peer.send(*head)

    async def send(self, data: bytes, *, last: bool = True, text: bool = False) -> None:
        """The next part; `last` False: the next one continues it; `text`: it is UTF-8."""
        state = bidi.Completion.COMPLETE if last else bidi.Completion.PARTIAL
        kind = bidi.DataType.UTF8 if text else bidi.DataType.BINARY
        await self._event(bidi.encode_request_part(data, kind, state, date_ms=0))

    async def wait_room(self) -> None:
        """Returns when what was sent is written but for a bounded rest. Another task must be receiving."""
        await self._peer.wait_room(self._stream)

    async def end(self) -> None:
        """There are no more parts."""
        await self._event(bidi.encode_request_end(date_ms=0))
        await self._peer.send(End(stream=self._stream))

    async def _event(self, buffers: Sequence[Any]) -> None:
        await self._peer.send(Data(stream=self._stream, buffers=tuple(buffers)))

    async def receive(self) -> Any:
        """The next message of the answer; None at its end, then `answer` says how it ended."""
        answer = self.answer
        while len(answer.messages) == self._taken:
            if answer.over:
                return None
            await self.step()
        self._taken += 1
        return answer.messages[self._taken - 1]

    async def rest(self) -> Answer:
        """The answer, when it is whole."""
        while not self.answer.over:
            await self.step()
        return self.answer

    async def step(self) -> None:
        """Takes the connection's next event, whatever that brings to `answer`. TransportLost where the answer is cut off."""
        try:
            event = await self._peer.next_event()
        except RemoteProtocolError as e:
            if CUT_OFF in str(e):
                raise TransportLost(str(e)) from None
            raise
        match event:
            case Response() if event.stream == self._stream and event.status >= 200:
                self.answer.head(event)
            case Data():
                self._peer.credit(event)
                if event.stream == self._stream:
                    self.answer.feed(event.buffers[0])
            case End() if event.stream == self._stream:
                self.answer.end()
            case Reset() if event.stream == self._stream:
                raise TransportLost(f"the stream was reset with code {event.code}")
            case ConnectionEnd():
                raise TransportLost("the connection ended before the answer was complete")

    def leave(self) -> None:
        """The client loses interest: the stream is reset with the next write, or the connection is closed."""
        if isinstance(self._peer.machine, HTTP2Connection):
            self._peer.machine.send(Reset(stream=self._stream, code=8))
        else:
            self._peer.close()


@final
class SocketConversation:
    """The frames of a WebSocket, each a part in full."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.code: int | None = None
        """Of the Close that came."""
        self.reason = ""

    async def send(self, data: str | bytes) -> None:
        """One message in one frame."""
        text = isinstance(data, str)
        payload = data.encode() if isinstance(data, str) else data
        await self.send_frame(Opcode.TEXT if text else Opcode.BINARY, payload)

    async def send_frame(self, opcode: Opcode, data: bytes, *, fin: bool = True) -> None:
        """One frame; what goes on with a message that has begun is a CONTINUATION."""
        await self.peer.send(Frame(opcode=opcode, fin=fin, data=data))

    async def receive(self) -> bytes | None:
        """The bytes of the next frame; None after a Close, whose `code` is there then."""
        frame = await self.receive_frame()
        return None if frame is None else bytes(frame.data)

    async def receive_frame(self) -> Frame | None:
        """The next frame; None after a Close."""
        machine: Any = self.peer.machine
        while True:
            match event := await self.peer.next_event():
                case Frame():
                    machine.credit(len(event.data))
                    return event
                case Close():
                    self.code, self.reason = event.code, event.reason
                    await self.peer.flush()
                    return None
                case ConnectionEnd():
                    if self.code is not None:
                        return None
                    raise TransportLost("the connection ended without a Close")

    async def close(self) -> None:
        """Says goodbye."""
        await self.peer.send(Close())
