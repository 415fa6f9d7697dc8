"""A JSON text that only the slower decoder reads exactly is read in a thread, though its values are few."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.codecs.threads import LONG
from gateway.config import LimitsConfig
from gateway.core.exchange import Exchange
from gateway.dialects import json_bodies
from protocols.json import strict

BEYOND_64_BITS = b"12345678901234567890"


@pytest.mark.parametrize(
    ("integer", "floats", "threads"), [(BEYOND_64_BITS, 15_000, 1), (b"1", 15_000, 0), (BEYOND_64_BITS, 2000, 0)]
)
async def test_many_numbers_beside_a_long_integer_are_read_in_a_thread(
    integer: bytes, floats: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = 0

    async def long_codec(call: Any, owner: object) -> Any:
        nonlocal begun
        begun += 1
        return call()

    monkeypatch.setattr(json_bodies, "long_codec", long_codec)
    text = b"[%b%b]" % (b"1e3," * floats, integer)
    assert len(text) <= LONG
    exchange = cast(Exchange, SimpleNamespace(owner=object(), making=lambda cost: None))
    read = partial(strict.loads, text)
    assert (await json_bodies.read_json(exchange, memoryview(text), LimitsConfig(), read))[-1] == int(integer)
    assert begun == threads
