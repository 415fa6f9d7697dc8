"""grpc.health.v1: the health checks of Kubernetes' probes, load balancers and gRPC's own clients."""

from __future__ import annotations

from typing import final

import trio

from gateway.core.exchange import Exchange
from gateway.core.route import Needs, Row
from gateway.dialects.grpc.calls import Calls, end_stream, reply_with, rows_of, start_stream
from gateway.dialects.grpc.infer import SERVICE
from gateway.dialects.health import ManagementDialect
from gateway.errors import NotFound
from protocols.grpc import v2_tables as tables
from protocols.grpc.framing import frame
from protocols.grpc.heads import CallHead

_NAME = "grpc.health.v1.Health"
_ASKED, _TOLD = tables.HEALTH_CHECK
_SERVING, _NOT_SERVING, _UNKNOWN = (tables.SERVING_STATUS[name] for name in ("SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"))
_LOOK = 1.0


@final
class HealthDialect:
    """Answers for the server, whose name is empty, and for v2's service. Both have the same health."""

    def __init__(self, calls: Calls, management: ManagementDialect) -> None:
        self._calls, self._management = calls, management

    def rows(self) -> list[Row]:
        """The two methods, which answer also during a drain and without memory."""
        return rows_of(_NAME, {"Check": self.check, "Watch": self.watch}, always=True, needs=Needs.NOTHING)

    async def check(self, exchange: Exchange, call: CallHead) -> None:
        """Check: NOT_FOUND for an unknown service."""
        fields = await self._calls.small.read(exchange, call, _ASKED)
        status = self._status(fields["service"])
        if status == _UNKNOWN:
            raise NotFound(f"there is no service {fields['service'][:100]!r}")
        reply_with(exchange, _TOLD, {"status": status})

    async def watch(self, exchange: Exchange, call: CallHead) -> None:
        """Watch: sends the status now, and again within 1 s of each change. Ends when the client leaves, and once the server
        drains, after the status of that moment."""
        fields = await self._calls.small.read(exchange, call, _ASKED)
        start_stream(exchange)
        told = -1
        while True:
            status = self._status(fields["service"])
            if status != told:
                buffers = frame((_TOLD.write({"status": status}),))
                await exchange.outbound.wait_room(sum(map(len, buffers)))
                exchange.outbound.push(*buffers)
                told = status
            if self._management.draining:
                break
            await trio.sleep(_LOOK)
        end_stream(exchange)

    def _status(self, service: str) -> int:
        if service not in ("", SERVICE):
            return _UNKNOWN
        return _NOT_SERVING if self._management.unready else _SERVING
