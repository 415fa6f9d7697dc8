"""v2's extensions for managing a server, as gRPC: statistics, the repository and the log, without shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import msgspec

from gateway.catalog.load_unload import ModelControl
from gateway.core.exchange import Exchange
from gateway.core.route import Needs, Row
from gateway.dialects.grpc.calls import Calls, Method, reply_with, rows_of
from gateway.dialects.grpc.infer import SERVICE
from gateway.dialects.grpc.server import fitting
from gateway.dialects.grpc.status import CallRefused
from gateway.dialects.v2.repository import V2ControlDialect, changed_log, log_settings
from gateway.errors import BadRequest
from protocols.grpc import v2_tables as tables
from protocols.grpc.heads import CallHead
from protocols.grpc.status import StatusCode
from protocols.v2.repository import LogChange

_NO_SHARED_MEMORY = "this server has no shared memory with its clients: send tensors in the message"
_NO_REPOSITORIES = "this server has one repository: leave repository_name empty"


@final
class ControlDialect:
    """Answers calls about models and the server rather than tensors."""

    def __init__(self, calls: Calls, control: V2ControlDialect, models: ModelControl) -> None:
        self._calls, self._control, self._models = calls, control, models

    def rows(self) -> list[Row]:
        """Its methods."""
        changing: dict[str, Method] = {
            "RepositoryIndex": self.index,
            "RepositoryModelLoad": self.load,
            "RepositoryModelUnload": self.unload,
            "LogSettings": self.log,
            "TraceSetting": self.trace,
        }
        for kind in ("System", "Cuda"):
            changing |= {
                f"{kind}SharedMemoryStatus": self._constant(f"{kind}SharedMemoryStatus"),
                f"{kind}SharedMemoryRegister": self.register,
                f"{kind}SharedMemoryUnregister": self._constant(f"{kind}SharedMemoryUnregister"),
            }
        return [
            *rows_of(SERVICE, {"ModelStatistics": self.statistics}),
            *rows_of(SERVICE, changing, needs=Needs.CONTROL),
        ]

    async def statistics(self, exchange: Exchange, call: CallHead) -> None:
        """ModelStatistics: of one model; of all models if the call names none."""
        asked, told = tables.MODEL_STATISTICS
        fields = await self._calls.small.read(exchange, call, asked)
        found = self._control.statistics_of(exchange, fields["name"], fields["version"])
        reply_with(exchange, told, fitting(told, msgspec.to_builtins(found)))

    async def index(self, exchange: Exchange, call: CallHead) -> None:
        """RepositoryIndex. There is one repository, without a name."""
        asked, told = tables.REPOSITORY_INDEX
        fields = await self._calls.small.read(exchange, call, asked)
        if fields["repository_name"]:
            raise CallRefused(StatusCode.UNIMPLEMENTED, _NO_REPOSITORIES)
        found = await self._control.indexed(exchange, ready=fields["ready"])
        reply_with(exchange, told, {"models": msgspec.to_builtins(found)})

    async def load(self, exchange: Exchange, call: CallHead) -> None:
        """RepositoryModelLoad: answered once the model takes calls."""
        asked, told = tables.REPOSITORY_MODEL_LOAD
        fields = await self._calls.read(exchange, call, asked)
        name = self._named(exchange, fields)
        if fields["parameters"]:
            raise BadRequest(
                f"parameters of a load: {_listed(fields['parameters'])}: models are loaded as their folders say"
            )
        await self._models.load(name)
        reply_with(exchange, told, {})

    async def unload(self, exchange: Exchange, call: CallHead) -> None:
        """RepositoryModelUnload: answered once nothing of the model is left."""
        asked, told = tables.REPOSITORY_MODEL_UNLOAD
        fields = await self._calls.small.read(exchange, call, asked)
        await self._models.unload(self._named(exchange, fields))
        reply_with(exchange, told, {})

    def _named(self, exchange: Exchange, fields: Mapping[str, Any]) -> str:
        name: str = fields["model_name"]
        self._control.check_allowed(exchange, name)
        if fields["repository_name"]:
            raise CallRefused(StatusCode.UNIMPLEMENTED, _NO_REPOSITORIES)
        return name

    async def log(self, exchange: Exchange, call: CallHead) -> None:
        """LogSettings: the settings of this process's log, after changing those that the call has."""
        asked, told = tables.LOG_SETTINGS
        fields = await self._calls.small.read(exchange, call, asked)
        if fields["settings"]:
            self._control.check_allowed(exchange)
            settings = changed_log(
                _change({name: next(iter(value.values()), None) for name, value in fields["settings"].items()})
            )
        else:
            settings = log_settings()
        kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
        values = {name: {kinds[type(value)]: value} for name, value in msgspec.to_builtins(settings).items()}
        reply_with(exchange, told, {"settings": values})

    async def trace(self, exchange: Exchange, call: CallHead) -> None:
        """TraceSetting: always refused."""
        raise CallRefused(
            StatusCode.UNIMPLEMENTED,
            "this server has no trace settings for its clients: it is traced by OpenTelemetry (tracing)",
        )

    async def register(self, exchange: Exchange, call: CallHead) -> None:
        """SystemSharedMemoryRegister and CudaSharedMemoryRegister: always refused."""
        raise CallRefused(StatusCode.UNIMPLEMENTED, _NO_SHARED_MEMORY)

    def _constant(self, name: str) -> Method:
        """A method that answers with an empty message: no region is ever registered."""
        asked, told = tables.METHODS[f"/{SERVICE}/{name}"]

        async def answer(exchange: Exchange, call: CallHead) -> None:
            await self._calls.small.read(exchange, call, asked)
            reply_with(exchange, told, {})

        return answer


def _change(values: Mapping[str, Any]) -> LogChange:
    try:
        return msgspec.convert(values, LogChange)
    except msgspec.ValidationError as e:
        raise BadRequest(f"log settings: {e}") from None


def _listed(parameters: Mapping[str, Any]) -> str:
    return ", ".join(sorted(parameters))[:200]
