"""Clients that leave with much under way, all at once: streams of HTTP/2 and gRPC, WebSockets, calls that wait for a slot."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hpack import Encoder

from benchmarks import requests
from benchmarks.load.connections import frame
from tests.attacks.attack import attack
from tests.attacks.attacker import Attacker
from tests.attacks.ears import HTTP2Ear
from tests.attacks.programs.load import OPENING

_HELD: Any = {"growth": 160, "lines": 200_000, "least": 3.0, "stop": 3.0}
"""Ten thousand streams cost their objects; and a line for each exchange that had reached a model."""
_PING = frame(6, 0, 0, b"all sent")
_Fields = Sequence[tuple[str, str]]


def _asked(path: str, *more: tuple[str, str]) -> _Fields:
    return [(":method", "POST"), (":scheme", "http"), (":authority", "127.0.0.1"), (":path", path), *more]


def _sent(attacker: Attacker, streams: int, fields: _Fields, body: bytes, *, answered: bool = False) -> socket.socket | None:
    """A connection with so many streams under way, each with the first bytes of its body, and with `answered` a first message
    in return; None if the server ended it."""
    head = Encoder().encode([(name, value, True) for name, value in fields])
    line, ear = attacker.connect(), HTTP2Ear()
    line.sendall(OPENING)
    begun = b"".join(
        frame(1, 4, stream, head) + (frame(0, 0, stream, body) if body else b"") for stream in range(1, 2 * streams, 2)
    )
    with suppress(OSError):
        line.sendall(begun + _PING)
        heard = b""
        while (_PING[9:] not in heard or (answered and ear.counts["data"] < streams)) and attacker.goes_on:
            if not (data := line.recv(1 << 18)):
                return None
            ear.take(data)
            line.sendall(ear.replies())
            heard = heard if _PING[9:] in heard else heard[-8:] + data
        return line
    return None


def _leave_again_and_again(
    attacker: Attacker,
    fields: _Fields,
    body: bytes,
    leave: Callable[[socket.socket, int], None],
    streams: tuple[int, int],
    *,
    answered: bool = False,
) -> None:
    """Opens some ten connections with all their streams, leaves on all of them at once, and comes back."""
    while attacker.goes_on:
        lines: list[tuple[socket.socket, int]] = []
        for _ in range(attacker.random.randint(8, 12)):
            if attacker.goes_on:
                number = attacker.random.randint(*streams)
                line = _sent(attacker, number, fields, body, answered=answered)
                attacker.did["streams"] += number
                if line is not None:
                    lines.append((line, number))
        for line, number in lines:
            with suppress(OSError):
                leave(line, number)
        for line, _ in lines:
            line.close()
        attacker.did["rounds"] += 1
        attacker.sleep(0.2)


def _close(line: socket.socket, streams: int) -> None:
    """FIN."""
    line.close()


def _abort(line: socket.socket, streams: int) -> None:
    """RST of the connection."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()


def _reset_all(line: socket.socket, streams: int) -> None:
    """RST_STREAM for each stream, in one write."""
    line.sendall(b"".join(frame(3, 0, stream, (8).to_bytes(4, "big")) for stream in range(1, 2 * streams, 2)))


def _say_goodbye(line: socket.socket, streams: int) -> None:
    """GOAWAY, and half a close."""
    line.sendall(frame(7, 0, 0, bytes(8)))
    line.shutdown(socket.SHUT_WR)


def _break(line: socket.socket, streams: int) -> None:
    """A frame that no stream may have: the server ends the connection."""
    line.sendall(frame(0, 0, 0, b"x"))


_STREAM = _asked(
    "/inference.GRPCInferenceService/ModelStreamInfer", ("content-type", "application/grpc"), ("te", "trailers")
)
_UNFINISHED = _asked(requests.INFER.decode(), ("content-type", "application/json"), ("content-length", "100000"))


@attack("closed-streams", after=100, **_HELD)  # every day there is no time for a further round, as `reset-streams` has it
def closed(attacker: Attacker) -> None:
    """Ten connections with up to a thousand unary streams each, closed at once."""
    _leave_again_and_again(attacker, _UNFINISHED, b"{", _close, (700, 1000))


@attack("reset-streams", nightly=True, **_HELD)
def reset(attacker: Attacker) -> None:
    """Ten connections with up to a thousand unary streams each, all of which are reset in one write, or the connection is."""
    leave = attacker.random.choice((_reset_all, _abort))
    _leave_again_and_again(attacker, _UNFINISHED, b"{", leave, (300, 1000))


@attack("goodbye-streams", nightly=True, **_HELD)
def goodbye(attacker: Attacker) -> None:
    """Ten connections with up to a thousand unary streams each, which say GOAWAY and close, or break the protocol."""
    leave = attacker.random.choice((_say_goodbye, _break))
    _leave_again_and_again(attacker, _UNFINISHED, b"{", leave, (700, 1000))


@attack("closed-grpc", nightly=True, **_HELD)
def closed_grpc(attacker: Attacker) -> None:
    """Ten connections with hundreds of gRPC streams each, which wait for their first message, closed at once."""
    _leave_again_and_again(attacker, _STREAM, b"\0", attacker.random.choice((_close, _abort)), (300, 1000))


@attack("closed-grpc-answered", nightly=True, **{**_HELD, "growth": 110, "stop": 6.0})  # its streams outlast the drain
def closed_grpc_answered(attacker: Attacker) -> None:
    """Ten connections with hundreds of gRPC streams each, which wait for their second message, closed at once."""
    leave, message = attacker.random.choice((_close, _abort)), requests.call_message(16)
    _leave_again_and_again(attacker, _STREAM, message, leave, (700, 1000), answered=True)


@attack("closed-sessions", nightly=True, after=16, **_HELD)
def closed_sessions(attacker: Attacker) -> None:
    """Ten connections with hundreds of two-way event streams each, whose models wait, closed at once."""
    fields = _asked(requests.DUPLEX.decode(), ("content-type", "application/vnd.amazon.eventstream"))
    _leave_again_and_again(attacker, fields, b"", attacker.random.choice((_close, _abort, _break)), (300, 1000))


@attack("closed-waiting", nightly=True, models={"one": "benchmarks.served:naps"}, **_HELD)
def closed_waiting(attacker: Attacker) -> None:
    """Ten connections with hundreds of whole calls each that wait for a slot, or for their model, closed at once."""
    body = json.dumps({"model": "one", "prompt": "x", "max_tokens": 1}).encode()
    fields = _asked("/v1/completions", ("content-type", "application/json"), ("content-length", str(len(body))))
    _leave_again_and_again(attacker, fields, body, attacker.random.choice((_close, _abort)), (300, 1000))


@attack("closed-websockets", nightly=True, after=16, **_HELD)
def closed_websockets(attacker: Attacker) -> None:
    """Hundreds of WebSockets whose models wait, closed at once."""
    while attacker.goes_on:
        lines: list[socket.socket] = []
        for _ in range(attacker.random.randint(500, 1000)):
            if attacker.goes_on:
                lines.append(attacker.connect())
                lines[-1].sendall(requests.upgrade())
        for line in lines:
            line.settimeout(1.0)
            with suppress(OSError):
                if attacker.goes_on:
                    line.recv(4096)
        attacker.did["streams"] += len(lines)
        for line in lines:
            _abort(line, 1)
        attacker.did["rounds"] += 1
        attacker.sleep(0.2)
