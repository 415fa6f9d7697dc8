"""v2's infer_stream: forms, statuses, errors before and after the first response, what the client asked for, deadlines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import trio

from models.adapt import spec_of
from models.errors import ModelError
from models.messages import InferRequest, InferResponse, Tensor
from models.session import Session
from models.spec import TensorSpec
from protocols import v2
from protocols.sse import ServerSentEvent, SSEDecoder
from tests.gateway.promises import House, at_once, serving

FRAMED = ("accept", v2.FRAMES)


async def count(session: Session[InferRequest, InferResponse]) -> None:
    """As many responses as the request says."""
    async for request in session:
        for number in range(int(request["n"][0])):
            await session.send(InferResponse(outputs=(Tensor(name="y", data=np.array([number, number + 1], np.int32)),)))


def asked(n: Any = 3, **members: Any) -> bytes:
    tensor = {"name": "n", "shape": [1], "datatype": "INT64", "data": [n]}
    return json.dumps({"inputs": [tensor], **members}).encode()


def events_in(body: bytes) -> list[Any]:
    decoder = SSEDecoder()
    decoder.receive_data(body)
    found = []
    while isinstance(event := decoder.next_event(), ServerSentEvent):
        found.append(json.loads(event.data))
    return found


def frames_in(body: bytes) -> list[v2.V2Frame]:
    decoder, found = v2.FrameDecoder(), []
    decoder.receive_data(body)
    while isinstance(frame := decoder.next_frame(), v2.V2Frame):
        found.append(frame)
    decoder.receive_eof()
    return found


async def stream(
    house: House, body: bytes, *headers: tuple[str, str], kind: str = "http1", path: str = ""
) -> tuple[int, dict[str, str], bytes]:
    return await house.ask(path or "/v2/models/m/infer_stream", body, *headers, line=house.line(kind))


@pytest.mark.parametrize("kind", ["http1", "http2"])
@pytest.mark.parametrize("path", ["", "/v2/models/m/versions/1/infer_stream"])
async def test_each_response_is_an_event_with_a_v2_reply(kind: str, path: str) -> None:
    async with serving(spec_of(count, "m")) as house:
        status, headers, body = await stream(house, asked(2, id="7"), kind=kind, path=path)
        assert (status, headers["content-type"], headers["cache-control"]) == (
            200,
            "text/event-stream; charset=utf-8",
            "no-cache",
        )
        output = {"name": "y", "datatype": "INT32", "shape": [2]}
        assert events_in(body) == [
            {"model_name": "m", "model_version": "1", "id": "7", "outputs": [{**output, "data": data}]}
            for data in ([0, 1], [1, 2])
        ]


@pytest.mark.parametrize("kind", ["http1", "http2"])
@pytest.mark.parametrize("binary", [True, False])
async def test_each_response_is_a_frame_for_those_who_accept_frames(kind: str, binary: bool) -> None:
    async with serving(spec_of(count, "m")) as house:
        outputs = [{"name": "y", "parameters": {"binary_data": binary}}]
        status, headers, body = await stream(house, asked(2, outputs=outputs), FRAMED, kind=kind)
        assert (status, headers["content-type"]) == (200, v2.FRAMES)
        frames = frames_in(body)
        assert [len(frame.body) - frame.header_length for frame in frames] == [8 if binary else 0] * 2
        replies = [v2.decode_streamed_reply(frame.body, frame.header_length) for frame in frames]
        assert [reply["y"].elements.tolist() for reply in replies] == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    "wanted",
    [{"parameters": {"binary_data_output": True}}, {"outputs": [{"name": "y", "parameters": {"binary_data": True}}]}],
)
async def test_binary_outputs_in_events_are_refused_with_the_word_for_frames(wanted: dict[str, Any]) -> None:
    calls = []

    async def model(session: Session[InferRequest, InferResponse]) -> None:
        calls.append(session)

    async with serving(spec_of(model, "m")) as house:
        status, _, body = await stream(house, asked(**wanted))
        assert status == 400
        assert f"accept: {v2.FRAMES}" in json.loads(body)["error"]
        assert not calls


@pytest.mark.parametrize("form", [(), (FRAMED,)])
async def test_a_model_that_gives_no_response_gives_an_empty_stream(form: tuple[tuple[str, str], ...]) -> None:
    async with serving(spec_of(count, "m")) as house:
        status, _, body = await stream(house, asked(0), *form)
        assert (status, body) == (200, b"")
        assert house.endings == {"complete": 1}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v2/models/nobody/infer_stream", asked(), 404),
        ("/v2/models/m/versions/9/infer_stream", asked(), 404),
        ("/v2/models/text/infer_stream", asked(), 400),
        ("/v2/models/m/infer_stream", b"{}", 400),
        ("/v2/models/m/infer_stream", asked("x"), 400),
        ("/v2/models/m/infer_stream", asked(parameters={"timeout": "soon"}), 400),
    ],
)
async def test_what_is_wrong_with_a_request_is_an_http_error(path: str, body: bytes, status: int) -> None:
    def text(prompt: str) -> str:
        return prompt

    async with serving(spec_of(count, "m"), spec_of(text, "text")) as house:
        got, headers, answer = await stream(house, body, path=path)
        assert (got, headers["content-type"]) == (status, "application/json")
        assert json.loads(answer)["error"]


def failing(after: int, error: Exception) -> Any:
    async def model(request: InferRequest) -> AsyncIterator[Any]:
        for number in range(after):
            yield np.array([number])
        raise error

    return model


@pytest.mark.parametrize("form", [(), (FRAMED,)])
@pytest.mark.parametrize(("error", "status", "text"), [
    (ModelError("no such voice", status=422), 422, "no such voice"), (RuntimeError("secret"), 500, "incident"),
])  # fmt: skip
async def test_an_error_before_the_first_response_is_a_status_and_later_the_last_event(
    error: Exception, status: int, text: str, form: tuple[tuple[str, str], ...]
) -> None:
    async with serving(spec_of(failing(0, error), "at_once"), spec_of(failing(2, error), "later")) as house:
        got, headers, body = await stream(house, asked(), *form, path="/v2/models/at_once/infer_stream")
        assert (got, headers["content-type"]) == (status, "application/json")
        assert text in json.loads(body)["error"]
        got, _, body = await stream(house, asked(), *form, path="/v2/models/later/infer_stream")
        assert got == 200
        replies = [json.loads(bytes(frame.body)) for frame in frames_in(body)] if form else events_in(body)
        assert [list(reply) for reply in replies] == [["model_name", "model_version", "outputs"]] * 2 + [["error"]]
        assert text in replies[-1]["error"]
        assert house.endings == {"model-error": 2}


async def test_an_output_that_json_cannot_carry_is_the_clients_error() -> None:
    def model(request: InferRequest) -> Any:
        return {"y": np.array([b"\xff"], object)}

    async with serving(spec_of(model, "m")) as house:
        status, _, body = await stream(house, asked())
        assert (status, "binary_data" in json.loads(body)["error"]) == (400, True)
        status, _, body = await stream(house, asked(parameters={"binary_data_output": True}), FRAMED)
        (frame,) = frames_in(body)
        assert bytes(frame.body[frame.header_length :]) == b"\1\0\0\0\xff"


async def test_an_output_that_the_model_owes_is_the_models_error() -> None:
    def model(request: InferRequest) -> Any:
        return {"z": np.array([1])}

    spec = spec_of(model, "m", outputs=(TensorSpec(name="y", datatype="INT64", shape=(1,)),))
    async with serving(spec) as house:
        status, _, _ = await stream(house, asked(outputs=[{"name": "y"}]))
        assert status == 500
        assert house.endings == {"model-error": 1}


async def test_outputs_come_as_they_were_asked_for_in_each_response() -> None:
    async def model(request: InferRequest) -> AsyncIterator[Any]:
        for number in range(2):
            yield {"a": np.array([number]), "b": np.array([10 * number])}

    async with serving(spec_of(model, "m")) as house:
        _, _, body = await stream(house, asked(outputs=[{"name": "b"}]))
        assert [[output["name"] for output in reply["outputs"]] for reply in events_in(body)] == [["b"], ["b"]]


async def test_a_model_may_use_its_array_again_for_the_next_response() -> None:
    size = 300_000  # beyond the send buffer, and what is copied in one step

    async def model(request: InferRequest) -> AsyncIterator[Any]:
        state = np.zeros(size, np.int64)
        for _ in range(4):
            yield state
            state += 1

    async with serving(spec_of(model, "m")) as house:
        _, _, body = await stream(house, asked(parameters={"binary_data_output": True}), FRAMED)
        numbers = [v2.decode_streamed_reply(f.body, f.header_length).outputs[0].elements for f in frames_in(body)]
        assert [(a.min(), a.max()) for a in numbers] == [(n, n) for n in range(4)]


async def test_a_raw_request_is_answered_in_frames() -> None:
    def model(request: InferRequest) -> Any:
        return request["x"] + 1

    spec = spec_of(model, "m", inputs=(TensorSpec(name="x", datatype="UINT8", shape=(-1,)),))
    async with serving(spec) as house:
        raw = ("inference-header-content-length", "0")
        status, _, body = await stream(house, b"abc", raw)
        assert (status, "accept" in json.loads(body)["error"]) == (400, True)
        _, _, body = await stream(house, b"abc", raw, FRAMED)
        (frame,) = frames_in(body)
        assert bytes(frame.body[frame.header_length :]) == b"bcd"


async def test_the_parameter_timeout_is_a_deadline_that_the_model_sees(autojump_clock: Any) -> None:
    seen = []

    async def model(session: Session[InferRequest, InferResponse]) -> None:
        await session.receive()
        seen.append(session.deadline - trio.current_time())
        await session.send(InferResponse(outputs=(Tensor(name="y", data=np.zeros(1)),)))
        await trio.sleep_forever()

    async with serving(spec_of(model, "m", timeout=100), spec_of(model, "short", timeout=1)) as house:
        _, _, body = await stream(house, asked(parameters={"timeout": 2_500_000}))
        assert seen == [2.5]
        assert trio.current_time() >= 2.5
        assert "2.5 s are over (parameter timeout of the request)" in events_in(body)[-1]["error"]
        path = "/v2/models/short/infer_stream"
        _, _, body = await stream(house, asked(parameters={"timeout": 2_500_000}), path=path)
        assert "models.short.timeout" in events_in(body)[-1]["error"]
        _, _, body = await stream(house, asked(parameters={"timeout": 0}), path=path)
        assert seen[1:] == [1, 1]
        assert house.endings == {"deadline": 3}


@pytest.mark.parametrize("route", ["infer", "infer_stream"])
async def test_a_request_whose_time_is_over_before_it_has_a_slot_is_told_so(route: str, autojump_clock: Any) -> None:
    calls = []

    async def model(session: Session[InferRequest, InferResponse]) -> None:
        calls.append(await session.receive())
        await trio.sleep_forever()

    async with serving(spec_of(model, "m", capacity=1, timeout=10)) as house, trio.open_nursery() as nursery:
        path = f"/v2/models/m/{route}"
        nursery.start_soon(stream, house, asked())
        await house.still()
        status, _, body = await stream(house, asked(parameters={"timeout": 3_000_000}), path=path)
        assert (status, trio.current_time(), len(calls)) == (504, 3, 1)
        assert "parameter timeout" in json.loads(body)["error"]


@pytest.mark.parametrize("value", ["1", 1.0, -1, True, 2**63, None, []])
@pytest.mark.parametrize("route", ["infer", "infer_stream"])
async def test_a_timeout_that_is_no_number_of_microseconds_is_refused_by_name(route: str, value: Any) -> None:
    async with serving(spec_of(count, "m")) as house:
        status, _, body = await stream(house, asked(parameters={"timeout": value}), path=f"/v2/models/m/{route}")
        assert (status, "timeout" in json.loads(body)["error"]) == (400, True)


async def test_unary_infer_ends_at_the_timeout_of_the_request(autojump_clock: Any) -> None:
    async def model(session: Session[InferRequest, InferResponse]) -> None:
        await session.receive()
        await trio.sleep_forever()

    async with serving(spec_of(model, "m", timeout=100)) as house:
        status, _, body = await stream(house, asked(parameters={"timeout": 50_000}), path="/v2/models/m/infer")
        assert (status, "0.05 s are over (parameter timeout" in json.loads(body)["error"]) == (504, True)


async def test_a_response_leaves_when_it_is_sent(autojump_clock: Any) -> None:
    go = trio.Event()

    async def model(request: InferRequest) -> AsyncIterator[Any]:
        yield np.array([1])
        await go.wait()
        yield np.array([2])

    async with serving(spec_of(model, "m")) as house:
        line = house.line("http1")
        await line.send(*house.posted(1, "/v2/models/m/infer_stream", asked()))
        with at_once():
            first = bytes((await line.data(1)).buffers[0])
            assert events_in(first)[0]["outputs"][0]["data"] == [1]
        go.set()
        assert events_in(bytes((await line.data(1)).buffers[0]))[0]["outputs"][0]["data"] == [2]


async def test_classes_of_an_output_come_in_place_of_it_on_every_route() -> None:
    def model(request: InferRequest) -> Any:
        return {"y": np.array([[1, 3, 2]], np.float32)}

    declared = TensorSpec(name="y", datatype="FP32", shape=(-1, 3), labels=("cat", "dog"))
    async with serving(spec_of(model, "m", outputs=(declared,))) as house:
        body = asked(outputs=[{"name": "y", "parameters": {"classification": 2}}])
        status, _, answer = await stream(house, body, path="/v2/models/m/infer")
        assert (status, json.loads(answer)["outputs"]) == (
            200,
            [{"name": "y", "datatype": "BYTES", "shape": [1, 2], "data": ["3.000000:1:dog", "2.000000:2"]}],
        )
        _, _, answer = await stream(house, body)
        assert events_in(answer)[0]["outputs"][0]["data"] == ["3.000000:1:dog", "2.000000:2"]
