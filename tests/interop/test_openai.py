"""openai's OpenAI and AsyncOpenAI, unmodified: chat and text completions, streams, models, and its exceptions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.interop.served_text import PATIENCE, SECRET, holding, tell, twenty_at_once
from tests.interop.servers import Server

pytestmark = [
    pytest.mark.usefixtures("openai"),  # before any server: where it is absent, none need start
    pytest.mark.filterwarnings("default"),  # its own
]

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def openai(needs: Callable[[str, str], Any]) -> Any:
    return needs("openai", "openai")


Talk = Callable[..., Any]


@pytest.fixture(params=["OpenAI", "AsyncOpenAI"])
def talk(request: pytest.FixtureRequest, openai: Any, text_server: Server) -> Talk:
    """talk("chat.completions.create", ...) is what that method returns; of a stream the list of its pieces, which are in
    `into` too, for a stream that ends with an exception."""
    make = getattr(openai, request.param)
    known = {"base_url": f"{text_server.url}/v1", "api_key": "any", "timeout": PATIENCE, "max_retries": 0}

    def method(client: Any, path: str) -> Any:
        for name in path.split("."):
            client = getattr(client, name)
        return client

    def blocking(path: str, *arguments: Any, into: list[Any], **more: Any) -> Any:
        with make(**known) as client:
            result = method(client, path)(*arguments, **more)
            if more.get("stream"):
                with result:
                    for piece in result:
                        into.append(piece)
                return into
            return result

    async def asynchronous(path: str, *arguments: Any, into: list[Any], **more: Any) -> Any:
        async with make(**known) as client:
            result = await method(client, path)(*arguments, **more)
            if more.get("stream"):
                async with result:
                    async for piece in result:
                        into.append(piece)
                return into
            return result

    def talk(path: str, *arguments: Any, into: list[Any] | None = None, **more: Any) -> Any:
        pieces = [] if into is None else into
        if request.param == "OpenAI":
            return blocking(path, *arguments, into=pieces, **more)
        return asyncio.run(asyncio.wait_for(asynchronous(path, *arguments, into=pieces, **more), PATIENCE))

    return talk


def chat(talk: Talk, model: str, **more: Any) -> Any:
    return talk("chat.completions.create", **{"model": model, "messages": HELLO, **more})


def complete(talk: Talk, model: str, **more: Any) -> Any:
    return talk("completions.create", **{"model": model, "prompt": "hello", **more})


def said(pieces: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    choices = [c for p in pieces for c in p.choices if c.index == index]
    return "".join(c.delta.content or "" if hasattr(c, "delta") else c.text for c in choices)


USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
ASK = pytest.mark.parametrize("ask", [chat, complete])


# ---- chat


@pytest.mark.by_default
def test_a_chat(talk: Talk) -> None:
    answer = chat(talk, "counted", max_tokens=3)
    (choice,) = answer.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", " 0 1 2")
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert (answer.object, answer.model) == ("chat.completion", "counted")
    assert answer.id
    assert answer.created > 1_700_000_000
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 3, 5)


def test_a_chat_in_a_stream(talk: Talk) -> None:
    pieces = chat(talk, "counted", max_tokens=3, stream=True)
    assert said(pieces) == " 0 1 2"
    assert {(p.object, p.model, p.id) for p in pieces} == {("chat.completion.chunk", "counted", pieces[0].id)}
    assert [p.choices[0].delta.role for p in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
    assert [p.choices[0].finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert not any(p.usage for p in pieces)


@ASK
def test_a_model_that_does_not_count_its_prompt_has_a_usage_too(talk: Talk, ask: Callable[..., Any]) -> None:
    for usage in (ask(talk, "shout", max_tokens=1).usage, ask(talk, "shout", max_tokens=1, **USAGE)[-1].usage):
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (0, 1, 1)
    options = {"include_usage": True, "continuous_usage_stats": True}
    pieces = ask(talk, "shout", max_tokens=1, stream=True, stream_options=options)
    assert [piece.usage.completion_tokens for piece in pieces[-3:]] == [1, 1, 1]


@ASK
def test_the_usage_comes_last_where_it_is_asked_for(talk: Talk, ask: Callable[..., Any]) -> None:
    pieces = ask(talk, "counted", max_tokens=3, **USAGE)
    assert pieces[-1].choices == []
    assert pieces[-1].usage.completion_tokens == 3
    assert [p.usage for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert said(pieces) == " 0 1 2"


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_log_probabilities(talk: Talk, stream: bool) -> None:
    answer = chat(talk, "counted", max_tokens=2, logprobs=True, top_logprobs=2, stream=stream)
    choices = [c for p in answer for c in p.choices] if stream else answer.choices
    tokens = [t for c in choices if c.logprobs for t in c.logprobs.content]
    assert [(t.token, t.logprob, bytes(t.bytes)) for t in tokens] == [(" 0", -0.5, b" 0"), (" 1", -0.5, b" 1")]
    assert [(t.token, t.logprob) for t in tokens[0].top_logprobs] == [(" 0", -0.5), (" 1", -1.5)]


@ASK
@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(talk: Talk, ask: Callable[..., Any], stream: bool) -> None:
    answer = ask(talk, "counted", max_tokens=2, n=2, stream=stream)
    if stream:
        assert [said(answer, index) for index in (0, 1)] == [" 0 1", " 0 1"]
        ends = [(c.index, c.finish_reason) for p in answer for c in p.choices if c.finish_reason]
        assert sorted(ends) == [(0, "length"), (1, "length")]
    else:
        texts = [c.message.content if ask is chat else c.text for c in answer.choices]
        assert texts == [" 0 1", " 0 1"]
        assert [c.index for c in answer.choices] == [0, 1]


def test_every_parameter_of_a_chat_reaches_the_model(talk: Talk) -> None:
    given = {"frequency_penalty": 0.5, "presence_penalty": -0.5, "seed": 7, "temperature": 0.5, "top_p": 0.5}
    more = {"max_completion_tokens": 9, "stop": ["END", "STOP"], "logit_bias": {"17": -1.5}, "user": "somebody"}
    answer = chat(talk, "told", **given, **more, extra_body={"top_k": 3, "min_p": 0.25, "repetition_penalty": 1.5})
    seen = json.loads(answer.choices[0].message.content)
    wanted = given | {"top_k": 3, "min_p": 0.25, "repetition_penalty": 1.5, "max_new_tokens": 9, "do_sample": True}
    assert {name: seen[name] for name in wanted} == wanted
    assert (seen["text"], seen["stop_sequences"], seen["logit_bias"]) == ("hello there", ["END", "STOP"], {"17": -1.5})


def test_a_message_may_be_of_several_parts(talk: Talk) -> None:
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    answer = chat(talk, "told", messages=[{"role": "user", "content": parts}])
    assert json.loads(answer.choices[0].message.content)["text"] == "hello there"


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_ends_before_a_stop_of_the_librarys_model(talk: Talk, stream: bool) -> None:
    whole = complete(talk, "lm", prompt="Return the", temperature=0, max_tokens=30).choices[0].text
    stop = whole[10:13]
    answer = complete(talk, "lm", prompt="Return the", temperature=0, max_tokens=30, stop=stop, stream=stream)
    text = said(answer) if stream else answer.choices[0].text
    assert text == whole.partition(stop)[0]
    last = [c for p in answer for c in p.choices][-1] if stream else answer.choices[0]
    assert last.finish_reason == "stop"


def test_a_chat_with_the_librarys_model(talk: Talk) -> None:
    whole = chat(talk, "lm", temperature=0, max_tokens=8)
    assert said(chat(talk, "lm", temperature=0, max_tokens=8, stream=True)) == whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 8


# ---- text completions


def test_a_completion(talk: Talk) -> None:
    answer = complete(talk, "counted", max_tokens=3)
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, " 0 1 2", "length")
    assert (answer.object, answer.model, answer.usage.completion_tokens) == ("text_completion", "counted", 3)


def test_a_completion_in_a_stream(talk: Talk) -> None:
    pieces = complete(talk, "counted", max_tokens=3, stream=True)
    assert said(pieces) == " 0 1 2"
    assert [c.finish_reason for p in pieces for c in p.choices][-1] == "length"
    assert {p.object for p in pieces} == {"text_completion"}


def test_several_prompts_are_several_choices(talk: Talk) -> None:
    answer = complete(talk, "words", prompt=["one two", "three"], max_tokens=5)
    assert [(c.index, c.text) for c in answer.choices] == [(0, " one two"), (1, " three")]
    pieces = complete(talk, "words", prompt=["one two", "three"], max_tokens=5, stream=True)
    assert [said(pieces, index) for index in (0, 1)] == [" one two", " three"]


def test_a_completion_with_log_probabilities_and_its_prompt(talk: Talk) -> None:
    logprobs = complete(talk, "counted", max_tokens=2, logprobs=2).choices[0].logprobs
    assert (logprobs.tokens, logprobs.token_logprobs) == ([" 0", " 1"], [-0.5, -0.5])
    assert logprobs.top_logprobs[0] == {" 0": -0.5, " 1": -1.5}
    assert logprobs.text_offset == [0, 2]
    assert complete(talk, "counted", max_tokens=2, echo=True).choices[0].text == "hello 0 1"


# ---- models


def test_the_models_are_listed_and_found(talk: Talk, openai: Any) -> None:
    names = [model.id for model in talk("models.list").data]
    assert {"counted", "lm", "told"} <= set(names)
    model = talk("models.retrieve", "counted")
    assert (model.id, model.object) == ("counted", "model")
    with pytest.raises(openai.NotFoundError, match="nobody"):
        talk("models.retrieve", "nobody")


# ---- failures


@ASK
def test_a_model_that_fails_in_a_stream_ends_it_with_the_clients_own_error(
    talk: Talk, openai: Any, ask: Callable[..., Any]
) -> None:
    pieces: list[Any] = []
    with pytest.raises(openai.APIError, match="the text ran dry"):
        ask(talk, "failing", stream=True, into=pieces)
    assert said(pieces) == " 0 1"


@ASK
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_is_an_http_error(
    talk: Talk, openai: Any, ask: Callable[..., Any], stream: bool
) -> None:
    dry: dict[str, Any] = {"messages": [{"role": "user", "content": "dry"}]} if ask is chat else {"prompt": "dry"}
    with pytest.raises(openai.APIStatusError, match="the text ran dry") as caught:
        ask(talk, "failing", stream=stream, **dry)
    assert caught.value.status_code == 424  # the model's own


@ASK
@pytest.mark.parametrize("stream", [False, True])
def test_a_crash_tells_no_secrets(talk: Talk, openai: Any, ask: Callable[..., Any], stream: bool) -> None:
    with pytest.raises(openai.APIError) as caught:
        ask(talk, "crashing", stream=stream)
    assert SECRET not in str(caught.value)
    if not stream:
        assert isinstance(caught.value, openai.InternalServerError)


@ASK
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_parameter_is_a_bad_request_that_names_it(
    talk: Talk, openai: Any, ask: Callable[..., Any], stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        ask(talk, "counted", temperature=9.0, stream=stream)
    assert (caught.value.type, caught.value.param) == ("invalid_request_error", "temperature")


def test_what_is_not_offered_is_refused_by_its_name(talk: Talk, openai: Any) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat(talk, "counted", tools=[tool])
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match="does not declare images"):
        chat(talk, "counted", messages=[{"role": "user", "content": [image]}])


@ASK
def test_an_unknown_model_is_not_found(talk: Talk, openai: Any, ask: Callable[..., Any]) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody") as caught:
        ask(talk, "nobody")
    assert caught.value.code == "model_not_found"


@ASK
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_a_bad_request_with_its_code(
    talk: Talk, openai: Any, ask: Callable[..., Any], stream: bool
) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "long"}]} if ask is chat else {"prompt": "long"}
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        ask(talk, "failing", stream=stream, **asked)
    said = caught.value
    assert (said.code, said.type, said.param) == ("context_length_exceeded", "invalid_request_error", next(iter(asked)))


def test_an_operation_that_is_not_there_is_the_clients_own_error_and_names_those_that_are(talk: Talk, openai: Any) -> None:
    for path, more in (("embeddings.create", {"input": "x"}), ("responses.create", {"input": "x"})):
        with pytest.raises(openai.NotFoundError, match="POST /v1/chat/completions") as caught:
            talk(path, model="counted", **more)
        assert (caught.value.code, caught.value.type) == ("unknown_url", "not_found_error")


def test_a_model_that_has_no_room_is_a_rate_limit(talk: Talk, openai: Any, text_server: Server, request: Any) -> None:
    with holding(text_server.url, "held", f"held {request.node.callspec.id}"), pytest.raises(openai.RateLimitError):
        complete(talk, "held")


@ASK
def test_nineteen_requests_do_not_notice_a_bad_one(
    talk: Talk, openai: Any, text_server: Server, ask: Callable[..., Any], request: Any
) -> None:
    def good(prompt: str) -> str:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if ask is chat else {"prompt": prompt}
        return said(ask(talk, "met", stream=True, **asked))

    def bad() -> None:
        with pytest.raises(openai.BadRequestError):
            ask(talk, "met", top_p=2.0)

    twenty_at_once(text_server.url, f"met-{request.node.callspec.id}", good, bad)


# ---- clients that leave


@ASK
def test_a_client_that_leaves_a_stream_stops_the_model(openai: Any, text_server: Server, ask: Callable[..., Any]) -> None:
    name = f"left {ask.__name__}"
    with openai.OpenAI(base_url=f"{text_server.url}/v1", api_key="any", timeout=PATIENCE, max_retries=0) as client:
        stream = (
            client.chat.completions.create(model="stepped", messages=[{"role": "user", "content": name}], stream=True)
            if ask is chat
            else client.completions.create(model="stepped", prompt=name, stream=True)
        )
        assert next(iter(stream)).choices
        tell(text_server.url, f"wait {name}:begun")
        stream.close()
        tell(text_server.url, f"wait {name}:cancelled")


def test_a_client_that_gives_up_waiting_stops_the_model(openai: Any, text_server: Server) -> None:
    async def conversation() -> None:
        async with openai.AsyncOpenAI(base_url=f"{text_server.url}/v1", api_key="any", timeout=PATIENCE) as client:
            asking = asyncio.ensure_future(client.completions.create(model="stepped", prompt="given up"))
            await asyncio.to_thread(tell, text_server.url, "wait given up:begun")
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await asyncio.to_thread(tell, text_server.url, "wait given up:cancelled")

    asyncio.run(asyncio.wait_for(conversation(), PATIENCE))


def test_a_model_that_is_slow_to_stop_holds_up_nobody(openai: Any, text_server: Server) -> None:
    with openai.OpenAI(base_url=f"{text_server.url}/v1", api_key="any", timeout=PATIENCE, max_retries=0) as client:
        stream = client.completions.create(model="stubborn", prompt="slow", stream=True)
        assert next(iter(stream)).choices[0].text == " 0"
        stream.close()
        tell(text_server.url, "wait slow:stopping")
        assert client.completions.create(model="counted", prompt="hello", max_tokens=2).choices[0].text == " 0 1"
        tell(text_server.url, "set slow:let go")
        tell(text_server.url, "wait slow:gone")


# ---- the end of a plain generator's text

STOPS: list[tuple[Any, str]] = [
    ("E FO", "ONE TWO THRE"),  # over the border of two tokens
    (["REE", "O TH"], "ONE TW"),
    (["FOUR "], "ONE TWO THREE "),
    (["FOUR FIVE"], "ONE TWO THREE FOUR "),  # it begins, and is not met
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "text"), STOPS)
def test_a_stop_sequence_ends_the_text_of_a_model_that_knows_of_none(talk: Talk, stop: Any, text: str, stream: bool) -> None:
    prompt = "one two three four"
    for answer in (
        chat(talk, "shout", messages=[{"role": "user", "content": prompt}], stop=stop, stream=stream),
        complete(talk, "shout", prompt=prompt, stop=stop, stream=stream),
    ):
        choices = [choice for piece in answer for choice in piece.choices] if stream else answer.choices
        pieces = [
            choice.text if hasattr(choice, "text") else (getattr(choice, "delta", None) or choice.message).content
            for choice in choices
        ]
        assert "".join([piece or "" for piece in pieces]) == text
        assert choices[-1].finish_reason == "stop"


def test_more_tokens_than_there_may_be_are_a_bad_request(talk: Talk, openai: Any) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"max_tokens: expected at most 262144 \(limits.max_new_tokens\)"
    ) as caught:
        complete(talk, "shout", max_tokens=262145)
    assert caught.value.param == "max_tokens"


# ---- SageMaker's path


@pytest.mark.parametrize("base", ["/endpoints/counted", "/endpoints/any/inference-components/counted"])
def test_the_base_url_of_an_endpoint_names_the_model(openai: Any, text_server: Server, base: str) -> None:
    asked: dict[str, Any] = {"model": "whatever", "messages": HELLO, "max_tokens": 3}
    url = f"{text_server.url}{base}/openai/v1"
    with openai.OpenAI(base_url=url, api_key="any", timeout=PATIENCE, max_retries=0) as client:
        answer = client.chat.completions.create(**asked)
        assert (answer.choices[0].message.content, answer.model) == (" 0 1 2", "whatever")
        with client.chat.completions.create(**asked, stream=True) as pieces:
            assert said(list(pieces)) == " 0 1 2"
        for missing in (client.models.list, lambda: client.embeddings.create(model="m", input="x")):
            with pytest.raises(openai.NotFoundError) as raised:
                missing()
            assert raised.value.code == "unknown_url"


def test_an_endpoint_that_is_not_there_is_openais_error(openai: Any, text_server: Server) -> None:
    url = f"{text_server.url}/endpoints/nobody/openai/v1"
    with openai.OpenAI(base_url=url, api_key="any", timeout=PATIENCE, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as raised:
            client.chat.completions.create(model="counted", messages=HELLO)
        assert raised.value.code == "model_not_found"
