"""The tensor models: identity without a copy, sum and difference, and what they refuse."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from models.adapt import spec_of
from models.errors import ModelError
from models.library.tensors import add_sub, identity, simple
from models.messages import InferRequest, Tensor
from tests.models.library.library_session import converse


def request(outputs: tuple[str, ...] = (), **arrays: Any) -> InferRequest:
    return InferRequest(
        inputs=[Tensor(name=name, data=np.asarray(array)) for name, array in arrays.items()], id="7", outputs=outputs
    )


async def refusal(model: Any, message: InferRequest) -> ModelError:
    with pytest.raises(ModelError) as caught:
        await converse(model, message)
    assert caught.value.status == 400
    return caught.value


async def test_identity_answers_with_the_same_memory_under_the_output_name() -> None:
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    (response,) = await converse(identity, request(INPUT0=data, INPUT12=data[0], other=data))
    assert [tensor.name for tensor in response.outputs] == ["OUTPUT0", "OUTPUT12", "other"]
    assert response.outputs[0].data is data
    assert response.id == "7"


@pytest.mark.parametrize("data", [[True], [b"bytes"], np.ones(1, dtype=ml_dtypes.bfloat16), np.float64(1)])
async def test_identity_keeps_the_datatype(data: Any) -> None:
    message = request(INPUT0=data)
    (response,) = await converse(identity, message)
    assert response.outputs[0].datatype == message.inputs[0].datatype


async def test_identity_refuses_two_inputs_that_would_share_a_name() -> None:
    assert "OUTPUT0, OUTPUT0" in (await refusal(identity, request(INPUT0=[1], OUTPUT0=[2]))).message


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.uint8, np.float16, ml_dtypes.bfloat16])
async def test_add_sub_gives_sum_and_difference_in_the_same_datatype(dtype: Any) -> None:
    first, second = np.full((2, 3), 5, dtype=dtype), np.full((2, 3), 2, dtype=dtype)
    (response,) = await converse(add_sub, request(INPUT1=second, INPUT0=first))
    names = {tensor.name: tensor.data for tensor in response.outputs}
    assert (names["OUTPUT0"] == 7).all()
    assert (names["OUTPUT1"] == 3).all()
    assert names["OUTPUT0"].dtype == dtype


async def test_integers_wrap_around_and_floats_become_infinite() -> None:
    large = np.array(2**31 - 1, dtype=np.int32)
    (response,) = await converse(add_sub, request(INPUT0=large, INPUT1=large))
    assert response.outputs[0].data == -2
    huge = np.full(2, 3e38, dtype=np.float32)
    (response,) = await converse(add_sub, request(INPUT0=huge, INPUT1=huge))
    assert np.isinf(response.outputs[0].data).all()


async def test_only_the_outputs_asked_for_are_sent_in_the_order_asked() -> None:
    (response,) = await converse(add_sub, request(("OUTPUT1", "OUTPUT0"), INPUT0=[5], INPUT1=[2]))
    assert [int(tensor.data[0]) for tensor in response.outputs] == [3, 7]
    (response,) = await converse(add_sub, request(("OUTPUT1",), INPUT0=[5], INPUT1=[2]))
    assert [tensor.name for tensor in response.outputs] == ["OUTPUT1"]


async def test_every_request_of_a_session_is_answered() -> None:
    responses = await converse(add_sub, *(request(INPUT0=[n], INPUT1=[1]) for n in range(3)))
    assert [int(response.outputs[0].data[0]) for response in responses] == [1, 2, 3]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (request(INPUT0=[1]), "inputs: expected INPUT0 and INPUT1, got INPUT0"),
        (request(), "inputs: expected INPUT0 and INPUT1, got none"),
        (request(INPUT0=[1], INPUT1=[1], INPUT2=[1]), "inputs: expected INPUT0 and INPUT1, got INPUT0, INPUT1, INPUT2"),
        (request(INPUT0=[1], INPUT1=[[1]]), "INPUT1 shape: expected [1] as INPUT0 has, got [1, 1]"),
        (request(INPUT0=[1], INPUT1=[1.0]), "INPUT1 datatype: expected INT64 as INPUT0 has, got FP64"),
        (request(INPUT0=[True], INPUT1=[True]), "got BOOL"),
        (request(INPUT0=[b"1"], INPUT1=[b"1"]), "got BYTES"),
        (request(("OUTPUT2",), INPUT0=[1], INPUT1=[1]), "outputs: expected some of OUTPUT0, OUTPUT1, got OUTPUT2"),
    ],
)
async def test_add_sub_says_what_it_expected_and_what_came(message: InferRequest, said: str) -> None:
    assert said in (await refusal(add_sub, message)).message


async def test_long_names_are_not_echoed_at_length() -> None:
    long = "x" * 10_000
    assert len((await refusal(add_sub, request((), **{long: [1]}))).message) < 200
    assert len((await refusal(identity, request((long,), INPUT0=[1]))).message) < 200


def test_add_sub_declares_its_names_alone_and_simple_is_that_of_tritons_examples() -> None:
    names = ["INPUT0", "INPUT1"], ["OUTPUT0", "OUTPUT1"]
    declared = spec_of(add_sub)
    for spec in (declared, simple):
        assert ([t.name for t in spec.inputs or ()], [t.name for t in spec.outputs or ()]) == names
    assert {(t.datatype, t.shape) for t in (*(declared.inputs or ()), *(declared.outputs or ()))} == {("", None)}
    assert {(t.datatype, t.shape) for t in (*(simple.inputs or ()), *(simple.outputs or ()))} == {("INT32", (16,))}
    assert (simple.name, simple.max_batch_size, declared.max_batch_size) == ("simple", 8, 0)
    assert spec_of(identity).inputs is spec_of(identity).outputs is None
