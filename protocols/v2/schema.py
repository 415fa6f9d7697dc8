"""The JSON bodies of the Open Inference Protocol (v2) about servers and models, as types.

The types of inference requests and replies serve only documents that describe them; the codec reads those bodies itself.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, final

import msgspec
from msgspec import UNSET, UnsetType


@final
class LiveReply(msgspec.Struct, frozen=True, kw_only=True):
    """Liveness of the server."""

    live: bool


@final
class ReadyReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Readiness of the server and all its models for inference requests, and the reasons against it."""

    ready: bool
    reasons: tuple[str, ...] = ()


@final
class ModelReadyReply(msgspec.Struct, frozen=True, kw_only=True):
    """Readiness of a model for inference requests."""

    name: str
    ready: bool


@final
class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a request was refused or failed."""

    error: str


@final
class ServerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The server, and the extensions of the protocol that it supports."""

    name: str
    version: str
    extensions: tuple[str, ...]


@final
class TensorMetadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An input or output. -1 in `shape` is a dimension of any size; if the model takes batches, the first dimension is the
    batch. `parameters.undeclared` names the properties that the model does not declare: `datatype`, which is then empty, and
    `shape`, which then stands for any number of dimensions. `parameters.optional` is true for an input that may be
    missing."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, str | bool] = {}


@final
class ModelMetadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model and its tensors. `parameters.undeclared` names those of `inputs` and `outputs` that the model does not
    declare: they are empty, and any tensors are accepted."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    parameters: dict[str, str] = {}


@final
class ConfigTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An input or output in Triton's terms: `data_type` is TYPE_FP32 and so on, TYPE_STRING for BYTES, and TYPE_INVALID if
    it is not declared. `dims` is the shape without the batch dimension."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    optional: bool = False


@final
class TransactionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """`decoupled` is true if a request may have any number of responses."""

    decoupled: bool


@final
class DynamicBatching(msgspec.Struct, frozen=True, kw_only=True):
    """The batching of several requests' rows, in Triton's terms."""

    preferred_batch_size: list[int] = []
    max_queue_delay_microseconds: int = 0
    priority_levels: int = 0
    default_priority_level: int = 0


@final
class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of Triton's model configuration that its clients read. `max_batch_size` is 0 for a model without batching."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: tuple[ConfigTensor, ...]
    output: tuple[ConfigTensor, ...]
    model_transaction_policy: TransactionPolicy
    dynamic_batching: DynamicBatching | msgspec.UnsetType = msgspec.UNSET
    """Clients check only whether it is there."""


Datatype: TypeAlias = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BF16", "BYTES"
]
Parameters: TypeAlias = dict[str, str | int | float | bool]
_Shape: TypeAlias = list[Annotated[int, msgspec.Meta(ge=0)]]


@final
class InferInput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An input, with `data`, or with the parameter `binary_data_size` and that many bytes after the JSON. `data` are the
    elements in row-major order, flat or nested like the shape: numbers, booleans, or strings for BYTES; floats may also be
    null, NaN and Infinity."""

    name: str
    datatype: Datatype
    shape: _Shape
    data: list[Any] | UnsetType = UNSET
    parameters: Parameters | UnsetType = UNSET


@final
class RequestedOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A requested output. With the parameter `binary_data` it comes as bytes, with `classification` as that many of its
    largest values."""

    name: str
    parameters: Parameters | UnsetType = UNSET


@final
class InferRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request for one inference. Without `outputs` all outputs are returned. The parameter `binary_data_output` is the
    default of the outputs' `binary_data`, `timeout` is in microseconds, and `priority` is the level in the queue, 1 for the
    first. Other parameters are the model's, `sequence_id`, `sequence_start` and `sequence_end` among them."""

    inputs: list[InferInput]
    outputs: list[RequestedOutput] | UnsetType = UNSET
    parameters: Parameters | UnsetType = UNSET
    id: str | UnsetType = UNSET
    model_name: str | UnsetType = UNSET
    """KServe's client sends it. It is ignored, because the path names the model."""


@final
class InferOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An output, with `data`, or with the parameter `binary_data_size` and that many bytes after the JSON. `data` are flat,
    in row-major order, and null for a float that is not finite."""

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
