"""Stories for the cancel sweep whose models run in processes, and what befalls a process at each of its steps."""

from __future__ import annotations

from dataclasses import replace

from gateway.testing import MemoryPlace
from tests.gateway.sweep_batched import BATCHED
from tests.gateway.sweep_scenarios import ONE_OF_EACH, Scenario

_WIDE, _NARROW = MemoryPlace(), MemoryPlace(capacity=700, piece=300, rest=0.0002, notice=0.003)


def _there(scenario: Scenario, place: MemoryPlace = _WIDE) -> Scenario:
    return replace(scenario, name=f"process-{scenario.name}", place=place)


PROCESSES: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        _there(ONE_OF_EACH["v2"]),
        _there(ONE_OF_EACH["lmi"], _NARROW),
        _there(ONE_OF_EACH["threads"]),
        _there(ONE_OF_EACH["queue"]),
        _there(ONE_OF_EACH["bidi"], _NARROW),
        _there(ONE_OF_EACH["websocket"]),
        _there(ONE_OF_EACH["rude"]),
        _there(BATCHED["rolling"]),
    )
}
