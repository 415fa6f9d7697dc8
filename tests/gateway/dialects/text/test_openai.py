"""OpenAI's API through the whole gateway: chats and completions to the byte, LMI's own forms of a chat, and models."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

import protocols.lmi
from gateway.config import Config, OpenAIConfig
from gateway.version import version
from models.adapt import spec_of
from models.chat import ChatMessage
from models.errors import ModelError
from models.messages import Family, Finish, FinishReason, InferRequest, Part, Prompt, Token
from models.session import Session
from protocols import openai
from protocols.sse import ServerSentEvent, SSEDecoder
from tests.gateway.dialects.text.test_lmi_forms import AT_EACH_ROUTE, KINDS, ROUTES, STREAM, ask, lmi, parts_of, text_spec
from tests.gateway.promises import CANCELLED, DATE, House, KiB, at_once, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(autouse=True)
def a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixes the time of creation that answers carry."""
    monkeypatch.setattr("gateway.dialects.text.openai.time", SimpleNamespace(time=lambda: 1_700_000_000.9))


def events_in(body: bytes) -> list[Any]:
    """The chunks of a stream, which ends with [DONE]."""
    decoder, events = SSEDecoder(), []
    decoder.receive_data(body)
    while isinstance(event := decoder.next_event(), ServerSentEvent):
        events.append(bytes(event.data))
    assert events.pop() == b"[DONE]"
    return [json.loads(event) for event in events]


def texts_in(chunks: Sequence[Any]) -> dict[int, str]:
    """The text of each choice of a stream."""
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        said = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + said
    return texts


async def get(house: House, path: str, kind: str = "http1") -> tuple[int, Any]:
    status, headers, body = await house.ask(path, None, method=b"GET", line=house.line(kind))
    assert headers["content-type"] == "application/json"
    return status, json.loads(body)


# -- golden bytes ------------------------------------------------------------------------------------------------------

OF_US = f'"created":1700000000,"model":"m","system_fingerprint":"everywire-{version()}","choices":['
DOCUMENT = '{"id":"chatcmpl-boot1","object":"chat.completion",' + OF_US
CHUNK = 'data: {"id":"chatcmpl-boot1","object":"chat.completion.chunk",' + OF_US
TEXT = '{"id":"cmpl-boot1","object":"text_completion","created":1700000000,"model":"m","choices":['
USAGE = '"usage":{"prompt_tokens":2,"completion_tokens":%d,"total_tokens":%d}}'
DEEP = '{"token":"Deep ","logprob":-0.05,"bytes":[68,101,101,112,32]'
DARK = '{"token":"Dark ","logprob":-0.1,"bytes":[68,97,114,107,32]'
SPELLED = '{"token": "Deep ", "logprob": -0.05, "bytes": [68, 101, 101, 112, 32], "top_logprobs": []}'
LMI_HEAD = '{"id": "chatcmpl-boot1", "object": "chat.completion%s", "created": 1700000000, "choices": ['

CHATS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    # name: (lmi.output_formatter, request beside its messages, Content-Type, body)
    "document": (
        "",
        {},
        "application/json",
        DOCUMENT + '{"index":0,"message":{"role":"assistant","content":"Deep Léarning"},"logprobs":null,'
        '"finish_reason":"stop"}],' + USAGE % (3, 5),
    ),
    "log-probs": (
        "",
        {"max_tokens": 1, "logprobs": True, "top_logprobs": 2, "model": "m"},
        "application/json",
        DOCUMENT + '{"index":0,"message":{"role":"assistant","content":"Deep "},"logprobs":{"content":['
        + DEEP + ',"top_logprobs":[' + DEEP + "}," + DARK + '}]}]},"finish_reason":"length"}],' + USAGE % (1, 3),
    ),
    "two-choices": (
        "",
        {"max_completion_tokens": 1, "n": 2},
        "application/json",
        DOCUMENT + '{"index":0,"message":{"role":"assistant","content":"Deep "},"logprobs":null,"finish_reason":"length"},'
        '{"index":1,"message":{"role":"assistant","content":"Deep "},"logprobs":null,"finish_reason":"length"}],'
        + USAGE % (2, 4),
    ),
    "stream": (
        "",
        {"stream": True},
        "text/event-stream; charset=utf-8",
        CHUNK + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHUNK + '{"index":0,"delta":{"content":"Deep "},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHUNK + '{"index":0,"delta":{"content":"Léarning"},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHUNK + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n',
    ),
    "stream-usage": (
        "",
        {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 1},
        "text/event-stream; charset=utf-8",
        CHUNK + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}'
        "\n\n"
        + CHUNK + '{"index":0,"delta":{"content":"Deep "},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
        + CHUNK + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null}\n\n'
        + CHUNK + "]," + USAGE % (1, 3) + "\n\ndata: [DONE]\n\n",
    ),
    "json_chat": (
        "json_chat",
        {"stream": True},
        "application/json",
        LMI_HEAD % "" + '{"index": 0, "message": {"role": "assistant", "content": "Deep Léarning"}, "logprobs": null, '
        '"finish_reason": "eos_token"}], "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}}',
    ),
    "jsonlines_chat": (
        "jsonlines_chat",
        {"max_tokens": 1, "logprobs": True},
        "application/jsonlines",
        LMI_HEAD % ".chunk" + '{"index": 0, "delta": {"content": "Deep ", "role": "assistant"}, "logprobs": {"content": ['
        + SPELLED + ']}, "finish_reason": "length"}]}\n',
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [name for name, (formatter, *_) in CHATS.items() if not formatter])
async def test_each_chat_byte_by_byte(kind: str, form: str, autojump_clock: Any) -> None:
    _, asked, content_type, text = CHATS[form]
    async with serving(text_spec()) as house:
        status, headers, body = await ask(house, CHAT, {**SAID, **asked}, kind=kind)
        assert (status, headers["content-type"], headers["x-request-id"]) == (200, content_type, "boot1")
        assert body.decode() == text
        assert headers.get("cache-control") == (None if content_type == "application/json" else "no-cache")
        assert house.endings == {"complete": 1}


@pytest.mark.parametrize("form", CHATS)
@pytest.mark.parametrize(("kind", "route"), AT_EACH_ROUTE)
async def test_at_lmis_routes_messages_ask_for_a_chat(kind: str, route: str, form: str, autojump_clock: Any) -> None:
    formatter, asked, content_type, text = CHATS[form]
    async with serving(text_spec(), config=lmi(output_formatter=formatter)) as house:
        status, headers, body = await ask(house, route, {**SAID, **asked}, kind=kind)
        assert (status, headers["content-type"], body.decode()) == (200, content_type, text)


@pytest.mark.parametrize("form", CHATS)
async def test_the_platforms_stream_carries_the_same_bytes(form: str, autojump_clock: Any) -> None:
    formatter, asked, content_type, text = CHATS[form]
    async with serving(text_spec(options={"output_formatter": formatter})) as house:
        status, headers, body = await ask(house, STREAM, {**SAID, **asked}, kind="http2")
        assert (status, headers["x-amzn-sagemaker-content-type"]) == (200, content_type)
        assert b"".join(parts_of(body)).decode() == text


@pytest.mark.parametrize("formatter", ["json_chat", "jsonlines_chat", "jsonlines"])
async def test_at_openais_own_routes_its_clients_get_their_own_form(formatter: str, autojump_clock: Any) -> None:
    async with serving(text_spec(), config=lmi(output_formatter=formatter)) as house:
        assert (await ask(house, CHAT, SAID))[2].decode() == CHATS["document"][3]
        assert (await ask(house, CHAT, {**SAID, "stream": True}))[2].decode() == CHATS["stream"][3]


@pytest.mark.parametrize("formatter", ["json_chat", "jsonlines_chat"])
async def test_a_form_of_chats_is_none_of_prompts(formatter: str, autojump_clock: Any) -> None:
    async with serving(text_spec(), config=lmi(output_formatter=formatter)) as house:
        assert (await ask(house, "/invocations", {"inputs": "x"}))[1]["content-type"] == "application/json"
        assert (await ask(house, "/invocations", {"inputs": "x", "stream": True}))[1][
            "content-type"
        ] == "application/jsonlines"


async def test_a_stream_over_http1_byte_by_byte(autojump_clock: Any) -> None:
    async with serving(text_spec()) as house:
        line = house.line("http1")
        await ask(house, CHAT, {**SAID, "stream": True, "max_tokens": 1}, line=line)
        head, _, rest = bytes(line.transport.read).partition(b"\r\n\r\n")
        assert head == (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
            b"x-request-id: boot1\r\n" + DATE + b"transfer-encoding: chunked"
        )
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


FOUR = (
    '{{"index":{0},"text":"{1}Deep ","logprobs":{{"text_offset":[0,2,{2}],"token_logprobs":[null,-0.5,-0.05],'
    '"tokens":["Ho","w","Deep "],"top_logprobs":[null,{{"w":-0.5}},{{"Deep ":-0.05}}]}},"finish_reason":"length"}}'
)


@pytest.mark.parametrize("kind", KINDS)
async def test_completions_of_several_prompts_byte_by_byte(kind: str, autojump_clock: Any) -> None:
    async with serving(text_spec()) as house:
        asked = {"prompt": ["How", "Why"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 1}
        status, headers, body = await ask(house, COMPLETIONS, asked, kind=kind)
        choices = [FOUR.format(i, prompt, 3) for i, prompt in enumerate(("How", "How", "Why", "Why"))]
        assert (status, headers["content-type"]) == (200, "application/json")
        usage = '],"usage":{"prompt_tokens":4,"completion_tokens":4,"total_tokens":8}}'
        assert body.decode() == TEXT + ",".join(choices) + usage


async def test_a_stream_of_completions_byte_by_byte(autojump_clock: Any) -> None:
    async with serving(text_spec()) as house:
        asked = {"prompt": ["How", "Why"], "stream": True, "echo": True, "max_tokens": 1}
        _, headers, body = await ask(house, COMPLETIONS, asked)
        chunks = [
            f'data: {TEXT}{{"index":{index},"text":"{text}","logprobs":null,"finish_reason":{reason}}}]}}\n\n'
            for index, prompt in enumerate(("How", "Why"))
            for text, reason in ((prompt, "null"), ("Deep ", "null"), ("", '"length"'))
        ]
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert body.decode() == "".join(chunks) + "data: [DONE]\n\n"


async def test_choices_of_a_stream_are_told_apart_by_their_index(autojump_clock: Any) -> None:
    async with serving(text_spec()) as house:
        _, _, body = await ask(house, COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "stream": True})
        assert texts_in(events_in(body)) == dict.fromkeys(range(4), "Deep Léarning")
        _, _, body = await ask(house, CHAT, {**SAID, "n": 2, "stream": True})
        assert texts_in(events_in(body)) == dict.fromkeys(range(2), "Deep Léarning")


# -- prompts and parameters --------------------------------------------------------------------------------------------


async def repeats(prompt: Prompt) -> AsyncIterator[str]:
    """Answers with its prompt, its `max_new_tokens` and its `do_sample`."""
    yield f"{prompt.text}|{prompt.parameters.max_new_tokens}|{prompt.parameters.do_sample}"


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]},
    {"role": "assistant", "content": None},
]


def shouting(messages: Sequence[ChatMessage]) -> str:
    return "/".join(f"{m.role}:{m.content.upper()}" for m in messages)


class Templated:
    """A model with a template of its own."""

    @staticmethod
    def chat_template(messages: Sequence[ChatMessage]) -> str:
        return shouting(messages)

    async def __call__(self, session: Session[Prompt, Any]) -> None:
        await session.send(Token(text=(await session.receive()).text))


class TemplatedOfPrompts:
    """A model with a template of its own, called with a prompt."""

    @staticmethod
    def chat_template(messages: Sequence[ChatMessage]) -> str:
        return shouting(messages)

    async def __call__(self, prompt: Prompt) -> str:
        return f"{prompt.text}|"


@pytest.mark.parametrize("route", [CHAT, *ROUTES])
async def test_the_prompt_of_a_conversation_is_its_templates(route: str, autojump_clock: Any) -> None:
    specs = {
        "plain": (text_spec(repeats), "Be brief.\nAnn: Why?\nAssistant: \nAssistant:"),
        "spec": (text_spec(repeats, chat_template=shouting), "system:BE BRIEF./user:WHY?/assistant:"),
        "model": (text_spec(Templated()), "system:BE BRIEF./user:WHY?/assistant:"),
        "of prompts": (text_spec(TemplatedOfPrompts()), "system:BE BRIEF./user:WHY?/assistant:"),
    }
    for spec, prompt in specs.values():
        async with serving(spec) as house:
            _, _, body = await ask(house, route, {"messages": CONVERSATION})
            assert json.loads(body)["choices"][0]["message"]["content"].partition("|")[0] == prompt


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ModelError("no system messages here", status=400), 400, "no system messages here"),
        (RuntimeError("its own business"), 500, "the chat template failed; incident"),
        (SystemExit(3), 500, "the chat template failed; incident"),
        (None, 500, "the chat template returned NoneType, not str"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_template_that_cannot_is_the_models_error(
    error: BaseException | None, status: int, said: str, stream: bool, autojump_clock: Any
) -> None:
    def template(messages: Sequence[ChatMessage]) -> Any:
        if error is not None:
            raise error

    async with serving(text_spec(repeats, chat_template=template)) as house:
        for route in (CHAT, "/invocations"):
            got, _, body = await ask(house, route, {**SAID, "stream": stream})
            assert (got, said in json.loads(body)["error"]["message"]) == (status, True)
        _, _, body = await ask(house, "/endpoints/m/invocations", SAID)
        assert said in json.loads(body)["OriginalMessage"]
        assert house.endings == {"model-error": 3}


async def test_how_much_is_said_where_the_request_does_not_say(autojump_clock: Any) -> None:
    config = Config(openai=OpenAIConfig(max_tokens=77))
    async with serving(text_spec(repeats), config=config) as house:
        for path, asked in ((CHAT, SAID), (COMPLETIONS, {"prompt": "x"}), ("/invocations", SAID)):
            assert b"|77|True" in (await ask(house, path, asked))[2]
            assert b"|5|False" in (await ask(house, path, {**asked, "max_tokens": 5, "temperature": 0}))[2]


USAGES = pytest.mark.parametrize(
    "options", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
HEADER = "x-everywire-usage"


async def usage_of(house: House, path: str, asked: dict[str, Any], options: Any = None) -> tuple[dict[str, int], bool]:
    """The usage of an answer, of a stream its last one; and whether its head says that prompts are not counted."""
    stream = {} if options is None else {"stream": True, "stream_options": options}
    status, headers, body = await ask(house, path, {**asked, **stream})
    assert status == 200
    if options is None:
        usage = json.loads(body)["usage"]
    else:
        *others, last = events_in(body)
        assert last["choices"] == []
        continuous = "continuous_usage_stats" in options
        assert all((chunk["usage"] is not None) == continuous for chunk in others)
        usage = last["usage"]
    assert list(usage) == ["prompt_tokens", "completion_tokens", "total_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert headers.get(HEADER) in (None, "completion-only")
    return usage, HEADER in headers


async def words_of(prompt: Prompt) -> AsyncIterator[str]:
    for word in ("one ", "two ", "three"):
        yield word


def at_once_said(prompt: Prompt) -> str:
    return "one"


async def parts_said(part: Part) -> bytes:
    return b"one"


async def says_nothing(session: Session[Prompt, Token]) -> None:
    await session.receive()


@USAGES
@pytest.mark.parametrize(
    ("spec", "made"),
    [
        (text_spec(words_of), 3),
        (text_spec(at_once_said), 1),
        (spec_of(parts_said, "m"), 1),
        (text_spec(says_nothing), 0),
    ],
)
async def test_a_usage_is_numbers_also_where_nobody_counts_the_prompt(spec: Any, made: int, options: Any) -> None:
    async with serving(spec) as house:
        for path, asked in ((CHAT, SAID), (COMPLETIONS, {"prompt": ["a", "b"]})):
            made_in_all = made * len(asked.get("prompt", "x"))
            usage, prompts_left_out = await usage_of(house, path, asked, options)
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (0, made_in_all)
            assert prompts_left_out
    if spec.family is Family.PARTS:  # parts at LMI's routes are no chats
        return
    async with serving(spec, config=lmi(output_formatter="json_chat")) as house:
        usage, prompts_left_out = await usage_of(house, "/invocations", SAID)
        assert (usage["prompt_tokens"], usage["completion_tokens"], prompts_left_out) == (0, made, True)


async def test_a_stream_without_a_usage_says_nothing_of_it(autojump_clock: Any) -> None:
    def never(text: str) -> int:
        raise AssertionError("nobody asked")

    async with serving(text_spec(words_of, count_tokens=never)) as house:
        for path, asked in ((CHAT, SAID), (COMPLETIONS, {"prompt": "a"})):
            _, headers, body = await ask(house, path, {**asked, "stream": True})
            assert HEADER not in headers
            assert b"usage" not in body


class Counts:
    """Counts words for who asks, and says nothing of them itself."""

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    async def __call__(self, prompt: Prompt) -> AsyncIterator[str]:
        yield "one "
        yield "two"


@USAGES
async def test_a_model_that_can_count_is_asked_to(options: Any) -> None:
    counted = [text_spec(Counts()), text_spec(words_of, count_tokens=lambda text: np.int64(len(text.split())))]
    for spec in (*counted, text_spec(says_nothing, count_tokens=lambda text: len(text.split()))):
        async with serving(spec) as house:
            usage, prompts_left_out = await usage_of(house, COMPLETIONS, {"prompt": ["a b", "c d e"]}, options)
            assert (usage["prompt_tokens"], prompts_left_out) == (5, False)


@USAGES
async def test_the_models_own_count_wins_and_then_the_tokens_that_it_has_reported(options: Any) -> None:
    async def reports(session: Session[Prompt, Token]) -> None:
        prompt = await session.receive()
        if prompt.text == "own":
            session.prompt_tokens = 9
        for _ in range(2):
            await session.send(Token(text="p", prefill=True))
        await session.send(Token(text="x"))

    async with serving(text_spec(reports, count_tokens=lambda text: 100)) as house:
        for prompts, count in ((["own"], 9), (["other"], 2), (["own", "other"], 11)):
            usage, prompts_left_out = await usage_of(house, COMPLETIONS, {"prompt": prompts}, options)
            assert (usage["prompt_tokens"], prompts_left_out) == (count, False)


async def test_each_chunk_counts_what_came_before_it() -> None:
    async with serving(text_spec(words_of, count_tokens=lambda text: 4)) as house:
        asked = {**SAID, "stream": True, "stream_options": {"continuous_usage_stats": True}}
        chunks = events_in((await ask(house, CHAT, asked))[2])
        assert [c["usage"]["completion_tokens"] for c in chunks] == [0, 1, 2, 3, 3]
        assert {c["usage"]["prompt_tokens"] for c in chunks} == {4}
        assert all(c["choices"] for c in chunks)


@pytest.mark.parametrize("count", ["7", 1.5, -1, None, RuntimeError("no count")])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_counter_that_gives_no_count_is_the_models_mistake(count: Any, stream: bool) -> None:
    def wrong(text: str) -> Any:
        if isinstance(count, Exception):
            raise count
        return count

    async with serving(text_spec(words_of, count_tokens=wrong)) as house:
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        status, _, body = await ask(house, COMPLETIONS, {"prompt": "a", **more})
        said = json.loads(body)["error"]["message"]
        assert (status, "count_tokens" in said) == (500, True)
        assert house.endings == {"model-error": 1}


def told_by_a_function(prompt: Prompt) -> Token:
    return Token(text="x", prompt_tokens=7)


def told_by_a_generator(prompt: Prompt) -> Iterator[Token | str]:
    yield Token(text="x", prompt_tokens=7)
    yield "y"


async def told_late(prompt: Prompt) -> AsyncIterator[Token]:
    yield Token(text="x")
    yield Token(text="y", prompt_tokens=7)


async def told_at_the_end(prompt: Prompt) -> AsyncIterator[Token | Finish]:
    yield Finish(reason=FinishReason.EOS_TOKEN, prompt_tokens=7)


def told_by_numpy(prompt: Prompt) -> Token:
    return Token(text="x", prompt_tokens=np.int64(7))  # type: ignore[arg-type]  # which is what libraries count with


async def told_by_a_session(session: Session[Prompt, Token]) -> None:
    async for _ in session:
        session.prompt_tokens = np.int64(7)  # type: ignore[assignment]
        await session.send(Token(text="x"))


COUNTING = [told_by_a_function, told_by_a_generator, told_late, told_at_the_end, told_by_numpy, told_by_a_session]


@pytest.mark.parametrize("model", COUNTING)
async def test_every_kind_of_model_can_say_how_many_tokens_its_prompt_has(model: Any) -> None:  # some of them in a thread
    async with serving(text_spec(model)) as house:
        asked = {"prompt": ["a", "b"]}
        assert json.loads((await ask(house, COMPLETIONS, asked))[2])["usage"]["prompt_tokens"] == 14
        _, _, body = await ask(house, CHAT, {**SAID, "stream": True, "stream_options": {"include_usage": True}})
        assert events_in(body)[-1]["usage"]["prompt_tokens"] == 7
    async with serving(text_spec(model), config=lmi(tgi_compat=True)) as house:
        _, _, body = await ask(house, "/predictions/m", {"inputs": "a", "stream": True})
        assert b'"input_length": 7' in body


async def counts_some(session: Session[Prompt, Token]) -> None:
    async for prompt in session:
        session.prompt_tokens = 7 if prompt.text == "a" else None
        await session.send(Token(text="x"))


async def test_the_count_of_some_prompts_is_no_usage(autojump_clock: Any) -> None:
    async with serving(text_spec(counts_some)) as house:
        for prompts, known in ((["a", "a"], True), (["a", "b"], False), (["b", "a"], False)):
            usage, prompts_left_out = await usage_of(house, COMPLETIONS, {"prompt": prompts})
            assert (usage["prompt_tokens"], prompts_left_out) == (14 if known else 0, not known)


@pytest.mark.parametrize("count", ["7", 1.5, -1, [1]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_count_that_is_none_is_the_models_mistake(count: Any, stream: bool, autojump_clock: Any) -> None:
    async def wrong(session: Session[Prompt, Token]) -> None:
        async for _ in session:
            session.prompt_tokens = count

    async def wrong_token(prompt: Prompt) -> AsyncIterator[Token]:
        yield Token(text="x", prompt_tokens=count)

    for model in (wrong, wrong_token):
        async with serving(text_spec(model)) as house:
            status, _, body = await ask(house, COMPLETIONS, {"prompt": "a", "stream": stream})
            assert status == 500
            assert "the model failed; incident" in json.loads(body)["error"]["message"]
            assert house.endings == {"model-error": 1}


# -- work beside the loop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x"}] * 10_000}),
        ("/invocations", {"messages": [{"role": "user", "content": "x"}] * 10_000}),
        (COMPLETIONS, {"prompt": "x", "extra": "y" * 300_000}),
        ("/invocations", {"inputs": "x", "extra": "y" * 300_000}),
    ],
)
@pytest.mark.parametrize("long", [False, True])
async def test_long_requests_are_read_and_made_prompts_beside_the_loop(
    path: str, asked: dict[str, Any], long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops, seen = threading.get_ident(), dict[str, bool]()

    def seeing(name: str, function: Any) -> Any:
        def see(*arguments: Any, **more: Any) -> Any:
            seen[name] = threading.get_ident() == loops
            return function(*arguments, **more)

        return see

    for owner, name in ((openai, "parse_chat"), (openai, "parse_completion"), (protocols.lmi, "parse_document")):
        monkeypatch.setattr(owner, name, seeing(name, getattr(owner, name)))
    if not long:
        asked = {**asked, "extra": ""} if "extra" in asked else SAID
    async with serving(text_spec(chat_template=seeing("template", lambda messages: "x"))) as house:
        assert (await ask(house, path, asked))[0] == 200
    assert seen
    assert set(seen.values()) == {not long}


# -- which model -------------------------------------------------------------------------------------------------------


async def upper(part: Part) -> bytes:
    return bytes(part.data).upper()


async def adds(request: InferRequest) -> None:
    return None


async def test_models_are_those_that_can_answer(autojump_clock: Any) -> None:
    specs = [text_spec(name="m"), spec_of(upper, "a parts"), spec_of(adds, "tensors")]
    async with serving(*specs) as house:
        for kind in KINDS:
            told = [
                {"id": n, "object": "model", "created": 1_700_000_000, "owned_by": "everywire"} for n in ("a parts", "m")
            ]
            assert await get(house, "/v1/models", kind) == (200, {"object": "list", "data": told})
            assert await get(house, "/v1/models/a%20parts", kind) == (200, told[0])
            status, missing = await get(house, "/v1/models/nobody", kind)
            assert (status, missing["error"]["code"]) == (404, "model_not_found")
            # a client may ask for any model by its name; only the list is of those that can answer here
            assert await get(house, "/v1/models/tensors", kind) == (200, {**told[0], "id": "tensors"})


@pytest.mark.parametrize("name", ["m", None, "", "tgi", "dummy"])
async def test_the_model_is_the_one_named_or_the_only_one(name: str | None, autojump_clock: Any) -> None:
    async with serving(text_spec(), spec_of(upper, "parts")) as house:
        for path, asked in ((CHAT, SAID), (COMPLETIONS, {"prompt": "x"})):
            status, _, body = await ask(house, path, {**asked, "model": name})
            assert (status, json.loads(body)["model"]) == (200, name or "m")


async def test_a_default_decides_among_several(autojump_clock: Any) -> None:
    specs = [text_spec(), text_spec(repeats, "other")]
    async with serving(*specs) as house:
        status, _, body = await ask(house, CHAT, SAID)
        error = json.loads(body)["error"]
        assert (status, error["param"], "openai.default_model" in error["message"]) == (400, "model", True)
    async with serving(*specs, config=Config(openai=OpenAIConfig(default_model="other"))) as house:
        assert json.loads((await ask(house, CHAT, SAID))[2])["model"] == "other"


async def test_a_model_of_parts_chats(autojump_clock: Any) -> None:
    async with serving(spec_of(upper, "parts")) as house:
        _, _, body = await ask(house, CHAT, {**SAID, "model": "parts"})
        assert json.loads(body)["choices"][0]["message"]["content"] == "USER: HI\nASSISTANT:"


# -- invalid requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "document", "status", "param", "said"),
    [
        (CHAT, b"{", 400, None, "JSON"),
        (CHAT, b"", 400, "messages", "messages: expected an array"),
        (CHAT, [], 400, None, "expected an object"),
        (CHAT, {}, 400, "messages", "messages: expected an array"),
        (CHAT, {**SAID, "model": 3}, 400, "model", "model: expected a string, got 3"),
        (CHAT, {**SAID, "model": "gpt-4"}, 404, None, "no model 'gpt-4'; GET /v1/models"),
        (CHAT, {**SAID, "temperature": 3}, 400, "temperature", "temperature: expected a number from 0 to 2, got 3"),
        (CHAT, {**SAID, "max_tokens": 0}, 400, "max_tokens", "max_tokens: expected"),
        (CHAT, {**SAID, "tools": [{}]}, 400, "tools", "tools: model 'm' does not declare tools"),
        (CHAT, {"messages": [{"role": "you", "content": ""}]}, 400, "messages[0].role", "messages[0].role"),
        (COMPLETIONS, {}, 400, "prompt", "prompt: expected a non-empty string"),
        (COMPLETIONS, {"prompt": [1, 2]}, 400, "prompt", "token ids"),
        (COMPLETIONS, {"prompt": "x", "n": 3, "best_of": 2}, 400, "best_of", "best_of: expected at least n"),
        (COMPLETIONS, {"prompt": ["x"] * 129}, 400, "prompt", "at most 128 choices"),
    ],
)
async def test_it_is_an_object_that_names_the_member(
    path: str, document: Any, status: int, param: str | None, said: str, autojump_clock: Any
) -> None:
    async with serving(text_spec()) as house:
        for kind in KINDS:
            got, headers, body = await ask(house, path, document, kind=kind)
            error = json.loads(body)["error"]
            assert (got, headers["content-type"]) == (status, "application/json")
            assert (list(error), said in error["message"]) == (["message", "type", "param", "code"], True)
            assert error["param"] in (param, param and param.partition("[")[0])
        assert house.endings == {"refused": 2}


async def test_a_refusal_byte_by_byte(autojump_clock: Any) -> None:
    async with serving(text_spec()) as house:
        _, _, body = await ask(house, CHAT, {**SAID, "top_p": 7})
        assert body == (
            b'{"error":{"message":"top_p: expected a number from 0 to 1, got 7","type":"invalid_request_error",'
            b'"param":"top_p","code":null}}'
        )


@pytest.mark.parametrize(("path", "asked"), [(CHAT, SAID), (COMPLETIONS, {"prompt": "x"}), ("/invocations", SAID)])
async def test_what_the_model_does_not_support_is_refused_unless_it_is_neutral(
    path: str, asked: dict[str, Any], autojump_clock: Any
) -> None:
    spec = text_spec(parameters=frozenset({"max_new_tokens", "temperature"}))
    async with serving(spec, config=lmi(unsupported="refuse")) as house:
        own_names = ({"min_tokens": 2}, {"bad_words": ["a"]})
        for refused in ({"presence_penalty": 1}, {"seed": 3}, {"delay_ms": 5}, *own_names):
            status, _, body = await ask(house, path, {**asked, **refused})
            error = json.loads(body)["error"]
            (name,) = refused
            assert (status, error["type"], error["param"]) == (400, "invalid_request_error", name)
            assert error["message"] == f"{name}: model 'm' does not support it (lmi.unsupported)"
        neutral = {"presence_penalty": 0, "n": 1, "top_p": 1}
        for passed in (neutral, {"user": "me"}, {"max_tokens": 2, "temperature": 0.3}, {"stop": "."}):
            assert (await ask(house, path, {**asked, **passed}))[0] == 200


async def test_another_method_is_refused_in_the_same_words(autojump_clock: Any) -> None:
    async with serving(text_spec()) as house:
        status, body = await get(house, CHAT)
        assert (status, body["error"]["type"]) == (405, "invalid_request_error")


SEVERAL = frozenset({"n"})
"""The parameters of a model that makes several sequences of a prompt itself."""

# -- choices and their ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_why_each_choice_has_ended(stream: bool, autojump_clock: Any) -> None:
    async def various(session: Session[Prompt, Any]) -> None:
        await session.receive()
        await session.send(Token(text="second", sequence=1, finish=FinishReason.STOP_SEQUENCE))
        await session.send(Token(text="first"))
        await session.send(Finish(reason=FinishReason.EOS_TOKEN))
        for _ in range(3):
            await session.send(Token(text="a", sequence=2))
        await session.send(Token(text="a"))

    async with serving(text_spec(various, parameters=SEVERAL)) as house:
        _, _, body = await ask(house, CHAT, {**SAID, "n": 3, "max_tokens": 3, "stream": stream})
        chunks = events_in(body) if stream else [json.loads(body)]
        reasons = {c["index"]: c["finish_reason"] for chunk in chunks for c in chunk["choices"]}
        assert reasons == {0: "stop", 1: "stop", 2: "length"}
        assert house.endings == {"complete": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_model_that_makes_one_sequence_is_called_once_for_each_choice(
    path: str, stream: bool, autojump_clock: Any
) -> None:
    seen: list[Prompt] = []

    async def endless(session: Session[Prompt, Any]) -> None:
        seen.append(prompt := await session.receive())
        while True:
            await session.send(Token(text="abc"[len(seen) - 1], prompt_tokens=7))
            assert prompt.parameters.n == 1

    async with serving(text_spec(endless, capacity=1)) as house:
        asked = {**SAID, "prompt": "x"} if path is COMPLETIONS else SAID
        asked = {**asked, "n": 3, "seed": 5, "max_tokens": 2, "stream": stream, "logprobs": None}
        _, _, body = await ask(house, path, asked | ({"stream_options": {"include_usage": True}} if stream else {}))
        if stream:
            assert texts_in(events_in(body)) == {0: "aa", 1: "bb", 2: "cc"}
            usage = events_in(body)[-1]["usage"]
        else:
            answer = json.loads(body)
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
            assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
            usage = answer["usage"]
        assert usage == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}
        assert [prompt.parameters.seed for prompt in seen] == [5, 6, 7]
        assert house.endings == {"complete": 1}


async def test_the_first_choice_that_fails_ends_the_answer(autojump_clock: Any) -> None:
    calls = []

    async def second_fails(session: Session[Prompt, Any]) -> None:
        calls.append(await session.receive())
        if len(calls) == 2:
            raise ModelError("no more")
        await session.send(Token(text="a"))

    async with serving(text_spec(second_fails)) as house:
        status, _, body = await ask(house, CHAT, {**SAID, "n": 3})
        assert (status, json.loads(body)["error"]["message"]) == (424, "no more")
        assert len(calls) == 2
        assert house.endings == {"model-error": 1}


@pytest.mark.parametrize(("name", "asked"), [("best_of", {"best_of": 3}), ("best_of", {"n": 2, "best_of": 4})])
async def test_sequences_that_a_model_would_not_choose_from_are_refused(
    name: str, asked: dict[str, Any], autojump_clock: Any
) -> None:
    async with serving(text_spec()) as house:
        status, _, body = await ask(house, COMPLETIONS, {"prompt": "x", **asked})
        assert (status, json.loads(body)["error"]["param"]) == (400, name)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_may_go_on_with_another_choice_when_one_is_complete(stream: bool, autojump_clock: Any) -> None:
    async def careless(session: Session[Prompt, Any]) -> None:
        await session.receive()
        for sequence in range(2):
            with suppress(trio.ClosedResourceError):
                while True:
                    await session.send(Token(text="ab"[sequence], sequence=sequence))

    async with serving(text_spec(careless, parameters=SEVERAL)) as house:
        _, _, body = await ask(house, CHAT, {**SAID, "n": 2, "max_tokens": 2, "stream": stream})
        if stream:
            assert texts_in(events_in(body)) == {0: "aa", 1: "bb"}
        else:
            assert [choice["message"]["content"] for choice in json.loads(body)["choices"]] == ["aa", "bb"]


@pytest.mark.parametrize("stray", [Token(text="a", sequence=3), Finish(reason=FinishReason.LENGTH, sequence=3)])
async def test_a_choice_that_nobody_asked_for_is_the_models_error(stray: Any, autojump_clock: Any) -> None:
    async def generous(session: Session[Prompt, Any]) -> None:
        await session.receive()
        await session.send(Token(text="0"))
        await session.send(stray)

    async with serving(text_spec(generous, parameters=SEVERAL)) as house:
        status, _, body = await ask(house, CHAT, {**SAID, "n": 3})
        said = "the model sent a token of sequence 3, where 0 to 2 were asked for"
        assert (status, json.loads(body)["error"]["message"]) == (500, said)
        assert house.endings == {"model-error": 1}


@pytest.mark.parametrize("says", ["token", "finish", "nothing"])
async def test_an_echo_over_the_bound_is_told_as_what_it_is(says: str, autojump_clock: Any) -> None:
    async def model(session: Session[Prompt, Any]) -> None:
        await session.receive()
        if says == "token":
            await session.send(Token(text="a"))
        elif says == "finish":
            await session.send(Finish(reason=FinishReason.LENGTH))

    async with serving(text_spec(model), config=lmi(max_text=20)) as house:
        status, _, body = await ask(house, COMPLETIONS, {"prompt": "x" * 50, "echo": True})
        assert (status, "at most 20 bytes (max_text)" in json.loads(body)["error"]["message"]) == (500, True)
        assert house.endings == {"model-error": 1}


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "asked"), [(CHAT, SAID), (COMPLETIONS, {"prompt": "x"})])
async def test_each_token_leaves_when_it_is_sent(path: str, asked: dict[str, Any], autojump_clock: Any) -> None:
    go = trio.Event()

    async def slow(prompt: Prompt) -> AsyncIterator[str]:
        yield "first"
        await go.wait()
        yield "second"

    async with serving(text_spec(slow)) as house:
        line = house.line("http1")
        await line.send(*house.posted(1, path, json.dumps({**asked, "stream": True}).encode()))
        with at_once():
            assert b'"first"' in bytes((await line.data(1)).buffers[0])
        go.set()
        assert b'"second"' in bytes((await line.data(1)).buffers[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("path", "formatter"), [(CHAT, ""), (COMPLETIONS, ""), ("/invocations", "jsonlines_chat"), (STREAM, "")]
)
async def test_a_client_that_does_not_read_stops_its_model_within_the_bound(
    kind: str, path: str, formatter: str, autojump_clock: Any
) -> None:
    sent = 0

    async def counting(session: Session[Prompt, Any]) -> None:
        nonlocal sent
        await session.receive()
        while True:
            await session.send(Token(text="x" * 1000))
            sent += 1

    async with serving(text_spec(counting), config=lmi(output_formatter=formatter), capacity=32 * KiB) as house:
        line = house.line(kind)
        stream = line.next_stream()
        asked = {**SAID, "prompt": "x", "max_tokens": 65536, "stream": True}
        await line.send(*house.posted(stream, path, json.dumps(asked).encode()))
        await house.still()
        stopped = sent
        assert 45 <= stopped <= 110  # bounded by the send buffer (64 KiB) and the transport (32 KiB)
        await trio.sleep(20)
        assert sent == stopped
        line.peer.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, *ROUTES, STREAM])
async def test_a_client_that_leaves_cancels_the_model(path: str, kind: str, stream: bool, autojump_clock: Any) -> None:
    live = 0

    async def hangs(session: Session[Prompt, Any]) -> None:
        nonlocal live
        live += 1
        try:
            await session.receive()
            await session.send(Token(text="a"))
            await trio.sleep_forever()
        finally:
            live -= 1

    async with serving(text_spec(hangs)) as house:
        line = house.line(kind)
        asked = {"prompt": ["x", "y"]} if path == COMPLETIONS else SAID
        body = json.dumps({**asked, "stream": stream}).encode()
        await line.send(*house.posted(line.next_stream(), path, body))
        await house.still()
        assert live == 1
        with at_once():
            line.peer.close()
            await house.still()
            assert (live, house.endings) == (0, CANCELLED)
