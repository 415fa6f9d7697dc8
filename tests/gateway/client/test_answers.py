"""The client's readers of answers: nothing comes behind the last, what is cut off is no answer, and each ends once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gateway.client.answers import (
    Answer,
    CompletionAnswer,
    CompletionEventsAnswer,
    EventsAnswer,
    GeneratedAnswer,
    GenerateEventsAnswer,
    InferEventsAnswer,
    InferFramesAnswer,
    LinesAnswer,
)
from protocols import v2
from protocols.aws import bidi
from protocols.errors import RemoteProtocolError
from protocols.events import Response
from protocols.sse import encode_event

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
"""What reads it, a message, and what ends the answer: an error has no words here."""
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
