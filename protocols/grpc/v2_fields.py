"""Tensors and parameters in the messages of gRPC's Open Inference Protocol (v2), for both roles."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, final

import numpy as np

from protocols.events import Buffer
from protocols.floods import GRPC_NAME
from protocols.grpc.contents import Contents, encode_contents
from protocols.grpc.protobuf import Room, encode_field, encode_varint, fields, read_text, to_signed, unpack_varints
from protocols.v2.body import V2Limits, read_parameters
from protocols.v2.tensors import (
    DATATYPES,
    NO_PARAMETERS,
    Array,
    BytesData,
    Parameters,
    V2Error,
    V2Tensor,
    bytes_apart,
    check_shape,
    decode_binary,
    encode_binary,
    show,
)

# Tags: the number of a field times 8, plus the wire type. Those of requests; RAW_OUTPUTS and the last line are responses'.
MODEL_NAME, MODEL_VERSION, ID, PARAMETERS, TENSORS = 0x0A, 0x12, 0x1A, 0x22, 0x2A
OUTPUTS, RAW_INPUTS, RAW_OUTPUTS = 0x32, 0x3A, 0x32
NAME, _DATATYPE, _SHAPE, _PACKED_SHAPE, _TENSOR_PARAMETERS, _CONTENTS = 0x0A, 0x12, 0x18, 0x1A, 0x22, 0x2A
OUTPUT_PARAMETERS, _KEY, _VALUE = 0x12, 0x0A, 0x12
_BOOL, _INT64, _STRING, _DOUBLE, _UINT64 = 0x08, 0x10, 0x1A, 0x21, 0x28
ERROR_MESSAGE, INFER_RESPONSE = 0x0A, 0x12

_TRANSFER = ("binary_data", "binary_data_output", "binary_data_size")  # parameters of HTTP's bodies, ignored as in Triton
_LARGEST_VARINT = 10

_DOUBLES = struct.Struct("<d")
FINAL_RESPONSE = "triton_final_response"
"""The parameter of a stream's response that tells whether it is the last one of its request."""

KEPT_BYTES = 1024
"""The longest piece of a message that is cached, in bytes."""
KEPT_ENTRIES = 128

Key = TypeVar("Key")
Value = TypeVar("Value")


# Reading


@final
class TensorFields:
    """An InferInputTensor or InferOutputTensor."""

    __slots__ = ("contents", "datatype", "name", "parameters", "shape")

    def __init__(self, view: memoryview, limits: V2Limits, room: Room, values: Room) -> None:
        """`room` is for the tensor's fields, `values` for those of its contents."""
        self.name = self.datatype = ""
        self.shape: list[int] = []
        self.parameters: dict[str, Any] = {}
        self.contents: Contents | None = None
        shape = self.shape
        for tag, value, _ in fields(view, room):
            if tag == NAME:
                self.name = read_name(value, "a tensor's name")
            elif tag == _DATATYPE:
                self.datatype = read_name(value, "a datatype")
            elif tag == _PACKED_SHAPE:
                if len(value) > _LARGEST_VARINT * limits.dims or len(shape) > limits.dims:
                    raise V2Error(f"tensor {show(self.name)}: at most {limits.dims} dimensions, got more")
                shape += [to_signed(size) for size in unpack_varints(value)]
            elif tag == _SHAPE:
                if len(shape) > limits.dims:
                    raise V2Error(f"tensor {show(self.name)}: at most {limits.dims} dimensions, got more")
                shape.append(to_signed(value))
            elif tag == _TENSOR_PARAMETERS:
                add_parameter(self.parameters, value, room)
            elif tag == _CONTENTS:
                if self.contents is None:
                    self.contents = Contents()
                self.contents.add(value, values)


def read_tensors(
    entries: Sequence[TensorFields], raw: Sequence[memoryview], message: memoryview, limits: V2Limits, kind: str
) -> tuple[tuple[V2Tensor, ...], int]:
    """The tensors of a message, and the number of bytes that were copied or converted for them. `raw` has the raw contents
    of all tensors in order, or is empty."""
    field = f"raw_{kind}_contents"
    check_names([entry.name for entry in entries], f"{kind}s")
    if raw and len(raw) != len(entries):
        if len(raw) < len(entries):
            missing = entries[len(raw)].name
            raise V2Error(f"{kind} {show(missing)} has no entry in {field}: {len(entries)} {kind}s, got {len(raw)} entries")
        raise V2Error(f"{field} has {len(raw)} entries for {len(entries)} {kind}s")
    tensors, elements, copied = [], 0, 0
    for index, entry in enumerate(entries):
        name, datatype, parameters = entry.name, entry.datatype, entry.parameters
        if datatype not in DATATYPES:
            raise V2Error(f"{kind} {show(name)}: datatype must be one of {', '.join(DATATYPES)}, got {show(datatype)}")
        shape = check_shape(entry.shape, name, dims=limits.dims)
        if datatype == "BYTES" and kind == "input":
            elements = limits.check_elements(name, shape, elements)
        if parameters:
            read_parameters({"parameters": parameters}, kind, name)
            drop_transfer(parameters)
        array: Array | BytesData
        if raw:
            if entry.contents is not None:
                raise V2Error(f"{kind} {show(name)} has contents, and there are {field}: a message has one or the other")
            array = decode_binary(datatype, shape, raw[index], name)
            if datatype == "BOOL":
                copied += bytes_apart(array, raw[index])
        else:
            array, apart = (entry.contents or Contents()).array(datatype, shape, name, message)
            copied += apart
        tensors.append(V2Tensor(name=name, datatype=datatype, array=array, parameters=parameters or NO_PARAMETERS))
    return tuple(tensors), copied


def read_name(view: memoryview, what: str) -> str:
    """The text of a field that names something. V2Error if it is very long; ProtobufError if it is not UTF-8."""
    if len(view) > GRPC_NAME:
        raise V2Error(f"{what} has at most {GRPC_NAME} bytes, got {len(view)}")
    return read_text(view)


def check_many(entries: Sequence[object], member: str, limits: V2Limits) -> None:
    """Raises V2Error unless one more entry is allowed."""
    if len(entries) == limits.tensors:
        raise V2Error(f"{member} has at most {limits.tensors} entries (limits.tensors), got more")


def check_names(names: Sequence[str], member: str) -> None:
    """Raises V2Error unless each entry has a unique name."""
    if len(set(names)) < len(names) or "" in names:
        for index, name in enumerate(names):
            if not name:
                raise V2Error(f"{member}[{index}] has no name")
            if name in names[:index]:
                raise V2Error(f"{member} has {show(name)} twice")


def add_parameter(parameters: dict[str, Any], view: memoryview, room: Room) -> None:
    """Adds an entry of a map of InferParameter. The last value of a name wins, as does the last member of its oneof."""
    key = ""
    value: bool | int | float | str | None = None
    for tag, piece, _ in fields(view, room):
        if tag == _KEY:
            key = read_text(piece)
        elif tag == _VALUE:
            for choice, chosen, _ in fields(piece, room):
                if choice == _STRING:
                    value = read_text(chosen)
                elif choice == _INT64:
                    value = to_signed(chosen)
                elif choice == _BOOL:
                    value = chosen != 0
                elif choice == _UINT64:
                    value = chosen
                elif choice == _DOUBLE:
                    value = _DOUBLES.unpack(chosen)[0]
    parameters[key] = value


def drop_transfer(parameters: dict[str, Any]) -> None:
    """Removes the parameters that concern the body of an HTTP request."""
    for key in _TRANSFER:
        parameters.pop(key, None)


# Writing


def encode_names(model_name: str, model_version: str) -> bytes:
    """The fields 1 and 2, with which requests and responses begin."""
    out = encode_field(1, model_name.encode()) if model_name else b""
    return out + encode_field(2, model_version.encode()) if model_version else out


def encode_id(id: str) -> bytes:
    """Field 3. V2Error with status 500 for text that UTF-8 cannot express."""
    try:
        return encode_field(3, id.encode())
    except UnicodeEncodeError:
        raise V2Error(f"id is text as UTF-8, which cannot express {show(id)}", status=500) from None


def encode_tensor(tensor: V2Tensor) -> bytes:
    """The fields of a tensor without its contents."""
    if type(tensor.name) is not str or not tensor.name:
        raise V2Error(f"a tensor has a name, which is a string, got {show(tensor.name)}", status=500)
    shape = b"".join([encode_varint(size) for size in tensor.array.shape])
    try:
        out = encode_field(1, tensor.name.encode()) + encode_field(2, tensor.datatype.encode())
    except UnicodeEncodeError:
        raise V2Error(f"a tensor's name is text as UTF-8, which cannot express {show(tensor.name)}", status=500) from None
    if shape:
        out += encode_field(3, shape)
    if tensor.parameters:
        out += encode_parameters(4, tensor.parameters, f"tensor {show(tensor.name)}")
    return out


def encode_parameters(number: int, parameters: Parameters, of: str) -> bytes:
    """A map of InferParameter. V2Error with status 500 for an invalid value; `of` names its owner."""
    out = []
    for key, value in parameters.items():
        if isinstance(value, np.generic):
            value = value.item()
        try:
            match value:
                case bool():
                    choice = b"\x08%c" % value
                case int() if -(2**63) <= value < 2**63:
                    choice = b"\x10" + encode_varint(value)
                case int() if 0 < value < 2**64:
                    choice = b"\x28" + encode_varint(value)
                case float():
                    choice = b"\x21" + _DOUBLES.pack(value)
                case str():
                    choice = encode_field(3, value.encode())
                case _:
                    raise TypeError
            out.append(encode_field(number, encode_field(1, key.encode()) + encode_field(2, choice)))
        except (TypeError, AttributeError, UnicodeEncodeError):
            raise V2Error(
                f"parameter {show(key)} of {of} must be a string, a boolean or a number of 64 bits, got {show(value)}",
                status=500,
            ) from None
    return b"".join(out)


FINAL = {final: encode_parameters(4, {FINAL_RESPONSE: final}, "the response") for final in (False, True)}


def join_raw(head: list[bytes], tag: int, tensors: Sequence[V2Tensor]) -> list[Buffer]:
    """The buffers of a message that ends with raw contents: an entry for each tensor, even an empty one. The data are the
    tensors' own memory if possible, see `encode_binary`."""
    buffers: list[Buffer] = []
    for tensor in tensors:
        data = raw_data(tensor)
        head.append(b"%c%b" % (tag, encode_varint(len(data[0]) if len(data) == 1 else sum(map(len, data)))))
        for buffer in data:
            if head:
                buffers.append(b"".join(head))
                head = []
            buffers.append(buffer)
    if head:
        buffers.append(b"".join(head))
    return buffers


def raw_data(tensor: V2Tensor) -> list[Buffer]:
    """The data of a tensor, as `encode_binary` gives them. V2Error, which names the tensor."""
    try:
        return encode_binary(tensor.array, tensor.datatype)
    except V2Error as error:
        raise V2Error(f"tensor {show(tensor.name)}: {error.message}", status=error.status) from None


def typed_tensors(tensors: Sequence[V2Tensor]) -> Iterator[Buffer]:
    """Field 5 with each tensor and its contents."""
    for tensor in tensors:
        try:
            contents = encode_contents(tensor.array, tensor.datatype)
        except V2Error as error:
            raise V2Error(f"tensor {show(tensor.name)}: {error.message}", status=error.status) from None
        inside = b"\x2a" + encode_varint(sum(map(len, contents)))
        described = encode_tensor(tensor) + inside
        yield b"\x2a" + encode_varint(len(described) + sum(map(len, contents))) + described
        yield from contents


def join(head: list[bytes], rest: Iterable[Buffer]) -> list[Buffer]:
    """The buffers of a message, with small neighbors joined."""
    buffers: list[Buffer] = []
    small = head
    for buffer in rest:
        if type(buffer) is bytes and len(buffer) <= KEPT_BYTES:
            small.append(buffer)
        else:
            if small:
                buffers.append(b"".join(small))
                small = []
            buffers.append(buffer)
    if small or not buffers:
        buffers.append(b"".join(small))
    return buffers


def keep(memo: dict[Key, Value], key: Key, value: Value) -> None:
    """Adds to a cache, which is cleared when it is full."""
    if len(memo) >= KEPT_ENTRIES and key not in memo:
        memo.clear()  # one step, because threads may read it
    memo[key] = value
