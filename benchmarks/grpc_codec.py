"""Cost of a request and an answer of the Open Inference Protocol over gRPC: our codec, and numpy that knows every place."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.units import Case, repeated
from protocols import v2
from protocols.grpc.v2_client import render_infer_request
from protocols.grpc.v2_messages import InferRequestReader, InferResponseWriter

_SIGNATURE = v2.ModelSignature(name="identity", versions=("1",), platform="python")


def cases() -> Iterator[Case]:
    """A ModelInferRequest read and its answer written: FP32 in raw data by a plan, with an id, and in typed contents."""
    for count in (16, 1024, 4_194_304):
        tensor = v2.V2Tensor(name="INPUT0", datatype="FP32", array=np.ones((1, count), "<f4"))
        raw = _joined(tensor)
        forms = {"by a plan": raw}
        if count == 16:
            forms["with an id"] = _joined(tensor, id="8f14e45f-ceea-467f")
            forms["with a parameter, which has no plan"] = _joined(tensor, parameters={"sequence_id": 7})
            forms["in typed contents"] = _joined(tensor, typed=True)
        for form, message in forms.items():
            yield Case(
                name=f"FP32 [1, {count}] {form}",
                costs={
                    "codec": repeated(
                        partial(_ours, InferRequestReader(), InferResponseWriter(_SIGNATURE, version="1"), message)
                    ),
                    "by hand": repeated(partial(_by_hand, raw, len(raw) - 4 * count, (1, count))),
                },
            )


def _joined(tensor: v2.V2Tensor, **options: object) -> bytes:
    return b"".join(map(bytes, render_infer_request("identity", [tensor], **options)))  # type: ignore[arg-type]


def _ours(reader: InferRequestReader, writer: InferResponseWriter, message: bytes) -> object:
    call = reader.read(message)
    call.check(_SIGNATURE)
    tensor = call.request.inputs[0]
    output = v2.V2Tensor(name="OUTPUT0", datatype=tensor.datatype, array=tensor.array)
    return writer.render([output], call.request)


def _by_hand(message: bytes, at: int, shape: tuple[int, ...]) -> object:
    array = np.ndarray(shape, np.float32, message, at)
    return b"\x0a\x08identity", array.data.cast("B")
