"""The messages about servers and models: each has the bytes of its .proto file, in both roles."""

from __future__ import annotations

from typing import Any

import pytest

from protocols.grpc.protobuf import MessageType
from protocols.grpc.v2_tables import (
    DATA_TYPES,
    HEALTH_CHECK,
    LOG_SETTINGS,
    METHODS,
    MODEL_CONFIG,
    MODEL_METADATA,
    MODEL_READY,
    MODEL_STATISTICS,
    REPOSITORY_INDEX,
    REPOSITORY_MODEL_LOAD,
    REPOSITORY_MODEL_UNLOAD,
    SERVER_LIVE,
    SERVER_METADATA,
    SERVING_STATUS,
    SYSTEM_SHARED_MEMORY_STATUS,
    TRACE_SETTING,
)
from protocols.v2.metadata import _CONFIG_TYPES
from protocols.v2.tensors import DATATYPES

GOLDEN: list[tuple[MessageType, dict[str, Any], str]] = [
    (SERVER_LIVE[1], {"live": True}, "0801"),
    (MODEL_READY[0], {"name": "m", "version": "1"}, "0a016d120131"),
    (MODEL_READY[1], {"ready": False}, ""),
    (SERVER_METADATA[1], {"name": "s", "version": "1", "extensions": ["a", ""]}, "0a01731201311a01611a00"),
    (
        MODEL_METADATA[1],
        {
            "name": "m",
            "versions": ["1"],
            "platform": "p",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [],
        },
        "0a016d1201311a0170" + "2216" + "0a0178" + "120446503332" + "1a0bffffffffffffffffff0104",
    ),
    (
        MODEL_CONFIG[1],
        {
            "config": {
                "name": "m",
                "platform": "",
                "max_batch_size": 8,
                "input": [{"name": "x", "data_type": DATA_TYPES["TYPE_FP32"], "dims": [4], "optional": True}],
                "output": [{"name": "y", "data_type": DATA_TYPES["TYPE_STRING"], "dims": [1]}],
                "dynamic_batching": {
                    "preferred_batch_size": [4],
                    "max_queue_delay_microseconds": 0,
                    "preserve_ordering": False,
                    "priority_levels": 0,
                    "default_priority_level": 0,
                },
                "backend": "b",
                "model_transaction_policy": {"decoupled": True},
            }
        },
        "0a29"
        + "0a016d"
        + "2008"
        + "2a0a0a0178100b2201044001"
        + "32080a0179100d1a0101"
        + "5a030a0104"
        + "8a010162"
        + "9a01020801",
    ),
    (REPOSITORY_INDEX[0], {"repository_name": "", "ready": True}, "1001"),
    (
        REPOSITORY_INDEX[1],
        {"models": [{"name": "m", "version": "1", "state": "READY", "reason": ""}]},
        "0a0d0a016d1201311a055245414459",
    ),
    (
        REPOSITORY_MODEL_LOAD[0],
        {"repository_name": "", "model_name": "m", "parameters": {"config": {"string_param": "{}"}}},
        "12016d" + "1a0e" + "0a06636f6e666967" + "12041a027b7d",
    ),
    (
        REPOSITORY_MODEL_UNLOAD[0],
        {"repository_name": "", "model_name": "m", "parameters": {"u": {"bool_param": False}}},
        "12016d" + "1a07" + "0a0175" + "12020800",
    ),
    (SYSTEM_SHARED_MEMORY_STATUS[1], {"regions": {}}, ""),
    (TRACE_SETTING[0], {"settings": {"l": {"value": ["a"]}}, "model_name": "m"}, "0a080a016c12030a0161" + "12016d"),
    (LOG_SETTINGS[0], {"settings": {"v": {"uint32_param": 1}}}, "0a070a017612021001"),
    (HEALTH_CHECK[0], {"service": "s"}, "0a0173"),
    (HEALTH_CHECK[1], {"status": SERVING_STATUS["SERVING"]}, "0801"),
]


@pytest.mark.parametrize(("table", "values", "wire"), GOLDEN, ids=lambda value: getattr(value, "name", ""))
def test_a_message_has_its_bytes(table: MessageType, values: dict[str, Any], wire: str) -> None:
    assert table.write(values).hex() == wire
    assert table.read(bytes.fromhex(wire)) == values


def test_statistics_read_back() -> None:
    some = {"count": 2, "ns": 2**63}
    model = {
        "name": "m",
        "version": "1",
        "last_inference": 5,
        "inference_count": 6,
        "execution_count": 7,
        "inference_stats": {"success": some, "fail": {"count": 0, "ns": 0}},
        "batch_stats": [{"batch_size": 4, "compute_infer": some}],
        "memory_usage": [{"type": "CPU", "id": -1, "byte_size": 3}],
        "response_stats": {"0": {"success": some}},
    }
    assert MODEL_STATISTICS[1].read(MODEL_STATISTICS[1].write({"model_stats": [model]})) == {"model_stats": [model]}


def test_responses_of_kserve_with_members_of_its_own_are_read() -> None:
    assert REPOSITORY_MODEL_LOAD[1].read(bytes.fromhex("0a016d1001")) == {}


def test_each_method_has_two_messages_that_may_be_empty() -> None:
    for request, response in METHODS.values():
        for table in (request, response):
            assert table.write(table.read(b"")) == b""


def test_each_datatype_has_a_number_in_a_configuration() -> None:
    assert {_CONFIG_TYPES.get(name, f"TYPE_{name}") for name in ["", *DATATYPES]} == DATA_TYPES.keys()
