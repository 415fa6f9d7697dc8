"""Reading JSON that strangers wrote: RFC 8259, UTF-8 alone, with bounds on depth, values and numbers and one error type."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, final

import msgspec
import numpy as np
import orjson

from protocols.events import Buffer
from protocols.json_text import (
    MAX_NUMBER,
    STEP,
    Marks,
    Text,
    census_of,
    close_census_of,
    count,
    deeper_than,
    has_long_number,
    has_run,
    inside_strings,
    may_hold_long_number,
    outside_strings,
)

CONTAINERS: Final = 100_000
"""Arrays and objects that a text may have where nobody says otherwise: each takes some 80 or 200 bytes of memory."""
VALUES: Final = 1_000_000
"""Commas and opening brackets that it may have outside of its strings: so many values are there at most."""

BOM: Final = b"\xef\xbb\xbf"
"""The byte order mark in UTF-8, which is skipped at the begin of a text."""
_BEYOND_64_BITS = 19  # digits: may be
_PAIR_SIGNS = (b'":', b" :", b"\t:", b"\n:", b"\r:")
_SHORT = 2**10  # bytes that may all be floats of the kind of which the decoder takes 8 us each, as for 1e300
_ALWAYS_AT_ONCE = 2**18  # bytes: below, no text holds the interpreter for long
_AT_ONCE = 2**24  # bytes of a text of long strings
_MARKS_AT_ONCE = 2**16  # brackets and commas in what is decoded at once: some milliseconds
_COMMA, _SQUARE, _CURLY = b",[{"
_CLOSING = {_SQUARE: ord("]"), _CURLY: ord("}")}
_SPACE = re.compile(rb"[ \t\n\r]*+")
_BYTE = re.compile(r"\(byte (\d+)\)$")
_PATH = re.compile(r" - at `[^`]*`$")
_BEHIND = "trailing characters"


def _float(text: str) -> float:
    value = float(text)
    if value - value:  # not 0, but NaN
        raise ValueError("Number out of range")
    return value


_DECODER = msgspec.json.Decoder()
_STEADY = msgspec.json.Decoder(float_hook=_float)  # slower for most floats, and never slow
_SHALLOW = msgspec.json.Decoder(float_hook=str)


@final
class JSONError(Exception):
    """The text is not JSON, or goes beyond a bound. `message` is fit for the peer: it echoes at most a shortened key."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def loads(
    data: Buffer,
    *,
    depth: int = 64,
    what: str = "body",
    allow_nonfinite: bool = False,
    duplicates: bool = True,
    floats: bool = True,
    containers: int = CONTAINERS,
    values: int = VALUES,
    float_hook: Callable[[str], Any] | None = None,
) -> Any:  # a JSON value: the caller looks at its type
    """The value of a JSON text. Integers are exact, other numbers the nearest double; a byte order mark is skipped.

    JSONError, which begins with `what`, for anything but one JSON text in UTF-8, for arrays and objects nested deeper
    than `depth`, for more than `containers` of them or more than `values` values, for a number of more than 400 characters
    or beyond the range of a double, and for an escaped surrogate without its pair. `NaN`, `Infinity` and `-Infinity`, which
    RFC 8259 does not know, are read only with `allow_nonfinite`. With `duplicates` the last of several equal keys of an
    object wins; without, they are an error. Without `floats` numbers that are no integers are left as text, of whatever
    range; `float_hook` makes something else of that text.

    The text is copied once if it is a memoryview. What it costs beyond its values (`json_text.Census.cost`) is a few passes
    at memory speed and, where it looks suspicious, some times its length of memory while they last, but no more than 16 MiB.
    A long text is read in steps of some milliseconds, between which other threads have their turn.
    """
    text = bytes(data) if isinstance(data, memoryview) else data
    if text.startswith(BOM):
        text = text[len(BOM) :]
    _check_bounds(text, depth, what, containers, values)
    if float_hook is None:
        if len(text) <= _SHORT and floats:
            try:
                value = _DECODER.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass  # the reader has the words
            else:
                if duplicates or not _may_repeat_keys(text, value):
                    return value
        read = _reader(what, allow_nonfinite, duplicates, floats)
    else:
        read = _Reader(what, allow_nonfinite, duplicates, float_hook)
    if len(text) > _ALWAYS_AT_ONCE and (
        len(text) > (STEP if allow_nonfinite or not duplicates else _AT_ONCE) or census_of(text).values > _MARKS_AT_ONCE
    ):
        return _Pieces(text, read).value()
    return read.value(text)


def cost_of(data: Buffer, *, containers: int = CONTAINERS, values: int = VALUES) -> int:
    """The bytes of memory that the values of a text take once `loads` has read it, beside the texts of its strings. 0 for
    one that it refuses for its `containers` or `values`: then nothing is made of it."""
    census = census_of(data)
    if census.cost > len(data):  # strings may have the most of it
        census = close_census_of(data, containers, values)
        if census.containers > containers or census.values > values:
            return 0
    return census.cost


def is_plain(text: bytes, pairs: int) -> bool:
    """Whether a JSON text, which a typed decoder has read, is seen at a glance to have no number of more than 400
    characters and no more members in its objects than the `pairs` that were found: then no member was there twice.
    False where that is not certain."""
    if len(text) > MAX_NUMBER and may_hold_long_number(text):
        return False
    return count(text, b":") == pairs or sum(map(text.count, _PAIR_SIGNS)) == pairs


def _check_bounds(text: Text, depth: int, what: str, containers: int, values: int) -> None:
    # The raw text can only overstate: strings are taken out where it speaks against the peer.
    short = len(text) <= _SHORT
    brackets = text.count(b"[") + text.count(b"{") if short else count(text, b"[") + count(text, b"{")
    if brackets > containers or (len(text) > values and brackets + count(text, b",") > values):
        _check_counts(text, what, containers, values)
    if brackets > depth and deeper_than(text, depth):
        raise JSONError(f"{what} is nested deeper than {depth} arrays and objects")
    if len(text) > MAX_NUMBER and may_hold_long_number(text) and has_long_number(text):
        raise JSONError(f"{what} holds a number of more than {MAX_NUMBER} characters")


def _check_counts(text: Text, what: str, containers: int, values: int) -> None:
    census = close_census_of(text, containers, values)
    if census.containers > containers:
        raise JSONError(f"{what} has more than {containers} arrays and objects (limits.json_containers)")
    if census.values > values:
        raise JSONError(f"{what} has more than {values} values (limits.json_values)")


@final
class _Reader:
    """Reads a text at once."""

    __slots__ = ("_decoder", "_hook", "_nonfinite", "duplicates", "what")

    def __init__(self, what: str, nonfinite: bool, duplicates: bool, hook: Callable[[str], Any] | None) -> None:
        self.what, self._nonfinite, self.duplicates, self._hook = what, nonfinite, duplicates, hook
        self._decoder = None if hook is None else _SHALLOW if hook is str else msgspec.json.Decoder(float_hook=hook)

    def value(self, text: Text) -> Any:
        """The value of the whole text. JSONError."""
        value = self.decoded(text)
        if not self.duplicates and _may_repeat_keys(text, value):
            _check_keys(text, self.what)
        return value

    def decoded(self, text: Text) -> Any:
        """The value, whatever is in it twice. JSONError."""
        if self._decoder is not None:
            return self._decode(text, self._decoder)
        if len(text) <= _SHORT:
            return self._decode(text, _DECODER)
        if not has_run(text, _BEYOND_64_BITS, digits=True):  # orjson would make a double of such an integer
            try:
                return orjson.loads(text)
            except orjson.JSONDecodeError:
                pass  # msgspec has the better words
        return self._decode(text, _STEADY)

    def _decode(self, text: Text, decoder: msgspec.json.Decoder[Any]) -> Any:
        what = self.what
        try:
            return decoder.decode(text)
        except UnicodeDecodeError:
            raise JSONError(f"{what} is not UTF-8") from None
        except RecursionError:
            raise JSONError(f"{what} is nested too deep to be read") from None
        except msgspec.DecodeError as error:
            if self._nonfinite and (b"NaN" in text or b"Infinity" in text):
                return self._decode_nonfinite(text)
            raise JSONError(f"{what} is {_reason(text, error)}") from None

    def _decode_nonfinite(self, text: Text) -> Any:
        """The standard library reads the three literals, but also what is refused here. So the same text with a number of
        their length in their place must be good first; the spaces keep it from growing together with what stands beside."""
        plain = text.replace(b"-Infinity", b"    0    ").replace(b"Infinity", b"   0    ").replace(b"NaN", b" 0 ")
        plain = np.where(inside_strings(text), np.frombuffer(text, np.uint8), np.frombuffer(plain, np.uint8)).tobytes()
        try:
            orjson.loads(plain)
        except orjson.JSONDecodeError:  # also for integers beyond a double, which are good
            _Reader(self.what, False, True, None)._decode(plain, _STEADY)
        return json.loads(text.decode(), parse_float=self._hook)


@lru_cache(maxsize=32)
def _reader(what: str, nonfinite: bool, duplicates: bool, floats: bool) -> _Reader:
    return _Reader(what, nonfinite, duplicates, None if floats else str)


def _reason(text: Text, error: msgspec.DecodeError) -> str:
    return f"not JSON: {error}" if text.strip() else "empty where JSON was expected"


@final
class _Pieces:
    """Reads a long text piece by piece: the children of its arrays and objects in groups, and those that are too large for
    one by their own children. The value, and the place of a mistake, are those of the text as a whole."""

    __slots__ = ("_marks", "_read", "_text", "_twice")

    def __init__(self, text: Text, read: _Reader) -> None:
        self._text, self._read = text, read
        self._marks = Marks(text)
        self._twice = ""  # of a member that is there twice, which is said of what is JSON

    def value(self) -> Any:
        """The value of the text. JSONError."""
        try:
            value = self._value(0, len(self._text), 0, len(self._marks.at), _BEHIND)
        except RecursionError:
            raise JSONError(f"{self._read.what} is nested too deep to be read") from None
        if self._twice:
            raise JSONError(self._twice)
        return value

    def _value(self, start: int, end: int, low: int, high: int, expected: str) -> Any:
        """The value between two places of the text, around which is white space, with the marks from `low` to `high`.
        `expected` is what a mistake behind it is called."""
        marks = self._marks
        begin = self._space(start, end)
        if low == high or marks.at[low] != begin or int(marks.codes[low]) not in _CLOSING:
            return self._decoded(b"", start, end, b"")  # a string, or what is wrong where it begins
        behind = np.flatnonzero(marks.levels[low + 1 : high] == marks.levels[low])
        if not behind.size:
            return self._container(low, high, end, closed=False)  # which says that the text was cut off
        close = low + 1 + int(behind[0])
        value = self._container(low, close, int(marks.at[close]), closed=True)
        rest = self._space(int(marks.at[close]) + 1, end)
        if rest < end:
            raise self._malformed(expected, rest + (expected == _BEHIND))  # where msgspec says it
        return value

    def _container(self, low: int, high: int, end: int, *, closed: bool) -> Any:
        """The array or object that begins with the mark `low` and, if it is closed, ends with `high`, which is at `end`."""
        marks, opening, level = self._marks, int(self._marks.codes[low]), self._marks.levels[low] + 1
        inner = slice(low + 1, high)
        commas = low + 1 + np.flatnonzero((marks.levels[inner] == level) & (marks.codes[inner] == _COMMA))
        cuts = np.concatenate(([low], commas, [high]))  # the marks between which the children are
        places = np.concatenate((marks.at[cuts[:-1]], [end]))
        children, at = len(cuts) - 1, 0
        items: list[Any] = []
        members: dict[str, Any] = {}
        before, after = (b"[", b"]") if opening == _SQUARE else (b"{", b"}")
        while at < children:
            fit = min(
                int(np.searchsorted(cuts, cuts[at] + _MARKS_AT_ONCE, "right")),
                int(np.searchsorted(places, places[at] + STEP, "right")),
            )
            to = min(max(fit - 1, at + 1), children)
            start, stop = int(places[at]) + 1, int(places[to])
            first, last = int(cuts[at]) + 1, int(cuts[to])
            if fit - 1 <= at and first < last:  # one child that is too large itself
                expected = f"expected ',' or '{after.decode()}'"
                if opening == _SQUARE:
                    items.append(self._value(start, stop, first, last, expected))
                else:
                    value_at = int(marks.at[first])
                    member = self._decoded(before, start, value_at, b"null}")
                    member[next(iter(member))] = self._value(value_at, stop, first, last, expected)
                    self._add(members, member)
            else:
                more = self._decoded(before, start, stop, after if closed or to < children else b"")
                if not more and children > 1:
                    raise self._malformed("invalid character", self._space(start, stop))
                if opening == _SQUARE:
                    items += more
                else:
                    self._add(members, more)
            at = to
        if not closed:
            raise JSONError(f"{self._read.what} is not JSON: Input data was truncated")
        if marks.codes[high] != _CLOSING[opening]:
            raise self._malformed(f"expected ',' or '{after.decode()}'", end)
        return items if opening == _SQUARE else members

    def _add(self, members: dict[str, Any], more: dict[str, Any]) -> None:
        if not self._read.duplicates and not self._twice and not members.keys().isdisjoint(more):
            self._twice = _twice(self._read.what, next(key for key in more if key in members)).message
        members.update(more)

    def _decoded(self, before: bytes, start: int, end: int, after: bytes) -> Any:
        """The value of a piece of the text between two brackets, whose mistake is told as where it is in the text."""
        piece, read = b"".join((before, memoryview(self._text)[start:end], after)), self._read
        try:
            value = read.decoded(piece)
        except JSONError as error:
            message = error.message
        else:
            if not read.duplicates and not self._twice and _may_repeat_keys(piece, value):
                try:
                    _check_keys(piece, read.what)
                except JSONError as error:
                    self._twice = error.message
            return value
        shift = start - len(before)
        message = _PATH.sub("", message)  # which is that in the piece
        raise JSONError(_BYTE.sub(lambda found: f"(byte {int(found[1]) + shift})", message))

    def _space(self, start: int, end: int) -> int:
        found = _SPACE.match(self._text, start, end)
        assert found is not None
        return found.end()

    def _malformed(self, why: str, at: int) -> JSONError:
        return JSONError(f"{self._read.what} is not JSON: JSON is malformed: {why} (byte {at})")


def _may_repeat_keys(text: Text, value: Any) -> bool:
    """False is certain. Outside of strings each colon stands for one pair, after a quote or white space. So where as
    few are found as the value has pairs, no key was lost; better counts are taken as worse ones leave it open."""
    pairs = _count_pairs(value, count(text, b"{"))
    return (
        count(text, b":") != pairs
        and (len(text) > STEP or sum(map(text.count, _PAIR_SIGNS)) != pairs)
        and sum([piece.count(b":") for piece in outside_strings(text)]) != pairs
    )


def _count_pairs(value: Any, objects: int) -> int:
    """The pairs of all objects in a value that has at most `objects` of them. Objects are looked at before arrays and
    small depths first, so that long arrays of numbers are seldom walked."""
    pairs = 0
    found = [value]
    arrays: deque[list[Any]] = deque()
    while objects:
        if found:
            item = found.pop()
            if type(item) is dict:
                pairs += len(item)
                objects -= 1
                found += item.values()
            elif type(item) is list:
                arrays.append(item)
        elif arrays:
            found += [item for item in arrays.popleft() if type(item) is dict or type(item) is list]
        else:
            break
    return pairs


def _check_keys(text: Text, what: str) -> None:
    def check(pairs: list[tuple[str, Any]]) -> None:
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise _twice(what, key)
            seen.add(key)

    json.loads(text.decode(), object_pairs_hook=check)


def _twice(what: str, key: str) -> JSONError:
    return JSONError(f"{what} has an object with two members {key[:60]!r:.100}")
