"""v2's texts: what a request with a `text_input` asks of a model of text, and the text that it generates, kept whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import msgspec

from gateway.codecs.prompts import prompt_of
from gateway.config import LimitsConfig
from gateway.core.exchange import Exchange
from gateway.dialects.text.requests import OnePrompt, within_ceiling
from gateway.errors import ModelFailed
from gateway.workers.worker import Worker
from models.continuations import Continuations
from models.messages import Finish, Prompt, Token, utf8
from protocols import lmi, v2

_MOST = 16 * 1024 * 1024  # bytes of a text that is kept until it is whole


class TextAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a model of text."""

    prompt: Prompt
    id: str
    given: Mapping[str, Any]
    """Its parameters."""


def text_asked(text: str, given: Mapping[str, Any], id: str, worker: Worker, limits: LimitsConfig) -> TextAsked:
    """A request with this `text_input` and these parameters, as LMI reads them. V2Error."""
    try:
        request = lmi.parse_document({"inputs": text, "parameters": given})
        lmi.check_one_sequence(request.parameters, request.given, "here, where an answer is one text")
        request = within_ceiling(worker, limits, request)
    except lmi.LMIError as e:
        raise v2.V2Error(e.message) from None
    return TextAsked(prompt=prompt_of(request.inputs, request.parameters), id=id, given=given)


def taken(text: Continuations, message: Token | Finish) -> str | None:
    """The text that a message adds, which passes and has room; None where it is no token of the answer, and adds none."""
    message = text.take(message)
    if type(message) is Finish:
        return text.rest(message.sequence) or None
    return None if message.prefill else message.text


@final
class WholeText(OnePrompt):
    """One prompt in; tokens out, kept until the text is whole."""

    def __init__(self, exchange: Exchange, worker: Worker, prompt: Prompt) -> None:
        super().__init__(exchange, worker, prompt)
        self._kept: list[bytes] = []
        self._size = 0

    async def send(self, message: Token | Finish, /) -> None:
        text = self.text
        if not text.passes(message):
            await text.drop()
            return
        await self._exchange.turn.checkpoint()
        said = taken(text, message)
        if said is not None:
            self._keep(said)
        text.sent()

    def _keep(self, text: str) -> None:
        data = utf8(text)
        self._size += len(data)
        if self._size > _MOST:
            raise ModelFailed(f"the text is over the limit of {_MOST} bytes", code="TooLong", status=500)
        self._kept.append(data)

    def whole(self) -> bytes:
        """All of it, once the model has returned."""
        for _, text in self.text.rests():
            self._keep(text)
        return b"".join(self._kept)
