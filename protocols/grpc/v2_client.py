"""The inference messages of gRPC's Open Inference Protocol (v2), in the client's role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import msgspec

from protocols.events import Buffer
from protocols.grpc.protobuf import ProtobufError, Room, encode_field, fields, read_text
from protocols.grpc.v2_fields import (
    ERROR_MESSAGE,
    FINAL_RESPONSE,
    ID,
    INFER_RESPONSE,
    MODEL_NAME,
    MODEL_VERSION,
    PARAMETERS,
    RAW_INPUTS,
    RAW_OUTPUTS,
    TENSORS,
    TensorFields,
    add_parameter,
    check_many,
    encode_id,
    encode_names,
    encode_parameters,
    encode_tensor,
    join,
    join_raw,
    read_tensors,
    typed_tensors,
)
from protocols.v2.body import ANSWER_LIMITS, V2Limits, read_parameters
from protocols.v2.request import WantedOutput
from protocols.v2.response import V2Answer
from protocols.v2.tensors import NO_PARAMETERS, Parameters, V2Error, V2Tensor, show

_PARTS = 1000  # parts of one message: protobuf allows any number, one is usual


@final
class StreamedAnswer(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A ModelStreamInferResponse as its client reads it. `error` is empty if there is none. `final` is the parameter
    `triton_final_response`, or None if the server does not send it."""

    error: str
    answer: V2Answer
    final: bool | None


def render_infer_request(
    model_name: str,
    inputs: Sequence[V2Tensor],
    *,
    model_version: str = "",
    id: str = "",
    parameters: Parameters = NO_PARAMETERS,
    outputs: Sequence[WantedOutput] = (),
    typed: bool = False,
) -> list[Buffer]:
    """A client's ModelInferRequest, as buffers to write in order. Arrays are not copied: they must not change until they are
    written. `typed` sends `contents` instead of raw data: V2Error for FP16 and BF16, which cannot be sent so."""
    head = [encode_names(model_name, model_version)]
    if id:
        head.append(encode_id(id))
    if parameters:
        head.append(encode_parameters(4, parameters, "the request"))
    wanted = [encode_field(6, _encode_output(output)) for output in outputs]
    if typed:
        return join(head, [*typed_tensors(inputs), *wanted])
    head += [encode_field(5, encode_tensor(tensor)) for tensor in inputs]
    head += wanted
    return join_raw(head, RAW_INPUTS, inputs)


def _encode_output(output: WantedOutput) -> bytes:
    out = encode_field(1, output.name.encode())
    if output.classification:
        out += encode_parameters(2, {"classification": output.classification}, f"output {show(output.name)}")
    return out


def read_infer_response(message: Buffer, limits: V2Limits = ANSWER_LIMITS) -> V2Answer:
    """The answer in a ModelInferResponse. Outputs are read-only views of it if their bytes allow that; those of BYTES are
    arrays of `bytes`. ProtobufError for a malformed message, V2Error for invalid outputs."""
    return _read_response([memoryview(message).toreadonly().cast("B")], limits)


def read_streamed_response(message: Buffer, limits: V2Limits = ANSWER_LIMITS) -> StreamedAnswer:
    """The ModelStreamInferResponse in a message, with its answer as `read_infer_response` reads it."""
    error = ""
    parts: list[memoryview] = []
    for tag, value, _ in fields(memoryview(message).toreadonly().cast("B"), Room(limits.values)):
        if tag == ERROR_MESSAGE:
            error = read_text(value)
        elif tag == INFER_RESPONSE:
            if len(parts) == _PARTS:
                raise ProtobufError(f"infer_response comes in more than {_PARTS} parts")
            parts.append(value)
    answer = _read_response(parts, limits)
    final = answer.parameters.get(FINAL_RESPONSE)
    return StreamedAnswer(error=error, answer=answer, final=final if type(final) is bool else None)


def _read_response(parts: Sequence[memoryview], limits: V2Limits) -> V2Answer:
    """The answer in all parts of a message together: protobuf merges a singular message that comes more than once."""
    model_name = model_version = id = ""
    parameters: dict[str, Any] = {}
    entries: list[TensorFields] = []
    raw: list[memoryview] = []
    room = Room(limits.values)
    for view in parts:
        for tag, value, _ in fields(view, room):
            if tag == RAW_OUTPUTS:
                if len(raw) == limits.tensors:
                    raise V2Error(f"raw_output_contents has more than {limits.tensors} entries (limits.tensors)")
                raw.append(value)
            elif tag == MODEL_NAME:
                model_name = read_text(value)
            elif tag == MODEL_VERSION:
                model_version = read_text(value)
            elif tag == ID:
                id = read_text(value)
            elif tag == PARAMETERS:
                add_parameter(parameters, value, room)
            elif tag == TENSORS:
                check_many(entries, "outputs", limits)
                entries.append(TensorFields(value, limits, room, room))
    if parameters:
        read_parameters({"parameters": parameters}, "the response")
    outputs, _ = read_tensors(entries, raw, parts[0] if parts else memoryview(b""), limits, "output")
    return V2Answer(
        model_name=model_name,
        model_version=model_version,
        id=id,
        parameters=parameters or NO_PARAMETERS,
        outputs=tuple([msgspec.structs.replace(tensor, array=tensor.elements) for tensor in outputs]),
    )
