"""Models that are loaded from folders and unloaded while the server runs, within a budget of memory."""

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
    """A model that is loaded."""

    name: str
    url: str
    """As it was given."""
    memory: int
    """Bytes of the budget that it holds."""


@final
class Repository:
    """Loads models from folders under `limits.roots` into a running supervisor, and unloads them.

    A name is taken from the moment its load begins until nothing of the model is left: no session, no thread, no module,
    no byte of the budget. Whoever comes in between is told so at once (Conflict), and never waits. Nothing of a load that
    fails stays behind. Models go in and out in tasks of the supervisor's, so that a caller who leaves leaves nothing
    half done.

    The budget: a model needs what its model.toml declares as `memory`, or its ModelSpec; where neither does, 1.2 times
    the bytes of its files. That is reserved before any of its code runs. What an undeclared model has made `resident` grow
    by, if that is more, is charged in its place, unless another model came or went meanwhile, when the growth would be
    nobody's in particular; of one in processes of its own, what those have. `resident` are the bytes of this process; give
    one that leaves out what requests hold.
    """

    def __init__(
        self, supervisor: Supervisor, limits: RepositoryLimits, *, resident: Callable[[], int] | None = None
    ) -> None:
        self._supervisor, self._limits = supervisor, limits
        self.holdings = Holdings(supervisor, limits)
        """Those that are there, and their memory."""
        self.loader = ModelLoader(supervisor, limits, self.holdings, resident or resident_bytes)
        """Their way in and out."""

    # -- what is there -----------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes of the budget that are reserved, or declared by models that are not the repository's."""
        return self.holdings.used

    def check_room(self, name: str, need: int) -> None:
        """InsufficientStorage where another version of a model, of so many bytes, does not fit beside the one there."""
        self.holdings.check_room(name, need)

    @property
    def names(self) -> list[str]:
        """All names that are taken, of models on their way in or out too."""
        return sorted(self.holdings.entries)

    def standings(self) -> dict[str, tuple[Worker | None, bool]]:
        """By each name that is taken the model's worker, where it has one, and whether it is on its way out."""
        return {
            name: (entry.worker, entry.state is EntryState.LEAVING) for name, entry in sorted(self.holdings.entries.items())
        }

    def list(self) -> list[LoadedModel]:
        """The models that are loaded, by name."""
        return [_told(entry) for _, entry in sorted(self.holdings.entries.items()) if entry.state is EntryState.READY]

    def get(self, name: str) -> LoadedModel:
        """A model that is loaded; NotFound otherwise."""
        entry = self.holdings.entries.get(name)
        if entry is None or entry.state is not EntryState.READY:
            raise NotFound(f"no model {show(name)} is loaded")
        return _told(entry)

    # -- for those who decide which models there are -----------------------------------------------------------------

    async def load(self, name: str, url: str, *, shown: str = "") -> LoadedModel:
        """Loads the model in the folder `url` as `name`; returns when it answers. `shown` is what the errors call the
        folder, as for `in_use`.

        Conflict at once where the name is taken. BadRequest and NotFound for a folder that is none, or not one of the
        roots'; BadModel for one with a mistake; InsufficientStorage where the model does not fit; LoadFailed for what
        its code raised; Unavailable where it has code, and too many threads of loads that were given up do not return.
        A caller who is cancelled has given the load up, and waits until it is undone; a thread that does not end is not
        waited for beyond 1.5 seconds, but keeps the name.
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

        New sessions find it gone at once, those that wait for a slot are answered, those that run have `unload_timeout`
        seconds, and then end as lost. NotFound where there is none, Conflict while it is being loaded and for a model of
        the configuration. Whoever asks while it is being unloaded waits for the same end. A caller who is cancelled is not
        waited for. Unavailable where a thread of the model does not return: its name and memory are free when it does.
        """
        entry = self.holdings.entries.get(name)
        if entry is None:
            if name in self._supervisor.workers or name in self._supervisor.configured:
                raise Conflict(f"model {show(name)} is of the server's configuration, and cannot be unloaded")
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
        """Loads a model of `load` or `in_use` anew from its folder while it serves; where `always` is False, only if a file
        of that has changed, come or gone. Returns when the new version answers. `shown` is as for `load`.

        The new version is read, loaded and warmed up beside the old one, and then takes over in one moment: no call is
        refused for it. Calls that run, and those that wait for a slot, end on the old version, which has `patience` seconds
        for that (`unload_timeout` unless given). Where it cannot be loaded the errors of `load` come out, and the old one
        serves on; both must fit. NotFound where there is none; Conflict while it is on its way in or out, or is reloaded
        already, and for a folder whose model is of another family now. A caller who is cancelled before the switch has given
        it up.
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

    # -- for those who want one to be there --------------------------------------------------------------------------

    @asynccontextmanager
    async def in_use(self, name: str, url: str, *, shown: str = "") -> AsyncIterator[Worker]:
        """The worker of a model, loaded first where it is not; within the block it is not unloaded for another's sake.

        All who want a model at once share one load, and its errors, which are those of `load`; it is given up when
        the last of them is cancelled. `shown` is what the errors call the folder, where whoever asks did not name the url
        himself; the log has the url. Where the model does not fit, models go that nobody uses, the least recently used
        first, until it does. One that is just being unloaded is waited for, by those who want it and by those who want its
        place, but not when all that is left of it is a thread that does not return: Unavailable for the former.

        Overloaded, at once, when all models that are left are in use: a session is never ended for another's model, so one
        that never ends, such as an endless stream, keeps its model's place for as long as it lasts, and whoever wants that
        place is told so each time he asks. InsufficientStorage where the model can never fit.
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
                    # it was told in the words of another: it fails once more in ours
            if entry.state is EntryState.READY and entry.worker is not None and not entry.worker.stopped.is_set():
                entry.users.count += 1
                self.holdings.entries.move_to_end(name)
                return entry
            while self.holdings.entries.get(name) is entry:
                if entry.stuck:
                    raise Unavailable(
                        f"model {show(name)} is out of service, and a thread of it does not end: there is no other before"
                    )
                await self.holdings.moved.park()

    # -- one model's life --------------------------------------------------------------------------------------------

    def _begin(self, name: str, url: str, shown: str) -> Entry:
        if not 1 <= len(name) <= _LONGEST_NAME or not name.isprintable():
            raise BadRequest(f"a model's name is of 1 to {_LONGEST_NAME} printable characters, not {show(name)}")
        if name in self._supervisor.workers or name in self._supervisor.configured:
            raise Conflict(f"model {show(name)} is of the server's configuration")
        entry = Entry(name, url, shown)
        self._supervisor.start_soon(self.loader.live, entry)
        self.holdings.entries[name] = entry
        self.holdings.all.add(entry)
        return entry

    async def _decided(self, entry: Entry) -> None:
        """Returns when the model is ready, raises why it is not. The last who leaves gives the load up."""
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
        if error is not None:  # one for each who asked: an exception has one traceback
            raise anew(error)


def _told(entry: Entry) -> LoadedModel:
    return LoadedModel(name=entry.name, url=entry.url, memory=entry.reserved or 0)
