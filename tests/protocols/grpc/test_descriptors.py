"""Descriptors say what the tables say: by golden bytes, and beside Google's protobuf and Triton's own files, where installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from protocols.grpc.descriptors import GRPC_SERVICE_FILE, HEALTH_FILE, MODEL_CONFIG_FILE, Method, ProtoFile
from protocols.grpc.protobuf import EnumType, FieldType, MessageType
from protocols.grpc.reflection import FILES, PATHS, REFLECTION_FILES
from protocols.grpc.v2_client import read_infer_response
from protocols.grpc.v2_messages import InferRequestReader
from protocols.grpc.v2_tables import METHODS, MODEL_INFER, SERVING_STATUS
from tests.protocols.grpc.messages import theirs

# A file of each kind of declaration

INNER = MessageType("Outer.Inner", {1: FieldType("a", "bytes", repeated=True)})
OUTER = MessageType(
    "Outer",
    {
        2: FieldType("b", INNER, oneof="x"),
        1: FieldType("k", "enum", enum=EnumType("Outer.Kind", {"NONE": 0, "LESS": -1})),
        3: FieldType("c", "bool", oneof="y"),
        4: FieldType("some_map", INNER, key="int32"),
    },
)
BASE = ProtoFile("base.proto", "p", messages=(OUTER,))
METHOD = Method("M", OUTER, MessageType("N", {}), server_streaming=True)
TOP = ProtoFile("top.proto", "q.r", {"S": (METHOD,)}, imports=(BASE,))


def test_messages_have_their_bytes() -> None:
    assert BASE.descriptor == bytes.fromhex(
        "0a0a 626173652e70726f746f"  # name "base.proto"
        "1201 70"  # package "p"
        "22f701"  # message_type:
        "0a05 4f75746572"  # name "Outer"
        "1218 0a01 6b 1801 2001 280e 320d 2e702e4f757465722e4b696e64"  # k = 1: optional, enum, ".p.Outer.Kind"
        "121b 0a01 62 1802 2001 280b 320e 2e702e4f757465722e496e6e6572 4800"  # b = 2: message ".p.Outer.Inner", oneof 0
        "120b 0a01 63 1803 2001 2808 4801"  # c = 3: bool, oneof 1
        "1227 0a08 736f6d655f6d6170 1804 2003 280b"  # some_map = 4: repeated, message
        "3215 2e702e4f757465722e536f6d654d6170456e747279"  # its type_name ".p.Outer.SomeMapEntry"
        "1a12 0a05 496e6e6572 1209 0a01 61 1801 2003 280c"  # nested_type "Inner", a = 1: repeated, bytes
        "1a3e 0a0c 536f6d654d6170456e747279"  # nested_type "SomeMapEntry"
        "120b 0a03 6b6579 1801 2001 2805"  # key = 1: int32
        "121d 0a05 76616c7565 1802 2001 280b 320e 2e702e4f757465722e496e6e6572"  # value = 2: ".p.Outer.Inner"
        "3a02 3801"  # options, map_entry true
        "2223 0a04 4b696e64 1208 0a04 4e4f4e45 1000"  # enum_type "Kind", NONE = 0
        "1211 0a04 4c455353 10ffffffffffffffffff01"  # LESS = -1
        "4203 0a01 78 4203 0a01 79"  # oneof_decl "x" and "y"
        "6206 70726f746f33"  # syntax "proto3"
    )


def test_a_service_has_its_bytes() -> None:
    assert TOP.descriptor == bytes.fromhex(
        "0a09 746f702e70726f746f"  # name "top.proto"
        "1203 712e72"  # package "q.r"
        "1a0a 626173652e70726f746f"  # dependency "base.proto"
        "2203 0a01 4e"  # message_type "N"
        "321c 0a01 53 1217 0a01 4d"  # service "S", method "M"
        "1208 2e702e4f75746572 1a06 2e712e722e4e 3001"  # from ".p.Outer" to ".q.r.N", server_streaming
        "6206 70726f746f33"  # syntax "proto3"
    )


def test_a_file_knows_its_symbols() -> None:
    assert BASE.symbols == {
        "p.Outer": "message",
        "p.Outer.k": "field",
        "p.Outer.b": "field",
        "p.Outer.c": "field",
        "p.Outer.some_map": "field",
        "p.Outer.x": "oneof",
        "p.Outer.y": "oneof",
        "p.Outer.Inner": "message",
        "p.Outer.Inner.a": "field",
        "p.Outer.SomeMapEntry": "message",
        "p.Outer.SomeMapEntry.key": "field",
        "p.Outer.SomeMapEntry.value": "field",
        "p.Outer.Kind": "enum",
        "p.Outer.NONE": "value",
        "p.Outer.LESS": "value",
    }
    assert TOP.symbols == {"q.r.N": "message", "q.r.S": "service", "q.r.S.M": "method"}


def test_a_file_comes_before_what_it_imports_and_each_once() -> None:
    other = ProtoFile("other.proto", "o", imports=(BASE,))
    all_of_them = ProtoFile("all.proto", "a", imports=(TOP, other))
    assert [file.name for file in all_of_them.with_imports()] == ["all.proto", "top.proto", "base.proto", "other.proto"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ((MessageType("A", {}), MessageType("A", {1: FieldType("a", "bool")})), "bad.proto has two messages A"),
        ((MessageType("A", {1: FieldType("a", "enum")}),), "p.A.a has no enum"),
        ((MessageType("A.B", {}),), "bad.proto has no message A, which others are declared in"),
        (
            (MessageType("A", {n: FieldType(f"f{n}", "enum", enum=EnumType("E", {"X": n})) for n in (1, 2)}),),
            "bad.proto declares p.E twice",
        ),
        (
            (MessageType("A", {1: FieldType("m", "bool", key="bool"), 2: FieldType("M", "bool", key="bool")}),),
            "bad.proto declares p.A.MEntry twice",
        ),
    ],
    ids=["two messages", "no enum", "no outer message", "two enums", "two entries"],
)
def test_tables_that_contradict_each_other_are_found_when_the_descriptor_is_made(
    messages: tuple[MessageType, ...], words: str
) -> None:
    file = ProtoFile("bad.proto", "p", messages=messages)  # makes nothing
    with pytest.raises(ValueError) as caught:
        file.descriptor  # noqa: B018
    assert str(caught.value) == words


# The files that are served


def test_each_method_is_described_with_the_tables_that_read_and_write_it() -> None:
    described = {
        f"/{file.package}.{service}/{method.name}": (method.request, method.response)
        for file in FILES
        for service, methods in file.services.items()
        for method in methods
    }
    infer = {f"/inference.GRPCInferenceService/{name}" for name in ("ModelInfer", "ModelStreamInfer")}
    assert described.keys() == METHODS.keys() | infer | set(PATHS)
    for path, pair in METHODS.items():
        assert described[path] == pair


def test_streams_are_said_to_be_streams() -> None:
    streams = {
        method.name: (method.client_streaming, method.server_streaming)
        for file in FILES
        for methods in file.services.values()
        for method in methods
        if method.client_streaming or method.server_streaming
    }
    both = (True, True)
    assert streams == {"ModelStreamInfer": both, "Watch": (False, True), "ServerReflectionInfo": both}


# Beside Google's protobuf


def loaded() -> Any:
    """A pool of Google's that has our files and nothing else."""
    pool = theirs("google.protobuf.descriptor_pool").DescriptorPool()
    for file in (MODEL_CONFIG_FILE, GRPC_SERVICE_FILE, HEALTH_FILE, *REFLECTION_FILES):
        pool.AddSerializedFile(file.descriptor)
    return pool


def class_of(pool: Any, file: ProtoFile, table: MessageType) -> Any:
    """Google's class for a message, made by our descriptor."""
    found = pool.FindMessageTypeByName(f"{file.package}.{table.name}")
    return theirs("google.protobuf.message_factory").GetMessageClass(found)


def sorted_file(data: bytes) -> Any:
    """A FileDescriptorProto in an order that does not depend on the text of the .proto file."""
    file = theirs("google.protobuf.descriptor_pb2").FileDescriptorProto.FromString(data)
    file.message_type.sort(key=lambda message: message.name)
    for service in file.service:
        service.method.sort(key=lambda method: method.name)
        for method in service.method:
            if not method.options.ListFields():  # a method with an empty body
                method.ClearField("options")
    return file


def test_the_service_is_declared_as_by_triton_to_the_last_field() -> None:
    triton = theirs("tritonclient.grpc.service_pb2").DESCRIPTOR.serialized_pb
    assert sorted_file(GRPC_SERVICE_FILE.descriptor) == sorted_file(triton)


def test_what_there_is_of_the_configuration_is_declared_as_by_triton() -> None:
    def by_number(message: Any) -> dict[int, tuple[Any, ...]]:
        named = {field.number: field for field in message.field}
        oneofs = [oneof.name for oneof in message.oneof_decl]
        return {
            number: (
                field.name,
                field.label,
                field.type,
                field.type_name,
                field.HasField("oneof_index") and oneofs[field.oneof_index],
            )
            for number, field in named.items()
        }

    ours = sorted_file(MODEL_CONFIG_FILE.descriptor)
    triton = sorted_file(theirs("tritonclient.grpc.model_config_pb2").DESCRIPTOR.serialized_pb)
    assert (ours.name, ours.package, ours.syntax, list(ours.enum_type)) == (
        triton.name,
        triton.package,
        triton.syntax,
        [enum for enum in triton.enum_type if enum.name == "DataType"],
    )
    known = {message.name: message for message in triton.message_type}
    assert {"ModelConfig", "ModelInput", "ModelOutput", "ModelTransactionPolicy"} <= {one.name for one in ours.message_type}
    for message in ours.message_type:
        assert by_number(message).items() <= by_number(known[message.name]).items(), message.name
        assert not message.nested_type


def test_health_and_reflection_are_what_their_proto_files_declare() -> None:
    pool = loaded()
    status = pool.FindEnumTypeByName("grpc.health.v1.HealthCheckResponse.ServingStatus")
    assert {value.name: value.number for value in status.values} == SERVING_STATUS
    assert pool.FindMessageTypeByName("grpc.health.v1.HealthCheckResponse").fields_by_number[1].enum_type is status
    one, other = (sorted_file(file.descriptor) for file in REFLECTION_FILES)
    assert str(other) == str(one).replace("/v1/", "/v1alpha/").replace("reflection.v1", "reflection.v1alpha")
    found = pool.FindMessageTypeByName("grpc.reflection.v1.ServerReflectionResponse")
    assert {field.number: field.name for field in found.oneofs_by_name["message_response"].fields} == {
        4: "file_descriptor_response",
        5: "all_extension_numbers_response",
        6: "list_services_response",
        7: "error_response",
    }
    assert [(field.number, field.name) for field in found.fields[:2]] == [(1, "valid_host"), (2, "original_request")]


def test_google_finds_every_symbol_where_ours_has_it() -> None:
    pool = loaded()
    find = {
        "message": pool.FindMessageTypeByName,
        "field": pool.FindFieldByName,
        "oneof": pool.FindOneofByName,
        "enum": pool.FindEnumTypeByName,
        "value": pool.FindFileContainingSymbol,
        "service": pool.FindServiceByName,
        "method": pool.FindMethodByName,
    }
    home_of: dict[str, Callable[[Any], Any]] = {
        "value": lambda found: found,
        "oneof": lambda found: found.containing_type.file,
        "method": lambda found: found.containing_service.file,
    }
    for file in FILES:
        for name, kind in file.symbols.items():
            found = find[kind](name)
            home = home_of.get(kind, lambda found: found.file)(found)
            assert home.name == file.name, name
            assert kind == "value" or found.full_name == name


def test_messages_of_our_descriptors_are_read_and_written_by_our_tables() -> None:
    differential = theirs("tests.protocols.grpc.differential")
    pool, maker, tables = loaded(), differential.Maker(3), 0
    for file in FILES:
        for table in file.types.values():
            made = class_of(pool, file, table)
            tables += 1
            for _ in range(5):
                message = made()
                maker.fill(message)
                values = differential.as_dict(message, table)
                again = table.read(message.SerializeToString())
                assert differential.plain(again) == differential.plain(values), table
                assert differential.plain(differential.as_dict(made.FromString(table.write(again)), table)) == (
                    differential.plain(values)
                )
    assert tables > 80


def test_messages_of_inference_by_our_descriptors_are_those_of_the_codec() -> None:
    differential = theirs("tests.protocols.grpc.differential")
    pool, maker = loaded(), differential.Maker(4)
    request, response = (class_of(pool, GRPC_SERVICE_FILE, table) for table in MODEL_INFER)

    def compare(made: Any, data: bytes, expect: Callable[[Any], Any], read: Callable[[bytes], Any]) -> str:
        message = made.FromString(data)
        assert message.SerializeToString(deterministic=True) == data
        wanted: tuple[str, Any] = differential.outcome(lambda: expect(message))
        assert differential.outcome(lambda: read(data)) == wanted
        return wanted[0]

    words = set()
    for _ in range(50):
        data = maker.request().SerializeToString(deterministic=True)
        words.add(compare(request, data, differential.expected_call, read_call))
        data = maker.response().SerializeToString(deterministic=True)
        words.add(compare(response, data, differential.expected_answer, read_answer))
    assert words == {"read", "refused"}


def read_call(data: bytes) -> Any:
    return theirs("tests.protocols.grpc.differential").described_call(InferRequestReader().read(data))


def read_answer(data: bytes) -> Any:
    return theirs("tests.protocols.grpc.differential").described_answer(read_infer_response(data))
