"""Triton's generate extension (v2): a JSON object whose members are a model's inputs by name, and one with its outputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, final

import msgspec
from msgspec import UNSET, UnsetType

from protocols.events import Buffer
from protocols.json import strict
from protocols.v2.body import DEFAULT_LIMITS, V2Limits, read_string, write_head
from protocols.v2.metadata import ModelSignature, TensorSpec, full_shape
from protocols.v2.request import V2Request, check_inputs
from protocols.v2.tensors import NO_PARAMETERS, Parameters, V2Error, V2Tensor, from_json, show, show_shape, to_json

_OWN = ("id", "parameters")
_REPLYS_OWN = ("model_name", "model_version", "id", "error")


@final
class GenerateRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request to a text model: `parameters`, and any other member, control the generation. A tensor model has members with
    the names of its inputs instead of `text_input`: a value, or an array of values."""

    text_input: str | UnsetType = UNSET
    parameters: dict[str, Any] = {}  # a Struct copies it
    id: str = ""


@final
class GenerateReply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The text that a text model has generated. A tensor model has members with the names of its outputs instead of
    `text_output`: a value if there is one, else an array."""

    model_name: str
    model_version: str
    text_output: str | UnsetType = UNSET
    id: str = ""


def read_object(
    body: Buffer, limits: V2Limits = DEFAULT_LIMITS, *, nonfinite: bool = False, what: str = "the request"
) -> dict[str, Any]:
    """The JSON object of a request, without duplicate members. With `nonfinite` it may hold NaN and Infinity, for the
    numbers of tensors. V2Error, which names the body by `what`, with status 413 above `limits.text`."""
    size = memoryview(body).nbytes
    if size > limits.text:
        raise V2Error(f"the JSON of {what} is at most {limits.text} bytes (limits.text_json), got {size}", status=413)
    try:
        head = strict.loads(
            body,
            depth=limits.depth,
            what=what,
            allow_nonfinite=nonfinite,
            duplicates=False,
            containers=limits.containers,
            values=limits.values,
        )
    except strict.JSONError as error:
        raise V2Error(error.message) from None
    if type(head) is not dict:
        raise V2Error(f"{what} must be a JSON object, got {show(head)}")
    return head


def members_of(head: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yields the name and the value of each member of a request and of its `parameters`, with True for those of
    `parameters`. V2Error for a name that both have."""
    parameters = head.get("parameters")
    if parameters is None:
        parameters = {}
    if type(parameters) is not dict:
        raise V2Error(f"parameters of the request must be an object, got {show(parameters)}")
    for name, value in head.items():
        if name not in _OWN:
            if name in parameters:
                raise V2Error(f"{show(name)} is there twice, in the request and in its parameters")
            yield name, value, False
    for name, value in parameters.items():
        yield name, value, True


def read_generate(body: Buffer, signature: ModelSignature, limits: V2Limits = DEFAULT_LIMITS) -> V2Request:
    """The request of a tensor model.

    A member of the request or of `parameters` with the name of a declared input is that input: one value, a flat array, or
    arrays nested like its shape. Flat values fill the declared shape from its inner end. If several dimensions are open, the
    innermost takes all that the fixed ones leave, and the others are 1. All other members are parameters. If a model does
    not declare its inputs, every member is an input in the shape in which it comes (one value is [1]), and `parameters` are
    the parameters. If no datatype is declared, whole numbers are INT64, other numbers FP64, booleans BOOL and strings BYTES.

    V2Error, which names the member.
    """
    head = read_object(body, limits, nonfinite=True)
    declared = None if signature.inputs is None else {spec.name: spec for spec in signature.inputs}
    inputs, parameters = [], {}
    elements = 0
    for name, value, given_as_parameter in members_of(head):
        if declared is not None and name in declared:
            spec = declared[name]
        elif declared is None and not given_as_parameter:
            spec = TensorSpec(name=name, datatype="", shape=None)
        else:
            parameters[name] = _parameter_of(name, value)
            continue
        tensor = _input_of(spec, value, signature, limits, elements)
        if tensor.datatype == "BYTES":
            elements += tensor.array.size
        inputs.append(tensor)
    if len(inputs) > limits.tensors:
        raise V2Error(f"a request has at most {limits.tensors} inputs (limits.tensors), got {len(inputs)}")
    check_inputs(inputs, signature)
    return V2Request(id=read_string(head, "id"), parameters=parameters or NO_PARAMETERS, inputs=tuple(inputs))


def _parameter_of(name: str, value: Any) -> str | int | float | bool:
    if name.startswith("triton_"):
        raise V2Error(f"parameter {show(name)} of the request: names that begin with triton_ are reserved")
    if type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value)):
        return value  # type: ignore[no-any-return]
    raise V2Error(
        f"{show(name)} is no input of the model, and a parameter must be a string, number or boolean, got {show(value)}"
    )


def _input_of(spec: TensorSpec, value: Any, signature: ModelSignature, limits: V2Limits, elements: int) -> V2Tensor:
    name = spec.name
    values = value if type(value) is list else [value]
    nested = _nesting(values)
    if len(nested) > limits.dims:
        raise V2Error(f"input {show(name)}: at most {limits.dims} dimensions, got {len(nested)}")
    datatype = spec.datatype or _datatype_of(values, name)
    shape = (
        nested if len(nested) > 1 else _completed(name, full_shape(spec, batched=signature.max_batch_size > 0), nested[0])
    )
    if datatype == "BYTES":
        limits.check_elements(name, shape, elements)
    return V2Tensor(name=name, datatype=datatype, array=from_json(datatype, shape, values, name))


def _nesting(values: list[Any]) -> tuple[int, ...]:
    """The shape of nested arrays, judged by the first of each."""
    shape: list[int] = []
    at: Any = values
    while type(at) is list:
        shape.append(len(at))
        at = at[0] if at else None
    return tuple(shape)


def _completed(name: str, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The declared shape with sizes for its open dimensions, so that it has `count` elements."""
    fixed = math.prod([size for size in shape if size != -1])
    rest, extra = divmod(count, fixed) if fixed else (1, count)
    sizes = []
    for size in reversed(shape):
        if size == -1:
            size, rest = rest, 1
        sizes.append(size)
    if extra or rest != 1:
        raise V2Error(f"input {show(name)}: {count} values do not fill the shape {show_shape(shape)} (-1 is any)")
    return tuple(reversed(sizes))


def _datatype_of(values: list[Any], name: str) -> str:
    apart: list[Any] = []  # beside arrays: not walked again for each of their levels
    while values and type(values[0]) is list:
        apart += [v for v in values if type(v) is not list]
        values = list(itertools.chain.from_iterable([v for v in values if type(v) is list]))
    values += apart
    kinds = set(map(type, values))
    if kinds == {str}:
        return "BYTES"
    if kinds == {bool}:
        return "BOOL"
    if kinds == {int}:
        return "INT64"
    if kinds <= {int, float, type(None)}:
        return "FP64"
    odd = next(v for v in values if type(v) is dict or type(v) is not type(values[0]))
    raise V2Error(f"input {show(name)} must hold numbers, or booleans, or strings, and has {show(odd)} among others")


def render_generate(
    model_name: str,
    model_version: str,
    outputs: Sequence[V2Tensor],
    request: V2Request,
    response_id: str = "",
    parameters: Parameters = NO_PARAMETERS,
) -> bytes:
    """The JSON of a response: the outputs by name, each as one value or a flat array, and the response's parameters. V2Error
    with status 500 if two of them have the same name."""
    head: dict[str, Any] = {"model_name": model_name, "model_version": model_version}
    if id := response_id or request.id:
        head["id"] = id
    members = [(name, value) for name, value in parameters.items()]
    members += [(tensor.name, _value_of(tensor)) for tensor in outputs]
    for name, value in members:
        if name in head or name in _REPLYS_OWN:
            raise V2Error(f"the model gave {show(name)}, which the reply has already", status=500)
        head[name] = value
    return write_head(head)


def _value_of(tensor: V2Tensor) -> msgspec.Raw:
    try:
        text = to_json(tensor.array, tensor.datatype)
    except V2Error as error:
        raise V2Error(f"tensor {show(tensor.name)}: {error.message}", status=error.status) from None
    return msgspec.Raw(text[1:-1] if tensor.array.size == 1 else text)
