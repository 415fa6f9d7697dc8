"""gRPC message framing, in either role: a flag byte, a length of four bytes, and that many bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeAlias, final

from protocols.buffers import untouched
from protocols.content_coding import Coding
from protocols.errors import LocalProtocolError
from protocols.events import Buffer, Signal
from protocols.grpc.compression import LEVEL, deflate_message, inflate_message
from protocols.grpc.status import GRPCError, StatusCode

PREFIX: Final = 5
"""Bytes before each message: the Compressed-Flag and the Message-Length (PROTOCOL-HTTP2)."""
MAX_LENGTH: Final = 2**32 - 1
"""The longest message that a prefix can announce, in bytes."""
LARGE: Final = 16 * 2**10
"""A shorter message is written as one buffer, which costs less than several. From this size on it goes by reference."""

_PREFIX = struct.Struct(">BI")
_NOTHING = memoryview(b"")

NeedData: TypeAlias = Literal[Signal.NEED_DATA]


class RawMessage(NamedTuple):
    """A message as it is on the wire. If it is `compressed`, `data` must be inflated."""

    compressed: bool
    data: memoryview


def length_of(begin: Buffer) -> int:
    """Returns how many bytes the message that begins so has, with its prefix; PREFIX if not even all of that is here."""
    return PREFIX if len(begin) < PREFIX else PREFIX + int.from_bytes(begin[1:PREFIX], "big")


# ---- writing


def encode_prefix(length: int, *, compressed: bool = False) -> bytes:
    """Returns the prefix of a message of `length` bytes. LocalProtocolError above MAX_LENGTH."""
    if length > MAX_LENGTH:
        raise LocalProtocolError(f"a gRPC message has at most {MAX_LENGTH} bytes, not {length}")
    return _PREFIX.pack(compressed, length)


def frame(buffers: Sequence[Buffer], *, compressed: bool = False) -> tuple[Buffer, ...]:
    """Returns the buffers to write for a message that consists of these buffers in order. It is one buffer if the message
    has less than 16 KiB, else the prefix and the buffers by reference, which must not change until they are written.
    `compressed` tells that they hold the compressed message. LocalProtocolError above MAX_LENGTH."""
    length = 0
    for buffer in buffers:
        length += len(buffer) if type(buffer) is bytes else memoryview(buffer).nbytes
    prefix = encode_prefix(length, compressed=compressed)
    return (b"".join((prefix, *buffers)),) if length < LARGE else (prefix, *buffers)


def encode_message(buffers: Sequence[Buffer], encoding: Coding | None = None, *, level: int = LEVEL) -> tuple[Buffer, ...]:
    """Returns a message as the buffers to write, by the rules of `frame`. It is compressed if there is an encoding and that
    makes it shorter. The head must have named that encoding in `grpc-encoding`."""
    pieces = None if encoding is None else deflate_message(buffers, encoding, level=level)
    return frame(buffers) if pieces is None else frame(pieces, compressed=True)


# ---- reading


def _octets(data: Buffer) -> memoryview:
    view = memoryview(data).toreadonly()
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


@final
class MessageDecoder:
    """Cuts messages out of a body that arrives in any pieces.

    Call `receive_data`, then `next_message` until NEED_DATA, and so on; `receive_eof` when the body ends. `encoding` is the
    one that the peer's `grpc-encoding` names; None without one, or for identity. `setting` names the setting of the limit,
    for error messages. `unary` is True for a call with exactly one message.

    The decoder refuses a message by its prefix, before any memory is taken for it: with RESOURCE_EXHAUSTED a length above
    `limit`; with INTERNAL a flag above 1, and flag 1 without an encoding (compression.md); with UNIMPLEMENTED a second
    message of a unary call (statuscodes.md). Each GRPCError is final: later bytes are dropped, and every later pull raises
    it again.

    Memory: input is held by reference until it is read, and a message that lies in one buffer is a view of it. A buffer must
    therefore not change while the decoder or one of its messages lives. A message that lies in several buffers is copied
    once, into memory that the next `receive_data` takes. Before that, `wanted` and `held` tell the caller how much to pay
    for, and `land` provides memory of the caller.
    """

    __slots__ = (
        "_at", "_begun", "_compressed", "_data", "_drained", "_encoding", "_error", "_filled", "_limit", "_memory",
        "_prefix", "_seen", "_setting", "_unary", "wanted",
    )  # fmt: skip

    def __init__(self, *, limit: int, encoding: Coding | None = None, unary: bool = False, setting: str = "limit") -> None:
        self._limit, self._encoding, self._unary, self._setting = limit, encoding, unary, setting
        self._data = _NOTHING  # the buffer that is being read, from `_at` on
        self._at = 0
        self._prefix = b""  # the part of a prefix that came before its rest
        self._begun = False  # a prefix is read, and its message is not given out yet
        self._compressed = False
        self._memory: memoryview | None = None  # the memory of the current message, if it does not lie in one buffer
        self._filled = 0
        self._seen = False
        self._drained = True
        self._error: GRPCError | None = None
        self.wanted = 0
        """The announced length of the message that is being received, in bytes; 0 if there is none."""

    @property
    def held(self) -> int:
        """The bytes that are here of the message that is being received."""
        if self._memory is not None:
            return self._filled
        return len(self._data) - self._at if self._begun else 0

    def receive_data(self, data: Buffer) -> None:
        """Takes the next buffer of the body, by reference. LocalProtocolError if `next_message` has not returned NEED_DATA
        since the last one. It never raises for the content of the bytes."""
        if self._error is not None:
            return
        self._check_drained("receive_data")
        view = memoryview(data) if type(data) is bytes else _octets(data)
        self._drained = False
        at = 0
        if self._begun:
            if self._memory is None and self._at < len(self._data):
                # Not cleared: an announced length whose bytes never come costs address space alone.
                self._move(untouched(self.wanted))
            if self._memory is not None:
                at = min(len(view), self.wanted - self._filled)
                self._memory[self._filled : self._filled + at] = view[:at]
                self._filled += at
        self._data, self._at = view, at

    def land(self, memory: Buffer) -> None:
        """Provides writable memory of at least `wanted` bytes for the message that is being received. Its bytes so far are
        copied there, the next ones are written there, and the message is a view of it. LocalProtocolError if no message is
        being received, if it has memory already, and for memory that is read-only or too short."""
        self._check_drained("land")
        if not self._begun or self._memory is not None:
            raise LocalProtocolError("land: no message is being received that needs memory")
        view = memoryview(memory).cast("B")
        if view.readonly or len(view) < self.wanted:
            got = f"{len(view)} {'read-only' if view.readonly else 'writable'} bytes"
            raise LocalProtocolError(f"land: expected {self.wanted} writable bytes, got {got}")
        self._move(view[: self.wanted])

    def landed(self, n: int) -> None:
        """Tells that the next n bytes of the message were written to the memory given to `land`, from byte `held` on. It
        replaces `receive_data`, without a copy. LocalProtocolError if there is no memory, and for more bytes than the
        message lacks."""
        self._check_drained("landed")
        if self._memory is None or not 0 <= n <= self.wanted - self._filled:
            raise LocalProtocolError(f"landed: {n} bytes, of a message that lacks {self.wanted - self.held}")
        self._drained = False
        self._filled += n

    def next_message(self) -> memoryview | NeedData:
        """Returns the next message, inflated in one step if it is compressed, as a read-only view; or NEED_DATA. GRPCError
        as the class describes. For compressed messages also with RESOURCE_EXHAUSTED if one inflates to more than `limit`
        bytes, and with INTERNAL if one is damaged or cut off."""
        data = self._next()
        if data is Signal.NEED_DATA or not self._compressed:
            return data
        assert self._encoding is not None
        try:
            return inflate_message(data, self._encoding, limit=self._limit, setting=self._setting)
        except GRPCError as e:
            raise self._fail(e.code, e.message) from None

    def next_raw(self) -> RawMessage | NeedData:
        """Returns the next message as it is on the wire, for a caller that inflates it in steps (`MessageInflater`)."""
        if not (self._begun or self._prefix or self._unary):
            buffer, at = self._data, self._at
            left = len(buffer) - at
            if left >= PREFIX:
                flag, length = _PREFIX.unpack_from(buffer, at)
                if not flag and length <= self._limit and length <= left - PREFIX:  # the usual case, at half the cost
                    self._at = end = at + PREFIX + length
                    return RawMessage(False, buffer[at + PREFIX : end])
            elif not left and self._error is None:
                return self._need_data()
        data = self._next()
        return Signal.NEED_DATA if data is Signal.NEED_DATA else RawMessage(self._compressed, data)

    def receive_eof(self) -> None:
        """Checks a body that has ended: GRPCError with INTERNAL if it was cut inside a prefix or a message, and if a unary
        call had no message. LocalProtocolError if `next_message` has not returned NEED_DATA."""
        if self._error is not None:
            raise self._error.again()
        self._check_drained("receive_eof")
        if self._begun:
            raise self._fail(
                StatusCode.INTERNAL, f"the body ends inside a message of {self.wanted} bytes, after {self.held} of them"
            )
        if self._prefix:
            raise self._fail(
                StatusCode.INTERNAL, f"the body ends inside a message's prefix, after {len(self._prefix)} of {PREFIX} bytes"
            )
        if self._unary and not self._seen:
            raise self._fail(StatusCode.INTERNAL, "a unary call has exactly one message, this one had none")

    def _next(self) -> memoryview | NeedData:
        if self._error is not None:
            raise self._error.again()
        if not self._begun and not self._read_prefix():
            return self._need_data()
        length = self.wanted
        if self._memory is not None:
            if self._filled < length:
                return self._need_data()
            message = self._memory.toreadonly()
            self._memory, self._filled = None, 0
        else:
            end = self._at + length
            if end > len(self._data):
                return self._need_data()
            message = self._data[self._at : end]
            self._at = end
        self._begun, self._seen, self.wanted = False, True, 0
        return message

    def _read_prefix(self) -> bool:
        """True if a message begins: its prefix is read and checked."""
        data, at = self._data, self._at
        if self._prefix or len(data) - at < PREFIX:
            n = PREFIX - len(self._prefix)
            self._prefix += data[at : at + n]
            self._at = min(at + n, len(data))
            if len(self._prefix) < PREFIX:
                return False
            flag, length = _PREFIX.unpack(self._prefix)
            self._prefix = b""
        else:
            flag, length = _PREFIX.unpack_from(data, at)
            self._at = at + PREFIX
        if self._unary and self._seen:
            raise self._fail(StatusCode.UNIMPLEMENTED, "a unary call has exactly one message, this one has a second")
        if flag > 1:
            raise self._fail(StatusCode.INTERNAL, f"the compressed flag of a message is 0 or 1, got {flag}")
        if flag and self._encoding is None:
            raise self._fail(StatusCode.INTERNAL, "a message has the compressed flag, but grpc-encoding names no coding")
        if length > self._limit:
            raise self._fail(
                StatusCode.RESOURCE_EXHAUSTED,
                f"a message has {length} bytes, the limit is {self._limit} bytes ({self._setting})",
            )
        self._begun, self._compressed, self.wanted = True, flag == 1, length
        return True

    def _need_data(self) -> NeedData:
        self._drained = True
        if self._at == len(self._data):
            self._data, self._at = _NOTHING, 0  # release the buffer that was read
        return Signal.NEED_DATA

    def _move(self, memory: memoryview) -> None:
        """Copies the bytes of the message that are here into its memory."""
        begun = self._data[self._at :]
        memory[: len(begun)] = begun
        self._memory, self._filled = memory, len(begun)
        self._data, self._at = _NOTHING, 0

    def _check_drained(self, what: str) -> None:
        if not self._drained:
            raise LocalProtocolError(f"{what}: next_message has not said NEED_DATA yet")

    def _fail(self, code: StatusCode, message: str) -> GRPCError:
        """Ends the decoder, and returns the error for raising."""
        self._error = GRPCError(code, message)
        self._data, self._at, self._prefix, self._memory, self._filled = _NOTHING, 0, b"", None, 0
        self._begun, self.wanted, self._drained = False, 0, True
        return self._error.again()


def read_unary(body: Buffer, *, limit: int, encoding: Coding | None = None, setting: str = "limit") -> memoryview:
    """Returns the one message of a unary call whose body is complete, as a `MessageDecoder` would. GRPCError as from it."""
    view = _octets(body)
    if len(view) >= PREFIX:
        flag, length = _PREFIX.unpack_from(view)
        if not flag and length == len(view) - PREFIX <= limit:  # the usual case, at half the cost of a decoder
            return view[PREFIX:]
    decoder = MessageDecoder(limit=limit, encoding=encoding, unary=True, setting=setting)
    decoder.receive_data(view)
    message = decoder.next_message()
    if message is not Signal.NEED_DATA:
        decoder.next_message()  # raises if there is a second one
    decoder.receive_eof()
    assert message is not Signal.NEED_DATA, "a body without a message is refused at its end"
    return message
