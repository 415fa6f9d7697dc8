"""A server as a user starts it, with its plane, and clients of it that read, do not read, or do not send."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.ports import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
MODELS = {"chat": "chat", "slow": "chat", "flaky": "flaky", "big": "big"}
PATIENCE = 30.0  # seconds for whatever a test waits for

FINDINGS = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations.map(
    found => `${found.id}: ${found.nodes.map(node => node.html.slice(0, 200) + " " + node.failureSummary.slice(0, 300)).join(" | ")}`)"""
"""Asks axe-core, which the page has, what is wrong with it."""


def until(holds: Callable[[], object], what: str, within: float = PATIENCE) -> None:
    """Waits for a condition outside this process."""
    end = time.monotonic() + within
    while not holds():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.02)


class Server:
    """`python -m gateway` on ports that stay the same when it is started again."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.port, self.operator_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.operator_port}/"
        self._log, self._settings = folder / f"server-{self.port}.log", settings
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def start(self) -> None:
        flags = [f"--model={name}=console_app:{function}" for name, function in MODELS.items()]
        given = [f"operator.port={self.operator_port}", "models.slow.capacity=2", *self._settings]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("EVERYWIRE_")}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(ROOT)])
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gateway", "--port", str(self.port), "--log-format", "json", *flags]
                + [word for setting in given for word in ("--set", setting)],
                env=environment,
                stderr=log,
            )
        until(lambda: '"serving"' in self.log or self._process.poll() is not None, "a server that serves")  # type: ignore[union-attr]
        assert self._process.poll() is None, self.log

    def stop(self, kind: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(kind)
            self._process.wait(PATIENCE)

    def ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def ask(self, method: str, path: str, **headers: str) -> tuple[int, Any]:
        """One request to the plane: its status and its JSON."""
        with socket.create_connection(("127.0.0.1", self.operator_port)) as sock:
            fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            sock.sendall(f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n{fields}\r\n".encode())
            head, _, body = _rest(sock).partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), json.loads(body)

    # -- clients of models -----------------------------------------------------------------------------------------

    def call(self, model: str, text: str, query: str = "") -> bytes:
        """One call and its whole answer."""
        with socket.create_connection(("127.0.0.1", self.port)) as sock:
            sock.sendall(_request(model, text, query))
            return _rest(sock)

    @contextmanager
    def clients(self) -> Iterator[Clients]:
        """Clients that are gone at the end of the block."""
        with ExitStack() as stack:
            yield Clients(self, stack)


class Clients:
    """Calls that go on."""

    def __init__(self, server: Server, stack: ExitStack) -> None:
        self._server, self._stack = server, stack

    def _connect(self, receive: int = 0) -> socket.socket:
        sock = socket.socket()
        if receive:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        self._stack.enter_context(sock)
        sock.connect(("127.0.0.1", self._server.port))
        return sock

    def reader(self, model: str, text: str) -> None:
        """Reads whatever comes."""
        sock = self._connect()
        sock.sendall(_request(model, text))
        self._read([sock])

    def readers(self, number: int, model: str, text: str) -> None:
        """So many that read whatever comes, all in one thread."""
        socks = [self._connect() for _ in range(number)]
        for sock in socks:
            sock.sendall(_request(model, text))
        self._read(socks)

    def _read(self, socks: list[socket.socket]) -> None:
        def read() -> None:
            with selectors.DefaultSelector() as selector:
                for sock in socks:
                    selector.register(sock, selectors.EVENT_READ)
                while selector.get_map() and not done.is_set():
                    for key, _ in selector.select(0.2):
                        if not key.fileobj.recv(65536):  # type: ignore[union-attr]
                            selector.unregister(key.fileobj)

        done = threading.Event()
        thread = threading.Thread(target=read)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(done.set)

    def deaf(self, model: str, text: str, *fields: str) -> None:
        """Reads nothing. `fields` are lines of its head."""
        self._connect(receive=4096).sendall(_request(model, text, fields=fields))

    def slow_sender(self, model: str) -> None:
        """Does not send the end of its request."""
        self._connect().sendall(_request(model, "1 0")[:-5])

    def event_reader(self) -> None:
        """Reads the plane's events, or would."""
        sock = self._stack.enter_context(socket.create_connection(("127.0.0.1", self._server.operator_port)))
        sock.sendall(b"GET /streams/events?interval=60 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert sock.recv(12) == b"HTTP/1.1 200"


def _request(model: str, text: str, query: str = "", *, fields: Sequence[str] = ()) -> bytes:
    body = json.dumps({"inputs": text, "stream": True, "parameters": {"max_new_tokens": 60_000}}).encode()
    lines = (f"POST /predictions/{model}{query} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(body)}")
    return "\r\n".join((*lines, *fields, "", "")).encode() + body


def _rest(sock: socket.socket) -> bytes:
    came = b""
    while piece := sock.recv(65536):
        came += piece
    return came
