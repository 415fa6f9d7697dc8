"""The gRPC methods that clients call before they infer: health, metadata and configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import msgspec

from gateway.core.exchange import Exchange
from gateway.core.route import Needs, Row
from gateway.dialects.grpc.calls import Calls, reply_with, rows_of
from gateway.dialects.grpc.infer import SERVICE
from gateway.dialects.health import ManagementDialect
from gateway.dialects.v2.requests import V2Calls
from gateway.errors import NotFound
from protocols import v2
from protocols.grpc import v2_tables as tables
from protocols.grpc.heads import CallHead
from protocols.grpc.protobuf import MessageType


@final
class ServerDialect:
    """Describes the server and its models to tritonclient, KServe's client and perf_analyzer."""

    def __init__(self, calls: Calls, tensors: V2Calls, management: ManagementDialect, *, name: str, version: str) -> None:
        self._calls, self._tensors, self._management = calls, tensors, management
        self._metadata = msgspec.json.decode(v2.server_metadata(name, version))

    def rows(self) -> list[Row]:
        """The methods. Those of health answer also during a drain and without memory."""
        return [
            *rows_of(SERVICE, {"ServerLive": self.live, "ServerReady": self.ready}, always=True, needs=Needs.NOTHING),
            *rows_of(SERVICE, {"ModelReady": self.model_ready}, always=True, needs=Needs.MODEL_READY),
            *rows_of(
                SERVICE,
                {"ServerMetadata": self.server, "ModelMetadata": self.model, "ModelConfig": self.config},
                needs=Needs.METADATA,
            ),
        ]

    async def live(self, exchange: Exchange, call: CallHead) -> None:
        """ServerLive: true while the process answers."""
        asked, told = tables.SERVER_LIVE
        await self._calls.small.read(exchange, call, asked)
        reply_with(exchange, told, {"live": True})

    async def ready(self, exchange: Exchange, call: CallHead) -> None:
        """ServerReady: false while a required model does not answer, and from the first moment of a drain."""
        asked, told = tables.SERVER_READY
        await self._calls.small.read(exchange, call, asked)
        reply_with(exchange, told, {"ready": not self._management.unready})

    async def model_ready(self, exchange: Exchange, call: CallHead) -> None:
        """ModelReady: false also for an unknown model."""
        asked, told = tables.MODEL_READY
        fields = await self._calls.small.read(exchange, call, asked)
        try:
            worker = self._tensors.worker(exchange, fields["name"], fields["version"])
            ready = worker.ready and not self._management.draining
        except NotFound:
            ready = False
        reply_with(exchange, told, {"ready": ready})

    async def server(self, exchange: Exchange, call: CallHead) -> None:
        """ServerMetadata."""
        asked, told = tables.SERVER_METADATA
        await self._calls.small.read(exchange, call, asked)
        reply_with(exchange, told, fitting(told, self._metadata))

    async def model(self, exchange: Exchange, call: CallHead) -> None:
        """ModelMetadata."""
        asked, told = tables.MODEL_METADATA
        fields = await self._calls.small.read(exchange, call, asked)
        worker = self._tensors.worker(exchange, fields["name"], fields["version"])
        metadata = v2.model_metadata(self._tensors.codec_of(worker).signature)
        reply_with(exchange, told, fitting(told, msgspec.json.decode(metadata)))

    async def config(self, exchange: Exchange, call: CallHead) -> None:
        """ModelConfig: read by Triton's clients before they measure."""
        asked, told = tables.MODEL_CONFIG
        fields = await self._calls.small.read(exchange, call, asked)
        worker = self._tensors.worker(exchange, fields["name"], fields["version"])
        config = msgspec.json.decode(v2.model_config(self._tensors.codec_of(worker).signature))
        reply_with(exchange, told, fitting(told, {"config": config}))


def fitting(kind: MessageType, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message of that kind from an object in JSON. Members that the kind lacks are left out, and names of
    datatypes become numbers."""
    found: dict[str, Any] = {}
    for field in kind.fields.values():
        value = values.get(field.name)
        if value is None:
            continue
        of = field.type
        if isinstance(of, MessageType):
            if field.key:
                value = {key: fitting(of, one) for key, one in value.items()}
            else:
                value = [fitting(of, one) for one in value] if field.repeated else fitting(of, value)
        elif of == "enum":
            value = tables.DATA_TYPES.get(value, 0)
        found[field.name] = value
    return found
