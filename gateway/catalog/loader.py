"""Loads and unloads one model of the repository: reads its folder, loads it, measures its memory, and frees that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import final

import trio

from gateway.catalog.entry import GRACE, UNLOAD_GRACE, Entry, EntryState, LoadStep, anew
from gateway.catalog.folder import (
    ModelFolder,
    changed,
    find_folder,
    forget,
    has_changed,
    load_error,
    make_spec,
    read_folder,
    started_model,
)
from gateway.catalog.holdings import Holdings
from gateway.catalog.limits import RepositoryLimits
from gateway.catalog.process_memory import give_back
from gateway.catalog.process_model import discard
from gateway.config.text import show
from gateway.errors import Conflict, GatewayError, InsufficientStorage, LoadFailed, Overloaded, Refusal, Unavailable
from gateway.workers.supervisor import Supervisor
from models.blocking import detached, in_thread, run_step, set_step_holder
from models.spec import LOAD_TIMEOUT, ModelSpec

log = logging.getLogger("gateway.repository")

_READS = 4  # at once, of folders and library models: no user's code runs
IMPORTS = 4  # at once, of users' code; a load that is given up makes place for the next, though its thread may stay


@final
class ModelLoader:
    """Loads models and cleans up after them. `resident` returns the bytes of this process without those of requests."""

    def __init__(
        self, supervisor: Supervisor, limits: RepositoryLimits, holdings: Holdings, resident: Callable[[], int]
    ) -> None:
        self._supervisor, self._limits, self._holdings, self._resident = supervisor, limits, holdings, resident
        self.reads = trio.CapacityLimiter(_READS)
        self.imports = trio.Semaphore(IMPORTS)
        self._collecting = trio.CapacityLimiter(1)

    async def live(self, entry: Entry) -> None:
        """Runs one model's whole life in a separate task: its load, its service, its clean-up."""
        set_step_holder(entry)
        try:
            await self._load(entry)
            if entry.error is None:
                assert entry.worker is not None
                await entry.worker.stopped.wait()
            entry.state = EntryState.LEAVING
            if not await self._discard(entry, GRACE):
                log.warning("a thread of a model does not end", extra={"model": entry.name, "url": entry.url})
                entry.stuck = True
                entry.decided.set()  # the load's callers need not wait for the thread
                self._holdings.moved.unpark_all()
                await self._discard(entry)
        finally:
            entry.error = entry.error or Unavailable(f"model {show(entry.name)} is being unloaded")
            entry.state, entry.worker, entry.reserved = EntryState.LEAVING, None, None
            forget(entry.module, entry.folder)
            self._holdings.all.remove(entry)
            for table in (self._holdings.entries, self._holdings.arriving):
                if table.get(entry.name) is entry:
                    del table[entry.name]
            self._holdings.comings_and_goings += 1
            entry.decided.set()
            entry.gone.set()
            self._holdings.moved.unpark_all()

    async def _load(self, entry: Entry) -> None:
        """Loads the model. Afterwards it is ready, or `entry.error` is set."""
        try:
            with entry.load_scope:
                await self._bring_in(entry)
        except GatewayError as e:
            entry.error = anew(e)
        except Exception:
            log.exception("loading failed", extra={"model": entry.name})
            entry.error = LoadFailed(f"model {show(entry.name)} cannot be loaded; the server's log says why")
        if entry.load_scope.cancelled_caught:
            entry.error = self._cut_short(entry)
        if entry.error is None:
            entry.decided.set()
            log.info("model loaded", extra={"model": entry.name, "url": entry.url, "memory": entry.reserved})
        else:
            # the old version goes on after a failed reload: only the log tells that the new one does not serve
            failed = isinstance(entry.error, LoadFailed) or (
                entry.before is not None and not isinstance(entry.error, Unavailable | Conflict)
            )
            log.log(
                logging.ERROR if failed and not entry.told else logging.INFO,
                "model not loaded" if entry.before is None else "model not reloaded",
                extra={"model": entry.name, "url": entry.url, "reason": entry.error.message},
            )

    def _cut_short(self, entry: Entry) -> GatewayError:
        if trio.current_time() < entry.load_scope.deadline:
            return Unavailable(f"the load of model {show(entry.name)} was given up")
        kind = Unavailable if entry.step is LoadStep.WAIT else LoadFailed
        return kind(f"model {show(entry.name)} cannot be loaded: {entry.step.value} {self._patience:g} s")

    @property
    def _patience(self) -> float:
        """Seconds for each step of a load before the worker's, which has the model's own `load_timeout`."""
        return self._limits.defaults.load_timeout or LOAD_TIMEOUT

    def _at(self, entry: Entry, step: LoadStep) -> None:
        entry.step, entry.load_scope.deadline = step, trio.current_time() + self._patience

    async def _bring_in(self, entry: Entry) -> None:
        self._at(entry, LoadStep.READ)
        folder = await run_step(partial(self._read, entry), limiter=self.reads)
        entry.folder, entry.stamp = folder.path, folder.stamp
        until = float("inf")
        while True:
            full: GatewayError
            try:
                await self._bring_in_once(entry, folder)
                return
            except InsufficientStorage as e:
                full = anew(e)
            except LoadFailed as e:
                if not await run_step(partial(has_changed, folder), limiter=self.reads):
                    raise
                # its parts are not of one model
                log.info("folder has changed", extra={"model": entry.name, "reason": e.message})
                raise changed(entry.name, folder.place) from None
            entry.load_scope.deadline = float("inf")
            if not await self._discard(entry, GRACE):
                raise anew(full)
            until = min(until, trio.current_time() + self._limits.unload_timeout + UNLOAD_GRACE)
            need = max(folder.need, entry.measured)
            if not await self._holdings.make_room(entry, need, until):
                if entry.evicts and need <= self._limits.memory:  # it will fit when other models are no longer in use
                    held = ", or held by threads that do not end" if any(e.stuck for e in self._holdings.all) else ""
                    said = f"{full.message}: all of them in use{held}; try again later"
                    raise Overloaded(said, refusal=Refusal.NO_PLACE)
                raise anew(full)

    def _read(self, entry: Entry) -> ModelFolder:
        limits = self._limits
        try:
            path = find_folder(entry.url, limits.roots, shown=entry.shown)
            return read_folder(path, code=limits.code_roots, defaults=limits.defaults, shown=entry.shown)
        except OSError:  # a link that is no link any more, when it is followed
            raise changed(entry.name, entry.shown or show(entry.url)) from None

    async def _bring_in_once(self, entry: Entry, folder: ModelFolder) -> None:
        self._holdings.reserve(entry, max(folder.need, entry.measured))
        self._holdings.comings_and_goings += 1
        moment, before = self._holdings.comings_and_goings, self._resident()
        spec = await self._spec(entry, folder)
        try:
            if spec.memory:
                self._holdings.reserve(entry, spec.memory)
            entry.load_scope.deadline = float("inf")  # the worker applies the model's own `load_timeout`
            await self._start(entry, folder, spec)
        finally:
            discard(spec)
        elsewhere = [*getattr(entry.worker and entry.worker.model, "__model_instances__", ())]
        entry.has_cycles = not folder.config.factory and not elsewhere
        if not spec.memory and elsewhere:
            entry.measured = sum(one.resident_bytes for one in elsewhere)
        elif not spec.memory and moment == self._holdings.comings_and_goings:
            entry.measured = self._resident() - before
        if entry.before is not None:
            entry.reserved = max(entry.reserved or 0, entry.measured)
            self._holdings.switch(entry, entry.before)
            return
        if entry.measured:
            self._holdings.reserve(entry, max(folder.need, entry.measured))
        self._holdings.comings_and_goings += 1
        await trio.lowlevel.checkpoint_if_cancelled()  # all its callers may have left in this moment
        entry.state = EntryState.READY

    async def _spec(self, entry: Entry, folder: ModelFolder) -> ModelSpec:
        if folder.config.process.wanted:
            self._at(entry, LoadStep.WAIT)
            async with self.imports:
                self._at(entry, LoadStep.RUN)
                return await started_model(folder, entry.name, self._limits.unload_timeout)
        make = partial(make_spec, folder, entry.name, entry.module)
        if folder.config.factory:
            self._at(entry, LoadStep.READ)
            return await run_step(make, limiter=self.reads)
        self._holdings.check_threads(entry)
        self._at(entry, LoadStep.WAIT)
        async with self.imports:
            self._holdings.check_threads(entry)
            self._at(entry, LoadStep.RUN)
            return await run_step(make, limiter=trio.CapacityLimiter(1))  # `imports` is the only limit on these threads

    async def _start(self, entry: Entry, folder: ModelFolder, spec: ModelSpec) -> None:
        failure: GatewayError
        old = entry.before and entry.before.worker
        try:
            if entry.before is None:
                entry.worker = await self._supervisor.load(spec)
            elif old is None:
                raise Conflict(f"model {show(entry.name)} was unloaded while it was reloaded")
            elif spec.family is not old.spec.family:
                raise Conflict(
                    f"model {show(entry.name)} is of family {old.spec.family.value}, and its folder has a model of family "
                    f"{spec.family.value} now: unload it before it is loaded again"
                )
            else:
                entry.worker = await self._supervisor.reload(spec, entry.patience)
            return
        except GatewayError:
            raise
        except (Exception, SystemExit, BaseExceptionGroup) as e:
            entry.told = True  # its worker has logged it
            failure = load_error(e, entry.name, folder)
            detached(e)  # from a thread or a warm-up, it is in a reference cycle, which would keep the model
        try:
            raise failure  # outside the `except`, because a traceback keeps the failed model's memory
        finally:
            del failure

    async def _discard(self, entry: Entry, patience: float = float("inf")) -> bool:
        """Removes all of a model but its name. True when its memory is free; False if a thread of the model keeps that for
        more than `patience` seconds. It may be called again, also after it was cancelled."""
        worker = entry.worker
        has_cycles = entry.has_cycles or (worker is not None and bool(worker.crashes))
        if worker is not None and not worker.stopped.is_set():  # a stopped one's name may be another worker's by now
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
            await in_thread(partial(give_back, has_cycles), limiter=self._collecting)
            entry.reserved = None
        return True
