"""Which ways a run's bytes take: who tells connections what is ready, and whether machines go through the libraries."""

from __future__ import annotations

from typing import Any

from gateway.core.connection import Connection
from gateway.net.readiness import Poller
from gateway.net.tls_transport import TLSTransport
from gateway.net.transport import MemoryTransport, StreamTransport
from protocols.http2 import connection as http2
from protocols.websocket import control

DRIVERS = ("leader", "waiting")
"""The hub, whose task runs what begins; two tasks that wait for each connection."""
LANES = ("payload", "library")
"""The payload lanes of HTTP/2 and WebSocket; everything through h2 and wsproto."""

driver = DRIVERS[0] if Poller.available else DRIVERS[1]
"""Of the promises' gateways."""
lane = LANES[0]
"""Of all machines, the clients' included."""


def take(driver_name: str, lane_name: str) -> None:
    """From now on, in this process."""
    global driver, lane
    driver, lane = driver_name, lane_name
    if lane == "library":
        http2._LANE = None
        control.CONTROL.clear()


def serves(connection: Connection, client: MemoryTransport) -> bool:
    """Whether it is the server's side of this client's transport."""
    return _memory(connection.transport) is client._other


def _memory(transport: Any) -> object:
    match transport:
        case TLSTransport():
            return _memory(transport._below)
        case StreamTransport():
            return _memory(transport._stream)
        case MemoryTransport():
            return transport
        case _:
            return transport.below
