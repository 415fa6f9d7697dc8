"""TLS records that carry nothing: new keys asked for again and again, empty records, and both between bytes of a request."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from tests.attacks.attack import attack
from tests.attacks.attacker import Attacker
from tests.tls_records import ForgingClient, Records

_FLOODS: Any = {
    "tls": True, "ends": "fin|reset", "within": 5.0, "events": ("flood",), "growth": 48,
    "counters": ('everywire_floods_total{kind="records",wire="tls"}',),
}  # fmt: skip
"""A connection of TLS holds some 100 KiB, and dozens are open at once."""

Piece = Callable[[Records], tuple[bytes, int]]
"""Makes the next bytes, and says how many of their records are empty of payload."""


def _handshake(sock: socket.socket) -> Records:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = ForgingClient(context)
    try:
        done, out = client.shake_hands()
        while True:
            sock.sendall(out)
            if done:
                return client.records()
            done, out = client.shake_hands(sock.recv(65536))
    finally:
        client.close()


def _pour(attacker: Attacker, piece: Piece, *, connections: int, reads: bool) -> None:
    """Sends pieces on all connections in turn, as fast as the server takes them, and opens another for each that it ends."""
    live: list[Iterator[None]] = []
    while attacker.goes_on:
        while len(live) < connections:
            live.append(_one(attacker, piece, reads))
        for line in list(live):
            if next(line, True):
                live.remove(line)
    for line in live:
        line.close()  # type: ignore[attr-defined]


def _one(attacker: Attacker, piece: Piece, reads: bool) -> Iterator[None]:
    """One connection: a step for each piece, until it is ended."""
    began, frames, by = time.monotonic(), 0, "reset"
    try:
        with attacker.connect_raw() as sock:
            records, due = _handshake(sock), b""
            sock.setblocking(False)
            while True:
                if not due:
                    due, count = piece(records)
                    frames += count
                with suppress(BlockingIOError):
                    due = due[sock.send(due) :]
                if reads:
                    with suppress(BlockingIOError):
                        if not sock.recv(65536):
                            by = "fin"
                            return
                yield
    except GeneratorExit:
        by = attacker.still_open(began)
    except OSError:
        pass
    finally:
        attacker.ended(by, frames=frames, seconds=time.monotonic() - began)


def _updates(attacker: Attacker, *, answered: bool) -> Piece:
    count = attacker.random.randint(20, 120)
    return lambda records: (b"".join(records.key_update(answered=answered) for _ in range(count)), count)


@attack("tls-key-updates", **_FLOODS)
def key_updates(attacker: Attacker) -> None:
    """KeyUpdates that ask for one in return, on connections that read nothing."""
    _pour(attacker, _updates(attacker, answered=True), connections=attacker.random.randint(1, 8), reads=False)


@attack("tls-key-updates-silent", nightly=True, **_FLOODS)
def silent_key_updates(attacker: Attacker) -> None:
    """KeyUpdates that ask for no answer, on connections that read."""
    _pour(attacker, _updates(attacker, answered=False), connections=attacker.random.randint(1, 8), reads=True)


@attack("tls-empty-records", nightly=True, **_FLOODS)
def empty_records(attacker: Attacker) -> None:
    """Empty records, as many in a row as OpenSSL takes, each row before a byte of an endless head."""
    row = attacker.random.randint(10, 31)

    def piece(records: Records) -> tuple[bytes, int]:
        return b"".join(records.record(b"") for _ in range(row)) + records.record(b"a"), row

    _pour(attacker, piece, connections=attacker.random.randint(1, 8), reads=True)


@attack("tls-key-updates-in-a-request", nightly=True, **_FLOODS)
def updates_in_a_request(attacker: Attacker) -> None:
    """KeyUpdates before each byte of a body that is dripped."""
    row = attacker.random.randint(2, 20)
    head = b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: there\r\nContent-Length: 1000000\r\n\r\n"
    begun: set[int] = set()

    def piece(records: Records) -> tuple[bytes, int]:
        first = b"" if id(records) in begun else records.record(head)
        begun.add(id(records))
        return first + b"".join(records.key_update() for _ in range(row)) + records.record(b" "), row

    _pour(attacker, piece, connections=attacker.random.randint(1, 8), reads=True)
