"""Looks up rows of a table by number: an embedding, and the smallest model whose weights are a file."""

from __future__ import annotations

from pathlib import Path
from typing import final

import numpy as np

from models.errors import ModelError
from models.messages import InferRequest, InferResponse, Tensor
from models.session import Session

MAX_BYTES = 64 * 1024**2


@final
class Lookup:
    """Answers INDEX, integers of any shape (family TENSOR), with ROWS: the row of the table for each of them.

    `table` is a .npy file with at least one dimension; all of it is held in memory. ModelError with status 400 for other
    inputs, a row that does not exist, and an answer of more than 64 MiB.
    """

    def __init__(self, table: Path) -> None:
        rows = np.load(table, allow_pickle=False)
        if rows.ndim < 1 or rows.dtype.kind not in "biuf" or rows.dtype.itemsize > 8:
            raise ValueError(f"a table has rows of numbers, this one is of shape {rows.shape} and of {rows.dtype}")
        self._table = rows.astype(rows.dtype.newbyteorder("="), copy=False)

    async def __call__(self, session: Session[InferRequest, InferResponse]) -> None:
        """Sends one response for each request, until the end of input."""
        async for request in session:
            rows = Tensor(name="ROWS", data=self._rows(request))
            await session.send(InferResponse(outputs=(rows,), id=request.id))

    def _rows(self, request: InferRequest) -> np.ndarray:
        names = [tensor.name for tensor in request.inputs]
        if names != ["INDEX"] or request.inputs[0].data.dtype.kind not in "iu":
            raise _refused(f"inputs: expected INDEX alone, of integers, got {', '.join(names)[:100] or 'none'}")
        index, count = request.inputs[0].data, len(self._table)
        size = index.size * self._table[:1].nbytes
        if size > MAX_BYTES:
            raise _refused(f"INDEX: {index.size} rows are {size} bytes, and an answer at most {MAX_BYTES}")
        if index.size and not (index.min() >= 0 and index.max() < count):
            raise _refused(f"INDEX: expected numbers from 0 to {count - 1}, got {index.min()} to {index.max()}")
        return np.asarray(self._table[index])


def _refused(message: str) -> ModelError:
    return ModelError(message, code="InvalidArgument", status=400)
