"""Those who begin and do not go on: heads, bodies, frames and handshakes that drip or stop, and answers that nobody reads."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

from hpack import Encoder

from benchmarks import requests
from benchmarks.load.connections import frame
from tests.attacks.attack import attack
from tests.attacks.attacker import Attacker
from tests.attacks.ears import HTTP1Ear, HTTP2Ear, WebSocketEar
from tests.attacks.programs.load import OPENING, Told

_SLOW: Any = {"within": 5.0, "least": 6.0, "growth": 48, "after": 16, "lines": 150}
"""The times of the limits are shortened, so that a short attack sees them, and not so much that a good client on a loaded machine
does; the server looks once a second. Hundreds of connections are open at once, of which the allocator keeps some; and one of HTTP/2 is a
cycle of 24 KiB, which waits for the collector."""
_HEAD: Any = {**_SLOW, "settings": ("limits.head_timeout=2",)}
_BODIES: Any = {**_SLOW, "settings": ("limits.body_silence=1",)}
_TLS: Any = {**_SLOW, "settings": ("limits.tls_handshake_timeout=2",), "tls": True}
_HEADS = 'everywire_ended_connections_total{reason="head-timeout"'


@final
class Dripping:
    """The opening, and what follows it byte by byte; then nothing."""

    def __init__(self, opening: bytes, rest: bytes = b"") -> None:
        self.opening, self._rest = opening, memoryview(rest)

    def more(self) -> tuple[bytes, int]:
        piece, self._rest = self._rest[:1], self._rest[1:]
        return bytes(piece), len(piece)


def _head(length: int = 100) -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: there\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (requests.INFER, length)


def _block() -> bytes:
    fields = [(":method", "POST"), (":scheme", "http"), (":authority", "there"), (":path", requests.INFER.decode())]
    return Encoder().encode([*fields, ("content-type", "application/json"), ("content-length", "100")])


def _drip(attacker: Attacker, made: Callable[[], Dripping], ear: Any) -> None:
    connections, every = attacker.random.randint(100, 300), attacker.random.uniform(0.1, 0.4)
    attacker.pour(made, ear, connections=connections, every=every)


@attack("slow-heads-http1", ends="status 408|fin", **_HEAD)
def heads_http1(attacker: Attacker) -> None:
    """Hundreds of HTTP/1.1 heads that come byte by byte and never end."""
    cut = attacker.random.randint(1, 40)
    _drip(attacker, lambda: Dripping(_head()[:cut], b"a" * 40 + b"x-a: b\r\n" * 1000), HTTP1Ear)


@attack("slow-heads-websocket", nightly=True, ends="status 408|fin", **_HEAD)
def heads_websocket(attacker: Attacker) -> None:
    """Hundreds of WebSocket handshakes that come byte by byte and never end."""
    cut = attacker.random.randint(30, 100)
    _drip(attacker, lambda: Dripping(requests.upgrade()[:cut], b"x-a: b\r\n" * 1000), WebSocketEar)


@attack("slow-heads-http2", nightly=True, ends="goaway 11", counters=(_HEADS,), **_HEAD)
def heads_http2(attacker: Attacker) -> None:
    """Hundreds of HTTP/2 header blocks that begin and stop: in a frame's head, in its payload, or before a CONTINUATION."""
    block = _block()
    begun = (
        frame(1, 0, 1, block[:10]) + frame(9, 0, 1, block[10:11]),
        frame(1, 4, 1, block)[: attacker.random.randint(1, 8)],
        frame(1, 4, 1, block)[: attacker.random.randint(10, 40)],
    )
    _drip(attacker, lambda: Dripping(OPENING + attacker.random.choice(begun)), HTTP2Ear)


@attack("silent-preface", nightly=True, ends="fin|goaway 11", **_HEAD)
def preface(attacker: Attacker) -> None:
    """Hundreds of HTTP/2 connections that stop within the preface, or send no SETTINGS after it."""
    _drip(attacker, lambda: Dripping(OPENING[: attacker.random.randint(1, 30)]), HTTP2Ear)


@attack("half-open-http1", nightly=True, ends="status 408|fin|reset", **_BODIES)
def bodies_http1(attacker: Attacker) -> None:
    """A thousand HTTP/1.1 requests without their bodies, all at once and again."""
    sent = attacker.random.randint(0, 99)
    attacker.pour(lambda: Dripping(_head() + b" " * sent), HTTP1Ear, connections=1000, every=1.0)


@final
class HalfOpen(HTTP2Ear):
    """HTTP/2 requests whose body does not come: as many streams as may be open at once."""

    opening = OPENING

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self._stream, self._at_once, self._head = 1, at_once, _block()

    def more(self) -> tuple[bytes, int]:
        streams = range(self._stream, self._stream + 2 * max(0, self._at_once - (self._stream >> 1) + self.answered), 2)
        self._stream = streams.stop
        return self.replies() + b"".join(frame(1, 4, stream, self._head) for stream in streams), len(streams)


@attack("half-open-http2", nightly=True, **{**_BODIES, "growth": 96, "after": 8})
def bodies_http2(attacker: Attacker) -> None:
    """Thousands of HTTP/2 requests without their bodies, all at once, and others as soon as those are refused."""
    at_once = attacker.random.randint(500, 1000)
    attacker.pour(lambda: HalfOpen(at_once), connections=5)


@attack("slow-bodies", nightly=True, ends="status 408|fin|reset", **_BODIES)
def slow_bodies(attacker: Attacker) -> None:
    """Hundreds of HTTP/1.1 bodies that arrive byte by byte."""
    _drip(attacker, lambda: Dripping(_head(10_000), b" " * 9_000), HTTP1Ear)


@attack("unread-http1", nightly=True, **_BODIES)
def unread_http1(attacker: Attacker) -> None:
    """HTTP/1.1 requests without end, whose answers are not read."""
    numbers = attacker.random.choice((256, 1024))
    attacker.pour(lambda: Told(b"", requests.infer_binary(numbers)), HTTP1Ear, connections=20, reads=False)


@attack("unread-messages", **_BODIES)
def unread_messages(attacker: Attacker) -> None:
    """WebSocket messages without end, whose echoes are not read."""
    message = requests.frame(requests.PIECE[: attacker.random.choice((200, 1024))])
    attacker.pour(lambda: Told(requests.upgrade(), message), WebSocketEar, connections=20, reads=False)


@attack("tls-handshakes", nightly=True, ends="fin|reset", **_TLS)
def handshakes(attacker: Attacker) -> None:
    """TLS handshakes that stop in the first message or after it, hundreds at once, again and again."""
    hello = client_hello()
    cuts = (1, attacker.random.randint(5, len(hello) - 1), len(hello))
    attacker.pour(
        lambda: Dripping(hello[: attacker.random.choice(cuts)]),
        HTTP1Ear,
        connections=attacker.random.randint(100, 300),
        tls_port=True,
    )


def client_hello() -> bytes:
    """The first message of a TLS handshake."""
    context, out = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    machine = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        machine.do_handshake()
    return out.read()


@attack("tls-connections", nightly=True, tls=True)
def tls_connections(attacker: Attacker) -> None:
    """Whole TLS handshakes, one after the other, each connection closed at once."""
    while attacker.goes_on:
        began = time.monotonic()
        attacker.connect(tls=True).close()
        attacker.did["handshakes"] += 1
        attacker.sleep(attacker.random.uniform(0, 0.002) - (time.monotonic() - began))


@attack("connections", nightly=True)
def connections(attacker: Attacker) -> None:
    """Connections that are opened and closed again, with FIN or RST, with nothing said or half a head."""
    lines: list[socket.socket] = []
    most = attacker.random.randint(1, 64)
    while attacker.goes_on:
        line = attacker.connect()
        if attacker.random.random() < 0.5:
            line.send(_head()[: attacker.random.randint(1, 60)])
        if attacker.random.random() < 0.5:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        lines.append(line)
        attacker.did["connections"] += 1
        if len(lines) > most:
            lines.pop(attacker.random.randrange(len(lines))).close()
    for line in lines:
        line.close()
