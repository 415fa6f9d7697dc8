"""Reads one inference request (v2) as its body arrives: its JSON first, then the rows of its binary inputs."""

from __future__ import annotations

import math
import struct
from typing import Any, NoReturn, final

import msgspec
import numpy as np

from protocols.buffers import untouched
from protocols.events import NEED_DATA, Buffer, Signal
from protocols.v2.body import DEFAULT_LIMITS, V2Limits, describe_tensors, split_body
from protocols.v2.metadata import ModelSignature
from protocols.v2.request import V2Request, read_request
from protocols.v2.tensors import DATATYPES, Array, BytesData, V2Error, V2Tensor, decode_binary, show, show_shape

MiB = 1024 * 1024
_LENGTH = struct.Struct("<I")
_SMALL = 64 * 1024  # bytes that are joined without announcing their memory


@final
class V2Piece(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """Some of a request's inputs, or rows of one. `whole` has the full shape for an input of which these are only some rows.
    `last` is True for the piece that completes the request."""

    inputs: tuple[V2Tensor, ...]
    whole: tuple[tuple[int, ...], ...]
    last: bool


@final
class _Rows:
    """The progress in a binary input, in rows of its first axis. An input of rank 0 is one row."""

    __slots__ = ("at", "datatype", "done", "items", "name", "row", "rows", "shape", "size", "tensor")

    def __init__(self, tensor: V2Tensor, size: int) -> None:
        self.tensor, self.size = tensor, size
        self.name, self.datatype, self.shape = tensor.name, tensor.datatype, tensor.array.shape
        self.rows = self.shape[0] if self.shape else 1
        self.items = math.prod(self.shape[1:])  # elements of a row
        self.row = self.items * DATATYPES[tensor.datatype].itemsize  # bytes of a row, if all have the same
        self.at = self.done = 0  # bytes and rows that were given out

    def piece(self, data: memoryview, rows: int) -> tuple[V2Tensor, tuple[int, ...]]:
        """The next rows, in these bytes."""
        shape = (rows, *self.shape[1:]) if self.shape else ()
        array = decode_binary(self.datatype, shape, data, self.name)
        self.at += data.nbytes
        self.done += rows
        return msgspec.structs.replace(self.tensor, array=array), self.shape if rows < self.rows else ()


@final
class PieceReader:
    """Reads a request whose Inference-Header-Content-Length is `header_length` from its body, in any pieces.

    Call `head` first: it refuses everything in the JSON that `parse_infer` would refuse. Then call `next_piece`: it returns
    consecutive rows of each binary input, in order, as many as are here and at most `piece` bytes, or one row if that is
    larger. Inputs in JSON and empty ones are whole in the first piece. The last piece comes when the body has ended.

    Pass one buffer at a time, after NEED_DATA. Arrays are read-only, and views of an input buffer if their rows lie in one:
    it must not change. `need` is the memory, beyond small amounts, that will be filled as bytes come, and `here` the part of
    it whose bytes are here: reserve that much before each `receive_data`. V2Error for a body that is invalid, too long or
    too short; no other error is raised.
    """

    __slots__ = (
        "_binary",
        "_block",
        "_ended",
        "_filled",
        "_given",
        "_held",
        "_json",
        "_largest",
        "_limits",
        "_piece",
        "_rest",
        "_signature",
        "_text",
        "_want",
        "_whole",
        "request",
    )

    def __init__(
        self,
        header_length: int,
        length: int | None,
        signature: ModelSignature,
        limits: V2Limits = DEFAULT_LIMITS,
        *,
        largest: int = 1024 * MiB,
        piece: int = MiB,
    ) -> None:
        """`length` is that of the body, if it is declared; `largest` is the limit of a body. V2Error if they, or the limit
        of the JSON, contradict the header."""
        self._signature, self._limits, self._largest, self._piece = signature, limits, largest, piece
        if header_length > limits.json:
            text = f"the JSON of the request is at most {limits.json} bytes (limits.json), got {header_length}"
            raise V2Error(text, status=413)
        if length is not None and header_length > length:
            raise V2Error(f"Inference-Header-Content-Length is {header_length}, but the body has {length} bytes")
        if length is not None and length > largest:
            raise V2Error(f"the body of {length} bytes is over the limit of {largest} bytes (limits.body)", status=413)
        self._given = None if length is None else length - header_length
        self._want = header_length  # bytes that are needed in one buffer
        self._rest = memoryview(b"")  # input that is not used yet
        self._block: memoryview | None = None  # the needed bytes, if they come in several buffers
        self._filled = 0
        self._text = _Text()
        self._binary: list[_Rows] = []  # the incomplete ones; the next one last
        self._whole: tuple[V2Tensor, ...] | None = None  # the other inputs, for the first piece
        self._held: V2Piece | None = None
        self._ended = False
        self._json: memoryview | None = None  # the JSON while it is not parsed
        self.request: V2Request | None = None
        """The request of the JSON, without its inputs; None before it is here."""

    @property
    def need(self) -> int:
        """The bytes of memory that the next input fills; 0 for less than 64 KiB."""
        return max(self._want if self._want > _SMALL else 0, self._text.need)

    @property
    def here(self) -> int:
        """The part of `need` whose bytes are here, to be paid for with the next input."""
        here = len(self._rest) if self._block is None else self._filled
        return max(here if self._want > _SMALL else 0, self._text.need)

    @property
    def work(self) -> int:
        """The bytes that the next step may examine one by one: those of BYTES."""
        strings = self._binary and self._binary[-1].datatype == "BYTES"
        return len(self._rest) + self._text.unseen if strings else 0

    def receive_data(self, data: Buffer) -> None:
        """Takes one buffer of the body."""
        view = memoryview(data).toreadonly()
        if self._block is None:
            if not self._rest:
                self._rest = view
                return
            self._block, self._filled = untouched(self._want), 0
            self._fill(self._rest)
        self._rest = view[self._fill(view) :]

    def receive_eof(self) -> None:
        """Tells that the body has ended."""
        self._ended = True

    def _fill(self, view: memoryview) -> int:
        block = self._block
        assert block is not None
        n = min(len(block) - self._filled, len(view))
        block[self._filled : self._filled + n] = view[:n]
        self._filled += n
        return n

    def _take(self, n: int) -> memoryview | None:
        """The next n bytes in one buffer, or None while they are not here."""
        block = self._block
        if block is not None:
            if self._filled < len(block):
                return None
            self._block = None
            self._want = 0
            return block.toreadonly()
        if len(self._rest) < n:
            self._want = n
            return None
        taken, self._rest = self._rest[:n], self._rest[n:]
        self._want = 0
        return taken

    # -- the JSON --------------------------------------------------------------------------------------------------

    def head_text(self) -> memoryview | Signal:
        """The JSON text, or NEED_DATA."""
        if self._json is None:
            self._json = self._take(self._want)
            if self._json is None:
                if self._ended:
                    raise V2Error("the body ended in the middle of its JSON")
                return NEED_DATA
        return self._json

    def head(self) -> V2Request | Signal:
        """The request of the JSON, without its inputs, or NEED_DATA."""
        if self.request is None:
            text = self.head_text()
            if not isinstance(text, memoryview):
                return text
            self.request = self._read(text)
            self._json = memoryview(b"")
        return self.request

    def _read(self, text: memoryview) -> V2Request:
        head, _ = split_body(text, len(text), self._limits, "the request")
        binary: dict[str, int] = {}

        def outline(datatype: str, shape: tuple[int, ...], at: int, size: int, name: str) -> Array | BytesData:
            if len(text) + at + size > self._largest:
                raise V2Error(
                    f"input {show(name)}: the body would have {len(text) + at + size} bytes, "
                    f"over the limit of {self._largest} bytes (limits.body)",
                    status=413,
                )
            if not size:
                return decode_binary(datatype, shape, memoryview(b""), name)
            if datatype == "BYTES" and not 0 < math.prod(shape) <= size // _LENGTH.size:
                raise V2Error(
                    f"tensor {show(name)}: BYTES {show_shape(shape)} has {show(math.prod(shape))} elements, each with a "
                    f"length of 4 bytes, got {size} bytes"
                )
            binary[name] = size
            return np.broadcast_to(np.empty((), DATATYPES[datatype]), shape)

        def inputs(entries: list[dict[str, Any]]) -> tuple[V2Tensor, ...]:
            return describe_tensors(entries, self._given, len(text), self._limits, "input", outline)

        request = read_request(head, self._signature, self._limits, inputs)
        self._whole = tuple(tensor for tensor in request.inputs if tensor.name not in binary)
        self._binary = [_Rows(t, binary[t.name]) for t in reversed(request.inputs) if t.name in binary]
        return msgspec.structs.replace(request, inputs=())

    # -- the data --------------------------------------------------------------------------------------------------

    def next_piece(self) -> V2Piece | Signal:
        """The next piece, or NEED_DATA. Call `head` before."""
        assert self.request is not None, "the head comes first"
        if self._held is None:
            piece = self._made()
            if piece is None:
                if self._ended:
                    self._short()
                return NEED_DATA
            if not piece.last:
                return piece
            self._held = piece
        if self._rest:
            raise V2Error(f"{len(self._rest)} bytes or more follow the last input's")
        return self._held if self._ended else NEED_DATA

    def _short(self) -> NoReturn:
        rows = self._binary[-1]
        here = rows.at + self._text.size + (len(self._rest) if self._block is None else self._filled)
        raise V2Error(f"input {show(rows.name)}: the body ended after {here} of its {rows.size} bytes")

    def _made(self) -> V2Piece | None:
        binary, made = self._binary, None
        if binary:
            rows = binary[-1]
            made = self._strings(rows) if rows.datatype == "BYTES" else self._numbers(rows)
            if made is None:
                return None
            if rows.done == rows.rows:
                binary.pop()
        whole, self._whole = self._whole or (), ()
        inputs = [*whole]
        shapes: list[tuple[int, ...]] = [()] * len(whole)
        if made is not None:
            inputs.append(made[0])
            shapes.append(made[1])
        return V2Piece(inputs=tuple(inputs), whole=tuple(shapes), last=not binary)

    def _numbers(self, rows: _Rows) -> tuple[V2Tensor, tuple[int, ...]] | None:
        n = 1
        if self._block is None:
            n = max(min(len(self._rest), self._piece) // rows.row, 1)
        n = min(n, rows.rows - rows.done)
        data = self._take(n * rows.row)
        return None if data is None else rows.piece(data, n)

    def _strings(self, rows: _Rows) -> tuple[V2Tensor, tuple[int, ...]] | None:
        text = self._text
        self._rest = text.feed(self._rest, rows)
        n = text.scan(rows, self._piece)
        return rows.piece(text.take(), n) if n else None


@final
class _Text:
    """The received elements of a BYTES input. Each element has its own length, so finding rows means examining all of
    them."""

    __slots__ = ("_at", "_data", "_items", "_rows_end")

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = self._rows_end = 0  # the bytes that were examined, and the end of the last row in them
        self._items = 0  # elements behind that row

    @property
    def size(self) -> int:
        return len(self._data)

    @property
    def unseen(self) -> int:
        return len(self._data) - self._at

    @property
    def need(self) -> int:
        size = len(self._data) + _SMALL
        return 2 * size if size > 2 * _SMALL else 0  # output is a copy

    def feed(self, view: memoryview, rows: _Rows) -> memoryview:
        """Takes the bytes that belong to the input; returns the others."""
        n = min(len(view), rows.size - rows.at - len(self._data))
        self._data += view[:n]
        return view[n:]

    def scan(self, rows: _Rows, most: int) -> int:
        """The number of whole rows that are here, within `most` bytes or just beyond."""
        data, left, found = self._data, rows.size - rows.at, 0
        at = self._at
        while found < rows.rows - rows.done and at < most + (0 if found else left):
            start = at + _LENGTH.size
            if start > left:
                raise V2Error(f"tensor {show(rows.name)}: the length of an element in row {rows.done + found} is cut off")
            if start > len(data):
                break
            end = start + _LENGTH.unpack_from(data, at)[0]
            if end > left:
                raise V2Error(
                    f"tensor {show(rows.name)}: an element in row {rows.done + found} has {end - start} bytes, "
                    f"only {left - start} are left"
                )
            if end > len(data):
                break
            at = end
            self._items += 1
            if self._items == rows.items:
                found, self._items, self._rows_end = found + 1, 0, at
        self._at = at
        if found == rows.rows - rows.done and self._rows_end != left:
            raise V2Error(
                f"tensor {show(rows.name)}: {left - self._rows_end} bytes are left after the last of {rows.rows} rows"
            )
        return found

    def take(self) -> memoryview:
        """Removes and returns the whole rows."""
        with memoryview(self._data) as data, data[: self._rows_end] as rows:
            taken = bytes(rows)
        del self._data[: len(taken)]
        self._at, self._rows_end = self._at - len(taken), 0
        return memoryview(taken)
