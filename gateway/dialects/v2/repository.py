"""v2's extensions for managing a server: statistics, the repository and the log, without shared memory."""

from __future__ import annotations

import logging
from typing import TypeVar, final

import msgspec

from gateway.catalog.load_unload import ModelControl
from gateway.catalog.repository import Repository
from gateway.core.exchange import Exchange
from gateway.core.route import Needs, Row
from gateway.core.whole_body import receive_body
from gateway.dialects.answers import JSON
from gateway.dialects.v2.operations import rows_of
from gateway.dialects.v2.requests import V2Calls
from gateway.errors import BadRequest, NotFound
from gateway.workers.statistics import Batches, ModelStatistics, Responses
from gateway.workers.worker import Worker
from protocols.v2 import repository as bodies
from protocols.v2.tensors import V2Error

_LARGEST = 64 * 1024
_FORMAT = "ISO8601"  # in Triton's words: both of ours begin with the time in that form
_gateway_log = logging.getLogger("gateway")

Wanted = TypeVar("Wanted", bodies.ModelIndexRequest, bodies.LoadRequest, bodies.UnloadRequest, bodies.LogChange)


@final
class V2ControlDialect:
    """Answers tritonclient's calls about models and the server rather than tensors."""

    def __init__(self, calls: V2Calls, control: ModelControl, repository: Repository) -> None:
        self._calls, self._control, self._repository = calls, control, repository
        self._allowed = calls.models.config.v2.model_control

    def rows(self) -> list[Row]:
        """Its routes."""
        rows = [
            *rows_of({"models": self.models}, needs=Needs.METADATA),
            *rows_of({"all_statistics": self.all_statistics, "statistics": self.statistics}),
            *rows_of(
                {
                    "index": self.index,
                    "load": self.load,
                    "unload": self.unload,
                    "log_settings": self.log_settings,
                    "change_log": self.change_log,
                },
                needs=Needs.CONTROL,
            ),
        ]
        for kind in ("system", "cuda"):
            rows += rows_of(
                {
                    f"{kind}_shared_memory": self.regions,
                    f"register_{kind}_shared_memory": self.register,
                    f"unregister_{kind}_shared_memory": self.unregister,
                },
                needs=Needs.CONTROL,
            )
        return rows

    # -- statistics --------------------------------------------------------------------------------------------------

    async def all_statistics(self, exchange: Exchange) -> None:
        """GET /v2/models/stats."""
        _reply(exchange, self.statistics_of(exchange))

    async def statistics(self, exchange: Exchange, name: str, version: str = "") -> None:
        """GET /v2/models/{name}[/versions/{version}]/stats."""
        _reply(exchange, self.statistics_of(exchange, name, version))

    def statistics_of(self, exchange: Exchange, name: str = "", version: str = "") -> bodies.StatisticsReply:
        """The statistics of one model, or of all that the exchange's key reaches, by name. NotFound for an unknown model."""
        if name:
            workers = [self._calls.worker(exchange, name, version)]
        else:
            workers = [worker for _, worker in sorted(self._calls.models.seen_by(exchange.permit).items())]
        return bodies.StatisticsReply(
            model_stats=tuple([_statistics_of(worker, self._memory_of(worker)) for worker in workers])
        )

    def _memory_of(self, worker: Worker) -> int:
        try:
            return self._repository.get(worker.name).memory
        except NotFound:  # one of the configuration
            return worker.spec.memory

    # -- models ------------------------------------------------------------------------------------------------------

    async def models(self, exchange: Exchange) -> None:
        """GET /v2/models, KServe's list."""
        _reply(exchange, bodies.ModelList(models=tuple(sorted(self._calls.models.seen_by(exchange.permit)))))

    async def index(self, exchange: Exchange, repository: str = "") -> None:
        """POST /v2/repository[/{repository}]/index. There is one repository, which any name stands for."""
        wanted = await self._body(exchange, bodies.ModelIndexRequest, "index request")
        _reply(exchange, await self.indexed(exchange, ready=wanted.ready))

    async def indexed(self, exchange: Exchange, *, ready: bool) -> list[bodies.ModelIndexEntry]:
        """The models that the exchange's key reaches, also those not loaded; with `ready` only those that take calls."""
        found = [entry for entry in await self._control.index(ready=ready) if exchange.may_ask(entry.name)]
        return [
            bodies.ModelIndexEntry(name=e.name, version=e.version, state=e.standing.value, reason=e.reason) for e in found
        ]

    async def load(self, exchange: Exchange, name: str, repository: str = "") -> None:
        """POST /v2/repository[/{repository}]/models/{name}/load: answered once the model takes calls."""
        self.check_allowed(exchange, name)
        await self._body(exchange, bodies.LoadRequest, "load request")
        await self._control.load(name)
        _reply(exchange, bodies.LoadReply(name=name))

    async def unload(self, exchange: Exchange, name: str, repository: str = "") -> None:
        """POST /v2/repository[/{repository}]/models/{name}/unload: answered once nothing of the model is left."""
        self.check_allowed(exchange, name)
        await self._body(exchange, bodies.UnloadRequest, "unload request")
        await self._control.unload(name)
        _reply(exchange, bodies.UnloadReply(name=name))

    def check_allowed(self, exchange: Exchange, name: str = "") -> None:
        """Raises BadRequest if clients may not load and unload models or, without a name, change the log."""
        exchange.model = name
        if not self._allowed:
            what = "loads and unloads no models for its clients" if name else "does not change its log for its clients"
            raise BadRequest(f"this server {what} (v2.model_control)", status=403)

    # -- the log -----------------------------------------------------------------------------------------------------

    async def log_settings(self, exchange: Exchange) -> None:
        """GET /v2/logging."""
        _reply(exchange, log_settings())

    async def change_log(self, exchange: Exchange) -> None:
        """POST /v2/logging: the level of this process's log."""
        self.check_allowed(exchange)
        _reply(exchange, changed_log(await self._body(exchange, bodies.LogChange, "log settings")))

    # -- shared memory -----------------------------------------------------------------------------------------------

    async def regions(self, exchange: Exchange, region: str = "") -> None:
        """GET /v2/{system,cuda}sharedmemory[/region/{region}]/status: none is registered."""
        no_regions: list[bodies.SharedMemoryRegion] = []
        _reply(exchange, no_regions)

    async def register(self, exchange: Exchange, region: str) -> None:
        """POST /v2/{system,cuda}sharedmemory/region/{region}/register."""
        raise BadRequest("this server has no shared memory with its clients: send tensors in the body")

    async def unregister(self, exchange: Exchange, region: str = "") -> None:
        """POST /v2/{system,cuda}sharedmemory[/region/{region}]/unregister: always succeeds, as no region is ever
        registered."""
        _reply(exchange, bodies.Done())

    async def _body(self, exchange: Exchange, kind: type[Wanted], what: str) -> Wanted:
        body = await receive_body(exchange, _LARGEST, setting="64 KiB, fixed")
        try:
            return bodies.decode(body, kind, what)
        except V2Error as e:
            raise BadRequest(e.message, status=e.status) from None


def _reply(
    exchange: Exchange, body: msgspec.Struct | list[bodies.ModelIndexEntry] | list[bodies.SharedMemoryRegion]
) -> None:
    exchange.outbound.respond(200, [JSON], msgspec.json.encode(body))


# -- the log, whose one level stands for Triton's four settings

_SEVERITIES = (
    ("log_verbose_level", logging.DEBUG),
    ("log_info", logging.INFO),
    ("log_warning", logging.WARNING),
    ("log_error", logging.ERROR),
)
_LESS = logging.CRITICAL  # the level at which none of them is logged


def changed_log(change: bodies.LogChange) -> bodies.LogSettings:
    """Changes the level of this process's log; the settings as they are then. BadRequest."""
    for name, now in (("log_file", ""), ("log_format", _FORMAT)):
        if getattr(change, name) not in (None, now):
            raise BadRequest(f"log settings: {name} is {now!r}, and cannot be changed while the server runs")
    _gateway_log.setLevel(_changed(change, _gateway_log.getEffectiveLevel()))
    return log_settings()


def log_settings() -> bodies.LogSettings:
    """The settings as they are."""
    level = _gateway_log.getEffectiveLevel()
    return bodies.LogSettings(
        log_file="",
        log_info=level <= logging.INFO,
        log_warning=level <= logging.WARNING,
        log_error=level <= logging.ERROR,
        log_verbose_level=int(level <= logging.DEBUG),
        log_format=_FORMAT,
    )


def _changed(change: bodies.LogChange, level: int) -> int:
    """The level after a change. BadRequest for one that would log something and not what is more severe."""
    above = dict(zip([level for _, level in _SEVERITIES], [*[level for _, level in _SEVERITIES[1:]], _LESS], strict=True))
    on = [(said, name) for name, said in _SEVERITIES if getattr(change, name)]
    off = [(above[said], name) for name, said in _SEVERITIES if getattr(change, name) in (False, 0)]
    if on and off and min(on)[0] < max(off)[0]:
        raise BadRequest(
            f"log settings: {min(on)[1]} is on and {max(off)[1]} is off, but what is logged includes all that is more severe"
        )
    if on:
        level = min(level, min(on)[0])
    return max(level, max(off)[0]) if off else level


# -- statistics, in Triton's form


def _statistics_of(worker: Worker, memory: int) -> bodies.ModelStatistics:
    s, none = worker.statistics, bodies.Duration(0, 0)
    return bodies.ModelStatistics(
        name=worker.name,
        version=worker.spec.version,
        last_inference=s.last_ms,
        inference_count=s.inferences,
        execution_count=s.executions,
        inference_stats=bodies.InferenceStatistics(
            success=bodies.Duration(s.succeeded, s.success_ns),
            fail=bodies.Duration(s.failed, s.failed_ns),
            queue=bodies.Duration(s.succeeded, s.queue),
            compute_input=bodies.Duration(s.succeeded, s.input),
            compute_infer=bodies.Duration(s.succeeded, s.infer),
            compute_output=bodies.Duration(s.succeeded, s.output),
            cache_hit=none,
            cache_miss=none,
            cancel=bodies.Duration(s.cancelled, s.cancelled_ns),
        ),
        response_stats={str(place): _responses(responses) for place, responses in sorted(s.responses.items())},
        batch_stats=_batches(s),
        memory_usage=(bodies.MemoryUsage(type="CPU", id=0, byte_size=memory),) if memory else (),
        transfer=bodies.Transfer(received_bytes=s.received, copied_bytes=s.copied),
    )


def _batches(statistics: ModelStatistics) -> tuple[bodies.BatchStatistics, ...]:
    def told(size: int, b: Batches) -> bodies.BatchStatistics:
        return bodies.BatchStatistics(
            batch_size=size,
            compute_input=bodies.Duration(b.count, b.input),
            compute_infer=bodies.Duration(b.count, b.infer),
            compute_output=bodies.Duration(b.count, b.output),
        )

    return tuple([told(size, batches) for size, batches in statistics.by_size.items()])


def _responses(r: Responses) -> bodies.ResponseStatistics:
    return bodies.ResponseStatistics(
        compute_infer=bodies.Duration(r.succeeded, r.infer),
        compute_output=bodies.Duration(r.succeeded, r.output),
        success=bodies.Duration(r.succeeded, r.infer + r.output),
        fail=bodies.Duration(r.failed, r.failed_ns),
        empty_response=bodies.Duration(0, 0),
        cancel=bodies.Duration(r.cancelled, r.cancelled_ns),
    )
