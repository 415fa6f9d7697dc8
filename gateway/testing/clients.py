"""Clients that know the dialects: a call is one line of a test. Over whatever connection they are given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy.typing as npt

from gateway import client
from gateway.client import Peer
from gateway.errors import TransportLost
from gateway.testing.answers import (
    Answer,
    BodyAnswer,
    CompletionAnswer,
    CompletionEventsAnswer,
    EventsAnswer,
    GeneratedAnswer,
    InferAnswer,
    InferEventsAnswer,
    InferFramesAnswer,
    LinesAnswer,
)
from models.messages import datatype_of
from protocols import bidi, v2
from protocols.errors import RemoteProtocolError
from protocols.events import Close, ConnectionEnd, Data, End, Frame, Headers, Opcode, Reset, Response
from protocols.http1 import HTTP1Connection
from protocols.http2 import HTTP2Connection

_JSON: Headers = ((b"content-type", b"application/json"),)
_EVENTS: Headers = ((b"content-type", bidi.CONTENT_TYPE.encode()),)


CUT_OFF = "the connection ended"
"""In what a machine says where its peer has left in the middle of something: no other violation is the network's."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request of some dialect, and what reads its answer. `body` None: it is sent piece by piece."""

    path: str
    answer: type[Answer]
    headers: Headers = _JSON
    body: bytes | None = b""


def lmi(prompt: str, model: str = "", *, stream: bool = False, **parameters: Any) -> Question:
    """Text generation at LMI's routes: one document, or jsonlines."""
    asked = {"inputs": prompt, "parameters": parameters, **({"stream": True} if stream else {})}
    path = f"/predictions/{model}" if model else "/invocations"
    return Question(path=path, body=json.dumps(asked).encode(), answer=LinesAnswer if stream else GeneratedAnswer)


def openai(
    messages: str | Sequence[Mapping[str, str]], model: str = "", *, stream: bool = False, **parameters: Any
) -> Question:
    """A chat completion; a str is the one message of a user."""
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    asked = {"messages": said, "stream": stream, **({"model": model} if model else {}), **parameters}
    answer = CompletionEventsAnswer if stream else CompletionAnswer
    return Question(path="/v1/chat/completions", body=json.dumps(asked).encode(), answer=answer)


def infer(inputs: Mapping[str, npt.NDArray[Any]], model: str, *, binary: bool = True, stream: bool = False) -> Question:
    """v2's infer, with binary tensors or in JSON, in both directions; or its infer_stream."""
    tensors = [v2.V2Tensor(name=name, datatype=datatype_of(a.dtype), array=a) for name, a in inputs.items()]
    headers, buffers = v2.encode_infer_request(tensors, binary=binary, binary_data_output=binary)
    fields = tuple(field for field in headers if field[0] != b"content-length")
    path, body = f"/v2/models/{model}/infer", b"".join(buffers)
    if not stream:
        return Question(path=path, headers=fields, body=body, answer=InferAnswer)
    if binary:
        fields = (*fields, (b"accept", v2.FRAMES.encode()))
    return Question(
        path=path + "_stream", headers=fields, body=body, answer=InferFramesAnswer if binary else InferEventsAnswer
    )


def invoke(endpoint: str, body: bytes, content_type: str = "application/json", *, stream: bool = False) -> Question:
    """SageMaker's InvokeEndpoint, or InvokeEndpointWithResponseStream."""
    path = f"/endpoints/{endpoint}/invocations" + ("-response-stream" if stream else "")
    headers = ((b"content-type", content_type.encode()),)
    return Question(path=path, headers=headers, body=body, answer=EventsAnswer if stream else BodyAnswer)


def bidirectional(endpoint: str) -> Question:
    """SageMaker's InvokeEndpointWithBidirectionalStream: events in both directions."""
    path = f"/endpoints/{endpoint}/invocations-bidirectional-stream"
    return Question(path=path, headers=_EVENTS, body=None, answer=EventsAnswer)


@final
class Client:
    """One connection, and calls one after the other; each returns its whole Answer.

    For more than one at a time, for pauses, and for what is no proper request, there is the Peer itself.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
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
        conversation = self._begin(question)
        await conversation.begin()
        return await conversation.rest()

    async def bidi(self, endpoint: str) -> Conversation:
        """A bidirectional stream over HTTP/2."""
        conversation = self._begin(bidirectional(endpoint))
        await conversation.begin()
        return conversation

    def _begin(self, question: Question) -> Conversation:
        machine = self.peer.machine
        if isinstance(machine, HTTP2Connection):
            return Conversation(self.peer, machine.next_stream, question)
        assert isinstance(machine, HTTP1Connection)
        self._requests += 1
        return Conversation(self.peer, self._requests, question)

    def close(self) -> None:
        """Leaves."""
        self.peer.close()


@final
class Conversation:
    """A request and its answer on one stream; of a bidirectional one, both as they go on."""

    def __init__(self, peer: Peer, stream: int, question: Question) -> None:
        self._peer, self._stream, self._question = peer, stream, question
        self.answer = question.answer()
        self._taken = 0

    async def begin(self) -> None:
        """Sends the head, and the body where there is one."""
        question = self._question
        await self._peer.send(*client.post(self._stream, question.path, question.body, question.headers))

    async def send(self, data: bytes, *, last: bool = True) -> None:
        """The next part; `last` False: the next one continues it."""
        state = bidi.Completion.COMPLETE if last else bidi.Completion.PARTIAL
        await self._event(bidi.encode_request_part(data, bidi.DataType.BINARY, state, date_ms=0))

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
            await self._step()
        self._taken += 1
        return answer.messages[self._taken - 1]

    async def rest(self) -> Answer:
        """The answer, when it is whole."""
        while not self.answer.over:
            await self._step()
        return self.answer

    async def _step(self) -> None:
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
        await self.peer.send(Frame(opcode=Opcode.TEXT if text else Opcode.BINARY, fin=True, data=payload))

    async def receive(self) -> bytes | None:
        """The next frame; None after a Close, whose `code` is there then."""
        machine: Any = self.peer.machine
        while True:
            match event := await self.peer.next_event():
                case Frame():
                    machine.credit(len(event.data))
                    return bytes(event.data)
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
