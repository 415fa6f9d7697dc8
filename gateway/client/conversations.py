"""Calls in the words of the dialects, over whatever connection they are given."""

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
"""Seconds that a full connection has to take the reset of a stream that was left."""
CUT_OFF = "the connection ended"
"""In what a machine says where its peer has left in the middle of something: no other violation is the network's."""


@final
class Client:
    """One connection, and calls one after the other; each returns its whole Answer.

    `call` and `stream` raise what an answer says went wrong; the others leave it in the Answer. `prefix` is where the
    gateway is mounted. For more than one at a time, for pauses, and for what is no proper request, there is the Peer itself.
    """

    def __init__(self, peer: Peer, *, authority: bytes = b"localhost", scheme: bytes = b"http", prefix: str = "") -> None:
        self.peer = peer
        self._authority, self._scheme, self._prefix = authority, scheme, prefix
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
        self,
        inputs: Mapping[str, npt.NDArray[Any]],
        model: str,
        *,
        binary: bool = True,
        stream: bool = False,
        parameters: Mapping[str, Any] = v2.NO_PARAMETERS,
    ) -> Answer:
        """v2's infer, or infer_stream. Each message has `outputs`."""
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
        timeout: float | None = None,  # noqa: ASYNC109  # the server's, which is told of it
        metadata: Metadata = (),
    ) -> Answer:
        """gRPC's ModelInfer, or ModelStreamInfer, over HTTP/2. Each message has `outputs`; `code` of the answer is its
        status."""
        return await self.ask(
            grpc_infer(
                inputs, model, stream=stream, typed=typed, id=id, parameters=parameters, timeout=timeout, metadata=metadata
            )
        )

    async def generate(self, members: Mapping[str, Any], model: str, *, stream: bool = False, **parameters: Any) -> Answer:
        """v2's generate, or generate_stream; text is the member `text_input`. Each message is an object."""
        return await self.ask(generate(members, model, stream=stream, **parameters))

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

    async def call(self, question: Question) -> Answer:
        """The whole answer of a question that has its body, where it is a success; `errors.CallFailed` where it is none. An
        answer that comes while the body is still sent is heard. Where it does not come to an end, also by cancellation, the
        server is told: the stream is reset, or the connection closed."""
        async with self.stream(question) as conversation:
            return (await conversation.rest()).check()

    @asynccontextmanager
    async def stream(self, question: Question) -> AsyncIterator[Conversation]:
        """The answer of a question that has its body, to be iterated over as its messages come:

            async with client.stream(lmi("hello", stream=True)) as tokens:
                async for token in tokens: ...

        The iteration raises `errors.CallFailed` where the answer is a refusal, or breaks off. What is left of it at the end
        of the block is not read: the stream is reset, or the connection closed.
        """
        conversation = self.about(question)
        async with _sent(conversation):
            yield conversation

    async def bidi(self, endpoint: str) -> Conversation:
        """A bidirectional stream over HTTP/2."""
        conversation = self.about(bidirectional(endpoint))
        await conversation.begin()
        return conversation

    def about(self, question: Question) -> Conversation:
        """A conversation on the next stream of the connection; nothing is sent yet. LocalProtocolError for a question that
        needs HTTP/2 where the connection has another protocol."""
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
        """True where the connection's protocol can."""
        return not question.http2 or isinstance(self.peer.machine, HTTP2Connection)

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
        self.said = False
        """Whether the head, and the body where there is one, have been written."""
        self._taken = 0

    async def begin(self) -> None:
        """Sends the head, and the body where there is one. TransportLost where the server has ended the connection."""
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

    def __aiter__(self) -> Conversation:
        return self

    async def __anext__(self) -> Any:
        """As `receive`, but what was given is not kept in `answer`; at its end CallFailed where the answer is an error."""
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
                self.answer.end(event.trailers)
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

    async def abandon(self) -> None:
        """The same, and writes it; nothing where the stream has ended."""
        with suppress(LocalProtocolError):
            self.leave()
            await self._peer.flush()


@asynccontextmanager
async def _sent(conversation: Conversation) -> AsyncIterator[None]:
    """A question that is sent while its answer is read; left at the end of the block unless that is whole."""
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
    with suppress(TransportLost, LocalProtocolError):  # whoever receives hears why
        await conversation.begin()


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

    @property
    def can_end(self) -> bool:
        """True if the server can be told that there is no more input."""
        return self.peer.end_of_input is not None

    async def end(self) -> None:
        """Tells the server that there is no more input: it answers what it still has to, and then says Close. Raises
        LocalProtocolError where the server has named no text for that (`can_end`)."""
        if self.peer.end_of_input is None:
            raise LocalProtocolError("the server has named no end of input: a WebSocket has none of its own")
        await self.send_frame(Opcode.TEXT, self.peer.end_of_input)

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
