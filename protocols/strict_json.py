"""Reading JSON that strangers wrote: RFC 8259, UTF-8 alone, with bounds on depth and number length and one error type."""

from __future__ import annotations

import json
from collections import deque
from typing import Any, final

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from protocols.events import Buffer

MAX_NUMBER = 400
"""Characters of one number. CPython itself reads integers of 4,300 digits in quadratic time."""

_BOM = b"\xef\xbb\xbf"
_NUMBER_BYTES = b"0123456789+-.eE"
_TO_ZERO = bytes(ord("0") if byte in _NUMBER_BYTES else ord(" ") for byte in range(256))
_TOO_LONG = b"0" * (MAX_NUMBER + 1)
_DIGITS_TO_ZERO = bytes(ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256))
_BEYOND_64_BITS = b"0" * 19  # may be
_PAIR_SIGNS = (b'":', b" :", b"\t:", b"\n:", b"\r:")
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_NO_STRUCTURE = _NOT_BRACKETS.replace(b'"', b"")
_CHUNK = 2**16  # bytes, or brackets, that numpy looks at together: temporary arrays stay small
_LARGE = 2**14  # bytes from which on numpy looks through a text faster than `bytes` does
_SHORT = 2**10  # bytes that may all be floats of the kind of which the decoder takes 8 us each, as for 1e300


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
) -> Any:  # a JSON value: the caller looks at its type
    """The value of a JSON text. Integers are exact, other numbers the nearest double; a byte order mark is skipped.

    JSONError, which begins with `what`, for anything but one JSON text in UTF-8, for arrays and objects nested deeper
    than `depth`, for a number of more than 400 characters or beyond the range of a double, and for an escaped
    surrogate without its pair. `NaN`, `Infinity` and `-Infinity`, which RFC 8259 does not know, are read only with
    `allow_nonfinite`. With `duplicates` the last of several equal keys of an object wins; without, they are an error.
    Without `floats` numbers that are no integers are left as text, of whatever range.

    The text is copied once if it is a memoryview. What it costs beyond its values is a few passes at memory speed and,
    where it looks suspicious, some four times its length of memory while they last.
    """
    text = bytes(data) if isinstance(data, memoryview) else data
    if text.startswith(_BOM):
        text = text[len(_BOM) :]
    _check_bounds(text, depth, what)
    value = _decode_all(text, what, allow_nonfinite) if floats else _decode(text, what, allow_nonfinite, _SHALLOW)
    if not duplicates and _may_repeat_keys(text, value):
        _check_keys(text, what)
    return value


def is_plain(text: bytes, pairs: int) -> bool:
    """Whether a JSON text, which a typed decoder has read, is seen at a glance to have no number of more than 400
    characters and no more members in its objects than the `pairs` that were found: then no member was there twice.
    False where that is not certain."""
    if len(text) > MAX_NUMBER and may_hold_long_number(text):
        return False
    return _count(text, b":") == pairs or sum(map(text.count, _PAIR_SIGNS)) == pairs


def _check_bounds(text: bytes | bytearray, depth: int, what: str) -> None:
    # The raw text can only overstate: strings are taken out where it speaks against the peer.
    if _count(text, b"[") + _count(text, b"{") > depth and _deeper_than(text, depth):
        raise JSONError(f"{what} is nested deeper than {depth} arrays and objects")
    if len(text) > MAX_NUMBER and may_hold_long_number(text) and _TOO_LONG in _outside_strings(text).translate(_TO_ZERO):
        raise JSONError(f"{what} holds a number of more than {MAX_NUMBER} characters")


def _count(text: bytes | bytearray, byte: bytes) -> int:
    if len(text) < _LARGE:
        return text.count(byte)
    codes, code = _codes(text), ord(byte)
    return sum(int(np.count_nonzero(codes[at : at + _CHUNK] == code)) for at in range(0, len(codes), _CHUNK))


def may_hold_long_number(text: bytes | bytearray) -> bool:
    """Whether a JSON text may have a number of more than 400 characters. False is certain: no number has a comma, and
    one that is too long fills a block of half its length."""
    if len(text) >= _LARGE:
        block = MAX_NUMBER // 2
        blocks = _codes(text)[: len(text) // block * block].reshape(-1, block)
        rows = _CHUNK // block
        if all((blocks[at : at + rows] == ord(",")).any(axis=1).all() for at in range(0, len(blocks), rows)):
            return False
    return _TOO_LONG in text.translate(_TO_ZERO)


def _decode_all(text: bytes | bytearray, what: str, allow_nonfinite: bool) -> Any:
    if len(text) <= _SHORT:
        return _decode(text, what, allow_nonfinite, _DECODER)
    if _BEYOND_64_BITS not in text.translate(_DIGITS_TO_ZERO):  # orjson would make a double of such an integer
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            pass  # msgspec has the better words
    return _decode(text, what, allow_nonfinite, _STEADY)


def _decode(text: bytes | bytearray, what: str, allow_nonfinite: bool, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(text)
    except UnicodeDecodeError:
        raise JSONError(f"{what} is not UTF-8") from None
    except RecursionError:
        raise JSONError(f"{what} is nested too deep to be read") from None
    except msgspec.DecodeError as error:
        if allow_nonfinite and (b"NaN" in text or b"Infinity" in text):
            return _decode_nonfinite(text, what)
        raise JSONError(f"{what} is {_reason(text, error)}") from None


def _reason(text: bytes | bytearray, error: msgspec.DecodeError) -> str:
    return f"not JSON: {error}" if text.strip() else "empty where JSON was expected"


def _decode_nonfinite(text: bytes | bytearray, what: str) -> Any:
    """The standard library reads the three literals, but also what is refused here. So the same text with a number of
    their length in their place must be good first; the spaces keep it from growing together with what stands beside."""
    plain = text.replace(b"-Infinity", b"    0    ").replace(b"Infinity", b"   0    ").replace(b"NaN", b" 0 ")
    plain = np.where(_inside_strings(text), _codes(text), _codes(plain)).tobytes()
    try:
        orjson.loads(plain)
    except orjson.JSONDecodeError:  # also for integers beyond a double, which are good
        _decode(plain, what, False, _STEADY)
    return json.loads(text.decode())


def _codes(text: bytes | bytearray) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text, np.uint8)


def _inside_strings(text: bytes | bytearray) -> npt.NDArray[np.bool_]:
    """True for each byte from an opening quote to the last before the closing one, False for the others.

    Backslashes stand in runs; with the pairs of each run gone, one that is left escapes what follows it. Where a text
    has backslashes outside of strings this is wrong from the first of them on, which is where its decoder stops.
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"..").replace(b'\\"', b"..")
    inside: npt.NDArray[np.bool_] = np.bitwise_xor.accumulate(_codes(text) == ord('"'))  # each quote turns it over
    return inside


def _outside_strings(text: bytes | bytearray) -> bytes:
    """The text without its strings; of each its closing quote is left, and keeps what stood beside it apart."""
    return bytes(_codes(text)[~_inside_strings(text)])


def _deeper_than(text: bytes | bytearray, depth: int) -> bool:
    if b"\\" not in text:  # so that runs of backslashes cannot grow together
        text = text.translate(None, _NO_STRUCTURE)
    brackets = _outside_strings(text).translate(_TO_SQUARE, _NOT_BRACKETS)
    steps = np.array(ord("\\"), np.int8) - _codes(brackets).view(np.int8)  # 1 for [ and -1 for ]: it stands between
    level = 0
    for start in range(0, len(steps), _CHUNK):
        levels = np.cumsum(steps[start : start + _CHUNK], dtype=np.int64) + level
        if np.any(levels > depth):
            return True
        level = int(levels[-1])
    return False


def _may_repeat_keys(text: bytes | bytearray, value: Any) -> bool:
    """False is certain. Outside of strings each colon stands for one pair, after a quote or white space. So where as
    few are found as the value has pairs, no key was lost; better counts are taken as worse ones leave it open."""
    pairs = _count_pairs(value, _count(text, b"{"))
    return (
        _count(text, b":") != pairs
        and sum(map(text.count, _PAIR_SIGNS)) != pairs
        and _outside_strings(text).count(b":") != pairs
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


def _check_keys(text: bytes | bytearray, what: str) -> None:
    def check(pairs: list[tuple[str, Any]]) -> None:
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise JSONError(f"{what} has an object with two members {key[:60]!r:.100}")
            seen.add(key)

    json.loads(text.decode(), object_pairs_hook=check)
