"""Messages that are short on the way and long to read, many at once: gRPC's fields, calls that need no key, coded JSON."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any, final

from hpack import Encoder

from benchmarks import requests
from benchmarks.load.connections import frame
from protocols.grpc.protobuf import encode_field
from tests.attacks.attack import attack
from tests.attacks.attacker import Attacker
from tests.attacks.ears import HTTP2Ear
from tests.attacks.programs.load import OPENING

_WINDOW, _FRAME = 65_535, 16_384
_ANY: Any = {"lines": 100_000, "stop": 3.0}
"""A line for each exchange that has reached a model."""
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_JSON = ("content-type", "application/json")
_CODED = (_JSON, ("content-encoding", "gzip"))


@final
class Asking(HTTP2Ear):
    """Requests on one HTTP/2 connection, of which so many are always in flight: each with the fields and the body that
    `make` gives. The connection's window is kept, so that it is a legal client."""

    opening = OPENING

    def __init__(self, make: Callable[[], tuple[Sequence[tuple[str, str]], bytes]], at_once: int) -> None:
        super().__init__()
        self._make, self._at_once, self._stream, self._room = make, at_once, 1, _WINDOW
        self._next: tuple[bytes, bytes] | None = None

    def more(self) -> tuple[bytes, int]:
        out = [self.replies()]
        while (self._stream >> 1) - self.answered < self._at_once:
            if self._next is None:
                fields, body = self._make()
                named = [(":method", "POST"), (":scheme", "http"), (":authority", "127.0.0.1"), *fields]
                self._next = Encoder().encode([(name, value, True) for name, value in named]), body
            head, body = self._next
            if len(body) > self._room:
                break
            self._room -= len(body)
            stream, self._stream, self._next = self._stream, self._stream + 2, None
            out.append(frame(1, 4, stream, head))
            pieces = range(0, max(len(body), 1), _FRAME)
            out += [frame(0, int(at == pieces[-1]), stream, body[at : at + _FRAME]) for at in pieces]
        return b"".join(out), len(out) - 1

    def take(self, data: bytes) -> None:
        given = self.window
        super().take(data)
        self._room += self.window - given


def grpc(path: str, message: bytes, *, coded: bool = True) -> tuple[Sequence[tuple[str, str]], bytes]:
    """A unary call, its message gzipped or not."""
    fields = [(":path", path), ("content-type", "application/grpc"), ("te", "trailers")]
    if coded:
        message, fields = _zipped(message), [*fields, ("grpc-encoding", "gzip")]
    return fields, struct.pack(">BI", coded, len(message)) + message


@cache
def _zipped(message: bytes) -> bytes:
    return gzip.compress(message, 6, mtime=0)


def _pour(
    attacker: Attacker, made: Sequence[tuple[Sequence[tuple[str, str]], bytes]], at_once: int, connections: int
) -> None:
    """The same few requests again and again, in an order of chance."""
    attacker.pour(lambda: Asking(lambda: attacker.random.choice(made), at_once), connections=connections)


# gRPC: messages of many fields


def _tensor(contents: bytes, shape: bytes, datatype: bytes = b"INT32") -> bytes:
    tensor = encode_field(1, b"x") + encode_field(2, datatype) + encode_field(3, shape) + encode_field(5, contents)
    return encode_field(1, b"identity") + encode_field(5, tensor)


_EMPTY = (b"\x0a\0", b"\x48\0", b"\x22\0", b"\x1a\0", b"\x12\0", b"\x4a\0")


@attack("grpc-fields", **_ANY)
def empty_fields(attacker: Attacker) -> None:
    """Fifty gRPC messages at once on a connection, each of a million empty fields, in 2 KB of gzip."""
    made = [grpc(_INFER, one * attacker.random.randint(800_000, 1_600_000)) for one in attacker.random.sample(_EMPTY, 3)]
    _pour(attacker, made, 50, attacker.random.randint(1, 3))


@attack("grpc-values", nightly=True, **_ANY)
def values(attacker: Attacker) -> None:
    """gRPC tensors of up to a million numbers or elements, each a field of its own, which are legal."""
    made = []
    for one, datatype in ((b"\x10\1", b"INT32"), (b"\x42\0", b"BYTES"), (b"\x08\1", b"BOOL")):
        count = attacker.random.randint(300_000, 990_000)
        made.append(grpc(_INFER, _tensor(one * count, _varint(count), datatype)))
    _pour(attacker, made, 20, 2)


@attack("grpc-parameters", nightly=True, **_ANY)
def parameters(attacker: Attacker) -> None:
    """gRPC messages of as many parameters as are read, with names of their own, and of more, everywhere they may stand."""
    made = []
    for count in (attacker.random.randint(1_000, 3_000), attacker.random.randint(4_000, 200_000)):
        entries = [encode_field(1, b"%06x" % number) + b"\x12\2\x08\1" for number in range(count)]
        made += [grpc(_INFER, b"".join([encode_field(4, entry) for entry in entries]))]
        within = encode_field(1, b"x") + b"".join([encode_field(4, entry) for entry in entries])
        made += [grpc(_INFER, encode_field(1, b"identity") + encode_field(5, within))]
        outputs = [encode_field(6, encode_field(1, b"%d" % n) + encode_field(2, entries[n])) for n in range(250)]
        made += [grpc(_INFER, encode_field(1, b"identity") + b"".join(outputs), coded=False)]
    _pour(attacker, made, 100, 3)


@attack("grpc-pieces", nightly=True, **_ANY)
def pieces(attacker: Attacker) -> None:
    """gRPC messages of a few thousand fields, plain, many at once: packed numbers in pieces, empty fields, long names."""
    size = attacker.random.randint(60, 63)
    made = [
        grpc(_INFER, _tensor(encode_field(2, b"\xff\1" * size) * 400, _varint(400 * size)), coded=False),
        grpc(_INFER, attacker.random.choice(_EMPTY) * attacker.random.randint(900, 2_000), coded=False),
        grpc(_INFER, encode_field(1, "é".encode() * attacker.random.randint(1_000, 30_000)), coded=False),
    ]
    _pour(attacker, made, 100, 4)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


# gRPC: calls that only name something


def _named(attacker: Attacker, path: str, *, coded: bool) -> tuple[Sequence[tuple[str, str]], bytes]:
    """A call of which the name is nothing but unknown fields, or is very long."""
    count = attacker.random.randint(10_000, 30_000)
    if attacker.random.random() < 0.5:
        return grpc(path, b"\x48\0" * (count * 3 if coded else count), coded=coded)
    return grpc(path, encode_field(1, b"x" * count), coded=coded)


@attack("grpc-health", nightly=True, **_ANY)
def health(attacker: Attacker) -> None:
    """Health checks of gRPC with tens of thousands of unknown fields, which need no key."""
    _pour(attacker, [_named(attacker, "/grpc.health.v1.Health/Check", coded=False) for _ in range(4)], 50, 4)


@attack("grpc-health-coded", nightly=True, **_ANY)
def coded_health(attacker: Attacker) -> None:
    """Health checks and watches of gRPC with tens of thousands of unknown fields, gzipped."""
    made = [_named(attacker, f"/grpc.health.v1.Health/{name}", coded=True) for name in ("Check", "Watch") for _ in range(3)]
    _pour(attacker, made, 100, 4)


@attack("grpc-names", nightly=True, **_ANY)
def names(attacker: Attacker) -> None:
    """Calls about the server and its models whose messages are as long as they may be, and longer."""
    made = []
    for name in ("ServerLive", "ServerReady", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"):
        path = f"/inference.GRPCInferenceService/{name}"
        made += [
            grpc(path, b"\x48\0" * attacker.random.randint(500, 2_048), coded=False),
            _named(attacker, path, coded=False),
        ]
    _pour(attacker, made, 100, 4)


@attack("grpc-symbols", nightly=True, **_ANY)
def symbols(attacker: Attacker) -> None:
    """Reflection: streams of requests that are empty, name files and symbols, or are nothing but unknown fields."""
    path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    fields = [(":path", path), ("content-type", "application/grpc"), ("te", "trailers")]
    some = [
        b"", encode_field(7, b""), encode_field(4, b"inference.GRPCInferenceService"), encode_field(3, b"no.proto"),
        b"\x48\0" * attacker.random.randint(400, 900), encode_field(4, b"x" * attacker.random.randint(1_000, 4_000)),
    ]  # fmt: skip
    made = []
    for message in some:
        one = struct.pack(">BI", 0, len(message)) + message
        made.append((fields, one * (attacker.random.randint(20_000, 60_000) // len(one))))
    _pour(attacker, made, 20, 4)


# JSON


_PATHS = (
    ("/v1/completions", b'{"model":"tokens","prompt":"x","max_tokens":1,"ignored":%b}'),
    ("/v1/chat/completions", b'{"model":"tokens","messages":[{"role":"user","content":"x"}],"max_tokens":1,"more":%b}'),
    ("/predictions/tokens", b'{"inputs":"x","parameters":{"max_new_tokens":1},"ignored":%b}'),
    ("/v2/models/tokens/generate", b'{"text_input":"x","max_tokens":1,"ignored":%b}'),
    ("/v2/models/identity/infer", b'{"inputs":[],"ignored":%b}'),
)
_DENSE = (b"[]", b"{}", b'{"":0}', b"1", b"1.5", b'"ab"', b"null")


def _text(random: Random, size: int, *, coded: bool) -> tuple[Sequence[tuple[str, str]], bytes]:
    """A request of so many bytes, dense in values of one kind."""
    path, body = random.choice(_PATHS)
    one = random.choice(_DENSE)
    text = body % b"[%b]" % b",".join([one] * (size // (len(one) + 1)))
    return [(":path", path), *(_CODED if coded else (_JSON,))], _zipped(text) if coded else text


@attack("json-coded", nightly=True, **_ANY)
def coded(attacker: Attacker) -> None:
    """Two hundred JSON bodies of 240 KB at once on a connection, each in a few KB of gzip."""
    made = [_text(attacker.random, attacker.random.randint(200_000, 260_000), coded=True) for _ in range(8)]
    _pour(attacker, made, 200, 1)


@attack("json-coded-small", growth=64, nightly=True, **_ANY)
def coded_small(attacker: Attacker) -> None:
    """Two hundred gzipped JSON bodies of some tens of KB at once on each of some connections. They cost their objects."""
    made = [_text(attacker.random, attacker.random.randint(3_000, 65_000), coded=True) for _ in range(12)]
    _pour(attacker, made, 200, attacker.random.randint(4, 8))


@attack("json-coded-large", growth=64, nightly=True, **_ANY)
def coded_large(attacker: Attacker) -> None:
    """Gzipped JSON bodies of 300 KB to 2 MB, a hundred at once on a connection."""
    made = [_text(attacker.random, attacker.random.randint(300_000, 2_000_000), coded=True) for _ in range(8)]
    _pour(attacker, made, 100, 2)


@attack("json-many", growth=64, nightly=True, **_ANY)
def many(attacker: Attacker) -> None:
    """Plain JSON bodies of 10 to 60 KB, a hundred at once on each of some connections, tensors among them."""
    made = [_text(attacker.random, attacker.random.randint(10_000, 60_000), coded=False) for _ in range(8)]
    for _ in range(3):
        count = attacker.random.randint(1_000, 12_000)
        tensor = {"name": "x", "datatype": "FP32", "shape": [count], "data": [0.5] * count}
        body = json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()
        made.append(([(":path", requests.INFER.decode()), _JSON], body))
    _pour(attacker, made, 100, attacker.random.randint(4, 8))
