"""generate and generate_stream: models of tensors by their inputs' names, models of text by text_input."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import trio

from gateway.dialects.v2 import generate
from models.adapt import spec_of
from models.errors import ModelError
from models.messages import Finish, FinishReason, InferRequest, Part, Prompt, Token
from models.session import Session
from models.spec import ModelSpec, TensorSpec
from tests.gateway.dialects.v2.test_v2_streams import events_in
from tests.gateway.promises import House, at_once, serving

STREAM, UNARY = "generate_stream", "generate"


async def mock(request: InferRequest) -> AsyncIterator[Any]:
    """As the model of Triton's own tests: the prompt, REPETITION times, and an error then if FAIL_LAST."""
    given = {tensor.name: tensor.data for tensor in request.inputs}
    for _ in range(int(given["REPETITION"][0]) if "REPETITION" in given else 1):
        yield {"TEXT": given["PROMPT"]}
    if "FAIL_LAST" in given and given["FAIL_LAST"][0]:
        raise ModelError("An Error Occurred", status=422)


def mock_llm() -> ModelSpec:
    inputs = (
        TensorSpec(name="PROMPT", datatype="BYTES", shape=(1,)),
        TensorSpec(name="REPETITION", datatype="UINT32", shape=(1,), optional=True),
        TensorSpec(name="FAIL_LAST", datatype="BOOL", shape=(1,), optional=True),
    )
    return spec_of(mock, "m", inputs=inputs, outputs=(TensorSpec(name="TEXT", datatype="BYTES", shape=(1,)),))


async def ask(
    house: House, route: str, members: Any, *, kind: str = "http1", model: str = "m"
) -> tuple[int, dict[str, str], bytes]:
    body = members if isinstance(members, bytes) else json.dumps(members).encode()
    return await house.ask(f"/v2/models/{model}/{route}", body, line=house.line(kind))


@pytest.mark.parametrize("kind", ["http1", "http2"])
@pytest.mark.parametrize("path", ["m", "m/versions/1"])
async def test_generate_answers_with_the_outputs_by_name(kind: str, path: str) -> None:
    async with serving(mock_llm()) as house:
        status, headers, body = await ask(house, UNARY, {"PROMPT": "hello world", "id": "42"}, kind=kind, model=path)
        assert (status, headers["content-type"]) == (200, "application/json")
        assert json.loads(body) == {"model_name": "m", "model_version": "1", "id": "42", "TEXT": "hello world"}


async def test_generate_stream_has_an_event_for_each_response() -> None:
    async with serving(mock_llm()) as house:
        status, headers, body = await ask(house, STREAM, {"PROMPT": ["hello"], "REPETITION": 3})
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert body.startswith(b'data: {"')
        assert events_in(body) == [{"model_name": "m", "model_version": "1", "TEXT": "hello"}] * 3


LINE_ENDS = "one\x85two\u2028three\u2029four"


async def test_an_event_is_one_line_also_for_who_reads_lines_of_unicode() -> None:
    async def says(prompt: Prompt) -> AsyncIterator[str]:
        yield LINE_ENDS
        raise ModelError(LINE_ENDS)

    tensor = {"name": "PROMPT", "datatype": "BYTES", "shape": [1], "data": [LINE_ENDS]}
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("m", STREAM, {"PROMPT": LINE_ENDS}),
        ("m", "infer_stream", {"inputs": [tensor]}),
        ("says", STREAM, {"text_input": "x"}),
    ]
    async with serving(mock_llm(), spec_of(says)) as house:
        for model, route, members in asked:
            _, _, body = await ask(house, route, members, model=model)
            events = events_in(body)
            assert [line for line in body.decode().splitlines() if line] == body.decode().split("\n\n")[:-1]
            assert len(events) == (2 if model == "says" else 1)
            assert all(LINE_ENDS in json.dumps(event, ensure_ascii=False) for event in events)


@pytest.mark.parametrize(("times", "code"), [(0, "without an answer"), (2, "generate_stream")])
async def test_generate_wants_exactly_one_response(times: int, code: str) -> None:
    async with serving(mock_llm()) as house:
        status, headers, body = await ask(house, UNARY, {"PROMPT": "hello", "REPETITION": times})
        assert (status, headers["content-type"]) == (500, "application/json")
        assert code in json.loads(body)["error"]
        assert house.endings == {"model-error": 1}


async def test_generate_stream_may_have_no_response() -> None:
    async with serving(mock_llm()) as house:
        status, _, body = await ask(house, STREAM, {"PROMPT": "hello", "REPETITION": 0})
        assert (status, body) == (200, b"")


async def test_the_status_of_a_stream_is_that_of_its_first_response() -> None:
    async with serving(mock_llm()) as house:
        status, headers, body = await ask(house, STREAM, {"PROMPT": "hello", "REPETITION": 0, "FAIL_LAST": True})
        assert (status, headers["content-type"]) == (422, "application/json")
        assert json.loads(body) == {"error": "An Error Occurred"}
        status, _, body = await ask(house, STREAM, {"PROMPT": "hello", "FAIL_LAST": True})
        assert status == 200
        assert [event.get("TEXT", event.get("error")) for event in events_in(body)] == ["hello", "An Error Occurred"]


@pytest.mark.parametrize("route", [UNARY, STREAM])
@pytest.mark.parametrize(
    ("members", "status", "word"),
    [
        ({}, 400, "'PROMPT'"),
        ({"PROMPT": 3}, 400, "'PROMPT'"),
        ({"PROMPT": "a", "parameters": 3}, 400, "parameters"),
        (b'{"PROMPT":"a","PROMPT":"b"}', 400, "'PROMPT'"),
        ({"PROMPT": "a", "x": {}}, 400, "'x'"),
        ({"PROMPT": "a", "timeout": "soon"}, 400, "timeout"),
    ],
)
async def test_what_is_wrong_with_a_request_is_a_json_error(route: str, members: Any, status: int, word: str) -> None:
    async with serving(mock_llm()) as house:
        got, headers, body = await ask(house, route, members)
        assert (got, headers["content-type"], word in json.loads(body)["error"]) == (status, "application/json", True)


@pytest.mark.parametrize("route", [UNARY, STREAM])
async def test_unknown_models_and_versions_are_404(route: str) -> None:
    async with serving(mock_llm()) as house:
        for model in ("nobody", "m/versions/2"):
            assert (await ask(house, route, {"PROMPT": "a"}, model=model))[0] == 404


@pytest.mark.parametrize("route", [UNARY, STREAM])
async def test_the_parameter_timeout_is_a_deadline(route: str, autojump_clock: Any) -> None:
    async def slow(request: InferRequest) -> Any:
        assert request.parameters == {"timeout": 1_500_000}
        await trio.sleep_forever()

    async with serving(spec_of(slow, "m", timeout=60)) as house:
        status, _, body = await ask(house, route, {"x": 1, "parameters": {"timeout": 1_500_000}})
        assert (status, trio.current_time(), "parameter timeout" in json.loads(body)["error"]) == (504, 1.5, True)


async def words(prompt: Prompt) -> AsyncIterator[Any]:
    """Its own parameters as a first word, and then those of the prompt."""
    yield Token(text="prompt", prefill=True)
    yield f"{prompt.parameters.temperature:g}"
    for word in prompt.text.split():
        yield f" {word}"


@pytest.mark.parametrize("beside", [True, False])
async def test_a_model_of_text_continues_text_input(beside: bool) -> None:
    async with serving(spec_of(words, "m")) as house:
        given = {"temperature": 0.5} if beside else {"parameters": {"temperature": 0.5}}
        status, headers, body = await ask(house, UNARY, {"text_input": "é b", "id": "42", **given})
        assert (status, headers["content-type"]) == (200, "application/json")
        assert json.loads(body) == {"model_name": "m", "model_version": "1", "text_output": "0.5 é b", "id": "42"}
        status, headers, body = await ask(house, STREAM, {"text_input": "é b", "id": "42", **given})
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert [event["text_output"] for event in events_in(body)] == ["0.5", " é", " b"]
        assert events_in(body)[0]["id"] == "42"


async def test_the_json_of_a_long_text_is_made_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def long(prompt: Prompt) -> AsyncIterator[str]:
        for _ in range(10):
            yield "é" * 10_000

    threads: list[int] = []
    render = generate._text_reply

    def reply(*given: Any) -> bytes:
        threads.append(threading.get_ident())
        return render(*given)

    monkeypatch.setattr(generate, "_text_reply", reply)
    async with serving(spec_of(long, "m")) as house:
        _, _, body = await ask(house, UNARY, {"text_input": "x", "max_tokens": 1000})
    assert json.loads(body)["text_output"] == "é" * 100_000
    assert len(threads) == 1
    assert threads != [threading.get_ident()]


@pytest.mark.parametrize("route", [UNARY, STREAM])
async def test_a_text_is_complete_at_the_number_of_tokens_asked_for_or_when_the_model_says_so(route: str) -> None:
    async def endless(session: Session[Prompt, Token | Finish]) -> None:
        await session.receive()
        while True:
            await session.send(Token(text="a"))

    async def finished(session: Session[Prompt, Token | Finish]) -> None:
        await session.receive()
        await session.send(Token(text="a"))
        await session.send(Token(text="b", finish=FinishReason.STOP_SEQUENCE))

    async def finishing(session: Session[Prompt, Token | Finish]) -> None:
        await session.receive()
        await session.send(Token(text="ab"))
        await session.send(Finish(reason=FinishReason.EOS_TOKEN))
        await session.send(Token(text="c"))

    async with serving(spec_of(endless, "m"), spec_of(finished, "n"), spec_of(finishing, "o")) as house:
        for model, text in (("m", "aaaaa"), ("n", "ab"), ("o", "ab")):
            status, _, body = await ask(house, route, {"text_input": "x", "max_new_tokens": 5}, model=model)
            replies = [json.loads(body)] if route == UNARY else events_in(body)
            assert (status, "".join(reply["text_output"] for reply in replies)) == (200, text)
        assert house.endings == {"complete": 3}


@pytest.mark.parametrize("route", [UNARY, STREAM])
@pytest.mark.parametrize(
    ("members", "word"),
    [
        ({}, "text_input"),
        ({"text_input": 3}, "text_input"),
        ({"text_input": ""}, "text_input"),
        (b'{"text_input": "a", "temperature": NaN}', "JSON"),
        ({"text_input": "a", "temperature": -1}, "temperature"),
        ({"text_input": "a", "parameters": {"top_p": 7}}, "top_p"),
        ({"text_input": "a", "top_p": 0.5, "parameters": {"top_p": 0.5}}, "'top_p'"),
        ({"text_input": "a", "id": 7}, "id"),
        ({"text_input": "a", "timeout": -1}, "timeout"),
        (b"nonsense", "JSON"),
    ],
)
async def test_what_is_wrong_with_a_request_for_text_is_named(route: str, members: Any, word: str) -> None:
    async with serving(spec_of(words, "m")) as house:
        status, headers, body = await ask(house, route, members)
        assert (status, headers["content-type"], word in json.loads(body)["error"]) == (400, "application/json", True)


async def test_a_model_of_text_that_fails_is_a_status_or_the_last_event() -> None:
    async def failing(prompt: Prompt) -> AsyncIterator[str]:
        if prompt.text == "a":
            yield prompt.text
        raise ModelError("no such voice", status=422)

    async with serving(spec_of(failing, "m")) as house:
        for route in (UNARY, STREAM):
            status, _, body = await ask(house, route, {"text_input": "b"})
            assert (status, json.loads(body)) == (422, {"error": "no such voice"})
        assert (await ask(house, UNARY, {"text_input": "a"}))[0] == 422
        status, _, body = await ask(house, STREAM, {"text_input": "a"})
        assert (status, events_in(body)[-1]) == (200, {"error": "no such voice"})


async def test_a_token_leaves_when_it_is_sent(autojump_clock: Any) -> None:
    go = trio.Event()

    async def slow(prompt: Prompt) -> AsyncIterator[str]:
        yield "a"
        await go.wait()
        yield "b"

    async with serving(spec_of(slow, "m")) as house:
        line = house.line("http1")
        await line.send(*house.posted(1, "/v2/models/m/generate_stream", b'{"text_input":"x"}'))
        with at_once():
            assert events_in(bytes((await line.data(1)).buffers[0]))[0]["text_output"] == "a"
        go.set()
        assert events_in(bytes((await line.data(1)).buffers[0]))[0]["text_output"] == "b"


async def test_a_model_of_parts_answers_as_a_model_of_text() -> None:
    def parts(part: Part) -> bytes:
        return bytes(part.data).upper()

    async with serving(spec_of(parts, "m")) as house:
        status, _, body = await ask(house, UNARY, {"text_input": "abc"})
        assert (status, json.loads(body)["text_output"]) == (200, "ABC")


async def test_an_undeclared_model_takes_every_member_as_an_input() -> None:
    def total(request: InferRequest) -> Any:
        return {"sum": np.array([request["a"].sum() + request["b"].sum()])}

    async with serving(spec_of(total, "m")) as house:
        status, _, body = await ask(house, UNARY, {"a": [1, 2], "b": 3.5, "parameters": {"c": 1}})
        assert (status, json.loads(body)["sum"]) == (200, 6.5)
