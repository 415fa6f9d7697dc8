"""What can go wrong with an LMI request, and the objects that say so."""

from __future__ import annotations

import re
from json.encoder import encode_basestring
from typing import Final, Literal, TypeAlias, final

from protocols.jsonlines import unbroken

Stage: TypeAlias = Literal["payload", "parameters", "generation"]

ErrorType: TypeAlias = Literal["validation", "generation", "overloaded", "incomplete_generation"]
"""TGI's `error_type`, from which its clients choose the exception that they raise."""

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

    @property
    def error_type(self) -> ErrorType:
        """TGI's word for the stage."""
        return "generation" if self.stage == "generation" else "validation"

    def body(self, *, tgi: bool = False) -> bytes:
        """The `application/json` body of the HTTP answer, the same whether a stream was asked for or not, and with
        `error_type` in TGI's form. After a stream has begun the error belongs in it: `TextEncoder.error`."""
        body = error_body(self.message) if self.stage == "payload" else generation_error_body(self.message)
        return _typed(body, self.error_type) if tgi else body


def error_body(message: str, code: int = 424) -> bytes:
    """The object for a body that is no request, and for refusals before the model."""
    return b'{"error": %b, "code": %d}' % (json_string(message), code)


def generation_error_body(message: str, code: int = 424) -> bytes:
    """The object for bad parameter values and for a generation that failed: the schema's, plus `error` and `code`."""
    return (
        b'{"generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, "inputs": null, '
        b'"tokens": null}, "error": %b, "code": %d}' % (json_string(message), code)
    )


def tgi_error_body(message: str, error_type: ErrorType, code: int = 424) -> bytes:
    """The same two objects in TGI's form, which adds `error_type`: `generation_error_body`'s for a generation that
    failed or is incomplete, `error_body`'s for a refusal. Not in an array: TGI's clients look up `error` in it."""
    failed = error_type in ("generation", "incomplete_generation")
    return _typed(generation_error_body(message, code) if failed else error_body(message, code), error_type)


def _typed(body: bytes, error_type: ErrorType) -> bytes:
    return b'%b, "error_type": "%b"}' % (body.removesuffix(b"}"), error_type.encode())


def json_string(text: str) -> bytes:
    """A JSON string, `unbroken`. A lone surrogate, which UTF-8 cannot carry, becomes U+FFFD."""
    try:
        quoted = encode_basestring(text).encode()
    except UnicodeEncodeError:
        return json_string(_SURROGATE.sub("\ufffd", text))
    return unbroken(quoted)
