"""Answers of OpenAI's API: the bytes of every form, streamed and whole, complete and failed."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.messages import TopToken
from protocols.errors import LocalProtocolError
from protocols.openai import ChatForm, CompletionEncoder, OpenAIError, model_body, models_body
from tests.protocols.openai.answers import chat, chunks, completion, events, generate

# --- chat completions


def test_a_chat_completion_is_one_document() -> None:
    # OpenAI's reference, "The chat completion object", without what is optional there.
    assert generate(chat()) == (
        b'{"id":"chatcmpl-123","object":"chat.completion","created":1694268190,"model":"lm","choices":[{"index":0,'
        b'"message":{"role":"assistant","content":"Hello"},"logprobs":null,"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}}'
    )


CHUNK = (
    'data: {"id":"chatcmpl-123","object":"chat.completion.chunk","created":1694268190,"model":"lm",'
    '"choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s}]}\n\n'
)


def test_a_stream_says_the_role_first_and_the_reason_last_and_ends_with_done() -> None:
    # OpenAI's reference, "The chat completion chunk object": its example's three kinds of chunks, in their order.
    assert generate(chat(stream=True)).decode() == (
        CHUNK % ('{"role":"assistant","content":""}', "null")
        + CHUNK % ('{"content":"Hel"}', "null")
        + CHUNK % ('{"content":"lo"}', "null")
        + CHUNK % ("{}", '"stop"')
        + "data: [DONE]\n\n"
    )


def test_the_first_token_brings_the_role_at_once_and_each_other_its_own_event() -> None:
    out = chat(stream=True)
    assert len(events(out.token(1, "a", -0.5))) == 2
    assert len(events(out.token(2, "b", -0.5))) == 1


def test_a_stream_counts_its_tokens_in_a_last_chunk_where_that_is_asked_for() -> None:
    # stream_options.include_usage: "the `choices` field will always be an empty array. All other chunks will also
    # include a `usage` field, but with a null value."
    *others, last = chunks(generate(chat(stream=True, stream_options={"include_usage": True})))
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in others)
    assert last == {
        "id": "chatcmpl-123", "object": "chat.completion.chunk", "created": 1694268190, "model": "lm", "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
    }  # fmt: skip
    assert all("usage" not in chunk for chunk in chunks(generate(chat(stream=True))))


@pytest.mark.parametrize(
    ("reason", "said"), [("length", "length"), ("eos_token", "stop"), ("stop_sequence", "stop")]
)  # fmt: skip
def test_decision_the_reasons_are_stop_and_length(reason: str, said: str) -> None:
    out = chat(stream=True)
    assert chunks(out.token(1, "a", -0.5, finish=reason) + out.end())[-1]["choices"][0]["finish_reason"] == said
    whole = completion()
    whole.finish(reason)
    assert json.loads(whole.document())["choices"][0]["finish_reason"] == said


LOG_PROBS = (
    b'{"content":[{"token":"H\xc3\xa9","logprob":-0.5,"bytes":[72,195,169],"top_logprobs":['
    b'{"token":"H\xc3\xa9","logprob":-0.5,"bytes":[72,195,169]},{"token":"No","logprob":-1.5,"bytes":[78,111]}]}]}'
)
TOP = (TopToken(text="Hé", log_prob=-0.5), TopToken(text="No", log_prob=-1.5), TopToken(text="Yes", log_prob=-2.5))


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_chat_name_each_token_its_bytes_and_the_most_probable_ones(stream: bool) -> None:
    # openai-python, types/chat/chat_completion_token_logprob.py: token, bytes, logprob, top_logprobs.
    out = chat(stream=stream, logprobs=True, top_logprobs=2)
    body = out.token(1, "Hé", -0.5, top=TOP, finish="length")
    body += out.end() if stream else out.document()
    assert body.count(b'"logprobs":' + LOG_PROBS + b',"finish_reason":') == 1


def test_a_document_without_tokens_has_no_log_probabilities_to_list() -> None:
    choice = json.loads(chat(logprobs=True).document())["choices"][0]
    assert choice["logprobs"] == {"content": []}


def test_a_token_within_a_character_has_no_bytes_of_its_own() -> None:
    out = chat(stream=True, logprobs=True)
    first, said = [json.loads(text) for text in events(out.token(1, "", -0.5))]
    assert first["choices"][0]["logprobs"] is None
    assert said["choices"][0]["logprobs"]["content"] == [{"token": "", "logprob": -0.5, "bytes": None, "top_logprobs": []}]


@pytest.mark.parametrize(
    ("log_prob", "said"),
    [
        (-math.inf, -9999.0),  # "the value `-9999.0` is used to signify that the token is very unlikely"
        (-1e300, -9999.0),
        (math.nan, -9999.0),
        (math.inf, -9999.0),
        (None, -9999.0),
        (np.float32(-0.5), -0.5),
        (0, 0.0),
    ],
)
@pytest.mark.parametrize("form", list(ChatForm))
def test_a_log_probability_of_a_chat_is_always_a_number_of_json(form: ChatForm, log_prob: Any, said: float) -> None:
    out = chat(form, logprobs=True, top_logprobs=1)
    body = out.token(1, "a", log_prob, top=(TopToken(text="b", log_prob=log_prob),))
    document = json.loads(body or out.document())
    entry = document["choices"][0]["logprobs"]["content"][0]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (said, said)


# --- LMI's forms of a chat


def test_lmis_json_chat_has_no_model_and_lmis_reason_and_ignores_stream() -> None:
    # LMI's chat schema, "Response Schema"; the bytes are Python's json, as its formatter's.
    out = chat(ChatForm.JSON_CHAT, stream=True)
    assert (out.content_type, out.streaming) == ("application/json", False)
    assert generate(out) == (
        b'{"id": "chatcmpl-123", "object": "chat.completion", "created": 1694268190, "choices": [{"index": 0, '
        b'"message": {"role": "assistant", "content": "Hello"}, "logprobs": null, "finish_reason": "eos_token"}], '
        b'"usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}}'
    )


LINE = (
    '{"id": "chatcmpl-123", "object": "chat.completion.chunk", "created": 1694268190, '
    '"choices": [{"index": 0, "delta": %s, "logprobs": null, "finish_reason": %s}]}\n'
)


def test_lmis_jsonlines_chat_has_the_role_beside_the_first_text_and_no_done_and_no_usage() -> None:
    # LMI's chat schema, the example of a stream: `content` before `role`, the reason on the last token's line.
    out = chat(ChatForm.JSONLINES_CHAT)
    assert (out.content_type, out.streaming) == ("application/jsonlines", True)
    body = out.token(1, "Hel", -0.5) + out.token(2, "lo", -0.25, finish="length") + out.finish("length") + out.end()
    assert body.decode() == (
        LINE % ('{"content": "Hel", "role": "assistant"}', "null") + LINE % ('{"content": "lo"}', '"length"')
    )


def test_a_reason_that_comes_after_the_last_token_is_one_more_line() -> None:
    out = chat(ChatForm.JSONLINES_CHAT, stream=True, stream_options={"include_usage": True})
    body = out.token(1, "a", -0.5) + out.finish("stop_sequence") + out.end()
    assert body.decode() == LINE % ('{"content": "a", "role": "assistant"}', "null") + LINE % (
        '{"content": ""}',
        '"stop_sequence"',
    )
    empty = chat(ChatForm.JSONLINES_CHAT)
    assert empty.end().decode() == LINE % ('{"content": "", "role": "assistant"}', '"eos_token"')


def test_decision_log_probabilities_of_lmis_lines_are_an_object_whose_tokens_are_text() -> None:
    # LMI wraps it in an array and writes a number for the token of top_logprobs: both are slips of its formatter.
    out = chat(ChatForm.JSONLINES_CHAT, logprobs=True, top_logprobs=1)
    assert (
        b'"logprobs": {"content": [{"token": " Oh", "logprob": -0.5, "bytes": [32, 79, 104], "top_logprobs": '
        b'[{"token": " Oh", "logprob": -0.5, "bytes": [32, 79, 104]}]}]}, "finish_reason": null'
    ) in out.token(1, " Oh", -0.5, top=(TopToken(text=" Oh", log_prob=-0.5),))


# --- completions


def test_a_completion_is_one_document() -> None:
    # OpenAI's reference, "The completion object".
    assert generate(completion()) == (
        b'{"id":"cmpl-7","object":"text_completion","created":1690759702,"model":"lm","choices":[{"index":0,'
        b'"text":"Hello","logprobs":null,"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8}}'
    )


TEXT = (
    'data: {"id":"cmpl-7","object":"text_completion","created":1690759702,"model":"lm",'
    '"choices":[{"index":0,"text":%s,"logprobs":null,"finish_reason":%s}]}\n\n'
)


def test_a_streamed_completion_is_chunks_of_the_same_object() -> None:
    # "both the streamed and non-streamed response objects share the same shape (unlike the chat endpoint)"
    assert generate(completion(stream=True)).decode() == (
        TEXT % ('"Hel"', "null") + TEXT % ('"lo"', "null") + TEXT % ('""', '"stop"') + "data: [DONE]\n\n"
    )


def test_echo_puts_the_prompt_first() -> None:
    assert json.loads(generate(completion(echo=True)))["choices"][0]["text"] == "This isHello"
    first = chunks(generate(completion(echo=True, stream=True)))[0]
    assert first["choices"][0]["text"] == "This is"


def test_each_prompt_has_its_own_choices_and_its_own_echo() -> None:
    out = completion(prompt=["One", "Two"], n=2, echo=True)
    for choice in (3, 0, 2, 1):
        out.token(1, f" {choice}", -0.5, sequence=choice, finish="length")
    document = json.loads(out.document())
    assert [(choice["index"], choice["text"]) for choice in document["choices"]] == [
        (0, "One 0"), (1, "One 1"), (2, "Two 2"), (3, "Two 3"),
    ]  # fmt: skip
    assert document["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_completions_are_four_arrays(stream: bool) -> None:
    # openai-python, types/completion_choice.py. The chosen token is among its step's, even where it is not of the best:
    # "there may be up to `logprobs+1` elements in the response".
    out = completion(stream=stream, logprobs=1)
    body = out.token(1, "Hé", -0.5, top=(TopToken(text="No", log_prob=-0.25), TopToken(text="X")))
    body += out.token(2, "!", -2.0, finish="length")
    body += out.end() if stream else out.document()
    if stream:
        choices = [chunk["choices"][0]["logprobs"] for chunk in chunks(body)]
        assert choices[-1] is None
        found = {name: choices[0][name] + choices[1][name] for name in choices[0]}
    else:
        found = json.loads(body)["choices"][0]["logprobs"]
    assert found == {
        "text_offset": [0, 2],
        "token_logprobs": [-0.5, -2.0],
        "tokens": ["Hé", "!"],
        "top_logprobs": [{"No": -0.25, "Hé": -0.5}, {"!": -2.0}],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_log_probabilities_reports_the_prompts_tokens_first(stream: bool) -> None:
    out = completion(stream=stream, logprobs=0, echo=True, prompt_tokens=None)
    out.prefill(5, "This", None)
    out.prefill(6, " is", -1.5)
    body = out.token(1, " it", -0.5, finish="length")
    body += out.end() if stream else out.document()
    if stream:
        echo = chunks(body)[0]["choices"][0]
        assert echo["text"] == "This is"
        assert echo["logprobs"] == {
            "text_offset": [0, 4], "token_logprobs": [None, -1.5], "tokens": ["This", " is"], "top_logprobs": [None, {" is": -1.5}],
        }  # fmt: skip
        assert chunks(body)[1]["choices"][0]["logprobs"]["text_offset"] == [7]
    else:
        document = json.loads(body)
        assert document["choices"][0]["logprobs"] == {
            "text_offset": [0, 4, 7],
            "token_logprobs": [None, -1.5, -0.5],
            "tokens": ["This", " is", " it"],
            "top_logprobs": [None, {" is": -1.5}, {" it": -0.5}],
        }
        assert document["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}


def tops(out: CompletionEncoder) -> list[dict[str, float]]:
    """The alternatives of each token."""
    found: list[dict[str, float]] = json.loads(out.document())["choices"][0]["logprobs"]["top_logprobs"]
    return found


def test_of_tokens_without_an_id_that_have_one_text_the_more_probable_one_is_reported() -> None:
    out = completion(logprobs=3)
    out.token(1, "a", -3.0, top=(TopToken(text="b", log_prob=-0.5), TopToken(text="b", log_prob=-1.0)))
    assert tops(out) == [{"b": -0.5, "a": -3.0}]


def test_the_chosen_token_has_its_own_value_where_others_have_the_same_text() -> None:
    # half characters, special tokens without text, and tokens that occur twice in a vocabulary
    out = completion(logprobs=3)
    most = (
        TopToken(text="b", id=5, log_prob=-0.5),
        TopToken(text="a", id=6, log_prob=-1.0),
        TopToken(text="a", id=7, log_prob=-3.0),
    )
    out.token(7, "a", -3.0, top=most)
    out.token(5, "b", -0.5, top=most)
    out.token(8, "a", -9.0, top=most)
    assert tops(out) == [
        {"b": -0.5, "token_id:6": -1.0, "a": -3.0},
        {"b": -0.5, "a": -1.0, "token_id:7": -3.0},
        {"b": -0.5, "token_id:6": -1.0, "token_id:7": -3.0, "a": -9.0},
    ]


def test_alternatives_within_a_character_are_named_as_the_chosen_token_is() -> None:
    # a tokenizer may give the text that a token would complete here; the chosen token is named by its own bytes
    most = (
        TopToken(text="é", id=5, log_prob=-0.5, data=b"\xa9"),
        TopToken(text="\ufffd", id=6, log_prob=-1.5, data=b"\xc3"),
    )
    out = completion(logprobs=2)
    out.token(5, "é", -0.5, top=most, data=b"\xa9")
    assert tops(out) == [{"\ufffd": -0.5, "token_id:6": -1.5}]
    said = chat(logprobs=True, top_logprobs=2)
    said.token(5, "é", -0.5, top=most, data=b"\xa9")
    (entry,) = json.loads(said.document())["choices"][0]["logprobs"]["content"]
    names = [(token["token"], token["bytes"]) for token in (entry, *entry["top_logprobs"])]
    assert names == [("\ufffd", [0xA9]), ("\ufffd", [0xA9]), ("\ufffd", [0xC3])]


def test_a_completion_reports_each_counted_token_also_the_end_of_the_sequence() -> None:
    # lm_eval leaves out the last value as that of the one token which it has asked for, whatever it is
    whole = json.loads(generate(completion(logprobs=0)))
    assert whole["choices"][0]["logprobs"] == {
        "text_offset": [0, 3, 5],
        "token_logprobs": [-0.5, -0.25, -0.125],
        "tokens": ["Hel", "lo", ""],
        "top_logprobs": [{"Hel": -0.5}, {"lo": -0.25}, {"": -0.125}],
    }
    assert whole["usage"]["completion_tokens"] == 3
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks(generate(completion(logprobs=0, stream=True)))]
    assert [found and found["token_logprobs"] for found in streamed] == [[-0.5], [-0.25], [-0.125], None]


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompts_tokens_have_their_bytes_and_their_alternatives(stream: bool) -> None:
    out = completion(prompt="é!", stream=stream, logprobs=2, echo=True)
    most = tuple(
        [TopToken(text=text, id=id, log_prob=value) for text, id, value in (("?", 1, -0.1), ("!", 2, -2.0), (".", 3, -3.0))]
    )
    out.prefill(8, "", None, data=b"\xc3")
    out.prefill(9, "é", -1.5, top=most, data=b"\xa9")
    out.prefill(2, "!", -2.0, top=most)
    body = out.token(1, "a", -0.5, finish="length")
    found = (chunks(body + out.end())[0] if stream else json.loads(out.document()))["choices"][0]["logprobs"]
    assert {name: values[:3] for name, values in found.items()} == {
        "text_offset": [0, 0, 1],
        "token_logprobs": [None, -1.5, -2.0],
        "tokens": ["\ufffd", "\ufffd", "!"],
        "top_logprobs": [None, {"?": -0.1, "!": -2.0, "\ufffd": -1.5}, {"?": -0.1, "!": -2.0}],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_of_a_truncated_prompt_are_those_of_its_last_tokens(stream: bool) -> None:
    out = completion(prompt="One two three", stream=stream, logprobs=0, echo=True, n=2, truncate_prompt_tokens=2)
    out.prefill(2, " two", None)
    out.prefill(3, " three", -1.0)
    body = b"".join([out.token(4, " four", -0.5, finish="length", sequence=number) for number in range(2)])
    choices = (
        [chunk["choices"][0] for chunk in chunks(body + out.end())] if stream else json.loads(out.document())["choices"]
    )
    for index in range(2):
        own = [choice for choice in choices if choice["index"] == index]
        text = "".join(choice["text"] for choice in own)
        found = [
            pair
            for choice in own
            if (told := choice["logprobs"])
            for pair in zip(told["text_offset"], told["tokens"], strict=True)
        ]
        assert found == [(3, " two"), (7, " three"), (13, " four")]
        assert text == "One two three four"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_no_tokens_has_every_choice_and_ends_by_its_length(stream: bool) -> None:
    for echo in (False, True):
        out = completion(prompt=["One", "Two"], n=2, max_tokens=0, echo=echo, stream=stream)
        choices = [chunk["choices"][0] for chunk in chunks(out.end())] if stream else json.loads(out.document())["choices"]
        for index, prompt in enumerate(("One", "One", "Two", "Two")):
            own = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["text"] for choice in own) == prompt * echo
            assert own[-1]["finish_reason"] == "length"


# --- tokens, choices and their end


@pytest.mark.parametrize("form", list(ChatForm))
def test_a_special_token_without_text_is_counted_and_not_reported(form: ChatForm) -> None:
    out = chat(form, logprobs=True)
    assert b"-0.5" not in out.token(0, "", -0.5, True)
    out.token(1, "a", -0.25)
    assert out.generated_tokens == 2
    assert b"-0.5" not in (out.end() if out.streaming else out.document())


def test_a_special_token_with_text_brings_what_was_held_back_or_asked_to_be_shown() -> None:
    out = chat()
    out.token(0, "held", -0.5, True, "eos_token")
    assert json.loads(out.document())["choices"][0]["message"]["content"] == "held"


def test_choices_grow_in_turns_and_each_has_its_own_role_and_reason() -> None:
    out = chat(stream=True, n=2)
    body = (
        out.token(1, "a", -0.5, sequence=1) + out.token(2, "b", -0.5) + out.token(3, "c", -0.5, sequence=1, finish="length")
    )
    finished = [out.finished]
    body += out.finish("stop_sequence")
    assert [*finished, out.finished] == [False, True]
    said = [chunk["choices"][0] for chunk in chunks(body + out.end())]
    assert [(choice["index"], choice["delta"], choice["finish_reason"]) for choice in said] == [
        (1, {"role": "assistant", "content": ""}, None),
        (1, {"content": "a"}, None),
        (0, {"role": "assistant", "content": ""}, None),
        (0, {"content": "b"}, None),
        (1, {"content": "c"}, None),
        (1, {}, "length"),
        (0, {}, "stop"),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_says_no_reason_has_reached_its_length_or_its_end(stream: bool) -> None:
    out = completion(stream=stream, n=3, max_tokens=2)
    body = out.token(1, "a", -0.5) + out.token(2, "b", -0.5) + out.token(3, "c", -0.5, sequence=2)
    body += out.end() if stream else out.document()
    choices = [chunk["choices"][0] for chunk in (chunks(body))] if stream else json.loads(body)["choices"]
    assert [(c["index"], c["finish_reason"]) for c in choices if c["finish_reason"]] == [(0, "length"), (2, "stop")]


@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_generation_has_the_first_choice_of_each_prompt(stream: bool) -> None:
    out = completion(prompt=["a", "b"], n=2, stream=stream)
    choices = [chunk["choices"][0] for chunk in chunks(out.end())] if stream else json.loads(out.document())["choices"]
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices] == [
        (0, "", "stop"),
        (2, "", "stop"),
    ]


def test_a_token_after_the_last_or_of_no_choice_is_the_callers_mistake() -> None:
    out = chat(stream=True)
    out.token(1, "a", -0.5, finish="length")
    assert out.finish("eos_token") == b""
    with pytest.raises(LocalProtocolError, match="a token after the last of sequence 0"):
        out.token(1, "a", -0.5)
    for sequence in (1, -1):
        with pytest.raises(LocalProtocolError, match=f"sequence {sequence} of an answer with 1 choices"):
            out.token(1, "a", -0.5, sequence=sequence)
        with pytest.raises(LocalProtocolError, match=f"sequence {sequence} of"):
            out.finish("length", sequence)


def test_an_answer_ends_once() -> None:
    stream, whole = chat(stream=True), chat()
    assert stream.end()
    assert whole.document()
    assert stream.end() + stream.finish("length") + stream.error("late") == b""
    assert whole.document() + whole.finish("length") + whole.error("late") == b""
    with pytest.raises(LocalProtocolError):
        stream.token(1, "a", -0.5)
    with pytest.raises(LocalProtocolError):
        stream.document()
    with pytest.raises(LocalProtocolError):
        whole.end()


# --- lines


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", list(ChatForm))
def test_whoever_reads_by_lines_of_unicode_reads_whole_objects(stream: bool, form: ChatForm) -> None:
    text = "a\x85b\u2028c\u2029d\x1e"
    top = (TopToken(text=text, id=1, log_prob=-0.5),)
    for out in (
        chat(form, stream=stream, logprobs=True, top_logprobs=1),
        completion(stream=stream, logprobs=1, prompt=text, echo=True),
    ):
        body = out.token(1, text, -0.5, top=top, finish="length") + (out.end() if out.streaming else out.document())
        lines = [line.removeprefix("data: ") for line in body.decode().splitlines() if line]
        assert all(json.loads(line) for line in lines if line != "[DONE]")


# --- usage


def test_the_prompts_tokens_are_counted_where_nobody_says_how_many_they_are() -> None:
    out = chat(prompt_tokens=None)
    for text in ("Hel", "lo", "!"):
        out.prefill(1, text, -0.5)
    assert json.loads(generate(out))["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def test_what_the_caller_learns_later_wins() -> None:
    out = chat(prompt_tokens=None)
    out.prefill(1, "Hello!", None)
    out.prompt_tokens = 7
    assert json.loads(generate(out))["usage"]["prompt_tokens"] == 7


def test_of_an_end_that_cannot_be_made_an_error_is_still_told() -> None:
    out = chat(stream=True, stream_options={"include_usage": True})
    out.prompt_tokens = object()  # type: ignore[assignment]
    with pytest.raises(TypeError):
        out.end()
    assert out.error("no usage").startswith(b'data: {"error":{"message":"no usage"')


def test_an_answer_to_a_prompt_of_unknown_length_counts_what_was_generated() -> None:
    usage = {"prompt_tokens": 0, "completion_tokens": 3, "total_tokens": 3}
    assert json.loads(generate(chat(prompt_tokens=None)))["usage"] == usage
    found = chunks(generate(chat(stream=True, stream_options={"include_usage": True}, prompt_tokens=None)))
    assert (found[-1]["choices"], found[-1]["usage"]) == ([], usage)


@pytest.mark.parametrize("last", [False, True])
def test_each_chunk_counts_the_tokens_up_to_it_where_that_is_asked_for(last: bool) -> None:
    # vLLM: stream_options.continuous_usage_stats
    asked = {"continuous_usage_stats": True, "include_usage": last}
    for make in (chat, completion):
        out = make(stream=True, stream_options=asked, n=2, logprobs=1 if make is completion else True, prompt_tokens=7)
        tokens = [out.token(1, "a", -0.5), out.token(2, "b", -0.5, sequence=1), out.token(3, "c", -0.5, finish="length")]
        found = chunks(b"".join([*tokens, out.finish("eos_token", 1), out.end()]))
        usages = [chunk["usage"] for chunk in found]
        assert all(u["prompt_tokens"] == 7 and u["total_tokens"] == 7 + u["completion_tokens"] for u in usages)
        counts = [u["completion_tokens"] for u in usages]
        assert (counts, counts[-1]) == (sorted(counts), 3)
        assert [1 for c in found if not c["choices"]] == [1] * last
    assert "usage" not in chunks(generate(chat(stream=True, stream_options={"continuous_usage_stats": False})))[0]


# --- errors


def test_an_error_in_a_stream_is_an_event_that_clients_raise_and_nothing_follows() -> None:
    # openai-python, _streaming.py: data with an `error` raises APIError with its message.
    out = chat(stream=True)
    out.token(1, "a", -0.5)
    assert out.error("the model failed") == (
        b'data: {"error":{"message":"the model failed","type":"server_error","param":null,"code":null}}\n\n'
    )
    assert out.end() == b""
    assert out.finished


def test_an_error_of_an_answer_that_is_no_stream_is_a_body() -> None:
    assert completion().error("busy", 503) == OpenAIError.of_status(503, "busy").body()


def test_errors_of_lmis_forms_are_lmis_and_a_line_is_a_whole_line() -> None:
    # LMI 0.31 sends {"error", "code"} bare, without the line feed; clients wait for it for ever.
    assert chat(ChatForm.JSONLINES_CHAT).error("the model failed") == b'{"error": "the model failed", "code": 424}\n'
    assert chat(ChatForm.JSON_CHAT).error("busy", 503) == b'{"error": "busy", "code": 503}'


# --- bounds


@pytest.mark.parametrize("text", ["a", "\n", "é"])
def test_what_a_document_keeps_is_bounded_and_the_token_too_many_counts_for_nothing(text: str) -> None:
    size = len(json.dumps(text, ensure_ascii=False).encode()) - 2
    out = chat(max_text=10 * size)
    for _ in range(10):
        out.token(1, text, -0.5)
    with pytest.raises(OpenAIError, match=f"at most {10 * size} bytes \\(max_text\\)") as caught:
        out.token(1, text, -0.5)
    assert (caught.value.status, caught.value.type, caught.value.code) == (500, "server_error", "answer_too_long")
    assert out.generated_tokens == 10
    assert json.loads(out.error(caught.value.message))["error"]["message"] == caught.value.message


def test_log_probabilities_and_echoes_are_kept_within_the_same_bound() -> None:
    out = chat(logprobs=True, max_text=100)
    out.token(1, "a", -0.5)
    with pytest.raises(OpenAIError):
        out.token(1, "a", -0.5)
    echoes = completion(echo=True, n=2, max_text=10)
    echoes.token(1, "a", -0.5)
    with pytest.raises(OpenAIError):
        echoes.token(1, "a", -0.5, sequence=1)
    prompt = completion(echo=True, logprobs=0, stream=True, max_text=10, prompt_tokens=None)
    with pytest.raises(OpenAIError):
        prompt.prefill(1, "a long token", -0.5)


@pytest.mark.parametrize("form", [ChatForm.OPENAI, ChatForm.JSONLINES_CHAT])
def test_a_stream_keeps_nothing_so_it_has_no_bound(form: ChatForm) -> None:
    out = chat(form, stream=True, max_text=0)
    assert all(out.token(1, "a" * 100, -0.5) for _ in range(100))


# --- properties of any text

TEXTS = st.lists(st.text(st.characters()), max_size=6)  # with lone surrogates, quotes, controls
FORMS = st.sampled_from(list(ChatForm))


def clean(texts: Sequence[str]) -> str:
    return "".join("".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text) for text in texts)


@given(TEXTS, FORMS, st.booleans(), st.booleans())
def test_the_texts_of_the_chunks_or_the_document_are_those_of_the_tokens(
    texts: list[str], form: ChatForm, stream: bool, log_probs: bool
) -> None:
    out = chat(form, stream=stream, logprobs=log_probs)
    pieces = [out.token(i, text, -0.5) for i, text in enumerate(texts)]
    if not out.streaming:
        assert not any(pieces)
        assert json.loads(out.document())["choices"][0]["message"]["content"] == clean(texts)
        return
    body = b"".join(pieces) + out.end()
    found = [json.loads(line) for line in body.splitlines()] if form is ChatForm.JSONLINES_CHAT else chunks(body)
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert "".join(delta.get("content", "") for delta in deltas) == clean(texts)
    assert [number for number, delta in enumerate(deltas) if "role" in delta] == [0]
    assert [chunk["choices"][0]["finish_reason"] is None for chunk in found] == [True] * (len(found) - 1) + [False]


@given(st.text(st.characters(), min_size=1), TEXTS, st.booleans(), st.booleans())
def test_offsets_point_into_the_text(prompt: str, texts: list[str], stream: bool, echo: bool) -> None:
    out = completion(prompt=prompt, stream=stream, echo=echo, logprobs=0)
    if echo:
        out.prefill(0, prompt, None)
    body = b"".join([out.token(i, text, -0.5) for i, text in enumerate(texts)])
    body += out.end() if stream else out.document()
    choices = [chunk["choices"][0] for chunk in chunks(body)] if stream else json.loads(body)["choices"]
    whole = "".join([choice["text"] for choice in choices])
    assert whole == clean([prompt] * echo + texts)
    for choice in choices:
        found = choice["logprobs"] or {"text_offset": [], "tokens": []}
        for offset, token in zip(found["text_offset"], found["tokens"], strict=True):
            assert whole[offset : offset + len(token)] == token


# --- models


def test_models_are_listed_and_shown() -> None:
    # openai-python, types/model.py: id, created, object, owned_by.
    lm = b'{"id":"lm","object":"model","created":5,"owned_by":"everywire"}'
    assert model_body("lm", created=5) == lm
    assert models_body([("lm", 5)]) == b'{"object":"list","data":[' + lm + b"]}"
    assert models_body([]) == b'{"object":"list","data":[]}'


# --- text that was held back to the end


def test_text_that_was_held_back_is_a_chunk_without_a_token() -> None:
    out = chat(stream=True, stream_options={"include_usage": True}, logprobs=True)
    body = out.token(1, "a", -0.5) + out.rest(" {") + out.rest("") + out.finish("eos_token") + out.rest("late") + out.end()
    *said, usage = chunks(body)
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in said]
    assert "".join(deltas) == "a {"
    assert [chunk["choices"][0]["logprobs"] is None for chunk in said] == [True, False, True, True]
    assert usage["usage"]["completion_tokens"] == 1


def test_text_that_was_held_back_is_in_the_document_and_may_be_all_of_it() -> None:
    out = chat(n=2)
    out.token(1, "a", -0.5)
    assert (out.rest(" {"), out.rest("b", 1)) == (b"", b"")
    assert [choice["message"]["content"] for choice in json.loads(out.document())["choices"]] == ["a {", "b"]
    assert completion(stream=True).rest("x").count(b"data: ") == 1


def test_text_that_was_held_back_is_bounded() -> None:
    out = chat(max_text=4)
    out.token(1, "abc", -0.5)
    with pytest.raises(OpenAIError, match="max_text"):
        out.rest("de")
