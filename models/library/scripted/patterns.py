"""Makes texts that match regular expressions, by a bounded search over their automata.

An expression comes from a client, and Python's own matching may take exponential time. So it is only parsed here, never run.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias, final

MAX_STATES: Final = 4_000
MAX_TEXT: Final = 10_000
"""The most characters of a text that is made."""
_OPTIONAL_CHARACTERS = 256
_OPTIONAL_GROUPS = 8

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""A set of characters: the first and the last of each range, in order."""

# The parser of the expressions of `re`: it has no public name.
_parser: Any = importlib.import_module("re._parser")

_LAST = 0x10FFFF
_FULL: Ranges = ((0, _LAST),)
_CATEGORIES: dict[str, Ranges] = {
    "DIGIT": ((48, 57),),
    "SPACE": ((9, 13), (32, 32)),
    "WORD": ((48, 57), (65, 90), (95, 95), (97, 122)),
}
# The order in which a character is chosen from a set; surrogates are no characters.
_PREFERRED = ((97, 122), (65, 90), (48, 57), (32, 32), (33, 126), (161, 0xD7FF), (0xE000, _LAST), (0, 0x9F))
_EDGE, _WORD, _OTHER = range(3)
"""The kinds of what is before or after a place in a text: its edge, a letter of a word, another character."""


@final
class CannotMake(Exception):
    """There is no such text or document, or it was not found within the limits. Its text says why, and names the keyword."""


@final
class Work:
    """Counts the steps of a search. CannotMake if there are more than `limit`."""

    __slots__ = ("left", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = self.left = limit

    def spend(self, steps: int = 1) -> None:
        self.left -= steps
        if self.left < 0:
            raise CannotMake(f"it takes more than {self.limit} steps")


@final
class Automaton:
    """The automaton of an expression. `within`: True if a text matches that has a match anywhere in it, as for the keyword
    `pattern`; False if all of it must match. CannotMake for an invalid expression, one with more than `MAX_STATES` states,
    and what no automaton does, such as back references and looks ahead."""

    def __init__(self, pattern: str, *, within: bool = False) -> None:
        self._pattern = pattern
        self._moves: list[list[tuple[Ranges, int]]] = []
        self._empty: list[list[tuple[str, int]]] = []
        """For each state, those that follow without a character, under a condition; "" is none."""
        self._closures: dict[tuple[int, int, int], frozenset[int]] = {}
        self._exact = math.inf
        """The length of the longest text about which it is always right: repetitions with a high bound are shortened."""
        self.has_words = False
        """True if it asks for the boundaries of words."""
        if len(pattern) > MAX_TEXT:
            raise self._refused(f"it has more than {MAX_TEXT} characters")
        try:
            parsed = _parser.parse(pattern)
            start = at = self._state()
            if within:
                self._moves[start].append((_FULL, start))
            self._end = self._sequence(parsed, at, parsed.state.flags)
        except (re.error, RecursionError, OverflowError, ValueError, Warning) as e:
            raise self._refused(str(e)[:100] or type(e).__name__) from None
        if within:
            self._moves[self._end].append((_FULL, self._end))

    def _refused(self, why: str) -> CannotMake:
        return CannotMake(f"{self._pattern[:60]!r}: {why}")

    def _state(self) -> int:
        if len(self._moves) == MAX_STATES:
            raise self._refused(f"it has more than {MAX_STATES} states")
        self._moves.append([])
        self._empty.append([])
        return len(self._moves) - 1

    def _skip(self, at: int, to: int, condition: str = "") -> None:
        self._empty[at].append((condition, to))

    def _sequence(self, items: Any, at: int, flags: int) -> int:
        for op, argument in items:
            at = self._item(str(op), argument, at, flags)
        return at

    def _item(self, op: str, argument: Any, at: int, flags: int) -> int:
        """Adds an item of the parsed expression behind a state. Returns the state behind it."""
        if flags & (re.MULTILINE | re.LOCALE):
            raise self._refused("the flags m and L are not supported")
        match op:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                after = self._state()
                self._moves[at].append((_characters(op, argument, flags), after))
                return after
            case "BRANCH":
                after = self._state()
                for branch in argument[1]:
                    self._skip(self._sequence(branch, at, flags), after)
                return after
            case "SUBPATTERN":
                _, added, removed, inner = argument
                return self._sequence(inner, at, (flags | added) & ~removed)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = argument
                return self._repeat(least, most, inner, at, flags)
            case "AT" if (condition := str(argument).removeprefix("AT_").removesuffix("_STRING")) in _CONDITIONS:
                self.has_words |= "BOUNDARY" in condition
                after = self._state()
                self._skip(at, after, condition)
                return after
        raise self._refused(f"{op.lower().replace('_', ' ')} is not supported")

    def _repeat(self, least: int, most: int, inner: Any, at: int, flags: int) -> int:
        for _ in range(least):
            at = self._fresh(inner, at, flags)
        if most is _parser.MAXREPEAT:
            hub = self._state()
            self._skip(at, hub)
            self._skip(self._fresh(inner, hub, flags), hub)
            return hub
        one = len(inner) == 1 and str(inner[0][0]) in ("LITERAL", "NOT_LITERAL", "ANY", "IN")
        optional = min(most - least, _OPTIONAL_CHARACTERS if one else _OPTIONAL_GROUPS)
        if optional < most - least:
            self._exact = min(self._exact, optional)
        after = self._state()
        for _ in range(optional):
            self._skip(at, after)
            at = self._fresh(inner, at, flags)
        self._skip(at, after)
        return after

    def _fresh(self, inner: Any, at: int, flags: int) -> int:
        """Adds a copy that begins with a state of its own, to which no other copy returns."""
        begin = self._state()
        self._skip(at, begin)
        return self._sequence(inner, begin, flags)

    def _closure(self, state: int, before: int, after: int, work: Work) -> frozenset[int]:
        """The states that are reached without a character, in a place between two of these kinds."""
        key = state, before, after
        if (found := self._closures.get(key)) is None:
            reached, todo = {state}, [state]
            for at in todo:
                work.spend()
                for condition, to in self._empty[at]:
                    if to not in reached and _CONDITIONS[condition](before, after):
                        reached.add(to)
                        todo.append(to)
            found = self._closures[key] = frozenset(reached)
        return found

    def accepts(self, state: int, before: int, work: Work) -> bool:
        """True if a text may end in this state."""
        return self._end in self._closure(state, before, _EDGE, work)

    def moves(self, state: int, before: int, kind: int, work: Work) -> Iterator[tuple[Ranges, int]]:
        """Yields the characters that may come next, each set with the state behind it. `kind` is that of the character."""
        closure = self._closure(state, before, kind, work)
        work.spend(len(closure))
        for at in sorted(closure):
            yield from self._moves[at]

    def matches(self, text: str, work: Work) -> bool:
        """True if the text matches. CannotMake if a shortened repetition leaves that open."""
        states, before = {0}, _EDGE
        for character in text:
            code = ord(character)
            kind = _kind(code)
            states = {
                to
                for state in states
                for ranges, to in self.moves(state, before, kind, work)
                if any(first <= code <= last for first, last in ranges)
            }
            before = kind
        found = any(self.accepts(state, before, work) for state in states)
        if not found and len(text) > self._exact:
            raise self._refused("its repetitions are too long")
        return found


def text_of(automata: Sequence[Automaton], shortest: int, longest: float, work: Work) -> str | None:
    """The first of the shortest texts that all the automata accept, of at least and at most so many characters. None if
    there is none of up to `MAX_TEXT`."""
    if shortest > MAX_TEXT:
        return None
    kinds = (_WORD, _OTHER) if any(automaton.has_words for automaton in automata) else (_OTHER,)
    start = tuple([0] * len(automata)), _EDGE
    layers: list[dict[Any, Any]] = [{start: None}]
    seen: set[Any] = set()
    while layers[-1]:
        length = len(layers) - 1
        if length >= shortest:
            seen.update(layers[-1])
            for states, before in layers[-1]:
                if all(one.accepts(state, before, work) for one, state in zip(automata, states, strict=True)):
                    return _spelled(layers, (states, before))
        if length >= min(longest, MAX_TEXT):
            return None
        ahead: dict[Any, Any] = {}
        for node in layers[-1]:
            for kind in kinds:
                for ranges, states in _together(automata, node, kind, len(kinds) == 2, work):
                    there = states, kind
                    if there not in ahead and there not in seen:
                        ahead[there] = node, _chosen(ranges)
        layers.append(ahead)
    return None


def _together(
    automata: Sequence[Automaton], node: tuple[tuple[int, ...], int], kind: int, divided: bool, work: Work
) -> list[tuple[Ranges, tuple[int, ...]]]:
    """The characters that may come next in all automata, each set with the states behind it."""
    states, before = node
    allowed = _FULL
    if divided:
        allowed = _CATEGORIES["WORD"] if kind == _WORD else _without(_CATEGORIES["WORD"])
    found: list[tuple[Ranges, tuple[int, ...]]] = [(allowed, ())]
    for automaton, state in zip(automata, states, strict=True):
        moves = list(automaton.moves(state, before, kind, work))
        work.spend(len(moves) * len(found))
        found = [(both, (*path, to)) for ranges, path in found for more, to in moves if (both := _common(ranges, more))]
    return [(ranges, path) for ranges, path in found if _chosen(ranges)]


def _spelled(layers: list[dict[Any, Any]], node: Any) -> str:
    characters = []
    for layer in reversed(layers[1:]):
        node, character = layer[node]
        characters.append(character)
    return "".join(reversed(characters))


_CONDITIONS: dict[str, Any] = {
    "": lambda before, after: True,
    "BEGINNING": lambda before, after: before == _EDGE,
    "END": lambda before, after: after == _EDGE,
    "BOUNDARY": lambda before, after: (before == _WORD) != (after == _WORD),
    # implementations differ about the empty text
    "NON_BOUNDARY": lambda before, after: (before == _WORD) == (after == _WORD) and (before, after) != (_EDGE, _EDGE),
}


def _kind(code: int) -> int:
    return _WORD if any(first <= code <= last for first, last in _CATEGORIES["WORD"]) else _OTHER


def _characters(op: str, argument: Any, flags: int) -> Ranges:
    match op:
        case "ANY":
            return _FULL if flags & re.DOTALL else _without(((10, 10),))
        case "LITERAL":
            return _folded([(argument, argument)], flags)
        case "NOT_LITERAL":
            return _without(_folded([(argument, argument)], flags))
    negated, ranges = False, list[tuple[int, int]]()
    for inner, value in argument:
        match str(inner):
            case "NEGATE":
                negated = True
            case "LITERAL":
                ranges.append((value, value))
            case "RANGE":
                ranges.append(value)
            case _:
                name = str(value).removeprefix("CATEGORY_")
                some = _CATEGORIES[name.removeprefix("NOT_")]
                ranges += _without(some) if name.startswith("NOT_") else some
    found = _folded(ranges, flags)
    return _without(found) if negated else found


def _folded(ranges: Iterable[tuple[int, int]], flags: int) -> Ranges:
    """The set of some ranges, with the other case of its letters (of ASCII) if the expression ignores case."""
    found = list(ranges)
    if flags & re.IGNORECASE:
        for letters, distance in (((65, 90), 32), ((97, 122), -32)):
            found += [(a + distance, b + distance) for a, b in _common(_joined(found), (letters,))]
    return _joined(found)


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


def _without(ranges: Ranges) -> Ranges:
    """All other characters."""
    edges = [-1, *[edge for first, last in ranges for edge in (first, last)], _LAST + 1]
    return tuple([(a + 1, b - 1) for a, b in zip(edges[::2], edges[1::2], strict=True) if a + 1 < b])


def _common(one: Ranges, other: Ranges) -> Ranges:
    if one is _FULL or other is _FULL:
        return other if one is _FULL else one
    both = [(max(a, c), min(b, d)) for a, b in one for c, d in other]
    return tuple(sorted([(a, b) for a, b in both if a <= b]))


def _chosen(ranges: Ranges) -> str:
    """The character to write for a set; empty if it has none but surrogates."""
    return next((chr(found[0][0]) for some in _PREFERRED if (found := _common(ranges, (some,)))), "")
