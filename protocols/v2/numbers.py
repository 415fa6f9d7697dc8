"""Arrays of numbers in JSON text, read into the memory of a tensor: no object for each of them."""

from __future__ import annotations

import math
import struct
from typing import Any, Final, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import orjson
import simdjson

from protocols.json_text import may_hold_long_number
from protocols.v2.tensors import DATATYPES, FLOATS, RANGES, Array, narrowed

FAST_FROM: Final = 2048
"""Bytes of an array's text from which on it is read in less time here than into a list."""

_PIECE = 2**16  # bytes of text that are read together, so that what is made on the way stays in a near cache
_FOR_AN_EXPONENT = 4096  # bytes of text for each exponent: with one, simdjson may take 8 us for a number of 25 characters

_Kind: TypeAlias = Literal["d", "i", "u"]
_WIDE: Final[dict[_Kind, tuple[np.dtype[Any], str]]] = {
    "d": (np.dtype("<f8"), "d"), "i": (np.dtype("<i8"), "q"), "u": (np.dtype("<u8"), "Q"),
}  # fmt: skip
_KINDS: Final[dict[str, _Kind]] = {
    **dict.fromkeys(FLOATS, "d"), **{name: "u" if name == "UINT64" else "i" for name in RANGES},
}  # fmt: skip

_MOST_IDLE = 4
_idle: list[simdjson.Parser] = []
"""Parsers that no thread uses, each with some 1 MiB of memory: to get that anew costs as much as to use it."""

_SPACE = b" \t\n\r"
_MARKS = bytes(ord("0") if byte in b"0123456789+-.eEnullNaN" else byte for byte in range(256))
_TO_SPACES = bytes.maketrans(b"[]", b"  ")


def read_numbers(text: bytes, start: int, end: int, datatype: str, shape: tuple[int, ...]) -> Array | None:
    """The array of a tensor's `data` in `text[start:end]`: numbers, and for floats null and NaN, flat or nested exactly as
    the shape says. Read-only.

    Each number is the one that `tensors.from_json` makes of it. None for whatever is not plain: another count or
    nesting, a number out of range or of more than 400 characters, 1.0 for an integer, an integer of more than 64 bits
    for a datatype of integers, Infinity, text that is not JSON. Then that says what is wrong, or reads it all the same.

    No more memory is taken than 8 bytes for two of text, besides that of some 64 KiB of text, or of all of it where it
    is nested. The thread that calls may be interrupted between two pieces of 64 KiB.
    """
    count, kind = math.prod(shape), _KINDS.get(datatype)
    if kind is None or not 0 < 2 * count < end - start or text[start] != ord("[") or text[end - 1] != ord("]"):
        return None  # even numbers of one digit take two bytes each, and one more for the brackets
    if text.find(b"[", start + 1, end) < 0:
        return _read_flat(text, start + 1, end - 1, datatype, kind, count, shape)
    flat = _flatten(text[start:end], shape)
    return None if flat is None else _read_flat(flat, 0, len(flat), datatype, kind, count, shape)


def _flatten(text: bytes, shape: tuple[int, ...]) -> bytes | None:
    """The text with spaces in place of its brackets, if those stand as the shape says."""
    length = -1
    for size in reversed(shape):
        length = size * (length + 1) + 1
    if length > len(text):
        return None
    structure = b""
    for size in reversed(shape):
        structure = b"[%b]" % ((structure + b",") * size)[:-1]
    marks = text.translate(_MARKS, _SPACE)
    if marks.translate(None, b"0") != structure:
        return None
    # The reader will find one number between two commas. It could still be outside of its brackets.
    codes = np.frombuffer(marks, np.uint8)
    before, after = codes[:-1], codes[1:]
    if (before[after == ord("[")] == ord("0")).any() or (after[before == ord("]")] == ord("0")).any():
        return None
    return text.translate(_TO_SPACES)


def _read_flat(
    text: bytes, at: int, end: int, datatype: str, kind: _Kind, count: int, shape: tuple[int, ...]
) -> Array | None:
    array = np.empty(count, DATATYPES[datatype])
    low, high = RANGES.get(datatype, (0, 0))
    try:
        parser = _idle.pop()
    except IndexError:
        parser = simdjson.Parser()
    filled = 0
    try:
        with np.errstate(over="ignore"):
            while at < end:
                stop = end if end - at <= _PIECE else text.rfind(b",", at, at + _PIECE)
                if stop < 0:
                    return None
                values = _read_piece(b"[%b]" % text[at:stop], kind, parser)
                if not values.size or (kind == "i" and (values.min() < low or values.max() > high)):
                    return None
                if datatype == "BF16":
                    values = narrowed(values, datatype)
                array[filled : filled + values.size] = values  # ValueError if they are too many
                filled += values.size
                at = stop + 1
    except (ValueError, TypeError, RuntimeError, struct.error):  # what the readers raise
        return None
    if filled != count or (kind == "d" and np.isinf(array).any()):  # JSON has no infinity: it was a number too large
        return None
    if len(_idle) < _MOST_IDLE:
        _idle.append(parser)
    array.setflags(write=False)
    return array.reshape(shape)


def _read_piece(piece: bytes, kind: _Kind, parser: simdjson.Parser) -> npt.NDArray[Any]:
    """The numbers of a flat array. ValueError and its like for anything else."""
    if may_hold_long_number(piece):
        raise ValueError("a number may be too long")
    dtype, code = _WIDE[kind]
    if len(piece) >= FAST_FROM and b"N" not in piece and b"n" not in piece and _has_few_exponents(piece):
        numbers = cast(simdjson.Array, parser.parse(piece))
        return np.frombuffer(numbers.as_buffer(of_type=kind), dtype)
    if b"t" in piece or b"f" in piece or b'"' in piece:
        raise ValueError("a boolean or a string is no number, though it may be taken for one")
    if kind == "d" and (b"n" in piece or b"N" in piece):
        return np.array(orjson.loads(piece.replace(b"NaN", b"null")), dtype)
    values = orjson.loads(piece)
    return np.frombuffer(struct.pack(f"<{len(values)}{code}", *values), dtype)


def _has_few_exponents(piece: bytes) -> bool:
    for letter in (b"e", b"E"):
        at = -1
        for _ in range(len(piece) // _FOR_AN_EXPONENT + 1):
            if (at := piece.find(letter, at + 1)) < 0:
                break
        else:
            return False
    return True
