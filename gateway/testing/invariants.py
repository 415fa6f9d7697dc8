"""Checks that a gateway without clients holds nothing, and that its ledgers are correct at every moment."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.gateway import Gateway
from gateway.wires.http2 import HTTP2Wire


def left_over(gateway: Gateway) -> list[str]:
    """Returns the objects of clients that a gateway still holds, such as "2 exchanges"; empty if nothing is left."""
    counts = gateway.counts()
    found = {
        "connections": counts.connections + len(gateway.acceptor.arriving),
        "exchanges": counts.exchanges,
        "slots in use": counts.slots_in_use,
        "bytes of the budget": counts.bytes_reserved,
        "tasks": len(gateway.acceptor.working),
    }
    return [f"{n} {name}" for name, n in found.items() if n]


def broken_ledgers(gateway: Gateway) -> Iterator[str]:
    """Yields the errors in the windows of HTTP/2 connections, the slots of models and the byte budget of a gateway. There
    are none at any moment at which a task can call this."""
    for connection in gateway.server.connections:
        wire = getattr(connection, "wire", None)  # connections of an ASGI server have none
        if isinstance(wire, HTTP2Wire):
            for stream, ledger in wire._machine.windows().items():
                if ledger.available != ledger.library or ledger.unread < 0 or ledger.owed < 0:
                    yield f"the window of stream {stream} is {ledger}"
    for name, worker in gateway.supervisor.workers.items():
        if not worker.slots.balanced:
            yield f"of {worker.slots.in_use} slots of {name} parties have {worker.slots.queue.used}"
    budget = gateway.budget
    if not 0 <= budget.used <= budget.limit:
        yield f"{budget.used} bytes of a budget of {budget.limit} are in use"
