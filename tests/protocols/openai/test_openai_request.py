"""Requests of OpenAI's API: what each member becomes, what is refused and how the refusal names it."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.messages import Role as ModelRole
from protocols.lmi.parameters import Parameters
from protocols.openai import ChatRequest, CompletionRequest, Message, OpenAIError, Role, parse_chat, parse_completion

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**members: Any) -> ChatRequest:
    return parse_chat({"messages": HELLO, **members}, model="m")


def completion(**members: Any) -> CompletionRequest:
    return parse_completion({"prompt": "Once", **members})


def refused(kind: Any, **members: Any) -> OpenAIError:
    with pytest.raises(OpenAIError) as caught:
        kind(**members)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    return caught.value


# --- messages and prompts


def test_a_conversation_is_its_messages_in_order() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "function", "content": "42", "name": "f"},
    ]
    assert parse_chat({"model": "lm", "messages": messages}) == ChatRequest(
        model="lm",
        messages=(
            Message(role="system", content="Be brief."),
            Message(role="user", content="Hi", name="Ada"),
            Message(role="assistant", content=""),
            Message(role="function", content="42", name="f"),
        ),
        parameters=Parameters(do_sample=True, max_new_tokens=2**31 - 1, include_stop_str_in_output=False),
    )


def test_the_roles_are_those_that_models_know() -> None:
    assert Role == ModelRole


def test_the_text_of_several_parts_is_theirs_one_after_another() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert parse_chat({"messages": [{"role": "user", "content": parts}]}).messages[0].content == "one two"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages: expected an array of at least one message, got nothing"),
        ([], "messages: expected an array of at least one message, got an array of 0"),
        ("Hi", "messages: expected an array of at least one message, got the string 'Hi'"),
        ([7], "messages[0]: expected an object, got 7"),
        (
            [{"content": "Hi"}],
            "messages[0].role: expected one of system, developer, user, assistant, tool, function, got nothing",
        ),
        (
            [*HELLO, {"role": ["user"], "content": "Hi"}],
            "messages[1].role: expected one of system, developer, user, assistant, tool, function, got an array of 1",
        ),
        (
            [{"role": "user"}],
            "messages[0].content: expected a string or an array of parts, got nothing",
        ),
        (
            [{"role": "user", "content": []}],
            "messages[0].content: expected a string or an array of parts, got an array of 0",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            "messages[0].content[1].type: model 'm' does not declare images",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text: expected a string, got nothing",
        ),
        (
            [{"role": "user", "content": "Hi", "name": 5}],
            "messages[0].name: expected a string, got 5",
        ),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}],
            "messages[0].tool_calls: model 'm' does not declare tools",
        ),
    ],
)
def test_a_conversation_that_cannot_be_read_is_refused_by_name(messages: object, message: str) -> None:
    error = refused(chat, messages=messages)
    assert error.message == message
    assert error.param == message.partition(":")[0]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal", "", None, 7])
def test_parts_of_other_types_than_text_are_refused(kind: object) -> None:
    content = [{"type": kind, "text": "Hi"}]
    assert refused(chat, messages=[{"role": "user", "content": content}]).param == "messages[0].content[0].type"


@pytest.mark.parametrize(("prompt", "prompts"), [("Once", ("Once",)), (["Once", "Twice"], ("Once", "Twice"))])
def test_a_prompt_is_a_string_or_an_array_of_them(prompt: object, prompts: tuple[str, ...]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2], [3]], ["Once", [1]]])
def test_token_ids_are_refused_by_name(prompt: object) -> None:
    assert refused(completion, prompt=prompt).message == "prompt: expected text, got token ids, which are not offered"


@pytest.mark.parametrize("prompt", [None, "", [], ["Once", ""], [None], {"text": "Once"}, 7])
def test_a_prompt_that_is_no_text_is_refused(prompt: object) -> None:
    assert refused(completion, prompt=prompt).message.startswith("prompt: expected a non-empty string")


# --- parameters


def test_a_bare_request_samples_at_temperature_1_and_leaves_out_the_stop_sequence() -> None:
    # The API's defaults: temperature 1, top_p 1, n 1; "The returned text will not contain the stop sequence."
    expected = Parameters(do_sample=True, include_stop_str_in_output=False, max_new_tokens=99)
    assert parse_chat({"messages": HELLO}, max_tokens=99).parameters == expected
    assert parse_completion({"prompt": "Once"}, max_tokens=99).parameters == expected
    assert chat().given == {}


def test_a_completion_has_16_tokens_where_nobody_says() -> None:
    # The API's own default of max_tokens.
    assert completion().parameters.max_new_tokens == 16


EVERY = {
    "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "presence_penalty": -2, "frequency_penalty": 2,
    "logit_bias": {"5": -100, "7": 1.5}, "n": 2, "seed": 11, "stop": ["a", "b"], "top_k": 4, "min_p": 0.1,
    "repetition_penalty": 1.1, "min_tokens": 3, "ignore_eos": True, "stop_token_ids": [9],
    "include_stop_str_in_output": True, "bad_words": ["bad"], "truncate_prompt_tokens": 12, "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
}  # fmt: skip
READ = Parameters(
    do_sample=True, max_new_tokens=7, temperature=0.5, top_p=0.9, presence_penalty=-2.0, frequency_penalty=2.0,
    logit_bias={5: -100.0, 7: 1.5}, n=2, best_of=2, seed=11, stop_sequences=("a", "b"), top_k=4, min_p=0.1,
    repetition_penalty=1.1, min_length=3, ignore_eos_token=True, stop_token_ids=(9,),
    include_stop_str_in_output=True, bad_sequences=("bad",), truncate=12, skip_special_tokens=False,
    spaces_between_special_tokens=False,
)  # fmt: skip


def test_every_parameter_of_both_apis_and_of_vllm_is_read() -> None:
    assert chat(**EVERY).parameters == READ
    assert completion(**EVERY).parameters == READ
    assert chat(**EVERY).given.keys() == {
        name for name, value in msgspec.structs.asdict(READ).items() if value != getattr(Parameters(), name)
    } - {"do_sample", "best_of"} | {"include_stop_str_in_output"}
    assert chat(**EVERY).given["stop_sequences"] == "stop"  # each with the member that asks for it
    assert {*chat(**EVERY).given.values()} == EVERY.keys()
    assert chat(n=2).n == 2


def test_null_is_the_same_as_absent() -> None:
    names = [*EVERY, "model", "stream", "stream_options", "logprobs", "top_logprobs", "max_completion_tokens", "tools"]
    assert chat(**dict.fromkeys(names)) == chat()
    assert completion(**dict.fromkeys([*EVERY, "model", "echo", "suffix", "best_of", "logprobs"])) == completion()


def test_neutral_values_are_not_given_so_a_model_without_penalties_need_not_refuse_them() -> None:
    # langchain's client sends these by default.
    request = completion(frequency_penalty=0, n=1, presence_penalty=0, temperature=0.7, top_p=1, max_tokens=256)
    assert request.given == {"temperature": "temperature", "max_new_tokens": "max_tokens"}


@pytest.mark.parametrize(
    "members", [{"temperature": 0}, {"temperature": 0.0}, {"top_p": 0}, {"top_p": 0.0, "temperature": 2}]
)
def test_no_temperature_or_no_nucleus_is_greedy(members: dict[str, float]) -> None:
    parameters = chat(**members).parameters
    assert (parameters.do_sample, parameters.top_p) == (False, 1.0)


@pytest.mark.parametrize(("stop", "sequences"), [("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())])
def test_stop_is_a_string_or_several(stop: object, sequences: tuple[str, ...]) -> None:
    assert chat(stop=stop).parameters.stop_sequences == sequences


def test_decision_more_stop_strings_than_openais_4_are_taken_up_to_64() -> None:
    assert len(chat(stop=["a"] * 64).parameters.stop_sequences) == 64
    assert refused(chat, stop=["a"] * 65).message == "stop: expected at most 64 strings, got an array of 65"


def test_both_names_of_the_longest_answer_may_say_the_same() -> None:
    assert chat(max_completion_tokens=5).parameters.max_new_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5.0).parameters.max_new_tokens == 5
    error = refused(chat, max_completion_tokens=5, max_tokens=6)
    assert error.message == "max_tokens: expected what max_completion_tokens says, or one of the two alone, got 6"
    assert error.param == "max_tokens"


def test_a_completion_knows_no_max_completion_tokens() -> None:
    request = completion(max_completion_tokens=5)
    assert request.parameters.max_new_tokens == 16
    assert request.parameters.extra == {"max_completion_tokens": 5}


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"temperature": 2.1}, "temperature: expected a number from 0 to 2, got 2.1"),
        ({"temperature": -1}, "temperature: expected a number from 0 to 2, got -1"),
        ({"temperature": "1"}, "temperature: expected a number from 0 to 2, got the string '1'"),
        ({"top_p": 1.1}, "top_p: expected a number from 0 to 1, got 1.1"),
        ({"top_p": False}, "top_p: expected a number from 0 to 1, got false"),
        ({"presence_penalty": 2.5}, "presence_penalty: expected a number from -2 to 2, got 2.5"),
        ({"frequency_penalty": -3}, "frequency_penalty: expected a number from -2 to 2, got -3"),
        ({"logit_bias": {"a": 1}}, "logit_bias: expected token ids from 0 to 2147483647 as keys, got the string 'a'"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5: expected a number from -100 to 100, got 101"),
        ({"logit_bias": [5]}, "logit_bias: expected an object of token ids and numbers, got an array of 1"),
        ({"n": 0}, "n: expected an integer from 1 to 64, got 0"),
        ({"n": 65}, "n: expected an integer from 1 to 64, got 65"),
        ({"seed": "x"}, "seed: expected an integer of 64 bits, got the string 'x'"),
        ({"stop": ""}, "stop: expected non-empty strings, got an empty string"),
        ({"stop": [1]}, "stop: expected non-empty strings, got 1"),
        ({"min_tokens": -1}, "min_tokens: expected an integer from 0 to 2147483647, got -1"),
        ({"min_p": 2}, "min_p: expected a number >= 0 and <= 1, got 2"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a number > 0, got 0"),
        ({"ignore_eos": 1}, "ignore_eos: expected true or false, got 1"),
        ({"stop_token_ids": 9}, "stop_token_ids: expected an array of at most 64 token ids, got 9"),
        ({"stream": "yes"}, "stream: expected true or false, got the string 'yes'"),
        ({"model": 7}, "model: expected a string, got 7"),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_the_name_that_the_client_used(members: dict[str, Any], message: str) -> None:
    for kind in (chat, completion):
        error = refused(kind, **members)
        assert error.message == message
        assert error.param == message.partition(":")[0].partition(".")[0]


@pytest.mark.parametrize(("kind", "least"), [(chat, 1), (completion, 0)])
def test_only_a_completion_may_have_no_token(kind: Any, least: int) -> None:
    for value in (least - 1, 1.5, True):
        error = refused(kind, max_tokens=value)
        said = str(value).lower()
        assert error.message == f"max_tokens: expected an integer from {least} to 2147483647, got {said}"
    assert kind(max_tokens=least).parameters.max_new_tokens == least


def test_a_long_value_is_cut() -> None:
    assert len(refused(chat, temperature="x" * 10_000).message) < 200


# --- the form of the answer


def test_a_stream_may_ask_for_its_usage() -> None:
    assert not chat(stream=True).include_usage
    request = chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    assert (request.stream, request.include_usage) == (True, True)
    assert not chat(stream=True, stream_options={}).include_usage


def test_each_chunk_of_a_stream_may_have_its_usage() -> None:
    for make in (chat, completion):
        assert make(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage
        assert not make(stream=True, stream_options={"include_usage": True}).continuous_usage
    for name in ("continuous_usage_stats", "include_obfuscation"):
        assert refused(chat, stream=True, stream_options={name: "yes"}).param == f"stream_options.{name}"


def test_stream_options_without_a_stream_are_refused() -> None:
    message = "stream_options: expected only where stream is true"
    assert refused(chat, stream_options={"include_usage": True}).message == message
    assert refused(completion, stream=True, stream_options=[]).param == "stream_options"
    assert refused(chat, stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"


def test_top_logprobs_of_a_chat_need_logprobs() -> None:
    request = chat(logprobs=True, top_logprobs=20)
    assert (request.logprobs, request.top_logprobs, request.parameters.top_n_tokens) == (True, 20, 20)
    assert "top_n_tokens" in request.given
    assert chat(logprobs=False, top_logprobs=0).top_logprobs == 0
    assert refused(chat, top_logprobs=1).message == "top_logprobs: expected only where logprobs is true"
    assert refused(chat, logprobs=True, top_logprobs=21).message == "top_logprobs: expected an integer from 0 to 20, got 21"
    assert refused(chat, logprobs=5).message == "logprobs: expected true or false, got 5"


def test_logprobs_of_a_completion_are_a_number_of_which_0_is_not_none() -> None:
    assert completion().logprobs is None
    assert (completion(logprobs=0).logprobs, completion(logprobs=0).parameters.top_n_tokens) == (0, 0)
    assert (completion(logprobs=5).logprobs, completion(logprobs=5).parameters.top_n_tokens) == (5, 5)
    assert completion(logprobs=True) == completion(logprobs=1)
    assert completion(logprobs=False) == completion()
    assert refused(completion, logprobs="1").param == "logprobs"


def test_the_prompts_tokens_are_asked_for_only_where_they_are_echoed_with_log_probabilities() -> None:
    assert not completion(echo=True).parameters.decoder_input_details
    request = completion(echo=True, logprobs=0)
    assert request.parameters.decoder_input_details
    assert request.given == {"decoder_input_details": "echo"}
    assert request.parameters.prompt_logprobs == 0
    assert request.shows_prompt


def test_the_alternatives_of_the_prompts_tokens_are_asked_for_as_those_of_the_texts() -> None:
    request = completion(echo=True, logprobs=3)
    assert (request.parameters.prompt_logprobs, request.parameters.top_n_tokens) == (3, 3)
    assert request.given["prompt_logprobs"] == "echo"
    assert completion(logprobs=3).parameters.prompt_logprobs is None
    assert refused(completion, echo="yes").param == "echo"


def test_best_of_is_at_least_n_and_not_for_a_stream() -> None:
    assert (completion(best_of=3).n, completion(best_of=3).parameters.best_of) == (1, 3)
    assert completion(n=2, best_of=2, stream=True).parameters.best_of == 2
    error = refused(completion, n=3, best_of=2)
    assert (error.message, error.param) == ("best_of: expected at least n, which is 3, got 2", "best_of")
    error = refused(completion, best_of=2, stream=True)
    assert error.message == "best_of: expected n (1) in a stream, which cannot wait for the best, got 2"


def test_the_choices_of_all_prompts_together_are_bounded() -> None:
    assert len(completion(prompt=["a"] * 64, n=2).prompts) == 64
    error = refused(completion, prompt=["a"] * 65, n=2)
    assert error.message == "prompt: expected at most 128 choices in all, got 65 prompts with n 2"


# --- members that are not read here


def test_members_that_nobody_knows_reach_the_model_as_they_came() -> None:
    assert chat(delay_ms=5, nothing=None).parameters.extra == {"delay_ms": 5}
    assert completion(guided_regex="a+", suffix="").parameters.extra == {"guided_regex": "a+", "suffix": ""}
    assert chat(tools=[{}], user="u", functions=None).parameters.extra == {"tools": [{}], "user": "u"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from([*EVERY, "messages", "prompt", "model", "stream", "stream_options", "logprobs", "top_logprobs",
                         "echo", "best_of", "suffix", "tools", "response_format", "max_completion_tokens"])  # fmt: skip


@given(st.dictionaries(NAMES, JSON, max_size=6), st.booleans())
def test_any_document_is_read_or_refused_with_a_short_message(members: dict[str, Any], whole: bool) -> None:
    document = {"messages": HELLO, "prompt": "Once", **members} if whole else members
    for parse in (parse_chat, parse_completion):
        refusal = None
        try:
            request = parse(document)
        except OpenAIError as error:
            refusal = error
        if refusal is None:
            assert request.parameters.best_of >= request.n
        else:
            assert refusal.status == 400
            assert refusal.param
            assert len(refusal.message) < 300
            json.loads(refusal.body())
