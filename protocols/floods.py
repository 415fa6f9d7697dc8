"""Flood limits: how much of each kind of cheap input a peer may send, and when it has sent too much.

Flood input costs the peer little and the gateway much. The machines of the wires count it and have no clock. Each wire has
a table of allowances, and each connection a policy that compares the counts with them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar, final


class FloodCounts(Protocol):
    """The counters of one machine, since its connection began."""

    total: int
    """A count over all kinds. It rises by at least as much as each kind does. For a kind that counts bytes it rises by 1 for
    each `BYTES`."""


NEVER = sys.maxsize
"""A count that no connection reaches."""
BYTES = 16_384
"""Bytes of a byte-counting kind that raise `FloodCounts.total` by 1; a part of them also raises it by 1."""

QUERY_MEMBERS = 100
"""The most members of a query that is taken apart, which costs some 2 us each."""
CODEC_ROUND = 32 * 1024
"""Bytes or elements of codec steps of all exchanges in one round of the loop, a millisecond's work at most. The step that
exceeds it is the round's last."""
HEAVY_JSON = 1536 * 1024
"""Bytes of memory that the values of a JSON text may take if it is read on the loop, in a millisecond at most."""
SLOW_JSON = 128 * 1024
"""Bytes of memory of those values if the slower decoder reads the text: `protocols.json.strict.is_slow`."""
GRPC_FIELDS = 10_000
"""Fields of a gRPC message, nested ones included, without those in the contents of tensors."""
GRPC_AT_ONCE = 1_000
"""Fields of a gRPC message that are read on the loop, in a millisecond at most."""
GRPC_NAME = 64 * 1024
"""Bytes of a name, a version or an id in a gRPC message."""
SMALL_CALL = 4 * 1024
"""Bytes of the message of a gRPC call that only names something: a health check, a model's metadata, a symbol."""
TOML_BYTES = 256 * 1024
"""Bytes of a model's `model.toml`, which take a second of a thread at most."""
TOML_PARTS = 32
"""Parts of a TOML key, with those of the keys and the arrays that it stands in; a table's head has as many more."""
TOML_WORD = 4096
"""Characters of a TOML number, or of a key without quotes."""

PLANE_CONNECTIONS = 100
"""Connections at once of the operator plane, and of the metrics port: operators, scrapers and probes."""
PLANE_READ = 16 * 1024
"""Bytes that the plane reads at once, in a turn of one connection."""
METRICS_BYTES = 1024 * 1024
"""Bytes that one connection may send to the metrics port, some thousand requests."""

STALLED_UPLOAD = 2.0
"""Seconds without a byte after which an upload keeps its memory only as long as nobody else asks for it."""

INTERIM_HEADS = 32
"""Heads of status 1xx that a server may send in a row before its answer."""

C = TypeVar("C", bound=FloodCounts)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Flood:
    """A verdict: more of one kind came than is allowed."""

    kind: str
    count: int
    """How many since the connection began, in bytes for a kind that counts bytes."""
    seconds: float
    """The age of the connection."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance(Generic[C]):
    """How much of one kind a peer may send: `burst` at once, and `rate` more a second, which accumulates to at most one
    burst. Work on the same connection can earn more. A long life alone reaches no limit."""

    kind: str
    counts: str
    """In words, what is counted."""
    count: Callable[[C], int]
    burst: int
    rate: float
    earned_by: str = ""
    """In words, the work that earns more; empty if none does."""
    earned: Callable[[C], int] | None = None
    most_earned: int | None = None
    """The most of the earnings that can accumulate; None: no bound."""
    in_a_row: int | None = None
    """The most in an uninterrupted row, whatever is left of burst and earnings; None: no bound."""
    longest: Callable[[C], int] | None = None
    """The longest row since the connection began."""
    in_bytes: bool = False


@final
class Allowances(Generic[C]):
    """The table of allowances of one wire. An empty one allows everything."""

    __slots__ = ("due", "rows")

    def __init__(self, rows: Iterable[Allowance[C]]) -> None:
        self.rows = tuple(rows)
        self.due = min((1 + _frames(row, row.burst, 0) for row in self.rows), default=NEVER)
        """While its `FloodCounts.total` is below this, no connection can have used up an allowance."""

    def __iter__(self) -> Iterator[Allowance[C]]:
        return iter(self.rows)

    def with_limits(self, said: Mapping[str, float]) -> Allowances[C]:
        """A copy of the table with other bursts and rates: `said` may hold `KIND_burst` and `KIND_rate` of each kind."""
        return Allowances(
            replace(
                row,
                burst=int(said.get(f"{row.kind}_burst", row.burst)),
                rate=said.get(f"{row.kind}_rate", row.rate),
            )
            for row in self.rows
        )


def _frames(row: Allowance[C], in_hand: float, longest: int) -> int:
    """How much `FloodCounts.total` may rise before the row can be used up."""
    left = int(in_hand) // BYTES if row.in_bytes else int(in_hand)
    return left if row.in_a_row is None else min(left, row.in_a_row - longest)


@final
class FloodPolicy(Generic[C]):
    """Judges one connection. It has no clock: the caller passes the time, in seconds on any clock that never goes back."""

    __slots__ = ("_allowances", "_asked", "_began", "_purses", "_quiet_until", "_seen", "due")

    def __init__(self, allowances: Allowances[C], now: float) -> None:
        self._allowances = allowances
        self._began = self._asked = self._quiet_until = now
        # four numbers a row: counted, earned, and what is left of burst and of earnings
        self._purses: array[float] | None = None
        self._seen = 0
        self.due = allowances.due
        """While `FloodCounts.total` is below this, `judge` returns None: it need not be called."""

    def judge(self, counters: C, now: float) -> Flood | None:
        """The first kind of which more came than is allowed, or None. Call it after every few frames: the input since the
        last call counts as spread evenly over that time, and the earnings as made before it."""
        return None if counters.total < self.due else self._reckon(counters, now)

    def tick(self, counters: C, now: float) -> Flood | None:
        """Judges as `judge` does. Call it about once a second, also when nothing comes: without it, a burst after a pause
        would count as spread evenly over the pause."""
        if counters.total != self._seen:
            return self._reckon(counters, now)
        self._quiet_until = now
        return None

    def _reckon(self, counters: C, now: float) -> Flood | None:
        rows, before = self._allowances.rows, self._purses
        quiet = max(0.0, self._quiet_until - self._asked)
        elapsed = max(0.0, now - max(self._quiet_until, self._asked))
        purses: list[float] = []
        due = NEVER
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
            due = min(due, counters.total + _frames(row, in_hand + earned, longest) + 1)
        self._purses, self._seen = array("d", purses), counters.total
        self._asked = self._quiet_until = max(now, self._asked)
        self.due = due
        return None


@final
@dataclass(slots=True)
class RecordCounts:
    """The TLS records without payload that came after the handshake: KeyUpdates, session tickets, empty records."""

    total: int = 0


TLS_FLOODS: Allowances[RecordCounts] = Allowances(
    [
        Allowance(
            kind="records",
            counts="a TLS record without payload, after the handshake",
            count=lambda counts: counts.total,
            burst=1000,
            rate=10,
        )
    ]
)
"""The allowance of one peer. No setting changes it: a client asks for new keys after millions of records."""
HANDSHAKE_RECORDS = 1000
"""The most records of one TLS handshake. A usual one has three or four."""
HANDSHAKES = 1024
"""TLS handshakes that may wait for their clients, some 50 KiB each. If one more begins, those are ended that have waited the
longest, and for `HANDSHAKE_PATIENCE` at least. A thousand clients at once lose none, however slow their machine."""
HANDSHAKE_PATIENCE = 1.0
"""Seconds that a handshake may wait for its client, however many do: a server that does nothing else begins some two
thousand in that time. A round trip by satellite takes 0.7 s."""
