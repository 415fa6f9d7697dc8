"""The errors of an LMI request, and their error objects."""

from __future__ import annotations

import re
from json.encoder import encode_basestring
from typing import Final, Literal, TypeAlias, final

from protocols.json.lines import unbroken

Stage: TypeAlias = Literal["payload", "parameters", "generation"]

ErrorType: TypeAlias = Literal["validation", "generation", "overloaded", "incomplete_generation"]
"""TGI's `error_type`. Its clients choose their exception by it."""

_SURROGATE = re.compile("[\ud800-\udfff]")


@final
class LMIError(Exception):
    """A generation that cannot start or continue. `status` is that of the answer if no head is sent yet.

    `stage` tells which error object of the schema applies: "payload" for a body that is not a request, "parameters" for a
    request whose values are out of range, "generation" for a failure while the model runs.
    """

    status: Final = 424

    def __init__(self, message: str, *, stage: Stage = "generation") -> None:
        super().__init__(message)
        self.message = message
        self.stage: Stage = stage

    @property
    def error_type(self) -> ErrorType:
        """TGI's `error_type` for the stage."""
        return "generation" if self.stage == "generation" else "validation"

    def body(self, *, tgi: bool = False) -> bytes:
        """The `application/json` body of the HTTP answer, with `error_type` in TGI's form. It is the same if a stream was
        requested. After a stream has begun, the error belongs in it: `TextEncoder.error`."""
        body = error_body(self.message) if self.stage == "payload" else generation_error_body(self.message)
        return _typed(body, self.error_type) if tgi else body


def error_body(message: str, code: int = 424) -> bytes:
    """The object for a body that is not a request, and for refusals before the model."""
    return b'{"error": %b, "code": %d}' % (json_string(message), code)


def generation_error_body(message: str, code: int = 424) -> bytes:
    """The object for invalid parameters and for a failed generation: the schema's, with `error` and `code` added."""
    return (
        b'{"generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, "inputs": null, '
        b'"tokens": null}, "error": %b, "code": %d}' % (json_string(message), code)
    )


def tgi_error_body(message: str, error_type: ErrorType, code: int = 424) -> bytes:
    """The error objects in TGI's form, which adds `error_type`: that of `generation_error_body` for a generation that failed
    or is incomplete, that of `error_body` for a refusal. It is not in an array, because TGI's clients look up `error` in
    it."""
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
