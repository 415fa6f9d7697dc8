"""What must be so of a gateway when nobody uses it any more, and of its ledgers at every moment."""

from __future__ import annotations

from collections.abc import Iterator

import trio

from gateway.gateway import Gateway
from gateway.wires.http2 import HTTP2Wire

_OWN = ("Gateway._accept_all", "Gateway._tick", "Gateway._turns")


def left_over(gateway: Gateway) -> list[str]:
    """What a gateway still holds of its clients, each with its number, as in "2 exchanges"; empty when nothing is left."""
    counts = gateway.counts()
    found = {
        "connections": counts.connections + len(gateway._arriving),
        "exchanges": counts.exchanges,
        "slots in use": counts.slots_in_use,
        "bytes of the budget": counts.bytes_reserved,
        "tasks": len(working_tasks(gateway)),
    }
    return [f"{n} {name}" for name, n in found.items() if n]


def working_tasks(gateway: Gateway) -> list[trio.lowlevel.Task]:
    """The tasks of its nursery that do something for a client: neither the gateway's own, nor those that wait for work."""
    if gateway._nursery is None:
        return []
    tasks = [task for task in gateway._nursery.child_tasks if not task.name.endswith(_OWN)]
    idle = {place.task for place in gateway._tasks._idle}
    running = [task for task in tasks if task.name.endswith("Runner._run") and task not in idle]
    if gateway.hub is not None and running and not gateway.counts().exchanges:
        running.pop()  # one leads
    others = [task for task in tasks if not task.name.endswith("Runner._run")]
    return others + running


def broken_ledgers(gateway: Gateway) -> Iterator[str]:
    """What is wrong with the windows of its HTTP/2 connections, and with its byte budget: nothing, at every moment between
    two steps of tasks."""
    for connection in gateway._connections:
        wire = getattr(connection, "wire", None)  # an ASGI server's are its own
        if isinstance(wire, HTTP2Wire):
            for stream, ledger in wire._machine.windows().items():
                if ledger.available != ledger.library or ledger.unread < 0 or ledger.owed < 0:
                    yield f"the window of stream {stream} is {ledger}"
    budget = gateway.budget
    if not 0 <= budget.used <= budget.limit:
        yield f"{budget.used} bytes of a budget of {budget.limit} are in use"
