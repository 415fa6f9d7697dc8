"""What a model raises to tell its client something."""

from __future__ import annotations

from typing import final


class ModelError(Exception):
    """An error whose text is meant for the client.

    `message` reaches the client as it is, on every wire; `code` is a short machine-readable name, `status` the HTTP
    status where a response has not begun. Any other exception out of a model reaches the client only as an id that
    the log explains.

    The code `ValidationError` says that the request is to blame: a parameter is outside the range that this model has.
    OpenAI's routes answer it with 400, whatever `status` says, and TGI's form calls it `validation`.
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


@final
class ContextLengthExceeded(ModelError):
    """A prompt that leaves no room for what is asked in the model's context: the request is to blame.

    `needed` are the tokens that prompt and output would have together, `limit` the most that they may have, and
    `prompt_tokens`, where the model knows them, those of the prompt alone. OpenAI's routes answer with 400 and the code
    `context_length_exceeded`, LMI's with their 424 (`error_type` `validation` in TGI's form), all others with 400.
    """

    def __init__(self, needed: int, limit: int, *, prompt_tokens: int | None = None) -> None:
        if prompt_tokens is None:
            said = f"the request needs {needed}"
        else:
            said = f"the prompt has {prompt_tokens} and {needed - prompt_tokens} were asked for"
        super().__init__(
            f"This model's maximum context length is {limit} tokens; {said}", code="ContextLengthExceeded", status=400
        )
        self.needed = needed
        self.limit = limit
        self.prompt_tokens = prompt_tokens
