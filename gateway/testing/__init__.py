"""A gateway in memory, for users' tests and ours: real machines, real dialects, no socket, a clock that may be mocked."""

from gateway.client.answers import Answer
from gateway.client.conversations import Client, Conversation, SocketConversation
from gateway.testing.faults import Injected, Lie, ModelFaults, with_faults
from gateway.testing.invariants import broken_ledgers, left_over
from gateway.testing.memory import MemoryEdges, MemoryGateway, MemorySocket, memory_gateway
from gateway.testing.network import Link, NetworkProfile, Way
from gateway.testing.seeded import seeded

__all__ = [
    "Answer", "Client", "Conversation", "Injected", "Lie", "Link", "MemoryEdges", "MemoryGateway", "MemorySocket",
    "ModelFaults", "NetworkProfile", "SocketConversation", "Way", "broken_ledgers", "left_over", "memory_gateway", "seeded",
    "with_faults",
]  # fmt: skip
