"""Attacks that take shared places and keep them: slots by silent sessions, every place for a connection, the log."""

from __future__ import annotations

import select
import socket
import time
from contextlib import ExitStack, suppress

from hpack import Encoder

from benchmarks import requests
from benchmarks.load.connections import frame
from tests.attacks.attack import attack
from tests.attacks.attacker import Attacker
from tests.attacks.ears import HTTP2Ear, WebSocketEar
from tests.attacks.programs.load import OPENING

_PATIENCE = 30.0
_DUPLEX_FIELDS = [
    (":method", "POST"), (":scheme", "http"), (":authority", "127.0.0.1"), (":path", requests.DUPLEX.decode()),
    ("content-type", "application/vnd.amazon.eventstream"),
]  # fmt: skip
_UNFINISHED = [
    (":method", "POST"), (":scheme", "http"), (":authority", "127.0.0.1"), (":path", requests.INFER.decode()),
    ("content-type", "application/json"), ("content-length", "1000"),
]  # fmt: skip
_PING = requests.frame(requests.PIECE[:126])


def opened(attacker: Attacker, held: ExitStack, first: bytes = b"") -> socket.socket:
    sock = held.enter_context(attacker.connect())
    if first:
        sock.sendall(first)
    return sock


def served(attacker: Attacker) -> None:
    """A session of its own, on a connection of its own, that is to be echoed: notes `served`, or how it ended."""
    began, ear = time.monotonic(), WebSocketEar()
    with attacker.connect() as sock:
        sock.settimeout(_PATIENCE)
        sock.sendall(requests.upgrade() + _PING)
        with suppress(OSError):
            while not (ear.counts["data"] or ear.last) and (data := sock.recv(65536)):
                ear.take(data)
    attacker.ended("served" if ear.counts["data"] else ear.last or "open", seconds=time.monotonic() - began, said=ear.said)


@attack("silent-sessions-one", nightly=True, ends="served", lines=5000, after=16)
def silent_sessions(attacker: Attacker) -> None:
    """A thousand silent sessions on one connection, more than a model has slots: others get slots at once."""
    head = Encoder().encode(_DUPLEX_FIELDS)
    with ExitStack() as held:
        streams = range(1, 2 * attacker.random.randint(700, 1000), 2)
        opened(attacker, held, OPENING + b"".join(frame(1, 4, stream, head) for stream in streams))
        attacker.sleep(0.3)
        while attacker.goes_on:
            served(attacker)
            attacker.sleep(0.05)


@attack(
    "silent-sessions-many",
    settings=("models.echo.idle_when_wanted=1s",),
    ends="served",
    counters=('everywire_party_refusals_total{reason="idle-when-wanted"}',),
    lines=500,
)
def silent_parties(attacker: Attacker) -> None:
    """A silent session on each of many connections, as many as a model has slots: they end when another client waits."""
    with ExitStack() as held:
        for _ in range(64 + attacker.random.randint(0, 20)):
            opened(attacker, held, requests.upgrade())
        for _ in range(3):
            served(attacker)


@attack(
    "connections-idle",
    nightly=True,
    settings=("limits.connections=200",),
    ends="fin|reset|open",
    counters=('everywire_ended_connections_total{reason="evicted"}',),
)
def idle_connections(attacker: Attacker) -> None:
    """Connections without a request take nearly all places, and further ones keep coming."""
    with ExitStack() as held:
        first = (b"", b"GET / HTTP/1.1\r\nHost: x\r\n", OPENING)
        socks = [opened(attacker, held, attacker.random.choice(first)) for _ in range(170)]
        until = max(attacker.until, time.monotonic() + 2.5)
        time.sleep(1.2)
        while time.monotonic() < until:
            with suppress(OSError):
                socks.append(opened(attacker, held, attacker.random.choice(first)))
            time.sleep(0.02)
        poll = select.poll()
        for sock in socks:
            poll.register(sock, select.POLLIN)
        over = {number for number, _ in poll.poll(0)}
        for sock in socks:
            attacker.ended("fin" if sock.fileno() in over else "open")


def fill(attacker: Attacker, places: int) -> None:
    """Takes them all, and each that a good client gives back; and asks beside that."""
    with ExitStack() as held:
        for _ in range(places):
            opened(attacker, held, requests.upgrade())
        attacker.sleep(0.3)
        while attacker.goes_on:
            opened(attacker, held, requests.upgrade())
            attacker.ask("GET", "/v2/health/live")
            attacker.sleep(0.02)


@attack(
    "connections-full",
    settings=("limits.connections=60",),
    ends="status (503|200)",
    counters=('everywire_ended_connections_total{reason="refused-at-limit"}',),
    lines=500,
    fair=False,
)
def full_table(attacker: Attacker) -> None:
    """Connections with a session take every place: later clients are told to come again.

    That is so for good clients that come anew.
    """
    fill(attacker, 60)


@attack(
    "connections-descriptors",
    nightly=True,
    descriptors=200,
    ends="status (503|200)",
    counters=('everywire_ended_connections_total{reason="refused-at-limit"}',),
    lines=500,
    fair=False,
)
def no_descriptors(attacker: Attacker) -> None:
    """As many connections with a session as the server has descriptors: later clients are told to come again.

    That is so for good clients that come anew.
    """
    fill(attacker, 140)


class Dropped(HTTP2Ear):
    """Requests that are given up before they are whole: not one of them reaches a model."""

    opening = OPENING

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self._head, self._stream, self._at_once = Encoder().encode(_UNFINISHED), 1, at_once

    def more(self) -> tuple[bytes, int]:
        streams = range(self._stream, self._stream + 2 * self._at_once, 2)
        self._stream = streams.stop
        out = [piece for n in streams for piece in (frame(1, 4, n, self._head), frame(3, 0, n, b"\0\0\0\x08"))]
        return self.replies() + b"".join(out), len(out)


@attack("log-resets", nightly=True, events=("suppressed",))
def log_resets(attacker: Attacker) -> None:
    """Requests that are cancelled at once, as many as the server takes: the log has few lines of them."""
    at_once = attacker.random.randint(20, 60)
    attacker.pour(lambda: Dropped(at_once), connections=4, every=0.02)


@attack("log-unread", nightly=True, settings=("log.access=all",), stalled_log=True, lines=1_000_000)
def unread_log(attacker: Attacker) -> None:
    """Refused requests, each with a log line, while the log is not read: lines are dropped, and no client waits."""
    while attacker.goes_on:
        attacker.ask("POST", "/predictions/nobody", b"{}")
