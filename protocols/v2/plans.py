"""Plans of inference requests (v2): reads requests that differ from an earlier one only in their data.

For FP32 [1, 16] a plan reads JSON in 2.2 us and binary data in 2.0 us; the typed reader takes 6.4 and 8.6 us. For 400 floats
in JSON it saves 4 us of 26, for 1,000 floats 1 us of 42. It saves less for longer texts: none above LONGEST_TEXT has a plan.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, TypeAlias, final

import msgspec
import numpy as np

from protocols.events import Buffer
from protocols.json.strict import is_plain
from protocols.json.text import MAX_NUMBER
from protocols.v2.numbers import FAST_FROM, read_numbers
from protocols.v2.request import V2Request, WantedOutput
from protocols.v2.tensors import DATATYPES, PACK_AT_ONCE, PACKED, Array, BytesData, V2Error, V2Tensor, from_json, packer
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


KEPT_BYTES = 1024
"""The most bytes of text around the data of a request with a plan."""
LONGEST_TEXT = 12 * 1024
"""The most bytes of a JSON request with a plan."""

_Numbers: TypeAlias = tuple[str, str, np.dtype[Any], tuple[int, ...], Callable[..., bytes], bytes]
"""An input in JSON: name, datatype, dtype, shape, the function that packs its numbers, and the text between the end of its
data and the data of the next input."""
_Bytes: TypeAlias = tuple[str, str, np.dtype[Any], tuple[int, ...], int]
"""An input in binary data: name, datatype, dtype, shape, and the position of its first byte in them."""


@final
class Plan(msgspec.Struct, frozen=True, gc=False):
    """The text around the data of a request, and its meaning. A request with the same text around other data has the same
    meaning. A request with an id or parameters has no plan: those are one client's own.

    For binary data the text is the JSON before them, by which the plan is found, and `size` is the number of their bytes.
    For numbers in a JSON text it is the text `before` the first number, and the text behind each array.
    """

    outputs: tuple[WantedOutput, ...]
    binary_default: bool
    data: tuple[_Bytes, ...] = ()
    size: int = 0
    before: bytes = b""
    numbers: tuple[_Numbers, ...] = ()

    def read_data(self, body: Buffer, at: int) -> V2Request:
        """The request of a body with this head, and `size` bytes of data from `at` on: the same as from `parse_infer`."""
        inputs: list[V2Tensor] = []
        for name, datatype, dtype, shape, begin in self.data:
            inputs.append(V2Tensor(name=name, datatype=datatype, array=_array(shape, dtype, body, at + begin)))
        return V2Request(inputs=tuple(inputs), outputs=self.outputs, binary_default=self.binary_default)

    def read_text(self, text: bytes) -> V2Request | None:
        """The request of the text: the same as from `parse_infer`. None if the text does not fit the plan, or needs a full
        check."""
        before = self.before
        if not text.startswith(before):
            return None
        at, inputs = len(before), []
        try:
            for name, datatype, dtype, shape, pack, after in self.numbers:
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
                    piece = text[at:end]
                    values = _decode_numbers(piece)
                    if size > MAX_NUMBER and not is_plain(piece, 0):
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


def plan_of_data(request: V2Request, size: int) -> Plan | None:
    """The plan for the head of a request that `read_typed` read with `size` bytes behind it; None if it can have none."""
    if is_somebodys(request):
        return None
    inputs = []
    at = 0
    for tensor in request.inputs:
        array = tensor.array
        # The bytes of BYTES and BOOL must be checked each time.
        if type(array) is BytesData or tensor.datatype == "BOOL" or not array.size:
            return None
        inputs.append((tensor.name, tensor.datatype, array.dtype, array.shape, at))
        at += array.nbytes
    if at != size:  # some inputs came as JSON
        return None
    return Plan(outputs=request.outputs, binary_default=request.binary_default, data=tuple(inputs), size=size)


def plan_of_text(text: bytes, request: V2Request) -> Plan | None:
    """The plan for a text that `read_typed` read as `request`, which must have no id or parameters. None if the plan would
    keep more than KEPT_BYTES, and for data other than a few thousand numbers."""
    tensors = request.inputs
    for tensor in tensors:
        if tensor.datatype not in PACKED or not 0 < tensor.array.size <= PACK_AT_ONCE:
            return None
    try:
        pieces = _take_apart(text)
    except msgspec.DecodeError:  # an empty input has no data
        return None
    if pieces is None or sum(map(len, pieces)) > KEPT_BYTES:
        return None
    before, *rest = pieces
    numbers = []
    for tensor, after in zip(tensors, rest, strict=True):
        name, datatype, shape = tensor.name, tensor.datatype, tensor.array.shape
        pack = packer(math.prod(shape), PACKED[datatype])
        numbers.append((name, datatype, DATATYPES[datatype], shape, pack, after))
    return Plan(outputs=request.outputs, binary_default=request.binary_default, before=before, numbers=tuple(numbers))


def is_somebodys(request: V2Request) -> bool:
    """True if it has an id or parameters, which are one client's own."""
    if request.id or request.parameters:
        return True
    for tensor in request.inputs:  # noqa: SIM110, a generator would cost more than the rest
        if tensor.parameters:
            return True
    return False


def _take_apart(text: bytes) -> list[bytes] | None:
    """The text around the data of each input. The same text as the data may also occur in a shape or a string. The found
    places are therefore proved: with a distinct number in each place, the text must decode to just these data. The arrays
    hold no quote, so a place inside a string or another array would leave an input's `data` unchanged."""
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
