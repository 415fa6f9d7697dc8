"""Counts of durations in fixed buckets."""

from __future__ import annotations

from bisect import bisect_left
from typing import final


@final
class Histogram:
    """A histogram of durations. Its counters only grow. Only the event loop's thread writes to it."""

    __slots__ = ("bounds", "buckets", "seconds")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        """The upper bound of each bucket, in seconds. The last bucket has none."""
        self.buckets = [0] * (len(bounds) + 1)
        """The number of durations in each bucket: up to its bound, and longer than the bound before."""
        self.seconds = 0.0
        """The sum of all durations."""

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(self.buckets)

    def observe(self, seconds: float) -> None:
        """Counts one duration."""
        self.buckets[bisect_left(self.bounds, seconds)] += 1
        self.seconds += seconds
