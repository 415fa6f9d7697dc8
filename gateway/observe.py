"""What an operator sees of exchanges: one structured line for each, with its one ending, and counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import final

from gateway.errors import Ending
from gateway.exchange import Exchange

log = logging.getLogger("gateway.exchange")


@final
class Observer:
    """Counts exchanges and writes their lines. Headers, bodies and query values are never in it."""

    def __init__(self) -> None:
        self.live: set[Exchange] = set()
        self.opened = self.live.add
        """Called once for each exchange, when it begins."""
        self.endings: dict[Ending, int] = {}
        self.trace_fields: Callable[[Exchange], Mapping[str, str]] | None = None
        """What names an exchange's span, where there are spans."""
        self.watchers: list[Callable[[Exchange], None]] = []
        """Each is called with every exchange that has ended."""

    def closed(self, exchange: Exchange) -> None:
        """Called once for each exchange, when its ending is decided and its task is done."""
        ending, endings = exchange.ending, self.endings
        assert ending is not None
        self.live.remove(exchange)
        endings[ending] = endings.get(ending, 0) + 1  # a Counter's own sum costs four times that
        if self.watchers:
            for watcher in self.watchers:
                watcher(exchange)
        if log.isEnabledFor(logging.INFO):
            request = exchange.request
            fields = {
                "id": exchange.id,
                "wire": exchange.wire.name,
                "dialect": exchange.dialect,
                "model": exchange.model,
                "method": request.method.decode("latin-1"),
                "path": exchange.path.decode("latin-1")[:200],
                "status": exchange.status,
                "ending": ending.value,
                "ms": round((exchange.owner.clock() - exchange.started_at) * 1000, 1),
                "bytes_in": exchange.bytes_in,
                "bytes_out": exchange.bytes_out,
                "peer": exchange.owner.peer,
            }
            if exchange.incident:
                fields["incident"] = exchange.incident
            if self.trace_fields is not None:
                fields |= self.trace_fields(exchange)
            log.info("exchange", extra=fields)
