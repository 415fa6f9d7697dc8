"""The trips that `python -m benchmarks.trips` measures are made, and what they count is so."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.trips import Trip, bidi_part, seen_from, text, v2_infer


@pytest.mark.parametrize("way", [v2_infer, bidi_part, text])
def test_a_trip_is_the_same_each_time(way: Any) -> None:
    first, again = seen_from(way), seen_from(way)
    assert first == again
    assert first["calls"] > first["modules"] > first["rooms"] > 5


async def test_a_change_is_counted_where_a_call_leads_elsewhere() -> None:
    trip = Trip()
    trip.modules = ["gateway.core.exchange", "gateway.core.runner", "gateway.gateway", "gateway.gateway"]
    told = {"calls": 4, "modules": 3, "rooms": 2, "changes of module": 2, "changes of room": 1}
    assert trip.told() == told
