"""Peers that no defence may end: what real clients do at most, as their transcripts; each keeps to its margin for as long as it lasts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hpack import Encoder

from benchmarks import requests
from benchmarks.load.connections import frame
from tests.attacks.attack import attack
from tests.attacks.attacker import Attacker
from tests.attacks.ears import HTTP2Ear
from tests.attacks.programs.load import BODY, FIELDS, OPENING

_NEVER: Any = {"ends": "open", "within": 0.2, "growth": 64, "after": 48, "lines": 100_000}
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_CANCEL = (8).to_bytes(4, "big")


def update(stream: int, size: int) -> bytes:
    """WINDOW_UPDATE."""
    return frame(8, 0, stream, size.to_bytes(4, "big"))


class Caller(HTTP2Ear):
    """So many calls in flight on one connection, and beside them what `beside` and `with_call` say."""

    opening = OPENING
    fields: Sequence[tuple[str, str]] = FIELDS
    body = BODY
    at_once = 20

    def __init__(self) -> None:
        super().__init__()
        self._head, self._stream, self._begun, self._data = Encoder().encode(self.fields), 1, 0, 0

    def more(self) -> tuple[bytes, int]:
        out = [self.replies()]
        while self._begun - self.answered < self.at_once:
            self._begun += 1
            out += [self.with_call(self._stream), *self.call(self._stream)]
            self._stream += 2
        out.append(self.beside(self.counts["data"] - self._data))
        self._data = self.counts["data"]
        return b"".join(out), len(out)

    def call(self, stream: int) -> list[bytes]:
        """The frames of one call."""
        return [frame(1, 4, stream, self._head), frame(0, 1, stream, self.body)]

    def with_call(self, stream: int) -> bytes:
        """The frames before each call."""
        return b""

    def beside(self, data: int) -> bytes:
        """The frames after that many DATA frames of the server."""
        return b""


class Probing(Caller):
    """gRPC's C-core and Go: a PING for each round trip in which DATA came, and SETTINGS while the window grows."""

    opening = OPENING + b"".join(frame(4, 0, 0, b"\0\4" + (1 << n).to_bytes(4, "big")) for n in range(16, 31))

    def beside(self, data: int) -> bytes:
        return frame(6, 0, 0, b"probing!") if data else b""


class Updating(Caller):
    """Python httpx, curl, node and nghttp2: two WINDOW_UPDATEs for each DATA."""

    def beside(self, data: int) -> bytes:
        return update(0, 100) * 2 * data


class Browsing(Caller):
    """A browser: PRIORITYs at the beginning, a PRIORITY_UPDATE for each request, and fifty cancels when a page is left."""

    opening = (
        _PREFACE
        + frame(4, 0, 0, b"\0\4" + (1 << 20).to_bytes(4, "big"))
        + update(0, 1 << 24) * 2
        + b"".join(frame(2, 0, stream, b"\0\0\0\0\x10") for stream in (3, 5, 7, 9, 11))
    )
    at_once = 50

    def __init__(self) -> None:
        super().__init__()
        self._leaves = time.monotonic() + 0.5

    def with_call(self, stream: int) -> bytes:
        return frame(0x10, 0, 0, stream.to_bytes(4, "big") + b"u=3, i")

    def beside(self, data: int) -> bytes:
        if time.monotonic() < self._leaves:
            return b""
        self._leaves = time.monotonic() + 4.0
        left = range(self._stream - 100, self._stream, 2)
        self.answered += 50  # nobody waits for them; those that were answered meanwhile are a few more in flight
        return b"".join(frame(3, 0, stream, _CANCEL) for stream in left)


class Proxying(Caller):
    """A proxy with its users' cancels: of each ten calls four are hedged, and cancelled young."""

    at_once = 30

    def call(self, stream: int) -> list[bytes]:
        pieces = super().call(stream)
        if stream // 2 % 10 < 4:
            pieces.append(frame(3, 0, stream, _CANCEL))
            self.answered += 1
        return pieces


class Cramped(Caller):
    """A slow embedded reader: windows of 1 KiB, given back as they are read."""

    opening = _PREFACE + frame(4, 0, 0, b"\0\4" + (1024).to_bytes(4, "big")) + update(0, (1 << 30))
    fields = (
        (":method", "POST"), (":scheme", "http"), (":authority", "127.0.0.1"), (":path", requests.INVOCATIONS.decode()),
        ("content-type", "application/json"),
    )  # fmt: skip
    body = requests.generate(512).partition(b"\r\n\r\n")[2]
    at_once = 1

    def beside(self, data: int) -> bytes:
        return update(self._stream - 2, 1024) * data


class Old:
    """The AWS SDK: all sessions of a program on one connection, of which all are cancelled at exit."""

    opening = OPENING

    def __init__(self) -> None:
        self._head, self._leaves = Encoder().encode(FIELDS), 0.0

    def more(self) -> tuple[bytes, int]:
        streams = range(1, 2001, 2)
        if not self._leaves:
            self._leaves = time.monotonic() + 1.5
            return b"".join(frame(1, 4, stream, self._head) for stream in streams), 1000
        if time.monotonic() < self._leaves:
            return b"", 0
        self._leaves += 3600.0
        return b"".join(frame(3, 0, stream, _CANCEL) for stream in streams), 1000


class Kept:
    """A connection without calls that is kept alive: a PING now and then, as often as ten times a second."""

    opening = OPENING

    def more(self) -> tuple[bytes, int]:
        return frame(6, 0, 0, b"alive???"), 1


@attack("legal-probes", nightly=True, **_NEVER)
def probes(attacker: Attacker) -> None:
    """gRPC: a PING for each round trip in which DATA came, fifteen SETTINGS at the beginning."""
    attacker.pour(Probing, connections=attacker.random.randint(1, 4))


@attack("legal-updates", nightly=True, **_NEVER)
def updates(attacker: Attacker) -> None:
    """httpx, curl, node: two WINDOW_UPDATEs for each DATA."""
    attacker.pour(Updating, connections=attacker.random.randint(1, 4))


@attack("legal-browser", **_NEVER)
def browser(attacker: Attacker) -> None:
    """Browsers: a PRIORITY_UPDATE for each request, and fifty cancels when a page is left."""
    attacker.pour(Browsing, connections=attacker.random.randint(1, 4))


@attack("legal-proxy", nightly=True, **_NEVER)
def proxy(attacker: Attacker) -> None:
    """A proxy's users: four of ten calls are cancelled young."""
    attacker.pour(Proxying, connections=attacker.random.randint(1, 4))


@attack("legal-small-windows", nightly=True, **_NEVER)
def small_windows(attacker: Attacker) -> None:
    """Embedded readers: windows of 1 KiB."""
    attacker.pour(Cramped, connections=attacker.random.randint(1, 8))


@attack("legal-old-cancels", nightly=True, least=3.0, **_NEVER)
def old_cancels(attacker: Attacker) -> None:
    """SDKs at exit: a thousand sessions older than a second are cancelled at once."""
    attacker.pour(Old, HTTP2Ear, connections=1)


@attack("legal-keepalive", nightly=True, **_NEVER)
def keepalive(attacker: Attacker) -> None:
    """Connections without calls, each with a PING some times a second."""
    attacker.pour(Kept, HTTP2Ear, connections=attacker.random.randint(20, 100), every=attacker.random.uniform(0.12, 1.0))
