"""One group of unit costs and one workload, run as anyone would; what they cost is not judged here."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import culprits, faults, neighbours, processes, servers, spans, stalled
from benchmarks.against import changed
from benchmarks.cli import program
from benchmarks.comparison import compare, load
from benchmarks.workloads import WORKLOADS


def test_unit_costs_are_printed_and_written(tmp_path: Path) -> None:
    file = tmp_path / "micro.json"
    done = CliRunner().invoke(program, ["micro", "lmi", "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert "token's line" in done.output
    (unit,) = json.loads(file.read_text())["micro"]
    assert unit["microseconds"]["TextEncoder"] > 0


@pytest.mark.programs
def test_a_server_and_its_floor_are_measured_side_by_side() -> None:
    workload = WORKLOADS["tokens-64"]
    ours, floor = compare(workload, seconds=0.3, rounds=1, programs=(servers.EVERYWIRE, servers.HTTP1))
    assert (ours.server, floor.server) == ("everywire", "http1")
    assert ours.median > 0 < floor.median
    assert ours.ratio is not None


@pytest.mark.programs
def test_a_round_is_not_over_before_each_connection_had_its_answers() -> None:
    with servers.started(servers.HTTP1) as server:
        result = load(WORKLOADS["unary-64"].plan(server, seconds=0.001, core=None))
    assert result.units >= 8 * 64


@pytest.mark.programs
def test_two_checkouts_are_measured_in_turns() -> None:
    found = changed(servers.ROOT, "unary-h2-64", seconds=0.2, rounds=2)
    assert found.there > 0 < found.here
    assert len(found.percents) == 2


@pytest.mark.programs
@pytest.mark.parametrize("load", ["resets", "pipelined", "messages"])
def test_what_a_client_waits_beside_another_is_measured(load: str) -> None:
    kept, fresh = neighbours.measure(load, seconds=0.3)
    assert (kept.load, kept.connection, fresh.connection) == (load, "kept", "fresh")
    for waits in (kept, fresh):
        assert waits.asked > 0
        assert 0 < waits.median <= waits.p99 <= waits.worst


@pytest.mark.programs
@pytest.mark.parametrize("load", culprits.LOADS)
def test_the_verdict_names_the_culprit_of_a_load(load: str) -> None:
    assert culprits.measure(load, well=0, holds=0).named


@pytest.mark.programs
def test_a_culprit_that_is_not_named_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(culprits, "PATIENCE", 0.5)
    monkeypatch.setitem(culprits.LOADS, "full-queue", (lambda port: [], "refusing", "naps"))
    done = CliRunner().invoke(program, ["culprits", "full-queue"])
    assert done.exit_code == 1
    assert "the verdict does not name the culprit of full-queue" in done.output


@pytest.mark.programs
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
@pytest.mark.parametrize("name", ["http1", "http2"])
def test_clients_that_read_nothing_park_their_model_and_those_beyond_its_slots_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalled, "_LOOKS", 2)
    series = stalled.measure(name, (0, 4, 8), capacity=6)
    assert [(point.readers, point.parked, point.refused) for point in series.points] == [(0, 0, 0), (4, 4, 0), (8, 6, 2)]
    first, *_, last = series.points
    assert (first.queued, first.kernel) == (0, 0)
    assert last.queued is not None
    assert last.queued >= 6 * 14 * 1024  # each stream's own are 16 KiB at least; a token has 2 KB
    assert last.refusals == {"queue-full": 2}
    assert len(stalled.cells(series)) == 3


@pytest.mark.programs
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_a_server_that_is_not_installed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalled, "_LOOKS", 2)
    monkeypatch.setattr(stalled, "find_spec", lambda name: None)
    file = tmp_path / "stalled.json"
    done = CliRunner().invoke(
        program, ["stalled", "litserve", "http1", "--readers", "0", "--readers", "2", "--json", str(file)]
    )
    assert done.exit_code == 0, done.output
    assert "without litserve: litserve is not installed" in done.output
    (series,) = json.loads(file.read_text())["series"]
    assert [point["parked"] for point in series["points"]] == [0, 2]
    assert series["points"][1]["kernel"] > 0


_LOST = "the process of model '{}' ended; try again"


@pytest.mark.programs
@pytest.mark.parametrize("fault", faults.FAULTS)
def test_a_model_that_does_its_worst_in_a_process_hurts_nobody_else(fault: str) -> None:
    (row,) = faults.measure([fault], note=lambda text: None)
    assert row.lost == 0
    endings = {ending.partition("; incident")[0]: count for ending, count in row.endings.items()}
    lost = _LOST.format(fault)
    assert endings == {
        "crash": {lost: 6}, "kill": {lost: 5}, "hang": {lost: 6}, "deaf": {lost: 5, "left": 1},
        "gil": {"goes on": 5, "complete": 1}, "memory": {"goes on": 5, "the model ran out of memory": 1},
    }[fault]  # fmt: skip


@pytest.mark.programs
def test_what_a_process_costs_a_model_is_measured() -> None:
    cost = processes.cost(processes.CASES["unary"], seconds=0.3, rounds=1)
    assert min(cost.here, cost.front, cost.child) > 0


@pytest.mark.skipif(sys.version_info < (3, 12), reason="bytecodes are counted by sys.monitoring")
def test_what_spans_cost_is_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(spans, "REQUESTS", 8)
    monkeypatch.setattr(spans, "TOKENS", 2)
    spans.main()
    lines = capsys.readouterr().out.splitlines()
    requests = [line for line in lines if "beside" in line]
    assert (len(requests), len(lines)) == (6, 10)
    assert all(", on: +" in line or "not sampled: +" in line for line in requests)
