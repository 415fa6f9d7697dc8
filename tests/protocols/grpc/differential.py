"""Google's protobuf and ours over messages that are made, and mutated: both accept the same, and read the same values.

`python -m tests.protocols.grpc.differential --number 100000 --seed 1` is the long run. The two differ here:

- Ours refuses groups (wire types 3 and 4), which proto3 does not have.
- Google's Python drops an entry of a map that has an unknown field. Its C++ keeps it, as a map is encoded like a repeated
  message (protobuf.dev, "Maps"), and so does ours.
- Ours skips the fields of the model configuration that its table leaves out, and finds no fault in them.

Protobuf accepts requests that no model can have: `expected_call` says from Google's reading, row by row of the decisions,
which of them are a V2Error.
"""

from __future__ import annotations

import argparse
import math
import random
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from protocols.grpc.contents import FIELD_OF
from protocols.grpc.protobuf import MessageType, ProtobufError, Room, fields
from protocols.grpc.v2_client import read_infer_response, read_streamed_response, render_infer_request
from protocols.grpc.v2_messages import InferCall, InferRequestReader, InferResponseWriter
from protocols.grpc.v2_tables import METHODS
from protocols.v2 import ModelSignature, V2Error, V2Request, V2Tensor, WantedOutput
from protocols.v2.body import UNSUPPORTED
from protocols.v2.tensors import DATATYPES, RANGES, decode_binary
from tests.protocols.grpc import messages as tables

CONTENTS = {
    1: "bool_contents", 2: "int_contents", 3: "int64_contents", 4: "uint_contents", 5: "uint64_contents",
    6: "fp32_contents", 7: "fp64_contents", 8: "bytes_contents",
}  # fmt: skip
TABLES: dict[str, MessageType] = {
    **{message.name: message for pair in METHODS.values() for message in pair if hasattr(pb, message.name)},
    **{message.name: message for message in (tables.REQUEST, tables.RESPONSE, tables.STREAM_RESPONSE)},
}
READER = InferRequestReader()  # one for all: a plan of one message must not be one of another


# Google's reading


def as_dict(message: Any, table: MessageType) -> dict[str, Any]:
    """A message of Google's as `MessageType.read` has it: the fields of the table, all others left out."""
    found: dict[str, Any] = {}
    for field in table.fields.values():
        value = getattr(message, field.name)
        inner = field.type
        if field.key and isinstance(inner, MessageType):
            found[field.name] = {key: as_dict(value[key], inner) for key in value}
        elif field.key:
            found[field.name] = dict(value)
        elif field.repeated:
            found[field.name] = [as_dict(one, inner) for one in value] if isinstance(inner, MessageType) else list(value)
        elif isinstance(inner, MessageType):
            if message.HasField(field.name):
                found[field.name] = as_dict(value, inner)
        elif not field.oneof or message.WhichOneof(field.oneof) == field.name:
            found[field.name] = value
    return found


def plain(value: Any) -> Any:
    """A value that equals itself: NaN by a word, and negative zero told from the other."""
    match value:
        case float():
            return repr(value)
        case dict():
            return {key: plain(one) for key, one in value.items()}
        case list():
            return [plain(one) for one in value]
    return value


class Refused(Exception):
    """A request that no model can have, by the decisions."""


def refuse_if(condition: bool) -> None:
    if condition:
        raise Refused


def parameters_of(owner: Any, *, tensor: bool) -> dict[str, Any]:
    found = {}
    for key, value in owner.parameters.items():
        choice = value.WhichOneof("parameter_choice")
        refuse_if(choice is None)
        found[key] = getattr(value, choice)
        refuse_if(type(found[key]) is float and not math.isfinite(found[key]))
    refuse_if(tensor and not UNSUPPORTED.isdisjoint(found))
    for key in ("binary_data", "binary_data_output", "binary_data_size"):
        found.pop(key, None)
    return found


def bits(array: Any) -> Any:
    if array.dtype.kind == "O":
        return array.reshape(-1).tolist()
    if array.dtype.kind in "fV":
        with np.errstate(invalid="ignore"):  # signalling NaN
            array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return array.tobytes()


def tensors_of(entries: Any, raw: Any, kind: str) -> list[Any]:
    names = [entry.name for entry in entries]
    refuse_if(len(set(names)) < len(names) or "" in names)
    refuse_if(bool(raw) and len(raw) != len(entries))
    found, elements = [], 0
    for index, entry in enumerate(entries):
        datatype, shape = entry.datatype, tuple(entry.shape)
        refuse_if(datatype not in DATATYPES or len(shape) > 16 or any(size < 0 for size in shape))
        count = math.prod(shape)
        if datatype == "BYTES" and kind == "input":
            elements += count
            refuse_if(elements > 1_000_000)
        parameters = parameters_of(entry, tensor=True)
        if raw:
            refuse_if(entry.HasField("contents"))
            try:
                array = decode_binary(datatype, shape, memoryview(raw[index]), entry.name)
            except V2Error:
                raise Refused from None
            values = bits(V2Tensor(name="x", datatype=datatype, array=array).elements)
        else:
            refuse_if(datatype not in FIELD_OF)
            held = {number: getattr(entry.contents, name) for number, name in CONTENTS.items()}
            refuse_if(any(len(values) for number, values in held.items() if number != FIELD_OF[datatype]))
            listed = list(held[FIELD_OF[datatype]])
            refuse_if(len(listed) != count)
            refuse_if(not count and math.prod(filter(None, shape)) * DATATYPES[datatype].itemsize >= 2**63)
            if datatype in RANGES:
                low, high = RANGES[datatype]
                refuse_if(any(not low <= value <= high for value in listed))
            values = listed if datatype == "BYTES" else bits(np.array(listed, DATATYPES[datatype]))
        found.append((entry.name, datatype, shape, values, repr(parameters)))
    return found


def expected_call(message: Any) -> Any:
    """The request in a ModelInferRequest that Google has read."""
    parameters = parameters_of(message, tensor=False)
    empty_final = parameters.pop("triton_enable_empty_final_response", False)
    refuse_if(type(empty_final) is not bool or any(key.startswith("triton_") for key in parameters))
    inputs = tensors_of(message.inputs, message.raw_input_contents, "input")
    outputs = []
    for output in message.outputs:
        count = parameters_of(output, tensor=True).get("classification", 0)
        refuse_if(not output.name or type(count) is not int or count < 0 or output.name in [name for name, _ in outputs])
        outputs.append((output.name, count))
    typed = bool(message.inputs) and not message.raw_input_contents
    return (message.model_name, message.model_version, message.id, repr(parameters), inputs, outputs, typed, empty_final)


def expected_answer(message: Any) -> Any:
    parameters = {}
    for key, value in message.parameters.items():
        choice = value.WhichOneof("parameter_choice")
        refuse_if(choice is None)
        parameters[key] = getattr(value, choice)
        refuse_if(type(parameters[key]) is float and not math.isfinite(parameters[key]))
    outputs = tensors_of(message.outputs, message.raw_output_contents, "output")
    return (message.model_name, message.model_version, message.id, repr(parameters), outputs)


# Our reading


def described(tensors: Any) -> list[Any]:
    return [(t.name, t.datatype, t.array.shape, bits(t.elements), repr(dict(t.parameters))) for t in tensors]


def described_call(call: InferCall) -> Any:
    request = call.request
    return (
        call.model_name,
        call.model_version,
        request.id,
        repr(dict(request.parameters)),
        described(request.inputs),
        [(output.name, output.classification) for output in request.outputs],
        call.typed,
        call.empty_final,
    )


def described_answer(answer: Any) -> Any:
    return (answer.model_name, answer.model_version, answer.id, repr(dict(answer.parameters)), described(answer.outputs))


def sorted_parameters(value: Any) -> Any:
    """Maps have no order: texts of their dicts are compared as sets of entries."""
    if isinstance(value, tuple | list):
        return [sorted_parameters(one) for one in value]
    if isinstance(value, str) and value.startswith("{"):
        return "".join(sorted(value))
    return value


def has_odd_entry(table: MessageType, data: Any) -> bool:
    """True if an entry of a map has an unknown field, at any depth."""
    view = memoryview(data)
    for tag, value, _ in fields(view, Room(10**6)):
        field = table.fields.get(tag >> 3)
        if field is None or tag & 7 != 2:
            continue
        if field.key:
            for inner, part, _ in fields(value, Room(10**6)):
                if inner == 0x12 and isinstance(field.type, MessageType):
                    if has_odd_entry(field.type, part):
                        return True
                elif inner not in (0x0A, 0x12):
                    return True
        elif isinstance(field.type, MessageType) and has_odd_entry(field.type, value):
            return True
    return False


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "read", sorted_parameters(call())
    except DecodeError:
        return "malformed", None
    except ProtobufError as error:
        group = "wire type 3" in str(error) or "wire type 4" in str(error)
        return "group" if group else "malformed", None
    except (V2Error, Refused):
        return "refused", None


def compare(name: str, data: bytes) -> str:
    """Compares one message: one word says how both read it. AssertionError if they differ."""
    kind = getattr(pb, name)
    table = TABLES[name]
    theirs = outcome(lambda: plain(as_dict(kind.FromString(data), table)))
    ours = outcome(lambda: plain(table.read(data)))
    if name == "ModelConfigResponse" and (ours[0], theirs[0]) == ("read", "malformed"):
        return "wrong in a field that the table leaves out"
    if ours[0] == "read" and has_odd_entry(table, data):
        return "odd entry"
    if ours[0] != "group":
        assert ours == theirs, (name, data.hex(), ours, theirs)
    word = ours[0]
    readers: dict[str, tuple[Callable[[Any], Any], list[Callable[[], Any]]]] = {
        "ModelInferRequest": (
            expected_call,
            [
                lambda: described_call(InferRequestReader().read(data)),
                lambda: described_call(READER.read(data)),
                lambda: described_call(READER.read(bytearray(data))),
            ],
        ),
        "ModelInferResponse": (expected_answer, [lambda: described_answer(read_infer_response(data))]),
        "ModelStreamInferResponse": (
            lambda message: (message.error_message, expected_answer(message.infer_response)),
            [lambda: ((one := read_streamed_response(data)).error, described_answer(one.answer))],
        ),
    }
    if name in readers:
        expect, reads = readers[name]
        wanted = outcome(lambda: expect(kind.FromString(data)))
        for read in reads:
            got = outcome(read)
            if wanted[0] == "malformed":  # a fault of a tensor may be found before that of the message
                assert got[0] in ("malformed", "refused", "group"), (name, data.hex(), got)
            elif got[0] == "group" or (wanted[0] == "refused" and word == "group"):
                assert word == "group", (name, data.hex(), got)
            else:
                assert got == wanted, (name, data.hex(), got, wanted)
        word = wanted[0] if word == "read" else word
    return word


# Messages

NAMES = ["x", "y", "INPUT0", "é", "", "a" * 130, "binary_data_size", "shared_memory_region", "classification", "priority", "triton_x", "triton_enable_empty_final_response"]  # fmt: skip
NUMBERS = [0, 1, -1, 2, 127, 128, 255, 256, 300, 32767, 32768, -129, 65535, 65536, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64 - 1]  # fmt: skip
FLOATS = [0.0, -0.0, 1.5, -3.25, math.inf, -math.inf, math.nan, 65504.0]


class Maker:
    """Makes messages, good ones for the most part."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def message(self) -> tuple[str, bytes]:
        """The name of a message, and bytes that are one, or nearly."""
        chance = self.random
        hot = ("ModelInferRequest", "ModelInferRequest", "ModelInferResponse", "ModelStreamInferResponse")
        name = chance.choice(hot if chance.random() < 0.8 else sorted(TABLES))
        if name == "ModelInferRequest" and chance.random() < 0.7:
            data = self.request().SerializeToString(deterministic=True)
        elif name == "ModelInferResponse" and chance.random() < 0.7:
            data = self.response().SerializeToString(deterministic=True)
        elif name == "ModelStreamInferResponse" and chance.random() < 0.7:
            data = pb.ModelStreamInferResponse(error_message=self.name(), infer_response=self.response()).SerializeToString(
                deterministic=True
            )
        else:
            message = getattr(pb, name)()
            self.fill(message)
            data = message.SerializeToString(deterministic=True)
        if chance.random() < 0.2:
            data = self.shuffled(data)
        if chance.random() < 0.1:
            data += self.message_of(name)
        for _ in range(chance.choice((0, 0, 0, 1, 1, 2))):
            data = self.mutated(data)
        return name, data

    def message_of(self, name: str) -> bytes:
        message = getattr(pb, name)()
        self.fill(message)
        return bytes(message.SerializeToString(deterministic=True))

    def name(self) -> str:
        return self.random.choice(NAMES)

    def request(self) -> Any:
        chance = self.random
        message = pb.ModelInferRequest(model_name=chance.choice(("m", "simple")))
        if chance.random() < 0.5:
            message.id = str(chance.randrange(1000))
        if chance.random() < 0.3:
            message.model_version = "1"
        if chance.random() < 0.2:
            message.parameters[self.name()].CopyFrom(self.parameter())
        self.tensors(message.inputs, message.raw_input_contents)
        for name in chance.sample(("o", "p"), chance.choice((0, 0, 1, 2))):
            output = message.outputs.add(name=name)
            if chance.random() < 0.2:
                output.parameters["classification"].int64_param = chance.choice((0, 1, 3, -1))
        return message

    def response(self) -> Any:
        message = pb.ModelInferResponse(model_name="m", id=self.random.choice(("", "7")))
        message.parameters["triton_final_response"].bool_param = self.random.random() < 0.5
        self.tensors(message.outputs, message.raw_output_contents)
        return message

    def parameter(self) -> Any:
        chance = self.random
        kind = chance.choice(("bool", "int64", "string", "double", "uint64", ""))
        value = pb.InferParameter()
        if kind == "bool":
            value.bool_param = chance.random() < 0.5
        elif kind == "int64":
            value.int64_param = chance.choice([n for n in NUMBERS if -(2**63) <= n < 2**63])
        elif kind == "uint64":
            value.uint64_param = chance.choice([n for n in NUMBERS if n >= 0])
        elif kind == "string":
            value.string_param = self.name()
        elif kind == "double":
            value.double_param = chance.choice(FLOATS)
        return value

    def tensors(self, entries: Any, raw: Any) -> None:
        chance = self.random
        typed = chance.random() < 0.4
        for name in chance.sample(("x", "y", "z"), chance.choice((0, 1, 1, 1, 2, 3))):
            datatype = chance.choice(sorted(DATATYPES))
            shape = [chance.choice((1, 1, 2, 3, 16, 0)) for _ in range(chance.choice((0, 1, 2, 2, 3)))]
            entry = entries.add(name=name, datatype=datatype, shape=shape)
            if chance.random() < 0.1:
                entry.parameters[self.name()].CopyFrom(self.parameter())
            count = max(0, math.prod(shape) + chance.choice((0,) * 12 + (1, -1)))
            if not typed:
                if datatype == "BYTES":
                    items = [chance.randbytes(chance.choice((0, 1, 5, 200))) for _ in range(count)]
                    raw.append(b"".join(struct.pack("<I", len(item)) + item for item in items))
                else:
                    raw.append(chance.randbytes(count * DATATYPES[datatype].itemsize))
                continue
            number = FIELD_OF.get(datatype, 6) if chance.random() < 0.95 else chance.randrange(1, 9)
            field = getattr(entry.contents, CONTENTS[number])
            for _ in range(count):
                field.append(self.value(number, datatype))

    def value(self, number: int, datatype: str) -> Any:
        chance = self.random
        if number == 8:
            return chance.randbytes(chance.choice((0, 1, 5, 200)))
        if number in (6, 7):
            return chance.choice(FLOATS)
        if number == 1:
            return chance.random() < 0.5
        low, high = RANGES[{2: "INT32", 3: "INT64", 4: "UINT32", 5: "UINT64"}[number]]
        if datatype in RANGES and chance.random() < 0.97:
            low, high = max(low, RANGES[datatype][0]), min(high, RANGES[datatype][1])
        return chance.choice([n for n in [*NUMBERS, low, high] if low <= n <= high])

    def fill(self, message: Any, depth: int = 3) -> None:
        """Gives some fields of any message a value."""
        chance = self.random
        for field in message.DESCRIPTOR.fields:
            if chance.random() < 0.4 or (field.message_type is not None and depth == 0):
                continue
            times = chance.choice((1, 2, 3)) if field.is_repeated else 1
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                inner = field.message_type.fields_by_name["value"]
                for _ in range(times):
                    key = self.any_of(field.message_type.fields_by_name["key"])
                    if inner.message_type is not None:
                        self.fill(getattr(message, field.name)[key], depth - 1)
                    else:
                        getattr(message, field.name)[key] = self.any_of(inner)
            elif field.message_type is not None:
                for _ in range(times):
                    part = getattr(message, field.name)
                    part = part.add() if field.is_repeated else part
                    part.SetInParent()
                    self.fill(part, depth - 1)
            elif field.is_repeated:
                getattr(message, field.name).extend([self.any_of(field) for _ in range(times)])
            else:
                setattr(message, field.name, self.any_of(field))

    def any_of(self, field: Any) -> Any:
        chance = self.random
        match field.cpp_type:
            case field.CPPTYPE_BOOL:
                return chance.random() < 0.5
            case field.CPPTYPE_STRING:
                return self.name() if field.type == field.TYPE_STRING else chance.randbytes(chance.randrange(6))
            case field.CPPTYPE_FLOAT | field.CPPTYPE_DOUBLE:
                return chance.choice(FLOATS)
            case field.CPPTYPE_ENUM:
                return chance.choice([value.number for value in field.enum_type.values])
        low, high = {
            field.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
            field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
            field.CPPTYPE_UINT32: (0, 2**32 - 1),
            field.CPPTYPE_UINT64: (0, 2**64 - 1),
        }[field.cpp_type]
        return chance.choice([n for n in NUMBERS if low <= n <= high])

    def shuffled(self, data: bytes) -> bytes:
        """The fields of a message in another order, and numbers in pieces: what other writers may do."""
        try:
            pieces = tables.split(data)
        except ProtobufError:
            return data
        self.random.shuffle(pieces)
        return b"".join(piece if self.random.random() < 0.7 else tables.loosened(piece, self.random) for piece in pieces)

    def varied(self, data: bytes) -> bytes:
        """A request with other raw data of the same sizes, or another id, and at times a fault."""
        chance = self.random
        message = pb.ModelInferRequest.FromString(data)
        for index, tensor in enumerate(message.inputs):
            if message.raw_input_contents and tensor.datatype != "BYTES":
                message.raw_input_contents[index] = chance.randbytes(len(message.raw_input_contents[index]))
        message.id = chance.choice(("", "", "a", "bb", "é", "a" * 130))
        again = bytes(message.SerializeToString(deterministic=True))
        return self.mutated(again) if chance.random() < 0.3 else again

    def mutated(self, data: bytes) -> bytes:
        chance = self.random
        at = chance.randrange(len(data) + 1)
        match chance.randrange(7):
            case 0:
                return data[:at]
            case 1 if at < len(data):
                return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
            case 2:
                return data[:at] + chance.randbytes(chance.randrange(1, 4)) + data[at:]
            case 3:
                return data[:at] + data[at + chance.randrange(1, 4) :]
            case 4:  # an unknown field, or a known one of another wire type
                wire = chance.choice((0, 0, 1, 2, 2, 5, 3, 4, 6, 7))
                tag = tables.varint(chance.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 100, 2**28)) << 3 | wire)
                body = {0: tables.varint(chance.choice(NUMBERS)), 1: b"12345678", 2: b"\x03abc", 5: b"1234"}.get(wire, b"")
                return data + tag + body
            case 5 if at < len(data):  # another form of a small varint
                return data[:at] + bytes([data[at] | 0x80]) + b"\x80" * chance.randrange(9) + b"\x00" + data[at + 1 :]
            case 6:
                end = chance.randrange(at, len(data) + 1)
                return data[:end] + data[at:end] + data[end:]
        return data


def rendered(maker: Maker) -> None:
    """Google reads what ours writes: a request, and an answer to it."""
    chance = maker.random
    tensors = []
    for name in chance.sample(("x", "y", "z"), chance.choice((1, 2, 3))):
        datatype = chance.choice(sorted(DATATYPES))
        shape = tuple(chance.choice((1, 2, 3, 16, 0)) for _ in range(chance.choice((0, 1, 2))))
        count = math.prod(shape)
        if datatype == "BYTES":
            array = np.empty(count, object)
            array[:] = [chance.randbytes(chance.choice((0, 3, 200))) for _ in range(count)]
            array = array.reshape(shape)
        elif datatype == "BOOL":
            array = np.array([chance.random() < 0.5 for _ in range(count)], np.bool_).reshape(shape)
        else:
            dtype = DATATYPES[datatype]
            array = np.frombuffer(chance.randbytes(count * dtype.itemsize), dtype).reshape(shape)
        tensors.append(V2Tensor(name=name, datatype=datatype, array=array))
    typed = chance.random() < 0.5 and all(tensor.datatype in FIELD_OF for tensor in tensors)
    parameters = {"s": "é", "b": True, "i": -3, "u": 2**63, "d": 0.5} if chance.random() < 0.5 else {}
    id = chance.choice(("", "7"))
    buffers = render_infer_request("m", tensors, id=id, parameters=parameters, outputs=[WantedOutput(name="o")], typed=typed)
    message = pb.ModelInferRequest.FromString(b"".join(map(bytes, buffers)))
    said = sorted_parameters(expected_call(message))
    wanted = ("m", "", id, repr(parameters), described(tensors), [("o", 0)], typed, False)
    assert said == sorted_parameters(wanted), (said, wanted)
    writer = InferResponseWriter(ModelSignature(name="m"), version="1")
    buffers = writer.render(tensors, V2Request(id=id), parameters=parameters, typed=typed)
    answer = pb.ModelInferResponse.FromString(b"".join(map(bytes, buffers)))
    assert len(answer.raw_output_contents) == (0 if typed else len(tensors))
    assert sorted_parameters(expected_answer(answer)) == sorted_parameters(
        ("m", "1", id, repr(parameters), described(tensors))
    )
    buffers = writer.render_streamed(tensors, V2Request(id=id), parameters=parameters, final=True, typed=typed)
    streamed = pb.ModelStreamInferResponse.FromString(b"".join(map(bytes, buffers)))
    assert streamed.infer_response.parameters["triton_final_response"].bool_param
    del streamed.infer_response.parameters["triton_final_response"]
    assert streamed.infer_response == answer


def written(maker: Maker) -> None:
    """Google reads what a table writes, and writes the same number of bytes."""
    name = maker.random.choice(sorted(TABLES))
    message = getattr(pb, name)()
    maker.fill(message)
    table = TABLES[name]
    values = as_dict(message, table)
    read = getattr(pb, name).FromString(table.write(values))
    assert plain(as_dict(read, table)) == plain(values)
    message.DiscardUnknownFields()
    again = getattr(pb, name).FromString(table.write(as_dict(read, table)))
    assert plain(as_dict(again, table)) == plain(values)


def run(number: int, seed: int) -> Counter[str]:
    """Compares so many messages, and counts them by name and word."""
    maker, words = Maker(seed), Counter[str]()
    for index in range(number):
        name, data = maker.message()
        group = name if name in ("ModelInferRequest", "ModelInferResponse", "ModelStreamInferResponse") else "tables"
        words[f"{group} {(word := compare(name, data))}"] += 1
        if name == "ModelInferRequest" and word == "read":
            for _ in range(3):
                again = maker.varied(data)
                words[f"{group} again {(word := compare(name, again))}"] += 1
                if word == "read" and READER.read(again).plan is not None:
                    words[f"{group} again by a plan"] += 1
        if index % 5 == 0:
            rendered(maker)
            written(maker)
    return words


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Google's protobuf and ours over made and mutated messages.")
    parser.add_argument("--number", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for word, count in sorted(run(arguments.number, arguments.seed).items()):
        print(f"{count:8} {word}")
