"""Byte accounting: memory is asked for here before it is allocated anywhere."""

from __future__ import annotations

from typing import final


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
