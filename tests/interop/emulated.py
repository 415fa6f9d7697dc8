"""A user's container as a process, and `everywire emulate sagemaker` before it, started as a user does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from tests.interop.servers import Server
from tests.ports import free_port

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 120


@final
class _Lines:
    """The lines that a process prints; a test can wait for one."""

    def __init__(self, stream: Any) -> None:
        self._all: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: Any) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    self._all.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._all)

    def find(self, wanted: Callable[[str], Any], *, since: int = 0, count: int = 1) -> list[Any]:
        """The first `count` answers of `wanted` that are not None."""
        with self._changed:
            found: list[Any] = []

            def enough() -> bool:
                found[:] = [a for line in self._all[since:] if (a := wanted(line)) is not None]
                return len(found) >= count or self._ended

            self._changed.wait_for(enough, _PATIENCE)
            assert len(found) >= count, "\n".join(self._all[since:])
            return found

    def still(self, seconds: float) -> int:
        """How many lines there are when none has come for so long; a process that does not fall silent fails the test."""
        with self._changed:
            for _ in range(_PATIENCE):
                before = len(self._all)
                if not self._changed.wait_for(lambda n=before: len(self._all) > n or self._ended, seconds):
                    return before
        raise AssertionError("it never stands still")


@final
class Container:
    """A program of tests/interop/containers. `start` again gives it the same port."""

    def __init__(self, name: str) -> None:
        self._file = Path(__file__).parent / "containers" / f"{name}.py"
        self.port = free_port()
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, str(self._file), str(self.port)], env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.said = _Lines(self.process.stdout)
        self.said.find(lambda line: line if line.startswith("listening") else None)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@final
class Emulator:
    """`everywire emulate sagemaker` as a process."""

    def __init__(self, process: subprocess.Popen[str], tls: Path) -> None:
        self.process = process
        self.log, self.advice = _Lines(process.stderr), _Lines(process.stdout)
        https, http = (self._port(scheme) for scheme in ("https", "http"))
        self.server = Server("127.0.0.1", http, https, tls / "ca.pem", process.pid)

    def _port(self, scheme: str) -> int:
        def port(line: str) -> int | None:
            found = re.search(rf"{scheme}://localhost:(\d+)", line)
            return int(found[1]) if found else None

        return int(self.advice.find(port)[0])

    def event(self, name: str, *, since: int = 0, count: int = 1, **wanted: Any) -> list[dict[str, Any]]:
        """The first records of the log with this event and these fields, waited for."""

        def match(line: str) -> dict[str, Any] | None:
            record: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
            return record if {"event": name, **wanted}.items() <= record.items() else None

        return self.log.find(match, since=since, count=count)

    def endings(self, since: int, count: int = 1) -> list[str]:
        """How the calls ended whose lines came after that place in the log."""
        return [record["ending"] for record in self.event("exchange", since=since, count=count)]

    @property
    def resident(self) -> int:
        """MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) // 1024


@contextmanager
def container(name: str) -> Iterator[Container]:
    """A container until the end of the block."""
    made = Container(name)
    try:
        yield made
    finally:
        made.kill()


@contextmanager
def emulating(port: int, cache: Path, *options: str, settings: Sequence[str] = ()) -> Iterator[Emulator]:
    """The front before the container at that port. At the end it drains, and must have nothing left to wait for."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EVERYWIRE_")}
    environment |= {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(_ROOT)}
    cache.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "gateway", "--port", "0", "--tls-port", "0"),
            *(part for setting in settings for part in ("--set", setting)),
            *("emulate", "sagemaker", "--container", f"ws://127.0.0.1:{port}", *options),
        ],
        cwd=cache, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        emulator = Emulator(process, cache / "everywire" / "tls")
        yield emulator
        process.send_signal(signal.SIGTERM)
        assert process.wait(_PATIENCE) == 0
        (drained,) = emulator.event("drained")
        assert drained["live"] == 0, "a call had not ended"
    finally:
        process.kill()
        process.wait()
