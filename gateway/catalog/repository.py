"""Loads models from folders and unloads them while the server runs, within a budget of memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import final

import trio

from gateway.catalog.entry import GRACE, UNLOAD_GRACE, Entry, EntryState, anew
from gateway.catalog.folder import stamp_of
from gateway.catalog.holdings import Holdings
from gateway.catalog.limits import RepositoryLimits
from gateway.catalog.loader import ModelLoader
from gateway.catalog.process_memory import resident_bytes
from gateway.config.text import show
from gateway.errors import BadRequest, Conflict, GatewayError, NotFound, Unavailable
from gateway.workers.supervisor import Supervisor
from gateway.workers.worker import Worker
from models.blocking import run_step

_LONGEST_NAME = 1024


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A loaded model of the repository."""

    name: str
    url: str
    """The url that the load was asked for, unchanged."""
    memory: int
    """Bytes of the budget that the model holds."""


@final
class Repository:
    """Loads models from folders under `limits.roots` into a running supervisor, and unloads them.

    A name is taken from the moment its load begins until nothing of the model is left: no session, no thread, no module,
    no byte of the budget. Until then, another load of the name fails at once with Conflict. A failed load leaves nothing
    behind. Loads and unloads run in tasks of the supervisor, so that a caller that disconnects leaves nothing half done.

    The budget: a model needs the `memory` that its model.toml or its ModelSpec declares; by default, 1.2 times the bytes of
    its files. That is reserved before any of its code runs. If an undeclared model made `resident` grow by more during its
    load, the growth is charged instead, unless another model came or went meanwhile. For a model in processes, the bytes
    of those processes take the place of the growth. `resident` returns the bytes of this process, by default all of them;
    pass one that leaves out the bytes of requests.
    """

    def __init__(
        self, supervisor: Supervisor, limits: RepositoryLimits, *, resident: Callable[[], int] | None = None
    ) -> None:
        self._supervisor, self._limits = supervisor, limits
        self.holdings = Holdings(supervisor, limits)
        """The entries of the models, and their memory."""
        self.loader = ModelLoader(supervisor, limits, self.holdings, resident or resident_bytes)
        """Runs the loads and unloads."""

    # -- the models --------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes of the budget in use: reserved here, or declared by models outside the repository."""
        return self.holdings.used

    def check_room(self, name: str, need: int) -> None:
        """Raises InsufficientStorage if a new version of a model, of `need` bytes, does not fit beside the serving one."""
        self.holdings.check_room(name, need)

    @property
    def names(self) -> list[str]:
        """All taken names, including those of models that are being loaded or unloaded."""
        return sorted(self.holdings.entries)

    def standings(self) -> dict[str, tuple[Worker | None, bool]]:
        """Returns, for each taken name, the model's worker if it has one, and True if the model is being unloaded."""
        return {
            name: (entry.worker, entry.state is EntryState.LEAVING) for name, entry in sorted(self.holdings.entries.items())
        }

    def list(self) -> list[LoadedModel]:
        """Returns the loaded models, in the order of their names."""
        return [_told(entry) for _, entry in sorted(self.holdings.entries.items()) if entry.state is EntryState.READY]

    def get(self, name: str) -> LoadedModel:
        """Returns a loaded model; NotFound if there is none of that name."""
        entry = self.holdings.entries.get(name)
        if entry is None or entry.state is not EntryState.READY:
            raise NotFound(f"no model {show(name)} is loaded")
        return _told(entry)

    # -- explicit loads and unloads ----------------------------------------------------------------------------------

    async def load(self, name: str, url: str, *, shown: str = "") -> LoadedModel:
        """Loads the model in the folder `url` as `name`; returns when it accepts calls. Errors name the folder `shown`, as
        for `in_use`.

        Conflict at once if the name is taken, and once the folder is read if a served name of the model is. BadRequest or
        NotFound if `url` is not a folder, or not below a root; BadModel for a mistake in the folder; InsufficientStorage if
        the model does not fit; LoadFailed if its code raised; Unavailable if it has code and too many threads of abandoned
        loads do not return. A caller that is cancelled gives the load up and waits until it is undone. It waits at most 1.5
        seconds for a thread, which keeps the name taken.
        """
        taken = self.holdings.entries.get(name)
        if taken is not None:
            raise Conflict(f"model {show(name)} {taken.state.value}")
        entry = self._begin(name, url, shown)
        try:
            await self._decided(entry)
        except trio.Cancelled:
            if entry.idle:  # it became ready in the moment its caller left
                self.holdings.retire(entry)
                with trio.move_on_after(GRACE, shield=True):
                    await entry.gone.wait()
            raise
        return _told(entry)

    async def unload(self, name: str) -> None:
        """Unloads a model that `load` or `in_use` has loaded; returns when nothing of it is left.

        New sessions do not find the model from now on. Sessions that wait for a slot get an error. Running sessions have
        `unload_timeout` seconds to end, and are then ended as lost. A second unload waits for the end of the first. The
        unload continues if the caller is cancelled.

        NotFound if no such model is loaded. Conflict while it is being loaded, and for a configured model. Unavailable if a
        thread of the model does not return: the name and the memory are free only when it does.
        """
        entry = self.holdings.entries.get(name)
        if entry is None:
            if name in self._supervisor.workers or name in self._supervisor.configured:
                raise Conflict(f"model {show(name)} is in the server's configuration, and cannot be unloaded")
            raise NotFound(f"no model {show(name)} is loaded")
        if entry.state is EntryState.LOADING:
            raise Conflict(f"model {show(name)} {entry.state.value}")
        self.holdings.retire(entry, self._limits.unload_timeout)
        versions = [other for other in self.holdings.all if other.name == name]
        if name in self.holdings.arriving:
            self.holdings.arriving[name].load_scope.cancel()
        with trio.move_on_after(GRACE if entry.stuck else self._limits.unload_timeout + UNLOAD_GRACE):
            for version in versions:
                await version.gone.wait()
        if not all(version.gone.is_set() for version in versions):
            raise Unavailable(f"model {show(name)} is out of service, but a thread of it does not end: it holds its memory")

    async def reload(self, name: str, *, shown: str = "", patience: float | None = None, always: bool = True) -> LoadedModel:
        """Loads a model of `load` or `in_use` again from its folder while it serves. If `always` is False, it loads only
        if a file of the folder has changed, appeared or disappeared. Returns when the new version accepts calls. `shown` is
        as for `load`.

        The new version is read, loaded and warmed up beside the old one, and then takes over in one moment: no call is
        refused. Calls that run or wait for a slot end on the old version, which has `patience` seconds for them, by default
        `unload_timeout`. If the new version cannot be loaded, the errors of `load` are raised and the old one goes on. Both
        versions must fit into the budget. NotFound if no such model is loaded. Conflict while it is being loaded, unloaded
        or reloaded, and if the folder's model is of another family now. A caller that is cancelled before the switch gives
        the reload up.
        """
        old = self._reloadable(name)
        if not always:
            if await run_step(partial(stamp_of, old.folder), limiter=self.loader.reads) == old.stamp:
                return _told(old)
            old = self._reloadable(name)
        entry = Entry(name, old.url, shown)
        entry.before = old
        entry.patience = self._limits.unload_timeout if patience is None else patience
        self._supervisor.start_soon(self.loader.live, entry)
        self.holdings.arriving[name] = entry
        self.holdings.all.add(entry)
        await self._decided(entry)
        return _told(entry)

    def _reloadable(self, name: str) -> Entry:
        entry = self.holdings.entries.get(name)
        if entry is None:
            raise NotFound(f"no model {show(name)} is loaded")
        if entry.state is not EntryState.READY:
            raise Conflict(f"model {show(name)} {entry.state.value}")
        if name in self.holdings.arriving:
            raise Conflict(f"model {show(name)} is being reloaded")
        return entry

    # -- loads on demand ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def in_use(self, name: str, url: str, *, shown: str = "") -> AsyncIterator[Worker]:
        """Returns the worker of a model, and loads the model first if needed. Within the block the model is not unloaded to
        make room for another.

        Concurrent callers share one load and its errors, which are those of `load`; the load is given up when the last of
        them is cancelled. Errors name the folder `shown` if the client did not supply the url; the log has the url. If the
        model does not fit, unused models are unloaded, the least recently used first. The caller waits for a model that is
        being unloaded, its own or one that makes room. Unavailable if only a thread that does not return is left of its own
        model.

        Overloaded, at once, if all remaining models are in use: no session is ended to make room. An endless stream
        therefore keeps the place of its model for as long as it lasts. InsufficientStorage if the model can never fit.
        """
        entry = await self._wanted(name, url, shown)
        worker = entry.worker
        assert worker is not None
        try:
            yield worker
        finally:
            entry.users.count -= 1
            self.holdings.moved.unpark_all()

    async def _wanted(self, name: str, url: str, shown: str = "") -> Entry:
        while True:
            entry = self.holdings.entries.get(name) or self._begin(name, url, shown)
            if entry.url != url and entry.state is not EntryState.LEAVING:
                raise Conflict(f"model {show(name)} {entry.state.value} from another url")
            if entry.state is EntryState.LOADING:
                entry.evicts = True
                try:
                    await self._decided(entry)
                except GatewayError:
                    if entry.shown == shown:
                        raise
                    # its text names the folder as another caller does: load again for an error in our words
            if entry.state is EntryState.READY and entry.worker is not None and not entry.worker.stopped.is_set():
                entry.users.count += 1
                self.holdings.entries.move_to_end(name)
                return entry
            while self.holdings.entries.get(name) is entry:
                if entry.stuck:
                    raise Unavailable(
                        f"model {show(name)} is out of service, and cannot be loaded again before a thread of it ends"
                    )
                await self.holdings.moved.park()

    # -- one model's life --------------------------------------------------------------------------------------------

    def _begin(self, name: str, url: str, shown: str) -> Entry:
        if not 1 <= len(name) <= _LONGEST_NAME or not name.isprintable():
            raise BadRequest(f"a model's name must be 1 to {_LONGEST_NAME} printable characters, not {show(name)}")
        if name in self._supervisor.workers or name in self._supervisor.configured:
            raise Conflict(f"model {show(name)} is in the server's configuration")
        if (owner := self._supervisor.served.get(name)) is not None:
            raise Conflict(f"model {show(name)} cannot be loaded: that is a served name of model {show(owner.name)}")
        entry = Entry(name, url, shown)
        self._supervisor.start_soon(self.loader.live, entry)
        self.holdings.entries[name] = entry
        self.holdings.all.add(entry)
        return entry

    async def _decided(self, entry: Entry) -> None:
        """Returns when the model is ready, or raises its error. If the last waiter is cancelled, the load is given up."""
        entry.waiters += 1
        try:
            await entry.decided.wait()
        finally:
            entry.waiters -= 1
            if not entry.waiters and not entry.decided.is_set():
                if entry.state is EntryState.LOADING:
                    entry.state = EntryState.LEAVING
                    entry.load_scope.cancel()
                with trio.move_on_after(GRACE, shield=True):
                    await entry.gone.wait()
        error = entry.error
        if error is not None:  # a copy for each waiter: an exception has one traceback
            raise anew(error)


def _told(entry: Entry) -> LoadedModel:
    return LoadedModel(name=entry.name, url=entry.url, memory=entry.reserved or 0)
