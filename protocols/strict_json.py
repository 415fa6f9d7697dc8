"""Reading JSON that strangers wrote: RFC 8259, UTF-8 alone, with bounds on depth and number length and one error type."""

from __future__ import annotations

import json
from collections import deque
from typing import Any, final

import msgspec

from protocols.events import Buffer

MAX_NUMBER = 400
"""Characters of one number. CPython itself reads integers of 4,300 digits in quadratic time."""

_BOM = b"\xef\xbb\xbf"
_NUMBER_BYTES = b"0123456789+-.eE"
_TO_ZERO = bytes(ord("0") if byte in _NUMBER_BYTES else ord(" ") for byte in range(256))
_TOO_LONG = b"0" * (MAX_NUMBER + 1)
_STEP = 7  # of a run of 401 characters every seventh is 57 in a row, wherever the run begins
_LONG_SAMPLE = _TOO_LONG[::_STEP][:-1]
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


@final
class JSONError(Exception):
    """The text is not JSON, or goes beyond a bound. `message` is fit for the peer: it echoes at most a shortened key."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def loads(
    data: Buffer, *, depth: int = 64, what: str = "body", allow_nonfinite: bool = False, duplicates: bool = True
) -> Any:  # a JSON value: the caller looks at its type
    """The value of a JSON text. Integers are exact, other numbers the nearest double; a byte order mark is skipped.

    JSONError, which begins with `what`, for anything but one JSON text in UTF-8, for arrays and objects nested deeper
    than `depth`, for a number of more than 400 characters or beyond the range of a double, and for an escaped
    surrogate without its pair. `NaN`, `Infinity` and `-Infinity`, which RFC 8259 does not know, are read only with
    `allow_nonfinite`. With `duplicates` the last of several equal keys of an object wins; without, they are an error.

    The text is copied once if it is a memoryview; what it costs beyond its values is a few passes at memory speed.
    """
    text = bytes(data) if isinstance(data, memoryview) else data
    if text.startswith(_BOM):
        text = text[len(_BOM) :]
    _check_bounds(text, depth, what)
    value = _decode(text, what, allow_nonfinite)
    # Outside of strings a colon stands for one pair. So equal counts prove that no key was lost, and only a text with
    # a colon in a string needs the second, slower count.
    if (
        not duplicates
        and text.count(b":") != (pairs := _count_pairs(value, text.count(b"{")))
        and _outside_strings(text).count(b":") != pairs
    ):
        _check_keys(text, what)
    return value


def _check_bounds(text: bytes | bytearray, depth: int, what: str) -> None:
    # The raw text can only overstate: strings are taken out where it speaks against the peer.
    if text.count(b"[") + text.count(b"{") > depth and _deeper_than(text, depth):
        raise JSONError(f"{what} is nested deeper than {depth} arrays and objects")
    if (
        len(text) > MAX_NUMBER
        and _LONG_SAMPLE in text[::_STEP].translate(_TO_ZERO)
        and _TOO_LONG in _outside_strings(text).translate(_TO_ZERO)
    ):
        raise JSONError(f"{what} holds a number of more than {MAX_NUMBER} characters")


def _decode(text: bytes | bytearray, what: str, allow_nonfinite: bool) -> Any:
    try:
        return msgspec.json.decode(text)
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
    """The standard library reads the three literals, but also what we refuse. So the same text with `null` in their
    place must be good first."""
    pieces = _split_strings(text)
    for name in (b"-Infinity", b"Infinity", b"NaN"):
        pieces[::2] = [piece.replace(name, b"null") for piece in pieces[::2]]
    _decode(b'"'.join(pieces), what, allow_nonfinite=False)
    return json.loads(text.decode())


def _split_strings(text: bytes | bytearray) -> list[bytes]:
    """The text cut at the quotes that open and close strings: what is outside at even places, inside at odd ones.

    Backslashes stand in runs; with the pairs of each run replaced, one that is left escapes what follows it. The
    replacements are strings of other characters that stay valid inside a string, so that the cut text still reads.
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"\\u005c").replace(b'\\"', b"\\u0022")
    return bytes(text).split(b'"')


def _outside_strings(text: bytes | bytearray) -> bytes:
    return b'""'.join(_split_strings(text)[::2])


def _deeper_than(text: bytes | bytearray, depth: int) -> bool:
    """Brackets alone are left, and each pass takes away the innermost pairs: one level."""
    if b"\\" not in text:  # so that runs of backslashes cannot grow together
        text = text.translate(None, _NOT_BRACKETS.replace(b'"', b""))
    brackets = _outside_strings(text).translate(_TO_SQUARE, _NOT_BRACKETS)
    for _ in range(depth):
        if b"[]" not in brackets:
            break
        brackets = brackets.replace(b"[]", b"")
    return b"[]" in brackets or brackets.count(b"[") > depth


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
