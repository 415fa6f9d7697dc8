"""Decides whether one more model fits into the repository's memory, and which unused ones to unload for it."""

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

ABANDONED = 16  # abandoned threads at which no more model code is started


@final
class Holdings:
    """The taken names and the memory reserved for each. It makes room by unloading models that are not in use."""

    def __init__(self, supervisor: Supervisor, limits: RepositoryLimits) -> None:
        self._supervisor, self._limits = supervisor, limits
        self.entries: OrderedDict[str, Entry] = OrderedDict()  # the least recently used first
        self.arriving: dict[str, Entry] = {}
        """New versions of loaded models that are still loading, by name."""
        self.all: set[Entry] = set()
        """All entries: those above, and replaced versions of which something is left."""
        self.comings_and_goings = 0
        """A count of loads begun and ended, and of unloads. If it has not changed during a load, the growth of memory
        belongs to that model."""
        self.moved = trio.lowlevel.ParkingLot()
        """Tasks that wait for a model to go. They wake when one has gone, is stuck, or has lost a user."""

    @property
    def used(self) -> int:
        """Bytes of the budget in use: reserved here, or declared by models outside the repository."""
        return self.used_beside(None)

    def used_beside(self, entry: Entry | None) -> int:
        """Returns the bytes of the budget in use, without those of one entry."""
        reserved = sum(other.reserved or 0 for other in self.all if other is not entry)
        return reserved + sum(need for name, need in self._supervisor.needs.items() if name not in self.entries)

    def check_room(self, name: str, need: int) -> None:
        """Raises InsufficientStorage if a new version of a model, of `need` bytes, does not fit beside the serving one."""
        if (used := self.used) + need > self._limits.memory:
            raise InsufficientStorage(
                f"model {show(name)} needs {need} bytes beside the version that serves, and {used} of {self._limits.memory} "
                "are in use (repository.memory): unload it before it is loaded again"
            )

    def reserve(self, entry: Entry, need: int) -> None:
        """Sets the bytes that a model holds to `need`; InsufficientStorage if they are not free."""
        limits = self._limits
        used = self.used_beside(entry)
        others = [other for other in self.all if other is not entry and other.reserved is not None]
        if used + need > limits.memory:
            raise InsufficientStorage(
                f"model {show(entry.name)} needs {need} bytes, and {used} of {limits.memory} are in use (repository.memory)"
            )
        if len(others) >= limits.models:
            raise InsufficientStorage(f"{len(others)} models are loaded, which is the limit (repository.models)")
        entry.reserved = need

    async def make_room(self, entry: Entry, need: int, until: float) -> bool:
        """Unloads the model that has been unused for longest, and waits until it, or one that was being unloaded, has gone.
        False if no model can go, or none has gone at the time `until`."""
        if not entry.evicts or need > self._limits.memory:
            return False
        with trio.CancelScope(deadline=until):
            while awaited := self._going(entry):
                await self.moved.park()
                if any(other.gone.is_set() for other in awaited):
                    return True
        return False

    def _going(self, entry: Entry) -> Sequence[Entry]:
        """Returns models whose end makes room for this one. Models that were evicted for another load count only if there
        are no others."""
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
        """Raises Unavailable if too many threads of abandoned loads do not return: they cannot be ended."""
        abandoned = sum(other.threads for other in self.all if other.state is EntryState.LEAVING)
        if abandoned >= ABANDONED:
            raise Unavailable(
                f"model {show(entry.name)} cannot be loaded: it has code, and {abandoned} threads of loads that were given "
                "up do not end; no more are started until some end, or the server is restarted"
            )

    def switch(self, entry: Entry, old: Entry) -> None:
        """Puts a new version in the place of the old one, once its worker has taken over. It cannot fail."""
        entry.state, old.state = EntryState.READY, EntryState.LEAVING
        entry.users, entry.before = old.users, None
        self.entries[entry.name] = entry
        del self.arriving[entry.name]
        self.comings_and_goings += 1
        self.moved.unpark_all()

    def retire(self, entry: Entry, patience: float = 0.0) -> None:
        """Takes a ready model out of service; running sessions have `patience` seconds to end."""
        if entry.state is EntryState.READY:
            entry.state = EntryState.LEAVING
            self.comings_and_goings += 1
            if entry.worker is not None:
                self._supervisor.retire(entry.worker, patience)
