"""The allowances by the settings, and the effects of a flood on every wire: its exchanges, log line and counts."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from gateway.core.connection import tell
from gateway.core.linger import Parting
from gateway.errors import Closing, Ending
from protocols.floods import Allowances, Flood, FloodCounts

if TYPE_CHECKING:
    from gateway.core.connection import Connection

C = TypeVar("C", bound=FloodCounts)
GOODBYE = 0.1
"""Seconds for sending the last bytes to a peer whose input is no longer read."""


@functools.lru_cache(maxsize=8)
def allowances_of(table: Allowances[C], settings: Any, refused_burst: int = 0) -> Allowances[C]:
    """Returns the table with the bursts and rates of a section of the settings, one object for all connections. It is empty
    if the section is not enabled. `refused_burst` replaces a setting of 0."""
    if not settings.enabled:
        return Allowances(())
    said = {f"{row.kind}_{what}": getattr(settings, f"{row.kind}_{what}") for row in table for what in ("burst", "rate")}
    return table.with_limits(said | ({"refused_burst": refused_burst} if said.get("refused_burst") == 0 else {}))


def end_exchanges(connection: Connection, closing: Closing) -> int:
    """Cuts the exchanges of a connection that the server ends, some in each turn, as refused, and counts the end. The
    machine has queued the goodbye to the peer. Returns how many exchanges that cuts."""
    cut = sum(exchange.ending is None for exchange in connection.exchanges.values())
    tell(connection, connection.exchanges.values(), lambda exchange: exchange.peer_gone(Ending.REFUSED))
    connection.server.connection_ended(closing)
    connection.parting = Parting.BRIEF
    connection.output_ready()
    return cut


def report(connection: Connection, flood: Flood, cut: int) -> None:
    """Logs and counts a flood."""
    connection.server.flooded(connection.peer, connection.wire.name, flood, cut)
