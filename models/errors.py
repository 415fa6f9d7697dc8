"""What a model raises to tell its client something."""

from __future__ import annotations

from typing import final


@final
class ModelError(Exception):
    """An error whose text is meant for the client.

    `message` reaches the client as it is, on every wire; `code` is a short machine-readable name, `status` the HTTP
    status where a response has not begun. Any other exception out of a model reaches the client only as an id that
    the log explains.
    """

    def __init__(self, message: str, *, code: str = "ModelError", status: int = 424) -> None:
        super().__init__(message)
        if not isinstance(message, str) or not isinstance(code, str) or not isinstance(status, int):
            raise TypeError(f"ModelError takes a text, a code that is one, and a number: {message!r}, {code!r}, {status!r}")
        if not 400 <= status <= 599:
            raise ValueError(f"status must be an error status, 400 to 599, not {status}")
        self.message = message
        self.code = code
        self.status = status
