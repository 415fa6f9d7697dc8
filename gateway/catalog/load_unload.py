"""Loads, unloads and reloads models by name, for every API: models of the configuration and of the repository alike."""

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
from gateway.config.text import dotted, show, text_without_secrets
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

_LISTED = 10_000  # entries of each root that are read for a list
_LONGEST_NAME = 255  # bytes, of a folder: NAME_MAX of Linux
# Seconds beyond `unload_timeout` for cancelled sessions and the clean-up of load(); the worker bounds both.
OLD_CODE = (
    "made again by the code that this server had already loaded: a changed file was not read. To read it, start the server "
    "anew (with --processes above 1: send SIGHUP), or run the model in processes (models.NAME.process.enabled = true)"
)
"""The remark about a model of this process that was loaded again: Python imports a module once."""
_UNLOAD_GRACE = 15.0


@final
class Standing(enum.Enum):
    """The state of a model, in the words of Triton's repository index."""

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
"""The state and the reason in the index, for each state of a worker."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Indexed:
    """A model that is loaded, or could be."""

    name: str
    version: str
    """The model's version; empty if only loading the model would tell."""
    standing: Standing
    reason: str


@final
class ModelControl:
    """Loads and unloads models by their names alone.

    A name is that of a configured model, or of a folder in the first of the repository's roots that has it. A model from a
    folder belongs to the repository, however it was loaded. A model that is not in service can be called by no protocol.
    """

    def __init__(self, supervisor: Supervisor, repository: Repository, limits: RepositoryLimits, lmi: LMIConfig) -> None:
        """`lmi` has the defaults for the options of text models."""
        self._supervisor, self._repository, self._limits, self._lmi = supervisor, repository, limits, lmi
        self._reads = trio.CapacityLimiter(2)
        self._loading: set[str] = set()
        self._leaving: dict[str, trio.Event] = {}
        """Configured models that are being unloaded; each event is set when nothing of the model is left."""

    async def load(self, name: str) -> None:
        """Loads a model; returns when it accepts calls.

        If the model is in service already, it returns at once. But if the files of its folder have changed, it loads and
        warms up the new version beside the old one, which it then replaces. A configured model that has crashed is started
        again, and its past crashes no longer count.

        Conflict while the model is being loaded or unloaded. NotFound for an unknown name; the errors of
        `Repository.load`; LoadFailed if a configured model raised. A caller that is cancelled gives the load up.
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
                f"no model {show(name)}: it is neither in the configuration, nor a folder in one of those that models are "
                "loaded from (repository.roots)"
            )
        if not self._answers(name):  # it may have been loaded while its folder was looked for
            await self._repository.load(name, path, shown=shown)

    def _answers(self, name: str) -> bool:
        """True if a model of the repository is in service and ready. Conflict if it is in service, but has crashed."""
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
            self._supervisor.dismissed.discard(name)  # from here on the gateway is not ready without it
        finally:
            self._loading.remove(name)
        if failure is not None:  # outside the `try`, because a traceback keeps the failed model's memory
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
            detached(e)  # from a thread or a warm-up, it is in a reference cycle, which would keep the model
            said = str(e) if isinstance(e, ModelExit) else f"{type(e).__name__}: {e}"
            return LoadFailed(f"model {show(spec.name)} cannot be loaded: {text_without_secrets(said)[:300]}")
        log.info("model loaded", extra={"model": spec.name})
        return None

    async def unload(self, name: str) -> None:
        """Takes a model out of service; returns when nothing of it is left, or at once if it is not loaded.

        Running sessions have `unload_timeout` seconds to end; those that wait for a slot get an error. Conflict while the
        model is being loaded. Unavailable if a thread of it does not return. The unload continues if the caller is
        cancelled.
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
        """Loads a model in service again, or `spec`, and then replaces the running version: `Gateway.reload` says how."""
        supervisor = self._supervisor
        old = supervisor.workers.get(name)
        if old is None:
            raise NotFound(f"no model {name[:100]!r} is in service")
        if name in self._repository.names:
            if spec is not None:
                raise Conflict(f"model {name[:100]!r} is from the repository: only its folder can change it, not a spec")
            await self._repository.reload(name, shown=f"the folder of model {name[:100]!r}", patience=patience)
            return supervisor.models[name]
        spec = old.spec if spec is None else spec
        if spec.name != name or spec.family is not old.spec.family:
            raise ValueError(
                f"model {name!r} of family {old.spec.family.value} must be replaced by one of the same name and family, "
                f"not by {spec.name!r} of family {spec.family.value}"
            )
        text_options(self._lmi, spec.options)
        self._repository.check_room(name, spec.memory)
        await supervisor.reload(spec, self._limits.unload_timeout if patience is None else patience)
        gateway_log.info("model reloaded", extra={"model": name, "version": spec.version, "code": self.code_of(name)})
        return supervisor.models[name]

    def code_of(self, name: str) -> str:
        """Returns the remark about the code of a model that was loaded again; empty if it was read, as in a folder or in
        processes."""
        worker = self._supervisor.workers.get(name)
        if worker is None or worker.in_processes or name in self._repository.names:
            return ""
        return OLD_CODE.replace("NAME", dotted((name,)))

    async def restart(self, name: str, number: int) -> None:
        """Replaces one process of a model in service, by its number; returns when the new process takes sessions. Sessions
        of the old process have `unload_timeout` seconds to end. The restart continues if the caller is cancelled.

        NotFound if no such model is in service, or it has no process of that number. Conflict if the model does not run in
        processes, or this one is being started. LoadFailed if the new process cannot be started: the old one goes on."""
        worker = self._supervisor.workers.get(name)
        if worker is None:
            raise NotFound(f"no model {show(name[:100])} is in service")
        if worker.model is None:
            raise Conflict(f"model {show(name)} is {worker.state.value}: the log says why")
        restart = getattr(worker.model, "__model_restart__", None)
        if restart is None:
            raise Conflict(f"model {show(name)} does not run in processes (models.NAME.process): reload it instead")
        await restart(number)
        log.info("instance restarted", extra={"model": name, "instance": number})

    # -- the index ---------------------------------------------------------------------------------------------------

    async def index(self, *, ready: bool = False) -> list[Indexed]:
        """Returns every model that is loaded or could be, by name; if `ready`, only those that accept calls. It reads at
        most 10,000 entries of each root."""
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
    """Returns the folder of that name; empty if no root has it."""
    if not _legal(name):
        return ""
    folders = (os.path.join(os.path.abspath(root), name) for root in roots)
    return next((folder for folder in folders if os.path.isdir(folder)), "")


def _folders(roots: Iterable[str]) -> list[str]:
    """Returns the names of all folders in the roots that contain a model.toml or a model.py."""
    names: set[str] = set()
    for root in roots:
        try:
            with os.scandir(root) as entries:
                for _, entry in zip(range(_LISTED), entries, strict=False):
                    if not _legal(entry.name):
                        continue
                    if entry.is_symlink() and not _is_within(os.path.realpath(entry.path), roots):
                        continue  # a load would refuse it
                    if any(os.path.isfile(os.path.join(entry.path, file)) for file in (TOML, CODE)):
                        names.add(entry.name)
        except OSError:
            continue  # a missing root has no models
    return sorted(names)


def _is_within(path: str, roots: Iterable[str]) -> bool:
    return any(path.startswith(os.path.join(os.path.realpath(root), "")) for root in roots)


def _legal(name: str) -> bool:
    """True if this can be the name of a model's folder, directly below a root and not hidden."""
    if not name.isprintable() or name.startswith(".") or "/" in name:
        return False
    return 0 < len(name.encode(errors="replace")) <= _LONGEST_NAME
