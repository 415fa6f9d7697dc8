"""/ping: what a load balancer or the SageMaker platform asks."""

from __future__ import annotations

from typing import final

import msgspec

from gateway.core.exchange import Exchange
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
    """Health in LMI's words: 200 when requests are taken; 503, with the reasons, while a model that is required does not
    answer, and from the first moment of a drain."""

    def __init__(self, models: ModelChoice, supervisor: Supervisor) -> None:
        self._models, self._supervisor = models, supervisor
        self.draining = False

    @property
    def unready(self) -> list[str]:
        """Why the server is not ready, in words for anybody; empty where it is."""
        absent = [absent.public for absent in self._supervisor.unready]
        return ["draining", *absent] if self.draining else absent

    async def ping(self, exchange: Exchange) -> None:
        """GET /ping."""
        exchange.dialect = "management"
        unready = self._supervisor.unready
        body = {absent.name: _State(status="Unhealthy", reason=absent.why) for absent in unready}
        for worker in self._models.workers.values():
            reason = "draining" if self.draining else worker.life.absence
            body[worker.name] = _State(status=_WORDS.get(worker.state, "Unhealthy"), reason=reason)
        exchange.outbound.respond(503 if self.draining or unready else 200, [_JSON], msgspec.json.encode(body))
