"""Reads arrays of numbers in JSON text directly into the memory of a tensor, without an object for each number."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, TypeAlias, cast, final

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
import simdjson

from protocols.json.strict import JSONError, loads, moved
from protocols.json.text import census_of, find, may_hold_long_number
from protocols.v2.tensors import DATATYPES, FLOATS, RANGES, Array, V2Error, narrowed, read_values, show, show_shape

FAST_FROM: Final = 2048
"""Bytes of an array's text from which on reading it here is quicker than reading it into a list."""

_PIECE = 2**16  # bytes of text that are read together, so that intermediate data stay in the processor's cache
_FOR_AN_EXPONENT = 4096  # bytes of text for each exponent: with one, simdjson may take 8 us for a number of 25 characters

_Kind: TypeAlias = Literal["d", "i", "u"]
_WIDE: Final[dict[_Kind, tuple[np.dtype[Any], str]]] = {
    "d": (np.dtype("<f8"), "d"), "i": (np.dtype("<i8"), "q"), "u": (np.dtype("<u8"), "Q"),
}  # fmt: skip
_KINDS: Final[dict[str, _Kind]] = {
    **dict.fromkeys(FLOATS, "d"), **{name: "u" if name == "UINT64" else "i" for name in RANGES},
}  # fmt: skip

_MOST_IDLE = 4
_ELSEWHERE = 100_000  # strings "data" that stand before no numbers: 0.1 s of looking
_idle: list[simdjson.Parser] = []
"""Parsers that no thread uses, each with some 1 MiB of memory: allocating that costs as much as using it."""

_SPACE = b" \t\n\r"
_MARKS = bytes(ord("0") if byte in b"0123456789+-.eEnulltrfasINity" else byte for byte in range(256))
_TO_SPACES = bytes.maketrans(b"[]", b"  ")
_LONG_ROW = 8  # numbers in a row; to look for each next bracket then costs less than to look at each byte
_BLOCK = 2**16  # bytes of a structure that are made together

_MARK = b"0e-00"  # the beginning of a number that replaces data in a text
_MARKED = b"0e-00%09d"  # its width is fixed, so a digit behind it makes it invalid
_SPACES = 1000  # white space that is passed over before a mark
_HOLE = re.compile(rb",(?=[ \t\n\r]{0,1000}+[,\]])|\[(?=[ \t\n\r]{0,1000}+,)")
_TO_DATA = re.compile(rb"[ \t\n\r]{0,1000}:[ \t\n\r]{0,1000}(?=\[)")


@final
class NumbersApart:
    """A text with its numbers taken out: in `beside`, a mark replaces each `data` that may be an array of numbers.

    The text around a JSON value does not depend on the value. If `beside` is a valid request, the marks are the values of
    its inputs' `data`, and the removed arrays are valid, then the text is that request with these data. A mark is a number
    that the text itself does not contain.
    """

    __slots__ = ("_next", "_places", "beside")

    def __init__(self, beside: bytes, places: list[tuple[int, int]]) -> None:
        self.beside, self._places, self._next = beside, places, 0

    def next_place(self, mark: msgspec.Raw) -> tuple[int, int] | None:
        """The position of the next data in the text, which `mark` must stand for; None if it does not."""
        if bytes(mark) != _MARKED % self._next:
            return None
        self._next += 1
        return self._places[self._next - 1]

    @property
    def done(self) -> bool:
        """True if all removed data have been asked for."""
        return self._next == len(self._places)

    def float_hook(self, text: str) -> float | NumbersAt:
        """The value of a number in `beside`: a double, or the data that a mark stands for."""
        if text.startswith("0e-00"):
            if len(text) != len(_MARKED % 0):
                raise ValueError("invalid number")
            return NumbersAt(*self._places[int(text[len(_MARK) :])])
        value = float(text)
        if math.isinf(value):
            raise ValueError("Number out of range")
        return value

    def place_of(self, byte: int) -> int:
        """The index in the text of a byte of `beside`."""
        behind = byte
        for start, end in self._places:
            if behind <= start:
                break
            behind += end - start - len(_MARKED % 0)
        return behind

    def asked_for(self, places: int) -> bool:
        """True if `places` is the number of all removed data."""
        return places == len(self._places)


@final
class NumbersAt(msgspec.Struct, frozen=True, gc=False):
    """The place of an array of numbers in a text."""

    start: int
    end: int


def apart_from_numbers(text: bytes, arrays: int, largest: float = math.inf) -> NumbersApart | None:
    """The text with its `data` taken out. None if there are more than `arrays` of them, if the rest has more than `largest`
    bytes, if "data" stands elsewhere more than 100,000 times, or if the text already contains a mark."""
    places: list[tuple[int, int]] = []
    pieces, at, size, key = [], 0, 0, find(text, b'"data"')
    elsewhere = 0
    while key >= 0:
        start = key + len(b'"data"')
        if colon := _TO_DATA.match(text, start):
            start = colon.end()
            end = _end_of_numbers(text, start)
            if end:
                size += start - at
                if len(places) == arrays or size > largest:
                    return None
                pieces.append(text[at:start])
                places.append((start, end))
                at = start = end
            elif largest < math.inf:
                return None
        if at != start:
            elsewhere += 1
            if elsewhere > _ELSEWHERE:
                return None
        key = find(text, b'"data"', start)
    if size + len(text) - at > largest:
        return None
    pieces.append(text[at:])
    if any(find(piece, _MARK) >= 0 for piece in pieces):
        return None
    beside = b"".join([piece + _MARKED % n for n, piece in enumerate(pieces[:-1])] + pieces[-1:])
    return NumbersApart(beside, places)


def _end_of_numbers(text: bytes, start: int) -> int:
    """The end of an array of numbers that begins at `start`; such an array has neither quote nor brace. 0 if it is
    another."""
    stop = text.find(b'"', start)
    if stop < 0:
        stop = len(text)
    brace = text.find(b"}", start, stop)
    return text.rfind(b"]", start, stop if brace < 0 else brace) + 1


def read_numbers(text: bytes, start: int, end: int, datatype: str, shape: tuple[int, ...]) -> Array | None:
    """The array of a tensor's `data` in `text[start:end]`, read-only: numbers, and for floats null and NaN, flat or nested
    exactly as the shape says.

    Each number is equal to the one from `tensors.from_json`. None for anything unusual: another count or nesting, a number
    out of range or of more than 400 characters, 1.0 for an integer, an integer of more than 64 bits for an integer datatype,
    Infinity, or text that is not JSON. `from_json` then reads it or reports the error.

    Beside some 64 KiB of text, it takes at most 8 bytes of memory for each two bytes of text. Other threads can run between
    two pieces of 64 KiB.
    """
    if datatype not in _KINDS or not _may_be(text, start, end, shape):
        return None
    try:
        return _read(text, start, end, datatype, shape, None)
    except (ValueError, TypeError, RuntimeError, struct.error):  # the errors of the readers
        return None


def read_data(text: bytes, place: NumbersAt, datatype: str, shape: tuple[int, ...], name: str) -> Array:
    """The array that `tensors.from_json` makes of the data at this place, with objects for at most 64 KiB of text at a time.
    V2Error as from `from_json` for a wrong count or kind; a shorter text if the nesting is wrong or the data are not
    JSON."""
    start, end = place.start, place.end
    array = read_numbers(text, start, end, datatype, shape)
    if array is not None:
        return array
    count = math.prod(shape)
    if text.find(b"[", start + 1, end) < 0:
        for at in range(start, end, _PIECE):
            if hole := _HOLE.search(text, at, min(at + _PIECE + _SPACES, end)):
                raise V2Error(f"tensor {show(name)}: data is not JSON: a comma without a value (byte {hole.start()})")
        there = census_of(memoryview(text)[start:end]).commas + 1
        if count != there:
            raise V2Error(f"tensor {show(name)}: shape {show_shape(shape)} takes {show(count)} values, data has {there}")
    if datatype != "BYTES" and _may_be(text, start, end, shape):
        try:
            return _read(text, start, end, datatype, shape, name)
        except (ValueError, TypeError, RuntimeError, struct.error):
            pass
    if datatype == "BYTES":
        raise V2Error(f"tensor {show(name)}: BYTES takes strings")
    otherwise = f"or nested otherwise than shape {show_shape(shape)}"
    raise V2Error(f"tensor {show(name)}: data is no JSON array of numbers, {otherwise}")


def _may_be(text: bytes, start: int, end: int, shape: tuple[int, ...]) -> bool:
    # even numbers of one digit take two bytes each, and the brackets one more
    return 0 < 2 * math.prod(shape) < end - start and text[start] == ord("[") and text[end - 1] == ord("]")


def _read(text: bytes, at: int, end: int, datatype: str, shape: tuple[int, ...], name: str | None) -> Array:
    """The array of data that are flat or nested like the shape. Without a `name`, ValueError and other errors for anything
    unusual. With the tensor's `name`, all valid data are read, and a wrong value is a V2Error."""
    structure = None
    if text.find(b"[", at + 1, end) < 0:
        at, end = at + 1, end - 1
    else:
        structure = _Structure(shape, end - at)
    array, filled = np.empty(math.prod(shape), DATATYPES[datatype]), 0
    try:
        parser = _idle.pop()
    except IndexError:
        parser = simdjson.Parser()
    kind = _KINDS.get(datatype)
    low, high = RANGES.get(datatype, (0, 0))
    with np.errstate(over="ignore", invalid="ignore"):
        while at < end:
            stop = end if end - at <= _PIECE else text.rfind(b",", at, at + _PIECE)
            if stop < 0:
                raise ValueError("white space without end")
            piece = text[at:stop]
            if structure is not None:
                structure.check(piece, last=stop == end)
                piece = structure.flattened(piece)
            piece = b"[%b]" % piece
            try:
                if kind is None:
                    raise ValueError("no numbers")
                values = _read_piece(piece, kind, parser)
                if not values.size or (kind == "i" and (values.min() < low or values.max() > high)):
                    raise ValueError("none, or out of range")
                if datatype == "BF16":
                    values = narrowed(values, datatype)
                here = array[filled : filled + values.size]
                here[:] = values  # ValueError if there are too many
                # the sum alone tells that no number was too large; if it does not, one may have been
                if kind == "d" and not math.isfinite(np.add.reduce(here)) and np.isinf(here).any():
                    raise ValueError("out of range")
            except (ValueError, TypeError, RuntimeError, struct.error):
                if name is None:
                    raise
                values = read_values(datatype, _values_of(piece, at - 1, name), name, filled)
                array[filled : filled + values.size] = values
            filled += values.size
            at = stop + 1
    if filled != len(array):
        raise ValueError("too few")
    if len(_idle) < _MOST_IDLE:
        _idle.append(parser)
    array.setflags(write=False)
    return array.reshape(shape)


def _values_of(piece: bytes, start: int, name: str) -> list[Any]:
    try:
        values = loads(piece, depth=1, what=f"tensor {show(name)}: data", allow_nonfinite=True)
    except JSONError as error:
        raise V2Error(moved(error.message, start.__add__)) from None
    if not values:
        raise ValueError("a comma too many")
    return cast("list[Any]", values)


@final
class _Structure:
    """The brackets and commas of nested data with a shape, compared with those of the text piece by piece."""

    __slots__ = ("_blocks", "_here", "_long_rows")

    def __init__(self, shape: tuple[int, ...], length: int) -> None:
        size = -1
        for row in reversed(shape):
            size = row * (size + 1) + 1
        if size > length:
            raise ValueError("nested otherwise")
        self._blocks, self._here = _blocks(shape), b""
        self._long_rows = shape[-1:] >= (_LONG_ROW,)

    def flattened(self, piece: bytes) -> bytes:
        """The piece with spaces in place of its brackets."""
        if self._long_rows:
            return piece.replace(b"[", b" ").replace(b"]", b" ")
        return piece.translate(_TO_SPACES)

    def check(self, piece: bytes, *, last: bool) -> None:
        """Raises ValueError if the nesting of the piece is wrong. A comma follows the piece, unless it is the `last`."""
        marks = piece.translate(_MARKS, _SPACE)
        found = marks.translate(None, b"0") + (b"" if last else b",")
        while len(self._here) < len(found):
            block = next(self._blocks, b"")
            if not block:
                break
            self._here += block
        if not self._here.startswith(found) or (last and len(found) != len(self._here) + len(next(self._blocks, b""))):
            raise ValueError("nested otherwise")
        self._here = self._here[len(found) :]
        # The reader ensures one number between two commas. This checks that it is inside its brackets.
        codes = np.frombuffer(marks, np.uint8)
        before, after, number = codes[:-1], codes[1:], codes == ord("0")
        if (number[:-1] & (after == ord("["))).any() or (number[1:] & (before == ord("]"))).any():
            raise ValueError("nested otherwise")


def _blocks(shape: tuple[int, ...]) -> Iterator[bytes]:
    """Yields the structure of nested data in blocks: for [2, 3] it is `[[,,],[,,]]`."""
    inner, outer = b"", list(shape)
    while outer and outer[-1] * (len(inner) + 1) <= _BLOCK:
        inner = b"[%b]" % ((inner + b",") * outer.pop())[:-1]
    if not outer:
        yield inner
        return
    unit = inner + b","
    at_once = max(_BLOCK // len(unit), 1)
    rows = outer.pop()
    many, rest = divmod(rows - 1, at_once)

    def row() -> Iterator[bytes]:
        yield b"["
        for _ in range(many):
            yield unit * at_once
        yield unit * rest + inner + b"]"

    yield from _around(outer, row)


def _around(outer: list[int], row: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
    if not outer:
        yield from row()
        return
    for n in range(outer[0]):
        yield b"," if n else b"["
        yield from _around(outer[1:], row)
    yield b"]"


def _read_piece(piece: bytes, kind: _Kind, parser: simdjson.Parser) -> npt.NDArray[Any]:
    """The numbers of a flat array. ValueError or another error for anything else."""
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
