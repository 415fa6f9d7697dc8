"""Byte accounting: memory is asked for here before it is allocated anywhere."""

from __future__ import annotations

import contextlib
import mmap
from typing import Protocol, final

import numpy as np

_FIRST_STEP, _LARGEST_STEP = 16 * 1024, 1024 * 1024
_MAPPED = 4 * 1024 * 1024  # from here on numpy itself asks for pages of 2 MiB, of which the first byte costs all
_HUGE = 2 * 1024 * 1024


class Budget(Protocol):
    """Whoever grants bytes that may be held: all of them, or one of those who share them."""

    @property
    def limit(self) -> int:
        """What all together may hold."""
        ...

    @property
    def used(self) -> int:
        """What all together hold."""
        ...

    @property
    def held(self) -> int:
        """What whoever asks here holds."""
        ...

    def try_reserve(self, n: int) -> bool:
        """Takes n bytes if they may be had; False, and nothing taken, if not."""
        ...

    def release(self, n: int) -> None:
        """Gives n bytes back."""
        ...


@final
class ByteBudget:
    """A bound on the bytes that may be held at once. It refuses and never waits.

    Every grant is returned exactly once; the ledger (`used`, `high_water`) is what tests and operators read.
    """

    __slots__ = ("high_water", "limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.high_water = 0

    @property
    def held(self) -> int:
        """All of what is in use: nobody shares it."""
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
    """How much is paid for where so many bytes have arrived of a message of that length: as much again, which is at least
    16 KiB and at most 1 MiB. So what is only announced takes nothing, and a long message few steps."""
    step = arrived if arrived > _FIRST_STEP else _FIRST_STEP
    paid = arrived + (step if step < _LARGEST_STEP else _LARGEST_STEP)
    return paid if paid < length else length


def untouched(n: int) -> memoryview:
    """Memory of n bytes, at least one, that costs what is touched of it and is not cleared: what is only announced costs
    address space alone."""
    return np.empty(n, np.uint8).data if n < _MAPPED else np.frombuffer(mapped(n), np.uint8).data


def mapped(n: int) -> mmap.mmap:
    """The same as a map of its own. Where the system has large pages it uses them behind the first of their size: they save
    more than they round up, but not where one byte takes one."""
    memory = mmap.mmap(-1, n)
    if n >= _MAPPED and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them knows no such advice
            memory.madvise(mmap.MADV_NOHUGEPAGE, 0, _HUGE)
            memory.madvise(mmap.MADV_HUGEPAGE, _HUGE, n - _HUGE)
    return memory
