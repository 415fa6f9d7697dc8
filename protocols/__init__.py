"""Sans-IO protocol machines: bytes in, events out, and no clock, socket or thread of their own.

The names here keep their place. The API reference lists the other modules whose names do.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protocols.errors import LocalProtocolError, RemoteProtocolError
    from protocols.http1 import HTTP1Connection, HTTP1Limits
    from protocols.http2 import HTTP2Connection, HTTP2Limits
    from protocols.roles import Role
    from protocols.websocket import WebSocketConnection, WebSocketLimits

__all__ = [
    "HTTP1Connection", "HTTP1Limits", "HTTP2Connection", "HTTP2Limits", "LocalProtocolError", "RemoteProtocolError",
    "Role", "WebSocketConnection", "WebSocketLimits",
]  # fmt: skip


_HOMES = {
    "protocols.errors": ("LocalProtocolError", "RemoteProtocolError"),
    "protocols.http1": ("HTTP1Connection", "HTTP1Limits"),
    "protocols.http2": ("HTTP2Connection", "HTTP2Limits"),
    "protocols.roles": ("Role",),
    "protocols.websocket": ("WebSocketConnection", "WebSocketLimits"),
}  # fmt: skip


def __getattr__(name: str) -> object:
    """Imports a name from its module when it is first used: `import protocols` alone imports nothing else."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
