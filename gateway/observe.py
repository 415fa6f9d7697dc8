"""What an operator sees of exchanges: one structured line for each, with its one ending and where its time went."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, final

from gateway.errors import Ending, Refusal
from gateway.exchange import Exchange
from gateway.ledger import PARTS, account_of
from gateway.printable import escape

log = logging.getLogger("gateway.exchange")

_METHOD, _PATH, _MODEL = 32, 200, 100  # characters of what peers choose


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
        self.refusals: dict[Refusal, int] = {}

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
            fields = _line_of(exchange, ending)
            if self.trace_fields is not None:
                fields |= self.trace_fields(exchange)
            log.info("exchange", extra=fields)

    def refused(self, why: Refusal) -> None:
        """Called for each request that is told so."""
        self.refusals[why] = self.refusals.get(why, 0) + 1


def _line_of(exchange: Exchange, ending: Ending) -> dict[str, Any]:
    """What peers have chosen is cut and escaped here: a handler of an embedder's may write it as it is."""
    request, account = exchange.request, account_of(exchange)
    ms = round(account.wall * 1000, 3)
    parts = {f"ms_{part}": round(getattr(account, part) * 1000, 3) for part in PARTS if part != "model"}
    fields = {
        "id": exchange.id,
        "wire": exchange.wire.name,
        "dialect": exchange.dialect,
        "model": escape(exchange.model[:_MODEL]),
        "method": escape(request.method[:_METHOD].decode("latin-1")),
        "path": escape(exchange.path[:_PATH].decode("latin-1")),
        "status": exchange.status,
        "ending": ending.value,
        "ms": ms,
        **parts,
        "ms_model": max(round(ms - sum(parts.values()), 3), 0.0),
        "ms_first": None if account.first is None else round(account.first * 1000, 3),
        "items_in": account.items_in,
        "items_out": account.items_out,
        "bytes_in": account.bytes_in,
        "bytes_out": account.bytes_out,
        "peer": exchange.owner.peer,
    }
    if exchange.incident:
        fields["incident"] = exchange.incident
    return fields
