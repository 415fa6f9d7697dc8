"""generate and generate_stream of a model of text, asked as Triton's clients ask: by TensorRT-LLM's and vLLM's names."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from models.adapt import spec_of
from models.errors import ModelError
from models.messages import Prompt, Token
from tests.gateway.dialects.v2.test_v2_generate import STREAM, UNARY, ask
from tests.gateway.dialects.v2.test_v2_streams import events_in
from tests.gateway.promises import House, serving

ROUTES = pytest.mark.parametrize("route", [UNARY, STREAM])


class Words:
    """Says the words of its prompt, and keeps its prompts."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []

    async def __call__(self, prompt: Prompt) -> AsyncIterator[str]:
        self.prompts.append(prompt)
        for word in prompt.text.split():
            yield f" {word}"


async def text_of(house: House, route: str, members: Any) -> list[str]:
    """The texts of the reply, or of its events."""
    status, _, body = await ask(house, route, members)
    assert status == 200, body
    return [reply["text_output"] for reply in ([json.loads(body)] if route == UNARY else events_in(body))]


def sampling(**members: Any) -> dict[str, str]:
    return {"sampling_parameters": json.dumps(members)}


@ROUTES
async def test_the_request_of_tensorrts_guide_is_answered_as_it_is(route: str) -> None:
    words = Words()
    asked = {"text_input": "one two three", "max_tokens": 2, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2}
    async with serving(spec_of(words, "m")) as house:
        status, headers, _ = await ask(house, route, asked)
        assert (status, "x-everywire-passed" in headers) == (200, False)
        assert "".join(await text_of(house, route, asked)) == " one two"
    parameters = words.prompts[0].parameters
    assert (parameters.max_new_tokens, parameters.limited, parameters.stop_token_ids) == (2, True, (2,))
    assert (parameters.stop_sequences, parameters.bad_sequences, dict(parameters.extra)) == ((), (), {})


@ROUTES
@pytest.mark.parametrize("beside", [True, False])
async def test_each_name_has_its_effect_beside_parameters_and_in_them(route: str, beside: bool) -> None:
    words = Words()
    named: dict[str, Any] = {
        "stop_words": ["three"], "random_seed": 7, "len_penalty": 0.5, "runtime_top_k": 4, "runtime_top_p": 0.25,
        "beam_width": 1, "return_log_probs": True, "max_tokens": 5, "bad_words": "never", "temperature": 0.5,
    }  # fmt: skip
    async with serving(spec_of(words, "m")) as house:
        members = named if beside else {"parameters": named}
        assert "".join(await text_of(house, route, {"text_input": "one two three four", **members})) == " one two three"
    asked = words.prompts[0].parameters
    assert (asked.seed, asked.length_penalty, asked.top_k, asked.top_p, asked.num_beams) == (7, 0.5, 4, 0.25, 1)
    assert (asked.details, asked.max_new_tokens, asked.temperature) == (True, 5, 0.5)
    assert (asked.stop_sequences, asked.bad_sequences) == (("three",), ("never",))


@ROUTES
async def test_sampling_parameters_are_members_in_a_string(route: str) -> None:
    words = Words()
    async with serving(spec_of(words, "m")) as house:
        asked = {"text_input": "one 7 three", **sampling(max_tokens="2", temperature="0.5", top_k=5, stop="7", nobody=[1])}
        assert "".join(await text_of(house, route, asked)) == " one 7"
        assert await text_of(house, route, {"text_input": "one", "parameters": {"sampling_parameters": ""}}) == [" one"]
        _, headers, _ = await ask(house, route, asked)
        assert headers["x-everywire-passed"] == "nobody"
    parameters = words.prompts[0].parameters
    assert (parameters.max_new_tokens, parameters.temperature, parameters.top_k) == (2, 0.5, 5)
    assert (parameters.stop_sequences, dict(parameters.extra)) == (("7",), {"nobody": [1]})


async def test_the_reply_begins_with_the_prompt_only_if_that_is_asked_for() -> None:
    async with serving(spec_of(Words(), "m")) as house:
        for route, texts in ((UNARY, [" é two"]), (STREAM, [" é", " two"])):
            for said in ({}, {"exclude_input_in_output": True}, {"exclude_input_in_output": None}):
                assert await text_of(house, route, {"text_input": "é two", **said}) == texts
            asked = {"text_input": "é two", "parameters": {"exclude_input_in_output": False}}
            vllms = {"text_input": "é two", **sampling(exclude_input_in_output=False)}
            both = ["é two é two"] if route == UNARY else ["é two", *texts]
            assert [await text_of(house, route, asked), await text_of(house, route, vllms)] == [both, both]
        assert house.endings == {"complete": 10}


@ROUTES
@pytest.mark.parametrize("stop", [None, "never before"])
async def test_the_prompt_is_there_even_if_no_text_follows_or_all_of_it_was_held_back(route: str, stop: str | None) -> None:
    prompt = " " if stop is None else "never"
    async with serving(spec_of(Words(), "m")) as house:
        asked = {"text_input": prompt, "exclude_input_in_output": False, "stop": stop}
        assert "".join(await text_of(house, route, asked)) == prompt + ("" if stop is None else " never")


@ROUTES
async def test_a_prompt_above_the_send_buffer_comes_before_its_text_and_all_memory_is_given_back(route: str) -> None:
    prompt = "x" * 1_000_000
    async with serving(spec_of(Words(), "m")) as house:
        asked = {"text_input": prompt, "exclude_input_in_output": False}
        assert "".join(await text_of(house, route, asked)) == f"{prompt} {prompt}"
        await house.still()
        assert house.gateway.budget.used == 0


async def test_a_model_that_fails_before_its_first_token_decides_the_status_although_the_prompt_comes_first() -> None:
    async def failing(prompt: Prompt) -> AsyncIterator[Token]:
        yield Token(text="prompt", prefill=True)
        raise ModelError("no such voice", status=422)

    async with serving(spec_of(failing, "m")) as house:
        for route in (UNARY, STREAM):
            status, _, body = await ask(house, route, {"text_input": "one", "exclude_input_in_output": False})
            assert (status, json.loads(body)) == (422, {"error": "no such voice"})


@ROUTES
@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"max_tokens": 2, "max_new_tokens": 3}, "parameters.max_new_tokens: expected what parameters.max_tokens says"),
        ({"max_tokens": 2, "parameters": {"max_new_tokens": 3}}, "expected what parameters.max_tokens says"),
        ({"max_tokens": 2, "parameters": {"max_tokens": 2}}, "'max_tokens' is there twice"),
        ({"stop_words": "a", "stop": "b"}, "parameters.stop: expected what parameters.stop_words says"),
        ({"max_tokens": [2]}, "parameters.max_tokens: expected an integer"),
        ({"max_tokens": 10**6}, "parameters.max_tokens: expected at most 262144 (limits.max_new_tokens)"),
        ({"beam_width": 2}, "parameters.beam_width: expected 1 here"),
        ({"num_return_sequences": 2}, "parameters.num_return_sequences: expected 1 here"),
        ({"end_id": "</s>"}, "parameters.end_id: expected -1 (none), or an integer"),
        ({"exclude_input_in_output": "no"}, "parameters.exclude_input_in_output: expected true or false"),
        ({"sampling_parameters": {"top_k": 5}}, "sampling_parameters: expected a JSON object in a string"),
        ({"sampling_parameters": "{"}, "sampling_parameters"),
        ({"sampling_parameters": "[1]"}, "sampling_parameters must be a JSON object"),
        ({"sampling_parameters": '{"top_k": 1, "top_k": 2}'}, "sampling_parameters"),
        ({"sampling_parameters": "[" * 1000}, "sampling_parameters"),
        ({"sampling_parameters": f'{{"x": "{"y" * 65536}"}}'}, "sampling_parameters: expected at most 65536 bytes"),
        ({**sampling(top_k=1), "top_k": 1}, "'top_k' is there twice, in sampling_parameters and beside them"),
        ({**sampling(max_tokens=1), "max_new_tokens": 2}, "expected what parameters.max_new_tokens says"),
        (sampling(temperature="warm"), "parameters.temperature: expected a number"),
        (sampling(n=2), "parameters.n: expected 1 here"),
        (sampling(guided_json={"type": "object"}), "guided_json"),
    ],
)
async def test_a_member_that_cannot_be_served_is_named(route: str, members: dict[str, Any], says: str) -> None:
    words = Words()
    async with serving(spec_of(words, "m")) as house:
        status, headers, body = await ask(house, route, {"text_input": "one", **members})
        assert (status, headers["content-type"]) == (400, "application/json")
        assert says in json.loads(body)["error"]
        assert words.prompts == []


@ROUTES
async def test_half_a_surrogate_pair_in_a_string_of_json_is_no_failure_of_the_server(route: str) -> None:
    async with serving(spec_of(Words(), "m")) as house:
        for text in ('{"stop": "\\ud800"}', '{"\\udc00": 1}', "\\ud800"):
            body = json.dumps({"text_input": "one", "sampling_parameters": text}).encode()
            assert (await ask(house, route, body))[0] == 400
