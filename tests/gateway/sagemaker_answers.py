"""SageMaker's answers that the client has no reader for: another answer's body in events, and the seed's literal JSON form."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import final

from gateway.client.answers import Answer, EventsAnswer
from protocols.aws import bidi
from protocols.events import Buffer, Response


@final
class WithinEvents(Answer):
    """A response stream: another answer's body in its parts. A failure in band cuts that one off."""

    def __init__(self, inner: Callable[[], Answer]) -> None:
        super().__init__()
        self._events, self._inner = EventsAnswer(), inner()
        self.messages, self.body = self._inner.messages, self._inner.body

    @property
    def failure(self) -> bidi.StreamFailure | None:
        return self._events.failure

    def head(self, response: Response) -> None:
        for answer in (self._events, self._inner):
            answer.head(response)
        super().head(response)

    def _read(self, data: Buffer) -> None:
        self._events.feed(data)
        self._pull()

    def _pull(self) -> None:
        for part in self._events.messages:
            self._inner.feed(part)
        self._events.messages.clear()

    def _finish(self) -> None:
        self._events.end()
        self._pull()
        if not self._events.error:
            self._inner.end()
        self.error = self._events.error or self._inner.error


@final
class LiteralAnswer(EventsAnswer):
    """The literal JSON form: a run of objects, each on a line."""

    def _read(self, data: Buffer) -> None:
        self.body += data
        while (at := self.body.find(b"\n")) >= 0:
            ((kind, members),) = json.loads(self.body[:at]).items()
            del self.body[: at + 1]
            assert self.failure is None, "an object after the failure"
            if kind == "PayloadPart":
                self.messages.append(base64.b64decode(members["Bytes"]))
                self.states.append(bidi.Completion(members["CompletionState"]))
            else:
                self.failure = bidi.StreamFailure(exception_type=kind, message=members["Message"])
                self._fail(members["Message"] or kind)

    def _finish(self) -> None:
        assert not self.body, "half an object"
