"""The HTTP/2 machine, in either role."""

from protocols.http2.connection import HTTP2Connection
from protocols.http2.limits import HTTP2Limits

__all__ = [
    "HTTP2Connection", "HTTP2Limits",
]  # fmt: skip
