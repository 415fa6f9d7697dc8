"""The server that is attacked, in a process of its own: started, looked at from outside, and ended by SIGTERM.

`python -m tests.attacks.served [--no-gc] [--stalled-log] [--descriptors N] [--objects FILE] ARGUMENTS` is
`python -m gateway ARGUMENTS`; on SIGUSR2 it writes its large objects to that file.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

import trio

from benchmarks.accounting import cpu_seconds, family, resident_bytes
from benchmarks.servers import ROOT, Program, Running, started
from tests.attacks.attack import Attack
from tests.ports import free_port

DRAIN = 2.0
"""Seconds that the server has for a drain."""
GOODBYES = 5.0
"""And beyond that, for those that are told and do not go: a WebSocket's `close_timeout` among them."""
LARGE = 64 * 1024
"""Bytes of an object that is worth a look when memory stays."""
_MODELS = {
    "echo": "models.library.echo:Echo",
    "identity": "models.library.tensors:identity",
    "tokens": "benchmarks.served:tokens",
}
_SETTINGS = (
    "bidi.default_model=echo",
    "lmi.default_model=tokens",
    "listen.host=127.0.0.1",
    f"drain.timeout={DRAIN}",
    "limits.requests_per_connection=1000000000",
    "log.format=json",
)


@final
class Served:
    """A server that runs, as the kernel, its log and its operator plane show it."""

    def __init__(self, running: Running, *, operator: int, tls_port: int, metrics: int, objects: Path) -> None:
        self.port, self.tls_port, self.operator, self.metrics = running.port, tls_port, operator, metrics
        self._running = running
        self.pid = running.pid
        self._objects, self.folder = objects, objects.parent
        """The folder of this run alone."""
        self.status: int | None = None
        """The exit status of the server; below zero: the number of the signal that ended it. None while it runs."""

    @property
    def alive(self) -> bool:
        if self.status is None and (found := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            self.status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return self.status is None

    def resident(self) -> int:
        """Bytes of it and its processes; nought once it has ended."""
        return int(self._of_all(resident_bytes)) if self.alive else 0

    def peak(self) -> int:
        """The most that was resident since `forget_peak`."""
        return int(self._of_all(_peak))

    def forget_peak(self) -> None:
        for pid in family(self.pid):
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def cpu(self) -> float:
        """Seconds so far; nought once it has ended."""
        return self._of_all(cpu_seconds) if self.alive else 0.0

    def _of_all(self, figure: Callable[[int], float]) -> float:
        found = 0.0
        for pid in family(self.pid):
            with suppress(OSError):  # it may end meanwhile
                found += figure(pid)
        return found

    def large(self) -> Counter[str]:
        """The objects of LARGE and more in the server, by type and KiB. A copy of the process makes the walk, and takes its memory."""
        self._objects.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR2)
        until = time.monotonic() + 60
        while not self._objects.exists():
            assert self.alive, "the server ended while its objects were counted"
            assert time.monotonic() < until, "the server does not tell its objects"
            time.sleep(0.05)
        return Counter(json.loads(self._objects.read_text()))

    def log(self) -> str:
        return self._running.log.read_text("utf-8", "replace")

    def samples(self) -> dict[str, float]:
        """The current values of the server's metrics, by sample."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.operator}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in found}

    def terminate(self) -> float:
        """SIGTERM; the seconds until it has ended. Long after its drain it is killed."""
        began = time.monotonic()
        os.kill(self.pid, signal.SIGTERM)
        while self.alive and time.monotonic() < began + DRAIN + GOODBYES + 5:
            time.sleep(0.01)
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
        return time.monotonic() - began


@contextmanager
def serving(attack: Attack, *, collector: bool = True) -> Iterator[Served]:
    """The server that this attack wants, its garbage collector on or off."""
    with tempfile.TemporaryDirectory(prefix="everywire-attack-") as folder:
        for name, text in attack.files.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_text(text)
            (Path(folder) / name).chmod(0o600)
        operator, tls_port = free_port(), free_port() if attack.tls else -1
        metrics, behind = (free_port() if wanted else -1 for wanted in (attack.metrics, attack.behind))
        objects = Path(folder) / "objects.json"
        arguments = ["tests.attacks.served", "--objects", str(objects)]
        arguments += [] if collector else ["--no-gc"]
        arguments += ["--stalled-log"] if attack.stalled_log else []
        arguments += ["--descriptors", str(attack.descriptors)] if attack.descriptors else []
        settings = [*_SETTINGS, f"operator.port={operator}", *attack.settings]
        if attack.tls:
            settings += [f"listen.tls_port={tls_port}", "tls.dev=true", "tls.dev_dir={folder}/tls"]
        if attack.metrics:
            settings.append(f"metrics.port={metrics}")
        settings = [setting.replace("{folder}", folder) for setting in settings]
        factories = {**_MODELS, **attack.models}
        if attack.behind is not None:
            factories["behind"] = "gateway.containers.model:container"
            settings.append(f'models.behind.options={{url="ws://127.0.0.1:{behind}"}}')
        models = [f"{name}={factory}" for name, factory in factories.items()]
        arguments += [part for model in models for part in ("--model", model)]
        arguments += [part for setting in settings for part in ("--set", setting)]
        escaped = [argument.replace("{", "{{").replace("}", "}}") for argument in arguments]
        program = Program(
            name="attacked", what="", arguments=(*escaped, "--port", "{port}"), health=b"/v2/health/ready", linux_only=True
        )
        with _container(attack, behind), started(program) as running:
            yield Served(running, operator=operator, tls_port=tls_port, metrics=metrics, objects=objects)


@contextmanager
def _container(attack: Attack, port: int) -> Iterator[None]:
    """The container behind the server, if this attack has one, in a process of its own."""
    if attack.behind is None:
        yield
        return
    command = [sys.executable, "-m", "tests.attacks.behind", attack.name, str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


def tracebacks(log: str) -> list[str]:
    """Lines that have one, cut."""
    return [line[:2000] for line in log.splitlines() if "Traceback (most recent" in line]


def records(log: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The event of each line with its fields."""
    for line in log.splitlines():
        with suppress(ValueError):
            told = json.loads(line)
            if isinstance(told, dict):
                yield str(told.get("event", told.get("message", ""))), told


def events(log: str) -> set[str]:
    """The events that it tells."""
    return {event for event, _ in records(log)}


def _peak(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _tables_of_trio() -> set[int]:
    """The identities of Trio's own tables of tasks and scopes: sets, which stay as large as a crowd has made them."""
    tables = list[Any]()
    with suppress(AttributeError):  # no run here
        runner = trio._core._run.GLOBAL_RUN_CONTEXT.runner
        tables.append(runner.tasks)
        for task in runner.tasks:
            tables += [nursery._children for nursery in task.child_nurseries]
            status: Any = task._cancel_status
            while status is not None:
                tables += [status._tasks, status._children]
                status = status._parent
    return {id(table) for table in tables}


def large_objects() -> Counter[str]:
    """The objects of LARGE and more in this process that the collector or a module leads to, by type and KiB; without
    Trio's own tables."""
    seen, counted = _tables_of_trio(), Counter[str]()
    level: list[Any] = [*gc.get_objects(), *sys.modules.values()]
    hidden = {id(seen), id(counted), id(level)}
    while level:
        beyond: list[Any] = []
        hidden.add(id(beyond))
        for found in level:
            if id(found) in seen or id(found) in hidden:
                continue
            seen.add(id(found))
            size = len(found) if isinstance(found, mmap.mmap) and not found.closed else sys.getsizeof(found, 0)
            if size >= LARGE:
                counted[f"{type(found).__module__}.{type(found).__qualname__} of {size // 1024} KiB"] += 1
            beyond += [held for held in gc.get_referents(found) if id(held) not in seen]
        level = beyond
        hidden.add(id(level))
    return counted


def _tell_objects(file: Path) -> None:
    """In a copy of this process, so that its own memory stays as it is; the copy of the copy, whom nobody has to wait for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # CPython 3.12 about threads: the copy calls into none
        if child := os.fork():
            os.waitpid(child, 0)
            return
        if not os.fork():
            with suppress(BaseException):
                written = file.with_suffix(".part")
                written.write_text(json.dumps(large_objects()))
                written.rename(file)
        os._exit(0)


def main() -> None:
    if "--objects" in sys.argv:
        at = sys.argv.index("--objects")
        file = Path(sys.argv[at + 1])
        del sys.argv[at : at + 2]
        signal.signal(signal.SIGUSR2, lambda number, frame: _tell_objects(file))
    if "--no-gc" in sys.argv:
        sys.argv.remove("--no-gc")
        gc.collect()
        gc.freeze()
        gc.disable()
    if "--stalled-log" in sys.argv:
        sys.argv.remove("--stalled-log")
        _, written = os.pipe()  # the reading end stays open here, and is never read
        os.dup2(written, 2)
    if "--descriptors" in sys.argv:
        at = sys.argv.index("--descriptors")
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[at + 1]),) * 2)
        del sys.argv[at : at + 2]
    from gateway.cli.main import main as gateway

    gateway()


if __name__ == "__main__":
    main()
