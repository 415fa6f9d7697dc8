"""Emulates the processes of models in memory: a test may end, stop or garble each of them."""

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
from gateway.instances.messages import Describe, Described, Hello, Message
from gateway.instances.pipe import Pipe
from gateway.instances.spawn import Exit, ProcessPlan, Said
from gateway.instances.trio_child import TrioChild
from gateway.net.transport import MemoryTransport, memory_pair
from gateway.version import version
from models.adapt import spec_of
from models.errors import is_failure
from models.spec import ModelSpec
from models.tracebacks.text import text_of

_READ = 64 * 1024


@final
class Moment(enum.Enum):
    """An event of a process."""

    STARTED = "started"
    SENT = "sent"
    """The process has sent one more frame."""
    ENDED = "ended"


Told: TypeAlias = "Callable[[MemoryProcess, Moment], None]"
"""A function that is called with each event of a process."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlace:
    """The behaviour of a model's processes."""

    capacity: int = 65536
    """Bytes that each direction of a process's stream holds."""
    piece: int = _READ
    """The most bytes that a process reads at once."""
    rest: float = 0.0
    """Seconds that a process waits before each read; default 0. More makes it a slow reader."""
    notice: float = 0.0
    """Seconds from the end of a process until `ended` reports it; the stream ends at once."""


@final
class MemoryProcesses:
    """The processes of one model. Tests find them by their numbers in `last`."""

    def __init__(self, spec: ModelSpec, place: MemoryPlace, told: Told) -> None:
        """Only `in_memory_processes` makes these."""
        self._spec, self._place, self._told = spec, place, told
        self.last: dict[int, MemoryProcess] = {}
        """The latest process of each number."""
        self._started = 0

    def start(self, plan: ProcessPlan) -> MemoryProcess:
        """Starts a process, for `Instances`."""
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
    """Returns the spec of a model that runs in processes, and the processes, which are emulated in the same Trio run.
    `model` is anything that `spec_of` takes. Except for the processes themselves, a gateway runs the same code as for
    `models.NAME.process`. `told` is called with each event of a process."""
    spec = spec_of(model)
    processes = MemoryProcesses(spec, place or MemoryPlace(), told)
    plans = [ProcessPlan(name=spec.name, number=number) for number in range(instances)]
    return spec_elsewhere(spec, Describe(spec.name, "memory", {}), plans, processes.start, hang_timeout), processes


@final
class MemoryProcess:
    """An emulated process, which loads and runs the model in a system task. It is an `Elsewhere`, and all that may happen to
    a process may happen to it. Unlike in a real process, the model shares objects with the test, and its clean-up runs even
    after a kill."""

    def __init__(self, plan: ProcessPlan, spec: ModelSpec, place: MemoryPlace, told: Told, pid: int) -> None:
        """Only `MemoryProcesses.start` makes these."""
        self.plan, self.pid, self.tail, self.memory = plan, pid, "", None
        self.frames = 0
        """The number of frames that the process has sent."""
        self._spec, self._place, self._told = spec, place, told
        ours, theirs = memory_pair(place.capacity)
        self._ours, self._theirs = _End(ours, MemoryPlace()), _End(theirs, place, self._sent)
        self._exit = Exit()
        self._over = trio.Event()
        self._dead = False
        self._life = trio.CancelScope()
        trio.lowlevel.spawn_system_task(self._run, name=f"{type(self).__qualname__}._run")

    # -- Elsewhere -----------------------------------------------------------------------------------------------------

    def stream(self) -> trio.abc.HalfCloseableStream:
        """Returns the gateway's end of the stream."""
        return self._ours

    async def ended(self) -> Exit:
        """Waits until the process has ended, and returns how."""
        await self._over.wait()
        return self._exit

    def kill(self) -> None:
        """Ends the process as SIGKILL does."""
        self.die(Exit(signal=9))

    def close(self) -> None:
        """Kills the process, and closes the gateway's end of the stream."""
        self.kill()
        self._ours.close()

    async def read_output(self, said: Said) -> None:
        """Passes one line to `said`, and waits for the end."""
        said("stdout", "up")
        await self._over.wait()

    def used(self) -> tuple[int, float]:
        """Returns zeros: the process shares the memory of the test."""
        return 0, 0.0

    # -- for tests -----------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return not self._dead

    def die(self, end: Exit) -> None:
        """Ends the process now. Bytes that it has sent may still be read. Does nothing if it has ended."""
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
        """Stops the process as SIGSTOP does: it neither reads nor writes."""
        self._theirs.stop(True)

    def go_on(self) -> None:
        """Lets the process go on as SIGCONT does."""
        self._theirs.stop(False)

    def hang_up(self) -> None:
        """Closes the process's end of the stream, while the process goes on."""
        self._theirs.close()

    def spoil(self, data: bytes) -> None:
        """Sends bytes before the process's next frame, or at once if it is not sending one."""
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
                self.tail, end = text_of(e), Exit(code=1)
        finally:
            self.die(end)

    def _described(self, message: Describe) -> tuple[ModelSpec, Message]:
        spec = self._spec
        described = Described(described_fields(spec), spec.input_formatter is not None, spec.output_formatter is not None)
        return replace(spec, name=message.name), described


_current: ContextVar[MemoryProcess | None] = ContextVar("process", default=None)


def current_process() -> MemoryProcess | None:
    """Returns the emulated process in which the calling model's code runs; None outside one."""
    return _current.get()


@final
class _End(trio.abc.HalfCloseableStream):
    """One end of a memory pair, as a stream."""

    def __init__(self, below: MemoryTransport, place: MemoryPlace, sent: Callable[[], None] = lambda: None) -> None:
        self._below, self._place, self._sent = below, place, sent
        self._stopped = False
        self._go = Doorbell(), Doorbell()  # for the reading task, and for the writing one
        self._sending = False
        self._spoilt = b""
        self.lost = False
        """True if the stream breaks at its end, as a reset socket does."""

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
            with suppress(TransportLost):  # the stream has ended
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
