"""Much that is announced and little that comes: lengths on every wire, streams and windows, messages that stop halfway."""

from __future__ import annotations

import struct
from typing import Any, final
from zlib import crc32

from hpack import Encoder

from benchmarks import requests
from benchmarks.load.connections import frame
from tests.attacks.attack import attack
from tests.attacks.attacker import Attacker
from tests.attacks.ears import HTTP1Ear, HTTP2Ear, WebSocketEar
from tests.attacks.programs.load import OPENING

MiB = 1024 * 1024
_SMALL: Any = {"settings": ("limits.total_bytes=96MiB", "limits.body=64MiB"), "lines": 100_000}
"""A budget that some fifty of these lengths would take whole; and a line for each exchange that is cut at the end."""


@final
class Said:
    """Bytes once, and then nothing."""

    def __init__(self, opening: bytes) -> None:
        self.opening = opening

    def more(self) -> tuple[bytes, int]:
        return b"", 0


@final
class Streams(HTTP2Ear):
    """Requests that begin on one HTTP/2 connection, each with the same few bytes of its body; then only what is owed."""

    def __init__(self, fields: list[tuple[str, str]], at_once: int, body: bytes) -> None:
        super().__init__()
        head, pieces = Encoder().encode(fields), []
        for stream in range(1, 2 * at_once, 2):
            pieces.append(frame(1, 4, stream, head))
            pieces += [frame(0, 0, stream, body[at : at + 16_384]) for at in range(0, len(body), 16_384)]
        self.opening = OPENING + b"".join(pieces)

    def more(self) -> tuple[bytes, int]:
        return self.replies(), 0


def _fields(path: bytes, *more: tuple[str, str]) -> list[tuple[str, str]]:
    plain = [(":method", "POST"), (":scheme", "http"), (":authority", "127.0.0.1"), (":path", path.decode())]
    return [*plain, *more]


@attack("announced-body", growth=48, **_SMALL)
def bodies(attacker: Attacker) -> None:
    """Bodies of up to 64 MiB of which one byte comes, on hundreds of HTTP/1.1 connections."""
    size = attacker.random.randint(32 * MiB, 64 * MiB)
    head = b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\nx" % (requests.INFER, size)
    attacker.pour(lambda: Said(head), HTTP1Ear, connections=300)


@attack("announced-head", nightly=True, growth=48, **_SMALL)
def heads(attacker: Attacker) -> None:
    """JSON heads of binary bodies of up to 60 MiB of which 70 KiB come, on HTTP/1.1 connections."""
    size = attacker.random.randint(32 * MiB, 60 * MiB)
    fields = b"inference-header-content-length: %d\r\ncontent-length: %d\r\n" % (size, size + 64)
    head = b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\n%b\r\n" % (requests.INFER, fields)
    attacker.pour(lambda: Said(head + bytes(70_000)), HTTP1Ear, connections=100)


@attack("announced-frame", nightly=True, growth=64, **_SMALL)
def frames(attacker: Attacker) -> None:
    """WebSocket frames of up to 16 MiB of which a few bytes come, on hundreds of connections."""
    size, here = attacker.random.randint(8 * MiB, 16 * MiB), attacker.random.randint(0, 1000)
    begun = b"\x82\xff" + size.to_bytes(8, "big") + bytes(4 + here)
    attacker.pour(lambda: Said(requests.upgrade() + begun), WebSocketEar, connections=200)


@attack("announced-event", nightly=True, growth=64, **_SMALL)
def events(attacker: Attacker) -> None:
    """Events of up to 16 MiB of which a few bytes come, on streams of HTTP/2 connections."""
    size, here = attacker.random.randint(8 * MiB, 16 * MiB), attacker.random.randint(0, 1000)
    lengths = struct.pack(">II", size, 16)
    begun = lengths + crc32(lengths).to_bytes(4, "big") + bytes(here)
    fields = _fields(requests.DUPLEX, ("content-type", "application/vnd.amazon.eventstream"))
    attacker.pour(lambda: Streams(fields, 60, begun), connections=10)


@attack("silent-streams", nightly=True, growth=64, after=24, **_SMALL)
def streams(attacker: Attacker) -> None:
    """A thousand streams with open windows on each of some HTTP/2 connections, and no byte of a body. They cost their objects."""
    fields = _fields(requests.INFER, ("content-length", "1000000"))
    attacker.pour(lambda: Streams(fields, attacker.random.randint(900, 1000), b""), connections=2)


@attack("half-frames", nightly=True, growth=96, after=16, **_SMALL)
def halves(attacker: Attacker) -> None:
    """WebSocket frames of 4 MiB that stop halfway: the bytes that came are charged, and others have the rest."""
    begun = b"\x82\xff" + (4 * MiB).to_bytes(8, "big") + bytes(4 + attacker.random.randint(MiB, 2 * MiB))
    attacker.pour(lambda: Said(requests.upgrade() + begun), WebSocketEar, connections=24, again=False)


@attack("half-bodies", nightly=True, growth=112, after=16, **_SMALL)
def half_bodies(attacker: Attacker) -> None:
    """Bodies of 8 MiB that stop halfway, over HTTP/2, all on one connection: it gets no more than its share."""
    fields = _fields(requests.INFER, ("content-length", str(8 * MiB)))
    attacker.pour(lambda: Streams(fields, attacker.random.randint(300, 600), bytes(65_000)), connections=2)
