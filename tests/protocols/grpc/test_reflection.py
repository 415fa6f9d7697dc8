"""Reflection answers what is asked, by golden bytes and as Google's protobuf reads it, and an unknown name ends no call."""

from __future__ import annotations

from typing import Any

import pytest

from protocols.grpc.descriptors import Method, ProtoFile
from protocols.grpc.protobuf import FieldType, MessageType, ProtobufError, encode_field
from protocols.grpc.reflection import FILES, PATHS, REFLECTION_FILES, REQUEST, RESPONSE, ServerReflection
from protocols.grpc.status import StatusCode
from tests.protocols.grpc.messages import theirs

MESSAGE = MessageType("M", {1: FieldType("f", "bool", oneof="o"), 2: FieldType("m", "bool", key="bool")})
EMPTY = MessageType("E", {})
BASE = ProtoFile("b", "p", messages=(MESSAGE,))
TOP = ProtoFile("t", "q", {"Z": (Method("Do", EMPTY, MESSAGE),), "A": ()}, imports=(BASE,))
SMALL = ServerReflection([TOP])
SERVED = ServerReflection()


def ask(server: ServerReflection, **request: Any) -> dict[str, Any]:
    """Returns the answer to a request, without the members that repeat the request."""
    said = RESPONSE.read(server.answer(REQUEST.write(request)))
    assert said.pop("original_request") == {"host": "", **request}
    assert said.pop("valid_host") == request.get("host", "")
    return said


def files(server: ServerReflection, **request: Any) -> list[bytes]:
    return [bytes(file) for file in ask(server, **request)["file_descriptor_response"]["file_descriptor_proto"]]


def code(server: ServerReflection, **request: Any) -> StatusCode:
    (error,) = ask(server, **request).values()
    assert error["error_message"]
    return StatusCode(error["error_code"])


@pytest.mark.parametrize(
    ("request_hex", "answer_hex"),
    [
        (
            "0a0168 3a00",  # host "h", list_services ""
            "0a0168 1205 0a01683a00"  # valid_host, original_request
            "320e 0a05 0a03712e41 0a05 0a03712e5a",  # list_services_response: "q.A", "q.Z"
        ),
        (
            "1a0178",  # file_by_filename "x"
            "1203 1a0178 3a0f 0805 120b 6e6f2066696c6520277827",  # error_response: NOT_FOUND, "no file 'x'"
        ),
        (
            "3203702e4d",  # all_extension_numbers_of_type "p.M"
            "1205 3203702e4d 2a05 0a03702e4d",  # all_extension_numbers_response: base_type_name "p.M", no numbers
        ),
    ],
    ids=["list_services", "unknown file", "extension numbers"],
)
def test_an_answer_has_its_bytes(request_hex: str, answer_hex: str) -> None:
    assert SMALL.answer(bytes.fromhex(request_hex)) == bytes.fromhex(answer_hex)


def test_a_file_comes_with_what_it_imports_each_time() -> None:
    both = encode_field(1, TOP.descriptor) + encode_field(1, BASE.descriptor)
    wanted = bytes.fromhex("1203 1a0174") + encode_field(4, both)  # file_by_filename "t"
    assert [SMALL.answer(bytes.fromhex("1a0174")) for _ in range(2)] == [wanted, wanted]
    assert files(SMALL, file_by_filename="b") == [BASE.descriptor]


@pytest.mark.parametrize(
    ("symbol", "found"),
    [
        ("q.Z", [TOP, BASE]),
        ("q.Z.Do", [TOP, BASE]),
        ("q.A", [TOP, BASE]),
        ("q.E", [TOP, BASE]),
        ("p.M", [BASE]),
        ("p.M.f", [BASE]),
        ("p.M.o", [BASE]),
        ("p.M.MEntry", [BASE]),
        ("p.M.MEntry.key", [BASE]),
    ],
)
def test_a_symbol_is_found_in_its_file(symbol: str, found: list[ProtoFile]) -> None:
    assert files(SMALL, file_containing_symbol=symbol) == [file.descriptor for file in found]


@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        ("inference.GRPCInferenceService", "grpc_service.proto"),
        ("inference.GRPCInferenceService.ModelInfer", "grpc_service.proto"),
        ("inference.ModelInferRequest.InferInputTensor", "grpc_service.proto"),
        ("inference.ModelConfig", "model_config.proto"),
        ("inference.DataType", "model_config.proto"),
        ("inference.TYPE_FP32", "model_config.proto"),
        ("grpc.health.v1.Health.Watch", "grpc/health/v1/health.proto"),
        ("grpc.health.v1.HealthCheckResponse.ServingStatus", "grpc/health/v1/health.proto"),
        ("grpc.health.v1.HealthCheckResponse.SERVING", "grpc/health/v1/health.proto"),
        ("grpc.reflection.v1.ServerReflection", "grpc/reflection/v1/reflection.proto"),
        ("grpc.reflection.v1alpha.ServerReflection.ServerReflectionInfo", "grpc/reflection/v1alpha/reflection.proto"),
    ],
)
def test_a_symbol_of_what_is_served_is_found(symbol: str, file: str) -> None:
    assert files(SERVED, file_containing_symbol=symbol)[0] == next(one.descriptor for one in FILES if one.name == file)


@pytest.mark.parametrize("symbol", ["", "p", "q", ".p.M", "p.M.", "p.M.g", "q.Z.Undo", "M", "q.M", "p.M.o.f", "é" * 1000])
def test_an_unknown_symbol_is_not_found(symbol: str) -> None:
    assert code(SMALL, file_containing_symbol=symbol) == StatusCode.NOT_FOUND


def test_there_are_no_extensions() -> None:
    for name in ("p.M", "x", ""):
        asked = {"containing_type": name, "extension_number": 1}
        assert code(SMALL, file_containing_extension=asked) == StatusCode.NOT_FOUND
    for name in ("p.M", "p.M.MEntry"):
        numbers = {"base_type_name": name, "extension_number": []}
        assert ask(SMALL, all_extension_numbers_of_type=name) == {"all_extension_numbers_response": numbers}
    for name in ("p.M.f", "q.Z", "x", ""):
        assert code(SMALL, all_extension_numbers_of_type=name) == StatusCode.NOT_FOUND


def test_an_error_repeats_little_of_a_long_name() -> None:
    (error,) = ask(SMALL, file_containing_symbol="x" * 10_000).values()
    assert len(error["error_message"]) < 150


@pytest.mark.parametrize("data", [b"", b"\x0a\x01h", b"\x42\x01x"], ids=["nothing", "a host", "an unknown field"])
def test_a_request_for_nothing_is_an_invalid_argument(data: bytes) -> None:
    said = RESPONSE.read(SMALL.answer(data))
    assert said["error_response"]["error_code"] == StatusCode.INVALID_ARGUMENT


def test_the_last_of_two_questions_is_answered() -> None:
    said = RESPONSE.read(SMALL.answer(REQUEST.write({"file_by_filename": "x"}) + REQUEST.write({"list_services": "*"})))
    assert said["original_request"] == {"host": "", "list_services": "*"}
    assert said["list_services_response"]["service"] == [{"name": "q.A"}, {"name": "q.Z"}]


@pytest.mark.parametrize("data", [b"\x1a\x05x", b"\x1a\x01\xff", b"\x0b", b"\x00", b"\x80"])
def test_garbage_is_no_request(data: bytes) -> None:
    with pytest.raises(ProtobufError):
        SMALL.answer(data)


def test_a_view_of_a_buffer_is_read_too() -> None:
    data = REQUEST.write({"list_services": ""})
    assert SMALL.answer(memoryview(bytearray(data))) == SMALL.answer(data)


def test_what_is_served_lists_its_services_by_name() -> None:
    services = [one["name"] for one in ask(SERVED, list_services="")["list_services_response"]["service"]]
    assert services == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
    ]
    assert {path.split("/")[1] for path in PATHS} <= set(services)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_a_client_that_knows_reflection_alone_finds_each_method(version: str) -> None:
    """As grpcurl does it: with Google's reading of our answers it makes a pool of its own."""
    descriptor_pb2 = theirs("google.protobuf.descriptor_pb2")
    pool_of = theirs("google.protobuf.descriptor_pool").DescriptorPool
    get_class = theirs("google.protobuf.message_factory").GetMessageClass
    package = f"grpc.reflection.{version}"
    known = pool_of()
    known.AddSerializedFile(next(file.descriptor for file in REFLECTION_FILES if file.package == package))
    request = get_class(known.FindMessageTypeByName(f"{package}.ServerReflectionRequest"))
    response = get_class(known.FindMessageTypeByName(f"{package}.ServerReflectionResponse"))

    def asked(**fields: Any) -> Any:
        question = request(host="h", **fields)
        said = response.FromString(SERVED.answer(question.SerializeToString()))
        assert said.original_request == question
        assert said.valid_host == "h"
        return said

    protos = {}
    services = [service.name for service in asked(list_services="*").list_services_response.service]
    for service in services:
        for data in asked(file_containing_symbol=service).file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            protos[file.name] = file
    found = pool_of()
    for file in sorted(protos.values(), key=lambda file: len(file.dependency)):
        found.Add(file)
    assert {service: len(found.FindServiceByName(service).methods) for service in services} == {
        "grpc.health.v1.Health": 2,
        "grpc.reflection.v1.ServerReflection": 1,
        "grpc.reflection.v1alpha.ServerReflection": 1,
        "inference.GRPCInferenceService": 20,
    }
    assert asked(file_by_filename="x").error_response.error_code == 5
    assert asked().error_response.error_code == 3
    assert asked(all_extension_numbers_of_type=f"{package}.ErrorResponse").WhichOneof("message_response") == (
        "all_extension_numbers_response"
    )
