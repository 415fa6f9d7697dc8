"""The models of the grammar of v2 requests: identity, with declarations of all kinds."""

from __future__ import annotations

import json
from typing import Any

from models.adapt import spec_of
from models.library.tensors import identity
from models.spec import ModelSpec, TensorSpec


def declared(tensors: str) -> ModelSpec:
    """An identity model; `tensors` is JSON: {"inputs": [{"name", "datatype", "shape", "optional"}] or null, "outputs": as
    inputs, "max_batch_size"}."""
    said: dict[str, Any] = json.loads(tensors)
    return spec_of(
        identity, inputs=_specs(said["inputs"]), outputs=_specs(said["outputs"]), max_batch_size=said["max_batch_size"]
    )


def _specs(tensors: list[dict[str, Any]] | None) -> tuple[TensorSpec, ...] | None:
    if tensors is None:
        return None
    return tuple([
        TensorSpec(**tensor | {"shape": None if tensor["shape"] is None else tuple(tensor["shape"])}) for tensor in tensors
    ])  # fmt: skip
