"""AWS event-stream messages (application/vnd.amazon.eventstream): framing, checksums and typed headers, both ways."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Final, Literal, NamedTuple, TypeAlias, final
from zlib import crc32

from protocols.buffers import untouched
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Buffer, Signal

# A message is: u32 total length, u32 headers length, u32 CRC-32 of those 8 bytes, headers, payload, u32 CRC-32 of
# everything before it. All big-endian.
OVERHEAD: Final = 16
"""Bytes of a message that are neither headers nor payload."""
MAX_PAYLOAD: Final = 16 * 2**20
"""The largest payload that AWS clients accept (smithy-python: 16 MiB, encoding and decoding)."""
MAX_HEADERS: Final = 128 * 2**10
"""The largest header block that AWS clients accept, in bytes."""
MAX_VALUE: Final = 32767
"""The most bytes of one header value. The length field allows 65535, but the AWS codecs stop here."""
MAX_FIELDS: Final = 64
"""The most header fields of one message. AWS has no such bound; its own messages have five."""

LARGE: Final = 16 * 2**10
"""Smaller payloads are copied, which costs less than keeping their neighbors alive. Larger ones go by reference."""

_PRELUDE = struct.Struct(">III")
_LENGTHS = struct.Struct(">II")
_CRC = struct.Struct(">I")

NeedData: TypeAlias = Literal[Signal.NEED_DATA]


@dataclass(frozen=True, slots=True)
class _Signed:
    value: int
    size: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if not -(1 << 8 * self.size - 1) <= self.value < 1 << 8 * self.size - 1:
            raise ValueError(f"{type(self).__name__} holds {8 * self.size} bits and a sign, {self.value} does not fit")


@final
class Byte(_Signed):
    """Header type 2: a signed 8-bit `value`. ValueError if it does not fit, also for the wider types."""

    __slots__ = ()
    size = 1


@final
class Short(_Signed):
    """Header type 3: a signed 16-bit `value`."""

    __slots__ = ()
    size = 2


@final
class Integer(_Signed):
    """Header type 4: a signed 32-bit `value`."""

    __slots__ = ()
    size = 4


@final
class Long(_Signed):
    """Header type 5: a signed 64-bit `value`."""

    __slots__ = ()
    size = 8


@final
class Timestamp(_Signed):
    """Header type 8: `value` is milliseconds since 1970-01-01T00:00Z."""

    __slots__ = ()
    size = 8


HeaderValue: TypeAlias = bool | Byte | Short | Integer | Long | bytes | str | Timestamp | uuid.UUID
"""One Python type for each wire type (true and false are types 0 and 1), so a value is sent with the type it came with."""

_SIGNED: dict[int, type[Byte | Short | Integer | Long | Timestamp]] = {2: Byte, 3: Short, 4: Integer, 5: Long, 8: Timestamp}
_SIGNED_KINDS = {kind: bytes((number,)) for number, kind in _SIGNED.items()}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EventMessage:
    """One message. `headers` keep their order and have unique names. A received `payload` is `bytes` up to 16 KiB, and a
    read-only memoryview above that."""

    headers: Mapping[str, HeaderValue] = field(default_factory=dict)
    payload: Buffer = b""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a decoder, in bytes and fields. The defaults accept everything that `encode` can make."""

    message: int = MAX_PAYLOAD + MAX_HEADERS + OVERHEAD
    """The total length, which alone bounds the memory."""
    headers: int = MAX_HEADERS
    fields: int = MAX_FIELDS


class Raw(NamedTuple):
    """A message whose checksums hold and whose header block is not decoded yet."""

    headers: bytes
    payload: Buffer


# ---- writing


def encode_headers(headers: Mapping[str, HeaderValue]) -> bytes:
    """The header block of these headers, in order. LocalProtocolError if one cannot be written: a name that is not 1 to 255
    bytes of UTF-8, a value over 32767 bytes or of another type (a plain int has no wire type), more than 64 fields, or more
    than 128 KiB in total."""
    if len(headers) > MAX_FIELDS:
        raise LocalProtocolError(f"a message has at most {MAX_FIELDS} header fields, not {len(headers)}")
    block = b"".join([_encode_name(name) + _encode_value(name, value) for name, value in headers.items()])
    if len(block) > MAX_HEADERS:
        raise LocalProtocolError(f"headers take at most {MAX_HEADERS} bytes, these take {len(block)}")
    return block


def _encode_name(name: str) -> bytes:
    raw = name.encode("utf-8", "replace")
    if not 1 <= len(raw) <= 255:
        raise LocalProtocolError(f"a header name has 1 to 255 bytes, not {len(raw)}: {name[:64]!r}")
    return bytes((len(raw),)) + raw


def _encode_value(name: str, value: HeaderValue) -> bytes:
    match value:
        case bool():
            return b"\0" if value else b"\1"
        case Byte() | Short() | Integer() | Long() | Timestamp():
            return _SIGNED_KINDS[type(value)] + value.value.to_bytes(value.size, "big", signed=True)
        case bytes():
            return b"\6" + _with_length(name, value)
        case str():
            return b"\7" + _with_length(name, value.encode("utf-8", "replace"))
        case uuid.UUID():
            return b"\x09" + value.bytes
    raise LocalProtocolError(f"header {name[:64]!r}: no event-stream type for a value of type {type(value).__name__}")


def _with_length(name: str, raw: bytes) -> bytes:
    if len(raw) > MAX_VALUE:
        raise LocalProtocolError(f"header {name[:64]!r}: a value has at most {MAX_VALUE} bytes, not {len(raw)}")
    return len(raw).to_bytes(2, "big") + raw


def encode_head(block: bytes, size: int) -> bytes:
    """The bytes before a payload of `size` bytes: the prelude and a header block from `encode_headers`. LocalProtocolError
    for more than 16 MiB."""
    if size > MAX_PAYLOAD:
        raise LocalProtocolError(f"an event-stream payload has at most {MAX_PAYLOAD} bytes, not {size}")
    lengths = _LENGTHS.pack(OVERHEAD + len(block) + size, len(block))
    return lengths + _CRC.pack(crc32(lengths)) + block


def encode_block(block: bytes, payload: Buffer = b"") -> list[Buffer]:
    """A message with a header block from `encode_headers`. It is one buffer if the payload is under 16 KiB, otherwise head,
    payload by reference (contiguous, unchanged until written) and tail. LocalProtocolError for a payload over 16 MiB."""
    size = memoryview(payload).nbytes
    head = encode_head(block, size)
    tail = _CRC.pack(crc32(payload, crc32(head)))
    return [b"".join((head, payload, tail))] if size < LARGE else [head, payload, tail]


def encode_buffers(headers: Mapping[str, HeaderValue], payload: Buffer = b"") -> list[Buffer]:
    """A message as the buffers to write, in order, with the rules and errors of `encode_headers` and `encode_block`."""
    return encode_block(encode_headers(headers), payload)


def encode(message: EventMessage) -> bytes:
    """A message as one `bytes`, with the rules and errors of `encode_headers` and `encode_block`."""
    return b"".join(encode_buffers(message.headers, message.payload))


# ---- reading


def decode_headers(block: bytes, fields: int = MAX_FIELDS) -> Mapping[str, HeaderValue]:
    """The headers of a block, read-only. RemoteProtocolError if they break the format: a name that is empty, not UTF-8 or
    duplicate; an unknown type; a value that is cut off, over 32767 bytes, or a string that is not UTF-8; or more than
    `fields` headers."""
    headers: dict[str, HeaderValue] = {}
    at = 0
    while at < len(block):
        if len(headers) == fields:
            raise RemoteProtocolError(f"event-stream message with more than {fields} header fields")
        name_end = at + 1 + block[at]
        name = _text(block, at + 1, name_end, "header name")
        if not name:
            raise RemoteProtocolError(f"event-stream header name is empty, at byte {at} of the headers")
        if name in headers:
            raise RemoteProtocolError(f"event-stream header {name[:64]!r} is there twice")
        headers[name], at = _decode_value(block, name_end, name)
    return MappingProxyType(headers)


def _decode_value(block: bytes, at: int, name: str) -> tuple[HeaderValue, int]:
    """The value whose type byte is at `at`, and the index behind it."""
    what = f"header {name[:64]!r}"
    match _slice(block, at, at + 1, what)[0]:
        case 0:
            return True, at + 1
        case 1:
            return False, at + 1
        case 2 | 3 | 4 | 5 | 8 as number:
            kind = _SIGNED[number]
            end = at + 1 + kind.size
            return kind(int.from_bytes(_slice(block, at + 1, end, what), "big", signed=True)), end
        case 6 | 7 as number:
            size = int.from_bytes(_slice(block, at + 1, at + 3, what), "big")
            if size > MAX_VALUE:
                raise RemoteProtocolError(f"event-stream {what}: value of {size} bytes, at most {MAX_VALUE}")
            end = at + 3 + size
            return _slice(block, at + 3, end, what) if number == 6 else _text(block, at + 3, end, what), end
        case 9:
            return uuid.UUID(bytes=_slice(block, at + 1, at + 17, what)), at + 17
        case number:
            raise RemoteProtocolError(f"event-stream {what}: type {number}, there are 0 to 9")


def _slice(block: bytes, start: int, end: int, what: str) -> bytes:
    if end > len(block):
        raise RemoteProtocolError(f"event-stream {what} needs {end - start} bytes, {len(block) - start} are left")
    return block[start:end]


def _text(block: bytes, start: int, end: int, what: str) -> str:
    try:
        return _slice(block, start, end, what).decode()
    except UnicodeDecodeError:
        raise RemoteProtocolError(f"event-stream {what} is not UTF-8") from None


def _read_prelude(buffer: Buffer, at: int, limits: Limits) -> tuple[int, int, int]:
    """Total length, headers length, and the CRC of the eight bytes that hold them. They are used only if that CRC is
    right."""
    total, headers, stored = _PRELUDE.unpack_from(buffer, at)
    crc = crc32(buffer[at : at + 8])
    if crc != stored:
        raise RemoteProtocolError(f"event-stream prelude CRC is {stored:#010x}, its bytes have {crc:#010x}")
    if headers > limits.headers:
        raise RemoteProtocolError(f"event-stream headers of {headers} bytes, the limit is {limits.headers}")
    if total > limits.message:
        raise RemoteProtocolError(f"event-stream message of {total} bytes, the limit is {limits.message}")
    if total < OVERHEAD + headers:
        raise RemoteProtocolError(
            f"event-stream message of {total} bytes cannot hold headers of {headers} and {OVERHEAD} more"
        )
    return total, headers, crc


def _raw(buffer: Buffer, at: int, total: int, headers: int, crc: int) -> Raw:
    """The parts of the message at `at`. `crc` is the CRC of its bytes before its own CRC."""
    payload_at, end = at + _PRELUDE.size + headers, at + total - 4
    (stored,) = _CRC.unpack_from(buffer, end)
    if crc != stored:
        raise RemoteProtocolError(f"event-stream message CRC is {stored:#010x}, its bytes have {crc:#010x}")
    block = bytes(buffer[at + _PRELUDE.size : payload_at])
    if end - payload_at < LARGE:
        return Raw(block, bytes(buffer[payload_at:end]))
    return Raw(block, memoryview(buffer)[payload_at:end].toreadonly())


def split(buffer: Buffer, limits: Limits) -> Raw:
    """Opens the one message that fills `buffer` exactly: an event inside an envelope. A large payload is a view of `buffer`.
    RemoteProtocolError as from a Decoder, also for missing or extra bytes."""
    if len(buffer) < _PRELUDE.size:
        raise RemoteProtocolError(f"event-stream message of {len(buffer)} bytes, at least {OVERHEAD} are needed")
    total, headers, crc = _read_prelude(buffer, 0, limits)
    if total != len(buffer):
        raise RemoteProtocolError(f"event-stream message of {total} bytes where {len(buffer)} bytes were announced for it")
    return _raw(buffer, 0, total, headers, crc32(memoryview(buffer)[8 : total - 4], crc))


class Reader:
    """Cuts messages out of bytes that arrive in any pieces: the base of the decoders of messages and of dialects.

    RemoteProtocolError is final: later bytes are dropped, and every pull raises it again.

    Memory: `buffered` is the number of held bytes, which is below 12 while no message has begun. Once a message's prelude
    has come, and its checksum and limits hold, `need` is the message's total length. Before each `receive_data`, reserve
    memory for its bytes so far and the next ones, because that call takes the memory. A message above 16 KiB is assembled in
    place, and each byte is copied once.
    """

    __slots__ = ("_at", "_buffer", "_crc", "_eof", "_error", "_filled", "_limits", "_target", "need")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buffer: bytes | bytearray = b""  # `bytes` while it is read, so that views of it are safe
        self._at = 0
        self._target: memoryview | None = None  # the memory of one large message
        self._filled = 0
        self._crc = 0  # CRC of the filled bytes, without the last four bytes of the message
        self._eof = False
        self._error: RemoteProtocolError | None = None
        self.need = 0
        """The total length of the message that is being assembled; 0 if there is none."""

    @property
    def buffered(self) -> int:
        """Received bytes that the decoder still holds."""
        return self._filled + len(self._buffer) - self._at

    def receive_data(self, data: Buffer) -> None:
        """Takes bytes; the caller may reuse `data` at once. It never raises for their content."""
        if self._error is not None:
            return
        if self.need > LARGE:
            data = self._fill(data)
            if not data:
                return
        rest = self._buffer
        if not rest:
            self._buffer = bytes(data)
            return
        if isinstance(rest, bytes):
            held = memoryview(rest)[self._at :]
            self._at = 0
            if len(held) < (self.need or _PRELUDE.size) <= len(held) + len(data):
                self._buffer = b"".join((held, data))  # now there is something to read
                return
            self._buffer = bytearray(held)
        self._buffer += data

    def receive_eof(self) -> None:
        """Tells that no more bytes will come. RemoteProtocolError if a message is cut off. Whole ones can still be
        pulled."""
        self._eof = True
        if self._error is None and 0 < self.buffered < (self.need or _PRELUDE.size):
            raise self._fail(self._truncated())

    def _fail(self, error: RemoteProtocolError) -> RemoteProtocolError:
        """Ends the reader with this error, and returns it for raising."""
        self._error = error.again()
        self._buffer, self._at, self._target, self._filled, self.need = b"", 0, None, 0, 0
        return error

    def _next_raw(self) -> Raw | NeedData:
        """The next whole message. RemoteProtocolError, which the caller makes final with `_fail`."""
        if self._error is not None:
            raise self._error.again()
        held = self._filled + len(self._buffer) - self._at
        if held < (self.need or _PRELUDE.size):
            if held and self._eof:
                raise self._truncated()
            return Signal.NEED_DATA
        if self._target is not None:
            return self._assembled(self._target)
        if isinstance(self._buffer, bytearray):
            self._buffer = bytes(self._buffer)
        buffer, at = self._buffer, self._at
        total, headers, crc = _read_prelude(buffer, at, self._limits)
        if held < total:
            self.need = total
            if self._eof:
                raise self._truncated()
            return Signal.NEED_DATA
        raw = _raw(buffer, at, total, headers, crc32(memoryview(buffer)[at + 8 : at + total - 4], crc))
        self._buffer, self._at = (b"", 0) if held == total else (buffer, at + total)
        self.need = 0
        return raw

    def _fill(self, data: Buffer) -> memoryview:
        """Copies the bytes of `data` that belong to the large message, and returns the rest."""
        if self._target is None:
            # Not zeroed: an announced length whose bytes never come costs address space alone.
            self._target = untouched(self.need)
            begun, self._buffer, self._at, self._crc = memoryview(self._buffer)[self._at :], b"", 0, 0
            self._append(self._target, begun)
        view = memoryview(data).cast("B")
        n = min(len(view), self.need - self._filled)
        self._append(self._target, view[:n])
        return view[n:]

    def _append(self, target: memoryview, view: memoryview) -> None:
        target[self._filled : self._filled + len(view)] = view
        self._crc = crc32(view[: max(0, self.need - 4 - self._filled)], self._crc)
        self._filled += len(view)

    def _assembled(self, target: memoryview) -> Raw:
        total, headers, _ = _PRELUDE.unpack_from(target)
        raw = _raw(target, 0, total, headers, self._crc)
        self._target, self._filled, self.need = None, 0, 0
        return raw

    def _truncated(self) -> RemoteProtocolError:
        needed = f"of {self.need} bytes" if self.need else "whose length is not known yet"
        return RemoteProtocolError(f"event stream ends inside a message {needed}, after {self.buffered} bytes of it")


@final
class Decoder(Reader):
    """Reads a sequence of messages. Call `receive_data`, then `next_message` until NEED_DATA, and so on; `receive_eof` at
    the end of the bytes. Memory and errors are those of Reader."""

    __slots__ = ()

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits or Limits())

    def next_message(self) -> EventMessage | NeedData:
        """The next whole message, or NEED_DATA."""
        try:
            raw = self._next_raw()
            if raw is Signal.NEED_DATA:
                return raw
            return EventMessage(headers=decode_headers(raw.headers, self._limits.fields), payload=raw.payload)
        except RemoteProtocolError as error:
            raise self._fail(error) from None
