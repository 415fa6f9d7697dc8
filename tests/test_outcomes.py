"""A test that is skipped in each of several environments is found, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests import outcomes
from tests.outcomes import never_run

SKIPPED = "skipped\ttests/test_a.py::test_one\tSkipped: envoy is not installed"


@pytest.mark.parametrize("other", ["run\ttests/test_a.py::test_one\t", "run\ttests/test_a.py::test_two\t"])
def test_one_that_ran_in_any_environment_is_well(other: str) -> None:
    assert (
        never_run([other, SKIPPED])
        == never_run([SKIPPED, other])
        == ({} if "one" in other else {"tests/test_a.py::test_one": "Skipped: envoy is not installed"})
    )


def test_one_that_is_skipped_for_another_reason_where_it_could_run_is_well() -> None:
    there = "skipped\ttests/test_a.py::test_one\tSkipped: the client does not send FP16 as JSON"
    assert never_run([SKIPPED, there]) == never_run([there, SKIPPED]) == {}


def test_a_file_that_was_skipped_as_a_whole_is_well_if_one_of_its_tests_ran() -> None:
    whole = "skipped\ttests/test_a.py\tSkipped: tritonclient is not installed"
    assert list(never_run([whole])) == ["tests/test_a.py"]
    assert never_run([whole, "run\ttests/test_a.py::test_two\t"]) == {}


def test_what_another_machine_alone_could_run_is_not_asked_for() -> None:
    assert never_run(["skipped\ttests/test_a.py::test_one\tSkipped: this machine has no IPv6"]) == {}


def report(
    test: str, outcome: Literal["passed", "failed", "skipped"], when: str = "call", why: str = "", **more: object
) -> pytest.TestReport:
    said = ("a.py", 1, f"Skipped: {why}") if why else None
    return pytest.TestReport(test, ("a.py", 1, test), {}, outcome, said, when, **more)  # type: ignore[arg-type]


def test_a_line_is_written_for_each_test(tmp_path: Path) -> None:
    said = tmp_path / "outcomes"
    for told in (
        report("runs", "passed", "setup"), report("runs", "passed"), report("runs", "passed", "teardown"),
        report("fails", "failed"), report("fails as expected", "skipped", wasxfail=""),
        report("is skipped", "skipped", why="haproxy is not installed"),
        report("is skipped by its fixture", "skipped", "setup", why="nginx is not installed"),
    ):  # fmt: skip
        outcomes.record(told, str(said))
    assert [tuple(line.split("\t")) for line in said.read_text().splitlines()] == [
        ("run", "runs", ""), ("run", "fails", ""), ("run", "fails as expected", ""),
        ("skipped", "is skipped", "Skipped: haproxy is not installed"),
        ("skipped", "is skipped by its fixture", "Skipped: nginx is not installed"),
    ]  # fmt: skip
