"""Byte accounting: memory is asked for here before it is allocated anywhere."""

from __future__ import annotations

import contextlib
import mmap
from typing import Protocol, final

import numpy as np

_FIRST_STEP, _LARGEST_STEP = 16 * 1024, 1024 * 1024
# from this size on, numpy asks for 2 MiB pages itself, and touching one byte then takes a whole page
_MAPPED = 4 * 1024 * 1024
_HUGE = 2 * 1024 * 1024


class Budget(Protocol):
    """A source of memory: a whole budget, or one party's share of it."""

    @property
    def limit(self) -> int:
        """The most bytes that all parties together may hold."""
        ...

    @property
    def used(self) -> int:
        """The bytes that all parties together hold."""
        ...

    @property
    def held(self) -> int:
        """The bytes that this party holds."""
        ...

    def try_reserve(self, n: int) -> bool:
        """Takes n bytes. False, and nothing taken, if they would exceed the limit."""
        ...

    def release(self, n: int) -> None:
        """Gives n bytes back."""
        ...


@final
class ByteBudget:
    """A bound on the bytes that may be held at once. It refuses and never waits.

    Every grant is returned exactly once. Tests and operators read the ledger (`used`, `high_water`).
    """

    __slots__ = ("high_water", "limit", "used", "wanted")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.high_water = 0
        self.wanted: object = None
        """The last holder that asked for more than it could have; None once somebody has looked."""

    @property
    def held(self) -> int:
        """All bytes in use: this budget has a single holder."""
        return self.used

    def try_reserve(self, n: int) -> bool:
        """Takes n bytes if they are free; False, and nothing taken, if not."""
        used = self.used + n
        if used > self.limit:
            return False
        self.used = used
        if used > self.high_water:
            self.high_water = used
        return True

    def release(self, n: int) -> None:
        """Gives n bytes back. Giving back more than was taken is a bug in the caller and raises AssertionError."""
        assert 0 <= n <= self.used, f"released {n} bytes of {self.used} held"
        self.used -= n


def ahead(arrived: int, length: int) -> int:
    """The bytes to reserve for a message of `length` bytes of which `arrived` are here: what arrived and as much again, but
    at least 16 KiB and at most 1 MiB more. An announced length alone reserves little, and a long message needs few steps."""
    step = arrived if arrived > _FIRST_STEP else _FIRST_STEP
    paid = arrived + (step if step < _LARGEST_STEP else _LARGEST_STEP)
    return paid if paid < length else length


def untouched(n: int) -> memoryview:
    """Memory of n bytes, at least one. It is not cleared, and only the pages that are touched cost memory: an announced body
    costs address space alone."""
    return np.empty(n, np.uint8).data if n < _MAPPED else np.frombuffer(mapped(n), np.uint8).data


def mapped(n: int) -> mmap.mmap:
    """An anonymous map of n bytes. If it has 4 MiB or more, large pages are off for its first 2 MiB, where one byte would
    take a whole page, and on behind them, where they save more than they round up."""
    memory = mmap.mmap(-1, n)
    if n >= _MAPPED and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel has no large pages
            memory.madvise(mmap.MADV_NOHUGEPAGE, 0, _HUGE)
            memory.madvise(mmap.MADV_HUGEPAGE, _HUGE, n - _HUGE)
    return memory
