"""What a client makes of an answer: its messages as they arrive, the error it says, and whether it is whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Self, final

from protocols import v2
from protocols.aws import bidi
from protocols.errors import RemoteProtocolError
from protocols.events import Buffer, Headers, Response, Signal
from protocols.grpc.framing import MAX_LENGTH, MessageDecoder
from protocols.grpc.heads import CallStatus, read_answer, read_trailers
from protocols.grpc.protobuf import ProtobufError
from protocols.grpc.status import GRPCError, StatusCode
from protocols.grpc.v2_client import read_infer_response, read_streamed_response
from protocols.lmi.response import parse_stream_line
from protocols.sse import ServerSentEvent, SSEDecoder


class Answer:
    """One answer; this one is whatever body there is, whole.

    `messages` are those of the dialect, each there as soon as its last byte is. `error` is what the answer says went
    wrong, by its status or in band. `over` only if it came to the end that its wire and its dialect have for it: what is
    cut off, in a message or between two, is not. A body that its dialect does not allow raises RemoteProtocolError.
    """

    def __init__(self) -> None:
        self.status = 0
        self.received = 0
        """Bytes of its body so far."""
        self.headers: Headers = ()
        self.body = bytearray()
        self.messages: list[Any] = []
        self.error = ""
        self.over = False

    @property
    def complete(self) -> bool:
        """Whether it is whole, and a success."""
        return self.over and not self.error

    @property
    def refused(self) -> bool:
        """Whether its head says that it is an error, so that nothing of an answer comes."""
        return self.status != 200

    @property
    def failed_as(self) -> str:
        """The name of the status by which an error is known; empty for one in band, which has words alone."""
        return str(self.status) if self.refused else ""

    def check(self) -> Self:
        """This answer, where it is a success; `errors.Refused` or `errors.BrokenOff` with the server's words otherwise."""
        if self.error:
            if self.refused:
                raise Refused(self._words(), self)
            raise BrokenOff(self.error, self)
        return self

    def _words(self) -> str:
        """Of a refusal."""
        return words_of(self.body)

    @property
    def text(self) -> str:
        """The messages of an answer of text, joined."""
        return "".join(self.messages)

    def head(self, response: Response) -> None:
        """The answer begins."""
        self.status, self.headers = response.status, response.headers

    def feed(self, data: Buffer) -> None:
        """A piece of its body."""
        self.received += len(data)
        if self.status == 200:
            self._read(data)
        else:
            self.body += data

    def end(self, trailers: Headers = ()) -> None:
        """Its body ends, with these fields behind it."""
        if self.status != 200:
            self.error = self.body.decode(errors="replace") or f"status {self.status}"
        else:
            self._finish()
        self.over = True

    def _read(self, data: Buffer) -> None:
        self.body += data

    def _finish(self) -> None:
        """Every byte has been read."""

    def _fail(self, words: str) -> None:
        """The answer says that something went wrong, with these words or without any."""
        self.error = words or _WORDLESS


class BodyAnswer(Answer):
    """A body that is the message."""

    def _finish(self) -> None:
        self.messages.append(bytes(self.body))


class GeneratedAnswer(Answer):
    """LMI's one document, in TGI's form in an array; its message is the text."""

    def _finish(self) -> None:
        self.messages.append(_member(_document(_only(self.body)), "generated_text"))


class LinesAnswer(Answer):
    """LMI's jsonlines; a message is the text of a token."""

    _last = False

    def _read(self, data: Buffer) -> None:
        self.body += data
        while (at := self.body.find(b"\n")) >= 0:
            line = bytes(self.body[:at])
            del self.body[: at + 1]
            if self._last and line:
                raise RemoteProtocolError("a line after the last")
            if line.strip():  # of server-sent events, which TGI's form has, each ends with an empty one
                self._line(parse_stream_line(line))

    def _line(self, line: dict[str, Any]) -> None:
        if isinstance(error := line.get("error"), str):
            self._fail(error)
            self._last = True
            return
        token = _member(line, "token")
        self._last = line.get("generated_text") is not None
        if "error_msg" in token:
            self._fail(token["error_msg"])
        elif (line.get("details") or {}).get("finish_reason") == "error":
            self.error = "error"
        elif not token.get("special_token"):
            self.messages.append(token["text"])

    def _finish(self) -> None:
        if not self._last or self.body:
            raise RemoteProtocolError("the answer ends without its last line")


class CompletionAnswer(Answer):
    """OpenAI's one document; its message is the text."""

    def _finish(self) -> None:
        self.messages.append(_member(_document(self.body), "choices", 0, "message", "content"))


class EventStreamAnswer(Answer):
    """What the answers of server-sent events have in common: nothing comes behind the last, and none is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self._decoder, self._last = SSEDecoder(), False

    def _read(self, data: Buffer) -> None:
        self._decoder.receive_data(data)
        while isinstance(event := self._decoder.next_event(), ServerSentEvent):
            if self._last:
                raise RemoteProtocolError("an event after the last")
            self._event(event.data)

    def _event(self, data: Buffer) -> None:
        raise NotImplementedError

    def _fail(self, words: str) -> None:
        super()._fail(words)
        self._last = True

    def _finish(self) -> None:
        if self._decoder.begun:
            raise RemoteProtocolError("the stream ends in the middle of an event")


class CompletionEventsAnswer(EventStreamAnswer):
    """OpenAI's stream; a message is what a chunk adds."""

    def _event(self, data: Buffer) -> None:
        self._last = data == b"[DONE]"
        if not self._last:
            self._chunk(_document(data))

    def _chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self._fail(_member(chunk, "error", "message"))
            return
        for choice in _member(chunk, "choices"):
            if content := _member(choice, "delta").get("content"):
                self.messages.append(content)

    def _finish(self) -> None:
        super()._finish()
        if not self._last:
            raise RemoteProtocolError("the stream ends without [DONE]")


class PiecesAnswer(Answer):
    """A body whose messages are its bytes, as they come."""

    def _read(self, data: Buffer) -> None:
        self.messages.append(bytes(data))

    def _finish(self) -> None:
        """Nothing marks its end but the body's."""


class GenerateReplyAnswer(Answer):
    """v2's generate; its message is the object."""

    def _finish(self) -> None:
        self.messages.append(_document(self.body))


class GenerateEventsAnswer(EventStreamAnswer):
    """v2's generate_stream; each message is an object."""

    def _event(self, data: Buffer) -> None:
        document = _document(data)
        if isinstance(error := document.get("error"), str):
            self._fail(error)
        else:
            self.messages.append(document)


class InferAnswer(Answer):
    """A reply of v2; its message is a `protocols.v2.V2Answer`."""

    def _finish(self) -> None:
        self.messages.append(v2.decode_infer_reply(self.headers, self.body))


class InferEventsAnswer(EventStreamAnswer):
    """v2's infer_stream as server-sent events; a message is a `protocols.v2.V2Answer`."""

    def _event(self, data: Buffer) -> None:
        self._reply(data, None)

    def _reply(self, data: Buffer, header_length: int | None) -> None:
        try:
            self.messages.append(v2.decode_streamed_reply(data, header_length))
        except v2.V2Error as e:
            self._fail(e.message)


class InferFramesAnswer(InferEventsAnswer):
    """The same as binary frames."""

    def __init__(self) -> None:
        super().__init__()
        self._frames = v2.FrameDecoder()

    def _read(self, data: Buffer) -> None:
        self._frames.receive_data(data)
        while isinstance(frame := self._frames.next_frame(), v2.V2Frame):
            if self._last:
                raise RemoteProtocolError("a frame after the last")
            self._reply(frame.body, frame.header_length)

    def _finish(self) -> None:
        self._frames.receive_eof()


class EventsAnswer(Answer):
    """SageMaker's event stream; a message is a part's bytes. `states` tells of each whether it is whole, `failure` what went
    wrong in band, with the name of its exception."""

    def __init__(self) -> None:
        super().__init__()
        self._decoder = bidi.ResponseDecoder()
        self.states: list[bidi.Completion | None] = []
        self.failure: bidi.StreamFailure | None = None

    def _read(self, data: Buffer) -> None:
        self._decoder.receive_data(data)
        self._pull()

    def _pull(self) -> None:
        while isinstance(event := self._decoder.next_event(), bidi.PayloadPart | bidi.StreamFailure):
            if self.failure is not None:
                raise RemoteProtocolError("an event after the failure")
            if isinstance(event, bidi.PayloadPart):
                self.messages.append(bytes(event.data))
                self.states.append(event.completion)
            else:
                self.failure = event
                self._fail(event.message or event.exception_type)

    def _finish(self) -> None:
        self._decoder.receive_eof()
        self._pull()


class CallAnswer(Answer):
    """An answer of gRPC, whose end is a status. `code` is that of the call, once it is over; `error` is what it says, or its
    name where it says nothing."""

    code: StatusCode | None = None

    def __init__(self) -> None:
        super().__init__()
        self._decoder: MessageDecoder | None = None
        self._head: CallStatus | None = None

    @property
    def refused(self) -> bool:
        """Whether the status is in its head: a call that has failed before its first message."""
        return self._head is not None

    @property
    def failed_as(self) -> str:
        """The name of the code, unless it is OK."""
        return self.code.name if self.code else ""

    def _words(self) -> str:
        return self.error

    def head(self, response: Response) -> None:
        super().head(response)
        found = read_answer(response)
        self._head = found.status
        self._decoder = MessageDecoder(limit=MAX_LENGTH, encoding=found.encoding)

    def feed(self, data: Buffer) -> None:
        self.received += len(data)
        decoder = self._decoder
        if decoder is None or self.refused:
            return  # a body of HTTP's, which is nothing to a client of gRPC
        try:
            decoder.receive_data(bytes(data))
            while (message := decoder.next_message()) is not Signal.NEED_DATA:
                self._message(message)
        except (GRPCError, ProtobufError, v2.V2Error) as e:
            raise RemoteProtocolError(str(e)) from None

    def _message(self, data: Buffer) -> None:
        raise NotImplementedError

    def end(self, trailers: Headers = ()) -> None:
        try:
            if self._decoder is not None and not self.refused:
                self._decoder.receive_eof()
        except GRPCError as e:
            raise RemoteProtocolError(str(e)) from None
        status = self._head or read_trailers(trailers)
        self.code = status.code
        if status.code is not StatusCode.OK:
            self.error = status.message or status.code.name
        else:
            self._finish()
        self.over = True

    def _finish(self) -> None:
        """The status is OK."""


class InferCallAnswer(CallAnswer):
    """A reply of gRPC's ModelInfer; its message is a `protocols.v2.V2Answer`."""

    _times = 0  # whoever takes the messages as they come leaves none here

    def _message(self, data: Buffer) -> None:
        self._times += 1
        self.messages.append(read_infer_response(data))

    def _finish(self) -> None:
        if self._times != 1:
            raise RemoteProtocolError(f"a call with one answer was answered {self._times} times")


class StreamCallAnswer(CallAnswer):
    """A ModelStreamInfer with any number of requests; a message is a `protocols.grpc.v2_client.StreamedAnswer`. That one of
    the requests has failed is no error of the stream."""

    def _message(self, data: Buffer) -> None:
        self.messages.append(read_streamed_response(data))


class InferStreamAnswer(CallAnswer):
    """A ModelStreamInfer with one request; a message is a `protocols.v2.V2Answer`. That the request has failed is the error
    of the answer, though the stream ends well."""

    def _message(self, data: Buffer) -> None:
        found = read_streamed_response(data)
        if self.error:
            raise RemoteProtocolError("a message after the error of the only request")
        if found.error:
            self._fail(found.error)
        elif found.answer.outputs or not found.final:
            self.messages.append(found.answer)


def _document(body: Buffer) -> dict[str, Any]:
    try:
        document = json.loads(bytes(body))
    except ValueError as e:
        raise RemoteProtocolError(f"not JSON: {e}") from None
    if not isinstance(document, dict):
        raise RemoteProtocolError("not a JSON object")
    return document


def _only(body: Buffer) -> bytes:
    """The one document of an array; what is no array stays as it is."""
    text = bytes(body).strip()
    return text[1:-1] if text[:1] == b"[" and text[-1:] == b"]" else text


def _member(document: Any, *path: str | int) -> Any:
    for step in path:
        try:
            document = document[step]
        except (LookupError, TypeError):
            raise RemoteProtocolError(f"no {'.'.join(map(str, path))} where the dialect has it") from None
    return document


class CallFailed(Exception):
    """The answer is an error, in words of the server's: `message`. `answer` has the rest, such as its headers and body.

    What is no answer is raised as something else: OSError where there is no connection, `gateway.errors.TransportLost` where
    it ended before the answer did, `protocols.errors.RemoteProtocolError` for what the dialect does not allow.
    """

    def __init__(self, message: str, answer: Answer) -> None:
        super().__init__(message)
        self.message, self.answer = message, answer

    def __str__(self) -> str:
        name = self.answer.failed_as
        return f"{name}: {self.message}" if name else self.message


@final
class Refused(CallFailed):
    """An error from its head: nothing of an answer came. `status` is HTTP's and not 200, but where gRPC refuses: then
    `answer.code` is what counts."""

    def __init__(self, message: str, answer: Answer) -> None:
        super().__init__(message, answer)
        self.status = answer.status

    @property
    def retry_after(self) -> float | None:
        """In how many seconds the same request may succeed, where the server says so."""
        value = dict(self.answer.headers).get(b"retry-after", b"")
        return float(value) if value.isdigit() else None


@final
class BrokenOff(CallFailed):
    """An error in band, after an answer that began well: what came before it is good."""


def words_of(body: bytes | bytearray) -> str:
    """The text of an error's body, in whatever member the dialect has it; the body itself where it has none."""
    text = bytes(body).decode(errors="replace").strip()
    try:
        document = json.loads(text)
    except ValueError:
        return text or _WORDLESS
    for path in _WORDS:
        found: Any = document
        for step in path:
            found = found.get(step) if isinstance(found, dict) else None
        if isinstance(found, str):
            return found
    return text


_WORDLESS = "no reason given"
_WORDS: Sequence[Sequence[str]] = (
    ("error", "message"), ("error",), ("OriginalMessage",), ("message",), ("Message",), ("detail",),
)  # fmt: skip
