"""The errors of OpenAI's API, and their error objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, final

from protocols.lmi.errors import json_string

# OpenAI's clients choose their exception by the status alone; `type` and `code` are for people and programs that read the
# object. 429 and 503 mean that the gateway has no room, and not a client's rate.
_KINDS: Final[Mapping[int, tuple[str, str | None]]] = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("not_found_error", "model_not_found"),
    408: ("timeout_error", "timeout"),
    409: ("conflict_error", None),
    413: ("invalid_request_error", "request_too_large"),
    424: ("server_error", "model_error"),
    429: ("rate_limit_error", "overloaded"),
    503: ("server_error", "unavailable"),
    504: ("timeout_error", "timeout"),
    507: ("server_error", "insufficient_storage"),
}


@final
class OpenAIError(Exception):
    """A request that cannot be served. `status` is that of the answer if no head is sent yet. `param` is the member of the
    request that is at fault."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = code

    @classmethod
    def of_status(cls, status: int, message: str, *, param: str | None = None) -> OpenAIError:
        """The error for an HTTP status. If the API has no name for the status, it is a `server_error` from 500 on, and an
        `invalid_request_error` below. The code of a 404 tells that the model was not found."""
        otherwise = ("server_error" if status >= 500 else "invalid_request_error", None)
        type, code = _KINDS.get(status, otherwise)
        return cls(message, status, type, param, code)

    def body(self) -> bytes:
        """The `application/json` body of the HTTP answer, and the data of the event that ends a stream."""
        param, code = (b"null" if text is None else json_string(text) for text in (self.param, self.code))
        said = json_string(self.message), json_string(self.type), param, code
        return b'{"error":{"message":%b,"type":%b,"param":%b,"code":%b}}' % said
