"""JSON that a request brings: its values are paid for before they are made, and long texts are read one after the other."""

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

_FREE = 2 * 1024  # bytes of a text whose values nobody counts


async def read_json(exchange: Exchange, text: memoryview, limits: LimitsConfig, read: Callable[[], T]) -> T:
    """What `read` makes of a text: here if it is short, in a thread if the loop would feel it. What that takes is paid for
    before, and counts until the exchange ends. Overloaded where there is no memory for it."""
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
