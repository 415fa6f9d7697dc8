"""`everywire plan`: the arithmetic by hand, and that each figure is in the page that measured it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli.main import program
from gateway.cli.plan import KIB, MICROSECONDS, TLS, FleetLoad, plan

DOCS = Path(__file__).parents[3] / "docs"
PERFORMANCE = (DOCS / "explanation/performance.md").read_text(encoding="utf-8")


def said(*words: str) -> str:
    done = CliRunner().invoke(program, ["plan", *words])
    assert done.exit_code == 0, done.output
    return done.output


def refused(*words: str) -> str:
    done = CliRunner().invoke(program, ["plan", *words])
    assert done.exit_code == 2
    return done.output


def rows() -> dict[str, str]:
    """The first column of numbers of the first table that has other servers, by the name of the workload."""
    table = PERFORMANCE[PERFORMANCE.index("| workload | everywire | beside |") :].partition("\n\n")[0]
    return {name.strip(): figure for name, figure in re.findall(r"^\| ([^:|]+):[^|]*\| ([^|]*) \|", table, re.MULTILINE)}


@pytest.mark.parametrize(("row", "figure"), MICROSECONDS.values())
def test_a_unit_costs_what_was_measured(row: str, figure: float) -> None:
    assert float(rows()[row]) == figure


def test_memory_and_tls_are_what_was_measured() -> None:
    assert rows()["w7-ws, w7-h2"] == f"{KIB['websocket']}, {KIB['http2']}"
    assert f"{TLS} times" in PERFORMANCE


def test_paced_tokens_are_bound_by_cpu() -> None:
    made = plan(FleetLoad(traffic="tokens", wire="http1", streams=1_000_000, rate=50, zones=1, surge=0))
    # 50 million tokens a second, 46.9 us each
    assert made.cores == pytest.approx(2345)
    assert (made.by_cpu, made.by_memory, made.pods) == (3909, 10, 3909)


def test_the_load_of_one_core_is_one_pod_and_a_little_more_is_two() -> None:
    assert plan(FleetLoad(traffic="infer", wire="http1", streams=1, rate=0.6e6 / 25.9)).needed == 1
    assert plan(FleetLoad(traffic="infer", wire="http1", streams=1, rate=0.6e6 / 25.9 + 1)).needed == 2


def test_silent_streams_are_bound_by_memory_and_sessions_by_capacity() -> None:
    silent = FleetLoad(traffic="duplex", wire="websocket", streams=1_000_000, rate=0)
    assert (plan(silent).by_cpu, plan(silent).by_memory) == (1, 10)
    held = FleetLoad(traffic="tokens", wire="http1", streams=1000, rate=20, capacity=64)
    assert (plan(held).by_cpu, plan(held).by_capacity, plan(held).needed) == (2, 16, 16)


@pytest.mark.parametrize(("zones", "more"), [(1, 0), (2, 10), (3, 5), (4, 4)])
def test_without_a_zone_the_others_carry_everything(zones: int, more: int) -> None:
    made = plan(FleetLoad(traffic="tokens", wire="http1", streams=10, rate=0, capacity=1, zones=zones))
    assert (made.needed, made.for_a_zone, made.pods) == (10, more, 10 + more + 1)
    if zones > 1:
        assert (made.needed + made.for_a_zone) * (zones - 1) / zones >= made.needed


def test_tls_and_the_share_of_a_core_count() -> None:
    clear = FleetLoad(traffic="infer", wire="http2", streams=1, rate=1e6)
    assert plan(clear).by_cpu == 70  # 41.5 cores, of which each pod has 0.6
    assert plan(FleetLoad(**{**vars_of(clear), "tls": True})).by_cpu == 93
    assert plan(FleetLoad(**{**vars_of(clear), "share": 100})).by_cpu == 42


def vars_of(load: FleetLoad) -> dict[str, object]:
    return {name: getattr(load, name) for name in ("traffic", "wire", "streams", "rate")}


def test_the_command_tells_of_its_inputs_and_of_the_row() -> None:
    text = said("--streams", "256", "--rate", "50")
    assert "256 streams x 50/s x 46.9 us = 0.6 cores  (w4-paced-256)" in text
    assert text.endswith("pods:     4\n")
    made = json.loads(said("--traffic", "duplex", "--streams", "5000", "--rate", "50", "--json"))
    assert (made["wire"], made["by_cpu"], made["pods"]) == ("http2", 8, 13)


def test_what_nobody_has_measured_is_refused() -> None:
    wrong = refused("--traffic", "infer", "--wire", "websocket", "--streams", "1", "--rate", "1")
    assert "--traffic infer was measured over http1 or http2, not over websocket" in wrong
    assert "--rate" in refused("--streams", "1", "--rate", "nan")
    assert "--streams" in refused("--streams", "0", "--rate", "1")


def test_the_page_has_the_figures_and_what_they_come_to() -> None:
    page = (DOCS / "howto/plan-capacity.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `([\w-]+)(?: --wire (\w+))?` \| [^|]* \| ([\d.]+) \| ([\d,]+)", page, re.MULTILINE)
    default = {"duplex": "http2"}
    seen = {(traffic, wire or default.get(traffic, "http1")): (float(us), units) for traffic, wire, us, units in table}
    assert {of: us for of, (us, _) in seen.items()} == {of: us for of, (_, us) in MICROSECONDS.items()}
    for us, units in seen.values():
        assert int(units.replace(",", "")) == pytest.approx(0.6e6 / us, rel=0.035)
