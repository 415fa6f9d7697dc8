"""The warm-up requests of a configuration: bodies, read into what the model is called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.dialects.lmi import read_prompt
from gateway.dialects.v2_calls import request_of, signature_of
from models.errors import ModelError
from models.messages import Family, Part, PartKind
from models.spec import ModelSpec
from protocols import v2


def read_warmup(spec: ModelSpec, bodies: Sequence[str]) -> tuple[Any, ...]:
    """A message of the model's family for each body. ValueError for one that no client could send either."""
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
