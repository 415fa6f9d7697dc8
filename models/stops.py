"""Stop sequences: end a text at the first one that is complete, at any cut into tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import final

from models.library.lm_matching import Matcher


@final
class Stops:
    """Watches the text of one sequence for its stop sequences, for models that end their texts themselves; the gateway uses
    the same for those that do not.

    The stop sequence that is complete first ends the text, and of several that are complete at the same character the
    longest. If it is not `included`, the longest end of the text that may be the beginning of one is held back until
    more text decides; a text that can begin none is never late. `feed` takes the text as it comes, `rest` gives what is
    held when there is no more. A character costs a step for each stop sequence, whatever their lengths.
    """

    __slots__ = ("_firsts", "_held", "_included", "_longest", "_matched", "_matchers", "_stops", "met")

    def __init__(self, stops: Collection[str], *, included: bool) -> None:
        """`included`: the text has the stop sequence that ends it. ValueError for an empty one."""
        if not all(stops):
            raise ValueError("a stop sequence must have at least one character")
        self._stops = tuple(stops)
        self._matchers = [Matcher(stop) for stop in stops]
        self._matched = [0] * len(stops)
        self._longest = 0  # the longest beginning of one that the text ends with
        self._firsts = frozenset([stop[0] for stop in stops])
        self._included = included
        self._held = ""
        self.met: str | None = None
        """The stop sequence that has ended the text; None while none has."""

    def fork(self) -> Stops:
        """A copy that has come as far as this."""
        copy = object.__new__(Stops)
        copy._stops, copy._matchers, copy._matched = self._stops, self._matchers, self._matched.copy()
        copy._firsts, copy._included = self._firsts, self._included
        copy._longest, copy._held, copy.met = self._longest, self._held, self.met
        return copy

    @property
    def held(self) -> int:
        """The number of characters that are held back."""
        return len(self._held)

    def feed(self, text: str, *, ignore: bool = False) -> str:
        """The text that may be shown now that this has come: of one that ends, no more than to its end. `ignore`: a stop
        sequence that is complete within this text is not met; one that only begins there may be met later. Nothing after
        one was met."""
        if self.met is not None:
            return ""
        if not self._longest and self._firsts.isdisjoint(text):
            return text
        whole = self._held + text
        seen = len(self._held)
        for position in range(seen, len(whole)):
            found = self._step(whole[position])
            if found is not None and not ignore:
                self.met, self._held = found, ""
                end = position + 1
                return whole[seen:end] if self._included else whole[: end - len(found)]
        self._longest = max(self._matched, default=0)
        shown = len(whole) if self._included else len(whole) - self._longest
        self._held = whole[shown:]
        return whole[:shown]

    def rest(self) -> str:
        """The text that was held back: it begins no stop sequence, as there is no more text."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """The longest stop sequence that this character completes."""
        found: str | None = None
        matched = self._matched
        for index, matcher in enumerate(self._matchers):
            length = matcher.step(matched[index], character)
            if length == len(matcher.word):
                if found is None or length > len(found):
                    found = self._stops[index]
                length = matcher.shorter(length)
            matched[index] = length
        return found
