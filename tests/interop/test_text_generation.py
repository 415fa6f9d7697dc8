"""The text-generation client, unmodified, before a server that is configured to answer as TGI: generate, generate_stream, chat."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.interop.served_text import PATIENCE, SECRET, holding, tell, twenty_at_once
from tests.interop.servers import Server

SETTINGS = ("lmi = { tgi_compat = true }", 'openai = { default_model = "counted" }')
"""Settings of the server `text_server`."""

pytestmark = [
    pytest.mark.usefixtures("tgi"),  # before any server: where it is absent, none need start
    pytest.mark.filterwarnings("default"),  # its own
]

Talk = Callable[..., Any]


@pytest.fixture(scope="module")
def tgi(needs: Callable[[str, str], Any]) -> Any:
    return needs("text-generation", "text_generation")


@pytest.fixture(scope="module")
def errors(needs: Callable[[str, str], Any]) -> Any:
    return needs("text-generation", "text_generation.errors")


@pytest.fixture(params=["Client", "AsyncClient"])
def talk(request: pytest.FixtureRequest, tgi: Any, text_server: Server) -> Talk:
    """talk(path, method, ...) is what that method of a client for that path returns; of a stream the list of its pieces,
    which are in `into` too, for a stream that ends with an exception."""
    make = getattr(tgi, request.param)

    def blocking(path: str, method: str, *arguments: Any, into: list[Any], **more: Any) -> Any:
        result = getattr(make(text_server.url + path, timeout=PATIENCE), method)(*arguments, **more)
        if method == "generate_stream":
            for piece in result:
                into.append(piece)
            return into
        return result

    async def asynchronous(path: str, method: str, *arguments: Any, into: list[Any], **more: Any) -> Any:
        result = getattr(make(text_server.url + path, timeout=PATIENCE), method)(*arguments, **more)
        if method == "generate_stream":
            async for piece in result:
                into.append(piece)
            return into
        return await result

    def talk(path: str, method: str, *arguments: Any, into: list[Any] | None = None, **more: Any) -> Any:
        pieces = [] if into is None else into
        if request.param == "Client":
            return blocking(path, method, *arguments, into=pieces, **more)
        conversation = asynchronous(path, method, *arguments, into=pieces, **more)
        return asyncio.run(asyncio.wait_for(conversation, PATIENCE))

    return talk


def generate(talk: Talk, model: str, prompt: str, **more: Any) -> Any:
    return talk(f"/predictions/{model}", "generate", prompt, **more)


def stream(talk: Talk, model: str, prompt: str, **more: Any) -> Any:
    return talk(f"/predictions/{model}", "generate_stream", prompt, **more)


METHODS = pytest.mark.parametrize("method", [generate, stream])


# ---- generation


@pytest.mark.by_default
def test_an_answer_has_all_the_details_that_the_client_demands(talk: Talk) -> None:
    answer = generate(talk, "counted", "a b", max_new_tokens=2)
    assert answer.generated_text == " 0 1"
    details = answer.details
    assert (details.finish_reason.value, details.generated_tokens, details.prefill) == ("length", 2, [])
    assert [(t.id, t.text, t.logprob, t.special) for t in details.tokens] == [
        (100, " 0", -0.5, False),
        (101, " 1", -0.5, False),
    ]


def test_the_details_that_are_asked_for(talk: Talk) -> None:
    answer = generate(talk, "counted", "a b", max_new_tokens=2, decoder_input_details=True, top_n_tokens=2, seed=7)
    assert [(t.id, t.text, t.logprob) for t in answer.details.prefill] == [(0, "a", None), (1, "b", -1.0)]
    assert [[t.text for t in step] for step in answer.details.top_tokens] == [[" 0", " 1"], [" 1", " 2"]]
    assert answer.details.seed == 7


def test_a_stream_ends_with_the_text_and_its_details(talk: Talk) -> None:
    pieces = stream(talk, "counted", "a b", max_new_tokens=3, top_n_tokens=2)
    assert [(p.token.id, p.token.text, p.token.logprob, p.token.special) for p in pieces] == [
        (100 + n, f" {n}", -0.5, False) for n in range(3)
    ]
    assert [[t.text for t in p.top_tokens] for p in pieces] == [[f" {n}", f" {n + 1}"] for n in range(3)]
    assert [p.generated_text for p in pieces] == [None, None, " 0 1 2"]
    assert [p.details for p in pieces[:-1]] == [None, None]
    assert (pieces[-1].details.finish_reason.value, pieces[-1].details.generated_tokens) == ("length", 3)


def test_best_of_brings_the_other_sequences(talk: Talk) -> None:
    answer = generate(talk, "counted", "a", max_new_tokens=2, best_of=3, do_sample=True)
    assert answer.generated_text == " 0 1"
    assert [(s.generated_text, s.finish_reason.value) for s in answer.details.best_of_sequences] == [(" 0 1", "length")] * 2


@METHODS
def test_every_parameter_of_the_client_reaches_the_model(talk: Talk, method: Callable[..., Any]) -> None:
    given = {
        "do_sample": True, "frequency_penalty": 0.5, "max_new_tokens": 9, "repetition_penalty": 1.5, "seed": 7,
        "temperature": 0.5, "top_k": 3, "top_n_tokens": 2, "top_p": 0.5, "truncate": 100, "typical_p": 0.25,
        "stop_sequences": ["END", "STOP"],
    }  # fmt: skip
    answer = method(talk, "told", "hello", **given)
    seen = json.loads(answer[-1].generated_text if method is stream else answer.generated_text)
    assert {name: seen[name] for name in given} == given
    assert (seen["text"], seen["details"]) == ("hello", True)


def test_the_librarys_model_ends_for_each_of_its_reasons(talk: Talk) -> None:
    whole = generate(talk, "lm", "Return the", max_new_tokens=30)
    assert "".join(t.text for t in whole.details.tokens) == whole.generated_text
    text = whole.generated_text
    stopped = generate(talk, "lm", "Return the", max_new_tokens=30, stop_sequences=[text[10:13]])
    assert stopped.details.finish_reason.value == "stop_sequence"
    assert generate(talk, "lm", "Return the", max_new_tokens=3).details.finish_reason.value == "length"
    streamed = stream(talk, "lm", "Return the", max_new_tokens=30)
    assert streamed[-1].generated_text == text
    assert "".join(p.token.text for p in streamed) == text
    full = generate(talk, "lm", "Return the", max_new_tokens=30, return_full_text=True)
    assert full.generated_text == "Return the" + text


def test_the_same_seed_is_the_same_text(talk: Talk) -> None:
    def sampled() -> str:
        answer = generate(talk, "lm", "Return the", max_new_tokens=20, do_sample=True, temperature=1.5, seed=11)
        assert answer.details.seed == 11
        return str(answer.generated_text)

    assert sampled() == sampled()


# ---- chat


@pytest.fixture(scope="module")
def hello(needs: Callable[[str, str], Any]) -> list[Any]:
    """A conversation."""
    return [needs("text-generation", "text_generation.types").Message(role="user", content="hello there")]


def test_a_chat(talk: Talk, hello: list[Any]) -> None:
    answer = talk("", "chat", hello, max_tokens=3)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", " 0 1 2", "length")
    assert answer.model == "tgi"  # the only name that this client knows: whichever there is


def test_a_streamed_chat_is_beyond_this_client(tgi: Any, text_server: Server, hello: list[Any]) -> None:
    """It wants `tool_calls` in every chunk, fails at its own way of saying so, and would take [DONE] for a chunk too."""
    with pytest.raises(AttributeError, match="status"):
        next(iter(tgi.Client(text_server.url, timeout=PATIENCE).chat(hello, max_tokens=3, stream=True)))


def test_a_chat_with_a_bad_parameter_is_a_bad_request(talk: Talk, errors: Any, hello: list[Any]) -> None:
    with pytest.raises(errors.BadRequestError, match="temperature"):  # made of OpenAI's object as it is
        talk("", "chat", hello, temperature=9.0)


# ---- failures


def test_a_model_that_fails_in_a_stream_ends_it_with_the_clients_own_error(talk: Talk, errors: Any) -> None:
    pieces: list[Any] = []
    with pytest.raises(errors.GenerationError, match="the text ran dry"):
        stream(talk, "failing", "hello", into=pieces)
    assert [p.token.text for p in pieces] == [" 0", " 1"]


def test_a_model_that_fails_without_a_stream(talk: Talk, errors: Any) -> None:
    with pytest.raises(errors.GenerationError, match="the text ran dry"):
        generate(talk, "failing", "hello")


@METHODS
def test_a_failure_before_the_first_token_is_an_http_error(talk: Talk, errors: Any, method: Callable[..., Any]) -> None:
    with pytest.raises(errors.GenerationError, match="the text ran dry"):
        method(talk, "failing", "dry")


@METHODS
def test_a_crash_tells_no_secrets(talk: Talk, errors: Any, method: Callable[..., Any]) -> None:
    with pytest.raises(errors.GenerationError) as caught:
        method(talk, "crashing", "hello")
    assert SECRET not in str(caught.value)


@METHODS
def test_a_bad_parameter_is_a_validation_error_that_names_it(talk: Talk, errors: Any, method: Callable[..., Any]) -> None:
    with pytest.raises(errors.ValidationError, match="max_new_tokens"):
        method(talk, "counted", "hello", max_new_tokens=0)


@METHODS
def test_an_unknown_model_is_not_found(talk: Talk, errors: Any, method: Callable[..., Any]) -> None:
    with pytest.raises(errors.NotFoundError, match="nobody"):
        method(talk, "nobody", "hello")


def test_a_model_that_has_no_room_is_overloaded(talk: Talk, errors: Any, text_server: Server, request: Any) -> None:
    name = f"held {request.node.callspec.id}"
    with holding(text_server.url, "held", name), pytest.raises(errors.OverloadedError):
        generate(talk, "held", "hello")


def test_nineteen_requests_do_not_notice_a_bad_one(talk: Talk, errors: Any, text_server: Server, request: Any) -> None:
    def good(prompt: str) -> str:
        return str(stream(talk, "met", prompt)[-1].generated_text)

    def bad() -> None:
        with pytest.raises(errors.ValidationError):
            generate(talk, "met", "hello", max_new_tokens=0)

    twenty_at_once(text_server.url, f"met-{request.node.callspec.id}", good, bad)


# ---- clients that leave


def test_a_client_that_leaves_a_stream_stops_the_model(tgi: Any, text_server: Server) -> None:
    pieces = tgi.Client(f"{text_server.url}/predictions/stepped", timeout=PATIENCE).generate_stream("left", max_new_tokens=9)
    assert next(pieces).token.text == " 0"
    pieces.close()
    del pieces
    gc.collect()  # the connection ends with the response, to which the client gives nobody a handle
    tell(text_server.url, "wait left:cancelled")


@METHODS
def test_an_asynchronous_client_that_leaves_stops_the_model(
    tgi: Any, text_server: Server, method: Callable[..., Any]
) -> None:
    name = f"left {method.__name__}"

    async def conversation() -> None:
        client = tgi.AsyncClient(f"{text_server.url}/predictions/stepped", timeout=PATIENCE)
        if method is stream:
            pieces = client.generate_stream(name, max_new_tokens=9)
            assert (await anext(pieces)).token.text == " 0"
            await pieces.aclose()
            return
        asking = asyncio.ensure_future(client.generate(name, max_new_tokens=9))
        await asyncio.to_thread(tell, text_server.url, f"wait {name}:begun")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(asyncio.wait_for(conversation(), PATIENCE))
    tell(text_server.url, f"wait {name}:cancelled")


def test_a_model_that_is_slow_to_stop_holds_up_nobody(tgi: Any, text_server: Server) -> None:
    async def conversation() -> None:
        pieces = tgi.AsyncClient(f"{text_server.url}/predictions/stubborn", timeout=PATIENCE).generate_stream("slow")
        assert (await anext(pieces)).token.text == " 0"
        await pieces.aclose()

    asyncio.run(asyncio.wait_for(conversation(), PATIENCE))
    tell(text_server.url, "wait slow:stopping")
    client = tgi.Client(f"{text_server.url}/predictions/counted", timeout=PATIENCE)
    assert client.generate("hello", max_new_tokens=2).generated_text == " 0 1"
    tell(text_server.url, "set slow:let go")
    tell(text_server.url, "wait slow:gone")
