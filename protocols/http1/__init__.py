"""The HTTP/1.1 machine, in either role."""

from protocols.http1.connection import HTTP1Connection
from protocols.http1.limits import HTTP1Limits

__all__ = [
    "HTTP1Connection", "HTTP1Limits",
]  # fmt: skip
