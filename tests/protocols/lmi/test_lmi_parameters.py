"""LMI's generation parameters: all tables, the names that mean one thing, and what follows from several together."""

import typing
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.messages import GenerationParameters
from protocols.lmi import LMIError, Parameters, SamplingRule, Table, read_parameters


def read(table: Table = Table.VLLM, rule: SamplingRule = SamplingRule.V0_31, **asked: Any) -> Parameters:
    return read_parameters(asked, table=table, rule=rule)[0]


def refusal(table: Table = Table.VLLM, **asked: Any) -> str:
    with pytest.raises(LMIError) as caught:
        read(table, **asked)
    assert (caught.value.stage, caught.value.status) == ("parameters", 424)
    return caught.value.message


# --- the tables


def test_the_parameters_are_those_that_models_know_by_name_order_type_and_default() -> None:
    def fields(struct: Any) -> list[tuple[str, Any, Any]]:
        types = typing.get_type_hints(struct)
        return [(f.name, types[f.name], f.default) for f in msgspec.structs.fields(struct)]

    assert fields(Parameters) == fields(GenerationParameters)
    assert GenerationParameters(**msgspec.structs.asdict(Parameters())) == GenerationParameters()


# The schema's tables "common", "lmi-dist" and "vLLM", as they print their defaults, but for what decisions change.
PRINTED = {
    "do_sample": False, "temperature": 1.0, "repetition_penalty": 1.0, "top_p": 1.0, "max_new_tokens": 30,
    "details": False, "return_full_text": False, "stop_sequences": (), "decoder_input_details": False,
    "typical_p": 1.0, "truncate": None, "ignore_eos_token": False, "min_p": 0.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "n": 1, "best_of": 1, "num_beams": 1, "length_penalty": 1.0, "early_stopping": False,
    "stop_token_ids": (), "logprobs": None, "prompt_logprobs": None, "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}  # fmt: skip


@pytest.mark.parametrize("table", [Table.VLLM, Table.LMI_DIST])
def test_the_defaults_are_those_that_the_schema_prints(table: Table) -> None:
    parameters = msgspec.structs.asdict(read(table))
    assert {name: parameters[name] for name in PRINTED} == PRINTED
    assert parameters["top_k"] == 0  # these backends print -1: off too


def test_decision_the_text_includes_its_stop_sequence_unless_told_otherwise() -> None:
    assert read().include_stop_str_in_output is True
    assert read(include_stop_str_in_output=False).include_stop_str_in_output is False


@pytest.mark.parametrize("option", ["vllm", "lmi-dist", "trtllm"])
def test_a_table_is_found_by_what_the_option_rolling_batch_says(option: str) -> None:
    assert read(Table(option)).max_new_tokens == 30


@pytest.mark.parametrize("table", list(Table))
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("min_p", 0, 0.0),
        ("min_p", 1, 1.0),
        ("typical_p", 1e-9, 1e-9),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 2.0, 2.0),
        ("logit_bias", {}, {}),
        ("logit_bias", {"0": -100, "2147483647": 1.5}, {0: -100.0, 2147483647: 1.5}),
        ("logit_bias", {str(i): 1 for i in range(65_536)}, dict.fromkeys(range(65_536), 1.0)),
        ("min_length", 0, 0),
        ("ignore_eos_token", True, True),
        ("stop_token_ids", [0, 2147483647, 3.0], (0, 2147483647, 3)),
        ("bad_sequences", ["a", "b"], ("a", "b")),
        ("bad_sequences", "a", ("a",)),
        ("n", 64, 64),
        ("best_of", 64, 64),
        ("num_beams", 64, 64),
        ("length_penalty", -3, -3.0),
        ("early_stopping", True, True),
        ("truncate", 1, 1),
        ("skip_special_tokens", False, False),
        ("spaces_between_special_tokens", False, False),
        ("top_n_tokens", 20, 20),
        ("logprobs", 0, 0),
        ("prompt_logprobs", 20, 20),
    ],
)
def test_every_table_knows_every_name_and_takes_values_in_range(table: Table, name: str, value: Any, expected: Any) -> None:
    parameters, told = read_parameters({name: value}, table=table)
    assert getattr(parameters, name) == expected
    assert type(getattr(parameters, name)) is type(expected)
    assert (told, parameters.extra) == ({name: name}, {})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("min_p", 1.1, "expected a number >= 0 and <= 1, got 1.1"),
        ("typical_p", 0, "expected a number > 0 and <= 1, got 0"),
        ("presence_penalty", -2.1, "expected a number from -2 to 2, got -2.1"),
        ("frequency_penalty", "1", "expected a number from -2 to 2, got the string '1'"),
        ("logit_bias", [1], "expected an object of token ids and numbers, got an array of 1"),
        ("logit_bias", {str(i): 1 for i in range(65_537)}, "expected at most 65536 token ids, got 65537"),
        ("logit_bias", {"a": 1}, "expected token ids from 0 to 2147483647 as keys, got the string 'a'"),
        ("logit_bias", {"-1": 1}, "expected token ids from 0 to 2147483647 as keys, got the string '-1'"),
        ("logit_bias", {"": 1}, "expected token ids from 0 to 2147483647 as keys, got an empty string"),
        ("logit_bias", {"2147483648": 1}, "expected token ids from 0 to 2147483647 as keys, got the string '2147483648'"),
        ("stop_token_ids", 7, "expected an array of at most 64 token ids, got 7"),
        ("stop_token_ids", [0] * 65, "expected an array of at most 64 token ids, got an array of 65"),
        ("stop_token_ids", [-1], "expected an integer from 0 to 2147483647, got -1"),
        ("stop_token_ids", ["7"], "expected an integer from 0 to 2147483647, got the string '7'"),
        ("bad_sequences", [""], "expected non-empty strings, got an empty string"),
        ("n", 0, "expected an integer from 1 to 64, got 0"),
        ("best_of", 65, "expected an integer from 1 to 64, got 65"),
        ("num_beams", 1.5, "expected an integer from 1 to 64, got 1.5"),
        ("length_penalty", 10**399, f"expected a number, got 1{'0' * 39}"),
        ("early_stopping", "never", "expected true or false, got the string 'never'"),
        ("truncate", 0, "expected an integer from 1 to 2147483647, got 0"),
        ("top_n_tokens", 21, "expected an integer from 0 to 20, got 21"),
        ("logprobs", -1, "expected an integer from 0 to 20, got -1"),
        ("prompt_logprobs", True, "expected an integer from 0 to 20, got true"),
        ("stop", True, "expected at most 64 strings, got true"),
        ("ignore_eos", 1, "expected true or false, got 1"),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_it_came_under(name: str, value: Any, message: str) -> None:
    assert refusal(**{name: value}) == f"parameters.{name}: {message}"


def test_one_token_has_one_bias() -> None:
    assert refusal(logit_bias={"1": 1, "01": 2}).endswith("as keys, got the string '01'")
    assert refusal(logit_bias={"5": 101}) == "parameters.logit_bias.5: expected a number from -100 to 100, got 101"
    assert refusal(logit_bias={"5": None}) == "parameters.logit_bias.5: expected a number from -100 to 100, got nothing"


def test_a_key_of_any_length_is_cut_in_the_error() -> None:
    assert len(refusal(logit_bias={"9" * 10_000: 1})) < 200


# --- names


@pytest.mark.parametrize("stop", ["a", ["a"]])
def test_stop_is_another_name_for_stop_sequences(stop: Any) -> None:
    parameters, told = read_parameters({"stop": stop})
    assert (parameters.stop_sequences, parameters.extra, told) == (("a",), {}, {"stop_sequences": "stop"})
    assert read(stop=stop, stop_sequences=["a"]).stop_sequences == ("a",)


def test_ignore_eos_is_another_name_for_ignore_eos_token() -> None:
    parameters, told = read_parameters({"ignore_eos": True})
    assert (parameters.ignore_eos_token, parameters.extra, told) == (True, {}, {"ignore_eos_token": "ignore_eos"})


def test_two_names_for_one_thing_that_differ_are_refused_whichever_comes_first() -> None:
    assert refusal(stop_sequences=["a"], stop=["b", "c"]) == (
        "parameters.stop: expected what parameters.stop_sequences says, or one of the two alone, got an array of 2"
    )
    assert refusal(ignore_eos=True, ignore_eos_token=False) == (
        "parameters.ignore_eos_token: expected what parameters.ignore_eos says, or one of the two alone, got false"
    )
    assert read(ignore_eos=True, ignore_eos_token=None).ignore_eos_token is True


@pytest.mark.parametrize("name", ["max_tokens", "min_new_tokens", "min_tokens", "watermark", "n_", "extra"])
def test_names_of_no_table_reach_extra_as_they_came_and_are_not_among_the_given(name: str) -> None:
    parameters, told = read_parameters({name: ["anything"], "top_k": 3})
    assert parameters == Parameters(top_k=3, extra={name: ["anything"]})
    assert told == {"top_k": "top_k"}


def test_what_is_null_is_not_given() -> None:
    names = [*Parameters.__struct_fields__, "stop", "ignore_eos", "other"]
    assert read_parameters(dict.fromkeys(names)) == (Parameters(), {})


def test_what_is_given_with_its_default_is_given() -> None:
    assert read_parameters({"top_k": 0, "n": 1})[1] == {"top_k": "top_k", "n": "n"}


# --- greedy or sampled

GREEDY, SAMPLED = False, True


@pytest.mark.parametrize(
    ("asked", "in_31", "in_32"),
    [
        ({}, GREEDY, GREEDY),
        ({"top_k": 5}, GREEDY, GREEDY),
        ({"temperature": 0.7}, GREEDY, SAMPLED),
        ({"temperature": None}, GREEDY, GREEDY),
        ({"do_sample": None, "temperature": 0.7}, GREEDY, SAMPLED),
        ({"do_sample": False, "temperature": 0.7}, GREEDY, GREEDY),
        ({"do_sample": True}, SAMPLED, SAMPLED),
        ({"do_sample": True, "temperature": 0.7}, SAMPLED, SAMPLED),
        ({"temperature": 0}, GREEDY, GREEDY),
        ({"do_sample": True, "temperature": 0.0}, GREEDY, GREEDY),
    ],
)
@pytest.mark.parametrize("table", list(Table))
def test_decision_the_rule_of_the_version_decides_and_a_temperature_of_0_is_greedy_in_both(
    table: Table, asked: dict[str, Any], in_31: bool, in_32: bool
) -> None:
    assert read(table, SamplingRule.V0_31, **asked).do_sample is in_31
    assert read(table, SamplingRule.V0_32, **asked).do_sample is in_32


# --- TensorRT-LLM


def test_decision_tensorrts_defaults_are_those_that_its_table_prints() -> None:
    greedy = read(Table.TRTLLM)
    assert (greedy.temperature, greedy.top_k, greedy.top_p, greedy.min_length) == (0.8, 0, 0.0, 1)
    sampled = read(Table.TRTLLM, do_sample=True)
    assert (sampled.temperature, sampled.top_k, sampled.top_p, sampled.min_length) == (1.0, 5, 0.85, 1)
    assert sampled.do_sample is True


def test_tensorrts_defaults_yield_to_what_is_given_and_are_not_given_themselves() -> None:
    asked: dict[str, Any] = {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_length": 0}
    assert read_parameters(asked, table=Table.TRTLLM) == (Parameters(**asked), dict(zip(asked, asked, strict=True)))
    assert read_parameters({}, table=Table.TRTLLM)[1] == {}


def test_tensorrt_takes_a_top_p_of_0_which_others_refuse() -> None:
    assert read(Table.TRTLLM, top_p=0).top_p == 0
    assert refusal(Table.TRTLLM, top_p=-0.1) == "parameters.top_p: expected a number >= 0 and <= 1, got -0.1"
    for table in (Table.VLLM, Table.LMI_DIST):
        assert refusal(table, top_p=0) == "parameters.top_p: expected a number > 0 and <= 1, got 0"


def test_in_tensorrt_top_k_and_top_p_of_0_together_are_greedy() -> None:
    # "If top_k and top_p are 0, TensorRT-LLM automatically recognizes it as greedy."
    assert read(Table.TRTLLM, do_sample=True, top_k=0, top_p=0).do_sample is False
    assert read(Table.TRTLLM, do_sample=True, top_k=-1, top_p=0).do_sample is False
    assert read(Table.TRTLLM, do_sample=True, top_k=0).do_sample is True
    assert read(Table.VLLM, do_sample=True, top_k=0).do_sample is True


def test_in_tensorrt_a_top_p_of_0_beside_a_top_k_is_off_and_said_as_every_model_understands_it() -> None:
    sampled = read(Table.TRTLLM, do_sample=True, top_p=0)
    assert (sampled.do_sample, sampled.top_k, sampled.top_p) == (True, 5, 1.0)


# --- sequences


@pytest.mark.parametrize(
    ("asked", "n", "best_of"),
    [
        ({}, 1, 1),
        ({"n": 3}, 3, 3),
        ({"best_of": 3}, 3, 3),
        ({"n": 2, "best_of": 3}, 2, 3),
        ({"n": 3, "best_of": 3}, 3, 3),
        ({"n": None, "best_of": 3}, 3, 3),
        ({"num_beams": 4}, 4, 4),
        ({"num_beams": 1, "best_of": 3}, 3, 3),
        ({"num_beams": 4, "best_of": 2}, 4, 4),
        ({"num_beams": 4, "best_of": 8}, 4, 8),
        ({"num_beams": 4, "n": 1}, 1, 1),
        ({"num_beams": 4, "n": 4}, 4, 4),
        ({"num_beams": 1, "n": 4}, 4, 4),
    ],
)
def test_without_n_all_that_are_made_come_back_and_best_of_is_never_less(
    asked: dict[str, Any], n: int, best_of: int
) -> None:
    parameters = read(**asked)
    assert (parameters.n, parameters.best_of) == (n, best_of)


def test_more_sequences_than_are_made_are_refused() -> None:
    assert refusal(n=3, best_of=2) == "parameters.best_of: expected at least parameters.n, which is 3, got 2"
    assert refusal(n=3, num_beams=2) == "parameters.n: expected at most parameters.num_beams, which is 2, got 3"


# --- tokens of the prompt


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"prompt_logprobs": 1}, True),
        ({"prompt_logprobs": 0}, False),
        ({"prompt_logprobs": 1, "decoder_input_details": False}, False),
        ({"decoder_input_details": True}, True),
    ],
)
def test_prompt_logprobs_ask_for_the_prompts_tokens_unless_they_are_refused(asked: dict[str, Any], expected: bool) -> None:
    parameters, told = read_parameters(asked)
    assert parameters.decoder_input_details is expected
    assert told.keys() == asked.keys()


# --- garbage

scalars = st.none() | st.booleans() | st.integers(-3, 70) | st.floats() | st.integers() | st.text(max_size=4)
json_values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.sampled_from(["1", "b"]), scalars, max_size=2)
NAMES = [*(name for name in Parameters.__struct_fields__ if name not in ("extra", "limited")), "stop", "ignore_eos"]


def outcome(asked: dict[str, Any], table: Table, rule: SamplingRule) -> tuple[Parameters, Mapping[str, str]] | LMIError:
    try:
        return read_parameters(asked, table=table, rule=rule)
    except LMIError as error:
        return error


@settings(max_examples=150)
@given(
    st.dictionaries(st.sampled_from([*NAMES, "other"]), json_values, max_size=4),
    st.sampled_from(list(Table)),
    st.sampled_from(list(SamplingRule)),
)
def test_whatever_is_asked_is_refused_by_name_or_read_into_what_a_model_may_rely_on(
    asked: dict[str, Any], table: Table, rule: SamplingRule
) -> None:
    result = outcome(asked, table, rule)
    if isinstance(result, LMIError):
        assert result.stage == "parameters"
        assert result.message.partition(":")[0].split(".")[1] in asked
        return
    parameters, told = result
    assert 1 <= parameters.n <= parameters.best_of <= 64
    assert parameters.num_beams == 1 or parameters.n <= parameters.num_beams
    assert not parameters.do_sample or (parameters.temperature > 0 and parameters.top_p > 0)
    assert parameters.top_k >= 0
    assert told.keys() <= set(NAMES)
    assert set(parameters.extra) == {name for name in asked if name == "other" and asked[name] is not None}
