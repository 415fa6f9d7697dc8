"""Measures how long a good client waits beside one that keeps the server as busy as it can: wall time of its requests.

The load is a process of its own, as the server is, so that only the server can make the good client wait. The good client
asks one question after the other, on a connection that it keeps and on one that it opens for the question.
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Protocol, final

from hpack import Encoder

from benchmarks import good, requests
from benchmarks.good import LIMIT, Waits
from benchmarks.load.connections import LoadError, frame
from benchmarks.servers import EVERYWIRE, ROOT, Program, started

__all__ = ["LIMIT", "LOADS", "Load", "Waits", "measure", "press"]

_READ = 262_144
_CANCEL = (8).to_bytes(4, "big")
_HEAD = [(":method", "POST"), (":scheme", "http"), (":authority", "127.0.0.1"), (":path", requests.INFER.decode())]


# ---- the load


class Load(Protocol):
    """The bytes of one connection: those of its opening, then the same kind for ever."""

    opening: bytes

    def more(self) -> bytes: ...


@final
class Resets:
    """HTTP/2 streams that are opened and reset, `at_once` so many before their resets."""

    opening = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")

    def __init__(self, at_once: int) -> None:
        self._head, self._stream, self._at_once = Encoder().encode(_HEAD), 1, at_once

    def more(self) -> bytes:
        out: list[bytes] = []
        for _ in range(512 // self._at_once):
            first, self._stream = self._stream, self._stream + 2 * self._at_once
            streams = range(first, self._stream, 2)
            out += [frame(1, 4, stream, self._head) for stream in streams]
            out += [frame(3, 0, stream, _CANCEL) for stream in streams]
        return b"".join(out)


@final
class Repeated:
    """One message again and again."""

    def __init__(self, opening: bytes, message: bytes) -> None:
        self.opening, self._many = opening, message * (65536 // len(message) + 1)

    def more(self) -> bytes:
        return self._many


LOADS: dict[str, Callable[[], Load]] = {
    "resets": lambda: Resets(1),
    "late-resets": lambda: Resets(64),
    "pipelined": lambda: Repeated(b"", requests.infer_binary(16)),
    "messages": lambda: Repeated(requests.upgrade(), requests.frame(requests.PIECE[:126])),
    "pings": lambda: Repeated(Resets.opening, frame(6, 0, 0, bytes(8))),
}
"""Each by its name: what a connection of it sends."""


def press(load: str, port: int, connections: int) -> None:
    """Sends as fast as the server takes it, reads what comes, and connects again where it is cut off, for ever."""
    poll = select.poll()
    lines: dict[int, tuple[socket.socket, Load, list[memoryview]]] = {}

    def connect() -> None:
        sock, side = socket.create_connection(("127.0.0.1", port), timeout=good.PATIENCE), LOADS[load]()
        sock.setblocking(False)
        lines[sock.fileno()] = sock, side, [memoryview(side.opening)]
        poll.register(sock, select.POLLIN | select.POLLOUT)

    for _ in range(connections):
        connect()
    while True:
        for number, events in poll.poll():
            sock, side, due = lines[number]
            try:
                if events & select.POLLIN and not sock.recv(_READ):
                    raise ConnectionResetError
                if events & select.POLLOUT:
                    if not due[0]:
                        due[0] = memoryview(side.more())
                    due[0] = due[0][sock.send(due[0]) :]
            except BlockingIOError:
                continue
            except OSError:
                poll.unregister(sock)
                del lines[number]
                sock.close()
                connect()


# ---- the good client


def measure(load: str, seconds: float, connections: int = 1, program: Program = EVERYWIRE) -> list[Waits]:
    """Measures the waits of a kept connection beside that load, and of fresh ones. LoadError if a question has no answer."""
    with started(program) as server, _pressed(load, server.port, connections):
        time.sleep(0.5)  # the load has begun
        waits: dict[str, list[float]] = {"kept": [], "fresh": []}
        until, failures = time.monotonic() + seconds, list[str]()

        def ask(kind: str) -> None:
            try:
                with closing(good.CLIENTS[kind](server.port, ())) as client:
                    waits[kind].extend(good.asked(client, until))
            except good.FAILURES as error:
                failures.append(f"a {kind} connection beside {load}: {error!r}")

        threads = [threading.Thread(target=ask, args=(kind,)) for kind in waits]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise LoadError("; ".join(failures))
    return [good.summed(load, kind, found) for kind, found in waits.items()]


@contextmanager
def _pressed(load: str, port: int, connections: int) -> Iterator[None]:
    if not connections:
        yield
        return
    arguments = [sys.executable, "-m", "benchmarks.neighbours", load, str(port), str(connections)]
    process = subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.DEVNULL)
    try:
        yield
        if process.poll() is not None:
            raise LoadError(f"the load {load} has ended with status {process.returncode}")
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        press(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
