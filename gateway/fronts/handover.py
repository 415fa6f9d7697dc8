"""Decides which front gets a connection, and keeps what no front has acknowledged yet. Decides alone: sends nothing."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar, final

SILENT = 1.0
"""Seconds after which a front that acknowledges nothing gets no more, until it does."""
AHEAD = 256
"""Connections that one front may have which it has not acknowledged."""

C = TypeVar("C")


@final
@dataclass(slots=True)
class _Front(Generic[C]):
    open: int = 0  # connections, as it said last
    pending: dict[int, C] = field(default_factory=dict)
    heard: float = 0.0  # when it acknowledged last, or was given the first that it has not
    given: int = 0  # the number of the last that it was given
    short_until: float = float("-inf")  # it had no descriptors left
    retired: bool = False

    @property
    def load(self) -> int:
        return self.open + len(self.pending)

    def takes(self, now: float) -> bool:
        if self.retired or now < self.short_until or len(self.pending) >= AHEAD:
            return False
        return not self.pending or now - self.heard <= SILENT


@final
class Handover(Generic[C]):
    """The connections between being accepted and being a front's. Fronts are known by numbers that are used once."""

    def __init__(self) -> None:
        self._fronts: dict[int, _Front[C]] = {}
        self._waiting: deque[C] = deque()
        self._numbers = itertools.count(1)

    # -- fronts come and go --------------------------------------------------------------------------------------------

    def add(self, front: int) -> None:
        """A front listens: it gets connections from now on."""
        self._fronts[front] = _Front()

    def retire(self, front: int) -> None:
        """It gets no more."""
        if front in self._fronts:
            self._fronts[front].retired = True

    def remove(self, front: int) -> None:
        """It is gone: what it has not acknowledged waits for others, before all that came later."""
        gone = self._fronts.pop(front, None)
        if gone is not None:
            self._waiting.extendleft(reversed(gone.pending.values()))

    def open(self, front: int) -> int:
        """Its connections: those it said it has, and those on their way to it."""
        return self._fronts[front].load if front in self._fronts else 0

    def idle(self, front: int) -> bool:
        """True if nothing is on its way to the front."""
        return front not in self._fronts or not self._fronts[front].pending

    # -- connections ---------------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Connections that are kept here: of no front yet, or not acknowledged."""
        return len(self._waiting) + sum(len(front.pending) for front in self._fronts.values())

    def put(self, connection: C) -> None:
        """A connection was accepted."""
        self._waiting.append(connection)

    def assign(self, now: float) -> Iterator[tuple[int, int, C]]:
        """Gives each that waits to the front with the fewest that takes some, while there is one; each with that front and
        its own number. Of fronts with as many, the one that was given one longest ago is next."""
        while self._waiting:
            taking = [(front.load, front.given, number) for number, front in self._fronts.items() if front.takes(now)]
            if not taking:
                return
            _, _, chosen = min(taking)
            front, number = self._fronts[chosen], next(self._numbers)
            if not front.pending:
                front.heard = now
            connection = self._waiting.popleft()
            front.pending[number], front.given = connection, number
            yield chosen, number, connection

    def heard(self, front: int, numbers: Iterable[int], lacking: Iterable[int], open: int, now: float) -> list[C]:
        """A front says which it has taken, which it had no descriptors for, and how many it has open. Returns those that are
        its own now; the lacking wait for others. ValueError for what it was not given: nothing has changed then."""
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
        """All that it keeps, for who closes them."""
        left = [*self._waiting, *(one for front in self._fronts.values() for one in front.pending.values())]
        self._waiting.clear()
        for front in self._fronts.values():
            front.pending.clear()
        return left
