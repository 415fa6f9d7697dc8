"""The JSON bodies of the Open Inference Protocol (v2) about servers and models, as types."""

from __future__ import annotations

from typing import final

import msgspec


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
