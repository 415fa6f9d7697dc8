"""The clients of a fleet: where each is connected, and when it does something next."""

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
    """A row of each array for each of them."""

    def __init__(self, number: int, cells: int, slow: float, chance: np.random.Generator) -> None:
        self.home: Ints = chance.integers(0, cells, number)
        """The cell that the key of each chooses."""
        self.second: Ints = (self.home + chance.integers(1, max(2, cells), number)) % cells
        """The cell that it chooses where that one is lost."""
        self.slow: Flags = chance.random(number) < slow
        self.pod: Ints = np.full(number, NOWHERE)
        """Where each is connected; NOWHERE while it is not."""
        self.due: Ints = np.full(number, NEVER, np.int32)
        """The second in which each does something next: it leaves its pod, or comes to one."""
        self.tries: Ints = np.zeros(number, np.int64)
        """How often each has come in vain since it was connected last."""

    def __len__(self) -> int:
        return len(self.home)

    def at(self, now: int) -> Ints:
        """Those that do something now."""
        who = np.flatnonzero(self.due == now)
        self.due[who] = NEVER
        return who

    def of(self, pods: Flags) -> Ints:
        """Those that are connected to one of these pods."""
        return np.flatnonzero((self.pod != NOWHERE) & pods[self.pod])
