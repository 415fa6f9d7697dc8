"""Errors in gRPC's form: a status code, alone or after the messages that were sent before."""

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
    ModelStalled,
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
_FAILED = 424  # the default status of a ModelError


@final
class CallRefused(GatewayError):
    """An error of a call that has its own gRPC status code."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.grpc_code = code

    @classmethod
    def of(cls, error: GRPCError | ProtobufError) -> CallRefused:
        """The refusal for an error that `protocols.grpc` raised."""
        if isinstance(error, GRPCError):
            return cls(error.code, error.message)
        code = StatusCode.RESOURCE_EXHAUSTED if error.over_limit else StatusCode.INTERNAL
        return cls(code, f"the message cannot be read: {error}")


def code_of(error: GatewayError) -> StatusCode:
    """The code of an error: Triton's if it has one, otherwise that of gRPC's statuscodes.md."""
    match error:
        case CallRefused():
            return error.grpc_code
        case DeadlineExceeded() | ModelStalled() | SlowUpload():
            return StatusCode.DEADLINE_EXCEEDED
        case WorkerLost():
            return StatusCode.INTERNAL  # clients retry UNAVAILABLE, and this call may be why the worker died
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
    """Answers an error before any message: one head, after which clients may retry (gRFC A6). Over HTTP/1.1, where trailers
    may be lost, the status is in the head, where people see it too."""
    code = exchange.own_status = code_of(error)
    if exchange.wire.name == "http/2":
        exchange.outbound.respond(200, _HEAD, ending=error.ending, trailers=trailers(code, error.message))
    else:
        exchange.outbound.respond(200, trailers_only(code, error.message), ending=error.ending)


def fail(exchange: Exchange, error: GatewayError) -> None:
    """Answers an error, before or after the head."""
    if exchange.outbound.status:
        exchange.own_status = code_of(error)
        exchange.outbound.finish(error.ending, trailers=trailers(code_of(error), error.message))
    else:
        refuse(exchange, error)
