"""Models that the clients of v2 call, and that Triton serves beside us: each input comes back as the output at its place."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import trio

from models.errors import ModelError
from models.messages import Family, InferRequest, InferResponse, Tensor
from models.session import Session
from models.spec import Model, ModelSpec, TensorSpec

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A model's declaration: a datatype and a shape for each name, without the batch dimension."""

    inputs: Tensors
    outputs: Tensors
    max_batch_size: int = 0
    labels: tuple[str, ...] = ()
    decoupled: bool = False


NUMBERS = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64")
DATATYPES = (*NUMBERS, "BYTES")


def _one(datatype: str, *shape: int, **more: Any) -> Declared:
    return Declared(inputs={"INPUT0": (datatype, shape)}, outputs={"OUTPUT0": (datatype, shape)}, **more)


DECLARED: Mapping[str, Declared] = {
    **{f"identity_{datatype.lower()}": _one(datatype, -1) for datatype in DATATYPES},
    "fixed": _one("FP32", 2, 2),
    "columns": _one("INT32", -1, 3),
    "open": _one("FP32", -1, -1),
    "one_bytes": _one("BYTES", 1),
    "batching": _one("FP32", 2, max_batch_size=4),
    "mixed": Declared(
        inputs={"a": ("FP16", (2, 2)), "b": ("UINT32", (2, 2)), "c": ("BOOL", (3,))},
        outputs={"A": ("FP16", (2, 2)), "B": ("UINT32", (2, 2)), "C": ("BOOL", (3,))},
    ),
    "said": Declared(inputs={"INPUT0": ("FP32", (-1,))}, outputs={"OUTPUT0": ("FP32", (-1,)), "SAID": ("BYTES", (1,))}),
    "plain": Declared(
        inputs={"a": ("INT32", (2, 2)), "b": ("BOOL", (1,))}, outputs={"A": ("INT32", (2, 2)), "B": ("BOOL", (1,))}
    ),
    "labelled": _one("FP32", 4, labels=("cat", "dog", "owl", "yak")),
    "failing": _one("FP32", -1),
    "delayed": _one("INT32", 1),
    "counting": _one("INT32", 1, decoupled=True),
    "pieces": Declared(inputs={"INPUT0": ("INT32", (1,))}, outputs={"OUTPUT0": ("INT32", (-1,))}, decoupled=True),
}
"""Each gives its inputs back at once, but for three: `delayed` after so many milliseconds, `counting` so many numbers, after which
a negative one fails, and `pieces` so many pieces of 64 KiB."""

OTHERS: Mapping[str, str] = {"anything": "models.library.tensors:identity", "mymodel": "served_v2:mymodel"}
"""The other models that are served, with their factories."""


def declared(model: str) -> ModelSpec:
    """The model of that name in DECLARED."""
    what = DECLARED[model]
    pairs = dict(zip(what.inputs, what.outputs, strict=False))

    async def answer(session: Session[InferRequest, InferResponse]) -> None:
        async for request in session:
            if model == "failing":
                raise ModelError("the model refuses", code="Refused", status=400)
            if what.decoupled:
                await _several(session, model, int(request["INPUT0"][0]))
                continue
            if model == "delayed":
                await trio.sleep(int(request["INPUT0"][0]) / 1000)
            outputs = [Tensor(name=pairs[t.name], data=t.data, datatype=t.datatype) for t in request.inputs]
            if model == "said":
                told = json.dumps(dict(request.parameters), sort_keys=True)
                outputs.append(Tensor(name="SAID", data=np.array([told.encode()], dtype=object)))
            order = {name: at for at, name in enumerate(request.outputs or what.outputs)}
            outputs = sorted((t for t in outputs if t.name in order), key=lambda t: order[t.name])
            await session.send(InferResponse(outputs=outputs))

    return _spec(answer, model, what)


async def _several(session: Session[InferRequest, InferResponse], model: str, many: int) -> None:
    for number in range(abs(many)):
        data = np.full(16_384 if model == "pieces" else 1, number, np.int32)
        await session.send(InferResponse(outputs=[Tensor(name="OUTPUT0", data=data)]))
    if many < 0:
        raise ModelError("no more numbers", code="Refused", status=400)


def mymodel() -> ModelSpec:
    """The model of the binary tensor extension's example: FP16 [2, 2], UINT32 [2, 2] and BOOL [3] give FP16 [3, 2] and FP32 [2, 2]."""

    async def answer(session: Session[InferRequest, InferResponse]) -> None:
        async for request in session:
            first, second = request["input_0"], request["input_1"]
            await session.send(
                InferResponse(
                    outputs=[
                        Tensor(name="output_0", data=np.vstack([first, first[:1] * np.float16(request["input_2"].sum())])),
                        Tensor(name="output_1", data=second.astype(np.float32) / 10),
                    ]
                )
            )

    inputs = {"input_0": ("FP16", (2, 2)), "input_1": ("UINT32", (2, 2)), "input_2": ("BOOL", (3,))}
    return _spec(
        answer, "mymodel", Declared(inputs=inputs, outputs={"output_0": ("FP16", (3, 2)), "output_1": ("FP32", (2, 2))})
    )


def _spec(answer: Model, name: str, what: Declared) -> ModelSpec:
    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        yield answer

    def tensors(specs: Tensors, labels: tuple[str, ...] = ()) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name=n, datatype=datatype, shape=shape, labels=labels) for n, (datatype, shape) in specs.items()
        )

    return ModelSpec(
        name=name, family=Family.TENSOR, load=load, max_batch_size=what.max_batch_size,
        inputs=tensors(what.inputs), outputs=tensors(what.outputs, what.labels), decoupled=what.decoupled,
    )  # fmt: skip


def configuration() -> list[str]:
    """The lines that serve them all."""
    models = [f'[models.{name}]\nfactory = "served_v2:declared"\noptions = {{ model = "{name}" }}' for name in DECLARED]
    models += [f'[models.{name}]\nfactory = "{factory}"' for name, factory in OTHERS.items()]
    return ["[limits]", "body = 16_777_216", "[v2]", "model_control = true", *models]
