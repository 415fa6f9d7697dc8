"""The operator's record of exchanges: one structured line for each, with its one ending and where its time went."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

from gateway.addresses import written_ip
from gateway.core.exchange import Exchange
from gateway.errors import (
    Ending,
    GatewayError,
    InternalFailure,
    LoadFailed,
    ModelCrashed,
    ModelOutOfMemory,
    Refusal,
    WorkerLost,
)
from gateway.log_limits import LogLimits
from gateway.telemetry.account import PARTS, account_of
from gateway.untrusted_text import escape
from protocols.forwarded import client_of

log = logging.getLogger("gateway.exchange")
failures = logging.getLogger("gateway.worker")

_METHOD, _PATH, _MODEL = 32, 200, 100  # characters of what peers choose
_CHEAP = (Ending.REFUSED, Ending.CANCELLED)  # a peer can cause these at will, where no model was reached
_REASON = 300  # characters of a model's text, which may repeat what a client has sent
_FAILED_DEPENDENCY = 424
# their log line has the traceback already, under the incident that the client is told
_EXPLAINED = (ModelCrashed, ModelOutOfMemory, InternalFailure)
# their reason is one line of its own for all sessions that it ends
_SHARED = (WorkerLost, LoadFailed)


@final
class Observer:
    """Counts exchanges and writes their lines. Headers, bodies and query values are never in it."""

    def __init__(self, access: Literal["all", "limited", "none"] = "limited") -> None:
        """`access` is the setting `log.access`."""
        self._writes, self._limited = access != "none", access == "limited"
        self.log_limits = LogLimits()
        """How often the line of an exchange is written that peers can have at no cost."""
        self.live: set[Exchange] = set()
        self.opened = self.live.add
        """Called once for each exchange, when it begins."""
        self.endings: dict[Ending, int] = {}
        self.trace_fields: Callable[[Exchange], Mapping[str, str]] | None = None
        """The fields that name an exchange's span; None if there are no spans."""
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
        if self._writes and log.isEnabledFor(logging.INFO):
            if ending in _CHEAP and self._limited and not self._may_write(exchange, ending):
                return
            fields = _line_of(exchange, ending)
            if self.trace_fields is not None:
                fields |= self.trace_fields(exchange)
            log.info("exchange", extra=fields)

    def _may_write(self, exchange: Exchange, ending: Ending) -> bool:
        """True if the exchange's line may be written. The line of an exchange that reached a model always is."""
        return getattr(exchange, "had_slot", False) or self.log_limits.allows(
            "exchange", dialect=exchange.dialect, ending=ending.value
        )

    def refused(self, why: Refusal) -> None:
        """Called for each request that is told so."""
        self.refusals[why] = self.refusals.get(why, 0) + 1


def log_failure(exchange: Exchange, error: GatewayError) -> None:
    """Says in the log why a call has failed, where that is its model's doing and no line says it yet: called once for each
    error that a client is told, or would be if it were still there.

    The level is that of the fault: info where the model has refused the request itself (a ModelError with a status of 4xx),
    warning where it says that it has failed (424, which ModelError has unless it is given another), error where it is
    broken: an answer that is not what it has declared, none, or one too many.
    """
    if error.ending is not Ending.MODEL_ERROR or isinstance(error, _EXPLAINED):
        return
    if isinstance(error, _SHARED):
        level = logging.INFO
    elif error.status == _FAILED_DEPENDENCY:
        level = logging.WARNING
    else:
        level = logging.ERROR if error.status >= 500 else logging.INFO
    failures.log(
        level,
        "model failed",
        extra={
            "model": escape(exchange.model[:_MODEL]),
            "id": exchange.id,
            "dialect": exchange.dialect,
            "status": error.status,
            "code": escape(error.code[:_MODEL]),
            "reason": escape(error.message[:_REASON]),
        },
    )


def _line_of(exchange: Exchange, ending: Ending) -> dict[str, Any]:
    """The fields of an exchange's line. Text that peers choose is cut and escaped here: an embedder's handler may write it
    as it is."""
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
        "status": exchange.outbound.status,
        "ending": ending.value,
        "ms": ms,
        **parts,
        "ms_model": max(round(ms - sum(parts.values()), 3), 0.0),
        "ms_first": None if account.first is None else round(account.first * 1000, 3),
        "items_in": account.items_in,
        "items_out": account.items_out,
        "bytes_in": account.bytes_in,
        "bytes_out": account.bytes_out,
        "peer": exchange.owner.peer if exchange.owner.proxies is None else peer_of(exchange),
    }
    if account.stopped_by:
        fields["stopped_by"] = account.stopped_by
    if (instance := getattr(exchange, "instance", None)) is not None:
        fields["instance"] = instance
    if exchange.key is not None:
        fields["key"] = exchange.key.name
    if (own_status := getattr(exchange, "own_status", None)) is not None:
        fields["grpc_status"] = int(own_status)
    if exchange.incident:
        fields["incident"] = exchange.incident
    return fields


def peer_of(exchange: Exchange) -> str:
    """The client of a request, for the log: the one that a trusted proxy names in a field, else the connection's."""
    owner = exchange.owner
    if owner.proxies is None:
        return owner.peer
    fields = exchange.header_values
    node = client_of(fields(b"forwarded"), fields(b"x-forwarded-for"), owner.proxies.trusts)
    return owner.peer if node is None else written_ip(str(node.address), node.port)


@final
@dataclass(slots=True)
class Counts:
    """Exchanges by their one ending, and what is live; read at any time."""

    connections: int = 0
    exchanges: int = 0
    endings: dict[str, int] = field(default_factory=dict)
    bytes_reserved: int = 0
    slots_in_use: int = 0
