"""A v2 call as a model sees it, over the whole path."""

import gzip
import json
import threading
from typing import Any

import numpy as np
import pytest

from gateway.client import post
from gateway.testing import memory_gateway
from models.adapt import spec_of
from models.messages import InferRequest, InferResponse, Tensor
from models.session import Call, Session
from models.spec import TensorSpec
from protocols import v2


class Seer:
    """Keeps the metadata of its last call."""

    call: Call
    deadline: float

    async def __call__(self, session: Session[InferRequest, InferResponse]) -> None:
        self.call, self.deadline = session.call, session.deadline
        await session.receive()
        await session.send(InferResponse(outputs=(Tensor(name="OUTPUT0", data=np.zeros(1, np.float32)),)))


async def infer(model: Any, parameters: dict[str, Any], **spec: Any) -> tuple[int, dict[str, Any]]:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1.0]}
    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    async with memory_gateway([spec_of(model, "seer", **spec)]) as served:
        peer = served.http1()
        await peer.send(*post(1, "/v2/models/seer/infer?a=b%20c", body))
        status, _headers, answer = await peer.read_answer(1)
        return status, json.loads(answer)


@pytest.mark.parametrize("name", ["exchange", "worker", "channel", "query", "path", "parameters", "self"])
async def test_any_parameter_name_reaches_the_model_as_a_parameter(name: str) -> None:
    seer = Seer()
    status, _ = await infer(seer, {name: 7})
    assert status == 200
    assert seer.call.parameters == {name: 7}
    assert (seer.call.path, seer.call.query) == ("/v2/models/seer/infer", "a=b%20c")


async def test_the_model_knows_its_deadline(autojump_clock: Any) -> None:
    seer = Seer()
    await infer(seer, {}, timeout=60)
    assert 59 < seer.deadline - autojump_clock.current_time() <= 60


@pytest.mark.parametrize("swallows", [False, True])
async def test_a_second_response_to_infer_is_an_error_that_says_where_there_may_be_many(swallows: bool) -> None:
    async def twice(session: Session[InferRequest, InferResponse]) -> None:
        await session.receive()
        response = InferResponse(outputs=(Tensor(name="OUTPUT0", data=np.zeros(1, np.float32)),))
        await session.send(response)
        try:
            await session.send(response)
        except Exception:
            if not swallows:
                raise

    status, answer = await infer(twice, {})
    assert status == 500
    assert "more than one response" in answer["error"]
    assert "/infer_stream" in answer["error"]


async def test_an_output_that_breaks_the_declaration_is_the_models_error() -> None:
    async with memory_gateway([spec_of(Seer(), "seer", outputs=(TensorSpec(name="other"),))]) as served:
        peer = served.http1()
        body = b'{"inputs":[{"name":"x","datatype":"BOOL","shape":[1],"data":[true]}]}'
        await peer.send(*post(1, "/v2/models/seer/infer", body))
        status, _headers, answer = await peer.read_answer(1)
        assert (status, json.loads(answer)) == (
            500, {"error": "output 'OUTPUT0' of model 'seer' is not one that it declares: 'other'"}
        )  # fmt: skip
        assert served.gateway.counts().endings == {"model-error": 1}


FLAGS = TensorSpec(name="x", datatype="BOOL", shape=(-1,))


@pytest.mark.parametrize(
    ("datatype", "declared", "apart"),
    [("BYTES", None, True), (r"B\u0059TES", None, True), ("BOOL", None, True), (r"B\u004fOL", None, True), ("", (FLAGS,), True), ("UINT8", None, False)],
)  # fmt: skip
async def test_elements_that_are_looked_at_one_by_one_are_not_on_the_loop_however_their_datatype_is_spelled(
    datatype: str, declared: Any, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, parse = [], v2.InferCodec.parse

    def seen(codec: v2.InferCodec, *args: Any) -> v2.V2Request:
        threads.append(threading.get_ident())
        return parse(codec, *args)

    monkeypatch.setattr(v2.InferCodec, "parse", seen)
    data = bytes(300_000)
    count = 75_000 if "Y" in datatype or "0059" in datatype else 300_000
    tensor = f'{{"name":"x","datatype":"{datatype}","shape":[{count}],"parameters":{{"binary_data_size":{len(data)}}}}}'
    head = f'{{"inputs":[{tensor}]}}'.encode() if datatype else b""
    async with memory_gateway([spec_of(Seer(), "seer", inputs=declared)]) as served:
        peer = served.http1()
        length = (b"inference-header-content-length", str(len(head)).encode())
        await peer.send(*post(1, "/v2/models/seer/infer", head + data, [length]))
        assert (await peer.read_answer(1))[0] == 200
    assert [thread != threading.get_ident() for thread in threads] == [apart]


@pytest.mark.parametrize(("array", "apart"), [(np.zeros((600, 500)), False), (np.zeros((500, 600)).T, True), (np.zeros(300_000, ">f8"), True)])  # fmt: skip
async def test_an_output_that_has_to_be_put_in_order_is_not_on_the_loop(
    array: Any, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, render = [], v2.InferCodec.render

    def seen(codec: v2.InferCodec, *args: Any) -> v2.V2Reply:
        threads.append(threading.get_ident())
        return render(codec, *args)

    monkeypatch.setattr(v2.InferCodec, "render", seen)
    status, _ = await asked_for(InferResponse(outputs=(Tensor(name="y", data=array),)), binary_data_output=True)
    assert status == 200
    assert [thread != threading.get_ident() for thread in threads] == [apart]


async def asked_for(response: Any, path: str = "infer", **parameters: Any) -> tuple[int, bytes]:
    """Status and body where the model answers so."""

    async def model(session: Session[InferRequest, InferResponse]) -> None:
        await session.receive()
        await session.send(response)

    body = json.dumps(
        {"inputs": [{"name": "x", "datatype": "BOOL", "shape": [1], "data": [True]}], "parameters": parameters}
    )
    async with memory_gateway([spec_of(model, "m")]) as served:
        peer = served.http1()
        await peer.send(*post(1, f"/v2/models/m/{path}", body.encode()))
        status, _headers, answer = await peer.read_answer(1)
        return status, answer


@pytest.mark.parametrize("path", ["infer", "infer_stream"])
@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        (None, "the outputs of an InferResponse are a sequence of Tensors, not NoneType"),
        ((np.zeros(1),), "an output is a Tensor, not ndarray"),
        ((Tensor(name="y", datatype="FP32", data=[1.0]),), "output 'y': its data are a numpy array, not list"),  # type: ignore[arg-type]
    ],
)
async def test_what_is_no_tensor_is_the_models_fault_and_the_log_says_which(
    outputs: Any, said: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    status, answer = await asked_for(InferResponse(outputs=outputs), path)
    assert (status, b"the model failed" in answer) == (500, True)
    (raised,) = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert str(raised) == said


@pytest.mark.parametrize("path", ["infer", "infer_stream"])
async def test_two_outputs_of_one_name_are_the_models_error(path: str) -> None:
    y = Tensor(name="y", data=np.zeros(1))
    status, answer = await asked_for(InferResponse(outputs=(y, y)), path)
    assert (status, json.loads(answer)) == (500, {"error": "the model gave two outputs with the name 'y'"})


async def test_a_request_with_the_head_of_the_one_before_is_looked_at_anew_where_that_matters() -> None:
    """Coded bodies, a model that has gone, and a query: nothing of them is carried over."""
    seer = Seer()
    body = b'{"inputs":[{"name":"x","datatype":"BOOL","shape":[1],"data":[true]}]}'
    async with memory_gateway([spec_of(seer, "seer")]) as served:
        peer = served.http1()

        async def status(number: int, sent: bytes, *headers: tuple[bytes, bytes], path: str = "") -> int:
            await peer.send(*post(number, "/v2/models/seer/infer" + path, sent, headers))
            return (await peer.read_answer(number))[0]

        coded = gzip.compress(body, mtime=0)
        assert [await status(n, coded, (b"content-encoding", b"gzip")) for n in (1, 2, 3)] == [200] * 3
        damaged = coded[:-8] + b"\0" * 8  # its length is unchanged, so the head is too, byte for byte
        assert await status(4, damaged, (b"content-encoding", b"gzip")) == 400
        assert [await status(n, body, path="?a=1") for n in (5, 6)] == [200] * 2
        assert seer.call.query == "a=1"
        assert await status(7, body) == 200
        assert seer.call.query == ""
        worker = served.gateway.supervisor.workers.pop("seer")
        assert await status(8, body) == 404
        served.gateway.supervisor.workers["seer"] = worker
        assert await status(9, body) == 200
        assert served.gateway.budget.used == 0


async def test_a_model_of_tensors_may_ask_and_say_what_only_texts_have() -> None:
    async def curious(session: Session[InferRequest, InferResponse]) -> None:
        assert session.prompt_tokens is None
        session.prompt_tokens = 1
        async for request in session:
            await session.send(InferResponse(outputs=request.inputs))

    async with memory_gateway([spec_of(curious, "curious")]) as served:
        peer = served.http1()
        body = b'{"inputs":[{"name":"a","datatype":"INT8","shape":[1],"data":[7]}]}'
        await peer.send(*post(1, "/v2/models/curious/infer", body))
        status, _, answer = await peer.read_answer(1)
        assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [7])
