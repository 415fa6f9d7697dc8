"""Dispatcher: runs the row of a request, and turns any failure into the exchange's one ending."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, final
from uuid import uuid4

from gateway.core.exchange import Exchange
from gateway.core.memory import share_is_held
from gateway.core.route import Handler, Needs, Row
from gateway.core.server import Server
from gateway.errors import Ending, GatewayError, InternalFailure, Overloaded, Refusal, Unavailable
from gateway.party import MemoryAccount
from gateway.serving.access import Admittance, ClientAccess
from gateway.serving.admission import Admission
from gateway.serving.router import Router, options
from gateway.telemetry.observer import Observer, log_failure
from gateway.workers.failures import Failure
from protocols.events import Head

log = logging.getLogger("gateway")

_NOTHING = Needs.NOTHING
_Routed: TypeAlias = tuple[Head, Row, Handler, dict[str, Any], Admittance | None]
"""A head, its route and the access decision."""


@final
class Dispatcher:
    """Does the work of exchanges, in their tasks, and answers with an error if the work fails."""

    def __init__(
        self,
        server: Server,
        router: Router,
        observer: Observer,
        access: ClientAccess,
        explain: Callable[[Failure], None],
    ) -> None:
        """`explain` is called with each internal failure that the log explains."""
        self._server, self._router, self._observer, self._access = server, router, observer, access
        self._explain = explain
        self._admission = Admission(server.config.admission)
        limits = server.limits
        self._refuse_above = limits.memory_refuse * limits.total_bytes // 100
        self._look_above = min(server.plenty, self._refuse_above)
        self.turned_away = 0
        """How many requests came during the drain and were refused."""

    def work(self, exchange: Exchange) -> Coroutine[Any, Any, None]:
        """Returns the work of the exchange, to be awaited. Exceptions, raised here or by the work, are for `blame`."""
        routed: _Routed | None = exchange.owner.routed
        if routed is None or routed[0] is not exchange.request:
            routed = self._route(exchange)
        _, row, handler, arguments, entry = routed
        if entry is not None:
            _, row, handler, arguments, _ = self._admitted(exchange, routed)
        server = self._server
        if server.draining or server.budget.used > self._look_above:
            self._turn_away(exchange, row)
        exchange.dialect, exchange.words = row.dialect, row.refuse
        if row.needs is _NOTHING:
            exchange.probe = True
        if len(arguments) == 1:  # as for most paths: a call with a named argument costs as much as ten of these
            (value,) = arguments.values()
            return handler(exchange, value)
        return handler(exchange, **arguments)

    def _route(self, exchange: Exchange) -> _Routed:
        """Finds the route and the access decision of a new head. Its connection keeps them while the head repeats."""
        access = self._access
        try:
            route = self._router.find(exchange)
        except GatewayError:
            if not access.is_asked_first(exchange):
                access.look(exchange, None, {})  # a client without access must not learn which paths exist
                raise
            route = options("OPTIONS")
        row, _, arguments = route
        try:
            entry = access.look(exchange, row, arguments)
            route = self._admission.asked(exchange, route)
        except GatewayError:
            self._refuse_as(exchange, row)
            raise
        routed = exchange.owner.routed = exchange.request, row, route[1], arguments, entry
        return routed

    def _admitted(self, exchange: Exchange, routed: _Routed) -> _Routed:
        """Admits an exchange and returns its route. A decision that was made with other keys is made again."""
        access, entry = self._access, routed[-1]
        if entry is not None and entry.keys is not access.keys:
            routed = self._route(exchange)
            entry = routed[-1]
        if entry is not None:
            try:
                access.admit(exchange, entry)
            except GatewayError:
                self._refuse_as(exchange, routed[1])
                raise
        return routed

    def _refuse_as(self, exchange: Exchange, row: Row) -> None:
        """Makes errors before the call of the handler answer in the format of the row."""
        exchange.words = row.refuse or self._router.words_for(exchange)

    def _turn_away(self, exchange: Exchange, row: Row) -> None:
        """Raises the error for a request that is refused because of the drain or the memory in use."""
        if row.always:
            return
        budget, account = self._server.budget, exchange.account
        if exchange.started_at >= self._server.draining_since:
            self._refuse_as(exchange, row)
            self.turned_away += 1
            raise Unavailable("the server is shutting down; try another", refusal=Refusal.DRAINING)
        if isinstance(account, MemoryAccount) and account.has_its_share():
            budget.wanted = account
            self._refuse_as(exchange, row)
            raise share_is_held(account)
        if budget.used <= self._refuse_above:
            return
        budget.wanted = account
        self._refuse_as(exchange, row)
        raise Overloaded(
            f"{budget.used} of {budget.limit} bytes are in use (limits.total_bytes): above "
            f"{self._server.limits.memory_refuse} percent (limits.memory_refuse) nothing new begins; try again later",
            refusal=Refusal.MEMORY,
        )

    def blame(self, exchange: Exchange, error: Exception) -> GatewayError:
        """Returns the error for the client. An exception that is not a GatewayError becomes an internal error, with an
        incident in the log."""
        if isinstance(error, GatewayError):
            return error
        exchange.incident = uuid4().hex[:12]
        if self._server.log_limits.allows("exchange failed", level=logging.ERROR):
            log.error("exchange failed", extra={"id": exchange.id, "incident": exchange.incident}, exc_info=error)
        told = f"internal error; incident {exchange.incident} in the server's log"
        self._explain(Failure(incident=exchange.incident, error=error, model=exchange.model, stream=exchange.id, told=told))
        return InternalFailure(told)

    def conclude(self, exchange: Exchange, error: GatewayError | None) -> None:
        """Answers with the error, unless the client has left or its whole answer is queued. None: the work ended without an
        answer."""
        if error is not None:
            log_failure(exchange, error)
            if error.barred:
                self._access.count(exchange, error)
        if exchange.gone or exchange.outbound.finishing is not None:
            return
        if error is not None and error.refusal is not None:
            self._observer.refused(error.refusal)
        if exchange.words is None and exchange.fail is None:
            exchange.words = self._router.words_for(exchange)  # it ended before its row was known
        if error is not None and error.retryable:
            error.chance = self._server.chance()
        try:
            exchange.answer_error(error or InternalFailure("the exchange ended without an answer"))
        except Exception:
            if self._server.log_limits.allows("an error could not be sent", level=logging.ERROR):
                log.exception("an error could not be sent", extra={"id": exchange.id})
            exchange.outbound.abort(Ending.MODEL_ERROR)
