"""Load, unload and reload by name, for every API that asks: models of the configuration and of the repository alike."""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import final

import trio

from gateway.catalog.folder import CODE, TOML
from gateway.catalog.limits import RepositoryLimits
from gateway.catalog.repository import Repository
from gateway.config import LMIConfig
from gateway.config.properties import text_options
from gateway.config.text import show, text_without_secrets
from gateway.errors import Conflict, GatewayError, LoadFailed, NotFound, Unavailable
from gateway.workers.snapshot import ModelStatus
from gateway.workers.states import State
from gateway.workers.supervisor import Supervisor
from gateway.workers.worker import Worker
from models.blocking import detached, run_step
from models.errors import ModelExit
from models.spec import ModelSpec

log = logging.getLogger("gateway.repository")
gateway_log = logging.getLogger("gateway")

_LISTED = 10_000  # entries of each root that are looked at for a list
_LONGEST_NAME = 255  # bytes, of a folder: NAME_MAX of Linux
# What an unload may take beyond `unload_timeout`: cancelled sessions, the clean-up of load(), both bounded by the worker.
_UNLOAD_GRACE = 15.0


@final
class Standing(enum.Enum):
    """Where a model is, in the words of Triton's repository index."""

    READY = "READY"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


STANDINGS = {
    State.LOADING: (Standing.LOADING, ""),
    State.READY: (Standing.READY, ""),
    State.DRAINING: (Standing.UNLOADING, ""),
    State.RESTARTING: (Standing.UNAVAILABLE, "it crashed, and is loaded again; the log says why"),
    State.FAILED: (Standing.UNAVAILABLE, "it crashed, and was given up; the log says why"),
    State.ENDED: (Standing.UNAVAILABLE, "it ended by itself"),
    State.STOPPED: (Standing.UNAVAILABLE, "unloaded"),
}
"""What an index says of each state of a worker: where the model is, and the reason."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Indexed:
    """A model that is there, or could be."""

    name: str
    version: str
    """Empty where only loading it would tell."""
    standing: Standing
    reason: str


@final
class ModelControl:
    """Loads and unloads models by their names alone.

    A name is of the configuration, or of a folder in one of the repository's roots, the first that has it; such a model
    is the repository's, however it was loaded. A model that is not in service is on no wire.
    """

    def __init__(self, supervisor: Supervisor, repository: Repository, limits: RepositoryLimits, lmi: LMIConfig) -> None:
        """`lmi` is what the options of a model of text are read beside."""
        self._supervisor, self._repository, self._limits, self._lmi = supervisor, repository, limits, lmi
        self._reads = trio.CapacityLimiter(2)
        self._loading: set[str] = set()
        self._leaving: dict[str, trio.Event] = {}
        """Models of the configuration that are being unloaded; set when nothing of them is left."""

    async def load(self, name: str) -> None:
        """Returns when the model answers: at once where it does already, unless it is of a folder whose files have changed:
        then its new version is loaded and warmed up beside it, and takes over. One of the configuration that has crashed is
        started anew, with no crash on its record.

        Conflict while it is on its way in or out. NotFound for a name of nothing; the errors of `Repository.load`;
        LoadFailed for what a model of the configuration raised. A caller who is cancelled has given the load up.
        """
        spec = self._supervisor.configured.get(name)
        if spec is None:
            await self._load_folder(name)
        else:
            await self._load_configured(name, spec)

    async def _load_folder(self, name: str) -> None:
        shown = f"the folder of model {show(name)}"
        if self._answers(name):
            await self._repository.reload(name, shown=shown, always=False)
            return
        roots = self._limits.roots
        path = await run_step(partial(_find, name, roots), limiter=self._reads) if roots else ""
        if not path:
            raise NotFound(
                f"no model {show(name)}: neither in the configuration, nor a folder in one of those that models are loaded "
                "from (repository.roots)"
            )
        if not self._answers(name):  # it may have been loaded while its folder was looked for
            await self._repository.load(name, path, shown=shown)

    def _answers(self, name: str) -> bool:
        """Whether a model of the repository is in service. Conflict where it is, and has crashed."""
        worker, leaving = self._repository.standings().get(name, (None, False))
        if worker is None or leaving:
            return False
        if not worker.ready:
            raise Conflict(f"model {show(name)} is {worker.state.value}: the log says why")
        return True

    async def _load_configured(self, name: str, spec: ModelSpec) -> None:
        worker = self._supervisor.workers.get(name)
        if worker is not None and worker.ready:
            return
        if name in self._leaving:
            raise Conflict(f"model {show(name)} is still being unloaded")
        loading = name in self._loading or name in self._supervisor.reloading
        if loading or (worker is not None and worker.state is State.LOADING):
            raise Conflict(f"model {show(name)} is being loaded")
        self._loading.add(name)
        try:
            if worker is not None:
                self._supervisor.retire(worker)
                await worker.stopped.wait()
                worker.retired()
            failure = await self._start(spec)
            self._supervisor.dismissed.discard(name)  # from here on it is missed where it is not there
        finally:
            self._loading.remove(name)
        if failure is not None:  # outside: what the traceback holds is the failed model's memory
            try:
                raise failure
            finally:
                failure = None

    async def _start(self, spec: ModelSpec) -> GatewayError | None:
        try:
            await self._supervisor.load(spec, lasting=True)
        except GatewayError:
            raise
        except (Exception, SystemExit, BaseExceptionGroup) as e:
            detached(e)  # out of a thread, or a warm-up, it is in a cycle, which would keep the model
            said = str(e) if isinstance(e, ModelExit) else f"{type(e).__name__}: {e}"
            return LoadFailed(f"model {show(spec.name)} cannot be loaded: {text_without_secrets(said)[:300]}")
        log.info("model loaded", extra={"model": spec.name})
        return None

    async def unload(self, name: str) -> None:
        """Takes a model out of service; returns when nothing of it is left, at once where there is none.

        Sessions that run have `unload_timeout` seconds, and those that wait for a slot are answered. Conflict while it is
        being loaded. A caller who is cancelled is not waited for. Unavailable where a thread of it does not return.
        """
        if name not in self._supervisor.configured:
            try:
                await self._repository.unload(name)
            except NotFound:
                return
            return
        worker = self._supervisor.workers.get(name)
        if name in self._loading or (worker is not None and worker.state is State.LOADING):
            raise Conflict(f"model {show(name)} is being loaded")
        self._supervisor.dismissed.add(name)
        if worker is not None:
            gone = trio.Event()
            self._supervisor.start_soon(self._leave, worker, gone)
            self._leaving[name] = gone
            self._supervisor.retire(worker, self._limits.unload_timeout)
        elif name in self._leaving:
            gone = self._leaving[name]
        else:
            return
        with trio.move_on_after(self._limits.unload_timeout + _UNLOAD_GRACE):
            await gone.wait()
        if not gone.is_set():
            raise Unavailable(f"model {show(name)} is out of service, but a thread of it does not end: it holds its memory")

    async def _leave(self, worker: Worker, gone: trio.Event) -> None:
        try:
            await worker.stopped.wait()
            await worker.slots.all_left()
            worker.retired()
            await self._supervisor.replaced_gone(worker.name)
            log.info("model unloaded", extra={"model": worker.name})
        finally:
            del self._leaving[worker.name]
            gone.set()

    async def reload(self, name: str, spec: ModelSpec | None, patience: float | None) -> ModelStatus:
        """Loads a model in service anew beside the old one, or `spec` in its place: `Gateway.reload` says how."""
        supervisor = self._supervisor
        old = supervisor.workers.get(name)
        if old is None:
            raise NotFound(f"no model {name[:100]!r} is in service")
        if name in self._repository.names:
            if spec is not None:
                raise Conflict(f"model {name[:100]!r} is of the repository: its folder says what it is, and no other spec")
            await self._repository.reload(name, shown=f"the folder of model {name[:100]!r}", patience=patience)
            return supervisor.models[name]
        spec = old.spec if spec is None else spec
        if spec.name != name or spec.family is not old.spec.family:
            raise ValueError(
                f"model {name!r} of {old.spec.family.value} is replaced by one of the same name and family, "
                f"not by {spec.name!r} of {spec.family.value}"
            )
        text_options(self._lmi, spec.options)
        self._repository.check_room(name, spec.memory)
        await supervisor.reload(spec, self._limits.unload_timeout if patience is None else patience)
        gateway_log.info("model reloaded", extra={"model": name, "version": spec.version})
        return supervisor.models[name]

    async def restart(self, name: str, number: int) -> None:
        """Puts a new process in the place of one that a model in service runs in, by its number; returns when the new one
        takes sessions. Sessions of the old one have `unload_timeout` seconds.

        NotFound where there is no such model in service, or no process of that number; Conflict where the model has no
        processes, or this one is on its way; LoadFailed where the new one cannot be had: the old one goes on. A cancelled
        caller is not waited for."""
        worker = self._supervisor.workers.get(name)
        if worker is None:
            raise NotFound(f"no model {show(name[:100])} is in service")
        if worker.model is None:
            raise Conflict(f"model {show(name)} is {worker.state.value}: the log says why")
        restart = getattr(worker.model, "__model_restart__", None)
        if restart is None:
            raise Conflict(f"model {show(name)} runs in no process of its own (models.NAME.process): reload it instead")
        await restart(number)
        log.info("instance restarted", extra={"model": name, "instance": number})

    # -- what is there -----------------------------------------------------------------------------------------------

    async def index(self, *, ready: bool = False) -> list[Indexed]:
        """Every model that is there or could be loaded, by name; only those that answer, where `ready` is asked for. Of
        each root 10,000 entries are looked at."""
        there = {entry.name: entry for entry in (*self._configured(), *self._loaded())}
        if not ready and self._limits.roots:
            names = await run_step(partial(_folders, self._limits.roots), limiter=self._reads)
            for name in names:
                if name not in there:
                    there[name] = Indexed(name=name, version="", standing=Standing.UNAVAILABLE, reason="not loaded")
        return [e for _, e in sorted(there.items()) if not ready or e.standing is Standing.READY]

    def _configured(self) -> Iterator[Indexed]:
        for name, spec in self._supervisor.configured.items():
            worker = self._supervisor.workers.get(name)
            if name in self._leaving:
                standing, reason = Standing.UNLOADING, ""
            elif name in self._loading:
                standing, reason = Standing.LOADING, ""
            elif self._supervisor.unloadable(name) is not None:
                standing, reason = Standing.UNAVAILABLE, "it could not be loaded; the log says why"
            else:
                standing, reason = STANDINGS[State.STOPPED if worker is None else worker.state]
            yield Indexed(name=name, version=spec.version, standing=standing, reason=reason)

    def _loaded(self) -> Iterator[Indexed]:
        for name, (worker, leaving) in self._repository.standings().items():
            if leaving:
                standing, reason = Standing.UNLOADING, ""
            else:
                standing, reason = STANDINGS[State.LOADING if worker is None else worker.state]
            yield Indexed(name=name, version="" if worker is None else worker.spec.version, standing=standing, reason=reason)


def _find(name: str, roots: Iterable[str]) -> str:
    """The folder of that name; empty where no root has it."""
    if not _legal(name):
        return ""
    folders = (os.path.join(os.path.abspath(root), name) for root in roots)
    return next((folder for folder in folders if os.path.isdir(folder)), "")


def _folders(roots: Iterable[str]) -> list[str]:
    """The names of all folders in the roots that look like a model's."""
    names: set[str] = set()
    for root in roots:
        try:
            with os.scandir(root) as entries:
                for _, entry in zip(range(_LISTED), entries, strict=False):
                    if not _legal(entry.name):
                        continue
                    if entry.is_symlink() and not _is_within(os.path.realpath(entry.path), roots):
                        continue  # where loading would refuse to go
                    if any(os.path.isfile(os.path.join(entry.path, file)) for file in (TOML, CODE)):
                        names.add(entry.name)
        except OSError:
            continue  # a root that is not there has no models
    return sorted(names)


def _is_within(path: str, roots: Iterable[str]) -> bool:
    return any(path.startswith(os.path.join(os.path.realpath(root), "")) for root in roots)


def _legal(name: str) -> bool:
    """Whether a model may be asked for by this name and its folder have it: one step down, and not a hidden one."""
    if not name.isprintable() or name.startswith(".") or "/" in name:
        return False
    return 0 < len(name.encode(errors="replace")) <= _LONGEST_NAME
