"""LogLimits: bounds how often events that peers can cause are written to the log, and sums up the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import final

import trio

log = logging.getLogger("gateway")

BURST = 20
"""The most records of one event that are written at once."""
RATE = 10.0
"""Records per second of one event after that."""
EVERY = 10.0
"""Seconds between two sums of suppressed records."""


@final
class _Bucket:
    """The records that one event may still write, and its suppressed ones."""

    __slots__ = ("at", "level", "records", "since", "suppressed")

    def __init__(self, now: float) -> None:
        self.records, self.at = float(BURST), now
        self.suppressed: dict[tuple[tuple[str, str], ...], int] = {}
        self.since, self.level = now, logging.INFO


@final
class LogLimits:
    """Limits the records of each event, known by its name, to a burst of BURST and then RATE per second.

    Suppressed records are counted. `tick` writes their sums: the event `suppressed`, with the event's name as `of`, a
    `count`, and the `seconds` in which they came. Metrics count suppressed events too.
    """

    __slots__ = ("_buckets", "_clock", "_fields")

    def __init__(self, clock: Callable[[], float] = trio.current_time, **fields: str) -> None:
        """`fields` are added to each sum."""
        self._buckets: dict[str, _Bucket] = {}
        self._clock, self._fields = clock, fields

    def write(self, log: logging.Logger, event: str, fields: Mapping[str, object], level: int = logging.INFO) -> None:
        """Writes a record of this event with these fields, if the limit allows it."""
        if self.allows(event, level=level):
            log.log(level, event, extra=fields)

    def allows(self, event: str, *, level: int = logging.INFO, **by: str) -> bool:
        """True if a record of this event may be written now. If not, it is counted as suppressed, `by` these fields, each of
        which must have few values. The sum has the highest `level` of the suppressed records."""
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
        """Writes the sums of suppressed records, 10 seconds after the first of them. The coarse timer calls it."""
        for event, bucket in self._buckets.items():
            if bucket.suppressed and now - bucket.since >= EVERY:
                self._sum_up(event, bucket, now)

    def flush(self) -> None:
        """Writes the sums at once. Called when no more records will come."""
        now = self._clock()
        for event, bucket in self._buckets.items():
            if bucket.suppressed:
                self._sum_up(event, bucket, now)

    def _sum_up(self, event: str, bucket: _Bucket, now: float) -> None:
        suppressed, bucket.suppressed = bucket.suppressed, {}
        for by, count in suppressed.items():
            facts = {"of": event, "count": count, "seconds": round(now - bucket.since, 3)}
            log.log(bucket.level, "suppressed", extra={**self._fields, **dict(by), **facts})
