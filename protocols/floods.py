"""What a peer may do that costs it little and us something: an allowance of each kind, and who has used up his.

The machines of the wires count and have no clock; each wire has a table of its allowances, and one policy a connection asks
whether what was counted is within them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar, final


class FloodCounts(Protocol):
    """What a machine has counted since its connection began."""

    total: int
    """All of it, whatever the kind: it rises by at least as much as each of them does, bytes apart, which it has in steps of
    `BYTES`."""


BYTES = 16_384
"""So many bytes of a kind that counts bytes are 1 in `FloodCounts.total`, and so is a part of them."""

C = TypeVar("C", bound=FloodCounts)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Flood:
    """A verdict: more of one kind came than is allowed."""

    kind: str
    count: int
    """How many, since the connection began; bytes where the kind counts them."""
    seconds: float
    """How long that took."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance(Generic[C]):
    """How much of one kind a peer may do: `burst` at once, `rate` more a second, of which never more than a burst is in
    hand, and what it has earned by real work on the same connection. No limit is reached by a long life alone."""

    kind: str
    counts: str
    """In words, what counts 1, or where `in_bytes` its bytes."""
    count: Callable[[C], int]
    burst: int
    rate: float
    earned_by: str = ""
    """In words, what earns more; empty where nothing does."""
    earned: Callable[[C], int] | None = None
    most_earned: int | None = None
    """Of what was earned, no more is in hand; None: there is no bound."""
    in_a_row: int | None = None
    """So many one behind the other are allowed, whatever is in hand; None: there is no such bound."""
    longest: Callable[[C], int] | None = None
    """The longest row so far."""
    in_bytes: bool = False


@final
class Allowances(Generic[C]):
    """The table of one wire."""

    __slots__ = ("due", "rows")

    def __init__(self, rows: Iterable[Allowance[C]]) -> None:
        self.rows = tuple(rows)
        self.due = 1 + min(_frames(row, row.burst, 0) for row in self.rows)
        """No connection has used up an allowance as long as its `FloodCounts.total` is less."""

    def __iter__(self) -> Iterator[Allowance[C]]:
        return iter(self.rows)

    def with_limits(self, said: Mapping[str, float]) -> Allowances[C]:
        """The same table with other bursts and rates: `KIND_burst` and `KIND_rate` of each kind that are said."""
        return Allowances(
            replace(
                row,
                burst=int(said.get(f"{row.kind}_burst", row.burst)),
                rate=said.get(f"{row.kind}_rate", row.rate),
            )
            for row in self.rows
        )


def _frames(row: Allowance[C], in_hand: float, longest: int) -> int:
    """How much `FloodCounts.total` may rise until the row may be used up."""
    left = int(in_hand) // BYTES if row.in_bytes else int(in_hand)
    return left if row.in_a_row is None else min(left, row.in_a_row - longest)


@final
class FloodPolicy(Generic[C]):
    """Judges one connection. It has no clock: whoever asks says when, in seconds on any clock that never goes back."""

    __slots__ = ("_allowances", "_asked", "_began", "_purses", "_quiet_until", "_seen", "due")

    def __init__(self, allowances: Allowances[C], now: float) -> None:
        self._allowances = allowances
        self._began = self._asked = self._quiet_until = now
        self._purses: array[float] | None = None  # of each row: counted, earned, and of both what is in hand
        self._seen = 0
        self.due = allowances.due
        """While `FloodCounts.total` is less there is nothing to ask about: the answer would be None."""

    def judge(self, counters: C, now: float) -> Flood | None:
        """The first kind of which more came than was allowed until now; None where there is none. To be asked after every
        few frames: what comes between two questions is taken to have come evenly, and what earns to have come first."""
        return None if counters.total < self.due else self._reckon(counters, now)

    def tick(self, counters: C, now: float) -> Flood | None:
        """The same, to be asked about once a second also where nothing comes: so what comes at once after a pause is not
        taken to have come evenly all through it."""
        if counters.total != self._seen:
            return self._reckon(counters, now)
        self._quiet_until = now
        return None

    def _reckon(self, counters: C, now: float) -> Flood | None:
        rows, before = self._allowances.rows, self._purses
        quiet = max(0.0, self._quiet_until - self._asked)
        elapsed = max(0.0, now - max(self._quiet_until, self._asked))
        purses: list[float] = []
        left: int | None = None
        for number, row in enumerate(rows):
            counted, seen, in_hand, earned = before[4 * number : 4 * number + 4] if before else (0, 0, row.burst, 0)
            count = row.count(counters)
            in_hand = min(in_hand + row.rate * quiet, row.burst) + row.rate * elapsed - (count - counted)
            earns = 0 if row.earned is None else row.earned(counters)
            earned += earns - seen
            if in_hand < 0:
                earned, in_hand = earned + in_hand, 0.0
            longest = 0 if row.longest is None else row.longest(counters)
            if earned < 0 or (row.in_a_row is not None and longest > row.in_a_row):
                return Flood(kind=row.kind, count=count, seconds=now - self._began)
            in_hand = min(in_hand, row.burst)
            if row.most_earned is not None:
                earned = min(earned, row.most_earned)
            purses += (count, earns, in_hand, earned)
            frames = _frames(row, in_hand + earned, longest)
            left = frames if left is None or frames < left else left
        self._purses, self._seen = array("d", purses), counters.total
        self._asked = self._quiet_until = max(now, self._asked)
        self.due = counters.total + (left or 0) + 1
        return None
