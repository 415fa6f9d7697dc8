"""huggingface_hub's InferenceClient and AsyncInferenceClient, unmodified: text_generation and chat_completion, streams, failures."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.interop.served_text import PATIENCE, SECRET, holding, tell, twenty_at_once
from tests.interop.servers import Server

SETTINGS = ('openai = { default_model = "counted" }',)
"""Settings of the server `text_server`."""

pytestmark = [
    pytest.mark.usefixtures("hub"),  # before any server: where it is absent, none need start
    pytest.mark.filterwarnings("default"),  # its own
]

Talk = Callable[..., Any]
HELLO = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def hub(needs: Callable[[str, str], Any]) -> Any:
    return needs("huggingface_hub", "huggingface_hub")


@pytest.fixture(scope="module")
def errors(needs: Callable[[str, str], Any]) -> Any:
    return needs("huggingface_hub", "huggingface_hub.errors")


@contextmanager
def opened(client: Any) -> Iterator[Any]:
    """The client until the end of the block. That of the older line cannot be closed: its connections end with what is
    read from them."""
    yield client
    if hasattr(client, "close"):
        client.close()
    gc.collect()


@pytest.fixture(params=["InferenceClient", "AsyncInferenceClient"])
def talk(request: pytest.FixtureRequest, hub: Any, text_server: Server) -> Talk:
    """talk(path, method, ...) is what that method of a client for that path returns; of a stream the list of its pieces,
    which are in `into` too, for a stream that ends with an exception."""
    make = getattr(hub, request.param)

    def blocking(path: str, method: str, *arguments: Any, into: list[Any], **more: Any) -> Any:
        with opened(make(model=text_server.url + path, timeout=PATIENCE)) as client:
            result = getattr(client, method)(*arguments, **more)
            if more.get("stream"):
                for piece in result:
                    into.append(piece)
                return into
            return result

    async def asynchronous(path: str, method: str, *arguments: Any, into: list[Any], **more: Any) -> Any:
        async with make(model=text_server.url + path, timeout=PATIENCE) as client:
            result = await getattr(client, method)(*arguments, **more)
            if more.get("stream"):
                async for piece in result:
                    into.append(piece)
                return into
            return result

    def talk(path: str, method: str, *arguments: Any, into: list[Any] | None = None, **more: Any) -> Any:
        pieces = [] if into is None else into
        if request.param == "InferenceClient":
            return blocking(path, method, *arguments, into=pieces, **more)
        conversation = asynchronous(path, method, *arguments, into=pieces, **more)
        return asyncio.run(asyncio.wait_for(conversation, PATIENCE))

    return talk


def generate(talk: Talk, model: str, prompt: str, **more: Any) -> Any:
    return talk(f"/predictions/{model}", "text_generation", prompt, **more)


def chat(talk: Talk, model: str, **more: Any) -> Any:
    return talk("/v1", "chat_completion", **{"messages": HELLO, "model": model, **more})


# ---- generation


@pytest.mark.parametrize("model", ["counted", "tgi-counted", "sse-counted"])
def test_every_form_of_an_answer_is_the_same_text(talk: Talk, model: str) -> None:
    # without a stream the third is an event, which this client does not read
    if model != "sse-counted":
        assert generate(talk, model, "hello", max_new_tokens=3) == " 0 1 2"
    if model != "counted":  # json lines are no events
        assert generate(talk, model, "hello", max_new_tokens=3, stream=True) == [" 0", " 1", " 2"]


def test_details_are_all_there(talk: Talk) -> None:
    answer = generate(
        talk, "tgi-counted", "a b", max_new_tokens=2, details=True, decoder_input_details=True, top_n_tokens=2, seed=7
    )
    assert answer.generated_text == " 0 1"
    details = answer.details
    assert (details.finish_reason, details.generated_tokens, details.seed) == ("length", 2, 7)
    assert [(t.id, t.text, t.logprob, t.special) for t in details.tokens] == [
        (100, " 0", -0.5, False),
        (101, " 1", -0.5, False),
    ]
    assert [(t.text, t.logprob) for t in details.prefill] == [("a", None), ("b", -1.0)]
    assert [[t["text"] for t in step] for step in details.top_tokens] == [[" 0", " 1"], [" 1", " 2"]]


def test_details_of_lmis_own_form_are_read_as_far_as_they_go(talk: Talk) -> None:
    answer = generate(talk, "counted", "a b", max_new_tokens=2, details=True)
    assert answer.generated_text == " 0 1"
    assert answer.details.finish_reason == "length"
    assert [t.text for t in answer.details.tokens] == [" 0", " 1"]


def test_a_stream_with_details_counts_its_tokens_and_ends_with_the_text(talk: Talk) -> None:
    pieces = generate(talk, "tgi-counted", "a b", max_new_tokens=3, details=True, stream=True, top_n_tokens=2, seed=7)
    assert [(p.index, p.token.text, p.token.logprob) for p in pieces] == [(n + 1, f" {n}", -0.5) for n in range(3)]
    assert [p.generated_text for p in pieces] == [None, None, " 0 1 2"]
    assert [p.details for p in pieces[:-1]] == [None, None]
    assert [t.text for t in pieces[0].top_tokens] == [" 0", " 1"]
    last = pieces[-1].details
    assert (last.finish_reason, last.generated_tokens, last.seed) == ("length", 3, 7)


def test_best_of_brings_the_other_sequences(talk: Talk) -> None:
    answer = generate(talk, "tgi-counted", "a", max_new_tokens=2, details=True, best_of=3, do_sample=True)
    assert answer.generated_text == " 0 1"
    assert [s.generated_text for s in answer.details.best_of_sequences] == [" 0 1", " 0 1"]


def test_every_parameter_of_the_client_reaches_the_model(talk: Talk) -> None:
    given = {
        "do_sample": True, "frequency_penalty": 0.5, "max_new_tokens": 9, "repetition_penalty": 1.5, "seed": 7,
        "temperature": 0.5, "top_k": 3, "top_n_tokens": 2, "top_p": 0.5, "truncate": 100, "typical_p": 0.25,
        "return_full_text": False, "details": True,
    }  # fmt: skip
    answer = generate(talk, "tgi-told", "hello", **given, stop=["END", "STOP"], watermark=False)
    seen = json.loads(answer.generated_text)
    assert {name: seen[name] for name in given} == given
    assert seen["text"] == "hello"
    assert seen["stop_sequences"] == ["END", "STOP"]


def test_what_the_caller_leaves_out_is_the_servers_default(talk: Talk) -> None:
    seen = json.loads(generate(talk, "tgi-told", "hello"))  # the client sends null for each
    assert (seen["max_new_tokens"], seen["temperature"], seen["do_sample"], seen["seed"]) == (30, 1.0, False, None)


def test_the_librarys_model_stops_where_it_is_told(talk: Talk) -> None:
    whole = generate(talk, "lm", "Return the", max_new_tokens=30)
    stop = whole[10:13]
    answer = generate(talk, "lm", "Return the", max_new_tokens=30, stop=[stop], details=True)
    assert answer.details.finish_reason == "stop_sequence"
    assert whole.startswith(answer.generated_text)
    assert answer.generated_text.count(stop) == 1
    full = generate(talk, "lm", "Return the", max_new_tokens=30, return_full_text=True)
    assert full == "Return the" + whole


# ---- chat


@pytest.mark.by_default
def test_a_chat(talk: Talk) -> None:
    answer = chat(talk, "counted", max_tokens=3)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", " 0 1 2")
    assert choice.finish_reason == "length"
    assert (answer.model, answer.usage.completion_tokens) == ("counted", 3)


def test_a_chat_whose_caller_names_no_model_is_the_default_models(talk: Talk) -> None:
    # the client then names one that it calls dummy
    answer = talk("/v1", "chat_completion", HELLO, max_tokens=3)
    assert answer.choices[0].message.content == " 0 1 2"


def test_a_chat_of_several_choices_with_log_probabilities(talk: Talk) -> None:
    answer = chat(talk, "counted", max_tokens=2, n=2, logprobs=True, top_logprobs=2)
    assert [(c.index, c.message.content) for c in answer.choices] == [(0, " 0 1"), (1, " 0 1")]
    tokens = answer.choices[0].logprobs.content
    assert [(t.token, t.logprob) for t in tokens] == [(" 0", -0.5), (" 1", -0.5)]
    assert [t.token for t in tokens[0].top_logprobs] == [" 0", " 1"]


def test_a_chat_in_a_stream(talk: Talk) -> None:
    pieces = chat(talk, "counted", max_tokens=3, stream=True, stream_options={"include_usage": True})
    choices = [p.choices[0] for p in pieces if p.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(c.delta.content or "" for c in choices) == " 0 1 2"
    assert choices[-1].finish_reason == "length"
    assert pieces[-1].usage.completion_tokens == 3


def test_every_parameter_of_a_chat_reaches_the_model(talk: Talk) -> None:
    given = {"frequency_penalty": 0.5, "presence_penalty": 0.25, "seed": 7, "temperature": 0.5, "top_p": 0.5}
    seen = json.loads(chat(talk, "told", **given, max_tokens=9, stop=["END"]).choices[0].message.content)
    assert {name: seen[name] for name in given} == given
    assert (seen["text"], seen["max_new_tokens"], seen["stop_sequences"]) == ("hello there", 9, ["END"])
    assert seen["do_sample"] is True


# ---- failures


def test_a_model_that_fails_in_a_stream_ends_it_with_the_clients_own_error(talk: Talk, errors: Any) -> None:
    pieces: list[str] = []
    with pytest.raises(errors.GenerationError, match="the text ran dry"):
        generate(talk, "tgi-failing", "hello", stream=True, into=pieces)
    assert pieces == [" 0", " 1"]


def test_in_lmis_form_the_last_event_says_that_it_failed(talk: Talk) -> None:
    pieces = generate(talk, "sse-failing", "hello", stream=True, details=True)
    assert [p.token.text for p in pieces] == [" 0", " 1", ""]
    assert pieces[-1].details.finish_reason == "error"


def test_a_chat_that_fails_in_a_stream_raises(talk: Talk, errors: Any) -> None:
    pieces: list[Any] = []
    with pytest.raises(errors.TextGenerationError, match="the text ran dry"):
        chat(talk, "failing", stream=True, into=pieces)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == " 0 1"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_is_an_http_error(talk: Talk, errors: Any, stream: bool) -> None:
    with pytest.raises(errors.GenerationError, match="the text ran dry"):
        generate(talk, "tgi-failing", "dry", stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_a_crash_tells_no_secrets(talk: Talk, errors: Any, stream: bool) -> None:
    with pytest.raises(errors.GenerationError) as caught:
        generate(talk, "tgi-crashing", "hello", stream=stream)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_parameter_is_a_validation_error_that_names_it(talk: Talk, errors: Any, stream: bool) -> None:
    with pytest.raises(errors.ValidationError, match="temperature"):
        generate(talk, "tgi-counted", "hello", temperature=-1.0, stream=stream)
    # not of TGI's form, so not of TGI's types
    assert status(lambda: generate(talk, "counted", "hello", temperature=-1.0, stream=stream)) == 424


def test_a_bad_parameter_of_a_chat_and_an_unknown_model(talk: Talk) -> None:
    assert status(lambda: chat(talk, "counted", temperature=9.0)) == 400
    assert status(lambda: chat(talk, "nobody")) == 404


def status(call: Callable[[], Any]) -> int:
    """The HTTP status of a call that is refused."""
    with pytest.raises(Exception) as caught:  # the older asynchronous client raises aiohttp's own
        call()
    error: Any = caught.value
    return int(error.status if hasattr(error, "status") else error.response.status_code)


def test_a_model_that_has_no_room_is_overloaded(talk: Talk, errors: Any, text_server: Server, request: Any) -> None:
    name = f"held {request.node.callspec.id}"
    with holding(text_server.url, "tgi-held", name), pytest.raises(errors.OverloadedError):
        generate(talk, "tgi-held", "hello")


def test_nineteen_requests_do_not_notice_a_bad_one(talk: Talk, errors: Any, text_server: Server, request: Any) -> None:
    def good(prompt: str) -> str:
        return "".join(generate(talk, "tgi-met", prompt, stream=True))

    def bad() -> None:
        with pytest.raises(errors.ValidationError):
            generate(talk, "tgi-met", "hello", top_p=2.0)

    twenty_at_once(text_server.url, f"met-{request.node.callspec.id}", good, bad)


# ---- clients that leave


def test_a_client_that_leaves_a_stream_stops_the_model(hub: Any, text_server: Server) -> None:
    with opened(hub.InferenceClient(model=f"{text_server.url}/predictions/tgi-stepped", timeout=PATIENCE)) as client:
        stream = client.text_generation("left", max_new_tokens=9, stream=True)
        assert next(stream) == " 0"
        stream.close()
        del stream
    tell(text_server.url, "wait left:cancelled")


@pytest.mark.parametrize("stream", [False, True])
def test_an_asynchronous_client_that_leaves_stops_the_model(hub: Any, text_server: Server, stream: bool) -> None:
    name = f"left {stream}"

    async def conversation() -> None:
        client = hub.AsyncInferenceClient(model=f"{text_server.url}/predictions/tgi-stepped", timeout=PATIENCE)
        async with client:
            asking = asyncio.ensure_future(client.text_generation(name, max_new_tokens=9, stream=stream))
            await asyncio.to_thread(tell, text_server.url, f"wait {name}:begun")
            if stream:
                async for piece in await asking:
                    assert piece == " 0"
                    break
            else:
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking

    asyncio.run(asyncio.wait_for(conversation(), PATIENCE))
    tell(text_server.url, f"wait {name}:cancelled")


def test_a_model_that_is_slow_to_stop_holds_up_nobody(hub: Any, text_server: Server) -> None:
    with opened(hub.InferenceClient(model=f"{text_server.url}/predictions/tgi-stubborn", timeout=PATIENCE)) as client:
        assert next(client.text_generation("slow", stream=True)) == " 0"
    tell(text_server.url, "wait slow:stopping")
    with opened(hub.InferenceClient(model=f"{text_server.url}/predictions/tgi-counted", timeout=PATIENCE)) as client:
        assert client.text_generation("hello", max_new_tokens=2) == " 0 1"
    tell(text_server.url, "set slow:let go")
    tell(text_server.url, "wait slow:gone")


# ---- the end of a plain generator's text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"), [(["E FO"], "ONE TWO THREE FO"), (["REE", "O TH"], "ONE TWO TH"), (["FIVE"], "ONE TWO THREE FOUR ")]
)
def test_a_stop_sequence_ends_the_text_of_a_model_that_knows_of_none(
    talk: Talk, stop: list[str], text: str, stream: bool
) -> None:
    answer = generate(talk, "tgi-shout", "one two three four", stop=stop, stream=stream)
    assert "".join(answer) == text  # with it, as TGI has it
    detailed = generate(talk, "tgi-shout", "one two three four", stop=stop, stream=stream, details=True)
    details = detailed[-1].details if stream else detailed.details
    assert details.finish_reason == ("stop_sequence" if text.strip() != "ONE TWO THREE FOUR" else "eos_token")
    assert details.generated_tokens == len(text.split())


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_ends_before_its_stop_sequence(talk: Talk, stream: bool) -> None:
    messages = [{"role": "user", "content": "one two three four"}]
    answer = chat(talk, "shout", messages=messages, stop=["E FO"], stream=stream)
    if stream:
        choices = [choice for piece in answer for choice in piece.choices]
        assert "".join([choice.delta.content or "" for choice in choices]) == "ONE TWO THRE"
    else:
        choices = answer.choices
        assert choices[0].message.content == "ONE TWO THRE"
    assert choices[-1].finish_reason == "stop"
