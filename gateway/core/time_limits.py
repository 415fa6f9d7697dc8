"""The limits on how long an exchange may last and stay silent, and how slow an upload may be, with their settings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import trio

from gateway.errors import SlowUpload

if TYPE_CHECKING:
    from gateway.config import LimitsConfig


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
        """Sets a deadline that no later limit can extend: the earliest deadline holds."""
        until = trio.current_time() + seconds
        if self._ceiling is None or until < self._ceiling[0]:
            self._ceiling = until, seconds, name
            if until < self.deadline:
                self.limit_time(seconds, name)

    def over(self) -> str:
        """The error's text when the deadline has passed."""
        return f"the session's {self.allowed:g} s are over ({self.allowed_by})"

    def silent(self, seconds: float) -> str | None:
        """The error's text after that many seconds of silence; None while it may last."""
        if self.silence is None or seconds <= self.silence[0]:
            return None
        most, name = self.silence
        return f"no part in either direction for {most:g} s ({name})"


@final
class Pace:
    """How fast messages arrive, one after the other, that have begun and are not whole. It is looked at about once a second,
    and knows nothing of those that come and go in between."""

    __slots__ = ("_since", "_which")

    def __init__(self) -> None:
        self._which: object = None
        self._since = 0.0

    def look(self, which: object, n: int, now: float, heard: float, limits: LimitsConfig) -> SlowUpload | None:
        """The error if a message is too slow, else None. n bytes of it are here, the last since `heard`; `which` tells it
        from the one before."""
        if which != self._which:
            self._which, self._since = which, now
        silent, lasted = now - max(heard, self._since), now - self._since
        if silent > limits.body_silence:
            return SlowUpload(f"no byte of a message that has begun for {silent:.0f} s (limits.body_silence)")
        if lasted > limits.body_silence and n < limits.body_rate * lasted:
            return SlowUpload(f"{n} bytes of a message in {lasted:.0f} s: less than limits.body_rate allows")
        return None

    def rest(self) -> None:
        """No message is under way, or it is not its sender for whom it waits."""
        self._which = None
