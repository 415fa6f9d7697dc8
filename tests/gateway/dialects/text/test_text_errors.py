"""Errors of a text call, in the words of each form: a status before its head, a whole message in the answer after it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import trio

from gateway.config import Config, DrainConfig, LimitsConfig
from gateway.config.problem import ConfigError
from gateway.gateway import Gateway
from models.errors import ContextLengthExceeded, ModelError
from models.messages import Family, Prompt, Token
from models.session import Session
from models.spec import Model, ModelSpec
from protocols.aws import bidi
from tests.gateway.dialects.text.test_lmi_forms import KINDS, STREAM, ask, lmi, text_spec
from tests.gateway.promises import CANCELLED, House, Line, at_once, serving

SECRET = "the model's own business"
SAID = {"messages": [{"role": "user", "content": "Hi"}]}
STREAMED = {"stream": True}
GUIDE = {"finish_reason": "error", "generated_tokens": None, "inputs": None, "tokens": None}
"""`details` of an error object, as the guide has it (seed, Error Responses)."""

Words = Literal["lmi", "tgi", "dynamic", "openai"]


@dataclass(frozen=True)
class Form:
    """A form of answers: how it is asked for, and whose words its errors have."""

    words: Words
    asked: Mapping[str, Any]
    path: str = "/predictions/m"
    configured: Mapping[str, Any] = field(default_factory=dict)
    event: Callable[[bytes], bytes | None] | None = None
    """For a stream: returns the content of its last piece, None if that is incomplete."""

    @property
    def config(self) -> Config:
        return lmi(**self.configured)

    @property
    def body(self) -> bytes:
        return json.dumps(self.asked).encode()


def line_of(body: bytes) -> bytes | None:
    """The last JSON line, whole with its line feed."""
    return body.splitlines()[-1] if body.endswith(b"\n") else None


def event_of(body: bytes) -> bytes | None:
    """The data of the last event, whole with its blank line."""
    last = body.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
    return last.removeprefix(b"data: ") if body.endswith(b"\n\n") and last.startswith(b"data: ") else None


PROMPT = {"inputs": "x"}
BATCH, JSONLINES_CHAT = {"rolling_batch": "disable"}, {"output_formatter": "jsonlines_chat"}
FORMS: dict[str, Form] = {
    "json": Form("lmi", PROMPT),
    "jsonlines": Form("lmi", PROMPT | STREAMED, event=line_of),
    "sse": Form("lmi", PROMPT, configured={"output_formatter": "sse"}, event=event_of),
    "tgi": Form("tgi", PROMPT, configured={"tgi_compat": True}),
    "tgi-sse": Form("tgi", PROMPT | STREAMED, configured={"tgi_compat": True}, event=event_of),
    "dynamic": Form("dynamic", PROMPT, configured=BATCH),
    "dynamic-stream": Form("dynamic", PROMPT, configured=BATCH | {"enable_streaming": True}, event=line_of),
    "chat": Form("openai", SAID, "/v1/chat/completions"),
    "chat-stream": Form("openai", SAID | STREAMED, "/v1/chat/completions", event=event_of),
    "chat-invoked": Form("openai", SAID, "/invocations"),
    "chat-invoked-stream": Form("openai", SAID | STREAMED, "/invocations", event=event_of),
    "jsonlines_chat": Form("openai", SAID, "/invocations", JSONLINES_CHAT, event=line_of),
    "completions": Form("openai", {"prompt": "x"}, "/v1/completions"),
    "completions-stream": Form("openai", {"prompt": ["x", "y"]} | STREAMED, "/v1/completions", event=event_of),
}
STREAMS = [name for name, form in FORMS.items() if form.event is not None]


def refused(
    words: Words, status: int, answer: tuple[int, dict[str, str], bytes], kind: str = "", *, generation: bool = False
) -> str:
    """The message of an error before the head, whose object is checked to the key. `generation`: the model's own."""
    got, headers, body = answer
    assert (got, headers["content-type"]) == (status, "application/json")
    document: dict[str, Any] = json.loads(body)
    if words == "openai":
        error: dict[str, Any] = document.pop("error")
        assert (document, list(error)) == ({}, ["message", "type", "param", "code"])
        message = error["message"]
    else:
        message = document.pop("error")
        assert document.pop("code") == status
        if words == "tgi":
            assert document.pop("error_type") == kind
        if words == "dynamic":
            assert document == {"message": "invoke handler failure"}
        else:
            assert document == ({"generated_text": "", "details": GUIDE} if generation else {})
    assert isinstance(message, str)
    return message


def in_band(name: str, body: bytes, code: int, kind: str = "generation") -> str:
    """The message of an error that ends a stream, whose object is checked to the key."""
    form = FORMS[name]
    assert form.event is not None
    last = form.event(body)
    assert last is not None, "the last piece is not framed as the others"
    assert b"[DONE]" not in body
    document: dict[str, Any] = json.loads(last)
    match form.words:
        case "lmi":
            message = document["token"].pop("error_msg")
            details = {"finish_reason": "error", "generated_tokens": None, "inputs": None}
            token = {"id": -1, "text": "", "log_prob": -1, "special_token": True}
            assert document == {"token": token, "generated_text": "", "details": details}
        case "tgi":
            message = document.pop("error")
            assert document == {"error_type": kind}
        case "dynamic":
            message = document.pop("error")
            assert document == {"code": 424, "message": "invoke handler failure"}
        case "openai" if name == "jsonlines_chat":
            message = document.pop("error")
            assert document == {"code": code}
        case "openai":
            message = document["error"]["message"]
            assert list(document["error"]) == ["message", "type", "param", "code"]
    return str(message)


async def begun(house: House, name: str, line: Line | None = None) -> Line:
    """A call of this form, whose model has done what it can."""
    line = line or house.line("http1")
    form = FORMS[name]
    await line.send(
        *house.posted(line.next_stream(), form.path, form.body, headers=[(b"content-type", b"application/json")])
    )
    await house.still()
    return line


async def answered(line: Line, stream: int = 1) -> tuple[int, dict[str, str], bytes]:
    status, headers, body = await line.peer.read_answer(stream)
    return status, {name.decode(): value.decode() for name, value in headers.items()}, body


def whole(line: Line) -> bool:
    """True if the last byte that an HTTP/1.1 client has read ends its chunked body."""
    return line.transport.read.endswith(b"\r\n0\r\n\r\n")


# -- models that fail --------------------------------------------------------------------------------------------------


class Fails:
    """Sends `after` tokens, then raises `error`, or waits for ever if that is None."""

    def __init__(self, after: int, error: BaseException | None = None) -> None:
        self.after, self.error, self.live = after, error, 0

    async def __call__(self, session: Session[Prompt, Any]) -> None:
        self.live += 1
        try:
            await session.receive()
            for number in range(self.after):
                await session.send(Token(text="ab"[number % 2], id=number))
            if self.error is not None:
                raise self.error
            await trio.sleep_forever()
        finally:
            self.live -= 1


# -- before the head: requests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("body", [b"{", b'{"inputs": "x",}', b"[1]", b"\xff", b"3"])
async def test_a_body_that_is_no_request(name: str, body: bytes, autojump_clock: Any) -> None:
    form = FORMS[name]
    async with serving(text_spec(), config=form.config) as house:
        answer = await ask(house, form.path, body)
        if form.path.startswith("/v1/"):
            message = refused("openai", 400, answer)
        else:  # that it asks for a chat is in the body too
            message = refused("lmi" if form.words == "openai" else form.words, 424, answer, "validation")
        assert "JSON" in message or "UTF-8" in message or "expected an object" in message
        assert house.endings == {"refused": 1}


@pytest.mark.parametrize("name", FORMS)
async def test_what_is_missing_is_named(name: str, autojump_clock: Any) -> None:
    form = FORMS[name]
    member = next(iter(form.asked))
    async with serving(text_spec(), config=form.config) as house:
        asked = {**form.asked, member: []}
        status = 400 if form.words == "openai" else 424
        assert member in refused(form.words, status, await ask(house, form.path, asked), "validation")
        assert house.endings == {"refused": 1}


@pytest.mark.parametrize("name", FORMS)
async def test_a_bad_parameter_is_named_with_what_was_expected_and_what_came(name: str, autojump_clock: Any) -> None:
    form = FORMS[name]
    async with serving(text_spec(), config=form.config) as house:
        if form.words == "openai":
            message = refused("openai", 400, await ask(house, form.path, {**form.asked, "top_p": 7}))
            assert message == "top_p: expected a number from 0 to 1, got 7"
        else:
            answer = await ask(house, form.path, {**form.asked, "parameters": {"top_p": 7}})
            message = refused(form.words, 424, answer, "validation", generation=True)
            assert message == "parameters.top_p: expected a number > 0 and <= 1, got 7"
        assert house.endings == {"refused": 1}


@pytest.mark.parametrize("name", FORMS)
async def test_a_model_that_there_is_not(name: str, autojump_clock: Any) -> None:
    form = FORMS[name]
    async with serving(text_spec(), config=form.config) as house:
        if form.path.startswith("/v1/"):
            message = refused("openai", 404, await ask(house, form.path, {**form.asked, "model": "nobody"}))
        else:  # which form it would have answered in nobody knows
            message = refused("lmi", 404, await ask(house, "/predictions/nobody", form.asked))
        assert "'nobody'" in message
        assert house.endings == {"refused": 1}


@pytest.mark.parametrize("name", FORMS)
async def test_a_body_over_its_limit(name: str, autojump_clock: Any) -> None:
    form = FORMS[name]
    config = replace(form.config, limits=LimitsConfig(text_json=100))
    async with serving(text_spec(), config=config) as house:
        status, _, body = await ask(house, form.path, {**form.asked, "long": "x" * 100})
        assert (status, b"limits.text_json" in body) == (413, True)
        assert house.endings == {"refused": 1}


# -- before the head: the server ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", KINDS)
async def test_no_room(name: str, kind: str, autojump_clock: Any) -> None:
    # decision table: 503 at LMI's routes, 429 in TGI's and OpenAI's form
    form, model = FORMS[name], Fails(0)
    async with serving(text_spec(model, capacity=1, queue=0), config=form.config) as house:
        line = await begun(house, name)
        with at_once():
            answer = await ask(house, form.path, dict(form.asked), kind=kind)
        status = 429 if form.words in ("tgi", "openai") else 503
        assert "models.m.capacity" in refused(form.words, status, answer, "overloaded")
        assert answer[1]["retry-after"] == "1"
        assert (model.live, house.endings) == (1, {"refused": 1})
        line.peer.close()


@pytest.mark.parametrize("name", FORMS)
async def test_a_deadline_before_the_first_token(name: str, autojump_clock: Any) -> None:
    form = FORMS[name]
    async with serving(text_spec(Fails(0), timeout=5), config=form.config) as house:
        answer = await ask(house, form.path, dict(form.asked))
        kind = "incomplete_generation"
        assert "models.m.timeout" in refused(form.words, 504, answer, kind, generation=form.words == "tgi")
        assert (trio.current_time(), house.endings) == (5, {"deadline": 1})


@pytest.mark.parametrize("name", FORMS)
async def test_a_server_that_drains(name: str, autojump_clock: Any) -> None:
    form = FORMS[name]
    config = replace(form.config, drain=DrainConfig(delay=1, timeout=5))
    async with serving(text_spec(Fails(0)), config=config) as house:
        live = await begun(house, name)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.gateway.drain)
            await house.still()
            status, headers, body = await ask(house, form.path, dict(form.asked))
            assert (status, headers["retry-after"], b"shutting down" in body) == (503, "1", True)
            kind = "incomplete_generation"
            message = refused(form.words, 503, await answered(live), kind, generation=form.words == "tgi")
            assert "drain.timeout" in message
        assert house.endings == {"refused": 1, "drained": 1}


# -- before the head: the model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    ("error", "lmi_status", "openai_status", "said"),
    [
        (ModelError("no such voice"), 424, 424, "no such voice"),
        (ModelError("no such voice", code="Voice", status=422), 422, 422, "no such voice"),
        (RuntimeError(SECRET), 424, 500, "the model failed; incident"),
        (SystemExit(3), 424, 500, "the model failed; incident"),
    ],
)
async def test_a_model_that_raises_before_its_first_token(
    name: str, error: BaseException, lmi_status: int, openai_status: int, said: str, autojump_clock: Any
) -> None:
    form = FORMS[name]
    async with serving(text_spec(Fails(0, error)), config=form.config) as house:
        for kind in KINDS:
            answer = await ask(house, form.path, dict(form.asked), kind=kind)
            status = openai_status if form.words == "openai" else lmi_status
            assert said in refused(form.words, status, answer, "generation", generation=True)
            assert SECRET.encode() not in answer[2]
        assert house.endings == {"model-error": 2}


TOO_LONG = ContextLengthExceeded(60, 32, prompt_tokens=40)
OUT_OF_RANGE = ModelError("top_p: expected a number from 0 to 0.5, got 0.9", code="ValidationError")
GIVEN = {"top_p": 0.9}


def blamed(name: str, error: ModelError, said: dict[str, Any]) -> None:
    """An error object of OpenAI's that says what of the request is to blame."""
    member = "prompt" if name.startswith("completions") else "messages"
    code, param = ("context_length_exceeded", member) if error is TOO_LONG else (None, "top_p")
    assert said == {"message": error.message, "type": "invalid_request_error", "param": param, "code": code}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("error", [TOO_LONG, OUT_OF_RANGE])
async def test_a_request_that_its_model_cannot_serve_is_the_clients_mistake_in_every_form(
    name: str, error: ModelError, autojump_clock: Any
) -> None:
    form = FORMS[name]
    given = GIVEN if form.words == "openai" else {"parameters": GIVEN}
    async with serving(text_spec(Fails(0, error)), config=form.config) as house:
        answer = await ask(house, form.path, {**form.asked, **given})
        if form.words == "openai":
            assert refused("openai", 400, answer) == error.message
            blamed(name, error, json.loads(answer[2])["error"])
        else:
            generation = form.words == "lmi"
            assert refused(form.words, 424, answer, "validation", generation=generation) == error.message
        assert house.endings == {"model-error": 1}


async def test_a_prompt_that_is_too_long_is_said_in_the_words_that_clients_search_for(autojump_clock: Any) -> None:
    async with serving(text_spec(Fails(0, TOO_LONG))) as house:
        said = "This model's maximum context length is 32 tokens; the prompt has 40 and 20 were asked for"
        assert TOO_LONG.message == said
        for kind in KINDS:
            for path in ("generate", "generate_stream"):
                status, _, body = await ask(house, f"/v2/models/m/{path}", {"text_input": "x"}, kind=kind)
                assert (status, json.loads(body)) == (400, {"error": said})
    assert ContextLengthExceeded(60, 32).message.endswith("is 32 tokens; the request needs 60")


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("error", [TOO_LONG, OUT_OF_RANGE])
async def test_the_same_in_mid_stream(name: str, error: ModelError, autojump_clock: Any) -> None:
    form = FORMS[name]
    given = GIVEN if form.words == "openai" else {"parameters": GIVEN}
    async with serving(text_spec(Fails(2, error)), config=form.config) as house:
        _, _, body = await ask(house, form.path, {**form.asked, **given})
        assert in_band(name, body, 400, "validation") == error.message
        if form.words == "openai" and name != "jsonlines_chat":
            blamed(name, error, json.loads(event_of(body) or b"")["error"])


@pytest.mark.parametrize("name", [name for name in FORMS if name not in STREAMS])
async def test_a_model_that_raises_in_the_middle_of_a_document_is_an_http_error(name: str, autojump_clock: Any) -> None:
    form = FORMS[name]
    async with serving(text_spec(Fails(3, ModelError("no such voice"))), config=form.config) as house:
        answer = await ask(house, form.path, dict(form.asked))
        assert refused(form.words, 424, answer, "generation", generation=True) == "no such voice"


@pytest.mark.parametrize("name", FORMS)
async def test_text_over_the_bound(name: str, autojump_clock: Any) -> None:
    form = FORMS[name]
    config = lmi(**{**form.configured, "max_text": 2000})

    async def long(prompt: Prompt) -> AsyncIterator[str]:
        for _ in range(3):
            yield "x" * 999

    async with serving(text_spec(long), config=config) as house:
        status, _, body = answer = await ask(house, form.path, dict(form.asked))
        if form.words in ("openai", "dynamic") and form.event:  # these streams keep nothing
            assert (status, house.endings) == (200, {"complete": 1})
            return
        if form.event:
            assert status == 200
            message = in_band(name, body, 424)
        else:
            expected = 500 if form.words == "openai" else 424
            message = refused(form.words, expected, answer, "generation", generation=True)
        assert "at most 2000 bytes (max_text)" in message
        assert house.endings == {"model-error": 1}


# -- in mid-stream -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ModelError("no such voice"), 424, "no such voice"),
        (ModelError("no such\nvoice é", status=422), 422, "no such\nvoice é"),
        (RuntimeError(SECRET), 500, "the model failed; incident"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_model_that_raises_in_mid_stream_ends_it_in_band_and_whole(
    kind: str, name: str, error: Exception, code: int, said: str, autojump_clock: Any
) -> None:
    form = FORMS[name]
    async with serving(text_spec(Fails(2, error)), config=form.config) as house:
        line = house.line(kind)
        status, _, body = await ask(house, form.path, dict(form.asked), line=line)
        assert status == 200
        assert b'"a"' in body
        assert b'"b"' in body
        assert said in in_band(name, body, code)
        assert SECRET.encode() not in body
        assert whole(line) or kind == "http2"
        assert house.endings == {"model-error": 1}
        assert (await ask(house, "/v1/models/nobody", b"", line=line))[0] == 405  # the connection goes on


@pytest.mark.parametrize("name", STREAMS)
async def test_a_deadline_in_mid_stream(name: str, autojump_clock: Any) -> None:
    form = FORMS[name]
    async with serving(text_spec(Fails(2), timeout=5), config=form.config) as house:
        line = await begun(house, name)
        _, _, body = await answered(line)
        assert "models.m.timeout" in in_band(name, body, 504, "incomplete_generation")
        assert whole(line)
        assert house.endings == {"deadline": 1}


@pytest.mark.parametrize("name", STREAMS)
async def test_a_drain_in_mid_stream(name: str, autojump_clock: Any) -> None:
    form = FORMS[name]
    config = replace(form.config, drain=DrainConfig(timeout=5))
    async with serving(text_spec(Fails(2)), config=config) as house:
        line = await begun(house, name)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.gateway.drain)
            _, _, body = await answered(line)
            assert "drain.timeout" in in_band(name, body, 503, "incomplete_generation")
            assert whole(line)
        assert house.endings == {"drained": 1}


def crashing(model: Any) -> tuple[ModelSpec, trio.Event]:
    """A model whose background work crashes, once, when told to."""
    boom = trio.Event()
    crashed: list[bool] = []

    async def explode() -> None:
        if crashed:
            await trio.sleep_forever()
        await boom.wait()
        crashed.append(True)
        raise RuntimeError(SECRET)

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(explode)
            yield model
            nursery.cancel_scope.cancel()

    return ModelSpec(name="m", family=Family.TEXT, load=load), boom


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("name", FORMS)
async def test_a_worker_that_is_lost(name: str, after: int, autojump_clock: Any) -> None:
    form, model = FORMS[name], Fails(after)
    spec, boom = crashing(model)
    async with serving(spec, config=form.config) as house:
        line = await begun(house, name)
        with at_once():
            boom.set()
            status, headers, body = answer = await answered(line)
        if form.event and after:
            assert status == 200
            message = in_band(name, body, 503, "incomplete_generation")
            assert whole(line)
        else:
            message = refused(form.words, 503, answer, "incomplete_generation", generation=form.words == "tgi")
            assert headers["retry-after"] == "1"
        assert "'m'" in message
        assert SECRET not in message
        assert (model.live, house.endings) == (0, {"model-error": 1})
        # nobody answers while it starts again
        assert (await ask(house, form.path, dict(form.asked)))[0] == 503
        await trio.sleep(1)


# -- by the platform's routes ------------------------------------------------------------------------------------------

INVOKED = {name: form for name, form in FORMS.items() if not form.path.startswith("/v1/")}


@pytest.mark.parametrize("route", ["/endpoints/m/invocations", STREAM])
@pytest.mark.parametrize("name", INVOKED)
async def test_the_platform_tells_an_error_before_the_head_as_its_models(name: str, route: str, autojump_clock: Any) -> None:
    form = FORMS[name]
    stories = [
        (text_spec(), b"{", 424, "JSON"),
        (text_spec(Fails(0, ModelError("no such voice", status=422))), form.body, 422, "no such voice"),
        (text_spec(Fails(0), timeout=5), form.body, 504, "models.m.timeout"),
    ]
    for spec, body, original, said in stories:
        async with serving(spec, config=form.config) as house:
            status, headers, answer = await ask(house, route, body)
            told = json.loads(answer)
            assert (status, headers["x-amzn-errortype"]) == (424, "ModelError")
            assert (told["OriginalStatusCode"], said in told["OriginalMessage"]) == (original, True)


@pytest.mark.parametrize("name", [name for name in STREAMS if name in INVOKED])
async def test_in_mid_stream_the_body_says_it_or_an_event_does(name: str, autojump_clock: Any) -> None:
    form = FORMS[name]
    async with serving(text_spec(Fails(2, ModelError("no such voice", code="Voice"))), config=form.config) as house:
        _, _, body = await ask(house, "/endpoints/m/invocations", dict(form.asked))
        assert in_band(name, body, 424) == "no such voice"
        _, _, body = await ask(house, STREAM, dict(form.asked))
        decoder = bidi.ResponseDecoder()
        decoder.receive_data(body)
        while isinstance(event := decoder.next_event(), bidi.PayloadPart):
            assert b"no such voice" not in bytes(event.data)
        assert isinstance(event, bidi.StreamFailure)
        assert (event.exception_type, event.message) == ("ModelStreamError", "no such voice")
        decoder.receive_eof()
        assert house.endings == {"model-error": 2}


# -- the client leaves -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMS)
async def test_a_client_that_leaves_cancels_its_model_at_once(
    name: str, kind: str, how: str, after: int, autojump_clock: Any
) -> None:
    model = Fails(after)
    async with serving(text_spec(model), config=FORMS[name].config) as house:
        line = await begun(house, name, house.line(kind))
        assert model.live == 1
        with at_once():
            if how == "fin":
                line.peer.close()
            else:
                line.reset()
            await house.still()
            assert (model.live, house.endings) == (0, CANCELLED)
            house.check_ledger()


@pytest.mark.parametrize("name", FORMS)
async def test_one_that_leaves_the_queue_for_a_slot_takes_none(name: str, autojump_clock: Any) -> None:
    model = Fails(0)
    async with serving(text_spec(model, capacity=1), config=FORMS[name].config) as house:
        first, second = await begun(house, name), await begun(house, name)
        assert model.live == 1
        second.peer.close()
        await house.still()
        assert (model.live, house.endings) == (1, CANCELLED)
        first.peer.close()


# -- refusals before a model is asked ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/predictions/m", "/invocations", "/models/m/invoke"])
async def test_a_body_over_its_limit_is_refused_in_tgis_words_at_each_route(path: str, autojump_clock: Any) -> None:
    config = replace(lmi(tgi_compat=True), limits=LimitsConfig(text_json=100))
    async with serving(text_spec(), config=config) as house:
        status, _, body = await ask(house, path, {"inputs": "x" * 200})
        assert (status, json.loads(body)["error_type"]) == (413, "validation")


def test_options_of_a_model_that_mean_nothing_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"model 'm': option\.tgi_compat must be .*maybe"):
        Gateway(models=[text_spec(options={"tgi_compat": "maybe"})])
