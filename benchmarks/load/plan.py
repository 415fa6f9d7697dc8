"""The input and output of the load client: a plan and a result."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import final


class Kind(enum.Enum):
    """The kinds of load on a connection."""

    UNARY = enum.auto()
    """HTTP/1.1: a request, its answer with a content-length, and again."""
    STREAMS = enum.auto()
    """HTTP/2: on each stream a request and its answer, again and again; with or without gRPC's trailers."""
    TOKENS = enum.auto()
    """HTTP/1.1: a request, tokens in chunks, and again."""
    FRAMES = enum.auto()
    """WebSocket: frames and their echoes."""
    DUPLEX = enum.auto()
    """HTTP/2: streams that carry messages and their echoes."""


class Measure(enum.Enum):
    """The kinds of figure."""

    CPU = enum.auto()
    """CPU time of the server while the load runs, and the units in that time."""
    HELD = enum.auto()
    """Resident memory that the connections cost once each has had one answer and is silent."""
    STALLED = enum.auto()
    """Resident memory that one connection costs which asks and never reads."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run of the load client against one server on the loopback interface."""

    kind: Kind
    measure: Measure = Measure.CPU
    port: int
    server: int
    """The server's process id: its cost, with that of the processes it has started, is read at the edges of the measured
    time."""
    alone: bool = False
    """True if what the processes cost that the server has started is left out."""
    connections: int = 1
    streams: int = 1
    """HTTP/2 streams on each connection."""
    in_flight: int = 1
    """Messages under way on each stream or WebSocket; a request is always alone on its connection."""
    message: bytes
    """The whole request, the frame, or the message that a DATA frame carries."""
    head: tuple[tuple[bytes, bytes], ...] = ()
    """HTTP/2: the fields of each request; its body is `message`."""
    answer: int = 0
    """Bytes of one echo; requests say it in their head. 0 for a DUPLEX: messages of gRPC, as long as the first one says."""
    seconds: float
    warm_up: float = 0.2
    """Seconds before the measured time, with the same load."""
    ca: str = ""
    """The file of the CA that signed the server's certificate; empty means no TLS."""
    core: int | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one run."""

    units: float
    seconds: float
    server_cpu: float
    """Seconds of CPU."""
    load_cpu: float
    """Seconds of CPU of the load client itself."""
    memory: int = 0
    """Growth of the server's resident bytes."""

    @property
    def load_share(self) -> float:
        """The share of one core that the load client used. Near 1, the client set the pace, not the server."""
        return self.load_cpu / self.seconds
