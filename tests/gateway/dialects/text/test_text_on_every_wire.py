"""One text model on every wire: with one seed, what each wire carries of ids, texts and log-probabilities is the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import trio

from gateway.client import Peer
from models.formatters import TextGenerationOutput
from models.library.lm.model import LanguageModel
from models.messages import GenerationParameters, Prompt, Token
from protocols.events import Close, Frame, Opcode
from tests.gateway.dialects.text.test_lmi_forms import KINDS, ask, lmi, parts_of, text_spec
from tests.gateway.dialects.text.text_wires import bidi_parts, events_in
from tests.gateway.promises import House, serving

PROMPT = "Return the number of "
SAMPLED: dict[str, Any] = {"do_sample": True, "seed": 7, "temperature": 0.8, "top_k": 40, "top_p": 0.95}
LENGTH = 24


@cache
def model() -> LanguageModel:
    return LanguageModel.load()


@cache
def expected(prompt: str = PROMPT) -> tuple[Token, ...]:
    """The model's tokens, asked directly."""
    parameters = GenerationParameters(max_new_tokens=LENGTH, **SAMPLED)
    return tuple(model().generate(model().encode(prompt), parameters))


def text_of(prompt: str = PROMPT) -> str:
    return "".join(token.text for token in expected(prompt))


@dataclass(frozen=True)
class Heard:
    """The fields of an answer that a wire carried, each None if the wire has no place for it."""

    text: str
    pieces: list[str] | None = None
    """The texts of the tokens, those that have one."""
    ids: list[int] | None = None
    log_probs: list[float] | None = None


def heard_of(tokens: list[dict[str, Any]], text: str, log_prob: str = "log_prob") -> Heard:
    """Tokens as LMI's and TGI's objects have them."""
    pieces = [token["text"] for token in tokens if token["text"]]
    return Heard(text, pieces, [token["id"] for token in tokens], [token[log_prob] for token in tokens])


# -- each wire's own way to ask for the same ---------------------------------------------------------------------------

ASKED = {"inputs": PROMPT, "parameters": {**SAMPLED, "max_new_tokens": LENGTH, "details": True}}
OPENAI = {"seed": 7, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "max_tokens": LENGTH}
CHAT = {"messages": [{"role": "system", "content": PROMPT}], **OPENAI}


async def document(house: House, path: str, kind: str) -> Heard:
    _, _, body = await ask(house, path, ASKED, kind=kind)
    answer = json.loads(body)
    return heard_of(answer["details"]["tokens"], answer["generated_text"])


async def lines(house: House, path: str, kind: str, wrapped: bool = False) -> Heard:
    _, _, body = await ask(house, path, {**ASKED, "stream": True}, kind=kind)
    answers = [json.loads(line) for line in (b"".join(parts_of(body)) if wrapped else body).splitlines()]
    return heard_of([answer["token"] for answer in answers], answers[-1]["generated_text"])


async def streamed(house: House, path: str, kind: str) -> Heard:
    return await lines(house, path, kind, wrapped=True)


async def sse(house: House, path: str, kind: str) -> Heard:
    asked = {"inputs": PROMPT, "parameters": {**ASKED["parameters"], "output_formatter": "sse"}}  # type: ignore[dict-item]
    events = events_in((await ask(house, path, asked, kind=kind))[2])
    return heard_of([event["token"] for event in events], events[-1]["generated_text"])


async def tgi(house: House, path: str, kind: str) -> Heard:
    (answer,) = json.loads((await ask(house, path, ASKED, kind=kind))[2])
    return heard_of(answer["details"]["tokens"], answer["generated_text"], "logprob")


async def tgi_sse(house: House, path: str, kind: str) -> Heard:
    events = events_in((await ask(house, path, {**ASKED, "stream": True}, kind=kind))[2])
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    return heard_of([event["token"] for event in events], events[-1]["generated_text"], "logprob")


async def dynamic(house: House, path: str, kind: str) -> Heard:
    _, _, body = await ask(house, path, ASKED, kind=kind)
    return Heard(json.loads(body)[0]["generated_text"])


async def dynamic_lines(house: House, path: str, kind: str) -> Heard:
    _, _, body = await ask(house, path, {**ASKED, "inputs": [PROMPT]}, kind=kind)
    pieces = [json.loads(line)["outputs"][0] for line in body.splitlines()]
    return Heard("".join(pieces), [piece for piece in pieces if piece])


def reported(choices: list[dict[str, Any]], text: str) -> Heard:
    """A chat's log-probabilities: they have no ids, and those of special tokens only where these are shown."""
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    return Heard(text, [t["token"] for t in tokens if t["token"]], None, [t["logprob"] for t in tokens])


async def chat(house: House, path: str, kind: str) -> Heard:
    (choice,) = json.loads((await ask(house, path, {**CHAT, "logprobs": True}, kind=kind))[2])["choices"]
    return reported([choice], choice["message"]["content"])


async def chat_stream(house: House, path: str, kind: str) -> Heard:
    _, _, body = await ask(house, path, {**CHAT, "logprobs": True, "stream": True}, kind=kind)
    choices = [choice for event in events_in(body) for choice in event["choices"]]
    return reported(choices, "".join(choice["delta"].get("content", "") for choice in choices))


async def completion(house: House, path: str, kind: str) -> Heard:
    (choice,) = json.loads((await ask(house, path, {"prompt": PROMPT, "logprobs": 0, **OPENAI}, kind=kind))[2])["choices"]
    report = choice["logprobs"]
    return Heard(choice["text"], [piece for piece in report["tokens"] if piece], None, report["token_logprobs"])


async def generate(house: House, path: str, kind: str) -> Heard:
    asked = {"text_input": PROMPT, "max_new_tokens": LENGTH, **SAMPLED}
    return Heard(json.loads((await ask(house, path, asked, kind=kind))[2])["text_output"])


async def generate_stream(house: House, path: str, kind: str) -> Heard:
    asked = {"text_input": PROMPT, "parameters": {"max_new_tokens": LENGTH, **SAMPLED}}
    pieces = [event["text_output"] for event in events_in((await ask(house, path, asked, kind=kind))[2])]
    return Heard("".join(pieces), [piece for piece in pieces if piece])


Way = Callable[[House, str, str], Awaitable[Heard]]
WAYS: dict[str, tuple[Way, str, dict[str, Any]]] = {
    "json": (document, "/predictions/m", {}),
    "json-invocations": (document, "/invocations", {}),
    "json-container": (document, "/models/m/invoke", {}),
    "jsonlines": (lines, "/predictions/m", {}),
    "sse": (sse, "/invocations", {}),
    "tgi": (tgi, "/invocations", {"tgi_compat": True}),
    "tgi-sse": (tgi_sse, "/predictions/m", {"tgi_compat": True}),
    "dynamic": (dynamic, "/predictions/m", {"rolling_batch": "disable"}),
    "dynamic-lines": (dynamic_lines, "/invocations", {"rolling_batch": "disable", "enable_streaming": True}),
    "InvokeEndpoint": (document, "/endpoints/m/invocations", {}),
    "InvokeEndpoint-lines": (lines, "/endpoints/m/invocations", {}),
    "InvokeEndpointWithResponseStream": (streamed, "/endpoints/m/invocations-response-stream", {}),
    "chat": (chat, "/v1/chat/completions", {}),
    "chat-stream": (chat_stream, "/v1/chat/completions", {}),
    "chat-invocations": (chat_stream, "/invocations", {}),
    "completions": (completion, "/v1/completions", {}),
    "generate": (generate, "/v2/models/m/generate", {}),
    "generate_stream": (generate_stream, "/v2/models/m/generate_stream", {}),
}


@asynccontextmanager
async def served(**configured: Any) -> AsyncIterator[House]:
    def said(messages: Any) -> str:
        return "".join(message.content for message in messages)

    # a chat's prompt is then the same as everyone's
    async with serving(text_spec(model(), chat_template=said), config=lmi(**configured)) as house:
        yield house


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
async def test_every_wire_carries_the_same_tokens(way: str, kind: str, autojump_clock: Any) -> None:
    asking, path, configured = WAYS[way]
    tokens = expected()
    async with served(**configured) as house:
        heard = await asking(house, path, kind)
        assert heard.text == text_of()
        if heard.pieces is not None:
            assert heard.pieces == [token.text for token in tokens if token.text]
        if heard.ids is not None:
            assert heard.ids == [token.id for token in tokens]
        if heard.log_probs is not None:  # to the last digit
            shown = tokens if heard.ids is not None else [token for token in tokens if not token.special]
            assert heard.log_probs == [token.log_prob for token in shown]
        assert house.endings == {"complete": 1}


def test_the_model_says_something_to_compare() -> None:
    tokens = expected()
    assert len(tokens) == LENGTH
    assert len({token.id for token in tokens}) > 8
    greedy = model().generate(model().encode(PROMPT), GenerationParameters(max_new_tokens=LENGTH))
    assert [token.id for token in greedy] != [token.id for token in tokens]


# -- the wires of sessions -----------------------------------------------------------------------------------------------

PROMPTS = (PROMPT, "Raise an error if ", "é")


def as_part(prompt: str) -> bytes:
    return json.dumps({"inputs": prompt, "parameters": {**SAMPLED, "max_new_tokens": LENGTH}}).encode()


def answers_in(parts: list[bytes]) -> list[list[str]]:
    """An empty part closes each answer."""
    answers: list[list[str]] = [[]]
    for part in parts:
        if part:
            answers[-1].append(part.decode())
        else:
            answers.append([])
    assert answers.pop() == []
    return answers


def check(answers: list[list[str]]) -> None:
    assert answers == [[token.text for token in expected(prompt) if token.text] for prompt in PROMPTS]


async def test_several_prompts_in_one_bidirectional_stream(autojump_clock: Any) -> None:
    async with served() as house:
        asked = [as_part(prompt) for prompt in PROMPTS]
        parts = await bidi_parts(house, "/endpoints/m/invocations-bidirectional-stream", "http2", asked)
        check(answers_in(parts))


async def conversation(peer: Peer) -> AsyncIterator[bytes]:
    """The frames of a WebSocket, to its end."""
    while True:
        match await peer.next_event():
            case Frame(data=data):
                yield bytes(data)
            case Close(code=code):
                assert code == 1000
                return


async def test_several_prompts_over_the_containers_websocket(autojump_clock: Any) -> None:
    async with served() as house:
        peer = await house.memory.websocket("/models/m/invocations-bidirectional-stream")
        for number, prompt in enumerate(PROMPTS):
            await peer.send(Frame(opcode=(Opcode.TEXT, Opcode.BINARY)[number % 2], fin=True, data=as_part(prompt)))
        parts: list[bytes] = []
        frames = conversation(peer)
        while parts.count(b"") < len(PROMPTS):
            parts.append(await anext(frames))
        check(answers_in(parts))
        await peer.send(Close(code=1000))
        assert [frame async for frame in frames] == []
        peer.close()


# -- several at once -----------------------------------------------------------------------------------------------------


async def test_all_wires_at_once_carry_what_each_carries_alone(autojump_clock: Any) -> None:
    async with served() as house, trio.open_nursery() as nursery:

        async def one(way: str, kind: str) -> None:
            asking, path, configured = WAYS[way]
            if not configured:
                assert (await asking(house, path, kind)).text == text_of(), way

        for way in WAYS:
            for kind in KINDS:
                nursery.start_soon(one, way, kind)


@pytest.mark.parametrize("n", [2, 3])
async def test_sequences_are_the_same_in_lmis_form_and_openais(n: int, autojump_clock: Any) -> None:
    parameters = GenerationParameters(max_new_tokens=LENGTH, n=n, **SAMPLED)
    ids = model().encode(PROMPT)
    alone = ["".join(token.text for token in model().generate(ids, parameters, sequence)) for sequence in range(n)]
    assert len(set(alone)) == n
    async with served() as house:
        asked = {**ASKED, "parameters": {**SAMPLED, "max_new_tokens": LENGTH, "n": n}}
        answer = json.loads((await ask(house, "/predictions/m", asked))[2])
        others = [other["generated_text"] for other in answer["details"]["best_of_sequences"]]
        assert [answer["generated_text"], *others] == alone
        for path, request in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": PROMPT, **OPENAI})):
            choices = json.loads((await ask(house, path, {**request, "n": n}))[2])["choices"]
            assert [choice.get("text") or choice["message"]["content"] for choice in choices] == alone


async def broken(prompt: Prompt) -> AsyncIterator[str]:
    """Half of a surrogate pair, which no UTF-8 has."""
    yield "a\ud800b"


@pytest.mark.parametrize("way", WAYS)
async def test_half_a_character_is_the_replacement_character_on_every_wire(way: str, autojump_clock: Any) -> None:
    asking, path, configured = WAYS[way]
    async with serving(text_spec(broken), config=lmi(**configured)) as house:
        assert (await asking(house, path, "http1")).text == "a\ufffdb"


async def test_half_a_character_is_the_replacement_character_in_a_formatters_text_too(autojump_clock: Any) -> None:
    def repeats(output: TextGenerationOutput) -> str:
        return output.sequences[0].get_next_token()[0].text

    async with serving(text_spec(broken, output_formatter=repeats)) as house:
        assert (await ask(house, "/predictions/m", {"inputs": "x"}))[2] == "a\ufffdb".encode()


async def test_the_prompts_tokens_are_counted_alike(autojump_clock: Any) -> None:
    count = len(model().encode(PROMPT))
    usage = {"prompt_tokens": count, "completion_tokens": LENGTH, "total_tokens": count + LENGTH}
    async with served() as house:
        for path, asked in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": PROMPT, **OPENAI})):
            assert json.loads((await ask(house, path, asked))[2])["usage"] == usage
            stream = {**asked, "stream": True, "stream_options": {"include_usage": True}}
            assert events_in((await ask(house, path, stream))[2])[-1]["usage"] == usage
    async with served(tgi_compat=True) as house:
        last = events_in((await ask(house, "/invocations", {**ASKED, "stream": True}))[2])[-1]
        assert (last["details"]["input_length"], last["details"]["generated_tokens"]) == (count, LENGTH)


async def test_a_stop_sequence_ends_every_wires_text_at_the_same_place(autojump_clock: Any) -> None:
    whole = text_of()
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    until = whole[: whole.index(stop)]
    async with served() as house:
        parameters = {**SAMPLED, "max_new_tokens": LENGTH, "stop_sequences": [stop]}
        answer = json.loads((await ask(house, "/predictions/m", {"inputs": PROMPT, "parameters": parameters}))[2])
        assert answer["generated_text"] == until + stop  # LMI's text is that of its tokens
        (choice,) = json.loads((await ask(house, "/v1/completions", {"prompt": PROMPT, **OPENAI, "stop": stop}))[2])[
            "choices"
        ]
        assert (choice["text"], choice["finish_reason"]) == (until, "stop")  # OpenAI's is without it
        asked = {"text_input": PROMPT, **parameters}
        assert json.loads((await ask(house, "/v2/models/m/generate", asked))[2])["text_output"] == until + stop
