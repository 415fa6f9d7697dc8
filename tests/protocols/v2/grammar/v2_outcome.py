"""The outcome on which two readers of v2 requests must agree: every part of a request, or the error."""

from typing import Any

from protocols.events import Buffer
from protocols.v2.body import DEFAULT_LIMITS, V2Limits
from protocols.v2.metadata import ModelSignature
from protocols.v2.request import V2Request, parse_by_rules
from protocols.v2.tensors import Array, V2Error
from protocols.v2.typed_request import parse_infer


def described(request: V2Request) -> Any:
    """All that a request says, bit for bit."""

    def bits(array: Array) -> Any:
        return array.tolist() if array.dtype.kind == "O" else array.tobytes()

    tensors = [
        (t.name, t.datatype, t.array.dtype, t.array.shape, bits(t.elements), t.elements.flags.writeable, repr(t.parameters))
        for t in request.inputs
    ]
    return (request.id, repr(request.parameters), tensors, request.outputs, request.binary_default, request.copied)


def outcome(call: Any, *arguments: Any) -> Any:
    """Calls a reader, and returns its request, described, or its error's status and text."""
    try:
        return described(call(*arguments))
    except V2Error as error:
        return (error.status, error.message)


def parse_both_ways(
    body: Buffer, header_length: int | None, signature: ModelSignature, limits: V2Limits = DEFAULT_LIMITS
) -> V2Request:
    """The request as the rules read it, once `parse_infer` has said the same."""
    asked = body, header_length, signature, limits
    assert outcome(parse_infer, *asked) == outcome(parse_by_rules, *asked)
    return parse_by_rules(*asked)
