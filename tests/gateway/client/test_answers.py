"""The client's readers of answers: nothing comes behind the last, what is cut off is no answer, and each ends once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gateway.client.answers import (
    Answer,
    BrokenOff,
    CallAnswer,
    CompletionAnswer,
    CompletionEventsAnswer,
    EventsAnswer,
    GeneratedAnswer,
    GenerateEventsAnswer,
    InferCallAnswer,
    InferEventsAnswer,
    InferFramesAnswer,
    InferStreamAnswer,
    LinesAnswer,
    Refused,
    StreamCallAnswer,
)
from protocols import v2
from protocols.aws import bidi
from protocols.errors import RemoteProtocolError
from protocols.events import Response
from protocols.grpc.framing import encode_prefix
from protocols.grpc.framing import frame as grpc_frame
from protocols.grpc.status import StatusCode
from protocols.grpc.v2_messages import InferResponseWriter, render_stream_error
from protocols.sse import encode_event
from protocols.v2.metadata import ModelSignature

TENSOR = {"outputs": [{"name": "y", "shape": [1], "datatype": "INT64", "data": [7]}]}


def line(text: str, **more: Any) -> bytes:
    return json.dumps({"token": {"id": 0, "text": text, "log_prob": 0, **more.pop("token", {})}, **more}).encode() + b"\n"


def event(document: Any) -> bytes:
    return encode_event(json.dumps(document).encode())


def chunk(text: str) -> bytes:
    return event({"choices": [{"delta": {"content": text}}]})


def frame(document: Any) -> bytes:
    return b"".join(v2.encode_frame(json.dumps(document).encode()))


def failure(message: str) -> bytes:
    return b"".join(bidi.encode_model_stream_error(message, ""))


PART = b"".join(bidi.encode_part(b"said"))
ENDS: dict[str, tuple[type[Answer], bytes, bytes]] = {
    "lines": (LinesAnswer, line("said"), line("", token={"special_token": True}, generated_text="said")),
    "lines, an error": (
        LinesAnswer,
        line("said"),
        line("", token={"error_msg": ""}, generated_text="said"),
    ),
    "lines, TGI's error": (LinesAnswer, line("said"), b'{"error":""}\n'),
    "completion": (CompletionEventsAnswer, chunk("said"), encode_event(b"[DONE]")),
    "completion, an error": (CompletionEventsAnswer, chunk("said"), event({"error": {"message": ""}})),
    "generate, an error": (GenerateEventsAnswer, event({"y": [7]}), event({"error": ""})),
    "infer, an error": (InferEventsAnswer, event(TENSOR), event({"error": ""})),
    "frames, an error": (InferFramesAnswer, frame(TENSOR), frame({"error": ""})),
    "events, an error": (EventsAnswer, PART, failure("")),
}
"""By name: the reader, a message, and the bytes that end the answer. Errors among them have no words."""
each = pytest.mark.parametrize("name", ENDS)


def begun(kind: Callable[[], Answer], *pieces: bytes) -> Answer:
    answer = kind()
    answer.head(Response(stream=1, status=200))
    for piece in pieces:
        answer.feed(piece)
    return answer


@each
def test_a_message_and_the_last_are_a_whole_answer_and_an_error_without_words_is_one(name: str) -> None:
    kind, message, last = ENDS[name]
    answer = begun(kind, message, last)
    answer.end()
    assert (len(answer.messages), answer.over, answer.complete) == (1, True, "error" not in name)
    assert bool(answer.error) == ("error" in name)


@each
@pytest.mark.parametrize("step", [1, 7])
def test_it_is_the_same_answer_in_pieces_of_any_size(name: str, step: int) -> None:
    kind, message, last = ENDS[name]
    body = message + last
    answer = begun(kind, *(body[at : at + step] for at in range(0, len(body), step)))
    answer.end()
    assert (len(answer.messages), answer.over, answer.complete) == (1, True, "error" not in name)


@each
def test_nothing_comes_behind_the_last(name: str) -> None:
    kind, message, last = ENDS[name]
    for more in (message, last):
        answer = begun(kind, message, last)
        with pytest.raises(RemoteProtocolError):
            answer.feed(more)


@each
def test_what_is_cut_off_is_not_over(name: str) -> None:
    kind, message, last = ENDS[name]
    for size in range(1, len(last) - last.endswith(b"\n\n")):
        answer = begun(kind, message, last[:size])
        with pytest.raises(RemoteProtocolError):
            answer.end()
        assert not answer.over


@pytest.mark.parametrize("name", ["lines", "completion"])
def test_an_answer_that_has_a_last_message_is_not_whole_without_it(name: str) -> None:
    kind, message, _ = ENDS[name]
    answer = begun(kind, message)
    with pytest.raises(RemoteProtocolError, match="ends without"):
        answer.end()


@pytest.mark.parametrize(
    ("kind", "body"), [(GeneratedAnswer, b'{"generated_text": "on'), (CompletionAnswer, b'{"choices": []}')]
)
def test_a_document_that_is_cut_off_or_lacks_its_text_is_not_taken(kind: Callable[[], Answer], body: bytes) -> None:
    answer = begun(kind, body)
    with pytest.raises(RemoteProtocolError):
        answer.end()


@pytest.mark.parametrize("name", ["generate, an error", "infer, an error", "frames, an error", "events, an error"])
def test_an_answer_that_has_none_is_whole_between_two_messages(name: str) -> None:
    kind, message, _ = ENDS[name]
    answer = begun(kind, message, message)
    answer.end()
    assert (len(answer.messages), answer.complete) == (2, True)


def test_an_event_stream_says_which_exception_ended_it() -> None:
    answer = begun(EventsAnswer, PART, failure("no such voice"))
    answer.end()
    assert isinstance(answer, EventsAnswer)
    assert (answer.messages, answer.error) == ([b"said"], "no such voice")
    assert answer.failure is not None
    assert answer.failure.exception_type == "ModelStreamError"


def test_a_reply_of_tensors_is_read_from_events_and_from_frames() -> None:
    for answer in (begun(InferEventsAnswer, event(TENSOR)), begun(InferFramesAnswer, frame(TENSOR))):
        np.testing.assert_array_equal(answer.messages[0]["y"].elements, [7])


# -- gRPC --------------------------------------------------------------------------------------------------------------

REPLY = InferResponseWriter(ModelSignature(name="m"))
Y = [v2.V2Tensor(name="y", datatype="INT64", array=np.array([7]))]
GRPC: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/grpc"),)
FINE, BAD = ((b"grpc-status", b"0"),), ((b"grpc-status", b"3"), (b"grpc-message", b"no such voice"))


def unary() -> bytes:
    return b"".join(grpc_frame(REPLY.render(Y, v2.V2Request())))


def response(*, final: bool) -> bytes:
    return b"".join(grpc_frame(REPLY.render_streamed(Y, v2.V2Request(id="7"), final=final)))


def failed() -> bytes:
    return b"".join(grpc_frame((render_stream_error("no such voice", "7"),)))


def called(kind: Callable[[], Answer], *pieces: bytes, fields: Any = GRPC) -> Answer:
    answer = kind()
    answer.head(Response(stream=1, status=200, headers=fields))
    for piece in pieces:
        answer.feed(piece)
    return answer


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_call_of_grpc_is_whole_with_its_status(step: int) -> None:
    body = unary()
    answer = called(InferCallAnswer, *(body[at : at + step] for at in range(0, len(body), step)))
    assert not answer.over
    answer.end(FINE)
    assert (answer.complete, answer.check() is answer, answer.received) == (True, True, len(body))
    assert answer.messages[0]["y"].elements.tolist() == [7]


def test_a_status_that_comes_in_the_head_is_a_refusal() -> None:
    for kind in (InferCallAnswer, StreamCallAnswer, InferStreamAnswer):
        answer = called(kind, fields=(*GRPC, *BAD))
        answer.end()
        assert (answer.over, answer.complete, answer.error, answer.code) == (True, False, "no such voice", 3)
        with pytest.raises(Refused, match="INVALID_ARGUMENT: no such voice"):
            answer.check()


def test_a_status_behind_messages_breaks_the_answer_off() -> None:
    for kind, messages in ((InferStreamAnswer, 2), (StreamCallAnswer, 2), (InferCallAnswer, 0)):
        answer = called(kind, *([response(final=False)] * messages))
        answer.end(BAD)
        assert isinstance(answer, CallAnswer)
        assert (len(answer.messages), answer.code) == (messages, StatusCode.INVALID_ARGUMENT)
        with pytest.raises(BrokenOff, match="no such voice"):
            answer.check()


def test_an_answer_of_grpc_without_a_status_was_cut_off() -> None:
    answer = called(StreamCallAnswer, response(final=True))
    answer.end()
    assert isinstance(answer, CallAnswer)
    assert (answer.complete, answer.code) == (False, StatusCode.UNKNOWN)
    answer = called(InferCallAnswer, unary()[:-1])
    with pytest.raises(RemoteProtocolError, match="inside a message"):
        answer.end(FINE)
    assert not answer.over


def test_what_is_no_grpc_is_a_refusal_too() -> None:
    answer = StreamCallAnswer()
    answer.head(Response(stream=1, status=503, headers=((b"content-type", b"text/html"),)))
    answer.feed(b"<html>")
    answer.end()
    assert (answer.code, answer.refused, answer.messages) == (StatusCode.UNAVAILABLE, True, [])


@pytest.mark.parametrize("pieces", [(), (unary(), unary())])
def test_a_unary_call_has_one_message(pieces: tuple[bytes, ...]) -> None:
    answer = called(InferCallAnswer, *pieces)
    with pytest.raises(RemoteProtocolError, match="answered"):
        answer.end(FINE)


def test_an_error_of_the_only_request_is_the_answers_and_one_of_many_a_message() -> None:
    one = called(InferStreamAnswer, response(final=False), failed())
    one.end(FINE)
    assert isinstance(one, CallAnswer)
    assert (len(one.messages), one.error, one.code, one.over) == (1, "no such voice", StatusCode.OK, True)
    with pytest.raises(BrokenOff, match="no such voice"):
        one.check()
    many = called(StreamCallAnswer, response(final=False), failed(), response(final=True))
    many.end(FINE)
    assert many.complete
    assert [(m.error, m.answer.id, m.final) for m in many.messages] == [
        ("", "7", False),
        ("no such voice", "7", True),
        ("", "7", True),
    ]
    with pytest.raises(RemoteProtocolError, match="after the error"):
        called(InferStreamAnswer, failed(), response(final=True))


def test_the_empty_last_response_of_the_only_request_is_its_end() -> None:
    end = b"".join(grpc_frame((REPLY.render_end(v2.V2Request()),)))
    answer = called(InferStreamAnswer, response(final=False), end)
    answer.end(FINE)
    assert (len(answer.messages), answer.complete) == (1, True)


@pytest.mark.parametrize("body", [b"\x02" + bytes(4), encode_prefix(2) + b"\xff\xff"])
def test_what_is_no_message_is_not_taken(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        called(StreamCallAnswer, body)
