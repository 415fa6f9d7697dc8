"""What a model sees of a v2 call, over the whole path."""

import json
from typing import Any

import numpy as np
import pytest

from gateway.client import post
from gateway.testing import memory_gateway
from models.adapt import spec_of
from models.messages import InferRequest, InferResponse, Tensor
from models.session import Call, Session
from models.spec import TensorSpec


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
