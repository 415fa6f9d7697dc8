"""The scenarios of a fleet, and the promises that are checked in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np

from gateway.testing.fleet.clients import NEVER, NOWHERE, Flags
from gateway.testing.fleet.record import EACH, EVEN, FleetRecord
from gateway.testing.fleet.run import FleetRun
from gateway.testing.fleet.setup import AGE, FleetSetup

QUIET, AWAY, MODELS_AWAY = 60, 300, 30
"""Seconds before the first event, and for which a zone, a cell or all models are lost."""
MOST_LOAD = 0.8
"""Largest load of a cell."""
LONGEST = 60
"""Seconds within which every client is connected again."""
TOGETHER = 0.25
"""Share of clients that may try to connect in one second only once: when all have lost their connections."""
ECHO = 1.5
"""Bound on clients per second whose connections age together, relative to an even spread over the jitter."""


@final
@dataclass(frozen=True, kw_only=True)
class FleetScenario:
    """A scenario. `begin` schedules its events and returns the second from which the fleet is complete again."""

    told: str
    begin: Callable[[FleetRun], int]
    absent: float = 0.0
    loses: bool = True
    """True if the scenario itself loses streams."""


def _zone(fleet: FleetRun) -> int:
    return _gone_for_a_while(fleet, fleet.zone == 0)


def _cell(fleet: FleetRun) -> int:
    return _gone_for_a_while(fleet, fleet.cell == 0)


def _gone_for_a_while(fleet: FleetRun, where: Flags) -> int:
    pods = where & fleet.serving
    fleet.later(QUIET, partial(fleet.lose, pods))
    fleet.later(QUIET + AWAY, partial(fleet.start, pods))
    return QUIET + AWAY + fleet.setup.start


def _rollout(fleet: FleetRun) -> int:
    """Replace all pods of one cell, then those of all other cells at the same time."""
    setup = fleet.setup
    ready = setup.start + setup.min_ready
    period = max(ready, setup.pre_stop + setup.drain) + 2
    waves = -(-setup.pods // setup.surge)
    for stage, cells in enumerate((fleet.cell == 0, fleet.cell != 0)):
        begin = QUIET + stage * (waves * period + ready)
        for wave in range(waves):
            old = (fleet.slot // setup.surge == wave) & cells
            new = (fleet.slot // setup.surge == (wave + waves) % (waves + 2)) & cells
            fleet.later(begin + wave * period, partial(fleet.start, new))
            fleet.later(begin + wave * period + ready, partial(fleet.leave, old))
    return QUIET + 2 * (waves * period + ready)


def _storm(fleet: FleetRun) -> int:
    def strike() -> None:
        fleet.unavailable = fleet.now + MODELS_AWAY
        fleet.drop()

    fleet.later(QUIET, strike)
    return QUIET + MODELS_AWAY


def _age(fleet: FleetRun) -> int:
    fleet.later(QUIET, partial(fleet.start, fleet.absent))
    return QUIET + fleet.setup.start


SCENARIOS = {
    "zone": FleetScenario(told="one of three zones is lost, and comes back", begin=_zone),
    "cell": FleetScenario(told="a cell is lost, and comes back", begin=_cell),
    "rollout": FleetScenario(told="every pod is replaced, one cell first", begin=_rollout, loses=False),
    "storm": FleetScenario(told="all connections and models are lost, and all clients connect again at once", begin=_storm),
    "age": FleetScenario(told="a fifth of the pods is new", begin=_age, absent=0.2, loses=False),
}


@final
@dataclass(frozen=True, kw_only=True)
class FleetOutcome:
    """The result of one scenario with one seed."""

    scenario: str
    seed: int
    seconds: int
    balanced_after: int
    """Seconds from the moment at which the fleet is complete until it is in balance."""
    interrupted: int
    """Longest time during which some client was not connected."""
    problems: tuple[str, ...]
    record: FleetRecord


def play(name: str, setup: FleetSetup, seed: int) -> FleetOutcome:
    """Play a scenario until the fleet is in balance again, or must be, and check the promises. Raise KeyError for an unknown
    name. The same setup and seed always give the same outcome."""
    scenario = SCENARIOS[name]
    fleet = FleetRun(setup, seed, absent=scenario.absent)
    whole = scenario.begin(fleet)
    allowed = 2 * (setup.age or AGE)
    # connections that were opened together age together: run until they have
    fleet.run(whole + (setup.age or AGE) + setup.slow_stream)
    while _balanced_after(fleet, whole) + EACH >= fleet.now - whole and fleet.now < whole + allowed + EACH:
        fleet.run(EACH)
    balanced = _balanced_after(fleet, whole)
    interrupted = _interrupted(fleet)
    return FleetOutcome(
        scenario=name, seed=seed, seconds=fleet.now, balanced_after=balanced, interrupted=interrupted,
        problems=tuple(_problems(fleet, scenario, whole, balanced, interrupted)), record=fleet.record,
    )  # fmt: skip


def _balanced_after(fleet: FleetRun, whole: int) -> int:
    """Seconds from `whole` until the fleet is in balance and stays so."""
    record = fleet.record
    uneven = np.flatnonzero((np.array(record.spread) > EVEN) | (np.array(record.guests) > 0))
    last = (int(uneven[-1]) + 2) * EACH if len(uneven) else 0
    return max(0, last - whole)


def _interrupted(fleet: FleetRun) -> int:
    longest = now = 0
    for served in fleet.record.served:
        now = now + 1 if served < len(fleet.clients) else 0
        longest = max(longest, now)
    return longest


def _problems(fleet: FleetRun, scenario: FleetScenario, whole: int, balanced: int, interrupted: int) -> list[str]:
    setup, record, clients = fleet.setup, fleet.record, fleet.clients
    came, number = np.array(record.came), len(clients)
    allowed = 2 * (setup.age or AGE)
    together = int((came > TOGETHER * number).sum())
    # connections of one age: jitter spreads them over a tenth of the age
    most, echo = ECHO * number / (0.1 * (setup.age or AGE)), int(came[whole + LONGEST :].max(initial=0))
    connected = clients.pod != NOWHERE
    counted = np.bincount(clients.pod[connected], minlength=len(fleet.streams))
    checks = (
        (
            record.refused_though_it_fits == 0,
            f"{record.refused_though_it_fits} calls were refused although their cell had room",
        ),
        (max(record.fullest) <= MOST_LOAD, f"a cell reached {max(record.fullest):.0%} of its capacity"),
        (balanced <= allowed, f"pods are not in balance after {allowed} s"),
        (record.cut_fast == 0, f"{record.cut_fast} streams were cut whose clients do not read slowly"),
        (scenario.loses or record.lost == 0, f"{record.lost} streams were lost"),
        (record.unheard == 0, f"{record.unheard} connections were dropped by a full backlog"),
        (interrupted <= LONGEST, f"some client was not connected for {interrupted} s"),
        (together <= 1, f"more than {TOGETHER:.0%} of the clients connected in one second, {together} times"),
        (echo <= most, f"{echo} clients connected in one second because their connections had one age"),
        (bool((counted == fleet.streams).all()), "the counters of pods are wrong"),
        (bool((connected | (clients.due < NEVER)).all()), "a client is neither connected nor due"),
    )
    return [said for holds, said in checks if not holds]
