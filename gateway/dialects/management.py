"""/ping: what a load balancer or the SageMaker platform asks."""

from __future__ import annotations

from typing import final

import msgspec

from gateway.dialects.base import Models
from gateway.exchange import Exchange
from gateway.workers.worker import State

_JSON = (b"content-type", b"application/json")
_WORDS = {State.READY: "Healthy", State.LOADING: "PENDING", State.FAILED: "FAILED", State.ENDED: "ENDED"}


@final
class ManagementDialect:
    """Health in LMI's words: 200 when requests are taken, 503 while models load and from the first moment of a drain."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self.draining = False

    @property
    def ready(self) -> bool:
        """A model that was given up does not make the server unready: the others live."""
        return not self.draining and not any(w.state is State.LOADING for w in self._models.workers.values())

    async def ping(self, exchange: Exchange) -> None:
        """GET /ping."""
        exchange.dialect = "management"
        body = {w.name: {"status": _WORDS.get(w.state, "Unhealthy")} for w in self._models.workers.values()}
        exchange.respond(200 if self.ready else 503, [_JSON], msgspec.json.encode(body))
