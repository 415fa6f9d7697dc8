"""Loads with one culprit each, on a real server: how soon its verdict names the culprit, beside what clients saw."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, final

from benchmarks.servers import Program, free_port, started

PATIENCE = 25.0
"""Seconds that the verdict may take, with those for which it is to hold."""
WELL, HOLDS = 5.0, 3.0
"""Seconds: without the culprit before the load, and for which the verdict names it."""
HEADS = ("load", "verdict", "s", "/stats says", "clients saw")
_LOOK = 0.25  # seconds between two looks
_TIMEOUT = 10.0  # seconds that a client waits for an answer
_SETTINGS = ("models.naps.capacity=2", "models.naps.queue=2")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The verdict on one load."""

    load: str
    named: bool
    """True if the verdict names the culprit."""
    kind: str
    seconds: float
    """From the begin of the load to the first verdict that names the culprit."""
    sentence: str
    detail: str
    clients: str
    """Statuses and waits that the clients saw meanwhile."""


class Client(Protocol):
    """A client on a thread of its own."""

    def work(self, done: threading.Event) -> None: ...


@final
class Deaf:
    """A client that asks for a long answer and reads its first bytes alone."""

    def __init__(self, port: int) -> None:
        self._port, self.received = port, 0

    def work(self, done: threading.Event) -> None:
        """Keeps the connection until it is done."""
        body = json.dumps({"inputs": "x", "stream": True, "parameters": {"max_new_tokens": 60_000}})
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(_TIMEOUT)
            sock.connect(("127.0.0.1", self._port))
            head = f"POST /predictions/floods HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body.encode())
            self.received = len(sock.recv(1024))
            done.wait(2 * PATIENCE)


@final
class Caller:
    """A client that sends one request after the other."""

    def __init__(self, port: int, model: str, prompts: tuple[str, ...] = ("x",)) -> None:
        self._port, self._model, self._prompts = port, model, prompts
        self.statuses, self.slowest = Counter[int](), 0.0

    def work(self, done: threading.Event) -> None:
        """Calls until it is done."""
        number = 0
        while not done.is_set():
            body, began = json.dumps({"inputs": self._prompts[number % len(self._prompts)]}), time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT)
            try:
                connection.request("POST", f"/predictions/{self._model}", body, {"content-type": "application/json"})
                answer = connection.getresponse()
                answer.read()
            finally:
                connection.close()
            self.statuses[answer.status] += 1
            self.slowest = max(self.slowest, time.monotonic() - began)
            number += 1
            done.wait(0.05)


def _deaf(port: int) -> list[Client]:
    return [Deaf(port) for _ in range(8)]


def _queued(port: int) -> list[Client]:
    return [Caller(port, "naps") for _ in range(12)]


def _failed(port: int) -> list[Client]:
    return [Caller(port, "fails", ("x", "x", "fail")) for _ in range(4)]


def _blocked(port: int) -> list[Client]:
    return [Caller(port, "blocks"), *(Caller(port, "fails") for _ in range(4))]


LOADS = {
    "slow-readers": (_deaf, "readers", "127.0.0.1"),
    "full-queue": (_queued, "refusing", "naps"),
    "failing-model": (_failed, "failing", "fails"),
    "blocked-loop": (_blocked, "blocked", "event loop"),
}
"""The clients of each load, the kind of its verdict, and the word of the sentence that names the culprit."""


def measure(load: str, *, well: float = WELL, holds: float = HOLDS) -> Told:
    """Serves calls that all go well, for that many seconds; adds the load, and asks `/stats` until its verdict has named the
    culprit for that many seconds, or until `PATIENCE` is over."""
    make, kind, word = LOADS[load]
    plane = free_port()
    models = [f"--model={name}=benchmarks.served:{name}" for name in ("tokens", "floods", "naps", "fails", "blocks")]
    settings = [f"--set={setting}" for setting in (f"operator.port={plane}", *_SETTINGS)]
    arguments = ("gateway", "--port", "{port}", "--log-level", "error", *models, *settings)
    program = Program(name="everywire", what="models that are to blame", arguments=arguments, health=b"/v2/health/ready")
    with started(program) as server:
        others, clients = [Caller(server.port, "tokens") for _ in range(4)], make(server.port)
        with _at_work(others):
            time.sleep(well)
            with _at_work(clients):
                seconds, told = _until_named(plane, kind, word, holds)
        saw = f"{_seen(clients)}; calls of other models took up to {max(one.slowest for one in others):.2f} s"
    return Told(
        load=load, named=seconds is not None, kind=told["kind"], seconds=PATIENCE if seconds is None else seconds,
        sentence=told["sentence"], detail=told["detail"], clients=saw,
    )  # fmt: skip


def _until_named(plane: int, kind: str, word: str, holds: float) -> tuple[float | None, dict[str, Any]]:
    """The seconds after which the verdict named the culprit, None if it did not go on to; and the last verdict."""
    began, since = time.monotonic(), None
    while True:
        told, now = _verdict(plane), time.monotonic()
        if told["kind"] != kind or word not in told["sentence"]:
            since = None
        elif since is None:
            since = now
        if since is not None and now - since >= holds:
            return since - began, told
        if now - began > PATIENCE:
            return None, told
        time.sleep(_LOOK)


def cells(row: Told) -> tuple[str, ...]:
    """The columns of `HEADS`."""
    return row.load, row.kind, f"{row.seconds:.1f}", f"{row.sentence}. {row.detail}".strip(), row.clients


def _verdict(plane: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", plane, timeout=_TIMEOUT)
    try:
        connection.request("GET", "/stats")
        told: dict[str, Any] = json.loads(connection.getresponse().read())["verdict"]
    finally:
        connection.close()
    return told


@contextmanager
def _at_work(clients: list[Client]) -> Iterator[None]:
    done = threading.Event()
    threads = [threading.Thread(target=client.work, args=(done,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def _seen(clients: list[Client]) -> str:
    deaf = [client for client in clients if isinstance(client, Deaf)]
    callers = [client for client in clients if isinstance(client, Caller)]
    said = [f"{len(deaf)} clients that read {sum(client.received for client in deaf)} bytes and no more"] if deaf else []
    if callers:
        statuses = sum((client.statuses for client in callers), Counter[int]())
        said.append(", ".join(f"{n} x {status}" for status, n in sorted(statuses.items())))
        said.append(f"the slowest answer after {max(client.slowest for client in callers):.2f} s")
    return "; ".join(said)
