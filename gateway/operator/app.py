"""The operator plane as an ASGI application: health, models, live streams, drain and the log's level.

And the little of it that a port for metrics alone has.
"""

from __future__ import annotations

import logging
import math
from contextlib import aclosing
from functools import cache
from typing import Any, TypeVar, final
from uuid import uuid4

import msgspec
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from gateway.config.text import show
from gateway.errors import BadRequest, GatewayError, Overloaded, TooLarge
from gateway.log_limits import LogLimits
from gateway.operator.access import Access, Endpoint, address_of
from gateway.operator.answers import Answers, GatewayAnswers
from gateway.operator.console import console_response
from gateway.operator.events import EventStream
from gateway.operator.history import LONGEST, History
from gateway.operator.operated import Operated
from gateway.operator.operations import (
    OPEN,
    OPERATIONS,
    SORTS,
    WAITS,
    DrainRequest,
    DrainView,
    ErrorReply,
    HealthView,
    LevelRequest,
    LevelView,
    LiveView,
    Nothing,
    ReloadRequest,
    StreamQuery,
    document,
)
from gateway.operator.playground import Playground
from gateway.telemetry.metrics import Scrapes
from gateway.untrusted_text import escape
from gateway.version import version
from protocols.json import strict

log = logging.getLogger("gateway.operator")

_LARGEST = 64 * 1024  # bytes of a body
_PATIENCE = 10.0  # seconds for it
_LISTED = 1000  # streams, at most
_READERS = 8  # at most read the event stream at once
_SLOWEST, _FASTEST = 60.0, 0.1  # seconds between two looks for it
# A browser must not run these answers as scripts, and must not keep them.
_HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-store"}

Wanted = TypeVar("Wanted", bound=msgspec.Struct)


def operator_app(gateway: Operated, access: Access | None = None) -> Starlette:
    """The plane as an ASGI application: for any server that runs on Trio, alone or mounted below a path of another one.

    `access` are its rules, by default those of `gateway.config.operator`; invalid ones raise ConfigError. The gateway's own
    `serve` offers it if `operator.port` is set. An embedder who mounts it decides who can reach it.
    """
    return app_of(GatewayAnswers(gateway), access)


def app_of(answers: Answers, access: Access | None = None) -> Starlette:
    """The plane as an ASGI application, with the answers of one gateway or of several."""
    access = access or Access(answers.place.config.operator)
    answers.operate()
    history = History(answers.stats, answers.serving)
    answers.place.each_second(history.second)
    return _application(answers, access, _Routes(answers, access, history).all())


def metrics_app(answers: Answers, access: Access) -> Starlette:
    """The application of a port for metrics alone. Metrics follow the rules of `access`; health has the paths of the data
    port and is open to everybody."""
    return _application(answers, access, _Routes(answers, access, History(answers.stats, answers.serving)).of_metrics())


def _application(answers: Answers, access: Access, routes: list[BaseRoute]) -> Starlette:
    if access.tokens.file is not None:
        answers.place.watch_file(access.tokens.file, access.tokens.reload)
    answers.place.each_second(access.sum_up)
    application = Starlette(
        routes=routes, exception_handlers={GatewayError: _refuse, HTTPException: _no_route, Exception: _fail}
    )  # fmt: skip
    application.state.log_limits = access.log_limits
    return application


@final
class _Routes:
    def __init__(self, answers: Answers, access: Access, history: History) -> None:
        self._answers, self._access, self._history = answers, access, history
        self._readers = trio.Semaphore(_READERS)
        self._scrapes = Scrapes(answers.metrics)
        self._playground = Playground(answers, access)

    def all(self) -> list[BaseRoute]:
        handlers: dict[str, Endpoint] = {
            "console": self._console,
            "console_file": self._console_file,
            "openapi": self._openapi,
            "live": self._live,
            "ready": self._ready,
            "metrics": self._metrics,
            "stats": self._stats,
            "history": self._told,
            "models": self._models,
            "load": self._load,
            "unload": self._unload,
            "reload": self._reload,
            "restart": self._restart,
            "model": self._model,
            "streams": self._streams,
            "end": self._end,
            "events": self._events,
            "incidents": self._incidents,
            "incident": self._incident,
            "ticket": self._ticket,
            "report": self._report,
            "drain": self._drain,
            "level": self._level,
            "set_level": self._set_level,
        }
        routes = list[BaseRoute]()
        for operation in OPERATIONS:
            handler = handlers[operation.name]
            if operation.name not in OPEN:
                handler = self._access.guarded(handler)
            # a name in the multi-model API may have a slash, and so has a file of the console
            paths = [path.replace("{name}", "{name:path}").replace("{file}", "{file:path}") for path in operation.paths]
            routes += [Route(path, handler, methods=[operation.method]) for path in paths]
        return [*routes, Mount("/play", self._playground)]

    def of_metrics(self) -> list[BaseRoute]:
        return [
            Route("/metrics", self._access.guarded(self._metrics), methods=["GET"]),
            Route("/v2/health/live", self._live, methods=["GET"]),
            *[Route(path, self._ready_or_not, methods=["GET"]) for path in ("/v2/health/ready", "/ping", "/health")],
        ]

    async def _console(self, request: Request) -> Response:
        return console_response(request)

    async def _console_file(self, request: Request) -> Response:
        return console_response(request, str(request.path_params["file"]))

    async def _openapi(self, request: Request) -> Response:
        return _answer(_document(version()))

    # -- health ------------------------------------------------------------------------------------------------------

    async def _live(self, request: Request) -> Response:
        return _answer(LiveView(live=True))

    async def _ready(self, request: Request) -> Response:
        view = await self._answers.health()
        if not self._access.allows(request):  # a probe without a token must not learn the reasons
            view = HealthView(ready=view.ready)
        return _answer(view, 200 if view.ready else 503)

    async def _ready_or_not(self, request: Request) -> Response:
        """Leaves the reasons out: they contain texts of models' exceptions, and everybody may ask."""
        ready = (await self._answers.health()).ready
        return _answer(HealthView(ready=ready), 200 if ready else 503)

    async def _metrics(self, request: Request) -> Response:
        content_type, text = await self._scrapes.text(request.headers.get("accept", ""))
        return Response(text, headers=_HEADERS | {"content-type": content_type})

    async def _stats(self, request: Request) -> Response:
        return _answer(await self._history.judged(await self._answers.stats()))

    async def _told(self, request: Request) -> Response:
        seconds = _within(request, "seconds", LONGEST, 1, LONGEST)
        return Response(self._history.json(seconds), headers=_HEADERS, media_type="application/json")

    # -- models ------------------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        return _answer(await self._answers.models())

    async def _model(self, request: Request) -> Response:
        return _answer(await self._answers.model(_name(request)))

    async def _load(self, request: Request) -> Response:
        await _body(request, Nothing)
        return _answer(await self._answers.load(_noted(request, "load")))

    async def _unload(self, request: Request) -> Response:
        await _body(request, Nothing)
        return _answer(await self._answers.unload(_noted(request, "unload")))

    async def _reload(self, request: Request) -> Response:
        patience = _seconds((await _body(request, ReloadRequest)).patience, "patience")
        return _answer(await self._answers.reload(_noted(request, "reload"), patience))

    async def _restart(self, request: Request) -> Response:
        await _body(request, Nothing)
        number = _number(request)
        return _answer(await self._answers.restart(_noted(request, "restart", instance=number), number))

    # -- streams -----------------------------------------------------------------------------------------------------

    async def _streams(self, request: Request) -> Response:
        given = request.query_params
        query = StreamQuery(
            limit=_count(request, "limit", _LISTED, _LISTED),
            sort=_one_of(request, "sort", SORTS) or SORTS[0],
            waits_for=_one_of(request, "waits_for", WAITS),
            model=given.get("model", ""),
            peer=given.get("peer", ""),
        )
        return _answer(await self._answers.streams(query))

    async def _end(self, request: Request) -> Response:
        await _body(request, Nothing)
        id = str(request.path_params["id"])
        _note(request, "end", id=escape(id[:200]))
        return _answer(await self._answers.end(id), 202)

    async def _events(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(headers=_HEADERS, media_type=EventStream.media_type)
        interval = _within(request, "interval", 1, _FASTEST, _SLOWEST)
        if not self._readers.value:
            raise Overloaded(f"{_READERS} read the event stream already; try again later")
        return EventStream(self._answers, self._history.recent, interval, self._readers, _HEADERS)

    # -- incidents ---------------------------------------------------------------------------------------------------

    async def _incidents(self, request: Request) -> Response:
        return _answer(await self._answers.incidents())

    async def _incident(self, request: Request) -> Response:
        return _answer(await self._answers.incident(str(request.path_params["id"])))

    # -- the playground ----------------------------------------------------------------------------------------------

    async def _ticket(self, request: Request) -> Response:
        await _body(request, Nothing)
        return _answer(self._playground.ticket())

    # -- the end -----------------------------------------------------------------------------------------------------

    async def _report(self, request: Request) -> Response:
        return self._drained()

    async def _drain(self, request: Request) -> Response:
        asked = await _body(request, DrainRequest)
        timeout = _seconds(asked.timeout, "timeout")
        _note(request, "drain", timeout=timeout)
        self._answers.begin_drain(timeout)
        if asked.wait:
            await self._answers.reported()
        return self._drained(begun=True)

    def _drained(self, *, begun: bool = False) -> Response:
        report, draining = self._answers.drain_report, begun or self._answers.draining
        return _answer(DrainView(draining=draining, report=report), 202 if begun and report is None else 200)

    # -- the log -----------------------------------------------------------------------------------------------------

    async def _level(self, request: Request) -> Response:
        return _answer(LevelView(level=self._answers.level()))

    async def _set_level(self, request: Request) -> Response:
        level = (await _body(request, LevelRequest)).level
        _note(request, "log", to=level)
        await self._answers.set_level(level)
        return _answer(LevelView(level=self._answers.level()))


# -- requests and answers


def _name(request: Request) -> str:
    return str(request.path_params["name"])


def _number(request: Request) -> int:
    text = str(request.path_params["number"])
    if not _is_number(text):
        raise BadRequest(f"the number of an instance must be a whole number from 0, not {show(text[:100])}")
    return int(text)


def _noted(request: Request, action: str, **about: object) -> str:
    """The name of the model that a request changes; writes the line of the log."""
    name = _name(request)
    _note(request, action, model=escape(name[:200]), **about)
    return name


def _note(request: Request, action: str, **about: object) -> None:
    limits: LogLimits = request.app.state.log_limits
    if limits.allows("operator request", action=action):
        log.info("operator request", extra={"action": action, **about, "peer": address_of(request)})


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9


def _count(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (_is_number(text) and 1 <= int(text) <= most):
        raise BadRequest(f"{name} must be a whole number from 1 to {most}, not {show(text[:100])}")
    return int(text)


def _one_of(request: Request, name: str, words: tuple[str, ...]) -> str:
    """A word of a query; empty if it is missing."""
    text = request.query_params.get(name, "")
    if text and text not in words:
        raise BadRequest(f"{name} must be one of {', '.join(words)}, not {show(text[:100])}")
    return text


def _within(request: Request, name: str, default: float, least: float, most: float) -> float:
    """A number of seconds in a query."""
    text = request.query_params.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not least <= seconds <= most:
        raise BadRequest(f"{name} must be a number of seconds from {least:g} to {most:g}, not {show(text[:100])}")
    return seconds


def _seconds(value: float | None, name: str) -> float | None:
    if value is not None and not (0 <= value < math.inf):
        raise BadRequest(f"{name} must be a number of seconds from 0, not {value}")
    return value


async def _body(request: Request, kind: type[Wanted]) -> Wanted:
    """The JSON of a body; an empty body is an empty object."""
    body = bytearray()
    with trio.move_on_after(_PATIENCE) as patience:
        async with aclosing(request.stream()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > _LARGEST:
                    raise TooLarge(f"the body is larger than {_LARGEST} bytes")
    if patience.cancelled_caught:
        raise BadRequest(f"the body has not come within {_PATIENCE:g} s", status=408)
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except UnicodeDecodeError:
        raise BadRequest("the body: it is not UTF-8") from None
    except RecursionError:
        raise BadRequest("the body: it is nested too deep to be read") from None
    except msgspec.DecodeError as e:
        raise BadRequest(f"the body: {strict.fault_of(body, e)}") from None


@cache
def _document(version: str) -> msgspec.Raw:
    """The OpenAPI document, made on the first request: that takes some milliseconds, and leaves cycles of objects behind."""
    return msgspec.Raw(msgspec.json.encode(document(version)))


def _answer(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(body), status, {**_HEADERS, **(headers or {})}, media_type="application/json"
    )  # fmt: skip


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    headers = {name.decode(): value.decode() for name, value in (*error.headers, *error.retry)}
    return _answer(ErrorReply(error=error.message, code=error.code), error.status, headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        said, code = f"no such path: {request.url.path[:100]}", "NotFound"
    elif error.status_code == 405:
        said, code = f"{request.method[:20]} is not allowed here", "MethodNotAllowed"
    else:
        said, code = error.detail, "BadRequest"
    return _answer(ErrorReply(error=said, code=code), error.status_code, dict(error.headers or {}))


async def _fail(request: Request, error: Exception) -> Response:
    incident = uuid4().hex[:12]
    limits: LogLimits = request.app.state.log_limits
    if limits.allows("operator request failed", level=logging.ERROR):
        log.error("operator request failed", extra={"incident": incident}, exc_info=error)
    return _answer(ErrorReply(error=f"internal error; incident {incident} in the server's log", code="InternalFailure"), 500)
