"""Judges a text model's tokens for every wire alike: their sequence, the text to show, and the end of each sequence.

It stands between a session and the wire's encoder. The model may send anything, for any time:

- A sequence ends at its `max_new_tokens`, at the first of its stop sequences, or when the model ends it. Later messages
  for it are dropped. With a `max_new_tokens` of 0 nothing but the prompt's tokens passes.
- If the gateway itself has ended all sequences, or the model goes on after the end of all, the model is cancelled: its call
  runs inside `scope`. That is not an error, and the answer is complete.

For each message the wire calls `passes` first, which changes nothing that a cancelled `send` would have to take back. Then
it waits for room. Then it calls `take` and the encoder, without a wait between them, and at last `sent`. A wire that can
wait only for everything at once calls `take` first, and `undo` if the message was not sent.
"""

from __future__ import annotations

import codecs
from collections.abc import Awaitable, Collection, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, final, overload

import trio
from msgspec import structs

from models.errors import ModelError
from models.messages import Finish, FinishReason, GenerationParameters, Prompt, Token, ToolCall, utf8
from models.session import Channel


@final
class Matcher:
    """Tells how much of a word the end of a text matches (Knuth, Morris and Pratt 1977).

    The matched length is a number that the caller keeps, so many texts can share a matcher. Its table grows with the longest
    match so far: a long word costs nothing before it is matched.
    """

    __slots__ = ("_borders", "word")

    def __init__(self, word: Sequence[object]) -> None:
        """`word` must not be empty."""
        self.word = word
        # For each length from 1: the length of the longest shorter prefix of the word that is also a suffix of it.
        self._borders = [0]

    def step(self, matched: int, item: object) -> int:
        """The length of the longest prefix of the word that the text ends with after this item. `matched` is the length
        before it, and must be less than the whole word."""
        word, borders = self.word, self._borders
        while word[matched] != item:
            if not matched:
                return 0
            matched = borders[matched - 1]
        if matched == len(borders):
            borders.append(self.step(borders[-1], item))
        return matched + 1

    def shorter(self, matched: int) -> int:
        """The length of the next shorter prefix of the word that the text ends with, if it ends with one of `matched`, which
        must be at least 1."""
        return self._borders[matched - 1]

    def lengths(self, matched: int) -> Iterator[int]:
        """Yields the lengths of all non-empty prefixes of the word that the text ends with, the longest first."""
        while matched:
            yield matched
            matched = self._borders[matched - 1]


@final
class _Words:
    """Tells which of several words the end of a text matches, at the same cost for one word and for many (Aho and Corasick
    1975).

    A place is a number that the caller keeps, so many texts can share the words. It stands for the longest prefix of a word
    that the text ends with; 0 is the place of a text that ends with none. A place is made when a text first comes to it: a
    long word costs nothing before it is matched.
    """

    __slots__ = ("_ahead", "_complete", "_depths", "_shorter")

    def __init__(self, words: Collection[str]) -> None:
        """`words` must not be empty strings."""
        self._depths = [0]
        self._shorter = [0]
        """For each place that of the longest shorter prefix of a word that such a text ends with."""
        self._complete: list[str | None] = [None]
        """For each place the longest word that such a text ends with."""
        self._ahead: list[dict[str, int | list[str]]] = [{}]
        """For each place and next character the place behind it, or the words of one that is not made yet."""
        for word in words:
            self._lead(0, word)

    def _lead(self, place: int, word: str) -> None:
        words = self._ahead[place].setdefault(word[self._depths[place]], [])
        assert isinstance(words, list)
        words.append(word)

    def starts(self, text: str) -> bool:
        """True if a character of the text begins a word."""
        return not self._ahead[0].keys().isdisjoint(text)

    def depth(self, place: int) -> int:
        """The length of the prefix that a place stands for."""
        return self._depths[place]

    def complete(self, place: int) -> str | None:
        """The longest word that a text at this place ends with."""
        return self._complete[place]

    def incomplete(self, place: int) -> int:
        """The place of the longest prefix that is not a whole word, or is more than one."""
        while place and not self._ahead[place]:
            place = self._shorter[place]
        return place

    def step(self, place: int, character: str) -> int:
        """The place behind a character."""
        while (ahead := self._ahead[place].get(character)) is None:
            if not place:
                return 0
            place = self._shorter[place]
        return ahead if isinstance(ahead, int) else self._made(place, character)

    def _made(self, place: int, character: str) -> int:
        """The place behind a character, made with those of all shorter prefixes that are not made yet."""
        made: list[tuple[int, list[str]]] = []
        while True:
            ahead = self._ahead[place].get(character)
            if isinstance(ahead, int):
                shorter = ahead
                break
            if ahead is not None:
                made.append((len(self._depths), ahead))
                self._ahead[place][character] = len(self._depths)
                self._depths.append(self._depths[place] + 1)
                self._ahead.append({})
                self._shorter.append(0)
                self._complete.append(None)
            if not place:
                shorter = 0
                break
            place = self._shorter[place]
        for number, words in reversed(made):
            self._shorter[number], self._complete[number] = shorter, self._complete[shorter]
            for word in words:
                if len(word) == self._depths[number]:
                    self._complete[number] = word
                else:
                    self._lead(number, word)
            shorter = number
        return shorter


@final
class Stops:
    """Watches the text of one sequence for its stop sequences. Models that end their texts themselves can use it; the
    gateway uses it for all others.

    The stop sequence that is complete first ends the text; if several are complete at the same character, the longest one
    does. Unless stop sequences are `included`, the longest end of the text that may begin one is held back until more text
    decides. A text that cannot begin one is never late. `feed` takes the text as it comes; `rest` gives the held-back text
    when no more comes. A character costs one step, however many stop sequences there are and whatever their lengths.
    """

    __slots__ = ("_held", "_included", "_place", "_words", "met")

    def __init__(self, stops: Collection[str], *, included: bool) -> None:
        """`included`: True if the text includes the stop sequence that ends it. ValueError for an empty stop sequence."""
        if not all(stops):
            raise ValueError("a stop sequence must have at least one character")
        self._words = _Words(stops)
        self._place = 0
        self._included = included
        self._held = ""
        self.met: str | None = None
        """The stop sequence that has ended the text; None before."""

    def fork(self) -> Stops:
        """A copy in the same state."""
        copy = object.__new__(Stops)
        copy._words, copy._place, copy._included = self._words, self._place, self._included
        copy._held, copy.met = self._held, self.met
        return copy

    @property
    def held(self) -> int:
        """The number of characters that are held back."""
        return len(self._held)

    def feed(self, text: str, *, ignore: bool = False) -> str:
        """The text that may be shown after this text has come, cut at the end if it ends. With `ignore`, a stop sequence
        that is complete within this text does not count; one that only begins in it may be complete later. Nothing after one
        was met."""
        if self.met is not None:
            return ""
        words, place = self._words, self._place
        if not place and not words.starts(text):
            return text
        whole = self._held + text
        seen = len(self._held)
        step, complete = words.step, words.complete
        for end, character in enumerate(text, seen + 1):
            place = step(place, character)
            if place and (found := complete(place)) is not None:
                if not ignore:
                    self.met, self._held = found, ""
                    return whole[seen:end] if self._included else whole[: end - len(found)]
                place = words.incomplete(place)
        self._place = place
        shown = len(whole) if self._included else len(whole) - words.depth(place)
        self._held = whole[shown:]
        return whole[:shown]

    def rest(self) -> str:
        """The held-back text: no more text comes, so it begins no stop sequence. Text after a call of a tool begins anew."""
        held, self._held, self._place = self._held, "", 0
        return held


Message: TypeAlias = Token | ToolCall | Finish
Last = TypeVar("Last", Token, ToolCall)
Named = TypeVar("Named", Token, Finish)

Held: TypeAlias = tuple[Stops | None, bytes]
"""The state of a sequence's text: that of its stop sequences, and the bytes of an unfinished character."""

_DROPPED_AT_ONCE = 16
"""The most messages that are dropped before other tasks can run, if a model never waits."""


@final
class _Sequence:
    """One continuation of the prompt."""

    __slots__ = ("made", "met", "over", "stops", "unfinished")

    def __init__(self, stops: Stops | None) -> None:
        self.made = 0
        """The tokens that the model has sent for it, dropped ones included."""
        self.over = False
        self.met = False
        """True if a stop sequence has ended it."""
        self.stops = stops
        self.unfinished = b""
        """The first bytes of a character, at most three: the next token may have the others."""

    def decode(self, data: bytes, *, final: bool = False) -> str:
        """The characters that these bytes complete. Bytes that are not UTF-8 become U+FFFD (as the Unicode Standard
        recommends, chapter 3.9), and with `final` an unfinished character too."""
        data = self.unfinished + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self.unfinished = data[used:]
        return text


@final
class Continuations:
    """The sequences of one prompt, from the first message of the model to the end of its call."""

    __slots__ = (
        "_asked", "_at_least", "_dropped", "_included", "_most", "_one_stop", "_open", "_prompt", "_refused", "_refuses",
        "_sequences", "_stops", "complete", "decodes", "judges", "scope", "shows_thinking", "stopped",
    )  # fmt: skip

    def __init__(self, parameters: GenerationParameters, *, own_stops: bool = False) -> None:
        """`own_stops`: True if the model ends its texts at stop sequences itself, so `Token.text` is the text to show. For
        any other model, `Token.data` takes precedence if it is there."""
        self._most, self._asked = parameters.max_new_tokens, parameters.n
        self._stops = () if own_stops else parameters.stop_sequences
        self._included, self._at_least = parameters.include_stop_str_in_output, parameters.min_length
        only = len(parameters.stop_sequences) == 1 and not parameters.stop_token_ids
        self._one_stop = parameters.stop_sequences[0] if only else ""
        self._open = parameters.n  # sequences without an end, including those that have not begun
        self._sequences: dict[int, _Sequence] = {}
        self._prompt: _Sequence | None = None
        """The text of the prompt's tokens, once one has come."""
        self._dropped = self._refused = 0
        self._refuses = False
        self.decodes = not own_stops
        """True if texts are decoded from the bytes of tokens that have them."""
        self.shows_thinking = False
        """True if the answer has a place for thinking: its tokens keep their text."""
        self.judges = parameters.n > 1 or bool(self._stops) or not self._most
        """True if a token needs more than the count of tokens before it: there are several sequences or stop sequences,
        characters are assembled (once a token had bytes), or the text has ended. Once it is True it stays True."""
        self.complete = False
        """True once nothing more that the model sends is part of the answer."""
        self.stopped = False
        """True once the model's call must be cancelled, because the text is complete."""
        self.scope: Any = trio.CancelScope()
        """The scope of the model's call, and of nothing else. On a loop other than Trio's it is any object with a
        `cancel`."""

    def passes(self, message: object) -> bool:
        """True if the message belongs to the answer; False if it is dropped. TypeError if it is not a message of a text
        model. ModelError with status 500 for a sequence that was not requested."""
        if type(message) is not Token and type(message) is not Finish and type(message) is not ToolCall:
            raise TypeError(f"a text call is answered with Token, ToolCall and Finish, not {type(message).__name__}")
        if not self._open or self.stopped:
            if type(message) is not Finish:
                self.stop()
            return False
        if not self._most and not (type(message) is Token and message.prefill):
            if type(message) is not Finish:
                self.stop()
            return False
        number = message.sequence
        sequence = self._sequences.get(number)
        if sequence is None:
            if not 0 <= number < self._asked:
                raise _bad_sequence(number, self._asked)
            return True
        if not sequence.over:
            return True
        if type(message) is Finish or (type(message) is Token and message.prefill):
            return False
        if all(begun.over for begun in self._sequences.values()):
            sequence.made += 1
            # A text that the gateway has cut may run to its own end, because other sequences may begin after it.
            if not sequence.met or sequence.made > self._most:
                self.complete = self._refuses = True
                self._refused += 1
                if self._refused > _DROPPED_AT_ONCE:
                    self.stop()
        return False

    async def around(self, call: Awaitable[None]) -> None:
        """Awaits the model's call inside `scope`. It is over when the model has returned, has raised, or was stopped."""
        scope, task = self.scope, trio.lowlevel.current_task()
        scope.__enter__()
        status = task._cancel_status
        # A model may have left its own scope open, as an abandoned async generator does inside of a timeout. Trio would
        # raise an error when an outer scope is left then. So this scope stays open too, for the owner of the task.
        try:
            await call
        except BaseException as e:
            if task._cancel_status is not status or not scope.__exit__(type(e), e, e.__traceback__):
                raise
        else:
            if task._cancel_status is status:
                scope.__exit__(None, None, None)

    def went_by(self, tokens: int) -> None:
        """Tells that sequence 0, the only one, has `tokens` tokens now. A wire need not call `take` for each token while
        `judges` is False."""
        self._sequences[0].made = tokens

    @property
    def taken(self) -> int:
        """The number of messages that have come from the model, for a look at whether any comes. Those that a wire does not
        pass to `take` are missing, and messages of the prompt's tokens."""
        return self._dropped + sum([sequence.made + sequence.over for sequence in self._sequences.values()])

    async def drop(self) -> None:
        """Drops a message that does not pass. For one turn nothing happens, in which a model that is about to return can do
        that. Then comes a checkpoint, at which a stopped model is cancelled. trio.ClosedResourceError tells the model that
        this sequence is over, if others may still begin: only a model that knows several sequences would begin them."""
        self._dropped += 1
        if not self._dropped % _DROPPED_AT_ONCE:
            await trio.lowlevel.checkpoint()
        if self._refuses:
            self._refuses = False
            raise trio.ClosedResourceError("the sequence is complete")

    def held(self, sequence: int) -> int:
        """The number of held-back characters of a sequence, at most: the next token may show them beside its own."""
        begun = self._sequences.get(sequence)
        if begun is None:
            return 0
        if begun.stops is None:
            return len(begun.unfinished)
        return len(begun.unfinished) + begun.stops.held

    @overload
    def take(self, message: Token) -> Token: ...
    @overload
    def take(self, message: ToolCall) -> ToolCall: ...
    @overload
    def take(self, message: Token | Finish) -> Token | Finish: ...
    @overload
    def take(self, message: Message) -> Message: ...
    def take(self, message: Message) -> Message:
        """The message to write: a token has the text that may be shown, and the reason if it is the last of its sequence.
        Before a Finish or a piece of a call is written, write `rest`. Only for a message that passes."""
        number = message.sequence
        sequence = self._sequences.get(number)
        if sequence is None:
            self.complete = False
            stops = Stops(self._stops, included=self._included) if self._stops else None
            sequence = self._sequences[number] = _Sequence(stops)
        if type(message) is not Token:
            if type(message) is ToolCall:
                sequence.made += message.tokens
                return self._ended(sequence, message)
            self._end(sequence)
            return self._named(message, message.reason)
        if message.prefill or message.thinking:
            return self._take_beside(sequence, message)
        sequence.made += 1
        reason, text, stop = message.finish, message.text, message.stop
        if reason is None and sequence.made >= self._most:
            reason = FinishReason.LENGTH
        if self.decodes and (message.data or sequence.unfinished):
            self.judges = True
            text = sequence.decode(message.data or utf8(text))
            if reason is not None:
                text += sequence.decode(b"", final=True)
        stops = sequence.stops
        if stops is not None:
            text = stops.feed(text, ignore=sequence.made <= self._at_least)
            if stops.met is not None:
                reason, stop, sequence.met = FinishReason.STOP_SEQUENCE, stops.met, True
            elif reason is not None:
                text += stops.rest()
        if text != message.text:  # it is still one token, with the same bytes
            message = structs.replace(message, text=text, data=message.data or utf8(message.text))
        if reason is None:
            return message
        self._end(sequence)
        self.stopped = self.complete and message.finish is None
        if reason is not message.finish or stop != message.stop:
            message = structs.replace(message, finish=reason, stop=stop)
        return self._named(message, reason)

    def _take_beside(self, sequence: _Sequence, message: Token) -> Token:
        """A token that is no part of the answer's text: of the prompt, or of thinking. No stop sequence is met in it."""
        if message.prefill:
            sequence = self._prompt = self._prompt or _Sequence(None)
        else:
            sequence.made += 1
        if self.decodes and (message.data or sequence.unfinished):
            self.judges = True
            data = message.data or utf8(message.text)
            message = structs.replace(message, text=sequence.decode(data), data=data)
        if message.prefill:
            return message
        if not self.shows_thinking:
            message = structs.replace(message, text="", data=b"", special=True)
        return self._ended(sequence, message)

    def _ended(self, sequence: _Sequence, message: Last) -> Last:
        """The message with its reason, if it is the last of its sequence."""
        reason = message.finish
        if reason is None and sequence.made >= self._most:
            reason = FinishReason.LENGTH
        if reason is None:
            return message
        self._end(sequence)
        self.stopped = self.complete and message.finish is None
        return message if reason is message.finish else structs.replace(message, finish=reason)

    def sent(self) -> None:
        """Tells that the taken message is on its way. If it was the last, the model is stopped."""
        if self.stopped:
            self.scope.cancel()

    def held_of(self, sequence: int) -> Held:
        """The held-back text of a sequence, for `undo`."""
        begun = self._sequences.get(sequence)
        if begun is None:
            return None, b""
        return None if begun.stops is None else begun.stops.fork(), begun.unfinished

    def undo(self, taken: Token | ToolCall | Finish, held: Held) -> None:
        """Takes back the last `take`, because the message was not sent. `held` is the result of `held_of` before it. The
        text of a prompt's token is not taken back: those who call this show none."""
        stops, unfinished = held
        sequence = self._sequences[taken.sequence]
        if type(taken) is Finish or taken.finish is not None:
            sequence.over = sequence.met = self.complete = self.stopped = False
            self._open += 1
        if type(taken) is ToolCall:
            sequence.made -= taken.tokens
        elif type(taken) is Token and not taken.prefill:
            sequence.made -= 1
        if stops is None and self._stops:
            stops = Stops(self._stops, included=self._included)
        sequence.stops, sequence.unfinished = stops, unfinished

    def rest(self, sequence: int) -> str:
        """The held-back text of a sequence that the model has ended."""
        begun = self._sequences.get(sequence)
        if begun is None:
            return ""
        text = begun.decode(b"", final=True) if begun.unfinished and not begun.met else ""
        return text if begun.stops is None else begun.stops.feed(text) + begun.stops.rest()

    def rests(self) -> Iterator[tuple[int, str]]:
        """Yields each sequence with held-back text, and its `rest`, once the model's call is over."""
        for number in sorted(self._sequences):
            if text := self.rest(number):
                yield number, text

    def cut(self, number: int) -> None:
        """Ends a sequence that the wire has ended by itself. If it was the last, the model is stopped."""
        self._end(self._sequences[number])
        if self.complete:
            self.stop()

    def stop(self) -> None:
        """Completes the answer, and cancels the model's call."""
        self.complete = self.stopped = self.judges = True
        self.scope.cancel()

    def _end(self, sequence: _Sequence) -> None:
        sequence.over = True
        self._open -= 1
        self.complete = not self._open
        self.judges |= self.complete

    def _named(self, message: Named, reason: FinishReason) -> Named:
        """The message with the stop sequence that ended the text, if the model left it out and only one is possible."""
        if reason is FinishReason.STOP_SEQUENCE and not message.stop and self._one_stop:
            return structs.replace(message, stop=self._one_stop)
        return message


class TextChannel(Channel[Prompt, Any], Protocol):
    """The channel below a text model's session, on every wire."""

    text: Continuations
    """The continuations of its prompt."""


@overload
def spoken(message: ToolCall) -> Token: ...
@overload
def spoken(message: Token | ToolCall | Finish) -> Token | Finish: ...
def spoken(message: Token | ToolCall | Finish) -> Token | Finish:
    """The message for an answer that has no place for calls of tools: what the model generated for a piece, as a token.
    ModelError with status 500 for a piece without that text."""
    if type(message) is not ToolCall:
        return message
    if not message.text and message.tokens:
        raise ModelError(
            "the model sent a piece of a tool call without its text, and this answer has no other place for it",
            code="UnexpectedToolCall",
            status=500,
        )
    return Token(
        text=message.text if message.tokens else "",
        special=not message.text,
        finish=message.finish,
        sequence=message.sequence,
        prompt_tokens=message.prompt_tokens,
    )


def _bad_sequence(number: int, asked: int) -> ModelError:
    return ModelError(
        f"the model sent a token of sequence {number}, where 0 to {asked - 1} were asked for",
        code="BadSequence",
        status=500,
    )
