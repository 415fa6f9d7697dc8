"""Inference requests (v2) of the shape that clients send, decoded into their types at once; the others are left."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from protocols import strict_json
from protocols.tensors import DATATYPES, NO_PARAMETERS, V2Error, V2Tensor, decode_binary, from_json
from protocols.v2_body import DEFAULT_LIMITS, UNSUPPORTED, V2Limits
from protocols.v2_metadata import ModelSignature
from protocols.v2_request import RequestedOutput, V2Request, check_inputs, check_output

_Scalars: TypeAlias = dict[str, str | int | float | bool]
Numbers: TypeAlias = list[int | float | list[int | float]]

_DEPTH = 5  # of what is read here: the request, its inputs, one of them, its data and a row of that


class _Input(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Numbers | None = None
    parameters: _Scalars | None = None


class _Output(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: str
    parameters: _Scalars | None = None


class _Head(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    inputs: list[_Input]
    outputs: list[_Output] | None = None
    parameters: _Scalars | None = None
    id: str | None = None
    model_name: str | None = None  # KServe's client sends it; it means nothing


_decode = msgspec.json.Decoder(_Head).decode


def read_typed(
    text: bytes, rest: memoryview | None, signature: ModelSignature, limits: V2Limits = DEFAULT_LIMITS
) -> V2Request | None:
    """What `parse_infer` makes of a body of that JSON text, within `limits.json`, and the bytes after it; `rest` None
    is a body without Inference-Header-Content-Length. None where the answer may be an error or takes another reader:
    members that are not known, null, text as data, a byte order mark."""
    if limits.depth < _DEPTH:
        return None
    try:
        head = _decode(text)
        members = _count_members(head)  # before some are taken out
        inputs = _read_inputs(head.inputs, rest, limits)
        outputs = _read_outputs(head.outputs, limits, signature) if head.outputs else ()
        if inputs is None or outputs is None or not strict_json.is_plain(text, members):
            return None
        check_inputs(inputs, signature)
    except (msgspec.DecodeError, UnicodeDecodeError, V2Error):
        return None
    parameters, binary_default = head.parameters, False
    if parameters:
        flag = parameters.pop("binary_data_output", False)
        if type(flag) is not bool or any(key.startswith("triton_") for key in parameters):
            return None
        binary_default = flag
    return V2Request(
        id=head.id or "",
        parameters=parameters or NO_PARAMETERS,
        inputs=inputs,
        outputs=outputs,
        binary_default=binary_default,
    )


def _count_members(head: _Head) -> int:
    """The members of all objects, where none was there twice. A null counts as none: then the text has more."""
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


def _read_inputs(entries: list[_Input], rest: memoryview | None, limits: V2Limits) -> tuple[V2Tensor, ...] | None:
    tensors, names, at = [], set(), 0
    given = 0 if rest is None else rest.nbytes
    for entry in entries:
        name, datatype, shape, parameters = entry.name, entry.datatype, entry.shape, entry.parameters
        if not name or datatype not in DATATYPES or len(shape) > limits.dims or (shape and min(shape) < 0):
            return None
        size = parameters.pop("binary_data_size", None) if parameters else None
        if parameters and not UNSUPPORTED.isdisjoint(parameters):
            return None
        if size is None:
            array = from_json(datatype, shape, entry.data, name, numbers=True)
        elif rest is not None and type(size) is int and 0 <= size <= given - at and entry.data is None:
            array = decode_binary(datatype, shape, rest[at : at + size], name)
            at += size
        else:
            return None
        tensors.append(V2Tensor(name=name, datatype=datatype, array=array, parameters=parameters or NO_PARAMETERS))
        names.add(name)
    return tuple(tensors) if at == given and len(names) == len(tensors) <= limits.tensors else None


def _read_outputs(entries: list[_Output], limits: V2Limits, signature: ModelSignature) -> tuple[RequestedOutput, ...] | None:
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
        outputs.append(RequestedOutput(name=name, binary=binary))
        names.add(name)
    return tuple(outputs) if "" not in names and len(names) == len(outputs) <= limits.tensors else None
