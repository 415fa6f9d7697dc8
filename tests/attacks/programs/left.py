"""Attacks by thousands of clients that come and go together, after which the server must keep nothing of them."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from typing import Any

from benchmarks import requests
from benchmarks.load.connections import frame
from tests.attacks.attack import attack
from tests.attacks.attacker import Attacker
from tests.attacks.programs.floods import block
from tests.attacks.programs.load import OPENING
from tests.attacks.programs.slow import client_hello

_MANY: Any = {"least": 25.0, "nightly": True, "fair": False, "lines": 20_000}
"""They hold what `costs.md` says of an idle connection, and good clients wait while thousands come at once."""
_HEARD = 100


def _come_and_go(attacker: Attacker, opening: bytes, most: int, *, answered: bool = True, tls_port: bool = False) -> None:
    """Opens so many connections, says that on each, hears the answers to the last of them, and closes them together."""
    began, lines = time.monotonic(), []
    with ExitStack() as held:
        for _ in range(most):
            try:
                line = held.enter_context(attacker.connect_raw() if tls_port else attacker.connect())
                line.sendall(opening)
            except OSError:
                attacker.did["not connected"] += 1
                continue
            lines.append(line)
            if time.monotonic() - began > attacker.seconds + 20:
                break
        attacker.did["connections"] += len(lines)
        if answered:
            for line in lines[-_HEARD:]:
                with suppress(OSError):
                    attacker.did["heard"] += bool(line.recv(1))


@attack("left-http1", growth=96, **_MANY)
def http1(attacker: Attacker) -> None:
    """Thousands of HTTP/1.1 connections with one request each, idle, and gone together."""
    _come_and_go(attacker, requests.infer_binary(16), attacker.random.randint(8000, 8900))


@attack("left-http2", growth=320, **_MANY)
def http2(attacker: Attacker) -> None:
    """Thousands of HTTP/2 connections, idle, and gone together."""
    _come_and_go(attacker, OPENING, attacker.random.randint(8000, 8900))


@attack("left-http2-streams", growth=96, **_MANY)
def streams(attacker: Attacker) -> None:
    """Connections with hundreds of open streams each, gone together."""
    head, most = block(), attacker.random.randint(150, 250)
    opened = b"".join(frame(1, 4, stream, head) for stream in range(1, 2 * most, 2))
    _come_and_go(attacker, OPENING + opened, attacker.random.randint(20, 30))


@attack("left-handshakes", growth=160, tls=True, **_MANY)
def half_open(attacker: Attacker) -> None:
    """Thousands of TLS handshakes that stop before their first byte, within it, or behind it, and are gone together."""
    hello = client_hello()
    said = attacker.random.choice((b"", hello[: attacker.random.randint(1, len(hello) - 1)], hello))
    _come_and_go(attacker, said, attacker.random.randint(8000, 8900), answered=said == hello, tls_port=True)
