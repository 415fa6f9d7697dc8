"""Uploads that stop shortly before their end: they keep the memory they have only as long as nobody else needs it."""

from __future__ import annotations

import json
import socket
from contextlib import suppress

from benchmarks import requests
from tests.attacks.attack import attack
from tests.attacks.attacker import Attacker

MiB = 1024 * 1024
_SETTINGS = ("limits.total_bytes=512MiB", "limits.body=256MiB")
_CALL = 64 * MiB


def _stalled(attacker: Attacker, size: int) -> socket.socket:
    """An upload of so many bytes, of which the last one never comes, or as many as the server takes."""
    line = attacker.connect()
    line.settimeout(2.0)
    with suppress(OSError):
        head = b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n"
        line.sendall(head % (requests.INFER, size))
        left, piece = size - 1, bytes(MiB)
        while left and attacker.goes_on:
            left -= line.send(piece[:left])
    return line


def _call(attacker: Attacker) -> int:
    """Another party's call of 64 MiB; its status."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [_CALL // 4], "parameters": {"binary_data_size": _CALL}}
    head = json.dumps({"inputs": [tensor]}).encode()
    fields = [("inference-header-content-length", str(len(head)))]
    status, _ = attacker.ask("POST", requests.INFER.decode(), head + bytes(_CALL), fields)
    attacker.did[f"call {status}"] += 1
    return status


@attack("stalled-upload", settings=_SETTINGS, growth=512, after=32, least=3.0, stop=3.0)
def upload(attacker: Attacker) -> None:
    """An upload of most of what one party may have, which stops, and calls of 64 MiB of other parties, which are answered."""
    line = _stalled(attacker, attacker.random.randint(160, 180) * MiB)
    while attacker.goes_on:
        assert _call(attacker) == 200
        attacker.sleep(0.5)
    line.close()


@attack(
    "stalled-uploads", settings=_SETTINGS, growth=640, after=32, least=8.0, stop=3.0, nightly=True, fair=False, lines=1000
)
def uploads(attacker: Attacker) -> None:
    """Uploads that fill most of all memory and stop: each is ended as soon as others are refused memory. Those come again."""
    lines = [_stalled(attacker, attacker.random.randint(120, 250) * MiB) for _ in range(attacker.random.randint(4, 6))]
    while attacker.goes_on:
        answered = _call(attacker) == 200
        attacker.sleep(0.5)
    assert answered, "calls of 64 MiB are still refused"
    for line in lines:
        line.close()
