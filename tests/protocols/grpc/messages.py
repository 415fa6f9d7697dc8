"""Messages for the tests of gRPC: the two large ones as tables, golden bytes, and wire forms that no writer of ours makes."""

from __future__ import annotations

import random

from protocols.grpc.protobuf import FieldType, MessageType, Room, encode_field, encode_varint, fields, unpack_varints

PARAMETER = MessageType(
    "InferParameter",
    {
        1: FieldType("bool_param", "bool", oneof="parameter_choice"),
        2: FieldType("int64_param", "int64", oneof="parameter_choice"),
        3: FieldType("string_param", "string", oneof="parameter_choice"),
        4: FieldType("double_param", "double", oneof="parameter_choice"),
        5: FieldType("uint64_param", "uint64", oneof="parameter_choice"),
    },
)
CONTENTS = MessageType(
    "InferTensorContents",
    {
        1: FieldType("bool_contents", "bool", repeated=True),
        2: FieldType("int_contents", "int32", repeated=True),
        3: FieldType("int64_contents", "int64", repeated=True),
        4: FieldType("uint_contents", "uint32", repeated=True),
        5: FieldType("uint64_contents", "uint64", repeated=True),
        6: FieldType("fp32_contents", "float", repeated=True),
        7: FieldType("fp64_contents", "double", repeated=True),
        8: FieldType("bytes_contents", "bytes", repeated=True),
    },
)
_PARAMETERS = FieldType("parameters", PARAMETER, key="string")
TENSOR = MessageType(
    "InferInputTensor",
    {
        1: FieldType("name", "string"),
        2: FieldType("datatype", "string"),
        3: FieldType("shape", "int64", repeated=True),
        4: _PARAMETERS,
        5: FieldType("contents", CONTENTS),
    },
)
OUTPUT = MessageType("InferRequestedOutputTensor", {1: FieldType("name", "string"), 2: _PARAMETERS})
_HEAD = {
    1: FieldType("model_name", "string"),
    2: FieldType("model_version", "string"),
    3: FieldType("id", "string"),
    4: _PARAMETERS,
}
REQUEST = MessageType(
    "ModelInferRequest",
    {
        **_HEAD,
        5: FieldType("inputs", TENSOR, repeated=True),
        6: FieldType("outputs", OUTPUT, repeated=True),
        7: FieldType("raw_input_contents", "bytes", repeated=True),
    },
)
RESPONSE = MessageType(
    "ModelInferResponse",
    {
        **_HEAD,
        5: FieldType("outputs", TENSOR, repeated=True),
        6: FieldType("raw_output_contents", "bytes", repeated=True),
    },
)
STREAM_RESPONSE = MessageType(
    "ModelStreamInferResponse", {1: FieldType("error_message", "string"), 2: FieldType("infer_response", RESPONSE)}
)


def varint(value: int) -> bytes:
    return encode_varint(value)


def split(data: bytes) -> list[bytes]:
    """The fields of a message, each with its tag."""
    pieces, at = [], 0
    for _, _, end in fields(memoryview(data), Room(10**6)):
        pieces.append(data[at:end])
        at = end
    return pieces


def loosened(piece: bytes, chance: random.Random) -> bytes:
    """A field of a tensor, `inputs` or `outputs` of a message, in a form that means the same to protobuf: its shape not packed,
    its contents in parts."""
    (tag, value, _), *_ = fields(memoryview(piece), Room(10**6))
    if tag != 0x2A:
        return piece
    out = b""
    for inner, part, _ in fields(value, Room(10**6)):
        if inner == 0x1A:
            out += b"".join(b"\x18" + varint(size) for size in unpack_varints(part))
        elif inner == 0x2A and len(part) < 1000:
            out += b"".join(
                encode_field(5, one) for one in map(_unpacked if chance.random() < 0.5 else bytes, split(bytes(part)))
            )
        elif inner & 7 == 2:
            out += encode_field(inner >> 3, bytes(part))
    return encode_field(5, out)


def _unpacked(piece: bytes) -> bytes:
    """A packed field of contents, as one field a number."""
    (tag, value, _), *_ = fields(memoryview(piece), Room(10**6))
    number = tag >> 3
    if tag & 7 != 2 or number > 7:
        return piece
    if number in (6, 7):
        size, wire = (4, 5) if number == 6 else (8, 1)
        return b"".join(varint(number << 3 | wire) + bytes(value[at : at + size]) for at in range(0, len(value), size))
    return b"".join(varint(number << 3) + varint(one) for one in unpack_varints(value))
