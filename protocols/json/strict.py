"""Reads JSON from untrusted peers: RFC 8259 in UTF-8, with limits on depth, values and numbers, and one error type."""

from __future__ import annotations

import codecs
import json
import math
import re
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, final

import msgspec
import numpy as np
import orjson

from protocols.events import Buffer
from protocols.json.text import (
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
"""The default limit of arrays and objects in a text: each takes some 80 or 200 bytes of memory."""
VALUES: Final = 1_000_000
"""The default limit of commas and opening brackets outside of strings: a text has at most that many values."""

BOM: Final = b"\xef\xbb\xbf"
"""The byte order mark in UTF-8, which is skipped at the beginning of a text."""
_BEYOND_64_BITS = 19  # digits: an integer this long may exceed 64 bits
_BEYOND_DOUBLE = 309  # digits: an integer this long may exceed a double
_PAIR_SIGNS = (b'":', b" :", b"\t:", b"\n:", b"\r:")
_SHORT = 2**10  # bytes; even if all were floats like 1e300, which cost the decoder 8 us each, the text is quick to read
_ALWAYS_AT_ONCE = 2**18  # bytes; a shorter text never holds the interpreter for long
_AT_ONCE = 2**24  # bytes; the limit for a text of long strings
_MARKS_AT_ONCE = 2**16  # brackets and commas in one decoded piece: some milliseconds
_COMMA, _SQUARE, _CURLY = b",[{"
_CLOSING = {_SQUARE: ord("]"), _CURLY: ord("}")}
_SPACE = re.compile(rb"[ \t\n\r]*+")
_BYTE = re.compile(r"\(byte (\d+)\)$")
_PATH = re.compile(r" - at `[^`]*`$")
_NUMBER = re.compile(rb"-?[0-9]++(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_INTEGER = re.compile(rb"(?<![0-9.eE+-])-?[0-9]{%d,}+(?![.eE])" % _BEYOND_DOUBLE)
_FIRST_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_BEHIND = "trailing characters"
_RANGE = "Number out of range"


def _float(text: str) -> float:
    value = float(text)
    if value - value:  # the difference is not 0 for NaN and infinities
        raise ValueError(_RANGE)
    return value


_DECODER = msgspec.json.Decoder()
_STEADY = msgspec.json.Decoder(float_hook=_float)  # slower for most floats, but never very slow
_SHALLOW = msgspec.json.Decoder(float_hook=str)


@final
class JSONError(Exception):
    """The text is not JSON or exceeds a limit. `message` may be shown to the peer: it quotes at most a shortened key."""

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
    """The value of a JSON text. Integers are exact, other numbers are the nearest double. A byte order mark is skipped.

    JSONError, whose message begins with `what`, if the data are not one JSON text in UTF-8; for nesting deeper than `depth`;
    for more than `containers` arrays and objects or more than `values` values; for a number of more than 400 characters or
    beyond the range of a double; and for an escaped surrogate without its pair. `allow_nonfinite` accepts `NaN`, `Infinity`
    and `-Infinity`, which RFC 8259 does not have. With `duplicates` the last of several equal keys of an object wins;
    without it, they are an error. Without `floats`, numbers that are not integers stay text, whatever their range;
    `float_hook` converts that text to another value.

    A memoryview is copied once. Beside the values (`text.Census.cost`), reading costs a few passes at memory speed and,
    for suspicious texts, temporary memory of a few times the text's length, but at most 16 MiB. A long text is read in steps
    of some milliseconds, between which other threads can run.
    """
    text = bytes(data) if isinstance(data, memoryview) else data
    before = len(BOM) if text.startswith(BOM) else 0
    if before:
        text = text[before:]
    try:
        _check_bounds(text, depth, what, containers, values)
        if float_hook is None:
            if len(text) <= _SHORT and floats:
                try:
                    value = _DECODER.decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    pass  # `_Reader` makes the error message
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
    except JSONError as error:
        if not before:
            raise
        raise JSONError(moved(error.message, before.__add__)) from None


def moved(message: str, place: Callable[[int], int]) -> str:
    """The message of an error about a part of a text, with the byte in the whole text: `place` of the one in the part."""
    return _BYTE.sub(lambda found: f"(byte {place(int(found[1]))})", message)


def cost_of(data: Buffer, *, containers: int = CONTAINERS, values: int = VALUES) -> int:
    """The memory that the values of a text take once `loads` has read it, in bytes, without the texts of its strings. 0 if
    `loads` would refuse the text for its `containers` or `values`, because then no value is made."""
    census = census_of(data)
    if census.cost > len(data):  # most of the count may be inside strings
        census = close_census_of(data, containers, values)
        if census.containers > containers or census.values > values:
            return 0
    return census.cost


def is_slow(text: Buffer) -> bool:
    """True if a text has an integer that may exceed 64 bits, or as many digits elsewhere: `loads` then takes some 0.2 us for
    each number with a fraction or an exponent."""
    return has_run(bytes(text), _BEYOND_64_BITS, digits=True)


def is_plain(text: bytes, pairs: int) -> bool:
    """True if a quick look shows that a JSON text has no number of more than 400 characters and no duplicate key. A typed
    decoder must have read it before and found `pairs` members. False if that is uncertain."""
    if len(text) > MAX_NUMBER and may_hold_long_number(text):
        return False
    return count(text, b":") == pairs or sum(map(text.count, _PAIR_SIGNS)) == pairs


def _check_bounds(text: Text, depth: int, what: str, containers: int, values: int) -> None:
    # The raw counts can only be too high: strings are removed before the peer is refused.
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
    """Reads a text in one call."""

    __slots__ = ("_decoder", "_hook", "_nonfinite", "duplicates", "what")

    def __init__(self, what: str, nonfinite: bool, duplicates: bool, hook: Callable[[str], Any] | None) -> None:
        self.what, self._nonfinite, self.duplicates, self._hook = what, nonfinite, duplicates, hook
        self._decoder = None if hook is None else _SHALLOW if hook is str else msgspec.json.Decoder(float_hook=hook)

    def value(self, text: Text) -> Any:
        """The value of the whole text. JSONError if it has none."""
        value = self.decoded(text)
        if not self.duplicates and _may_repeat_keys(text, value):
            _check_keys(text, self.what)
        return value

    def decoded(self, text: Text) -> Any:
        """The value, without a check for duplicate keys. JSONError."""
        if self._decoder is not None:
            return self._decode(text, self._decoder)
        if len(text) <= _SHORT:
            return self._decode(text, _DECODER)
        if not has_run(text, _BEYOND_64_BITS, digits=True):  # orjson would turn such an integer into a double
            try:
                return orjson.loads(text)
            except orjson.JSONDecodeError:
                if found := _out_of_range(text):
                    raise JSONError(f"{self.what} cannot be read: {_beyond(*found)}") from None
                self._decode(text, _SHALLOW)  # msgspec has the better error messages
        return self._decode(text, _STEADY)

    def _decode(self, text: Text, decoder: msgspec.json.Decoder[Any]) -> Any:
        what = self.what
        try:
            return decoder.decode(text)
        except RecursionError:
            raise JSONError(f"{what} is nested too deep to be read") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if self._nonfinite and (b"NaN" in text or b"Infinity" in text):
                return self._decode_nonfinite(text)
            raise JSONError(f"{what} {_reason(text, error)}") from None

    def _decode_nonfinite(self, text: Text) -> Any:
        """Reads a text with NaN or infinities. The standard library accepts those, but also texts that are refused here. The
        text must therefore pass first with each literal replaced by a zero; spaces keep the zero apart from its
        neighbors."""
        plain = text.replace(b"-Infinity", b"    0    ").replace(b"Infinity", b"   0    ").replace(b"NaN", b" 0 ")
        plain = np.where(inside_strings(text), np.frombuffer(text, np.uint8), np.frombuffer(plain, np.uint8)).tobytes()
        try:
            orjson.loads(plain)
        except orjson.JSONDecodeError:  # orjson also refuses integers beyond a double, which are valid
            _Reader(self.what, False, True, None)._decode(plain, _STEADY)
        return json.loads(text.decode(), parse_float=self._hook)


@lru_cache(maxsize=32)
def _reader(what: str, nonfinite: bool, duplicates: bool, floats: bool) -> _Reader:
    return _Reader(what, nonfinite, duplicates, None if floats else str)


def _reason(text: Text, error: Exception) -> str:
    if not text.strip():
        return "is empty where JSON was expected"
    if not _is_utf8(text):  # msgspec's own error is not the same in all its versions
        return "is not UTF-8"
    said = fault_of(text, error)
    return f"cannot be read: {said}" if said.startswith(_RANGE) else f"is not JSON: {said}"


def _is_utf8(text: Text) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for at in range(0, len(text), STEP):
            decoder.decode(text[at : at + STEP])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def fault_of(text: Buffer, error: Exception) -> str:
    """The text of a decoder's error, with the fault and its byte where the decoder tells another fault, or not where it is:
    half of a surrogate pair near the end of the text, and a number beyond the range of a double."""
    said, text = str(error), bytes(text)
    if said.startswith(_RANGE) and (found := _out_of_range(text)):
        return _beyond(*found)
    if said == "Input data was truncated" and (at := _cut_pair(text)) >= 0:
        return f"JSON is malformed: unexpected end of escaped utf-16 surrogate pair (byte {at})"
    return said


def _beyond(number: str, at: int) -> str:
    return f"{_RANGE}: {number if len(number) <= 24 else number[:21] + '...'} (byte {at})"


def _cut_pair(text: bytes) -> int:
    """The index behind an escape of the first half of a surrogate pair that no second escape follows, so near the end of the
    text that the decoder takes it for cut off. -1 if there is none."""
    for found in _FIRST_HALF.finditer(text, max(len(text) - 12, 0)):
        backslashes = found.start() - len(text[: found.start()].rstrip(b"\\"))
        rest = text[found.end() :]
        if backslashes % 2 == 0 and not (b"\\u".startswith(rest[:2]) and len(rest) < 6):
            return found.end()
    return -1


def _out_of_range(text: Text) -> tuple[str, int] | None:
    """The first number beyond the range of a double, and its index."""
    if has_run(text, _BEYOND_DOUBLE, digits=True):  # orjson refuses such integers too, which are valid here
        inside = inside_strings(text)
        text = _INTEGER.sub(lambda found: found[0] if inside[found.start()] else b"0".ljust(len(found[0])), text)
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as error:
        number = _NUMBER.match(text, at := len(error.doc[: error.pos].encode()))
        if number and math.isinf(float(number[0])):
            return number[0].decode(), at
    return None


@final
class _Pieces:
    """Reads a long text in pieces: the children of its arrays and objects in groups. A child that is too large for a group
    is read by its own children. The value and the error positions are those of the whole text."""

    __slots__ = ("_marks", "_read", "_text", "_twice")

    def __init__(self, text: Text, read: _Reader) -> None:
        self._text, self._read = text, read
        self._marks = Marks(text)
        self._twice = ""  # the message about the first duplicate key, raised only after the whole text has proved to be JSON

    def value(self) -> Any:
        """The value of the text. JSONError if it has none."""
        try:
            value = self._value(0, len(self._text), 0, len(self._marks.at), _BEHIND)
        except RecursionError:
            raise JSONError(f"{self._read.what} is nested too deep to be read") from None
        if self._twice:
            raise JSONError(self._twice)
        return value

    def _value(self, start: int, end: int, low: int, high: int, expected: str) -> Any:
        """The value in `start` to `end` of the text, which may have white space around it, with the marks `low` to `high`.
        `expected` is the message for anything behind the value."""
        marks = self._marks
        begin = self._space(start, end)
        if low == high or marks.at[low] != begin or int(marks.codes[low]) not in _CLOSING:
            return self._decoded(b"", start, end, b"")  # a string, a number, a literal, or a mistake where the value begins
        behind = np.flatnonzero(marks.levels[low + 1 : high] == marks.levels[low])
        if not behind.size:
            return self._container(low, high, end, closed=False)  # this reports that the text was cut off
        close = low + 1 + int(behind[0])
        value = self._container(low, close, int(marks.at[close]), closed=True)
        rest = self._space(int(marks.at[close]) + 1, end)
        if rest < end:
            raise self._malformed(expected, rest + (expected == _BEHIND))  # the position that msgspec reports
        return value

    def _container(self, low: int, high: int, end: int, *, closed: bool) -> Any:
        """The array or object that begins with the mark `low`. If it is closed, it ends with the mark `high`, at `end`."""
        marks, opening, level = self._marks, int(self._marks.codes[low]), self._marks.levels[low] + 1
        inner = slice(low + 1, high)
        commas = low + 1 + np.flatnonzero((marks.levels[inner] == level) & (marks.codes[inner] == _COMMA))
        cuts = np.concatenate(([low], commas, [high]))  # the children lie between these marks
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
            if fit - 1 <= at and first < last:  # one child that is itself too large
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
        """The value of a piece of the text, put between two brackets. Errors give the position in the whole text."""
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
        message = _PATH.sub("", message)  # the path in the piece means nothing to the peer
        raise JSONError(moved(message, shift.__add__))

    def _space(self, start: int, end: int) -> int:
        found = _SPACE.match(self._text, start, end)
        assert found is not None
        return found.end()

    def _malformed(self, why: str, at: int) -> JSONError:
        return JSONError(f"{self._read.what} is not JSON: JSON is malformed: {why} (byte {at})")


def _may_repeat_keys(text: Text, value: Any) -> bool:
    """True if a key may occur twice in an object. False is certain: outside of strings each colon belongs to one pair,
    behind a quote or white space. If no more colons are found than the value has pairs, no key was lost. Slower counts are
    made only if the quicker ones leave it open."""
    pairs = _count_pairs(value, count(text, b"{"))
    return (
        count(text, b":") != pairs
        and (len(text) > STEP or sum(map(text.count, _PAIR_SIGNS)) != pairs)
        and sum([piece.count(b":") for piece in outside_strings(text)]) != pairs
    )


def _count_pairs(value: Any, objects: int) -> int:
    """The number of pairs of all objects in a value that has at most `objects` objects. Objects go before arrays, and
    shallow values before deep ones, because long arrays of numbers are slow to walk."""
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
