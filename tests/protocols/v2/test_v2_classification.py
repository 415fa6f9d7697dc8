"""Triton's classification: the largest values of an output with their indexes and labels."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from protocols import v2
from protocols.v2.request import MOST, classify
from protocols.v2.tensors import V2Error, V2Tensor


def classes(array: Any, datatype: str, count: int, *labels: str) -> Any:
    found = classify(V2Tensor(name="y", datatype=datatype, array=np.asarray(array)), count, labels)
    assert found.datatype == "BYTES"
    return found.elements.tolist()


def test_the_example_of_the_extension() -> None:
    assert classes(np.array([1.1, 3.3, 0.5, 2.4], np.float32), "FP32", 2) == [b"3.300000:1", b"2.400000:3"]
    assert classes([1, 5, 10, 4], "INT64", 2, "a", "pickle", "apple") == [b"10:2:apple", b"5:1:pickle"]


def test_each_row_has_its_own_classes_and_never_more_than_there_are() -> None:
    rows = np.array([[[1, 2], [4, 3]]], np.uint8)
    assert classes(rows, "UINT8", 1) == [[[b"2:1"], [b"4:0"]]]
    assert classes(rows, "UINT8", 9) == [[[b"2:1", b"1:0"], [b"4:0", b"3:1"]]]
    assert classes(np.array(7, np.int8), "INT8", 3) == [b"7:0"]
    assert classes(np.zeros((2, 0)), "FP64", 3) == [[], []]
    assert classes(np.zeros((0, 3)), "FP64", 3) == []


def test_equal_values_come_by_index_and_nan_last() -> None:
    values = [np.nan, 1, -np.inf, np.inf, 1]
    assert classes(values, "FP64", 5) == [b"inf:3", b"1.000000:1", b"1.000000:4", b"-inf:2", b"nan:0"]


@pytest.mark.parametrize(("datatype", "dtype"), [("FP16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_halves_are_in_order_too(datatype: str, dtype: Any) -> None:
    assert classes(np.array([0.5, 2, -1], dtype), datatype, 2) == [b"2.000000:1", b"0.500000:0"]


@given(arrays(st.sampled_from([np.int8, np.uint64, np.int64, np.float32]), array_shapes(max_dims=3)), st.integers(1, 5))
def test_any_numbers_are_in_order(array: Any, count: int) -> None:
    datatype = {"int8": "INT8", "uint64": "UINT64", "int64": "INT64", "float32": "FP32"}[array.dtype.name]
    found = classify(V2Tensor(name="y", datatype=datatype, array=array), count).elements
    assert found.shape == (*array.shape[:-1], min(count, array.shape[-1]))
    for row, texts in zip(array.reshape(-1, array.shape[-1]), found.reshape(-1, found.shape[-1]), strict=True):
        indexes = [int(text.split(b":")[1]) for text in texts]
        wanted = sorted(
            range(len(row)), key=lambda i: (np.isnan(row[i]), -float(row[i]) if row.dtype.kind == "f" else -int(row[i]), i)
        )
        assert indexes == wanted[: len(indexes)]


@pytest.mark.parametrize(("datatype", "array"), [("BYTES", np.array([b"a"], object)), ("BOOL", np.array([True]))])
def test_what_has_no_order_is_refused(datatype: str, array: Any) -> None:
    with pytest.raises(V2Error, match=f"'y' is {datatype}"):
        classes(array, datatype, 1)


def test_there_is_a_bound_on_what_is_put_in_order() -> None:
    with pytest.raises(V2Error, match=str(MOST)):
        classes(np.zeros(MOST + 1, np.uint8), "UINT8", 1)


X = {"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}
SIGNATURE = v2.ModelSignature(
    name="m", outputs=(v2.TensorSpec(name="y", datatype="FP32", shape=(-1, 3), labels=("cat", "dog")),)
)
Y = V2Tensor(name="y", datatype="FP32", array=np.array([[1, 3, 2]], np.float32))


def request(parameters: Any) -> bytes:
    return json.dumps({"inputs": [X], "outputs": [{"name": "y", "parameters": parameters}]}).encode()


@pytest.mark.parametrize("times", [1, 3])
def test_a_request_asks_for_classes_of_an_output(times: int) -> None:
    codec = v2.InferCodec(SIGNATURE, version="1")
    for _ in range(times):
        asked = codec.parse(request({"classification": 2}), None)
        reply = json.loads(b"".join(codec.render([Y], asked).buffers))
    assert reply["outputs"] == [
        {"name": "y", "datatype": "BYTES", "shape": [1, 2], "data": ["3.000000:1:dog", "2.000000:2"]}
    ]


def test_classes_come_as_binary_data_too_and_none_is_the_output_itself() -> None:
    codec = v2.InferCodec(SIGNATURE, version="1")
    reply = codec.render([Y], codec.parse(request({"classification": 1, "binary_data": True}), None))
    assert bytes(reply.buffers[1]) == b"\x0e\0\0\x003.000000:1:dog"
    reply = codec.render([Y], codec.parse(request({"classification": 0}), None))
    assert json.loads(bytes(reply.buffers[0]))["outputs"][0]["data"] == [1, 3, 2]


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.array([[1.0, 3.0, 2.0]]), "datatype FP32 holds float32, got an array of float64"),
        (
            np.ma.masked_array(np.ones((1, 3), np.float32), [[False, True, False]]),
            "a masked array has elements without a value",
        ),
    ],
)
@pytest.mark.parametrize("parameters", [{}, {"classification": 2}])
def test_what_is_not_of_its_datatype_has_no_classes_either(parameters: Any, array: Any, said: str) -> None:
    codec = v2.InferCodec(SIGNATURE)
    with pytest.raises(V2Error, match=f"tensor 'y': {said}") as caught:
        codec.render([V2Tensor(name="y", datatype="FP32", array=array)], codec.parse(request(parameters), None))
    assert caught.value.status == 500


@pytest.mark.parametrize("count", [-1, 1.0, "1", True])
def test_a_count_that_is_none_is_refused_by_name(count: Any) -> None:
    with pytest.raises(V2Error, match="classification of output 'y'"):
        v2.InferCodec(SIGNATURE).parse(request({"classification": count}), None)


def test_a_client_asks_for_them() -> None:
    x = V2Tensor(name="x", datatype="INT64", array=np.array([1]))
    output = v2.WantedOutput(name="y", classification=2)
    _, body = v2.encode_infer_request([x], outputs=[output], binary=False)
    assert v2.parse_infer(b"".join(body), None, SIGNATURE).outputs == (output,)
