"""Limits on how long an exchange may last or be silent, and how slow an upload may be, each with the name of its setting."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import msgspec
import trio

from gateway.errors import SlowUpload

if TYPE_CHECKING:
    from gateway.config import LimitsConfig


@final
class TimeLimits(msgspec.Struct, gc=False):
    """The deadline of one exchange, with the seconds and the name of the limit that set it, and the silence it may have."""

    allowed: float = math.inf
    """Seconds; infinite if there is no limit."""
    deadline: float = math.inf
    """On Trio's clock; infinite if there is no limit."""
    allowed_by: str = ""
    silence: tuple[float, str] | None = None
    """Seconds for which neither side need move a byte, and the name of that limit; None if there is none."""
    said: tuple[int, float] | None = None
    """The bytes of its answer before the last comment, and when the last of them had left; None without a comment."""
    _ceiling: tuple[float, float, str] | None = None  # the earliest deadline, the seconds and the name of its limit

    def limit_time(self, seconds: float, name: str, said: float | None = None) -> None:
        """Sets the deadline to `seconds` from now. It replaces earlier ones, except that of `limit_call`. `said`: the
        seconds that the error names, if they began earlier."""
        until = trio.current_time() + seconds
        if self._ceiling is not None and self._ceiling[0] <= until:
            until, seconds, name = self._ceiling
        self.deadline, self.allowed, self.allowed_by = until, seconds if said is None else said, name

    def limit_call(self, seconds: float, name: str) -> None:
        """Sets a deadline that later calls of `limit_time` cannot extend: the earliest one holds."""
        until = trio.current_time() + seconds
        if self._ceiling is None or until < self._ceiling[0]:
            self._ceiling = until, seconds, name
            if until < self.deadline:
                self.limit_time(seconds, name)

    def over(self) -> str:
        """Makes the message for a deadline that has passed."""
        return f"the session's {self.allowed:g} s are over ({self.allowed_by})"

    def said_at(self, bytes_out: int, sent_at: float) -> float:
        """When bytes of the answer last left, comments aside: `bytes_out` have, and bytes of any kind at `sent_at`."""
        return self.said[1] if self.said is not None and self.said[0] == bytes_out else sent_at

    def silent(self, seconds: float) -> str | None:
        """Makes the message for a silence of `seconds`; None if that long is allowed."""
        if self.silence is None or seconds <= self.silence[0]:
            return None
        most, name = self.silence
        return f"no part in either direction for {most:g} s ({name})"


@final
class Pace:
    """Checks how fast the incomplete message of a stream arrives, one message after the other. It is called about once a
    second, and misses messages that begin and end in between."""

    __slots__ = ("_since", "_which")

    def __init__(self) -> None:
        self._which: object = None
        self._since = 0.0

    def look(self, which: object, n: int, now: float, heard: float, limits: LimitsConfig) -> SlowUpload | None:
        """Returns an error if the incomplete message is too slow. n bytes of it are here, the last since `heard`. `which`
        identifies the message."""
        if which != self._which:
            self._which, self._since = which, now
        silent, lasted = now - max(heard, self._since), now - self._since
        if silent > limits.body_silence:
            return SlowUpload(f"no byte of a message that has begun for {silent:.0f} s (limits.body_silence)")
        if lasted > limits.body_silence and n < limits.body_rate * lasted:
            return SlowUpload(f"{n} bytes of a message in {lasted:.0f} s: less than limits.body_rate allows")
        return None

    def rest(self) -> None:
        """Forgets the message: none is under way, or its sender is not what delays it."""
        self._which = None
