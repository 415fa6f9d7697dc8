"""The load client's loop: non-blocking sockets, one wait for all of them, counts between two looks at the clock."""

from __future__ import annotations

import select
import selectors
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import requests
from benchmarks.accounting import cpu_seconds, pin, resident_bytes, tree_cpu_seconds
from benchmarks.load.connections import Connection, LoadError, connection
from benchmarks.load.plan import Kind, Measure, Plan, Result

_SILENCE = 10.0
"""Seconds without any answer after which a run is given up."""
_READ = 262_144
_SMALL_WINDOW = 65_536
_ROUNDS = 8
"""How many answers a run has, at least, for each that is under way at once. It lasts longer than its time for that."""


def run(plan: Plan) -> Result:
    """Carries the plan out. LoadError says what the server did instead of answering."""
    if plan.core is not None:
        pin(0, plan.core)
    try:
        match plan.measure:
            case Measure.CPU:
                return _busy(plan)
            case Measure.HELD:
                return _held(plan)
            case Measure.STALLED:
                return _stalled(plan)
    except OSError as error:
        raise LoadError(f"the server on port {plan.port} cannot be used: {error}") from None


# ---- one connection


class _Line:
    """A connection with its socket."""

    __slots__ = ("pending", "side", "sock", "writing")

    def __init__(self, plan: Plan) -> None:
        self.sock = _connect(plan)
        self.side: Connection = connection(plan)
        self.pending: bytes | memoryview = b""
        self.writing = False


def _connect(plan: Plan) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", plan.port), timeout=_SILENCE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if plan.ca:
        context = ssl.create_default_context(cafile=plan.ca)
        context.set_alpn_protocols(["h2" if plan.kind in (Kind.DUPLEX, Kind.STREAMS) else "http/1.1"])
        sock = context.wrap_socket(sock, server_hostname="127.0.0.1")
    if plan.kind is Kind.FRAMES:
        _upgrade(sock)
    return sock


def _upgrade(sock: socket.socket) -> None:
    sock.sendall(requests.upgrade())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = sock.recv(1)
        head += byte
        if not byte or len(head) > 4096:
            raise LoadError(f"the WebSocket handshake was answered with {head[:200]!r}")
    if not head.startswith(b"HTTP/1.1 101"):
        raise LoadError(f"the WebSocket handshake was answered with {head[:200]!r}")


# ---- many


class _Loop:
    """All connections of a run. epoll where there is one: `selectors` costs a tuple and a key for each event."""

    def __init__(self, lines: list[_Line]) -> None:
        self._lines = {line.sock.fileno(): line for line in lines}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._selector = selectors.DefaultSelector()
        for fd, line in self._lines.items():
            line.sock.setblocking(False)
            if self._epoll is not None:
                self._epoll.register(fd, select.EPOLLIN)
            else:
                self._selector.register(fd, selectors.EVENT_READ)
        for line in lines:
            self._write(line)

    def close(self) -> None:
        for line in self._lines.values():
            line.sock.close()
        self._selector.close()
        if self._epoll is not None:
            self._epoll.close()

    def until(self, deadline: float, *, least: int = 0) -> int:
        """Keeps every connection busy until then, and until `least` units were completed; how many were."""
        units, clock, lines = 0, time.perf_counter, self._lines
        last = clock()
        while (now := clock()) < deadline or units < least:
            before = units
            for fd in self._wait(min(deadline - now, 1.0) if now < deadline else 1.0):
                line = lines[fd]
                if line.writing:
                    self._write(line)
                units += self._read(line)
            if units != before:
                last = now
            elif now - last > _SILENCE:
                raise LoadError(f"no answer for {_SILENCE:g} s")
        return units

    def _wait(self, seconds: float) -> list[int]:
        if self._epoll is not None:
            return [fd for fd, _ in self._epoll.poll(seconds)]
        return [key.fd for key, _ in self._selector.select(seconds)]

    def _read(self, line: _Line) -> int:
        units = 0
        sock, side = line.sock, line.side
        while True:
            try:
                data = sock.recv(_READ)
            except (BlockingIOError, ssl.SSLWantReadError):
                return units
            if not data:
                raise LoadError("the server closed a connection")
            units += side.take(data)
            if side.out:
                self._write(line)
            # a TLS socket may hold records that the kernel will not announce again
            if type(sock) is socket.socket:
                return units

    def _write(self, line: _Line) -> None:
        rest, out = line.pending, line.side.out
        if out:
            line.side.out = b""
            rest = b"".join((rest, out)) if rest else out
        try:
            while rest:
                n = line.sock.send(rest)
                rest = b"" if n == len(rest) else memoryview(rest)[n:]
        except (BlockingIOError, ssl.SSLWantWriteError):
            pass
        line.pending = rest
        if line.writing is not bool(rest):
            line.writing = bool(rest)
            self._watch(line)

    def _watch(self, line: _Line) -> None:
        if self._epoll is not None:
            self._epoll.modify(line.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if line.writing else 0))
        else:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.writing else 0)
            self._selector.modify(line.sock.fileno(), events)


@contextmanager
def _opened(plan: Plan, count: int) -> Iterator[_Loop]:
    lines: list[_Line] = []
    try:
        for _ in range(count):
            lines.append(_Line(plan))
        loop = _Loop(lines)
    except BaseException:
        for line in lines:
            line.sock.close()
        raise
    try:
        yield loop
    finally:
        loop.close()


def _busy(plan: Plan) -> Result:
    cpu = cpu_seconds if plan.alone else tree_cpu_seconds
    with _opened(plan, plan.connections) as loop:
        # the beginnings of connections are over then, even where a busy machine hardly lets the server run
        places = plan.connections * plan.streams * plan.in_flight
        loop.until(time.perf_counter() + plan.warm_up, least=places)
        began, server, own = time.perf_counter(), cpu(plan.server), time.process_time()
        units = loop.until(began + plan.seconds, least=_ROUNDS * places)
        server, own = cpu(plan.server) - server, time.process_time() - own
        seconds = time.perf_counter() - began
    return Result(units=units, seconds=seconds, server_cpu=server, load_cpu=own)


# ---- memory


def _held(plan: Plan) -> Result:
    """Each stream has one answer, then all are silent. The first connections pay for what all share, and do not count."""
    open_now: list[socket.socket] = []
    began = own = server = 0.0
    base = 0
    shared = max(1, plan.connections // 20)
    try:
        for number in range(shared + plan.connections):
            if number == shared:
                began, own, server = time.perf_counter(), time.process_time(), cpu_seconds(plan.server)
                base = resident_bytes(plan.server)
            sock = _connect(plan)
            open_now.append(sock)
            _ask_once(sock, connection(plan), plan.streams)
        time.sleep(plan.seconds)
        memory = resident_bytes(plan.server) - base
    finally:
        for sock in open_now:
            sock.close()
    spent, used = time.process_time() - own, cpu_seconds(plan.server) - server
    seconds = time.perf_counter() - began
    return Result(units=plan.connections * plan.streams, seconds=seconds, server_cpu=used, load_cpu=spent, memory=memory)


def _ask_once(sock: socket.socket, side: Connection, units: int) -> None:
    while units > 0:
        out, side.out = side.out, b""
        sock.sendall(out)
        data = sock.recv(_READ)
        if not data:
            raise LoadError("the server closed a connection")
        units -= side.take(data)


def _stalled(plan: Plan) -> Result:
    """One connection asks and does not read."""
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_WINDOW)
        sock.settimeout(_SILENCE)
        sock.connect(("127.0.0.1", plan.port))
        began, own = time.perf_counter(), time.process_time()
        base, server = resident_bytes(plan.server), cpu_seconds(plan.server)
        sock.sendall(plan.message)
        time.sleep(plan.seconds)
        memory = resident_bytes(plan.server) - base
        first = sock.recv(4096)
    finally:
        sock.close()
    if not first.startswith(b"HTTP/1.1 200"):
        raise LoadError(f"expected an answer with status 200, got {first[:200]!r}")
    spent, used = time.process_time() - own, cpu_seconds(plan.server) - server
    seconds = time.perf_counter() - began
    return Result(units=1, seconds=seconds, server_cpu=used, load_cpu=spent, memory=memory)
