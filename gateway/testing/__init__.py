"""Tools for users' tests and ours: a gateway in memory or on a port, faults, seeds, and checks for leftovers.

May import all parts of a gateway, but neither cli nor operator.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.client.answers import Answer
    from gateway.client.conversations import Client, Conversation, SocketConversation
    from gateway.testing.faults import Injected, Lie, ModelFaults, with_faults
    from gateway.testing.invariants import broken_ledgers, left_over
    from gateway.testing.loopback import ScriptedServer, loopback_gateway, scripted_gateway
    from gateway.testing.memory import MemoryEdges, MemoryGateway, MemorySocket, memory_gateway
    from gateway.testing.network import Link, NetworkProfile, Way
    from gateway.testing.processes import (
        MemoryPlace,
        MemoryProcess,
        MemoryProcesses,
        Moment,
        current_process,
        in_memory_processes,
    )
    from gateway.testing.seeding import seeded

__all__ = [
    "Answer", "Client", "Conversation", "Injected", "Lie", "Link", "MemoryEdges", "MemoryGateway", "MemoryPlace",
    "MemoryProcess", "MemoryProcesses", "MemorySocket", "ModelFaults", "Moment", "NetworkProfile", "ScriptedServer",
    "SocketConversation", "Way", "broken_ledgers", "current_process", "in_memory_processes", "left_over",
    "loopback_gateway", "memory_gateway", "scripted_gateway", "seeded", "with_faults",
]  # fmt: skip


_HOMES = {
    "gateway.client.answers": ("Answer",),
    "gateway.client.conversations": ("Client", "Conversation", "SocketConversation"),
    "gateway.testing.faults": ("Injected", "Lie", "ModelFaults", "with_faults"),
    "gateway.testing.invariants": ("broken_ledgers", "left_over"),
    "gateway.testing.loopback": ("ScriptedServer", "loopback_gateway", "scripted_gateway"),
    "gateway.testing.memory": ("MemoryEdges", "MemoryGateway", "MemorySocket", "memory_gateway"),
    "gateway.testing.network": ("Link", "NetworkProfile", "Way"),
    "gateway.testing.processes": (
        "MemoryPlace", "MemoryProcess", "MemoryProcesses", "Moment", "current_process", "in_memory_processes",
    ),
    "gateway.testing.seeding": ("seeded",),
}  # fmt: skip


def __getattr__(name: str) -> object:
    """Imports a name from its module on first use: `import gateway.testing` alone imports nothing else."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
