"""Converts between families: a model of parts answers text calls, and a text model answers parts."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, final

import trio

from models.blocking import codec_threads, in_thread, json_turn, step_holder
from models.continuations import Continuations, spoken
from models.errors import ModelError, is_failure
from models.messages import Family, Finish, Part, PartKind, Prompt, Token, ToolCall, utf8
from models.session import Channel, Session
from models.spec import Model

Stopped: TypeAlias = Callable[[BaseException | None], None]

_LONG = 2 * 1024 * 1024  # characters whose encoding would delay the loop


def _nobody(error: BaseException | None) -> None:
    """Does nothing: the default of `stopped`."""


def convertible(model: Family, wire: Family) -> bool:
    """True if a model of one family can answer on a wire of another."""
    return model is wire or {model, wire} == {Family.TEXT, Family.PARTS}


def convert(
    model: Model,
    family: Family,
    wire: Family,
    *,
    read_prompt: Callable[[bytes], Prompt] | None = None,
    own_stops: bool = False,
    stopped: Stopped = _nobody,
) -> Model:
    """The model as the wire's family sees it: the model itself if the families are equal.

    TEXT for PARTS: each whole message (its fragments joined, at most 1 MiB) is a prompt, read by `read_prompt` or taken as
    text. Each token with text is sent as one UTF8 part, and an empty UTF8 part ends each answer. PARTS for TEXT: the prompt
    is one UTF8 part followed by the end of input. Each part that comes back is one token, and its bytes are decoded as UTF-8
    across part boundaries. TypeError for families that cannot be converted.

    An answer in parts ends where `models.continuations` ends it, which is given `own_stops`. `stopped` is called when a
    model was stopped there, with the exception that it has raised since, or None.
    """
    if family is wire:
        return model
    if family is Family.PARTS and wire is Family.TEXT:
        return _TextFromParts(model)
    if family is Family.TEXT and wire is Family.PARTS:
        return _PartsFromText(model, read_prompt or _plain, own_stops, stopped)
    raise TypeError(f"a {family.value} model cannot answer {wire.value} calls")


def _plain(data: bytes) -> Prompt:
    try:
        return Prompt(text=data.decode())
    except UnicodeDecodeError as e:
        raise ModelError(f"a prompt is UTF-8 text: {e.reason} at byte {e.start}", code="BadPrompt", status=400) from None


def _only(error: BaseException, *kinds: type[Exception]) -> bool:
    """True if an error consists only of these kinds, also inside groups made by nurseries."""
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
        await channel.end()


@final
class _PromptAsParts(Channel[Part, Part]):
    def __init__(self, session: Session[Prompt, Any]) -> None:
        self._channel = session.channel  # nothing else uses the session
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._sent = 0
        self.reply, self.accept = session.reply, session.accept

    @property
    def complete(self) -> bool:
        return self._channel.complete

    async def receive(self) -> Part:
        prompt = await self._channel.receive()
        encode = partial(prompt.text.encode, "utf-8", "surrogatepass")
        long = len(prompt.text) > _LONG
        data = await in_thread(encode, limiter=codec_threads()) if long else encode()
        return Part(data=data, kind=PartKind.UTF8)

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

    async def end(self) -> None:
        """Sends the rest of a character that was never completed."""
        if text := self._decoder.decode(b"", final=True):
            with contextlib.suppress(trio.ClosedResourceError):  # the answer was complete without it
                await self._channel.send(Token(text=text, id=self._sent))


@final
class _PartsFromText:
    def __init__(self, model: Model, read_prompt: Callable[[bytes], Prompt], own_stops: bool, stopped: Stopped) -> None:
        self._model, self._read, self._own_stops, self._stopped = model, read_prompt, own_stops, stopped

    async def __call__(self, session: Session[Part, Part]) -> None:
        channel = _PartsAsPrompts(session, self._read)
        # one call of the model for each prompt: a text model may return after its first answer
        while (prompt := await channel.next_prompt()) is not None:
            one = _OnePrompt(prompt, session, Continuations(prompt.parameters, own_stops=self._own_stops))
            error: BaseException | None = None
            try:
                await one.text.around(self._model(Session(one, session.call, deadline=session.deadline)))
            except BaseException as e:
                if not is_failure(e):
                    raise
                # it asked for a second prompt, or went on after its answer was complete, which is how many loops end
                if not one.text.stopped and not _only(
                    e, trio.EndOfChannel, *((trio.ClosedResourceError,) if one.complete else ())
                ):
                    raise
                error = e
            if one.text.stopped:
                self._stopped(error)
            del error  # it refers to this frame
            if not one.exhausted:
                return
            await one.end()


_MESSAGE_LIMIT = 1024 * 1024
_SHORT = 256 * 1024  # bytes of a prompt that are read without a noticeable delay
_FOR_A_BYTE = 24  # the most bytes of memory that each byte of JSON takes while it is read


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
                return await self._prompt(bytes(message))
        if message:
            raise ModelError(f"the input ended inside a prompt, after {len(message)} bytes", code="BadPrompt", status=400)
        return None

    async def _prompt(self, data: bytes) -> Prompt:
        if len(data) <= _SHORT:
            return self._read(data)
        async with json_turn():
            give_back = step_holder().reserve(_FOR_A_BYTE * len(data) if data[:1] == b"{" else 0)
            try:
                return await in_thread(partial(self._read, data), limiter=codec_threads(), expected=(ModelError,))
            finally:
                give_back()


@final
class _OnePrompt(Channel[Prompt, Any]):
    """A session of one prompt, so that a text model sees the end of input after it."""

    def __init__(self, prompt: Prompt, session: Session[Part, Part], text: Continuations) -> None:
        self._prompt, self._channel, self.text = prompt, session.channel, text
        self.reply, self.accept = session.reply, session.accept
        self.exhausted = False

    @property
    def complete(self) -> bool:
        return self.text.complete

    async def receive(self) -> Prompt:
        await trio.lowlevel.checkpoint()
        if self.exhausted:
            raise trio.EndOfChannel
        self.exhausted = True
        return self._prompt

    async def send(self, message: Token | ToolCall | Finish, /) -> None:
        text, message = self.text, spoken(message)
        if not text.passes(message):
            await text.drop()
            return
        held = text.held_of(message.sequence)
        taken = text.take(message)
        try:
            if type(taken) is Finish:
                await self._say(text.rest(taken.sequence))
            else:
                await self._say("" if taken.prefill else taken.text)
        except BaseException:
            text.undo(taken, held)
            raise
        text.sent()

    async def _say(self, text: str) -> None:
        if text:
            await self._channel.send(Part(data=utf8(text), kind=PartKind.UTF8))
        else:  # an empty part would end the answer
            await trio.lowlevel.checkpoint()

    async def end(self) -> None:
        """Sends the rest of the answer, and ends it."""
        for _, text in self.text.rests():
            await self._channel.send(Part(data=utf8(text), kind=PartKind.UTF8))
        await self._channel.send(Part(data=b"", kind=PartKind.UTF8))
