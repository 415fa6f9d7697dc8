"""v2's texts: what a request with a `text_input` asks of a model of text, and the text that it generates, kept whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, final

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
from protocols.events import Buffer

_MOST = 16 * 1024 * 1024  # bytes of a text that is kept until it is whole
_BESIDE = 128  # bytes that a response has beside its text, about

Responding: TypeAlias = Callable[[bytes], Sequence[Buffer]]
"""Makes the response with a text."""
Speak: TypeAlias = Callable[[int, Callable[[], Sequence[Buffer]]], Awaitable[None]]
"""Says what the function makes when it has its turn and there is room for so many bytes; nothing where that is empty."""


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


def size_of(text: Continuations, message: Token | Finish) -> int:
    """About the bytes of the response that a message makes, which passes."""
    size = _BESIDE + text.held(message.sequence)
    return size + len(message.text) + len(message.data) if type(message) is Token else size


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


@final
class EachToken(OnePrompt):
    """One prompt in; tokens out, each its own response."""

    def __init__(self, exchange: Exchange, worker: Worker, prompt: Prompt, speak: Speak, response: Responding) -> None:
        super().__init__(exchange, worker, prompt)
        self._speak, self._response = speak, response

    async def send(self, message: Token | Finish, /) -> None:
        text = self.text
        if not text.passes(message):
            await text.drop()
            return
        await self._speak(size_of(text, message), partial(self._take, message))
        text.sent()

    def _take(self, message: Token | Finish) -> Sequence[Buffer]:
        said = taken(self.text, message)
        return () if said is None else self._response(utf8(said))

    async def finish(self) -> None:
        """Says what was held back, once the model has returned."""
        for _, text in self.text.rests():
            await self._speak(_BESIDE + len(text), partial(self._response, utf8(text)))
