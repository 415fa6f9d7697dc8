"""Which JSON library the codecs stand on: CPU microseconds to read and write what the gateway's requests look like.

    python -m benchmarks.json_library

Measures msgspec, the standard library and, where it is installed, orjson; and our own strict reader, which is msgspec
plus what RFC 8259 leaves open (depth, length of numbers, repeated keys). Best of several rounds, in process CPU time.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from protocols import strict_json
from protocols.tensors import from_json, to_json

ROUNDS = 7
ROUND_SECONDS = 0.05


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


def cost(call: Callable[[], object]) -> float:
    """CPU microseconds of one call."""
    count, best = 1, float("inf")
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(count):
            call()
        spent = time.process_time() - started
        best = min(best, spent / count)
        count = max(1, int(ROUND_SECONDS / best))
    return best * 1e6


def write_with_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def libraries() -> dict[str, tuple[Callable[[bytes], object], Callable[[Any], bytes]]]:
    found: dict[str, tuple[Callable[[bytes], object], Callable[[Any], bytes]]] = {
        "msgspec": (msgspec.json.decode, msgspec.json.encode),
        "json": (json.loads, write_with_json),
    }
    if importlib.util.find_spec("orjson"):
        orjson = importlib.import_module("orjson")
        found["orjson"] = (orjson.loads, orjson.dumps)
    found["strict_json"] = (partial(strict_json.loads, duplicates=False), msgspec.json.encode)
    return found


def main() -> None:
    print(f"{'text':>13} {'bytes':>9} {'library':>12} {'read us':>10} {'write us':>10}")
    for name, value in TEXTS.items():
        text = msgspec.json.encode(value)
        for library, (read, write) in libraries().items():
            reading = cost(partial(read, text))
            writing = cost(partial(write, value))
            print(f"{name:>13} {len(text):>9} {library:>12} {reading:>10.2f} {writing:>10.2f}")
    for count in (16, 100_000):
        data = TEXTS["16 numbers" if count == 16 else "100k numbers"]["inputs"][0]["data"]
        array = from_json("FP32", (1, count), data, "x")
        to_array = cost(partial(from_json, "FP32", (1, count), data, "x"))
        to_text = cost(partial(to_json, array, "FP32"))
        print(f"{f'{count} floats':>13} {'':>9} {'tensors':>12} {to_array:>10.2f} {to_text:>10.2f}")


if __name__ == "__main__":
    main()
