"""Thinking in answers: shown apart from the text or not at all, counted always, and never among the log-probabilities."""

import json
from typing import Any

import pytest

from protocols.openai import ChatForm, OpenAIError
from tests.protocols.openai.answers import accumulated, chat, chunks, completion

CHUNK = (
    'data: {"id":"chatcmpl-123","object":"chat.completion.chunk","created":1694268190,"model":"lm",'
    '"choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s}]}\n\n'
)


def think(out: Any) -> bytes:
    """Two tokens of thinking, one of text, and the end."""
    body: bytes = out.thought(1, "Hm", -0.5) + out.thought(2, ", yes", -0.5)
    body += out.token(3, "Yes", -0.5) + out.token(0, "", -0.5, True, "eos_token")
    return body + (out.end() if out.streaming else out.document())


def test_a_stream_shows_thinking_after_the_role_and_before_the_content() -> None:
    # the name is SGLang's: clients that know vLLM's `reasoning` read it too
    assert think(chat(stream=True)).decode() == (
        CHUNK % ('{"role":"assistant","content":""}', "null")
        + CHUNK % ('{"reasoning_content":"Hm"}', "null")
        + CHUNK % ('{"reasoning_content":", yes"}', "null")
        + CHUNK % ('{"content":"Yes"}', "null")
        + CHUNK % ("{}", '"stop"')
        + "data: [DONE]\n\n"
    )


def test_a_document_has_thinking_beside_the_content_and_counts_it_apart() -> None:
    assert think(chat()) == (
        b'{"id":"chatcmpl-123","object":"chat.completion","created":1694268190,"model":"lm","choices":[{"index":0,'
        b'"message":{"role":"assistant","content":"Yes","reasoning_content":"Hm, yes"},"logprobs":null,"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13,"completion_tokens_details":{"reasoning_tokens":2}}}'
    )


@pytest.mark.parametrize("stream", [False, True])
def test_every_split_of_thinking_and_text_is_the_same_thinking_and_text(stream: bool) -> None:
    thinking, text = 'So "7"\n\u2028é', 'Seven\\"'
    for at in range(len(thinking) + 1):
        for place in range(len(text) + 1):
            out = chat(stream=stream)
            body = out.thought(1, thinking[:at], None) + out.thought(1, thinking[at:], None)
            body += out.token(1, text[:place], None) + out.token(1, text[place:], None, finish="eos_token")
            body += out.end() if stream else out.document()
            message = (accumulated(chunks(body)) if stream else json.loads(body)["choices"])[0]["message"]
            assert message == {"role": "assistant", "content": text, "reasoning_content": thinking}


@pytest.mark.parametrize("form", list(ChatForm))
@pytest.mark.parametrize("stream", [False, True])
def test_thinking_that_is_not_shown_is_counted_all_the_same(form: ChatForm, stream: bool) -> None:
    out = chat(form, stream=stream, show_thinking=form is not ChatForm.OPENAI)
    body = think(out)
    assert out.generated_tokens == 4
    assert b"reasoning_content" not in body
    assert b"Hm" not in body
    if not out.streaming:
        usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
        # LMI's usage has no place for it
        more = {"completion_tokens_details": {"reasoning_tokens": 2}} if form is ChatForm.OPENAI else {}
        assert json.loads(body)["usage"] == usage | more


def test_lmis_lines_say_the_role_with_the_first_text_after_the_thinking() -> None:
    out = chat(ChatForm.JSONLINES_CHAT)
    assert out.thought(1, "Hm", -0.5) == b""
    assert b'"delta": {"content": "Yes", "role": "assistant"}' in out.token(2, "Yes", -0.5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_counts_thinking_and_does_not_show_it(stream: bool) -> None:
    out = completion(stream=stream, echo=True, logprobs=0, **({"stream_options": {"include_usage": True}} if stream else {}))
    body = think(out)
    assert b"Hm" not in body
    found = chunks(body) if stream else [json.loads(body)]
    assert found[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    texts = [choice["text"] for chunk in found for choice in chunk["choices"]]
    assert "".join(texts) == "This isYes"
    tokens = [
        token for chunk in found for choice in chunk["choices"] for token in (choice["logprobs"] or {"tokens": []})["tokens"]
    ]
    assert tokens == ["Yes", ""]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_content_alone(stream: bool) -> None:
    out = chat(stream=stream, logprobs=True)
    body = out.thought(1, "Hm", -0.5) + out.call(0, "c", "f", "{}") + out.token(2, "Yes", -0.25, finish="eos_token")
    body += out.end() if stream else out.document()
    (choice,) = accumulated(chunks(body)) if stream else json.loads(body)["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["Yes"]


def test_a_token_of_thinking_without_text_has_no_chunk() -> None:
    out = chat(stream=True)
    assert b"role" in out.thought(1, "", -0.5)  # but the first thing of a choice says its role
    assert out.thought(1, "", -0.5) == b""
    assert out.generated_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_may_end_within_its_thinking(stream: bool) -> None:
    out = chat(stream=stream)
    body = out.thought(1, "Hm", -0.5, finish="length") + (out.end() if stream else out.document())
    (choice,) = accumulated(chunks(body)) if stream else json.loads(body)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    assert out.finished


def test_each_choice_thinks_for_itself_and_all_thoughts_are_counted() -> None:
    out = chat(n=2, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    body = out.token(1, "a", -0.5) + out.thought(2, "Hm", -0.5, sequence=1) + out.thought(3, "b", -0.5) + out.end()
    found = chunks(body)
    details = [chunk["usage"].get("completion_tokens_details") for chunk in found]
    assert details == [None, None, None, {"reasoning_tokens": 1}, *[{"reasoning_tokens": 2}] * 4]
    assert [choice["message"].get("reasoning_content") for choice in accumulated(found)] == ["b", "Hm"]


def test_there_is_never_more_thinking_than_tokens() -> None:
    # the model counts fewer tokens than it sent pieces
    out = chat()
    out.thought(1, "a", -0.5)
    out.thought(1, "b", -0.5)
    out.count(1)
    usage = json.loads(out.document())["usage"]
    assert (usage["completion_tokens"], usage["completion_tokens_details"]) == (1, {"reasoning_tokens": 1})


def test_thinking_that_a_document_shows_is_bounded_with_its_text() -> None:
    out = chat(max_text=10)
    out.token(1, "a" * 5, -0.5)
    out.thought(1, "b" * 5, -0.5)
    with pytest.raises(OpenAIError, match="max_text"):
        out.thought(1, "c", -0.5)
    assert out.generated_tokens == 2
    for free in (chat(max_text=0, show_thinking=False), chat(max_text=0, stream=True), completion(max_text=0)):
        free.thought(1, "a" * 100, -0.5)
