"""The two ways a protocol can be broken: by us (Local) or by the peer (Remote)."""

from __future__ import annotations

from typing import final


class ProtocolError(Exception):
    """Base of every error that a protocol machine raises."""


@final
class LocalProtocolError(ProtocolError):
    """The caller asked a machine for something its state forbids. Nothing was queued; the fault is in our code."""


@final
class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol.

    `status` is the HTTP status to answer with where a head can still be sent, `wire_code` the wire's own code
    (an HTTP/2 error code, a WebSocket close code) where the wire has one. After it a machine only gives out what
    `data_to_send` still holds; it reads nothing more.
    """

    def __init__(self, message: str, *, status: int = 400, wire_code: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.wire_code = wire_code

    def again(self) -> RemoteProtocolError:
        """A new error like this one, to be raised. A machine that fails for good keeps one and raises copies: the traceback
        of a raised error would keep the frames it came through alive, and by them the machine and its input."""
        return RemoteProtocolError(str(self), status=self.status, wire_code=self.wire_code)
