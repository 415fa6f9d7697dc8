"""Inference requests of the Open Inference Protocol (v2), read by a server and written by a client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import msgspec
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
    with_length,
    write_tensor,
)
from protocols.v2_metadata import ModelSignature, TensorSpec


@final
class RequestedOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An output by name; `binary` None leaves its form to the request's `binary_data_output`."""

    name: str
    binary: bool | None = None


@final
class V2Request(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A checked request. `id` is empty where there is none; `parameters` are the model's, so without
    `binary_data_output`, which is `binary_default`; `outputs` empty asks for all of them."""

    id: str = ""
    parameters: Parameters = NO_PARAMETERS
    inputs: tuple[V2Tensor, ...] = ()
    outputs: tuple[RequestedOutput, ...] = ()
    binary_default: bool = False

    def wants_binary(self, output: str) -> bool:
        """Whether that output is asked for as binary data: `binary_data` on it outranks `binary_data_output`."""
        for asked in self.outputs:
            if asked.name == output and asked.binary is not None:
                return asked.binary
        return self.binary_default


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
    check_inputs(inputs, signature)
    return V2Request(
        id=read_string(head, "id"),
        parameters=parameters or NO_PARAMETERS,
        inputs=inputs,
        outputs=_read_outputs(read_entries(head, "outputs", limits, optional=True), signature),
        binary_default=binary_default,
    )


def check_inputs(inputs: Sequence[V2Tensor], signature: ModelSignature) -> None:
    """V2Error unless the inputs, of which no two have the same name, are those that the model declares."""
    expected = signature.expected
    if expected is None:
        return
    specs = [expected.get(tensor.name) for tensor in inputs]
    if len(specs) != len(expected) or None in specs:
        given = {tensor.name for tensor in inputs}
        wrong = [f"unknown input {show(tensor.name)}" for tensor in inputs if tensor.name not in expected]
        wrong += [f"missing input {show(name)}" for name in expected if name not in given]
        takes = ", ".join(map(show, expected)) or "none"
        raise V2Error(f"{', '.join(wrong[:2])}: model {show(signature.name)} takes {takes}")
    for tensor in inputs:
        spec = expected[tensor.name]
        if tensor.datatype != spec.datatype:
            raise V2Error(f"input {show(tensor.name)}: datatype must be {spec.datatype}, got {tensor.datatype}")
        if not spec.fits(shape := tensor.array.shape):
            wanted = list(spec.shape)
            raise V2Error(f"input {show(tensor.name)}: shape must be {wanted} (-1 is any), got {show_shape(shape)}")
    if signature.max_batch_size:
        _check_batch(inputs, signature.max_batch_size)


def _check_batch(inputs: Sequence[V2Tensor], largest: int) -> None:
    sizes = sorted({tensor.array.shape[0] for tensor in inputs})
    if len(sizes) > 1:
        raise V2Error(f"all inputs must have one batch size, got {sizes[0]} and {sizes[-1]}")
    if sizes and sizes[0] > largest:
        raise V2Error(f"the batch size is at most {largest} (max_batch_size), got {sizes[0]}")


def _read_outputs(entries: list[dict[str, Any]], signature: ModelSignature) -> tuple[RequestedOutput, ...]:
    outputs = []
    for entry in entries:
        name = entry["name"]
        check_output(name, signature)
        parameters = read_parameters(entry, "output", name)
        outputs.append(RequestedOutput(name=name, binary=take_flag(parameters, "binary_data", "output", name)))
    return tuple(outputs)


def check_output(name: str, signature: ModelSignature) -> None:
    """V2Error unless the model may give an output of that name."""
    if signature.output_names is not None and name not in signature.output_names:
        known = ", ".join(show(spec.name) for spec in signature.outputs or ())
        raise V2Error(f"unknown output {show(name)}: model {show(signature.name)} gives {known}")


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
    form, body = join_body(head, [buffer for _, buffers in written for buffer in buffers])
    return with_length(form, body), body


def _write_output(output: RequestedOutput) -> dict[str, Any]:
    if output.binary is None:
        return {"name": output.name}
    return {"name": output.name, "parameters": {"binary_data": output.binary}}
