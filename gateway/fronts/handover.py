"""Decides which front gets a connection, and keeps the connections that no front has acknowledged. It does no I/O."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar, final

SILENT = 1.0
"""Seconds after which a front that acknowledges nothing gets no more connections, until it does."""
AHEAD = 256
"""The most connections of one front that it has not acknowledged."""

C = TypeVar("C")


@final
@dataclass(slots=True)
class _Front(Generic[C]):
    open: int = 0  # its open connections, by its last message
    pending: dict[int, C] = field(default_factory=dict)
    heard: float = 0.0  # the time of its last acknowledgement, or of the first connection given since all were acknowledged
    given: int = 0  # the number of the last connection that it was given
    short_until: float = float("-inf")  # it gets none until then, because it had no descriptors left
    retired: bool = False
    ready: bool = True
    missed: frozenset[str] = frozenset()

    @property
    def load(self) -> int:
        return self.open + len(self.pending)

    def takes(self, now: float) -> bool:
        if now < self.short_until or len(self.pending) >= AHEAD:
            return False
        return not self.pending or now - self.heard <= SILENT


@final
class Handover(Generic[C]):
    """The connections that are accepted, but not yet acknowledged by a front. Fronts have numbers that are used once.

    All fronts together are one server for a client, so no front may refuse what another has answered. While no front is
    ready, all get connections; otherwise only those that are ready. A front that misses a model gets none while another
    of them has it."""

    def __init__(self) -> None:
        self._fronts: dict[int, _Front[C]] = {}
        self._waiting: deque[C] = deque()
        self._numbers = itertools.count(1)
        self._missed: frozenset[str] | None = None  # models that a front may miss and still get connections; None: all
        self.chosen: Collection[int] = ()
        """The fronts that get connections now."""
        self.paused = False
        """True while no front gets any. The caller sets this."""

    # -- fronts come and go --------------------------------------------------------------------------------------------

    def add(self, front: int, *, ready: bool = True, missed: frozenset[str] = frozenset()) -> None:
        """Adds a front, or takes its new state. `missed` are models that do not answer there now."""
        state = self._fronts.setdefault(front, _Front())
        state.ready, state.missed = ready, missed
        self._choose()

    def retire(self, front: int) -> None:
        """Gives a front no more connections."""
        if front in self._fronts:
            self._fronts[front].retired = True
            self._choose()

    def remove(self, front: int) -> None:
        """Removes a front that has ended. Connections that it has not acknowledged go to others, before all later ones."""
        gone = self._fronts.pop(front, None)
        if gone is not None:
            self._waiting.extendleft(reversed(gone.pending.values()))
            self._choose()

    def _choose(self) -> None:
        fronts = {number: front for number, front in self._fronts.items() if not front.retired}
        fronts = {number: front for number, front in fronts.items() if front.ready} or fronts
        misses = [front.missed for front in fronts.values()]
        allowed = [some for some in misses if self._missed is None or some <= self._missed] or misses
        self._missed = fewest = min(allowed, key=len, default=None)
        self.chosen = [number for number, front in fronts.items() if fewest is not None and front.missed <= fewest]

    def open(self, front: int) -> int:
        """Returns the number of a front's connections: those that it has reported, and those on their way to it."""
        return self._fronts[front].load if front in self._fronts else 0

    def idle(self, front: int) -> bool:
        """True if nothing is on its way to the front."""
        return front not in self._fronts or not self._fronts[front].pending

    # -- connections ---------------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """The number of connections that no front has acknowledged."""
        return len(self._waiting) + sum(len(front.pending) for front in self._fronts.values())

    def put(self, connection: C) -> None:
        """Adds an accepted connection."""
        self._waiting.append(connection)

    def assign(self, now: float) -> Iterator[tuple[int, int, C]]:
        """Gives waiting connections to fronts, while there is one that takes some. Yields the front, the number and the
        connection of each. The front with the fewest connections is next; among equals, the one that waits longest."""
        while self._waiting and not self.paused:
            chosen = [(number, self._fronts[number]) for number in self.chosen]
            taking = [(front.load, front.given, number) for number, front in chosen if front.takes(now)]
            if not taking:
                return
            _, _, least = min(taking)
            front, number = self._fronts[least], next(self._numbers)
            if not front.pending:
                front.heard = now
            connection = self._waiting.popleft()
            front.pending[number], front.given = connection, number
            yield least, number, connection

    def heard(self, front: int, numbers: Iterable[int], lacking: Iterable[int], open: int, now: float) -> list[C]:
        """Takes a front's acknowledgement: connections that it has taken, those that it had no descriptors for, and the
        number of its open ones. Returns the taken connections; the `lacking` ones go to others. ValueError for connections
        that it was not given; then nothing changes."""
        state = self._fronts.get(front) or _Front()
        taken, back = list(numbers), list(lacking)
        named = set(taken) | set(back)
        if len(named) != len(taken) + len(back) or not named <= state.pending.keys() or open < 0:
            raise ValueError("it acknowledges connections that it was not given")
        state.open, state.heard = open, now
        if back:
            state.short_until = now + SILENT
        self._waiting.extendleft(reversed([state.pending.pop(number) for number in back]))
        return [state.pending.pop(number) for number in taken]

    def drop(self) -> list[C]:
        """Removes and returns all connections that are held here. The caller closes them."""
        left = [*self._waiting, *(one for front in self._fronts.values() for one in front.pending.values())]
        self._waiting.clear()
        for front in self._fronts.values():
            front.pending.clear()
        return left
