"""What the operator plane asks of the gateway that it manages: `Gateway` is one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gateway.catalog.load_unload import ModelControl
    from gateway.config import Config, LimitsConfig
    from gateway.config.watched_file import WatchedFile
    from gateway.core.exchange import Exchange
    from gateway.serving.drain import DrainProgress, DrainReport
    from gateway.telemetry.metrics import Metrics
    from gateway.telemetry.observer import Counts, Observer
    from gateway.wires.asgi import Receive, Scope, Send
    from gateway.workers.snapshot import ModelsSnapshot, ModelStatus
    from gateway.workers.supervisor import Supervisor


class PlaneSite(Protocol):
    """Where a plane is, and by what rules."""

    config: Config
    limits: LimitsConfig
    operator_port: int
    """Where the plane listens; the plane says it."""
    metrics_port: int
    """The same, of the metrics alone."""

    def watch_file(self, file: WatchedFile, reload: Callable[[], Awaitable[None]]) -> None: ...
    def each_second(self, look: Callable[[], Awaitable[None]]) -> None:
        """It is awaited once a second while the server runs; a second in which the last one goes on still is left out."""
        ...


class Operated(PlaneSite, Protocol):
    """A gateway as the plane sees it."""

    supervisor: Supervisor
    observer: Observer
    control: ModelControl

    @property
    def draining(self) -> bool: ...
    @property
    def models(self) -> ModelsSnapshot: ...
    @property
    def live(self) -> list[Exchange]: ...
    @property
    def unready(self) -> tuple[str, ...]: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def addresses(self) -> tuple[str, ...]: ...
    @property
    def drain_progress(self) -> DrainProgress | None: ...
    @property
    def drain_report(self) -> DrainReport | None: ...
    def counts(self) -> Counts: ...
    def watched(self, ended: Callable[[Exchange], None]) -> AbstractContextManager[None]: ...
    def begin_drain(self, timeout: float | None = None) -> None: ...
    async def reported(self) -> DrainReport: ...
    async def reload(self, name: str, *, patience: float | None = None) -> ModelStatus: ...
    async def serve_asgi(self, scope: Scope, receive: Receive, send: Send, *, by_operator: bool = False) -> None: ...
