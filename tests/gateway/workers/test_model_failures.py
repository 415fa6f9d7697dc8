"""A model's failure is told in the same words on every route, and the log has the reason of each."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio

from gateway.config import Config, LMIConfig
from models.adapt import blocking, spec_of
from models.errors import ModelError
from models.messages import Family, InferRequest, InferResponse, Part, Prompt, Tensor, Token
from models.session import Session
from models.spec import Batching, Model, ModelSpec, Restart, RestartPolicy, TensorSpec
from protocols import v2
from protocols.events import Close
from tests.gateway.dialects.v2.test_v2_sessions import join
from tests.gateway.promises import House, serving

DECLARED = (TensorSpec(name="y", datatype="FP32", shape=(2,)), TensorSpec(name="z", datatype="INT64", shape=(1,)))
Y, Z = np.zeros(2, np.float32), np.zeros(1, np.int64)


def answer(**outputs: Any) -> InferResponse:
    return InferResponse(outputs=tuple([Tensor(name=name, data=data) for name, data in outputs.items()]))


FAULTS: dict[str, tuple[Callable[[], InferResponse | None], str]] = {
    "datatype": (
        lambda: answer(y=Y.astype(np.float64), z=Z),
        "output 'y' of model 'm' is declared as FP32, the model gave FP64",
    ),
    "shape": (
        lambda: answer(y=np.zeros(3, np.float32), z=Z),
        "output 'y' of model 'm': its shape must be [2] (-1 is any), the model gave [3]",
    ),
    "undeclared": (
        lambda: answer(y=Y, z=Z, w=Z),
        "output 'w' of model 'm' is not one that it declares: 'y', 'z'",
    ),
    "missing": (
        lambda: answer(y=Y),
        "output 'z' of model 'm' is declared, and the model gave 'y'",
    ),
    "all missing": (
        lambda: InferResponse(outputs=()),
        "output 'y' of model 'm' is declared, and the model gave none",
    ),
    "twice": (
        lambda: InferResponse(outputs=(Tensor(name="y", data=Y), Tensor(name="z", data=Z), Tensor(name="y", data=Y))),
        "the model gave two outputs with the name 'y'",
    ),
}

X = {"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}
ASKED, SIMPLE = json.dumps({"inputs": [X]}).encode(), json.dumps({"x": 1}).encode()
BINARY = json.dumps({"inputs": [X], "parameters": {"binary_data_output": True}}).encode()
FRAMES = ("accept", v2.FRAMES)
JSON = ("content-type", "application/json")
ROUTES: dict[str, tuple[str, bytes, tuple[tuple[str, str], ...]]] = {
    "infer": ("/v2/models/m/infer", ASKED, ()),
    "infer, binary": ("/v2/models/m/infer", BINARY, ()),
    "infer_stream, events": ("/v2/models/m/infer_stream", ASKED, ()),
    "infer_stream, frames": ("/v2/models/m/infer_stream", BINARY, (FRAMES,)),
    "generate": ("/v2/models/m/generate", SIMPLE, ()),
    "generate_stream": ("/v2/models/m/generate_stream", SIMPLE, ()),
    "the container": ("/invocations?model_name=m", ASKED, (JSON,)),
    "the container's model": ("/models/m/invoke", ASKED, (JSON,)),
    "the platform": ("/endpoints/m/invocations", ASKED, (JSON,)),
    "the platform's stream": ("/endpoints/m/invocations-response-stream", ASKED, (JSON,)),
}


def giving(make: Callable[[], InferResponse | None], *, batched: bool = False) -> ModelSpec:
    @blocking(False)
    def model(request: InferRequest) -> InferResponse | None:
        made = make()
        if made is not None and batched:
            rows = request["x"].shape[0]
            outputs = [Tensor(name=t.name, data=np.repeat(t.data[None], rows, 0)) for t in made.outputs]
            return InferResponse(outputs=tuple(outputs))
        return made

    rows: dict[str, Any] = {"max_batch_size": 4, "batching": Batching()} if batched else {}
    inputs = (TensorSpec(name="x", datatype="INT64", shape=() if batched else (1,)),)
    return spec_of(model, "m", inputs=inputs, outputs=DECLARED, **rows)


@asynccontextmanager
async def failing(spec: ModelSpec, config: Config | None = None) -> AsyncIterator[House]:
    async with serving(spec, config=config) as house:
        yield house


def reasons(caplog: pytest.LogCaptureFixture) -> Iterator[tuple[str, str]]:
    """The log's lines about the model's failures: the level and the reason of each."""
    for record in caplog.records:
        if record.message == "model failed":
            said = vars(record)
            assert (said["model"], bool(said["id"])) == ("m", True)
            yield record.levelname, said["reason"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_broken_declaration_is_one_error_on_every_route(
    fault: str, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, said = FAULTS[fault]
    path, body, headers = ROUTES[route]
    async with failing(giving(make)) as house:
        status, _, told = await house.ask(path, body, *headers)
        assert status >= 400
        assert said in told.decode()
        assert house.endings == {"model-error": 1}
    assert list(reasons(caplog)) == [("ERROR", said)]


@pytest.mark.parametrize("fault", FAULTS)
async def test_and_in_a_session_of_requests(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    make, said = FAULTS[fault]
    async with failing(giving(make)) as house:
        peer = await join(house)
        await peer.say(ASKED)
        assert (await peer.error())["error"] == said
        await peer.line.peer.send(Close(code=1000))
    assert list(reasons(caplog)) == [("ERROR", said)]


@pytest.mark.parametrize("route", [name for name in ROUTES if "generate" not in name])
@pytest.mark.parametrize("fault", ["datatype", "undeclared", "missing"])
async def test_and_where_requests_are_batched(fault: str, route: str, caplog: pytest.LogCaptureFixture) -> None:
    make, said = FAULTS[fault]
    path, body, headers = ROUTES[route]
    async with failing(giving(make, batched=True)) as house:
        _, _, told = await house.ask(path, body, *headers)
        assert said in told.decode()
    assert list(reasons(caplog)) == [("ERROR", said)]


@pytest.mark.parametrize("fault", FAULTS)
async def test_and_in_a_warm_up_before_any_client_meets_it(fault: str, autojump_clock: Any) -> None:
    make, said = FAULTS[fault]
    x = np.zeros(1, np.int64)
    warmup = (InferRequest(inputs=(Tensor(name="x", data=x),)),)
    spec = giving(make)
    spec = spec_of(spec, warmup=warmup, load_timeout=5.0)
    async with serving(spec, config=Config()) as house:
        reason = house.gateway.models["m"].reason
        assert reason == f"WarmupFailed: the answer to warm-up request 1 of 1 is wrong: {said}"
        await house.gateway.drain()


async def test_no_answer_is_a_failure_of_both_unless_there_may_be_any_number(autojump_clock: Any) -> None:
    spec = spec_of(giving(lambda: None), warmup=(InferRequest(inputs=(Tensor(name="x", data=np.zeros(1, np.int64)),)),))
    async with serving(spec, spec_of(giving(lambda: None), "cold"), spec_of(spec, "decoupled", decoupled=True)) as house:
        assert (await house.ask("/v2/models/cold/infer", ASKED))[0] == 500
        reason = "WarmupFailed: warm-up request 1 of 1 has no answer, and the model is not decoupled"
        assert house.gateway.models["m"].reason == reason
        assert house.gateway.models["decoupled"].reason == ""
        await house.gateway.drain()


@pytest.mark.parametrize("route", ROUTES)
async def test_a_parameter_may_be_a_number_of_numpys_on_every_route(route: str) -> None:
    given = InferResponse(outputs=answer(y=Y, z=Z).outputs, parameters={"score": np.float64(0.5)})
    path, body, headers = ROUTES[route]
    async with failing(giving(lambda: given)) as house:
        status, _, told = await house.ask(path, body, *headers)
    assert (status, b'"score":0.5' in told) == (200, True)


async def test_an_output_that_nobody_asks_for_need_not_be_made() -> None:
    asked = json.dumps({"inputs": [X], "outputs": [{"name": "y"}]}).encode()
    async with serving(giving(FAULTS["missing"][0])) as house:
        assert (await house.ask("/v2/models/m/infer", asked))[0] == 200


async def test_nor_one_of_an_optional_input_that_is_not_there() -> None:
    @blocking(False)
    def model(request: InferRequest) -> InferResponse:
        return InferResponse(outputs=tuple([Tensor(name=f"{t.name}'", data=t.data) for t in request.inputs]))

    inputs = (TensorSpec(name="x"), TensorSpec(name="w", optional=True))
    spec = spec_of(model, "m", inputs=inputs, outputs=(TensorSpec(name="x'"), TensorSpec(name="w'")))
    async with serving(spec) as house:
        assert (await house.ask("/v2/models/m/infer", ASKED))[0] == 200
        assert (await house.ask("/v2/models/m/generate", SIMPLE))[0] == 200


# -- other calls that end with model-error


async def refuses(session: Session[InferRequest, InferResponse]) -> None:
    await session.receive()
    raise ModelError("no negative numbers", status=422)


async def fails(session: Session[InferRequest, InferResponse]) -> None:
    await session.receive()
    raise ModelError("the disk is full: " + "x" * 1000)


async def gives_up(session: Session[InferRequest, InferResponse]) -> None:
    raise ModelError("no weights", status=500)


async def silent(session: Session[InferRequest, InferResponse]) -> None:
    await session.receive()


async def talks(session: Session[InferRequest, InferResponse]) -> None:
    await session.receive()
    for _ in range(2):
        await session.send(InferResponse(outputs=()))


TOO_MANY = "model 'm' gave more than one response: ask for them at /infer_stream, or at /generate_stream"


@pytest.mark.parametrize(
    ("model", "level", "reason"),
    [
        (refuses, "INFO", "no negative numbers"),
        (fails, "WARNING", "the disk is full: " + "x" * 282),
        (gives_up, "ERROR", "no weights"),
        (silent, "ERROR", "model 'm' returned without an answer"),
        (talks, "ERROR", TOO_MANY),
    ],
)
@pytest.mark.parametrize("route", ["infer", "generate", "the platform"])
async def test_the_level_is_that_of_the_fault(
    model: Any, level: str, reason: str, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gateway.worker")
    path, body, headers = ROUTES[route]
    async with failing(spec_of(model, "m")) as house:
        assert (await house.ask(path, body, *headers))[0] >= 400
        assert house.endings == {"model-error": 1}
    assert list(reasons(caplog)) == [(level, reason)]


async def mistaken(session: Session[Prompt, Token]) -> None:
    await session.receive()
    await session.send("a text")  # type: ignore[arg-type]


async def long_winded(session: Session[Prompt, Token]) -> None:
    await session.receive()
    for number in range(100):
        await session.send(Token(text="x" * 100, id=number))


TEXTS = {
    "LMI": ("/predictions/m", {"inputs": "hi", "parameters": {"max_new_tokens": 100}}),
    "chat": ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}),
    "completions": ("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 100}),
    "generate": ("/v2/models/m/generate", {"text_input": "hi", "max_new_tokens": 100}),
    "invoke": ("/models/m/invoke", {"inputs": "hi", "parameters": {"max_new_tokens": 100}}),
    "the platform": ("/endpoints/m/invocations", {"inputs": "hi", "parameters": {"max_new_tokens": 100}}),
}


@pytest.mark.parametrize("wire", TEXTS)
async def test_a_message_that_is_none_is_in_the_log_with_its_traceback(wire: str, caplog: pytest.LogCaptureFixture) -> None:
    path, body = TEXTS[wire]
    async with failing(spec_of(mistaken, "m")) as house:
        assert (await house.ask(path, json.dumps(body).encode()))[0] >= 400
        assert house.endings == {"model-error": 1}
    (record,) = [record for record in caplog.records if record.message == "model raised"]
    assert record.exc_info is not None
    assert "a text call is answered with Token, ToolCall and Finish, not str" in str(record.exc_info[1])
    assert list(reasons(caplog)) == []  # it is said once


@pytest.mark.parametrize("wire", [name for name in TEXTS if name != "generate"])  # its own limit is 16 MiB
async def test_an_answer_over_its_limit_is_there_too(wire: str, caplog: pytest.LogCaptureFixture) -> None:
    path, body = TEXTS[wire]
    config = Config(lmi=LMIConfig(max_text=4096))
    async with failing(spec_of(long_winded, "m"), config) as house:
        assert (await house.ask(path, json.dumps(body).encode()))[0] >= 400
        assert house.endings == {"model-error": 1}
    ((level, reason),) = reasons(caplog)
    assert (level in ("WARNING", "ERROR"), reason.endswith("exceed them")) == (True, True), reason


async def test_a_worker_that_is_lost_says_so_for_each_of_its_sessions(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gateway.worker")
    crash, once = trio.Event(), RestartPolicy(kind=Restart.TEMPORARY)

    async def waiting(session: Session[Part, Part]) -> None:
        await trio.sleep_forever()

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        async def fall() -> None:
            await crash.wait()
            raise ZeroDivisionError("in the background")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fall)
            yield waiting
            nursery.cancel_scope.cancel()

    async with serving(ModelSpec(name="m", family=Family.PARTS, load=load, restart=once)) as house:
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                assert (await house.ask("/models/m/invoke", b"x"))[0] == 503

            nursery.start_soon(call)
            nursery.start_soon(call)
            await house.still()
            crash.set()
        await house.gateway.drain()
    assert list(reasons(caplog)) == [("INFO", "the worker of model 'm' ended; try again")] * 2
    assert [r.levelno for r in caplog.records if r.message == "model given up"] == [logging.ERROR]


BESIDE: dict[str, tuple[InferResponse, str]] = {
    "id": (InferResponse(outputs=(), id=7), "the id of an InferResponse is a str, not int"),  # type: ignore[arg-type]
    "parameters": (
        InferResponse(outputs=(), parameters=[1]),  # type: ignore[arg-type]
        "the parameters of an InferResponse are a mapping, not list",
    ),
    "name": (
        InferResponse(outputs=(Tensor(name=7, data=Y),)),  # type: ignore[arg-type]
        "the name of an output is a str, not int",
    ),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("what", BESIDE)
async def test_an_answer_of_wrong_types_is_its_models_fault_and_not_ours(
    what: str, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    response, said = BESIDE[what]

    @blocking(False)
    def model(request: InferRequest) -> InferResponse:
        return response

    path, body, headers = ROUTES[route]
    async with failing(spec_of(model, "m")) as house:
        await house.ask(path, body, *headers)
        assert house.endings == {"model-error": 1}
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert (record.message, str(record.exc_info[1])) == ("model raised", said)
