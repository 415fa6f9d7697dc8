"""Calls of tools in answers to chats: the bytes of each piece, ids, numbers, ends, bounds, and what a model does wrong."""

import json
import re
from typing import Any

import pytest

from protocols.errors import LocalProtocolError
from protocols.openai import ChatEncoder, ChatForm, OpenAIError
from tests.docs.pages import blocks
from tests.protocols.openai.answers import accumulated, chat, chunks, completion, events

CHUNK = (
    'data: {"id":"chatcmpl-123","object":"chat.completion.chunk","created":1694268190,"model":"lm",'
    '"choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s}]}\n\n'
)
ROLE = CHUNK % ('{"role":"assistant","content":""}', "null")
DONE = CHUNK % ("{}", '"tool_calls"') + "data: [DONE]\n\n"


def document(out: ChatEncoder) -> Any:
    return json.loads(out.document())


def choice_of(out: ChatEncoder) -> Any:
    """The one choice of an answer that ends now."""
    return document(out)["choices"][0]


def weather(out: ChatEncoder, **more: Any) -> bytes:
    """A call in three pieces."""
    return (
        out.call(0, "call_7", "get_weather", "", **more)
        + out.call(0, "", "", '{"city":', **more)
        + out.call(0, "", "", ' "Köln"}', **more)
    )


# --- the bytes


def test_a_stream_begins_a_call_with_its_id_and_name_and_goes_on_with_arguments_alone() -> None:
    # OpenAI's reference, "Streaming" of function calling: `id`, `type` and `name` are in the first delta of an index alone.
    out = chat(stream=True)
    body = weather(out) + out.finish("eos_token") + out.end()
    assert body.decode() == (
        ROLE
        + CHUNK
        % (
            '{"tool_calls":[{"index":0,"id":"call_7","type":"function","function":{"name":"get_weather","arguments":""}}]}',
            "null",
        )
        + CHUNK % (r'{"tool_calls":[{"index":0,"function":{"arguments":"{\"city\":"}}]}', "null")
        + CHUNK % (r'{"tool_calls":[{"index":0,"function":{"arguments":" \"Köln\"}"}}]}', "null")
        + DONE
    )


def test_a_document_has_no_content_where_no_text_came() -> None:
    out = chat()
    assert weather(out) + out.finish("tool_calls") == b""
    assert out.document().decode() == (
        '{"id":"chatcmpl-123","object":"chat.completion","created":1694268190,"model":"lm","choices":[{"index":0,'
        '"message":{"role":"assistant","content":null,"tool_calls":[{"id":"call_7","type":"function","function":'
        r'{"name":"get_weather","arguments":"{\"city\": \"Köln\"}"}}]},"logprobs":null,"finish_reason":"tool_calls"}],'
        '"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}}'
    )


def test_text_before_a_call_stays_its_own() -> None:
    whole, stream = chat(), chat(stream=True)
    for out in (whole, stream):
        out.token(1, "Let me look.", -0.5)
        weather(out)
    message = choice_of(whole)["message"]
    assert message["content"] == "Let me look."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    assert events(stream.end())[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_arguments_are_the_models_text_character_for_character(stream: bool) -> None:
    # odd white space, an escape, a name that comes twice, digits that no double holds, and broken JSON
    text = '{ "a":1.0e2,\t"a" : "\\u00e9\u2028" , "n":123456789012345678901234567890, broken'
    for at in range(len(text) + 1):
        out = chat(stream=stream)
        body = out.call(0, "c", "f", text[:at]) + out.call(0, "", "", text[at:], finish="eos_token")
        choices = accumulated(chunks(body + out.end())) if stream else document(out)["choices"]
        assert choices[0]["message"]["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize("stream", [False, True])
def test_names_ids_and_arguments_of_any_characters_are_strings_of_json_on_one_line(stream: bool) -> None:
    out = chat(stream=stream)
    odd = '"\\\n\u2028\x85\ud800'
    body = out.call(0, odd, odd, odd) + (out.end() if stream else out.document())
    assert "\u2028" not in body.decode()
    call = (accumulated(chunks(body)) if stream else json.loads(body)["choices"])[0]["message"]["tool_calls"][0]
    clean = odd.replace("\ud800", "\ufffd")
    assert (call["id"], call["function"]) == (clean, {"name": clean, "arguments": clean})


def test_a_piece_that_says_nothing_has_no_chunk_and_is_counted() -> None:
    out = chat(stream=True)
    assert out.call(0, "c", "f", "")
    assert out.call(0, "", "", "") == b""
    assert out.call(0, "", "", "", tokens=3) == b""
    assert out.generated_tokens == 5


def test_an_id_and_a_name_that_come_again_are_passed_over() -> None:
    whole, stream = chat(), chat(stream=True)
    whole.call(0, "call_7", "f", "{")
    stream.call(0, "call_7", "f", "{")
    whole.call(0, "call_8", "g", "}")
    assert b"call_8" not in stream.call(0, "call_8", "g", "}")
    assert choice_of(whole)["message"]["tool_calls"] == [
        {"id": "call_7", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ]


def test_the_reference_shows_these_forms() -> None:
    whole, calls, thinking = [block.text for block in blocks("docs/reference/openai.md") if block.language == "json"]
    pieces = [(0, "call_7", "weather", ""), (0, "", "", '{"city":'), (1, "call_8", "now", ""), (0, "", "", ' "Oslo"}')]
    out, stream = chat(), chat(stream=True)
    for piece in pieces:
        out.call(*piece)
    assert whole.replace("\n", "") in out.document().decode()
    deltas = [b'"delta":%b,' % line.encode() for line in calls.splitlines()]
    said = b"".join([stream.call(*piece) for piece in pieces]) + stream.end()
    assert [delta in said for delta in deltas] == [True] * 5
    stream = chat(stream=True)
    said = stream.thought(1, "Rain", None) + stream.thought(1, " again.", None) + stream.token(1, "Take a coat.", None)
    assert [chunk["choices"][0]["delta"] for chunk in chunks(said + stream.end())][:-1] == [
        json.loads(line) for line in thinking.splitlines()
    ]


# --- arguments that never come


def test_a_call_without_arguments_has_an_empty_object_which_a_stream_says_before_its_reason() -> None:
    stream = chat(stream=True)
    body = stream.call(0, "c", "now", "") + stream.call(0, "", "", "") + stream.finish("eos_token") + stream.end()
    assert body.decode() == (
        ROLE
        + CHUNK
        % ('{"tool_calls":[{"index":0,"id":"c","type":"function","function":{"name":"now","arguments":""}}]}', "null")
        + CHUNK % ('{"tool_calls":[{"index":0,"function":{"arguments":"{}"}}]}', "null")
        + DONE
    )
    whole = chat()
    whole.call(0, "c", "now", "")
    assert choice_of(whole)["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


@pytest.mark.parametrize("end", ["token", "call", "finish", "end"])
def test_whatever_ends_a_choice_completes_its_calls(end: str) -> None:
    out = chat(stream=True)
    body = out.call(0, "a", "f", "") + out.call(1, "b", "g", "[1]") + out.call(2, "c", "h", "")
    match end:
        case "token":
            body += out.token(1, "!", -0.5, finish="eos_token")
        case "call":
            body += out.call(1, "", "", "", finish="eos_token")
        case "finish":
            body += out.finish("stop_sequence")
    (choice,) = accumulated(chunks(body + out.end()))
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ["{}", "[1]", "{}"]


# --- ids


def test_an_id_of_the_models_own_goes_out_unchanged() -> None:
    out = chat(make_id=lambda: "made")
    out.call(0, "toolu_x/7", "f", "{}")
    assert choice_of(out)["message"]["tool_calls"][0]["id"] == "toolu_x/7"


def test_an_id_that_the_model_leaves_out_is_made_once_for_each_call() -> None:
    made = iter(["call_a", "call_b"])
    out = chat(make_id=lambda: next(made), stream=True)
    body = out.call(0, "", "f", "{") + out.call(1, "", "g", "{}") + out.call(0, "", "", "}") + out.end()
    assert [call["id"] for call in accumulated(chunks(body))[0]["message"]["tool_calls"]] == ["call_a", "call_b"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_id_is_call_and_24_characters_and_no_two_of_an_answer_are_alike(stream: bool) -> None:
    out = chat(n=2, stream=stream)
    body = b"".join([out.call(index, "", "f", "{}", sequence=s) for index in range(3) for s in range(2)])
    body += out.end() if stream else out.document()
    choices = accumulated(chunks(body)) if stream else json.loads(body)["choices"]
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert all(re.fullmatch("call_[0-9a-zA-Z]{24}", id) for id in ids)
    assert len(set(ids)) == 6


# --- several calls, several choices


def test_calls_that_grow_in_turns_are_told_apart_by_their_index() -> None:
    stream, whole = chat(stream=True), chat()
    pieces = [(0, "a", "f", "{"), (1, "b", "g", ""), (0, "", "", '"x":'), (1, "", "", "[]"), (0, "", "", "1}")]
    body = b"".join([stream.call(*piece) for piece in pieces]) + stream.end()
    for piece in pieces:
        whole.call(*piece)
    said = [chunk["choices"][0]["delta"]["tool_calls"][0]["index"] for chunk in chunks(body)[1:-1]]
    assert said == [0, 1, 0, 1, 0]
    calls = choice_of(whole)["message"]["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [("a", '{"x":1}'), ("b", "[]")]


@pytest.mark.parametrize("numbers", [(0, 1, 2), (2, 0, 1), (7, 700, 3)])
def test_decision_calls_are_numbered_as_they_begin_because_clients_take_the_index_for_a_place(
    numbers: tuple[int, ...],
) -> None:
    # openai-python would merge a call with the index 0 into one that came before it with the index 1
    stream, whole = chat(stream=True), chat()
    pieces = [(index, f"id{index}", "f", "{") for index in numbers] + [(index, "", "", "}") for index in reversed(numbers)]
    body = b"".join([stream.call(*piece) for piece in pieces]) + stream.end()
    for piece in pieces:
        whole.call(*piece)
    calls = choice_of(whole)["message"]["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [(f"id{index}", "{}") for index in numbers]
    there = accumulated(chunks(body))[0]["message"]["tool_calls"]
    assert [call.pop("index") for call in there] == [0, 1, 2]
    assert there == calls


def test_each_choice_has_its_own_calls_and_its_own_reason() -> None:
    out = chat(stream=True, n=3)
    body = (
        out.call(0, "a", "f", "{", sequence=2)
        + out.token(1, "No.", -0.5, sequence=1, finish="eos_token")
        + out.call(0, "b", "g", "{}", sequence=0, finish="eos_token")
        + out.call(0, "", "", "}", sequence=2, finish="length")
    )
    assert out.finished
    found = accumulated(chunks(body + out.end()))
    assert [(c["finish_reason"], [call["id"] for call in c["message"].get("tool_calls", [])]) for c in found] == [
        ("tool_calls", ["b"]), ("stop", []), ("length", ["a"]),
    ]  # fmt: skip


# --- reasons


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "with_calls", "without"),
    [
        ("eos_token", "tool_calls", "stop"),
        ("tool_calls", "tool_calls", "stop"),
        ("stop_sequence", "stop", "stop"),
        ("length", "length", "length"),
        ("", "tool_calls", "stop"),  # nobody says one
    ],
)
def test_a_text_that_ends_by_itself_after_a_call_says_so(reason: str, with_calls: str, without: str, stream: bool) -> None:
    for calls, said in ((True, with_calls), (False, without)):
        out = chat(stream=stream)
        body = out.call(0, "c", "f", "{}") if calls else b""
        body += out.token(1, "a", -0.5) + (out.finish(reason) if reason else b"")
        body += out.end() if stream else out.document()
        choices = accumulated(chunks(body)) if stream else json.loads(body)["choices"]
        assert choices[0]["finish_reason"] == said


def test_a_call_that_reaches_the_length_says_length_even_beyond_it() -> None:
    out = chat(max_tokens=5)
    out.call(0, "c", "f", "{", tokens=4)
    out.call(0, "", "", '"a', tokens=4)
    choice = choice_of(out)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a'


@pytest.mark.parametrize("form", [ChatForm.JSON_CHAT, ChatForm.JSONLINES_CHAT])
def test_lmis_forms_have_no_place_for_calls_and_its_reason_for_their_end_is_eos_token(form: ChatForm) -> None:
    out = chat(form)
    with pytest.raises(LocalProtocolError, match="no place for calls"):
        out.call(0, "c", "f", "{}")
    body = out.token(1, "a", -0.5, finish="tool_calls") + (out.end() if out.streaming else out.document())
    assert b'"finish_reason": "eos_token"' in body


def test_a_completion_has_no_calls() -> None:
    out = completion()
    out.token(1, "a", -0.5, finish="tool_calls")
    assert json.loads(out.document())["choices"][0]["finish_reason"] == "stop"
    assert not hasattr(out, "call")


# --- usage


def test_the_tokens_of_pieces_are_counted_as_they_are_given() -> None:
    out = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    body = (
        out.call(0, "c", "f", "")
        + out.call(0, "", "", "{", tokens=0)
        + out.call(0, "", "", "}", tokens=5, finish="eos_token")
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks(body + out.end())]
    assert counts == [0, 1, 1, 6, 6, 6]


def test_a_count_of_the_models_own_replaces_what_was_counted() -> None:
    out = chat(n=2)
    out.call(0, "c", "f", "{}", tokens=2)
    out.token(1, "a", -0.5, sequence=1)
    out.count(40)
    out.finish("eos_token")
    found = document(out)
    assert found["usage"] == {"prompt_tokens": 9, "completion_tokens": 41, "total_tokens": 50}
    assert found["choices"][0]["finish_reason"] == "tool_calls"
    with pytest.raises(LocalProtocolError):
        out.count(1, 2)


# --- errors


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("index", "name", "says"), [(1, "", "has no name"), (-1, "f", "at least 0, got -1")]
)  # fmt: skip
def test_a_call_that_begins_badly_is_the_models_error_and_counts_for_nothing(
    index: int, name: str, says: str, stream: bool
) -> None:
    out = chat(stream=stream)
    out.call(0, "c", "f", "{}")
    with pytest.raises(OpenAIError, match=says) as caught:
        out.call(index, "d", name, "{}")
    assert (caught.value.status, caught.value.type, caught.value.code) == (500, "server_error", "bad_tool_call")
    assert out.generated_tokens == 1
    assert json.loads(out.error(caught.value).removeprefix(b"data: "))["error"]["code"] == "bad_tool_call"
    assert out.finished


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_has_at_most_1024_calls_and_each_may_still_grow(stream: bool) -> None:
    out = chat(stream=stream, n=2)
    for index in range(1024):
        out.call(index, "", "f", "")
    with pytest.raises(OpenAIError, match="at most 1024"):
        out.call(1024, "", "f", "")
    body = out.call(1023, "", "", "[]") + out.call(0, "", "f", "{}", sequence=1)
    assert (b"[]" in body) is stream
    if stream:
        # each of the 1,023 that are still empty gets its arguments
        assert out.finish("eos_token").count(b'"arguments":"{}"') == 1023
    else:
        assert len(choice_of(out)["message"]["tool_calls"]) == 1024


def test_calls_of_a_document_are_bounded_with_its_texts_and_the_piece_too_many_counts_for_nothing() -> None:
    out = chat(max_text=200)
    out.token(1, "a" * 50, -0.5)
    out.call(0, "c", "f", "{")
    said = len('"id":"c","type":"function","function":{"name":"f","arguments":"{')
    for _ in range((150 - said) // 2):
        out.call(0, "", "", '"')  # two bytes each, as they will be written
    for piece in ((0, "", "", '""'), (1, "d", "g" * 100, "")):
        with pytest.raises(OpenAIError, match=r"at most 200 bytes \(max_text\)"):
            out.call(*piece)
    assert out.generated_tokens == 2 + (150 - said) // 2
    (call,) = choice_of(out)["message"]["tool_calls"]
    assert call["function"]["arguments"] == "{" + '"' * ((150 - said) // 2)


def test_a_stream_keeps_no_bytes_of_its_calls_so_they_have_no_bound() -> None:
    out = chat(stream=True, max_text=0)
    assert out.call(0, "c", "f", "")
    assert all(out.call(0, "", "", "1" * 1000) for _ in range(100))


@pytest.mark.parametrize("stream", [False, True])
def test_a_piece_after_the_last_or_of_no_choice_is_the_callers_mistake(stream: bool) -> None:
    out = chat(stream=stream)
    out.call(0, "c", "f", "{}", finish="eos_token")
    for say in (lambda: out.call(0, "", "", "{"), lambda: out.thought(1, "a", -0.5), lambda: out.call(1, "d", "g", "")):
        with pytest.raises(LocalProtocolError, match="after the last of sequence 0"):
            say()
    with pytest.raises(LocalProtocolError, match="sequence 1 of"):
        out.call(0, "c", "f", "", sequence=1)
    ended = chat(stream=stream)
    assert ended.end() if stream else ended.document()
    with pytest.raises(LocalProtocolError):
        ended.call(0, "c", "f", "{}")


def test_a_stream_that_fails_within_a_call_says_the_error_and_nothing_more() -> None:
    out = chat(stream=True)
    out.call(0, "c", "f", "{")
    assert out.error("the model failed").startswith(b'data: {"error":{"message":"the model failed"')
    assert out.end() + out.finish("eos_token") == b""
