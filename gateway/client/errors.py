"""What an answer says went wrong, as exceptions: it was refused, or it broke off."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from gateway.client.answers import Answer


class CallFailed(Exception):
    """The answer is an error, in words of the server's: `message`. `answer` has the rest, such as its headers and body.

    What is no answer is raised as something else: OSError where there is no connection, `gateway.errors.TransportLost` where
    it ended before the answer did, `protocols.errors.RemoteProtocolError` for what the dialect does not allow.
    """

    def __init__(self, message: str, answer: Answer) -> None:
        super().__init__(message)
        self.message, self.answer = message, answer


@final
class Refused(CallFailed):
    """An error from its head: nothing of an answer came. `status` is not 200."""

    def __init__(self, message: str, answer: Answer) -> None:
        super().__init__(message, answer)
        self.status = answer.status

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"

    @property
    def retry_after(self) -> float | None:
        """In how many seconds the same request may succeed, where the server says so."""
        value = dict(self.answer.headers).get(b"retry-after", b"")
        return float(value) if value.isdigit() else None


@final
class BrokenOff(CallFailed):
    """An error in band, after an answer that began well: what came before it is good."""


def words_of(body: bytes | bytearray) -> str:
    """The text of an error's body, in whatever member the dialect has it; the body itself where it has none."""
    text = bytes(body).decode(errors="replace").strip()
    try:
        document = json.loads(text)
    except ValueError:
        return text or "no reason given"
    for path in _WORDS:
        found: Any = document
        for step in path:
            found = found.get(step) if isinstance(found, dict) else None
        if isinstance(found, str):
            return found
    return text


_WORDS: Sequence[Sequence[str]] = (
    ("error", "message"), ("error",), ("OriginalMessage",), ("message",), ("Message",), ("detail",),
)  # fmt: skip
