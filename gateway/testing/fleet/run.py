"""Run a fleet second by second: pods start, drain and are lost, connections age, and clients connect again."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, final

import numpy as np

from gateway.core.server import leaves_at
from gateway.errors import spread_over
from gateway.testing.fleet.clients import NOWHERE, Clients, Flags, Ints
from gateway.testing.fleet.record import FleetRecord, by_cell
from gateway.testing.fleet.setup import FleetSetup
from gateway.workers.slots import retry_estimate

_leaves_at: Any = leaves_at  # plain arithmetic, so it takes arrays too
_FINE = 1 << 12
"""Number of equal steps of chance for which Retry-After is computed."""


@cache
def _waits(seconds: float) -> Ints:
    """Retry-After for each step of chance, in seconds."""
    return np.array([spread_over(seconds, (step + 0.5) / _FINE) for step in range(_FINE)])


@final
class FleetRun:
    """All pods side by side, `slots` per cell. The last slots of a cell are used during a rollout only."""

    def __init__(self, setup: FleetSetup, seed: int, *, absent: float = 0.0) -> None:
        """`absent` is the share of each cell's pods that do not exist at first."""
        self.setup, self.now = setup, 0
        self.chance = np.random.default_rng(seed)
        number = setup.cells * setup.slots
        place = np.arange(number)
        self.cell: Ints = place // setup.slots
        self.zone: Ints = place % setup.slots % setup.zones
        self.slot: Ints = place % setup.slots
        """Place of each pod in its cell."""
        self.absent: Flags = self.slot < round(absent * setup.pods)
        self.serving: Flags = (self.slot < setup.pods) & ~self.absent
        """True for pods that accept calls."""
        self.listed = self.serving.copy()
        """True for pods to which the balancers send clients."""
        self.silent: Flags = np.zeros(number, bool)
        """True for pods that were lost. A connection attempt to one of them times out."""
        self.streams: Ints = np.zeros(number, np.int64)
        """Number of connected clients of each pod."""
        self.unavailable = 0
        """The second until which no pod has a model."""
        self.clients = Clients(setup.clients, setup.cells, setup.slow, self.chance)
        self.record = FleetRecord()
        self._events: dict[int, list[Callable[[], None]]] = {}
        self._waiting: Ints = np.empty(0, np.int64)
        self._list()
        self._begin()

    def _begin(self) -> None:
        """Connect all clients, with connections of random ages."""
        who = np.arange(len(self.clients))
        self._connect(who, self._chosen(who))
        if self.setup.age:
            left = self.clients.due - self.now
            self.clients.due[who] = (self.chance.random(len(who)) * left).astype(np.int64) + 1

    # -- pods --------------------------------------------------------------------------------------------------------

    def later(self, seconds: int, event: Callable[[], None]) -> None:
        """Schedule an event in `seconds`, at least one second from now."""
        self._events.setdefault(self.now + max(1, seconds), []).append(event)

    def lose(self, pods: Flags) -> None:
        """Lose these pods and their streams. Neither clients nor balancers are told."""
        self.serving &= ~pods
        self.silent |= pods
        self.later(self.setup.noticed, lambda: self._unlist(pods))
        who = self.clients.of(pods)
        self.record.lost += len(who)
        self._part(who, self._within(who, self.setup.keepalive))

    def start(self, pods: Flags) -> None:
        """Start these pods. They are ready after `setup.start` seconds."""

        def ready() -> None:
            self.silent &= ~pods
            self.serving |= pods
            self.listed |= pods
            self._list()

        self.later(self.setup.start, ready)

    def leave(self, pods: Flags) -> None:
        """Tell these pods to end, as in a rollout: they serve until `setup.pre_stop` is over, then they drain."""
        self.later(self.setup.noticed, lambda: self._unlist(pods))
        self.later(self.setup.pre_stop, lambda: self._drain(pods))

    def _drain(self, pods: Flags) -> None:
        self.serving &= ~pods
        who = self.clients.of(pods)
        left = self._rest_of_a_stream(who)
        cut = left > self.setup.drain
        self.record.cut += int(cut.sum())
        self.record.cut_fast += int((cut & ~self.clients.slow[who]).sum())
        self.clients.due[who] = self.now + np.minimum(left, self.setup.drain) + 1

    def drop(self) -> None:
        """Lose every connection. Every client connects again in the next second."""
        who = np.flatnonzero(self.clients.pod != NOWHERE)
        self.record.lost += len(who)
        self._part(who, np.ones(len(who), np.int64))

    def _unlist(self, pods: Flags) -> None:
        self.listed &= ~pods
        self._list()

    def _list(self) -> None:
        """Update the balancers' lists of pods, ordered by cell."""
        self._known = np.flatnonzero(self.listed)
        self._first = np.searchsorted(self.cell[self._known], np.arange(self.setup.cells))
        self._number = np.bincount(self.cell[self._known], minlength=self.setup.cells)

    # -- clients -----------------------------------------------------------------------------------------------------

    def run(self, seconds: int) -> None:
        """Run for `seconds` seconds."""
        for _ in range(seconds):
            self.now += 1
            for event in self._events.pop(self.now, ()):
                event()
            self._move(self.clients.at(self.now))
            self.record.second(self.now, self.setup, self.clients, self.streams, self.serving & self.listed)

    def _move(self, who: Ints) -> None:
        """Connect the clients that are due, and those that wait to be accepted."""
        self._part(who[self.clients.pod[who] != NOWHERE])
        self.record.came.append(len(who))
        pods = self._chosen(who)
        if len(self._waiting):
            who = np.concatenate([self._waiting, who])
            pods = np.concatenate([self._at, pods])
        if self.silent.any():
            who, pods = self._unanswered(who, pods)
        come = np.bincount(pods, minlength=len(self.streams))
        if come.max() > self.setup.accepts or len(self._waiting):
            who, pods = self._accepted(who, pods)
        if self.now < self.unavailable:
            self._refuse(who, float(self.unavailable - self.now))
            self.record.sent_away += len(who)
            return
        if (come * ~self.serving).any() or (come + self.streams).max() > self.setup.capacity:
            fits = self.serving[pods] & (self.streams[pods] + _rank(pods) < self.setup.capacity)
            self._connect(who[fits], pods[fits])
            self._refuse(who[~fits], retry_estimate(0, self.setup.capacity, float(self.setup.stream)))
            self.record.refused += int((~fits).sum())
            self.record.refused_though_it_fits += int(self._room()[self.cell[pods[~fits]]].sum())
        else:
            self._connect(who, pods)

    def _chosen(self, who: Ints) -> Ints:
        """A random pod of each client's cell: balancers hash addresses."""
        home = self.clients.home[who]
        cell = np.where(self._number[home] > 0, home, self.clients.second[who])
        of = (self.chance.random(len(who)) * self._number[cell]).astype(np.int64)
        pods: Ints = self._known[self._first[cell] + of]
        return pods

    def _unanswered(self, who: Ints, pods: Ints) -> tuple[Ints, Ints]:
        """Make clients whose pod was lost try again after a time-out, and return the others."""
        gone = self.silent[pods]
        if not gone.any():
            return who, pods
        self._again(who[gone], self.setup.connect_timeout)
        return who[~gone], pods[~gone]

    def _accepted(self, who: Ints, pods: Ints) -> tuple[Ints, Ints]:
        """Return the clients accepted in this second. The others wait in the backlog, or are dropped if it is full."""
        place = _rank(pods)
        now = place < self.setup.accepts
        if now.all():
            self._waiting = self._at = who[:0]
            return who, pods
        waits = ~now & (place < self.setup.accepts + self.setup.backlog)
        self._waiting, self._at = who[waits], pods[waits]
        unheard = who[~now & ~waits]
        self.record.unheard += len(unheard)
        self._again(unheard, 1)
        return who[now], pods[now]

    def _connect(self, who: Ints, pods: Ints) -> None:
        self.clients.pod[who] = pods
        self.clients.tries[who] = 0
        self.streams += np.bincount(pods, minlength=len(self.streams))
        if self.setup.age:
            old = _leaves_at(self.now, float(self.setup.age), self._some(len(who)))
            # a stream that is open when its connection is old goes on to its end
            self.clients.due[who] = old.astype(np.int64) + self._rest_of_a_stream(who)

    def _part(self, who: Ints, wait: Ints | None = None) -> None:
        """Disconnect these clients. They connect again after `wait` seconds, if it is given."""
        self.streams -= np.bincount(self.clients.pod[who], minlength=len(self.streams))
        self.clients.pod[who] = NOWHERE
        if wait is not None:
            self.clients.due[who] = self.now + wait

    def _refuse(self, who: Ints, seconds: float) -> None:
        """Answer 503 with Retry-After. Clients wait exactly that long."""
        if len(who):
            self.clients.due[who] = self.now + _waits(seconds)[(self._some(len(who)) * _FINE).astype(np.int64)]

    def _again(self, who: Ints, least: int) -> None:
        """Make these clients try again, with exponential backoff and full jitter."""
        if len(who):
            most = np.minimum(1 << np.minimum(self.clients.tries[who], 10), self.setup.backoff)
            self.clients.tries[who] += 1
            self.clients.due[who] = self.now + least + (self.chance.random(len(who)) * most).astype(np.int64)

    # -- chance ------------------------------------------------------------------------------------------------------

    def _some(self, number: int) -> Any:
        """Random numbers for the product's jitter."""
        return self.chance.random(number) * self.setup.jitter

    def _within(self, who: Ints, seconds: int) -> Ints:
        return 1 + (self.chance.random(len(who)) * seconds).astype(np.int64)

    def _rest_of_a_stream(self, who: Ints) -> Ints:
        lasts = np.where(self.clients.slow[who], self.setup.slow_stream, self.setup.stream)
        return 1 + (self.chance.random(len(who)) * lasts).astype(np.int64)

    def _room(self) -> Flags:
        """True for cells that have room for one more stream."""
        free = np.where(self.listed & self.serving, self.setup.capacity - self.streams, 0)
        room: Flags = by_cell(self.setup, free) > 0
        return room


def _rank(pods: Ints) -> Ints:
    """For each entry, the number of earlier entries with the same pod."""
    order = np.argsort(pods, kind="stable")
    ordered = pods[order]
    first = np.searchsorted(ordered, ordered)
    rank = np.empty(len(pods), np.int64)
    rank[order] = np.arange(len(pods)) - first
    return rank
