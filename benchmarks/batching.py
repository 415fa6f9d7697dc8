"""The cost of batching rows of several requests: joining and cutting alone, and requests through the whole queue.

python -m benchmarks micro batching
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import trio

from benchmarks.units import ROUNDS, Case, repeated
from gateway.workers.statistics import ModelStatistics
from gateway.workers.stuck import StuckWatch
from models.adapt import spec_of
from models.batching import running
from models.messages import InferRequest, InferResponse, Tensor
from models.rows import Rows
from models.session import Session
from models.spec import Batching, ModelSpec

_TOGETHER = 16
_EACH = 64  # requests of each client


async def _double(request: InferRequest) -> InferResponse:
    await trio.lowlevel.checkpoint()
    return InferResponse(outputs=(Tensor(name="OUTPUT0", data=request["x"] * 2),))


def _spec(batching: Batching | None) -> ModelSpec:
    return spec_of(_double, "double", max_batch_size=_TOGETHER, batching=batching)


def _requests(width: int) -> list[InferRequest]:
    rows = np.random.default_rng(1).random((_TOGETHER, 1, width), np.float32)
    return [InferRequest(inputs=(Tensor(name="x", data=row),)) for row in rows]


def _joined(width: int) -> Callable[[], object]:
    rows, requests = Rows(_spec(Batching())), _requests(width)

    def step() -> object:
        joined = rows.join(requests, _TOGETHER)
        return rows.cut(InferResponse(outputs=joined.inputs), requests, _TOGETHER)

    return step


def _joined_by_hand(width: int) -> Callable[[], object]:
    requests = _requests(width)

    def step() -> object:
        joined = np.concatenate([request.inputs[0].data for request in requests])
        return [joined[row : row + 1] for row in range(_TOGETHER)]

    return step


class _Client:
    """A client that sends the next request after each answer."""

    def __init__(self, request: InferRequest) -> None:
        self._request, self._left = request, _EACH

    async def receive(self) -> InferRequest:
        if not self._left:
            raise trio.EndOfChannel
        self._left -= 1
        return self._request

    async def send(self, message: InferResponse, /) -> None:
        assert message.outputs


def _through(batching: Batching | None) -> float:
    """The cost of a request if many clients wait at once, all in one process."""

    spec = _spec(batching)

    async def ask(width: int) -> None:
        async with (
            running(spec, ModelStatistics(batched=True), StuckWatch(spec, list)) as model,
            trio.open_nursery() as nursery,
        ):
            for request in _requests(width):
                nursery.start_soon(model, Session(_Client(request)))

    best = float("inf")
    for _ in range(ROUNDS):
        started = time.process_time()
        trio.run(ask, 1024)
        best = min(best, time.process_time() - started)
    return best / (_TOGETHER * _EACH) * 1e6


def cases() -> Iterator[Case]:
    """Rows of several requests in one call: models.rows beside numpy alone, and the queue beside a call for each request."""
    for width in (16, 16_384):
        yield Case(
            name=f"{_TOGETHER} requests of FP32 [1, {width}] joined and cut",
            costs={"Rows": repeated(_joined(width)), "numpy": repeated(_joined_by_hand(width))},
        )
    yield Case(
        name=f"a request of {_TOGETHER} at once, FP32 [1, 1024]",
        costs={"batched": partial(_through, Batching()), "each alone": partial(_through, None)},
    )
