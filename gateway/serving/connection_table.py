"""ConnectionTable: decides which new connections get a place, and which idle ones are closed to make room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from functools import partial
from typing import TypeAlias, final

import trio

from gateway.addresses import split_port
from gateway.core.connection import Connection
from gateway.core.server import Server
from gateway.errors import Closing
from gateway.serving.lobby import GUESTS

_WARY = 90  # percent of the places, from which on idle connections are closed
_AT_ONCE = 32  # connections, at most, that one arrival closes: as nginx does
_YOUNG = 1.0  # seconds of idleness before a connection may be closed
_LOOKS = 0.25  # seconds between two looks at all connections

_Idle: TypeAlias = "tuple[bool, float, int, Connection | trio.CancelScope]"


@final
class ConnectionTable:
    """The places for connections. A connection takes one even before its first request.

    If nearly all places are taken, each arrival closes idle connections: first those that never had an exchange, then those
    whose last exchange ended longest ago. If all places are taken and no connection is idle, the arrival is refused.
    """

    def __init__(
        self, server: Server, arriving: Callable[[], Set[trio.CancelScope]], descriptors: int | None = None
    ) -> None:
        """`arriving` returns a scope for each connection that has not sent its first request yet. `descriptors` is how many
        the process may have open; None: no limit."""
        self._server, self._arriving, limits = server, arriving, server.limits
        self._most = limits.connections
        self._setting = "limits.connections"
        self.spare = GUESTS
        """Descriptors for connections without a place: 64, or, if descriptors bound the places, at most half of
        `limits.descriptors_reserved`."""
        if descriptors is not None and (left := max(descriptors - limits.descriptors_reserved, 1)) < self._most:
            self._most, self._setting = left, "the process's file descriptors and limits.descriptors_reserved"
            self.spare = min(limits.descriptors_reserved // 2, GUESTS)
        self._wary = self._most * _WARY // 100
        self._per_peer = limits.per_peer
        self._of: Counter[str] = Counter()  # connections by address, if `limits.per_peer` is set
        self.evicted: set[trio.CancelScope] = set()
        """Scopes of `arriving` that were cancelled to make room, and have not ended yet."""
        self.starting = 0
        """Connections that have a place, and whose task has not started yet."""
        self._candidates: list[_Idle] = []  # idle connections; the last one is closed first
        self._looked = float("-inf")

    @property
    def taken(self) -> int:
        """How many places are taken."""
        return len(self._server.connections) + len(self._arriving()) + self.starting

    def refusal(self, peer: str) -> str | None:
        """Returns the reason, for the peer, why it gets no place; None if it gets one, for which an idle connection may be
        closed."""
        if self._per_peer and self._of[_address(peer)] >= self._per_peer:
            return f"{self._per_peer} connections of this address are open (limits.per_peer)"
        if self.taken < self._wary:
            return None
        self._make_room()
        taken = self.taken
        return f"{taken} connections are open ({self._setting})" if taken >= self._most else None

    def counted(self, peer: str) -> Callable[[], None] | None:
        """Counts a connection for its address. Returns a function to call at its end; None if addresses are not counted."""
        address = _address(peer)
        if not self._per_peer or not address:
            return None
        self._of[address] += 1
        return partial(self._gone, address)

    def _gone(self, address: str) -> None:
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]

    # -- eviction ----------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Closes idle connections, until fewer than `_WARY` percent of the places are taken."""
        arriving = self._arriving()
        self.evicted = {scope for scope in self.evicted if scope in arriving}
        now = self._server.clock()
        for _ in range(min(self.taken - len(self.evicted) - self._wary + 1, _AT_ONCE)):
            idle = self._next(now)
            if idle is None:
                return
            self._server.connection_ended(Closing.EVICTED)
            if isinstance(idle, trio.CancelScope):
                self.evicted.add(idle)
                idle.cancel()
            else:  # closed at once, as nginx does: an end that waits for its peer would keep the place for as long
                idle.wire.end_idle()
                idle.turn()
                idle.lost()

    def _next(self, now: float) -> Connection | trio.CancelScope | None:
        """Returns the idle connection to close next; None if none is idle for long enough."""
        if not self._candidates and now - self._looked >= _LOOKS:
            self._looked = now
            self._candidates = self._idle(now)
        while self._candidates:
            _, since, _, idle = self._candidates.pop()
            # It may have changed since it was found.
            if isinstance(idle, trio.CancelScope):
                if idle in self._arriving() and idle not in self.evicted:
                    return idle
            elif idle in self._server.connections and _idle_since(idle) == since:
                return idle
        return None

    def _idle(self, now: float) -> list[_Idle]:
        """Returns all connections that may be closed; the last one is to be closed first."""
        found: list[_Idle] = []
        patience = self._server.limits.head_timeout
        for scope in self._arriving():
            if now - (since := scope.deadline - patience) >= _YOUNG and scope not in self.evicted:
                found.append((False, since, len(found), scope))
        for connection in self._server.connections:
            if not isinstance(connection, Connection):
                continue
            if (idle_since := _idle_since(connection)) is not None and now - idle_since >= _YOUNG:
                found.append((connection.requests > 0, idle_since, len(found), connection))
        found.sort(reverse=True, key=lambda idle: idle[:3])
        return found


def _idle_since(connection: Connection) -> float | None:
    """Returns since when it has had no exchange; None if it has one, may have received one, or ends."""
    busy = connection.exchanges or connection.behind or connection.heavy or connection.wire.over
    return None if busy else connection.wire.idle_since


def _address(peer: str) -> str:
    """Returns the address of a TCP peer, without its port; empty for other peers."""
    address, port = split_port(peer)
    return "" if port is None else address
