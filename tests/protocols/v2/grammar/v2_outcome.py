"""What two readers of v2 requests must agree on: every part of a request, or the error."""

from typing import Any

from protocols.v2.request import V2Request
from protocols.v2.tensors import Array, V2Error


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
    """What a reader makes of its arguments: a request described, or an error's status and text."""
    try:
        return described(call(*arguments))
    except V2Error as error:
        return (error.status, error.message)
