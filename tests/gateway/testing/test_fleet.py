"""The fleet in numbers: what must hold does under every seed, and each way to break it is found."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from gateway.cli import main, simulate_fleet
from gateway.cli.plan import plan
from gateway.testing.fleet.run import FleetRun
from gateway.testing.fleet.scenarios import SCENARIOS, play
from gateway.testing.fleet.setup import FleetSetup
from scripts import write_fleet_plots

ROOT = Path(__file__).parents[3]
SETUP = simulate_fleet.fleet_for(simulate_fleet.LOAD)


def test_the_fleet_is_what_the_plan_says_in_whole_cells() -> None:
    assert (SETUP.cells, SETUP.pods, SETUP.capacity) == (10, 100, 426)  # 1e6 / (50 x 46.9)
    assert SETUP.cells * SETUP.pods - SETUP.pods < plan(simulate_fleet.LOAD).pods <= SETUP.cells * SETUP.pods
    assert {*SCENARIOS, "all"} == set(main._FLEETS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_everything_holds(name: str) -> None:
    outcome = play(name, SETUP, 7)
    assert outcome.problems == ()
    assert 0 <= outcome.balanced_after < SETUP.age


FAULTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "no jitter": ("storm", {"jitter": 0.0}, ("in one second, 2 times", "connections had one age")),
    "no age": ("age", {"age": 0}, ("not in balance after 1200 s",)),
    "no age, and a zone comes back": ("zone", {"age": 0}, ("not in balance after 1200 s",)),
    "no zone to spare": ("zone", {"clients": 255_000}, ("a cell reached 9",)),
    "pods that drain before balancers know": ("rollout", {"pre_stop": 3}, ("although their cell had room",)),
    "a drain that is shorter than a stream": ("rollout", {"drain": 10}, ("streams were cut whose clients do not",)),
    "balancers that learn late": ("cell", {"noticed": 90}, ("some client was not connected for",)),
    "a short backlog": ("storm", {"accepts": 50, "backlog": 50}, ("dropped by a full backlog",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    name, changed, found = FAULTS[fault]
    problems = play(name, replace(SETUP, **changed), 7).problems
    assert [said for said in found if not any(said in problem for problem in problems)] == [], problems


def test_streams_that_a_rollout_loses_and_counters_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(self: FleetRun, pods: Any) -> None:
        self.lose(pods)
        self.streams[0] += 1

    monkeypatch.setattr(FleetRun, "leave", leave)
    problems = play("rollout", small(), 7).problems
    assert [said for said in ("streams were lost", "counters of pods") if not any(said in p for p in problems)] == []


def small(**changed: Any) -> FleetSetup:
    return FleetSetup(**{"clients": 3400, "capacity": 426, "cells": 2, "pods": 10, "surge": 1, **changed})


def test_one_seed_is_one_story() -> None:
    one, same, other = (play("zone", small(), seed) for seed in (3, 3, 4))
    assert vars(one.record) == vars(same.record)
    assert vars(one.record) != vars(other.record)


def test_a_full_cell_sends_clients_away_and_that_is_no_mistake() -> None:
    setup = small(clients=900, cells=1, pods=2)
    fleet = FleetRun(setup, 1, absent=0.5)  # the one pod that is there cannot have all of them
    assert fleet.streams.sum() == 900
    fleet.run(700)
    assert fleet.record.refused > 0
    assert fleet.record.refused_though_it_fits == 0
    assert fleet.streams.max() == setup.capacity
    assert fleet.record.served[-1] == setup.capacity
    assert np.count_nonzero(fleet.clients.pod < 0) == 900 - setup.capacity


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test in a folder that hides no package of ours."""
    monkeypatch.chdir(tmp_path)


def said(*words: str, status: int = 0) -> str:
    done = CliRunner().invoke(main.program, ["simulate", *words])
    assert done.exit_code == status, done.output
    return done.output


def test_the_command_tells_of_each_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_fleet, "fleet_for", lambda load: small())
    text = said("--fleet", "all", "--seeds", "0..1")
    assert text.startswith("20 pods in 2 cells, 3,400 clients, 426 streams fill a pod\n")
    assert text.count("2 seeds, none failed") == len(SCENARIOS)
    made = json.loads(said("--fleet", "cell", "--seeds", "5..5", "--json"))
    assert (made["scenario"], made["seed"], made["problems"]) == ("cell", 5, [])
    assert made["lost"] > 0


def test_the_command_shows_how_to_play_a_failure_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_fleet, "fleet_for", lambda load: small(age=0))
    text = said("--fleet", "age", "--seeds", "4..4", status=1)
    assert "again: python -m gateway simulate --fleet age --seeds 4..4: pods are not in balance after 1200 s" in text
    assert "1 seeds, 1 failed" in text


def test_what_a_fleet_does_not_know_is_refused() -> None:
    assert "--fleet" in said("--fleet", "flood", status=2)
    assert "leave out --trace and --twice" in said("--fleet", "zone", "--twice", status=2)


def test_the_plots_are_those_of_the_stored_figures() -> None:
    texts = write_fleet_plots.written()
    assert set(write_fleet_plots.FOLDER.glob("*.svg")) == texts.keys()
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, "run scripts/write_fleet_plots.py"


@pytest.mark.sweep
def test_the_stored_figures_are_what_is_played() -> None:
    stored = json.loads(write_fleet_plots.FIGURES.read_text(encoding="utf-8"))
    for name, lines in write_fleet_plots.figures().items():
        for line, before in zip(lines, stored[name], strict=True):
            # another numpy may deal otherwise from the same seed
            assert np.abs(np.array(line) - np.array(before)).max() <= 0.1 * write_fleet_plots.PLOTS[name].top, name


@pytest.mark.sweep
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("seed", range(8, 12))
def test_everything_holds_under_some_seeds(name: str, seed: int) -> None:
    assert play(name, SETUP, seed).problems == ()


@pytest.mark.soak
@pytest.mark.parametrize("name", SCENARIOS)
def test_everything_holds_under_a_hundred_seeds_and_the_page_has_the_worst(name: str) -> None:
    outcomes = [play(name, SETUP, seed) for seed in range(100)]
    assert {outcome.seed: outcome.problems for outcome in outcomes if outcome.problems} == {}
    page = (ROOT / "docs/howto/plan-capacity.md").read_text(encoding="utf-8")
    ((balanced, interrupted, fullest, came, cut),) = re.findall(
        rf"^\| `{name}` \| (\d+) s \| (\d+) s \| ([\d.]+) % \| ([\d,]+) \| ([\d,]+) \|", page, re.MULTILINE
    )
    assert max(outcome.balanced_after for outcome in outcomes) == pytest.approx(int(balanced), abs=30)
    assert max(outcome.interrupted for outcome in outcomes) == pytest.approx(int(interrupted), abs=3)
    assert max(max(outcome.record.fullest) for outcome in outcomes) == pytest.approx(float(fullest) / 100, abs=0.01)
    assert max(max(outcome.record.came) for outcome in outcomes) == pytest.approx(int(came.replace(",", "")), rel=0.1)
    assert max(outcome.record.cut for outcome in outcomes) == pytest.approx(int(cut.replace(",", "")), rel=0.02)
