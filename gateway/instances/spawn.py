"""Starts the processes of models, reads their output and waits for their end; and prepares such a process from inside.

The kernel reports the end of a process by a pidfd; silence proves nothing. Linux only (`supported`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import logging
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
from models.tracebacks.frames import is_authors

OURS = "EVERYWIRE_"
"""The prefix of the gateway's own environment variables. Some hold tokens, so models' processes do not get them."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_READ = 64 * 1024  # bytes: the default capacity of a pipe
_DRAIN = 16  # reads of remaining output: /proc/sys/fs/pipe-max-size is 1 MiB
_LINE = 8 * 1024  # bytes
_LINES = 200  # per second
_LAST_WORDS = 1.0  # seconds that a process has to end after we hung up
_TAIL = 64 * 1024  # bytes of stderr: faulthandler's dump of forty idle threads is 18 KiB; the current one may come first
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Said: TypeAlias = "Callable[[str, str], None]"
"""Takes the name of a stream, "stdout" or "stderr", and a line of it, with bytes that are not UTF-8 replaced. It must not
raise."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """The plan of one process of a model."""

    name: str
    """The name of the model."""
    number: int
    """The number of the instance, from 0."""
    module: str = "gateway.instances.child"
    """The module that the process runs, as `python -m` does."""
    python: str = ""
    """The interpreter; default empty: that of this process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the process gets in addition."""
    device: str | None = None
    """The value of `device_variable`; default None: the variable is not set."""
    device_variable: str = "CUDA_VISIBLE_DEVICES"
    """The environment variable that selects the device."""
    cpu_threads: int | None = None
    """The threads that numeric libraries may use; default None: as the environment says, or else `threads_each`."""
    threads_each: int = 1
    """The usable cores divided by the number of instances: the default of `cpu_threads`."""
    memory_limit: int = 0
    """Bytes for `limit_memory` in the process; default 0: no limit."""
    speaks_for_itself: bool = False
    """True if the process writes to our own stdout and stderr, so that its output is not read here."""
    loop: str = "trio"
    """The event loop of the process: "trio" or "asyncio"."""
    shared_memory: int = 0
    """Bytes of shared memory in each direction; default 0: none."""
    shared: bool = False
    """True if other gateways than the owner will have links to the process."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The end of a process: a status or a signal. Neither is known if other code in this process has reaped it."""

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        if self.signal is not None:
            with suppress(ValueError):  # only the first and the last of the real-time signals have names
                return signal.Signals(self.signal).name
            return f"signal {self.signal}"
        return "unknown exit status" if self.code is None else f"exit status {self.code}"


def supported() -> str:
    """Returns an empty text if processes can be started and watched here; otherwise an error for the author of the
    configuration."""
    if sys.platform == "linux" and hasattr(os, "pidfd_open"):
        with suppress(OSError):  # a kernel before 5.3, or a sandbox
            os.close(os.pidfd_open(os.getpid()))
            return ""
    return "processes need Linux; leave `process` out"


def environment_of(plan: ProcessPlan, own: Mapping[str, str], path: Sequence[str] = ()) -> dict[str, str]:
    """Returns the environment of a process. The first of these that sets a variable wins: the plan's variables, its device,
    its `cpu_threads`, our environment `own`, our default of threads. The gateway's own variables are left out.

    `path` has folders in which the process finds modules before all others, except those of a PYTHONPATH in the plan.
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
    """Returns the folders of `sys.path` before the standard library's: those of PYTHONPATH, of the program, or added by
    code. An interpreter finds the others by itself, and they must not come before the library."""
    library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    found: list[str] = []
    for folder in sys.path:
        if folder in library or folder.endswith(zipped):
            return found
        found.append(folder or os.getcwd())
    return []


_THREAD_AT_FAULT = re.compile(r"(?:Current thread 0x[^\n]*|Stack) \(most recent call first\):\n(?:  Garbage-collecting\n)?")
_OTHER_THREAD = re.compile(r"Thread 0x.* \(most recent call first\):$")
_PLACE = re.compile(r'  File "([^"\n]*)", line (\d+)')


def innermost_line(tail: str) -> str:
    """Returns the line that crashed, such as `app.py line 12`, from faulthandler's output at the end of stderr: the author's
    innermost of the thread at fault, or else the innermost. Empty if there is no such output, or the thread was not one of
    Python."""
    begin = tail.rfind("Fatal Python error: ")
    fault = _THREAD_AT_FAULT.search(tail, begin) if begin >= 0 else None
    if fault is None or not (places := _places(tail, fault.end())):
        return ""
    file, line = next((place for place in places if is_authors(place[0])), places[0])
    return f"{file} line {line}"


def _places(tail: str, at: int) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    while (place := _PLACE.match(tail, at)) is not None:
        found.append((place[1], place[2]))
        at = tail.find("\n", place.end()) + 1 or len(tail)
    return found


@final
class CrashOutput:
    """Finds, in the lines that a process writes to stderr, those of a crash that do not help the model's author: the frames
    of everywire, Trio and Python, and all of the threads that did not crash."""

    __slots__ = ("_crashed", "_elsewhere")

    def __init__(self) -> None:
        self._crashed = self._elsewhere = False

    def level(self, stream: str, line: str) -> int:
        """Returns the level at which the next line is logged: DEBUG for such a line."""
        return logging.DEBUG if stream == "stderr" and self._is_noise(line) else logging.INFO

    def _is_noise(self, line: str) -> bool:
        if line.startswith("Fatal Python error: "):
            self._crashed = True
        if not self._crashed:
            return False
        if (other := _OTHER_THREAD.match(line)) or not line.startswith("  "):
            self._elsewhere = other is not None
        place = _PLACE.match(line)
        return self._elsewhere or line.startswith("Extension modules: ") or (place is not None and not is_authors(place[1]))


# -- the process, from outside -------------------------------------------------------------------------------------


@final
class Process:
    """A process of a model, and our end of the socket to it.

    The process leads a new session and a new process group. Processes that it starts are in that group and die with it,
    unless they leave the group. A task must run `read_output` for as long as the process runs: the process blocks when
    64 KiB of its output are unread.
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
        """Only `start` makes processes."""
        self.plan, self.pid, self.socket, self.memory, self.links = plan, popen.pid, ours, memory, links
        self._popen, self._pidfd = popen, pidfd
        self._turn = trio.Lock()  # one task of those in `ended` waits for the pidfd; the others wait for that task
        self._exit: Exit | None = None
        allowance = _Allowance()
        self._outputs: list[_Output] = []
        for name, pipe in (("stdout", popen.stdout), ("stderr", popen.stderr)):
            if pipe is not None:
                self._outputs.append(_Output(name, pipe, allowance, _TAIL * (name == "stderr")))

    @classmethod
    def start(cls, plan: ProcessPlan, *arguments: str, bodies: Arena | None = None) -> Process:
        """Starts `python -m MODULE DESCRIPTOR PID ARGUMENTS [DESCRIPTOR ...]`.

        DESCRIPTOR is the process's end of the socket, PID that of its parent, for `bind_to_parent`. Further descriptors: the
        socket that links come over if the process is shared (`links` is our end), and those for
        `SharedMemory.of_descriptors` if there is shared memory. All users of the machine can read the arguments. `bodies` is
        memory that other processes of the model share.

        Must be called in a thread that lives as long as the process may: the kernel kills the process when the *thread*
        that started it ends. Returns when the interpreter has begun, in a millisecond or two. OSError if it cannot start.
        """
        # -P: a file in the working folder must not hide a module from the process that it does not hide from us
        command = [plan.python or sys.executable, "-P", "-m", plan.module]
        output = None if plan.speaks_for_itself else subprocess.PIPE
        # another interpreter has its own packages, so our folders are not for it
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
                popen.communicate()  # the process has only begun, so it ends at once
                raise
            undone.pop_all()
        ours.setblocking(False)
        return cls(plan, popen, pidfd, ours, memory, links)

    def stream(self) -> SocketStream:
        """Returns our end of the socket as a stream."""
        return SocketStream(self.socket)

    def used(self) -> tuple[int, float]:
        """Returns the process's bytes of memory and seconds of CPU; zeros if it is gone."""
        return used_by(self.pid)

    @property
    def tail(self) -> str:
        """The end of its stderr so far, at most 64 KiB; complete once `ended` has returned."""
        return self._outputs[-1].tail.decode("utf-8", "replace") if self._outputs else ""

    async def ended(self) -> Exit:
        """Waits until the process has ended, kills the rest of its group, and returns how it ended. Any number of tasks may
        wait; all get the same. A cancel changes nothing."""
        async with self._turn:
            while (end := self._look()) is None:
                with suppress(trio.ClosedResourceError):  # after `close`, `_look` knows the end
                    await trio.lowlevel.wait_readable(self._pidfd)
        return end

    def wait_here(self, seconds: float) -> bool:
        """Waits at most `seconds` for bytes on the socket, and reads the process's output meanwhile. Blocks; for callers
        without a loop. True if there are bytes, or the other end is closed."""
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
        """Hangs up, waits at most a second for the process to end, kills it otherwise, frees everything, and returns how it
        ended. Blocks; for callers without a loop."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        if self._look() is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._pidfd, selectors.EVENT_READ)
                selector.select(_LAST_WORDS)
        self.close()
        return self._look() or Exit()

    def kill(self) -> None:
        """Kills the process and its whole group. Does nothing if it has ended."""
        if self._look() is None:
            self._kill_group()

    def close(self) -> None:
        """Kills the process and frees everything; a second call does nothing. Tasks in `read_output` and `ended` return. To
        know how the process ended, wait for `ended` first: a process that this call kills counts as ended by SIGKILL."""
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
            # the process may die late, in a call of a driver, and is then a zombie until it is waited for
            self._settle(Exit(signal=signal.SIGKILL))
            threading.Thread(target=self._popen.wait, name="everywire reaper", daemon=True).start()

    async def read_output(self, said: Said) -> None:
        """Passes each line of stdout and stderr to `said`, until both have ended. Only one task may run this at a time.

        Empty lines are left out. A carriage return ends a line too. Lines over 8 KiB are passed in parts. `said` gets at
        most 200 lines per second of both; the others are counted, and a line such as `31 lines dropped` takes their
        place."""
        async with trio.open_nursery() as nursery:
            for output in self._outputs:
                nursery.start_soon(output.read, said)

    def _look(self) -> Exit | None:
        """Returns how the process ended, and reaps it; None while it runs."""
        if self._exit is not None:
            return self._exit
        try:
            if os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
        except ChildProcessError:  # SIGCHLD is ignored, or other code in this process waits for all children
            self._popen.poll()
            end = Exit()
        else:
            self._kill_group()  # before it is reaped: then its id, which is the group's too, may be used again
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
        """Kills the group. Must be called before the process is reaped."""
        with suppress(ProcessLookupError, PermissionError):  # PermissionError: the process runs as another user now
            os.killpg(self.pid, signal.SIGKILL)


@final
class _Allowance:
    """The number of lines of one process that may still be passed on in the current second."""

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
    """One output stream of a process: its lines, and its last bytes."""

    def __init__(self, name: str, pipe: IO[bytes], allowance: _Allowance, kept: int = 0) -> None:
        os.set_blocking(pipe.fileno(), False)  # only our end: the writer's still blocks
        self._name, self._pipe, self._allowance, self._kept = name, pipe, allowance, kept
        self.tail = bytearray()
        self._rest = b""  # the begun line, not passed on yet
        self.over = False
        """True once the writer has closed the stream."""
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
        """Reads the remaining output."""
        for _ in range(_DRAIN):
            if not self._receive():
                return

    def close(self) -> None:
        if not self._pipe.closed:
            _tell_closing(self._pipe.fileno())
            self._pipe.close()
            self.over = True

    def _receive(self) -> bool:
        """Reads once. False if there is nothing to read, now or any more."""
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
                # the rest is only counted, since one read of a flood has tens of thousands of lines
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
    """Yields the start and the end of each line before `end`; a line that is too long comes in parts."""
    for line in _WHOLE.finditer(data, 0, end):
        start, stop = line.span()
        while stop - start > _LINE:
            yield start, (cut := _cut(data, start))
            start = cut
        yield start, stop


def _cut(data: bytes, start: int) -> int:
    """Returns the end of the first part of a line that is too long: not within a character (RFC 3629 section 3)."""
    longest = start + _LINE
    return next((cut for cut in range(longest, longest - 4, -1) if data[cut] & 0xC0 != 0x80), longest)


def _tell_closing(descriptor: int) -> None:
    if trio.lowlevel.in_trio_run():  # otherwise no task can wait for it
        trio.lowlevel.notify_closing(descriptor)


def used_by(pid: int) -> tuple[int, float]:
    """Returns a process's resident bytes and its seconds of CPU; zeros if it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm, open(f"/proc/{pid}/stat", "rb") as stat:
            pages, fields = int(statm.read().split()[1]), stat.read().rpartition(b")")[2].split()
    except (OSError, IndexError):
        return 0, 0.0
    return pages * os.sysconf("SC_PAGE_SIZE"), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- the process, from inside --------------------------------------------------------------------------------------


def bind_to_parent(parent: int) -> None:
    """Binds this process to the thread that started it: the kernel kills the process when that ends. Call this before other
    imports. It exits at once if `parent` is no longer the parent.

    A crash writes Python's stack to stderr. Output is UTF-8 and flushed line by line. SIGINT and SIGTERM do nothing in this
    process, because its owner decides when it ends. Programs and forks that it starts handle them as usual.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent ended before the call above, so there is no signal
        os._exit(1)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    for number in _UNHEARD:
        # not SIG_IGN: programs that it starts would inherit that, and ignore requests to end (execve(2))
        signal.signal(number, _unheard)
        signal.siginterrupt(number, False)
    os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_hear_again)


def limit_memory(limit: int) -> None:
    """Limits the private memory of this process to so many bytes (RLIMIT_DATA; the stacks of threads count). Beyond that,
    allocations fail, in Python with MemoryError. 0 changes nothing."""
    if limit:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


_UNHEARD = (signal.SIGINT, signal.SIGTERM)
_fork = threading.local()


def _unheard(number: int, frame: object) -> None:
    """Handles a signal by doing nothing."""


def _hold_back() -> None:
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _UNHEARD)  # so that the fork keeps one that comes at once


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _hear_again() -> None:
    for number in _UNHEARD:
        if signal.getsignal(number) is _unheard:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _let_through()
