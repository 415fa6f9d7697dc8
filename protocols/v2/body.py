"""The common body of v2 requests and replies: one JSON object, then the binary data of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import msgspec
import numpy as np

from protocols.events import Buffer, Headers
from protocols.json import strict
from protocols.json.text import census_of, find
from protocols.v2.numbers import NumbersAt, apart_from_numbers, read_data
from protocols.v2.tensors import (
    DATATYPES,
    MAX_DIMS,
    NO_PARAMETERS,
    NUMPY_DIMS,
    Array,
    BytesData,
    V2Error,
    V2Tensor,
    check_shape,
    decode_binary,
    encode_binary,
    from_json,
    show,
    show_shape,
    to_json,
)

IHCL = b"inference-header-content-length"
JSON_FORM: Headers = ((b"content-type", b"application/json"),)
_OCTETS = (b"content-type", b"application/octet-stream")
_MAX_HEADER_LENGTH = 2**31 - 1  # Triton and its clients read it as an int32

# Extensions of Triton that do not exist here. Ignoring one would give an answer to another question.
UNSUPPORTED = frozenset(("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"))
_GiB = 1024**3


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class V2Limits:
    """The limits of one body: `json` bytes of JSON, or `text` bytes for the generate extension, nested at most `depth` deep,
    with at most `containers` arrays and objects and `values` values; `tensors` inputs and as many outputs, with `dims`
    dimensions each; and `elements` of BYTES in all inputs together, because each becomes an object. `sequences` is True if a
    request may belong to a sequence."""

    json: int = 64 * 1024 * 1024
    text: int = 16 * 1024 * 1024
    depth: int = 64
    containers: int = strict.CONTAINERS
    values: int = strict.VALUES
    tensors: int = 256
    dims: int = MAX_DIMS
    elements: int = 1_000_000
    sequences: bool = True

    def check_sequence(self, parameters: Mapping[str, Any]) -> None:
        """Raises V2Error for a request of a sequence if this server cannot keep sequences together."""
        if not self.sequences and (sequence := parameters.get("sequence_id")):
            raise V2Error(
                f"parameter sequence_id of the request is {show(sequence)}, and this server has several processes "
                "(listen.processes), of which each would see a part of the sequence"
            )

    def check_elements(self, name: str, shape: tuple[int, ...], before: int) -> int:
        """The number of BYTES elements including this input's, by its shape; `before` is the number without it. V2Error if
        that is more than allowed."""
        count = before + math.prod(shape)
        if count > self.elements:
            others = f", and those before it {before}" if before else ""
            raise V2Error(
                f"input {show(name)}: BYTES {show_shape(shape)} has {show(math.prod(shape))} elements{others}: the inputs "
                f"of a request have at most {self.elements} of BYTES (limits.bytes_elements)"
            )
        return count


DEFAULT_LIMITS = V2Limits()

ANSWER_LIMITS = V2Limits(
    json=_GiB, text=_GiB, containers=_GiB, values=_GiB, tensors=_GiB, dims=NUMPY_DIMS, elements=_GiB
)  # fmt: skip
"""The default limits of an answer, for its client: what a server's model may send. The bytes of an answer are its reader's
to bound, while they come."""


def parse_header_length(values: Sequence[bytes]) -> int | None:
    """The value of `Inference-Header-Content-Length` from all fields of that name; None if there is none.

    Only this field tells how a body is read, whatever its content type. Absent: all of it is JSON. N above 0: N bytes of
    JSON, then tensors. 0: the bytes of the only input. V2Error for anything but ASCII digits, for a value above 2**31 - 1,
    and for fields that differ. (Triton's older readers took `abc` for 0 and `106xyz` for 106.)
    """
    if len(values) == 1:
        return _header_length(values[0])
    lengths = {_header_length(value) for value in values}
    if len(lengths) > 1:
        raise V2Error("Inference-Header-Content-Length is given twice with different values")
    return lengths.pop() if lengths else None


@lru_cache(maxsize=128)
def _header_length(value: bytes) -> int:
    # At most 20 digits are parsed: CPython takes quadratic time, and no valid length has more.
    if not value.isdigit() or len(value) > 20 or int(value) > _MAX_HEADER_LENGTH:
        got = show(value[:100].decode("latin-1"))
        raise V2Error(f"Inference-Header-Content-Length must be a number of bytes up to {_MAX_HEADER_LENGTH}, got {got}")
    return int(value)


def split_body(body: Buffer, header_length: int | None, limits: V2Limits, what: str) -> tuple[dict[str, Any], memoryview]:
    """The JSON object of a body, and the bytes behind it. `what` names the body in errors."""
    view = memoryview(body)
    size = view.nbytes if header_length is None else header_length
    if size > view.nbytes:
        raise V2Error(f"Inference-Header-Content-Length is {size}, but the body has {view.nbytes} bytes")
    if size > limits.json:
        raise V2Error(f"the JSON of {what} is at most {limits.json} bytes (limits.json), got {size}", status=413)
    data = body if size == view.nbytes else view[:size]
    try:
        head = _read_head(data, limits, what)
    except strict.JSONError as error:
        missing = header_length is None and find(data, b"binary_data_size") >= 0
        hint = "; it seems to have binary data, but Inference-Header-Content-Length is missing" if missing else ""
        raise V2Error(error.message + hint) from None
    if type(head) is not dict:
        raise V2Error(f"{what} must be a JSON object, got {show(head)}")
    return head, view[size:]


def _read_head(data: Buffer, limits: V2Limits, what: str) -> object:
    """The value of a JSON text. If it has more values than allowed, the numbers in its inputs' data stay text, a `NumbersIn`
    for each array, because they need not become objects."""
    apart = None
    if len(data) > min(limits.values, 2 * limits.containers):
        census = census_of(data)
        if census.values > limits.values or census.containers > limits.containers:
            text = bytes(data).removeprefix(strict.BOM)
            apart = apart_from_numbers(text, limits.tensors)
    try:
        head = strict.loads(
            data if apart is None else apart.beside,
            depth=limits.depth,
            what=what,
            allow_nonfinite=True,
            duplicates=False,
            containers=limits.containers,
            values=limits.values,
            float_hook=None if apart is None else apart.float_hook,
        )
    except strict.JSONError as error:
        if apart is None:
            raise
        message = strict.moved(error.message, apart.place_of)
        raise strict.JSONError(strict.moved(message, (len(data) - len(text)).__add__)) from None
    if apart is None:
        return head
    entries = head.get("inputs") if type(head) is dict else None
    found = 0
    for entry in entries if type(entries) is list else ():
        if type(entry) is dict and type(place := entry.get("data")) is NumbersAt:
            entry["data"] = NumbersIn(text, place)
            found += 1
    if not apart.asked_for(found):  # some are not the data of an input, so they count
        raise strict.JSONError(f"{what} has more than {limits.values} values (limits.json_values)")
    return head


@final
class NumbersIn:
    """Data of an input that are still text."""

    __slots__ = ("_place", "_text")

    def __init__(self, text: bytes, place: NumbersAt) -> None:
        self._text, self._place = text, place

    def read(self, datatype: str, shape: tuple[int, ...], name: str) -> Array:
        """The array of the numbers. V2Error if they are invalid."""
        return read_data(self._text, self._place, datatype, shape, name)


def read_string(head: dict[str, Any], member: str) -> str:
    """An optional string member: empty if it is absent or null. pydantic writes null for unset members, so null counts as
    absence for every optional member here."""
    value = head.get(member)
    if value is None:
        return ""
    if type(value) is not str:
        raise V2Error(f"{member} must be a string, got {show(value)}")
    return value


def read_parameters(owner: dict[str, Any], kind: str, name: str = "") -> dict[str, Any]:
    """The parameters of the body (only `kind` given) or of a tensor, as a dict that the caller may change."""
    parameters = owner.get("parameters")
    if parameters is None:
        return {}
    if type(parameters) is not dict:
        raise V2Error(f"parameters of {_what(kind, name)} must be an object, got {show(parameters)}")
    for key, value in parameters.items():
        if type(value) not in (str, int, float, bool) or (type(value) is float and not math.isfinite(value)):
            raise V2Error(
                f"parameter {show(key)} of {_what(kind, name)} must be a string, number or boolean, got {show(value)}"
            )
    if name and not UNSUPPORTED.isdisjoint(parameters):
        key = min(UNSUPPORTED.intersection(parameters))
        raise V2Error(f"{_what(kind, name)} has the parameter {key}, of an extension that is not implemented")
    return parameters


def _what(kind: str, name: str) -> str:
    return f"{kind} {show(name)}" if name else kind


def take_flag(parameters: dict[str, Any], key: str, kind: str, name: str = "") -> bool | None:
    """Removes a boolean from the parameters, because it concerns the transfer and not the model. None if it is absent."""
    value = parameters.pop(key, None)
    if value is not None and type(value) is not bool:
        raise V2Error(f"{key} of {_what(kind, name)} must be true or false, got {show(value)}")
    return value


def read_entries(head: dict[str, Any], member: str, limits: V2Limits, *, optional: bool = False) -> list[dict[str, Any]]:
    """The objects of `inputs` or `outputs`, each with a unique name."""
    entries = head.get(member)
    if entries is None and optional:
        return []
    if type(entries) is not list:
        raise V2Error(f"{member} must be an array, got {show(entries) if member in head else 'nothing'}")
    if len(entries) > limits.tensors:
        raise V2Error(f"{member} has at most {limits.tensors} entries (limits.tensors), got {len(entries)}")
    names = set()
    for index, entry in enumerate(entries):
        name = entry.get("name") if type(entry) is dict else None
        if type(name) is not str or not name:
            raise V2Error(f"{member}[{index}] must be an object with a name, got {show(entry)}")
        if name in names:
            raise V2Error(f"{member} has {show(name)} twice")
        names.add(name)
    return entries


def read_tensors(
    entries: Iterable[dict[str, Any]], rest: memoryview, header_length: int | None, limits: V2Limits, kind: str
) -> tuple[V2Tensor, ...]:
    """The tensors of `entries`, with their values in `data` or, in order, in `rest`, which they must use up."""

    def decode(datatype: str, shape: tuple[int, ...], at: int, size: int, name: str) -> Array | BytesData:
        return decode_binary(datatype, shape, rest[at : at + size], name)

    return describe_tensors(entries, rest.nbytes, header_length, limits, kind, decode)


def describe_tensors(
    entries: Iterable[dict[str, Any]],
    given: int | None,
    header_length: int | None,
    limits: V2Limits,
    kind: str,
    decode: Callable[[str, tuple[int, ...], int, int, str], Array | BytesData],
) -> tuple[V2Tensor, ...]:
    """The tensors of `entries`, whose binary data are the `given` bytes behind the JSON; None if that number is unknown.
    `decode` makes the array from datatype, shape, position and number of its bytes, and name."""
    tensors = []
    at = elements = 0
    for entry in entries:
        name, datatype = entry["name"], entry.get("datatype")
        if type(datatype) is not str or datatype not in DATATYPES:
            raise V2Error(f"{_what(kind, name)}: datatype must be one of {', '.join(DATATYPES)}, got {show(datatype)}")
        shape = check_shape(entry.get("shape"), name, dims=limits.dims)
        if datatype == "BYTES" and kind == "input":
            elements = limits.check_elements(name, shape, elements)
        parameters = read_parameters(entry, kind, name)
        data, size = entry.get("data"), parameters.pop("binary_data_size", None)
        if (data is None) == (size is None):
            missing = "neither data nor" if size is None else "both data and"
            raise V2Error(f"{_what(kind, name)} has {missing} binary_data_size")
        array: Array | BytesData
        if size is None:
            array = data.read(datatype, shape, name) if type(data) is NumbersIn else from_json(datatype, shape, data, name)
        else:
            _check_size(datatype, shape, size, kind, name)
            if size and header_length is None:
                raise V2Error(f"{_what(kind, name)} is binary, but Inference-Header-Content-Length is missing")
            if given is not None and size > given - at:
                left = given - at
                raise V2Error(f"{_what(kind, name)} has {size} bytes of binary data, but only {left} are left in the body")
            array = decode(datatype, shape, at, size, name)
            at += size
        tensors.append(V2Tensor(name=name, datatype=datatype, array=array, parameters=parameters or NO_PARAMETERS))
    if given is not None and at != given:
        raise V2Error(f"the {kind}s take {at} bytes of binary data, but {given} follow the JSON")
    return tuple(tensors)


def _check_size(datatype: str, shape: tuple[int, ...], size: object, kind: str, name: str) -> None:
    """Raises V2Error for a size that contradicts its own shape. It is checked before the body's size, as the nearer
    cause."""
    if type(size) is not int or not 0 <= size < 2**63:
        raise V2Error(f"{_what(kind, name)}: binary_data_size must be a number of bytes, got {show(size)}")
    expected = math.prod(shape) * DATATYPES[datatype].itemsize
    if datatype != "BYTES" and size != expected:
        takes = f"{datatype} {show_shape(shape)} takes {show(expected)} bytes"
        raise V2Error(f"{_what(kind, name)}: {takes}, got binary_data_size {size}")


def write_tensor(tensor: V2Tensor, *, binary: bool) -> tuple[dict[str, Any], list[Buffer]]:
    """The JSON object of a tensor, and its binary data, which is empty for one that is written as JSON."""
    if type(tensor.name) is not str or not tensor.name:
        raise V2Error(f"a tensor has a name, which is a string, got {show(tensor.name)}", status=500)
    entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.array.shape}
    buffers: list[Buffer] = []
    parameters = tensor.parameters
    try:
        if binary:
            buffers = encode_binary(tensor.array, tensor.datatype)
            parameters = {**parameters, "binary_data_size": sum(map(len, buffers))}
        else:
            entry["data"] = msgspec.Raw(to_json(tensor.array, tensor.datatype))
    except V2Error as error:
        raise V2Error(f"tensor {show(tensor.name)}: {error.message}", status=error.status) from None
    if parameters:
        entry["parameters"] = parameters
    return entry, buffers


def join_body(head: dict[str, Any], buffers: list[Buffer]) -> tuple[Headers, list[Buffer]]:
    """The head fields (see `form_of`) and the buffers of a body."""
    text = write_head(head)
    return form_of(len(text), buffers), [text, *buffers]


def write_head(head: dict[str, Any]) -> bytes:
    """The JSON of an object. V2Error with status 500 if JSON cannot express a parameter: nothing else in it can be
    invalid."""
    try:
        return msgspec.json.encode(head, enc_hook=_encode_other)
    except (TypeError, ValueError, OverflowError) as error:  # UnicodeEncodeError is a ValueError
        raise V2Error(f"a parameter is not what JSON can express: {show(str(error))}", status=500) from None


def form_of(header_length: int, buffers: Sequence[Buffer]) -> Headers:
    """The head fields that tell how a body is read: `header_length` bytes of JSON, then `buffers` of binary data. A body
    without binary data is plain JSON, as from Triton."""
    return (_OCTETS, (IHCL, b"%d" % header_length)) if buffers else JSON_FORM


def with_length(form: Headers, buffers: Sequence[Buffer]) -> list[tuple[bytes, bytes]]:
    """The fields of `form_of` and the length of a body: all head fields that it needs."""
    return [*form, (b"content-length", b"%d" % sum(map(len, buffers)))]


def _encode_other(value: object) -> Any:
    match value:
        case np.generic():
            return value.item()
        case Mapping():
            return dict(value)
        case _:
            raise TypeError(f"{type(value).__name__} is neither string, number nor boolean")
