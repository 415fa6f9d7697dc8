"""Models in processes that are played in memory: each has a life of its own, which a test may end, stop or garble."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import trio

from gateway.catalog.process_model import described_fields, spec_elsewhere
from gateway.doorbell import Doorbell
from gateway.errors import TransportLost
from gateway.instances.child import trace_of
from gateway.instances.messages import Describe, Described, Hello, Message
from gateway.instances.pipe import Pipe
from gateway.instances.spawn import Exit, ProcessPlan, Said
from gateway.instances.trio_child import TrioChild
from gateway.net.transport import MemoryTransport, memory_pair
from gateway.version import version
from models.adapt import spec_of
from models.errors import is_failure
from models.spec import ModelSpec

_READ = 64 * 1024


@final
class Moment(enum.Enum):
    """What is told of a process."""

    STARTED = "started"
    SENT = "sent"
    """It has sent one more frame."""
    ENDED = "ended"


Told: TypeAlias = "Callable[[MemoryProcess, Moment], None]"
"""Hears of processes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlace:
    """What the processes of a model are like."""

    capacity: int = 65536
    """Bytes that each direction of one's stream holds."""
    piece: int = _READ
    """The most that it reads at once, and how long it rests before each piece: a slow reader."""
    rest: float = 0.0
    notice: float = 0.0
    """Seconds from the end of a process, which its stream tells at once, until the kernel tells of it."""


@final
class MemoryProcesses:
    """Those of one model: what starts them, and whoever wants to disturb them finds them by their numbers."""

    def __init__(self, spec: ModelSpec, place: MemoryPlace, told: Told) -> None:
        """`in_memory_processes` makes them."""
        self._spec, self._place, self._told = spec, place, told
        self.last: dict[int, MemoryProcess] = {}
        """The one that was started last of each number."""
        self._started = 0

    def start(self, plan: ProcessPlan) -> MemoryProcess:
        """Starts one, for `Instances`."""
        self._started += 1
        process = self.last[plan.number] = MemoryProcess(plan, self._spec, self._place, self._told, self._started)
        self._told(process, Moment.STARTED)
        return process


def in_memory_processes(
    model: Any,
    *,
    instances: int = 1,
    hang_timeout: float = 0.0,
    place: MemoryPlace | None = None,
    told: Told = lambda process, moment: None,
) -> tuple[ModelSpec, MemoryProcesses]:
    """The model, which is anything that `spec_of` takes, as one that runs in processes; and those, which are played in the
    same Trio run: all but the process is what a gateway has for `models.NAME.process`. `told` hears of each."""
    spec = spec_of(model)
    processes = MemoryProcesses(spec, place or MemoryPlace(), told)
    plans = [ProcessPlan(name=spec.name, number=number) for number in range(instances)]
    return spec_elsewhere(spec, Describe(spec.name, "memory", {}), plans, processes.start, hang_timeout), processes


@final
class MemoryProcess:
    """One that loads and runs the model as a process does, in a task that nobody but the run itself can cancel. It is an
    `Elsewhere`, and what may befall a process may befall it. What models share with the test they share still: their
    clean-up runs also when they are killed."""

    def __init__(self, plan: ProcessPlan, spec: ModelSpec, place: MemoryPlace, told: Told, pid: int) -> None:
        """`start` of MemoryProcesses makes them."""
        self.plan, self.pid, self.tail, self.memory = plan, pid, "", None
        self.frames = 0
        """How many it has sent."""
        self._spec, self._place, self._told = spec, place, told
        ours, theirs = memory_pair(place.capacity)
        self._ours, self._theirs = _End(ours, MemoryPlace()), _End(theirs, place, self._sent)
        self._exit = Exit()
        self._over = trio.Event()
        self._dead = False
        self._life = trio.CancelScope()
        trio.lowlevel.spawn_system_task(self._run, name=f"{type(self).__qualname__}._run")

    # -- as a place ----------------------------------------------------------------------------------------------------

    def stream(self) -> trio.abc.HalfCloseableStream:
        """The gateway's end."""
        return self._ours

    async def ended(self) -> Exit:
        """Waits for its end."""
        await self._over.wait()
        return self._exit

    def kill(self) -> None:
        """SIGKILL."""
        self.die(Exit(signal=9))

    def close(self) -> None:
        """Kills it, and closes the gateway's end."""
        self.kill()
        self._ours.close()

    async def read_output(self, said: Said) -> None:
        """It says one line."""
        said("stdout", "up")
        await self._over.wait()

    def used(self) -> tuple[int, float]:
        """Nothing of its own."""
        return 0, 0.0

    # -- what befalls it -----------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return not self._dead

    def die(self, end: Exit) -> None:
        """It ends now: what it had sent may still be read, and it says and hears no more. Nothing where it has ended."""
        if self._dead:
            return
        self._dead, self._exit = True, end
        self._ours.lost = self._theirs.unread  # a socket that is closed with something unread is reset
        self._theirs.close()
        self._life.cancel()
        self._told(self, Moment.ENDED)
        if self._place.notice:
            trio.lowlevel.spawn_system_task(self._notice, name=f"{type(self).__qualname__}._notice")
        else:
            self._over.set()

    def stop(self) -> None:
        """SIGSTOP: it neither reads nor writes."""
        self._theirs.stop(True)

    def go_on(self) -> None:
        """SIGCONT."""
        self._theirs.stop(False)

    def hang_up(self) -> None:
        """Its end of the stream is closed, and it lives on."""
        self._theirs.close()

    def spoil(self, data: bytes) -> None:
        """These bytes are sent before its next frame, or now where none is under way."""
        self._theirs.spoil(data)

    def _sent(self) -> None:
        self.frames += 1
        self._told(self, Moment.SENT)

    async def _notice(self) -> None:
        await trio.sleep(self._place.notice)
        self._over.set()

    async def _run(self) -> None:
        end = Exit(code=0)
        _current.set(self)
        try:
            with self._life:
                pipe = Pipe(self._theirs)
                pipe.post(Hello(version()))
                await TrioChild(pipe, self._described).serve()
        except BaseException as e:
            if not is_failure(e):
                raise
            if not self._dead:
                self.tail, end = trace_of(e), Exit(code=1)
        finally:
            self.die(end)

    def _described(self, message: Describe) -> tuple[ModelSpec, Message]:
        spec = self._spec
        described = Described(described_fields(spec), spec.input_formatter is not None, spec.output_formatter is not None)
        return replace(spec, name=message.name), described


_current: ContextVar[MemoryProcess | None] = ContextVar("process", default=None)


def current_process() -> MemoryProcess | None:
    """The process that the caller, a model's code, runs in; None where that is none of these."""
    return _current.get()


@final
class _End(trio.abc.HalfCloseableStream):
    """One end of a memory pair, as a stream."""

    def __init__(self, below: MemoryTransport, place: MemoryPlace, sent: Callable[[], None] = lambda: None) -> None:
        self._below, self._place, self._sent = below, place, sent
        self._stopped = False
        self._go = Doorbell(), Doorbell()  # of who reads, and of who writes
        self._sending = False
        self._spoilt = b""
        self.lost = False
        """At its end it breaks."""

    @property
    def unread(self) -> bool:
        return bool(self._below._inbox)

    def stop(self, stopped: bool) -> None:
        self._stopped = stopped
        for bell in self._go:
            bell.ring()

    def spoil(self, data: bytes) -> None:
        self._spoilt += data
        if not self._sending and not self._stopped:
            with suppress(TransportLost):  # it has ended
                self._spoilt = self._spoilt[self._below.try_send([self._spoilt]) :]

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        rest = memoryview(self._spoilt + bytes(data))
        self._spoilt, self._sending = b"", True
        try:
            while rest:
                await self._going(1)
                rest = rest[self._below.try_send([rest]) :]
                if rest:
                    await self._below.wait_writable()
        except TransportLost as e:
            raise trio.BrokenResourceError from e
        finally:
            self._sending = False
        self._sent()

    async def wait_send_all_might_not_block(self) -> None:
        await self._below.wait_writable()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        buffer = memoryview(bytearray(min(max_bytes or _READ, self._place.piece)))
        try:
            while True:
                await self._going(0)
                if self._place.rest:
                    await trio.sleep(self._place.rest)
                if (n := self._below.try_receive_into(buffer)) is not None:
                    break
                await self._below.wait_readable()
        except TransportLost as e:
            raise trio.BrokenResourceError from e
        if not n and self.lost:
            raise trio.BrokenResourceError
        return bytes(buffer[:n])

    async def _going(self, who: int) -> None:
        while self._stopped:
            await self._go[who].wait()

    async def send_eof(self) -> None:
        self._below.send_eof()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._below.close()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()
