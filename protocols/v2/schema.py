"""The JSON bodies of the Open Inference Protocol (v2) about servers and models, as types.

Those of inference requests and replies are for documents that describe them; the codec reads them faster.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, final

import msgspec
from msgspec import UNSET, UnsetType


@final
class LiveReply(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the server answers at all."""

    live: bool


@final
class ReadyReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Readiness of the server and all its models for inference requests, and the reasons against it."""

    ready: bool
    reasons: tuple[str, ...] = ()


@final
class ModelReadyReply(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a model takes inference requests."""

    name: str
    ready: bool


@final
class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was refused or failed."""

    error: str


@final
class ServerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The server, and the extensions of the protocol that it has."""

    name: str
    version: str
    extensions: tuple[str, ...]


@final
class TensorMetadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An input or output. -1 in `shape` is a dimension of any size, the first one that of the batch where the model takes
    batches. `parameters.undeclared` names what the model leaves open: `datatype`, which is then empty, and `shape`, which
    then stands for any number of dimensions. `parameters.optional` is true for an input that may be missing."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, str | bool] = {}


@final
class ModelMetadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model, and the tensors that it takes and gives. `parameters.undeclared` names those of `inputs` and `outputs` of
    which the model says nothing: they are empty, and any are accepted."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    parameters: dict[str, str] = {}


@final
class ConfigTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An input or output in Triton's words: `data_type` is TYPE_FP32 and so on, TYPE_STRING for BYTES and TYPE_INVALID
    where it is not declared; `dims` is the shape without the batch dimension."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    optional: bool = False


@final
class TransactionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a request may have any number of responses."""

    decoupled: bool


@final
class DynamicBatching(msgspec.Struct, frozen=True, kw_only=True):
    """How rows of several requests go together, in Triton's words."""

    preferred_batch_size: list[int] = []
    max_queue_delay_microseconds: int = 0
    priority_levels: int = 0
    default_priority_level: int = 0


@final
class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of Triton's model configuration that its clients read. A model that does not batch has a `max_batch_size`
    of 0."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: tuple[ConfigTensor, ...]
    output: tuple[ConfigTensor, ...]
    model_transaction_policy: TransactionPolicy
    dynamic_batching: DynamicBatching | msgspec.UnsetType = msgspec.UNSET
    """Clients look whether it is there."""


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
