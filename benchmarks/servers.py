"""Starting and ending the servers that are measured: ours, as an operator starts it, and the floors."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from benchmarks.accounting import pin

ROOT = Path(__file__).parent.parent
_START_SECONDS = 120.0
"""Long, for a machine with other work; a server that ends before it serves is not waited for."""
_STOP_SECONDS = 5.0
_LOG_LINES = 20


class ServerError(Exception):
    """A server did not come up; the text holds the end of its log."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A server that can be started: `python -m MODULE ...`. In `arguments`, {port} and {folder} are filled in."""

    name: str
    what: str
    arguments: tuple[str, ...]
    health: bytes = b""
    """A path that answers 200 when the server is ready; empty: a connection is all there is to wait for."""
    tls: bool = False
    linux_only: bool = False
    root: Path = ROOT
    """The checkout whose server it is."""
    path: Path | None = None
    """A folder of models that every checkout is to serve alike."""

    @property
    def missing(self) -> str:
        """Why it cannot run here; empty where it can."""
        return f"{self.name} needs Linux" if self.linux_only and not sys.platform.startswith("linux") else ""


_MODELS = {
    "echo": "models.library.echo:Echo",
    "identity": "models.library.tensors:identity",
    "tokens": "everywire_tokens:tokens",
}
_SETTINGS = (
    "bidi.default_model=echo",
    "limits.connections=20000",
    "limits.requests_per_connection=1000000000",
    "websocket.ping_interval=3600",
    *(f"models.{name}.capacity=20000" for name in _MODELS),
)


def _gateway(*settings: str, **models: str) -> tuple[str, ...]:
    """The arguments of a server with these models in place of ours of the same names."""
    chosen = (f"{name}={factory}" for name, factory in (_MODELS | models).items())
    return (
        "gateway", "--log-level", "warning", "--log-format", "text",
        *(argument for model in chosen for argument in ("--model", model)),
        *(argument for setting in (*_SETTINGS, *settings) for argument in ("--set", setting)),
    )  # fmt: skip


_PORT = ("--port", "{port}")
_HEALTH = b"/v2/health/ready"
_ALONE = Path(__file__).parent / "alone"

EVERYWIRE = Program(
    name="everywire",
    what="python -m gateway with the models identity, echo and tokens",
    arguments=(*_gateway(), *_PORT),
    health=_HEALTH,
    path=_ALONE,
)
EVERYWIRE_TLS = Program(
    name="everywire-tls",
    what="the same behind TLS, with a development certificate",
    arguments=(*_gateway(), "--port", "-1", "--tls-port", "{port}", "--tls-dev", "--set", "tls.dev_dir={folder}"),
    tls=True,
    path=_ALONE,
)
EVERYWIRE_PACED = Program(
    name="everywire-paced",
    what="the same with tokens 20 ms apart",
    arguments=(*_gateway(tokens="everywire_tokens:paced"), *_PORT),
    health=_HEALTH,
    path=_ALONE,
)
EVERYWIRE_PROCESS = Program(
    name="everywire-process",
    what="the same with identity in a process of its own",
    arguments=(*_gateway("models.identity.process.enabled=true"), *_PORT),
    health=_HEALTH,
    linux_only=True,
    path=_ALONE,
)
OURS = (EVERYWIRE, EVERYWIRE_TLS, EVERYWIRE_PACED, EVERYWIRE_PROCESS)


def floor(module: str, what: str, *, linux_only: bool = False) -> Program:
    """A floor, by its module's name."""
    arguments = (f"benchmarks.floors.{module}", "{port}")
    return Program(name=module.replace("_", "-"), what=what, arguments=arguments, linux_only=linux_only)


HTTP1 = floor("http1", "HTTP/1.1 by hand on Trio, a wait for each read")
HUB = floor("hub", "HTTP/1.1 by hand on Trio, one epoll set for all reads", linux_only=True)
WEBSOCKET = floor("websocket", "WebSocket by hand on Trio")
WSPROTO = floor("wsproto_echo", "WebSocket by wsproto on Trio")
HTTP2 = floor("http2", "HTTP/2 by hand on Trio: raw bytes back")
H2 = floor("h2_echo", "HTTP/2 by h2 on Trio: raw bytes back")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that has come up."""

    program: Program
    port: int
    pid: int
    ca: str
    """The CA's file; empty without TLS."""
    log: Path

    def last_words(self) -> str:
        """The end of its log, to be put behind a message; empty where it logged nothing."""
        lines = self.log.read_text("utf-8", "replace").splitlines()[-_LOG_LINES:]
        return "; its log:\n" + "\n".join(f"    {line[:300]}" for line in lines) if lines else ""


@contextmanager
def started(program: Program, *, core: int | None = None) -> Iterator[Running]:
    """Runs a server for the length of the block, on that core; ends it, and nothing else, by its process id. ServerError
    where it does not come up."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="everywire-bench-") as folder:
        given = [argument.format(port=port, folder=folder) for argument in program.arguments]
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *given],
                cwd=program.root,
                env=_environment(program),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        ca = str(Path(folder) / "ca.pem") if program.tls else ""
        running = Running(program=program, port=port, pid=process.pid, ca=ca, log=log)
        try:
            if core is not None:
                pin(process.pid, core)
            _wait_ready(running, process)
            yield running
        finally:
            _end(process)


def _environment(program: Program) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith("EVERYWIRE_")}
    return found if program.path is None else found | {"PYTHONPATH": str(program.path)}


def free_port() -> int:
    """A port of the loopback interface that nobody has at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_ready(server: Running, process: subprocess.Popen[bytes]) -> None:
    name, deadline = server.program.name, time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"{name} ended with status {process.returncode} before it served{server.last_words()}")
        if _answers(server.port, server.program.health):
            return
        time.sleep(0.02)
    raise ServerError(f"{name} did not serve on port {server.port} within {_START_SECONDS:g} s{server.last_words()}")


def _answers(port: int, path: bytes) -> bool:
    try:
        if not path:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
        try:
            connection.request("GET", path.decode())
            return connection.getresponse().status == 200
        finally:
            connection.close()
    except (OSError, http.client.HTTPException):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
