"""The models of a multi-model container, as the platform keeps them: loaded on first use, unloaded for others."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import final
from urllib.parse import quote

import msgspec
import trio

from gateway import client
from gateway.catalog.target_model import model_name, model_url
from gateway.containers.connection import (
    AS_IT_IS,
    GATEWAY_TIMEOUT,
    Container,
    NoAnswer,
    Within,
    content_coding,
    next_piece,
    refused,
)
from gateway.errors import Overloaded, Refusal, TransportLost, WorkerLost
from models.errors import ModelError
from protocols.aws.multi_model import MAX_NAME
from protocols.errors import RemoteProtocolError

log = logging.getLogger("gateway.bridge")

NO_MEMORY = 507
_TAKEN, _UNKNOWN = 409, 404
_LISTED = 1024 * 1024  # bytes of one page of a list of models that are read
_PAGES = 100
_TOKEN = 4096  # characters of the token of the next one
_SURVEYED = 1000  # models that one look at that list adds at most: it is about room, not about all of them
# Models that are remembered. One that is forgotten though it is loaded is found so (409) when it is asked for again.
_REMEMBERED = 10_000
# Loads whose callers have all left: they go on, but a container that answers none must not collect them.
_UNATTENDED = 64
# Unloads under way: where one lasts longer than these seconds, the next is tried beside it.
_LEAVING, _PATIENCE = 4, 5.0
_PAUSE = 60.0  # seconds in which a model that could not be unloaded is not tried again


@final
class _Change:
    """A load or an unload under way."""

    def __init__(self, load: bool) -> None:
        self.load, self.done = load, trio.Event()
        self.error: ModelError | NoAnswer | None = None

    async def outcome(self) -> None:
        """Waits for it; raises what went wrong, anew for each who waits."""
        await self.done.wait()
        match self.error:
            case ModelError() as e:
                raise ModelError(e.message, code=e.code, status=e.status) from e
            case NoAnswer() as e:
                raise NoAnswer(e.message, status=e.status) from e


@final
class _Model:
    """One of them."""

    def __init__(self, name: str, *, loaded: bool = False) -> None:
        self.name, self.loaded = name, loaded
        self.users = 0
        self.change: _Change | None = None
        self.stays_until = 0.0
        """On Trio's clock: it could not be unloaded, and is not tried before."""

    @property
    def idle(self) -> bool:
        return self.loaded and not self.users and self.change is None

    @property
    def path(self) -> bytes:
        return b"/models/" + quote(self.name, safe="").encode()


class _Listed(msgspec.Struct, rename="camel"):
    model_name: str


class _Page(msgspec.Struct, rename="camel"):
    models: list[_Listed] = []  # a Struct copies it
    next_page_token: str | None = None


@final
class ContainerModels:
    """Decides which models a container holds, by its multi-model API, as SageMaker's platform does.

    A model is loaded when it is asked for first; one that is loaded already (409) is as good. Where the container has no
    memory (507), models go that nobody uses, the least recently used first, and it is asked again. Loads and unloads run
    in tasks of `nursery`, each within a time: a caller who leaves leaves nothing half done.
    """

    def __init__(self, container: Container, prefix: str, nursery: trio.Nursery) -> None:
        self._container, self._prefix, self._nursery = container, prefix, nursery
        self._models: OrderedDict[str, _Model] = OrderedDict()  # the least recently used first
        self._leaving = self._gone = 0  # unloads under way, and those that came to a good end
        self._left = trio.lowlevel.ParkingLot()  # for the end of an unload
        self._closed = False

    def close(self) -> None:
        """The nursery ends: whoever wants a change from now on gets WorkerLost."""
        self._closed = True

    @asynccontextmanager
    async def in_use(self, target: str) -> AsyncIterator[bytes]:
        """The path that invokes a target model, loaded first where it is not; it is not unloaded within the block.
        BadRequest for a target that is none, ModelError with the container's own status and text where it cannot be
        loaded, NoAnswer where the container says nothing; Overloaded where it has not answered too many loads whose
        callers have left, WorkerLost where the model's worker ends meanwhile."""
        url = model_url(self._prefix, target)
        name = model_name(url)
        model = self._models.get(name)
        if model is None:
            self._forget_one()
            model = self._models[name] = _Model(name)
        model.users += 1
        try:
            while model.change is not None or not model.loaded:
                change = model.change or self._begin_load(model, url)
                if change.load:
                    await change.outcome()
                else:
                    await change.done.wait()  # it is being unloaded for another, who goes on without it if that fails
            self._models.move_to_end(name)
            yield model.path + b"/invoke"
        finally:
            model.users -= 1
            self._forget(model)

    async def make_room(self) -> bool:
        """Returns when a model that nobody uses is unloaded, for whoever was told that there is no memory. False where
        none is left that could be, or none was within model_unload_timeout."""
        gone = self._gone
        with trio.move_on_after(self._container.limits.model_unload_timeout):
            while self._gone == gone:
                if self._leaving < _LEAVING and (model := self._next_to_go()) is not None:
                    self._begin(model, partial(self._unload, model), load=False)
                    self._leaving += 1
                elif not self._leaving:
                    return False
                with trio.move_on_after(_PATIENCE):
                    await self._left.park()
        return self._gone > gone

    def _next_to_go(self) -> _Model | None:
        now = trio.current_time()
        return next((m for m in self._models.values() if m.idle and m.stays_until <= now), None)

    def lost(self, target: str) -> None:
        """The container does not know this model any more, whatever it said before."""
        model = self._models.get(model_name(model_url(self._prefix, target)))
        if model is not None and model.change is None:
            model.loaded = False

    def _begin_load(self, model: _Model, url: str) -> _Change:
        unattended = sum(1 for m in self._models.values() if m.change is not None and m.change.load and not m.users)
        if unattended >= _UNATTENDED:
            raise Overloaded(
                f"the container has not answered {unattended} loads yet whose callers have left "
                f"(model_load_timeout); try again later",
                refusal=Refusal.NO_PLACE,
            )
        return self._begin(model, partial(self._load, model, url), load=True)

    def _begin(self, model: _Model, work: Callable[[], Awaitable[None]], *, load: bool) -> _Change:
        if self._closed:
            raise WorkerLost("the worker of the container's model ended; try again")
        model.change = change = _Change(load)
        self._nursery.start_soon(self._run, model, change, work)
        return change

    async def _run(self, model: _Model, change: _Change, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (ModelError, NoAnswer) as e:
            change.error = e
            if not change.load:
                model.stays_until = trio.current_time() + _PAUSE
                log.warning("the container did not unload a model", extra={"model": model.name, "reason": str(e)})
        except trio.Cancelled:  # by the end of the nursery
            self.close()
            raise
        finally:
            model.change = None
            change.done.set()
            if not change.load:
                self._leaving -= 1
                self._left.unpark_all()
            self._forget(model)

    async def _unload(self, model: _Model) -> None:
        within = Within(self._container.limits.model_unload_timeout, "model_unload_timeout")
        status, text = await self._ask(b"DELETE", model.path, None, within)
        if status >= 300 and status != _UNKNOWN:
            raise refused(status, text, code="UnloadFailed", asked="DELETE /models")
        model.loaded = False
        self._gone += 1
        log.info("model evicted from the container", extra={"model": model.name})

    def _forget(self, model: _Model) -> None:
        unused = not (model.loaded or model.users or model.change)
        if unused and self._models.get(model.name) is model:
            del self._models[model.name]

    def _forget_one(self) -> None:
        """Where too many are remembered, the one that was not used for longest."""
        if len(self._models) >= _REMEMBERED and (model := next((m for m in self._models.values() if m.idle), None)):
            del self._models[model.name]

    async def _load(self, model: _Model, url: str) -> None:
        body = msgspec.json.encode({"model_name": model.name, "url": url})
        within = Within(self._container.limits.model_load_timeout, "model_load_timeout")
        surveyed = False
        while True:
            status, text = await self._ask(b"POST", b"/models", body, within)
            if status < 300 or status == _TAKEN:
                model.loaded = True
                log.info("model loaded by the container", extra={"model": model.name, "url": url, "status": status})
                return
            if status != NO_MEMORY:
                raise refused(status, text, code="LoadFailed", asked="POST /models")
            room = False
            with trio.move_on_at(within.deadline):
                room = await self.make_room()
                if not room and not surveyed:
                    surveyed = True
                    room = await self._survey(within)
            if not room:
                raise refused(status, text, code="InsufficientStorage", asked="POST /models")

    async def _survey(self, within: Within) -> bool:
        """Looks for models that the container has and we do not know of: of a load that was given up, or an earlier
        front's. Whether there are any."""
        found, token = 0, ""
        for _ in range(_PAGES):
            target = b"/models" + (f"?next_page_token={quote(token, safe='')}".encode() if token else b"")
            try:
                page = await self._page(target, within)
            except (NoAnswer, msgspec.DecodeError, RecursionError) as e:
                log.warning("the container did not list its models", extra={"reason": str(e)})
                break
            for listed in page.models:
                if found < _SURVEYED and _is_name(listed.model_name) and listed.model_name not in self._models:
                    self._models[listed.model_name] = _Model(listed.model_name, loaded=True)
                    self._models.move_to_end(listed.model_name, last=False)
                    found += 1
            token = page.next_page_token or ""
            if not token or len(token) > _TOKEN or found == _SURVEYED:
                break
        return found > 0

    async def _page(self, target: bytes, within: Within) -> _Page:
        status, text = await self._ask(b"GET", target, None, within, _LISTED)
        if status != 200:
            raise NoAnswer(f"the container answered {status} to GET /models")
        return msgspec.json.decode(text, type=_Page)

    async def _ask(
        self, method: bytes, target: bytes, body: bytes | None, within: Within, limit: int | None = None
    ) -> tuple[int, str]:
        """One request of the API: the status of its answer and as much of its text as `limit` allows."""
        headers = [(b"connection", b"close"), (b"accept", b"application/json"), AS_IT_IS]
        if body is not None:
            headers.append((b"content-type", b"application/json"))
        limit = limit or self._container.limits.error_text
        async with self._container.connect(within) as transport:
            peer = client.http1(transport)
            answer = await self._container.ask(peer, method, target, headers, within, body)
            if content_coding(answer):
                return answer.status, ""
            text = bytearray()
            with trio.move_on_at(within.deadline):
                try:
                    while len(text) < limit and (piece := await next_piece(peer)) is not None:
                        text += piece
                    return answer.status, text[:limit].decode(errors="replace")
                except (TransportLost, RemoteProtocolError) as e:
                    raise NoAnswer(f"the container's answer was cut off: {e}") from e
        raise NoAnswer(f"the container did not answer {within.words}", status=GATEWAY_TIMEOUT)


def _is_name(name: str) -> bool:
    """Whether it can stand in a path as one segment."""
    return name not in ("", ".", "..") and len(name) <= MAX_NAME
