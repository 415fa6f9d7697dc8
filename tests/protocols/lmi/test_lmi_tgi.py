"""The TGI form of LMI's answers: what its clients count on, token by token, to the end or a failure."""

import json
from typing import Any

import pytest

from models.messages import TopToken
from protocols.errors import LocalProtocolError
from protocols.lmi import Formatter, LMIError, Parameters, TextEncoder, TextRequest, parse_stream_line
from protocols.lmi.errors import ErrorType, tgi_error_body

STREAMS = [Formatter.JSONLINES, Formatter.SSE]
ERROR_TYPES: list[ErrorType] = ["validation", "generation", "overloaded", "incomplete_generation"]


def encoder(formatter: Formatter, max_text: int = 1 << 20, **asked: Any) -> TextEncoder:
    parameters = Parameters(**{"details": True} | asked)
    request = TextRequest(inputs="Deep Learning is", parameters=parameters, formatter=formatter, tgi=True)
    return TextEncoder(request, max_text=max_text)


def details_of(body: bytes) -> dict[str, Any]:
    document = parse_stream_line(body) if not body.startswith(b"[") else json.loads(body)[0]
    details: dict[str, Any] = document["details"]
    return details


# --- tokens and events


@pytest.mark.parametrize("special", [False, True])
def test_a_token_always_says_whether_it_is_special_and_calls_its_probability_logprob(special: bool) -> None:
    event = parse_stream_line(encoder(Formatter.SSE).token(7, "a", -0.5, special))
    assert event["token"] == {"id": 7, "text": "a", "logprob": -0.5, "special": special}


@pytest.mark.parametrize("formatter", STREAMS)
def test_events_are_numbered_from_one_and_all_but_the_last_have_nulls_for_what_comes_at_the_end(
    formatter: Formatter,
) -> None:
    out = encoder(formatter)
    events = [parse_stream_line(out.token(1, text, -0.5)) for text in "abc"]
    last = parse_stream_line(out.finish("eos_token"))
    assert [event["index"] for event in [*events, last]] == [1, 2, 3, 4]
    assert [(event["generated_text"], event["details"]) for event in events] == [(None, None)] * 3
    assert last["token"] == {"id": 0, "text": "", "logprob": 0.0, "special": True}
    assert (last["generated_text"], last["details"]["generated_tokens"]) == ("abc", 3)


def test_a_prompt_that_was_not_reported_has_an_input_length_of_null() -> None:
    # huggingface_hub and text-generation check neither its type nor that it is there; a number would be invented.
    out = encoder(Formatter.SSE)
    assert out.token(1, "a", -0.5, finish="length") == (
        b'data: {"index": 1, "token": {"id": 1, "text": "a", "logprob": -0.5, "special": false}, "generated_text": "a", '
        b'"details": {"finish_reason": "length", "generated_tokens": 1, "seed": null, "input_length": null, '
        b'"inputs": "Deep Learning is"}}\n\n'
    )


def test_the_tokens_of_a_prompt_are_its_input_length_whether_they_are_shown_or_not() -> None:
    for asked in (False, True):
        out = encoder(Formatter.SSE, decoder_input_details=asked)
        out.prefill(1, "Deep", None)
        out.prefill(2, " is", -0.25)
        details = details_of(out.finish("eos_token"))
        assert details["input_length"] == 2
        assert ("prefill" in details) == asked


def test_a_document_has_an_empty_prefill_where_nobody_asked_for_one_and_no_input_length() -> None:
    out = encoder(Formatter.JSON)
    out.prefill(1, "Deep", None)
    details = details_of(out.finish("eos_token"))
    assert details["prefill"] == []
    assert "input_length" not in details


@pytest.mark.parametrize("seed", [None, 0, -1, 2**64 - 1])
@pytest.mark.parametrize("formatter", list(Formatter))
def test_the_seed_is_the_requests_and_null_if_it_has_none(formatter: Formatter, seed: int | None) -> None:
    assert details_of(encoder(formatter, seed=seed).finish("eos_token"))["seed"] == seed


def test_an_event_has_its_top_tokens_even_where_there_are_no_details() -> None:
    out = encoder(Formatter.SSE, details=False, top_n_tokens=1)
    event = parse_stream_line(out.token(1, "a", -0.5, top=(TopToken(id=2, text="b", log_prob=-0.25),)))
    assert event["top_tokens"] == [{"id": 2, "text": "b", "logprob": -0.25, "special": False}]
    assert "top_tokens" not in parse_stream_line(out.token(1, "a", -0.5))
    last = parse_stream_line(out.finish("eos_token"))
    assert "top_tokens" not in last
    assert last["details"] is None


@pytest.mark.parametrize("formatter", list(Formatter))
def test_top_tokens_that_nobody_asked_for_are_left_out(formatter: Formatter) -> None:
    out = encoder(formatter)
    assert b"top_tokens" not in out.token(1, "a", -0.5, top=(TopToken(text="b"),)) + out.finish("eos_token")


# --- ends and failures


@pytest.mark.parametrize("reason", ["length", "eos_token", "stop_sequence"])
@pytest.mark.parametrize("formatter", list(Formatter))
def test_the_reason_is_one_of_the_three_that_tgis_clients_know(formatter: Formatter, reason: str) -> None:
    out = encoder(formatter)
    assert details_of(out.token(1, "a", -0.5, finish=reason) + out.finish(reason))["finish_reason"] == reason


@pytest.mark.parametrize("formatter", STREAMS)
def test_token_number_max_new_tokens_is_the_last_event(formatter: Formatter) -> None:
    out = encoder(formatter, max_new_tokens=2)
    assert parse_stream_line(out.token(1, "a", -0.5))["details"] is None
    states = [out.finished]
    assert details_of(out.token(1, "b", -0.5))["finish_reason"] == "length"
    assert [*states, out.finished] == [False, True]
    assert out.finish("eos_token") == b""
    with pytest.raises(LocalProtocolError, match="ended with 'length'"):
        out.token(1, "c", -0.5)


@pytest.mark.parametrize("kind", ERROR_TYPES)
def test_a_failure_in_a_stream_is_an_event_that_names_its_type(kind: ErrorType) -> None:
    out = encoder(Formatter.SSE)
    out.token(1, "a", -0.5)
    assert (
        out.error('lost "é"\n', kind=kind) == ('data: {"error":"lost \\"é\\"\\n","error_type":"' + kind + '"}\n\n').encode()
    )
    assert out.finish("eos_token") == out.error("again") == b""


@pytest.mark.parametrize("kind", ERROR_TYPES)
def test_a_failed_document_is_the_error_body_of_its_type(kind: ErrorType) -> None:
    assert encoder(Formatter.JSON).error("lost", kind=kind) == tgi_error_body("lost", kind)


@pytest.mark.parametrize("error_type", ERROR_TYPES)
def test_an_error_body_is_no_array_and_has_both_forms_keys(error_type: ErrorType) -> None:
    body = json.loads(tgi_error_body("\ud800", error_type, 503))
    assert {key: body[key] for key in ("error", "code", "error_type")} == {
        "error": "\ufffd",
        "code": 503,
        "error_type": error_type,
    }


@pytest.mark.parametrize(
    ("stage", "error_type"), [("payload", "validation"), ("parameters", "validation"), ("generation", "generation")]
)
def test_the_stage_of_an_error_is_its_type(stage: Any, error_type: str) -> None:
    error = LMIError("no", stage=stage)
    assert error.error_type == json.loads(error.body(tgi=True))["error_type"] == error_type
    assert "error_type" not in json.loads(error.body())


def test_the_bound_counts_what_the_end_repeats_and_not_what_an_event_has_already_said() -> None:
    top = (TopToken(text="bcdefgh"),)
    kept = len(b'[{"id": 0, "text": "bcdefgh", "logprob": 0.0, "special": false}], ') + len(b"a")
    without = encoder(Formatter.SSE, max_text=1, details=False, top_n_tokens=1)
    assert b"bcdefgh" in without.token(1, "a", -0.5, top=top)
    exact = encoder(Formatter.SSE, max_text=kept, top_n_tokens=1)
    assert exact.token(1, "a", -0.5, top=top)
    with pytest.raises(LMIError, match="max_text"):
        exact.token(1, "a", -0.5)
    assert exact.generated_tokens == 1
    assert parse_stream_line(exact.finish("length"))["index"] == 2
