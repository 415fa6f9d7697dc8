"""Tensors of the Open Inference Protocol (v2), to and from bytes: binary bodies and the `data` arrays of its JSON."""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeAlias, final

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from protocols.events import Buffer

Array: TypeAlias = npt.NDArray[Any]

Parameters: TypeAlias = Mapping[str, Any]
"""A mapping of names to strings, numbers and booleans."""

NO_PARAMETERS: Parameters = MappingProxyType({})

MAX_DIMS = 16
"""The default of the most dimensions of one tensor."""

NUMPY_DIMS = 64 if int(np.__version__.partition(".")[0]) > 1 else 32
"""The most dimensions of an array."""

DATATYPES: Mapping[str, np.dtype[Any]] = MappingProxyType({
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"), "UINT16": np.dtype("<u2"), "UINT32": np.dtype("<u4"), "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"), "INT16": np.dtype("<i2"), "INT32": np.dtype("<i4"), "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "BYTES": np.dtype(object),
})  # fmt: skip
"""Every v2 datatype and the numpy dtype of its arrays. The elements of a BYTES array are `bytes`."""

_FP32, _FP64, _U1, _U4 = DATATYPES["FP32"], DATATYPES["FP64"], DATATYPES["UINT8"], DATATYPES["UINT32"]
_INTEGERS = {name: np.iinfo(dtype) for name, dtype in DATATYPES.items() if dtype.kind in "iu"}
FLOATS = ("FP16", "FP32", "FP64", "BF16")
"""The datatypes of floating-point numbers."""
RANGES: Mapping[str, tuple[int, int]] = MappingProxyType({
    name: (int(info.min), int(info.max)) for name, info in _INTEGERS.items()
})  # fmt: skip
"""The smallest and the largest number of each datatype of integers."""
_LARGEST = {"FP16": "65504", "BF16": "3.38953139e+38", "FP32": "3.40282347e+38", "FP64": "1.79769313e+308"}
_BEYOND_FP64 = 2**1024 - 2**970  # the first integer that rounds to infinity
_EXACT = 2.0**53  # from here on doubles skip whole numbers, so another one may have been intended
_LENGTH = struct.Struct("<I")
PACKED = {
    "FP16": "e", "FP32": "f", "FP64": "d", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
    "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q",
}  # fmt: skip
"""The datatypes that `struct` can write by the rules of `from_json`: it refuses values that do not fit, and rounds as
numpy."""
STEP = 16_384
"""Elements of BYTES that are made, or written, in one step: a few milliseconds of the interpreter."""
_WRITTEN_AT_ONCE = 262_144  # numbers that are written in one call: 6 ms
PACK_AT_ONCE = 4096
"""Numbers that are passed to `struct` in one call."""
_CASTABLE = frozenset(name for name in PACKED if np.zeros(1, DATATYPES[name]).data.format in "bBhHiIlLqQfd")
"""The datatypes whose memory a memoryview can also show as bytes."""
_WRITTEN_AS_IS = {name: dtype for name, dtype in DATATYPES.items() if name not in ("BYTES", "BF16", "FP16")}
_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_encode = msgspec.json.Encoder().encode
_dumps = orjson.dumps
_ndarray = np.ndarray  # looking it up in numpy costs as much as a call


@final
class V2Error(Exception):
    """An invalid v2 request or reply. `status` is the HTTP status to answer with: 400 for a fault of the client, 413 for
    JSON above its limit, 500 if a model's output does not match its declaration."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    def error_body(self) -> bytes:
        """The body of the answer, `{"error": message}`; its content type is application/json."""
        return msgspec.json.encode({"error": self.message})


@final
class BytesData:
    """The checked binary data of a BYTES tensor, in place of its array. The data are sent as they came, and elements become
    objects only when they are needed. `data` must not change while this lives."""

    __slots__ = ("_array", "data", "dtype", "shape", "size")

    def __init__(self, data: memoryview, shape: tuple[int, ...], size: int) -> None:
        self.data, self.shape, self.size = data, shape, size
        self.dtype = DATATYPES["BYTES"]
        self._array: Array | None = None

    @property
    def made(self) -> bool:
        """True if the elements are objects already."""
        return self._array is not None

    def array(self) -> Array:
        """The read-only object array of the elements, which are `bytes`: made by the first call, and kept."""
        if self._array is None:
            flat = np.empty(self.size, object)
            for _ in self.fill(flat):
                pass
            flat.setflags(write=False)
            self._array = flat.reshape(self.shape)
        return self._array

    def fill(self, flat: Array) -> Iterator[None]:
        """Makes the elements in `flat`, an object array of `size`, in steps of at most STEP, each a few milliseconds. They
        are not kept."""
        data, count = self.data, self.size
        length = _LENGTH.unpack_from(data)[0] if count else 0
        alike = bool(count) and _are_alike(data, count, length)
        at, step = 0, _LENGTH.size + length
        for begin in range(0, count, STEP):
            end = min(begin + STEP, count)
            if alike:
                piece = data[begin * step : end * step]
                items = [item for (item,) in struct.iter_unpack(f"<4x{length}s", piece)]
            else:
                items = []
                for _ in range(begin, end):
                    start = at + _LENGTH.size
                    at = start + _LENGTH.unpack_from(data, at)[0]
                    items.append(data[start:at].tobytes())
            flat[begin:end] = items
            yield


@final
class V2Tensor(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A tensor with its v2 name and datatype. `array` has the dtype of DATATYPES, or is BytesData for BYTES that came as
    binary data. `parameters` are those of the tensor, without those that only describe the transfer (`binary_data_size`)."""

    name: str
    datatype: str
    array: Array | BytesData
    parameters: Parameters = NO_PARAMETERS

    @property
    def elements(self) -> Array:
        """The array itself, also if BytesData stands for it, see `BytesData.array`."""
        return self.array.array() if type(self.array) is BytesData else self.array


def show(value: object) -> str:
    """A JSON value for an error message: at most some 64 characters, with arrays and objects as their kind."""
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
    """A shape for an error message, shortened."""
    return _shorten("[" + ", ".join(map(show, shape)) + "]")


def _shorten(text: str) -> str:
    return text if len(text) <= 64 else text[:61] + "..."


def check_shape(shape: object, name: str, *, dims: int = MAX_DIMS) -> tuple[int, ...]:
    """The shape of the tensor `name` from JSON: an array of at most `dims` non-negative integers. Booleans and fractions,
    even 1.0, are refused. It allocates nothing: compare the shape with the present bytes first."""
    if type(shape) is not list:
        raise V2Error(f"tensor {show(name)}: shape must be an array of integers, got {show(shape)}")
    if len(shape) > (most := min(dims, NUMPY_DIMS)):
        raise V2Error(f"tensor {show(name)}: at most {most} dimensions, got {len(shape)}")
    for size in shape:
        if type(size) is not int or size < 0:
            raise V2Error(f"tensor {show(name)}: a dimension must be a non-negative integer, got {show(size)}")
    return tuple(shape)


def decode_binary(datatype: str, shape: tuple[int, ...], view: memoryview, name: str) -> Array | BytesData:
    """The array of a tensor's binary data: little-endian, row-major, without padding (binary tensor data extension).

    It is a read-only view of the memory of `view`, which must not change while the array lives. It is a copy for BOOL if a
    byte is neither 0 nor 1 (any such byte is true). BYTES are checked here and become objects later. V2Error before anything
    is allocated; it names the tensor, the size of its shape and the actual size.
    """
    if datatype != "BYTES":
        return decode_fixed(datatype, shape, view, name)
    count = math.prod(shape)
    _check_bytes(count, shape, view, name)
    _check_empty(count, DATATYPES[datatype], shape, name)
    return BytesData(view.toreadonly(), shape, count)


def decode_fixed(datatype: str, shape: tuple[int, ...], view: memoryview, name: str) -> Array:
    """Does `decode_binary` for datatypes whose elements have a fixed size: all but BYTES."""
    dtype = DATATYPES[datatype]
    count = math.prod(shape)
    if view.nbytes != count * dtype.itemsize:
        expected = show(count * dtype.itemsize)
        raise V2Error(f"tensor {show(name)}: {datatype} {show_shape(shape)} takes {expected} bytes, got {view.nbytes}")
    flat = np.frombuffer(view.toreadonly(), dtype)
    if datatype == "BOOL" and count and flat.view(_U1).max() > 1:
        flat = flat.view(_U1) != 0  # numpy computes wrong sums for a true that is not 1
        flat.setflags(write=False)
    return _shaped(flat, shape, name)


def bytes_apart(array: Array | BytesData, view: memoryview) -> int:
    """The bytes of an array that `decode_binary` made of `view`, if it is not a view of it; else 0."""
    if type(array) is BytesData or not array.nbytes or np.may_share_memory(array, np.frombuffer(view, _U1)):
        return 0
    return array.nbytes


def _check_bytes(count: int, shape: tuple[int, ...], view: memoryview, name: str) -> None:
    size = view.nbytes
    if count * _LENGTH.size > size:
        raise V2Error(
            f"tensor {show(name)}: BYTES {show_shape(shape)} has {show(count)} elements, each with a length of 4 bytes,"
            f" got {size} bytes"
        )
    if count and _are_alike(view, count, _LENGTH.unpack_from(view)[0]):
        return
    at, length_at = 0, _LENGTH.unpack_from
    try:
        for _ in range(count):
            at += 4 + length_at(view, at)[0]
    except struct.error:
        raise _fault_of_bytes(count, view, name) from None
    if at > size:
        raise _fault_of_bytes(count, view, name)
    if at < size:
        raise V2Error(f"tensor {show(name)}: {size - at} bytes are left after the last of {count} elements")


def _are_alike(view: memoryview, count: int, length: int) -> bool:
    """True if all elements have that length and fill the data exactly."""
    step = _LENGTH.size + length
    return step * count == view.nbytes and bool((np.ndarray(count, "<u4", view, 0, step) == length).all())


def _fault_of_bytes(count: int, view: memoryview, name: str) -> V2Error:
    """The error for data that end before all elements: it names the first incomplete one."""
    at = index = 0
    while at + _LENGTH.size <= view.nbytes:
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(view, at)[0]
        if at > view.nbytes:
            rest = view.nbytes - start
            return V2Error(f"tensor {show(name)}: element {index} of {count} has {at - start} bytes, only {rest} are left")
        index += 1
    return V2Error(f"tensor {show(name)}: the length of element {index} of {count} is cut off")


def _check_empty(count: int, dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> None:
    # A single zero makes a tensor empty, but numpy still requires the other dimensions to stay below 2**63 bytes.
    if not count and math.prod(filter(None, shape)) * dtype.itemsize >= 2**63:
        raise V2Error(f"tensor {show(name)}: shape {show_shape(shape)} is too large")


def _objects(items: list[bytes], shape: tuple[int, ...]) -> Array:
    flat = np.empty(len(items), object)
    for begin in range(0, len(items), STEP):
        flat[begin : begin + STEP] = items[begin : begin + STEP]
    flat.setflags(write=False)
    return flat.reshape(shape)


def _shaped(flat: Array, shape: tuple[int, ...], name: str) -> Array:
    _check_empty(flat.size, flat.dtype, shape, name)
    return flat.reshape(shape)


def encode_binary(array: Array | BytesData, datatype: str) -> list[Buffer]:
    """The binary data of an array, as buffers to write in order; none for an array without elements.

    It is the array's own memory if that is row-major and little-endian: the array must not change until it is written.
    Otherwise, and for BYTES (elements `bytes`, or `str` as UTF-8), it is a copy. BytesData are sent as they came. V2Error
    with status 500 if the array is not of that datatype: nothing is cast.
    """
    if type(array) is BytesData:
        _check_dtype(array, datatype)
        return [array.data] if array.size else []
    if type(array) is not _ndarray:
        array = _plain(array)
    if datatype == "BYTES":
        made = [
            b"".join(itertools.chain.from_iterable((_LENGTH.pack(len(item)), item) for item in items))
            for items in _bytes_items(array)
        ]
        return [b"".join(made)] if made else []
    if array.dtype is not DATATYPES.get(datatype):
        _check_dtype(array, datatype)
    elif array.size and datatype in _CASTABLE and array.flags.c_contiguous:
        return [array.data.cast("B")]
    if not array.size:
        return []
    flat = np.ascontiguousarray(array, DATATYPES[datatype]).reshape(-1)
    return [flat.view(_U1).data]  # as bytes, because bfloat16 has no format in the buffer protocol


def to_json(array: Array | BytesData, datatype: str) -> bytes:
    """The `data` of an array: a flat JSON array, row-major.

    Integers are exact. A float is the shortest text that reads back to the same value of its datatype. NaN and both
    infinities become `null`, because JSON cannot express them: ask for binary data if that matters. BYTES are strings.
    V2Error if one is not UTF-8, and with status 500 if the array is not of that datatype.
    """
    if type(array) is BytesData:
        _check_dtype(array, datatype)
        array = array.array()
    elif type(array) is not _ndarray:
        array = _plain(array)
    shortest = None
    if array.dtype is not _WRITTEN_AS_IS.get(datatype) or not array.flags.aligned:
        if datatype == "BYTES":
            return b"[%b]" % b",".join([_encode([_as_text(item) for item in items])[1:-1] for items in _bytes_items(array)])
        _check_dtype(array, datatype)
        array = np.array(array, DATATYPES[datatype])  # in native byte order, and aligned
        if array.dtype.itemsize == 2 and datatype in FLOATS:
            shortest, array = shortest_of(datatype), array.view(np.uint16)
    flat = array.ravel()  # contiguous
    if flat.size <= _WRITTEN_AT_ONCE:
        return _dumps(flat if shortest is None else shortest[flat], None, _NUMPY)
    pieces = [flat[at : at + _WRITTEN_AT_ONCE] for at in range(0, flat.size, _WRITTEN_AT_ONCE)]
    return b"[%b]" % b",".join([_dumps(p if shortest is None else shortest[p], None, _NUMPY)[1:-1] for p in pieces])


@lru_cache(maxsize=2)
@np.errstate(invalid="ignore", over="ignore")  # NaN, and what rounds to infinity
def shortest_of(datatype: str) -> npt.NDArray[np.float64]:
    """For FP16 or BF16, by the bits of a value: the double whose shortest text is the shortest that reads back to the value.
    It is a table, because no library writes these types so, and takes some milliseconds to make, once."""
    dtype, bits = DATATYPES[datatype], np.arange(2**15, dtype=np.uint16)  # those of the positive values
    values = bits.view(dtype).astype(np.float32).astype(np.float64)
    found, left = values.copy(), np.flatnonzero(np.isfinite(values) & (values > 0))
    for digits in range(1, 6):  # five are enough for both
        value = values[left]
        power = np.floor(np.log10(value)).astype(np.int64) + 1 - digits
        scaled, unit = value * np.power(10.0, -power), np.power(10.0, power)
        whole = np.rint(scaled)
        fits = _bits(whole * unit, dtype) == bits[left]
        # below a power of two the next value is half as far: the other neighbor may fit where the nearer one does not
        other = np.flatnonzero(~fits & (np.frexp(value)[0] == 0.5))
        whole[other] = np.ceil(scaled[other])
        fits[other] = _bits(whole[other] * unit[other], dtype) == bits[left[other]]
        texts = [f"{number:.0f}e{at}" for number, at in zip(whole[fits].tolist(), power[fits].tolist(), strict=True)]
        found[left[fits]], left = list(map(float, texts)), left[~fits]
    return np.concatenate((found, -found))


def _bits(values: npt.NDArray[np.float64], dtype: np.dtype[Any]) -> npt.NDArray[np.uint16]:
    return values.astype(np.float32).astype(dtype).view(np.uint16)


def numbers_of(array: Array, datatype: str) -> Array:
    """The elements as a plain array. V2Error with status 500 if it is not of that datatype, which must not be BYTES."""
    array = _plain(array)
    _check_dtype(array, datatype)
    return array


def _plain(array: Any) -> Array:
    """A plain array of a scalar, or of an array of a subclass, which may treat elements and shape differently."""
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise V2Error("a masked array has elements without a value: give it some, as with numpy.ma.filled", status=500)
    return np.asarray(array)


def _check_dtype(array: Array | BytesData, datatype: str) -> None:
    dtype = DATATYPES.get(datatype)
    if array.dtype is dtype:
        return
    if dtype is None:
        raise V2Error(f"there is no datatype {show(datatype)}, only {', '.join(DATATYPES)}", status=500)
    if array.dtype != dtype and array.dtype.name != dtype.name:  # the name is the same in either byte order
        raise V2Error(f"datatype {datatype} holds {dtype.name}, got an array of {array.dtype.name}", status=500)


def _bytes_items(array: Array) -> Iterator[list[bytes]]:
    flat, strings = array.reshape(-1), array.dtype.kind == "T"  # numpy's StringDType, whose elements may be missing
    for begin in range(0, len(flat), STEP):
        items = flat[begin : begin + STEP].tolist()
        if strings and (missing := next((i for i, item in enumerate(items) if not isinstance(item, str)), None)) is not None:
            raise V2Error(f"element {begin + missing} of a StringDType is missing (na_object): give it a text", status=500)
        yield [_as_bytes(item) for item in items]


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


def from_json(datatype: str, shape: tuple[int, ...], data: object, name: str, *, numbers: bool = False) -> Array:
    """The array of a tensor's `data`, read-only: a flat array of its elements in row-major order, or arrays nested exactly
    as the shape says.

    Elements: for integers a whole number in range (1.0 is one, below 2**53); for floats any number in range, `null` for NaN;
    for BOOL true, false, 0 and 1; for BYTES a string, encoded as UTF-8. V2Error for anything else, and for another count or
    nesting. It names the tensor and the first wrong element; nothing is cut, wrapped or guessed.

    `numbers` is True if the caller has checked that `data` holds only `int` and `float`, and lists of them.
    """
    values = data if numbers and type(data) is list and data and type(data[0]) is not list else _flatten(shape, data, name)
    count = math.prod(shape)
    if len(values) != count:
        raise V2Error(f"tensor {show(name)}: shape {show_shape(shape)} takes {show(count)} values, data has {len(values)}")
    if numbers and count and (packed := _pack(datatype, values)) is not None:
        return np.ndarray(shape, DATATYPES[datatype], packed)
    if datatype == "BYTES":
        _check_empty(count, DATATYPES[datatype], shape, name)
        return _objects(_to_bytes(values, name), shape)
    array = read_values(datatype, values, name)
    array.setflags(write=False)
    return _shaped(array, shape, name)


def _pack(datatype: str, values: list[Any]) -> Buffer | None:
    """The binary data of numbers, read-only, if all fit the datatype and are of its kind; None otherwise. Booleans count as
    numbers here."""
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
    """The function that packs `count` numbers, at most PACK_AT_ONCE, with a code of PACKED."""
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


def read_values(datatype: str, values: list[Any], name: str, first: int = 0) -> Array:
    """The flat array of `values` for any datatype but BYTES. V2Error for the first wrong value; `first` is the number of
    elements before these."""
    kinds = set(map(type, values))
    if datatype == "BOOL":
        if not kinds <= {bool, int} or not set(values) <= {False, True}:
            bad = _first(values, lambda v: type(v) not in (bool, int) or v not in (0, 1))
            raise _wrong(name, "BOOL takes true, false, 0 and 1", values, bad, first)
        return np.array(values, np.bool_)
    if kinds <= {float, int} and (packed := _pack(datatype, values)) is not None:
        return np.frombuffer(packed, DATATYPES[datatype])
    if datatype in RANGES:
        return np.array(_to_integers(datatype, values, kinds, name, first), DATATYPES[datatype])
    if not kinds <= {float, int, type(None)}:
        bad = _first(values, lambda v: type(v) not in (float, int, type(None)))
        raise _wrong(name, f"{datatype} takes numbers and null", values, bad, first)
    return _to_floats(datatype, values, name, first)


def _to_integers(datatype: str, values: list[Any], kinds: set[type], name: str, first: int) -> list[int]:
    if float in kinds:
        values = [int(v) if type(v) is float and -_EXACT < v < _EXACT and v.is_integer() else v for v in values]
        kinds = set(map(type, values))
    low, high = RANGES[datatype]
    if not kinds <= {int} or (values and not (low <= min(values) and max(values) <= high)):
        bad = _first(values, lambda v: type(v) is not int or not low <= v <= high)
        rule = f"{datatype} takes whole numbers from {low} to {high}"
        if type(values[bad]) is float:
            rule += ", those with a point or an exponent below 2**53"
        raise _wrong(name, rule, values, bad, first)
    return values


def _to_floats(datatype: str, values: list[Any], name: str, first: int) -> Array:
    try:
        wide = np.array(values, _FP64)
    except OverflowError:
        bad = _first(values, lambda v: type(v) is int and abs(v) >= _BEYOND_FP64)
    else:
        with np.errstate(over="ignore"):
            narrow = narrowed(wide, datatype)
        lost = np.isinf(narrow) & np.isfinite(wide)
        if not lost.any():
            return narrow
        bad = int(np.argmax(lost))
    raise _wrong(name, f"{datatype} takes numbers up to {_LARGEST[datatype]}", values, bad, first)


def narrowed(wide: npt.NDArray[np.float64], datatype: str) -> Array:
    """Doubles as an array of a float datatype: each is the nearest value, or infinite if too large, of which numpy warns."""
    if datatype == "BF16":
        # The way through FP32 must not round twice: a value exactly half-way there would be rounded to even again.
        single = wide.astype(_FP32)
        halfway = ((single.view(_U4) & 0xFFFF) == 0x8000) & (single != wide)
        if halfway.any():
            towards = np.where(wide[halfway] > single[halfway], np.inf, -np.inf).astype(_FP32)
            single[halfway] = np.nextafter(single[halfway], towards)
        return single.astype(DATATYPES["BF16"])
    return wide.astype(DATATYPES[datatype], copy=False)


def _to_bytes(values: list[Any], name: str) -> list[bytes]:
    if not set(map(type, values)) <= {str}:
        raise _wrong(name, "BYTES takes strings", values, _first(values, lambda v: type(v) is not str))
    try:
        return [value.encode() for value in values]
    except UnicodeEncodeError:
        raise V2Error(f"tensor {show(name)}: data holds a surrogate, which UTF-8 cannot express") from None


def _first(values: list[Any], unfit: Callable[[Any], bool]) -> int:
    return next(index for index, value in enumerate(values) if unfit(value))


def _wrong(name: str, rule: str, values: list[Any], index: int, first: int = 0) -> V2Error:
    return V2Error(f"tensor {show(name)}: {rule}, got {show(values[index])} at element {first + index}")
