"""Characters that are spread over tokens: whole on every wire, and their bytes in OpenAI's log-probabilities."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.config import Config, LMIConfig
from models.messages import FinishReason, Prompt, Token, TopToken
from tests.gateway.dialects.text.test_lmi_forms import ask, text_spec
from tests.gateway.dialects.text.text_wires import WAYS, Asked, events_in
from tests.gateway.promises import serving

TEXT = "né 😀€!"
BYTES = [bytes([byte]) for byte in TEXT.encode()]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def bytewise(prompt: Prompt) -> AsyncIterator[Token]:
    """Each byte of the text is a token."""
    for number, data in enumerate(BYTES):
        top = (TopToken(text="\ufffd", data=data, id=number, log_prob=-0.5),)[: prompt.parameters.top_n_tokens]
        yield Token(text="", data=data, id=number, log_prob=-0.5, top=top)


async def shown(prompt: Prompt) -> AsyncIterator[Token]:
    """Tokens of `bytewise` with the text that a tokenizer decodes of each byte alone, as authors write it first."""
    async for token in bytewise(prompt):
        yield Token(text=token.data.decode(errors="replace"), data=token.data, id=token.id, log_prob=-0.5, top=token.top)


async def late(prompt: Prompt) -> AsyncIterator[Token]:
    """Words first, and then bytes."""
    yield Token(text="n", id=0, log_prob=-0.5)
    for number, data in enumerate(BYTES[1:], 1):
        yield Token(text="", data=data, id=number, log_prob=-0.5)


@pytest.mark.parametrize(("way", "kind"), [(name, kind) for name, way in WAYS.items() for kind in way.kinds])
@pytest.mark.parametrize("model", [bytewise, shown, late])
async def test_a_text_of_bytes_is_whole_on_every_wire(way: str, kind: str, model: Any) -> None:
    found = WAYS[way]
    async with serving(text_spec(model, **found.spec), config=Config(lmi=LMIConfig(**found.lmi))) as house:
        told = await found.ask(house, found.path, kind, Asked("x"))
        assert told.text == TEXT
        if told.pieces is not None:
            assert list(told.pieces) == list(TEXT)
        assert told.tokens in (None, len(BYTES))
        cut = await found.ask(house, found.path, kind, Asked("x", stop=["😀"], included=False))
        assert cut.text == "né "
        half = await found.ask(house, found.path, kind, Asked("x", most=2))
        assert half.text == "n\ufffd"


async def entries_of(house: Any, stream: bool, **more: Any) -> tuple[list[Any], list[str]]:
    """The entries of a chat's log-probabilities, and of a stream the text of the chunk of each."""
    asked = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1, "stream": stream, **more}
    status, _, body = await ask(house, CHAT, asked)
    assert status == 200
    if not stream:
        (choice,) = json.loads(body)["choices"]
        return choice["logprobs"]["content"], []
    choices = [choice for chunk in events_in(body) for choice in chunk["choices"] if choice["logprobs"]]
    return [entry for c in choices for entry in c["logprobs"]["content"]], [c["delta"]["content"] for c in choices]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", [bytewise, shown])
async def test_the_bytes_of_all_tokens_are_those_of_the_text(model: Any, stream: bool, autojump_clock: Any) -> None:
    async with serving(text_spec(model)) as house:
        entries, texts = await entries_of(house, stream)
        assert [bytes(entry["bytes"]) for entry in entries] == BYTES
        assert [bytes(entry["top_logprobs"][0]["bytes"]) for entry in entries] == BYTES
        assert [entry["token"] for entry in entries] == [data.decode(errors="replace") for data in BYTES]
        if stream:
            assert texts == ["n", "", "é", " ", "", "", "", "😀", "", "", "€", "!"]


async def test_a_token_that_only_goes_on_with_a_character_has_no_chunk(autojump_clock: Any) -> None:
    async with serving(text_spec(bytewise)) as house:
        for path, asked in ((CHAT, {"messages": [{"role": "user", "content": "x"}]}), (COMPLETIONS, {"prompt": "x"})):
            asked = {**asked, "stream": True, "stream_options": {"include_usage": True}}
            chunks = events_in((await ask(house, path, asked))[2])
            texts = [c.get("text", c.get("delta", {}).get("content")) for chunk in chunks for c in chunk["choices"]]
            assert [text for text in texts if text] == list(TEXT)
            assert len(texts) <= len(TEXT) + 2  # the role, and the reason
            assert chunks[-1]["usage"]["completion_tokens"] == len(BYTES)


async def test_where_each_token_stands_in_the_text_of_a_completion(autojump_clock: Any) -> None:
    async with serving(text_spec(bytewise)) as house:
        body = (await ask(house, COMPLETIONS, {"prompt": "x", "logprobs": 0}))[2]
        (choice,) = json.loads(body)["choices"]
        assert choice["text"] == TEXT
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3, 3, 3, 3, 4, 4, 4, 5]
        assert choice["logprobs"]["tokens"] == [data.decode(errors="replace") for data in BYTES]


async def holds_back(prompt: Prompt) -> AsyncIterator[Token]:
    for text in ("a", "b", "c"):
        yield Token(text=text, log_prob=-0.5)
    yield Token(text="", special=True, log_prob=-0.5, finish=FinishReason.EOS_TOKEN)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "tokens"), [("bx", "abc"), ("bcd", "abc"), ("bc", "abc"), (["a", "b"], "a")])
async def test_a_token_whose_text_is_held_back_is_reported_as_what_it_is(
    stop: str | list[str], tokens: str, stream: bool, autojump_clock: Any
) -> None:
    async with serving(text_spec(holds_back)) as house:
        entries, _ = await entries_of(house, stream, stop=stop)
        assert [(entry["token"], bytes(entry["bytes"])) for entry in entries] == [(t, t.encode()) for t in tokens]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("special", [False, True])
async def test_a_token_without_text_is_not_reported_with_what_others_have_held_back(
    special: bool, stream: bool, autojump_clock: Any
) -> None:
    async def silent(prompt: Prompt) -> AsyncIterator[Token]:
        yield Token(text="ab", log_prob=-0.5)
        yield Token(text="", special=special, log_prob=-0.5, finish=FinishReason.EOS_TOKEN)

    async with serving(text_spec(silent)) as house:
        entries, _ = await entries_of(house, stream, stop="bc")
        reported = [("ab", [97, 98]), *([] if special else [("", None)])]
        assert [(entry["token"], entry["bytes"]) for entry in entries] == reported
