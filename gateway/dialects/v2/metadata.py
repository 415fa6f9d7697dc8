"""The Open Inference Protocol, v2: health and metadata of the server and its models."""

from __future__ import annotations

from typing import final

from gateway.core.exchange import Exchange
from gateway.core.route import Needs, Row
from gateway.dialects.answers import JSON
from gateway.dialects.health import ManagementDialect
from gateway.dialects.v2.operations import rows_of
from gateway.dialects.v2.requests import V2Calls
from protocols import v2


@final
class V2Dialect:
    """Describes the server and its models to clients such as tritonclient, KServe's client and perf_analyzer."""

    def __init__(self, calls: V2Calls, management: ManagementDialect, *, name: str, version: str) -> None:
        self._calls, self._management = calls, management
        self._metadata = v2.server_metadata(name, version)

    def rows(self) -> list[Row]:
        """The routes. Those of health answer also during a drain and without memory."""
        return [
            *rows_of({"server_live": self.live, "server_ready": self.ready}, always=True, needs=Needs.NOTHING),
            *rows_of({"model_ready": self.model_ready}, always=True, needs=Needs.MODEL_READY),
            *rows_of(
                {"server_metadata": self.server, "model_metadata": self.model, "model_config": self.config},
                needs=Needs.METADATA,
            ),
        ]

    async def live(self, exchange: Exchange) -> None:
        """GET /v2/health/live: true while the process answers."""
        self._reply(exchange, 200, v2.live_body(True))

    async def ready(self, exchange: Exchange) -> None:
        """GET /v2/health/ready: 503, with the reasons, while a required model does not answer, and from the first moment of
        a drain."""
        unready = self._management.unready
        self._reply(exchange, 503 if unready else 200, v2.ready_body(not unready, unready))

    async def server(self, exchange: Exchange) -> None:
        """GET /v2."""
        self._reply(exchange, 200, self._metadata)

    async def model(self, exchange: Exchange, name: str, version: str = "") -> None:
        """GET /v2/models/{name}[/versions/{version}]."""
        worker = self._calls.worker(exchange, name, version)
        self._reply(exchange, 200, v2.model_metadata(self._calls.codec_of(worker).signature))

    async def config(self, exchange: Exchange, name: str, version: str = "") -> None:
        """GET /v2/models/{name}[/versions/{version}]/config: read by Triton's clients before they measure."""
        worker = self._calls.worker(exchange, name, version)
        self._reply(exchange, 200, v2.model_config(self._calls.codec_of(worker).signature))

    async def model_ready(self, exchange: Exchange, name: str, version: str = "") -> None:
        """GET /v2/models/{name}[/versions/{version}]/ready."""
        worker = self._calls.worker(exchange, name, version)
        ready = worker.ready and not self._management.draining
        self._reply(exchange, 200 if ready else 503, v2.model_ready(worker.name, ready))

    def _reply(self, exchange: Exchange, status: int, body: bytes) -> None:
        exchange.outbound.respond(status, [JSON], body)
