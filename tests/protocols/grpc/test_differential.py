"""Google's protobuf, where it is installed, and ours agree about some hundred messages, and a hundred thousand with `pytest --soak`."""

from __future__ import annotations

import pytest

from protocols.grpc.protobuf import FieldType, MessageType
from protocols.grpc.v2_tables import DATA_TYPES, METHODS
from tests.protocols.grpc import messages
from tests.protocols.grpc.messages import theirs


@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=pytest.mark.soak)])
def test_both_accept_the_same_messages_and_read_the_same_values(count: int) -> None:
    words = theirs("tests.protocols.grpc.differential").run(count, seed=8)
    for word in ("read", "refused", "malformed", "again read", "again by a plan"):
        assert words[f"ModelInferRequest {word}"], word


KINDS = {
    1: "double",
    2: "float",
    3: "int64",
    4: "uint64",
    5: "int32",
    8: "bool",
    9: "string",
    12: "bytes",
    13: "uint32",
    14: "enum",
}


PARTIAL = {
    "ModelConfig", "ModelInput", "ModelOutput", "ModelDynamicBatching", "ModelSequenceBatching", "ModelEnsembling",
}  # fmt: skip


def declared(table: MessageType, descriptor: object, seen: set[str]) -> None:
    """The fields of a table are those of the .proto file: all of them, but for the model's configuration."""
    fields = {field.number: field for field in descriptor.fields}  # type: ignore[attr-defined]
    partial = table.name in PARTIAL
    assert f"inference.{table.name}" == descriptor.full_name  # type: ignore[attr-defined]
    assert fields.keys() == table.fields.keys() or (partial and fields.keys() > table.fields.keys()), table.name
    seen.add(table.name)
    for number, ours in table.fields.items():
        theirs = fields[number]
        entry = theirs.message_type is not None and theirs.message_type.GetOptions().map_entry
        value = theirs.message_type.fields_by_name["value"] if entry else theirs
        kind = ours.type if isinstance(ours.type, str) else "message"
        oneof = theirs.containing_oneof.name if theirs.containing_oneof else ""
        wanted = FieldType(
            theirs.name,
            KINDS.get(value.type, "message"),  # type: ignore[arg-type]
            repeated=theirs.is_repeated and not entry,
            key="string" if entry else "",
            oneof=oneof,
        )
        assert FieldType(ours.name, kind, ours.repeated, ours.key, ours.oneof) == wanted  # type: ignore[arg-type]
        if isinstance(ours.type, MessageType):
            declared(ours.type, value.message_type, seen)


def test_the_tables_are_those_of_the_proto_files() -> None:
    service_pb2 = theirs("tritonclient.grpc.service_pb2")
    model_config_pb2 = theirs("tritonclient.grpc.model_config_pb2")
    seen: set[str] = set()
    tables = [table for path, pair in METHODS.items() if path.startswith("/inference.") for table in pair]
    for table in (*tables, messages.REQUEST, messages.RESPONSE, messages.STREAM_RESPONSE):
        declared(table, service_pb2.DESCRIPTOR.message_types_by_name[table.name], seen)
    assert set(service_pb2.DESCRIPTOR.message_types_by_name) <= seen
    assert dict(model_config_pb2.DataType.items()) == DATA_TYPES
    methods = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    hot = {"/inference.GRPCInferenceService/ModelInfer", "/inference.GRPCInferenceService/ModelStreamInfer"}
    ours = {path for path in METHODS if path.startswith("/inference.")}
    assert {f"/inference.GRPCInferenceService/{method.name}" for method in methods} == ours | hot
