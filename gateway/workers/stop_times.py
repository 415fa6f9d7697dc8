"""How long a model takes to stop: from the end of a session to the return of its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from gateway.histogram import Histogram

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""The largest time of each bucket but the last, which has no bound, in seconds."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StopSummary:
    """What StopTimes had counted at one moment, in seconds."""

    count: int
    mean: float
    p50: float
    """The bound of the bucket in which half of them are reached; the longest where that bucket has none. So is `p99`."""
    p99: float
    longest: float
    within: float
    breaches: int


@final
class StopTimes:
    """What sessions that were told to stop, or whose threads outlived them, took until nothing of them was left.

    Counters that only grow; written by the event loop's thread alone. `within` is what was promised, in
    seconds, 0 for nothing.
    """

    __slots__ = ("breaches", "longest", "times", "within")

    def __init__(self, within: float = 0.0) -> None:
        self.within = within
        self.times = Histogram(BOUNDS)
        self.longest = 0.0
        self.breaches = 0
        """How many took longer than was promised, those included that have not stopped yet."""

    def stopped(self, seconds: float) -> None:
        """One has stopped."""
        self.times.observe(seconds)
        self.longest = max(self.longest, seconds)

    def breaks(self, seconds: float) -> bool:
        """Whether this is longer than was promised."""
        return 0 < self.within < seconds

    @property
    def summary(self) -> StopSummary:
        """What was counted until now."""
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
