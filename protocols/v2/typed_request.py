"""Decodes inference requests (v2) of the usual form directly into types; all others go to the rules.

FP32 [1, 16] costs 6.4 us in JSON and 8.6 us in binary; by the rules 18 and 14.8 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from protocols.events import Buffer
from protocols.json import strict
from protocols.v2.body import DEFAULT_LIMITS, UNSUPPORTED, V2Limits
from protocols.v2.metadata import ModelSignature
from protocols.v2.numbers import NumbersApart, apart_from_numbers, read_numbers
from protocols.v2.request import V2Request, WantedOutput, check_inputs, check_output, parse_by_rules
from protocols.v2.tensors import (
    DATATYPES,
    NO_PARAMETERS,
    Array,
    BytesData,
    V2Error,
    V2Tensor,
    bytes_apart,
    decode_binary,
    from_json,
)

_Scalars: TypeAlias = dict[str, str | int | float | bool]
Numbers: TypeAlias = list[int | float | list[int | float]]

LARGE: Final = 2048
"""Bytes of JSON from which on the numbers of its inputs are read separately."""

_DEPTH = 5  # the nesting that is read here: the request, its inputs, one input, its data, a row of them
_AROUND = 3  # arrays and objects around the data of an input
_LARGEST_HEAD = 4096  # bytes beside the numbers; all could be floats that cost the decoder 8 us each


class _Input(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Numbers | None = None
    parameters: _Scalars | None = None


class _MarkedInput(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: msgspec.Raw = None  # type: ignore[assignment]  # Raw cannot be in a union, and defaults are not checked
    parameters: _Scalars | None = None


class _Output(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: str
    parameters: _Scalars | None = None


class _Head(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    inputs: list[_Input]
    outputs: list[_Output] | None = None
    parameters: _Scalars | None = None
    id: str | None = None
    model_name: str | None = None  # KServe's client sends it; it is ignored


class _MarkedHead(_Head, forbid_unknown_fields=True, gc=False):
    inputs: list[_MarkedInput]  # type: ignore[assignment]


_decode = msgspec.json.Decoder(_Head).decode
_decode_marked = msgspec.json.Decoder(_MarkedHead).decode


def parse_infer(
    body: Buffer, header_length: int | None, signature: ModelSignature, limits: V2Limits = DEFAULT_LIMITS
) -> V2Request:
    """The request in a complete body, fully checked against the model's declaration.

    Usual requests are decoded directly into types; `parse_by_rules` reads all others and reports every error.

    `header_length` comes from `parse_header_length`. 0 is a raw binary request: its body is the only input of the model, and
    its outputs are all binary. Binary inputs are read-only views of `body`, which must not change while they live; JSON
    inputs are new arrays. V2Error with status 413 for JSON above `limits.json`, and 400 otherwise. Its text names the input,
    the expected and the actual value.
    """
    if type(body) is not bytes:  # bytes, because arrays may then be views of the body
        body = memoryview(body).toreadonly().cast("B")
    size = len(body)
    length = size if header_length is None else header_length
    if 0 < length <= size and length <= limits.json:
        text, rest = bytes(body[:length]), None
        if header_length is None:
            body = text
        else:
            rest = memoryview(body)[length:]
        request = read_typed(text, rest, signature, limits)
        if request is not None:
            return request
        del text  # it may be large
    return parse_by_rules(body, header_length, signature, limits)


def read_typed(
    text: bytes, rest: memoryview | None, signature: ModelSignature, limits: V2Limits = DEFAULT_LIMITS
) -> V2Request | None:
    """The request of a JSON text, within `limits.json`, and the bytes after it: the same as from `parse_by_rules`. `rest` is
    None for a body without Inference-Header-Content-Length. None if the result may be an error or another reader is needed:
    for unknown members, null, strings as data, and a byte order mark."""
    if limits.depth < _DEPTH:
        return None
    apart = None
    try:
        if len(text) < LARGE:
            head, beside = _decode(text), text
        else:
            apart = apart_from_numbers(text, limits.tensors, _LARGEST_HEAD)
            if apart is None:
                return None
            head, beside = _decode_marked(apart.beside), apart.beside
        members = _count_members(head)  # before some are removed
        read = _read_inputs(head.inputs, rest, limits, apart, text)
        outputs = _read_outputs(head.outputs, limits, signature) if head.outputs else ()
        if read is None or outputs is None or not strict.is_plain(beside, members):
            return None
        inputs, copied = read
        check_inputs(inputs, signature)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, V2Error):
        return None
    parameters, binary_default = head.parameters, False
    if parameters:
        flag = parameters.pop("binary_data_output", False)
        if type(flag) is not bool or any(key.startswith("triton_") for key in parameters):
            return None
        if not limits.sequences and "sequence_id" in parameters:
            return None
        binary_default = flag
    return V2Request(
        id=head.id or "",
        parameters=parameters or NO_PARAMETERS,
        inputs=inputs,
        outputs=outputs,
        binary_default=binary_default,
        copied=copied,
    )


def _count_members(head: _Head | _MarkedHead) -> int:
    """The members of all objects, if there are no duplicates. A null member is not counted, so the text then has more."""
    count = 1 + (head.id is not None) + (head.model_name is not None)
    if head.parameters is not None:
        count += 1 + len(head.parameters)
    for tensor in head.inputs:
        count += 3 if tensor.data is None else 4
        if tensor.parameters is not None:
            count += 1 + len(tensor.parameters)
    if head.outputs is not None:
        count += 1
        for output in head.outputs:
            count += 1 if output.parameters is None else 2 + len(output.parameters)
    return count


def _read_inputs(
    entries: Sequence[_Input | _MarkedInput],
    rest: memoryview | None,
    limits: V2Limits,
    apart: NumbersApart | None,
    text: bytes,
) -> tuple[tuple[V2Tensor, ...], int] | None:
    """The inputs, and the number of bytes that were copied or converted for them."""
    tensors, names, at, read, copied = [], set(), 0, 0, 0
    given = 0 if rest is None else rest.nbytes
    elements = 0
    for entry in entries:
        name, datatype, shape, parameters = entry.name, entry.datatype, entry.shape, entry.parameters
        if not name or datatype not in DATATYPES or len(shape) > limits.dims or (shape and min(shape) < 0):
            return None
        if datatype == "BYTES":
            elements = limits.check_elements(name, shape, elements)
        size = parameters.pop("binary_data_size", None) if parameters else None
        if parameters and not UNSUPPORTED.isdisjoint(parameters):
            return None
        data = entry.data
        array: Array | BytesData | None
        if size is None and data is not None:
            if apart is None:
                array = from_json(datatype, shape, data, name, numbers=True)
            elif type(data) is not msgspec.Raw or len(shape) > limits.depth - _AROUND:
                return None
            else:
                place = apart.next_place(data)
                array = None if place is None else read_numbers(text, *place, datatype, shape)
            if array is None:
                return None
            read = len(text)
        elif rest is not None and type(size) is int and 0 <= size <= given - at and data is None:
            view = rest[at : at + size]
            array = decode_binary(datatype, shape, view, name)
            at += size
            if datatype == "BOOL":
                copied += bytes_apart(array, view)
        else:
            return None
        tensors.append(V2Tensor(name=name, datatype=datatype, array=array, parameters=parameters or NO_PARAMETERS))
        names.add(name)
    if at != given or not len(names) == len(tensors) <= limits.tensors or (apart is not None and not apart.done):
        return None
    return tuple(tensors), copied + read


def _read_outputs(entries: list[_Output], limits: V2Limits, signature: ModelSignature) -> tuple[WantedOutput, ...] | None:
    outputs, names = [], set()
    for entry in entries:
        name, binary = entry.name, None
        check_output(name, signature)
        if entry.parameters:
            if len(entry.parameters) > 1:
                return None
            flag = entry.parameters.get("binary_data")
            if type(flag) is not bool:
                return None
            binary = flag
        outputs.append(WantedOutput(name=name, binary=binary))
        names.add(name)
    return tuple(outputs) if "" not in names and len(names) == len(outputs) <= limits.tensors else None
