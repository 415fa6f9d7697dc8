"""A small client over the same machines and transports: connections, the dialects' requests, and answers as they arrive."""

from gateway.client.connection import Machine, Peer, UpgradeRefused, connect, http1, http2, post, websocket

__all__ = ["Machine", "Peer", "UpgradeRefused", "connect", "http1", "http2", "post", "websocket"]
