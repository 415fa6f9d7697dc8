"""Without a key, or with a guessed one, on every wire and route; and pages of another site on every route that manages."""

from __future__ import annotations

from hashlib import sha256
from random import Random
from typing import Any, final

from hpack import Encoder

from benchmarks.load.connections import frame
from gateway.config import Config, SageMakerConfig, V2Config
from gateway.core.route import WEBSOCKET, Needs, Row
from gateway.gateway import Gateway
from tests.attacks.attack import attack
from tests.attacks.attacker import Attacker
from tests.attacks.ears import HTTP1Ear, HTTP2Ear, WebSocketEar
from tests.attacks.programs.load import OPENING

KEY = "ew_" + "g" * 43
_FILE = f"# the good clients'\ngood sha256:{sha256(KEY.encode()).hexdigest()} scope=control\n"
_GUARDED: Any = {
    "settings": ("access.keys_file={folder}/keys", "v2.model_control=true", "sagemaker.multi_model=true"),
    "files": {"keys": _FILE},
    "fields": (("x-api-key", KEY),),
    "counters": ("everywire_access_refusals_total",),
    "events": ("access refused",),
    "lines": 1_000_000,
}
"""A server with a key, which the good clients have. A line for each refusal is the log's to bound."""
_OPEN = _GUARDED | {
    "settings": ("v2.model_control=true", "sagemaker.multi_model=true"),
    "files": {},
    "fields": (),
}
_GIVEN = {"{name}": "identity", "{endpoint}": "echo", "{version}": "1", "{repository}": "r", "{region}": "x"}


def _rows() -> list[Row]:
    chosen = Config(v2=V2Config(model_control=True), sagemaker=SageMakerConfig(multi_model=True))
    return Gateway(chosen).router.rows


def _path(row: Row) -> str:
    path = "/any" if row.path == "*" else row.path
    for captured, value in _GIVEN.items():
        path = path.replace(captured, value)
    return path


def _guess(random: Random) -> str:
    return "ew_" + "".join(random.choices("abcdefghijklmnopqrstuvwxyz0123456789-_", k=43))


@final
class Guesses:
    """Requests of HTTP/1.1 with another key each, one behind the other."""

    opening = b""

    def __init__(self, random: Random) -> None:
        self._random = random

    def more(self) -> tuple[bytes, int]:
        asked = [
            f"GET /v2/models/identity HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {_guess(self._random)}\r\n\r\n"
            for _ in range(10)
        ]
        return "".join(asked).encode(), len(asked)


@final
class Guessed(HTTP2Ear):
    """Requests of HTTP/2 with another key each."""

    opening = OPENING

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random, self._stream, self._encoder = random, 1, Encoder()

    def more(self) -> tuple[bytes, int]:
        out = []
        for _ in range(10):
            fields = [(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/v2/models/identity")]
            head = self._encoder.encode([*fields, ("x-api-key", _guess(self._random))])
            out.append(frame(1, 5, self._stream, head))
            self._stream += 2
        return self.replies() + b"".join(out), len(out)


@final
class Knocks:
    """A handshake of a WebSocket that offers a guessed key as a subprotocol."""

    def __init__(self, random: Random) -> None:
        self.opening = (
            "GET /v2/models/identity/infer HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n"
            f"sec-websocket-protocol: real, everywire.key.{_guess(random)}\r\n\r\n"
        ).encode()

    def more(self) -> tuple[bytes, int]:
        return b"", 0


@attack("keys-guessed-http1", nightly=True, ends="status 401", **_GUARDED)
def guessed(attacker: Attacker) -> None:
    """Guessed keys over HTTP/1.1, as fast as they are refused: each connection ends after twenty."""
    attacker.pour(lambda: Guesses(attacker.random), HTTP1Ear, connections=attacker.random.randint(2, 8))


@attack("keys-guessed-http2", nightly=True, ends="goaway 0|fin|reset|open", **_GUARDED)
def guessed_http2(attacker: Attacker) -> None:
    """Guessed keys over HTTP/2, as fast as they are refused."""
    attacker.pour(lambda: Guessed(attacker.random), connections=attacker.random.randint(2, 8))


@attack("keys-guessed-websocket", nightly=True, ends="status 401|open", **_GUARDED)
def guessed_websocket(attacker: Attacker) -> None:
    """Guessed keys as subprotocols of WebSockets."""
    attacker.pour(lambda: Knocks(attacker.random), WebSocketEar, connections=attacker.random.randint(2, 8))


@attack("keys-bodies", nightly=True, ends="status 40[13]|reset", **_GUARDED)
def bodies(attacker: Attacker) -> None:
    """Large bodies with no key, on every route that takes one: none of them is taken."""
    rows = [row for row in _rows() if row.method == "POST"]
    while attacker.goes_on:
        row = attacker.random.choice(rows)
        attacker.ask("POST", _path(row), bytes(attacker.random.randint(1, 16) << 20))


@attack("keys-everywhere", ends="status 40[13]", **_GUARDED)
def everywhere(attacker: Attacker) -> None:
    """Every route there is, without a key and with a wrong one: health alone answers."""
    for row in _rows():
        if row.needs is Needs.NOTHING or row.method == WEBSOCKET or not attacker.goes_on:
            continue
        for fields in ((), (("x-api-key", _guess(attacker.random)),), (("authorization", "Basic !"),)):
            attacker.ask(row.method, _path(row), b"{}", fields)


@attack("pages-of-another-site", nightly=True, ends="status 403", **_OPEN)
def pages(attacker: Attacker) -> None:
    """A page of another site calls every control route with simple requests, which browsers send without a preflight."""
    managing = [row for row in _rows() if row.needs is Needs.CONTROL and row.method != "GET"]
    while attacker.goes_on:
        for row in managing:
            origin = attacker.random.choice(
                ("https://evil.example", "null", "http://127.0.0.1", "http://localhost.evil.example")
            )
            kind = attacker.random.choice(("text/plain", "application/x-www-form-urlencoded", "application/json"))
            site = attacker.random.choice(("cross-site", "same-site"))
            attacker.ask(
                row.method, _path(row), b"{}", [("origin", origin), ("content-type", kind), ("sec-fetch-site", site)]
            )
            attacker.did["asked"] += 1


@attack("pages-of-this-site", nightly=True, ends="status 415", **_OPEN)
def forms(attacker: Attacker) -> None:
    """A form on a page of this site calls every control route, which needs no preflight."""
    managing = [row for row in _rows() if row.needs is Needs.CONTROL and row.method != "GET"]
    while attacker.goes_on:
        for row in managing:
            own = ("origin", f"http://127.0.0.1:{attacker.port}")
            kind = attacker.random.choice(("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"))
            attacker.ask(row.method, _path(row), b"{}", [own, ("content-type", kind)])
