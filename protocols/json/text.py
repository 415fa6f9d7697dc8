"""Scans JSON text in steps of 1 MiB: counts and depths of what is outside of its strings. It decodes no value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, TypeAlias, final

import msgspec
import numpy as np
import numpy.typing as npt

Text: TypeAlias = bytes | bytearray
Codes: TypeAlias = npt.NDArray[np.uint8]

STEP: Final = 2**20
"""Bytes that one call into C code sees. Between two calls other threads can run."""
MAX_NUMBER: Final = 400
"""The most characters of one number. CPython itself reads integers of up to 4,300 digits, in quadratic time."""

_CHUNK = 2**16  # bytes, or brackets, that numpy handles together: temporary arrays stay small
_LARGE = 2**14  # bytes from which on numpy scans a text faster than `bytes` does
_NEAR = 2**8  # bytes that `find` looks through first
_DIGITS = b"0123456789"
_OF_NUMBERS = b'"[]{},:+-. \t\r\n' + _DIGITS  # quotes are near
_NUMBER_BYTES = b"0123456789+-.eE"
_TO_ZERO = bytes(ord("0") if byte in _NUMBER_BYTES else ord(" ") for byte in range(256))
_DIGITS_TO_ZERO = bytes(ord("0") if byte in _DIGITS else ord(" ") for byte in range(256))
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_NO_STRUCTURE = _NOT_BRACKETS.replace(b'"', b"")
_IS_MARK = np.zeros(256, np.bool_)
_IS_MARK[list(b"[]{},")] = True
_STEPS = np.zeros(256, np.int8)  # the change of depth at a bracket
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


@final
class Census(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The numbers of arrays, objects and commas in a text: outside of its strings, or for a quick count inside them too."""

    arrays: int = 0
    objects: int = 0
    commas: int = 0

    @property
    def containers(self) -> int:
        """Arrays and objects."""
        return self.arrays + self.objects

    @property
    def values(self) -> int:
        """The most values there can be: commas and opening brackets."""
        return self.arrays + self.objects + self.commas

    @property
    def cost(self) -> int:
        """An upper bound of the memory that the values take once they are read, in bytes, without the texts of strings."""
        return 80 * self.arrays + 200 * self.objects + 48 * self.commas


def census_of(text: Text | memoryview) -> Census:
    """Counts inside strings too. Each number is at least that of `close_census_of`, in a tenth of its time."""
    if len(text) < _LARGE:
        text = bytes(text)
        return Census(arrays=text.count(b"["), objects=text.count(b"{"), commas=text.count(b","))
    arrays = objects = commas = 0
    for at in range(0, len(text), _CHUNK):
        piece = bytes(text[at : at + _CHUNK])
        arrays += _count_in(piece, b"[")
        objects += _count_in(piece, b"{")
        commas += _count_in(piece, b",")
    return Census(arrays=arrays, objects=objects, commas=commas)


def close_census_of(text: Text | memoryview, containers: float = math.inf, values: float = math.inf) -> Census:
    """Counts outside of strings. It stops early once there are more than `containers` or `values`."""
    census = Census()
    for piece in outside_strings(text):
        census = Census(
            arrays=census.arrays + piece.count(b"["),
            objects=census.objects + piece.count(b"{"),
            commas=census.commas + piece.count(b","),
        )
        if census.containers > containers or census.values > values:
            break
    return census


def count(text: Text, byte: bytes) -> int:
    """How often the byte occurs in the text."""
    if len(text) < _LARGE:
        return text.count(byte)
    return sum(_count_in(text[at : at + _CHUNK], byte) for at in range(0, len(text), _CHUNK))


def _count_in(piece: Text, byte: bytes) -> int:
    # long numbers have few brackets: that there is none is seen at memory speed
    return 0 if piece.find(byte) < 0 else int(np.count_nonzero(np.frombuffer(piece, np.uint8) == ord(byte)))


def find(text: Text | memoryview, wanted: bytes, start: int = 0) -> int:
    """The index of the first `wanted` in the text from `start` on, or -1. It costs what lies before the place, so that all
    places of a text cost one pass."""
    step = min(_NEAR, STEP)
    # CPython finds one byte a hundred times faster than several, and long numbers have none of this one
    rare = wanted.lstrip(_OF_NUMBERS)[:1]
    while start < len(text):
        piece = bytes(text[start : start + step + len(wanted) - 1])
        found = piece.find(wanted) if rare in piece else -1
        if found >= 0:
            return start + found
        start, step = start + step, min(4 * step, STEP)
    return -1


def has_run(text: Text, length: int, *, digits: bool) -> bool:
    """True if the text has `length` digits in a row or, without `digits`, that many characters of numbers."""
    table, wanted = _DIGITS_TO_ZERO if digits else _TO_ZERO, b"0" * length
    if len(text) <= STEP:
        return wanted in text.translate(table)
    return any(wanted in text[at : at + STEP + length - 1].translate(table) for at in range(0, len(text), STEP))


def may_hold_long_number(text: Text) -> bool:
    """True if a JSON text may have a number of more than 400 characters. False is certain: a number contains no comma, and
    one that is too long fills an aligned block of half its length."""
    if len(text) >= _LARGE:
        block = MAX_NUMBER // 2
        codes = np.frombuffer(text, np.uint8)[: len(text) // block * block]
        step = _CHUNK // block * block
        # eight answers are looked at together
        if all(
            (codes[at : at + step] == ord(",")).view(np.uint64).reshape(-1, block // 8).any(axis=1).all()
            for at in range(0, len(codes), step)
        ):
            return False
    return has_run(text, MAX_NUMBER + 1, digits=False)


def has_long_number(text: Text) -> bool:
    """True if the text has more than 400 characters of numbers in a row outside of its strings."""
    before = b""
    for piece in outside_strings(text):
        zeros = before + piece.translate(_TO_ZERO)
        if b"0" * (MAX_NUMBER + 1) in zeros:
            return True
        before = zeros[-MAX_NUMBER:]
    return False


def deeper_than(text: Text, depth: int) -> bool:
    """True if arrays and objects are nested deeper than `depth`."""
    if b"\\" not in text:  # joining pieces must not join runs of backslashes
        text = b"".join([text[at : at + STEP].translate(None, _NO_STRUCTURE) for at in range(0, len(text), STEP)])
    level = 0
    for piece in outside_strings(text):
        brackets = piece.translate(_TO_SQUARE, _NOT_BRACKETS)
        steps = np.array(ord("\\"), np.int8) - np.frombuffer(brackets, np.uint8).view(np.int8)  # 1 for [ and -1 for ]
        for start in range(0, len(steps), _CHUNK):
            levels = np.cumsum(steps[start : start + _CHUNK], dtype=np.int64) + level
            if np.any(levels > depth):
                return True
            level = int(levels[-1])
    return False


def outside_strings(text: Text | memoryview) -> Iterator[bytes]:
    """Yields the text without its strings, in pieces. The closing quote of each string stays and keeps its neighbors
    apart."""
    for at, inside in _insides(text):
        yield np.frombuffer(text, np.uint8)[at : at + len(inside)][~inside].tobytes()


def inside_strings(text: Text) -> npt.NDArray[np.bool_]:
    """A mask: True for each byte from an opening quote up to, but not including, the closing one."""
    pieces = [inside for _, inside in _insides(text)]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.bool_)


def _insides(text: Text | memoryview) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
    """Yields the start of each piece, and a mask of its bytes that are inside strings.

    Backslashes come in runs. Once pairs are removed, a remaining backslash escapes the next character. If a text has a
    backslash outside of its strings, the mask is wrong from there on, and a decoder fails at that place anyway.
    """
    escaped = within = False  # the first byte of the piece is escaped; the piece begins inside a string
    for at in range(0, len(text), STEP):
        piece = bytes(text[at : at + STEP])
        if escaped:
            piece = b"." + piece[1:]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"..").replace(b'\\"', b"..")
            escaped = piece.endswith(b"\\")
        else:
            escaped = False
        inside: npt.NDArray[np.bool_] = np.frombuffer(piece, np.uint8) == ord('"')
        np.bitwise_xor.accumulate(inside, out=inside)  # each quote toggles it
        if within:
            np.logical_not(inside, out=inside)
        within = bool(inside[-1])
        yield at, inside


@final
class Marks:
    """The brackets and commas outside of a text's strings, each with its place and depth. Takes some 12 bytes of memory for
    each of them."""

    __slots__ = ("at", "codes", "inside", "levels", "open_string")

    def __init__(self, text: Text) -> None:
        places: list[npt.NDArray[np.int64]] = []
        codes: list[Codes] = []
        self.open_string = False
        """True if the text ends inside a string."""
        for at, inside in _insides(text):
            piece = np.frombuffer(text, np.uint8)[at : at + len(inside)]
            found = np.flatnonzero(_IS_MARK[piece] & ~inside)
            places.append(found + at)
            codes.append(piece[found])
            self.open_string = bool(inside[-1])
        self.at = np.concatenate(places) if places else np.zeros(0, np.int64)
        """Their places, in order."""
        self.codes = np.concatenate(codes) if codes else np.zeros(0, np.uint8)
        """Their bytes."""
        steps = _STEPS[self.codes]
        # an opening bracket has the depth before it, a closing one the depth behind it: the same for both ends of a value
        self.levels = np.cumsum(steps, dtype=np.int32) - (steps == 1)
        """The number of arrays and objects around each; a comma counts the one that it separates."""
