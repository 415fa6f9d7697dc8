"""JSON that costs more than it weighs: dense in values, deep, of many strings, plain and compressed, on every JSON route."""

from __future__ import annotations

import gzip
import json
import struct
import threading
from collections.abc import Callable
from typing import Any

from benchmarks import requests
from gateway.config import LimitsConfig
from tests.attacks.attack import attack
from tests.attacks.attacker import Attacker
from tests.attacks.ears import WebSocketEar

MiB = 1024 * 1024
_AT_ONCE = 4
_BODIES: Any = {"growth": 32 + _AT_ONCE * 64, "lines": 100_000}
"""The bodies in flight, plain and compressed, and two more of each while it is read; and a line for each request."""
_JSON = ("content-type", "application/json")

# Each with a value that nobody asked for, or a parameter, in place of %b; and whether it takes compressed bodies.
_ROUTES = (
    ("/invocations?model_name=tokens", b'{"inputs":"x","ignored":%b}', True),
    ("/predictions/tokens", b'{"inputs":"x","parameters":{"more":%b}}', True),
    ("/predictions/tokens", b'{"messages":[{"role":"user","content":"x"}],"ignored":%b}', True),
    ("/models/tokens/invoke", b'{"inputs":"x","ignored":%b}', True),
    ("/endpoints/tokens/invocations", b'{"inputs":"x","ignored":%b}', False),
    ("/v1/chat/completions", b'{"model":"tokens","messages":[{"role":"user","content":"x"}],"ignored":%b}', True),
    ("/v1/completions", b'{"model":"tokens","prompt":"x","ignored":%b}', True),
    ("/v2/models/tokens/generate", b'{"text_input":"x","ignored":%b}', True),
    ("/v2/models/identity/generate", b'{"x":%b}', True),
    ("/v2/models/identity/infer", b'{"inputs":[],"ignored":%b}', True),
    ("/v2/models/identity/infer_stream", b'{"inputs":[],"parameters":{"more":%b}}', True),
)
_VALUES = LimitsConfig().json_values
_DENSE = (b"[]", b"{}", b'{"":0}', b"1", b"1.5", b'""', b'"ab"', b"null")


def _beyond(attacker: Attacker, size: int) -> bytes:
    """An array of so many bytes, or more, with more of something than may be."""
    one = attacker.random.choice(_DENSE)
    return b"[%b]" % b",".join([one] * max(size // (len(one) + 1), _VALUES + 1))


def _within(attacker: Attacker) -> bytes:
    """As many values as may be, of which as many as may be are objects."""
    return b"[%b]" % b",".join([b"{}"] * 99_000 + [attacker.random.choice(_DENSE[3:])] * 790_000)


def _deep(attacker: Attacker, size: int) -> bytes:
    """An array of so many bytes which is deeper than may be, in a way of its own."""
    opening, closing = attacker.random.choice(((b"[", b"]"), (b'{"":', b"}")))
    if attacker.random.random() < 0.5:
        depth = size // len(opening + closing)
        return opening * depth + b"0" + closing * depth
    row = opening * 70 + b"0" + closing * 70
    return b"[%b]" % b",".join([row] * (size // len(row)))


def _each(attacker: Attacker, value: Callable[[], bytes]) -> None:
    """Asks one route after another, several at once, half of them compressed, until the time is over."""

    def asking() -> None:
        while attacker.goes_on:
            path, body, compresses = attacker.random.choice(_ROUTES)
            text = body % value()
            fields = [_JSON]
            if not compresses:
                text = text if len(text) < 5 * MiB else body % b"[%b]" % (b"0," * 2 * MiB + b"0")
            elif attacker.random.random() < 0.5:
                text, fields = gzip.compress(text, 1), [_JSON, ("content-encoding", "gzip")]
            attacker.ask("POST", path, text, fields)
            attacker.did[path] += 1

    _several(asking)


def _several(run: Callable[[], None]) -> None:
    threads = [threading.Thread(target=run) for _ in range(_AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@attack("json-values", ends=r"status 4\d\d", **_BODIES)
def values(attacker: Attacker) -> None:
    """Bodies dense in empty arrays, small objects, numbers or strings, in ignored members."""
    _each(attacker, lambda: _beyond(attacker, attacker.random.randint(2, 12) * MiB))


@attack("json-depth", nightly=True, ends=r"status 4\d\d", **_BODIES)
def depth(attacker: Attacker) -> None:
    """Bodies of nested arrays and objects, once or in many rows."""
    _each(attacker, lambda: _deep(attacker, attacker.random.randint(1, 12) * MiB))


@attack("json-legal", nightly=True, ends=r"status (2|4)\d\d", growth=32 + _AT_ONCE * 80, after=32, lines=100_000)
def legal(attacker: Attacker) -> None:
    """Bodies with as many objects and values as allowed, which are read and charged."""
    _each(attacker, lambda: _within(attacker))


@attack("json-numbers", nightly=True, growth=32 + _AT_ONCE * 128, lines=100_000, ends=r"status (2|4)\d\d")
def numbers(attacker: Attacker) -> None:
    """Tensors of millions of numbers, flat and nested, in forms that are read fast and in others."""

    def asking() -> None:
        while attacker.goes_on:
            count = attacker.random.randint(1, 4) * 1_000_000
            datatype, one = attacker.random.choice(
                (("FP32", "1.5"), ("INT32", "1.0"), ("FP64", "1e300"), ("BOOL", "true"), ("INT8", "x"))
            )
            row, shape = attacker.random.choice(
                ((one, [count]), (f"[{one}]", [count, 1]), (f"[{one},{one}]", [count // 2, 2]))
            )
            data = ",".join([row] * shape[0])
            more = attacker.random.choice(("", ',"parameters":null'))
            entry = f'{{"name":"x","datatype":"{datatype}","shape":{shape},"data":[{data}]{more}}}'
            attacker.ask("POST", "/v2/models/identity/infer", f'{{"inputs":[{entry}]}}'.encode(), [_JSON])

    _several(asking)


@attack("json-messages", nightly=True, ends="open", **_BODIES)
def messages(attacker: Attacker) -> None:
    """WebSocket messages of v2, dense in values, each refused."""
    text = b'{"inputs":[],"ignored":%b}' % _beyond(attacker, 2 * MiB)
    message = b"\x81\xff" + len(text).to_bytes(8, "big") + bytes(4) + text  # a mask of zeros is one too
    opening = requests.upgrade().replace(b"/invocations-bidirectional-stream", b"/v2/models/identity/infer")

    class Dense:
        def __init__(self) -> None:
            self.opening = opening

        def more(self) -> tuple[bytes, int]:
            return message, 1

    attacker.pour(Dense, WebSocketEar, connections=2, every=0.2)


@attack("bytes-elements", nightly=True, ends=r"status (2|4)\d\d", growth=32 + _AT_ONCE * 112, after=16, lines=100_000)
def elements(attacker: Attacker) -> None:
    """BYTES tensors of a million short elements and of more, in binary and in JSON, for a model that passes them on."""

    def asking() -> None:
        while attacker.goes_on:
            count = attacker.random.choice((200_000, 1_000_000, 1_000_001, 3_000_000))
            entry: dict[str, Any] = {"name": "x", "datatype": "BYTES", "shape": [count]}
            if attacker.random.random() < 0.5:
                text = json.dumps({"inputs": [{**entry, "data": ["a"] * count}]}).encode()
                attacker.ask("POST", "/v2/models/identity/infer", text, [_JSON])
                continue
            data = attacker.random.choice((struct.pack("<I", 1) + b"a", struct.pack("<I", 0))) * count
            if attacker.random.random() < 0.3:
                data = data[:-1] + b"\xff"
            head = json.dumps({"inputs": [{**entry, "parameters": {"binary_data_size": len(data)}}]}).encode()
            length = ("inference-header-content-length", str(len(head)))
            attacker.ask("POST", "/v2/models/identity/infer", head + data, [length])

    _several(asking)


@attack("refusals", nightly=True, ends=r"status (2|4)\d\d", **_BODIES)
def refusals(attacker: Attacker) -> None:
    """Bodies with a mistake at their end: JSON, UTF-8, codings, numbers, members."""
    size = attacker.random.randint(4, 12) * MiB
    text = b"x" * size
    wrong = (
        b'{"inputs":"%b' % text, b'{"inputs":"%b\xff"}' % text, b'{"inputs":"%b","parameters":{"top_k":"a"}}' % text,
        b'{"messages":[{"role":"user","content":7}],"a":"%b"}' % text, b'{"prompt":7,"a":"%b"}' % text,
        b'{"text_input":7,"a":"%b"}' % text, b'{"inputs":[{"name":"%b"}]}' % text,
    )  # fmt: skip
    paths = [path for path, _, compresses in _ROUTES if compresses]

    def asking() -> None:
        while attacker.goes_on:
            body, fields = attacker.random.choice(wrong), [_JSON]
            if attacker.random.random() < 0.5:
                body, fields = (
                    gzip.compress(body, 1)[: -attacker.random.choice((0, 8)) or None],
                    [*fields, ("content-encoding", "gzip")],
                )
            attacker.ask("POST", attacker.random.choice(paths), body, fields)

    _several(asking)
