"""Converts requests and responses of tensors between v2's codec and the messages of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.adapt import AT_ONCE
from models.messages import BytesTensor, InferRequest, InferResponse, Tensor
from models.spec import Batching, ModelSpec, TensorSpec
from protocols import v2

SHORT = 16 * 1024
"""Bytes or elements that are read or written on the loop, whatever their datatype."""


_USUAL = (list, tuple)
_array = np.ndarray
_ARRAYS = (np.ndarray, np.generic)
_HEAVIER = SHORT // AT_ONCE  # numbers that an element of BYTES counts as, for an answer that may be written at once


def request_of(request: v2.V2Request) -> InferRequest:
    """A request as its model sees it."""
    return InferRequest(
        inputs=tuple([
            Tensor(name=t.name, data=array, datatype=t.datatype, parameters=t.parameters)
            if type(array := t.array) is not v2.BytesData
            else BytesTensor.of(t.name, array, t.parameters)
            for t in request.inputs
        ]),
        id=request.id,
        parameters=request.parameters,
        outputs=tuple([o.name for o in request.outputs]) if request.outputs else (),
    )  # fmt: skip


def outputs_of(response: InferResponse) -> tuple[list[v2.V2Tensor], int]:
    """A response's outputs as the codec takes them, and the number of their elements, where an element of BYTES counts more.
    TypeError for an output that is not a tensor."""
    if type(response.outputs) not in _USUAL and not isinstance(response.outputs, Sequence):
        raise TypeError(f"the outputs of an InferResponse are a sequence of Tensors, not {type(response.outputs).__name__}")
    if response.id or response.parameters:
        _check_beside(response)
    outputs, size = [], 0
    for t in response.outputs:
        data: Any
        if type(t) is not Tensor or type(data := t.data) is not _array or type(t.name) is not str:
            _check_output(t)
            # BYTES that the model has not read leave as the bytes that came.
            data = t.given if type(t) is BytesTensor else t.data
        datatype, parameters = t.datatype, dict(t.parameters) if t.parameters else v2.NO_PARAMETERS
        outputs.append(v2.V2Tensor(name=t.name, datatype=datatype, array=data, parameters=parameters))
        size += data.size if datatype != "BYTES" else data.size * _HEAVIER
    return outputs, size


def _check_beside(response: InferResponse) -> None:
    """Raises TypeError for a response whose id or parameters have a wrong type."""
    if not isinstance(response.id, str):
        raise TypeError(f"the id of an InferResponse is a str, not {type(response.id).__name__}")
    if not isinstance(response.parameters, Mapping):
        raise TypeError(f"the parameters of an InferResponse are a mapping, not {type(response.parameters).__name__}")


def _check_output(tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"an output is a Tensor, not {type(tensor).__name__}")
    if not isinstance(tensor.name, str):
        raise TypeError(f"the name of an output is a str, not {type(tensor.name).__name__}")
    if type(tensor) is not BytesTensor and not isinstance(tensor.data, _ARRAYS):
        raise TypeError(f"output {str(tensor.name)[:60]!r}: its data are a numpy array, not {type(tensor.data).__name__}")


def signature_of(spec: ModelSpec) -> v2.ModelSignature:
    """The tensors and options that a model declares, as the codec takes them."""
    return v2.ModelSignature(
        name=spec.name,
        versions=(spec.version,),
        platform=spec.platform,
        inputs=_declared(spec.inputs),
        outputs=_declared(spec.outputs),
        max_batch_size=spec.max_batch_size,
        decoupled=spec.decoupled,
        dynamic_batching=_batching(spec.batching) if spec.batching is not None else None,
    )


def _batching(batching: Batching) -> v2.DynamicBatching:
    levels = batching.priority_levels
    return v2.DynamicBatching(
        preferred_batch_size=sorted(batching.preferred),
        max_queue_delay_microseconds=round(batching.max_delay * 1e6),
        priority_levels=levels,
        default_priority_level=batching.default_priority or levels,
    )


def _declared(tensors: tuple[TensorSpec, ...] | None) -> tuple[v2.TensorSpec, ...] | None:
    if tensors is None:
        return None
    return tuple([
        v2.TensorSpec(name=t.name, datatype=t.datatype, shape=t.shape, optional=t.optional, labels=t.labels)
        for t in tensors
    ])  # fmt: skip


def check_response(message: object) -> None:
    """Raises TypeError if the message is not an InferResponse. `outputs_of` checks its outputs."""
    if not isinstance(message, InferResponse):
        raise TypeError(f"an infer call is answered with InferResponse, not {type(message).__name__}")
