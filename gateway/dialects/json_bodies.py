"""JSON in requests: the budget pays for its values before they are made, and long texts are read one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from gateway.codecs.threads import LONG, run_in_codec_thread
from gateway.config import LimitsConfig
from gateway.core.exchange import Exchange
from models.blocking import json_turn
from protocols.strict_json import cost_of

T = TypeVar("T")

_FREE = 2 * 1024  # bytes of the longest text whose values are not counted


async def read_json(exchange: Exchange, text: memoryview, limits: LimitsConfig, read: Callable[[], T]) -> T:
    """Calls `read`, which reads the text, and returns its result: here if the text is short, otherwise in a thread. The
    memory of the values is paid for before, until the exchange ends. Overloaded if the budget has no room."""
    size = len(text)
    if size <= LONG:
        if size > _FREE:
            cost = _cost(text, limits)
            if cost > size:
                exchange.making(cost)
        return read()
    async with json_turn():
        exchange.making(await run_in_codec_thread(partial(_cost, text, limits)))
        return await run_in_codec_thread(read)


def _cost(text: memoryview, limits: LimitsConfig) -> int:
    return cost_of(text, containers=limits.json_containers, values=limits.json_values)
