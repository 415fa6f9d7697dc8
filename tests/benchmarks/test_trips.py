"""The trips that `python -m benchmarks.trips` measures are made, and what they count is so."""

from __future__ import annotations

from typing import Any

import pytest
from trio.testing import MockClock

from benchmarks.trips import Trip, bidi_part, measured, text, v2_infer


@pytest.fixture
def autojump_clock() -> MockClock:
    return MockClock(autojump_threshold=0.01)


@pytest.mark.parametrize("way", [v2_infer, bidi_part, text])
async def test_a_trip_is_the_same_each_time(way: Any, autojump_clock: MockClock) -> None:
    first, again = await measured(way), await measured(way)
    assert first == again
    assert first["calls"] > first["modules"] > first["rooms"] > 5


async def test_a_change_is_counted_where_a_call_leads_elsewhere() -> None:
    trip = Trip()
    trip.modules = ["gateway.core.exchange", "gateway.core.runner", "gateway.gateway", "gateway.gateway"]
    told = {"calls": 4, "modules": 3, "rooms": 2, "changes of module": 2, "changes of room": 1}
    assert trip.told() == told
