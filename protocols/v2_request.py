"""Inference requests of the Open Inference Protocol (v2), read by a server and written by a client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from protocols.events import Buffer
from protocols.tensors import DATATYPES, NO_PARAMETERS, Array, Parameters, V2Error, V2Tensor, decode_binary, show, show_shape
from protocols.v2_body import (
    DEFAULT_LIMITS,
    V2Limits,
    join_body,
    read_entries,
    read_parameters,
    read_string,
    read_tensors,
    split_body,
    take_flag,
    write_tensor,
)
from protocols.v2_metadata import ModelSignature, TensorSpec


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedOutput:
    """An output by name; `binary` None leaves its form to the request's `binary_data_output`."""

    name: str
    binary: bool | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class V2Request:
    """A checked request. `id` is empty where there is none; `parameters` are the model's, so without
    `binary_data_output`, which is `binary_default`; `outputs` empty asks for all of them."""

    id: str = ""
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    inputs: tuple[V2Tensor, ...] = ()
    outputs: tuple[RequestedOutput, ...] = ()
    binary_default: bool = False

    def wants_binary(self, output: str) -> bool:
        """Whether that output is asked for as binary data: `binary_data` on it outranks `binary_data_output`."""
        asked = next((o.binary for o in self.outputs if o.name == output), None)
        return self.binary_default if asked is None else asked


def parse_infer(
    body: Buffer, header_length: int | None, signature: ModelSignature, limits: V2Limits = DEFAULT_LIMITS
) -> V2Request:
    """The request in a complete body, checked against what the model declares; nothing is left to check after it.

    `header_length` comes from `parse_header_length`; 0 is a raw binary request, whose body is the only input of the
    model and whose outputs are all binary. Binary inputs are read-only views of `body`, which must not change while
    they live; JSON inputs are new arrays. V2Error, with status 413 for JSON above `limits.json` and 400 otherwise,
    and a text that names the input, what was expected and what came.
    """
    if header_length == 0:
        return _raw_request(memoryview(body), signature)
    head, rest = split_body(body, header_length, limits, "the request")
    parameters = read_parameters(head, "the request")
    for key in parameters:
        if key.startswith("triton_"):
            raise V2Error(f"parameter {show(key)} of the request: names that begin with triton_ are reserved")
    binary_default = take_flag(parameters, "binary_data_output", "the request") or False
    inputs = read_tensors(read_entries(head, "inputs", limits), rest, header_length, limits, "input")
    if signature.inputs is not None:
        _check_inputs(inputs, signature.inputs, signature)
    return V2Request(
        id=read_string(head, "id"),
        parameters=parameters,
        inputs=inputs,
        outputs=_read_outputs(read_entries(head, "outputs", limits, optional=True), signature),
        binary_default=binary_default,
    )


def _check_inputs(inputs: tuple[V2Tensor, ...], declared: tuple[TensorSpec, ...], signature: ModelSignature) -> None:
    specs = {spec.name: spec for spec in declared}
    given = {tensor.name for tensor in inputs}
    if given != specs.keys():
        wrong = [f"unknown input {show(tensor.name)}" for tensor in inputs if tensor.name not in specs]
        wrong += [f"missing input {show(name)}" for name in specs if name not in given]
        takes = ", ".join(map(show, specs)) or "none"
        raise V2Error(f"{', '.join(wrong[:2])}: model {show(signature.name)} takes {takes}")
    for tensor in inputs:
        _check_input(tensor, specs[tensor.name], signature)
    if signature.max_batch_size:
        _check_batch(inputs, signature.max_batch_size)


def _check_input(tensor: V2Tensor, spec: TensorSpec, signature: ModelSignature) -> None:
    if tensor.datatype != spec.datatype:
        raise V2Error(f"input {show(tensor.name)}: datatype must be {spec.datatype}, got {tensor.datatype}")
    expected, shape = signature.full_shape(spec), tensor.array.shape
    if len(shape) != len(expected) or any(want not in (-1, got) for want, got in zip(expected, shape, strict=True)):
        raise V2Error(f"input {show(tensor.name)}: shape must be {list(expected)} (-1 is any), got {show_shape(shape)}")


def _check_batch(inputs: tuple[V2Tensor, ...], largest: int) -> None:
    sizes = sorted({tensor.array.shape[0] for tensor in inputs})
    if len(sizes) > 1:
        raise V2Error(f"all inputs must have one batch size, got {sizes[0]} and {sizes[-1]}")
    if sizes and sizes[0] > largest:
        raise V2Error(f"the batch size is at most {largest} (max_batch_size), got {sizes[0]}")


def _read_outputs(entries: list[dict[str, Any]], signature: ModelSignature) -> tuple[RequestedOutput, ...]:
    known = None if signature.outputs is None else [spec.name for spec in signature.outputs]
    outputs = []
    for entry in entries:
        name = entry["name"]
        if known is not None and name not in known:
            raise V2Error(f"unknown output {show(name)}: model {show(signature.name)} gives {', '.join(map(show, known))}")
        parameters = read_parameters(entry, "output", name)
        outputs.append(RequestedOutput(name=name, binary=take_flag(parameters, "binary_data", "output", name)))
    return tuple(outputs)


def _raw_request(view: memoryview, signature: ModelSignature) -> V2Request:
    if signature.inputs is None or len(signature.inputs) != 1:
        has = "undeclared inputs" if signature.inputs is None else f"{len(signature.inputs)}"
        raise V2Error(
            "a raw binary request (Inference-Header-Content-Length 0) needs a model with one declared input;"
            f" {show(signature.name)} has {has}"
        )
    spec = signature.inputs[0]
    array = _raw_element(view, spec) if spec.datatype == "BYTES" else _raw_array(view, spec)
    if signature.max_batch_size:
        array = array[np.newaxis]  # a batch of one
    tensor = V2Tensor(name=spec.name, datatype=spec.datatype, array=array)
    return V2Request(inputs=(tensor,), binary_default=True)


def _raw_element(view: memoryview, spec: TensorSpec) -> Array:
    # The body is the element itself; what looks like a length in front of it is content.
    if -1 in spec.shape or math.prod(spec.shape) != 1:
        raise V2Error(f"a raw binary request is one BYTES element, but input {show(spec.name)} has {list(spec.shape)}")
    array = np.empty(1, object)
    array[0] = bytes(view)
    array.setflags(write=False)
    return array.reshape(spec.shape)


def _raw_array(view: memoryview, spec: TensorSpec) -> Array:
    if spec.shape.count(-1) > 1:
        raise V2Error(f"a raw binary request tells one open dimension, but input {show(spec.name)} has {list(spec.shape)}")
    row = math.prod(size for size in spec.shape if size != -1) * DATATYPES[spec.datatype].itemsize
    variable = view.nbytes // row if row else 0
    shape = tuple(variable if size == -1 else size for size in spec.shape)
    return decode_binary(spec.datatype, shape, view, spec.name)


def encode_infer_request(
    inputs: Sequence[V2Tensor],
    *,
    id: str = "",
    parameters: Parameters = NO_PARAMETERS,
    outputs: Sequence[RequestedOutput] = (),
    binary: bool = True,
    binary_data_output: bool | None = None,
) -> tuple[list[tuple[bytes, bytes]], list[Buffer]]:
    """A client's request: headers and the buffers to send in order.

    `binary` sends all inputs as binary data, else as JSON. `binary_data_output` asks for that form of the outputs
    that do not say otherwise; where it is None the member is not sent, and servers take it for false. Arrays are not
    copied: they must not change until they are written.
    """
    written = [write_tensor(tensor, binary=binary) for tensor in inputs]
    head: dict[str, Any] = {"id": id} if id else {}
    if binary_data_output is not None:
        parameters = {**parameters, "binary_data_output": binary_data_output}
    if parameters:
        head["parameters"] = parameters
    head["inputs"] = [entry for entry, _ in written]
    if outputs:
        head["outputs"] = [_write_output(output) for output in outputs]
    return join_body(head, [buffer for _, buffers in written for buffer in buffers])


def _write_output(output: RequestedOutput) -> dict[str, Any]:
    if output.binary is None:
        return {"name": output.name}
    return {"name": output.name, "parameters": {"binary_data": output.binary}}
