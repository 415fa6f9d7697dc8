"""One family to another: a model of parts answers text calls, and a model of text answers parts."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Callable
from typing import Any, final

import trio

from models.errors import ModelError
from models.messages import Family, Finish, Part, PartKind, Prompt, Token
from models.session import Channel, Session
from models.spec import Model
from models.utf8 import utf8


def convertible(model: Family, wire: Family) -> bool:
    """Whether a model of one family can answer on a wire of another."""
    return model is wire or {model, wire} == {Family.TEXT, Family.PARTS}


def convert(model: Model, family: Family, wire: Family, *, read_prompt: Callable[[bytes], Prompt] | None = None) -> Model:
    """The model as the wire's family sees it; the model itself where they are the same.

    TEXT for PARTS: each whole message (its fragments joined, at most 1 MiB) is a prompt, read by `read_prompt` or taken
    as text; each token that has text leaves as one UTF8 part, and an empty UTF8 part closes each answer. PARTS for TEXT:
    the prompt is one UTF8 part and the end of input; each part that comes back is one token, its bytes decoded as UTF-8
    over part boundaries. TypeError for families that do not convert.
    """
    if family is wire:
        return model
    if family is Family.PARTS and wire is Family.TEXT:
        return _TextFromParts(model)
    if family is Family.TEXT and wire is Family.PARTS:
        return _PartsFromText(model, read_prompt or _plain)
    raise TypeError(f"a {family.value} model cannot answer {wire.value} calls")


def _plain(data: bytes) -> Prompt:
    try:
        return Prompt(text=data.decode())
    except UnicodeDecodeError as e:
        raise ModelError(f"a prompt is UTF-8 text: {e.reason} at byte {e.start}", code="BadPrompt", status=400) from None


def _only(error: Exception, *kinds: type[Exception]) -> bool:
    """Whether an error is nothing but these, also where nurseries have wrapped them in groups."""
    if isinstance(error, ExceptionGroup):
        return error.split(kinds)[1] is None
    return isinstance(error, kinds)


@final
class _TextFromParts:
    def __init__(self, model: Model) -> None:
        self._model = model

    async def __call__(self, session: Session[Prompt, Any]) -> None:
        channel = _PromptAsParts(session)
        try:
            await self._model(Session(channel, session.call, deadline=session.deadline))
        except Exception as e:
            if not _only(e, trio.EndOfChannel):
                raise
        await channel.complete()


@final
class _PromptAsParts(Channel[Part, Part]):
    def __init__(self, session: Session[Prompt, Any]) -> None:
        self._channel = session.channel  # nothing else has the session
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._sent = 0
        self.reply, self.accept = session.reply, session.accept

    async def receive(self) -> Part:
        prompt = await self._channel.receive()
        return Part(data=prompt.text.encode("utf-8", "surrogatepass"), kind=PartKind.UTF8)

    async def send(self, part: Part, /) -> None:
        if not isinstance(part, Part):
            raise TypeError(f"a model of parts answers with Part, not {type(part).__name__}")
        before = self._decoder.getstate()
        text = self._decoder.decode(bytes(part.data))
        try:
            await self._channel.send(Token(text=text, id=self._sent))
        except BaseException:
            self._decoder.setstate(before)  # a send that raises has sent nothing
            raise
        self._sent += 1

    async def complete(self) -> None:
        """Sends what is left of a character that was never completed."""
        if text := self._decoder.decode(b"", final=True):
            with contextlib.suppress(trio.ClosedResourceError):  # the answer was complete without it
                await self._channel.send(Token(text=text, id=self._sent))


@final
class _PartsFromText:
    def __init__(self, model: Model, read_prompt: Callable[[bytes], Prompt]) -> None:
        self._model, self._read = model, read_prompt

    async def __call__(self, session: Session[Part, Part]) -> None:
        channel = _PartsAsPrompts(session, self._read)
        # one call of the model for each prompt: a text model may return after its first answer
        while (prompt := await channel.next_prompt()) is not None:
            one = _OnePrompt(prompt, session)
            try:
                await self._model(Session(one, session.call, deadline=session.deadline))
            except Exception as e:
                # it asked for a second prompt, or sent on after its answer was complete: how many loops end
                if not _only(e, trio.EndOfChannel, *((trio.ClosedResourceError,) if one.closed else ())):
                    raise
            if not one.taken:
                return
            await one.complete()


_MESSAGE_LIMIT = 1024 * 1024


@final
class _PartsAsPrompts:
    def __init__(self, session: Session[Part, Part], read: Callable[[bytes], Prompt]) -> None:
        self._session, self._read = session, read

    async def next_prompt(self) -> Prompt | None:
        message = bytearray()
        async for part in self._session:
            if len(message) + len(part.data) > _MESSAGE_LIMIT:
                raise ModelError(f"a prompt is at most {_MESSAGE_LIMIT} bytes", code="PromptTooLarge", status=413)
            message += part.data
            if part.last:
                return self._read(bytes(message))
        if message:
            raise ModelError(f"the input ended inside a prompt, after {len(message)} bytes", code="BadPrompt", status=400)
        return None


@final
class _OnePrompt(Channel[Prompt, Any]):
    """A session of one prompt, so that a text model sees the end of input after it."""

    def __init__(self, prompt: Prompt, session: Session[Part, Part]) -> None:
        self._prompt, self._channel = prompt, session.channel
        self.reply, self.accept = session.reply, session.accept
        self._left = prompt.parameters.max_new_tokens
        self.closed = False
        self.taken = False

    async def receive(self) -> Prompt:
        await trio.lowlevel.checkpoint()
        if self.taken:
            raise trio.EndOfChannel
        self.taken = True
        return self._prompt

    async def send(self, message: Token | Finish, /) -> None:
        if not isinstance(message, Token) and not isinstance(message, Finish):
            raise TypeError(f"a text model answers with Token and Finish, not {type(message).__name__}")
        if self.closed:
            raise trio.ClosedResourceError("the answer is complete")
        text = message.text if isinstance(message, Token) and not message.prefill else ""
        if text:
            await self._channel.send(Part(data=utf8(text), kind=PartKind.UTF8))
        else:  # an empty part would close the answer
            await trio.lowlevel.checkpoint()
        if not isinstance(message, Token):
            self.closed = True
        elif not message.prefill:
            self._left -= 1
            self.closed = message.finish is not None or self._left <= 0

    async def complete(self) -> None:
        await self._channel.send(Part(data=b"", kind=PartKind.UTF8))
