"""How LMI's routes say an error that comes before the head: in LMI's words, in TGI's, or in those of a dynamic batch."""

from __future__ import annotations

from gateway.core.exchange import Exchange
from gateway.dialects.answers import refusal_headers
from gateway.errors import (
    DeadlineExceeded,
    Drained,
    GatewayError,
    ModelCrashed,
    ModelFailed,
    Overloaded,
    WorkerLost,
)
from protocols import lmi
from protocols.events import Headers


def refuse_as_lmi(exchange: Exchange, error: GatewayError) -> None:
    """Says it in LMI's words, also for a model that writes its own answers."""
    status = status_of(error)
    failed = isinstance(error, ModelFailed | ModelCrashed)
    body_of = lmi.generation_error_body if failed else lmi.error_body
    exchange.outbound.respond(status, _headers(error), body_of(error.message, status), ending=error.ending)


def refuse_as_tgi(exchange: Exchange, error: GatewayError) -> None:
    """The same in TGI's form, whose clients choose their exception by `error_type`, and know no room as 429."""
    status = 429 if isinstance(error, Overloaded) else status_of(error)
    body = lmi.tgi_error_body(error.message, kind_of(error), status)
    exchange.outbound.respond(status, _headers(error), body, ending=error.ending)


def refuse_as_dynamic(exchange: Exchange, error: GatewayError) -> None:
    """The same in the words of a dynamic batch."""
    status = status_of(error)
    exchange.outbound.respond(status, _headers(error), lmi.dynamic_error_body(error.message, status), ending=error.ending)


def status_of(error: GatewayError) -> int:
    """The HTTP status of an error: LMI's 424 for a prompt that is too long or a crashed model, else the error's own."""
    too_long = isinstance(error, ModelFailed) and error.too_long
    return 424 if too_long or isinstance(error, ModelCrashed) else error.status


def kind_of(error: GatewayError) -> lmi.ErrorType:
    """TGI's word for what went wrong."""
    match error:
        case ModelFailed() if error.request_to_blame:
            return "validation"
        case ModelFailed() | ModelCrashed():
            return "generation"
        case DeadlineExceeded() | Drained() | WorkerLost():
            return "incomplete_generation"
        case _ if error.retryable:
            return "overloaded"
        case _:
            return "validation" if error.status < 500 else "generation"


def _headers(error: GatewayError) -> Headers:
    return (*refusal_headers(error), *lmi.response_headers())
