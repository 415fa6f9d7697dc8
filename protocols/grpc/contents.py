"""Typed contents of tensors in gRPC messages of the Open Inference Protocol: InferTensorContents to and from arrays.

Numbers of fixed size in one packed field are a view of the message. Others are converted by numpy, in steps. A million
INT32 take 30 ms, so a caller that serves others should read large messages in a thread.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from protocols.events import Buffer
from protocols.grpc.protobuf import (
    FIXED32,
    FIXED64,
    LENGTH,
    VARINT,
    ProtobufError,
    Room,
    encode_field,
    encode_varint,
    fields,
    to_signed,
    unpack_varints,
)
from protocols.v2.tensors import (
    DATATYPES,
    RANGES,
    Array,
    BytesData,
    V2Error,
    bytes_apart,
    decode_binary,
    decode_fixed,
    encode_binary,
    read_values,
    show,
    show_shape,
)

_Varints: TypeAlias = npt.NDArray[np.uint64]

_FIELDS: Mapping[int, tuple[str, int]] = MappingProxyType({
    1: ("bool_contents", 0), 2: ("int_contents", 0), 3: ("int64_contents", 0), 4: ("uint_contents", 0),
    5: ("uint64_contents", 0), 6: ("fp32_contents", 4), 7: ("fp64_contents", 8), 8: ("bytes_contents", 0),
})  # fmt: skip
"""The fields of InferTensorContents, each with the size of a number in bytes, or 0 if that varies."""
FIELD_OF: Mapping[str, int] = MappingProxyType({
    "BOOL": 1, "INT8": 2, "INT16": 2, "INT32": 2, "INT64": 3, "UINT8": 4, "UINT16": 4, "UINT32": 4, "UINT64": 5,
    "FP32": 6, "FP64": 7, "BYTES": 8,
})  # fmt: skip
"""The field that holds the elements of a datatype. FP16 and BF16 have none."""
_BYTES_FIELD = FIELD_OF["BYTES"]
_LENGTH = struct.Struct("<I")
_STEP = 65_536  # bytes to read, or numbers to write, in one call of numpy
_FEW = 128  # bytes below which Python is faster than numpy
_WIRE_TYPES = {0: VARINT, 4: FIXED32, 8: FIXED64}
_SINGLES = {number << 3 | _WIRE_TYPES[size] for number, (_, size) in _FIELDS.items()}
_SINGLES.discard(_BYTES_FIELD << 3 | VARINT)


@final
class Contents:
    """The contents of one tensor, from all the parts in which they came. They are kept as on the wire, with numbers packed:
    as a view of the message if it has them in one piece, else as a copy, which has at most the bytes of the message and 3
    bytes for each element of BYTES."""

    __slots__ = ("_pieces", "count_of_bytes")

    def __init__(self) -> None:
        self._pieces: dict[int, memoryview | bytearray] = {}
        self.count_of_bytes = 0

    def add(self, view: memoryview, room: Room) -> None:
        """Adds the fields of an InferTensorContents. ProtobufError if they are malformed."""
        pieces = self._pieces
        for tag, value, _ in fields(view, room):
            number = tag >> 3
            if tag == _BYTES_FIELD << 3 | LENGTH:
                piece = pieces.get(number)
                if type(piece) is not bytearray:
                    piece = pieces[number] = bytearray()
                piece += _LENGTH.pack(len(value))  # as in binary data
                piece += value
                self.count_of_bytes += 1
            elif tag & 7 == LENGTH and number in _FIELDS:
                if not _FIELDS[number][1]:
                    room.take(min(len(value), _FEW // 2))  # as long as the check takes
                _check_packed(number, value)
                if value:
                    self._append(number, value)
            elif tag in _SINGLES:
                self._append(number, value if tag & 7 else memoryview(encode_varint(value)))

    def _append(self, number: int, packed: memoryview) -> None:
        piece = self._pieces.get(number)
        if piece is None:
            self._pieces[number] = packed
        else:
            if type(piece) is not bytearray:
                piece = self._pieces[number] = bytearray(piece)
            piece += packed

    @property
    def cost(self) -> int:
        """The most bytes that `array` makes besides views of the message."""
        copies = [len(piece) for piece in self._pieces.values() if type(piece) is bytearray]
        return self.converted + sum(copies)

    @property
    def converted(self) -> int:
        """The most bytes of the numbers that `array` converts one by one."""
        return 8 * sum([len(p) for number, p in self._pieces.items() if not _FIELDS[number][1] and number != _BYTES_FIELD])

    def array(self, datatype: str, shape: tuple[int, ...], name: str, message: memoryview) -> tuple[Array | BytesData, int]:
        """The array of a tensor, read-only, and the number of its bytes that are not a view of the message. V2Error before
        an array is made, for contents of another type or count or a number out of range. It names the tensor, the expected
        and the actual contents."""
        number = FIELD_OF.get(datatype)
        if number is None:
            raise V2Error(f"tensor {show(name)}: contents have no field for {datatype}: send it raw")
        others = [other for other in self._pieces if other != number]
        if others:
            wanted, got = _FIELDS[number][0], _FIELDS[min(others)][0]
            raise V2Error(f"tensor {show(name)}: {datatype} takes {wanted}, got {got}")
        piece = self._pieces.get(number, b"")
        packed = memoryview(piece).toreadonly()
        count = self._count(number, packed)
        if count != math.prod(shape):
            field = _FIELDS[number][0]
            expected = show(math.prod(shape))
            raise V2Error(f"tensor {show(name)}: shape {show_shape(shape)} takes {expected} values, {field} has {count}")
        if datatype == "BYTES":
            if not count:
                return decode_binary(datatype, shape, packed, name), 0
            return BytesData(packed, shape, count), packed.nbytes
        if _FIELDS[number][1] or not count:
            array = decode_fixed(datatype, shape, packed, name)
            return array, 0 if type(piece) is memoryview else bytes_apart(array, message)
        flat = _read_varints(packed, count, datatype, name)
        flat.setflags(write=False)
        return flat.reshape(shape), flat.nbytes

    def _count(self, number: int, packed: memoryview) -> int:
        if number == _BYTES_FIELD:
            return self.count_of_bytes
        size = _FIELDS[number][1]
        return len(packed) // size if size else _count_varints(packed)


def _check_packed(number: int, view: memoryview) -> None:
    size = _FIELDS[number][1]
    if size and len(view) % size:
        raise ProtobufError(f"{_FIELDS[number][0]} are numbers of {size} bytes, got {len(view)} bytes")
    if not size and len(view) < _FEW:
        unpack_varints(view)
    elif not size:
        for at in range(0, len(view), _STEP):
            # The tenth byte of a varint must be its last: ten bytes in a row that announce another are malformed.
            more = np.frombuffer(view[at : at + _STEP + 9], np.uint8) >= 0x80
            if len(more) > 9 and _longest_run(more) > 9:
                raise ProtobufError("a varint has more than ten bytes")
        if view[-1] >= 0x80:
            raise ProtobufError("a varint is cut off")


def _longest_run(flags: npt.NDArray[np.bool_]) -> int:
    if not flags.any():
        return 0
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    return int((edges[1::2] - edges[::2]).max())


def _count_varints(packed: memoryview) -> int:
    return sum(
        int(np.count_nonzero(np.frombuffer(packed[at : at + _STEP], np.uint8) < 0x80)) for at in range(0, len(packed), _STEP)
    )


def _read_varints(packed: memoryview, count: int, datatype: str, name: str) -> Array:
    """The flat array of `count` varints. V2Error for the first number that the datatype does not have."""
    if len(packed) < _FEW:
        return read_values(datatype, [_number(value, datatype) for value in unpack_varints(packed)], name)
    flat = np.empty(count, DATATYPES[datatype])
    done = 0
    for values in _varints(packed):
        numbers: Array = values
        if datatype == "BOOL":
            numbers = values != 0
        elif datatype in RANGES and datatype != "UINT64":
            # protobuf keeps the low 32 bits of the fields of such numbers
            numbers = values.view(np.int64)
            if datatype != "INT64":
                numbers = values.astype(np.uint32)
                numbers = numbers.view(np.int32) if datatype.startswith("INT") else numbers
            low, high = RANGES[datatype]
            if numbers.itemsize > flat.itemsize and (beyond := (numbers < low) | (numbers > high)).any():
                wrong = int(beyond.argmax())
                rule = f"{datatype} takes whole numbers from {low} to {high}"
                got = show(int(numbers[wrong]))
                raise V2Error(f"tensor {show(name)}: {rule}, got {got} at element {done + wrong}")
        flat[done : done + len(numbers)] = numbers
        done += len(numbers)
    return flat


def _number(value: int, datatype: str) -> int:
    """The value of a varint in the field of a datatype. protobuf keeps the low 32 bits of a field of 32 bits."""
    if datatype == "BOOL":
        return value != 0
    if datatype == "UINT64":
        return value
    if datatype == "INT64":
        return to_signed(value)
    return to_signed(value, 32) if datatype.startswith("INT") else value & 0xFFFF_FFFF


def _varints(packed: memoryview) -> Iterator[_Varints]:
    """The numbers of 64 bits without a sign that good varints are, in steps."""
    at, size = 0, len(packed)
    while at < size:
        raw = np.frombuffer(packed[at : at + _STEP], np.uint8)
        ends = np.flatnonzero(raw < 0x80)
        used = int(ends[-1]) + 1
        if used == len(ends):  # each is one byte
            yield raw[:used].astype(np.uint64)
        else:
            starts = np.concatenate((np.zeros(1, ends.dtype), ends[:-1] + 1))
            lengths = ends - starts + 1
            values = np.zeros(len(ends), np.uint64)
            for index in range(int(lengths.max())):
                long = np.flatnonzero(lengths > index)
                part = (raw[starts[long] + index] & 0x7F).astype(np.uint64)
                values[long] |= part << np.uint64(7 * index)
            yield values
        at += used


# Writing


def encode_contents(array: Array | BytesData, datatype: str) -> list[Buffer]:
    """The InferTensorContents of an array, as buffers to write in order: the array's own memory for FP32 and FP64, and a
    copy otherwise. V2Error with status 500 if the array is not of that datatype, or the datatype is not in FIELD_OF."""
    number = FIELD_OF.get(datatype)
    if number is None:
        raise V2Error(f"contents have no field for {datatype}", status=500)
    data = encode_binary(array, datatype)
    if not data:
        return []
    if datatype == "BYTES":
        return [b"".join([encode_field(_BYTES_FIELD, item) for buffer in data for item in _items(memoryview(buffer))])]
    if not _FIELDS[number][1]:
        numbers = np.frombuffer(b"".join(data), np.uint8 if datatype == "BOOL" else DATATYPES[datatype])
        data = [b"".join([_pack(numbers[at : at + _STEP]) for at in range(0, len(numbers), _STEP)])]
    return [encode_varint(number << 3 | LENGTH) + encode_varint(sum(map(len, data))), *data]


def _items(data: memoryview) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(data, at)[0]
        yield bytes(data[start:at])


def _pack(numbers: Array) -> bytes:
    """The varints of whole numbers, one after the other."""
    if numbers.dtype.kind == "i":
        values: Any = numbers.astype(np.int64).view(np.uint64)
    else:
        values = numbers.astype(np.uint64)
    lengths = np.ones(len(values), np.intp)
    for index in range(1, 10):
        lengths += values >= np.uint64(1 << (7 * index))
    starts = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), np.uint8)
    for index in range(int(lengths.max())):
        long = np.flatnonzero(lengths > index)
        more = (lengths[long] > index + 1).astype(np.uint8) << 7
        out[starts[long] + index] = ((values[long] >> np.uint64(7 * index)) & np.uint64(0x7F)).astype(np.uint8) | more
    return out.tobytes()
