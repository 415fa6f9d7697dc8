"""The two classic tensor models: identity, and add_sub, of which Triton's "simple" is a variant."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from models.adapt import spec_of
from models.errors import ModelError
from models.messages import InferRequest, InferResponse, Tensor
from models.session import Session
from models.spec import TensorSpec, declare

NUMERIC: Final = (
    "INT32", "FP32", "INT8", "INT16", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "FP64", "BF16",
)  # fmt: skip


async def identity(session: Session[InferRequest, InferResponse]) -> None:
    """Answers each input with its own memory: INPUT0 comes back as OUTPUT0, INPUT1 as OUTPUT1, and a tensor with any other
    name under that name. Any datatype and shape; one response for each request, until the end of input. ModelError with
    status 400 if two inputs would come back under one name."""
    async for request in session:
        outputs = [
            Tensor(name=output_name(tensor.name), data=tensor.data, datatype=tensor.datatype)
            if tensor.datatype != "BYTES"
            # its elements are not made: the received bytes are sent back
            else msgspec.structs.replace(tensor, name=output_name(tensor.name), parameters={})
            for tensor in request.inputs
        ]
        if len(outputs) > 1 and len(set(names := [tensor.name for tensor in outputs])) < len(names):
            raise _refused(f"inputs: expected one input for each output, got outputs {', '.join(names)[:100]}")
        if request.outputs:
            outputs = requested(request, outputs)
        await session.send(InferResponse(outputs=outputs, id=request.id))


def _pair(side: str, datatype: str, shape: tuple[int, ...] | None) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name=f"{side}{n}", datatype=datatype, shape=shape) for n in range(2))


@declare(inputs=_pair("INPUT", "", None), outputs=_pair("OUTPUT", "", None))
async def add_sub(session: Session[InferRequest, InferResponse]) -> None:
    """OUTPUT0 = INPUT0 + INPUT1 and OUTPUT1 = INPUT0 - INPUT1, elementwise; integers wrap around.

    Both inputs must have the same shape and the same numeric datatype, which the outputs have too; otherwise ModelError with
    status 400. One response for each request, until the end of input.
    """
    async for request in session:
        first, second = operands(request.inputs)
        outputs = []
        for name, operation in (("OUTPUT0", np.add), ("OUTPUT1", np.subtract)):
            data = np.empty_like(first.data)
            with np.errstate(all="ignore"):  # an overflow gives infinity, as in IEEE 754, without a warning
                operation(first.data, second.data, out=data)
            outputs.append(Tensor(name=name, data=data, datatype=first.datatype))
        await session.send(InferResponse(outputs=requested(request, outputs), id=request.id))


simple: Final = spec_of(
    add_sub, "simple", inputs=_pair("INPUT", "INT32", (16,)), outputs=_pair("OUTPUT", "INT32", (16,)), max_batch_size=8
)
"""`add_sub` as Triton's examples declare it: batches of up to 8 rows of 16 INT32."""


@functools.lru_cache(maxsize=256)
def output_name(name: str) -> str:
    """OUTPUTn for INPUTn, otherwise the name itself."""
    number = name.removeprefix("INPUT")
    return f"OUTPUT{number}" if number != name and number.isdecimal() else name


def operands(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """INPUT0 and INPUT1, checked."""
    names = sorted(tensor.name for tensor in inputs)
    if names != ["INPUT0", "INPUT1"]:
        raise _refused(f"inputs: expected INPUT0 and INPUT1, got {', '.join(names)[:100] or 'none'}")
    first, second = sorted(inputs, key=lambda tensor: tensor.name)
    if first.datatype not in NUMERIC:
        raise _refused(f"INPUT0 datatype: expected one of {', '.join(NUMERIC)}, got {first.datatype}")
    if second.datatype != first.datatype:
        raise _refused(f"INPUT1 datatype: expected {first.datatype} as INPUT0 has, got {second.datatype}")
    if second.shape != first.shape:
        raise _refused(f"INPUT1 shape: expected {list(first.shape)} as INPUT0 has, got {list(second.shape)}")
    return first, second


def requested(request: InferRequest, outputs: list[Tensor]) -> list[Tensor]:
    """The outputs that the request names, in its order; all if it names none."""
    if not request.outputs:
        return outputs
    by_name = {tensor.name: tensor for tensor in outputs}
    for name in request.outputs:
        if name not in by_name:
            raise _refused(f"outputs: expected some of {', '.join(by_name)[:80]}, got {name[:80]}")
    return [by_name[name] for name in request.outputs]


def _refused(message: str) -> ModelError:
    return ModelError(message, code="InvalidArgument", status=400)
