"""Health, metadata and config bodies: what the real clients of v2 read in them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from protocols.v2 import (
    ModelSignature,
    TensorSpec,
    V2Error,
    V2Tensor,
    encode_infer_request,
    live_body,
    model_config,
    model_metadata,
    model_ready,
    parse_header_length,
    ready_body,
    schema,
    server_metadata,
)
from tests.protocols.v2.grammar.v2_outcome import parse_both_ways

SIGNATURE = ModelSignature(
    name="m",
    versions=("1", "2"),
    platform="python",
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 2)), TensorSpec(name="s", datatype="BYTES", shape=())),
    outputs=(TensorSpec(name="y", datatype="INT64", shape=(3,)),),
)


@pytest.mark.parametrize("good", [True, False])
def test_health_is_json_because_kserves_client_reads_it(good: bool) -> None:
    assert json.loads(live_body(good)) == {"live": good}
    assert json.loads(ready_body(good)) == {"ready": good}
    assert json.loads(model_ready("m", good)) == {"name": "m", "ready": good}


def test_server_metadata_lists_the_extensions_there_are() -> None:
    assert json.loads(server_metadata("s", "1.0", ["a"])) == {"name": "s", "version": "1.0", "extensions": ["a"]}
    assert "binary_tensor_data" in json.loads(server_metadata("s", "1.0"))["extensions"]


def test_model_metadata_has_every_member_of_the_schema() -> None:
    assert json.loads(model_metadata(SIGNATURE)) == {
        "name": "m",
        "versions": ["1", "2"],
        "platform": "python",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}, {"name": "s", "datatype": "BYTES", "shape": []}],
        "outputs": [{"name": "y", "datatype": "INT64", "shape": [3]}],
    }


OPEN = ModelSignature(
    name="m",
    inputs=(
        TensorSpec(name="a", datatype="", shape=None),
        TensorSpec(name="b", datatype="", shape=(2,)),
        TensorSpec(name="c", datatype="INT8", shape=None, optional=True),
    ),
)


def test_metadata_says_what_is_not_declared_and_keeps_the_members_of_the_schema() -> None:
    nothing = json.loads(model_metadata(ModelSignature(name="m")))
    assert (nothing["inputs"], nothing["outputs"]) == ([], [])
    assert nothing["parameters"] == {"undeclared": "inputs, outputs"}
    some = json.loads(model_metadata(OPEN))
    assert some["parameters"] == {"undeclared": "outputs"}
    assert some["inputs"] == [
        {"name": "a", "datatype": "", "shape": [-1], "parameters": {"undeclared": "datatype, shape"}},
        {"name": "b", "datatype": "", "shape": [2], "parameters": {"undeclared": "datatype"}},
        {"name": "c", "datatype": "INT8", "shape": [-1], "parameters": {"undeclared": "shape", "optional": True}},
    ]
    none_taken = json.loads(model_metadata(ModelSignature(name="m", inputs=(), outputs=())))
    assert "parameters" not in none_taken


def test_config_has_an_input_for_each_of_the_metadata_as_perf_analyzer_demands() -> None:
    config = json.loads(model_config(OPEN))
    assert config["input"] == [
        {"name": "a", "data_type": "TYPE_INVALID", "dims": [-1]},
        {"name": "b", "data_type": "TYPE_INVALID", "dims": [2]},
        {"name": "c", "data_type": "TYPE_INT8", "dims": [-1], "optional": True},
    ]
    assert config["output"] == []
    for absent in ("sequence_batching", "dynamic_batching", "response_cache", "ensemble_scheduling"):
        assert absent not in config


def test_metadata_shows_the_batch_dimension_and_config_does_not() -> None:
    tensors = TensorSpec(name="x", datatype="FP32", shape=(2,)), TensorSpec(name="y", datatype="FP32", shape=None)
    batched = ModelSignature(name="m", inputs=tensors, max_batch_size=8)
    assert [t["shape"] for t in json.loads(model_metadata(batched))["inputs"]] == [[-1, 2], [-1, -1]]
    config = json.loads(model_config(batched))
    assert ([t["dims"] for t in config["input"]], config["max_batch_size"]) == ([[2], [-1]], 8)


def test_config_has_what_perf_analyzer_reads() -> None:
    config = json.loads(model_config(SIGNATURE))
    assert config["name"] == "m"
    assert config["platform"] == config["backend"] == "python"
    assert config["max_batch_size"] == 0
    assert config["model_transaction_policy"] == {"decoupled": False}
    decoupled = json.loads(model_config(ModelSignature(name="m", decoupled=True)))
    assert decoupled["model_transaction_policy"] == {"decoupled": True}
    assert config["input"] == [
        {"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 2]},
        {"name": "s", "data_type": "TYPE_STRING", "dims": []},
    ]
    assert config["output"] == [{"name": "y", "data_type": "TYPE_INT64", "dims": [3]}]


@pytest.mark.parametrize(("datatype", "shape"), [("FLOAT", (1,)), ("fp32", (1,)), ("FP32", (-2,))])
def test_a_declaration_that_v2_does_not_have_is_refused_at_once(datatype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="tensor x: "):
        TensorSpec(name="x", datatype=datatype, shape=shape)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (live_body(True), schema.LiveReply),
        (ready_body(False), schema.ReadyReply),
        (model_ready("m", True), schema.ModelReadyReply),
        (server_metadata("s", "1"), schema.ServerMetadata),
        (model_metadata(SIGNATURE), schema.ModelMetadata),
        (model_metadata(OPEN), schema.ModelMetadata),
        (model_config(OPEN), schema.ModelConfig),
        (V2Error("no").error_body(), schema.ErrorReply),
    ],
)
def test_every_body_is_one_of_the_schema(body: bytes, kind: Any) -> None:
    assert msgspec.json.encode(msgspec.json.decode(body, type=kind)) == body


# ---- checks of requests against a signature ----


def infer(signature: ModelSignature, **inputs: Any) -> list[str]:
    """The names of the inputs that the request is left with."""
    tensors = [V2Tensor(name=k, datatype={"f": "FP32", "i": "INT8"}[v.dtype.kind], array=v) for k, v in inputs.items()]
    headers, buffers = encode_infer_request(tensors)
    length = [value for name, value in headers if name == b"inference-header-content-length"]
    request = parse_both_ways(b"".join(buffers), parse_header_length(length), signature)
    return [t.name for t in request.inputs]


def floats(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def bytes_(*shape: int) -> Any:
    return np.zeros(shape, np.int8)


@pytest.mark.parametrize(
    "inputs",
    [
        {"a": floats(), "b": bytes_(2)},
        {"b": floats(2), "a": bytes_(1, 2, 3)},
        {"a": floats(0, 4), "b": floats(2), "c": bytes_(3, 3)},
    ],
)
def test_what_is_not_declared_of_an_input_may_be_anything(inputs: dict[str, Any]) -> None:
    assert infer(OPEN, **inputs) == list(inputs)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"a": floats()}, "missing input 'b': model 'm' takes 'a', 'b', 'c'"),
        ({"c": bytes_()}, "missing input 'a', missing input 'b': model 'm' takes 'a', 'b', 'c'"),
        ({"a": floats(), "b": bytes_(2), "d": floats()}, "unknown input 'd': model 'm' takes 'a', 'b', 'c'"),
        ({"a": floats(), "d": floats()}, "unknown input 'd', missing input 'b': model 'm' takes 'a', 'b', 'c'"),
        ({"a": floats(), "b": floats(3)}, "input 'b': shape must be [2] (-1 is any), got [3]"),
        ({"a": floats(), "b": floats(2), "c": floats()}, "input 'c': datatype must be INT8, got FP32"),
    ],
)
def test_what_is_declared_of_an_input_is_checked(inputs: dict[str, Any], said: str) -> None:
    with pytest.raises(V2Error) as caught:
        infer(OPEN, **inputs)
    assert (caught.value.status, caught.value.message) == (400, said)


def test_a_batch_dimension_is_there_whatever_the_others_are() -> None:
    tensors = TensorSpec(name="x", datatype="FP32", shape=None), TensorSpec(name="y", datatype="", shape=(), optional=True)
    signature = ModelSignature(name="m", inputs=tensors, max_batch_size=2)
    assert infer(signature, x=floats(2, 7), y=floats(2)) == ["x", "y"]
    assert infer(signature, x=floats(2)) == ["x"]
    for inputs, said in (
        ({"x": floats()}, r"input 'x': shape must begin with the batch dimension, got \[\]"),
        ({"x": floats(2), "y": floats()}, r"input 'y': shape must be \[-1\] \(-1 is any\), got \[\]"),
        ({"x": floats(2), "y": floats(1)}, "input 'y': all inputs must have one batch size, got 1, and 2 for 'x'"),
        ({"x": floats(3)}, r"the batch size is at most 2 \(max_batch_size\), got 3"),
    ):
        with pytest.raises(V2Error, match=said):
            infer(signature, **inputs)


@pytest.mark.parametrize(
    ("datatype", "shape", "missing"), [("", (2,), "datatype"), ("FP32", None, "shape"), ("BYTES", None, "shape")]
)
def test_a_raw_request_needs_the_datatype_and_the_shape_declared(
    datatype: str, shape: tuple[int, ...] | None, missing: str
) -> None:
    signature = ModelSignature(name="m", inputs=(TensorSpec(name="x", datatype=datatype, shape=shape),))
    with pytest.raises(V2Error, match=f"a raw binary request does not tell the {missing} of input 'x', nor does its model"):
        parse_both_ways(bytes(8), 0, signature)
