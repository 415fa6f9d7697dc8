"""The bodies that the real tritonclient writes and reads, without a network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protocols.v2 import ModelSignature, V2Request, V2Tensor, render_infer
from protocols.v2.tensors import DATATYPES, Array
from tests.protocols.v2.grammar.v2_outcome import parse_both_ways

httpclient = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")

ANY = ModelSignature(name="m")
ARRAYS: dict[str, Array] = {
    name: np.array([[0, 1], [1, 0]]).astype(dtype) for name, dtype in DATATYPES.items() if name != "BYTES"
} | {"BYTES": np.array([[b"a", b""], ["é".encode(), b"xyz"]], object)}


def ask(arrays: dict[str, Array], *, binary: bool, outputs: list[Any] | None = None, **options: Any) -> V2Request:
    inputs = []
    for datatype, array in arrays.items():
        given = httpclient.InferInput(f"in_{datatype}", list(array.shape), datatype)
        given.set_data_from_numpy(array, binary_data=binary)
        inputs.append(given)
    body, length = httpclient.InferenceServerClient.generate_request_body(inputs, outputs=outputs, **options)
    return parse_both_ways(body, length, ANY)


def read(outputs: list[V2Tensor], request: V2Request) -> Any:
    reply = render_infer("m", "1", outputs, request)
    length = dict(reply.headers).get(b"inference-header-content-length")
    return httpclient.InferenceServerClient.parse_response_body(
        b"".join(map(bytes, reply.buffers)), header_length=int(length) if length else None
    )


@pytest.mark.parametrize("datatype", ARRAYS)
def test_every_datatype_arrives_in_binary_and_goes_back(datatype: str) -> None:
    array = ARRAYS[datatype]
    request = ask({datatype: array}, binary=True)
    assert request.binary_default  # tritonclient asks for binary if no outputs are listed
    assert (request.inputs[0].elements == array).all()
    result = read([V2Tensor(name="out", datatype=datatype, array=request.inputs[0].array)], request)
    assert (result.as_numpy("out") == array).all()


@pytest.mark.parametrize("datatype", [name for name in ARRAYS if name not in ("FP16", "BF16")])  # no JSON there
def test_every_datatype_arrives_as_json_and_goes_back(datatype: str) -> None:
    array = ARRAYS[datatype]
    request = ask({datatype: array}, binary=False, outputs=[httpclient.InferRequestedOutput("out", binary_data=False)])
    assert (request.inputs[0].array == array).all()
    result = read([V2Tensor(name="out", datatype=datatype, array=request.inputs[0].array)], request)
    back = result.as_numpy("out")
    if datatype == "BYTES":  # its JSON strings come back as str
        back = np.vectorize(str.encode, otypes=[object])(back)
    assert (back == array).all()


def test_nan_is_sent_as_a_literal_and_read_as_null() -> None:
    array = np.array([np.nan, np.inf, 1], np.float32)
    request = ask({"FP32": array}, binary=False, outputs=[httpclient.InferRequestedOutput("out", binary_data=False)])
    assert np.array_equal(request.inputs[0].array, array, equal_nan=True)
    back = read([V2Tensor(name="out", datatype="FP32", array=array)], request).as_numpy("out")
    assert np.array_equal(back, [np.nan, np.nan, 1], equal_nan=True)


def test_mixed_outputs_and_an_empty_binary_one_are_read() -> None:
    outputs = [httpclient.InferRequestedOutput(name, binary_data=name != "j") for name in ("e", "j", "b")]
    request = ask({"INT8": np.zeros(1, np.int8)}, binary=True, outputs=outputs)
    result = read(
        [
            V2Tensor(name="b", datatype="INT16", array=np.array([1, 2], np.int16)),
            V2Tensor(name="e", datatype="FP32", array=np.zeros((0, 2), np.float32)),
            V2Tensor(name="j", datatype="UINT8", array=np.array([3], np.uint8)),
        ],
        request,
    )
    assert result.as_numpy("b").tolist() == [1, 2]
    assert result.as_numpy("e").shape == (0, 2)
    assert result.as_numpy("j").tolist() == [3]


def test_id_and_sequence_parameters_arrive() -> None:
    request = ask(
        {"INT8": np.zeros(1, np.int8)},
        binary=True,
        request_id="7",
        sequence_id=5,
        sequence_start=True,
        timeout=1000,
        parameters={"k": "v"},
    )
    assert request.id == "7"
    assert request.parameters == {"sequence_id": 5, "sequence_start": True, "sequence_end": False, "timeout": 1000, "k": "v"}
    response = read([], request).get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("7", "m", "1")
