"""Processes that a model runs in: how one is started, what it says, how it ends, and what it does first, in the child.

The kernel tells that a process has ended, by a pidfd; nothing is guessed from silence. Linux only (`supported`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import math
import os
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import IO, TypeAlias, final

import trio

from gateway.instances.memory import Arena, SharedMemory
from gateway.instances.socket_stream import SocketStream

OURS = "EVERYWIRE_"
"""What the gateway's own variables begin with. There are tokens among them: no model's process has them."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_READ = 64 * 1024  # bytes: all that a pipe holds, unless its writer asks for more
_DRAIN = 16  # reads of what was left behind: /proc/sys/fs/pipe-max-size is a mebibyte
_LINE = 8 * 1024  # bytes
_LINES = 200  # a second
_LAST_WORDS = 1.0  # seconds in which a process that was hung up on ends by itself
_TAIL = 64 * 1024  # bytes of stderr: faulthandler's dump of forty threads that rest is 18 KiB, the current one perhaps first
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Said: TypeAlias = "Callable[[str, str], None]"
"""Is told a stream, "stdout" or "stderr", and a line of it, as it came but for bytes that are not UTF-8. Does not raise."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """What one process of a model is to be."""

    name: str
    """The model."""
    number: int
    """Which of its instances, from 0."""
    module: str = "gateway.instances.child"
    """What it runs, as `python -m` does."""
    python: str = ""
    """The interpreter; empty: our own."""
    environment: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    device_variable: str = "CUDA_VISIBLE_DEVICES"
    cpu_threads: int | None = None
    """How many threads its libraries may have, where somebody says so."""
    threads_each: int = 1
    """And where neither that nor the environment does: the usable cores, shared by the instances."""
    memory_limit: int = 0
    """Bytes, for `limit_memory` in the process; 0: none."""
    speaks_for_itself: bool = False
    """True where it writes to our own stdout and stderr, and nobody reads its output here."""
    loop: str = "trio"
    """The event loop that it runs: Trio's or asyncio's."""
    shared_memory: int = 0
    """Bytes of the memory that is shared with it, in each direction; 0: there is none."""
    shared: bool = False
    """True where others than its owner are to have links to it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended: with a status or by a signal; neither where something else here has waited for it before us."""

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        if self.signal is not None:
            with suppress(ValueError):  # of the real-time signals only the first and the last have names
                return signal.Signals(self.signal).name
            return f"signal {self.signal}"
        return "unknown exit status" if self.code is None else f"exit status {self.code}"


def supported() -> str:
    """Empty where processes can be started and watched here; else what to tell whoever has configured them."""
    if sys.platform == "linux" and hasattr(os, "pidfd_open"):
        with suppress(OSError):  # a kernel before 5.3, or a sandbox
            os.close(os.pidfd_open(os.getpid()))
            return ""
    return "processes need Linux; leave `process` out"


def environment_of(plan: ProcessPlan, own: Mapping[str, str], path: Sequence[str] = ()) -> dict[str, str]:
    """The environment of a process. What is said more specially holds: the plan's own variables, its device, its
    `cpu_threads`, our environment `own`, our default of threads. Of the gateway's own variables none is handed on.

    `path` are folders that it is to find modules in before all others, as we do, but after those of a PYTHONPATH that the
    plan names.
    """
    each = str(max(plan.threads_each, 1))
    made = dict.fromkeys(_THREADS, each)
    made |= {name: value for name, value in own.items() if not name.startswith(OURS)}
    if plan.cpu_threads is not None:
        made |= dict.fromkeys(_THREADS, str(plan.cpu_threads))
    if plan.device is not None:
        made[plan.device_variable] = plan.device
    made |= plan.environment
    made[f"{OURS}INSTANCE"] = str(plan.number)
    if path:
        named = made.get("PYTHONPATH", "").split(os.pathsep)
        folders = [*named, *path] if "PYTHONPATH" in plan.environment else [*path, *named]
        made["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, folders)))
    return made


def _leading_path() -> list[str]:
    """The folders that modules are found in before the standard library's: of PYTHONPATH, of the program, or where one has
    put them there. All others an interpreter finds by itself, and they must not come before the library."""
    library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    found: list[str] = []
    for folder in sys.path:
        if folder in library or folder.endswith(zipped):
            return found
        found.append(folder or os.getcwd())
    return []


_PLACE = re.compile(
    r"(?:Current thread 0x[^\n]*|Stack) \(most recent call first\):\n(?:  Garbage-collecting\n)?"
    r'  File "([^"\n]*)", line (\d+)'
)


def innermost_line(tail: str) -> str:
    """Where Python was, as `app.py line 12`, by what faulthandler wrote to stderr as the process died: the innermost line of
    the thread whose fault it was. Empty where it wrote nothing, or that was no thread of Python's."""
    begin = tail.rfind("Fatal Python error: ")
    found = _PLACE.search(tail, begin) if begin >= 0 else None
    return f"{found[1]} line {found[2]}" if found else ""


# -- the process, from outside -------------------------------------------------------------------------------------


@final
class Process:
    """A process of a model, and our end of the socket to it.

    It leads a session and a process group of its own. Whoever it starts is in that group, and dies with it, unless it
    leaves. Somebody has to `read_output` while it runs: it waits when 64 KiB of it are unread.
    """

    def __init__(
        self,
        plan: ProcessPlan,
        popen: subprocess.Popen[bytes],
        pidfd: int,
        ours: socket.socket,
        memory: SharedMemory | None,
        links: socket.socket | None,
    ) -> None:
        """For `start`."""
        self.plan, self.pid, self.socket, self.memory, self.links = plan, popen.pid, ours, memory, links
        self._popen, self._pidfd = popen, pidfd
        self._turn = trio.Lock()  # of those who wait for its end: one waits for the pidfd, the others for that one
        self._exit: Exit | None = None
        allowance = _Allowance()
        self._outputs: list[_Output] = []
        for name, pipe in (("stdout", popen.stdout), ("stderr", popen.stderr)):
            if pipe is not None:
                self._outputs.append(_Output(name, pipe, allowance, _TAIL * (name == "stderr")))

    @classmethod
    def start(cls, plan: ProcessPlan, *arguments: str, bodies: Arena | None = None) -> Process:
        """Starts `python -m MODULE DESCRIPTOR PID ARGUMENTS [DESCRIPTOR ...]`: the number of its end of the socket, whose
        child it is, for `bind_to_parent`, where it is shared the socket that links come over (`links`, here our end of it),
        and where there is shared memory what `SharedMemory.of_descriptors` takes. All users of the machine can read the
        arguments. `bodies` is memory that is lent to others too.

        To be called in a thread that lives as long as the process may: the kernel kills it at the end of the *thread* that
        has started it. Returns when the interpreter has begun, in a millisecond or two. OSError where it cannot.
        """
        # -P: a file in the working folder hides no module from it that is not hidden from us
        command = [plan.python or sys.executable, "-P", "-m", plan.module]
        # another interpreter has packages of its own
        output = None if plan.speaks_for_itself else subprocess.PIPE
        environment = environment_of(plan, os.environ, [] if plan.python else _leading_path())
        with ExitStack() as undone, ExitStack() as theirs_alone:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            undone.callback(ours.close)
            theirs_alone.callback(theirs.close)
            descriptors, memory, links = [theirs.fileno()], None, None
            if plan.shared:
                links, taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undone.callback(links.close)
                theirs_alone.callback(taken.close)
                links.setblocking(False)
                descriptors.append(taken.fileno())
            if plan.shared_memory:
                memory = SharedMemory.create(plan.shared_memory, also=bodies)
                undone.callback(memory.close)
                descriptors += memory.descriptors
            numbers = [*map(str, descriptors)]
            popen = subprocess.Popen(
                [*command, numbers[0], str(os.getpid()), *arguments, *numbers[1:]],
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=descriptors,
                start_new_session=True,
            )
            theirs_alone.close()
            try:
                pidfd = os.pidfd_open(popen.pid)
            except BaseException:
                os.killpg(popen.pid, signal.SIGKILL)
                popen.communicate()  # it has hardly begun: it ends at once
                raise
            undone.pop_all()
        ours.setblocking(False)
        return cls(plan, popen, pidfd, ours, memory, links)

    def stream(self) -> SocketStream:
        """Our end of the socket, as a stream."""
        return SocketStream(self.socket)

    def used(self) -> tuple[int, float]:
        """The bytes of memory that it has, and the seconds of CPU that it has used; noughts where it is gone."""
        return used_by(self.pid)

    @property
    def tail(self) -> str:
        """The end of what it has written to stderr so far, 64 KiB at most; when `ended` has returned, the last of all."""
        return self._outputs[-1].tail.decode("utf-8", "replace") if self._outputs else ""

    async def ended(self) -> Exit:
        """Waits until it has ended, ends all that is left of its group, and says how it ended. Any number of tasks may wait,
        and each time it says the same. A cancel leaves all as it is."""
        async with self._turn:
            while (end := self._look()) is None:
                with suppress(trio.ClosedResourceError):  # `close` has an answer
                    await trio.lowlevel.wait_readable(self._pidfd)
        return end

    def wait_here(self, seconds: float) -> bool:
        """Waits, where there is no loop yet, for something on the socket, and receives what the process writes meanwhile;
        True where something is there, or the other end is closed."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            outputs = [output for output in self._outputs if not output.over]
            for output in outputs:
                selector.register(output.descriptor, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(seconds)}
        for output in outputs:
            if output.descriptor in ready:
                output.drain()
        return self.socket in ready

    def end_here(self) -> Exit:
        """Hangs up, kills it where it does not end by itself, gives everything back, and says how it ended: where there is
        no loop to wait in."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        if self._look() is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._pidfd, selectors.EVENT_READ)
                selector.select(_LAST_WORDS)
        self.close()
        return self._look() or Exit()

    def kill(self) -> None:
        """Has the kernel end it and its whole group. Nothing where it has ended."""
        if self._look() is None:
            self._kill_group()

    def close(self) -> None:
        """Kills it and gives everything back; a second call does nothing. Whoever reads its output, or waits for its end,
        is done. To know how it ended, wait for `ended` before: what was killed here alone ended by SIGKILL."""
        self.kill()
        for output in self._outputs:
            output.close()
        for end in (self.socket, self.links):
            if end is not None and end.fileno() >= 0:
                _tell_closing(end.fileno())
                end.close()
        if self.memory is not None:
            self.memory.close()
        if self._look() is None:
            # it dies when it comes to it, in a driver's call perhaps late, and is a zombie until somebody waits
            self._settle(Exit(signal=signal.SIGKILL))
            threading.Thread(target=self._popen.wait, name="everywire reaper", daemon=True).start()

    async def read_output(self, said: Said) -> None:
        """Tells `said` each line of its stdout and stderr, until both have ended. Empty lines are left out, a carriage
        return ends one as well, and those beyond 8 KiB come in several parts. `said` is told 200 a second of both at most,
        the others are counted: `31 lines dropped` comes in their place. For one task at a time."""
        async with trio.open_nursery() as nursery:
            for output in self._outputs:
                nursery.start_soon(output.read, said)

    def _look(self) -> Exit | None:
        """How it ended; None while it runs. Reaps it."""
        if self._exit is not None:
            return self._exit
        try:
            if os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
        except ChildProcessError:  # SIGCHLD is ignored, or a library of the embedder's waits for any child
            self._popen.poll()
            end = Exit()
        else:
            self._kill_group()  # before its number, which is the group's too, may be somebody else's
            code = self._popen.poll() or 0
            end = Exit(code=code) if code >= 0 else Exit(signal=-code)
        self._settle(end)
        for output in self._outputs:
            output.drain()
        return end

    def _settle(self, end: Exit) -> None:
        self._exit = end
        _tell_closing(self._pidfd)
        os.close(self._pidfd)

    def _kill_group(self) -> None:
        """To be called while it is not reaped."""
        with suppress(ProcessLookupError, PermissionError):  # the latter: it runs for another user now
            os.killpg(self.pid, signal.SIGKILL)


@final
class _Allowance:
    """How many lines of one instance may still be told in this second."""

    def __init__(self) -> None:
        self.until, self._left = -math.inf, 0

    def take(self) -> bool:
        now = trio.current_time()
        if now >= self.until:
            self.until, self._left = now + 1, _LINES
        self._left -= 1
        return self._left >= 0


@final
class _Output:
    """One stream that a process writes: the end of it as bytes, and lines for whoever is told them."""

    def __init__(self, name: str, pipe: IO[bytes], allowance: _Allowance, kept: int = 0) -> None:
        os.set_blocking(pipe.fileno(), False)  # our end of it; the writer's is another
        self._name, self._pipe, self._allowance, self._kept = name, pipe, allowance, kept
        self.tail = bytearray()
        self._rest = b""  # what is not told yet, because its line has no end
        self.over = False
        """True once its writer has closed it."""
        self.descriptor = pipe.fileno()
        self._dropped = 0  # lines
        self._said: Said | None = None

    async def read(self, said: Said) -> None:
        self._said = said
        try:
            self._tell_lines()
            while not self.over:
                with trio.move_on_at(self._allowance.until if self._dropped else math.inf) as scope:
                    await trio.lowlevel.wait_readable(self._pipe)
                if not scope.cancelled_caught:
                    self._receive()
                elif self._allowance.take():
                    self._tell_dropped()
        except trio.ClosedResourceError:
            pass  # `close`
        finally:
            self._said = None

    def drain(self) -> None:
        """Receives what the process has left behind."""
        for _ in range(_DRAIN):
            if not self._receive():
                return

    def close(self) -> None:
        if not self._pipe.closed:
            _tell_closing(self._pipe.fileno())
            self._pipe.close()
            self.over = True

    def _receive(self) -> bool:
        """Reads once. False where nothing is there, now or ever again."""
        if self.over:
            return False
        try:
            data = os.read(self._pipe.fileno(), _READ)
        except BlockingIOError:
            return False
        self.over = not data
        if self._kept:
            self.tail += data
            del self.tail[: -self._kept]
        self._rest += data
        if self._said is not None:
            self._tell_lines()
        return not self.over

    def _tell_lines(self) -> None:
        data = self._rest
        end = len(data) if self.over else max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        while len(data) - end > _LINE:
            end = _cut(data, end)
        for start, stop in _parts(data, end):
            if not self._may_tell():
                # the others only counted: of a flood there are ten thousands in one read
                left = data[start:end]
                self._dropped += max(left.count(b"\n"), left.count(b"\r"), 1)
                break
            self._tell(data[start:stop].decode("utf-8", "replace"))
        self._rest = data[end:]
        if self.over and self._dropped:
            self._tell_dropped()

    def _may_tell(self) -> bool:
        if self._dropped and self._allowance.take():
            self._tell_dropped()
        return not self._dropped and self._allowance.take()

    def _tell_dropped(self) -> None:
        dropped, self._dropped = self._dropped, 0
        self._tell(f"{dropped} lines dropped" if dropped > 1 else "1 line dropped")

    def _tell(self, line: str) -> None:
        if self._said is not None:
            self._said(self._name, line)


_WHOLE = re.compile(rb"[^\r\n]+")


def _parts(data: bytes, end: int) -> Iterator[tuple[int, int]]:
    """Where each line begins and stops, up to `end`, and each part of one that is too long."""
    for line in _WHOLE.finditer(data, 0, end):
        start, stop = line.span()
        while stop - start > _LINE:
            yield start, (cut := _cut(data, start))
            start = cut
        yield start, stop


def _cut(data: bytes, start: int) -> int:
    """Where the first part of a line that is too long stops: not within a character (RFC 3629 section 3)."""
    longest = start + _LINE
    return next((cut for cut in range(longest, longest - 4, -1) if data[cut] & 0xC0 != 0x80), longest)


def _tell_closing(descriptor: int) -> None:
    if trio.lowlevel.in_trio_run():  # else nobody waits for it
        trio.lowlevel.notify_closing(descriptor)


def used_by(pid: int) -> tuple[int, float]:
    """The bytes of memory that a process has, and the seconds of CPU that it has used; noughts where it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm, open(f"/proc/{pid}/stat", "rb") as stat:
            pages, fields = int(statm.read().split()[1]), stat.read().rpartition(b")")[2].split()
    except (OSError, IndexError):
        return 0, 0.0
    return pages * os.sysconf("SC_PAGE_SIZE"), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- the process, from inside --------------------------------------------------------------------------------------


def bind_to_parent(parent: int) -> None:
    """Has this process end with the thread that has started it, in whatever call it is then: to be called before anything
    else is imported. Exits at once where `parent` is its parent no more.

    A fault writes Python's stack to stderr. Output is UTF-8, and told line by line. SIGINT and SIGTERM do nothing here,
    because whoever started it decides when it ends; but programs and forks that it starts have them as usual.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before that, and will not end again
        os._exit(1)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    for number in _UNHEARD:
        # not SIG_IGN: what it starts would inherit that, and could not be told to end (execve(2))
        signal.signal(number, _unheard)
        signal.siginterrupt(number, False)
    os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_hear_again)


def limit_memory(limit: int) -> None:
    """Has allocations fail, as MemoryError in Python, when this process has so many bytes of private memory (RLIMIT_DATA;
    the stacks of threads count): 0 changes nothing."""
    if limit:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


_UNHEARD = (signal.SIGINT, signal.SIGTERM)
_fork = threading.local()


def _unheard(number: int, frame: object) -> None:
    """Handles a signal by doing nothing."""


def _hold_back() -> None:
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _UNHEARD)  # one that comes at once is for the fork


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _hear_again() -> None:
    for number in _UNHEARD:
        if signal.getsignal(number) is _unheard:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _let_through()
