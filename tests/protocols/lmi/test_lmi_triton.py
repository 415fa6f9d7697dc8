"""Triton's names of the parameters of a text are read as LMI's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.lmi import LMIError, Parameters, read_triton_parameters
from protocols.lmi.triton import NAMES, TEXTS

VALUES: dict[str, Any] = {
    "max_new_tokens": 20,
    "min_length": 2,
    "stop_sequences": ("a",),
    "bad_sequences": ("b",),
    "seed": 7,
    "length_penalty": 0.5,
    "top_k": 3,
    "top_p": 0.25,
    "num_beams": 1,
    "n": 1,
    "truncate": 9,
    "details": True,
    "ignore_eos_token": True,
}


def read(**given: Any) -> Parameters:
    return read_triton_parameters(given)[0]


@pytest.mark.parametrize(("name", "own"), NAMES.items())
def test_each_name_stands_for_one_of_lmi_and_is_told(name: str, own: str) -> None:
    value = VALUES[own]
    asked = list(value) if isinstance(value, tuple) else value
    parameters, told = read_triton_parameters({name: asked})
    assert (getattr(parameters, own), told, parameters.extra) == (value, {own: name}, {})


@pytest.mark.parametrize(("name", "own"), NAMES.items())
def test_two_names_of_one_parameter_say_the_same(name: str, own: str) -> None:
    value = VALUES[own]
    assert getattr(read(**{name: value, own: value}), own) == value
    other: Any = not value if isinstance(value, bool) else ["else"] if isinstance(value, tuple) else 2 * value
    with pytest.raises(LMIError, match=f"parameters.{own}: expected what parameters.{name} says, or one of the two alone"):
        read(**{name: value, own: other})


@pytest.mark.parametrize("name", sorted(TEXTS))
@pytest.mark.parametrize("empty", ["", [""], None])
def test_an_empty_text_is_as_if_absent(name: str, empty: Any) -> None:
    assert read_triton_parameters({name: empty}) == (Parameters(), {})


@pytest.mark.parametrize("texts", [["", "a"], ["a", ""], ["", ""]])
def test_an_empty_text_among_others_is_refused(texts: list[str]) -> None:
    with pytest.raises(LMIError, match=r"parameters\.stop_words: expected non-empty strings, got an empty string"):
        read(stop_words=texts)


def test_a_mass_of_0_is_off_by_the_name_of_tensorrt_alone() -> None:
    assert read(runtime_top_p=0.0, runtime_top_k=0) == Parameters()
    with pytest.raises(LMIError, match=r"parameters.top_p: expected a number > 0"):
        read(top_p=0.0)
    with pytest.raises(LMIError, match=r"parameters.runtime_top_p: expected a number > 0 .* got false"):
        read(runtime_top_p=False)


def test_the_id_of_the_end_is_one_more_of_the_tokens_that_end_a_text() -> None:
    assert read_triton_parameters({"end_id": 2}) == (Parameters(stop_token_ids=(2,)), {"stop_token_ids": "end_id"})
    parameters, told = read_triton_parameters({"end_id": 2.0, "stop_token_ids": [5], "pad_id": 0})
    assert (parameters.stop_token_ids, told) == ((5, 2), {"stop_token_ids": "stop_token_ids"})
    assert read(end_id=-1, pad_id=-1) == Parameters()


IGNORED = ("stream", "streaming", "return_context_logits", "return_generation_logits", "exclude_input_in_output")


@pytest.mark.parametrize("name", IGNORED)
@pytest.mark.parametrize("value", [True, False])
def test_members_about_the_answer_are_read_and_passed_over(name: str, value: bool) -> None:
    assert read_triton_parameters({name: value}) == (Parameters(), {})


@pytest.mark.parametrize("name", ["end_id", "pad_id", *IGNORED])
@pytest.mark.parametrize("value", ["x", [], {}, 1.5, -2, 2**31, [1]])
def test_their_types_are_checked_all_the_same(name: str, value: Any) -> None:
    with pytest.raises(LMIError, match=f"parameters.{name}: expected "):
        read(**{name: value})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ANY_NAME = st.sampled_from(sorted({*NAMES, *NAMES.values(), *IGNORED, "end_id", "pad_id", "nobody_knows"}))


@given(st.dictionaries(ANY_NAME, JSON, max_size=4))
def test_any_value_at_all_is_read_or_refused_by_a_name(asked: dict[str, Any]) -> None:
    try:
        parameters, told = read_triton_parameters(asked)
    except LMIError as error:
        said = error.message
    else:
        assert {*told.values(), *parameters.extra} <= asked.keys()
        return
    assert any(said.startswith(f"parameters.{name}") for name in asked)


def test_sequences_that_contradict_each_other_are_named_as_they_came() -> None:
    with pytest.raises(
        LMIError, match=r"parameters\.num_return_sequences: expected at most parameters\.beam_width, which is 2"
    ):
        read(num_return_sequences=3, beam_width=2)
