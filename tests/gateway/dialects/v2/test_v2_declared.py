"""Tensors that a model declares, by annotations or attributes, to a v2 client: metadata, config, refusals, parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pytest

from gateway.client import post
from gateway.testing import memory_gateway
from models.adapt import blocking, spec_of
from models.library.tensors import add_sub, identity, simple
from models.messages import InferRequest, InferResponse, Tensor
from models.spec import Shape
from protocols.events import End, Head, Request

Rows = Annotated[npt.NDArray[np.float32], Shape(-1, 2)]


@blocking(False)
def scale(rows: Rows, by: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_] | None = None) -> Rows:
    return rows * by if mask is None else rows * by * mask


def count(n: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    yield from n


def tensor(name: str, datatype: str, data: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(np.shape(data)), "data": data}


ROWS, BY = tensor("rows", "FP32", [[1, 2]]), tensor("by", "FP32", [3])


async def ask(model: Any, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    async with memory_gateway([spec_of(model, "m")]) as served:
        peer = served.http1()
        route = f"/v2/models/m{path}"
        if body is None:
            await peer.send(
                Request(stream=1, head=Head(method=b"GET", target=route.encode(), authority=b"localhost")), End(stream=1)
            )
        else:
            await peer.send(*post(1, route, json.dumps(body).encode()))
        status, _headers, answer = await peer.read_answer(1)
        return status, json.loads(answer)


async def test_annotations_are_the_metadata_and_the_config() -> None:
    _, metadata = await ask(scale, "")
    assert metadata["inputs"] == [
        {"name": "rows", "datatype": "FP32", "shape": [-1, 2]},
        {"name": "by", "datatype": "FP32", "shape": [-1], "parameters": {"undeclared": "shape"}},
        {"name": "mask", "datatype": "BOOL", "shape": [-1], "parameters": {"undeclared": "shape", "optional": True}},
    ]
    assert metadata["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 2]}]
    assert "parameters" not in metadata
    _, config = await ask(scale, "/config")
    assert [t.get("optional", False) for t in config["input"]] == [False, False, True]
    assert config["model_transaction_policy"] == {"decoupled": False}


async def test_a_generator_says_that_it_is_decoupled() -> None:
    _, config = await ask(count, "/config")
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["output"] == [{"name": "OUTPUT0", "data_type": "TYPE_INT64", "dims": [-1]}]


async def test_a_model_that_declares_nothing_says_so() -> None:
    _, metadata = await ask(identity, "")
    assert (metadata["inputs"], metadata["outputs"]) == ([], [])
    assert metadata["parameters"] == {"undeclared": "inputs, outputs"}


async def test_an_optional_input_may_come_or_not() -> None:
    mask = tensor("mask", "BOOL", [True, False])
    for inputs, data in (([ROWS, BY], [3, 6]), ([mask, BY, ROWS], [3, 0])):
        status, answer = await ask(scale, "/infer", {"inputs": inputs})
        assert (status, answer["outputs"][0]["data"]) == (200, data)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([ROWS], "missing input 'by': model 'm' takes 'rows', 'by', 'mask'"),
        ([ROWS, BY, tensor("x", "FP32", [1])], "unknown input 'x': model 'm' takes 'rows', 'by', 'mask'"),
        ([tensor("rows", "FP64", [[1, 2]]), BY], "input 'rows': datatype must be FP32, got FP64"),
        ([tensor("rows", "FP32", [1, 2]), BY], "input 'rows': shape must be [-1, 2] (-1 is any), got [2]"),
    ],
)
async def test_what_was_declared_is_checked_before_the_model_is_called(inputs: list[Any], said: str) -> None:
    @blocking(False)
    def never(rows: Rows, by: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_] | None = None) -> Rows:
        pytest.fail("called")

    assert await ask(never, "/infer", {"inputs": inputs}) == (400, {"error": said})


async def test_an_output_that_is_not_declared_cannot_be_asked_for() -> None:
    status, answer = await ask(scale, "/infer", {"inputs": [ROWS, BY], "outputs": [{"name": "other"}]})
    assert (status, answer) == (400, {"error": "unknown output 'other': model 'm' gives 'OUTPUT0'"})


async def test_add_sub_takes_any_datatype_and_simple_batches_of_rows() -> None:
    for datatype, data in (("FP16", [1.5]), ("INT8", [[1], [2]]), ("UINT64", [3])):
        pair = [tensor(f"INPUT{n}", datatype, data) for n in range(2)]
        status, answer = await ask(add_sub, "/infer", {"inputs": pair})
        assert (status, answer["outputs"][0]["datatype"]) == (200, datatype)
    for rows, status in ((1, 200), (8, 200), (9, 400)):
        pair = [tensor(f"INPUT{n}", "INT32", [list(range(16))] * rows) for n in range(2)]
        assert (await ask(simple, "/infer", {"inputs": pair}))[0] == status
    _, metadata = await ask(simple, "")
    assert {str(t["shape"]) for t in metadata["inputs"] + metadata["outputs"]} == {"[-1, 16]"}


@pytest.mark.parametrize("sequence", [7, "a-session"])
async def test_the_parameters_of_triton_for_sequences_and_scheduling_reach_the_model(sequence: int | str) -> None:
    seen: list[InferRequest] = []

    async def keep(request: InferRequest) -> InferResponse:
        seen.append(request)
        return InferResponse(outputs=[Tensor(name="y", data=request["x"])])

    parameters = {
        "sequence_id": sequence, "sequence_start": True, "sequence_end": False, "priority": 2, "timeout": 60_000_000
    }  # fmt: skip
    status, answer = await ask(keep, "/infer", {"inputs": [tensor("x", "INT8", [1])], "parameters": parameters})
    assert status == 200
    assert seen[0].parameters == parameters
    assert "parameters" not in answer
    assert seen[0].last
