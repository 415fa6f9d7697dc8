"""Finds a word in what comes item by item: characters of a text, or its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final


@final
class Matcher:
    """Tells how much of a word the end of a text is (Knuth, Morris and Pratt 1977).

    What is matched so far is a number that the caller keeps, so that many texts can share a matcher. Its table grows
    with what was ever matched: a long word costs nothing before.
    """

    __slots__ = ("_borders", "word")

    def __init__(self, word: Sequence[object]) -> None:
        """`word` is not empty."""
        self.word = word
        # For each length from 1: that of the longest shorter beginning of the word which it also ends with.
        self._borders = [0]

    def step(self, matched: int, item: object) -> int:
        """The length of the longest beginning of the word that the text ends with after this item, where it was
        `matched` before, less than the whole word."""
        word, borders = self.word, self._borders
        while word[matched] != item:
            if not matched:
                return 0
            matched = borders[matched - 1]
        if matched == len(borders):
            borders.append(self.step(borders[-1], item))
        return matched + 1

    def shorter(self, matched: int) -> int:
        """The length of the longest shorter beginning of the word that the text ends with too, where it ends with one of
        `matched`, at least 1."""
        return self._borders[matched - 1]

    def lengths(self, matched: int) -> Iterator[int]:
        """The lengths of all beginnings of the word, but the empty one, that the text ends with, the longest first."""
        while matched:
            yield matched
            matched = self._borders[matched - 1]
