"""The errors of the protocol machines: we broke the protocol (Local), or the peer did (Remote)."""

from __future__ import annotations

from typing import final


class ProtocolError(Exception):
    """Base of every error that a protocol machine raises."""


@final
class LocalProtocolError(ProtocolError):
    """The caller asked a machine for something its state forbids. Nothing was queued. The fault is in the caller's code."""


@final
class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol.

    `status` is the HTTP status to answer with if a head can still be sent. `wire_code` is the wire's own code (an HTTP/2
    error code, a WebSocket close code) if it has one. After this error a machine reads nothing more, and only gives out
    what `data_to_send` still holds.
    """

    head: bytes = b""
    """HTTP/1.1: what had come of a request head that is refused. Copies of the error do not have it."""

    def __init__(self, message: str, *, status: int = 400, wire_code: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.wire_code = wire_code

    def again(self) -> RemoteProtocolError:
        """A new error like this one, to be raised. A failed machine keeps one error and raises copies: the traceback of a
        raised error keeps its frames alive, and through them the machine and its input."""
        return RemoteProtocolError(str(self), status=self.status, wire_code=self.wire_code)
