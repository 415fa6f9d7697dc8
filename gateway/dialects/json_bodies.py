"""JSON in requests: the budget pays for its values before they are made, and long texts are read one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from gateway.codecs.threads import FREE, LONG, codec, long_codec, run_in_codec_thread
from gateway.codecs.turns import Stage, codec_turns
from gateway.config import LimitsConfig
from gateway.core.exchange import Exchange
from models.blocking import json_turn
from protocols.floods import HEAVY_JSON, SLOW_JSON
from protocols.json.strict import cost_of, is_slow

T = TypeVar("T")


async def read_json(exchange: Exchange, text: memoryview, limits: LimitsConfig, read: Callable[[], T]) -> T:
    """Calls `read`, which reads the text, and returns its result: here if the text is short, otherwise in a thread. The
    memory of the values is paid for before, until the exchange ends. Overloaded if the budget has no room."""
    size = len(text)
    if size <= FREE:
        return read()
    owner = exchange.owner
    if size <= LONG:

        def at_once() -> tuple[T] | None:
            cost = _cost(text, limits)
            if cost > size:
                exchange.making(cost)
            return None if cost > HEAVY_JSON or (cost > SLOW_JSON and is_slow(text)) else (read(),)

        if (done := await codec(size, at_once, owner, Stage.READ)) is not None:
            return done[0]
        return await long_codec(read, owner)
    async with codec_turns().in_thread(owner, Stage.READ), json_turn():
        exchange.making(await run_in_codec_thread(partial(_cost, text, limits)))
        return await run_in_codec_thread(read)


def _cost(text: memoryview, limits: LimitsConfig) -> int:
    return cost_of(text, containers=limits.json_containers, values=limits.json_values)
