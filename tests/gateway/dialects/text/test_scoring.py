"""Clients that score texts: they ask for a prompt's own tokens and their alternatives, and perhaps for no new token."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import pytest

from gateway.testing import in_memory_processes
from models.adapt import spec_of
from models.library.lm import neural
from models.library.lm.model import LanguageModel
from models.messages import Family, Finish, FinishReason, GenerationParameters, Part, Prompt, Token, TopToken
from models.rolling import RollingBatch, rolling
from models.session import Session
from models.spec import ModelSpec
from tests.gateway.dialects.text.test_lmi_forms import AT_EACH_ROUTE, STREAM, ask, lmi, parts_of, text_spec
from tests.gateway.dialects.text.text_wires import events_in
from tests.gateway.promises import House, serving
from tests.models.steps import Counting

COMPLETIONS, GENERATE, PREDICT = "/v1/completions", "/v2/models/m/generate", "/predictions/m"
TEXT = "Return the naïve 日本 value"


@cache
def ngrams() -> LanguageModel:
    return LanguageModel.load()


@cache
def network() -> neural.TransformerModel:
    return neural.TransformerModel.load()


@asynccontextmanager
async def load_network() -> AsyncIterator[RollingBatch[Any]]:
    async with rolling(network(), blocking=False) as batch:
        yield batch


def of_ngrams(name: str = "m") -> ModelSpec:
    return text_spec(ngrams(), name)


def of_network(name: str = "m") -> ModelSpec:
    return spec_of(load_network, name, family=Family.TEXT)


def in_process(name: str = "m") -> ModelSpec:
    return in_memory_processes(of_ngrams(name), instances=1)[0]


def scores_of_ngrams(ids: list[int]) -> list[Any]:
    """The log-probabilities of all tokens in each place of a text; None in the first, which nothing predicts."""
    model = ngrams()
    return [None, *[model.next_log_probs([0, *ids[:place]]) for place in range(1, len(ids))]]


def scores_of_network(ids: list[int]) -> list[Any]:
    net = network().network
    return [None, *net.log_probs([net.cache()] * len(ids), [0, *ids[:-1]])[1:]]


MODELS: dict[str, tuple[Callable[[], ModelSpec], Callable[[list[int]], list[Any]]]] = {
    "n-grams": (of_ngrams, scores_of_ngrams),
    "rolling batch": (of_network, scores_of_network),
    "in a process": (in_process, scores_of_ngrams),
}


async def completed(house: House, kind: str = "http1", **members: Any) -> list[dict[str, Any]]:
    """The choices of a completion; those of a stream are put together."""
    status, _, body = await ask(house, COMPLETIONS, {"prompt": TEXT, "temperature": 0, **members}, kind=kind)
    assert status == 200, body
    if not members.get("stream"):
        found: list[dict[str, Any]] = json.loads(body)["choices"]
        return found
    choices: dict[int, dict[str, Any]] = {}
    for part in [choice for event in events_in(body) for choice in event["choices"]]:
        into = choices.setdefault(part["index"], {"index": part["index"], "text": "", "logprobs": {}})
        into["text"] += part["text"]
        into["finish_reason"] = part["finish_reason"]
        for name, values in (part["logprobs"] or {}).items():
            into["logprobs"].setdefault(name, []).extend(values)
    return [choices[index] for index in sorted(choices)]


async def refusal(house: House, path: str, document: Any) -> tuple[int, str, Any]:
    """The status, the message and the member that an answer blames."""
    status, _, body = await ask(house, path, document)
    error = json.loads(body)["error"]
    return (status, error, None) if isinstance(error, str) else (status, error["message"], error["param"])


# -- the prompt's tokens and their alternatives ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("name", MODELS)
async def test_an_echo_has_the_models_own_values_for_each_token_and_for_the_best(
    name: str, most: int, stream: bool, autojump_clock: Any
) -> None:
    spec, scores = MODELS[name]
    tokenizer = ngrams().tokenizer if scores is scores_of_ngrams else network().tokenizer
    ids = tokenizer.encode(TEXT)
    async with serving(spec()) as house:
        (choice,) = await completed(house, echo=True, logprobs=2, max_tokens=most, stream=stream)
    told = choice["logprobs"]
    assert {len(values) for values in told.values()} == {len(ids) + most}
    assert choice["finish_reason"] == "length"
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    shown = [tokenizer.bytes_of(token).decode(errors="replace") for token in ids]
    assert told["tokens"][: len(ids)] == shown
    places = zip(ids, scores(ids), told["token_logprobs"], told["tokens"], told["top_logprobs"], strict=False)
    for token, row, value, text, top in list(places)[1:]:
        assert value == pytest.approx(float(row[token]), abs=1e-5)
        assert top[text] == value
        assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-5)
        assert (value == max(top.values())) is (token == int(row.argmax()))
        assert len(top) in (2, 3)


async def test_the_choices_of_several_prompts_each_have_their_own_prompts_tokens(autojump_clock: Any) -> None:
    async with serving(of_ngrams()) as house:
        alone = [(await completed(house, prompt=text, echo=True, logprobs=1, max_tokens=1))[0] for text in ("One two", "Or")]
        together = await completed(house, prompt=["One two", "Or"], echo=True, logprobs=1, max_tokens=1, n=2)
    assert [choice["logprobs"] for choice in together] == [alone[index // 2]["logprobs"] for index in range(4)]


@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_are_those_in_the_text_also_where_the_prompt_was_truncated(stream: bool, autojump_clock: Any) -> None:
    text = "Return the value of the option."
    async with serving(of_ngrams()) as house:
        for kept in (None, 1, 3, 100):
            (choice,) = await completed(
                house, prompt=text, echo=True, logprobs=1, max_tokens=3, stream=stream, truncate_prompt_tokens=kept
            )
            told, whole = choice["logprobs"], choice["text"]
            assert whole.startswith(text)
            for offset, token in zip(told["text_offset"], told["tokens"], strict=True):
                assert whole[offset : offset + len(token)] == token
            assert told["text_offset"][-1] >= len(text)


CHARACTERS = "né 😀"
BYTES = [bytes([byte]) for byte in CHARACTERS.encode()]


async def bytewise(session: Session[Prompt, Any]) -> None:
    """Reports its prompt byte by byte, whatever the prompt is, and says one word."""
    asked = (await session.receive()).parameters
    for number, data in enumerate(BYTES if asked.decoder_input_details else ()):
        others = (
            TopToken(text="\ufffd", id=number, log_prob=-0.5, data=data),
            TopToken(text="\ufffd", id=300, log_prob=-3.0),
        )
        top = others[: asked.prompt_logprobs or 0] if number else ()
        value = -0.5 if number else None
        await session.send(Token(text="", data=data, id=number, log_prob=value, prefill=True, top=top))
    await session.send(Token(text="!", id=400, log_prob=-0.25, finish=FinishReason.LENGTH))


async def test_tokens_of_a_prompt_may_be_bytes(autojump_clock: Any) -> None:
    async with serving(text_spec(bytewise)) as house:
        (choice,) = await completed(house, prompt=CHARACTERS, echo=True, logprobs=2, max_tokens=1)
        told = choice["logprobs"]
        assert told["text_offset"] == [0, 1, 1, 2, 3, 3, 3, 3, 4]
        assert told["tokens"] == ["n", "\ufffd", "\ufffd", " ", *["\ufffd"] * 4, "!"]
        assert told["top_logprobs"][1] == {"\ufffd": -0.5, "token_id:300": -3.0}

        asked = {"inputs": CHARACTERS, "parameters": {"details": True, "decoder_input_details": True}}
        _, _, body = await ask(house, PREDICT, asked)
        prefill = json.loads(body)["details"]["prefill"]
        assert [token["text"] for token in prefill] == ["n", "", "é", " ", "", "", "", "😀"]


# -- models that do not report their prompts ---------------------------------------------------------------------------


async def plain(prompt: Prompt) -> str:
    return "Hello there"


async def tokenwise(prompt: Prompt) -> AsyncIterator[Token]:
    yield Token(text="Hello", id=5, log_prob=-0.5)


async def ends(session: Session[Prompt, Any]) -> None:
    await session.receive()
    await session.send(Finish(reason=FinishReason.LENGTH))


async def of_parts(session: Session[Part, Part]) -> None:
    async for _ in session:
        await session.send(Part(data=b"Hello"))


SILENT: dict[str, ModelSpec] = {
    "text": text_spec(plain),
    "tokens": text_spec(tokenwise),
    "finish": text_spec(ends),
    "parts": spec_of(of_parts, "m", family=Family.PARTS),
    "text of a list": text_spec(plain, parameters=frozenset({"max_new_tokens", "top_n_tokens"})),
    "tokens in a process": in_memory_processes(text_spec(tokenwise), instances=1)[0],
}
WHO = "model 'm' "


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", SILENT)
async def test_a_prompt_that_the_model_does_not_report_is_refused_by_name(
    model: str, stream: bool, autojump_clock: Any
) -> None:
    async with serving(SILENT[model]) as house:
        for most in (0, 2):
            asked = {"prompt": "x", "echo": True, "logprobs": 1, "max_tokens": most, "stream": stream}
            status, said, param = await refusal(house, COMPLETIONS, asked)
            assert (status, param) == (400, "echo")
            assert said.startswith(f"echo: {WHO}")
        for name, value in (("decoder_input_details", True), ("prompt_logprobs", 1)):
            given = {"inputs": "x", "parameters": {"details": True, name: value}, "stream": stream}
            status, said, _ = await refusal(house, PREDICT, given)
            assert status == 424
            assert said.startswith(f"parameters.{name}: {WHO}")
        # an answer that would show nothing of the prompt lacks nothing
        (choice,) = await completed(house, echo=True, max_tokens=2)
        assert choice["text"].startswith(TEXT)
        (choice,) = await completed(house, logprobs=1, max_tokens=2)
        status, _, _ = await ask(house, PREDICT, {"inputs": "x", "parameters": {"decoder_input_details": True}})
        assert status == 200


@pytest.mark.parametrize(("kind", "route"), AT_EACH_ROUTE)
async def test_each_route_refuses_the_details_of_a_prompt_that_is_not_reported(
    kind: str, route: str, autojump_clock: Any
) -> None:
    asked = {"inputs": "x", "parameters": {"details": True, "decoder_input_details": True}}
    async with serving(text_spec(tokenwise)) as house:
        status, _, body = await ask(house, route, asked, kind=kind)
        assert status in (400, 424)
        assert b"parameters.decoder_input_details: model 'm' has not reported the tokens of its prompt" in body
        status, _, body = await ask(house, STREAM, {**asked, "stream": True}, kind=kind)
        assert status == 424 or b"has not reported" in b"".join(parts_of(body))
    async with serving(text_spec(tokenwise), config=lmi(tgi_compat=True)) as house:
        status, _, body = await ask(house, route, asked, kind=kind)
        assert b"parameters.decoder_input_details" in body
        if not route.startswith("/endpoints"):  # the platform puts the container's error into its own
            assert (status, json.loads(body)["error_type"]) == (424, "validation")


async def test_a_model_whose_list_has_no_alternatives_of_prompts_is_not_taken_for_greedy(autojump_clock: Any) -> None:
    listed = frozenset({"decoder_input_details", "top_n_tokens"})
    async with serving(text_spec(bytewise, parameters=listed)) as house:
        status, said, param = await refusal(house, COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 1})
        assert (status, param) == (400, "echo")
        assert said == "echo: model 'm' does not report the most probable tokens in its prompt (prompt_logprobs)"
        (choice,) = await completed(house, echo=True, logprobs=0)
        assert len(choice["logprobs"]["tokens"]) == len(BYTES) + 1


# -- no token ----------------------------------------------------------------------------------------------------------


def counting(tokens: int) -> tuple[ModelSpec, Counting]:
    """A step model that knows nothing of prompts without an answer, whose prompts have so many tokens."""
    steps = Counting()

    class Prompted:
        def open(self, prompt: Prompt) -> Any:
            return steps.open(
                Prompt(text=prompt.text, parameters=GenerationParameters(max_new_tokens=9, extra={"tokens": tokens}))
            )

        prefill, step, close = steps.prefill, steps.step, steps.close

    @asynccontextmanager
    async def load() -> AsyncIterator[RollingBatch[Any]]:
        async with rolling(Prompted(), blocking=False) as batch:
            yield batch

    return spec_of(load, "m", family=Family.TEXT), steps


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", [*SILENT, *MODELS, "steps", "steps at once"])
async def test_no_token_may_be_asked_for_of_any_model(model: str, stream: bool, autojump_clock: Any) -> None:
    spec = (
        SILENT[model] if model in SILENT else MODELS[model][0]() if model in MODELS else counting(7 * (model == "steps"))[0]
    )
    async with serving(spec) as house:
        for echo in (False, True):
            choices = await completed(house, max_tokens=0, echo=echo, n=2, stream=stream)
            assert [choice["text"] for choice in choices] == [TEXT * echo] * 2
            assert [choice["finish_reason"] for choice in choices] == ["length"] * 2
        _, _, body = await ask(house, COMPLETIONS, {"prompt": TEXT, "max_tokens": 0})
        assert json.loads(body)["usage"]["completion_tokens"] == 0
        assert house.gateway.counts().endings == {"complete": 3}


async def test_the_model_sees_that_no_token_is_wanted(autojump_clock: Any) -> None:
    seen: list[GenerationParameters] = []

    async def looks(prompt: Prompt) -> str:
        seen.append(prompt.parameters)
        return "never shown"

    async with serving(text_spec(looks)) as house:
        await completed(house, max_tokens=0)
        await completed(house, max_tokens=0.0)
    assert [parameters.max_new_tokens for parameters in seen] == [0, 0]


async def test_a_step_model_is_prefilled_alone(autojump_clock: Any) -> None:
    spec, steps = counting(7)
    async with serving(spec) as house:
        await completed(house, max_tokens=0, prompt="a")
        assert (steps.prefills, steps.steps) == ([("a", 7)], [])
    assert steps.closed == ["a"]


@pytest.mark.parametrize(
    ("path", "document", "status"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0}, 400),
        (PREDICT, {"inputs": "x", "parameters": {"max_new_tokens": 0}}, 424),
        (GENERATE, {"text_input": "x", "max_new_tokens": 0}, 400),
    ],
)
async def test_other_schemas_have_at_least_one_token(path: str, document: Any, status: int, autojump_clock: Any) -> None:
    async with serving(of_ngrams()) as house:
        found, _, body = await ask(house, path, document)
        assert found == status
        assert b"expected an integer from 1" in body
