"""The messages of tensor models: tensors, requests and responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, cast, final

import msgspec
import numpy as np
import numpy.typing as npt

Parameter: TypeAlias = str | int | float | bool

_EMPTY: Mapping[Any, Any] = MappingProxyType({})


class Tensor(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A named array. `datatype` is the v2 name (BOOL, UINT8 ... FP64, BF16, BYTES) and determines the type of `data`.

    If it came from a wire, `data` is a read-only view of the received bytes: copy before writing. BF16 is
    `ml_dtypes.bfloat16`, BYTES an object array of `bytes`. A sent tensor must not change until `send` has returned and the
    reply is written.

    `whole` is set if `data` are only some rows of a tensor that arrives in pieces: it is the full shape.
    """

    name: str
    data: npt.NDArray[Any]
    datatype: str = ""
    parameters: Mapping[str, Parameter] = _EMPTY
    whole: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.datatype:
            try:
                datatype = datatype_of(self.data.dtype)
            except TypeError as e:
                raise TypeError(f"tensor {str(self.name)[:60]!r}: {e}") from None
            msgspec.structs.force_setattr(self, "datatype", datatype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


class Elements(Protocol):
    """A stand-in for an array of BYTES whose elements have not been used."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def size(self) -> int: ...
    @property
    def data(self) -> memoryview:
        """The received bytes, including the lengths."""

    @property
    def made(self) -> bool:
        """True if the array exists already."""

    def array(self) -> npt.NDArray[Any]:
        """The read-only object array of `bytes`, the same one at each call."""

    def fill(self, flat: npt.NDArray[Any]) -> Iterator[None]:
        """Makes the elements in `flat`, an object array of `size`, in steps of a few milliseconds. They are not kept."""


_given: Any = vars(Tensor)["data"]


@final
class BytesTensor(Tensor, frozen=True, kw_only=True, eq=False):
    """A Tensor of BYTES from a wire: its elements become objects when `data` is first used. If a model passes it on unused,
    the received bytes are sent."""

    @classmethod
    def of(cls, name: str, elements: Elements, parameters: Mapping[str, Parameter] = _EMPTY) -> BytesTensor:
        return cls(name=name, data=cast("npt.NDArray[Any]", elements), datatype="BYTES", parameters=parameters)

    @property  # type: ignore[misc]  # overrides the parent's member, which holds what was given
    def data(self) -> npt.NDArray[Any]:
        given = self.given
        return given if isinstance(given, np.ndarray) else given.array()

    @property
    def given(self) -> npt.NDArray[Any] | Elements:
        """The source of `data`. Reading it makes no objects."""
        given: npt.NDArray[Any] | Elements = _given.__get__(self)
        return given

    @property
    def shape(self) -> tuple[int, ...]:
        return self.given.shape


_DATATYPES = {
    "b1": "BOOL", "u1": "UINT8", "u2": "UINT16", "u4": "UINT32", "u8": "UINT64",
    "i1": "INT8", "i2": "INT16", "i4": "INT32", "i8": "INT64", "f2": "FP16", "f4": "FP32", "f8": "FP64",
}  # fmt: skip

DATATYPES = (*_DATATYPES.values(), "BF16", "BYTES")
"""The names of all datatypes of v2."""


def datatype_of(dtype: np.dtype[Any]) -> str:
    """The v2 name of a numpy dtype. TypeError for one that v2 cannot carry (complex, datetime, structured)."""
    if name := _DATATYPES.get(f"{dtype.kind}{dtype.itemsize}"):
        return name
    if dtype.kind in "OSUT":  # T is numpy's StringDType
        return "BYTES"
    if dtype.name == "bfloat16":
        return "BF16"
    if dtype.name.startswith("float"):
        raise TypeError(
            f"no v2 datatype for numpy dtype {dtype}: v2 has FP16, BF16, FP32 and FP64, and none of 8 bits or fewer; "
            "cast to one of these, or give the bytes with .view(numpy.uint8)"
        )
    raise TypeError(f"no v2 datatype for numpy dtype {dtype}: cast to a bool, integer, float, bfloat16 or bytes array")


@final
class InferRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One inference: inputs in the order sent, and the names of the requested outputs (empty: all).

    `last` is False if more pieces of this request follow, for a model that asked for pieces. `parameters` are the client's,
    including Triton's `sequence_id`, `sequence_start`, `sequence_end`, `priority` and `timeout`, if it sent them.
    """

    inputs: Sequence[Tensor]
    id: str = ""
    parameters: Mapping[str, Parameter] = _EMPTY
    outputs: Sequence[str] = ()
    last: bool = True

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        for tensor in self.inputs:
            if tensor.name == name:
                return tensor.data
        raise KeyError(f"no input {name!r}; there are: {', '.join(t.name for t in self.inputs)}")


@final
class InferResponse(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The outputs of one inference. If `id` is empty, the request's is used."""

    outputs: Sequence[Tensor]
    id: str = ""
    parameters: Mapping[str, Parameter] = _EMPTY
