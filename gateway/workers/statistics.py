"""What became of a model's calls, and where their time went: counters that only grow, read at any time."""

from __future__ import annotations

from time import perf_counter_ns, time_ns
from typing import final

_SIZES = 1024  # batch sizes that are told apart
_RESPONSES = 128  # responses of one call that are told apart


@final
class Batches:
    """Executions of one batch size, and the nanoseconds of their three steps."""

    __slots__ = ("count", "infer", "input", "output")

    def __init__(self) -> None:
        self.count = self.input = self.infer = self.output = 0


@final
class Responses:
    """What became of the nth responses of calls that may have many, and the nanoseconds they took."""

    __slots__ = ("cancelled", "cancelled_ns", "failed", "failed_ns", "infer", "output", "succeeded")

    def __init__(self) -> None:
        self.succeeded = self.infer = self.output = 0
        self.failed = self.failed_ns = self.cancelled = self.cancelled_ns = 0


@final
class ModelStatistics:
    """The calls of one worker, on every wire. Times are nanoseconds.

    A call begins when a slot is asked of a model that can be called, and is counted once, at its end: it succeeded or it
    failed. What failed of it was cancelled where its client had left before its answer was complete. The time of a
    success is that of its queue, input, infer and output, and nothing else. Written by the event loop's thread alone.

    Where requests are `batched`, several calls are one execution of the model, which is told by `executed`; elsewhere each
    call that succeeded was one.
    """

    __slots__ = (
        "_beyond",
        "_executions",
        "batched",
        "batches",
        "cancelled",
        "cancelled_ns",
        "copied",
        "failed",
        "failed_ns",
        "infer",
        "input",
        "last",
        "output",
        "queue",
        "received",
        "responses",
        "succeeded",
    )  # fmt: skip

    def __init__(self, *, batched: bool = False) -> None:
        self.batched, self._executions = batched, 0
        self.succeeded = self.failed = self.cancelled = 0
        self.queue = self.input = self.infer = self.output = 0
        self.failed_ns = self.cancelled_ns = 0
        self._beyond = 0  # inferences beyond one a call
        self.received = self.copied = 0
        """Bytes of the bodies of tensor requests that succeeded, and of how many of them a copy was made, each time that
        one was, until the model had its arrays."""
        self.last = 0
        """The end of the last call, on `perf_counter_ns`; 0: there was none."""
        self.batches: dict[int, Batches] = {}
        """By size, without those of 1 where calls are not `batched`: they are all that are not here."""
        self.responses: dict[int, Responses] = {}
        """By their place in their call, from 0 on."""

    def success(self, arrived: int, asked: int, began: int, returned: int, now: int, batch: int = 1) -> None:
        """A call has its answer: its request was read from `arrived` on and its slot asked for then, and its model ran from
        `began` to `returned`. `batch` is how many inferences it was."""
        self.last = now
        self.succeeded += 1
        if began != asked:
            self.queue += began - asked
        self.input += asked - arrived
        self.infer += returned - began
        self.output += now - returned
        if batch != 1:
            read, infer, output = asked - arrived, returned - began, now - returned
            self._beyond += batch - 1
            if not self.batched:
                self._batch(batch, read, infer, output)

    def executed(self, rows: int, joining: int, infer: int, cutting: int, copied: int) -> None:
        """The model has answered calls that came to so many rows together, for which so many bytes were copied."""
        self._executions += 1
        self.copied += copied
        self._batch(rows, joining, infer, cutting)

    def _batch(self, size: int, input: int, infer: int, output: int) -> None:
        batches = self.batches.get(size)
        if batches is None:
            # beyond that they are of no size: a client chooses it, within the model's max_batch_size
            batches = self.batches.setdefault(size if len(self.batches) < _SIZES else -1, Batches())
        batches.count += 1
        batches.input += input
        batches.infer += infer
        batches.output += output

    def failure(self, now: int, lasted: int, *, cancelled: bool) -> None:
        """A call has no answer, or an error."""
        self.last = now
        self.failed += 1
        self.failed_ns += lasted
        if cancelled:
            self.cancelled += 1
            self.cancelled_ns += lasted

    def response(self, place: int, infer: int, output: int) -> None:
        """One of a call's responses is on its way: it took so long since the one before, or since the call, and so long to
        write."""
        if (responses := self._at(place)) is not None:
            responses.succeeded += 1
            responses.infer += infer
            responses.output += output

    def no_response(self, place: int, lasted: int, *, cancelled: bool) -> None:
        """The call ended badly where this response would have come."""
        if (responses := self._at(place)) is not None:
            if cancelled:
                responses.cancelled += 1
                responses.cancelled_ns += lasted
            else:
                responses.failed += 1
                responses.failed_ns += lasted

    def _at(self, place: int) -> Responses | None:
        responses = self.responses.get(place)
        if responses is None and place < _RESPONSES:
            responses = self.responses[place] = Responses()
        return responses

    @property
    def inferences(self) -> int:
        """As `succeeded`, but each item of a batch counts."""
        return self.succeeded + self._beyond

    @property
    def executions(self) -> int:
        """How often the model was called with success."""
        return self._executions if self.batched else self.succeeded

    @property
    def success_ns(self) -> int:
        """The time of all calls that succeeded."""
        return self.queue + self.input + self.infer + self.output

    @property
    def service(self) -> float:
        """Seconds that a call which succeeded had its slot and its answer written, on average; 0 where none has."""
        return (self.success_ns - self.queue) / self.succeeded / 1e9 if self.succeeded else 0.0

    @property
    def last_ms(self) -> int:
        """The end of the last call, in milliseconds since 1970; 0 where there was none."""
        if not self.last:
            return 0
        return (time_ns() - perf_counter_ns() + self.last) // 1_000_000

    @property
    def by_size(self) -> dict[int, Batches]:
        """The executions of each batch size, 1 included."""
        if self.batched:
            return {size: batches for size, batches in sorted(self.batches.items()) if size >= 0}
        ones, sizes = Batches(), {}
        ones.count, ones.input, ones.infer, ones.output = self.succeeded, self.input, self.infer, self.output
        for size, batches in self.batches.items():
            ones.count -= batches.count
            ones.input -= batches.input
            ones.infer -= batches.infer
            ones.output -= batches.output
            if size >= 0:
                sizes[size] = batches
        if ones.count:
            sizes[1] = ones
        return dict(sorted(sizes.items()))
