"""LMI answers: the bytes of every form, with and without details, complete and failed."""

import json
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.messages import TopToken
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Signal
from protocols.json.lines import LineDecoder
from protocols.lmi import (
    Formatter,
    LMIError,
    Parameters,
    TextEncoder,
    TextRequest,
    error_body,
    generation_error_body,
    parse_stream_line,
    response_headers,
)
from protocols.sse import SSEDecoder
from tests.protocols.lmi.lmi_json import dumped

STREAMS = [Formatter.JSONLINES, Formatter.SSE]


def encoder(formatter: Formatter, inputs: str = "Deep Learning is", max_text: int = 1 << 20, **given_: Any) -> TextEncoder:
    request = TextRequest(inputs=inputs, parameters=Parameters(**given_), formatter=formatter)
    return TextEncoder(request, max_text=max_text)


def generate(out: TextEncoder) -> bytes:
    """Three tokens, of which the last says that the length is reached."""
    body = out.token(304, "Deep ", -0.052432529628276825)
    body += out.token(11157, "Learning", -1.2865009307861328)
    body += out.token(5972, " field.", -0.6950479745864868, finish="length")
    return body + out.finish("length")


def framed(formatter: Formatter, *lines: str) -> bytes:
    start, end = ("data: ", "\n\n") if formatter is Formatter.SSE else ("", "\n")
    return "".join(f"{start}{line}{end}" for line in lines).encode()


# --- the forms


@pytest.mark.parametrize(
    ("formatter", "content_type", "streaming"),
    [
        (Formatter.JSON, "application/json", False),
        (Formatter.JSONLINES, "application/jsonlines", True),
        (Formatter.SSE, "text/event-stream; charset=utf-8", True),
    ],
)
def test_each_formatter_has_its_content_type(formatter: Formatter, content_type: str, streaming: bool) -> None:
    out = encoder(formatter)
    assert (out.content_type, out.streaming) == (content_type, streaming)


def test_a_json_answer_is_one_document_without_a_line_end() -> None:
    assert generate(encoder(Formatter.JSON)) == b'{"generated_text": "Deep Learning field."}'


def test_decision_json_details_say_finish_reason_with_an_underscore_and_always_carry_inputs() -> None:
    assert generate(encoder(Formatter.JSON, details=True)) == (
        b'{"generated_text": "Deep Learning field.", "details": {"finish_reason": "length", "generated_tokens": 3, '
        b'"inputs": "Deep Learning is", "tokens": ['
        b'{"id": 304, "text": "Deep ", "log_prob": -0.052432529628276825}, '
        b'{"id": 11157, "text": "Learning", "log_prob": -1.2865009307861328}, '
        b'{"id": 5972, "text": " field.", "log_prob": -0.6950479745864868}]}}'
    )


def test_json_details_of_an_empty_generation_have_an_empty_list_of_tokens() -> None:
    out = encoder(Formatter.JSON, details=True)
    assert out.finish("eos_token") == (
        b'{"generated_text": "", "details": {"finish_reason": "eos_token", "generated_tokens": 0, '
        b'"inputs": "Deep Learning is", "tokens": []}}'
    )


def test_decision_jsonlines_are_single_line_objects_without_details_on_the_last_unless_asked() -> None:
    assert generate(encoder(Formatter.JSONLINES)) == (
        b'{"token": {"id": 304, "text": "Deep ", "log_prob": -0.052432529628276825}}\n'
        b'{"token": {"id": 11157, "text": "Learning", "log_prob": -1.2865009307861328}}\n'
        b'{"token": {"id": 5972, "text": " field.", "log_prob": -0.6950479745864868}, '
        b'"generated_text": "Deep Learning field."}\n'
    )


def test_decision_sse_events_are_data_space_object_blank_line_the_last_included_and_no_done() -> None:
    assert generate(encoder(Formatter.SSE)) == (
        b'data: {"token": {"id": 304, "text": "Deep ", "log_prob": -0.052432529628276825}}\n\n'
        b'data: {"token": {"id": 11157, "text": "Learning", "log_prob": -1.2865009307861328}}\n\n'
        b'data: {"token": {"id": 5972, "text": " field.", "log_prob": -0.6950479745864868}, '
        b'"generated_text": "Deep Learning field."}\n\n'
    )


@pytest.mark.parametrize("formatter", STREAMS)
def test_details_of_a_stream_have_no_tokens(formatter: Formatter) -> None:
    out = encoder(formatter, details=True)
    assert out.token(2, " is", -0.5, finish="eos_token") == framed(
        formatter,
        '{"token": {"id": 2, "text": " is", "log_prob": -0.5}, "generated_text": " is", "details": '
        '{"finish_reason": "eos_token", "generated_tokens": 1, "inputs": "Deep Learning is"}}',
    )


PREFILL = '"prefill": [{"id": 1, "text": "Deep", "log_prob": null}, {"id": 2, "text": " is", "log_prob": -0.25}]'


@pytest.mark.parametrize("formatter", list(Formatter))
@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_prefill_is_there_only_with_both_details_and_decoder_input_details(
    formatter: Formatter, details: bool, asked: Any
) -> None:
    out = encoder(formatter, details=details, decoder_input_details=asked)
    out.prefill(1, "Deep", None)
    out.prefill(2, " is", -0.25)
    body = out.token(3, "!", -0.5, finish="length") + out.finish("length")
    assert (PREFILL.encode() in body) == (details and asked)
    assert (b"prefill" in body) == (details and asked)


def test_prefill_stands_last_in_the_details() -> None:
    out = encoder(Formatter.JSON, details=True, decoder_input_details=True)
    out.prefill(1, "Deep", None)
    out.prefill(2, " is", -0.25)
    assert out.finish("eos_token").decode().endswith(f'"tokens": [], {PREFILL}}}}}')


@pytest.mark.parametrize("formatter", list(Formatter))
def test_the_full_text_is_prompt_and_text_with_nothing_between(formatter: Formatter) -> None:
    out = encoder(formatter, 'say "é"', return_full_text=True)
    body = out.token(1, "!", -0.5, finish="length") + out.finish("length")
    assert '"generated_text": "say \\"é\\"!"}'.encode() in body
    assert b'"text": "!"' in body or formatter is Formatter.JSON


def test_special_token_appears_only_when_it_is_one() -> None:
    out = encoder(Formatter.JSONLINES)
    assert out.token(2, "", -0.5, special=True) == framed(
        Formatter.JSONLINES, '{"token": {"id": 2, "text": "", "log_prob": -0.5, "special_token": true}}'
    )
    assert out.generated_tokens == 1


@pytest.mark.parametrize(
    ("log_prob", "written"),
    [
        (-0.5, "-0.5"),
        (0.0, "0.0"),
        (-1, "-1.0"),
        (-1e-7, "-1e-07"),
        (None, "null"),
        (-math.inf, "null"),
        (math.nan, "null"),
        (np.float64(-0.5), "-0.5"),
        (np.float32(-0.5), "-0.5"),
    ],
)
def test_a_log_prob_is_written_as_python_writes_a_float_and_as_null_where_json_has_no_number(
    log_prob: float | None, written: str
) -> None:
    line = encoder(Formatter.JSONLINES).token(1, "a", log_prob)
    assert line == f'{{"token": {{"id": 1, "text": "a", "log_prob": {written}}}}}\n'.encode()


EDGES = [1e-4, math.nextafter(1e-4, 0), 1e16, math.nextafter(1e16, 0), 0.0, -0.0, 5e-324, 1.7976931348623157e308, math.inf]


@settings(max_examples=500)
@given(
    st.integers(-1, 2**40),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.floats() | st.floats(-30, 0) | st.sampled_from([sign * x for x in EDGES for sign in (1, -1)]),
    st.booleans(),
)
def test_a_line_is_byte_for_byte_what_pythons_json_writes(id: int, text: str, log_prob: float, special: bool) -> None:
    token: dict[str, Any] = {"id": id, "text": text, "log_prob": log_prob if math.isfinite(log_prob) else None}
    token |= {"special_token": True} if special else {}
    line = encoder(Formatter.JSONLINES).token(id, text, log_prob, special)
    assert line == dumped({"token": token}).encode() + b"\n"


def test_a_numpy_token_id_is_written_as_a_number() -> None:
    assert b'{"id": 7, ' in encoder(Formatter.JSONLINES).token(np.int64(7), "a", -0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["ab", 'a"b\x7f', "zwölf"])
def test_a_numpy_text_is_written_as_that_text(text: str) -> None:
    lines = [encoder(Formatter.JSONLINES).token(7, one, -0.5) for one in (text, np.str_(text))]
    assert lines[0] == lines[1]


def test_text_is_raw_utf8_with_jsons_own_escapes_only() -> None:
    text = 'é\x7f😀"\\/\n\r\t\x01'
    line = encoder(Formatter.SSE).token(1, text, -0.5)
    assert (
        line
        == (
            "data: " + json.dumps({"token": {"id": 1, "text": text, "log_prob": -0.5}}, ensure_ascii=False) + "\n\n"
        ).encode()
    )


@pytest.mark.parametrize("formatter", list(Formatter))
@pytest.mark.parametrize("tgi", [False, True])
def test_whoever_reads_by_lines_of_unicode_reads_whole_objects(formatter: Formatter, tgi: bool) -> None:
    text = "a\x85b\u2028c\u2029d\x0b\x0c\x1c\x1d\x1e"
    out = TextEncoder(
        TextRequest(inputs=text, parameters=Parameters(details=True, return_full_text=True), formatter=formatter, tgi=tgi)
    )
    body = (out.token(1, text, -0.5, finish="length") + out.finish("length")).decode()
    (line,) = [line for line in body.splitlines() if line]
    answer = json.loads(line.removeprefix("data: "))
    assert (answer[0] if type(answer) is list else answer)["generated_text"] == text * 2


@pytest.mark.parametrize("formatter", list(Formatter))
def test_a_lone_surrogate_leaves_as_a_replacement_character_even_if_its_pair_follows(formatter: Formatter) -> None:
    out = encoder(formatter, details=True)
    body = out.token(1, "a\ud83d", -0.5) + out.token(2, "\ude00b", -0.5, finish="length") + out.finish("length")
    assert '"generated_text": "a\ufffd\ufffdb"'.encode() in body
    assert '"text": "a\ufffd"'.encode() in body


def test_the_headers_are_those_of_every_lmi_answer() -> None:
    assert dict(response_headers()) == {
        b"cache-control": b"no-cache; no-store, must-revalidate, private",
        b"pragma": b"no-cache",
        b"expires": b"Thu, 01 Jan 1970 00:00:00 UTC",
    }


# --- the end


@pytest.mark.parametrize("formatter", STREAMS)
def test_a_reason_known_only_afterwards_gets_a_line_with_an_empty_special_token_that_is_not_counted(
    formatter: Formatter,
) -> None:
    out = encoder(formatter, details=True)
    assert out.token(1, "a", -0.5) == framed(formatter, '{"token": {"id": 1, "text": "a", "log_prob": -0.5}}')
    assert not out.finished
    assert out.finish("eos_token") == framed(
        formatter,
        '{"token": {"id": 0, "text": "", "log_prob": 0.0, "special_token": true}, "generated_text": "a", "details": '
        '{"finish_reason": "eos_token", "generated_tokens": 1, "inputs": "Deep Learning is"}}',
    )
    assert (out.finished, out.generated_tokens) == (True, 1)


@pytest.mark.parametrize("formatter", STREAMS)
def test_token_number_max_new_tokens_is_the_last_line(formatter: Formatter) -> None:
    out = encoder(formatter, max_new_tokens=2)
    states = [out.finished]
    lines = []
    for text in "ab":
        lines.append(out.token(1, text, -0.5))
        states.append(out.finished)
    assert states == [False, False, True]
    assert [b"generated_text" in line for line in lines] == [False, True]
    assert out.finish("eos_token") == b""


@pytest.mark.parametrize("formatter", list(Formatter))
@pytest.mark.parametrize("most", [1, 2, 3, 4, 64, 65, 130])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_special_tokens_count_to_the_last_as_all_do(formatter: Formatter, most: int, every: int) -> None:
    out = encoder(formatter, max_new_tokens=most)
    made = 0
    while not out.finished:
        made += 1
        assert made <= most
        out.token(1, "a", -0.5, special=made % every == 0)
    assert (made, out.generated_tokens) == (most, most)


@pytest.mark.parametrize("formatter", list(Formatter))
def test_every_formatter_reports_the_same_reason(formatter: Formatter) -> None:
    def reason(finish: str | None) -> str:
        out = encoder(formatter, details=True, max_new_tokens=1)
        body = out.token(1, "a", -0.5, finish=finish) + out.finish("eos_token")
        document: dict[str, Any] = parse_stream_line(body)
        return str(document["details"]["finish_reason"])

    assert reason(None) == "length"
    assert reason("stop_sequence") == "stop_sequence"


def test_decision_a_stop_sequence_is_reported_as_one_and_stays_in_the_text() -> None:
    out = encoder(Formatter.JSON, details=True, stop_sequences=("\n\n",))
    out.token(1, "a\n\n", -0.5, finish="stop_sequence")
    document = json.loads(out.finish("stop_sequence"))
    assert document["generated_text"] == "a\n\n"
    assert document["details"]["finish_reason"] == "stop_sequence"


@pytest.mark.parametrize("formatter", list(Formatter))
def test_an_answer_ends_once(formatter: Formatter) -> None:
    out = encoder(formatter)
    assert out.token(1, "a", -0.5, finish="length") + out.finish("length")
    assert out.finish("length") == out.error("late") == b""
    failed = encoder(formatter)
    assert failed.error("no")
    assert failed.finished
    assert failed.finish("length") == failed.error("again") == b""


@pytest.mark.parametrize("formatter", list(Formatter))
def test_a_token_after_the_last_is_the_callers_mistake(formatter: Formatter) -> None:
    out = encoder(formatter, max_new_tokens=1)
    out.token(1, "a", -0.5)
    with pytest.raises(LocalProtocolError):
        out.token(2, "b", -0.5)


# --- failures


@pytest.mark.parametrize("formatter", STREAMS)
def test_decision_a_stream_that_fails_ends_with_the_schemas_line_framed_like_every_other(formatter: Formatter) -> None:
    out = encoder(formatter)
    out.token(1, "a", -0.5)
    assert out.error('lost "é"\nat 3') == framed(
        formatter,
        '{"token": {"id": -1, "text": "", "log_prob": -1, "special_token": true, "error_msg": "lost \\"é\\"\\nat 3"}, '
        '"generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, "inputs": null}}',
    )


def test_decision_a_json_answer_that_fails_is_the_schemas_object_plus_error_and_code() -> None:
    out = encoder(Formatter.JSON, details=True)
    out.token(1, "a", -0.5)
    assert out.error("no") == generation_error_body("no") == LMIError("no").body()


def test_an_error_body_may_carry_another_code() -> None:
    assert error_body("full", 503) == b'{"error": "full", "code": 503}'


@pytest.mark.parametrize("formatter", STREAMS)
def test_the_bound_of_the_text_is_exact_and_a_refused_token_counts_for_nothing(formatter: Formatter) -> None:
    out = encoder(formatter, max_text=6, details=True, max_new_tokens=100)
    out.token(1, "é", -0.5)
    out.token(2, "abcd", -0.5)
    with pytest.raises(LMIError, match=r"at most 6 bytes \(max_text\)") as caught:
        out.token(3, "e", -0.5)
    assert caught.value.stage == "generation"
    assert out.generated_tokens == 2
    assert out.token(4, "", -0.5)
    assert b'"finish_reason": "error"' in out.error(caught.value.message)


def test_the_bound_counts_escapes_and_the_tokens_that_are_kept() -> None:
    escaped = encoder(Formatter.JSON, max_text=5)
    with pytest.raises(LMIError):
        escaped.token(1, "\x01", -0.5)
    token = '{"id": 1, "text": "", "log_prob": -0.5}, '
    kept = encoder(Formatter.JSON, max_text=2 * len(token), details=True)
    kept.token(1, "", -0.5)
    kept.token(1, "", -0.5)
    with pytest.raises(LMIError):
        kept.token(1, "", -0.5)
    prompt = encoder(Formatter.SSE, max_text=len(token), details=True, decoder_input_details=True)
    prompt.prefill(1, "", -0.5)
    with pytest.raises(LMIError):
        prompt.prefill(1, "", -0.5)


# --- the most probable tokens, and several sequences


TOP = (TopToken(id=2, text=" is", log_prob=-0.5), TopToken(id=3, text="", log_prob=-math.inf, special=True))
TOP_WRITTEN = b'[{"id": 2, "text": " is", "log_prob": -0.5}, {"id": 3, "text": "", "log_prob": null, "special_token": true}]'


@pytest.mark.parametrize("formatter", list(Formatter))
@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("asked", [0, 2])
def test_top_tokens_are_there_only_with_both_details_and_top_n_tokens(
    formatter: Formatter, details: bool, asked: int
) -> None:
    out = encoder(formatter, details=details, top_n_tokens=asked)
    body = out.token(2, " is", -0.5, top=TOP) + out.finish("length")
    assert (b'"top_tokens": [' + TOP_WRITTEN + b"]" in body) == (details and asked > 0)
    assert (b"top_tokens" in body) == (details and asked > 0)


def test_a_step_without_top_tokens_keeps_its_place_among_them() -> None:
    out = encoder(Formatter.JSON, details=True, top_n_tokens=2)
    for top in ((), TOP, ()):
        out.token(2, " is", -0.5, top=top)
    assert b'"top_tokens": [[], ' + TOP_WRITTEN + b", []]" in out.finish("length")


SEVERAL: list[dict[str, Any]] = [{"n": 3}, {"best_of": 3}, {"num_beams": 3}]


def document_of(out: TextEncoder, reason: str = "eos_token") -> dict[str, Any]:
    document: dict[str, Any] = json.loads(out.finish(reason))
    return document


@pytest.mark.parametrize("asked", SEVERAL, ids=str)
def test_sequences_whose_tokens_come_in_any_order_are_told_apart(asked: dict[str, Any]) -> None:
    out = encoder(Formatter.JSON, **asked)
    for sequence, text in [(2, "x"), (0, "a"), (1, "1"), (0, "b"), (2, "y"), (1, "2")]:
        assert out.token(1, text, -0.5, sequence=sequence) == b""
    document = document_of(out)
    others = document["details"]["best_of_sequences"]
    assert out.several
    assert [document["generated_text"], *(other["generated_text"] for other in others)] == ["ab", "12", "xy"]
    assert [[token["text"] for token in other["tokens"]] for other in others] == [["1", "2"], ["x", "y"]]
    assert out.generated_tokens == 2


def test_each_sequence_has_the_reason_of_its_own_end() -> None:
    out = encoder(Formatter.JSON, n=6, max_new_tokens=2)
    out.token(1, "a", -0.5, finish="stop_sequence")
    out.token(1, "a", -0.5, finish="eos_token", sequence=1)
    out.token(1, "a", -0.5, sequence=2)
    assert out.finish("stop_sequence", 2) == out.finish("length", 2) == b""
    for _ in range(2):
        out.token(1, "a", -0.5, sequence=3)
    out.token(1, "a", -0.5, sequence=4)
    assert out.finish("stop_sequence", 5) == b""
    assert not out.finished  # more may begin
    details = document_of(out, "eos_token")["details"]
    assert [details["finish_reason"], *(other["finish_reason"] for other in details["best_of_sequences"])] == [
        "stop_sequence",
        "eos_token",
        "stop_sequence",
        "length",
        "eos_token",
        "stop_sequence",
    ]
    assert out.finished


@pytest.mark.parametrize("sequence", [0, 1])
def test_a_token_after_the_last_of_its_sequence_is_the_callers_mistake(sequence: int) -> None:
    out = encoder(Formatter.JSON, n=2)
    out.token(1, "a", -0.5, finish="eos_token", sequence=sequence)
    out.token(1, "a", -0.5, sequence=1 - sequence)
    with pytest.raises(LocalProtocolError, match="ended with 'eos_token'"):
        out.token(1, "a", -0.5, sequence=sequence)
    out.finish("length")
    with pytest.raises(LocalProtocolError, match="ended with"):
        out.token(1, "a", -0.5, sequence=1 - sequence)


@pytest.mark.parametrize("formatter", list(Formatter))
@pytest.mark.parametrize(("asked", "sequence"), [(1, 1), (3, 3), (3, -1), (3, 10**9)])
def test_a_sequence_beyond_those_asked_for_fails_the_generation_and_counts_for_nothing(
    formatter: Formatter, asked: int, sequence: int
) -> None:
    out = encoder(formatter, n=asked)
    with pytest.raises(LMIError, match=f"got one of {sequence}$"):
        out.token(1, "a", -0.5, sequence=sequence)
    with pytest.raises(LMIError, match="expected a token of sequence 0"):
        out.finish("length", sequence)
    assert out.generated_tokens == 0
    assert b'"generated_text": ""' in out.finish("length")


@pytest.mark.parametrize("formatter", STREAMS)
def test_a_stream_is_of_the_best_sequence_alone(formatter: Formatter) -> None:
    out = encoder(formatter, n=2, details=True, max_text=1)
    assert out.token(1, "unheard", -0.5, sequence=1) == out.finish("length", 1) == b""
    last = out.token(1, "a", -0.5, finish="eos_token")
    assert parse_stream_line(last)["generated_text"] == "a"
    assert b"best_of_sequences" not in last
    assert (out.several, out.finished) == (False, True)


def test_the_bound_is_one_for_all_sequences_and_counts_what_each_repeats() -> None:
    token = len('{"id": 1, "text": "a", "log_prob": -0.5}, ') + len("a")
    prompt = len('{"id": 1, "text": "", "log_prob": null}, ')
    bound = 3 * token + 3 * prompt + 2 * len('say \\"é\\"'.encode())
    asked: dict[str, Any] = {"n": 4, "decoder_input_details": True, "return_full_text": True}

    def begun(max_text: int) -> TextEncoder:
        out = encoder(Formatter.JSON, 'say "é"', max_text=max_text, **asked)
        out.token(1, "a", -0.5)
        out.token(1, "a", -0.5, sequence=1)
        out.prefill(1, "", None)  # once for each of the two
        out.token(1, "a", -0.5, sequence=2)
        return out

    with pytest.raises(LMIError, match="max_text"):
        begun(bound - 1)
    out = begun(bound)
    with pytest.raises(LMIError, match="max_text"):
        out.token(1, "", -0.5, sequence=3)
    with pytest.raises(LMIError, match="max_text"):
        out.finish("length", 3)
    with pytest.raises(LMIError, match="max_text"):
        out.prefill(1, "", None)
    document = document_of(out)
    assert [other["generated_text"] for other in document["details"]["best_of_sequences"]] == ['say "é"a'] * 2
    assert len(document["details"]["prefill"]) == 1


def test_the_bound_counts_the_top_tokens_that_are_kept() -> None:
    kept = len(TOP_WRITTEN) + 2
    for formatter, size in [
        (Formatter.JSONLINES, kept),
        (Formatter.JSON, kept + len('{"id": 1, "text": "", "log_prob": -0.5}, ')),
    ]:
        out = encoder(formatter, max_text=size, details=True, top_n_tokens=2)
        out.token(1, "", -0.5, top=TOP)
        with pytest.raises(LMIError, match="max_text"):
            out.token(1, "", -0.5)
        assert out.generated_tokens == 1


@pytest.mark.parametrize("formatter", list(Formatter))
def test_no_token_follows_finish_or_error(formatter: Formatter) -> None:
    complete, failed = encoder(formatter), encoder(formatter)
    complete.finish("stop_sequence")
    failed.error("lost")
    for out, reason in ((complete, "stop_sequence"), (failed, "error")):
        assert out.finished
        with pytest.raises(LocalProtocolError, match=f"ended with '{reason}'"):
            out.token(1, "a", -0.5)


# --- the client's side, and everything together


@pytest.mark.parametrize(
    "line", [b'{"token": {}}\n', b'data: {"token": {}}\n\n', b'data:{"token": {}}', bytearray(b'{"token": {}}')]
)
def test_a_line_of_a_stream_is_read_with_and_without_its_frame(line: bytes) -> None:
    assert parse_stream_line(line) == {"token": {}}


@pytest.mark.parametrize(
    "line", [b"", b"data:", b"[]", b"data: 1", b"{", b"event: a", b"\xff", b'{"error":"lost"}{', b"[" * 9999]
)
def test_a_line_that_is_no_object_is_the_peers_error(line: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="a line of the stream"):
        parse_stream_line(line)


tokens = st.lists(
    st.tuples(
        st.integers(-1, 2**31),
        st.text(st.characters() | st.characters(categories=["Cs"]), max_size=6),
        st.none() | st.floats(),
    ),
    max_size=8,
)


def lines_of(formatter: Formatter, pieces: list[bytes]) -> list[bytes]:
    decoder: SSEDecoder | LineDecoder = SSEDecoder() if formatter is Formatter.SSE else LineDecoder()
    lines = []
    for piece in pieces:
        decoder.receive_data(piece)
        while not isinstance(event := decoder.next_event(), Signal):
            lines.append(event if isinstance(event, bytes) else event.data)
    return lines


@settings(max_examples=60)
@given(tokens, st.sampled_from(STREAMS), st.booleans(), st.booleans(), st.integers(1, 7))
def test_any_stream_is_one_object_a_token_and_its_text_is_their_concatenation(
    generated: list[tuple[int, str, float | None]], formatter: Formatter, details: bool, last_says_so: bool, size: int
) -> None:
    out = encoder(formatter, details=details, max_new_tokens=100)
    body = b""
    for number, (id, text, log_prob) in enumerate(generated, 1):
        finish = "eos_token" if last_says_so and number == len(generated) else None
        body += out.token(id, text, log_prob, finish=finish)
    body += out.finish("eos_token")
    objects = [
        parse_stream_line(line) for line in lines_of(formatter, [body[i : i + size] for i in range(0, len(body), size)])
    ]
    extra_line = not (last_says_so and generated)
    assert len(objects) == len(generated) + extra_line
    assert [item["token"]["text"] for item in objects[: len(generated)]] == [
        re.sub("[\ud800-\udfff]", "\ufffd", text) for _, text, _ in generated
    ]
    assert objects[-1]["generated_text"] == "".join(item["token"]["text"] for item in objects)
    assert all(item.keys() == {"token"} for item in objects[:-1])
    assert ("details" in objects[-1]) == details
    if details:
        assert objects[-1]["details"]["generated_tokens"] == len(generated)


@settings(max_examples=60)
@given(tokens, st.booleans())
def test_any_json_answer_says_what_a_stream_says(generated: list[tuple[int, str, float | None]], details: bool) -> None:
    whole, stream = encoder(Formatter.JSON, details=details), encoder(Formatter.JSONLINES, details=details)
    lines = b""
    for id, text, log_prob in generated:
        assert whole.token(id, text, log_prob) == b""
        lines += stream.token(id, text, log_prob)
    document = json.loads(whole.finish("eos_token"))
    lines += stream.finish("eos_token")
    objects = [json.loads(line) for line in lines.splitlines(keepends=False)]
    assert document["generated_text"] == objects[-1]["generated_text"]
    if details:
        assert document["details"].pop("tokens") == [item["token"] for item in objects[:-1]]
        assert document["details"] == objects[-1]["details"]


@pytest.mark.parametrize("formatter", STREAMS)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("last", [0, 1])
def test_the_end_has_every_text_of_a_long_answer(formatter: Formatter, tokens: int, last: int) -> None:
    out = encoder(formatter, max_new_tokens=tokens + last)
    texts = [f' "{i}\n' + "\ud83d\ude00"[i % 2] for i in range(tokens)]
    lines = [out.token(i, text, -0.5) for i, text in enumerate(texts)]
    assert out.generated_tokens == tokens
    assert out.finished is not bool(last)
    end = parse_stream_line(out.finish("eos_token") or lines[-1])
    assert end["generated_text"] == "".join(re.sub("[\ud800-\udfff]", "\ufffd", text) for text in texts)


# --- text that was held back to the end


@pytest.mark.parametrize("formatter", STREAMS)
def test_text_that_was_held_back_is_on_the_last_line_of_a_stream_and_no_token(formatter: Formatter) -> None:
    out = encoder(formatter, details=True)
    lines = out.token(1, "a", -0.5)
    out.rest(" {")
    lines += out.finish("eos_token")
    assert lines == framed(
        formatter,
        '{"token": {"id": 1, "text": "a", "log_prob": -0.5}}',
        '{"token": {"id": 0, "text": " {", "log_prob": 0.0}, "generated_text": "a {", '
        '"details": {"finish_reason": "eos_token", "generated_tokens": 1, "inputs": "Deep Learning is"}}',
    )


def test_text_that_was_held_back_is_in_the_document_of_each_sequence() -> None:
    out = encoder(Formatter.JSON, n=2, best_of=2)
    out.token(1, "a", -0.5)
    out.token(1, "b", -0.5, sequence=1)
    out.rest("é")
    out.rest("", 1)
    out.rest("!", 1)
    answer = json.loads(out.finish("eos_token"))
    (other,) = answer["details"]["best_of_sequences"]
    assert [answer["generated_text"], other["generated_text"]] == ["aé", "b!"]
    assert [answer["details"]["generated_tokens"], other["generated_tokens"]] == [1, 1]


def test_text_that_was_held_back_is_bounded_and_comes_before_the_end_or_not_at_all() -> None:
    out = encoder(Formatter.JSON, max_text=8)
    out.token(1, "a" * 6, -0.5)
    with pytest.raises(LMIError, match="max_text"):
        out.rest("abc")
    out.rest("b")
    assert out.finish("eos_token") == b'{"generated_text": "aaaaaab"}'
    out.rest("c")
    ended = encoder(Formatter.JSON)
    ended.token(1, "a", -0.5, finish="length")
    ended.rest("b")
    assert ended.finish("eos_token") == b'{"generated_text": "a"}'


# ---- the short way


@pytest.mark.parametrize("formatter", STREAMS)
def test_a_line_made_in_the_fewest_steps_is_the_same(formatter: Formatter) -> None:
    short = encoder(formatter, max_new_tokens=200)
    whole = encoder(formatter, max_new_tokens=200, details=True, top_n_tokens=2)  # which has only the long way
    line = short.line
    assert line is not None
    for number in range(150):  # the texts are put together now and then
        said = number, ["a", "\u00e9", '"\n', ""][number % 4], [-0.5, None, 0.0, -1e-9, math.nan][number % 5]
        assert line(*said) == whole.token(*said)
    assert short.generated_tokens == whole.generated_tokens == 150


def test_the_line_of_the_last_token_ends_the_answer() -> None:
    short, whole = (encoder(Formatter.SSE, max_new_tokens=70, details=True) for _ in range(2))
    line = short.line
    assert line is not None
    lines = [line(number, "a", -0.5) for number in range(70)]
    assert lines == [whole.token(number, "a", -0.5) for number in range(69)] + [whole.token(69, "a", -0.5, finish="length")]
    assert short.finished


def test_a_stream_that_keeps_more_than_the_text_has_no_such_line() -> None:
    assert encoder(Formatter.JSONLINES, details=True, top_n_tokens=2).line is None


def test_neither_has_a_document_nor_the_other_form() -> None:
    assert encoder(Formatter.JSON).line is None
    assert TextEncoder(TextRequest(inputs="a", parameters=Parameters(), formatter=Formatter.SSE, tgi=True)).line is None
