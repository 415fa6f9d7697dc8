"""What is told of a sequence as its tokens come: the text of each, where it ends and why, the most probable in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from models.library.lm_matching import Matcher
from models.library.lm_sampling import Floats, best
from models.library.lm_tokenizer import EOS, TextStream, Tokenizer
from models.messages import FinishReason, GenerationParameters, TopToken

EOS_TEXT = "<eos>"
"""What the end of sequence looks like where special tokens are not skipped."""


def top_tokens(tokenizer: Tokenizer, log_probs: Floats, count: int, *, skip_special: bool = True) -> tuple[TopToken, ...]:
    """The most probable tokens, each with the text that it has alone."""
    if not count:
        return ()
    return tuple(
        TopToken(
            text=EOS_TEXT if token == EOS and not skip_special else tokenizer.decode((token,)),
            id=token,
            log_prob=float(log_probs[token]),
            special=token == EOS,
        )
        for token in best(log_probs, count).tolist()
    )


@final
class Output:
    """What each token adds to the text, in the order that they are generated.

    Without `include_stop_str_in_output` text that may be the beginning of a stop sequence is held back until it is
    known not to be one: it comes with a later token, at the latest with the last.
    """

    __slots__ = ("_begun", "_number", "_parameters", "_stop_ids", "_stops", "_text")

    def __init__(self, tokenizer: Tokenizer, parameters: GenerationParameters) -> None:
        self._parameters = parameters
        self._stop_ids = frozenset(parameters.stop_token_ids)
        self._text = TextStream(tokenizer)
        self._stops: Stops | None = None
        if parameters.stop_sequences:
            self._stops = Stops(parameters.stop_sequences, hold=not parameters.include_stop_str_in_output)
        self._number = 0
        self._begun = False

    def fork(self) -> Output:
        """Another output that has come as far as this one."""
        copy = object.__new__(Output)
        copy._parameters, copy._stop_ids = self._parameters, self._stop_ids
        copy._text = self._text.fork()
        copy._stops = None if self._stops is None else self._stops.fork()
        copy._number, copy._begun = self._number, self._begun
        return copy

    def add(self, token: int) -> tuple[str, FinishReason | None]:
        """What the token adds to the text that may be shown, and why it is the last, if it is."""
        self._number += 1
        if token == EOS:
            added = self._released("", last=True)
            return added + self._eos_text(), FinishReason.EOS_TOKEN
        if token in self._stop_ids:
            shown = self._text.feed(token) if self._parameters.include_stop_str_in_output else ""
            return self._released(shown, last=True), FinishReason.STOP_SEQUENCE
        last = self._number == self._parameters.max_new_tokens
        added = self._text.feed(token)
        if last or self._stops is not None:
            added = self._released(added, last)
            if self._stops is not None and self._stops.met:
                return added, FinishReason.STOP_SEQUENCE
        if added:
            self._begun = True
        return added, FinishReason.LENGTH if last else None

    def _released(self, added: str, last: bool) -> str:
        if last:
            added += self._text.rest()
        if self._stops is not None:
            added = self._stops.feed(added)
            if last:
                added += self._stops.rest()
        self._begun = self._begun or bool(added)
        return added

    def _eos_text(self) -> str:
        if self._parameters.skip_special_tokens:
            return ""
        return " " + EOS_TEXT if self._begun and self._parameters.spaces_between_special_tokens else EOS_TEXT


@final
class Stops:
    """Watches a text for the stop sequence that is complete first, and of those complete at once for the longest, so
    that it does not matter how the text is cut into tokens."""

    __slots__ = ("_held", "_hold", "_matched", "_matchers", "met")

    def __init__(self, stops: Sequence[str], *, hold: bool) -> None:
        """`hold`: a stop is no part of the text, so what may become one is held back."""
        self._matchers = [Matcher(stop) for stop in stops]
        self._matched = [0] * len(stops)
        self._hold = hold
        self._held = ""
        self.met = False
        """Whether the text has ended by a stop."""

    def fork(self) -> Stops:
        copy = object.__new__(Stops)
        copy._matchers, copy._matched = self._matchers, self._matched.copy()
        copy._hold, copy._held, copy.met = self._hold, self._held, self.met
        return copy

    def feed(self, added: str) -> str:
        """What may be shown now; of a text that ends by a stop, no more than up to it."""
        text = self._held + added
        seen = len(self._held)
        for position in range(seen, len(text)):
            if met := self._step(text[position]):
                self.met, self._held = True, ""
                end = position + 1
                return text[: end - met] if self._hold else text[seen:end]
        shown = len(text) - max(self._matched) if self._hold else len(text)
        self._held = text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """What was held back: no stop, as there is no more text."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> int:
        """The length of the stop that this character completes, 0 if it completes none."""
        met = 0
        for index, matcher in enumerate(self._matchers):
            matched = self._matched[index] = matcher.step(self._matched[index], character)
            if matched == len(matcher.word) > met:
                met = matched
        return met
