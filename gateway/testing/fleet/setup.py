"""The size of a fleet, and the times of its pods, its balancers and its clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from gateway.config.tree import ListenConfig

AGE = 600
"""`limits.connection_age` of the manifests."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSetup:
    """A fleet in cells of equal size. Seconds are whole: the fleet is looked at once a second."""

    clients: int
    """Each has one connection, and one stream on it after the other."""
    capacity: int
    """Streams that a pod runs at once; one more is refused."""
    cells: int = 10
    pods: int = 100
    """Pods of a cell."""
    surge: int = 10
    """Pods that a rollout replaces at once in a cell."""
    zones: int = 3
    age: int = AGE
    """`limits.connection_age`; 0: connections stay where they are."""
    pre_stop: int = 10
    """From the moment at which a pod is told to leave to the begin of its drain."""
    drain: int = 30
    """`drain.timeout`."""
    start: int = 30
    """From the begin of a pod to its readiness."""
    min_ready: int = 10
    """How long a new pod is ready before the rollout goes on."""
    accepts: int = 200
    """New connections a second that a pod takes: a core that is 60 % busy, and 2 ms for a handshake."""
    backlog: int = ListenConfig().backlog
    noticed: int = 5
    """Until a balancer sends nobody to a pod any more that is gone, or leaves."""
    stream: int = 20
    """How long a stream lasts."""
    slow: float = 0.1
    """Share of the clients that read slowly."""
    slow_stream: int = 180
    """How long a stream lasts whose client reads slowly."""
    keepalive: int = 20
    """Seconds within which a client notices that the other end is gone without a word."""
    connect_timeout: int = 3
    backoff: int = 20
    """The longest that a client waits by itself before it tries again."""
    jitter: float = 1.0
    """How much there is of the product's jitter, in Retry-After and in the age of connections; 0 shows what it is for."""

    @property
    def slots(self) -> int:
        """Pods that a cell may have at once: some that are new, and some that still drain."""
        return self.pods + 2 * self.surge
