"""Metrics in the log for CloudWatch: a line each period in the embedded metric format, which CloudWatch turns into metrics.

The format is in Amazon CloudWatch's user guide, "Specification: Embedded metric format".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, final

from gateway.core.server import Server
from gateway.errors import Closing
from gateway.telemetry.logging_setup import METADATA, METRICS
from gateway.telemetry.observer import Observer
from gateway.workers.supervisor import Supervisor

log = logging.getLogger(METRICS)

_NAMESPACE, _DIMENSION = "everywire", "service"
_METRICS = ("SlotsInUse", "Queued", "LiveStreams", "Refusals")
_STANDARD = 60.0  # seconds: for shorter periods, CloudWatch keeps each value only at high resolution


@final
class EmbeddedMetrics:
    """Writes one gateway's figures for an autoscaler to the log, every `metrics.emf` seconds."""

    def __init__(self, server: Server, supervisor: Supervisor, observer: Observer, wall_clock: Callable[[], float]) -> None:
        """`wall_clock` returns the seconds since 1970."""
        self._server, self._supervisor, self._observer, self._wall_clock = server, supervisor, observer, wall_clock
        self._period = server.config.metrics.emf
        self._due: float | None = None
        self._refused = 0

    def look(self, now: float) -> None:
        """Writes a line if one is due. Called once a second, with the time on Trio's clock."""
        if self._due is None:
            self._due = now + self._period
        elif now >= self._due:
            self._due = now + self._period
            log.info("metrics", extra=self.line())

    def line(self) -> dict[str, Any]:
        """Returns the members of a line: the current values, and the refusals since the last line."""
        refused, before = self._refusals(), self._refused
        self._refused = refused
        slots = [worker.slots for worker in self._supervisor.workers.values()]
        values = (sum(s.in_use for s in slots), sum(s.queued for s in slots), len(self._observer.live), refused - before)
        resolution = {} if self._period >= _STANDARD else {"StorageResolution": 1}
        directive = {
            "Namespace": _NAMESPACE,
            "Dimensions": [[_DIMENSION]],
            "Metrics": [{"Name": name, "Unit": "Count", **resolution} for name in _METRICS],
        }
        metadata = {"Timestamp": int(self._wall_clock() * 1000), "CloudWatchMetrics": [directive]}
        service = self._server.config.tracing.service_name
        return {METADATA: metadata, _DIMENSION: service, **dict(zip(_METRICS, values, strict=True))}

    def _refusals(self) -> int:
        return sum(self._observer.refusals.values()) + self._server.endings_of_connections[Closing.REFUSED]
