"""Text models for gRPC's clients of Triton's LLM backends: `text_input` in, `text_output` out.

A request has one element of BYTES as `text_input`. Its other inputs are parameters by name, of one element or a list,
beside the request's own parameters; `gateway.dialects.v2.text` reads them. The input `stream`, a BOOL, asks for a response
for each token; TensorRT-LLM's other name for it is `streaming`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np

from gateway.codecs.threads import codec
from gateway.core.exchange import Exchange
from gateway.dialects.inner_call import InnerCall
from gateway.dialects.text.requests import tell_passed
from gateway.dialects.v2.requests import OBJECT, V2Calls
from gateway.dialects.v2.text import TextAsked, text_asked, with_room
from gateway.workers.worker import Worker
from protocols.grpc.v2_messages import InferCall
from protocols.v2.tensors import BytesData, V2Error, V2Tensor, show

_STREAM = ("stream", "streaming")
_PROMPT = "text_input"
_LIGHT = 8  # bytes of the prompt that are read as fast as one byte of JSON


class TextCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a text model, and the form of its answer."""

    asked: TextAsked
    streams: bool
    """True if each token is a response."""


async def read_text(caller: Exchange | InnerCall, call: InferCall, worker: Worker, calls: V2Calls) -> TextCall:
    """Reads the call's request, whose objects are paid for before. V2Error, which names the input, for an invalid one;
    Overloaded."""
    arrays, most = [tensor.array for tensor in call.request.inputs], calls.bounds.text
    size = sum(len(array.data) if type(array) is BytesData else array.nbytes for array in arrays)
    if size > most:
        raise V2Error(f"the inputs have at most {most} bytes (limits.text_json), got {size}", status=413)
    cost = 2 * (size + OBJECT * sum(array.size for array in arrays))  # as they came, and as texts and numbers
    caller.making(cost)
    exchange = caller if isinstance(caller, Exchange) else caller.exchange
    prompt = sum(len(t.array.data) for t in call.request.inputs if t.name == _PROMPT and type(t.array) is BytesData)
    work = cost - 2 * prompt + prompt // _LIGHT
    read = await codec(work, partial(_read, call, worker, calls), exchange.owner)
    tell_passed(exchange, worker, read.asked.unknown)
    asked = await with_room(caller, worker, read.asked)
    return read if asked is read.asked else msgspec.structs.replace(read, asked=asked)


def _read(call: InferCall, worker: Worker, calls: V2Calls) -> TextCall:
    request = call.request
    for output in request.outputs:
        if output.name != "text_output" or output.classification:
            raise V2Error(f"output {show(output.name)}: a model of text has one output, text_output, without classes")
    given: dict[str, Any] = dict(request.parameters)
    for tensor in request.inputs:
        if tensor.name in given:
            raise V2Error(f"{show(tensor.name)} is there twice, as an input and as a parameter")
        given[tensor.name] = _value_of(tensor)
    text = given.pop(_PROMPT, None)
    if type(text) is not str or not text:
        raise V2Error(
            f"model {worker.name!r} speaks {worker.spec.family.value}, and is asked by an input 'text_input': "
            f"expected BYTES of one element that is not empty, got {'none' if text is None else show(text)}"
        )
    said = {name: given.pop(name) for name in _STREAM if name in given}
    for name, value in said.items():
        if type(value) is not bool:
            raise V2Error(f"input {show(name)}: expected one BOOL, got {show(value)}")
    if len(set(said.values())) > 1:
        raise V2Error(f"inputs {_STREAM[0]!r} and {_STREAM[1]!r} are two names of one input: expected one of them")
    asked = text_asked(text, given, request.id, worker, calls.models.config.limits, calls.bounds)
    return TextCall(asked=asked, streams=True in said.values())


def _value_of(tensor: V2Tensor) -> Any:
    """An input as a parameter: its only element, or the list of its elements."""
    array = tensor.array.array() if type(tensor.array) is BytesData else tensor.array
    values = array.reshape(-1).tolist()
    if tensor.datatype == "BYTES":
        try:
            values = [value.decode() if type(value) is bytes else value for value in values]
        except UnicodeDecodeError:
            raise V2Error(f"input {show(tensor.name)}: its elements are texts, which must be UTF-8") from None
    return values[0] if len(values) == 1 else values


def output_of(text: bytes) -> V2Tensor:
    """The output of a response: the whole text, or that of one token."""
    element = np.empty(1, object)
    element[0] = text
    return V2Tensor(name="text_output", datatype="BYTES", array=element)
