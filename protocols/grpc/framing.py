"""gRPC message framing: a flag byte, a length of four bytes and that many bytes, read and written in either role."""

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
"""A message below this many bytes is written as one buffer, which costs less than several; from here on by reference."""

_PREFIX = struct.Struct(">BI")
_NOTHING = memoryview(b"")

NeedData: TypeAlias = Literal[Signal.NEED_DATA]


class RawMessage(NamedTuple):
    """A message as it is on the wire: `data` is to be inflated if `compressed`."""

    compressed: bool
    data: memoryview


# ---- writing


def encode_prefix(length: int, *, compressed: bool = False) -> bytes:
    """Returns what stands before a message of that many bytes. LocalProtocolError above MAX_LENGTH."""
    if length > MAX_LENGTH:
        raise LocalProtocolError(f"a gRPC message has at most {MAX_LENGTH} bytes, not {length}")
    return _PREFIX.pack(compressed, length)


def frame(buffers: Sequence[Buffer], *, compressed: bool = False) -> tuple[Buffer, ...]:
    """Returns a message, made of these buffers in their order, as the buffers to write: one if it has less than 16 KiB, else
    the prefix and the buffers by reference, which must not change until they are written. `compressed` says that they
    hold the message compressed already. LocalProtocolError above MAX_LENGTH."""
    length = 0
    for buffer in buffers:
        length += len(buffer) if type(buffer) is bytes else memoryview(buffer).nbytes
    prefix = encode_prefix(length, compressed=compressed)
    return (b"".join((prefix, *buffers)),) if length < LARGE else (prefix, *buffers)


def encode_message(buffers: Sequence[Buffer], encoding: Coding | None = None, *, level: int = LEVEL) -> tuple[Buffer, ...]:
    """Returns a message as the buffers to write, by the rules of `frame`; compressed if there is an encoding and that makes
    it shorter. The head must have named that encoding in `grpc-encoding`."""
    pieces = None if encoding is None else deflate_message(buffers, encoding, level=level)
    return frame(buffers) if pieces is None else frame(pieces, compressed=True)


# ---- reading


def _octets(data: Buffer) -> memoryview:
    view = memoryview(data).toreadonly()
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


@final
class MessageDecoder:
    """Cuts messages out of a body that arrives in any pieces.

    Feed `receive_data`, pull `next_message` until it says NEED_DATA, feed again; `receive_eof` when the body ends.
    `encoding` is what the peer's `grpc-encoding` names, None without one or for identity. `setting` names what changes the
    limit, for the texts of errors. With `unary` the body is that of a call which has exactly one message.

    The decoder refuses a message by its prefix, before any memory is taken for it: with RESOURCE_EXHAUSTED a length above
    `limit`, with INTERNAL a flag above 1 and flag 1 without an encoding (compression.md), with UNIMPLEMENTED a second
    message of a unary call (statuscodes.md). Each GRPCError is final: bytes fed afterwards are dropped, and every later pull
    raises it again.

    Memory: fed buffers are held by reference until they are read, and a message that lies in one of them is a view of it. So
    a buffer must not change while the decoder or a message of it lives. A message that lies in several is copied once, into
    memory that the next `receive_data` takes. Before that, `wanted` and `held` tell a caller what to pay for, and `land`
    gives the message memory of the caller's own.
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
        self._begun = False  # a prefix is read, its message is not given out
        self._compressed = False
        self._memory: memoryview | None = None  # of the message that has begun, where it does not lie in one buffer
        self._filled = 0
        self._seen = False
        self._drained = True
        self._error: GRPCError | None = None
        self.wanted = 0
        """The announced length of the message that is being received, in bytes; 0 while there is none."""

    @property
    def held(self) -> int:
        """Bytes of the message that is being received that are here already."""
        if self._memory is not None:
            return self._filled
        return len(self._data) - self._at if self._begun else 0

    def receive_data(self, data: Buffer) -> None:
        """Takes the next buffer of the body, by reference. LocalProtocolError if `next_message` has not said NEED_DATA since
        the last one. Never raises for what the bytes say."""
        if self._error is not None:
            return
        self._check_drained("receive_data")
        view = memoryview(data) if type(data) is bytes else _octets(data)
        self._drained = False
        at = 0
        if self._begun:
            if self._memory is None and self._at < len(self._data):
                # Not cleared, so a length that no bytes follow costs address space alone.
                self._move(untouched(self.wanted))
            if self._memory is not None:
                at = min(len(view), self.wanted - self._filled)
                self._memory[self._filled : self._filled + at] = view[:at]
                self._filled += at
        self._data, self._at = view, at

    def land(self, memory: Buffer) -> None:
        """Gives the message that is being received writable memory, of `wanted` bytes or more: what is held is copied there,
        what comes is written there, and the message is a view of it. LocalProtocolError if no message is being received, if
        it has memory already, and for memory that is read-only or too short."""
        self._check_drained("land")
        if not self._begun or self._memory is not None:
            raise LocalProtocolError("land: no message is being received that needs memory")
        view = memoryview(memory).cast("B")
        if view.readonly or len(view) < self.wanted:
            got = f"{len(view)} {'read-only' if view.readonly else 'writable'} bytes"
            raise LocalProtocolError(f"land: expected {self.wanted} writable bytes, got {got}")
        self._move(view[: self.wanted])

    def landed(self, n: int) -> None:
        """Tells that the next n bytes of the message were written to the memory given to `land`, from byte `held` on: what
        `receive_data` does, without a copy. LocalProtocolError without such memory, and for more than the message lacks."""
        self._check_drained("landed")
        if self._memory is None or not 0 <= n <= self.wanted - self._filled:
            raise LocalProtocolError(f"landed: {n} bytes, of a message that lacks {self.wanted - self.held}")
        self._drained = False
        self._filled += n

    def next_message(self) -> memoryview | NeedData:
        """Returns the next message, inflated at once if it is compressed, as a read-only view; or NEED_DATA. GRPCError as
        the class says; for compressed messages also RESOURCE_EXHAUSTED if one inflates to more than `limit` bytes, and
        INTERNAL for one that is damaged or cut."""
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
                if not flag and length <= self._limit and length <= left - PREFIX:  # nearly every one: half of the cost
                    self._at = end = at + PREFIX + length
                    return RawMessage(False, buffer[at + PREFIX : end])
            elif not left and self._error is None:
                return self._need_data()
        data = self._next()
        return Signal.NEED_DATA if data is Signal.NEED_DATA else RawMessage(self._compressed, data)

    def receive_eof(self) -> None:
        """Checks a body that has ended: GRPCError with INTERNAL if it was cut inside a prefix or a message, and if a unary
        call had no message. LocalProtocolError if `next_message` has not said NEED_DATA."""
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
        """True if a message begins; its prefix is read and checked then."""
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
            self._data, self._at = _NOTHING, 0  # what was read need not live on
        return Signal.NEED_DATA

    def _move(self, memory: memoryview) -> None:
        """Copies what is held of the message into its memory."""
        begun = self._data[self._at :]
        memory[: len(begun)] = begun
        self._memory, self._filled = memory, len(begun)
        self._data, self._at = _NOTHING, 0

    def _check_drained(self, what: str) -> None:
        if not self._drained:
            raise LocalProtocolError(f"{what}: next_message has not said NEED_DATA yet")

    def _fail(self, code: StatusCode, message: str) -> GRPCError:
        """Ends the decoder; returns the error, to be raised."""
        self._error = GRPCError(code, message)
        self._data, self._at, self._prefix, self._memory, self._filled = _NOTHING, 0, b"", None, 0
        self._begun, self.wanted, self._drained = False, 0, True
        return self._error.again()


def read_unary(body: Buffer, *, limit: int, encoding: Coding | None = None, setting: str = "limit") -> memoryview:
    """Returns the one message of a unary call whose body is all here, as a `MessageDecoder` would; GRPCError as from it."""
    view = _octets(body)
    if len(view) >= PREFIX:
        flag, length = _PREFIX.unpack_from(view)
        if not flag and length == len(view) - PREFIX <= limit:  # nearly every call: half the cost of a decoder
            return view[PREFIX:]
    decoder = MessageDecoder(limit=limit, encoding=encoding, unary=True, setting=setting)
    decoder.receive_data(view)
    message = decoder.next_message()
    if message is not Signal.NEED_DATA:
        decoder.next_message()  # raises if there is a second one
    decoder.receive_eof()
    assert message is not Signal.NEED_DATA, "a body without a message is refused at its end"
    return message
