"""Inference requests of the Open Inference Protocol (v2), read by a server and written by a client."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import msgspec
import numpy as np

from protocols.events import Buffer
from protocols.v2.body import (
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
from protocols.v2.metadata import ModelSignature
from protocols.v2.tensors import (
    DATATYPES,
    NO_PARAMETERS,
    Array,
    Parameters,
    V2Error,
    V2Tensor,
    bytes_apart,
    decode_fixed,
    numbers_of,
    show,
    show_shape,
)

MOST = 1_000_000
"""The most elements of an output that classification sorts, as in Triton."""

_NO_NUMBERS = ("BYTES", "BOOL")


def read_count(value: object, name: str) -> int:
    """The number of classes that an output's parameter `classification` asks for. 0, also if absent: the output itself."""
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise V2Error(f"classification of output {show(name)} must be a number of classes, got {show(value)}")
    return value


def classify(output: V2Tensor, count: int, labels: Sequence[str] = ()) -> V2Tensor:
    """The `count` largest values along the last axis of an output, or all if it has fewer, as BYTES of the form
    `value:index`, or `value:index:label` if the index has a label. Floats have six decimals, as in Triton. Equal values are
    ordered by index, and NaN comes last. V2Error for a datatype without an order, and for too many elements; with status 500
    for an array that is not of its datatype."""
    if output.datatype in _NO_NUMBERS:
        raise V2Error(f"output {show(output.name)} is {output.datatype}, which classification does not order")
    try:
        array = numbers_of(output.elements, output.datatype)
    except V2Error as error:
        raise V2Error(f"tensor {show(output.name)}: {error.message}", status=error.status) from None
    if array.size > MOST:
        raise V2Error(f"output {show(output.name)}: classification orders at most {MOST} elements, got {array.size}")
    classes = array.shape[-1] if array.shape else 1
    count = min(count, classes)
    rows = array.reshape(-1, classes) if array.size else array.reshape(0, classes)
    order = _descending(rows)[:, :count]
    form = "%f:%d" if rows.dtype.kind not in "iu" else "%d:%d"
    texts = [
        _labelled(form % (value, index), index, labels)
        for values, indexes in zip(np.take_along_axis(rows, order, 1).tolist(), order.tolist(), strict=True)
        for value, index in zip(values, indexes, strict=True)
    ]
    found = np.empty(len(texts), DATATYPES["BYTES"])
    found[:] = texts
    return msgspec.structs.replace(output, datatype="BYTES", array=found.reshape(*array.shape[:-1], count))


def _descending(rows: Array) -> Array:
    """The indexes of each row, sorted by value, the largest first."""
    # inverting reverses the order of integers, signed or not, without overflow
    keys = np.invert(rows) if rows.dtype.kind in "iu" else np.negative(rows.astype(_wide(rows)))
    return np.argsort(keys, axis=1, kind="stable")


def _wide(rows: Array) -> type:
    return np.float64 if rows.dtype.itemsize == 8 else np.float32


def _labelled(text: str, index: int, labels: Sequence[str]) -> bytes:
    label = labels[index] if index < len(labels) else ""
    return (f"{text}:{label}" if label else text).encode()


@final
class WantedOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A requested output by name. `binary` None leaves its form to the request's `binary_data_output`. `classification`
    above 0 asks for that many of its largest values, see `classify`."""

    name: str
    binary: bool | None = None
    classification: int = 0


@final
class V2Request(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A checked request. `id` is empty if there is none. `parameters` are those for the model; `binary_data_output` is
    removed from them and is `binary_default`. Empty `outputs` ask for all. `copied` is the number of bytes that were copied
    or converted to make the arrays: 0 for views of the body, and all of the JSON if an input is in it."""

    id: str = ""
    parameters: Parameters = NO_PARAMETERS
    inputs: tuple[V2Tensor, ...] = ()
    outputs: tuple[WantedOutput, ...] = ()
    binary_default: bool = False
    copied: int = 0

    def wants_binary(self, output: str) -> bool:
        """True if that output is requested as binary data: its `binary_data` takes precedence over `binary_data_output`."""
        for asked in self.outputs:
            if asked.name == output and asked.binary is not None:
                return asked.binary
        return self.binary_default


def parse_by_rules(
    body: Buffer, header_length: int | None, signature: ModelSignature, limits: V2Limits = DEFAULT_LIMITS
) -> V2Request:
    """Reads a request as `parse_infer` must, member by member: requests that the quick readers decline, and every error."""
    if header_length == 0:
        return _raw_request(memoryview(body), signature)
    head, rest = split_body(body, header_length, limits, "the request")
    request = read_request(
        head, signature, limits, lambda entries: read_tensors(entries, rest, header_length, limits, "input")
    )
    copied = _count_copied(head["inputs"], request.inputs, memoryview(body).nbytes - rest.nbytes, rest)
    return msgspec.structs.replace(request, copied=copied) if copied else request


def _count_copied(entries: list[dict[str, Any]], inputs: Sequence[V2Tensor], length: int, rest: memoryview) -> int:
    read = copied = 0
    for entry, tensor in zip(entries, inputs, strict=True):
        if entry.get("data") is None:
            copied += bytes_apart(tensor.array, rest)
        else:
            read = length
    return copied + read


def read_request(
    head: dict[str, Any],
    signature: ModelSignature,
    limits: V2Limits,
    read_inputs: Callable[[list[dict[str, Any]]], tuple[V2Tensor, ...]],
) -> V2Request:
    """The request in a JSON object. `read_inputs` makes tensors of the entries of its inputs."""
    parameters = read_parameters(head, "the request")
    for key in parameters:
        if key.startswith("triton_"):
            raise V2Error(f"parameter {show(key)} of the request: names that begin with triton_ are reserved")
    limits.check_sequence(parameters)
    binary_default = take_flag(parameters, "binary_data_output", "the request") or False
    inputs = read_inputs(read_entries(head, "inputs", limits))
    check_inputs(inputs, signature)
    return V2Request(
        id=read_string(head, "id"),
        parameters=parameters or NO_PARAMETERS,
        inputs=inputs,
        outputs=_read_outputs(read_entries(head, "outputs", limits, optional=True), signature),
        binary_default=binary_default,
    )


def check_inputs(inputs: Sequence[V2Tensor], signature: ModelSignature) -> None:
    """Raises V2Error unless the inputs, whose names must be unique, are those that the model declares."""
    expected = signature.expected
    if expected is None:
        if signature.max_batch_size:
            _check_batch(inputs, signature.max_batch_size)
        return
    given = {tensor.name for tensor in inputs}
    if not signature.required <= given <= expected.keys():
        wrong = [f"unknown input {show(tensor.name)}" for tensor in inputs if tensor.name not in expected]
        wrong += [f"missing input {show(name)}" for name in expected if name in signature.required - given]
        takes = ", ".join(map(show, expected)) or "none"
        raise V2Error(f"{', '.join(wrong[:2])}: model {show(signature.name)} takes {takes}")
    for tensor in inputs:
        spec = expected[tensor.name]
        if spec.datatype and tensor.datatype != spec.datatype:
            raise V2Error(f"input {show(tensor.name)}: datatype must be {spec.datatype}, got {tensor.datatype}")
        if not spec.fits(shape := tensor.array.shape):
            raise V2Error(f"input {show(tensor.name)}: shape must {spec.wanted}, got {show_shape(shape)}")
    if signature.max_batch_size:
        _check_batch(inputs, signature.max_batch_size)


def _check_batch(inputs: Sequence[V2Tensor], largest: int) -> None:
    for tensor in inputs:
        if not tensor.array.shape:
            raise V2Error(f"input {show(tensor.name)}: shape must begin with the batch dimension, got []")
    if not inputs:
        return
    first = inputs[0]
    size = first.array.shape[0]
    for tensor in inputs:
        if tensor.array.shape[0] != size:
            raise V2Error(
                f"input {show(tensor.name)}: all inputs must have one batch size, got {tensor.array.shape[0]}, and {size} "
                f"for {show(first.name)}"
            )
    if size > largest:
        raise V2Error(f"input {show(first.name)}: the batch size is at most {largest} (max_batch_size), got {size}")


def _read_outputs(entries: list[dict[str, Any]], signature: ModelSignature) -> tuple[WantedOutput, ...]:
    outputs = []
    for entry in entries:
        name = entry["name"]
        check_output(name, signature)
        parameters = read_parameters(entry, "output", name)
        binary = take_flag(parameters, "binary_data", "output", name)
        count = read_count(parameters.get("classification"), name)
        outputs.append(WantedOutput(name=name, binary=binary, classification=count))
    return tuple(outputs)


def check_output(name: str, signature: ModelSignature) -> None:
    """Raises V2Error unless the model may give an output of that name."""
    if signature.promised is not None and name not in signature.promised:
        known = ", ".join(map(show, signature.promised))
        raise V2Error(f"unknown output {show(name)}: model {show(signature.name)} gives {known}")


def _raw_request(view: memoryview, signature: ModelSignature) -> V2Request:
    if signature.inputs is None or len(signature.inputs) != 1:
        has = "undeclared inputs" if signature.inputs is None else f"{len(signature.inputs)}"
        raise V2Error(
            "a raw binary request (Inference-Header-Content-Length 0) needs a model with one declared input;"
            f" {show(signature.name)} has {has}"
        )
    spec = signature.inputs[0]
    if not spec.datatype or spec.shape is None:
        missing = "shape" if spec.datatype else "datatype"
        raise V2Error(f"a raw binary request does not tell the {missing} of input {show(spec.name)}, nor does its model")
    read = _raw_element if spec.datatype == "BYTES" else _raw_array
    array = read(view, spec.name, spec.datatype, spec.shape)
    copied = bytes_apart(array, view) and view.nbytes
    if signature.max_batch_size:
        array = array[np.newaxis]  # a batch of one
    tensor = V2Tensor(name=spec.name, datatype=spec.datatype, array=array)
    return V2Request(inputs=(tensor,), binary_default=True, copied=copied)


def _raw_element(view: memoryview, name: str, datatype: str, shape: tuple[int, ...]) -> Array:
    # The body is the element itself; a length in front of it would be content.
    if -1 in shape or math.prod(shape) != 1:
        raise V2Error(f"a raw binary request is one {datatype} element, but input {show(name)} has {list(shape)}")
    array = np.empty(1, object)
    array[0] = bytes(view)
    array.setflags(write=False)
    return array.reshape(shape)


def _raw_array(view: memoryview, name: str, datatype: str, shape: tuple[int, ...]) -> Array:
    if shape.count(-1) > 1:
        raise V2Error(f"a raw binary request tells one open dimension, but input {show(name)} has {list(shape)}")
    row = math.prod(size for size in shape if size != -1) * DATATYPES[datatype].itemsize
    variable = view.nbytes // row if row else 0
    return decode_fixed(datatype, tuple(variable if size == -1 else size for size in shape), view, name)


def encode_infer_request(
    inputs: Sequence[V2Tensor],
    *,
    id: str = "",
    parameters: Parameters = NO_PARAMETERS,
    outputs: Sequence[WantedOutput] = (),
    binary: bool = True,
    binary_data_output: bool | None = None,
) -> tuple[list[tuple[bytes, bytes]], list[Buffer]]:
    """A client's request: headers, and the buffers to send in order.

    `binary` sends all inputs as binary data, otherwise as JSON. `binary_data_output` is the default form of the outputs; if
    it is None the member is not sent, and servers use false. Arrays are not copied: they must not change until they are
    written.
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


def _write_output(output: WantedOutput) -> dict[str, Any]:
    parameters: dict[str, Any] = {} if output.binary is None else {"binary_data": output.binary}
    if output.classification:
        parameters["classification"] = output.classification
    return {"name": output.name, "parameters": parameters} if parameters else {"name": output.name}
