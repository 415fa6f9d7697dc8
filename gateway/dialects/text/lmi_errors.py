"""Errors before the head at LMI's routes: in LMI's form, in TGI's, or in that of a dynamic batch."""

from __future__ import annotations

from gateway.core.exchange import Exchange
from gateway.dialects.answers import refusal_headers
from gateway.errors import (
    DeadlineExceeded,
    Drained,
    GatewayError,
    ModelCrashed,
    ModelFailed,
    ModelStalled,
    Overloaded,
    WorkerLost,
)
from protocols import lmi
from protocols.events import Headers


def refuse_as_lmi(exchange: Exchange, error: GatewayError) -> None:
    """Answers an error in LMI's form, also for a model with an output formatter."""
    status = status_of(error)
    failed = isinstance(error, ModelFailed | ModelCrashed)
    body_of = lmi.generation_error_body if failed else lmi.error_body
    exchange.outbound.respond(status, _headers(error), body_of(error.message, status), ending=error.ending)


def refuse_as_tgi(exchange: Exchange, error: GatewayError) -> None:
    """Answers an error in TGI's form. Its clients choose their exception by `error_type`, and read 429 as overload."""
    status = 429 if isinstance(error, Overloaded) else status_of(error)
    body = lmi.tgi_error_body(error.message, kind_of(error), status)
    exchange.outbound.respond(status, _headers(error), body, ending=error.ending)


def refuse_as_dynamic(exchange: Exchange, error: GatewayError) -> None:
    """Answers an error in the form of a dynamic batch."""
    status = status_of(error)
    exchange.outbound.respond(status, _headers(error), lmi.dynamic_error_body(error.message, status), ending=error.ending)


def status_of(error: GatewayError) -> int:
    """The HTTP status of an error: LMI's 424 for a prompt that is too long or a crashed model, otherwise the error's own."""
    too_long = isinstance(error, ModelFailed) and error.too_long
    return 424 if too_long or isinstance(error, ModelCrashed) else error.status


def kind_of(error: GatewayError) -> lmi.ErrorType:
    """TGI's type for an error."""
    match error:
        case ModelFailed() if error.request_to_blame:
            return "validation"
        case ModelFailed() | ModelCrashed():
            return "generation"
        case DeadlineExceeded() | Drained() | ModelStalled() | WorkerLost():
            return "incomplete_generation"
        case _ if error.retryable:
            return "overloaded"
        case _:
            return "validation" if error.status < 500 else "generation"


def _headers(error: GatewayError) -> Headers:
    return (*refusal_headers(error), *lmi.response_headers())
