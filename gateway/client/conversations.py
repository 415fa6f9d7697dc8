"""Calls of the dialects, over any client connection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, final

import numpy.typing as npt
import trio

from gateway.client.answers import Answer, EventsAnswer
from gateway.client.connection import Peer, post
from gateway.client.questions import Question, bidirectional, generate, grpc_infer, infer, invoke, lmi, openai
from gateway.errors import TransportLost
from protocols import v2
from protocols.aws import bidi
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Close, ConnectionEnd, Data, End, Frame, Opcode, Reset, Response
from protocols.grpc.metadata import Metadata
from protocols.http1.connection import HTTP1Connection
from protocols.http2.connection import HTTP2Connection

_GOODBYE = 1.0
"""Seconds at most to write the reset of an abandoned stream to a full connection."""
CUT_OFF = "the connection ended"
"""Part of the machines' error message for a connection that ended in the middle of something: TransportLost, not a
violation."""


@final
class Client:
    """One connection, for calls one after the other; each returns its whole Answer.

    `call` and `stream` raise an error that an answer reports; the other methods leave it in the Answer. `prefix` is the path
    below which the gateway is mounted. For several calls at a time, pauses or invalid requests, use the Peer.
    """

    def __init__(self, peer: Peer, *, authority: bytes = b"localhost", scheme: bytes = b"http", prefix: str = "") -> None:
        self.peer = peer
        self._authority, self._scheme, self._prefix = authority, scheme, prefix
        self._requests = 0

    async def lmi(self, prompt: str, model: str = "", *, stream: bool = False, **parameters: Any) -> Answer:
        """Calls text generation. The parameters are LMI's, such as `max_new_tokens`."""
        return await self.ask(lmi(prompt, model, stream=stream, **parameters))

    async def openai(
        self, messages: str | Sequence[Mapping[str, str]], model: str = "", *, stream: bool = False, **parameters: Any
    ) -> Answer:
        """Calls a chat completion. The parameters are OpenAI's, such as `max_tokens`."""
        return await self.ask(openai(messages, model, stream=stream, **parameters))

    async def infer(
        self,
        inputs: Mapping[str, npt.NDArray[Any]],
        model: str,
        *,
        binary: bool = True,
        stream: bool = False,
        parameters: Mapping[str, Any] = v2.NO_PARAMETERS,
    ) -> Answer:
        """Calls v2's infer, or infer_stream. Each message has `outputs`."""
        return await self.ask(infer(inputs, model, binary=binary, stream=stream, parameters=parameters))

    async def grpc_infer(
        self,
        inputs: Mapping[str, npt.NDArray[Any]],
        model: str,
        *,
        stream: bool = False,
        typed: bool = False,
        id: str = "",
        parameters: Mapping[str, Any] = v2.NO_PARAMETERS,
        timeout: float | None = None,  # noqa: ASYNC109  # sent to the server, which enforces it
        metadata: Metadata = (),
    ) -> Answer:
        """Calls gRPC's ModelInfer, or ModelStreamInfer, over HTTP/2. Each message has `outputs`; the answer's `code` is the
        status code. `timeout` is in seconds."""
        return await self.ask(
            grpc_infer(
                inputs, model, stream=stream, typed=typed, id=id, parameters=parameters, timeout=timeout, metadata=metadata
            )
        )

    async def generate(self, members: Mapping[str, Any], model: str, *, stream: bool = False, **parameters: Any) -> Answer:
        """Calls v2's generate, or generate_stream. Text is the member `text_input`; each message is an object."""
        return await self.ask(generate(members, model, stream=stream, **parameters))

    async def invoke(
        self, endpoint: str, body: bytes, content_type: str = "application/json", *, stream: bool = False
    ) -> Answer:
        """Calls SageMaker's InvokeEndpoint, or InvokeEndpointWithResponseStream."""
        return await self.ask(invoke(endpoint, body, content_type, stream=stream))

    async def ask(self, question: Question) -> Answer:
        """Sends a question that has a body and returns the whole answer, also if it is an error. TransportLost if the
        connection ends before the answer does."""
        conversation = self.about(question)
        await conversation.begin()
        return await conversation.rest()

    async def call(self, question: Question) -> Answer:
        """Sends a question that has a body and returns the whole answer; CallFailed if it is an error. The answer is read
        while the body is still being sent. If the call does not reach the answer's end, also by cancellation, the stream is
        reset or the connection closed, so that the server stops."""
        async with self.stream(question) as conversation:
            return (await conversation.rest()).check()

    @asynccontextmanager
    async def stream(self, question: Question) -> AsyncIterator[Conversation]:
        """The answer to a question that has a body, to iterate over as its messages arrive:

            async with client.stream(lmi("hello", stream=True)) as tokens:
                async for token in tokens: ...

        The iteration raises CallFailed if the answer is a refusal or breaks off. If the answer is not whole at the end of
        the block, the rest is not read: the stream is reset, or the connection closed.
        """
        conversation = self.about(question)
        async with _sent(conversation):
            yield conversation

    async def bidi(self, endpoint: str) -> Conversation:
        """Opens a bidirectional stream, over HTTP/2."""
        conversation = self.about(bidirectional(endpoint))
        await conversation.begin()
        return conversation

    def about(self, question: Question) -> Conversation:
        """A conversation on the next stream of the connection; nothing is sent yet. LocalProtocolError if the question needs
        HTTP/2 and the connection has another protocol."""
        machine = self.peer.machine
        if not self.carries(question):
            raise LocalProtocolError(f"{question.path} needs HTTP/2: connect with prior_knowledge=True, or over https")
        if isinstance(machine, HTTP2Connection):
            stream = machine.next_stream
        else:
            assert isinstance(machine, HTTP1Connection)
            stream = self._requests = self._requests + 1
        if self._prefix:
            question = replace(question, path=self._prefix + question.path)
        return Conversation(self.peer, stream, question, authority=self._authority, scheme=self._scheme)

    def carries(self, question: Question) -> bool:
        """True if the connection's protocol can carry the question."""
        return not question.http2 or isinstance(self.peer.machine, HTTP2Connection)

    def close(self) -> None:
        """Closes the connection at once."""
        self.peer.close()


@final
class Conversation:
    """A request and its answer on one stream. On a bidirectional stream, both go on side by side."""

    def __init__(
        self, peer: Peer, stream: int, question: Question, *, authority: bytes = b"localhost", scheme: bytes = b"http"
    ) -> None:
        self._peer, self._stream, self._question = peer, stream, question
        self._authority, self._scheme = authority, scheme
        self.answer = question.answer()
        self.said = False
        """True once the head, and the body if there is one, have been written."""
        self._taken = 0

    async def begin(self) -> None:
        """Sends the head, and the body if there is one. TransportLost if the server has ended the connection."""
        if self._peer.over:
            raise TransportLost("the server has ended this connection: open another one")
        question = self._question
        head = post(
            self._stream, question.path, question.body, question.headers, authority=self._authority, scheme=self._scheme,
            declares=question.declares,
        )  # fmt: skip
        await self._peer.send(*head)
        self.said = True

    async def send(self, data: bytes, *, last: bool = True, text: bool = False) -> None:
        """Sends the next part. `last` False: the part after it continues it. `text`: it is UTF-8."""
        state = bidi.Completion.COMPLETE if last else bidi.Completion.PARTIAL
        kind = bidi.DataType.UTF8 if text else bidi.DataType.BINARY
        await self._event(bidi.encode_request_part(data, kind, state, date_ms=0))

    async def wait_room(self) -> None:
        """Waits until all but a bounded rest of the sent bytes is written. Another task must be receiving."""
        await self._peer.wait_room(self._stream)

    async def end(self) -> None:
        """Ends the request: there are no more parts."""
        await self._event(bidi.encode_request_end(date_ms=0))
        await self._peer.send(End(stream=self._stream))

    async def _event(self, buffers: Sequence[Any]) -> None:
        await self._peer.send(Data(stream=self._stream, buffers=tuple(buffers)))

    async def receive(self) -> Any:
        """The next message of the answer; None at the end: `answer` then has the error, if there is one."""
        answer = self.answer
        while len(answer.messages) == self._taken:
            if answer.over:
                return None
            await self.step()
        self._taken += 1
        return answer.messages[self._taken - 1]

    def __aiter__(self) -> Conversation:
        return self

    async def __anext__(self) -> Any:
        """Like `receive`, but `answer` does not keep the messages. At the end, CallFailed if the answer is an error."""
        message = await self.receive()
        answer = self.answer
        del answer.messages[: self._taken]
        if isinstance(answer, EventsAnswer):
            del answer.states[: self._taken]
        self._taken = 0
        if message is None and answer.over:
            answer.check()
            raise StopAsyncIteration
        return message

    async def rest(self) -> Answer:
        """Waits for the end of the answer, and returns it."""
        while not self.answer.over:
            await self.step()
        return self.answer

    async def step(self) -> None:
        """Reads one event of the connection into `answer`, if it belongs there. TransportLost if the answer is cut off."""
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
                self.answer.end(event.trailers)
            case Reset() if event.stream == self._stream:
                raise TransportLost(f"the stream was reset with code {event.code}")
            case ConnectionEnd():
                raise TransportLost("the connection ended before the answer was complete")

    def leave(self) -> None:
        """Abandons the call: over HTTP/2 resets the stream with the next write, otherwise closes the connection."""
        if isinstance(self._peer.machine, HTTP2Connection):
            self._peer.machine.send(Reset(stream=self._stream, code=8))
        else:
            self._peer.close()

    async def abandon(self) -> None:
        """Abandons the call like `leave`, and writes the reset. Does nothing if the stream has ended."""
        with suppress(LocalProtocolError):
            self.leave()
            await self._peer.flush()


@asynccontextmanager
async def _sent(conversation: Conversation) -> AsyncIterator[None]:
    """Sends a question while the block reads its answer; abandons the call at the end unless the answer is whole."""
    wrong: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_begin, conversation)
            try:
                yield
            except Exception as e:  # raised below, outside of a group
                wrong = e
            nursery.cancel_scope.cancel()
    finally:
        if not (conversation.answer.over and conversation.said):
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _GOODBYE), suppress(TransportLost):
                await conversation.abandon()
    if wrong is not None:
        try:
            raise wrong
        finally:
            wrong = None  # it knows this frame: a cycle would keep the conversation


async def _begin(conversation: Conversation) -> None:
    with suppress(TransportLost, LocalProtocolError):  # the receiver raises the reason
        await conversation.begin()


@final
class SocketConversation:
    """A WebSocket, frame by frame; a message is one frame unless `send_frame` splits it."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.code: int | None = None
        """The code of the server's Close; None before it, or if it has none."""
        self.reason = ""

    async def send(self, data: str | bytes) -> None:
        """Sends one message in one frame."""
        text = isinstance(data, str)
        payload = data.encode() if isinstance(data, str) else data
        await self.send_frame(Opcode.TEXT if text else Opcode.BINARY, payload)

    async def send_frame(self, opcode: Opcode, data: bytes, *, fin: bool = True) -> None:
        """Sends one frame. A frame that continues a message is a CONTINUATION."""
        await self.peer.send(Frame(opcode=opcode, fin=fin, data=data))

    @property
    def can_end(self) -> bool:
        """True if the server can be told that there is no more input."""
        return self.peer.end_of_input is not None

    async def end(self) -> None:
        """Tells the server that there is no more input. The server sends the rest of its answer and a Close.
        LocalProtocolError if the server has named no text for the end of input (`can_end`)."""
        if self.peer.end_of_input is None:
            raise LocalProtocolError("the server has named no end of input: a WebSocket has none of its own")
        await self.send_frame(Opcode.TEXT, self.peer.end_of_input)

    async def receive(self) -> bytes | None:
        """The bytes of the next frame; None after a Close, when `code` is set."""
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
        """Sends a Close."""
        await self.peer.send(Close())
