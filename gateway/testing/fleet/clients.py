"""The clients of a fleet: the pod of each, and when it acts next."""

from __future__ import annotations

from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[Any]
Flags: TypeAlias = NDArray[np.bool_]
NOWHERE = -1
NEVER = (1 << 31) - 1


@final
class Clients:
    """All clients of a fleet, as arrays with an entry for each client."""

    def __init__(self, number: int, cells: int, slow: float, chance: np.random.Generator) -> None:
        self.home: Ints = chance.integers(0, cells, number)
        """Cell of each client, by its key."""
        self.second: Ints = (self.home + chance.integers(1, max(2, cells), number)) % cells
        """Cell that each client uses while its own is lost."""
        self.slow: Flags = chance.random(number) < slow
        self.pod: Ints = np.full(number, NOWHERE)
        """Pod to which each client is connected, or NOWHERE."""
        self.due: Ints = np.full(number, NEVER, np.int32)
        """Second in which each client leaves its pod, or tries to connect."""
        self.tries: Ints = np.zeros(number, np.int64)
        """Failed attempts since each client was last connected."""

    def __len__(self) -> int:
        return len(self.home)

    def at(self, now: int) -> Ints:
        """The clients that act in this second. They are not due again."""
        who = np.flatnonzero(self.due == now)
        self.due[who] = NEVER
        return who

    def of(self, pods: Flags) -> Ints:
        """The clients that are connected to one of these pods."""
        return np.flatnonzero((self.pod != NOWHERE) & pods[self.pod])
