"""The JSON of inference requests and replies (v2) as types, for documents that describe it; the codec reads it faster."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, final

import msgspec
from msgspec import UNSET, UnsetType

Datatype: TypeAlias = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BF16", "BYTES"
]
Parameters: TypeAlias = dict[str, str | int | float | bool]
_Shape: TypeAlias = list[Annotated[int, msgspec.Meta(ge=0)]]


@final
class InferInput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An input: with `data`, or with the parameter `binary_data_size` and that many bytes after the JSON. `data` are the
    elements in row-major order, flat or nested as the shape is: numbers, booleans, strings for BYTES; null, NaN and
    Infinity where the datatype is one of floats."""

    name: str
    datatype: Datatype
    shape: _Shape
    data: list[Any] | UnsetType = UNSET
    parameters: Parameters | UnsetType = UNSET


@final
class RequestedOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An output that is asked for. The parameter `binary_data` says whether it is to come as bytes, `classification` that it
    is to come as its so many largest values."""

    name: str
    parameters: Parameters | UnsetType = UNSET


@final
class InferRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request for one inference. Without `outputs` all are meant. The parameter `binary_data_output` says whether outputs
    that do not say so themselves are to come as bytes, `timeout` how many microseconds there are, and `priority` the place
    in the queue, 1 for the first; others are the model's, `sequence_id`, `sequence_start` and `sequence_end` among them."""

    inputs: list[InferInput]
    outputs: list[RequestedOutput] | UnsetType = UNSET
    parameters: Parameters | UnsetType = UNSET
    id: str | UnsetType = UNSET
    model_name: str | UnsetType = UNSET
    """KServe's client sends it; the path names the model."""


@final
class InferOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An output: with `data`, or with the parameter `binary_data_size` and that many bytes after the JSON. `data` are flat,
    in row-major order, and null where a float is no number."""

    name: str
    datatype: Datatype
    shape: _Shape
    data: list[Any] | UnsetType = UNSET
    parameters: Parameters | UnsetType = UNSET


@final
class InferReply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The outputs of one inference."""

    model_name: str
    model_version: str
    outputs: list[InferOutput]
    id: str | UnsetType = UNSET
    parameters: Parameters | UnsetType = UNSET
