"""The sources of readiness for a run's connections, and the connection that serves a client's transport."""

from __future__ import annotations

from typing import Any

from gateway.core.connection import Connection
from gateway.net.readiness import Poller
from gateway.net.tls_transport import TLSTransport
from gateway.net.transport import MemoryTransport, StreamTransport

DRIVERS = ("leader", "waiting") if Poller.available else ("waiting",)
"""The poller, whose task runs what begins; two tasks that wait for each connection, as for an embedder's streams."""


def serves(connection: Connection, client: MemoryTransport) -> bool:
    """True if the connection is the server's side of this client's transport."""
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
