"""LMI's rolling batch through the whole gateway: every form at every route, to the byte, and what decides between them."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import trio

from gateway.config import Config, LMIConfig
from models.adapt import spec_of
from models.messages import Family, Finish, FinishReason, Prompt, Token, TopToken
from models.session import Session
from models.spec import ModelSpec
from protocols.aws import bidi
from protocols.events import Data
from tests.gateway.promises import DATE, House, at_once, serving

KINDS = ("http1", "http2")
ROUTES = ("/predictions/m", "/invocations", "/models/m/invoke", "/endpoints/m/invocations")
"""The routes of LMI's schema. The platform's has headers of its own."""
STREAM = "/endpoints/m/invocations-response-stream"
LMI_HEADERS = {
    "cache-control": "no-cache; no-store, must-revalidate, private",
    "pragma": "no-cache",
    "expires": "Thu, 01 Jan 1970 00:00:00 UTC",
}
PROMPT_TOKENS = (("Ho", 7, None), ("w", 8, -0.5))
WORDS = (("Deep ", 304, -0.05), ("Léarning", 11157, -1.25), ("", 0, -0.75))
"""The last is the end of the sequence."""


async def speaks(session: Session[Prompt, Any]) -> None:
    """Says two words to any prompt, with all details that a request can ask for."""
    asked = (await session.receive()).parameters
    session.prompt_tokens = len(PROMPT_TOKENS)
    if asked.decoder_input_details:
        for text, id, log_prob in PROMPT_TOKENS:
            await session.send(Token(text=text, id=id, log_prob=log_prob, prefill=True))
    for text, id, log_prob in WORDS[: asked.max_new_tokens]:
        others = [(text, id, log_prob), ("Dark ", id + 1, log_prob * 2)][: asked.top_n_tokens]
        for sequence in range(asked.n):
            token = Token(
                text=text,
                id=id + 1000 * sequence if id else 0,
                log_prob=log_prob,
                special=not id,
                finish=None if id else FinishReason.EOS_TOKEN,
                top=tuple(TopToken(text=t, id=i, log_prob=p, special=not i) for t, i, p in others),
                sequence=sequence,
            )
            await session.send(token)


def text_spec(model: Any = speaks, name: str = "m", **options: Any) -> ModelSpec:
    """A text model as these stories serve it."""
    return spec_of(model, name, family=Family.TEXT, **options)


def lmi(**changes: Any) -> Config:
    """A configuration with another section `lmi`."""
    return Config(lmi=LMIConfig(**changes))


async def ask(
    house: House, path: str, document: Any, *headers: tuple[str, str], kind: str = "http1", line: Any = None
) -> tuple[int, dict[str, str], bytes]:
    """A JSON document (or bytes as they are) posted to a path. The ids that the gateway gives are counted from 1."""
    house.gateway.server.new_id = map("boot%d".__mod__, itertools.count(1)).__next__
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    fields = headers or (("content-type", "application/json"),)
    return await house.ask(path, body, *fields, line=line or house.line(kind))


def parts_of(body: bytes) -> list[bytes]:
    """The PayloadParts of a response stream, which must end well."""
    decoder, parts = bidi.ResponseDecoder(), []
    decoder.receive_data(body)
    while isinstance(event := decoder.next_event(), bidi.PayloadPart):
        parts.append(bytes(event.data))
    decoder.receive_eof()
    assert not isinstance(event, bidi.StreamFailure)
    return parts


# -- golden bytes ------------------------------------------------------------------------------------------------------
# Keys, order, spaces and framing: spec section 1.3, which is what LMI 0.31's own formatters write; TGI's form: section 5.

JSON, LINES, SSE = "application/json", "application/jsonlines", "text/event-stream; charset=utf-8"
T1 = '{"id": 304, "text": "Deep ", "log_prob": -0.05}'
T2 = '{"id": 11157, "text": "Léarning", "log_prob": -1.25}'
T3 = '{"id": 0, "text": "", "log_prob": -0.75, "special_token": true}'
G1 = '{"id": 304, "text": "Deep ", "logprob": -0.05, "special": false}'
G2 = '{"id": 11157, "text": "Léarning", "logprob": -1.25, "special": false}'
PREFILL = '"prefill": [{"id": 7, "text": "Ho", "log_prob": null}, {"id": 8, "text": "w", "log_prob": -0.5}]'
TOP = (
    '"top_tokens": [[{"id": 304, "text": "Deep ", "log_prob": -0.05}, {"id": 305, "text": "Dark ", "log_prob": -0.1}], '
    '[{"id": 11157, "text": "Léarning", "log_prob": -1.25}, {"id": 11158, "text": "Dark ", "log_prob": -2.5}]]'
)
ALL = {"details": True, "decoder_input_details": True, "top_n_tokens": 2, "max_new_tokens": 2}
FACTS = '"finish_reason": "length", "generated_tokens": 2, "inputs": "How"'

GOLDEN: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    # name: (configuration, request beside its inputs, Content-Type, body)
    "json": ({}, {}, JSON, '{"generated_text": "Deep Léarning"}'),
    "json-full-text": (
        {},
        {"parameters": {"return_full_text": True}},
        JSON,
        '{"generated_text": "HowDeep Léarning"}',
    ),
    "json-details": (
        {},
        {"parameters": ALL},
        JSON,
        f'{{"generated_text": "Deep Léarning", "details": {{{FACTS}, "tokens": [{T1}, {T2}], {PREFILL}, {TOP}}}}}',
    ),
    "json-end-of-sequence": (
        {},
        {"parameters": {"details": True}},
        JSON,
        '{"generated_text": "Deep Léarning", "details": {"finish_reason": "eos_token", "generated_tokens": 3, '
        f'"inputs": "How", "tokens": [{T1}, {T2}, {T3}]}}}}',
    ),
    "json-two-sequences": (
        {},
        {"parameters": {"n": 2, "max_new_tokens": 1}},
        JSON,
        '{"generated_text": "Deep ", "details": {"inputs": "How", "finish_reason": "length", "generated_tokens": 1, '
        f'"tokens": [{T1}], "best_of_sequences": [{{"finish_reason": "length", "generated_tokens": 1, '
        '"tokens": [{"id": 1304, "text": "Deep ", "log_prob": -0.05}], "generated_text": "Deep "}]}}',
    ),
    "jsonlines": (
        {},
        {"stream": True},
        LINES,
        f'{{"token": {T1}}}\n{{"token": {T2}}}\n{{"token": {T3}, "generated_text": "Deep Léarning"}}\n',
    ),
    "jsonlines-details": (
        {},
        {"stream": True, "parameters": ALL},
        LINES,
        f'{{"token": {T1}}}\n{{"token": {T2}, "generated_text": "Deep Léarning", '
        f'"details": {{{FACTS}, {PREFILL}, {TOP}}}}}\n',
    ),
    "jsonlines-configured": (
        {"output_formatter": "jsonlines"},
        {"parameters": {"max_new_tokens": 1}},
        LINES,
        f'{{"token": {T1}, "generated_text": "Deep "}}\n',
    ),
    "sse": (
        {"output_formatter": "sse"},
        {"parameters": {"max_new_tokens": 2}},
        SSE,
        f'data: {{"token": {T1}}}\n\ndata: {{"token": {T2}, "generated_text": "Deep Léarning"}}\n\n',
    ),
    "tgi": (
        {"tgi_compat": True},
        {"parameters": {"max_new_tokens": 2, "seed": 5}},
        JSON,
        '[{"generated_text": "Deep Léarning", "details": {"finish_reason": "length", "generated_tokens": 2, "seed": 5, '
        f'"inputs": "How", "tokens": [{G1}, {G2}], "prefill": []}}}}]',
    ),
    "tgi-sse": (
        {"tgi_compat": True},
        {"stream": True, "parameters": {"max_new_tokens": 2}},
        SSE,
        f'data: {{"index": 1, "token": {G1}, "generated_text": null, "details": null}}\n\n'
        f'data: {{"index": 2, "token": {G2}, "generated_text": "Deep Léarning", "details": {{"finish_reason": "length", '
        '"generated_tokens": 2, "seed": null, "input_length": 2, "inputs": "How"}}\n\n',
    ),
}
AT_EACH_ROUTE = [pytest.param(kind, route, id=f"{kind}{route.replace('/', '-')}") for kind in KINDS for route in ROUTES]


@pytest.mark.parametrize("form", GOLDEN)
@pytest.mark.parametrize(("kind", "route"), AT_EACH_ROUTE)
async def test_each_form_at_each_route_byte_by_byte(kind: str, route: str, form: str, autojump_clock: Any) -> None:
    configured, asked, content_type, text = GOLDEN[form]
    async with serving(text_spec(), config=lmi(**configured)) as house:
        status, headers, body = await ask(house, route, {"inputs": "How", **asked}, kind=kind)
        assert (status, headers["content-type"], headers["x-request-id"]) == (200, content_type, "boot1")
        assert body.decode() == text
        if not route.startswith("/endpoints/"):
            assert {name: headers.get(name) for name in LMI_HEADERS} == LMI_HEADERS
        assert house.endings == {"complete": 1}


@pytest.mark.parametrize("form", GOLDEN)
@pytest.mark.parametrize("kind", KINDS)
async def test_the_platforms_stream_carries_the_same_bytes_each_token_a_part(
    kind: str, form: str, autojump_clock: Any
) -> None:
    configured, asked, content_type, text = GOLDEN[form]
    async with serving(text_spec(), config=lmi(**configured)) as house:
        status, headers, body = await ask(house, STREAM, {"inputs": "How", **asked}, kind=kind)
        assert (status, headers["content-type"]) == (200, "application/vnd.amazon.eventstream")
        assert headers["x-amzn-sagemaker-content-type"] == content_type
        parts = parts_of(body)
        assert b"".join(parts).decode() == text
        assert len(parts) == (1 if content_type == JSON else text.count('"token"'))


async def test_a_stream_over_http1_byte_by_byte(autojump_clock: Any) -> None:
    async with serving(text_spec()) as house:
        line = house.line("http1")
        await ask(house, "/predictions/m", {"inputs": "How", "stream": True, "parameters": {"max_new_tokens": 2}}, line=line)
        assert bytes(line.transport.read) == (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/jsonlines\r\n"
            b"cache-control: no-cache; no-store, must-revalidate, private\r\npragma: no-cache\r\n"
            b"expires: Thu, 01 Jan 1970 00:00:00 UTC\r\nx-accel-buffering: no\r\nx-request-id: boot1\r\n"
            + DATE
            + b"transfer-encoding: chunked\r\n\r\n"
            b'3b\r\n{"token": {"id": 304, "text": "Deep ", "log_prob": -0.05}}\n\r\n'
            b'65\r\n{"token": {"id": 11157, "text": "L\xc3\xa9arning", "log_prob": -1.25}, '
            b'"generated_text": "Deep L\xc3\xa9arning"}\n\r\n0\r\n\r\n'
        )


async def test_a_document_over_http1_byte_by_byte(autojump_clock: Any) -> None:
    async with serving(text_spec(), config=lmi(tgi_compat=True)) as house:
        line = house.line("http1")
        await ask(house, "/invocations", {"inputs": "How", "parameters": {"details": False}}, line=line)
        assert bytes(line.transport.read) == (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
            b"cache-control: no-cache; no-store, must-revalidate, private\r\npragma: no-cache\r\n"
            b"expires: Thu, 01 Jan 1970 00:00:00 UTC\r\ncontent-length: 38\r\nx-request-id: boot1\r\n" + DATE + b"\r\n"
            b'[{"generated_text": "Deep L\xc3\xa9arning"}]'
        )


# -- which form: spec section 1.2 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_options", [True, False])
@pytest.mark.parametrize(
    ("option", "asked", "content_type"),
    [
        ({}, {}, JSON),
        ({}, {"stream": True}, LINES),
        ({}, {"parameters": {"stream": True}}, JSON),  # at the top level alone, also by its absence
        ({}, {"stream": None}, JSON),
        ({"output_formatter": "json"}, {"stream": True}, JSON),
        ({"output_formatter": "jsonlines"}, {}, LINES),
        ({"output_formatter": "sse"}, {}, SSE),
        ({"output_formatter": "sse"}, {"parameters": {"output_formatter": "jsonlines"}}, LINES),
        ({"output_formatter": "sse"}, {"parameters": {"output_formatter": "3p"}}, SSE),  # passed over
        ({"tgi_compat": "true"}, {}, JSON),
        ({"tgi_compat": "true"}, {"stream": True}, SSE),
        ({"tgi_compat": "true", "output_formatter": "jsonlines"}, {}, LINES),
    ],
)
async def test_what_decides_the_form(
    by_options: bool, option: dict[str, str], asked: dict[str, Any], content_type: str, autojump_clock: Any
) -> None:
    config = {name: value == "true" if name == "tgi_compat" else value for name, value in option.items()}
    spec = text_spec(options=option if by_options else {})
    async with serving(spec, config=Config() if by_options else lmi(**config)) as house:
        status, headers, _ = await ask(house, "/predictions/m", {"inputs": "How", **asked}, ("accept", "text/html"))
        assert (status, headers["content-type"]) == (200, content_type)


async def test_each_model_has_its_own_options(autojump_clock: Any) -> None:
    specs = [text_spec(name="tgi", options={"tgi_compat": "true"}), text_spec(name="plain")]
    specs.append(text_spec(name="batch", options={"rolling_batch": "disable"}))
    async with serving(*specs, config=lmi(output_formatter="jsonlines")) as house:
        for route in ("/predictions/{}", "/models/{}/invoke", "/invocations?model_name={}"):
            asked = {"inputs": "How", "parameters": {"max_new_tokens": 1}}
            bodies = [(await ask(house, route.format(name), asked))[2] for name in ("tgi", "plain", "batch")]
            assert json.loads(bodies[0])["token"]["logprob"] == -0.05
            assert json.loads(bodies[1])["token"]["log_prob"] == -0.05
            assert json.loads(bodies[2]) == [{"generated_text": "Deep "}]


async def test_plain_text_is_a_prompt(autojump_clock: Any) -> None:
    async def shouts(prompt: Prompt) -> str:
        return prompt.text.upper()

    async with serving(text_spec(shouts)) as house:
        for route in ROUTES:
            _, _, body = await ask(house, route, "hé".encode(), ("content-type", "text/plain; charset=utf-8"))
            assert json.loads(body) == {"generated_text": "HÉ"}


# -- parameters --------------------------------------------------------------------------------------------------------


def parameters_in(house: House, path: str, asked: dict[str, Any]) -> Any:
    return ask(house, path, {"inputs": "x", "parameters": asked})


async def tells(prompt: Prompt) -> AsyncIterator[str]:
    """Answers with the parameters of its prompt."""
    p = prompt.parameters
    yield f"{p.do_sample} {p.temperature:g} {p.top_k} {p.top_p:g} {p.max_new_tokens} {dict(p.extra)}"


@pytest.mark.parametrize(
    ("changes", "asked", "seen"),
    [
        ({}, {}, "False 1 0 1 30 {}"),
        ({}, {"temperature": 0.5, "foo": [1]}, "False 0.5 0 1 30 {'foo': [1]}"),
        ({"do_sample": "0.32"}, {"temperature": 0.5}, "True 0.5 0 1 30 {}"),
        ({"rolling_batch": "trtllm"}, {}, "False 0.8 0 0 30 {}"),
        ({"rolling_batch": "trtllm"}, {"do_sample": True}, "True 1 5 0.85 30 {}"),
        ({"rolling_batch": "lmi-dist"}, {"top_k": -1, "top_p": None}, "False 1 0 1 30 {}"),
    ],
)
async def test_the_configured_table_decides_the_defaults(
    changes: dict[str, Any], asked: dict[str, Any], seen: str, autojump_clock: Any
) -> None:
    async with serving(text_spec(tells), config=lmi(**changes)) as house:
        assert json.loads((await parameters_in(house, "/predictions/m", asked))[2])["generated_text"] == seen


class Picky:
    """A model that says itself what it acts on."""

    parameters = frozenset({"temperature", "max_new_tokens"})

    async def __call__(self, session: Session[Prompt, Any]) -> None:
        await speaks(session)


@pytest.mark.parametrize("by_spec", [True, False])
@pytest.mark.parametrize("route", [*ROUTES, STREAM])
async def test_a_parameter_that_the_model_does_not_support_is_refused_by_its_name(
    route: str, by_spec: bool, autojump_clock: Any
) -> None:
    spec = text_spec(parameters=Picky.parameters) if by_spec else text_spec(Picky())
    async with serving(spec, config=lmi(unsupported="refuse")) as house:
        for refused in ({"top_p": 0.5}, {"nobody_knows": True}, {"temperature": 1, "n": 1}, {"min_length": 2}):
            status, _, body = await parameters_in(house, route, refused)
            named = next(name for name in refused if name not in Picky.parameters)
            assert status == 424
            assert f"parameters.{named}: model 'm' does not support it (lmi.unsupported)" in body.decode()
        for passed in ({"temperature": 0.5}, {"details": True, "stop": "."}, {"top_p": None}, {}):
            assert (await parameters_in(house, route, passed))[0] == 200


async def test_what_only_looks_like_its_parameters_says_nothing(autojump_clock: Any) -> None:
    class Module:
        def parameters(self) -> None:
            """As a module of torch has it."""

        async def __call__(self, session: Session[Prompt, Any]) -> None:
            await speaks(session)

    async with serving(text_spec(Module()), config=lmi(unsupported="refuse")) as house:
        assert (await parameters_in(house, "/predictions/m", {"top_p": 0.5}))[0] == 200


@pytest.mark.parametrize(("spec", "unsupported"), [(text_spec(Picky()), "ignore"), (text_spec(), "refuse")])
async def test_where_it_is_ignored_or_the_model_does_not_say_it_is_passed_over(
    spec: ModelSpec, unsupported: str, autojump_clock: Any
) -> None:
    async with serving(spec, config=lmi(unsupported=unsupported)) as house:
        assert (await parameters_in(house, "/predictions/m", {"top_p": 0.5, "nobody_knows": True}))[0] == 200


# -- several sequences -------------------------------------------------------------------------------------------------


async def told(model: Any, **parameters: Any) -> dict[str, Any]:
    """The document that a model's several sequences become."""
    async with serving(text_spec(model)) as house:
        status, _, body = await parameters_in(house, "/predictions/m", parameters)
        document: dict[str, Any] = json.loads(body)
        assert (status, house.endings) == (200, {"complete": 1}), document
        return document


def texts_in(document: dict[str, Any]) -> list[str]:
    others = document["details"].get("best_of_sequences", [])
    return [document["generated_text"], *(other["generated_text"] for other in others)]


async def test_sequences_may_come_one_after_another_and_in_any_order(autojump_clock: Any) -> None:
    async def backwards(session: Session[Prompt, Any]) -> None:
        await session.receive()
        for sequence in (2, 0, 1):
            for letter in "abc"[: 3 - sequence]:
                await session.send(Token(text=f"{letter}{sequence}", sequence=sequence))
            await session.send(Finish(reason=FinishReason.STOP_SEQUENCE, sequence=sequence))

    document = await told(backwards, n=3)
    assert texts_in(document) == ["a0b0c0", "a1b1", "a2"]
    reasons = [document["details"], *document["details"]["best_of_sequences"]]
    assert [one["finish_reason"] for one in reasons] == ["stop_sequence"] * 3


async def test_a_model_that_knows_of_one_sequence_alone_is_stopped_at_its_last_token(autojump_clock: Any) -> None:
    async def endless(session: Session[Prompt, Any]) -> None:
        await session.receive()
        while True:
            await session.send(Token(text="a"))

    document = await told(endless, n=2, max_new_tokens=3)
    assert (texts_in(document), document["details"]["finish_reason"]) == (["aaa"], "length")


async def test_a_model_may_go_on_with_another_sequence_when_one_is_complete(autojump_clock: Any) -> None:
    async def careless(session: Session[Prompt, Any]) -> None:
        await session.receive()
        for sequence in range(2):
            with suppress(trio.ClosedResourceError):
                while True:
                    await session.send(Token(text="ab"[sequence], sequence=sequence))

    assert texts_in(await told(careless, n=2, max_new_tokens=2)) == ["aa", "bb"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reason_that_is_none_is_the_models_error(stream: bool, autojump_clock: Any) -> None:
    async def unreasonable(session: Session[Prompt, Any]) -> None:
        await session.receive()
        await session.send(Finish(reason="length"))  # type: ignore[arg-type]

    async with serving(text_spec(unreasonable)) as house:
        status, _, body = await ask(house, "/predictions/m", {"inputs": "x", "stream": stream})
        assert (status, "the model failed; incident" in json.loads(body)["error"]) == (424, True)
        assert house.endings == {"model-error": 1}


@pytest.mark.parametrize("stray", [Token(text="a", sequence=1), Finish(reason=FinishReason.LENGTH, sequence=5)])
async def test_a_sequence_that_nobody_asked_for_is_the_models_error(stray: Any, autojump_clock: Any) -> None:
    async def lost(session: Session[Prompt, Any]) -> None:
        await session.receive()
        await session.send(stray)

    async with serving(text_spec(lost)) as house:
        status, _, body = await ask(house, "/predictions/m", {"inputs": "x"})
        assert (status, json.loads(body)["details"]["finish_reason"]) == (500, "error")
        assert json.loads(body)["error"] == (
            f"the model sent a token of sequence {stray.sequence}, where 0 to 0 were asked for"
        )
        assert house.endings == {"model-error": 1}


# -- side by side ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [{"top_p": 7}, {"max_new_tokens": "many"}, {"n": 2}])
async def test_of_twenty_at_once_the_one_with_a_bad_parameter_is_refused_and_nineteen_are_untouched(
    kind: str, bad: dict[str, Any], autojump_clock: Any
) -> None:
    arrived, go = [], trio.Event()

    async def together(prompt: Prompt) -> AsyncIterator[str]:
        yield prompt.text
        arrived.append(prompt.text)
        if len(arrived) == 19:
            go.set()
        await go.wait()
        yield "!"

    answers: dict[int, tuple[int, bytes]] = {}

    async def one(house: House, line: Any, number: int) -> None:
        asked = {"inputs": str(number), "stream": True, "parameters": bad if number == 7 else {}}
        status, _, body = await ask(house, "/predictions/m", asked, line=line)
        answers[number] = status, body

    async with serving(text_spec(together)) as house:
        with at_once():
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(one, house, house.line(kind), number)
        status, body = answers.pop(7)
        refused = json.loads(body)
        assert (status, refused["code"], refused["details"]["finish_reason"]) == (424, 424, "error")
        assert f"parameters.{next(iter(bad))}" in refused["error"]
        for number, (status, body) in answers.items():
            assert (status, json.loads(body.splitlines()[-1])["generated_text"]) == (200, f"{number}!")
        assert house.endings == {"complete": 19, "refused": 1}


@pytest.mark.parametrize("form", ["jsonlines", "sse"])
async def test_each_token_leaves_when_it_is_sent(form: str, autojump_clock: Any) -> None:
    go = trio.Event()

    async def slow(prompt: Prompt) -> AsyncIterator[str]:
        yield "a"
        await go.wait()
        yield "b"

    async with serving(text_spec(slow), config=lmi(output_formatter=form)) as house:
        line = house.line("http1")
        await line.send(*house.posted(1, "/predictions/m", b'{"inputs":"x"}'))
        with at_once():
            first = await line.data(1)
            assert isinstance(first, Data)
            assert b'"text": "a"' in bytes(first.buffers[0])
        go.set()
        assert b'"text": "b"' in bytes((await line.data(1)).buffers[0])
