"""What a model declares in the Open Inference Protocol (v2), and the JSON of its health, metadata and config replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, final

import msgspec

from protocols.tensors import DATATYPES

EXTENSIONS = ("binary_tensor_data", "model_configuration", "parameters")
"""The names, as Triton's server metadata has them, of what this codec implements."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A declared input or output; -1 in `shape` is a dimension of any size. With `max_batch_size` above 0 the shape
    is that of one item, without the batch dimension, as in a Triton model configuration. ValueError for a datatype or
    dimension that v2 does not have."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.datatype not in DATATYPES:
            raise ValueError(f"tensor {self.name}: datatype must be one of {', '.join(DATATYPES)}, got {self.datatype!r}")
        if any(size < -1 for size in self.shape):
            raise ValueError(f"tensor {self.name}: a dimension is a size or -1 for any, got {self.shape}")


@final
class Expected:
    """The datatype and the full shape of a declared input; `fixed` are the axes of one size and these sizes."""

    __slots__ = ("datatype", "fixed", "shape")

    def __init__(self, datatype: str, shape: tuple[int, ...]) -> None:
        self.datatype, self.shape = datatype, shape
        self.fixed = tuple((axis, size) for axis, size in enumerate(shape) if size != -1)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether an input may have this shape."""
        if len(shape) != len(self.shape):
            return False
        for axis, size in self.fixed:  # noqa: SIM110, a generator would cost more than the rest
            if shape[axis] != size:
                return False
        return True


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSignature:
    """What a request is checked against. `inputs` or `outputs` None is undeclared: any are accepted. With
    `max_batch_size` above 0 each tensor has a leading batch dimension, the same for all inputs, up to that size."""

    name: str
    versions: tuple[str, ...] = ()
    platform: str = ""
    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None
    max_batch_size: int = 0
    expected: Mapping[str, Expected] | None = field(init=False, repr=False, compare=False)
    """What `inputs` says of each, by its name."""
    output_names: frozenset[str] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        expected = {s.name: Expected(s.datatype, self.full_shape(s)) for s in self.inputs or ()}
        object.__setattr__(self, "expected", None if self.inputs is None else MappingProxyType(expected))
        names = frozenset(s.name for s in self.outputs or ())
        object.__setattr__(self, "output_names", None if self.outputs is None else names)

    def full_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """The shape on the wire: with the batch dimension, where the model has one, as -1."""
        return (-1, *spec.shape) if self.max_batch_size else spec.shape


def live_body(live: bool) -> bytes:
    """The body of `/v2/health/live`; its status is 200 if live, else 503. KServe's client wants the JSON."""
    return msgspec.json.encode({"live": live})


def ready_body(ready: bool) -> bytes:
    """The body of `/v2/health/ready`; its status is 200 if ready, else 503."""
    return msgspec.json.encode({"ready": ready})


def server_metadata(name: str, version: str, extensions: Sequence[str] = EXTENSIONS) -> bytes:
    """The body of `/v2`."""
    return msgspec.json.encode({"name": name, "version": version, "extensions": list(extensions)})


def model_ready(name: str, ready: bool) -> bytes:
    """The body of `/v2/models/NAME/ready`; its status is 200 if ready, else 503. An unknown model is a V2Error 404."""
    return msgspec.json.encode({"name": name, "ready": ready})


def model_metadata(signature: ModelSignature) -> bytes:
    """The body of `/v2/models/NAME`: shapes with the batch dimension. Undeclared inputs or outputs are an empty array,
    because the schema requires the members."""

    def tensors(specs: tuple[TensorSpec, ...] | None) -> list[dict[str, Any]]:
        return [{"name": s.name, "datatype": s.datatype, "shape": signature.full_shape(s)} for s in specs or ()]

    return msgspec.json.encode({
        "name": signature.name,
        "versions": signature.versions,
        "platform": signature.platform,
        "inputs": tensors(signature.inputs),
        "outputs": tensors(signature.outputs),
    })  # fmt: skip


def model_config(signature: ModelSignature, *, decoupled: bool = False) -> bytes:
    """The body of `/v2/models/NAME/config`, the part of Triton's model configuration that tritonclient and
    perf_analyzer read: `dims` without the batch dimension, `decoupled` for a model that answers with a stream."""

    def tensors(specs: tuple[TensorSpec, ...] | None) -> list[dict[str, Any]]:
        return [{"name": s.name, "data_type": _config_type(s.datatype), "dims": s.shape} for s in specs or ()]

    return msgspec.json.encode({
        "name": signature.name,
        "platform": signature.platform,
        "backend": "",
        "max_batch_size": signature.max_batch_size,
        "input": tensors(signature.inputs),
        "output": tensors(signature.outputs),
        "model_transaction_policy": {"decoupled": decoupled},
    })  # fmt: skip


def _config_type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
