"""The size of a simulated fleet, and the times of its pods, balancers and clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from gateway.config.tree import ListenConfig

AGE = 600
"""`limits.connection_age` of the manifests."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSetup:
    """A fleet of equal cells. Times are whole seconds, because the simulation advances by one second."""

    clients: int
    """Number of clients. Each has one connection, and one stream after the other on it."""
    capacity: int
    """Streams that a pod runs at once. It refuses more."""
    cells: int = 10
    pods: int = 100
    """Pods per cell."""
    surge: int = 10
    """Pods per cell that a rollout replaces at once."""
    zones: int = 3
    age: int = AGE
    """`limits.connection_age`. 0: connections never age."""
    pre_stop: int = 10
    """Seconds between the decision to remove a pod and the begin of its drain."""
    drain: int = 30
    """`drain.timeout`."""
    start: int = 30
    """Seconds until a new pod is ready."""
    min_ready: int = 10
    """Seconds for which new pods are ready before a rollout continues."""
    accepts: int = 200
    """New connections per second that a pod accepts: 2 ms of CPU each, on a core that is 60 % busy."""
    backlog: int = ListenConfig().backlog
    noticed: int = 5
    """Seconds until balancers stop sending clients to a pod that is lost or leaves."""
    stream: int = 20
    """Duration of a stream."""
    slow: float = 0.1
    """Share of clients that read slowly."""
    slow_stream: int = 180
    """Duration of a stream of a client that reads slowly."""
    keepalive: int = 20
    """Longest time until a client notices that its pod was lost."""
    connect_timeout: int = 3
    backoff: int = 20
    """Longest wait of a client between two attempts to connect."""
    jitter: float = 1.0
    """Share of the product's jitter that is applied, in Retry-After and in the age of connections. 0 shows its purpose."""

    @property
    def slots(self) -> int:
        """Most pods of a cell at once, including new ones and ones that drain."""
        return self.pods + 2 * self.surge
