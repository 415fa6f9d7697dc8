"""Which JSON libraries the codecs stand on: CPU microseconds to read and write what the gateway's requests look like.

    python -m benchmarks micro json-library

Measures our own strict reader, which is msgspec plus what RFC 8259 leaves open (depth, length of numbers, repeated
keys), msgspec, the standard library and orjson; and the numbers of tensors, which simdjson reads and orjson writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import orjson

from benchmarks.units import Case, repeated
from protocols.json import strict
from protocols.v2.numbers import read_numbers
from protocols.v2.tensors import from_json, to_json


def tensor(count: int) -> dict[str, Any]:
    values = np.random.default_rng(1).standard_normal(count).astype(np.float32)
    return {
        "inputs": [{"name": "input0", "shape": [1, count], "datatype": "FP32", "data": json.loads(to_json(values, "FP32"))}]
    }


TEXTS: dict[str, Any] = {
    "v2 head": {
        "id": "1",
        "inputs": [{"name": "input0", "shape": [1, 16], "datatype": "FP32", "parameters": {"binary_data_size": 64}}],
        "parameters": {"binary_data_output": True},
    },
    "16 numbers": tensor(16),
    "100k numbers": tensor(100_000),
    "token line": {"token": {"id": 763, "text": " in", "log_prob": -0.3270}, "generated_text": None, "details": None},
}


def write_with_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def libraries() -> dict[str, tuple[Callable[[bytes], object], Callable[[Any], bytes]]]:
    """How each reads and writes; ours writes with msgspec."""
    return {
        "strict_json": (partial(strict.loads, duplicates=False), msgspec.json.encode),
        "msgspec": (msgspec.json.decode, msgspec.json.encode),
        "json": (json.loads, write_with_json),
        "orjson": (orjson.loads, orjson.dumps),
    }


def numbers_to_a_tensor(name: str, text: bytes, count: int, datatype: str) -> Iterator[Case]:
    """A JSON array read into a tensor."""

    def by_lists(loads: Callable[[bytes], Any]) -> object:
        return from_json(datatype, (count,), loads(text), "x", numbers=True)

    yield Case(
        name=f"{name} to a tensor",
        costs={
            "json_numbers": repeated(partial(read_numbers, text, 0, len(text), datatype, (count,))),
            "msgspec and struct": repeated(partial(by_lists, msgspec.json.decode)),
            "orjson and struct": repeated(partial(by_lists, orjson.loads)),
        },
    )


def cases() -> Iterator[Case]:
    """Texts read and written by our strict reader and by JSON libraries, and the numbers of tensors."""
    for name, value in TEXTS.items():
        text = msgspec.json.encode(value)
        both = libraries()
        yield Case(
            name=f"read {name}, {len(text)} bytes",
            costs={library: repeated(partial(read, text)) for library, (read, _) in both.items()},
        )
        yield Case(
            name=f"write {name}",
            costs={
                library: repeated(partial(write, value)) for library, (_, write) in both.items() if library != "strict_json"
            },
        )
    for count in (16, 100_000):
        data = TEXTS["16 numbers" if count == 16 else "100k numbers"]["inputs"][0]["data"]
        array = from_json("FP32", (1, count), data, "x")
        yield from numbers_to_a_tensor(f"{count} numbers", msgspec.json.encode(data), count, "FP32")
        yield Case(
            name=f"a tensor of {count} to JSON",
            costs={
                "tensors": repeated(partial(to_json, array, "FP32")),
                "numpy and msgspec": repeated(lambda array=array: msgspec.json.encode(array.ravel().tolist())),  # type: ignore[misc]
            },
        )
    large = ",".join(["1e300"] * 10_000)
    yield from numbers_to_a_tensor("10000 numbers of 1e300", f"[{large}]".encode(), 10_000, "FP64")
