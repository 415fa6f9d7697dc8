"""Models that are loaded from folders and unloaded while the server runs, within a budget of memory."""

from __future__ import annotations

import ctypes
import enum
import gc
import itertools
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import final

import trio

from gateway.catalog.folder import ModelFolder, find_folder, forget, load_error, make_spec, read_folder, stamp_of
from gateway.config import ModelConfig
from gateway.config.text import show
from gateway.doorbell import Doorbell
from gateway.errors import (
    BadRequest,
    Conflict,
    GatewayError,
    InsufficientStorage,
    LoadFailed,
    NotFound,
    Overloaded,
    Refusal,
    Unavailable,
)
from gateway.workers.supervisor import Supervisor
from gateway.workers.worker import Worker
from models.blocking import StepHolder, detached, in_thread, run_step, set_step_holder
from models.spec import LOAD_TIMEOUT, ModelSpec

log = logging.getLogger("gateway.repository")

_LONGEST_NAME = 1024
# What a load that was given up has to end in before whoever gave it up goes on without it: only a thread lasts longer. In a
# drain it is part of the time that an exchange has for its goodbye, and must leave most of that.
_GRACE = 1.5
# What an unload may take beyond `unload_timeout`: cancelled sessions, the clean-up of load(), both bounded by the worker.
_UNLOAD_GRACE = 15.0
_READS = 4  # at once, of what no code of a model's has a part in
_IMPORTS = 4  # at once; one that is given up makes place for the next, though its thread may stay
_ABANDONED = 16  # threads that stay; no more code is begun then
_M_ARENA_MAX = -8  # glibc's malloc.h
_numbers = itertools.count(1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryLimits:
    """From where models may be loaded, and how much of them."""

    roots: tuple[str, ...] = ()
    """Folders that models may be in."""
    code_roots: tuple[str, ...] = ()
    """Folders whose model.py may run."""
    memory: int = 1024**3
    """Bytes that all models may need together."""
    models: int = 1000
    """Models at once, those included that are on their way in or out."""
    unload_timeout: float = 60.0
    """Seconds that sessions under way may go on while their model is unloaded."""
    defaults: ModelConfig = field(default_factory=lambda: ModelConfig(factory=""))
    """How a model is served where its folder does not say."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is loaded."""

    name: str
    url: str
    """As it was given."""
    memory: int
    """Bytes of the budget that it holds."""


class _State(enum.Enum):
    LOADING = "is being loaded"
    READY = "is loaded already"
    LEAVING = "is still being unloaded"


class _Step(enum.Enum):
    """What a load is at, and what it is to have taken too long for that."""

    READ = "its folder was not read within"
    WAIT = "the code of others is run before it, and was not over within"
    RUN = "its code took longer than"


@final
class _Users:
    """Those who want a model to stay, whichever version of it they have chosen: they are sent on to the next."""

    count = 0


@final
class _Entry(StepHolder):
    """A name that is taken, from the first moment of a load until nothing of the model is left."""

    def __init__(self, name: str, url: str, shown: str) -> None:
        self.name, self.url, self.shown = name, url, shown
        self.state = _State.LOADING
        self.module = f"everywire_model_{next(_numbers)}"
        self.folder, self.stamp = "", 0
        self.before: _Entry | None = None
        """The version that this one is to replace."""
        self.worker: Worker | None = None
        self.error: GatewayError | None = None
        self.told = False
        """True if the load's worker has logged its error already."""
        self.reserved: int | None = None
        self.measured = 0
        self.has_cycles = True
        """Whether what it was made of may hold itself, so that only the garbage collector finds it: functions and the
        module that they are of do. What the library loads does not, unless it fails."""
        self.evicts = False
        """Whether somebody wants it so much that others may go for it."""
        self.patience = 0.0
        """Seconds that calls of the version before have to end."""
        self.evicted_for: _Entry | None = None
        """Whose place this one's is to be."""
        self.waiters, self.users = 0, _Users()
        self.load_scope, self.step = trio.CancelScope(), _Step.READ
        self.decided = trio.Event()
        """It is ready, or `error` says why not."""
        self.gone = trio.Event()
        self.stuck = False
        """All of it has left but a thread that does not return: nobody knows when it goes."""
        self.threads, self._bell = 0, Doorbell()
        """Those of its load that have not returned."""

    @property
    def idle(self) -> bool:
        if self.state is not _State.READY or self.users.count or self.waiters:
            return False
        return self.worker is not None and not self.worker.slots.live and not self.worker.slots.in_use

    # a holder of blocking steps: the name stays taken until the last thread of a load has returned

    def hold(self, *, stopping: bool = True) -> None:
        self.threads += 1

    def release(self) -> None:
        self.threads -= 1
        self._bell.ring()

    async def quiet(self) -> None:
        """Returns when no session and no thread of this model runs any more."""
        if self.worker is not None:
            await self.worker.slots.all_left()
        while self.threads:
            await self._bell.wait()


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
    nobody's in particular. `resident` are the bytes of this process; give one that leaves out what requests hold.
    """

    def __init__(
        self, supervisor: Supervisor, limits: RepositoryLimits, *, resident: Callable[[], int] | None = None
    ) -> None:
        self._supervisor, self._limits = supervisor, limits
        self._resident = resident or resident_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the least recently used first
        self._arriving: dict[str, _Entry] = {}
        """Other versions of models that are loaded, on their way in."""
        self._all: set[_Entry] = set()
        """Those, and what is left of versions that were replaced."""
        self._comings_and_goings = 0
        self._reads = trio.CapacityLimiter(_READS)
        self._imports = trio.Semaphore(_IMPORTS)
        self._collecting = trio.CapacityLimiter(1)
        self._moved = trio.lowlevel.ParkingLot()
        """Those who wait for a model to go look again: one has gone, is stuck, or has lost a user."""

    # -- what is there -----------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes of the budget that are reserved, or declared by models that are not the repository's."""
        return self._used_beside(None)

    def _used_beside(self, entry: _Entry | None) -> int:
        reserved = sum(other.reserved or 0 for other in self._all if other is not entry)
        return reserved + sum(need for name, need in self._supervisor.needs.items() if name not in self._entries)

    def check_room(self, name: str, need: int) -> None:
        """InsufficientStorage where another version of a model, of so many bytes, does not fit beside the one there."""
        if (used := self.used) + need > self._limits.memory:
            raise InsufficientStorage(
                f"model {show(name)} needs {need} bytes beside the version that serves, and {used} of {self._limits.memory} "
                "are in use (repository.memory): unload it before it is loaded again"
            )

    @property
    def names(self) -> list[str]:
        """All names that are taken, of models on their way in or out too."""
        return sorted(self._entries)

    def standings(self) -> dict[str, tuple[Worker | None, bool]]:
        """By each name that is taken the model's worker, where it has one, and whether it is on its way out."""
        return {name: (entry.worker, entry.state is _State.LEAVING) for name, entry in sorted(self._entries.items())}

    def list(self) -> list[LoadedModel]:
        """The models that are loaded, by name."""
        return [_told(entry) for _, entry in sorted(self._entries.items()) if entry.state is _State.READY]

    def get(self, name: str) -> LoadedModel:
        """A model that is loaded; NotFound otherwise."""
        entry = self._entries.get(name)
        if entry is None or entry.state is not _State.READY:
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
        taken = self._entries.get(name)
        if taken is not None:
            raise Conflict(f"model {show(name)} {taken.state.value}")
        entry = self._begin(name, url, shown)
        try:
            await self._decided(entry)
        except trio.Cancelled:
            if entry.idle:  # it became ready in the moment its caller left
                self._retire(entry)
                with trio.move_on_after(_GRACE, shield=True):
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
        entry = self._entries.get(name)
        if entry is None:
            if name in self._supervisor.workers or name in self._supervisor.configured:
                raise Conflict(f"model {show(name)} is of the server's configuration, and cannot be unloaded")
            raise NotFound(f"no model {show(name)} is loaded")
        if entry.state is _State.LOADING:
            raise Conflict(f"model {show(name)} {entry.state.value}")
        self._retire(entry, self._limits.unload_timeout)
        versions = [other for other in self._all if other.name == name]
        if name in self._arriving:
            self._arriving[name].load_scope.cancel()
        with trio.move_on_after(_GRACE if entry.stuck else self._limits.unload_timeout + _UNLOAD_GRACE):
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
            if await run_step(partial(stamp_of, old.folder), limiter=self._reads) == old.stamp:
                return _told(old)
            old = self._reloadable(name)
        entry = _Entry(name, old.url, shown)
        entry.before = old
        entry.patience = self._limits.unload_timeout if patience is None else patience
        self._supervisor.start_soon(self._live, entry)
        self._arriving[name] = entry
        self._all.add(entry)
        await self._decided(entry)
        return _told(entry)

    def _reloadable(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise NotFound(f"no model {show(name)} is loaded")
        if entry.state is not _State.READY:
            raise Conflict(f"model {show(name)} {entry.state.value}")
        if name in self._arriving:
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
            self._moved.unpark_all()

    async def _wanted(self, name: str, url: str, shown: str = "") -> _Entry:
        while True:
            entry = self._entries.get(name) or self._begin(name, url, shown)
            if entry.url != url and entry.state is not _State.LEAVING:
                raise Conflict(f"model {show(name)} {entry.state.value} from another url")
            if entry.state is _State.LOADING:
                entry.evicts = True
                try:
                    await self._decided(entry)
                except GatewayError:
                    if entry.shown == shown:
                        raise
                    # it was told in the words of another: it fails once more in ours
            if entry.state is _State.READY and entry.worker is not None and not entry.worker.stopped.is_set():
                entry.users.count += 1
                self._entries.move_to_end(name)
                return entry
            while self._entries.get(name) is entry:
                if entry.stuck:
                    raise Unavailable(
                        f"model {show(name)} is out of service, and a thread of it does not end: there is no other before"
                    )
                await self._moved.park()

    # -- one model's life --------------------------------------------------------------------------------------------

    def _begin(self, name: str, url: str, shown: str) -> _Entry:
        if not 1 <= len(name) <= _LONGEST_NAME or not name.isprintable():
            raise BadRequest(f"a model's name is of 1 to {_LONGEST_NAME} printable characters, not {show(name)}")
        if name in self._supervisor.workers or name in self._supervisor.configured:
            raise Conflict(f"model {show(name)} is of the server's configuration")
        entry = _Entry(name, url, shown)
        self._supervisor.start_soon(self._live, entry)
        self._entries[name] = entry
        self._all.add(entry)
        return entry

    async def _decided(self, entry: _Entry) -> None:
        """Returns when the model is ready, raises why it is not. The last who leaves gives the load up."""
        entry.waiters += 1
        try:
            await entry.decided.wait()
        finally:
            entry.waiters -= 1
            if not entry.waiters and not entry.decided.is_set():
                if entry.state is _State.LOADING:
                    entry.state = _State.LEAVING
                    entry.load_scope.cancel()
                with trio.move_on_after(_GRACE, shield=True):
                    await entry.gone.wait()
        error = entry.error
        if error is not None:  # one for each who asked: an exception has one traceback
            raise _anew(error)

    def _retire(self, entry: _Entry, patience: float = 0.0) -> None:
        if entry.state is _State.READY:
            entry.state = _State.LEAVING
            self._comings_and_goings += 1
            if entry.worker is not None:
                self._supervisor.retire(entry.worker, patience)

    async def _live(self, entry: _Entry) -> None:
        """All of it, in a task of its own: loading, until it has left, and what is left to do then."""
        set_step_holder(entry)
        try:
            await self._load(entry)
            if entry.error is None:
                assert entry.worker is not None
                await entry.worker.stopped.wait()
            entry.state = _State.LEAVING
            if not await self._discard(entry, _GRACE):
                log.warning("a thread of a model does not end", extra={"model": entry.name, "url": entry.url})
                entry.stuck = True
                entry.decided.set()  # who asked for the load need not wait for the rest
                self._moved.unpark_all()
                await self._discard(entry)
        finally:
            entry.error = entry.error or Unavailable(f"model {show(entry.name)} is being unloaded")
            entry.state, entry.worker, entry.reserved = _State.LEAVING, None, None
            forget(entry.module, entry.folder)
            self._all.remove(entry)
            for table in (self._entries, self._arriving):
                if table.get(entry.name) is entry:
                    del table[entry.name]
            self._comings_and_goings += 1
            entry.decided.set()
            entry.gone.set()
            self._moved.unpark_all()

    async def _load(self, entry: _Entry) -> None:
        """Ends with a model that is ready, or with `error`."""
        try:
            with entry.load_scope:
                await self._bring_in(entry)
        except GatewayError as e:
            entry.error = _anew(e)
        except Exception:
            log.exception("loading failed", extra={"model": entry.name})
            entry.error = LoadFailed(f"model {show(entry.name)} cannot be loaded; the server's log says why")
        if entry.load_scope.cancelled_caught:
            entry.error = self._cut_short(entry)
        if entry.error is None:
            entry.decided.set()
            log.info("model loaded", extra={"model": entry.name, "url": entry.url, "memory": entry.reserved})
        else:
            # a failed reload is an error though the old version serves on: nobody would see that the new one does not
            failed = isinstance(entry.error, LoadFailed) or (
                entry.before is not None and not isinstance(entry.error, Unavailable | Conflict)
            )
            log.log(
                logging.ERROR if failed and not entry.told else logging.INFO,
                "model not loaded" if entry.before is None else "model not reloaded",
                extra={"model": entry.name, "url": entry.url, "reason": entry.error.message},
            )

    def _cut_short(self, entry: _Entry) -> GatewayError:
        if trio.current_time() < entry.load_scope.deadline:
            return Unavailable(f"the load of model {show(entry.name)} was given up")
        kind = Unavailable if entry.step is _Step.WAIT else LoadFailed
        return kind(f"model {show(entry.name)} cannot be loaded: {entry.step.value} {self._patience:g} s")

    @property
    def _patience(self) -> float:
        """Seconds for each step of a load until the worker has it, which has the model's own."""
        return self._limits.defaults.load_timeout or LOAD_TIMEOUT

    def _at(self, entry: _Entry, step: _Step) -> None:
        entry.step, entry.load_scope.deadline = step, trio.current_time() + self._patience

    async def _bring_in(self, entry: _Entry) -> None:
        self._at(entry, _Step.READ)
        folder = await run_step(partial(self._read, entry), limiter=self._reads)
        entry.folder, entry.stamp = folder.path, folder.stamp
        until = float("inf")
        while True:
            full: GatewayError
            try:
                await self._bring_in_once(entry, folder)
                return
            except InsufficientStorage as e:
                full = _anew(e)
            entry.load_scope.deadline = float("inf")
            if not await self._discard(entry, _GRACE):
                raise _anew(full)
            until = min(until, trio.current_time() + self._limits.unload_timeout + _UNLOAD_GRACE)
            need = max(folder.need, entry.measured)
            if not await self._make_room(entry, need, until):
                if entry.evicts and need <= self._limits.memory:  # it will fit when others are done
                    held = ", or held by threads that do not end" if any(e.stuck for e in self._all) else ""
                    said = f"{full.message}: all of them in use{held}; try again later"
                    raise Overloaded(said, refusal=Refusal.NO_PLACE)
                raise _anew(full)

    def _read(self, entry: _Entry) -> ModelFolder:
        path = find_folder(entry.url, self._limits.roots, shown=entry.shown)
        limits = self._limits
        return read_folder(path, code=limits.code_roots, defaults=limits.defaults, shown=entry.shown)

    async def _bring_in_once(self, entry: _Entry, folder: ModelFolder) -> None:
        self._reserve(entry, max(folder.need, entry.measured))
        self._comings_and_goings += 1
        moment, before = self._comings_and_goings, self._resident()
        spec = await self._spec(entry, folder)
        if spec.memory:
            self._reserve(entry, spec.memory)
        entry.load_scope.deadline = float("inf")  # the worker has the model's own
        await self._start(entry, folder, spec)
        entry.has_cycles = not folder.config.factory
        if not spec.memory and moment == self._comings_and_goings:
            entry.measured = self._resident() - before
        if entry.before is not None:
            entry.reserved = max(entry.reserved or 0, entry.measured)
            self._switch(entry, entry.before)
            return
        if entry.measured:
            self._reserve(entry, max(folder.need, entry.measured))
        self._comings_and_goings += 1
        await trio.lowlevel.checkpoint_if_cancelled()  # all who wanted it may have left in this moment
        entry.state = _State.READY

    def _switch(self, entry: _Entry, old: _Entry) -> None:
        """The new version's worker has taken over: from here on nothing fails."""
        entry.state, old.state = _State.READY, _State.LEAVING
        entry.users, entry.before = old.users, None
        self._entries[entry.name] = entry
        del self._arriving[entry.name]
        self._comings_and_goings += 1
        self._moved.unpark_all()

    async def _spec(self, entry: _Entry, folder: ModelFolder) -> ModelSpec:
        make = partial(make_spec, folder, entry.name, entry.module)
        if folder.config.factory:
            self._at(entry, _Step.READ)
            return await run_step(make, limiter=self._reads)
        self._check_threads(entry)
        self._at(entry, _Step.WAIT)
        async with self._imports:
            self._check_threads(entry)
            self._at(entry, _Step.RUN)
            return await run_step(make, limiter=trio.CapacityLimiter(1))  # the place is all that it has to wait for

    def _check_threads(self, entry: _Entry) -> None:
        """Threads that do not return are never ended, so there is an end to beginning more."""
        abandoned = sum(other.threads for other in self._all if other.state is _State.LEAVING)
        if abandoned >= _ABANDONED:
            raise Unavailable(
                f"model {show(entry.name)} cannot be loaded: it has code, and {abandoned} threads of loads that were given "
                "up do not end; none is begun until some do, or the server is restarted"
            )

    async def _start(self, entry: _Entry, folder: ModelFolder, spec: ModelSpec) -> None:
        failure: GatewayError
        old = entry.before and entry.before.worker
        try:
            if entry.before is None:
                entry.worker = await self._supervisor.load(spec)
            elif old is None:
                raise Conflict(f"model {show(entry.name)} was unloaded while it was reloaded")
            elif spec.family is not old.spec.family:
                raise Conflict(
                    f"model {show(entry.name)} is of {old.spec.family.value}, and in its folder is one of "
                    f"{spec.family.value} now: unload it before it is loaded again"
                )
            else:
                entry.worker = await self._supervisor.reload(spec, entry.patience)
            return
        except GatewayError:
            raise
        except (Exception, SystemExit, BaseExceptionGroup) as e:
            entry.told = True  # by its worker
            failure = load_error(e, entry.name, folder)
            detached(e)  # out of a thread, or a warm-up, it is in a cycle, which would keep the model
        try:
            raise failure  # outside: what the traceback holds is the failed model's memory
        finally:
            del failure

    def _reserve(self, entry: _Entry, need: int) -> None:
        limits = self._limits
        used = self._used_beside(entry)
        others = [other for other in self._all if other is not entry and other.reserved is not None]
        if used + need > limits.memory:
            raise InsufficientStorage(
                f"model {show(entry.name)} needs {need} bytes, and {used} of {limits.memory} are in use (repository.memory)"
            )
        if len(others) >= limits.models:
            raise InsufficientStorage(f"{len(others)} models are loaded, and no more may be (repository.models)")
        entry.reserved = need

    async def _make_room(self, entry: _Entry, need: int, until: float) -> bool:
        """Unloads the model that nobody uses for the longest time; True when that has gone, or another that was on its way
        out, False where none will go, or none has until then."""
        if not entry.evicts or need > self._limits.memory:
            return False
        with trio.CancelScope(deadline=until):
            while awaited := self._going(entry):
                await self._moved.park()
                if any(other.gone.is_set() for other in awaited):
                    return True
        return False

    def _going(self, entry: _Entry) -> Sequence[_Entry]:
        """Models that make room for this one when they have gone; those whose place another waits for only where there is
        nothing else."""
        others = [
            other for other in (*self._entries.values(), *self._all.difference(self._entries.values())) if other is not entry
        ]
        leaving = [other for other in others if other.state is _State.LEAVING and not other.stuck]
        free = [
            other for other in leaving if other.evicted_for in (None, entry) or other.evicted_for.state is not _State.LOADING
        ]
        if all(other.evicted_for is not entry for other in free):
            victim = next((other for other in others if other.idle), None)
            if victim is not None:
                log.info("model evicted", extra={"model": victim.name, "by": entry.name})
                victim.evicted_for = entry
                self._retire(victim)
                free.append(victim)
        return free or leaving

    async def _discard(self, entry: _Entry, patience: float = float("inf")) -> bool:
        """Leaves nothing of a model but its name; True when its memory is back, False when a thread of it keeps that for
        longer than `patience`. It can be called again, also where it was cancelled."""
        worker = entry.worker
        has_cycles = entry.has_cycles or (worker is not None and bool(worker.crashes))
        if worker is not None and not worker.stopped.is_set():  # else others of its name may serve, or end in peace
            self._supervisor.retire(worker)
            await worker.stopped.wait()
        with trio.move_on_after(patience) as waited:
            await entry.quiet()
        if waited.cancelled_caught:
            return False
        if worker is not None:
            worker.retired()
        worker = entry.worker = None
        forget(entry.module, entry.folder)
        if entry.reserved is not None:
            await in_thread(partial(_give_back, has_cycles), limiter=self._collecting)
            entry.reserved = None
        return True


def _anew(error: GatewayError) -> GatewayError:
    """The same error without its traceback, whose frames would keep what the load had made."""
    return type(error)(error.message, status=error.status, retry_after=error.retry_after)


def _told(entry: _Entry) -> LoadedModel:
    return LoadedModel(name=entry.name, url=entry.url, memory=entry.reserved or 0)


def resident_bytes() -> int:
    """Bytes of memory that this process has; 0 where the system does not tell (it has no /proc)."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def share_one_arena() -> None:
    """Has all threads of this process allocate from one arena, where the C library is glibc. It gives each its own
    otherwise, and of those alone `malloc_trim` cannot give back the end: up to 64 MiB in each that has loaded a model. For
    whoever owns a process that unloads models, before it has threads."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def _give_back(has_cycles: bool) -> None:
    """Gives back what is left of a model: cycles to Python's allocator, and free memory to the system where libc can. The
    collector stops all threads while it looks through everything there is, so it looks only where it has to."""
    if has_cycles:
        gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
