"""LMI's dynamic batch through the whole gateway: several prompts in one request, side by side in one slot, and one answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from gateway.config import Config
from models.errors import ModelError
from models.messages import Finish, FinishReason, Prompt, Token
from models.session import Session
from tests.gateway.dialects.text.test_lmi_forms import AT_EACH_ROUTE, KINDS, ROUTES, STREAM, ask, lmi, parts_of, text_spec
from tests.gateway.promises import CANCELLED, KiB, at_once, serving

SECRET = "the model's own business"


def batch(**changes: Any) -> Config:
    return lmi(rolling_batch="disable", **changes)


def streaming(**changes: Any) -> Config:
    return batch(enable_streaming=True, **changes)


def outputs_in(body: bytes) -> list[list[str]]:
    return [json.loads(line)["outputs"] for line in body.splitlines()]


def failure(message: str, code: int = 424) -> bytes:
    """To the byte as LMI prints it: spec section 1.8."""
    return b'{\n  "code":%d,\n  "message":"invoke handler failure",\n  "error":"%b"\n}' % (code, message.encode())


# -- golden bytes ------------------------------------------------------------------------------------------------------

GOLDEN: dict[str, tuple[Config, Any, str, bytes]] = {
    "one": (batch(), "How", "application/json", '[\n  {\n    "generated_text":"Deep Léarning"\n  }\n]'.encode()),
    "two": (
        batch(),
        ["How", "Why"],
        "application/json",
        '[\n  {\n    "generated_text":"Deep Léarning"\n  },\n  {\n    "generated_text":"Deep Léarning"\n  }\n]'.encode(),
    ),
    "stream": (
        streaming(),
        ["How", "Why"],
        "application/jsonlines",
        b'{"outputs": ["Deep ", "Deep "]}\n{"outputs": ["L\\u00e9arning", "L\\u00e9arning"]}\n{"outputs": ["", ""]}\n',
    ),
}


@pytest.mark.parametrize("form", GOLDEN)
@pytest.mark.parametrize(("kind", "route"), AT_EACH_ROUTE)
async def test_each_form_at_each_route_byte_by_byte(kind: str, route: str, form: str, autojump_clock: Any) -> None:
    config, inputs, content_type, text = GOLDEN[form]
    async with serving(text_spec(), config=config) as house:
        status, headers, body = await ask(house, route, {"inputs": inputs}, kind=kind)
        assert (status, headers["content-type"], body) == (200, content_type, text)
        if not route.startswith("/endpoints/"):
            assert headers["pragma"] == "no-cache"
        assert house.endings == {"complete": 1}


@pytest.mark.parametrize("form", GOLDEN)
async def test_the_platforms_stream_carries_the_same_bytes(form: str, autojump_clock: Any) -> None:
    config, inputs, content_type, text = GOLDEN[form]
    async with serving(text_spec(), config=config) as house:
        status, headers, body = await ask(house, STREAM, {"inputs": inputs}, kind="http2")
        assert (status, headers["x-amzn-sagemaker-content-type"]) == (200, content_type)
        assert b"".join(parts_of(body)) == text


async def test_a_model_may_be_served_so_by_its_own_options(autojump_clock: Any) -> None:
    options = {"rolling_batch": "disable", "enable_streaming": "huggingface"}
    async with serving(text_spec(options=options)) as house:
        _, headers, body = await ask(house, "/predictions/m", {"inputs": "How", "parameters": {"max_new_tokens": 1}})
        assert (headers["content-type"], body) == ("application/jsonlines", b'{"outputs": ["Deep "]}\n')


async def test_what_the_request_says_of_streams_counts_for_nothing(autojump_clock: Any) -> None:
    async with serving(text_spec(), config=batch()) as house:
        _, headers, _ = await ask(house, "/predictions/m", {"inputs": "How", "stream": True})
        assert headers["content-type"] == "application/json"


async def test_parameters_are_the_same_for_all_prompts_and_the_full_text_has_each_its_own(autojump_clock: Any) -> None:
    async def tells(prompt: Prompt) -> str:
        return f" {prompt.parameters.temperature:g}"

    async with serving(text_spec(tells), config=batch()) as house:
        asked = {"inputs": ["a", "b"], "parameters": {"temperature": 0.5, "return_full_text": True}}
        _, _, body = await ask(house, "/predictions/m", asked)
        assert json.loads(body) == [{"generated_text": "a 0.5"}, {"generated_text": "b 0.5"}]


@pytest.mark.parametrize("route", ROUTES)
async def test_a_chat_is_a_chat(route: str, autojump_clock: Any) -> None:
    async with serving(text_spec(), config=batch()) as house:
        _, _, body = await ask(house, route, {"messages": [{"role": "user", "content": "Hi"}]})
        assert json.loads(body)["choices"][0]["message"]["content"] == "Deep Léarning"


# -- side by side ------------------------------------------------------------------------------------------------------


async def test_prompts_are_generated_at_once_within_one_slot(autojump_clock: Any) -> None:
    together = trio.Event()
    prompts: list[str] = []

    async def meets(prompt: Prompt) -> str:
        prompts.append(prompt.text)
        if len(prompts) == 3:
            together.set()
        await together.wait()
        return prompt.text.upper()

    async with serving(text_spec(meets, capacity=1, queue=0), config=batch()) as house:
        with at_once():
            status, _, body = await ask(house, "/predictions/m", {"inputs": ["a", "b", "c"]})
        assert (status, [one["generated_text"] for one in json.loads(body)]) == (200, ["A", "B", "C"])


async def test_a_prompt_that_is_complete_leaves_its_place_on_the_lines_empty(autojump_clock: Any) -> None:
    async def letters(prompt: Prompt) -> AsyncIterator[str]:
        for letter in prompt.text:
            yield letter

    async with serving(text_spec(letters), config=streaming()) as house:
        _, _, body = await ask(house, "/predictions/m", {"inputs": ["ab", "c", "xyz"]})
        assert outputs_in(body) == [["a", "c", "x"], ["b", "", "y"], ["", "", "z"]]


async def test_prompts_that_wait_for_time_together_share_lines(autojump_clock: Any) -> None:
    async def timed(prompt: Prompt) -> AsyncIterator[str]:
        for number in range(3):
            await trio.sleep(1)
            yield f"{prompt.text}{number}"

    async with serving(text_spec(timed), config=streaming()) as house:
        _, _, body = await ask(house, "/predictions/m", {"inputs": ["a", "b"]})
        assert outputs_in(body) == [["a0", "b0"], ["a1", "b1"], ["a2", "b2"]]


async def test_a_token_leaves_when_it_is_made_and_waits_for_no_other_prompt(autojump_clock: Any) -> None:
    go = trio.Event()

    async def slow(prompt: Prompt) -> AsyncIterator[str]:
        if prompt.text == "slow":
            await go.wait()
        yield prompt.text
        await go.wait()
        yield "!"

    async with serving(text_spec(slow), config=streaming()) as house:
        line = house.line("http1")
        await line.send(*house.posted(1, "/predictions/m", b'{"inputs":["fast","slow"]}'))
        with at_once():
            assert bytes((await line.data(1)).buffers[0]) == b'{"outputs": ["fast", ""]}\n'
        go.set()
        rest = b"".join([bytes(event.buffers[0]) async for event in until_end(line)])
        columns = ["".join(column) for column in zip(*outputs_in(rest), strict=True)]
        assert columns == ["!", "slow!"]


async def until_end(line: Any) -> AsyncIterator[Any]:
    while type(event := await line.event(1)).__name__ == "Data":
        yield event


@pytest.mark.parametrize("config", [batch(), streaming()], ids=["document", "stream"])
async def test_each_prompt_ends_as_its_model_says_or_at_its_last_token(config: Config, autojump_clock: Any) -> None:
    async def various(session: Session[Prompt, Any]) -> None:
        prompt = await session.receive()
        await session.send(Token(text="prompt", prefill=True))  # the answer has no field for it
        await session.send(Token(text="a"))
        if prompt.text == "finish":
            await session.send(Finish(reason=FinishReason.EOS_TOKEN))
        elif prompt.text == "last":
            await session.send(Token(text="b", finish=FinishReason.STOP_SEQUENCE))
        while prompt.text != "return":
            await session.send(Token(text="c"))

    async with serving(text_spec(various), config=config) as house:
        asked = {"inputs": ["finish", "last", "return", "endless"], "parameters": {"max_new_tokens": 4}}
        status, headers, body = await ask(house, "/predictions/m", asked)
        if headers["content-type"] == "application/json":
            texts = [one["generated_text"] for one in json.loads(body)]
        else:
            texts = ["".join(column) for column in zip(*outputs_in(body), strict=True)]
        assert (status, texts) == (200, ["a", "ab", "a", "accc"])
        assert house.endings == {"complete": 1}


@pytest.mark.parametrize("config", [batch(), streaming()], ids=["document", "stream"])
async def test_a_model_that_makes_nothing_makes_empty_texts(config: Config, autojump_clock: Any) -> None:
    async def mute(prompt: Prompt) -> None:
        return None

    async with serving(text_spec(mute), config=config) as house:
        status, _, body = await ask(house, "/predictions/m", {"inputs": ["a", "b"]})
        assert status == 200
        assert body == b"" or json.loads(body) == [{"generated_text": ""}] * 2


# -- invalid requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "word"),
    [
        (b'{"inputs": "x",}', "JSON"),
        (b"[]", "body: expected an object"),
        ({}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": ["a", 3]}, "inputs[1]: expected a non-empty string, got 3"),
        ({"inputs": ["a"] * 5}, "at most 4 prompts (max_prompts), got an array of 5"),
        ({"inputs": "a", "parameters": None}, "parameters: expected an object, got nothing"),
        ({"inputs": "a", "parameters": {"top_p": 7}}, "parameters.top_p"),
        ({"inputs": "a", "parameters": {"n": 2}}, "parameters.n: expected 1 in a"),
    ],
)
async def test_it_is_424_in_the_words_of_a_dynamic_batch(document: Any, word: str, autojump_clock: Any) -> None:
    for config in (batch(max_prompts=4), streaming(max_prompts=4)):
        async with serving(text_spec(), config=config) as house:
            for route in ROUTES[:3]:
                status, headers, body = await ask(house, route, document)
                said = json.loads(body)
                assert (status, headers["content-type"]) == (424, "application/json")
                assert (list(said), said["code"]) == (["code", "message", "error"], 424)
                assert said["message"] == "invoke handler failure"
                assert word in said["error"]
            assert house.endings == {"refused": 3}


async def test_a_bad_request_byte_by_byte(autojump_clock: Any) -> None:
    async with serving(text_spec(), config=batch()) as house:
        _, _, body = await ask(house, "/predictions/m", {"inputs": 3})
        assert body == failure("inputs: expected a non-empty string, or an array of them, got 3")


async def test_what_the_model_does_not_support_is_refused(autojump_clock: Any) -> None:
    async with serving(text_spec(parameters=frozenset({"seed"})), config=batch(unsupported="refuse")) as house:
        asked = {"inputs": ["a", "b"], "parameters": {"seed": 1, "top_k": 3}}
        status, _, body = await ask(house, "/predictions/m", asked)
        assert (status, body) == (424, failure("parameters.top_k: model 'm' does not support it (lmi.unsupported)"))


# -- a generation that fails -------------------------------------------------------------------------------------------


class Failing:
    """Fails for the prompt "bad" after `after` tokens; other prompts go on for ever."""

    def __init__(self, after: int, error: Exception) -> None:
        self.after, self.error, self.live = after, error, 0

    async def __call__(self, session: Session[Prompt, Any]) -> None:
        self.live += 1
        try:
            prompt = await session.receive()
            for _ in range(self.after):
                await session.send(Token(text="a"))
            if prompt.text == "bad":
                await trio.sleep(1)
                raise self.error
            await trio.sleep_forever()
        finally:
            self.live -= 1


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ModelError("no such voice"), 424, "no such voice"),
        (ModelError("no such voice", status=422), 422, "no such voice"),
        (RuntimeError(SECRET), 424, "the model failed; incident"),
    ],
)
async def test_the_failure_of_one_prompt_is_the_answers_and_stops_the_others(
    error: Exception, status: int, message: str, after: int, autojump_clock: Any
) -> None:
    for config in (batch(), streaming()):
        model = Failing(after, error)
        async with serving(text_spec(model), config=config) as house:
            got, headers, body = await ask(house, "/predictions/m", {"inputs": ["good", "bad", "good"]})
            if after and config == streaming():
                assert (got, headers["content-type"]) == (200, "application/jsonlines")
                *lines, last = [json.loads(line) for line in body.splitlines()]
                assert body.endswith(b"\n")
                assert lines == [{"outputs": ["a", "a", "a"]}] * 2
                assert (last["code"], last["message"]) == (424, "invoke handler failure")
            else:
                assert (got, headers["content-type"]) == (status, "application/json")
                last = json.loads(body)
                assert (last["code"], last["message"]) == (status, "invoke handler failure")
            assert message in last["error"]
            assert SECRET.encode() not in body
            assert (model.live, house.endings) == (0, {"model-error": 1})


async def test_several_failures_at_once_are_the_first(autojump_clock: Any) -> None:
    async def all_fail(prompt: Prompt) -> str:
        raise ModelError(f"not {prompt.text[0]}")

    async with serving(text_spec(all_fail), config=batch()) as house:
        status, _, body = await ask(house, "/predictions/m", {"inputs": ["a1", "a2", "a3"]})
        assert (status, body) == (424, failure("not a"))
        assert house.endings == {"model-error": 1}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_that_fails_ends_well(kind: str, autojump_clock: Any) -> None:
    async with serving(text_spec(Failing(1, ModelError("no such voice"))), config=streaming()) as house:
        line = house.line(kind)
        _, _, body = await ask(house, "/predictions/m", {"inputs": ["bad", "good"]}, line=line)
        assert body == (
            b'{"outputs": ["a", "a"]}\n{"code": 424, "message": "invoke handler failure", "error": "no such voice"}\n'
        )
        if kind == "http1":
            assert line.transport.read.endswith(b"\r\n0\r\n\r\n")


async def test_the_platforms_stream_says_a_failure_as_an_event(autojump_clock: Any) -> None:
    async with serving(text_spec(Failing(1, ModelError("no such voice"))), config=streaming()) as house:
        _, _, body = await ask(house, STREAM, {"inputs": ["bad", "good"]})
        assert b'{"outputs": ["a", "a"]}\n' in body
        assert b"ModelStreamError" in body
        _, _, body = await ask(house, "/endpoints/m/invocations", {"inputs": ["bad", "good"]})
        assert json.loads(body.splitlines()[-1])["error"] == "no such voice"


@pytest.mark.parametrize("config", [batch(max_text=100), streaming(max_text=100)], ids=["document", "stream"])
async def test_a_text_over_the_bound_is_a_failure(config: Config, autojump_clock: Any) -> None:
    async def long(prompt: Prompt) -> AsyncIterator[str]:
        for size in (90, 101):
            yield "a" * size

    async with serving(text_spec(long), config=config) as house:
        status, _, body = await ask(house, "/predictions/m", {"inputs": ["x"]})
        assert status == (200 if config == streaming(max_text=100) else 424)
        assert b"at most 100 bytes (max_text)" in body
        assert house.endings == {"model-error": 1}


async def test_a_deadline_and_no_room_are_said_in_the_same_words(autojump_clock: Any) -> None:
    async def hangs(session: Session[Prompt, Any]) -> None:
        await session.receive()
        await session.send(Token(text="a"))
        await trio.sleep_forever()

    async with serving(text_spec(hangs, timeout=5, capacity=1, queue=0), config=streaming()) as house:
        line = house.line("http1")
        await line.send(*house.posted(1, "/predictions/m", b'{"inputs":["a","b"]}'))
        await house.still()
        status, headers, body = await ask(house, "/predictions/m", {"inputs": "x"})
        assert (status, headers["retry-after"], json.loads(body)["code"]) == (503, "1", 503)
        assert json.loads(body)["message"] == "invoke handler failure"
        assert "models.m.capacity" in json.loads(body)["error"]
        _, _, body = await line.peer.read_answer(1)
        assert body.splitlines()[0] == b'{"outputs": ["a", "a"]}'
        assert "models.m.timeout" in json.loads(body.splitlines()[-1])["error"]
        assert house.endings == {"refused": 1, "deadline": 1}


# -- the client ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [batch(), streaming()], ids=["document", "stream"])
@pytest.mark.parametrize("route", [*ROUTES, STREAM])
async def test_a_client_that_leaves_cancels_every_prompt(route: str, config: Config, autojump_clock: Any) -> None:
    model = Failing(1, RuntimeError("never"))
    async with serving(text_spec(model), config=config) as house:
        line = house.line("http2")
        await line.send(*house.posted(line.next_stream(), route, b'{"inputs":["a","b","c"]}'))
        await house.still()
        assert model.live == 3
        with at_once():
            line.peer.close()
            await house.still()
            assert (model.live, house.endings) == (0, CANCELLED)


@pytest.mark.parametrize("sore", ["ab", "a", ""])
async def test_prompts_that_raise_while_they_are_cancelled_end_their_exchange_alone(sore: str, autojump_clock: Any) -> None:
    async def raises(session: Session[Prompt, Any]) -> None:
        prompt = await session.receive()
        try:
            await trio.sleep_forever()
        finally:
            if prompt.text in sore:
                raise ModelError("let me be")

    async with serving(text_spec(raises), config=batch()) as house:
        gone, patient = house.line("http1"), house.line("http1")
        for line in (gone, patient):
            await line.send(*house.posted(1, "/predictions/m", b'{"inputs":["a","b"]}'))
        await house.still()
        gone.peer.close()
        await house.still()
        assert house.endings == CANCELLED
        assert house.connections == 1
        patient.peer.close()
        await house.still()
        assert house.endings == {"cancelled-by-client": 2}


@pytest.mark.parametrize("sore", ["ab", "a"])
async def test_at_a_deadline_too(sore: str, autojump_clock: Any) -> None:
    async def raises(session: Session[Prompt, Any]) -> None:
        prompt = await session.receive()
        try:
            await trio.sleep_forever()
        finally:
            if prompt.text in sore:
                raise ModelError("let me be")

    async with serving(text_spec(raises, timeout=5), config=batch()) as house:
        status, _, body = await ask(house, "/predictions/m", {"inputs": ["a", "b"]})
        assert (status, json.loads(body)["code"]) == (504, 504)
        assert house.endings == {"deadline": 1}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_does_not_read_stops_every_prompt_within_the_bound(kind: str, autojump_clock: Any) -> None:
    sent = 0

    async def counting(session: Session[Prompt, Any]) -> None:
        nonlocal sent
        await session.receive()
        while True:
            await session.send(Token(text="x" * 1000))
            sent += 1

    async with serving(text_spec(counting), config=streaming(), capacity=32 * KiB) as house:
        line = house.line(kind)
        stream = line.next_stream()
        asked = {"inputs": ["a", "b"], "parameters": {"max_new_tokens": 65536}}
        await line.send(*house.posted(stream, "/predictions/m", json.dumps(asked).encode()))
        await house.still()
        stopped = sent
        assert 64 <= stopped <= 110  # bounded by the send buffer (64 KiB) and the transport (32 KiB)
        await trio.sleep(20)
        assert sent == stopped
        line.peer.close()


async def test_a_hundred_prompts_in_step_share_their_lines(autojump_clock: Any) -> None:
    async with serving(text_spec(), config=streaming()) as house:
        _, _, body = await ask(house, "/predictions/m", {"inputs": ["x"] * 100})
        assert outputs_in(body) == [["Deep "] * 100, ["Léarning"] * 100, [""] * 100]
