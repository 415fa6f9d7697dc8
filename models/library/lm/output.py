"""The output of a sequence as its tokens come: the text of each, the end and its reason, and the most probable tokens."""

from __future__ import annotations

from typing import final

from models.continuations import Stops
from models.library.lm.sampling import Floats, best
from models.library.lm.tokenizer import EOS, TextStream, Tokenizer
from models.messages import FinishReason, GenerationParameters, TopToken

EOS_TEXT = "<eos>"
"""The text of the end-of-sequence token, if special tokens are not skipped."""


def top_tokens(tokenizer: Tokenizer, log_probs: Floats, count: int, *, skip_special: bool = True) -> tuple[TopToken, ...]:
    """The most probable tokens, each with its text when decoded alone."""
    if not count:
        return ()
    return tuple(
        TopToken(
            text=EOS_TEXT if token == EOS and not skip_special else tokenizer.decode((token,)),
            id=token,
            log_prob=float(log_probs[token]),
            special=token == EOS,
            data=tokenizer.bytes_of(token),
        )
        for token in best(log_probs, count).tolist()
    )


@final
class Output:
    """Computes what each token adds to the text, in the order in which tokens are generated.

    Without `include_stop_str_in_output`, text that may begin a stop sequence is held back until it is known not to: it comes
    with a later token, at the latest with the last.
    """

    __slots__ = ("_begun", "_number", "_parameters", "_stop_ids", "_stops", "_text")

    def __init__(self, tokenizer: Tokenizer, parameters: GenerationParameters) -> None:
        self._parameters = parameters
        self._stop_ids = frozenset(parameters.stop_token_ids)
        self._text = TextStream(tokenizer)
        self._stops: Stops | None = None
        if parameters.stop_sequences:
            self._stops = Stops(parameters.stop_sequences, included=parameters.include_stop_str_in_output)
        self._number = 0
        self._begun = False

    def fork(self) -> Output:
        """A copy in the same state."""
        copy = object.__new__(Output)
        copy._parameters, copy._stop_ids = self._parameters, self._stop_ids
        copy._text = self._text.fork()
        copy._stops = None if self._stops is None else self._stops.fork()
        copy._number, copy._begun = self._number, self._begun
        return copy

    @property
    def stop(self) -> str:
        """The stop sequence that has ended the text; empty before."""
        return "" if self._stops is None else self._stops.met or ""

    def add(self, token: int) -> tuple[str, FinishReason | None]:
        """The text that the token adds and that may be shown, and the reason if it is the last token."""
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
            if self._stops is not None and self._stops.met is not None:
                return added, FinishReason.STOP_SEQUENCE
        if added:
            self._begun = True
        return added, FinishReason.LENGTH if last else None

    def _released(self, added: str, last: bool) -> str:
        if last:
            added += self._text.rest()
        if self._stops is not None:
            added = self._stops.feed(added, ignore=self._number <= self._parameters.min_length)
            if last:
                added += self._stops.rest()
        self._begun = self._begun or bool(added)
        return added

    def _eos_text(self) -> str:
        if self._parameters.skip_special_tokens:
            return ""
        return " " + EOS_TEXT if self._begun and self._parameters.spaces_between_special_tokens else EOS_TEXT
