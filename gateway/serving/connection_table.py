"""ConnectionTable: whom of those that arrive there is a place for, and which idle connections go to make one."""

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
_YOUNG = 1.0  # seconds for which nobody has to go
_LOOKS = 0.25  # seconds between two looks at all connections

_Idle: TypeAlias = "tuple[bool, float, int, Connection | trio.CancelScope]"


@final
class ConnectionTable:
    """The places for connections, of which those that have not said what they want take one too.

    When nearly all are taken each arrival closes idle ones: first those that never had an exchange, then those whose last
    exchange is over for longest. When all are taken, and none of them is idle, there is no place.
    """

    def __init__(
        self, server: Server, arriving: Callable[[], Set[trio.CancelScope]], descriptors: int | None = None
    ) -> None:
        """`arriving` gives those that have not said what they want. `descriptors` is how many the process may have open."""
        self._server, self._arriving, limits = server, arriving, server.limits
        self._most = limits.connections
        self._setting = "limits.connections"
        self.spare = GUESTS
        """Descriptors that there are for connections which have no place: of the reserve, where descriptors are the bound, a
        half."""
        if descriptors is not None and (left := max(descriptors - limits.descriptors_reserved, 1)) < self._most:
            self._most, self._setting = left, "the process's file descriptors and limits.descriptors_reserved"
            self.spare = min(limits.descriptors_reserved // 2, GUESTS)
        self._wary = self._most * _WARY // 100
        self._per_peer = limits.per_peer
        self._of: Counter[str] = Counter()  # by address, where that is bounded
        self.evicted: set[trio.CancelScope] = set()
        """Those of `arriving` that have had to go, and have not gone yet."""
        self.starting = 0
        """Those that have a place, and are not among the others yet."""
        self._candidates: list[_Idle] = []  # the first to go last
        self._looked = float("-inf")

    @property
    def taken(self) -> int:
        """Places that are taken."""
        return len(self._server.connections) + len(self._arriving()) + self.starting

    def refusal(self, peer: str) -> str | None:
        """The reason, as text for the peer, to refuse one more connection of this peer; None if there is a place, which may
        be that of an idle connection."""
        if self._per_peer and self._of[_address(peer)] >= self._per_peer:
            return f"{self._per_peer} connections of this address are open (limits.per_peer)"
        if self.taken < self._wary:
            return None
        self._make_room()
        taken = self.taken
        return f"{taken} connections are open ({self._setting})" if taken >= self._most else None

    def counted(self, peer: str) -> Callable[[], None] | None:
        """Counts a connection for its address, where these are counted; what comes back is to be called at its end."""
        address = _address(peer)
        if not self._per_peer or not address:
            return None
        self._of[address] += 1
        return partial(self._gone, address)

    def _gone(self, address: str) -> None:
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]

    # -- evictions ---------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Closes idle connections, until there are as many as may be open without."""
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
        """The connection to close first; None if none is idle for long enough."""
        if not self._candidates and now - self._looked >= _LOOKS:
            self._looked = now
            self._candidates = self._idle(now)
        while self._candidates:
            _, since, _, idle = self._candidates.pop()
            # much may have become of it since
            if isinstance(idle, trio.CancelScope):
                if idle in self._arriving() and idle not in self.evicted:
                    return idle
            elif idle in self._server.connections and _idle_since(idle) == since:
                return idle
        return None

    def _idle(self, now: float) -> list[_Idle]:
        """All who may go, the first of them last."""
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
    """Since when it has had no exchange; None where it has one, or may have received one, or ends."""
    busy = connection.exchanges or connection.behind or connection.heavy or connection.wire.over
    return None if busy else connection.wire.idle_since


def _address(peer: str) -> str:
    """That of a peer of TCP, without its port; empty for one that has none of its own."""
    address, port = split_port(peer)
    return "" if port is None else address
