"""Models of text as gRPC's clients of Triton's LLM backends ask for them: `text_input` in, `text_output` out.

A request has an element of BYTES as `text_input`. Its other inputs are parameters by their names, of one element or a list
of them, beside those of the request; `sampling_parameters` is a JSON object of more, as vLLM's backend has it. Two say how
the answer comes: `stream` (BOOL), a response for each token, and `exclude_input_in_output` (BOOL), of which false puts the
prompt before an answer that is not streamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np

from gateway.codecs.threads import codec
from gateway.config import LimitsConfig
from gateway.core.exchange import Exchange
from gateway.dialects.inner_call import InnerCall
from gateway.dialects.v2.text import TextAsked, text_asked
from gateway.workers.worker import Worker
from models.messages import utf8
from protocols import strict_json
from protocols.grpc.v2_messages import InferCall
from protocols.v2.tensors import BytesData, V2Error, V2Tensor, show

_STREAM, _WITHOUT_PROMPT = "stream", "exclude_input_in_output"


class TextCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a request of a model of text asks for."""

    asked: TextAsked
    streams: bool
    """A response for each token."""
    with_prompt: bool


async def read_text(caller: Exchange | InnerCall, call: InferCall, worker: Worker, limits: LimitsConfig) -> TextCall:
    """The call's request, whose texts are paid for. V2Error, which names the input, for one that the model cannot have;
    Overloaded."""
    size = sum(len(t.array.data) if type(t.array) is BytesData else t.array.nbytes for t in call.request.inputs)
    if size > limits.text_json:
        raise V2Error(f"the inputs have at most {limits.text_json} bytes (limits.text_json), got {size}", status=413)
    caller.making(4 * size)
    return await codec(size, partial(_read, call, worker, limits))


def _read(call: InferCall, worker: Worker, limits: LimitsConfig) -> TextCall:
    request = call.request
    for output in request.outputs:
        if output.name != "text_output" or output.classification:
            raise V2Error(f"output {show(output.name)}: a model of text has one output, text_output, without classes")
    given: dict[str, Any] = dict(request.parameters)
    for tensor in request.inputs:
        if tensor.name in given:
            raise V2Error(f"{show(tensor.name)} is there twice, as an input and as a parameter")
        given[tensor.name] = _value_of(tensor)
    text = given.pop("text_input", None)
    if type(text) is not str or not text:
        raise V2Error(
            f"model {worker.name!r} speaks {worker.spec.family.value}, and is asked by an input 'text_input': "
            f"expected BYTES of one element that is not empty, got {'none' if text is None else show(text)}"
        )
    said = {name: given.pop(name, None) for name in (_STREAM, _WITHOUT_PROMPT)}
    for name, value in said.items():
        if value is not None and type(value) is not bool:
            raise V2Error(f"input {show(name)}: expected one BOOL, got {show(value)}")
    for name, value in _sampling(given.pop("sampling_parameters", None), limits).items():
        if name in given:
            raise V2Error(f"{show(name)} is there twice, in sampling_parameters and beside them")
        given[name] = value
    return TextCall(
        asked=text_asked(text, given, request.id, worker, limits),
        streams=said[_STREAM] is True,
        with_prompt=said[_WITHOUT_PROMPT] is False,
    )


def _value_of(tensor: V2Tensor) -> Any:
    """An input as a parameter: its one element, or a list of them."""
    array = tensor.array.array() if type(tensor.array) is BytesData else tensor.array
    values = array.reshape(-1).tolist()
    if tensor.datatype == "BYTES":
        try:
            values = [value.decode() if type(value) is bytes else value for value in values]
        except UnicodeDecodeError:
            raise V2Error(f"input {show(tensor.name)}: its elements are texts, which must be UTF-8") from None
    return values[0] if len(values) == 1 else values


def _sampling(text: Any, limits: LimitsConfig) -> Mapping[str, Any]:
    """What is in `sampling_parameters`. vLLM's clients write numbers as strings, too."""
    if text is None or text == "":
        return {}
    try:
        found = strict_json.loads(
            text.encode() if type(text) is str else b"",
            depth=limits.json_depth,
            what="input 'sampling_parameters'",
            duplicates=False,
            containers=limits.json_containers,
            values=limits.json_values,
        )
    except strict_json.JSONError as e:
        raise V2Error(e.message) from None
    if type(found) is not dict:
        raise V2Error(f"input 'sampling_parameters': expected a JSON object, got {show(found)}")
    return {name: _number(value) for name, value in found.items()}


def _number(value: Any) -> Any:
    if type(value) is str:
        try:
            number = msgspec.json.decode(value)
        except msgspec.DecodeError:
            return value
        if type(number) in (int, float, bool):
            return number
    return value


def text_of(call: TextCall, text: bytes) -> bytes:
    """All of an answer that is not streamed, whose tokens are this text."""
    return utf8(call.asked.prompt.text) + text if call.with_prompt else text


def output_of(text: bytes) -> V2Tensor:
    """The output of a response, with all of the text, or a token's."""
    element = np.empty(1, object)
    element[0] = text
    return V2Tensor(name="text_output", datatype="BYTES", array=element)
