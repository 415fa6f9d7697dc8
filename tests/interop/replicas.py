"""Two gateways of one model behind one proxy, each a process that is stopped and started as in a rollout."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Protocol

from tests.interop.servers import LIBRARY, ROOT
from tests.ports import free_port

PATIENCE = 60.0
TOKENS = 25
MODELS = """
import os
from collections.abc import AsyncIterator, Iterator

import trio

from models.messages import Prompt


async def words(prompt: Prompt) -> AsyncIterator[str]:
    for n in range(25):
        await trio.sleep(0.01)
        yield f"{n} "


def held(prompt: Prompt) -> Iterator[str]:
    # its own gateway's name, and then each line that it is told by the pipe of that name
    yield os.environ["NAME"] + " "
    with open(prompt.text) as pipe:
        for line in pipe:
            if line == "end\\n":
                return
            yield line


async def flood(prompt: Prompt) -> AsyncIterator[str]:
    # 128 MiB; the file of that name has a byte for each token that was made, and an E in the end
    with open(prompt.text, "ab", buffering=0) as made:
        try:
            for _ in range(2048):
                yield "x" * 65536
                made.write(b".")
        finally:
            made.write(b"E")
"""
FLOOD = 2048
TENSOR = {"datatype": "INT64", "shape": [2]}
SUM = {"inputs": [{"name": "INPUT0", "data": [5, 7], **TENSOR}, {"name": "INPUT1", "data": [1, 2], **TENSOR}]}


def until(true: Callable[[], Any], what: str) -> Any:
    """Its first value that is true. AssertionError, with `what`, where there is none in time."""
    for _ in range(int(PATIENCE / 0.02)):
        if value := true():
            return value
        threading.Event().wait(0.02)
    raise AssertionError(f"not in {PATIENCE:.0f} s: {what}")


class Replica:
    """A gateway that is started and stopped, always on the same port."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.port, self.folder = name, free_port(), folder
        self.log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def at(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        models = {
            **LIBRARY,
            "words": "served_replicas:words",
            "held": "served_replicas:held",
            "flood": "served_replicas:flood",
        }
        named = [word for name, factory in models.items() if name != "lm" for word in ("--model", f"{name}={factory}")]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("EVERYWIRE_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gateway", "--port", str(self.port), *named,
                 # Envoy writes a client of its own machine with another address of that machine
                 "--set", 'listen.trusted_proxies=["0.0.0.0/0"]',
                 # the names by which clients call the proxy, which passes them on: for gRPC too
                 "--set", 'access.hosts=["127.0.0.1", "localhost", "x"]'],
                cwd=self.folder, stderr=log, env={**environment, "PYTHONPATH": str(ROOT), "NAME": self.name},
            )  # fmt: skip
        until(self.ready, f"{self.name} is ready")

    def ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        try:
            return ask(self.port, "GET", "/v2/health/ready")[0] == 200
        except OSError:
            return False

    def drain(self) -> None:
        """SIGTERM; the drain has begun when this returns."""
        assert self._process is not None
        before = len(self.events("draining"))
        self._process.send_signal(signal.SIGTERM)
        until(lambda: len(self.events("draining")) > before, f"{self.name} drains")

    def ended(self) -> tuple[int, dict[str, Any]]:
        """The exit status, and the report of the drain."""
        assert self._process is not None
        return self._process.wait(PATIENCE), self.events("drain report")[-1]

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = self.log.read_text().split("\n")[:-1]
        return [entry for line in lines if line.startswith("{") and (entry := json.loads(line))["event"] == name]

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def ask(port: int, method: str, path: str, body: Any = None, **fields: str) -> tuple[int, bytes]:
    """Status and body, on a connection of its own."""
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), fields)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def of_a_page(port: int, name: str, origin: str) -> tuple[int, int]:
    """The statuses of a POST and of a WebSocket's handshake that a page of this origin sends to `name`."""
    socket = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    path = "/models/echo/invocations-bidirectional-stream"
    posted, _ = ask(port, "POST", "/endpoints/echo/invocations", {}, Host=f"{name}:{port}", Origin=origin)
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        fields = {"Host": f"{name}:{port}", "Origin": origin, "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", **socket}
        connection.request("GET", path, None, fields)
        return posted, connection.getresponse().status
    finally:
        connection.close()


class Held:
    """A stream of `held`, that says what it is told."""

    def __init__(self, port: int, pipe: Path) -> None:
        os.mkfifo(pipe)
        self._told = os.fdopen(os.open(pipe, os.O_RDWR), "wb", buffering=0)
        self._connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        self._connection.request("POST", "/predictions/held", json.dumps({"inputs": str(pipe), "stream": True}))
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        self.name = self.next().strip()

    def next(self) -> str:
        line: dict[str, Any] = json.loads(self._answer.readline())
        return str(line["token"]["text"])

    def say(self, word: str) -> str:
        """The token that this word comes back as. It waits for ever behind a proxy that gathers tokens."""
        self._told.write(f"{word}\n".encode())
        return self.next().strip()

    def end(self) -> str:
        """The whole text, after its last token."""
        self._told.write(b"end\n")
        return str(json.loads(self._answer.read().splitlines()[-1])["generated_text"])

    def close(self) -> None:
        self._connection.close()
        self._told.close()


class Load:
    """Clients that call again and again, each by a connection of its own, and what went wrong for them."""

    def __init__(self, port: int) -> None:
        self._port, self._stop = port, threading.Event()
        self.lost: list[str] = []
        calls = [self._sum, self._sum, self._words, self._words, self._words]
        self.done = [0] * len(calls)
        self._threads = [threading.Thread(target=self._go_on, args=(n, call)) for n, call in enumerate(calls)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def pass_by(self) -> None:
        """Waits until every call that is under way now is over, and the one after it too."""
        before = list(self.done)
        until(lambda: all(now >= was + 2 for was, now in zip(before, self.done, strict=True)), "every client goes on")

    def _go_on(self, n: int, call: Callable[[], str]) -> None:
        while not self._stop.is_set():
            try:
                wrong = call()
            except Exception as e:
                wrong = repr(e)
            if wrong:
                self.lost.append(wrong)
            self.done[n] += 1

    def _sum(self) -> str:
        status, body = ask(self._port, "POST", "/v2/models/add_sub/infer", SUM)
        right = status == 200 and [output["data"] for output in json.loads(body)["outputs"]] == [[6, 9], [4, 5]]
        return "" if right else f"{status} {body!r}"

    def _words(self) -> str:
        status, body = ask(self._port, "POST", "/predictions/words", {"inputs": "x", "stream": True})
        lines = [json.loads(line) for line in body.splitlines()]
        whole = "".join(f"{n} " for n in range(TOKENS))
        right = status == 200 and len(lines) == TOKENS + 1 and lines[-1].get("generated_text") == whole
        return "" if right else f"{status} {body[-300:]!r}"


class Front(Protocol):
    """A proxy: its ports, and how gateways are taken from it and given back."""

    port: int
    grpc_port: int

    def list(self, replicas: list[Replica]) -> None:
        """New calls go to these alone; what has begun elsewhere goes on."""


def deployed(name: str, *changes: tuple[str, str]) -> str:
    """A file of `deploy/proxies`, with another text in the place of some of its own."""
    text = (ROOT / "deploy" / "proxies" / name).read_text(encoding="utf-8")
    for was, now in changes:
        assert was in text
        text = text.replace(was, now)
    return text


class Nginx:
    """nginx by `nginx-replicas.conf`."""

    def __init__(self, program: str, folder: Path, replicas: list[Replica], *changes: tuple[str, str]) -> None:
        self.port, self.grpc_port, self._folder, self.log = free_port(), free_port(), folder, folder / "nginx.log"
        server = deployed(
            "nginx-replicas.conf",
            ("/etc/nginx/everywire", str(folder)),
            ("listen 80;", f"listen 127.0.0.1:{self.port};"),
            ("listen 81 ", f"listen 127.0.0.1:{self.grpc_port} "),
            *changes,
        )
        temporary = " ".join(
            f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (folder / "nginx.conf").write_text(
            f"{'user root;' if os.geteuid() == 0 else ''} daemon off; pid {folder}/pid; error_log {self.log} warn; events {{}}\n"
            f"http {{ access_log off; {temporary}\n{server} }}"
        )
        self._write(replicas)
        self._process = subprocess.Popen([program, "-p", str(folder), "-c", f"{folder}/nginx.conf", "-e", str(self.log)])
        until(self._workers, "nginx has a worker")
        until(lambda: _answers(self.port), "nginx answers")

    def list(self, replicas: list[Replica]) -> None:
        before = self._workers()
        self._write(replicas)
        self._process.send_signal(signal.SIGHUP)  # nginx -s reload
        until(lambda: self._workers() and not self._workers() & before, "nginx has new workers alone")

    def _write(self, replicas: list[Replica]) -> None:
        (self._folder / "gateways").write_text("".join(f"server {replica.at};\n" for replica in replicas))

    def _workers(self) -> set[str]:
        """The workers that take new connections: the name of one that shuts down shows it."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return {pid for pid in children if _command_of(pid).startswith("nginx: worker process\0")}

    def close(self) -> None:
        _end(self._process, signal.SIGTERM)


class Envoy:
    """Envoy by `envoy.yaml` and `envoy-gateways.yaml`: one port for every wire."""

    def __init__(self, program: str, folder: Path, replicas: list[Replica], *changes: tuple[str, str]) -> None:
        self.port = self.grpc_port = free_port()
        self._admin, self._listed = free_port(), folder / "gateways"
        self._listed.mkdir()
        config = deployed(
            "envoy.yaml",
            ("/etc/envoy/gateways", str(self._listed)),
            ("{address: 0.0.0.0, port_value: 80}", f"{{address: 127.0.0.1, port_value: {self.port}}}"),
            *changes,
        )
        admin = f"admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {self._admin}}}}}}}\n"
        (folder / "envoy.yaml").write_text(admin + config)
        self._write(replicas)
        command = [program, "-c", f"{folder}/envoy.yaml", "--concurrency", "1", "--disable-hot-restart", "-l", "error"]
        self._process = subprocess.Popen(command)
        until(lambda: _answers(self.port) and self._has(replicas), "Envoy answers")

    def list(self, replicas: list[Replica]) -> None:
        self._write(replicas)
        until(lambda: self._has(replicas), "Envoy has read which gateways there are")

    def _write(self, replicas: list[Replica]) -> None:
        head, endpoint, _ = deployed("envoy-gateways.yaml").partition("          - endpoint:")
        address = "\n              address:\n                socket_address: {address: 127.0.0.1, port_value: %d}\n"
        new = self._listed / "new"
        new.write_text(head + "".join(endpoint + address % replica.port for replica in replicas))
        new.rename(self._listed / "envoy-gateways.yaml")

    def _has(self, replicas: list[Replica]) -> bool:
        """True if these are the gateways that Envoy knows, and their health checks succeed."""
        _, said = ask(self._admin, "GET", "/clusters")
        flags = dict(re.findall(r"^gateways::([\d.]+:\d+)::health_flags::(\S+)$", said.decode(), re.MULTILINE))
        return flags == {replica.at: "healthy" for replica in replicas}

    def close(self) -> None:
        _end(self._process, signal.SIGTERM)


def _answers(port: int) -> bool:
    try:
        return ask(port, "GET", "/v2/health/ready")[0] == 200
    except OSError:
        return False


def _command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    process.send_signal(number)
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def replicas_in(folder: Path) -> Iterator[list[Replica]]:
    """Two gateways that are ready."""
    (folder / "served_replicas.py").write_text(MODELS)
    made = [Replica(name, folder) for name in ("one", "other")]
    with ExitStack() as stack:
        for replica in made:
            stack.callback(replica.kill)
            replica.start()
        yield made
