"""/ping and /health: the health check of load balancers, of the SageMaker platform and of clients that wait for a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import msgspec

from gateway.core.exchange import Exchange
from gateway.core.route import Needs, Row
from gateway.dialects.model_choice import ModelChoice
from gateway.workers.states import State
from gateway.workers.supervisor import Supervisor

_JSON = (b"content-type", b"application/json")
_WORDS = {State.READY: "Healthy", State.LOADING: "PENDING", State.FAILED: "FAILED", State.ENDED: "ENDED"}


class _State(msgspec.Struct, omit_defaults=True):
    status: str
    reason: str = ""


@final
class ManagementDialect:
    """Answers health checks in LMI's words: 200 if the server takes requests; 503, with the reasons, while a required model
    does not answer, and from the first moment of a drain."""

    def __init__(self, models: ModelChoice, supervisor: Supervisor, draining: Callable[[], bool]) -> None:
        """`draining` returns True once the server drains."""
        self._models, self._supervisor, self._draining = models, supervisor, draining

    @property
    def draining(self) -> bool:
        """True once the server drains: it takes no new requests."""
        return self._draining()

    @property
    def unready(self) -> list[str]:
        """The reasons why the server is not ready, in words that any client may see; empty if it is ready."""
        absent = [absent.public for absent in self._supervisor.unready]
        return ["draining", *absent] if self.draining else absent

    def rows(self) -> list[Row]:
        """Its two routes, which answer alike."""
        paths = ("/ping", "/health")
        return [Row("GET", path, self.ping, dialect="management", always=True, needs=Needs.NOTHING) for path in paths]

    async def ping(self, exchange: Exchange) -> None:
        """GET /ping and GET /health."""
        unready, draining = self._supervisor.unready, self._draining()
        body = {absent.name: _State(status="Unhealthy", reason=absent.why) for absent in unready}
        for worker in self._models.workers.values():
            reason = "draining" if draining else worker.life.absence
            body[worker.name] = _State(status=_WORDS.get(worker.state, "Unhealthy"), reason=reason)
        exchange.outbound.respond(503 if draining or unready else 200, [_JSON], msgspec.json.encode(body))
