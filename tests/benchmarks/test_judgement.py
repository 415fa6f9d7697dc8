"""The tables, the ratios and the guard: what is concluded from figures, without measuring any."""

import pytest
from click.testing import CliRunner

from benchmarks import report, servers
from benchmarks.accounting import parse_cpu_time
from benchmarks.cli import program
from benchmarks.comparison import Row, value, with_ratios
from benchmarks.guard import BOUNDS, Bound, Verdict, judge, verdict
from benchmarks.load.connections import LoadError
from benchmarks.load.plan import Kind, Measure, Result
from benchmarks.micro import GROUPS, purpose
from benchmarks.servers import OURS, Program, ServerError, started
from benchmarks.units import Case, measured
from benchmarks.workloads import WORKLOADS, Workload


def row(server: str, *values: float) -> Row:
    return Row(workload="w", server=server, figure="us/unit", values=values, per_second=1.0, load_share=0.96)


def test_every_workload_has_ours_first_and_another_beside_it() -> None:
    for workload in WORKLOADS.values():
        ours, floor, *others = workload.servers
        assert ours in OURS
        assert floor is not ours
        assert not set(OURS) & set(others)
        assert workload.message()
        assert bool(workload.head) is (workload.kind in (Kind.STREAMS, Kind.DUPLEX))


def test_the_guard_watches_workloads_that_exist_against_floors_that_run_everywhere() -> None:
    for name, bound in BOUNDS.items():
        assert bound.floor in WORKLOADS[name].servers
        assert not bound.floor.linux_only
        assert WORKLOADS[name].measure is Measure.CPU


def test_a_figure_is_the_cost_of_one_unit() -> None:
    result = Result(units=4, seconds=2.0, server_cpu=1e-3, load_cpu=0.5, memory=2**20)
    assert value(Measure.CPU, result) == 250
    assert value(Measure.HELD, result) == 256
    assert value(Measure.STALLED, result) == 1
    assert result.load_share == 0.25


def test_ratios_are_of_medians_and_the_second_server_is_the_floor() -> None:
    rows = with_ratios([row("ours", 90.0, 30.0, 20.0), row("floor", 9.0, 10.0, 11.0), row("library", 20.0)])
    assert [r.ratio for r in rows] == [3.0, None, 2.0]
    assert with_ratios([row("ours", 1.0)])[0].ratio is None
    assert with_ratios([row("ours", 1.0), row("floor", 0.0)])[0].ratio is None, "a memory that did not grow is no floor"


def test_a_bound_is_met_exactly_and_broken_above() -> None:
    assert verdict("w", [row("ours", 30.0), row("floor", 10.0)], 3.0).holds
    assert not verdict("w", [row("ours", 30.1), row("floor", 10.0)], 3.0).holds


@pytest.mark.parametrize(
    ("ratios", "holds"), [([1.0], True), ([99.0, 1.0], True), ([None, 1.0], True), ([99.0, 99.0], False)]
)
def test_what_fails_once_is_measured_once_more(ratios: list[float | None], holds: bool) -> None:
    left = {name: list(ratios) for name in BOUNDS}

    def measure(name: str, bound: Bound) -> Verdict:
        ratio = left[name].pop(0)
        if ratio is None:
            raise LoadError("no answer for 10 s")
        return Verdict(workload=name, ours=1.0, floor=1.0, ratio=ratio, most=bound.most)

    assert [found.holds for found in judge(measure)] == [holds] * len(BOUNDS)
    assert not any(left.values())


@pytest.mark.parametrize(("ratio", "status"), [(2.0, 0), (2.1, 1)])
def test_the_guard_fails_as_a_program_and_names_what_is_too_dear(
    monkeypatch: pytest.MonkeyPatch, ratio: float, status: int
) -> None:
    found = Verdict(workload="duplex-pipe", ours=ratio, floor=1.0, ratio=ratio, most=2.0)
    monkeypatch.setattr("benchmarks.guard.judge", lambda: iter([found]))
    done = CliRunner().invoke(program, ["guard"])
    assert done.exit_code == status
    assert ("Error: beyond the bound in two measurements: duplex-pipe" in done.output) is bool(status)


@pytest.mark.parametrize(
    ("text", "seconds"), [("0:00.05", 0.05), ("12:34", 754.0), ("01:02:03", 3723.0), ("2-00:00:01", 172_801.0)]
)
def test_cpu_times_are_read_as_every_ps_prints_them(text: str, seconds: float) -> None:
    assert parse_cpu_time(text) == pytest.approx(seconds)


def test_tables_are_aligned_and_a_busy_load_client_is_told() -> None:
    rows = with_ratios([row("everywire", 1234.5), row("hub", 12.345)])
    head, ours, floor = report.servers_table(rows).splitlines()
    assert ours.split() == ["w", "everywire", "us/unit", "1,234", "1,234", "1,234", "100.00", "1.00", "0.96"]
    assert floor.split()[3:7] == ["12.3", "12.3", "12.3", "-"]
    assert head.index("server") == ours.index("everywire") == floor.index("hub")
    assert len(report.warnings(rows)) == 2


def test_a_unit_is_compared_with_its_first_floor() -> None:
    unit = measured("g", Case(name="c", costs={"ours": lambda: 6.0, "floor": lambda: 2.0, "library": lambda: 9.0}))
    assert unit.ratio == 3.0
    assert "library 9.00" in report.units_table([unit])


def test_the_program_lists_what_it_measures() -> None:
    listed = CliRunner().invoke(program, ["list"])
    assert listed.exit_code == 0
    for name in (*GROUPS, *WORKLOADS):
        assert f"\n{name} " in listed.output
    assert all(purpose(group) for group in GROUPS.values())


@pytest.mark.parametrize(("command", "known"), [("micro", "eventstream"), ("server", "unary-64")])
def test_a_name_that_is_none_is_answered_with_those_there_are(command: str, known: str) -> None:
    asked = CliRunner().invoke(program, [command, "unarry"])
    assert asked.exit_code == 2
    assert "'unarry'" in asked.output
    assert known in asked.output


@pytest.mark.programs
def test_a_server_that_does_not_come_up_fails_with_its_log() -> None:
    broken = Program(name="broken", what="", arguments=("benchmarks.floors.no_such_floor", "{port}"))
    with pytest.raises(ServerError, match=r"broken ended with status 1(.|\n)*no_such_floor"), started(broken):
        pytest.fail("it cannot have come up")


def test_a_server_that_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert servers.HUB.missing == "hub needs Linux"
    assert not servers.HTTP1.missing


def test_a_workload_that_fails_does_not_take_the_figures_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(workload: Workload, **options: object) -> list[Row]:
        if workload.name == "unary-64":
            raise LoadError("no answer for 10 s")
        return [row("everywire", 123.0)]

    monkeypatch.setattr("benchmarks.cli.compare", compare)
    done = CliRunner().invoke(program, ["server", "unary-64", "tokens-64"])
    assert done.exit_code == 1
    assert "Error: no answer for 10 s" in done.output
    assert "123" in done.output
