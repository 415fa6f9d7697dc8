"""Inference requests (v2) in JSON that differ in their numbers alone: what one was shows where the others have theirs."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, TypeAlias, final

import msgspec
import numpy as np

from protocols.strict_json import MAX_NUMBER, is_plain
from protocols.v2.numbers import FAST_FROM, read_numbers
from protocols.v2.request import V2Request, WantedOutput
from protocols.v2.tensors import DATATYPES, PACK_AT_ONCE, PACKED, Array, V2Error, V2Tensor, from_json, packer
from protocols.v2.typed_request import Numbers


class _Raw(msgspec.Struct, gc=False):
    data: msgspec.Raw


class _RawHead(msgspec.Struct, gc=False):
    inputs: list[_Raw]


class _Mark(msgspec.Struct, gc=False):
    data: int


class _MarkedHead(msgspec.Struct, gc=False):
    inputs: list[_Mark]


_array = np.ndarray
_decode_numbers = msgspec.json.Decoder(Numbers).decode
_decode_raw = msgspec.json.Decoder(_RawHead).decode
_decode_marked = msgspec.json.Decoder(_MarkedHead).decode


_Slot: TypeAlias = tuple[str, str, np.dtype[Any], tuple[int, ...], Callable[..., bytes], bytes]
"""An input: name, datatype, dtype, shape, what packs its numbers, and the text from the end of its data to the data of
the next."""


@final
class Template(msgspec.Struct, frozen=True, gc=False):
    """The text of a request around the `data` of its inputs, and what it means. A text that has the same around other
    arrays is the same request with other numbers, as what stands around a JSON value does not depend on it."""

    before: bytes
    slots: tuple[_Slot, ...]
    outputs: tuple[WantedOutput, ...]
    binary_default: bool

    def read(self, text: bytes) -> V2Request | None:
        """What `parse_infer` makes of the text; None where it is no such request, or one to be looked at closely."""
        before = self.before
        if not text.startswith(before):
            return None
        at, inputs = len(before), []
        try:
            for name, datatype, dtype, shape, pack, after in self.slots:
                end = text.find(after, at)
                if end < 0:
                    return None
                array: Array | None
                size = end - at
                if size >= FAST_FROM:
                    array = read_numbers(text, at, end, datatype, shape)
                    if array is None:
                        return None
                else:
                    numbers = text[at:end]
                    values = _decode_numbers(numbers)
                    if size > MAX_NUMBER and not is_plain(numbers, 0):
                        return None
                    if values and type(values[0]) is list:
                        array = from_json(datatype, shape, values, name, numbers=True)
                    else:
                        array = _array(shape, dtype, pack(*values))
                inputs.append(V2Tensor(name=name, datatype=datatype, array=array))
                at = end + len(after)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, struct.error, OverflowError, V2Error):
            return None
        if at != len(text):
            return None
        return V2Request(inputs=tuple(inputs), outputs=self.outputs, binary_default=self.binary_default, copied=len(text))


def template_of(text: bytes, request: V2Request, largest: int) -> Template | None:
    """The template of a text that `read_typed` made `request` of, which has no id and no parameters; None where it would
    keep more than `largest` bytes, and for data that is not some thousand numbers at most."""
    tensors = request.inputs
    for tensor in tensors:
        if tensor.datatype not in PACKED or not 0 < tensor.array.size <= PACK_AT_ONCE:
            return None
    try:
        pieces = _take_apart(text)
    except msgspec.DecodeError:  # an input of no bytes has no data
        return None
    if pieces is None or sum(map(len, pieces)) > largest:
        return None
    before, *rest = pieces
    slots = []
    for tensor, after in zip(tensors, rest, strict=True):
        name, datatype, shape = tensor.name, tensor.datatype, tensor.array.shape
        pack = packer(math.prod(shape), PACKED[datatype])
        slots.append((name, datatype, DATATYPES[datatype], shape, pack, after))
    return Template(before, tuple(slots), request.outputs, request.binary_default)


def _take_apart(text: bytes) -> list[bytes] | None:
    """The text around the data of each input. The same text may stand elsewhere too, in a shape or a string: so the
    places found are proved, by what becomes of the request with a number of its own in each. These arrays hold no
    quote: one inside of a string, or of another array, would leave its `data` what it was."""
    pieces, at = [], 0
    for tensor in _decode_raw(text).inputs:
        data = bytes(tensor.data)
        found = text.find(data, at)
        if found < 0:
            return None
        pieces.append(text[at:found])
        at = found + len(data)
    pieces.append(text[at:])
    marked = b"".join(b"%b%d" % (piece, index) for index, piece in enumerate(pieces[:-1])) + pieces[-1]
    marks = [tensor.data for tensor in _decode_marked(marked).inputs]
    return pieces if marks == list(range(len(marks))) else None
