"""The party that an error is blamed on, as SageMaker's operations report it to their callers."""

from __future__ import annotations

import enum

from gateway.errors import (
    BadModel,
    BadRequest,
    DeadlineExceeded,
    Drained,
    Forbidden,
    GatewayError,
    InsufficientStorage,
    LoadFailed,
    MethodNotAllowed,
    ModelCrashed,
    ModelFailed,
    ModelNotReady,
    ModelOutOfMemory,
    ModelStalled,
    NoSuchPath,
    NotFound,
    NotPermitted,
    OthersWait,
    Overloaded,
    SlowReader,
    SlowUpload,
    TooLarge,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
    UnsupportedEncoding,
    UnsupportedType,
    WorkerLost,
    WrongHost,
)


class ErrorOrigin(enum.Enum):
    """The origins of errors. Each operation has its own names for them."""

    CALLER = enum.auto()
    """The request is invalid, too large or too slow, or names something that does not exist."""
    SIGNATURE = enum.auto()
    """The caller is unknown, did not prove its identity, or lacks permission or rate; or the host or content type is not
    allowed."""
    MODEL = enum.auto()
    """The model raised, did not finish in time, or cannot be loaded."""
    LOADING = enum.auto()
    """The model is still loading."""
    BUSY = enum.auto()
    """The gateway has no room or no worker for the call now."""
    PLATFORM = enum.auto()
    """A bug of the gateway's."""


def blame(error: GatewayError) -> ErrorOrigin:
    """The origin of an error."""
    match error:
        case ModelFailed() | ModelCrashed() | ModelOutOfMemory() | ModelStalled() | DeadlineExceeded():
            return ErrorOrigin.MODEL
        case InsufficientStorage() | LoadFailed() | BadModel():
            return ErrorOrigin.MODEL
        case BadRequest() | NotFound() | NoSuchPath() | MethodNotAllowed():
            return ErrorOrigin.CALLER
        case TooLarge() | UnsupportedEncoding() | SlowUpload() | SlowReader():
            return ErrorOrigin.CALLER
        case Forbidden() | Unauthenticated() | NotPermitted() | TooManyRequests() | WrongHost() | UnsupportedType():
            return ErrorOrigin.SIGNATURE
        case ModelNotReady():
            return ErrorOrigin.LOADING
        case Overloaded() | OthersWait() | Unavailable() | Drained() | WorkerLost():
            return ErrorOrigin.BUSY
        case _:
            return ErrorOrigin.PLATFORM
