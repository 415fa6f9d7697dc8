"""Reads the warm-up requests of a configuration into messages of the model's family, and checks the answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from gateway.codecs.prompts import read_prompt
from gateway.codecs.tensors import check_response, outputs_of, request_of, signature_of
from models.errors import ModelError
from models.messages import Family, Finish, InferRequest, Part, PartKind, Token, ToolCall
from models.spec import Check, ModelSpec
from protocols import v2


def read_warmup(spec: ModelSpec, bodies: Sequence[str]) -> tuple[Any, ...]:
    """Returns a message of the model's family for each body. ValueError for a body that would be refused from a client."""
    messages = []
    for number, body in enumerate(bodies, 1):
        try:
            messages.append(_message(spec, body.encode()))
        except (ModelError, v2.V2Error) as e:
            raise ValueError(f"warmup: request {number}: {e.message}") from None
    return tuple(messages)


def _message(spec: ModelSpec, body: bytes) -> Any:
    match spec.family:
        case Family.TEXT:
            return read_prompt(body)
        case Family.TENSOR:
            codec = v2.InferCodec(signature_of(spec), version=spec.version, limits=v2.V2Limits())
            return request_of(codec.parse(memoryview(body), None))
        case Family.PARTS:
            return Part(data=body, kind=PartKind.UTF8)


def answer_check(spec: ModelSpec) -> Check:
    """Returns a function that raises if an answer of the model would fail in a call: its family or its declaration do not
    match, or v2 cannot carry it."""
    match spec.family:
        case Family.TEXT:
            return _check_text
        case Family.PARTS:
            return _check_part
        case Family.TENSOR:
            infer = v2.InferCodec(signature_of(spec), version=spec.version, limits=v2.V2Limits())
            return partial(_check_tensors, infer)


def _check_text(asked: object, answer: object) -> None:
    if not isinstance(answer, Token | ToolCall | Finish):
        raise TypeError(f"a text call is answered with Token, ToolCall and Finish, not {type(answer).__name__}")


def _check_part(asked: object, answer: object) -> None:
    if not isinstance(answer, Part):
        raise TypeError(f"a call of parts is answered with Part, not {type(answer).__name__}")


def _check_tensors(infer: v2.InferCodec, asked: InferRequest, answer: Any) -> None:
    check_response(answer)
    outputs, _ = outputs_of(answer)
    inputs = [v2.V2Tensor(name=tensor.name, datatype=tensor.datatype, array=tensor.data) for tensor in asked.inputs]
    wanted = [v2.WantedOutput(name=name) for name in asked.outputs]
    request = v2.V2Request(inputs=tuple(inputs), outputs=tuple(wanted), binary_default=True)
    infer.render(outputs, request, answer.id, dict(answer.parameters))
