"""Who is to blame for an error, as SageMaker's operations tell it to their callers."""

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
    NoSuchPath,
    NotFound,
    OthersWait,
    Overloaded,
    SlowReader,
    SlowUpload,
    TooLarge,
    Unavailable,
    UnsupportedEncoding,
    WorkerLost,
)


class ErrorOrigin(enum.Enum):
    """Each operation has its own names for these."""

    CALLER = enum.auto()
    """What was asked for cannot be."""
    SIGNATURE = enum.auto()
    """Who asked is not known, or not proved."""
    MODEL = enum.auto()
    """It raised, did not finish in time, or cannot be loaded."""
    LOADING = enum.auto()
    """It is not there yet."""
    BUSY = enum.auto()
    """The platform has no room or no worker for it now."""
    PLATFORM = enum.auto()
    """A bug of ours."""


def blame(error: GatewayError) -> ErrorOrigin:
    """Who is to blame for it."""
    match error:
        case ModelFailed() | ModelCrashed() | ModelOutOfMemory() | DeadlineExceeded():
            return ErrorOrigin.MODEL
        case InsufficientStorage() | LoadFailed() | BadModel():
            return ErrorOrigin.MODEL
        case BadRequest() | NotFound() | NoSuchPath() | MethodNotAllowed():
            return ErrorOrigin.CALLER
        case TooLarge() | UnsupportedEncoding() | SlowUpload() | SlowReader():
            return ErrorOrigin.CALLER
        case Forbidden():
            return ErrorOrigin.SIGNATURE
        case ModelNotReady():
            return ErrorOrigin.LOADING
        case Overloaded() | OthersWait() | Unavailable() | Drained() | WorkerLost():
            return ErrorOrigin.BUSY
        case _:
            return ErrorOrigin.PLATFORM
