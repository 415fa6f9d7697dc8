"""LMI requests: what is accepted, with which defaults, and what is refused in which words."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.lmi import (
    Formatter,
    LMIError,
    Parameters,
    SamplingRule,
    Table,
    TextRequest,
    is_chat,
    parse_document,
    parse_request,
    read_document,
)


def parse(document: Any, content_type: str = "application/json", **options: Any) -> TextRequest:
    return parse_request(json.dumps(document).encode(), content_type, **options)


def parameters(**given: Any) -> Parameters:
    return parse({"inputs": "hi", "parameters": given}).parameters


def refusal(body: bytes | Any, content_type: str = "application/json", **options: Any) -> LMIError:
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(LMIError) as caught:
        parse_request(body, content_type, **options)
    assert caught.value.status == 424
    return caught.value


# --- the body


def test_a_prompt_alone_gets_the_defaults_of_the_common_table() -> None:
    request = parse({"inputs": "What is Deep Learning?"})
    assert request == TextRequest(inputs="What is Deep Learning?", stream=False, formatter=Formatter.JSON)
    assert request.parameters == Parameters(
        do_sample=False,
        seed=None,
        temperature=1.0,
        repetition_penalty=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=30,
        details=False,
        return_full_text=False,
        stop_sequences=(),
        decoder_input_details=False,
        extra={},
    )


def test_the_schemas_example_request_without_its_trailing_commas_is_read() -> None:
    request = parse(
        {
            "inputs": "What is Deep Learning?",
            "parameters": {"do_sample": True, "max_new_tokens": 256, "details": True},
            "stream": True,
        }
    )
    assert request.stream
    assert request.formatter is Formatter.JSONLINES
    assert request.parameters == Parameters(do_sample=True, max_new_tokens=256, details=True)


def test_decision_the_trailing_commas_of_the_schemas_example_are_refused() -> None:
    body = b"""
    {
        "inputs" : "What is Deep Learning?",
        "parameters" : {
            "do_sample": true,
            "max_new_tokens": 256,
            "details": true,
        },
        "stream": true,
    }"""
    assert refusal(body).stage == "payload"


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "Application/JSON; charset=utf-8", "application/x-www-form-urlencoded", "text/csv", "x"],
)
def test_json_is_json_whatever_it_is_called(content_type: str) -> None:
    assert parse({"inputs": "hi"}, content_type).inputs == "hi"


def test_plain_text_is_the_prompt_itself() -> None:
    assert parse_request('{"inputs": "é"}'.encode(), "text/plain; charset=utf-8").inputs == '{"inputs": "é"}'


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize(("body", "content_type"), [(b'{"inputs": "hi"}', ""), (b"hi", "text/plain")])
def test_a_body_may_be_any_buffer(kind: type[bytes], body: bytes, content_type: str) -> None:
    assert parse_request(kind(body), content_type).inputs == "hi"


def test_what_is_not_json_names_its_content_type() -> None:
    assert "'text/csv': send application/json or text/plain" in refusal(b"a,b", "text/csv").message
    assert "send application/json" not in refusal(b"a,b", "application/json").message


@pytest.mark.parametrize("content_type", ["", "application/json", "text/plain"])
@pytest.mark.parametrize("body", [b"\xff", b'{"inputs": "\xff"}'])
def test_text_that_is_not_utf8_is_refused(content_type: str, body: bytes) -> None:
    error = refusal(body, content_type)
    assert error.stage == "payload"


@pytest.mark.parametrize("content_type", ["", "application/json", "text/plain"])
def test_an_empty_body_is_an_empty_prompt_and_refused(content_type: str) -> None:
    assert refusal(b"", content_type).message == "inputs: expected a non-empty string, got an empty string"


@pytest.mark.parametrize(
    "document", [{}, {"inputs": None}, {"inputs": ""}, {"inputs": ["a"]}, {"inputs": 1}, {"inputs": {}}]
)
def test_inputs_is_one_non_empty_string(document: Any) -> None:
    error = refusal(document)
    assert error.stage == "payload"
    assert error.message.startswith("inputs: expected a non-empty string, got ")


@pytest.mark.parametrize("document", [None, [], "inputs", 1, True])
def test_the_body_is_an_object(document: Any) -> None:
    error = refusal(document)
    assert error.stage == "payload"
    assert error.message.startswith("body: expected an object, got ")


@pytest.mark.parametrize("given_", [None, [], "a", 1, False])
def test_decision_parameters_that_are_not_an_object_are_refused_null_included(given_: Any) -> None:
    error = refusal({"inputs": "hi", "parameters": given_})
    assert error.stage == "payload"
    assert error.message.startswith("parameters: expected an object, got ")


def test_unknown_top_level_members_are_passed_over() -> None:
    assert parse({"inputs": "hi", "adapters": "a", "anything": [1]}) == parse({"inputs": "hi"})


def test_messages_ask_for_chat_which_this_route_does_not_offer() -> None:
    error = refusal({"messages": [{"role": "user", "content": "hi"}], "inputs": "hi"})
    assert error.stage == "payload"
    assert "chat is not offered at this route" in error.message
    assert parse({"inputs": "hi", "messages": None}).inputs == "hi"


@pytest.mark.parametrize(("said", "chat"), [({}, False), ({"messages": None}, False), ({"messages": []}, True)])
def test_a_caller_that_offers_chat_asks_the_document_which_schema_it_is_of(said: dict[str, Any], chat: bool) -> None:
    document = read_document(json.dumps({"inputs": "hi", "top_p": 2, **said}).encode(), "")
    assert document == {"inputs": "hi", "top_p": 2, **said}
    assert is_chat(document) is chat


def test_reading_in_two_steps_is_reading_in_one() -> None:
    body = b'{"inputs": "hi", "stream": true, "parameters": {"top_p": 0, "temperature": 0.5, "best_of": null}}'
    options: dict[str, Any] = {"tgi": True, "table": Table.TRTLLM, "rule": SamplingRule.V0_32}
    in_two = parse_document(read_document(body, "", json_limit=len(body), depth=2), **options)
    assert in_two == parse_request(body, "", json_limit=len(body), depth=2, **options)
    assert in_two.parameters == Parameters(do_sample=True, temperature=0.5, top_k=5, top_p=1.0, min_length=1, details=True)


def test_the_size_limit_is_exact_and_named() -> None:
    body = b'{"inputs": "hi"}'
    assert parse_request(body, "", json_limit=len(body)).inputs == "hi"
    error = refusal(body, json_limit=len(body) - 1)
    assert error.message == "body: at most 15 bytes (limits.text_json), got 16"
    assert refusal(b"hello", "text/plain", json_limit=4).stage == "payload"


def test_the_depth_limit_is_exact() -> None:
    def nested(depth: int) -> dict[str, Any]:
        value: Any = 0
        for _ in range(depth - 2):
            value = [value]
        return {"inputs": "hi", "parameters": {"deep": value}}

    assert parse(nested(5), depth=5).inputs == "hi"
    assert refusal(nested(6), depth=5).stage == "payload"
    assert refusal(b"[" * 100_000).stage == "payload"


# --- which format


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("configured", [None, *Formatter])
def test_a_configured_formatter_wins_over_stream(configured: Formatter | None, stream: Any) -> None:
    expected = configured or (Formatter.JSONLINES if stream else Formatter.JSON)
    request = parse({"inputs": "hi", "stream": stream}, configured=configured)
    assert (request.formatter, request.stream) == (expected, stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", list(Formatter))
def test_the_formatter_of_the_request_wins_over_all(asked: Any, stream: Any) -> None:
    body = {"inputs": "hi", "stream": stream, "parameters": {"output_formatter": asked.value}}
    for configured in (None, *Formatter):
        assert parse(body, configured=configured).formatter is asked


@pytest.mark.parametrize("asked", ["json_chat", "3p_stream", "JSON", "", None])
def test_a_formatter_without_a_meaning_here_is_passed_over(asked: Any) -> None:
    body = {"inputs": "hi", "stream": True, "parameters": {"output_formatter": asked}}
    assert parse(body).formatter is Formatter.JSONLINES
    assert parse(body, configured=Formatter.SSE).formatter is Formatter.SSE


@pytest.mark.parametrize("asked", [1, 1.5, True, [], ["sse"], {}])
def test_a_formatter_is_a_name(asked: Any) -> None:
    error = refusal({"inputs": "hi", "stream": True, "parameters": {"output_formatter": asked}})
    assert error.stage == "parameters"
    assert error.message.startswith("parameters.output_formatter: expected a string, got ")


@pytest.mark.parametrize(("top", "expected"), [({}, False), ({"stream": None}, False), ({"stream": True}, True)])
def test_stream_at_the_top_level_overwrites_the_parameter_also_by_its_absence(top: dict[str, Any], expected: Any) -> None:
    request = parse({"inputs": "hi", "parameters": {"stream": not expected}, **top})
    assert request.stream is expected
    assert request.parameters.extra == {}


@pytest.mark.parametrize("stream", ["true", 1, 0, [], {}])
def test_stream_is_a_boolean(stream: Any) -> None:
    error = refusal({"inputs": "hi", "stream": stream})
    assert error.stage == "payload"
    assert error.message.startswith("stream: expected true or false, got ")


# --- TGI's form (LMI's get_output_formatter, with option.tgi_compat)


@pytest.mark.parametrize(
    ("configured", "stream", "expected"),
    [
        (None, False, Formatter.JSON),
        (None, True, Formatter.SSE),
        (Formatter.JSONLINES, False, Formatter.JSONLINES),
        (Formatter.JSONLINES, True, Formatter.JSONLINES),
        (Formatter.JSON, True, Formatter.JSON),
    ],
)
def test_with_tgi_compat_an_unnamed_stream_is_sse(configured: Any, stream: Any, expected: Formatter) -> None:
    request = parse({"inputs": "hi", "stream": stream}, configured=configured, tgi=True)
    assert (request.formatter, request.tgi) == (expected, True)


@pytest.mark.parametrize("tgi", [False, True])
@pytest.mark.parametrize("asked", list(Formatter))
def test_the_request_names_the_framing_and_the_server_the_words(asked: Formatter, tgi: bool) -> None:
    body = {"inputs": "hi", "stream": True, "parameters": {"output_formatter": asked.value}}
    request = parse(body, tgi=tgi)
    assert (request.formatter, request.tgi) == (asked, tgi)


@pytest.mark.parametrize(("said", "expected"), [({}, True), ({"details": None}, True), ({"details": False}, False)])
def test_with_tgi_compat_details_are_given_unless_refused(said: dict[str, Any], expected: bool) -> None:
    body = {"inputs": "hi", "parameters": said}
    assert parse(body, tgi=True).parameters.details is expected
    assert parse(body, tgi=False).parameters.details is False


def test_details_by_default_are_not_among_those_that_the_request_has_given() -> None:
    assert parse({"inputs": "hi"}, tgi=True).given == {}
    assert parse({"inputs": "hi", "parameters": {"details": True, "top_k": 0}}, tgi=True).given.keys() == {
        "details",
        "top_k",
    }


def test_decision_tokens_of_the_prompt_are_refused_in_a_stream_of_tgis_form_and_in_no_other() -> None:
    asked = {"inputs": "hi", "stream": True, "parameters": {"decoder_input_details": True}}
    error = refusal(asked, tgi=True)
    assert error.stage == "parameters"
    assert error.message == "parameters.decoder_input_details: expected false in a stream of TGI's form, got true"
    assert parse(asked).parameters.decoder_input_details
    assert parse({**asked, "stream": False}, tgi=True).parameters.decoder_input_details

    implied = {"inputs": "hi", "stream": True, "parameters": {"prompt_logprobs": 3}}
    assert refusal(implied, tgi=True).message == ("parameters.prompt_logprobs: expected 0 in a stream of TGI's form, got 3")


# --- several sequences


@pytest.mark.parametrize("name", ["n", "best_of", "num_beams"])
def test_decision_several_sequences_are_refused_in_a_stream(name: str) -> None:
    # LMI streams only one of them, without an error.
    body = {"inputs": "hi", "parameters": {name: 2}}
    for configured in (Formatter.JSONLINES, Formatter.SSE):
        assert refusal(body, configured=configured).message == f"parameters.{name}: expected 1 in a stream, got 2"
    error = refusal({**body, "stream": True})
    assert (error.stage, error.message) == ("parameters", f"parameters.{name}: expected 1 in a stream, got 2")
    assert parse(body).parameters.n == 2


def test_a_single_sequence_may_be_streamed_in_so_many_words() -> None:
    assert parse({"inputs": "hi", "stream": True, "parameters": {"n": 1, "best_of": 1, "num_beams": 1}}).stream


# --- parameters


KNOWN = [name for name in Parameters.__struct_fields__ if name not in ("extra", "limited")]


def test_decision_null_in_a_parameter_is_the_same_as_absent() -> None:
    # A published client sends null for every parameter that its user has not set.
    assert parameters(**dict.fromkeys([*KNOWN, "stop", "typical_p", "best_of"])) == Parameters()


def test_decision_an_unknown_parameter_is_no_error_and_reaches_extra_as_it_came() -> None:
    unknown = {"watermark": True, "max_tokens": 5, "min_new_tokens": 3, "min_tokens": 3, "nested": {"a": [1, None]}}
    assert parameters(**unknown, top_k=5) == Parameters(top_k=5, extra=unknown)


def test_decision_do_sample_absent_stays_greedy_whatever_the_temperature() -> None:
    assert parameters(temperature=0.7).do_sample is False
    assert parameters(temperature=0.7, do_sample=True).do_sample is True


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("do_sample", True, True),
        ("details", False, False),
        ("temperature", 0, 0.0),
        ("temperature", 1e300, 1e300),
        ("repetition_penalty", 1e-9, 1e-9),
        ("top_p", 1, 1.0),
        ("top_p", 5e-324, 5e-324),
        ("top_k", -1, 0),
        ("top_k", 0, 0),
        ("top_k", 1, 1),
        ("top_k", 2**31 - 1, 2**31 - 1),
        ("max_new_tokens", 1, 1),
        ("max_new_tokens", 10.0, 10),
        ("max_new_tokens", 2**31 - 1, 2**31 - 1),
        ("seed", "42", 42),
        ("seed", "-1", -1),
        ("seed", 7.0, 7),
        ("seed", -(2**63), -(2**63)),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("stop_sequences", [], ()),
        ("stop_sequences", "\n", ("\n",)),
        ("stop_sequences", ["a"] * 64, ("a",) * 64),
    ],
)
def test_a_value_in_its_range_is_taken(name: str, value: Any, expected: Any) -> None:
    taken = getattr(parameters(**{name: value}), name)
    assert taken == expected
    assert type(taken) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("do_sample", "true", "expected true or false, got the string 'true'"),
        ("details", 1, "expected true or false, got 1"),
        ("return_full_text", [], "expected true or false, got an array of 0"),
        ("decoder_input_details", {}, "expected true or false, got an object"),
        ("temperature", -0.1, "expected a number >= 0, got -0.1"),
        ("temperature", "1.0", "expected a number >= 0, got the string '1.0'"),
        ("temperature", True, "expected a number >= 0, got true"),
        ("temperature", 10**399, f"expected a number >= 0, got 1{'0' * 39}"),
        ("repetition_penalty", 0, "expected a number > 0, got 0"),
        ("top_p", 0, "expected a number > 0 and <= 1, got 0"),
        ("top_p", 1.0001, "expected a number > 0 and <= 1, got 1.0001"),
        ("top_k", -2, "expected -1 or 0 (off), or an integer from 1 to 2147483647, got -2"),
        ("top_k", 2**31, "expected -1 or 0 (off), or an integer from 1 to 2147483647, got 2147483648"),
        ("top_k", 1.5, "expected -1 or 0 (off), or an integer from 1 to 2147483647, got 1.5"),
        ("max_new_tokens", 0, "expected an integer from 1 to 2147483647, got 0"),
        ("max_new_tokens", 2**31, "expected an integer from 1 to 2147483647, got 2147483648"),
        ("max_new_tokens", 10.5, "expected an integer from 1 to 2147483647, got 10.5"),
        ("max_new_tokens", "10", "expected an integer from 1 to 2147483647, got the string '10'"),
        ("max_new_tokens", False, "expected an integer from 1 to 2147483647, got false"),
        ("seed", 2**64, "expected an integer of 64 bits, got 18446744073709551616"),
        ("seed", -(2**63) - 1, "expected an integer of 64 bits, got -9223372036854775809"),
        ("seed", 1.5, "expected an integer of 64 bits, got 1.5"),
        ("seed", "1_0", "expected an integer of 64 bits, got the string '1_0'"),
        ("seed", "", "expected an integer of 64 bits, got an empty string"),
        ("seed", "9" * 20, "expected an integer of 64 bits, got the string '99999999999999999999'"),
        ("stop_sequences", 1, "expected at most 64 strings, got 1"),
        ("stop_sequences", ["a"] * 65, "expected at most 64 strings, got an array of 65"),
        ("stop_sequences", ["a", ""], "expected non-empty strings, got an empty string"),
        ("stop_sequences", "", "expected non-empty strings, got an empty string"),
        ("stop_sequences", ["a", None], "expected non-empty strings, got nothing"),
    ],
)
def test_decision_a_bad_value_is_refused_by_name_with_what_was_expected_and_what_came(
    name: str, value: Any, message: str
) -> None:
    error = refusal({"inputs": "hi", "parameters": {name: value}})
    assert error.stage == "parameters"
    assert error.message == f"parameters.{name}: {message}"


def test_a_number_beyond_a_double_is_refused_as_payload() -> None:
    assert refusal(b'{"inputs": "hi", "parameters": {"temperature": 1e999}}').stage == "payload"
    assert refusal(b'{"inputs": "hi", "parameters": {"temperature": NaN}}').stage == "payload"


def test_an_error_echoes_little_of_a_long_value() -> None:
    error = refusal({"inputs": "hi", "parameters": {"details": "\x00" * 10_000}})
    assert len(error.message) < 300


def test_an_escaped_surrogate_without_its_pair_is_refused_and_a_pair_is_read() -> None:
    assert refusal(b'{"inputs": "\\ud83d"}').stage == "payload"
    assert parse_request(b'{"inputs": "\\ud83d\\ude00"}', "").inputs == "\U0001f600"


# --- errors


def test_decision_a_body_that_is_no_request_gets_error_and_code() -> None:
    assert LMIError('no\n"é"', stage="payload").body() == '{"error": "no\\n\\"é\\"", "code": 424}'.encode()


@pytest.mark.parametrize("stage", ["parameters", "generation"])
def test_decision_other_errors_get_the_schemas_object_plus_error_and_code(stage: Any) -> None:
    assert LMIError("no", stage=stage).body() == (
        b'{"generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, "inputs": null, '
        b'"tokens": null}, "error": "no", "code": 424}'
    )


# --- garbage


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
json_values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), scalars, max_size=2)
quick = settings(max_examples=80)


def outcome(body: bytes, content_type: str = "") -> TextRequest | LMIError:
    try:
        return parse_request(body, content_type)
    except LMIError as error:
        return error


@quick
@given(st.binary(max_size=60), st.sampled_from(["", "application/json", "text/plain", "text/csv"]))
def test_any_bytes_are_read_or_refused_and_nothing_else(body: bytes, content_type: str) -> None:
    result = outcome(body, content_type)
    assert result.stage == "payload" if isinstance(result, LMIError) else result.inputs


@quick
@given(st.dictionaries(st.sampled_from([*KNOWN, "output_formatter", "stream", "other"]), json_values, max_size=4))
def test_any_parameters_are_read_or_refused_by_name(given_: Any) -> None:
    result = outcome(json.dumps({"inputs": "hi", "parameters": given_}).encode())
    if isinstance(result, LMIError):
        assert result.stage == "parameters"
        assert result.message.partition(":")[0].split(".")[1] in given_.keys() - {"other"}
    else:
        assert result.parameters.extra == ({"other": given_["other"]} if given_.get("other") is not None else {})


@quick
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(["inputs", "parameters", "stream", "messages"], json_values)))
def test_any_object_is_read_or_refused(document: Any) -> None:
    result = outcome(json.dumps(document).encode())
    assert result.message if isinstance(result, LMIError) else result.inputs == document["inputs"]
