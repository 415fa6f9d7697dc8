"""The interface by which the operator plane manages a gateway; `Gateway` implements it."""

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
    """The address and the settings of a plane."""

    config: Config
    limits: LimitsConfig
    operator_port: int
    """The port of the plane, set by the plane itself; 0 while it does not listen."""
    metrics_port: int
    """The port of the metrics listener; 0 while it does not listen."""

    def watch_file(self, file: WatchedFile, reload: Callable[[], Awaitable[None]]) -> None: ...
    def each_second(self, look: Callable[[], Awaitable[None]]) -> None:
        """Awaits `look` once a second while the server runs. A second is skipped while the last call is still running."""
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
