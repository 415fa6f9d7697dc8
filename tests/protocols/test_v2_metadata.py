"""Health, metadata and config bodies: what the real clients of v2 read in them."""

from __future__ import annotations

import json

import pytest

from protocols.v2 import (
    ModelSignature,
    TensorSpec,
    live_body,
    model_config,
    model_metadata,
    model_ready,
    ready_body,
    server_metadata,
)

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
    undeclared = json.loads(model_metadata(ModelSignature(name="m")))
    assert (undeclared["inputs"], undeclared["outputs"]) == ([], [])


def test_metadata_shows_the_batch_dimension_and_config_does_not() -> None:
    batched = ModelSignature(name="m", inputs=(TensorSpec(name="x", datatype="FP32", shape=(2,)),), max_batch_size=8)
    assert json.loads(model_metadata(batched))["inputs"][0]["shape"] == [-1, 2]
    config = json.loads(model_config(batched))
    assert (config["input"][0]["dims"], config["max_batch_size"]) == ([2], 8)


def test_config_has_what_perf_analyzer_reads() -> None:
    config = json.loads(model_config(SIGNATURE, decoupled=True))
    assert config["name"] == "m"
    assert config["platform"] == "python"
    assert config["max_batch_size"] == 0
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["input"] == [
        {"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 2]},
        {"name": "s", "data_type": "TYPE_STRING", "dims": []},
    ]
    assert config["output"] == [{"name": "y", "data_type": "TYPE_INT64", "dims": [3]}]


@pytest.mark.parametrize(("datatype", "shape"), [("FLOAT", (1,)), ("fp32", (1,)), ("FP32", (-2,))])
def test_a_declaration_that_v2_does_not_have_is_refused_at_once(datatype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="tensor x: "):
        TensorSpec(name="x", datatype=datatype, shape=shape)
