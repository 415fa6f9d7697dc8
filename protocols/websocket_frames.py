"""The codec of WebSocket data frames: headers, masking, and the memory that a large frame lands in."""

from __future__ import annotations

import enum
import struct
from typing import final

import numpy as np

from protocols.events import Buffer, Opcode

FIN = 0x80
MASKED = 0x80

# Where unmasking by one big integer, linear with a steep slope, starts to cost more than numpy's constant.
_WIDE = 600
_WORD = np.dtype("<u4")
_MEDIUM_HEADER = struct.Struct("!BBH")
_LONG_HEADER = struct.Struct("!BBQ")


class Lane(enum.Enum):
    """What `read_header` says when it has no header to give."""

    MORE = enum.auto()
    """The header is not complete."""

    OTHER = enum.auto()
    """Not the header of a well-formed data frame: a control frame, or a violation."""


def write_header(first: int, length: int, masked: int) -> bytes:
    """The header, without masking key, of a frame: RFC 6455 section 5.2, the length in its shortest form. `first`
    holds FIN and opcode; `masked` is MASKED or 0."""
    if length < 126:
        return bytes((first, masked | length))
    if length < 65536:
        return _MEDIUM_HEADER.pack(first, masked | 126, length)
    return _LONG_HEADER.pack(first, masked | 127, length)


def read_header(buffer: bytearray, at: int, masked: bool) -> tuple[int, int] | Lane:
    """Payload length and payload position of the data frame that starts at `at`; its key, if `masked`, is the four
    bytes before that position.

    Lane.OTHER, as soon as it is certain, for everything else: extension bits, other opcodes, a mask that must not be
    there or is missing, a length that is not in its shortest form or not below 2**63.
    """
    have = len(buffer) - at
    if have < 2:
        return Lane.MORE
    second = buffer[at + 1]
    if buffer[at] & 0x7F > 2 or (second >= MASKED) is not masked:
        return Lane.OTHER
    length, start = second & 0x7F, at + 2
    if length == 126:
        if have < 4:
            return Lane.MORE
        length, start = buffer[at + 2] << 8 | buffer[at + 3], at + 4
        if length < 126:
            return Lane.OTHER
    elif length == 127:
        if have < 10:
            return Lane.MORE
        length, start = int.from_bytes(buffer[at + 2 : at + 10], "big"), at + 10
        if length < 65536 or length >> 63:
            return Lane.OTHER
    if masked:
        start += 4
        if start > len(buffer):
            return Lane.MORE
    return length, start


def mask(data: bytes | bytearray, key: bytes | bytearray) -> bytes:
    """`data` masked with the four bytes of `key`, which also unmasks: RFC 6455 section 5.3."""
    length = len(data)
    if length >= _WIDE:
        out = bytearray(data)
        mask_in_place(out, 0, length, key)
        return bytes(out)
    repeated = int.from_bytes((key * (length + 3 >> 2))[:length], "little")
    return (int.from_bytes(data, "little") ^ repeated).to_bytes(length, "little")


def mask_in_place(buffer: bytearray | memoryview, start: int, stop: int, key: bytes | bytearray) -> None:
    """Masks buffer[start:stop], whose payload begins at 0; `start` is a multiple of four."""
    words = stop - start >> 2
    if words:
        body = np.frombuffer(buffer, _WORD, words, start)
        np.bitwise_xor(body, np.frombuffer(key, _WORD), out=body)
    for i in range(start + 4 * words, stop):
        buffer[i] ^= key[i & 3]


def flat(buffer: Buffer) -> Buffer:
    """The same bytes such that len() counts bytes and slices cut them; copied only where memory is not contiguous."""
    if not isinstance(buffer, memoryview):
        return buffer
    return buffer.cast("B") if buffer.c_contiguous and buffer.nbytes else buffer.tobytes()


@final
class Landing:
    """A large frame under way. Its payload is received into `buffer`, in place and unmasked as it fills; nothing else
    holds a copy."""

    __slots__ = ("_clear", "_filled", "_key", "buffer", "fin", "opcode")

    # Unmasked in steps that the processor's cache still holds.
    _STEP = 65536

    def __init__(self, opcode: Opcode, fin: bool, key: bytes | None, buffer: bytearray | memoryview) -> None:
        self.opcode = opcode
        self.fin = fin
        self.buffer = buffer
        self._key = key
        self._filled = self._clear = 0

    @property
    def rest(self) -> memoryview:
        """Where the next bytes of the payload belong; empty once it is complete."""
        return memoryview(self.buffer)[self._filled :]

    @property
    def missing(self) -> int:
        return len(self.buffer) - self._filled

    def advance(self, n: int) -> None:
        """The first n bytes of `rest` have been received."""
        self._filled += n
        if self._key is not None and (not self.missing or self._filled - self._clear >= self._STEP):
            stop = self._filled if not self.missing else self._filled & ~3
            mask_in_place(self.buffer, self._clear, stop, self._key)
            self._clear = stop
