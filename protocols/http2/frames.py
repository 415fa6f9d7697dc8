"""HTTP/2 frames as bytes: cuts whole frames out of the input, and writes the few that h2 does not."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from typing import final

import msgspec

from protocols.errors import RemoteProtocolError
from protocols.events import Buffer

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = 9
"""The size of a frame head in bytes (RFC 9113 section 4.1)."""
LARGEST_DATA = 16_384
"""The longest payload of a DATA frame that we write: one turn of the round robin, and accepted by any peer (section 4.2)."""
RUN = 16
"""The most DATA frames that are examined in one step, which keeps the step short even if none of them can be taken."""
END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
LARGEST_ID = 2**31 - 1
GOODBYES = (b"leaving1", b"leaving2")
"""The data of the PINGs behind a first GOAWAY, each sent when the one before it is acknowledged."""
_WINDOW_UPDATE = struct.Struct(">IBII")
FRAME_HEAD = struct.Struct(">IBI")
"""Length and kind as one number, flags, and the stream with its reserved bit."""


class Kind(enum.IntEnum):
    """The frame types of RFC 9113 section 6. Any type above CONTINUATION is an extension and may be ignored."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Code(enum.IntEnum):
    """The error codes of RFC 9113 section 7 that we send ourselves."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    ENHANCE_YOUR_CALM = 11


@final
class HTTP2Frame(msgspec.Struct, frozen=True, gc=False):
    """One whole frame. `kind` is a plain number because extensions have no name. `reserved` is the bit before `stream`."""

    kind: int
    flags: int
    stream: int
    payload: bytes
    reserved: bool = False

    @property
    def head(self) -> bytes:
        """The frame's nine bytes, as they came."""
        return FRAME_HEAD.pack(len(self.payload) << 8 | self.kind, self.flags, self.stream | self.reserved << 31)


def data_head(length: int, *, end: bool, stream: int) -> bytes:
    """The nine bytes before `length` bytes of DATA."""
    return FRAME_HEAD.pack(length << 8, END_STREAM if end else 0, stream)


def rst_stream(stream: int, code: int) -> bytes:
    """A whole RST_STREAM frame."""
    return struct.pack(">IBII", 4 << 8 | Kind.RST_STREAM, 0, stream, code)


def window_update(stream: int, increment: int) -> bytes:
    """A whole WINDOW_UPDATE frame."""
    return _WINDOW_UPDATE.pack(4 << 8 | Kind.WINDOW_UPDATE, 0, stream, increment)


def head_frames(stream: int, block: bytes, largest: int, *, end: bool = False) -> bytes:
    """A header block as one HEADERS frame and CONTINUATION frames with at most `largest` bytes each. With `end`, the HEADERS
    frame ends the stream (RFC 9113 section 6.2)."""
    first = END_STREAM if end else 0
    if len(block) <= largest:
        return FRAME_HEAD.pack(len(block) << 8 | Kind.HEADERS, END_HEADERS | first, stream) + block
    pieces = [block[at : at + largest] for at in range(0, len(block), largest)]
    kinds = [Kind.HEADERS] + [Kind.CONTINUATION] * (len(pieces) - 1)
    flags = [first] + [0] * (len(pieces) - 2) + [END_HEADERS]
    return b"".join(
        FRAME_HEAD.pack(len(piece) << 8 | kind, flag, stream) + piece
        for piece, kind, flag in zip(pieces, kinds, flags, strict=True)
    )


def goaway(code: int, last_stream: int, debug: bytes) -> bytes:
    """A whole GOAWAY frame."""
    return struct.pack(">IBIII", (8 + len(debug)) << 8 | Kind.GOAWAY, 0, 0, last_stream, code) + debug


def settings(values: dict[int, int]) -> bytes:
    """A whole SETTINGS frame."""
    body = b"".join(struct.pack(">HI", setting, value) for setting, value in values.items())
    return FRAME_HEAD.pack(len(body) << 8 | Kind.SETTINGS, 0, 0) + body


def unpad(frame: HTTP2Frame) -> bytes | None:
    """The payload of a DATA frame without its padding. None if the padding is longer than the frame (section 6.1)."""
    if not frame.flags & PADDED:
        return frame.payload
    if not frame.payload or frame.payload[0] >= len(frame.payload):
        return None
    return frame.payload[1 : len(frame.payload) - frame.payload[0]]


def copy_payloads(buffer: bytes, payloads: Iterable[tuple[int, int]], memory: memoryview) -> None:
    """Copies payloads, each given by its start in `buffer` and its length, one behind the other to the start of `memory`."""
    view, at = memoryview(buffer), 0
    for start, n in payloads:
        memory[at : at + n] = view[start : start + n]
        at += n


@final
class FrameSplitter:
    """Cuts the input into whole frames, and refuses frames that are too large before it buffers them.

    It holds at most the last input and one incomplete frame. After a RemoteProtocolError it cannot be used again, but
    `pending_head` still shows the head of the refused frame.
    """

    __slots__ = (
        "_blocked",
        "_continuations",
        "_continued",
        "_first",
        "_preface",
        "_settings_entries",
        "at",
        "block",
        "block_stream",
        "buffer",
        "frame_size",
    )

    def __init__(self, *, preface: bool, frame_size: int, continuations: int, block: int, settings_entries: int) -> None:
        self.frame_size = frame_size
        """The longest payload that may arrive. Raise it when the peer has acknowledged a larger one."""
        self.block_stream = 0
        """The stream whose header block is incomplete: HEADERS or PUSH_PROMISE came without END_HEADERS. 0 if there is
        none."""
        self.buffer: bytes | bytearray = b""
        """The input. It is a bytearray while a large frame comes in small pieces."""
        self.at = 0
        """The start of the next frame in `buffer`. A caller that takes this frame itself then calls `skip`."""
        self._preface = PREFACE if preface else b""
        self._first = True
        self._continuations = continuations
        self._continued = 0
        self.block = block
        """The longest header block before decoding, in bytes."""
        self._blocked = 0
        self._settings_entries = settings_entries

    def receive(self, data: Buffer) -> None:
        """Stores a copy of `data`."""
        buffer, at = self.buffer, self.at
        rest = len(buffer) - at
        if not rest:
            self.buffer, self.at = bytes(data), 0
        elif rest < len(data):
            self.buffer, self.at = b"".join((memoryview(buffer)[at:], data)), 0
        else:
            # In a bytearray, each byte is copied a bounded number of times, however small the pieces of the input are.
            if not isinstance(buffer, bytearray):
                buffer = bytearray(memoryview(buffer)[at:])
                self.buffer, self.at = buffer, 0
            buffer += data

    def clear(self) -> None:
        """Drops the input."""
        self.buffer, self.at = b"", 0

    def skip(self, end: int) -> None:
        """Sets the start of the next frame to `end`."""
        if end == len(self.buffer):
            self.buffer, self.at = b"", 0
        else:
            self.at = end

    def skip_block(self, length: int) -> None:
        """Skips a HEADERS frame that is a whole header block of `length` bytes."""
        self._continued, self._blocked = 0, length
        self.skip(self.at + HEAD + length)

    @property
    def expects_settings(self) -> bool:
        """True until the peer has sent its first frame, and a client the preface before it."""
        return self._first

    @property
    def at_boundary(self) -> bool:
        """True if the input ends with a whole frame and outside of a header block."""
        whole_preface = not self._preface or self._preface is PREFACE
        return not self.buffer and not self.block_stream and whole_preface

    @property
    def pending_head(self) -> bytes:
        """The head of the next frame, as far as it has come."""
        return bytes(self.buffer[self.at : self.at + HEAD])

    def next_frame(self) -> HTTP2Frame | None:
        """The next whole frame, or None until more bytes are here.

        RemoteProtocolError for a wrong preface, a first frame that is not SETTINGS (section 3.4), a frame above
        `frame_size`, and a header block or SETTINGS frame beyond the limits.
        """
        if self._preface:
            self._take_preface()
        buffer, at = self.buffer, self.at
        if len(buffer) - at < HEAD or self._preface:
            return None
        length_and_kind, flags, stream = FRAME_HEAD.unpack_from(buffer, at)
        length, kind = length_and_kind >> 8, length_and_kind & 0xFF
        if kind or self._first or length > self.frame_size:
            self._check(kind, flags, length)
        start = at + HEAD
        end = start + length
        if len(buffer) < end:
            return None
        if type(buffer) is not bytes:
            self.buffer = buffer = bytes(buffer)
        frame = HTTP2Frame(kind, flags, stream & LARGEST_ID, buffer[start:end], stream > LARGEST_ID)
        self.skip(end)
        if kind:
            self._first = False
            self._note_block(kind, flags, frame.stream, length)
        return frame

    def payloads(
        self, buffer: bytes, stream: int, room: int, expected: int | None
    ) -> tuple[int, list[tuple[int, int]], int, bool]:
        """Finds the stream's plain DATA frames at the front of `buffer`, which must be the input. It takes whole frames
        without padding, at most RUN of them and at most `room` bytes of payload. The last one may end the stream if the
        payload then has the `expected` size.

        Returns the total payload size, the start and length of each payload in the buffer, the start of the next frame, and
        True if the stream ends.
        """
        at, size, total, ended = self.at, len(buffer), 0, False
        found: list[tuple[int, int]] = []
        while size - at >= HEAD and not ended and len(found) < RUN:
            length_and_kind, flags, number = FRAME_HEAD.unpack_from(buffer, at)
            n, start = length_and_kind >> 8, at + HEAD
            if number != stream or length_and_kind & 0xFF or flags > END_STREAM or not 0 < n <= self.frame_size:
                break
            if n > size - start or total + n > room or (flags and expected not in (None, total + n)):
                break
            found.append((start, n))
            at, total, ended = start + n, total + n, bool(flags)
        return total, found, at, ended

    def _take_preface(self) -> None:
        n = min(len(self._preface), len(self.buffer) - self.at)
        if self.buffer[self.at : self.at + n] != self._preface[:n]:
            raise RemoteProtocolError("the connection does not begin with the HTTP/2 preface", wire_code=Code.PROTOCOL_ERROR)
        if n:
            self._preface = self._preface[n:]
            self.skip(self.at + n)

    def _check(self, kind: int, flags: int, length: int) -> None:
        if self._first and (kind != Kind.SETTINGS or flags & ACK):
            raise RemoteProtocolError("the first frame is not SETTINGS", wire_code=Code.PROTOCOL_ERROR)
        if length > self.frame_size:
            raise RemoteProtocolError(
                f"a frame of {length} bytes; MAX_FRAME_SIZE is {self.frame_size}", wire_code=Code.FRAME_SIZE_ERROR
            )
        if kind == Kind.DATA:
            return
        if kind == Kind.SETTINGS and length > 6 * self._settings_entries:
            raise RemoteProtocolError(
                f"SETTINGS with {length // 6} entries; the limit is {self._settings_entries} (http2.settings_entries)",
                wire_code=Code.ENHANCE_YOUR_CALM,
            )
        if kind in (Kind.HEADERS, Kind.PUSH_PROMISE) and not self.block_stream:
            self._check_block(0, length)
        elif kind == Kind.CONTINUATION:
            self._check_block(self._continued + 1, self._blocked + length)

    def _check_block(self, continued: int, size: int) -> None:
        if continued > self._continuations:
            raise RemoteProtocolError(
                f"a header block with more than {self._continuations} CONTINUATION frames (http2.continuations)",
                wire_code=Code.ENHANCE_YOUR_CALM,
            )
        if size > self.block:
            raise RemoteProtocolError(
                f"a header block of {size} bytes before decoding; the limit is {self.block}, twice limits.head",
                wire_code=Code.ENHANCE_YOUR_CALM,
            )

    def _note_block(self, kind: int, flags: int, stream: int, length: int) -> None:
        if kind == Kind.CONTINUATION:
            self._continued += 1
            self._blocked += length
        elif kind in (Kind.HEADERS, Kind.PUSH_PROMISE):
            self._continued, self._blocked = 0, length
        else:
            return
        self.block_stream = 0 if flags & END_HEADERS else stream
