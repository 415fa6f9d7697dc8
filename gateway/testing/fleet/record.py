"""What happened to a fleet, second by second, in numbers."""

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
    """Counts, and a few numbers for each second, or for every tenth."""

    def __init__(self) -> None:
        self.lost = 0
        """Streams that ended with a pod that was lost, or with the way to it."""
        self.cut = 0
        """Streams that a drain ended at its deadline."""
        self.cut_fast = 0
        """Of these, the ones whose clients read well."""
        self.refused = 0
        """Calls that a pod refused, since it was full or on its way out."""
        self.refused_though_it_fits = 0
        """Of these, the ones whose cell had room."""
        self.sent_away = 0
        """Calls that were told to come back when the models are there again."""
        self.unheard = 0
        """Connections that no backlog had a place for."""
        self.came: list[int] = []
        """Clients that came to a pod, each second."""
        self.served: list[int] = []
        """Clients that have their stream, each second."""
        self.fullest: list[float] = []
        """The load of the fullest cell, each second: streams by the capacity of its pods that serve."""
        self.guests: list[int] = []
        """Every tenth second: clients in a cell that is not theirs."""
        self.emptiest_pod: list[float] = []
        """Every tenth second: the load of the emptiest pod that serves, by the mean of its cell."""
        self.spread: list[float] = []
        """Every tenth second: how uneven the pods of a cell are, beyond what chance alone makes of them. It is the index of
        dispersion, in standard deviations from 1."""

    def second(self, now: int, setup: FleetSetup, clients: Clients, pods: Ints, serving: Flags) -> None:
        """Looks at the fleet: `pods` are the streams of each, `serving` those that clients are sent to and that answer."""
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
    """The sum of each cell."""
    sums: Ints = of_pods.reshape(setup.cells, setup.slots).sum(axis=1)
    return sums
