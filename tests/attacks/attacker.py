"""The attacker's process: runs one attack for its seconds, and says as JSON how its connections were ended.

`python -m tests.attacks.attacker NAME --port N --seconds N --seed N`, as the harness starts it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import select
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, final

from benchmarks.accounting import allow_descriptors
from tests.attacks.attack import attacks
from tests.attacks.ears import Ear

_READ = 1 << 18
_PATIENCE = 10.0
_TOLD = 2000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one connection, or one request, of the attack came to its end."""

    by: str
    """`goaway CODE`, `close CODE`, `rst CODE`, `status CODE`, `fin`, `reset`, or `open`: it was not ended, or `young`: it had
    hardly begun when the attack was over."""
    frames: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """From its first byte until it was ended."""
    said: str = ""
    """The text that came with the end: debug data, a reason, the beginning of a body."""
    heard: dict[str, int] = field(default_factory=dict)
    """Other answers before the end, counted: `status 200`, `rst 7`, `pong`."""


class Side(Protocol):
    """The bytes of one connection, made anew for each: those of its opening, then the same kind for ever."""

    opening: bytes

    def more(self) -> tuple[bytes, int]:
        """The bytes to send next, and their number of frames; no bytes: nothing for now."""
        ...


@final
class Line:
    """One connection of an attack: its socket, what it has sent, and what it hears."""

    def __init__(self, sock: socket.socket, side: Side, ear: Ear) -> None:
        self.sock, self.side, self.ear = sock, side, ear
        self.due = memoryview(side.opening)
        self.not_before = 0.0
        self.began = time.monotonic()
        self.frames = self.bytes = 0

    def send(self, every: float) -> None:
        """Sends what the kernel takes at once."""
        if not self.due:
            data, frames = self.side.more()
            self.due, self.frames = memoryview(data), self.frames + frames
            self.not_before = time.monotonic() + (every if data else max(every, 0.01))
        if self.due:
            sent = self.sock.send(self.due)
            self.due, self.bytes = self.due[sent:], self.bytes + sent

    def ended(self, by: str) -> Ended:
        """By the server's last word, where it has said one."""
        return Ended(
            by=self.ear.last or by, frames=self.frames, bytes=self.bytes, seconds=time.monotonic() - self.began,
            said=self.ear.said[:200], heard=dict(self.ear.counts),
        )  # fmt: skip


@final
class Attacker:
    """The tools of an attack: the server's ports, random numbers, time, and the ways to send."""

    def __init__(
        self,
        *,
        port: int,
        tls_port: int,
        seconds: float,
        seed: int,
        within: float,
        operator: int = -1,
        metrics: int = -1,
        folder: Path = Path(),
    ) -> None:
        self.within, self.folder = within, folder
        self.operator, self.metrics = operator, metrics
        """The ports of the operator plane and of the metrics; below zero where there is none."""
        self.port, self.tls_port, self.seconds, self.random = port, tls_port, seconds, random.Random(seed)
        self.until = time.monotonic() + seconds
        self.endings: list[Ended] = []
        self.did: Counter[str] = Counter()
        """Other counts for the row, such as the number of requests."""

    @property
    def goes_on(self) -> bool:
        """True while the attack's time is not over."""
        return time.monotonic() < self.until

    def sleep(self, seconds: float) -> None:
        """Waits, not beyond the attack's time."""
        time.sleep(max(0.0, min(seconds, self.until - time.monotonic())))

    def ended(self, by: str, *, frames: int = 0, bytes: int = 0, seconds: float = 0.0, said: str = "") -> None:
        """Notes how a connection or a request of the attack was ended."""
        self.endings.append(Ended(by=by, frames=frames, bytes=bytes, seconds=seconds, said=said[:200]))

    def connect(self, *, tls: bool = False) -> socket.socket:
        """A blocking socket to the server; with `tls` after a TLS handshake, which verifies no certificate."""
        sock = self._opened(self.tls_port if tls else self.port)
        if not tls:
            return sock
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context.wrap_socket(sock, server_hostname="localhost")

    def connect_raw(self) -> socket.socket:
        """A blocking socket to the port with TLS, before its handshake."""
        return self._opened(self.tls_port)

    def _opened(self, port: int) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def ask(
        self, method: str, path: str, body: bytes = b"", fields: Sequence[tuple[str, str]] = (), *, timeout: float = 60.0
    ) -> tuple[int, bytes]:
        """One HTTP/1.1 request on a connection of its own; notes its end as `status CODE`, or as what became of the
        connection. Status 0 where there was no answer."""
        began, line = time.monotonic(), http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        status, said, by = 0, b"", "reset"
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # it may be answered before all of it is read
                line.request(method, path, body, dict(fields))
            answer = line.getresponse()
            status, by = answer.status, f"status {answer.status}"
            said = answer.read()
        except TimeoutError:
            by = "open"
        except (OSError, http.client.HTTPException):
            pass
        finally:
            line.close()
        text = said[:200].decode("latin-1")
        self.ended(by, frames=1, bytes=len(body), seconds=time.monotonic() - began, said=text)
        return status, said

    def pour(
        self,
        side: Callable[[], Side],
        ear: Callable[[], Ear] | None = None,
        *,
        connections: int = 1,
        again: bool = True,
        every: float = 0.0,
        reads: bool = True,
        tls_port: bool = False,
        port: int = 0,
    ) -> None:
        """Sends as fast as the server takes it, or a piece each `every` seconds, until the attack's time is over; reads what
        comes, unless `reads` is false; connects again where it was cut off, unless `again` is false. All ends are noted.
        A side that must hear what it is answered is its own ear. `tls_port`: to that one, without a handshake. `port`: to another of the server's."""
        poll, lines = select.poll(), dict[int, Line]()
        wants = select.POLLIN if reads else 0

        def connect() -> None:
            made: Any = side()
            line = Line(
                self._opened(port or (self.tls_port if tls_port else self.port)), made, made if ear is None else ear()
            )
            line.sock.setblocking(False)
            lines[line.sock.fileno()] = line
            poll.register(line.sock, wants | select.POLLOUT)

        def over(line: Line, by: str) -> None:
            self.endings.append(line.ended(by))
            poll.unregister(line.sock)
            del lines[line.sock.fileno()]
            line.sock.close()

        missing = connections
        while self.goes_on and (lines or missing):
            try:
                while missing:
                    connect()
                    missing -= 1
            except OSError:
                self.did["not connected"] += 1
                self.sleep(0.05)
            now, soonest = time.monotonic(), self.until
            for line in lines.values():
                due = line.due or line.not_before <= now
                poll.modify(line.sock, wants | (select.POLLOUT if due else 0))
                soonest = min(soonest, now if due else line.not_before)
            wait = min(self.until - now, 0.2) if soonest <= now else min(soonest - now, 0.2)
            for number, events in poll.poll(max(1, wait * 1000)):
                line = lines[number]
                try:
                    if reads and events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                        data = line.sock.recv(_READ)
                        if not data:
                            over(line, "fin")
                            missing += again
                            continue
                        line.ear.take(data)
                    if events & select.POLLOUT:
                        line.send(every)
                    elif not reads and events & (select.POLLHUP | select.POLLERR):
                        raise ConnectionResetError
                except BlockingIOError:
                    continue
                except OSError:
                    self._last_words(line)
                    over(line, "reset")
                    missing += again
        for line in list(lines.values()):
            self._last_words(line)
            over(line, self.still_open(line.began))

    def still_open(self, began: float) -> str:
        """The word for a connection of that age that is still open: `open`, or `young` within the limit."""
        return "open" if time.monotonic() - began > self.within else "young"

    def _last_words(self, line: Line) -> None:
        """Reads the bytes that had come before a write failed."""
        with suppress(OSError):
            while data := line.sock.recv(_READ):
                line.ear.take(data)

    def told(self) -> str:
        """All as JSON: of many endings the first two thousand, and the counts of all."""
        return json.dumps(
            {
                "ends": Counter(ended.by for ended in self.endings),
                "endings": [asdict(ended) for ended in self.endings[:_TOLD]],
                "did": self.did,
            }
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tls-port", type=int, default=-1)
    parser.add_argument("--operator-port", type=int, default=-1)
    parser.add_argument("--metrics-port", type=int, default=-1)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chosen = attacks()[given.name]
    allow_descriptors(32768)
    attacker = Attacker(
        port=given.port, tls_port=given.tls_port, seconds=given.seconds, seed=given.seed, within=chosen.within,
        operator=given.operator_port, metrics=given.metrics_port, folder=given.folder,
    )  # fmt: skip
    print("begun", flush=True)
    chosen.run(attacker)
    print(attacker.told(), flush=True)


if __name__ == "__main__":
    main()
