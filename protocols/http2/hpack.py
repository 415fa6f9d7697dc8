"""HPACK for our HTTP/2 machine: a decoder that caches decoded blocks, and an encoder without a dynamic table."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import final

from hpack import Decoder, Encoder, HeaderTuple, NeverIndexedHeaderTuple
from hpack.exceptions import HPACKDecodingError
from hpack.hpack import decode_integer
from hpack.table import HeaderTable

from protocols.events import Head
from protocols.huffman import decode_huffman

REMEMBERED_BYTES = 8192
"""The most bytes of cached blocks on one connection. Each counts with its own bytes and those of its list (RFC 9113 section
6.5.2). A block is cached if it takes at most a quarter of this."""
_SHORT = 128
"""Strings up to this length are cached across connections, unless they are marked as never indexed."""
_ENTRY = 32
_STATIC = len(HeaderTable.STATIC_TABLE)
_STATIC_FIELDS = (None, *(HeaderTuple(*field) for field in HeaderTable.STATIC_TABLE))  # the first index is 1
_STATIC_NAMES = (b"", *(name for name, _ in HeaderTable.STATIC_TABLE))
_INDEXED, _INCREMENTAL, _UPDATE, _NEVER = 0x80, 0x40, 0x20, 0x10  # RFC 7541 section 6: the first bits of a field
_HUFFMAN = 0x80

_decode_short = lru_cache(maxsize=1024)(decode_huffman)


class _Unusual(Exception):
    """A block that is left to hpack."""


@final
class Block:
    """The meaning of one header block."""

    __slots__ = ("head", "headers", "size")

    def __init__(self, headers: list[HeaderTuple], size: int) -> None:
        self.headers = headers
        self.size = size
        """The size of the list in bytes, as RFC 9113 section 6.5.2 counts it."""
        self.head: Head | None = None
        """The request of this list, once it has been checked, its content-length included. None before."""


class RememberingDecoder(Decoder):
    """An hpack Decoder that decodes ordinary blocks itself, and equal blocks only once while the dynamic table is unchanged.

    A block that adds nothing to the dynamic table keeps its meaning until another block changes that table. Most requests
    of a client therefore cost one look-up. hpack itself decodes everything unusual (table size updates, long integers,
    errors, lists that are too large) from the same state, and raises its own errors.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[bytes, Block] = {}
        self._held = 0
        self._read: Block | None = None

    def look(self, data: bytes) -> Block | None:
        """Decodes a block and applies its effect on the table. None, and no effect, if hpack must decide. After None, or
        after `put_back`, `decode` must still be called with the block; otherwise the block is done."""
        found = self._known.get(data)
        if found is None:
            return self._learn(data)
        if found.size > self.max_header_list_size or self.header_table._maxsize > self.max_allowed_table_size:
            return None
        return found

    def put_back(self, block: Block) -> None:
        """Keeps a block that `look` has decoded for the next call of `decode`."""
        self._read = block

    def decode(self, data: bytes, raw: bool = False) -> list[HeaderTuple]:
        """Decodes a block as hpack does."""
        block, self._read = self._read, None
        if raw and (block or (block := self.look(data))):
            return list(block.headers)
        self._forget()
        return list(super().decode(data, raw))

    def _decode_literal(self, data: bytes | memoryview, should_index: bool) -> tuple[HeaderTuple, int]:
        """The field at the beginning of the data and its length, as hpack's own has them, which decodes Huffman's code more
        slowly: a peer chooses the blocks that are left to hpack."""
        data = bytes(data)
        never = not should_index and bool(data[0] & _NEVER)
        index, at = decode_integer(data, 6 if should_index else 4)
        name, at = (self.header_table.get_by_index(index)[0], at) if index else _whole_string(data, at)
        value, at = _whole_string(data, at)
        if should_index:
            self.header_table.add(name, value)
        return NeverIndexedHeaderTuple(name, value) if never else HeaderTuple(name, value), at

    def _learn(self, data: bytes) -> Block | None:
        table = self.header_table
        before = table.dynamic_entries.copy(), table._current_size
        try:
            block, changes = self._fields(data)
        except (_Unusual, IndexError, HPACKDecodingError):
            table.dynamic_entries, table._current_size = before
            return None
        if changes:
            self._forget()
        else:
            self._remember(data, block)
        return block

    def _remember(self, data: bytes, block: Block) -> None:
        cost = len(data) + block.size
        if 4 * cost <= REMEMBERED_BYTES:
            self._known[data] = block
            self._held += cost
            while self._held > REMEMBERED_BYTES:
                oldest = next(iter(self._known))
                self._held -= len(oldest) + self._known.pop(oldest).size

    def _forget(self) -> None:
        if self._known:
            self._known.clear()
            self._held = 0

    def _fields(self, data: bytes) -> tuple[Block, bool]:
        """The decoded block, and True if a field changed the dynamic table. _Unusual, IndexError or HPACKDecodingError if
        the block is not ordinary; the table may have changed by then."""
        table, changes = self.header_table, False
        if table.maxsize > self.max_allowed_table_size:
            raise _Unusual
        entries, headers, size = table.dynamic_entries, list[HeaderTuple](), 0
        at, end = 0, len(data)
        while at < end:
            first = data[at]
            if first & _INDEXED:
                index, at = (first & 0x7F, at + 1) if first != 0xFF else _integer(data, at, 0x7F)
                field = _STATIC_FIELDS[index] if index <= _STATIC else HeaderTuple(*entries[index - _STATIC - 1])
                if field is None:
                    raise _Unusual
            else:
                if first & _INCREMENTAL:
                    mask, never = 0x3F, False
                elif first & _UPDATE:
                    raise _Unusual
                else:
                    mask, never = 0x0F, bool(first & _NEVER)
                index, at = _integer(data, at, mask)
                if index:
                    name = entries[index - _STATIC - 1][0] if index > _STATIC else _STATIC_NAMES[index]
                else:
                    name, at = _string(data, at, never)
                value, at = _string(data, at, never)
                field = NeverIndexedHeaderTuple(name, value) if never else HeaderTuple(name, value)
                if first & _INCREMENTAL:
                    table.add(name, value)
                    changes = True
            headers.append(field)
            size += len(field[0]) + len(field[1]) + _ENTRY
            if size > self.max_header_list_size:
                raise _Unusual
        return Block(headers, size), changes


def _integer(data: bytes, at: int, mask: int) -> tuple[int, int]:
    """The integer of RFC 7541 section 5.1 in the lower bits of a byte and up to two more, and the index behind it."""
    number = data[at] & mask
    if number < mask:
        return number, at + 1
    more = data[at + 1]
    if more < 0x80:
        return number + more, at + 2
    last = data[at + 2]
    if last < 0x80:
        return number + (more & 0x7F) + (last << 7), at + 3
    raise _Unusual


def _string(data: bytes, at: int, never: bool) -> tuple[bytes, int]:
    """The string of RFC 7541 section 5.2, and the index behind it."""
    first = data[at]
    length = first & 0x7F
    length, at = (length, at + 1) if length < 0x7F else _integer(data, at, 0x7F)
    text, at = data[at : at + length], at + length
    if at > len(data):
        raise _Unusual
    if first & _HUFFMAN:
        text = decode_huffman(text) if never or length > _SHORT else _decode_short(text)
    return text, at


def _whole_string(data: bytes, at: int) -> tuple[bytes, int]:
    """Like `_string`, for integers of any length that hpack reads. HPACKDecodingError."""
    length, used = decode_integer(data[at:], 7)
    start, end = at + used, at + used + length
    if end > len(data):
        raise HPACKDecodingError("Truncated header block")
    return decode_huffman(data[start:end]) if data[at] & _HUFFMAN else data[start:end], end


@final
class StatelessEncoder(Encoder):
    """An encoder that refers to the static table or writes fields in full, without Huffman coding and the dynamic table.

    A field therefore has the same bytes on every connection. A peer is told about the unused table only if it must be: if
    its SETTINGS_HEADER_TABLE_SIZE is below 4,096, the size that both ends begin with, the next block begins with a size
    update to 0 (RFC 7541 sections 4.2 and 6.3). Every later setting allows that size.
    """

    def __init__(self) -> None:
        super().__init__()
        self._size = HeaderTable.DEFAULT_SIZE
        self._update = b""

    @property
    def header_table_size(self) -> int:
        """The size of the dynamic table that the peer must assume."""
        return self._size

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        if value < self._size:
            self._size = 0
            self._update = b"\x20"

    def opening(self) -> bytes:
        """The bytes that the next block must begin with. They count as sent."""
        update, self._update = self._update, b""
        return update

    def encode(self, headers: Iterable[tuple[bytes, bytes]], huffman: bool = False) -> bytes:  # type: ignore[override]
        """The block of a header list of bytes. `huffman` is ignored."""
        fields = [encode_field(name, value) for name, value in headers]
        return self.opening() + b"".join(fields)


SENSITIVE = frozenset((b"authorization", b"proxy-authorization", b"cookie", b"set-cookie"))
"""Fields whose values are kept out of every table."""


def encode_field(name: bytes, value: bytes) -> bytes:
    """One field of an HPACK block of StatelessEncoder. Fields that hold credentials are marked as never indexed, so that no
    intermediary compresses them either (RFC 7541 section 7.1.3)."""
    _, values = HeaderTable.STATIC_TABLE_MAPPING.get(name, (0, {}))
    if value in values:
        return bytes((_INDEXED | values[value],))
    return encode_name(name) + _encode_integer(len(value), 0x7F) + value


def encode_name(name: bytes) -> bytes:
    """The first part of a field that is written in full, as `encode_field` writes it."""
    index, _ = HeaderTable.STATIC_TABLE_MAPPING.get(name, (0, {}))
    first = _NEVER if name in SENSITIVE else 0
    return _encode_integer(index, 0x0F, first) if index else bytes((first,)) + _encode_integer(len(name), 0x7F) + name


def _encode_integer(number: int, mask: int, first: int = 0) -> bytes:
    if number < mask:
        return bytes((first | number,))
    out, number = bytearray((first | mask,)), number - mask
    while number >= 0x80:
        out.append(0x80 | (number & 0x7F))
        number >>= 7
    out.append(number)
    return bytes(out)
