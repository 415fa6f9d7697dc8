"""Models of text over gRPC, asked as the clients of Triton's LLM backends ask: text_input in, text_output out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import trio

from gateway.client import questions
from gateway.config import Config, HTTP2Config, LimitsConfig
from models.adapt import spec_of
from models.errors import ModelError
from models.messages import Part, Prompt, Token
from protocols.grpc.status import StatusCode
from protocols.v2.response import V2Answer
from tests.gateway.dialects.grpc.by_hand import EMPTY_FINAL, OK, ByHand, Status, infer
from tests.gateway.promises import KiB, serving

SEND_BUFFER, WINDOW = LimitsConfig().send_buffer, HTTP2Config().initial_window


class Words:
    """Says the words of its prompt, `pause` seconds apart, and fails at the word "fail"; keeps its prompts."""

    def __init__(self, pause: float = 0.0) -> None:
        self.prompts: list[Prompt] = []
        self.said = self.live = 0
        self.pause = pause

    async def __call__(self, prompt: Prompt) -> AsyncIterator[Token]:
        self.prompts.append(prompt)
        self.live += 1
        try:
            for number, word in enumerate(prompt.text.split()):
                if word == "fail":
                    raise ModelError("a bad word", status=422)
                await trio.sleep(self.pause)
                self.said += 1
                yield Token(id=number, text=f"{word} ")
        finally:
            self.live -= 1


def texts(*values: str | bytes, shape: tuple[int, ...] | None = None) -> Any:
    return np.array([v.encode() if isinstance(v, str) else v for v in values], object).reshape(shape or (len(values),))


def asking(prompt: str | None = "one two three", model: str = "words", **how: Any) -> bytes:
    """A request of a model of text, as a message in the body; members that are arrays are inputs."""
    request = {name: how.pop(name) for name in ("id", "parameters") if name in how}
    inputs = {} if prompt is None else {"text_input": texts(prompt)}
    return questions.grpc_request(inputs | how, model, **request)


def text_of(answer: V2Answer) -> str:
    (output,) = answer.outputs
    assert (output.name, output.datatype, output.array.shape) == ("text_output", "BYTES", (1,))
    return bytes(output.array.array()[0] if hasattr(output.array, "array") else output.array[0]).decode()


async def test_all_of_a_text_comes_in_one_answer() -> None:
    words = Words()
    async with serving(spec_of(words, "words")) as house:
        for message in (
            asking(id="7"),
            asking(None, id="7", text_input=texts("one two three", shape=(1, 1))),
            asking(id="7", stream=np.array([False]), exclude_input_in_output=np.array([[True]])),
        ):
            answer = await infer(house, message)
            assert isinstance(answer, V2Answer), answer
            assert (answer.model_name, answer.id, text_of(answer)) == ("words", "7", "one two three ")
        answer = await infer(house, asking(exclude_input_in_output=np.array([False])))
        assert isinstance(answer, V2Answer)
        assert text_of(answer) == "one two threeone two three "
        assert house.endings == {"complete": 4}


async def test_what_is_asked_beside_the_text_are_its_parameters() -> None:
    words = Words()
    async with serving(spec_of(words, "words")) as house:
        answer = await infer(
            house,
            asking(
                max_new_tokens=np.array([[2]], np.int32),
                temperature=np.array([0.5], np.float32),
                stop_sequences=texts("never", "three"),
                parameters={"seed": 7},
                sampling_parameters=texts(json.dumps({"top_p": "0.25", "top_k": 5})),  # as vLLM's client writes it
            ),
        )
        assert isinstance(answer, V2Answer), answer
        assert text_of(answer) == "one two "
        (prompt,) = words.prompts
        asked = prompt.parameters
        assert (asked.max_new_tokens, asked.temperature, asked.top_p, asked.top_k, asked.seed) == (2, 0.5, 0.25, 5, 7)
        assert list(asked.stop_sequences) == ["never", "three"]


INVALID, EXHAUSTED = StatusCode.INVALID_ARGUMENT, StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("message", "code", "says"),
    [
        (asking(None, x=np.zeros(1)), INVALID, "an input 'text_input': expected BYTES of one element"),
        (asking(None, text_input=texts("a", "b")), INVALID, "expected BYTES of one element"),
        (asking(""), INVALID, "expected BYTES of one element that is not empty"),
        (asking(None, text_input=np.zeros(1)), INVALID, "expected BYTES of one element"),
        (asking(None, text_input=texts(b"\xff")), INVALID, "input 'text_input': its elements are texts"),
        (asking(stream=np.array([1])), INVALID, "input 'stream': expected one BOOL"),
        (asking(stream=np.array([True]), streaming=np.array([False])), INVALID, "'stream' and 'streaming' are two names"),
        (asking(exclude_input_in_output=np.array([1])), INVALID, "exclude_input_in_output: expected true or false"),
        (asking(stream=np.array([True])), INVALID, "call ModelStreamInfer"),
        (asking(temperature=texts("warm")), INVALID, "temperature"),
        (asking(seed=np.array([1]), parameters={"seed": 2}), INVALID, "'seed' is there twice"),
        (asking(seed=np.array([1]), sampling_parameters=texts('{"seed": 1}')), INVALID, "'seed' is there twice"),
        (asking(sampling_parameters=texts("{")), INVALID, "sampling_parameters"),
        (asking(sampling_parameters=texts("[1]")), INVALID, "must be a JSON object"),
        (asking(sampling_parameters=np.array([1])), INVALID, "sampling_parameters"),
        (asking(sampling_parameters=texts('{"temperature": "' + "[" * 20_000 + '"}')), INVALID, "temperature"),
        (asking(sampling_parameters=texts("[" * 20_000)), INVALID, "sampling_parameters"),
        (asking(beam_width=np.array([2], np.int32)), INVALID, "parameters.beam_width: expected 1"),
        (asking(n=np.array([2])), INVALID, "parameters.n: expected 1"),
        (asking(max_new_tokens=np.array([10**6])), INVALID, "limits.max_new_tokens"),
        (asking("x" * 40 * KiB), EXHAUSTED, "limits.text_json"),
        (asking("fail"), INVALID, "a bad word"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_a_model_of_text_cannot_be_asked_is_refused_and_names_it(
    message: bytes, code: StatusCode, says: str, streamed: bool
) -> None:
    words = Words()
    config = Config(limits=LimitsConfig(text_json=32 * KiB, max_new_tokens=1000))
    async with serving(spec_of(words, "words"), config=config) as house:
        if not streamed:
            answer = await infer(house, message)
            assert isinstance(answer, Status), answer
            assert answer.code is code
            assert says in answer.text
        elif "ModelStreamInfer" not in says:
            call = await ByHand(house.line("http2")).open()
            await call.say(message)
            found = await call.response()
            assert says in found.error
            assert found.final
            await call.end()
            assert await call.rest() == ([], OK)
        assert len(words.prompts) == (says == "a bad word" and (not streamed or 1))
        await house.still()
        assert house.gateway.budget.used == 0


async def test_a_stream_has_a_response_for_each_token() -> None:
    async with serving(spec_of(Words(), "words")) as house:
        call = await ByHand(house.line("http2")).open()
        await call.say(asking("one two three", id="a", stream=np.array([True]), parameters={EMPTY_FINAL: True}))
        for word in ("one ", "two ", "three "):
            found = await call.response()
            assert (found.answer.id, text_of(found.answer), found.final) == ("a", word, False)
        found = await call.response()
        assert (found.answer.id, found.answer.outputs, found.final) == ("a", (), True)
        await call.say(asking("four five", id="b"))
        found = await call.response()
        assert (found.answer.id, text_of(found.answer), found.final) == ("b", "four five ", True)
        await call.end()
        assert await call.rest() == ([], OK)


@pytest.mark.parametrize("name", ["stream", "streaming"])
async def test_the_first_response_is_the_prompt_if_that_is_asked_for(name: str) -> None:
    with_prompt: dict[str, Any] = {name: np.array([True]), "exclude_input_in_output": np.array([False])}
    async with serving(spec_of(Words(), "words")) as house:
        call = await ByHand(house.line("http2")).open()
        await call.say(asking("one two", **with_prompt))
        assert [text_of((await call.response()).answer) for _ in range(3)] == ["one two", "one ", "two "]
        await call.say(asking(" ", **with_prompt))  # no words
        assert text_of((await call.response()).answer) == " "
        await call.end()
        assert await call.rest() == ([], OK)


async def test_texts_of_one_stream_are_made_side_by_side(autojump_clock: Any) -> None:
    async with serving(spec_of(Words(pause=1), "slow"), spec_of(Words(), "fast")) as house:
        call = await ByHand(house.line("http2")).open()
        await call.say(asking("a b", "slow", id="slow", stream=np.array([True])))
        await call.say(asking("c d fail", "fast", id="fast", stream=np.array([True])))
        heard = [await call.response() for _ in range(5)]
        assert [found.answer.id for found in heard] == ["fast", "fast", "fast", "slow", "slow"]
        assert heard[2].error == "a bad word"
        await call.end()
        assert await call.rest() == ([], OK)


async def test_text_that_was_held_back_is_said_at_the_end() -> None:
    async with serving(spec_of(Words(), "words")) as house:
        call = await ByHand(house.line("http2")).open()
        await call.say(asking("one two", stream=np.array([True]), stop_sequences=texts("two three")))
        assert text_of((await call.response()).answer) == "one "
        assert text_of((await call.response()).answer) == "two "
        await call.end()
        assert await call.rest() == ([], OK)


async def test_a_client_that_does_not_read_stops_the_text(autojump_clock: Any) -> None:
    words = Words()
    async with serving(spec_of(words, "words")) as house:
        call = await ByHand(house.line("http2")).open()
        await call.say(asking("word " * 20_000, stream=np.array([True]), max_new_tokens=np.array([20_000])))
        await call.line.read()
        await trio.sleep(20)
        said = words.said
        assert said <= (WINDOW + SEND_BUFFER) // 60
        await trio.sleep(5)
        assert words.said == said
        await call.leave()
        await house.still()
        assert words.live == 0


async def parts(part: Part) -> bytes:
    return bytes(part.data).upper()


async def test_a_model_of_parts_is_asked_by_text_too() -> None:
    async with serving(spec_of(parts, "parts")) as house:
        answer = await infer(house, asking("loud", "parts"))
        assert isinstance(answer, V2Answer), answer
        assert text_of(answer) == "LOUD"
