"""Maps an exception of a model to the error that its call ends with, by the exception alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import trio

from gateway.errors import GatewayError, ModelCrashed, ModelFailed, ModelOutOfMemory
from models.errors import ModelError, is_failure, is_out_of_memory


class LoadEnded(RuntimeError):
    """The context of a `load()` has ended by itself, without an exception."""


class GivenUpElsewhere(Exception):
    """The owner of the model's processes does not start them again."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LastError:
    """A failure of a model's own code."""

    error: str
    """The type and the text of the exception."""
    incident: str
    """The id of the log line that explains the failure."""
    at: float
    """The time of the failure, on Trio's clock."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure that the log explains, for those who collect failures. They must not keep the exception."""

    incident: str
    error: BaseException
    model: str
    version: str = ""
    stream: str = ""
    """The id of the exchange; default empty: the failure was in none."""
    told: str = ""
    """The error that the client got."""


def of_the_gateway(errors: Sequence[BaseException]) -> GatewayError | None:
    """Returns the gateway's own error, if one has passed through the model: the call ends with it."""
    return next((error for error in errors if isinstance(error, GatewayError)), None)


def of_the_model(errors: Sequence[BaseException]) -> ModelFailed | None:
    """Returns the error for the client, if the model raised a ModelError."""
    said = next((error for error in errors if isinstance(error, ModelError)), None)
    return None if said is None else ModelFailed(said.message, code=said.code, status=said.status)


def crash(errors: Sequence[BaseException], incident: str) -> GatewayError:
    """Returns the error for the client of any other exception. It shows only the incident id, by which the log explains
    the failure."""
    where = f"incident {incident} in the server's log"
    if any(map(is_out_of_memory, errors)):
        return ModelOutOfMemory(f"the model ran out of memory; {where}")
    return ModelCrashed(f"the model failed; {where}")


def end_normally(errors: Sequence[BaseException], *, complete: bool = True) -> bool:
    """True if a model that ends with these exceptions has done its work. `complete`: its answer was complete."""
    return all(_ends_normally(error, complete=complete) for error in errors)


def _ends_normally(error: BaseException, *, complete: bool) -> bool:
    match error:
        case trio.EndOfChannel():
            return True  # it read past the end of its input: many loops end this way
        case trio.ClosedResourceError():
            return complete  # if it sent more after a complete answer, the answer stands
        case _:
            return False


def only_cancelled(error: BaseExceptionGroup[Any]) -> tuple[BaseException, BaseException | None]:
    """Splits an error of a cancelled call: returns the cancellation, with which the call ends, and the other exceptions that
    its tasks raised, for the log. Other errors are returned whole."""
    cancelled, rest = error.split(trio.Cancelled)
    if cancelled is None or (rest is not None and not is_failure(rest)):
        return error, None
    return cancelled, rest


def because(error: BaseException, cause: BaseException | None) -> BaseException:
    """Sets the cause of an error, as `raise error from cause` does, and returns the error."""
    error.__cause__ = cause
    return error


def one_of(error: BaseException) -> BaseException:
    """Returns the only exception of a group, through all levels; other exceptions are unchanged."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
