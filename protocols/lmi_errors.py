"""What can go wrong with an LMI request, and the objects that say so."""

from __future__ import annotations

import re
from json.encoder import encode_basestring
from typing import Final, Literal, TypeAlias, final

Stage: TypeAlias = Literal["payload", "parameters", "generation"]

_SURROGATE = re.compile("[\ud800-\udfff]")


@final
class LMIError(Exception):
    """A generation that cannot start or go on. `status` is the answer's where no head is sent yet.

    `stage` tells which of the schema's error objects it is: "payload" for a body that is no request, "parameters"
    for a request that asks for something out of range, "generation" for a failure while the model runs.
    """

    status: Final = 424

    def __init__(self, message: str, *, stage: Stage = "generation") -> None:
        super().__init__(message)
        self.message = message
        self.stage: Stage = stage

    def body(self) -> bytes:
        """The `application/json` body of the HTTP answer, the same whether a stream was asked for or not. After a
        stream has begun the error belongs in it: `TextEncoder.error`."""
        return error_body(self.message) if self.stage == "payload" else generation_error_body(self.message)


def error_body(message: str, code: int = 424) -> bytes:
    """The object for a body that is no request, and for refusals before the model."""
    return b'{"error": %b, "code": %d}' % (json_string(message), code)


def generation_error_body(message: str, code: int = 424) -> bytes:
    """The object for bad parameter values and for a generation that failed: the schema's, plus `error` and `code`."""
    return (
        b'{"generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, "inputs": null, '
        b'"tokens": null}, "error": %b, "code": %d}' % (json_string(message), code)
    )


def json_string(text: str) -> bytes:
    """A JSON string. A lone surrogate, which UTF-8 cannot carry, becomes U+FFFD."""
    try:
        return encode_basestring(text).encode()
    except UnicodeEncodeError:
        return json_string(_SURROGATE.sub("\ufffd", text))
