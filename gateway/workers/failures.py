"""Maps the exception of a model to what its call ends with, by the exception alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import trio

from gateway.errors import GatewayError, ModelCrashed, ModelFailed, ModelOutOfMemory
from models.errors import ModelError, is_failure, is_out_of_memory


class LoadEnded(RuntimeError):
    """The context of a `load()` is over, and nobody had asked it to be; nothing was raised."""


class GivenUpElsewhere(Exception):
    """The owner of the model's processes does not start them again."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LastError:
    """A failure of a model's own code."""

    error: str
    """Its type and text."""
    incident: str
    """The id that the line of the log has which explains it."""
    at: float
    """When, on Trio's clock."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure that the log explains, for who keeps an account of them; whoever is told keeps nothing of the error."""

    incident: str
    error: BaseException
    model: str
    version: str = ""
    stream: str = ""
    """The id of the exchange; empty where it was in none."""
    told: str = ""
    """The error that its client was told."""


def of_the_gateway(errors: Sequence[BaseException]) -> GatewayError | None:
    """The gateway's own error that has come through the model: it says all there is to say."""
    return next((error for error in errors if isinstance(error, GatewayError)), None)


def of_the_model(errors: Sequence[BaseException]) -> ModelFailed | None:
    """What a model's author has raised for the client to read."""
    said = next((error for error in errors if isinstance(error, ModelError)), None)
    return None if said is None else ModelFailed(said.message, code=said.code, status=said.status)


def crash(errors: Sequence[BaseException], incident: str) -> GatewayError:
    """What a client is told of anything else: nothing but where the log explains it."""
    where = f"incident {incident} in the server's log"
    if any(map(is_out_of_memory, errors)):
        return ModelOutOfMemory(f"the model ran out of memory; {where}")
    return ModelCrashed(f"the model failed; {where}")


def end_normally(errors: Sequence[BaseException], *, complete: bool = True) -> bool:
    """Whether a model that ends with these has done what it had to; `complete` says that its answer was."""
    return all(_ends_normally(error, complete=complete) for error in errors)


def _ends_normally(error: BaseException, *, complete: bool) -> bool:
    match error:
        case trio.EndOfChannel():
            return True  # it read on past the end of input: that is how many loops end
        case trio.ClosedResourceError():
            return complete  # it sent on after its answer was complete; the answer stands
        case _:
            return False


def only_cancelled(error: BaseExceptionGroup[Any]) -> tuple[BaseException, BaseException | None]:
    """What was cancelled ends as such, whatever else its tasks raised on their way out: what to end with, and the rest that
    only the log tells of."""
    cancelled, rest = error.split(trio.Cancelled)
    if cancelled is None or (rest is not None and not is_failure(rest)):
        return error, None
    return cancelled, rest


def because(error: BaseException, cause: BaseException | None) -> BaseException:
    """As `raise error from cause` says it."""
    error.__cause__ = cause
    return error


def one_of(error: BaseException) -> BaseException:
    """The exception that a group of one stands for."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
