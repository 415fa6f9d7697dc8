"""Good clients, which send one request after the other and wait for each answer: their waits beside another client's load.

`python -m benchmarks.good PORT` runs all of them in one process. It sends a few requests that do not count, prints `ready`,
reads a number of seconds from its input, sends requests for that time, and prints the waits as JSON. With `--pid` they
also tell how long the loop of that server worked while a request waited, whatever else the machine does meanwhile.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Protocol, final

import h2.config
import h2.connection
import h2.events

from benchmarks import requests
from benchmarks.accounting import loop_seconds

LIMIT = 0.25
"""Seconds that the 99th percentile of a good client's waits may be, at most."""
PATIENCE = 60.0
PAUSE = 0.005  # seconds between an answer and the next question
_WARM_UP = 5
_TOLD = 5  # failures that are reported in words, at most
_TOKENS = 16
_JSON = [("content-type", "application/json")]

FAILURES = (OSError, http.client.HTTPException)
"""The exceptions of `ask` if there is no answer, or one with another status than 200."""
Fields = Sequence[tuple[str, str]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """The times of the answers on one kind of connection beside one load, in seconds."""

    load: str
    connection: str
    asked: int
    median: float
    p99: float
    worst: float
    failed: int = 0
    failures: tuple[str, ...] = ()
    """The first failures, in words."""
    loop_p99: float = 0.0
    """Seconds of CPU time of the server's loop while a request waited: the 99th percentile; 0 where nobody asked for it."""
    loop_worst: float = 0.0


class Client(Protocol):
    """A client whose `ask` raises one of FAILURES if the answer is not as expected."""

    def ask(self) -> None: ...

    def close(self) -> None: ...


class _HTTP1:
    def __init__(self, port: int, fields: Fields, path: bytes, body: bytes, *, kept: bool) -> None:
        self._line = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        self._asked, self._kept = (path.decode(), body, dict([*_JSON, *fields])), kept

    def ask(self) -> None:
        path, body, fields = self._asked
        self._line.request("POST", path, body, fields)
        answer = self._line.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise http.client.HTTPException(f"status {answer.status}: {said[:200]!r}")
        if not self._kept:
            self._line.close()  # the next request opens it again

    def close(self) -> None:
        self._line.close()


class _HTTP2:
    """Sends one stream after the other on one connection, and opens it again if the server has sent GOAWAY."""

    def __init__(self, port: int, fields: Fields, path: bytes, body: bytes) -> None:
        pseudo = [(":method", "POST"), (":scheme", "http"), (":authority", "127.0.0.1"), (":path", path.decode())]
        self._head, self._body = [*pseudo, *_JSON, ("content-length", str(len(body))), *fields], body
        self._port = port
        self._open()

    def _open(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._machine = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self._machine.initiate_connection()
        self._leaving = False

    def ask(self) -> None:
        if self._leaving:
            self._socket.close()
            self._open()
        stream = self._machine.get_next_available_stream_id()
        self._machine.send_headers(stream, self._head)
        self._machine.send_data(stream, self._body, end_stream=True)
        self._socket.sendall(self._machine.data_to_send())
        while not self._answered(stream):
            pass

    def _answered(self, stream: int) -> bool:
        done, data = False, self._socket.recv(65536)
        if not data:
            raise ConnectionResetError("the server closed an HTTP/2 connection that waits for an answer")
        for event in self._machine.receive_data(data):
            match event:
                case h2.events.ResponseReceived(headers=fields) if fields is not None:
                    if (b":status", b"200") not in fields:
                        raise http.client.HTTPException(f"not status 200: {list(fields)[:4]}")
                case h2.events.DataReceived(flow_controlled_length=int(size)) if size:
                    self._machine.acknowledge_received_data(size, stream)
                case h2.events.StreamEnded():
                    done = True
                case h2.events.StreamReset(error_code=code):
                    raise http.client.HTTPException(f"stream reset with code {code}")
                case h2.events.ConnectionTerminated(error_code=code):
                    if code:
                        raise http.client.HTTPException(f"goodbye with code {code}")
                    self._leaving = True
        self._socket.sendall(self._machine.data_to_send())
        return done

    def close(self) -> None:
        self._socket.close()


_INFER = requests.infer_json(16).partition(b"\r\n\r\n")[2]
_GENERATE = requests.generate(_TOKENS).partition(b"\r\n\r\n")[2]

CLIENTS: dict[str, Callable[[int, Fields], Client]] = {
    "kept": lambda port, fields: _HTTP1(port, fields, requests.INFER, _INFER, kept=True),
    "fresh": lambda port, fields: _HTTP1(port, fields, requests.INFER, _INFER, kept=False),
    "http2": lambda port, fields: _HTTP2(port, fields, requests.INFER, _INFER),
    "tokens": lambda port, fields: _HTTP1(port, fields, requests.INVOCATIONS, _GENERATE, kept=True),
}
"""The clients by name: HTTP/1.1 on a kept connection and on fresh ones, HTTP/2, and a text model's stream. They need the
models `identity` and `tokens` of the benchmarks' server."""


def asked(client: Client, until: float, pid: int = 0, worked: list[float] | None = None) -> Iterator[float]:
    """Yields the wall time of each request in seconds, which includes opening a fresh connection. The seconds that the loop
    of the server `pid` worked meanwhile are added to `worked`."""
    while (began := time.monotonic()) < until:
        before = loop_seconds(pid) if worked is not None else {}
        client.ask()
        taken = time.monotonic() - began
        if worked is not None:
            after = loop_seconds(pid)
            worked.append(max((after[loop] - before[loop] for loop in before if loop in after), default=0.0))
        yield taken
        time.sleep(PAUSE)


def summed(load: str, kind: str, waits: list[float], failures: Sequence[str] = (), worked: Sequence[float] = ()) -> Waits:
    """The median, 99th percentile and worst of the waits, and of the loop's work; 0 if nothing was answered."""
    ordered, loop = sorted(waits) or [0.0], sorted(worked) or [0.0]
    return Waits(
        load=load, connection=kind, asked=len(waits), median=_at(ordered, 50), p99=_at(ordered, 99), worst=ordered[-1],
        failed=len(failures), failures=tuple(failures[:_TOLD]), loop_p99=_at(loop, 99), loop_worst=loop[-1],
    )  # fmt: skip


def _at(ordered: list[float], percent: int) -> float:
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]


def _persevering(kind: str, port: int, fields: Fields, seconds: float, pid: int) -> Waits:
    waits, failures, until = list[float](), list[str](), time.monotonic() + seconds
    worked = list[float]()
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            client = CLIENTS[kind](port, fields)
            try:
                waits.extend(asked(client, until, pid, worked if pid else None))
            finally:
                client.close()
        except FAILURES as error:
            failures.append(f"{error!r} after {time.monotonic() - began:.2f} s of this client")
            time.sleep(PAUSE)
    return summed("", kind, waits, failures, worked)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--field", action="append", nargs=2, default=[], help="name and value of a field for each request")
    parser.add_argument("--kinds", default=",".join(CLIENTS))
    parser.add_argument("--pid", type=int, default=0, help="the server, of which the loop's CPU time is told")
    given = parser.parse_args()
    fields, kinds = [(name, value) for name, value in given.field], [kind for kind in given.kinds.split(",") if kind]
    for kind in kinds:
        client = CLIENTS[kind](given.port, fields)
        for _ in range(_WARM_UP):
            client.ask()
        client.close()
    print("ready", flush=True)
    seconds = float(input())
    found: dict[str, Waits] = {}

    def ask(kind: str) -> None:
        found[kind] = _persevering(kind, given.port, fields, seconds, given.pid)

    threads = [threading.Thread(target=ask, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps([asdict(found[kind]) for kind in kinds]), flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
