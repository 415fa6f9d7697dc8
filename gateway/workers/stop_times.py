"""Measures how long a model takes to stop: from the end of a session until the model has returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from gateway.histogram import Histogram

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""The upper bound of each bucket in seconds; a last bucket has none."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StopSummary:
    """The counts of StopTimes at one moment. Times are in seconds."""

    count: int
    """The sessions that have stopped."""
    mean: float
    p50: float
    """The bound of the bucket that half of the sessions reach, or the longest time if that is less."""
    p99: float
    """The bound of the bucket that 99 percent of the sessions reach, or the longest time if that is less."""
    longest: float
    within: float
    """The promised time; 0: none was promised."""
    breaches: int
    """The sessions that took longer than promised."""


@final
class StopTimes:
    """The times until nothing was left of sessions that were told to stop, or whose threads outlived them.

    All counters only grow. Only the event loop's thread may write. `within` is the promised time in seconds; default 0:
    none is promised.
    """

    __slots__ = ("breaches", "longest", "times", "within")

    def __init__(self, within: float = 0.0) -> None:
        self.within = within
        self.times = Histogram(BOUNDS)
        self.longest = 0.0
        self.breaches = 0
        """The sessions that took longer than promised, including those that have not stopped yet."""

    def stopped(self, seconds: float) -> None:
        """Counts a session that has stopped after `seconds`."""
        self.times.observe(seconds)
        self.longest = max(self.longest, seconds)

    def breaks(self, seconds: float) -> bool:
        """True if `seconds` are more than promised."""
        return 0 < self.within < seconds

    @property
    def summary(self) -> StopSummary:
        """The present counts."""
        times = self.times
        count = times.count
        return StopSummary(
            count=count,
            mean=times.seconds / count if count else 0.0,
            p50=self._quantile(0.5),
            p99=self._quantile(0.99),
            longest=self.longest,
            within=self.within,
            breaches=self.breaches,
        )

    def _quantile(self, share: float) -> float:
        reached, count = 0, self.times.count
        for bound, n in zip(BOUNDS, self.times.buckets, strict=False):
            reached += n
            if reached and reached >= share * count:
                return min(bound, self.longest)
        return self.longest
