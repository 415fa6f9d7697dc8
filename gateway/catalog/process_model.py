"""A model that runs in separate processes: the first describes it, calls go to the least busy, ended ones are restarted."""

from __future__ import annotations

import logging
import random
import time
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, final

import msgspec
import trio

from gateway.catalog.processes.calls import InstanceCalls, UnfinishedLoad, lost_sequence
from gateway.config import ModelConfig
from gateway.config.machine import usable_cores
from gateway.config.problem import ConfigError
from gateway.config.text import text_without_secrets
from gateway.errors import BadModel, Conflict, GatewayError, InsufficientStorage, LoadFailed, NotFound, WorkerLost
from gateway.instances.elsewhere import Elsewhere, Start
from gateway.instances.instance import Instance, InstanceEnded, RaisedThere
from gateway.instances.memory import Arena
from gateway.instances.messages import Describe, Described, Failed, Folder, Frames, Hello, encoded, frames_of
from gateway.instances.pipe import give_back_idle
from gateway.instances.spawn import CrashOutput, Exit, Process, ProcessPlan, innermost_line, supported
from gateway.version import version
from gateway.workers.restart_policy import decide, within_period
from gateway.workers.snapshot import InstanceStatus
from models.blocking import detached, throw
from models.messages import Family, InferRequest
from models.spec import LOAD_TIMEOUT, Batching, Model, ModelSpec, RestartPolicy, TensorSpec, WarmupFailed, warm_up
from models.spec import Load as Loading
from models.tracebacks.text import explains

log = logging.getLogger("gateway.worker")

CHILD = "gateway.catalog.process_child"
SHARED = "shared"
"""The argument of a process that other gateways than its owner will have links to."""
_SEQUENCES = 100_000  # sequences of v2 whose instance is remembered
_SAID = 300  # characters of an interpreter's last line
_READ = 64 * 1024  # bytes
_LAST_WORDS = 1.0  # seconds that a process has to end after it closed its socket
_REFUSALS = {kind.__name__: kind for kind in (BadModel, InsufficientStorage, LoadFailed)}
_NOT_SAID = frozenset(("name", "load", "warmup", "chat_template", "count_tokens", "input_formatter", "output_formatter"))


def described_fields(spec: ModelSpec) -> dict[str, Any]:
    """Returns the fields of a spec in types that MessagePack has, without the name, the warm-up and all callables."""
    found: dict[str, Any] = {}
    for field in fields(spec):
        if field.name not in _NOT_SAID:
            found[field.name] = getattr(spec, field.name)
    builtins: dict[str, Any] = msgspec.to_builtins(found, enc_hook=_plain)
    return builtins


def _plain(value: object) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"a model in a process cannot describe itself with a {type(value).__name__}")


def spec_of_fields(name: str, said: dict[str, Any], load: Loading) -> ModelSpec:
    """Returns the spec of the fields that `described_fields` returned."""
    kinds: dict[str, Any] = {
        "family": Family, "inputs": tuple[TensorSpec, ...] | None, "outputs": tuple[TensorSpec, ...] | None,
        "restart": RestartPolicy, "batching": Batching | None, "parameters": frozenset[str] | None,
        "features": frozenset[str] | None,
        "subprotocols": tuple[str, ...], "served_names": tuple[str, ...],
    }  # fmt: skip
    values = {key: msgspec.convert(value, kinds[key]) if key in kinds else value for key, value in said.items()}
    return ModelSpec(name=name, load=load, **values)


@final
@dataclass(frozen=True, slots=True)
class _Care:
    """The time limits of a model's processes."""

    hang_timeout: float
    """Seconds that the loop of a process may be silent before it is killed; 0: no limit."""
    patience: float
    """Seconds that sessions have to end in a process that was replaced."""


def process_spec(
    name: str, config: ModelConfig, patience: float, folder: Folder | None = None, *, shared: bool = False
) -> ModelSpec:
    """Returns the spec that a model's code declares, for a configured or a folder's model that runs in processes. The first
    process imports the factory, describes the model, and goes on as the first instance.

    Blocks; for callers without a loop. `patience`: seconds that sessions have to end in a process that is replaced.
    `shared`: other gateways will have links to the processes. ConfigError says what is wrong with the factory, or how the
    process ended. For a folder's code the errors of `make_spec` are raised too."""
    describe, plans = Describe(name, config.factory, config.options, folder), _plans(name, config, shared=shared)
    kept = _begin(plans[0])
    try:
        described = _described(kept, describe, config.load_timeout or LOAD_TIMEOUT)
        return _spec_of(described, describe, plans, _Care(config.process.hang_timeout, patience), kept)
    except BaseException as e:
        kept.end()
        if isinstance(e, ConfigError) and not str(e).startswith("models."):
            raise ConfigError(f"models.{name}: {e}") from None
        raise


async def started_spec(
    name: str, config: ModelConfig, patience: float, folder: Folder | None = None, *, shared: bool = False
) -> ModelSpec:
    """Does the same as `process_spec` without blocking the loop. It waits for the code without limit. If it is cancelled,
    no process is left."""
    describe, plans = Describe(name, config.factory, config.options, folder), _plans(name, config, shared=shared)
    kept = _begin(plans[0], at_once=True)
    try:
        described = await _described_soon(kept, describe)
        return _spec_of(described, describe, plans, _Care(config.process.hang_timeout, patience), kept)
    except BaseException:
        kept.end()
        raise


def _begin(plan: ProcessPlan, *, at_once: bool = False) -> _Kept:
    whose = _python_of(plan.name) if plan.python else f"models.{plan.name}"
    if why := supported():
        raise ConfigError(f"{whose}: {why}")
    try:
        bodies = Arena.create(plan.shared_memory)
    except OSError as e:
        said = f"the system cannot have {plan.shared_memory} bytes of it: {e.strerror}"
        raise ConfigError(f"models.{plan.name}.process.shared_memory: {said}") from None
    try:
        process = _start(plan, bodies)
    except OSError as e:
        bodies.close()
        raise ConfigError(f"{whose}: its process cannot be started: {e.strerror}") from None
    return _Kept(None, process, process.close if at_once else process.end_here, bodies)


def _spec_of(described: Described, describe: Describe, plans: Sequence[ProcessPlan], care: _Care, kept: _Kept) -> ModelSpec:
    spec = spec_of_fields(describe.name, described.fields, partial(_loading, describe, plans, care, kept))
    return formatted_there(spec, reads=described.input_formatter, writes=described.output_formatter)


def formatted_there(spec: ModelSpec, *, reads: bool, writes: bool) -> ModelSpec:
    """Marks in a spec which formatters the model has in its processes: `__model_formatting__` calls them there."""
    return replace(spec, input_formatter=_there if reads else None, output_formatter=_there if writes else None)


def _there(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a formatter was called here that is in the model's process")


def spec_elsewhere(
    spec: ModelSpec, describe: Describe, plans: Sequence[ProcessPlan], start: Start, hang: float
) -> ModelSpec:
    """Returns the spec of a model that declares `spec`, and whose instances `start` starts, one for each plan. Each is asked
    to `describe` the model. An instance whose loop is silent for `hang` seconds is killed; 0: never."""
    load = partial(_loading, describe, plans, _Care(hang, spec.stop_within or LOAD_TIMEOUT), _Kept(start))
    there = spec_of_fields(spec.name, described_fields(spec), load)
    reads, writes = spec.input_formatter is not None, spec.output_formatter is not None
    return loadable(formatted_there(there, reads=reads, writes=writes))


def discard(spec: ModelSpec) -> None:
    """Ends the process that has described a model, unless a load has taken it. Does nothing for a model in this process."""
    if isinstance(spec.load, partial) and spec.load.func is _loading:
        kept: _Kept = spec.load.args[3]
        kept.end()


def loadable(spec: ModelSpec) -> ModelSpec:
    """Completes the spec of a model in processes, once the configuration is in it: its instances are loaded by the result.
    Other specs are unchanged."""
    load = spec.load
    if isinstance(load, UnfinishedLoad):
        return load.complete(spec)
    if isinstance(load, partial) and load.func is _loading:
        spec = replace(spec, load=partial(load.func, *load.args, spec))
        if spec.batching is not None:  # its `instances` are calls of one process
            plans: Sequence[ProcessPlan] = load.args[1]
            batching = replace(spec.batching, instances=spec.batching.instances * len(plans))
            spec = replace(spec, batching=batching)
    return spec


def _plans(name: str, config: ModelConfig, *, shared: bool = False) -> list[ProcessPlan]:
    process = config.process
    count = process.count
    each = max(1, usable_cores() // count)
    return [
        ProcessPlan(
            name=name,
            number=number,
            module=CHILD,
            python=process.python,
            environment=process.environment,
            device=process.devices[number % len(process.devices)] if process.devices else None,
            device_variable=process.device_variable,
            cpu_threads=process.cpu_threads,
            threads_each=each,
            memory_limit=process.memory_limit,
            loop=process.loop,
            shared_memory=process.shared_memory,
            shared=shared,
        )
        for number in range(count)
    ]


def _python_of(name: str) -> str:
    return f"models.{name}.process.python"


def _start(plan: ProcessPlan, bodies: Arena) -> Process:
    return Process.start(plan, str(plan.memory_limit), plan.loop, *[SHARED] * plan.shared, bodies=bodies)


# -- before there is a loop ------------------------------------------------------------------------------------------------


@final
class _Kept:
    """The state of a model that outlasts its loads: how its instances are started, and the process that has described it,
    until that becomes the first instance. If it never does, it ends with this object."""

    def __init__(
        self,
        start: Start | None = None,
        process: Process | None = None,
        end: Callable[[], object] = lambda: None,
        bodies: Arena | None = None,
    ) -> None:
        """`end` ends the process. Without `start`, instances are processes of this machine."""
        self._started_by, self._process, self.frames = start, process, Frames()
        """How instances are started, the process, and the messages that it has sent."""
        self.bodies = bodies
        """The memory for bodies that is shared with the process, until the first load takes it."""
        self._end = weakref.finalize(self, end)
        self.starts = Counter[int]()
        """Starts of each instance since the model came into service."""
        self.sequences: OrderedDict[int | str, Instance] = OrderedDict()
        """The instance that has each sequence of v2, even after the instance has ended."""

    def take(self) -> Process | None:
        """Returns the process the first time, and None afterwards."""
        return self._process if self._end.detach() is not None else None

    @property
    def process(self) -> Process:
        """The process, which describes the model."""
        assert self._process is not None
        return self._process

    def end(self) -> None:
        """Ends the process and closes its memory, unless the process was taken."""
        if self._end.alive:
            self._end()
            if self.bodies is not None:
                self.bodies.close()

    def bodies_for(self, plan: ProcessPlan) -> Arena | None:
        """Returns the memory for bodies of one load: that of the process the first time, new memory afterwards; None if the
        instances are not processes of this machine. OSError if the system has no such memory."""
        bodies, self.bodies = self.bodies, None
        return Arena.create(plan.shared_memory) if bodies is None and self._started_by is None else bodies

    def start(self, plan: ProcessPlan, bodies: Arena | None) -> Elsewhere:
        """Starts an instance that shares the memory `bodies`."""
        if self._started_by is not None:
            return self._started_by(plan)
        assert bodies is not None
        return _start(plan, bodies)


def _described(kept: _Kept, describe: Describe, seconds: float) -> Described:
    """Asks the process to describe the model. Blocks, as the import of a model in this process does."""
    until, process, heard = time.monotonic() + seconds, kept.process, _Heard(kept)
    process.socket.setblocking(True)
    try:
        for frame in frames_of([encoded(describe)]):
            process.socket.sendall(frame)
        while (left := until - time.monotonic()) > 0:
            if not process.wait_here(left):
                continue
            if not (data := process.socket.recv(_READ)):
                break
            if (described := heard.feed(data)) is not None:
                return described
        else:
            raise ConfigError(f"its process had not imported it after {seconds:g} s (models.{describe.name}.load_timeout)")
    except OSError:
        pass
    finally:
        process.socket.setblocking(False)
    raise heard.end(process.end_here())


async def _described_soon(kept: _Kept, describe: Describe) -> Described:
    """Does the same as `_described` without blocking the loop, and without a limit of time."""
    process, heard = kept.process, _Heard(kept)
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(process.socket))
    crash = CrashOutput()

    def printed(output: str, line: str) -> None:
        extra = {"model": describe.name, "instance": 0, "pid": process.pid, "stream": output, "line": line}
        log.log(crash.level(output, line), "model output", extra=extra)

    found: Described | ConfigError | GatewayError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.read_output, printed)
        try:
            with suppress(trio.BrokenResourceError):
                for frame in frames_of([encoded(describe)]):
                    await stream.send_all(frame)
                while found is None and (data := await stream.receive_some(_READ)):
                    found = heard.feed(data)
            if found is None:
                with trio.move_on_after(_LAST_WORDS):
                    await process.ended()
                process.kill()
                found = heard.end(await process.ended())
        except (ConfigError, GatewayError) as e:
            found = detached(e, (ConfigError, GatewayError))
        nursery.cancel_scope.cancel()
    if isinstance(found, Described):
        return found
    assert found is not None
    throw(found)


@final
class _Heard:
    """Reads the messages that a process sends until it has described its model."""

    def __init__(self, kept: _Kept) -> None:
        self._process, self._frames = kept.process, kept.frames
        self._name, self._anything = kept.process.plan.name, False

    def feed(self, data: bytes | bytearray) -> Described | None:
        """Takes bytes and returns the description once it is complete. ConfigError, or an error of a folder, if the process
        cannot describe its model."""
        described: Described | None = None
        try:
            found = [message for messages in self._frames.feed(data) for message in messages]
        except ValueError as e:
            raise ConfigError(f"its process sent something that is not a message: {str(e)[:_SAID]}") from None
        for message in found:
            self._anything = True
            match message:
                case Hello() if message.version == version():
                    pass
                case Hello():
                    versions = f"its process has everywire {message.version}, and this is {version()}"
                    raise ConfigError(f"{_python_of(self._name)}: {versions}")
                case Described():
                    described = message
                case Failed() if message.refusal in _REFUSALS:
                    raise _REFUSALS[message.refusal](message.error)
                case Failed(configuration=True):
                    raise ConfigError(message.error)
                case Failed():
                    raise ConfigError(f"its process could not import it: {message.error}")
                case _:
                    self._frames.unread.append(message)  # a log record, kept for the instance
        return described

    def end(self, code: Exit) -> ConfigError:
        """Returns the error for a process that ended before it had described its model."""
        process = self._process
        if process.plan.python and not self._anything:
            said = (process.tail.strip().splitlines() or [str(code)])[-1][:_SAID]
            what = f"{_python_of(self._name)}: {process.plan.python} has no everywire {version()}"
            return ConfigError(text_without_secrets(f"{what}: {said}"))
        line = innermost_line(process.tail)
        return ConfigError(f"its process ended ({code}) while it was imported{': ' if line else ''}{line}")


# -- the model -------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _loading(
    describe: Describe, plans: Sequence[ProcessPlan], care: _Care, kept: _Kept, spec: ModelSpec
) -> AsyncIterator[Model]:
    bodies = kept.bodies_for(plans[0])
    try:
        async with trio.open_nursery() as nursery:
            model = Instances(describe, plans, care, kept, bodies, spec, nursery)
            for number in range(len(plans)):
                nursery.start_soon(model.keep, number)
            if bodies is not None:
                nursery.start_soon(give_back_idle, bodies)
            await model.loaded()
            yield model
            nursery.cancel_scope.cancel()
    finally:
        if bodies is not None:
            bodies.close()


@final
class _Restart:
    """A restart that an operator has asked for: a new process replaces the old one, or one that was given up."""

    def __init__(self, old: Instance | None) -> None:
        self.old = old
        self.over = trio.Event()
        self.failure = ""
        """The reason why the new process could not take over; empty if it has."""

    def end(self, failure: str) -> None:
        if not self.over.is_set():
            self.failure = failure
            self.over.set()


@final
class Instances(InstanceCalls):
    """The processes of one model that this gateway starts, restarts and calls."""

    def __init__(
        self,
        describe: Describe,
        plans: Sequence[ProcessPlan],
        care: _Care,
        kept: _Kept,
        bodies: Arena | None,
        spec: ModelSpec,
        nursery: trio.Nursery,
    ) -> None:
        """`bodies` is the shared memory in which bodies for the model should be received; None: any memory will do."""
        super().__init__(spec, bodies)
        self._describe, self._plans, self._kept = describe, plans, kept
        self._care, self._nursery = care, nursery
        self._there: dict[int, Instance] = {}
        """Instances that are loading or ready, by number."""
        self._worn = set[Instance]()
        """Instances that are being replaced, or were."""
        self._restarts: dict[int, _Restart] = {}
        """Restarts whose new process is not ready yet, by number."""
        self.changed: Callable[[], None] = lambda: None
        """Called when an instance appears, is ready, is given up or has ended."""
        self._crashes = defaultdict[int, list[float]](list)
        self._unattempted = set(range(len(plans)))
        self.given_up = set[int]()
        """The numbers of instances that are not started again."""
        self._settled = trio.Event()
        self._sequences = kept.sequences

    @property
    def there(self) -> list[Instance]:
        """Instances that take sessions, and those that did until they were replaced."""
        return [one for one in (*self._there.values(), *self._worn) if one.ready or one.worn]

    @property
    def patience(self) -> float:
        """Seconds that sessions have to end in an instance that was replaced."""
        return self._care.patience

    async def loaded(self) -> None:
        """Waits until each instance is ready or has failed once."""
        await self._settled.wait()

    # -- starts and restarts -----------------------------------------------------------------------------------------

    async def keep(self, number: int) -> None:
        """Runs one instance and restarts it after the policy's wait, until it is given up, or replaced: then another task
        keeps the new one. If the instance ends and no other is ready, it raises the reason. That ends the model, which its
        worker then loads again."""
        while True:
            if not await self._again(number, *await self._live(number)):
                return

    async def _again(self, number: int, error: Exception, pid: int, replaced: bool) -> bool:
        """Waits until an ended instance is due to be started again; False if it is given up, or was `replaced`."""
        if replaced:
            return False
        self._attempted(number)
        policy, now = self._spec.restart, trio.current_time()
        crashes = self._crashes[number] = [*within_period(policy, self._crashes[number], now), now]
        wait = decide(policy, crashes, now, chance=random.random())
        # the model is ready only while one of its instances is: without one, those that still load are ended too
        others = any(one.ready for one in self._ready_soon()) if self._settled.is_set() else bool(self._there)
        if not others and (wait is None or not self._worn):
            try:
                raise error
            finally:
                del error
        said = "instance ended" if wait is not None else "instance given up"
        reason = text_without_secrets(f"{type(error).__name__}: {error}")[:300]
        extra = {"model": self._spec.name, "instance": number, "pid": pid, "reason": reason, "restart_in": wait}
        log.error(said, extra=extra, exc_info=explains(error))
        del error
        if wait is None:
            self.given_up.add(number)
            self._part(number)
            return False
        await trio.sleep(wait)
        return True

    async def _live(self, number: int) -> tuple[Exception, int, bool]:
        """Runs one instance once. Returns why it ended, the id of its process (0 if it could not be started), and True if it
        was being replaced."""
        process: Elsewhere | None = self._kept.take() if number == 0 else None
        described = process is not None
        self._kept.starts[number] += 1
        try:
            process = process or self._kept.start(self._plans[number], self._bodies)
        except OSError as e:
            return e, 0, False
        frames = self._kept.frames if described else None
        instance = Instance(process, self._load, hang_timeout=self._care.hang_timeout, frames=frames)
        self._there[number] = instance
        try:
            await instance.run(
                [] if described else [self._describe],
                partial(self._nursery.start_soon, self._warm, instance),
                partial(self._wear, instance),
            )
        except (InstanceEnded, RaisedThere, MemoryError, WarmupFailed) as e:
            return e, process.pid, bool(instance.worn)
        finally:
            self._worn.discard(instance)
            if self._there.get(number) is instance:
                del self._there[number]
            self.changed()

    def _wear(self, instance: Instance) -> None:
        """Replaces an instance in which too much is stuck. Until the new one is ready, it goes on if it is the only one."""
        del self._there[instance.number]
        self._worn.add(instance)
        self._nursery.start_soon(self._replace, instance)

    async def _replace(self, instance: Instance) -> None:
        if await self._again(instance.number, InstanceEnded(instance.worn), instance.process.pid, False):
            await self.keep(instance.number)

    def _part(self, number: int) -> None:
        for worn in self._worn:
            if worn.number == number:
                worn.part(self._care.patience)
        self.changed()

    def _ready_soon(self) -> Iterator[Instance]:
        """Yields the current instances, and those in a restart, which go on if the new process cannot replace them."""
        yield from self._there.values()
        yield from (restart.old for restart in self._restarts.values() if restart.old is not None)

    async def __model_restart__(self, number: int) -> None:
        """Starts a new process in the place of one that is ready or was given up; returns when the new one takes sessions.
        Until then the old one gets new sessions only if no other is ready. After that it ends when its sessions are over,
        at the latest after `patience` seconds. The restart continues if the caller is cancelled.

        NotFound for an unknown number. Conflict while the process of that number is being started. LoadFailed if the new
        one cannot be started: then the old one goes on."""
        name, numbers = self._spec.name, range(len(self._plans))
        if number not in numbers:
            raise NotFound(f"model {name!r} has no instance {number}: it has {', '.join(map(str, numbers))}")
        old = self._there.get(number)
        if not (number in self.given_up if old is None else old.ready):
            raise Conflict(f"instance {number} of model {name!r} is being started: wait until it is ready")
        self._restarts[number] = restart = _Restart(old)
        if old is not None:
            old.worn = "an operator has asked for another process in its place"
            del self._there[number]
            self._worn.add(old)
        self.given_up.discard(number)
        self._crashes.pop(number, None)
        self._nursery.start_soon(self._restart, number, restart)
        await restart.over.wait()
        if restart.failure:
            raise LoadFailed(f"instance {number} of model {name!r} cannot be started anew: {restart.failure}")

    async def _restart(self, number: int, restart: _Restart) -> None:
        if await self._restarted(number, restart):
            await self.keep(number)

    async def _restarted(self, number: int, restart: _Restart) -> bool:
        """Runs the new process once. True after its end if it is due to be started again."""
        old = restart.old
        try:
            ended = [await self._live(number)]  # in a list, so that no local name keeps an exception that passes through
            if self._restarts.get(number) is restart:  # the new process was never ready
                del self._restarts[number]
                restart.end(self._not_restarted(number, old, *ended[0]))
                if old is None:
                    self.given_up.add(number)
                    return False
                if not old.lost:
                    self._worn.discard(old)
                    self._there[number] = old
                    old.go_on()
                    return False
        finally:
            restart.end("its model has ended meanwhile")
        return await self._again(number, *ended.pop())

    def _not_restarted(self, number: int, old: Instance | None, error: Exception, pid: int, replaced: bool) -> str:
        reason = text_without_secrets(f"{type(error).__name__}: {error}")[:300]
        extra = {"model": self._spec.name, "instance": number, "pid": pid, "reason": reason}
        log.error("instance not restarted", extra=extra, exc_info=explains(error))
        return reason if old is None or old.lost else f"{reason}; the old process goes on"

    async def _warm(self, instance: Instance) -> None:
        """Warms up a loaded instance; afterwards it takes sessions."""
        try:
            await warm_up(instance.call, self._spec)
        except WarmupFailed as e:
            if not isinstance(e.__cause__, WorkerLost):  # if the process has ended, its end gives the reason
                instance.fail(e)
            return
        if not self._hear(instance):
            return
        instance.ready = True
        if (restart := self._restarts.pop(instance.number, None)) is not None:
            restart.end("")
        self._part(instance.number)
        extra = {"model": self._spec.name, "instance": instance.number, "pid": instance.process.pid}
        log.info("instance ready", extra=extra)
        self._attempted(instance.number)

    @property
    def __model_instances__(self) -> Iterator[InstanceStatus]:
        """Yields the present status of each instance."""
        for plan in self._plans:
            there = self._there.get(plan.number)
            resident, cpu = there.process.used() if there is not None else (0, 0.0)
            memory = there.process.memory if there is not None else None
            yield InstanceStatus(
                number=plan.number,
                state=("ready" if there.ready else "loading") if there is not None
                else "given-up" if plan.number in self.given_up
                else "restarting",
                pid=there.process.pid if there is not None else 0,
                sessions=there.sessions if there is not None else 0,
                restarts=max(self._kept.starts[plan.number] - 1, 0),
                device=plan.device or "",
                resident_bytes=resident,
                cpu_seconds=cpu,
                shared_bodies_bytes=memory.arena.used_bytes if memory is not None else 0,
                shared_answers_bytes=memory.window.used_bytes if memory is not None else 0,
            )  # fmt: skip

    def _attempted(self, number: int) -> None:
        self._unattempted.discard(number)
        if not self._unattempted:
            self._settled.set()

    # -- sessions ----------------------------------------------------------------------------------------------------

    def _instances(self) -> Iterable[Instance]:
        return [*self._ready_soon(), *self._worn]

    def _ready(self) -> list[Instance]:
        return [one for one in self._there.values() if one.ready] or [one for one in self._worn if one.ready]

    def _of_sequence(self, sequence: Any, request: InferRequest) -> Instance:
        known = self._sequences.pop(sequence, None)
        if known is None or request.parameters.get("sequence_start"):
            known = self._chosen(None)
        elif not known.ready:
            self._sequences[sequence] = known  # kept, so that every request fails until the sequence begins again
            raise lost_sequence(sequence)
        if not request.parameters.get("sequence_end"):
            self._sequences[sequence] = known
            if len(self._sequences) > _SEQUENCES:
                self._sequences.popitem(last=False)
        return known
