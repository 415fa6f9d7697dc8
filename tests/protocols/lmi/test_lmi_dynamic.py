"""LMI's dynamic batch: its requests, and the bytes of its answers, whole and streamed, complete and failed."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import LocalProtocolError
from protocols.lmi import (
    DynamicEncoder,
    DynamicRequest,
    LMIError,
    Parameters,
    SamplingRule,
    Table,
    dynamic_error_body,
    parse_dynamic,
)
from tests.protocols.lmi.lmi_json import dumped


def parse(document: Any, content_type: str = "application/json", **options: Any) -> DynamicRequest:
    return parse_dynamic(json.dumps(document).encode(), content_type, **options)


def refusal(document: Any, **options: Any) -> LMIError:
    with pytest.raises(LMIError) as caught:
        parse(document, **options)
    return caught.value


def outcome(body: bytes) -> DynamicRequest | LMIError:
    try:
        return parse_dynamic(body, "")
    except LMIError as error:
        return error


def encoder(prompts: int, *, streaming: bool, max_text: int = 1 << 20, **asked: Any) -> DynamicEncoder:
    inputs = tuple(f"prompt {at}: " for at in range(prompts))
    request = DynamicRequest(inputs=inputs, parameters=Parameters(**asked))
    return DynamicEncoder(request, streaming=streaming, max_text=max_text)


# --- requests


def test_the_schemas_example_request_without_its_trailing_commas_is_read() -> None:
    request = parse({"inputs": "What is Deep Learning?", "parameters": {"do_sample": True, "max_new_tokens": 256}})
    assert request == DynamicRequest(
        inputs=("What is Deep Learning?",),
        parameters=Parameters(do_sample=True, max_new_tokens=256),
        given={"do_sample": "do_sample", "max_new_tokens": "max_new_tokens"},
    )


def test_inputs_may_be_several_prompts_in_their_order() -> None:
    request = parse({"inputs": ["What is Deep Learning", "How many ways can I peel an orange"]})
    assert request.inputs == ("What is Deep Learning", "How many ways can I peel an orange")


def test_decision_a_prompt_gets_30_tokens_as_in_every_form_of_lmi() -> None:
    assert parse({"inputs": "hi"}).parameters.max_new_tokens == 30


def test_plain_text_is_one_prompt() -> None:
    assert parse_dynamic(b'["hi"]', "text/plain").inputs == ('["hi"]',)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, "inputs: expected a non-empty string, or an array of them, got nothing"),
        ([], "inputs: expected a non-empty string, or an array of them, got an array of 0"),
        (1, "inputs: expected a non-empty string, or an array of them, got 1"),
        ({}, "inputs: expected a non-empty string, or an array of them, got an object"),
        ("", "inputs: expected a non-empty string, got an empty string"),
        (["a", ""], "inputs[1]: expected a non-empty string, got an empty string"),
        ([["a"]], "inputs[0]: expected a non-empty string, got an array of 1"),
    ],
)
def test_inputs_that_are_no_prompts_are_refused_with_their_place(inputs: Any, message: str) -> None:
    error = refusal({"inputs": inputs})
    assert (error.stage, error.message) == ("payload", message)


def test_an_empty_body_is_refused_and_one_that_is_no_request_too() -> None:
    for body in (b"", b"[]", b"\xff", b'{"inputs": "a", "parameters": null}'):
        with pytest.raises(LMIError) as caught:
            parse_dynamic(body, "application/json")
        assert caught.value.stage == "payload"


def test_the_number_of_prompts_is_bounded_exactly() -> None:
    assert len(parse({"inputs": ["a"] * 64}).inputs) == 64
    assert refusal({"inputs": ["a"] * 65}).message == "inputs: expected at most 64 prompts (max_prompts), got an array of 65"
    assert refusal({"inputs": ["a", "b"]}, max_prompts=1).stage == "payload"


def test_what_concerns_the_form_of_other_answers_is_passed_over() -> None:
    asked = {"inputs": "hi", "stream": True, "parameters": {"stream": True, "output_formatter": "sse"}}
    assert parse(asked) == parse({"inputs": "hi"})
    assert refusal({"inputs": "hi", "stream": "yes"}).message == "stream: expected true or false, got the string 'yes'"


def test_table_rule_and_limits_reach_the_reader() -> None:
    asked = {"inputs": "hi", "parameters": {"temperature": 0.5}}
    parameters = parse(asked, table=Table.TRTLLM, rule=SamplingRule.V0_32).parameters
    assert (parameters.do_sample, parameters.top_k) == (True, 5)
    assert "limits.text_json" in refusal(asked, json_limit=5).message
    assert "deeper than 1" in refusal(asked, depth=1).message


@pytest.mark.parametrize("name", ["best_of", "num_beams"])
def test_the_best_of_several_is_the_one_text_of_a_prompt(name: str) -> None:
    request = parse({"inputs": "hi", "parameters": {name: 4}})
    assert (request.parameters.n, getattr(request.parameters, name)) == (1, 4)


def test_several_sequences_have_no_place_in_the_answer() -> None:
    error = refusal({"inputs": "hi", "parameters": {"n": 2}})
    assert (error.stage, error.message) == ("parameters", "parameters.n: expected 1 in a dynamic batch, got 2")
    assert parse({"inputs": "hi", "parameters": {"n": 1, "best_of": 2}}).parameters.best_of == 2


@pytest.mark.parametrize("name", ["n", "best_of", "num_beams"])
def test_a_stream_has_one_sequence_a_prompt(name: str) -> None:
    error = refusal({"inputs": "hi", "parameters": {name: 2}}, streaming=True)
    assert error.message == f"parameters.{name}: expected 1 in a stream, got 2"


@settings(max_examples=80)
@given(st.binary(max_size=60) | st.lists(st.text(max_size=2), max_size=3).map(lambda i: json.dumps({"inputs": i}).encode()))
def test_any_bytes_are_prompts_or_refused(body: bytes) -> None:
    result = outcome(body)
    assert result.stage == "payload" if isinstance(result, LMIError) else all(result.inputs)


# --- one document


def test_the_document_is_printed_as_lmi_prints_it() -> None:
    # LMI's Output.add_as_json: json.dumps with indent=2, separators=(",", ":") and ensure_ascii=False.
    out = encoder(1, streaming=False)
    assert out.content_type == "application/json"
    assert out.token(0, "Deep Learning is a ") + out.token(0, "really cool field") + out.end(0) == b""
    assert out.finish() == b'[\n  {\n    "generated_text":"Deep Learning is a really cool field"\n  }\n]'


@settings(max_examples=50)
@given(st.lists(st.lists(st.text(max_size=3), max_size=3), min_size=1, max_size=3), st.booleans())
def test_the_document_is_what_pythons_json_writes_of_it(texts: list[list[str]], full: bool) -> None:
    out = encoder(len(texts), streaming=False, return_full_text=full)
    for at, tokens in enumerate(texts):
        for token in tokens:
            out.token(at, token)
        out.end(at)
    assert out.finished
    expected = [{"generated_text": (f"prompt {at}: " if full else "") + "".join(tokens)} for at, tokens in enumerate(texts)]
    assert out.finish() == dumped(expected, indent=2, separators=(",", ":")).encode()


def test_texts_stand_by_their_prompts_in_whatever_order_tokens_come() -> None:
    out = encoder(3, streaming=False)
    for prompt, text in ((2, "c"), (0, "a"), (2, "C"), (0, "A")):
        assert out.token(prompt, text) == b""
    assert [answer["generated_text"] for answer in json.loads(out.finish())] == ["aA", "", "cC"]


def test_a_failed_document_is_the_error_alone() -> None:
    out = encoder(2, streaming=False)
    out.token(0, "lost")
    assert out.error("out of luck") == dynamic_error_body("out of luck")
    assert out.finish() == out.error("again") == out.token(0, "a") == out.flush() == b""


# --- the stream


def test_prompts_in_step_make_one_line_a_step_with_an_entry_for_each() -> None:
    out = encoder(2, streaming=True)
    assert out.content_type == "application/jsonlines"
    assert out.token(0, "a") == b""
    assert out.token(1, "c") == b'{"outputs": ["a", "c"]}\n'
    assert out.token(1, "d") == b""
    assert out.token(0, "b") == b'{"outputs": ["b", "d"]}\n'
    assert out.finish() == b""


def test_the_schemas_example_of_one_prompt_is_a_line_a_token_at_once_and_no_final_line() -> None:
    out = encoder(1, streaming=True)
    lines = [out.token(0, text) for text in ("This", "opportunity", "is")]
    assert lines == [b'{"outputs": ["This"]}\n', b'{"outputs": ["opportunity"]}\n', b'{"outputs": ["is"]}\n']
    assert out.end(0) + out.finish() == b""


def test_a_token_without_text_is_a_step_too() -> None:
    assert encoder(1, streaming=True).token(0, "") == b'{"outputs": [""]}\n'


def test_a_stream_has_the_ascii_escapes_of_pythons_json() -> None:
    text = 'é"\n\U0001f600\x7f\u2028'
    line = encoder(1, streaming=True).token(0, text)
    assert line == json.dumps({"outputs": [text]}).encode() + b"\n"
    assert b"\\u00e9" in line


@pytest.mark.parametrize("text", ["\ud800", "a\udc00é"])
def test_a_lone_surrogate_becomes_the_replacement_character_in_both_forms(text: str) -> None:
    replaced = text.replace("\ud800", "\ufffd").replace("\udc00", "\ufffd")
    assert json.loads(encoder(1, streaming=True).token(0, text)) == {"outputs": [replaced]}
    out = encoder(1, streaming=False)
    out.token(0, text)
    assert json.loads(out.finish()) == [{"generated_text": replaced}]


def test_a_prompt_that_has_ended_is_not_waited_for_and_has_empty_entries() -> None:
    out = encoder(2, streaming=True)
    out.token(0, "a", last=True)
    assert out.ended(0)
    assert not out.ended(1)
    assert out.token(1, "b") == b'{"outputs": ["a", "b"]}\n'
    assert out.token(1, "c") == b'{"outputs": ["", "c"]}\n'


def test_the_end_of_a_prompt_completes_the_line_that_waited_for_it_alone() -> None:
    out = encoder(2, streaming=True)
    out.token(1, "b")
    assert out.end(0) == b'{"outputs": ["", "b"]}\n'
    assert out.end(0) == b""
    assert not out.finished
    assert out.end(1) == b""
    assert out.finished


def test_a_prompt_that_is_ahead_waits_for_nobody() -> None:
    out = encoder(2, streaming=True)
    assert out.token(0, "a") == b""
    assert out.token(0, "b") == b'{"outputs": ["a", ""]}\n'
    assert out.flush() == b'{"outputs": ["b", ""]}\n'
    assert out.flush() == b""
    assert out.token(0, "c") + out.token(1, "x") == b'{"outputs": ["c", "x"]}\n'


def test_the_end_of_the_answer_brings_out_what_waited() -> None:
    out = encoder(2, streaming=True)
    out.token(0, "a", last=True)
    assert out.finish() == b'{"outputs": ["a", ""]}\n'


@pytest.mark.parametrize("streaming", [False, True])
def test_a_prompt_ends_with_its_token_number_max_new_tokens(streaming: bool) -> None:
    out = encoder(2, streaming=streaming, max_new_tokens=2)
    out.token(0, "a")
    assert not out.ended(0)
    out.token(0, "b")
    assert out.ended(0)
    assert not out.finished
    with pytest.raises(LocalProtocolError, match="after the last of prompt 0"):
        out.token(0, "c")


steps = st.lists(
    st.tuples(st.sampled_from(["token", "token", "token", "last", "end", "flush"]), st.integers(0, 2), st.text(max_size=2)),
    max_size=30,
)


@settings(max_examples=150)
@given(steps, st.booleans())
def test_in_whatever_order_prompts_go_on_and_end_the_columns_are_their_texts(
    story: list[tuple[str, int, str]], flushed: bool
) -> None:
    out, texts, body, ended = encoder(3, streaming=True), ["", "", ""], b"", set()
    for what, prompt, text in story:
        if what == "flush":
            body += out.flush()
        elif what == "end":
            body += out.end(prompt)
            ended.add(prompt)
        elif prompt not in ended:
            body += out.token(prompt, text, last=what == "last")
            texts[prompt] += text
            if what == "last":
                ended.add(prompt)
            if flushed:
                body += out.flush()
    assert out.finished == (len(ended) == 3)
    body += out.finish()
    lines = [json.loads(line)["outputs"] for line in body.splitlines()]
    assert all(len(line) == 3 for line in lines)
    assert ["".join(column) for column in zip(*lines, strict=True)] == (texts if lines else [])
    assert lines or texts == ["", "", ""]


# --- bounds


def test_what_a_document_holds_is_bounded_over_all_prompts_and_the_token_counts_for_nothing() -> None:
    out = encoder(2, streaming=False, max_text=8)
    out.token(0, "abcd")
    out.token(1, "\n\n")  # four characters of JSON
    with pytest.raises(LMIError, match=r"at most 8 bytes \(max_text\)") as caught:
        out.token(1, "e")
    assert caught.value.stage == "generation"
    assert [answer["generated_text"] for answer in json.loads(out.finish())] == ["abcd", "\n\n"]


def test_what_a_stream_holds_is_its_line_alone() -> None:
    out = encoder(2, streaming=True, max_text=8)
    out.token(0, "abcdef")
    with pytest.raises(LMIError):
        out.token(1, "ghi")
    with pytest.raises(LMIError):
        out.token(0, "123456789")
    assert out.token(0, "12345678") == b'{"outputs": ["abcdef", ""]}\n'
    assert out.flush() == b'{"outputs": ["12345678", ""]}\n'
    assert out.token(0, "x" * 8) == b""


# --- errors


def test_the_error_is_printed_as_lmi_prints_it() -> None:
    assert dynamic_error_body('no "é"') == (
        '{\n  "code":424,\n  "message":"invoke handler failure",\n  "error":"no \\"é\\""\n}'.encode()
    )
    assert json.loads(dynamic_error_body("out of memory", 507))["code"] == 507


def test_decision_a_stream_that_fails_ends_with_the_error_as_a_line_after_all_that_was_said() -> None:
    # LMI just stops, or writes the text of the error as a bare value.
    out = encoder(2, streaming=True)
    out.token(0, "a")
    assert out.error("no é") == (
        b'{"outputs": ["a", ""]}\n{"code": 424, "message": "invoke handler failure", "error": "no \\u00e9"}\n'
    )
    assert out.finish() == out.error("again") == out.token(0, "b") == out.end(1) == out.flush() == b""


# --- text that was held back to the end


def test_text_that_was_held_back_is_in_the_document() -> None:
    out = encoder(2, streaming=False)
    out.token(0, "a")
    assert (out.end(0, " {"), out.end(1)) == (b"", b"")
    assert [one["generated_text"] for one in json.loads(out.finish())] == ["a {", ""]


def test_text_that_was_held_back_is_on_a_line_as_a_last_token() -> None:
    out = encoder(2, streaming=True)
    lines = out.token(0, "a") + out.token(1, "b") + out.end(0, " {") + out.token(1, "c") + out.end(1, "}")
    assert lines + out.finish() == b'{"outputs": ["a", "b"]}\n{"outputs": [" {", "c"]}\n{"outputs": ["", "}"]}\n'
    assert out.finished


def test_text_that_was_held_back_is_bounded() -> None:
    out = encoder(1, streaming=False, max_text=4)
    out.token(0, "abc")
    with pytest.raises(LMIError, match="max_text"):
        out.end(0, "de")
