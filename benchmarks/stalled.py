"""Measures the memory of a server beside clients that ask for a long answer, read its head, and then read nothing."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias, final

import h2.config
import h2.connection
import h2.events
from h2.settings import SettingCodes, Settings

from benchmarks import requests
from benchmarks.accounting import allow_descriptors, anonymous_bytes, children
from benchmarks.load.connections import LoadError
from benchmarks.servers import Program, Running, free_port, started
from gateway.version import version as gateway_version

READERS = (0, 25, 50, 100, 200, 400, 800, 1000, 1600)
"""Clients that have asked, at each measurement."""
CAPACITY = 1000
"""Slots of the gateway's model, whose queue has no place: the gateway refuses the clients after these."""
TOKENS = 4096
"""Tokens of an answer, of 2,000 characters each: more than 8 MiB of server-sent events."""
STREAMS = 50
"""Streams of one connection of HTTP/2."""
PATIENCE = 120.0
"""Seconds for an answer's head, and for a server to come to rest."""
HEADS = ("server", "wire", "clients", "parked", "refused", "MiB", "KiB a reader", "in the kernel")
_PATH = b"/v1/completions"
_RECEIVE_BUFFER = 4096  # bytes; Linux doubles it
_DESCRIPTORS = 8192
_LOOK, _LOOKS, _STEADY = 0.25, 8, 512 * 1024  # seconds between two looks; so many looks differ by so many bytes at most

Opener: TypeAlias = "Callable[[int, int, ExitStack], Counter[int]]"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A server at rest beside its clients."""

    readers: int
    """Clients that have asked."""
    refused: int
    """Clients whose answer had another status than 200; they have left."""
    memory: int
    """Memory of the server with the processes that it has started, without pages of files, in bytes."""
    kernel: int
    """Bytes in the send queues of its connections: the kernel has taken them, and the clients' kernels have not."""
    parked: int | None = None
    """Streams whose model waits for the client to read, by `/stats`; None for a server without it."""
    queued: int | None = None
    """Bytes that wait to be written, by `/stats`."""
    budget: int | None = None
    """Bytes of `limits.total_bytes` that are in use, by `/stats`."""
    refusals: dict[str, int] | None = None
    """Refusals so far by reason, by `/stats`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One server beside more and more clients."""

    server: str
    version: str
    wire: str
    points: tuple[Point, ...]

    @property
    def each(self) -> tuple[float, float] | None:
        """Bytes of memory and bytes in the kernel for each client that reads nothing, from the first point to the last one;
        None without such a client."""
        return _each(self.points[0], self.points[-1])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One server, and the wire of its clients."""

    server: str
    wire: str
    what: str
    needs: str = ""
    """The module that has to be installed."""
    most: int = 10_000
    """Clients beyond which it is not measured: it would need gigabytes."""

    @property
    def missing(self) -> str:
        """The reason why it cannot be measured here; empty if it can."""
        return f"{self.needs} is not installed" if self.needs and find_spec(self.needs) is None else ""


def _each(first: Point, last: Point) -> tuple[float, float] | None:
    number = last.readers - last.refused - first.readers
    return ((last.memory - first.memory) / number, (last.kernel - first.kernel) / number) if number else None


CASES = {
    "http1": Case(server="everywire", wire="HTTP/1.1", what="a connection for each client"),
    "http2": Case(server="everywire", wire="HTTP/2", what=f"{STREAMS} streams on each connection, which give no window"),
    "uvicorn": Case(
        server="uvicorn", wire="HTTP/1.1", what="a streaming response of Starlette, up to 200 clients", needs="uvicorn",
        most=200,
    ),
    "litserve": Case(
        server="LitServe", wire="HTTP/1.1", what="its default loop, up to 50 clients", needs="litserve", most=50
    ),
}  # fmt: skip


# ---- clients


def _question() -> bytes:
    return json.dumps({"model": "floods", "prompt": "x", "stream": True, "max_tokens": TOKENS}).encode()


def _http1(port: int, count: int, sockets: ExitStack) -> Counter[int]:
    """Opens that many connections, and returns the number of clients by status."""
    request, statuses = requests.post(_PATH, b"application/json", _question()), Counter[int]()
    for _ in range(count):
        sock = _connected(port, sockets)
        sock.sendall(request)
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = sock.recv(1)
            if not byte:
                raise LoadError(f"a connection was closed after {head[:200]!r}")
            head += byte
        status = int(head.split(b" ", 2)[1])
        statuses[status] += 1
        if status != 200:
            sock.close()
    return statuses


def _http2(port: int, count: int, sockets: ExitStack) -> Counter[int]:
    """Opens that many streams, `STREAMS` on each connection, and returns their number by status."""
    statuses = Counter[int]()
    for first in range(0, count, STREAMS):
        statuses += _streams(_connected(port, sockets), min(STREAMS, count - first))
    return statuses


def _streams(sock: socket.socket, count: int) -> Counter[int]:
    machine = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    machine.local_settings = Settings(client=True, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: 0})
    machine.initiate_connection()
    body = _question()
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "127.0.0.1"),
        (":path", _PATH.decode()),
    ]
    fields += [("content-type", "application/json"), ("content-length", str(len(body)))]
    for _ in range(count):
        stream = machine.get_next_available_stream_id()
        machine.send_headers(stream, fields)
        machine.send_data(stream, body, end_stream=True)
    sock.sendall(machine.data_to_send())
    statuses = Counter[int]()
    while statuses.total() < count:
        data = sock.recv(4096)
        if not data:
            raise LoadError("a connection of HTTP/2 was closed")
        for event in machine.receive_data(data):
            match event:
                case h2.events.ResponseReceived(headers=head, stream_id=int(stream)) if head is not None:
                    status = int(dict(head)[b":status"])
                    statuses[status] += 1
                    if status != 200:
                        machine.reset_stream(stream)
                case h2.events.StreamReset(error_code=code) | h2.events.ConnectionTerminated(error_code=code):
                    raise LoadError(f"a stream ended with code {code}")
        sock.sendall(machine.data_to_send())
    return statuses


def _connected(port: int, sockets: ExitStack) -> socket.socket:
    sock = sockets.enter_context(socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
    sock.settimeout(PATIENCE)
    sock.connect(("127.0.0.1", port))
    return sock


# ---- servers


def _program(case: Case, plane: int, capacity: int) -> Program:
    if case.needs:
        arguments: tuple[str, ...] = (f"benchmarks.peers.on_{case.needs}", "{port}")
        return Program(name=case.server, what=case.what, arguments=arguments, health=b"/health")
    own = (f"capacity={capacity}", "queue=0", "party_share=100")
    settings = ("limits.write_stall=0", f"operator.port={plane}", *(f"models.floods.{setting}" for setting in own))
    arguments = (
        "gateway", "--port", "{port}", "--log-level", "error", "--model", "floods=benchmarks.served:floods",
        *(f"--set={setting}" for setting in settings),
    )  # fmt: skip
    return Program(name=case.server, what=case.what, arguments=arguments, health=b"/v2/health/ready")


def _tree(pid: int) -> list[int]:
    found = [pid]
    with suppress(OSError):
        for child in children(pid):
            found += _tree(child)
    return found


@contextmanager
def _served(program: Program) -> Iterator[Running]:
    """Runs a server for the length of the block, and ends the processes that it has started and not ended."""
    left: list[int] = []
    try:
        with started(program) as server:
            try:
                yield server
            finally:
                left = _tree(server.pid)[1:]
    finally:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _memory(server: Running) -> int:
    return sum(map(anonymous_bytes, _tree(server.pid)))


def _in_the_kernel(port: int) -> int:
    """Bytes in the send queues of the connections to a port of this machine, which their clients have not acknowledged."""
    connections = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(queues.split(":")[0], 16) for _, local, _, _, queues, *_ in connections if local.endswith(f":{port:04X}"))


def _stats(plane: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", plane, timeout=PATIENCE)
    try:
        connection.request("GET", "/stats")
        told: dict[str, Any] = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return told


# ---- measuring


def measure(name: str, readers: Sequence[int] = READERS, *, capacity: int = CAPACITY) -> Series:
    """Opens more and more clients of one server, and measures it at rest beside each number of them and beside none.
    LoadError if it does not come to rest."""
    case, plane = CASES[name], free_port()
    allow_descriptors(_DESCRIPTORS)
    opened: Opener = _http2 if case.wire == "HTTP/2" else _http1
    with _served(_program(case, plane, capacity)) as server:
        asked = None if case.needs else plane
        with ExitStack() as sockets:  # the first client pays for what all share
            opened(server.port, 1, sockets)
            _at_rest(server, asked, 1)
        points, statuses = list[Point](), Counter[int]()
        with ExitStack() as sockets:
            for count in sorted({0, *(count for count in readers if count <= case.most)}):
                statuses += opened(server.port, count - statuses.total(), sockets)
                memory, told = _at_rest(server, asked, statuses[200])
                points.append(_point(count, statuses, memory, _in_the_kernel(server.port), told))
    installed = version(case.needs) if case.needs else gateway_version()
    return Series(server=case.server, version=installed, wire=case.wire, points=tuple(points))


def _point(readers: int, statuses: Counter[int], memory: int, kernel: int, told: dict[str, Any] | None) -> Point:
    refused = statuses.total() - statuses[200]
    if told is None:
        return Point(readers=readers, refused=refused, memory=memory, kernel=kernel)
    return Point(
        readers=readers, refused=refused, memory=memory, kernel=kernel, parked=_parked(told),
        queued=told["memory"]["held"]["send"], budget=told["memory"]["used"],
        refusals={reason: n for reason, n in told["refusals"].items() if n},
    )  # fmt: skip


def _parked(told: dict[str, Any]) -> int:
    return sum(parts.get("room", 0) for parts in told["waiting"].values())


def _at_rest(server: Running, plane: int | None, parked: int) -> tuple[int, dict[str, Any] | None]:
    """Waits until so many streams are live, all wait for room, and memory no longer changes. Returns the memory and the
    figures of `/stats`."""
    until, looks, told = time.monotonic() + PATIENCE, list[int](), None
    while time.monotonic() < until:
        time.sleep(_LOOK)
        if plane is not None:
            told = _stats(plane)
            if not _parked(told) == sum(told["live"].values()) == parked:
                looks.clear()
                continue
        looks = [*looks[1 - _LOOKS :], _memory(server)]
        if len(looks) == _LOOKS and max(looks) - min(looks) <= _STEADY:
            return looks[-1], told
    state = f"; its /stats has {told['live']} live and {told['waiting']} waiting" if told else ""
    raise LoadError(f"{server.program.name} did not come to rest in {PATIENCE:g} s{state}{server.last_words()}")


def cells(series: Series) -> list[tuple[str, ...]]:
    """The rows of one server, with the columns of `HEADS`."""
    rows = []
    for point in series.points:
        each = _each(series.points[0], point)
        sizes = ("-", "-") if each is None else tuple(f"{size / 1024:,.0f}" for size in each)
        parked = "-" if point.parked is None else str(point.parked)
        numbers = (str(point.readers), parked, str(point.refused), f"{point.memory / 2**20:.1f}")
        rows.append((series.server, series.wire, *numbers, *sizes))
    return rows
