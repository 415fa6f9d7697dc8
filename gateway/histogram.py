"""Counts of durations in fixed buckets."""

from __future__ import annotations

from bisect import bisect_left
from typing import final


@final
class Histogram:
    """How many seconds things took. Counters that only grow; written by the event loop's thread alone."""

    __slots__ = ("bounds", "buckets", "seconds")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        """The longest of each bucket but the last, which has no bound, in seconds."""
        self.buckets = [0] * (len(bounds) + 1)
        """How many took up to each bound and longer than the one before; the last one has the rest."""
        self.seconds = 0.0
        """All of them together."""

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.buckets)

    def observe(self, seconds: float) -> None:
        """One took so long."""
        self.buckets[bisect_left(self.bounds, seconds)] += 1
        self.seconds += seconds
