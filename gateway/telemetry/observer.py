"""Observes exchanges: counts their endings, and writes one access line for each, with its ending and times."""

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
    ModelStalled,
    Refusal,
    WorkerLost,
)
from gateway.log_limits import LogLimits
from gateway.telemetry.account import PARTS, account_of
from gateway.untrusted_text import escape
from protocols.forwarded import client_of
from protocols.request_ids import FIELDS, client_request_id

log = logging.getLogger("gateway.exchange")
failures = logging.getLogger("gateway.worker")

_METHOD, _PATH, _MODEL = 32, 200, 100  # the most characters of texts from peers
_REASON = 300  # the most characters of a model's text, which may repeat a client's
_FAILED_DEPENDENCY = 424
_CLIENT_ID, _ID = FIELDS
# the log has their traceback already, under the incident number that the client gets
_EXPLAINED = (ModelCrashed, ModelOutOfMemory, ModelStalled, InternalFailure)
# the log has their reason already, in one line for all the sessions that it ends
_SHARED = (WorkerLost, LoadFailed)


@final
class Observer:
    """Counts exchanges and writes their access lines. A line never has headers, bodies or query values."""

    def __init__(self, access: Literal["all", "limited", "none"] = "limited") -> None:
        """`access` is the setting `log.access`."""
        self._writes, self._limited = access != "none", access == "limited"
        self.log_limits = LogLimits()
        """The limits for lines of exchanges that peers can cause at no cost."""
        self.live: set[Exchange] = set()
        self.opened = self.live.add
        """Called once for each exchange, when it begins."""
        self.endings: dict[Ending, int] = {}
        self.trace_fields: Callable[[Exchange], Mapping[str, str]] | None = None
        """Returns the fields that name an exchange's span; None without spans."""
        self.watchers: list[Callable[[Exchange], None]] = []
        """Functions that are called with every exchange that has ended."""
        self.refusals: dict[Refusal, int] = {}

    def closed(self, exchange: Exchange) -> None:
        """Called once for each exchange, when its ending is decided and its task is done."""
        ending, endings = exchange.ending, self.endings
        assert ending is not None
        self.live.remove(exchange)
        endings[ending] = endings.get(ending, 0) + 1  # a Counter would cost four times as much
        if self.watchers:
            for watcher in self.watchers:
                watcher(exchange)
        if self._writes and log.isEnabledFor(logging.INFO):
            if self._limited and (exchange.probe or not self._may_write(exchange, ending)):
                return
            fields = _line_of(exchange, ending)
            if self.trace_fields is not None:
                fields |= self.trace_fields(exchange)
            log.info("exchange", extra=fields)

    def _may_write(self, exchange: Exchange, ending: Ending) -> bool:
        """True if the exchange's line may be written. It always may if the exchange reached a model: without one a peer can
        cause any ending at no cost, as by OPTIONS, which need no key."""
        return getattr(exchange, "had_slot", False) or self.log_limits.allows(
            "exchange", dialect=exchange.dialect, ending=ending.value
        )

    def refused(self, why: Refusal) -> None:
        """Counts a refusal. Called for each refused request."""
        self.refusals[why] = self.refusals.get(why, 0) + 1


def log_failure(exchange: Exchange, error: GatewayError) -> None:
    """Logs the reason of a call that failed by its model's fault, unless a line has it already. Called once for each error
    that a client gets, or would get if it were still connected.

    The level is info if the model has refused the request (a ModelError with a status of 4xx). It is warning if the model
    says that it has failed (status 424, ModelError's default). It is error if the model is broken: its answer is not of
    the declared form, is missing, or is one too many.
    """
    if error.ending is not Ending.MODEL_ERROR or isinstance(error, _EXPLAINED):
        return
    if isinstance(error, _SHARED):
        level = logging.INFO
    elif error.status == _FAILED_DEPENDENCY:
        level = logging.WARNING
    else:
        level = logging.ERROR if error.status >= 500 else logging.INFO
    if not exchange.owner.log_limits.allows("model failed", level=level, dialect=exchange.dialect):
        return  # a client's mistake can be the reason, as often as it likes
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
    """Makes the fields of an access line. Texts from peers are cut and escaped here, because an embedder's handler may write
    fields as they are."""
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
    given = exchange.fields
    if (_CLIENT_ID in given or _ID in given) and (own := client_request_id(given)):
        fields["client_request_id"] = own
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
    """Returns the client of a request, for the log: the one that a trusted proxy names in a field, or else the connection's
    peer."""
    owner = exchange.owner
    if owner.proxies is None:
        return owner.peer
    fields = exchange.header_values
    node = client_of(fields(b"forwarded"), fields(b"x-forwarded-for"), owner.proxies.trusts)
    return owner.peer if node is None else written_ip(str(node.address), node.port)


@final
@dataclass(slots=True)
class Counts:
    """The numbers of live connections and exchanges, of endings so far, and of bytes and slots in use."""

    connections: int = 0
    exchanges: int = 0
    endings: dict[str, int] = field(default_factory=dict)
    bytes_reserved: int = 0
    slots_in_use: int = 0
