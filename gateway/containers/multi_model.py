"""Loads the models of a multi-model container on first use and unloads them for others, as the platform does."""

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
_LISTED = 1024 * 1024  # the most bytes of one page in a list of models
_PAGES = 100  # the most pages of a list
_TOKEN = 4096  # the most characters of the token of the next page
_SURVEYED = 1000  # the most models that one survey adds: it needs some to unload, not all
# Models that are remembered. If a loaded one is forgotten, the container answers its next load with 409.
_REMEMBERED = 10_000
# The most loads whose callers have all disconnected: they go on, but must not pile up for a container that never answers.
_UNATTENDED = 64
# The most unloads at once. If one takes longer than _PATIENCE seconds, the next one begins beside it.
_LEAVING, _PATIENCE = 4, 5.0
_PAUSE = 60.0  # seconds before a model that could not be unloaded is tried again


@final
class _Change:
    """A load or an unload that runs."""

    def __init__(self, load: bool) -> None:
        self.load, self.done = load, trio.Event()
        self.error: ModelError | NoAnswer | None = None

    async def outcome(self) -> None:
        """Waits for the end of the change; raises a copy of its error for each waiting task."""
        await self.done.wait()
        match self.error:
            case ModelError() as e:
                raise ModelError(e.message, code=e.code, status=e.status) from e
            case NoAnswer() as e:
                raise NoAnswer(e.message, status=e.status) from e


@final
class _Model:
    """A model that the container has, or is asked to load."""

    def __init__(self, name: str, *, loaded: bool = False) -> None:
        self.name, self.loaded = name, loaded
        self.users = 0
        self.change: _Change | None = None
        self.stays_until = 0.0
        """The time on Trio's clock before which no unload is tried, because the last one failed."""

    @property
    def idle(self) -> bool:
        return self.loaded and not self.users and self.change is None

    @property
    def path(self) -> bytes:
        return b"/models/" + quote(self.name, safe="").encode()


class _Listed(msgspec.Struct, rename="camel"):
    model_name: str


class _Page(msgspec.Struct, rename="camel"):
    models: list[_Listed] = []  # safe as a default: msgspec copies it
    next_page_token: str | None = None


@final
class ContainerModels:
    """Decides which models a container holds, by its multi-model API, as SageMaker's platform does.

    A model is loaded on its first use; the answer 409, loaded already, counts as success. If the container has no memory
    (507), unused models are unloaded, the least recently used first, and it is asked again. Loads and unloads run in tasks
    of `nursery`, each with a time limit, so that a caller that disconnects leaves nothing half done.
    """

    def __init__(self, container: Container, prefix: str, nursery: trio.Nursery) -> None:
        self._container, self._prefix, self._nursery = container, prefix, nursery
        self._models: OrderedDict[str, _Model] = OrderedDict()  # the least recently used first
        self._leaving = self._gone = 0  # unloads that run, and unloads that have succeeded
        self._left = trio.lowlevel.ParkingLot()  # tasks that wait for the end of an unload
        self._closed = False

    def close(self) -> None:
        """Makes further loads and unloads fail with WorkerLost, because the nursery ends."""
        self._closed = True

    @asynccontextmanager
    async def in_use(self, target: str) -> AsyncIterator[bytes]:
        """Yields the path that invokes a target model, and loads the model first if needed. It is not unloaded within the
        block. BadRequest for an invalid target; ModelError with the container's status and text if it refuses the load;
        NoAnswer if the container does not answer; Overloaded if too many loads of disconnected callers are unanswered;
        WorkerLost if the model's worker ends meanwhile."""
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
                    await change.done.wait()  # an unload to make room; its error is not for this caller
            self._models.move_to_end(name)
            yield model.path + b"/invoke"
        finally:
            model.users -= 1
            self._forget(model)

    async def make_room(self) -> bool:
        """Unloads an unused model, after the container has answered that it has no memory. False if there is none to unload,
        or none was unloaded within `model_unload_timeout`."""
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
        """Notes that the container no longer has a model."""
        model = self._models.get(model_name(model_url(self._prefix, target)))
        if model is not None and model.change is None:
            model.loaded = False

    def _begin_load(self, model: _Model, url: str) -> _Change:
        unattended = sum(1 for m in self._models.values() if m.change is not None and m.change.load and not m.users)
        if unattended >= _UNATTENDED:
            raise Overloaded(
                f"the container has not answered {unattended} loads yet whose callers have disconnected "
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
        except trio.Cancelled:  # the nursery ends
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
        """Forgets the model that has been unused for longest, if too many are remembered."""
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
        """Asks the container for models that are not known here, such as those of an abandoned load or of an earlier
        gateway. True if there are some."""
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
        """Sends one request of the API. Returns the status of the answer and at most `limit` bytes of its text, by default
        `error_text`."""
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
    """True if the name can be one segment of a path."""
    return name not in ("", ".", "..") and len(name) <= MAX_NAME
