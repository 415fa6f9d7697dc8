"""v2's text calls: requests with a `text_input` to a text model, and its text, whole or token by token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, final

import msgspec

from gateway.codecs.prompts import prompt_of
from gateway.config import LimitsConfig
from gateway.core.exchange import Exchange
from gateway.dialects.inner_call import InnerCall
from gateway.dialects.text.requests import OnePrompt, decided, within_ceiling, within_room
from gateway.errors import ModelFailed
from gateway.workers.worker import Worker
from models.continuations import Continuations, spoken
from models.messages import Finish, Prompt, Token, ToolCall, utf8
from protocols import lmi, v2
from protocols.events import Buffer
from protocols.text_members import MemberRefused

_MOST = 16 * 1024 * 1024  # bytes of the longest text that is kept until it is whole
_BESIDE = 128  # bytes that a response has beside its text, about

Responding: TypeAlias = Callable[[bytes], Sequence[Buffer]]
"""Makes the response that carries a text."""
Speak: TypeAlias = Callable[[int, Callable[[], Sequence[Buffer]]], Awaitable[None]]
"""Waits for its turn and for room for that many bytes, then sends the buffers that the function returns, if any."""


class TextAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a text model."""

    prompt: Prompt
    id: str
    given: Mapping[str, Any]
    """The parameters, as the request has them."""
    unknown: tuple[str, ...]
    """The names of those that the model gets although nobody here knows them (`tell_passed`)."""


def text_asked(text: str, given: Mapping[str, Any], id: str, worker: Worker, limits: LimitsConfig) -> TextAsked:
    """A request with this `text_input` and these parameters, which LMI's rules read. V2Error."""
    try:
        request = lmi.parse_document({"inputs": text, "parameters": given})
        lmi.check_one_sequence(request.parameters, request.given, "here, where an answer is one text")
        request, said = decided(worker, request, "own", judges=False)
        request = within_ceiling(worker, limits, request)
    except (lmi.LMIError, MemberRefused) as e:
        raise v2.V2Error(e.message) from None
    prompt = prompt_of(request.inputs, request.parameters, said)
    return TextAsked(prompt=prompt, id=id, given=given, unknown=said.unknown)


async def with_room(caller: Exchange | InnerCall, worker: Worker, asked: TextAsked) -> TextAsked:
    """The request with no more tokens than its prompt leaves in the model's context (`within_room`)."""
    if not worker.context:
        return asked
    prompt = asked.prompt
    parameters, _ = await within_room(caller, worker, prompt.text, prompt.parameters)
    return msgspec.structs.replace(asked, prompt=msgspec.structs.replace(prompt, parameters=parameters))


def size_of(text: Continuations, message: Token | ToolCall | Finish) -> int:
    """About the bytes of the response to a message that `Continuations.passes` has accepted."""
    if type(message) is Token:
        return _BESIDE + text.held(message.sequence) + len(message.text) + len(message.data)
    size = _BESIDE + text.held(message.sequence)
    return size + len(message.text) if type(message) is ToolCall else size


def taken(text: Continuations, message: Token | ToolCall | Finish) -> str | None:
    """The text that a message adds to the answer; None if it adds none. The message has passed, and there is room."""
    if type(message) is Token:
        message = text.take(message)
        return None if message.prefill or message.thinking else message.text
    if type(message) is Finish:
        return text.rest(text.take(message).sequence) or None
    return text.take(spoken(message)).text


@final
class WholeText(OnePrompt):
    """The channel of one prompt whose tokens are kept until the text is whole."""

    def __init__(self, exchange: Exchange, worker: Worker, prompt: Prompt) -> None:
        super().__init__(exchange, worker, prompt)
        self._kept: list[bytes] = []
        self._size = 0

    async def send(self, message: Token | ToolCall | Finish, /) -> None:
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
        """The whole text, once the model has returned."""
        for _, text in self.text.rests():
            self._keep(text)
        return b"".join(self._kept)


@final
class EachToken(OnePrompt):
    """The channel of one prompt whose tokens are responses of their own."""

    def __init__(self, exchange: Exchange, worker: Worker, prompt: Prompt, speak: Speak, response: Responding) -> None:
        super().__init__(exchange, worker, prompt)
        self._speak, self._response = speak, response

    async def send(self, message: Token | ToolCall | Finish, /) -> None:
        text = self.text
        if not text.passes(message):
            await text.drop()
            return
        await self._speak(size_of(text, message), partial(self._take, message))
        text.sent()

    def _take(self, message: Token | ToolCall | Finish) -> Sequence[Buffer]:
        said = taken(self.text, message)
        return () if said is None else self._response(utf8(said))

    async def finish(self) -> None:
        """Sends the text that was held back, once the model has returned."""
        for _, text in self.text.rests():
            await self._speak(_BESIDE + len(text), partial(self._response, utf8(text)))
