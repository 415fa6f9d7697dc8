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
from gateway.container_client import Container, NoAnswer, Within, next_piece
from gateway.errors import TransportLost
from gateway.target_model import model_name, model_url
from models.errors import ModelError
from protocols.errors import RemoteProtocolError

log = logging.getLogger("gateway.bridge")

NO_MEMORY = 507
_TAKEN, _UNKNOWN = 409, 404
_LISTED = 1024 * 1024  # bytes of a list of models that are read
_PAGES = 100


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
    in tasks of `nursery`: a caller who leaves leaves nothing half done.
    """

    def __init__(self, container: Container, prefix: str, nursery: trio.Nursery) -> None:
        self._container, self._prefix, self._nursery = container, prefix, nursery
        self._models: OrderedDict[str, _Model] = OrderedDict()  # the least recently used first

    @asynccontextmanager
    async def in_use(self, target: str) -> AsyncIterator[bytes]:
        """The path that invokes a target model, loaded first where it is not; it is not unloaded within the block.
        BadRequest for a target that is none, ModelError with the container's own status and text where it cannot be
        loaded, NoAnswer where the container says nothing."""
        url = model_url(self._prefix, target)
        name = model_name(url)
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = _Model(name)
        model.users += 1
        try:
            while model.change is not None or not model.loaded:
                change = model.change or self._begin(model, partial(self._load, model, url), load=True)
                if change.load:
                    await change.outcome()
                else:
                    await change.done.wait()  # it is being unloaded for another, who is told if that fails
            self._models.move_to_end(name)
            yield model.path + b"/invoke"
        finally:
            model.users -= 1
            self._forget(model)

    async def make_room(self) -> bool:
        """Unloads a model that nobody uses, for whoever was told that there is no memory. False where none is left."""
        idle = (m for m in self._models.values() if m.loaded and not m.users and m.change is None)
        model = next(idle, None)
        if model is None:
            return False
        await self._begin(model, partial(self._unload, model), load=False).outcome()
        return True

    def _begin(self, model: _Model, work: Callable[[], Awaitable[None]], *, load: bool) -> _Change:
        model.change = change = _Change(load)
        self._nursery.start_soon(self._run, model, change, work)
        return change

    async def _run(self, model: _Model, change: _Change, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (ModelError, NoAnswer) as e:
            change.error = e
        finally:
            model.change = None
            change.done.set()
            self._forget(model)

    async def _unload(self, model: _Model) -> None:
        within = Within(self._container.limits.model_unload_timeout, "model_unload_timeout")
        status, text = await self._ask(b"DELETE", model.path, None, within)
        if status >= 300 and status != _UNKNOWN:
            raise ModelError(f"model {model.name} cannot be unloaded: {text}", code="UnloadFailed", status=status)
        model.loaded = False
        log.info("model evicted from the container", extra={"model": model.name})

    def lost(self, path: bytes) -> None:
        """The container does not know this model any more, whatever it said before."""
        for model in self._models.values():
            if path == model.path + b"/invoke" and model.change is None:
                model.loaded = False

    def _forget(self, model: _Model) -> None:
        unused = not (model.loaded or model.users or model.change)
        if unused and self._models.get(model.name) is model:
            del self._models[model.name]

    async def _load(self, model: _Model, url: str) -> None:
        body = msgspec.json.encode({"model_name": model.name, "url": url})
        surveyed = False
        while True:
            within = Within(self._container.limits.model_load_timeout, "model_load_timeout")
            status, text = await self._ask(b"POST", b"/models", body, within)
            if status < 300 or status == _TAKEN:
                model.loaded = True
                log.info("model loaded by the container", extra={"model": model.name, "url": url, "status": status})
                return
            if status != NO_MEMORY:
                raise ModelError(text, code="LoadFailed", status=status if status >= 400 else 502)
            if await self.make_room():
                continue
            if surveyed or not await self._survey():
                raise ModelError(text, code="InsufficientStorage", status=status)
            surveyed = True

    async def _survey(self) -> bool:
        """Looks for models that the container has and we do not know of: of a load that was given up, or an earlier
        front's. Whether there are any."""
        found, token = False, ""
        for _ in range(_PAGES):
            target = b"/models" + (f"?next_page_token={quote(token, safe='')}".encode() if token else b"")
            within = Within(self._container.limits.invocation_timeout, "invocation_timeout")
            status, text = await self._ask(b"GET", target, None, within, _LISTED)
            try:
                page = msgspec.json.decode(text, type=_Page) if status == 200 else _Page()
            except msgspec.DecodeError:
                log.warning("the container's list of models is none", extra={"text": text[:200]})
                break
            for listed in page.models:
                if listed.model_name not in self._models:
                    self._models[listed.model_name] = _Model(listed.model_name, loaded=True)
                    self._models.move_to_end(listed.model_name, last=False)
                    found = True
            token = page.next_page_token or ""
            if not token:
                break
        return found

    async def _ask(
        self, method: bytes, target: bytes, body: bytes | None, within: Within, limit: int | None = None
    ) -> tuple[int, str]:
        """One request of the API: the status of its answer and as much of its text as `limit` allows."""
        headers = [(b"connection", b"close"), (b"accept", b"application/json")]
        if body is not None:
            headers.append((b"content-type", b"application/json"))
        limit = limit or self._container.limits.error_text
        async with self._container.connect(within) as transport:
            peer = client.http1(transport)
            answer = await self._container.ask(peer, method, target, headers, within, body)
            text = bytearray()
            with trio.move_on_at(within.deadline):
                try:
                    while len(text) < limit and (piece := await next_piece(peer)) is not None:
                        text += piece
                    return answer.status, text[:limit].decode(errors="replace")
                except (TransportLost, RemoteProtocolError) as e:
                    raise NoAnswer(f"the container's answer was cut off: {e}") from e
        raise NoAnswer(f"the container did not answer {within.words}")
