"""gRPC's calls by hand, over HTTP/2 in memory: what a client says piece by piece, and what it hears."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import numpy as np

from gateway.client import questions
from protocols.events import ConnectionEnd, Data, End, Head, Headers, Request, Reset, Response, Signal
from protocols.grpc.framing import MAX_LENGTH, MessageDecoder, encode_prefix, frame
from protocols.grpc.heads import call_head, read_answer, read_trailers
from protocols.grpc.protobuf import MessageType
from protocols.grpc.status import StatusCode
from protocols.grpc.v2_client import StreamedAnswer, read_infer_response, read_streamed_response
from protocols.v2.response import V2Answer
from protocols.v2.tensors import NO_PARAMETERS
from tests.gateway.promises import House, Line

SERVICE = "inference.GRPCInferenceService"
EMPTY_FINAL = "triton_enable_empty_final_response"


class Status(NamedTuple):
    """How a call has ended. `alone`: it was the answer's head, and nothing else came."""

    code: StatusCode
    text: str = ""
    alone: bool = False


OK = Status(StatusCode.OK)
SILENT = Status(StatusCode.OK, alone=True)
"""The end of a stream that has no message."""


def request(model: str, *numbers: int, id: str = "", parameters: Mapping[str, Any] = NO_PARAMETERS, **how: Any) -> bytes:
    """A request for a model, with the tensor x, as a message in the body."""
    return questions.grpc_request({"x": np.array(numbers or (0,))}, model, id=id, parameters=parameters, **how)


@final
class ByHand:
    """One call on a line, which may have others."""

    def __init__(self, line: Line, method: str = "ModelStreamInfer", service: str = SERVICE) -> None:
        self.line, self.stream = line, line.next_stream()
        self._service, self._method = service, method
        self._decoder: MessageDecoder | None = None
        self._waiting: deque[bytes] = deque()
        self._status: Status | None = None
        self.headers: Headers = ()

    async def open(
        self, *fields: tuple[bytes, bytes], within: float | None = None, authority: bytes = b"localhost"
    ) -> ByHand:
        """Sends the head with more fields; `within` is the call's timeout in seconds. Default None: no timeout."""
        head = call_head(self._service, self._method, authority=authority, timeout=within)
        await self.line.send(
            Request(
                stream=self.stream,
                head=Head(method=b"POST", target=head.target, authority=head.authority, headers=(*head.headers, *fields)),
            )
        )
        return self

    async def say(self, data: bytes) -> None:
        """Any bytes of the body."""
        await self.line.send(Data(stream=self.stream, buffers=(data,)))

    async def ask(self, model: str, *numbers: int, **how: Any) -> None:
        """One request."""
        await self.say(request(model, *numbers, **how))

    async def end(self) -> None:
        """There are no more."""
        await self.line.send(End(stream=self.stream))

    async def leave(self) -> None:
        await self.line.send(Reset(stream=self.stream, code=8))

    async def message(self) -> bytes | Status:
        """The next message of the answer, or how it has ended."""
        while not self._waiting:
            if self._status is not None:
                return self._status
            await self._step()
        return self._waiting.popleft()

    async def _step(self) -> None:
        match event := await self.line.event(self.stream):
            case Response(status=200):
                self.headers = event.headers
                found = read_answer(event)
                if found.status is not None:
                    self._status = Status(found.status.code, found.status.message, alone=True)
                    assert isinstance(await self.line.event(self.stream), End), "one head, and no more"
                self._decoder = MessageDecoder(limit=MAX_LENGTH)
            case Data():
                assert self._decoder is not None
                self.line.peer.credit(event)
                self._decoder.receive_data(bytes(event.buffers[0]))
                while (message := self._decoder.next_message()) is not Signal.NEED_DATA:
                    self._waiting.append(bytes(message))
            case End():
                assert self._decoder is not None
                self._decoder.receive_eof()
                found_in = read_trailers(event.trailers)
                self._status = Status(found_in.code, found_in.message)
            case Reset() | ConnectionEnd():
                raise AssertionError(f"cut off: {event}")
            case _:
                raise AssertionError(event)

    async def next(self) -> StreamedAnswer | Status:
        """The next response of a stream, or how it has ended."""
        message = await self.message()
        return message if isinstance(message, Status) else read_streamed_response(message)

    async def response(self) -> StreamedAnswer:
        """The next response, which is one."""
        found = await self.next()
        assert isinstance(found, StreamedAnswer), found
        return found

    async def told(self) -> tuple[str, list[int]]:
        """The id and the numbers of the next response, which is good."""
        found = await self.response()
        assert not found.error, found.error
        return found.answer.id, numbers(found.answer)

    async def rest(self) -> tuple[list[StreamedAnswer], Status]:
        """The responses that are still to come, and how it ended."""
        came = []
        while not isinstance(found := await self.next(), Status):
            came.append(found)
        return came, found


def numbers(answer: V2Answer) -> list[int]:
    """The numbers in the answer's outputs; empty if it has no output."""
    return [int(n) for output in answer.outputs for n in output.elements]


async def call(
    house: House, method: str, message: bytes, *fields: tuple[bytes, bytes], line: Line | None = None, **how: Any
) -> bytes | Status:
    """Makes a unary call with this message. Returns the answer, if the status behind it is OK, else the status."""
    made = ByHand(line or house.line("http2"), method, how.pop("service", SERVICE))
    await made.open(*fields, **how)
    await made.say(b"".join(frame((message,))))
    await made.end()
    return await answered(made)


async def answered(made: ByHand) -> bytes | Status:
    """The one message of a unary call's answer, or how it has failed."""
    answer = await made.message()
    if isinstance(answer, Status):
        return answer
    ended = await made.message()
    assert ended == OK, ended
    return answer


async def asked(
    house: House, method: str, kinds: tuple[MessageType, MessageType], line: Line | None = None, **values: Any
) -> Any:
    """A unary call with these fields, and those of its answer; or how it has failed."""
    answer = await call(house, method, kinds[0].write(values), line=line)
    return answer if isinstance(answer, Status) else kinds[1].read(answer)


async def infer(house: House, message: bytes, *fields: tuple[bytes, bytes], **how: Any) -> V2Answer | Status:
    """A ModelInfer with this message in its body, its prefix included."""
    made = ByHand(how.pop("line", None) or house.line("http2"), "ModelInfer")
    await made.open(*fields, **how)
    await made.say(message)
    await made.end()
    answer = await answered(made)
    return answer if isinstance(answer, Status) else read_infer_response(answer)


def announced(length: int) -> bytes:
    """A prefix alone."""
    return encode_prefix(length)
