"""The operator plane as an ASGI application: health, models, live streams, drain and the log's level."""

from __future__ import annotations

import logging
import math
from contextlib import aclosing
from typing import Any, TypeVar, final
from uuid import uuid4

import msgspec
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.config.text import show, text_without_secrets
from gateway.errors import BadRequest, GatewayError, LoadFailed, NotFound, Overloaded, TooLarge
from gateway.operator.access import Access, Endpoint, address_of
from gateway.operator.console import console_response
from gateway.operator.events import EventStream
from gateway.operator.operated import Operated
from gateway.operator.operations import (
    OPEN,
    OPERATIONS,
    DrainRequest,
    DrainView,
    ErrorReply,
    HealthView,
    LevelRequest,
    LevelView,
    LiveView,
    ModelsView,
    Nothing,
    ReloadRequest,
    StreamsView,
    document,
)
from gateway.operator.views import ModelView, models_of, view_of_model, view_of_stream, waits_for
from gateway.telemetry import logging_setup
from gateway.telemetry.metrics import exposition
from gateway.untrusted_text import escape
from gateway.version import version
from models.blocking import detached
from models.errors import ModelExit

log = logging.getLogger("gateway.operator")

_LARGEST = 64 * 1024  # bytes of a body
_PATIENCE = 10.0  # seconds for it
_LISTED = 1000  # streams, where a request does not say
_READERS = 8  # of the event stream, at once
_SLOWEST, _FASTEST = 60.0, 0.1  # seconds between two looks for it
_EXCHANGES_AT_ONCE = 256  # streams that are looked at before others have their turn
# A browser is to run nothing of what comes from here, and to keep none of it.
_HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-store"}

Wanted = TypeVar("Wanted", bound=msgspec.Struct)


def operator_app(gateway: Operated, access: Access | None = None) -> Starlette:
    """The application, for any ASGI server that runs on Trio, and to be mounted below a path of another one.

    `access` are its rules, those of `gateway.config.operator` unless given: ConfigError where they cannot be. The gateway's
    own `serve` offers it where `operator.port` is set; an embedder who mounts it chooses who reaches it.
    """
    access = access or Access(gateway.config.operator)
    if access.tokens.file is not None:
        gateway.watch_file(access.tokens.file, access.tokens.reload)
    return Starlette(
        routes=_Routes(gateway, access).all(),
        exception_handlers={GatewayError: _refuse, HTTPException: _no_route, Exception: _fail},
    )


@final
class _Routes:
    def __init__(self, gateway: Operated, access: Access) -> None:
        self._gateway, self._access = gateway, access
        self._registry = gateway.registry  # from now on exchanges are counted
        self._readers = trio.Semaphore(_READERS)

    def all(self) -> list[Route]:
        handlers: dict[str, Endpoint] = {
            "console": self._console,
            "openapi": self._openapi,
            "live": self._live,
            "ready": self._ready,
            "metrics": self._metrics,
            "models": self._models,
            "load": self._load,
            "unload": self._unload,
            "reload": self._reload,
            "model": self._model,
            "streams": self._streams,
            "events": self._events,
            "report": self._report,
            "drain": self._drain,
            "level": self._level,
            "set_level": self._set_level,
        }
        routes = []
        for operation in OPERATIONS:
            handler = handlers[operation.name]
            if operation.name not in OPEN:
                handler = self._access.guarded(handler)
            # a name in the multi-model API may have a slash
            paths = [path.replace("{name}", "{name:path}") for path in operation.paths]
            routes += [Route(path, handler, methods=[operation.method]) for path in paths]
        return routes

    async def _console(self, request: Request) -> Response:
        return console_response()

    async def _openapi(self, request: Request) -> Response:
        return _answer(document(version()))

    # -- health ------------------------------------------------------------------------------------------------------

    async def _live(self, request: Request) -> Response:
        return _answer(LiveView(live=True))

    async def _ready(self, request: Request) -> Response:
        unready = self._gateway.unready
        # a probe has no token: it is told no more than it needs
        view = HealthView(ready=not unready, reasons=unready if self._access.allows(request) else None)
        return _answer(view, 503 if unready else 200)

    async def _metrics(self, request: Request) -> Response:
        content_type, text = exposition(self._registry, request.headers.get("accept", ""))
        return Response(text, headers=_HEADERS | {"content-type": content_type})

    # -- models ------------------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        revision = self._gateway.models.revision
        return _answer(ModelsView(revision=revision, models=await models_of(self._gateway)))

    async def _model(self, request: Request) -> Response:
        return await self._tell(_name(request))

    async def _tell(self, name: str) -> Response:
        status = self._gateway.models.get(name)
        return _answer(await self._absent(name) if status is None else view_of_model(status))

    async def _absent(self, name: str) -> ModelView:
        """A model that is not in service; NotFound where there is none."""
        for view in await models_of(self._gateway):
            if view.name == name:
                return view
        raise NotFound(f"no model {show(name[:100])}: GET /models lists those there are")

    async def _load(self, request: Request) -> Response:
        await _body(request, Nothing)
        name = _noted(request, "load")
        await self._gateway.control.load(name)
        return await self._tell(name)

    async def _unload(self, request: Request) -> Response:
        await _body(request, Nothing)
        name = _noted(request, "unload")
        if name not in self._gateway.models:
            await self._absent(name)
        await self._gateway.control.unload(name)
        return await self._tell(name)

    async def _reload(self, request: Request) -> Response:
        patience = _seconds((await _body(request, ReloadRequest)).patience, "patience")
        name = _noted(request, "reload")
        failure: GatewayError | None = None
        try:
            await self._gateway.reload(name, patience=patience)
        except GatewayError:
            raise
        except (Exception, SystemExit, BaseExceptionGroup) as e:  # of the model's own code
            if isinstance(e, BaseExceptionGroup) and e.split((Exception, SystemExit))[1] is not None:
                raise
            detached(e)  # out of a thread, or a warm-up, it is in a cycle, which would keep the model
            said = text_without_secrets(str(e) if isinstance(e, ModelExit) else f"{type(e).__name__}: {e}")[:300]
            failed = self._gateway.models[name].last_error
            where = f"; incident {failed.incident}" if failed is not None else ""
            failure = LoadFailed(f"the new version cannot be loaded, and the old one serves on: {said}{where}")
        if failure is not None:  # outside: what the traceback holds is the failed model's memory
            try:
                raise failure
            finally:
                failure = None
        return await self._tell(name)

    # -- streams -----------------------------------------------------------------------------------------------------

    async def _streams(self, request: Request) -> Response:
        limit = _count(request, "limit", _LISTED)
        gateway = self._gateway
        live, queued, now = gateway.live, gateway.supervisor.waiting, trio.current_time()
        views = []
        for number, exchange in enumerate(live[:limit], 1):
            views.append(view_of_stream(exchange, now, waits_for(exchange, queued)))
            if number % _EXCHANGES_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        counts = gateway.counts()
        return _answer(
            StreamsView(live=len(live), connections=counts.connections, endings=counts.endings, streams=views)
        )  # fmt: skip

    async def _events(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(headers=_HEADERS, media_type=EventStream.media_type)
        interval = _interval(request)
        if not self._readers.value:
            raise Overloaded(f"{_READERS} read the event stream already; try again later")
        return EventStream(self._gateway, interval, self._readers, _HEADERS)

    # -- the end -----------------------------------------------------------------------------------------------------

    async def _report(self, request: Request) -> Response:
        return self._drained()

    async def _drain(self, request: Request) -> Response:
        asked = await _body(request, DrainRequest)
        timeout = _seconds(asked.timeout, "timeout")
        _note(request, "drain", timeout=timeout)
        self._gateway.begin_drain(timeout)
        if asked.wait:
            await self._gateway.reported()
        return self._drained(begun=True)

    def _drained(self, *, begun: bool = False) -> Response:
        report, draining = self._gateway.drain_report, begun or self._gateway.draining
        return _answer(DrainView(draining=draining, report=report), 202 if begun and report is None else 200)

    # -- the log -----------------------------------------------------------------------------------------------------

    async def _level(self, request: Request) -> Response:
        return _answer(LevelView(level=logging_setup.level()))

    async def _set_level(self, request: Request) -> Response:
        level = (await _body(request, LevelRequest)).level
        _note(request, "log", to=level)
        logging_setup.set_level(level)
        return _answer(LevelView(level=logging_setup.level()))


# -- requests and answers


def _name(request: Request) -> str:
    return str(request.path_params["name"])


def _noted(request: Request, action: str) -> str:
    """The model that something is to be done with; the log has a line of it."""
    name = _name(request)
    _note(request, action, model=escape(name[:200]))
    return name


def _note(request: Request, action: str, **about: object) -> None:
    log.info("operator request", extra={"action": action, **about, "peer": address_of(request)})


def _count(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text)):
        raise BadRequest(f"{name} must be a whole number from 1, not {show(text[:100])}")
    return int(text)


def _interval(request: Request) -> float:
    text = request.query_params.get("interval", "1")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not _FASTEST <= seconds <= _SLOWEST:
        raise BadRequest(f"interval must be a number of seconds from {_FASTEST:g} to {_SLOWEST:g}, not {show(text[:100])}")
    return seconds


def _seconds(value: float | None, name: str) -> float | None:
    if value is not None and not (0 <= value < math.inf):
        raise BadRequest(f"{name} must be a number of seconds from 0, not {value}")
    return value


async def _body(request: Request, kind: type[Wanted]) -> Wanted:
    """The JSON of a body; an empty one has no members."""
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
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise BadRequest(f"the body: {e}") from None


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
    log.error("operator request failed", extra={"incident": incident}, exc_info=error)
    return _answer(ErrorReply(error=f"internal error; incident {incident} in the server's log", code="InternalFailure"), 500)
