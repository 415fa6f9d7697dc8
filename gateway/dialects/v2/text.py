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
from protocols.lmi.triton import TEXTS
from protocols.text_members import MemberRefused
from protocols.v2.generate import read_object
from protocols.v2.tensors import show

_MOST = 16 * 1024 * 1024  # bytes of the longest text that is kept until it is whole
_BESIDE = 128  # bytes that a response has beside its text, about
_SAMPLING = "sampling_parameters"
_MOST_SAMPLING = 64 * 1024  # bytes of it, so that its objects are few beside those of the request, which are paid for
_NUMBER = 40  # characters of the longest string that is read as a number

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
    with_prompt: bool
    """True if the answer begins with the prompt."""

    def whole(self, text: bytes) -> bytes:
        """The text of an answer whose tokens make up `text`."""
        return utf8(self.prompt.text) + text if self.with_prompt else text


def text_asked(
    text: str, given: Mapping[str, Any], id: str, worker: Worker, limits: LimitsConfig, bounds: v2.V2Limits
) -> TextAsked:
    """A request with this `text_input`, which is not empty, and these parameters by Triton's names or LMI's, whose rules
    hold. Those in the JSON text `sampling_parameters` are parameters too. V2Error."""
    given = _with_sampling(given, bounds)
    try:
        parameters, names = lmi.read_triton_parameters(given)
        lmi.check_one_sequence(parameters, names, "here, where an answer is one text")
        request, said = decided(
            worker, lmi.TextRequest(inputs=text, parameters=parameters, given=names), "own", judges=False
        )
        request = within_ceiling(worker, limits, request)
    except (lmi.LMIError, MemberRefused) as e:
        raise v2.V2Error(e.message) from None
    prompt = prompt_of(text, request.parameters, said)
    with_prompt = given.get("exclude_input_in_output") is False
    return TextAsked(prompt=prompt, id=id, given=given, unknown=said.unknown, with_prompt=with_prompt)


def _with_sampling(given: Mapping[str, Any], bounds: v2.V2Limits) -> Mapping[str, Any]:
    """The parameters with the members of `sampling_parameters` in its place. V2Error."""
    text = given.get(_SAMPLING)
    if text is None:
        return given
    if type(text) is not str:
        raise v2.V2Error(f"{_SAMPLING}: expected a JSON object in a string, got {show(text)}")
    together = {name: value for name, value in given.items() if name != _SAMPLING}
    if not text:
        return together
    data = utf8(text)
    if len(data) > _MOST_SAMPLING:
        raise v2.V2Error(f"{_SAMPLING}: expected at most {_MOST_SAMPLING} bytes, got {len(data)}")
    for name, value in read_object(data, bounds, what=_SAMPLING).items():
        if name in together:
            raise v2.V2Error(f"{show(name)} is there twice, in {_SAMPLING} and beside them")
        together[name] = value if name in TEXTS else _number(value)
    return together


def _number(value: Any) -> Any:
    """A member of `sampling_parameters`: numbers may be strings, as vLLM's clients write them."""
    if type(value) is str and len(value) <= _NUMBER:
        try:
            return msgspec.json.decode(value, type=int | float | bool)
        except msgspec.DecodeError:  # a text
            return value
    return value


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


@final
class AfterPrompt:
    """Speaks for `EachToken`, and says the prompt first, as a response of its own."""

    def __init__(self, prompt: Prompt, speak: Speak, response: Responding) -> None:
        self._lead, self._speak, self._response = utf8(prompt.text), speak, response

    async def speak(self, size: int, make: Callable[[], Sequence[Buffer]]) -> None:
        """`Speak`."""
        await self.finish()
        await self._speak(size, make)

    async def finish(self) -> None:
        """Says the prompt, if no token has come before the model has returned."""
        if self._lead:
            await self._speak(_BESIDE + len(self._lead), partial(self._response, self._lead))
            self._lead = b""
