"""Counts and measurements of a fleet, second by second."""

from __future__ import annotations

from typing import final

import numpy as np

from gateway.testing.fleet.clients import Clients, Flags, Ints
from gateway.testing.fleet.setup import FleetSetup

EACH = 10
"""Seconds between two looks at every pod."""
EVEN = 5.6
"""The most that `FleetRecord.spread` is of a fleet in balance. It is more where a fifth of 1,000 pods has 10 percent less
than the others."""


@final
class FleetRecord:
    """Counts, measurements of every second, and measurements of every tenth second."""

    def __init__(self) -> None:
        self.lost = 0
        """Streams that were lost with their pod or their connection."""
        self.cut = 0
        """Streams that a drain cut at its deadline."""
        self.cut_fast = 0
        """Streams in `cut` whose clients do not read slowly."""
        self.refused = 0
        """Calls that a pod refused because it was full or draining."""
        self.refused_though_it_fits = 0
        """Calls in `refused` whose cell had room."""
        self.sent_away = 0
        """Calls that were refused because the models were away."""
        self.unheard = 0
        """Connections that were dropped because a backlog was full."""
        self.came: list[int] = []
        """Every second: clients that tried to connect."""
        self.served: list[int] = []
        """Every second: clients that are connected."""
        self.fullest: list[float] = []
        """Every second: streams of the fullest cell, divided by the capacity of its pods that serve."""
        self.guests: list[int] = []
        """Every tenth second: clients outside their own cell."""
        self.emptiest_pod: list[float] = []
        """Every tenth second: streams of the emptiest pod, divided by the mean of its cell."""
        self.spread: list[float] = []
        """Every tenth second: how uneven the pods of a cell are, beyond what chance alone makes of them. It is the index of
        dispersion, in standard deviations from 1."""

    def second(self, now: int, setup: FleetSetup, clients: Clients, pods: Ints, serving: Flags) -> None:
        """Measure the fleet: `pods` has the streams of each pod, `serving` is true for pods that are listed and accept."""
        streams, there = by_cell(setup, pods), by_cell(setup, serving)
        self.served.append(int(streams.sum()))
        load = streams / np.maximum(there, 1) / setup.capacity
        self.fullest.append(float(load[there > 0].max(initial=0.0)))
        if now % EACH == 0:
            self._look(setup, clients, pods, serving)

    def _look(self, setup: FleetSetup, clients: Clients, pods: Ints, serving: Flags) -> None:
        there = by_cell(setup, serving)
        mean = np.repeat(by_cell(setup, pods * serving) / np.maximum(there, 1), there)
        streams = pods[serving]
        by_mean = streams / np.maximum(mean, 1.0)
        self.emptiest_pod.append(float(by_mean.min(initial=1.0)))
        degrees = max(1, len(mean) - int(np.count_nonzero(there)))
        index = float(((streams - mean) ** 2 / np.maximum(mean, 1.0)).sum()) / degrees
        self.spread.append((index - 1) * (degrees / 2) ** 0.5)
        self.guests.append(int(((clients.pod >= 0) & (clients.pod // setup.slots != clients.home)).sum()))


def by_cell(setup: FleetSetup, of_pods: Ints) -> Ints:
    """Sum of a value of pods, by cell."""
    sums: Ints = of_pods.reshape(setup.cells, setup.slots).sum(axis=1)
    return sums
