"""Decides whether one more model fits: those that are loaded at run time, and the memory that they hold of what they may."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import final

import trio

from gateway.catalog.entry import Entry, EntryState
from gateway.catalog.limits import RepositoryLimits
from gateway.config.text import show
from gateway.errors import InsufficientStorage, Unavailable
from gateway.workers.supervisor import Supervisor

log = logging.getLogger("gateway.repository")

ABANDONED = 16  # threads that stay; no more code is begun then


@final
class Holdings:
    """The names that are taken, and what is reserved for each; makes room by letting those go that nobody uses."""

    def __init__(self, supervisor: Supervisor, limits: RepositoryLimits) -> None:
        self._supervisor, self._limits = supervisor, limits
        self.entries: OrderedDict[str, Entry] = OrderedDict()  # the least recently used first
        self.arriving: dict[str, Entry] = {}
        """Other versions of models that are loaded, on their way in."""
        self.all: set[Entry] = set()
        """Those, and what is left of versions that were replaced."""
        self.comings_and_goings = 0
        """How many there were: memory that has grown is one model's only where no other came or went."""
        self.moved = trio.lowlevel.ParkingLot()
        """Those who wait for a model to go look again: one has gone, is stuck, or has lost a user."""

    @property
    def used(self) -> int:
        """Bytes of the budget that are reserved, or declared by models that are not the repository's."""
        return self.used_beside(None)

    def used_beside(self, entry: Entry | None) -> int:
        """The same, without what this one holds."""
        reserved = sum(other.reserved or 0 for other in self.all if other is not entry)
        return reserved + sum(need for name, need in self._supervisor.needs.items() if name not in self.entries)

    def check_room(self, name: str, need: int) -> None:
        """InsufficientStorage where another version of a model, of so many bytes, does not fit beside the one there."""
        if (used := self.used) + need > self._limits.memory:
            raise InsufficientStorage(
                f"model {show(name)} needs {need} bytes beside the version that serves, and {used} of {self._limits.memory} "
                "are in use (repository.memory): unload it before it is loaded again"
            )

    def reserve(self, entry: Entry, need: int) -> None:
        """Has a model hold so many bytes, in place of what it held; InsufficientStorage where they are not free."""
        limits = self._limits
        used = self.used_beside(entry)
        others = [other for other in self.all if other is not entry and other.reserved is not None]
        if used + need > limits.memory:
            raise InsufficientStorage(
                f"model {show(entry.name)} needs {need} bytes, and {used} of {limits.memory} are in use (repository.memory)"
            )
        if len(others) >= limits.models:
            raise InsufficientStorage(f"{len(others)} models are loaded, and no more may be (repository.models)")
        entry.reserved = need

    async def make_room(self, entry: Entry, need: int, until: float) -> bool:
        """Unloads the model that nobody uses for the longest time; True when that has gone, or another that was on its way
        out, False where none will go, or none has until then."""
        if not entry.evicts or need > self._limits.memory:
            return False
        with trio.CancelScope(deadline=until):
            while awaited := self._going(entry):
                await self.moved.park()
                if any(other.gone.is_set() for other in awaited):
                    return True
        return False

    def _going(self, entry: Entry) -> Sequence[Entry]:
        """Models that make room for this one when they have gone; those whose place another waits for only where there is
        nothing else."""
        others = [
            other for other in (*self.entries.values(), *self.all.difference(self.entries.values())) if other is not entry
        ]
        leaving = [other for other in others if other.state is EntryState.LEAVING and not other.stuck]
        free = [
            other
            for other in leaving
            if other.evicted_for in (None, entry) or other.evicted_for.state is not EntryState.LOADING
        ]
        if all(other.evicted_for is not entry for other in free):
            victim = next((other for other in others if other.idle), None)
            if victim is not None:
                log.info("model evicted", extra={"model": victim.name, "by": entry.name})
                victim.evicted_for = entry
                self.retire(victim)
                free.append(victim)
        return free or leaving

    def check_threads(self, entry: Entry) -> None:
        """Threads that do not return are never ended, so there is an end to beginning more."""
        abandoned = sum(other.threads for other in self.all if other.state is EntryState.LEAVING)
        if abandoned >= ABANDONED:
            raise Unavailable(
                f"model {show(entry.name)} cannot be loaded: it has code, and {abandoned} threads of loads that were given "
                "up do not end; none is begun until some do, or the server is restarted"
            )

    def switch(self, entry: Entry, old: Entry) -> None:
        """The new version's worker has taken over: from here on nothing fails."""
        entry.state, old.state = EntryState.READY, EntryState.LEAVING
        entry.users, entry.before = old.users, None
        self.entries[entry.name] = entry
        del self.arriving[entry.name]
        self.comings_and_goings += 1
        self.moved.unpark_all()

    def retire(self, entry: Entry, patience: float = 0.0) -> None:
        """Takes a model that is ready out of service; sessions that run have `patience` seconds to end."""
        if entry.state is EntryState.READY:
            entry.state = EntryState.LEAVING
            self.comings_and_goings += 1
            if entry.worker is not None:
                self._supervisor.retire(entry.worker, patience)
