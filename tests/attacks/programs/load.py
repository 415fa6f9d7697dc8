"""More than anybody needs, all of it legal: many connections with many requests in flight, pipelined, on fresh connections."""

from __future__ import annotations

from typing import Any, final

from hpack import Encoder

from benchmarks import requests
from benchmarks.load.connections import frame
from benchmarks.neighbours import Repeated
from tests.attacks.attack import attack
from tests.attacks.attacker import Attacker
from tests.attacks.ears import HTTP1Ear, HTTP2Ear, WebSocketEar

_MOST = 2**31 - 1
OPENING = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + frame(4, 0, 0, b"\0\4" + _MOST.to_bytes(4, "big"))
    + frame(8, 0, 0, (_MOST - 65535).to_bytes(4, "big"))
)
BODY = requests.infer_json(16).partition(b"\r\n\r\n")[2]
FIELDS = [
    (":method", "POST"), (":scheme", "http"), (":authority", "127.0.0.1"), (":path", requests.INFER.decode()),
    ("content-type", "application/json"), ("content-length", str(len(BODY))),
]  # fmt: skip


_HELD: Any = {"growth": 64, "after": 24, "lines": 100_000}
"""Bounds for memory in flight, for memory that the allocator keeps, and for log lines: one for each exchange that is cut at
the end, as it had reached a model."""


@final
class InFlight(HTTP2Ear):
    """Requests on one HTTP/2 connection: always as many are in flight, and each answer makes room for the next. With `most`
    it leaves after so many, without a word."""

    opening = OPENING

    def __init__(self, at_once: int, most: int = _MOST) -> None:
        super().__init__()
        self._head, self._at_once, self._stream, self._most = Encoder().encode(FIELDS), at_once, 1, most

    def more(self) -> tuple[bytes, int]:
        begun = self._stream >> 1
        if self.answered >= self._most:
            raise ConnectionAbortedError
        streams = range(self._stream, self._stream + 2 * min(self._at_once - begun + self.answered, self._most - begun), 2)
        self._stream = streams.stop
        out = [piece for stream in streams for piece in (frame(1, 4, stream, self._head), frame(0, 1, stream, BODY))]
        return self.replies() + b"".join(out), len(out)


@final
class Told:
    """One message again and again, from the neighbours of the benchmarks, with their number."""

    def __init__(self, opening: bytes, message: bytes) -> None:
        self._of, self.opening = Repeated(opening, message), opening
        self._frames = 65536 // len(message) + 1

    def more(self) -> tuple[bytes, int]:
        return self._of.more(), self._frames


@attack("load-http2-kept", ends="open", within=0.2, **_HELD)
def load_kept(attacker: Attacker) -> None:
    """A hundred HTTP/2 connections with up to a hundred requests in flight on each."""
    at_once = attacker.random.randint(60, 100)
    attacker.pour(lambda: InFlight(at_once), connections=100)


@attack("load-http2-fresh", nightly=True, **_HELD)
def load_fresh(attacker: Attacker) -> None:
    """A hundred HTTP/2 connections with a hundred requests each, and a new connection as soon as those are answered."""
    most = attacker.random.randint(60, 100)
    attacker.pour(lambda: InFlight(most, most), connections=100)


@attack("load-pipelined", nightly=True, ends="open", within=0.2)
def pipelined(attacker: Attacker) -> None:
    """Pipelined HTTP/1.1 requests on a few connections, as fast as the server takes them."""
    numbers = attacker.random.choice((1, 16, 256))
    attacker.pour(lambda: Told(b"", requests.infer_binary(numbers)), HTTP1Ear, connections=attacker.random.randint(1, 8))


@attack("load-messages", nightly=True, ends="open", within=0.2)
def messages(attacker: Attacker) -> None:
    """WebSocket messages as fast as the server takes them, each of them echoed."""
    size = attacker.random.choice((126, 512, 1024))
    message = requests.frame(requests.PIECE[:size])
    attacker.pour(lambda: Told(requests.upgrade(), message), WebSocketEar, connections=attacker.random.randint(1, 8))
