"""The answers that a client reads: messages as they arrive, the error if there is one, and whether the answer is whole."""

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
    """One answer. This base class keeps any body whole; subclasses read the messages of a dialect.

    A message is in `messages` as soon as its last byte has arrived. `error` is the error that the answer reports, by its
    status or in band; empty if there is none. `over` is True once the answer has the end that its wire and its dialect
    prescribe: an answer that is cut off never has. A body that its dialect does not allow raises RemoteProtocolError.
    """

    def __init__(self) -> None:
        self.status = 0
        self.received = 0
        """Bytes of the body so far."""
        self.headers: Headers = ()
        self.body = bytearray()
        self.messages: list[Any] = []
        self.error = ""
        self.over = False

    @property
    def complete(self) -> bool:
        """True if the answer is whole and a success."""
        return self.over and not self.error

    @property
    def refused(self) -> bool:
        """True if the head reports an error, so that the answer has no messages."""
        return self.status != 200

    @property
    def failed_as(self) -> str:
        """The name of the error's status; empty for an error in band, which has no status."""
        return str(self.status) if self.refused else ""

    def check(self) -> Self:
        """Returns this answer if it is a success; otherwise raises `Refused` or `BrokenOff` with the server's message."""
        if self.error:
            if self.refused:
                raise Refused(self._words(), self)
            raise BrokenOff(self.error, self)
        return self

    def _words(self) -> str:
        """The message of a refusal."""
        return words_of(self.body)

    @property
    def text(self) -> str:
        """The messages of a text answer, joined."""
        return "".join(self.messages)

    def head(self, response: Response) -> None:
        """Called with the head of the answer."""
        self.status, self.headers = response.status, response.headers

    def feed(self, data: Buffer) -> None:
        """Called with each piece of the body."""
        self.received += len(data)
        if self.status == 200:
            self._read(data)
        else:
            self.body += data

    def end(self, trailers: Headers = ()) -> None:
        """Called at the end of the body, with the trailers."""
        if self.status != 200:
            self.error = self.body.decode(errors="replace") or f"status {self.status}"
        else:
            self._finish()
        self.over = True

    def _read(self, data: Buffer) -> None:
        self.body += data

    def _finish(self) -> None:
        """Called at the end of a successful body."""

    def _fail(self, words: str) -> None:
        """Called for an error in band. If `words` is empty, a standard text replaces it."""
        self.error = words or _WORDLESS


class BodyAnswer(Answer):
    """An answer whose body is its one message."""

    def _finish(self) -> None:
        self.messages.append(bytes(self.body))


class GeneratedAnswer(Answer):
    """LMI's document, which TGI's form puts into an array; its one message is the text."""

    def _finish(self) -> None:
        self.messages.append(_member(_document(_only(self.body)), "generated_text"))


class LinesAnswer(Answer):
    """LMI's jsonlines; each message is the text of a token."""

    _last = False

    def _read(self, data: Buffer) -> None:
        self.body += data
        while (at := self.body.find(b"\n")) >= 0:
            line = bytes(self.body[:at])
            del self.body[: at + 1]
            if self._last and line:
                raise RemoteProtocolError("a line after the last")
            if line.strip():  # TGI's form has server-sent events, each followed by an empty line
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
    """OpenAI's document; its one message is the text."""

    def _finish(self) -> None:
        self.messages.append(_member(_document(self.body), "choices", 0, "message", "content"))


class EventStreamAnswer(Answer):
    """The base class for answers of server-sent events: no event may follow the last one, and none may be cut off."""

    def __init__(self) -> None:
        super().__init__()
        self._decoder, self._last = SSEDecoder(max_event=v2.ANSWER_LIMITS.json), False

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
    """OpenAI's stream; each message is the text that a chunk adds."""

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
    """An answer whose messages are the pieces of its body, as they arrive."""

    def _read(self, data: Buffer) -> None:
        self.messages.append(bytes(data))

    def _finish(self) -> None:
        """Does nothing: only the end of the body marks the end."""


class GenerateReplyAnswer(Answer):
    """v2's generate; its one message is the object."""

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
    """A reply of v2; its one message is a `protocols.v2.V2Answer`."""

    def _finish(self) -> None:
        self.messages.append(v2.decode_infer_reply(self.headers, self.body))


class InferEventsAnswer(EventStreamAnswer):
    """v2's infer_stream as server-sent events; each message is a `protocols.v2.V2Answer`."""

    def _event(self, data: Buffer) -> None:
        self._reply(data, None)

    def _reply(self, data: Buffer, header_length: int | None) -> None:
        try:
            self.messages.append(v2.decode_streamed_reply(data, header_length))
        except v2.V2Error as e:
            self._fail(e.message)


class InferFramesAnswer(InferEventsAnswer):
    """v2's infer_stream as binary frames; each message is a `protocols.v2.V2Answer`."""

    def __init__(self) -> None:
        super().__init__()
        self._frames = v2.FrameDecoder(json=v2.ANSWER_LIMITS.json)

    def _read(self, data: Buffer) -> None:
        self._frames.receive_data(data)
        while isinstance(frame := self._frames.next_frame(), v2.V2Frame):
            if self._last:
                raise RemoteProtocolError("a frame after the last")
            self._reply(frame.body, frame.header_length)

    def _finish(self) -> None:
        self._frames.receive_eof()


class EventsAnswer(Answer):
    """SageMaker's event stream; each message is the bytes of a part. `states` has the completion of each, `texts` is
    True for each that is declared as text, and `failure` has the error in band, with the name of its exception."""

    def __init__(self) -> None:
        super().__init__()
        self._decoder = bidi.ResponseDecoder()
        self.states: list[bidi.Completion | None] = []
        self.texts: list[bool] = []
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
                self.texts.append(event.data_type is bidi.DataType.UTF8)
            else:
                self.failure = event
                self._fail(event.message or event.exception_type)

    def _finish(self) -> None:
        self._decoder.receive_eof()
        self._pull()


class CallAnswer(Answer):
    """An answer of gRPC, which ends with a status. `code` is the call's status code once it is over. If the call failed,
    `error` is the message of the status, or the code's name if it has none."""

    code: StatusCode | None = None

    def __init__(self) -> None:
        super().__init__()
        self._decoder: MessageDecoder | None = None
        self._head: CallStatus | None = None

    @property
    def refused(self) -> bool:
        """True if the head has the status: the call failed before its first message."""
        return self._head is not None

    @property
    def failed_as(self) -> str:
        """The name of the code; empty if it is OK or not known yet."""
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
            return  # a body of plain HTTP, which a client of gRPC ignores
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
        """Called at the end of a call with the status OK."""


class InferCallAnswer(CallAnswer):
    """A reply of gRPC's ModelInfer; its one message is a `protocols.v2.V2Answer`."""

    _times = 0  # not the length of `messages`: iterating over the answer removes them

    def _message(self, data: Buffer) -> None:
        self._times += 1
        self.messages.append(read_infer_response(data))

    def _finish(self) -> None:
        if self._times != 1:
            raise RemoteProtocolError(f"a call with one answer was answered {self._times} times")


class StreamCallAnswer(CallAnswer):
    """A ModelStreamInfer with any number of requests; each message is a `protocols.grpc.v2_client.StreamedAnswer`. If a
    request fails, its message has the error, and the answer goes on."""

    def _message(self, data: Buffer) -> None:
        self.messages.append(read_streamed_response(data))


class InferStreamAnswer(CallAnswer):
    """A ModelStreamInfer with one request; each message is a `protocols.v2.V2Answer`. If the request fails, `error` is its
    error, although the status of the stream is OK."""

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
    """The one document of an array; any other text stays as it is."""
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
    """Raised if the server answers with an error. `message` is the server's text; `answer` has the headers and the body.

    Other failures have other exceptions: OSError if there is no connection, `gateway.errors.TransportLost` if the connection
    ended before the answer did, `protocols.errors.RemoteProtocolError` if the dialect does not allow the answer.
    """

    def __init__(self, message: str, answer: Answer) -> None:
        super().__init__(message)
        self.message, self.answer = message, answer

    def __str__(self) -> str:
        name = self.answer.failed_as
        return f"{name}: {self.message}" if name else self.message


@final
class Refused(CallFailed):
    """Raised if the server refused the request, before any message of the answer. `status` is the HTTP status, which is not
    200, except for gRPC: there it is 200, and `answer.code` is the status code of the call."""

    def __init__(self, message: str, answer: Answer) -> None:
        super().__init__(message, answer)
        self.status = answer.status

    @property
    def retry_after(self) -> float | None:
        """The number of seconds after which the same request may succeed; None if the server names none."""
        value = dict(self.answer.headers).get(b"retry-after", b"")
        return float(value) if value.isdigit() else None


@final
class BrokenOff(CallFailed):
    """Raised for an error in band, after an answer that began well. The messages before it are valid."""


def words_of(body: bytes | bytearray) -> str:
    """The text of an error's body, from the member that its dialect has for it; the whole body if there is none."""
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
