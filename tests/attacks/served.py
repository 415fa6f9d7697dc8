"""The server that is attacked, in a process of its own: started, looked at from outside, and ended by SIGTERM.

`python -m tests.attacks.served [--no-gc] [--stalled-log] [--descriptors N] ARGUMENTS` is `python -m gateway ARGUMENTS`.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from benchmarks.accounting import cpu_seconds, resident_bytes
from benchmarks.servers import Program, Running, started
from tests.attacks.attack import Attack
from tests.ports import free_port

DRAIN = 2.0
"""Seconds that the server has for a drain."""
GOODBYES = 5.0
"""And beyond that, for those that are told and do not go: a WebSocket's `close_timeout` among them."""
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

    def __init__(self, running: Running, *, operator: int, tls_port: int) -> None:
        self.port, self.tls_port, self._operator, self._running = running.port, tls_port, operator, running
        self._pid = running.pid
        self.status: int | None = None
        """The exit status of the server; below zero: the number of the signal that ended it. None while it runs."""

    @property
    def alive(self) -> bool:
        if self.status is None and (found := os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            self.status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return self.status is None

    def resident(self) -> int:
        """Bytes; nought once it has ended."""
        return resident_bytes(self._pid) if self.alive else 0

    def peak(self) -> int:
        """The most that was resident since `forget_peak`."""
        with suppress(OSError):
            for line in Path(f"/proc/{self._pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return 0

    def forget_peak(self) -> None:
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")

    def cpu(self) -> float:
        """Seconds so far; nought once it has ended."""
        return cpu_seconds(self._pid) if self.alive else 0.0

    def log(self) -> str:
        return self._running.log.read_text("utf-8", "replace")

    def samples(self) -> dict[str, float]:
        """The current values of the server's metrics, by sample."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._operator}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in found}

    def terminate(self) -> float:
        """SIGTERM; the seconds until it has ended. Long after its drain it is killed."""
        began = time.monotonic()
        os.kill(self._pid, signal.SIGTERM)
        while self.alive and time.monotonic() < began + DRAIN + GOODBYES + 5:
            time.sleep(0.01)
        if self.alive:
            os.kill(self._pid, signal.SIGKILL)
        return time.monotonic() - began


@contextmanager
def serving(attack: Attack, *, collector: bool = True) -> Iterator[Served]:
    """The server that this attack wants, its garbage collector on or off."""
    with tempfile.TemporaryDirectory(prefix="everywire-attack-") as folder:
        for name, text in attack.files.items():
            (Path(folder) / name).write_text(text)
            (Path(folder) / name).chmod(0o600)
        operator, tls_port = free_port(), free_port() if attack.tls else -1
        arguments = ["tests.attacks.served"]
        arguments += [] if collector else ["--no-gc"]
        arguments += ["--stalled-log"] if attack.stalled_log else []
        arguments += ["--descriptors", str(attack.descriptors)] if attack.descriptors else []
        settings = [*_SETTINGS, f"operator.port={operator}", *attack.settings]
        if attack.tls:
            settings += [f"listen.tls_port={tls_port}", "tls.dev=true", "tls.dev_dir={folder}/tls"]
        settings = [setting.replace("{folder}", folder) for setting in settings]
        models = [f"{name}={factory}" for name, factory in {**_MODELS, **attack.models}.items()]
        arguments += [part for model in models for part in ("--model", model)]
        arguments += [part for setting in settings for part in ("--set", setting)]
        escaped = [argument.replace("{", "{{").replace("}", "}}") for argument in arguments]
        program = Program(
            name="attacked", what="", arguments=(*escaped, "--port", "{port}"), health=b"/v2/health/ready", linux_only=True
        )
        with started(program) as running:
            yield Served(running, operator=operator, tls_port=tls_port)


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


def main() -> None:
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
