"""Triton's classification extension (v2): an output as its largest values, each with its index and label."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from protocols.tensors import DATATYPES, Array, V2Error, V2Tensor, numbers_of, show

MOST = 1_000_000
"""Elements of an output that are put in order, as in Triton."""

_NO_NUMBERS = ("BYTES", "BOOL")


def read_count(value: object, name: str) -> int:
    """How many classes the parameter `classification` of an output asks for; 0, and absence, for the output itself."""
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise V2Error(f"classification of output {show(name)} must be a number of classes, got {show(value)}")
    return value


def classify(output: V2Tensor, count: int, labels: Sequence[str] = ()) -> V2Tensor:
    """The `count` largest values along the last axis of an output, or all of them where it has fewer: BYTES of the form
    `value:index`, and `value:index:label` where there is a label for the index. Floats have six decimals, as in Triton.
    Equal values come in the order of their indexes, and NaN last. V2Error for an output that has no order, or is too large
    to be put in order; with status 500 for one that is not of its datatype."""
    if output.datatype in _NO_NUMBERS:
        raise V2Error(f"output {show(output.name)} is {output.datatype}, which classification does not order")
    try:
        array = numbers_of(output.elements, output.datatype)
    except V2Error as error:
        raise V2Error(f"tensor {show(output.name)}: {error.message}", status=error.status) from None
    if array.size > MOST:
        raise V2Error(f"output {show(output.name)}: classification orders at most {MOST} elements, got {array.size}")
    classes = array.shape[-1] if array.shape else 1
    count = min(count, classes)
    rows = array.reshape(-1, classes) if array.size else array.reshape(0, classes)
    order = _descending(rows)[:, :count]
    form = "%f:%d" if rows.dtype.kind not in "iu" else "%d:%d"
    texts = [
        _labelled(form % (value, index), index, labels)
        for values, indexes in zip(np.take_along_axis(rows, order, 1).tolist(), order.tolist(), strict=True)
        for value, index in zip(values, indexes, strict=True)
    ]
    found = np.empty(len(texts), DATATYPES["BYTES"])
    found[:] = texts
    return msgspec.structs.replace(output, datatype="BYTES", array=found.reshape(*array.shape[:-1], count))


def _descending(rows: Array) -> Array:
    """The indexes of each row by its values, the largest first."""
    # inverted integers are in the opposite order, signed or not, and none of them overflows
    keys = np.invert(rows) if rows.dtype.kind in "iu" else np.negative(rows.astype(_wide(rows)))
    return np.argsort(keys, axis=1, kind="stable")


def _wide(rows: Array) -> type:
    return np.float64 if rows.dtype.itemsize == 8 else np.float32


def _labelled(text: str, index: int, labels: Sequence[str]) -> bytes:
    label = labels[index] if index < len(labels) else ""
    return (f"{text}:{label}" if label else text).encode()
