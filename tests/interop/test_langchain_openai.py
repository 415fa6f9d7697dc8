"""langchain-openai's ChatOpenAI and OpenAI, unmodified: invoke, stream, batch, where a text ends, and the usage of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.interop.served_text import PATIENCE, within_patience
from tests.interop.servers import Server

pytestmark = [
    pytest.mark.usefixtures("langchain"),  # before any server: where it is absent, none need start
    pytest.mark.filterwarnings("default"),  # its own
]

Make = Callable[..., Any]

PROMPT = "one two three four five"
ENDS: list[tuple[dict[str, Any], str]] = [
    ({}, "ONE TWO THREE FOUR FIVE "),
    ({"stop": ["E FO"]}, "ONE TWO THRE"),
    ({"stop": ["REE", "O TH"]}, "ONE TW"),
    ({"stop": ["FIVE SIX"]}, "ONE TWO THREE FOUR FIVE "),
    ({"max_tokens": 2}, "ONE TWO "),
]
"""Arguments of a call, and the text they end in."""


@pytest.fixture(scope="module")
def langchain(needs: Callable[[str, str], Any]) -> Any:
    return needs("langchain-openai", "langchain_openai")


@pytest.fixture(params=["ChatOpenAI", "OpenAI"])
def model(request: pytest.FixtureRequest, langchain: Any, text_server: Server) -> Any:
    """A client of the model `shout`."""
    make = getattr(langchain, request.param)
    return make(model="shout", base_url=f"{text_server.url}/v1", api_key="any", timeout=PATIENCE, max_retries=0)


def text_of(answer: Any) -> str:
    """The text of a message, or of a completion, which is a text itself."""
    return answer if isinstance(answer, str) else str(answer.content)


@pytest.mark.parametrize(("asked", "text"), ENDS)
def test_a_whole_answer_ends_where_it_was_asked_to(model: Any, asked: dict[str, Any], text: str) -> None:
    assert text_of(model.invoke(PROMPT, **asked)) == text


@pytest.mark.parametrize(("asked", "text"), ENDS)
def test_a_stream_ends_where_it_was_asked_to(model: Any, asked: dict[str, Any], text: str) -> None:
    pieces = [text_of(piece) for piece in model.stream(PROMPT, **asked)]
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) == len(text.split())


def test_the_same_asynchronously(langchain: Any, text_server: Server) -> None:
    known = {"model": "shout", "base_url": f"{text_server.url}/v1", "api_key": "any", "timeout": PATIENCE, "max_retries": 0}

    async def every() -> None:  # in one loop: all of its clients share connections
        for make in (langchain.ChatOpenAI, langchain.OpenAI):
            model = make(**known)
            for asked, text in ENDS:
                assert text_of(await model.ainvoke(PROMPT, **asked)) == text
                assert "".join([text_of(piece) async for piece in model.astream(PROMPT, **asked)]) == text

    asyncio.run(asyncio.wait_for(every(), PATIENCE))


def test_prompts_of_a_batch_end_each_at_its_own_place(model: Any) -> None:
    answers = model.batch([PROMPT, "six seven"], stop=["EVEN", "WO"])
    assert [text_of(answer) for answer in answers] == ["ONE T", "SIX S"]


@pytest.mark.by_default
def test_a_chat_says_why_it_has_ended(langchain: Any, text_server: Server) -> None:
    chat = langchain.ChatOpenAI(model="shout", base_url=f"{text_server.url}/v1", api_key="any", max_retries=0)
    for asked, reason in (({"stop": ["E FO"]}, "stop"), ({"max_tokens": 2}, "length"), ({}, "stop")):
        assert chat.invoke(PROMPT, **asked).response_metadata["finish_reason"] == reason
        *_, last = [piece for piece in chat.stream(PROMPT, **asked) if piece.response_metadata.get("finish_reason")]
        assert last.response_metadata["finish_reason"] == reason


# ---- usage


@pytest.fixture
def completions(langchain: Any, text_server: Server) -> Make:
    """completions(model, ...) is an OpenAI, which calls /v1/completions."""

    def make(model: str, **options: Any) -> Any:
        return langchain.OpenAI(model=model, **_known(text_server), **options)

    return make


@pytest.fixture
def chats(langchain: Any, text_server: Server) -> Make:
    """chats(model, ...) is a ChatOpenAI, which calls /v1/chat/completions."""

    def make(model: str, **options: Any) -> Any:
        return langchain.ChatOpenAI(model=model, **_known(text_server), **options)

    return make


def _known(server: Server) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "any", "timeout": PATIENCE, "max_retries": 0}


PLAIN = "words"
"""A plain generator, which does not say how many tokens its prompt has."""


@pytest.mark.parametrize(("model", "said", "prompt_tokens"), [(PLAIN, " one two", 0), ("counted", " 0 1", 2)])
def test_a_completion(completions: Make, model: str, said: str, prompt_tokens: int) -> None:
    client = completions(model, max_tokens=2)
    assert within_patience(lambda: client.invoke("one two")) == said
    result = within_patience(lambda: client.generate(["one two", "one two"]))
    assert [texts[0].text for texts in result.generations] == [said, said]
    usage = {"prompt_tokens": 2 * prompt_tokens, "completion_tokens": 4, "total_tokens": 2 * prompt_tokens + 4}
    assert result.llm_output["token_usage"] == usage


@pytest.mark.parametrize("model", [PLAIN, "counted", "lm"])
def test_a_completion_in_a_stream_is_the_whole_one(completions: Make, model: str) -> None:
    whole = completions(model, max_tokens=4, temperature=0)
    pieces = within_patience(lambda: list(whole.stream("one two")))
    assert "".join(pieces) == within_patience(lambda: whole.invoke("one two"))
    assert len(pieces) > 1


@pytest.mark.parametrize(("model", "said", "counts"), [(PLAIN, " one two", (0, 2)), ("counted", " 0 1", (2, 2))])
def test_a_chat_counts_its_tokens(chats: Make, model: str, said: str, counts: tuple[int, int]) -> None:
    answer = within_patience(lambda: chats(model, max_tokens=2).invoke("one two"))
    assert answer.content == said
    assert (answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"]) == counts


@pytest.mark.parametrize(("model", "said", "counts"), [(PLAIN, " one two", (0, 2)), ("counted", " 0 1", (2, 2))])
@pytest.mark.parametrize("stream_usage", [False, True])
def test_a_chat_in_a_stream(chats: Make, model: str, said: str, counts: tuple[int, int], stream_usage: bool) -> None:
    chat = chats(model, max_tokens=2, stream_usage=stream_usage)
    pieces = within_patience(lambda: list(chat.stream("one two")))
    whole = sum(pieces[1:], pieces[0])
    assert whole.content == said
    if stream_usage:
        assert (whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"]) == counts
    else:
        assert whole.usage_metadata is None
