"""Joins the rows of several requests into one request, and cuts its response into the response of each: pure functions."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from models.errors import ModelError
from models.messages import BytesTensor, InferRequest, InferResponse, Parameter, Tensor
from models.spec import ModelSpec, TensorSpec

Array: TypeAlias = npt.NDArray[Any]

_OF_THE_QUEUE = ("priority", "timeout")
"""Parameters that control the queue and not the model: a model whose requests are joined does not get them."""
_WARM = 64 * 1024  # bytes from which on fresh memory is too expensive
_KEPT = 8  # blocks of memory that are reused


@final
class Rows:
    """Joins requests of one model, and cuts its responses."""

    def __init__(self, spec: ModelSpec) -> None:
        self._name, self._most = spec.name, spec.max_batch_size
        self._padded = {tensor.name: tensor for tensor in spec.inputs or () if tensor.pad is not None}
        self._like = {tensor.name: tensor for tensor in spec.outputs or () if tensor.like in self._padded}
        self._memory = _Memory()

    def key_of(self, request: InferRequest) -> Hashable:
        """The key of a request; requests with equal keys may be joined. None for a request that may not be joined: its
        tensors have no common number of rows, or more than the model accepts."""
        parts: list[Hashable] = []
        rows = rows_of(request)
        if rows > self._most:
            return None
        for tensor in request.inputs:
            shape = tensor.shape
            if not shape or shape[0] != rows:
                return None
            tail: tuple[int | None, ...] = shape[1:]
            if (spec := self._padded.get(tensor.name)) is not None:
                if len(tail) != len(spec.shape or ()):
                    return None
                tail = tuple([None if axis in spec.variable else size for axis, size in enumerate(tail)])
            order = "|O" if type(tensor) is BytesTensor else tensor.data.dtype.str
            parts.append((tensor.name, tensor.datatype, order, tail, _told(tensor.parameters)))
        if not parts:
            return None
        return (*parts, _told(_of_the_model(request.parameters)), tuple(request.outputs))

    def join(self, requests: Sequence[InferRequest], rows: int) -> InferRequest:
        """One request made of requests with equal keys, filled up to `rows` rows. A single request keeps its arrays. Those
        of several are copied into memory that is reused once no one refers to it."""
        first = requests[0]
        parameters = _of_the_model(first.parameters)
        if len(requests) == 1 and rows == rows_of(first):
            if parameters is first.parameters:
                return first
            return InferRequest(inputs=first.inputs, id=first.id, parameters=parameters, outputs=first.outputs)
        inputs = []
        for i, tensor in enumerate(first.inputs):
            data = self._joined(tensor.name, [request.inputs[i].data for request in requests], rows)
            inputs.append(Tensor(name=tensor.name, data=data, datatype=tensor.datatype, parameters=tensor.parameters))
        return InferRequest(inputs=tuple(inputs), parameters=parameters, outputs=first.outputs)

    def _joined(self, name: str, arrays: list[Array], rows: int) -> Array:
        tails = {array.shape[1:] for array in arrays}
        tail = tuple(map(max, *tails)) if len(tails) > 1 else next(iter(tails))
        given = sum([len(array) for array in arrays])
        data = self._memory.array((rows, *tail), arrays[0].dtype)
        if len(tails) == 1:
            np.concatenate(arrays, out=data[:given])
        else:
            data[:given] = _filler(self._padded[name])
            start = 0
            for array in arrays:
                stop = start + len(array)
                data[(slice(start, stop), *map(slice, array.shape[1:]))] = array
                start = stop
        if rows > given:
            data[given:] = data[given - 1]
        data.flags.writeable = False
        return data

    def cut(self, response: InferResponse, requests: Sequence[InferRequest], rows: int) -> list[InferResponse]:
        """The response of each request; its arrays are read-only views of its rows. ModelError if the number of rows is
        wrong."""
        alone = len(requests) == 1 and rows == rows_of(requests[0])
        if not isinstance(response, InferResponse):
            raise TypeError(f"an infer call is answered with InferResponse, not {type(response).__name__}")
        for tensor in response.outputs:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"an output is a Tensor, not {type(tensor).__name__}")
            if tensor.shape[:1] != (rows,):
                raise _bad_output(
                    f"model {self._name!r} was called with {rows} rows, and gave output {tensor.name[:60]!r} with shape "
                    f"{list(tensor.shape)}: expected {rows} rows, one for each (max_batch_size)"
                )
        if alone:
            return [response]
        longest = self._longest(requests)
        found, start = [], 0
        for request in requests:
            stop = start + rows_of(request)
            outputs = tuple([self._own(tensor, request, longest, start, stop) for tensor in response.outputs])
            found.append(InferResponse(outputs=outputs, parameters=response.parameters))
            start = stop
        return found

    def _longest(self, requests: Sequence[InferRequest]) -> Mapping[str, tuple[int, ...]]:
        """The shapes that inputs with a pad were filled up to."""
        if not self._like:
            return {}
        names = {tensor.like for tensor in self._like.values()}
        shapes: dict[str, tuple[int, ...]] = {}
        for request in requests:
            for tensor in request.inputs:
                if tensor.name in names:
                    shapes[tensor.name] = tuple(map(max, tensor.shape, shapes.get(tensor.name, tensor.shape)))
        return shapes

    def _own(
        self, tensor: Tensor, request: InferRequest, longest: Mapping[str, tuple[int, ...]], start: int, stop: int
    ) -> Tensor:
        data = tensor.data
        if (spec := self._like.get(tensor.name)) is None or spec.like not in longest:
            data = data[start:stop]
        else:
            data = data[(slice(start, stop), *self._own_sizes(spec, data, request, longest[spec.like]))]
        data.flags.writeable = False
        return Tensor(name=tensor.name, data=data, datatype=tensor.datatype, parameters=tensor.parameters)

    def _own_sizes(self, spec: TensorSpec, data: Array, request: InferRequest, longest: tuple[int, ...]) -> Sequence[slice]:
        """The slice of each further dimension of an output that belongs to a request. ModelError for an output whose
        dimensions differ from those that its input was filled up to."""
        source, sizes = self._padded[spec.like], [slice(None)] * (data.ndim - 1)
        given = request[spec.like].shape
        for axis, of_input in zip(spec.variable, source.variable, strict=True):
            if data.ndim != len(spec.shape or ()) + 1 or data.shape[axis + 1] != longest[of_input + 1]:
                filled, wanted = [len(data), *longest[1:]], longest[of_input + 1]
                raise _bad_output(
                    f"model {self._name!r} was called with {spec.like[:60]!r} of shape {filled}, filled up with its pad, "
                    f"and gave output {spec.name[:60]!r} with shape {list(data.shape)}: expected {wanted} in dimension "
                    f"{axis + 1} (like = {spec.like[:60]!r})"
                )
            sizes[axis] = slice(given[of_input + 1])
        return sizes


def _bad_output(text: str) -> ModelError:
    return ModelError(text, code="BadOutput", status=500)


def size_of(requests: Sequence[InferRequest]) -> tuple[int, int]:
    """The bytes of the inputs of these requests, and the number of their elements that are objects or become some."""
    size = objects = 0
    for request in requests:
        for tensor in request.inputs:
            if tensor.datatype == "BYTES":
                objects += math.prod(tensor.shape)
            else:
                size += tensor.data.nbytes
    return size + 8 * objects, objects


def elements_of(message: InferRequest) -> tuple[int, int] | None:
    """The number of BYTES elements that must become objects, and their bytes. None: there are none, or all are objects."""
    for tensor in message.inputs:
        if type(tensor) is BytesTensor:
            given = [one.given for one in message.inputs if type(one) is BytesTensor]
            waiting = [one for one in given if not isinstance(one, np.ndarray) and not one.made]
            return (sum([one.size for one in waiting]), sum([len(one.data) for one in waiting])) if waiting else None
    return None


def rows_of(request: InferRequest) -> int:
    """The number of rows of the first input."""
    inputs = request.inputs
    return inputs[0].shape[0] if inputs and inputs[0].shape else 0


def _told(parameters: Mapping[str, Parameter]) -> str:
    """Parameters as a key: 1, 1.0, "1" and true are different to a model."""
    return repr(sorted(parameters.items())) if parameters else ""


def _of_the_model(parameters: Mapping[str, Parameter]) -> Mapping[str, Parameter]:
    if not any(name in parameters for name in _OF_THE_QUEUE):
        return parameters
    return {name: value for name, value in parameters.items() if name not in _OF_THE_QUEUE}


def _filler(spec: TensorSpec) -> Any:
    return spec.pad.encode() if isinstance(spec.pad, str) else spec.pad


@final
class _Memory:
    """Provides arrays in memory that was used before: fresh memory costs ten times as much as filling it. A block is free
    when no array in it is left, whoever had it."""

    def __init__(self) -> None:
        self._blocks: list[npt.NDArray[np.uint8]] = []

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array that is not cleared."""
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if size < _WARM or dtype.hasobject:
            return np.empty(shape, dtype)
        return self._block(size)[:size].view(dtype).reshape(shape)

    def _block(self, size: int) -> npt.NDArray[np.uint8]:
        blocks = self._blocks
        for i in range(len(blocks)):
            if _references(blocks, i) == _FREE and size <= blocks[i].size <= 4 * size:
                blocks.append(blocks.pop(i))  # the longest unused one comes first
                return blocks[-1]
        del blocks[: len(blocks) - _KEPT + 1]
        blocks.append(np.empty(1 << (size - 1).bit_length(), np.uint8))
        return blocks[-1]


def _references(blocks: list[npt.NDArray[np.uint8]], i: int) -> int:
    """The number of references to a block: each array in it is one more."""
    return sys.getrefcount(blocks[i])


_FREE = _references([np.empty(0, np.uint8)], 0)
