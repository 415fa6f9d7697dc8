"""An error as gRPC says it: its status code, alone or after what was said before."""

from __future__ import annotations

from typing import final

from gateway.core.exchange import Exchange
from gateway.errors import (
    Conflict,
    DeadlineExceeded,
    Drained,
    Ending,
    GatewayError,
    MethodNotAllowed,
    ModelFailed,
    NoSuchPath,
    OthersWait,
    Overloaded,
    SlowReader,
    SlowUpload,
    Unavailable,
    UnsupportedEncoding,
    UpgradeRequired,
    WorkerLost,
)
from protocols.grpc.heads import answer_head, trailers, trailers_only
from protocols.grpc.protobuf import ProtobufError
from protocols.grpc.status import GRPCError, StatusCode

_OF_STATUS = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    409: StatusCode.FAILED_PRECONDITION,
    413: StatusCode.RESOURCE_EXHAUSTED,
    429: StatusCode.RESOURCE_EXHAUSTED,
    507: StatusCode.RESOURCE_EXHAUSTED,
}
_HEAD = answer_head()
_FAILED = 424  # what a ModelError says that names no status of its own


@final
class CallRefused(GatewayError):
    """A call with an error that has a code of its own in gRPC."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.grpc_code = code

    @classmethod
    def of(cls, error: GRPCError | ProtobufError) -> CallRefused:
        """What a machine of gRPC's found wrong."""
        if isinstance(error, GRPCError):
            return cls(error.code, error.message)
        return cls(StatusCode.INTERNAL, f"the message cannot be read: {error}")


def code_of(error: GatewayError) -> StatusCode:
    """The code of an error: that of Triton's, or else of statuscodes.md."""
    match error:
        case CallRefused():
            return error.grpc_code
        case DeadlineExceeded() | SlowUpload():
            return StatusCode.DEADLINE_EXCEEDED
        case WorkerLost():
            return StatusCode.INTERNAL  # clients retry UNAVAILABLE by themselves, and this call may have been the reason
        case Overloaded() | OthersWait() | Unavailable() | Drained() | SlowReader():
            return StatusCode.UNAVAILABLE
        case NoSuchPath() | MethodNotAllowed() | UnsupportedEncoding() | UpgradeRequired():
            return StatusCode.UNIMPLEMENTED
        case ModelFailed() if error.status == _FAILED:
            return StatusCode.INTERNAL
        case Conflict():
            return StatusCode.FAILED_PRECONDITION
    if error.status == 503:
        return StatusCode.UNAVAILABLE
    return _OF_STATUS.get(error.status) or (
        StatusCode.INVALID_ARGUMENT if error.status < 500 and error.ending is not Ending.DEADLINE else StatusCode.INTERNAL
    )


def refuse(exchange: Exchange, error: GatewayError) -> None:
    """Says an error that comes before any message: one head, which clients may retry by (gRFC A6). A wire that may drop
    trailers has it in its head, where people see it."""
    code = exchange.own_status = code_of(error)
    if exchange.wire.name == "http/2":
        exchange.outbound.respond(200, _HEAD, ending=error.ending, trailers=trailers(code, error.message))
    else:
        exchange.outbound.respond(200, trailers_only(code, error.message), ending=error.ending)


def fail(exchange: Exchange, error: GatewayError) -> None:
    """Says an error, whatever was said before."""
    if exchange.outbound.status:
        exchange.own_status = code_of(error)
        exchange.outbound.finish(error.ending, trailers=trailers(code_of(error), error.message))
    else:
        refuse(exchange, error)
