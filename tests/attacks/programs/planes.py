"""The operator plane and the metrics port: floods of scrapes, of frames of HTTP/2, of refused calls, and of lines of the log."""

from __future__ import annotations

import random
from typing import Any, final

from benchmarks.load.connections import frame
from tests.attacks.attack import attack
from tests.attacks.attacker import Attacker
from tests.attacks.ears import HTTP1Ear
from tests.attacks.programs.load import OPENING

_TOKEN: Any = {
    "settings": ("metrics.token_file={folder}/tokens",),
    "files": {"tokens": "scrape-me-with-this-and-no-other\n"},
    "metrics": True,
    "stop": 3.0,
}
_OPEN: Any = {"metrics": True, "stop": 3.0}
"""SIGTERM: a drain of two seconds, in which answers under way end, and one more."""


@final
class Repeats:
    """An opening, and then the same bytes for ever."""

    def __init__(self, opening: bytes, again: bytes, at_once: int) -> None:
        self.opening, self._again, self._at_once = opening, again * at_once, at_once

    def more(self) -> tuple[bytes, int]:
        return self._again, self._at_once


def _get(path: str, *fields: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: 127.0.0.1", *fields, "", ""]).encode()


def _at_once(random: random.Random) -> int:
    return random.randint(1, 40)


@attack("metrics-http2", nightly=True, ends="status 505", **_OPEN)
def http2(attacker: Attacker) -> None:
    """WINDOW_UPDATEs of HTTP/2 to the metrics port, on tens of connections: its preface is refused."""
    update = frame(8, 0, 0, attacker.random.randint(1, 9).to_bytes(4, "big"))
    attacker.pour(
        lambda: Repeats(OPENING, update, 1000), HTTP1Ear, connections=attacker.random.randint(30, 60), port=attacker.metrics
    )  # fmt: skip


@attack("metrics-h2c", nightly=True, ends="status 505", within=3.0, **_OPEN)
def h2c(attacker: Attacker) -> None:
    """Requests that ask for h2c, and frames of HTTP/2 behind them: they are answered in HTTP/1.1, and the preface is refused."""
    asked = _get("/metrics", "connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAMAAABk")
    ping = frame(6, 0, 0, bytes(8))
    attacker.pour(
        lambda: Repeats(asked + OPENING, ping, 1000), HTTP1Ear, connections=attacker.random.randint(20, 60), port=attacker.metrics
    )  # fmt: skip


@attack("metrics-scrapes", nightly=True, ends="fin|reset|open", **_OPEN)
def scrapes(attacker: Attacker) -> None:
    """Scrapes as fast as they are answered, behind one another, on as many connections as there may be."""
    at_once, kinds = _at_once(attacker.random), ("accept: text/plain", "accept: application/openmetrics-text")
    attacker.pour(
        lambda: Repeats(b"", _get("/metrics", attacker.random.choice(kinds)), at_once), HTTP1Ear, connections=100,
        port=attacker.metrics,
    )  # fmt: skip


@attack("metrics-unread", nightly=True, ends="fin|reset|open", **_OPEN)
def unread(attacker: Attacker) -> None:
    """Scrapes of which no answer is read, on as many connections as there may be."""
    at_once = _at_once(attacker.random)
    attacker.pour(
        lambda: Repeats(b"", _get("/metrics"), at_once), HTTP1Ear, connections=100, reads=False, port=attacker.metrics
    )


@attack("plane-calls", nightly=True, ends="status 4..|fin|reset|open", **_OPEN)
def calls(attacker: Attacker) -> None:
    """Calls of the operator plane that a stranger on this machine may make, and bodies of tiny chunks."""
    chunks = b"1\r\nx\r\n" * attacker.random.randint(500, 4000)
    body = b"POST /reload/none HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + chunks
    paths = ("/streams?limit=1000", "/stats", "/openapi.json", "/nowhere", "/models", "/history")

    def side() -> Repeats:
        if attacker.random.random() < 0.3:
            return Repeats(body, chunks, 1)
        return Repeats(b"", _get(attacker.random.choice(paths)), _at_once(attacker.random))

    attacker.pour(side, HTTP1Ear, connections=90, port=attacker.operator)  # and room for who looks at the counters


@attack("refused-scrapes", ends="status 401|fin|reset", events=("metrics request refused",), **_TOKEN)
def refused(attacker: Attacker) -> None:
    """Thousands of scrapes without a token, or with a wrong one: the log has few lines."""
    at_once = _at_once(attacker.random)
    wrong = f"authorization: Bearer {attacker.random.randbytes(20).hex()}"
    attacker.pour(
        lambda: Repeats(b"", _get("/metrics", attacker.random.choice((wrong, "accept: */*"))), at_once),
        HTTP1Ear, connections=attacker.random.randint(20, 80), port=attacker.metrics,
    )  # fmt: skip


@attack("refused-calls", nightly=True, ends="status 40[13]|fin|reset", events=("operator request refused",), **_TOKEN)
def refused_calls(attacker: Attacker) -> None:
    """Calls of the operator plane that name another host, with long paths: few lines, each cut."""
    path = "/models/" + "x" * attacker.random.randint(10, 4000)
    asked = _get(path).replace(b"127.0.0.1", b"evil.example")
    attacker.pour(
        lambda: Repeats(b"", asked, _at_once(attacker.random)), HTTP1Ear, connections=attacker.random.randint(20, 80),
        port=attacker.operator,
    )  # fmt: skip


@attack("audit-lines", nightly=True, events=("operator request",), **_OPEN)
def audit(attacker: Attacker) -> None:
    """Changes that a stranger on this machine asks of an open plane, of models and streams that there are not."""
    asked = [
        f"POST /{what}/{attacker.random.randbytes(50).hex()}/{do} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 0\r\n\r\n".encode()
        for what, do in (("models", "load"), ("models", "unload"), ("streams", "end"))
    ]
    attacker.pour(
        lambda: Repeats(b"", attacker.random.choice(asked), _at_once(attacker.random)), HTTP1Ear,
        connections=attacker.random.randint(20, 80), port=attacker.operator,
    )  # fmt: skip


@attack("options-without-key", nightly=True, events=("exchange",))
def options(attacker: Attacker) -> None:
    """OPTIONS, metadata and probes on the data port: exchanges that are complete without a model."""
    asked = [
        f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode()
        for method, path in (
            ("OPTIONS", "/v2/models/identity/infer"),
            ("GET", "/v2"),
            ("GET", "/v2/health/ready"),
            ("OPTIONS", "*"),
        )
    ]
    attacker.pour(
        lambda: Repeats(b"", attacker.random.choice(asked), _at_once(attacker.random)), HTTP1Ear,
        connections=attacker.random.randint(5, 40),
    )  # fmt: skip
