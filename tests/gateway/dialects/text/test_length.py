"""How long an answer may be: to its model's end, the room of the context or the ceiling, and never cut in silence."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from gateway.config import Config, LimitsConfig, LMIConfig, OpenAIConfig
from gateway.testing import in_memory_processes
from models.adapt import spec_of
from models.library.lm.model import LanguageModel
from models.messages import Family, Finish, FinishReason, Prompt, Token
from models.rolling import RollingBatch, rolling
from models.session import Session
from models.spec import ModelSpec
from tests.gateway.dialects.text.test_lmi_forms import ask, text_spec
from tests.gateway.dialects.text.text_wires import SESSIONS, WAYS, Asked, Refused, Way
from tests.gateway.promises import serving

OPENAI = ["chat", "chat-stream", "completions", "completions-stream"]


async def thousand(prompt: Prompt) -> AsyncIterator[str]:
    for number in range(1000):
        yield f"{number} "


async def endless(prompt: Prompt) -> AsyncIterator[str]:
    for number in itertools.count():
        yield f"{number} "


def words_in(text: str) -> int:
    return len(text.split())


def config_of(way: Way, tokens: int = 0, **limits: Any) -> Config:
    return Config(lmi=LMIConfig(**way.lmi), limits=LimitsConfig(**limits), openai=OpenAIConfig(max_tokens=tokens))


async def told(wire: str, spec: ModelSpec, asked: Asked, config: Config | None = None) -> tuple[int, str | None]:
    """The number of words of the answer, and its reason."""
    way = WAYS[wire]
    async with serving(replace(spec, **way.spec), config=config or config_of(way)) as house:
        answer = await way.ask(house, way.path, way.kinds[0], asked)
        return words_in(answer.text), answer.reason


@pytest.mark.parametrize("wire", OPENAI)
async def test_an_answer_whose_request_names_no_limit_goes_on_until_its_model_ends_it(wire: str) -> None:
    assert await told(wire, text_spec(thousand), Asked("x")) == (1000, "end")


@pytest.mark.parametrize("wire", OPENAI)
async def test_a_model_that_never_ends_by_itself_ends_at_the_least_of_what_bounds_it(wire: str) -> None:
    spec, way = text_spec(endless), WAYS[wire]
    for bounded, config, most in (
        (spec, config_of(way, max_new_tokens=400), 400),
        (replace(spec, max_new_tokens=300), config_of(way, max_new_tokens=400), 300),
        (replace(spec, context=350), config_of(way, max_new_tokens=400), 350),
        (replace(spec, context=350), config_of(way, tokens=280, max_new_tokens=400), 280),
        (replace(spec, context=450), config_of(way, max_new_tokens=0), 450),
        (replace(spec, context=450, count_tokens=words_in), config_of(way, max_new_tokens=0), 448),
    ):
        assert await told(wire, bounded, Asked("x y"), config) == (most, "length")


@pytest.mark.parametrize("wire", [name for name in WAYS if name not in OPENAI])
async def test_other_schemas_keep_their_default(wire: str) -> None:
    assert (await told(wire, text_spec(endless), Asked("x y")))[0] == 30
    assert (await told(wire, text_spec(endless, context=20), Asked("x y")))[0] == 20


@pytest.mark.parametrize("wire", WAYS)
async def test_more_than_the_ceiling_is_refused_and_128_000_are_not_more(wire: str) -> None:
    way = WAYS[wire]
    spec = replace(text_spec(thousand), **way.spec)
    async with serving(spec, config=config_of(way)) as house:
        answer = await way.ask(house, way.path, way.kinds[0], Asked("x", 128_000))
        assert words_in(answer.text) == 1000
        with pytest.raises(Refused) as refused:
            await way.ask(house, way.path, way.kinds[0], Asked("x", 262_145))
        assert b"expected at most 262144 (limits.max_new_tokens), got 262145" in refused.value.body


@pytest.mark.parametrize("wire", [name for name in WAYS if name not in SESSIONS])
async def test_a_prompt_that_leaves_less_room_than_asked_is_answered_to_the_end_of_the_room(wire: str) -> None:
    spec = text_spec(endless, context=10, count_tokens=words_in)
    words, reason = await told(wire, spec, Asked("a b c d", 50))
    assert (words, reason) in ((6, "length"), (6, None))
    assert (await told(wire, spec, Asked("a b c d", 5)))[0] == 5
    assert (await told(wire, spec, Asked("a b c d")))[0] == 6
    with pytest.raises(Refused) as refused:
        await told(wire, spec, Asked("a b c d e f g h i j", 5))
    assert b"maximum context length is 10 tokens" in refused.value.body
    if "v1" in WAYS[wire].path:
        error = json.loads(refused.value.body)["error"]
        assert (refused.value.status, error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("wire", WAYS)
async def test_a_model_is_told_if_the_client_has_named_a_limit(wire: str) -> None:
    got: list[bool] = []

    async def model(prompt: Prompt) -> AsyncIterator[str]:
        got.append(prompt.parameters.limited)
        yield "w"

    await told(wire, text_spec(model), Asked("x"))
    await told(wire, text_spec(model), Asked("x", 5))
    assert got == [False, True]


async def test_the_prompts_tokens_are_counted_once() -> None:
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return len(text)

    spec = text_spec(thousand, context=2000, count_tokens=count)
    async with serving(spec) as house:
        _, _, body = await ask(house, "/v1/completions", {"prompt": ["ab", "c"], "max_tokens": 1})
        assert json.loads(body)["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert counted == ["ab", "c"]


# -- sources of the context ------------------------------------------------------------------------------------------------


class Told:
    """A model whose own attributes say it."""

    context = 12

    def count_tokens(self, text: str) -> int:
        return words_in(text)

    async def __call__(self, session: Session[Prompt, Token]) -> None:
        async for _ in session:
            for number in itertools.count():
                await session.send(Token(text=f"{number} "))


class Function(Told):
    """Is called for each prompt."""

    async def __call__(self, prompt: Prompt) -> AsyncIterator[str]:  # type: ignore[override]
        for number in itertools.count():  # not in a thread, whose step may outlast the test
            yield f"{number} "


class Steps:
    """A rolling batch's."""

    context = 12

    def count_tokens(self, text: str) -> int:
        return words_in(text)

    def open(self, prompt: Prompt) -> list[Any]:
        return [type("Sequence", (), {"prompt_tokens": words_in(prompt.text), "pending": 1})()]

    def prefill(self, sequence: Any, at_most: int) -> None:
        sequence.pending = 0

    def step(self, sequences: list[Any]) -> list[Token | Finish]:
        return [Token(text="w ") for _ in sequences]

    def close(self, sequence: Any) -> None:
        """Nothing to release."""


@asynccontextmanager
async def rolls() -> AsyncIterator[RollingBatch[Any]]:
    async with rolling(Steps(), blocking=False) as batch:
        yield batch


MODELS: dict[str, Callable[[], ModelSpec]] = {
    "a session": lambda: text_spec(Told()),
    "a generator": lambda: text_spec(Function()),
    "a rolling batch": lambda: spec_of(rolls, "m", family=Family.TEXT),
    "a process": lambda: in_memory_processes(text_spec(Told()), instances=1)[0],
    "a rolling batch in a process": lambda: in_memory_processes(spec_of(rolls, "m", family=Family.TEXT), instances=1)[0],
    "a spec": lambda: text_spec(endless, context=12, count_tokens=words_in),
    "a spec in a process": lambda: in_memory_processes(text_spec(endless, context=12, count_tokens=words_in), instances=1)[
        0
    ],
}


@pytest.mark.parametrize("model", MODELS)
async def test_the_room_holds_for_every_shape_of_model(model: str) -> None:
    async with serving(MODELS[model]()) as house:
        _, _, body = await ask(house, "/v1/completions", {"prompt": "a b c"})
        answer = json.loads(body)
        assert (words_in(answer["choices"][0]["text"]), answer["choices"][0]["finish_reason"]) == (9, "length")
        listed = json.loads((await house.ask("/v1/models", method=b"GET"))[2])
        assert [one["max_model_len"] for one in listed["data"]] == [12]
        assert json.loads((await house.ask("/v1/models/m", method=b"GET"))[2])["max_model_len"] == 12


async def test_a_context_that_nobody_tells_is_not_shown_and_another_attribute_of_that_name_is_none() -> None:
    class Other(Told):
        context = "a text"  # type: ignore[assignment]

    for model in (thousand, Other()):
        async with serving(text_spec(model)) as house:
            assert "max_model_len" not in json.loads((await house.ask("/v1/models/m", method=b"GET"))[2])


def test_a_context_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="context must be at least 0"):
        text_spec(thousand, context=-1)


@pytest.mark.sweep
async def test_a_greedy_text_of_the_librarys_model_ends_although_nobody_names_a_limit() -> None:
    async with serving(text_spec(LanguageModel.load())) as house:
        _, _, body = await ask(house, "/v1/completions", {"prompt": "Return the", "temperature": 0})
        answer = json.loads(body)
        assert answer["usage"]["completion_tokens"] == 2048
        assert answer["choices"][0]["finish_reason"] == "length"
        status, _, _ = await ask(house, "/v1/completions", {"prompt": "Return the", "best_of": 64, "seed": 1})
        assert status == 200  # nobody has asked for more tokens than a search may keep


async def test_a_model_may_end_itself_and_say_why() -> None:
    async def short(session: Session[Prompt, Token | Finish]) -> None:
        async for prompt in session:
            assert prompt.parameters.max_new_tokens == 262_144
            await session.send(Token(text="w", finish=FinishReason.LENGTH))

    assert await told("chat", text_spec(short), Asked("x")) == (1, "length")
