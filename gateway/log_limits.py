"""LogLimits: how often an event that peers can cause is written to the log, and the sum of what is not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import final

import trio

log = logging.getLogger("gateway")

BURST = 20
"""Records of one event that are written one after the other."""
RATE = 10.0
"""And then so many a second."""
EVERY = 10.0
"""Seconds between two sums of what was not written."""


@final
class _Bucket:
    """The records of one event that may be written now, and a count of those that were not."""

    __slots__ = ("at", "level", "records", "since", "suppressed")

    def __init__(self, now: float) -> None:
        self.records, self.at = float(BURST), now
        self.suppressed: dict[tuple[tuple[str, str], ...], int] = {}
        self.since, self.level = now, logging.INFO


@final
class LogLimits:
    """Asked before a record is made. An event is known by its name, and has a burst of BURST records, and RATE a second.

    Records that are not written are counted, and summed up by `tick`: event `suppressed`, with the event's name as `of`, a
    `count`, and the `seconds` that they came in. Metrics count these events too.
    """

    __slots__ = ("_buckets", "_clock", "_fields")

    def __init__(self, clock: Callable[[], float] = trio.current_time, **fields: str) -> None:
        """`fields` are in each sum."""
        self._buckets: dict[str, _Bucket] = {}
        self._clock, self._fields = clock, fields

    def write(self, log: logging.Logger, event: str, fields: Mapping[str, object], level: int = logging.INFO) -> None:
        """A record of this event with these fields, where one may be written."""
        if self.allows(event, level=level):
            log.log(level, event, extra=fields)

    def allows(self, event: str, *, level: int = logging.INFO, **by: str) -> bool:
        """True if a record of this event may be written. Otherwise the record is counted `by` these fields, which must have
        few values each; the sum has the highest `level` of the records that it counts."""
        now = self._clock()
        bucket = self._buckets.get(event)
        if bucket is None:
            bucket = self._buckets[event] = _Bucket(now)
        records = min(bucket.records + RATE * (now - bucket.at), BURST)
        bucket.at = now
        if records >= 1:
            bucket.records = records - 1
            return True
        bucket.records = records
        if not bucket.suppressed:
            bucket.since, bucket.level = now, level
        elif level > bucket.level:
            bucket.level = level
        key = tuple(by.items())
        bucket.suppressed[key] = bucket.suppressed.get(key, 0) + 1
        return False

    def tick(self, now: float) -> None:
        """Sums up the records that were not written, 10 seconds after the first of them. The coarse timer calls it."""
        for event, bucket in self._buckets.items():
            if bucket.suppressed and now - bucket.since >= EVERY:
                self._sum_up(event, bucket, now)

    def flush(self) -> None:
        """Sums up at once: nothing is written any more."""
        now = self._clock()
        for event, bucket in self._buckets.items():
            if bucket.suppressed:
                self._sum_up(event, bucket, now)

    def _sum_up(self, event: str, bucket: _Bucket, now: float) -> None:
        suppressed, bucket.suppressed = bucket.suppressed, {}
        for by, count in suppressed.items():
            facts = {"of": event, "count": count, "seconds": round(now - bucket.since, 3)}
            log.log(bucket.level, "suppressed", extra={**self._fields, **dict(by), **facts})
