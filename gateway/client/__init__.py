"""A small client on the gateway's own machines and transports: connections, the dialects' requests, and their answers.

May import net.
"""

from gateway.client.answers import Answer, BrokenOff, CallFailed, Refused
from gateway.client.connection import Machine, Peer, UpgradeRefused, connect, dial, http1, http2, post, websocket
from gateway.client.conversations import Client, Conversation, SocketConversation
from gateway.client.opening import open_client
from gateway.client.questions import Question, generate, grpc_infer, infer, invoke, lmi, openai

__all__ = [
    "Answer",
    "BrokenOff",
    "CallFailed",
    "Client",
    "Conversation",
    "Machine",
    "Peer",
    "Question",
    "Refused",
    "SocketConversation",
    "UpgradeRefused",
    "connect",
    "dial",
    "generate",
    "grpc_infer",
    "http1",
    "http2",
    "infer",
    "invoke",
    "lmi",
    "open_client",
    "openai",
    "post",
    "websocket",
]
