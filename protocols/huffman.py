"""Decodes HPACK's Huffman code (RFC 7541 section 5.2) with a table of what each byte means behind each code that has begun.
hpack's own decoder looks at half a byte at a time, and takes four times as long.

The table takes 2 MiB of memory, and some 15 ms when this module is imported.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from hpack.exceptions import HPACKDecodingError
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

_Row: TypeAlias = tuple[list["_Row"], list[bytes], bool]
"""For each value of the next byte: the row behind it, and the characters that it completes. Then True if a string may end
here: with a whole code, or with at most 7 bits of padding, which are all ones."""

_WRONG = "wrong"
"""The row behind the code that ends a string, which a string must not have: it leads to itself alone."""


def _rows() -> dict[str, _Row]:
    """The rows by the bits of the code that has begun."""
    codes = {
        f"{code:0{length}b}": symbol
        for symbol, (code, length) in enumerate(zip(REQUEST_CODES, REQUEST_CODES_LENGTH, strict=True))
    }
    begun = [*sorted({code[:length] for code in codes for length in range(len(code))}), _WRONG]
    places = {bits: place for place, bits in enumerate(begun)}
    # First for one more bit, then for two, four and eight. A character is a number from 256 on, two of them have 18 bits.
    nexts = np.full((len(begun), 2), places[_WRONG])
    texts = np.zeros((len(begun), 2), np.int64)
    for place, bits in enumerate(begun[:-1]):
        for bit in range(2):
            symbol = codes.get(code := f"{bits}{bit}")
            if symbol is None:
                nexts[place, bit] = places[code]
            elif symbol < 256:
                nexts[place, bit], texts[place, bit] = places[""], 256 + symbol
    for _ in range(3):
        more = texts[nexts]
        texts = np.where(more > 0, texts[:, :, None] << 9 | more, texts[:, :, None]).reshape(len(begun), -1)
        nexts = nexts[nexts].reshape(len(begun), -1)
    known = {text: bytes((text >> 9 & 255, text & 255)[text < 512 :]) for text in {*texts.ravel().tolist()}} | {0: b""}
    rows: list[_Row] = [([], [], bits in "1111111") for bits in begun]
    for row, follow, completed in zip(rows, nexts.tolist(), texts.tolist(), strict=True):
        row[0].extend([rows[place] for place in follow])
        row[1].extend([known[text] for text in completed])
    return dict(zip(begun, rows, strict=True))


_ROWS = _rows()
_FIRST, _INVALID = _ROWS[""], _ROWS[_WRONG]
del _ROWS


def decode_huffman(data: bytes) -> bytes:
    """The text of a coded string. HPACKDecodingError, as hpack has it, if it is none."""
    nexts, texts, whole = _FIRST
    decoded = bytearray()
    for byte in data:
        decoded += texts[byte]
        nexts, texts, whole = nexts[byte]
    if not whole:
        raise HPACKDecodingError("Invalid Huffman string" if nexts is _INVALID[0] else "Incomplete Huffman string")
    return bytes(decoded)
