"""Counts a model's calls and their time: counters that only grow, and may be read at any time."""

from __future__ import annotations

from time import perf_counter_ns, time_ns
from typing import final

_SIZES = 1024  # batch sizes that are counted separately
_RESPONSES = 128  # responses of one call that are counted separately


@final
class Batches:
    """The executions of one batch size, and the nanoseconds of their three steps."""

    __slots__ = ("count", "infer", "input", "output")

    def __init__(self) -> None:
        self.count = self.input = self.infer = self.output = 0


@final
class Responses:
    """The counts and nanoseconds of the nth responses of calls that may have many."""

    __slots__ = ("cancelled", "cancelled_ns", "failed", "failed_ns", "infer", "output", "succeeded")

    def __init__(self) -> None:
        self.succeeded = self.infer = self.output = 0
        self.failed = self.failed_ns = self.cancelled = self.cancelled_ns = 0


@final
class ModelStatistics:
    """The calls of one worker, on every wire. Times are nanoseconds.

    A call begins when it asks for a slot of a model that can be called. It is counted once, at its end, as a success or a
    failure. A failure also counts as cancelled if the client disconnected before the answer was complete. The time of a
    success is the sum of its queue, input, infer and output times. Only the event loop's thread may write.

    If requests are `batched`, several calls are one execution of the model, and `executed` counts those. Otherwise each
    successful call is one execution.
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
        self._beyond = 0  # inferences beyond one per call
        self.received = self.copied = 0
        """Bytes of the bodies of successful tensor requests; and bytes that were copied before the model had its arrays. A
        byte that was copied twice counts twice."""
        self.last = 0
        """The end of the last call, on `perf_counter_ns`; 0: there was none."""
        self.batches: dict[int, Batches] = {}
        """The executions by batch size. If calls are not `batched`, size 1 is missing: it has all other calls."""
        self.responses: dict[int, Responses] = {}
        """The responses by their place in their call, from 0."""

    def success(self, arrived: int, asked: int, began: int, returned: int, now: int, batch: int = 1) -> None:
        """Counts a success. The request was read from `arrived` to `asked`, when the call asked for its slot. The model ran
        from `began` to `returned`, and the answer was written until `now`. `batch` is the number of inferences."""
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
        """Counts an execution of joined calls with `rows` rows together. The steps took so many nanoseconds, and `copied`
        bytes were copied."""
        self._executions += 1
        self.copied += copied
        self._batch(rows, joining, infer, cutting)

    def _batch(self, size: int, input: int, infer: int, output: int) -> None:
        batches = self.batches.get(size)
        if batches is None:
            # further sizes are counted together: clients choose sizes, up to the model's max_batch_size
            batches = self.batches.setdefault(size if len(self.batches) < _SIZES else -1, Batches())
        batches.count += 1
        batches.input += input
        batches.infer += infer
        batches.output += output

    def failure(self, now: int, lasted: int, *, cancelled: bool) -> None:
        """Counts a failure: a call that has no answer, or an error."""
        self.last = now
        self.failed += 1
        self.failed_ns += lasted
        if cancelled:
            self.cancelled += 1
            self.cancelled_ns += lasted

    def response(self, place: int, infer: int, output: int) -> None:
        """Counts one response of a call that was sent. `infer` is the time since the previous one, or since the call began;
        `output` is the time to write it."""
        if (responses := self._at(place)) is not None:
            responses.succeeded += 1
            responses.infer += infer
            responses.output += output

    def no_response(self, place: int, lasted: int, *, cancelled: bool) -> None:
        """Counts a call that failed before this response."""
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
        """The inferences of successful calls: each item of a batch counts."""
        return self.succeeded + self._beyond

    @property
    def executions(self) -> int:
        """The number of successful executions of the model."""
        return self._executions if self.batched else self.succeeded

    @property
    def success_ns(self) -> int:
        """The time of all successful calls."""
        return self.queue + self.input + self.infer + self.output

    @property
    def service(self) -> float:
        """The mean seconds of a successful call without its time in the queue; 0 if there was none."""
        return (self.success_ns - self.queue) / self.succeeded / 1e9 if self.succeeded else 0.0

    @property
    def last_ms(self) -> int:
        """The end of the last call, in milliseconds since 1970; 0 if there was none."""
        if not self.last:
            return 0
        return (time_ns() - perf_counter_ns() + self.last) // 1_000_000

    @property
    def by_size(self) -> dict[int, Batches]:
        """The executions of each batch size, including 1."""
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
