"""Tensors of the Open Inference Protocol (v2) to and from bytes: binary bodies and the `data` arrays of its JSON."""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeAlias, final

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from protocols.events import Buffer

Array: TypeAlias = npt.NDArray[Any]

Parameters: TypeAlias = Mapping[str, Any]
"""Names to strings, numbers and booleans."""

NO_PARAMETERS: Parameters = MappingProxyType({})

MAX_DIMS = 16
"""Dimensions of one tensor. numpy itself ends at 32 or 64, depending on its version."""

DATATYPES: Mapping[str, np.dtype[Any]] = MappingProxyType({
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"), "UINT16": np.dtype("<u2"), "UINT32": np.dtype("<u4"), "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"), "INT16": np.dtype("<i2"), "INT32": np.dtype("<i4"), "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "BYTES": np.dtype(object),
})  # fmt: skip
"""Every v2 datatype and the numpy dtype of its arrays; the elements of a BYTES array are `bytes`."""

_FP32, _FP64, _U1, _U4 = DATATYPES["FP32"], DATATYPES["FP64"], DATATYPES["UINT8"], DATATYPES["UINT32"]
_INTEGERS = {name: np.iinfo(dtype) for name, dtype in DATATYPES.items() if dtype.kind in "iu"}
_RANGES = {name: (int(info.min), int(info.max)) for name, info in _INTEGERS.items()}
_LARGEST = {"FP16": "65504", "BF16": "3.38953139e+38", "FP32": "3.40282347e+38", "FP64": "1.79769313e+308"}
_BEYOND_FP64 = 2**1024 - 2**970  # the first integer that rounds to infinity
_LENGTH = struct.Struct("<I")
PACKED = {
    "FP16": "e", "FP32": "f", "FP64": "d", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
    "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q",
}  # fmt: skip
"""The datatypes that `struct` writes too, by the rules of `from_json`: it refuses what does not fit, and rounds as numpy."""
PACK_AT_ONCE = 4096
"""Numbers that are given to `struct` in one call."""
_CASTABLE = frozenset(name for name in PACKED if np.zeros(1, DATATYPES[name]).data.format in "bBhHiIlLqQfd")
"""The datatypes whose memory a memoryview shows as bytes too."""
_encode = msgspec.json.Encoder().encode


@final
class V2Error(Exception):
    """A v2 request or reply that cannot be. `status` is the HTTP status to answer with: 400 for what the client did,
    413 for a JSON part above its limit, 500 where a model's own output does not fit what it claims to be."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    def error_body(self) -> bytes:
        """The body of the answer, `{"error": message}`; its content type is application/json."""
        return msgspec.json.encode({"error": self.message})


@final
class V2Tensor(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A tensor with its v2 name and datatype; `array` has the dtype that DATATYPES tells. `parameters` are those of
    the tensor, without the ones that only describe the transfer (`binary_data_size`)."""

    name: str
    datatype: str
    array: Array
    parameters: Parameters = NO_PARAMETERS


def show(value: object) -> str:
    """A JSON value as an error message may repeat it: at most some 64 characters, arrays and objects by kind."""
    match value:
        case None | bool():
            return json.dumps(value)
        case list():
            return f"an array of {len(value)}"
        case dict():
            return "an object"
        case int() if value.bit_length() > 200:  # CPython refuses to write thousands of digits
            return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1} or more"
        case str():
            return _shorten(repr(value[:65]))
        case _:
            return _shorten(repr(value))


def show_shape(shape: tuple[int, ...]) -> str:
    """A shape as an error message may repeat it."""
    return _shorten("[" + ", ".join(map(show, shape)) + "]")


def _shorten(text: str) -> str:
    return text if len(text) <= 64 else text[:61] + "..."


def check_shape(shape: object, name: str, *, dims: int = MAX_DIMS) -> tuple[int, ...]:
    """The shape of the tensor `name` as JSON gave it: an array of at most `dims` non-negative integers. A boolean, a
    fraction, even 1.0, is none. Allocates nothing: what a shape claims is compared with the bytes present first."""
    if type(shape) is not list:
        raise V2Error(f"tensor {show(name)}: shape must be an array of integers, got {show(shape)}")
    if len(shape) > dims:
        raise V2Error(f"tensor {show(name)}: at most {dims} dimensions, got {len(shape)}")
    for size in shape:
        if type(size) is not int or size < 0:
            raise V2Error(f"tensor {show(name)}: a dimension must be a non-negative integer, got {show(size)}")
    return tuple(shape)


def decode_binary(datatype: str, shape: tuple[int, ...], view: memoryview, name: str) -> Array:
    """The array of a tensor's binary data: little-endian, row-major, without padding (binary tensor data extension).

    A read-only view of the memory of `view`, which must not change while the array lives. Two datatypes are copies:
    BYTES, whose elements become `bytes`, and BOOL where a byte is neither 0 nor 1 (any such byte is true). V2Error
    naming the tensor, what its shape takes and what came, before anything is allocated.
    """
    dtype = DATATYPES[datatype]
    count = math.prod(shape)
    if datatype == "BYTES":
        return _decode_bytes(count, shape, view, name)
    if view.nbytes != count * dtype.itemsize:
        expected = show(count * dtype.itemsize)
        raise V2Error(f"tensor {show(name)}: {datatype} {show_shape(shape)} takes {expected} bytes, got {view.nbytes}")
    flat = np.frombuffer(view.toreadonly(), dtype)
    if datatype == "BOOL" and count and flat.view(_U1).max() > 1:
        flat = flat.view(_U1) != 0  # numpy gives wrong sums for a true that is not 1
        flat.setflags(write=False)
    return _shaped(flat, shape, name)


def _decode_bytes(count: int, shape: tuple[int, ...], view: memoryview, name: str) -> Array:
    if count * _LENGTH.size > view.nbytes:
        raise V2Error(
            f"tensor {show(name)}: BYTES {show_shape(shape)} has {show(count)} elements, each with a length of 4 bytes,"
            f" got {view.nbytes} bytes"
        )
    items = []
    at = 0
    for index in range(count):
        start = at + _LENGTH.size
        if start > view.nbytes:
            raise V2Error(f"tensor {show(name)}: the length of element {index} of {count} is cut off")
        at = start + _LENGTH.unpack_from(view, start - _LENGTH.size)[0]
        if at > view.nbytes:
            rest = view.nbytes - start
            raise V2Error(f"tensor {show(name)}: element {index} of {count} has {at - start} bytes, only {rest} are left")
        items.append(bytes(view[start:at]))
    if at != view.nbytes:
        raise V2Error(f"tensor {show(name)}: {view.nbytes - at} bytes are left after the last of {count} elements")
    return _objects(items, shape, name)


def _objects(items: list[bytes], shape: tuple[int, ...], name: str) -> Array:
    flat = np.empty(len(items), object)
    flat[:] = items
    flat.setflags(write=False)
    return _shaped(flat, shape, name)


def _shaped(flat: Array, shape: tuple[int, ...], name: str) -> Array:
    # One zero makes a tensor empty however large the other dimensions are; numpy wants those below 2**63 bytes too.
    if not flat.size and math.prod(filter(None, shape)) * flat.itemsize >= 2**63:
        raise V2Error(f"tensor {show(name)}: shape {show_shape(shape)} is too large")
    return flat.reshape(shape)


def encode_binary(array: Array, datatype: str) -> list[Buffer]:
    """The binary data of an array, as buffers to write in order; none for an array without elements.

    The array's own memory where it is row-major and little-endian: it must not change until it is written. Else, and
    for BYTES (elements `bytes` or `str`, the latter as UTF-8), a copy. V2Error with status 500 if the array is not of
    that datatype: nothing is cast.
    """
    if datatype == "BYTES":
        items = _bytes_items(array)
        data = b"".join(itertools.chain.from_iterable((_LENGTH.pack(len(item)), item) for item in items))
        return [data] if data else []
    if array.dtype is not DATATYPES.get(datatype):
        _check_dtype(array, datatype)
    elif array.size and datatype in _CASTABLE and array.flags.c_contiguous:
        return [array.data.cast("B")]
    if not array.size:
        return []
    flat = np.ascontiguousarray(array, DATATYPES[datatype]).reshape(-1)
    return [flat.view(_U1).data]  # as bytes: bfloat16 has no format of its own in the buffer protocol


def to_json(array: Array, datatype: str) -> bytes:
    """The `data` of an array: a flat JSON array, row-major.

    Integers are exact and a float is the shortest text that reads back to the same value: for FP32, and the 16-bit
    types that it includes, the same 32-bit value. NaN and both infinities become `null`, as JSON has no word for
    them: ask for binary data where the sign matters. BYTES are strings; V2Error if one is not UTF-8, and with status
    500 if the array is not of that datatype.
    """
    if array.dtype is not _SINGLES.get(datatype):
        if datatype == "BYTES":
            return _encode([_as_text(item) for item in _bytes_items(array)])
        _check_dtype(array, datatype)
        if datatype not in _SINGLES:
            return _encode(array.ravel().tolist())
    if array.size > _FEW:
        return _encode(_shortest(array.ravel()).tolist())
    text = _encode(array.ravel().tolist())
    if text.translate(_ALL_ZERO, b".").find(b"0000000") < 0 and _E not in text:
        return text  # at most 6 digits are the text of no other single: so it is the shortest, as it is for the double
    return _few_singles(array.ravel(), text)


def _check_dtype(array: Array, datatype: str) -> None:
    dtype = DATATYPES.get(datatype)
    if array.dtype is dtype:
        return
    if dtype is None:
        raise V2Error(f"there is no datatype {show(datatype)}, only {', '.join(DATATYPES)}", status=500)
    if array.dtype != dtype and array.dtype.name != dtype.name:  # the name is the same in either byte order
        raise V2Error(f"datatype {datatype} holds {dtype.name}, got an array of {array.dtype.name}", status=500)


def _bytes_items(array: Array) -> list[bytes]:
    return [_as_bytes(item) for item in array.reshape(-1).tolist()]


def _as_bytes(item: object) -> bytes:
    if isinstance(item, str):
        try:
            item = item.encode()
        except UnicodeEncodeError:
            raise V2Error("datatype BYTES holds text as UTF-8, which cannot express a surrogate", status=500) from None
    if not isinstance(item, bytes):
        raise V2Error(f"datatype BYTES holds bytes, got an element of {type(item).__name__}", status=500)
    if len(item) >= 2**32:
        raise V2Error(f"datatype BYTES: an element has less than 2**32 bytes, got {len(item)}", status=500)
    return item


def _as_text(item: bytes) -> str:
    try:
        return item.decode()
    except UnicodeDecodeError:
        raise V2Error("the output is not UTF-8 and JSON has no other text: ask for it with binary_data true") from None


_FEW = 32  # up to here the fixed cost of the vector steps is more than numpy's own conversion
_BLOCK = 2048  # elements for which the arrays of all steps stay in the nearest cache
_SINGLES = {name: DATATYPES[name] for name in ("FP32", "FP16", "BF16")}  # all of them are singles too
_E = ord("e")
_ALL_ZERO = bytes(ord("0") if byte in b"0123456789" else byte for byte in range(256))


def _few_singles(values: Array, text: bytes) -> bytes:
    """The JSON of singles and halves, given that of the same doubles: numpy writes the shortest text, 0.4 us each."""
    if text.find(b"null") >= 0:
        return _encode(_shortest(values).tolist())
    text = b",".join(values.astype(_FP32, copy=False).astype("S24").tolist())
    if _E in text:  # numpy writes exponents in its own way
        return _encode(list(map(float, text.split(b","))))
    return b"[%b]" % text


def _scales() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """By the upper 9 bits of a single, sign and exponent: the power of ten that makes a whole number of 9 digits of it,
    the same for magnitudes from the next power of ten on, and that power. NaN beyond what a double holds exactly; 1
    for zeros and subnormals, of which only zeros are whole then."""
    scales, limits = np.full((2, 512), np.nan), np.full(512, np.inf)
    for exponent in range(127 - 40, 127 + 20):  # a binade, of which one power of ten is in the middle at most
        low = 2.0 ** (exponent - 127)
        digits = int(f"{low:e}".partition("e")[2])
        for upper, magnitude in enumerate((digits, digits + 1)):
            if -12 <= magnitude <= 5:
                scales[upper, [exponent, exponent + 256]] = float(10 ** (8 - magnitude))
        limits[[exponent, exponent + 256]] = float(f"1e{digits + 1}")
    scales[0, [0, 256]] = 1
    return scales.reshape(-1), limits


_SCALES, _LIMITS = _scales()


@np.errstate(invalid="ignore")  # a signalling NaN is quietened, and numpy would warn of it
def _shortest(values: Array) -> npt.NDArray[np.float64]:
    """Doubles whose shortest text is that of the given singles: 0.1 and not 0.10000000149011612.

    numpy writes the text itself, 0.4 us each. For ordinary magnitudes there is a way around it: round to 9 digits, then
    to 8, 7 and 6 where that reads back too. Whole number and power of ten are exact, so their quotient is the
    double nearest to that decimal, which is what its text means.
    """
    values = values.astype(_FP32, copy=False)
    if values.size <= _BLOCK:
        return _shortest_of(values)
    return np.concatenate([_shortest_of(values[at : at + _BLOCK]) for at in range(0, values.size, _BLOCK)])


def _shortest_of(values: Array) -> npt.NDArray[np.float64]:
    wide = values.astype(_FP64)
    index = values.view(_U4) >> 23
    scale = _SCALES.take(np.where(np.abs(wide) < _LIMITS.take(index), index, index + 512))
    shortest: npt.NDArray[np.float64] = np.rint(wide * scale) / scale
    rest = np.flatnonzero(shortest.astype(_FP32) != values)
    for _ in range(3):
        scale /= 10
        decimal = np.rint(wide * scale) / scale
        np.copyto(shortest, decimal, where=decimal.astype(_FP32) == values)
    if rest.size:
        shortest[rest] = values[rest].astype("S24").astype(_FP64)
    return shortest


def from_json(datatype: str, shape: tuple[int, ...], data: object, name: str, *, numbers: bool = False) -> Array:
    """The array of a tensor's `data`: a flat array of its elements in row-major order, or arrays nested exactly as
    the shape says. Read-only.

    Elements: for integers a whole number in range (1.0 is one); for floats any number in range, `null` for NaN;
    for BOOL true, false, 0 and 1; for BYTES a string, taken as UTF-8. Anything else, another count or another nesting
    is a V2Error that names the tensor and the first wrong element; nothing is cut, wrapped or guessed.

    `numbers` says what the caller has made sure of: that `data` holds `int` and `float` alone, and lists of them.
    """
    values = data if numbers and type(data) is list and data and type(data[0]) is not list else _flatten(shape, data, name)
    count = math.prod(shape)
    if len(values) != count:
        raise V2Error(f"tensor {show(name)}: shape {show_shape(shape)} takes {show(count)} values, data has {len(values)}")
    if numbers and count and (packed := _pack(datatype, values)) is not None:
        return np.ndarray(shape, DATATYPES[datatype], packed)
    if datatype == "BYTES":
        return _objects(_to_bytes(values, name), shape, name)
    array = _to_array(datatype, values, name)
    array.setflags(write=False)
    return _shaped(array, shape, name)


def _pack(datatype: str, values: list[Any]) -> Buffer | None:
    """The binary data of numbers that all fit the datatype and are of its kind, read-only; None otherwise. Booleans count
    as numbers here."""
    code = PACKED.get(datatype)
    if code is None:
        return None
    count = len(values)
    try:
        if count <= PACK_AT_ONCE:
            return packer(count, code)(*values)
        size = struct.calcsize(f"<{code}")
        packed = bytearray(count * size)
        for start in range(0, count, PACK_AT_ONCE):
            part = values[start : start + PACK_AT_ONCE]
            struct.pack_into(f"<{len(part)}{code}", packed, start * size, *part)
    except (struct.error, OverflowError):
        return None
    return memoryview(packed).toreadonly()


@lru_cache(maxsize=128)
def packer(count: int, code: str) -> Callable[..., bytes]:
    """What packs so many numbers, at most PACK_AT_ONCE, of a code of PACKED."""
    return struct.Struct(f"<{count}{code}").pack


def _flatten(shape: tuple[int, ...], data: object, name: str) -> list[Any]:
    if type(data) is not list:
        raise V2Error(f"tensor {show(name)}: data must be an array, got {show(data)}")
    if not data or type(data[0]) is not list:
        return data
    rows: list[Any] = [data]
    for size in shape:
        for row in rows:
            if type(row) is not list or len(row) != size:
                raise V2Error(f"tensor {show(name)}: data is nested otherwise than shape {show_shape(shape)}: {show(row)}")
        rows = list(itertools.chain.from_iterable(rows))
    return rows


def _to_array(datatype: str, values: list[Any], name: str) -> Array:
    kinds = set(map(type, values))
    if datatype == "BOOL":
        if not kinds <= {bool, int} or not set(values) <= {False, True}:
            bad = _first(values, lambda v: type(v) not in (bool, int) or v not in (0, 1))
            raise _wrong(name, "BOOL takes true, false, 0 and 1", values, bad)
        return np.array(values, np.bool_)
    if kinds <= {float, int} and (packed := _pack(datatype, values)) is not None:
        return np.frombuffer(packed, DATATYPES[datatype])
    if datatype in _RANGES:
        return np.array(_to_integers(datatype, values, kinds, name), DATATYPES[datatype])
    if not kinds <= {float, int, type(None)}:
        bad = _first(values, lambda v: type(v) not in (float, int, type(None)))
        raise _wrong(name, f"{datatype} takes numbers and null", values, bad)
    return _to_floats(datatype, values, name)


def _to_integers(datatype: str, values: list[Any], kinds: set[type], name: str) -> list[int]:
    if float in kinds:
        values = [int(v) if type(v) is float and v.is_integer() else v for v in values]
        kinds = set(map(type, values))
    low, high = _RANGES[datatype]
    if not kinds <= {int} or (values and not (low <= min(values) and max(values) <= high)):
        bad = _first(values, lambda v: type(v) is not int or not low <= v <= high)
        raise _wrong(name, f"{datatype} takes whole numbers from {low} to {high}", values, bad)
    return values


def _to_floats(datatype: str, values: list[Any], name: str) -> Array:
    try:
        wide = np.array(values, _FP64)
    except OverflowError:
        bad = _first(values, lambda v: type(v) is int and abs(v) >= _BEYOND_FP64)
    else:
        with np.errstate(over="ignore"):
            narrow = wide.astype(DATATYPES[datatype], copy=False)
        lost = np.isinf(narrow) & np.isfinite(wide)
        if not lost.any():
            return narrow
        bad = int(np.argmax(lost))
    raise _wrong(name, f"{datatype} takes numbers up to {_LARGEST[datatype]}", values, bad)


def _to_bytes(values: list[Any], name: str) -> list[bytes]:
    if not set(map(type, values)) <= {str}:
        raise _wrong(name, "BYTES takes strings", values, _first(values, lambda v: type(v) is not str))
    try:
        return [value.encode() for value in values]
    except UnicodeEncodeError:
        raise V2Error(f"tensor {show(name)}: data holds a surrogate, which UTF-8 cannot express") from None


def _first(values: list[Any], unfit: Callable[[Any], bool]) -> int:
    return next(index for index, value in enumerate(values) if unfit(value))


def _wrong(name: str, rule: str, values: list[Any], index: int) -> V2Error:
    return V2Error(f"tensor {show(name)}: {rule}, got {show(values[index])} at element {index}")
