"""The declaration of a model in the Open Inference Protocol (v2), and the JSON of health, metadata and config replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import final

import msgspec

from protocols.v2.schema import (
    ConfigTensor,
    DynamicBatching,
    LiveReply,
    ModelConfig,
    ModelMetadata,
    ModelReadyReply,
    ReadyReply,
    ServerMetadata,
    TensorMetadata,
    TransactionPolicy,
)
from protocols.v2.tensors import DATATYPES

EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "logging",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "statistics",
)
"""The extensions of this server, by their names in Triton's server metadata."""

_encode = msgspec.json.encode


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A declared input or output. -1 in `shape` is a dimension of any size. With `max_batch_size` above 0 the shape is that
    of one item, without the batch dimension, as in a Triton model configuration. An empty `datatype` is any datatype, and a
    `shape` of None any number of dimensions. An `optional` input may be missing. `labels` are the names of an output's
    classes, by index. ValueError for a datatype or dimension that v2 does not have."""

    name: str
    datatype: str
    shape: tuple[int, ...] | None
    optional: bool = False
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.datatype and self.datatype not in DATATYPES:
            raise ValueError(f"tensor {self.name}: datatype must be one of {', '.join(DATATYPES)}, got {self.datatype!r}")
        if any(size < -1 for size in self.shape or ()):
            raise ValueError(f"tensor {self.name}: a dimension is a size or -1 for any, got {self.shape}")


@final
class Expected:
    """The allowed form of a declared tensor: its datatype, empty for any, and its shape, including a batch dimension.
    `wanted` is that shape in words. `labels` are the names of an output's classes."""

    __slots__ = ("_fixed", "_least", "_rank", "datatype", "labels", "wanted")

    def __init__(self, spec: TensorSpec, *, batched: bool) -> None:
        shape = full_shape(spec, batched=batched)
        self.datatype, self.labels = spec.datatype, spec.labels
        self._rank = None if spec.shape is None else len(shape)
        self._least = int(batched)
        self._fixed = tuple([(axis, size) for axis, size in enumerate(shape) if size != -1])
        self.wanted = "begin with the batch dimension" if spec.shape is None else f"be {list(shape)} (-1 is any)"

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if a tensor may have this shape."""
        if len(shape) != self._rank:
            return self._rank is None and len(shape) >= self._least
        for axis, size in self._fixed:  # noqa: SIM110, a generator would cost more than the rest
            if shape[axis] != size:
                return False
        return True


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSignature:
    """The declaration that requests are checked against. None for `inputs` or `outputs` means undeclared: any are accepted.
    With `max_batch_size` above 0, each tensor has a leading batch dimension of at most that size, equal for all inputs. A
    `decoupled` model gives any number of responses to a request. `dynamic_batching` is the batching of several requests'
    rows, if any."""

    name: str
    versions: tuple[str, ...] = ()
    platform: str = ""
    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None
    max_batch_size: int = 0
    decoupled: bool = False
    dynamic_batching: DynamicBatching | None = None
    expected: Mapping[str, Expected] | None = field(init=False, repr=False, compare=False)
    """The allowed form of each declared input, by name."""
    required: frozenset[str] = field(init=False, repr=False, compare=False)
    """The names of the inputs that must not be missing."""
    promised: Mapping[str, Expected] | None = field(init=False, repr=False, compare=False)
    """The allowed form of each declared output, by name."""

    def __post_init__(self) -> None:
        inputs, outputs = self.inputs or (), self.outputs or ()
        expected = {s.name: Expected(s, batched=self.max_batch_size > 0) for s in inputs}
        object.__setattr__(self, "expected", None if self.inputs is None else MappingProxyType(expected))
        object.__setattr__(self, "required", frozenset([s.name for s in inputs if not s.optional]))
        promised = {s.name: Expected(s, batched=self.max_batch_size > 0) for s in outputs}
        object.__setattr__(self, "promised", None if self.outputs is None else MappingProxyType(promised))


def full_shape(spec: TensorSpec, *, batched: bool) -> tuple[int, ...]:
    """The shape on the wire as metadata shows it: the batch dimension is -1, and a single -1 stands for any number of
    others."""
    shape = (-1,) if spec.shape is None else spec.shape
    return (-1, *shape) if batched else shape


def live_body(live: bool) -> bytes:
    """The body of `/v2/health/live`. Its status is 200 if live, else 503. KServe's client requires the JSON."""
    return _encode(LiveReply(live=live))


def ready_body(ready: bool, reasons: Sequence[str] = ()) -> bytes:
    """The body of `/v2/health/ready`. Its status is 200 if ready, else 503. `reasons` tell why it is not ready."""
    return _encode(ReadyReply(ready=ready, reasons=tuple(reasons)))


def server_metadata(name: str, version: str, extensions: Sequence[str] = EXTENSIONS) -> bytes:
    """The body of `/v2`."""
    return _encode(ServerMetadata(name=name, version=version, extensions=tuple(extensions)))


def model_ready(name: str, ready: bool) -> bytes:
    """The body of `/v2/models/NAME/ready`. Its status is 200 if ready, else 503. An unknown model is a V2Error 404."""
    return _encode(ModelReadyReply(name=name, ready=ready))


def model_metadata(signature: ModelSignature) -> bytes:
    """The body of `/v2/models/NAME`. The schema requires all its members: an undeclared one has an empty or open value, and
    is named in `parameters.undeclared`."""
    metadata = ModelMetadata(
        name=signature.name,
        versions=signature.versions,
        platform=signature.platform,
        inputs=_metadata_of(signature.inputs, signature),
        outputs=_metadata_of(signature.outputs, signature),
        parameters=_undeclared(inputs=signature.inputs is None, outputs=signature.outputs is None),
    )
    return _encode(metadata)


def _metadata_of(specs: tuple[TensorSpec, ...] | None, signature: ModelSignature) -> tuple[TensorMetadata, ...]:
    batched = signature.max_batch_size > 0
    return tuple([
        TensorMetadata(
            name=spec.name,
            datatype=spec.datatype,
            shape=full_shape(spec, batched=batched),
            parameters={
                **_undeclared(datatype=not spec.datatype, shape=spec.shape is None),
                **({"optional": True} if spec.optional else {}),
            },
        )
        for spec in specs or ()
    ])  # fmt: skip


def _undeclared(**missing: bool) -> dict[str, str]:
    names = ", ".join([name for name, is_missing in missing.items() if is_missing])
    return {"undeclared": names} if names else {}


def model_config(signature: ModelSignature) -> bytes:
    """The body of `/v2/models/NAME/config`: the part of Triton's model configuration that tritonclient and perf_analyzer
    read. perf_analyzer refuses an input that is not in the metadata. It assumes that a model has sequence batching, dynamic
    batching or a response cache if `sequence_batching`, `dynamic_batching` or `response_cache` is present."""
    config = ModelConfig(
        name=signature.name,
        platform=signature.platform,
        backend=signature.platform,
        max_batch_size=signature.max_batch_size,
        input=_config_of(signature.inputs),
        output=_config_of(signature.outputs),
        model_transaction_policy=TransactionPolicy(decoupled=signature.decoupled),
        dynamic_batching=signature.dynamic_batching or msgspec.UNSET,
    )
    return _encode(config)


def _config_of(specs: tuple[TensorSpec, ...] | None) -> tuple[ConfigTensor, ...]:
    return tuple([
        ConfigTensor(
            name=spec.name,
            data_type=_CONFIG_TYPES.get(spec.datatype, f"TYPE_{spec.datatype}"),
            dims=full_shape(spec, batched=False),
            optional=spec.optional,
        )
        for spec in specs or ()
    ])  # fmt: skip


# Names of Triton's model configuration that differ from those of the protocol.
_CONFIG_TYPES = {"": "TYPE_INVALID", "BYTES": "TYPE_STRING"}
