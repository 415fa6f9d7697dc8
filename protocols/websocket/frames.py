"""The codec of WebSocket data frames: headers, masking, and the memory of large frames."""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from protocols.events import Buffer, Frame, Opcode

FIN = 0x80
MASKED = 0x80

LARGE = 65536
"""Frames with a payload of this many bytes or more are received into their own memory."""

Legal: TypeAlias = Mapping[int, tuple[Opcode, bool]]
"""The first bytes that a data frame may have at some point, with the opcode and FIN that they stand for."""

OPENING: Legal = {
    0x01: (Opcode.TEXT, False),
    0x02: (Opcode.BINARY, False),
    0x81: (Opcode.TEXT, True),
    0x82: (Opcode.BINARY, True),
}
"""Between messages: a new one must begin."""

CONTINUING: Legal = {0x00: (Opcode.CONTINUATION, False), 0x80: (Opcode.CONTINUATION, True)}
"""Inside a message: a continuation must come."""

# From this length on, one big integer, whose cost is linear and steep, is slower than numpy with its constant cost.
_WIDE = 400
# A run is decoded ahead of its consumer: at most this many frames, and no further frame after this many bytes.
_RUN_FRAMES = 64
_RUN_BYTES = 65536
# From this length on, a copy out of the run costs more than unmasking the frame alone.
_ALONE = 4096

_OCTET = np.dtype("u1")
_WORD = np.dtype("<u4")
_GAPS = tuple(map(bytes, range(9)))
_integer, _frombuffer, _bitwise_xor = int.from_bytes, np.frombuffer, np.bitwise_xor
_short_header = struct.Struct("!BB").pack
_medium_header = struct.Struct("!BBH").pack
_long_header = struct.Struct("!BBQ").pack


class NextBytes(enum.Enum):
    """The answer of `read_header` if it has no header."""

    MORE = enum.auto()
    """The header is not complete."""

    OTHER = enum.auto()
    """Not the header of a well-formed data frame, but a control frame or a violation."""


def write_header(first: int, length: int, masked: int) -> bytes:
    """The header of a frame without its masking key, with the length in its shortest form (RFC 6455 section 5.2). `first`
    holds FIN and opcode; `masked` is MASKED or 0."""
    if length < 126:
        return _short_header(first, masked | length)
    if length < 65536:
        return _medium_header(first, masked | 126, length)
    return _long_header(first, masked | 127, length)


def read_header(buffer: bytes | bytearray, at: int, masked: bool) -> tuple[int, int] | NextBytes:
    """The payload length and position of the data frame at `at`. If `masked`, its key is the four bytes before that
    position.

    NextBytes.OTHER, as soon as it is certain, for anything else: extension bits, other opcodes, a mask that is missing or
    not allowed, and a length that is not in its shortest form or not below 2**63.
    """
    have = len(buffer) - at
    if have < 2:
        return NextBytes.MORE
    second = buffer[at + 1]
    if buffer[at] & 0x7F > 2 or (second >= MASKED) is not masked:
        return NextBytes.OTHER
    length, start = second & 0x7F, at + 2
    if length == 126:
        if have < 4:
            return NextBytes.MORE
        length, start = buffer[at + 2] << 8 | buffer[at + 3], at + 4
        if length < 126:
            return NextBytes.OTHER
    elif length == 127:
        if have < 10:
            return NextBytes.MORE
        length, start = int.from_bytes(buffer[at + 2 : at + 10], "big"), at + 10
        if length < 65536 or length >> 63:
            return NextBytes.OTHER
    if masked:
        start += 4
        if start > len(buffer):
            return NextBytes.MORE
    return length, start


Run: TypeAlias = list[tuple[Frame, int]]
"""Consecutive frames, the last one first, each with its length on the wire."""


def read_masked(buffer: bytes | bytearray, at: int, legal: Legal, most: int) -> Frame | Run | None:
    """The usual data frames at `at` that are whole: in order, masked, with a payload of at most `most` bytes, and with a
    length of one byte or three in its shortest form. A frame that is the rest of the buffer is returned alone.

    None for anything else, right or wrong: `read_header` and its caller decide about that. They would accept the frames
    returned here too, with the same result.
    """
    size = len(buffer)
    run: list[tuple[tuple[Opcode, bool], int, int, int]] | None = None
    while size - at > 5 and (kind := legal.get(buffer[at])):
        length = buffer[at + 1]
        if length == 254:
            length, start = buffer[at + 2] << 8 | buffer[at + 3], at + 8
            if length < 126:
                break
        elif 128 <= length < 254:
            length, start = length - 128, at + 6
        else:
            break
        end = start + length
        if end > size or length > most:
            break
        if run is None:
            if end == size or length >= _ALONE:
                frame = Frame(opcode=kind[0], fin=kind[1], data=unmask(buffer, start, end))
                return frame if end == size else [(frame, end - at)]
            run, begin, done = [], start, start
            pads: list[bytes | bytearray] = []
        # One mask covers the whole run, with zeros at the headers. A key that extends beyond its payload spoils bytes of the
        # next header, which is not read again.
        words = length + 3 >> 2
        pads += (_GAPS[start - done], buffer[start - 4 : start] * words)
        done = start + 4 * words
        run.append((kind, start - begin, end - begin, end - at))
        legal, at = OPENING if kind[1] else CONTINUING, end
        if len(run) == _RUN_FRAMES or end - begin >= _RUN_BYTES:
            break
    if run is None:
        return None
    clear = _xor(buffer, begin, at, b"".join(pads))
    return [(Frame(opcode=kind[0], fin=kind[1], data=clear[start:end]), n) for kind, start, end, n in reversed(run)]


def read_clear(buffer: bytes | bytearray, at: int, legal: Legal, most: int) -> Frame | Run | None:
    """Reads frames without a mask as `read_masked` reads masked ones."""
    size = len(buffer)
    run: Run = []
    while size - at > 3 and (kind := legal.get(buffer[at])):
        length = buffer[at + 1]
        if length == 126:
            length, start = buffer[at + 2] << 8 | buffer[at + 3], at + 4
            if length < 126:
                break
        elif length < 126:
            start = at + 2
        else:
            break
        end = start + length
        if end > size or length > most:
            break
        frame = Frame(opcode=kind[0], fin=kind[1], data=bytes(buffer[start:end]))
        if end == size and not run:
            return frame
        run.append((frame, end - at))
        legal, at = OPENING if kind[1] else CONTINUING, end
        if len(run) == _RUN_FRAMES:
            break
    run.reverse()
    return run or None


def mask(data: bytes | bytearray, key: bytes | bytearray) -> bytes:
    """`data` masked with the four bytes of `key`, which also unmasks it (RFC 6455 section 5.3)."""
    return unmask(key + data, 4, 4 + len(data))


def unmask(buffer: bytes | bytearray, start: int, stop: int) -> bytes:
    """The payload buffer[start:stop], unmasked with the four bytes before it."""
    length = stop - start
    if length & 3 or length < _WIDE:
        return _xor(buffer, start, stop, buffer[start - 4 : start] * (length + 3 >> 2))
    words = _frombuffer(buffer, _WORD, (length >> 2) + 1, start - 4)
    return _bitwise_xor(words[1:], words[0, ...]).tobytes()


def _xor(buffer: bytes | bytearray, start: int, stop: int, pad: bytes | bytearray) -> bytes:
    length = stop - start
    if length < _WIDE:
        number = _integer(buffer[start:stop], "little") ^ _integer(pad[:length], "little")
        return number.to_bytes(length, "little")
    return _bitwise_xor(_frombuffer(buffer, _OCTET, length, start), _frombuffer(pad, _OCTET, length)).tobytes()


def mask_in_place(buffer: bytearray | memoryview, start: int, stop: int, key: bytes | bytearray) -> None:
    """Masks buffer[start:stop]. The payload must begin at 0, and `start` must be a multiple of four."""
    words = stop - start >> 2
    if words:
        body = _frombuffer(buffer, _WORD, words, start)
        _bitwise_xor(body, _frombuffer(key, _WORD), out=body)
    for i in range(start + 4 * words, stop):
        buffer[i] ^= key[i & 3]


def flat(buffer: Buffer) -> Buffer:
    """The same bytes, with a len() and slices that count bytes. They are copied only if the memory is not contiguous."""
    if not isinstance(buffer, memoryview):
        return buffer
    return buffer.cast("B") if buffer.c_contiguous and buffer.nbytes else buffer.tobytes()


class FrameMemory:
    """The memory of large frames. This one is without bounds: drivers with bounds have their own."""

    __slots__ = ()

    def allocate(self, n: int) -> bytearray | memoryview | None:
        """Returns the memory of a frame of n bytes, which should take address space alone. None: it can never be had."""
        return bytearray(n)

    def pay_landing(self, n: int) -> bool:
        """Pays for n more bytes of that memory, which are about to be filled. False: it cannot be had now."""
        return True


class Landing:
    """A large frame while it arrives. Its payload is received into `buffer` and unmasked there; there is no other copy."""

    __slots__ = ("_clear", "_key", "buffer", "filled", "fin", "opcode", "paid")

    # Bytes are unmasked in steps that are still in the processor's cache.
    _STEP = 65536

    def __init__(self, opcode: Opcode, fin: bool, key: bytes | None, buffer: bytearray | memoryview) -> None:
        self.opcode = opcode
        self.fin = fin
        self.buffer = buffer
        self._key = key
        self._clear = 0
        self.filled = 0
        """Bytes that are here."""
        self.paid = 0
        """Bytes of memory that are paid for, and may be filled."""

    @property
    def rest(self) -> memoryview:
        """The memory for the next bytes of the payload, as far as it is paid for."""
        return memoryview(self.buffer)[self.filled : self.paid]

    @property
    def missing(self) -> int:
        return len(self.buffer) - self.filled

    def advance(self, n: int) -> None:
        """Tells that the first n bytes of `rest` have been received."""
        self.filled += n
        if self._key is not None and (not self.missing or self.filled - self._clear >= self._STEP):
            stop = self.filled if not self.missing else self.filled & ~3
            mask_in_place(self.buffer, self._clear, stop, self._key)
            self._clear = stop
