"""How long an exchange may last and stay silent, and which setting says so."""

from __future__ import annotations

import math
from typing import final

import trio


@final
class TimeLimits:
    """The deadline of one exchange, with the seconds and the name of the limit that has set it, and the silence it bears."""

    __slots__ = ("_ceiling", "allowed", "allowed_by", "deadline", "silence")

    def __init__(self) -> None:
        self.allowed = self.deadline = math.inf
        """Seconds, and the moment on Trio's clock; infinite where there is none."""
        self.allowed_by = ""
        self.silence: tuple[float, str] | None = None
        """Seconds for which neither side need move a byte, and the name of that limit."""
        self._ceiling: tuple[float, float, str] | None = None  # the earliest deadline, the seconds and the name of its limit

    def limit_time(self, seconds: float, name: str, said: float | None = None) -> None:
        """That many seconds from now it is over; what was said before holds no longer, apart from `limit_call`. `said`: the
        seconds that are named, where they began before."""
        until = trio.current_time() + seconds
        if self._ceiling is not None and self._ceiling[0] <= until:
            until, seconds, name = self._ceiling
        self.deadline, self.allowed, self.allowed_by = until, seconds if said is None else said, name

    def limit_call(self, seconds: float, name: str) -> None:
        """The same, whatever limits are said later: the earliest deadline holds."""
        until = trio.current_time() + seconds
        if self._ceiling is None or until < self._ceiling[0]:
            self._ceiling = until, seconds, name
            if until < self.deadline:
                self.limit_time(seconds, name)

    def over(self) -> str:
        """What is said when the deadline has passed."""
        return f"the session's {self.allowed:g} s are over ({self.allowed_by})"

    def silent(self, seconds: float) -> str | None:
        """What is said after so long a silence; None while it may last."""
        if self.silence is None or seconds <= self.silence[0]:
            return None
        most, name = self.silence
        return f"no part in either direction for {most:g} s ({name})"
