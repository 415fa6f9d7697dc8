"""Every route of the operator plane, once: the application and its OpenAPI document are made of this list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.operator.history import EVERY, LONGEST, HistoryView
from gateway.operator.stats import StatsView
from gateway.operator.views import IncidentView, ModelView, StreamView
from gateway.serving.drain import DrainReport
from gateway.telemetry.logging_setup import Level
from protocols import openapi
from protocols.openapi import Answer, Body, Field, Operation
from protocols.sse import MEDIA_TYPE


class HealthView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer about readiness: true if new calls are accepted."""

    ready: bool
    reasons: tuple[str, ...] | None = None
    """The reasons why it is not, or why one of several processes is not; left out if the plane demands a token and the
    request has none."""


class LiveView(msgspec.Struct, kw_only=True):
    """The answer about liveness."""

    live: bool


class ModelsView(msgspec.Struct, kw_only=True):
    """Every model there is, by name."""

    revision: int
    models: list[ModelView]


SORTS = ("age", "waited")
"""The orders in which streams are listed, the largest value first."""
WAITS = ("slot", "model", "input", "room", "end", "gateway")
"""The things that a stream may wait for."""


class StreamQuery(msgspec.Struct, kw_only=True, frozen=True):
    """The filters and the order of a list of live streams."""

    limit: int
    sort: str = "age"
    """One of `SORTS`."""
    waits_for: str = ""
    """One of `WAITS`; empty: all."""
    model: str = ""
    """A model's name; empty: all."""
    peer: str = ""
    """An address, with its port or without; empty: all."""


class StreamsView(msgspec.Struct, kw_only=True):
    """The live streams."""

    live: int
    matched: int
    """The number of streams that match the filters; the first of them are listed."""
    connections: int
    endings: dict[str, int]
    """How exchanges have ended since the server began."""
    streams: list[StreamView]


class IncidentsView(msgspec.Struct, kw_only=True):
    """Exceptions that models and the server have raised, the latest group first; a hundred at most."""

    incidents: list[IncidentView]


class TicketView(msgspec.Struct, kw_only=True, frozen=True):
    """The ticket of one WebSocket of the playground, and how to use it."""

    ticket: str
    """It opens one WebSocket within 10 seconds, as the subprotocol `everywire.ticket.TICKET` beside `everywire.play`."""
    path: str
    """The path below /play, in which `{name}` stands for the name of a model."""
    end: str
    """The text message that ends the input; the answer may go on."""


class DrainView(msgspec.Struct, kw_only=True):
    """True if the server drains, and the report of the drain once it is over."""

    draining: bool
    report: DrainReport | None


class LevelView(msgspec.Struct, kw_only=True):
    """The level of the log."""

    level: str


class ErrorReply(msgspec.Struct, kw_only=True):
    """An error in words, and its code."""

    error: str
    code: str


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """An empty object, or no body at all."""


class ReloadRequest(msgspec.Struct, forbid_unknown_fields=True):
    """How long calls of the old version may go on, in seconds; without it `repository.unload_timeout`."""

    patience: float | None = None


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    """How long what is live may go on, in seconds, `drain.timeout` without it; whether to answer only with the report."""

    timeout: float | None = None
    wait: bool = False


class LevelRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The least severity that is logged from now on."""

    level: Level


_DESCRIPTION = (
    "Manages a gateway and watches it. Where the server has a token, each request but those of health and the console "
    "brings it as `Authorization: Bearer TOKEN`. Below /play are the paths of the data port. "
    "Every error has a JSON body with `error`, in words, and `code`."
)
_CAPTURED = {
    "name": "The name of a model.",
    "id": "The id of a stream, as its client has it as x-request-id; or the number of an incident.",
    "number": "The number of one of its processes, from 0.",
    "file": "The path of a file.",
}
_ERRORS = {
    400: "The request is wrong; the text names the field.",
    401: "The server demands a token, and the request has none or a wrong one.",
    403: "A browser's page of another site may have made the request.",
    404: "There is no such model, process, stream or incident.",
    408: "The body did not come.",
    409: "The model or its process is on its way in or out, or the model has none; the stream's answer is complete already.",
    413: "The body is larger than 64 KiB.",
    429: "As much is under way as may be.",
    500: "The model's own code failed, or the server did.",
    503: "Not now: it may be tried again.",
    507: "The model does not fit into memory beside the others.",
}
_ACCESS = (401, 403)
_BODY = (400, 408, 413)


def _answers(type: Any, description: str, *errors: int) -> tuple[Answer, ...]:
    return (Answer(status=200, description=description, bodies=(Body(type=type),)), *_errors(*errors))


def _errors(*statuses: int) -> Iterable[Answer]:
    return [Answer(status=status, description=_ERRORS[status], bodies=(Body(type=ErrorReply),)) for status in statuses]


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        name="console",
        method="GET",
        paths=("/",),
        summary="The console: a page that shows models, live streams and incidents.",
        answers=(
            Answer(status=200, description="The page.", bodies=(Body(content_type="text/html", description="HTML."),)),
        ),
    ),
    Operation(
        name="console_file",
        method="GET",
        paths=("/console/{file}",),
        summary="A script, a style or a licence of the console.",
        answers=(
            Answer(status=200, description="The file.", bodies=(Body(content_type="text/*", description="Text."),)),
            Answer(status=404, description="There is no such file.", bodies=(Body(type=ErrorReply),)),
        ),
    ),
    Operation(
        name="openapi",
        method="GET",
        paths=("/openapi.json",),
        summary="This document.",
        answers=_answers(dict[str, Any], "An OpenAPI 3.1 document.", *_ACCESS),
    ),
    Operation(
        name="live",
        method="GET",
        paths=("/health/live",),
        summary="Whether the process answers.",
        answers=_answers(LiveView, "The process answers."),
    ),
    Operation(
        name="ready",
        method="GET",
        paths=("/health/ready",),
        summary="Whether new calls are taken.",
        answers=(
            *_answers(HealthView, "They are."),
            Answer(
                status=503,
                description="Not now: models are loaded for the first time, or the server drains.",
                bodies=(Body(type=HealthView),),
            ),
        ),
    ),
    Operation(
        name="metrics",
        method="GET",
        paths=("/metrics",),
        summary="What the gateway counts and holds, for Prometheus.",
        answers=(
            Answer(
                status=200,
                description="Prometheus' text, or OpenMetrics where Accept asks for it.",
                bodies=(Body(content_type="text/plain", description="One line for each value."),),
            ),
            *_errors(*_ACCESS),
        ),
    ),
    Operation(
        name="stats",
        method="GET",
        paths=("/stats",),
        summary="The figures of now: counters, what is live and waits, memory, and the clients that are waited for.",
        answers=_answers(StatsView, "The figures.", *_ACCESS),
    ),
    Operation(
        name="history",
        method="GET",
        paths=("/history",),
        summary=f"The figures of the last ten minutes, one point in {EVERY} seconds.",
        queries=(Field(name="seconds", description=f"Of how many seconds, from 1 to {LONGEST}; {LONGEST}.", type=float),),
        answers=_answers(HistoryView, "The points, the oldest first.", 400, *_ACCESS),
    ),
    Operation(
        name="models",
        method="GET",
        paths=("/models",),
        summary="Every model there is: in service, configured, or a folder of the repository.",
        answers=_answers(ModelsView, "The models.", *_ACCESS),
    ),
    Operation(
        name="load",
        method="POST",
        paths=("/models/{name}/load",),
        summary="Loads a model; answered when it answers calls.",
        bodies=(Body(type=Nothing),),
        answers=_answers(ModelView, "It is in service.", *_BODY, *_ACCESS, 404, 409, 500, 503, 507),
    ),
    Operation(
        name="unload",
        method="POST",
        paths=("/models/{name}/unload",),
        summary="Takes a model out of service; answered when nothing of it is left.",
        bodies=(Body(type=Nothing),),
        answers=_answers(ModelView, "It is gone.", *_BODY, *_ACCESS, 404, 409, 503),
    ),
    Operation(
        name="reload",
        method="POST",
        paths=("/models/{name}/reload",),
        summary="Loads a model anew beside the old version, which serves until then.",
        bodies=(Body(type=ReloadRequest),),
        answers=_answers(ModelView, "The new version serves.", *_BODY, *_ACCESS, 404, 409, 500, 503, 507),
    ),
    Operation(
        name="restart",
        method="POST",
        paths=("/models/{name}/instances/{number}/restart",),
        summary="Puts a new process in the place of one of a model's, which serves until then.",
        bodies=(Body(type=Nothing),),
        answers=_answers(ModelView, "The new process takes calls.", *_BODY, *_ACCESS, 404, 409, 500, 503),
    ),
    Operation(
        name="model",
        method="GET",
        paths=("/models/{name}",),
        summary="One model.",
        answers=_answers(ModelView, "The model.", *_ACCESS, 404),
    ),
    Operation(
        name="streams",
        method="GET",
        paths=("/streams",),
        summary="The live streams, and what each one waits for.",
        queries=(
            Field(name="limit", description="The most that are listed, from 1 to 1000; default 1000.", type=int),
            Field(name="sort", description="age, the default: the oldest first; waited: the one that waits longest first."),
            Field(name="waits_for", description=f"Those that wait for this alone: {', '.join(WAITS)}."),
            Field(name="model", description="Those of this model alone."),
            Field(name="peer", description="Those of this address alone, with its port or without."),
        ),
        answers=_answers(StreamsView, "What is live.", 400, *_ACCESS),
    ),
    Operation(
        name="end",
        method="POST",
        paths=("/streams/{id}/end",),
        summary="Ends one stream: its model is cancelled, and its client is told as at a drain.",
        bodies=(Body(type=Nothing),),
        answers=(
            Answer(status=202, description="It is told; the row is as it was then.", bodies=(Body(type=StreamView),)),
            *_errors(*_BODY, *_ACCESS, 404, 409),
        ),
    ),
    Operation(
        name="events",
        method="GET",
        paths=("/streams/events",),
        summary="A stream of events: streams that open, change and close, figures, incidents and a drain.",
        queries=(Field(name="interval", description="Seconds between two looks, from 0.1 to 60; 1.", type=float),),
        answers=(
            Answer(
                status=200,
                description="Events until the server has drained.",
                bodies=(
                    Body(
                        content_type=MEDIA_TYPE,
                        description="Events stats, models, opened, changed, closed, dropped, incident, draining, drained.",
                    ),
                ),
            ),
            *_errors(400, *_ACCESS, 503),
        ),
    ),
    Operation(
        name="incidents",
        method="GET",
        paths=("/incidents",),
        summary="The exceptions of models and of the server, grouped by type and place.",
        answers=_answers(IncidentsView, "The groups, without their tracebacks.", *_ACCESS),
    ),
    Operation(
        name="incident",
        method="GET",
        paths=("/incidents/{id}",),
        summary="The group of an incident, by any of its numbers, with the traceback.",
        answers=_answers(IncidentView, "The group.", *_ACCESS, 404),
    ),
    Operation(
        name="ticket",
        method="POST",
        paths=("/play/ticket",),
        summary="A word that opens one WebSocket of the playground, whose calls are the data port's paths below /play.",
        bodies=(Body(type=Nothing),),
        answers=_answers(TicketView, "The word, and how a model is called with it.", *_BODY, *_ACCESS, 404, 409, 429),
    ),
    Operation(
        name="report",
        method="GET",
        paths=("/drain",),
        summary="The state of the drain, and the report once it is over.",
        answers=_answers(DrainView, "The state of the drain.", *_ACCESS),
    ),
    Operation(
        name="drain",
        method="POST",
        paths=("/drain",),
        summary="Begins a drain, as SIGTERM does, or shortens one.",
        bodies=(Body(type=DrainRequest),),
        answers=(
            *_answers(DrainView, "It is over."),
            Answer(status=202, description="It has begun.", bodies=(Body(type=DrainView),)),
            *_errors(*_BODY, *_ACCESS),
        ),
    ),
    Operation(
        name="level",
        method="GET",
        paths=("/log",),
        summary="The level of the log.",
        answers=_answers(LevelView, "The level.", *_ACCESS),
    ),
    Operation(
        name="set_level",
        method="PUT",
        paths=("/log",),
        summary="Changes the level of the log.",
        bodies=(Body(type=LevelRequest),),
        required=True,
        answers=_answers(LevelView, "The level from now on.", *_BODY, *_ACCESS),
    ),
)
"""The operations in the order in which paths are matched; the application has a handler for each name."""

OPEN = frozenset({"console", "console_file", "live", "ready"})
"""The operations that need no token."""


def document(version: str) -> dict[str, Any]:  # a JSON object
    """The OpenAPI document of this version of the server."""
    written = openapi.document(
        title="everywire operator plane",
        version=version,
        description=_DESCRIPTION,
        operations=OPERATIONS,
        captured=_CAPTURED,
    )
    written["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for operation in OPERATIONS:
        if operation.name not in OPEN:
            for path in operation.paths:
                # either: a server on loopback may have none
                written["paths"][path][operation.method.lower()]["security"] = [{"token": []}, {}]
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(written))  # a tuple that is a default is an array
    return plain
