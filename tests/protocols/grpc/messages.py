"""Messages for the tests of gRPC: those of inference by their tables, and wire forms that no writer of ours makes."""

from __future__ import annotations

import importlib
import os
import random
from types import ModuleType

import pytest

from protocols.grpc.protobuf import Room, encode_field, encode_varint, fields, unpack_varints
from protocols.grpc.v2_tables import MODEL_INFER, MODEL_STREAM_INFER

REQUEST, RESPONSE = MODEL_INFER
STREAM_RESPONSE = MODEL_STREAM_INFER[1]
_PACKAGES = {"protobuf": "google.protobuf", "grpcio": "grpc", "tritonclient": "tritonclient.grpc"}


def theirs(name: str) -> ModuleType:
    """A module that is there where Google's protobuf and tritonclient's messages are; the test is skipped elsewhere."""
    for package, module in _PACKAGES.items():
        if package not in os.environ.get("EVERYWIRE_REQUIRE", "").split(","):
            pytest.importorskip(module, reason=f"{package} is not installed", exc_type=ImportError)
    return importlib.import_module(name)


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
