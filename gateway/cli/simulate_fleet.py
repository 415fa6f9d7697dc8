"""The command `everywire simulate --fleet`: play scenarios of a fleet, whose size `everywire plan` computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from gateway.cli.plan import FleetLoad, plan
from gateway.testing.fleet.scenarios import SCENARIOS, FleetOutcome, play
from gateway.testing.fleet.setup import FleetSetup

LOAD = FleetLoad(traffic="tokens", wire="http1", streams=170_000, rate=50)
"""The load of the fleet. The plan includes a spare zone, as by default."""
_CELL = 100


def fleet_for(load: FleetLoad) -> FleetSetup:
    """The planned pods, rounded up to whole cells. A pod's capacity is the number of streams that use all of its core."""
    made = plan(load)
    return FleetSetup(
        clients=load.streams, capacity=int(1e6 / (load.rate * made.microseconds)), cells=-(-made.pods // _CELL), pods=_CELL
    )


def run(fleet: str, seeds: range, echo: Callable[[str], None], *, as_json: bool) -> int:
    """Plays one scenario, or all, with each seed. Returns the exit status: 1 if a promise was broken, otherwise 0."""
    setup = fleet_for(LOAD)
    if not as_json:
        pods = setup.cells * setup.pods
        echo(f"{pods:,} pods in {setup.cells} cells, {setup.clients:,} clients, {setup.capacity} streams fill a pod")
    failed = False
    for name in SCENARIOS if fleet == "all" else (fleet,):
        played = []
        for seed in seeds:
            outcome = play(name, setup, seed)
            failed = failed or bool(outcome.problems)
            if as_json:
                echo(json.dumps(told(outcome)))
                continue
            played.append(outcome)
            for problem in outcome.problems:
                echo(
                    f"seed {seed} failed; again: python -m gateway simulate --fleet {name} --seeds {seed}..{seed}: {problem}"
                )
        if played:
            _sum_up(name, played, setup, echo)
    return 1 if failed else 0


def told(outcome: FleetOutcome) -> dict[str, Any]:
    """The outcome as one JSON object."""
    record = outcome.record
    return {
        "scenario": outcome.scenario, "seed": outcome.seed, "seconds": outcome.seconds,
        "balanced_after": outcome.balanced_after, "interrupted": outcome.interrupted,
        "fullest_cell": round(max(record.fullest), 3), "came_at_most": max(record.came), "refused": record.refused,
        "sent_away": record.sent_away, "lost": record.lost, "cut": record.cut, "problems": list(outcome.problems),
    }  # fmt: skip


def _sum_up(name: str, played: list[FleetOutcome], setup: FleetSetup, echo: Callable[[str], None]) -> None:
    records = [outcome.record for outcome in played]
    failed = sum(bool(outcome.problems) for outcome in played)
    balanced, interrupted = max(o.balanced_after for o in played), max(o.interrupted for o in played)
    fullest, came = max(max(record.fullest) for record in records), max(max(record.came) for record in records)
    lost, cut, refused = (max(getattr(record, of) for record in records) for of in ("lost", "cut", "refused"))
    echo(f"{name}: {SCENARIOS[name].told}")
    echo(f"  {len(played)} seeds, {failed or 'none'} failed; at worst:")
    echo(f"  in balance after {balanced} s, of {2 * setup.age} allowed; some client not connected for {interrupted} s")
    echo(f"  fullest cell {fullest:.1%}; {came:,} clients connected in one second; {refused:,} refused")
    echo(f"  {lost:,} streams lost, {cut:,} cut by a drain")
