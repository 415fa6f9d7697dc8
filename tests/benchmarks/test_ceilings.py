"""Judgement of counts: ceilings that only fall, and a failure that says which figure rose and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.cli import program
from benchmarks.counts import ceilings, command
from benchmarks.counts.cases import CASES
from benchmarks.counts.command import Found

STORED = {"lines": {"units": 64, "calls": 702, "allocations": 5863}}


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of ceilings that holds for this environment."""
    monkeypatch.setattr(ceilings, "FILE", tmp_path / "ceilings.json")
    monkeypatch.setattr(ceilings, "pins", dict)
    ceilings.write(STORED)
    return tmp_path / "ceilings.json"


def counting(monkeypatch: pytest.MonkeyPatch, growth: float | None = 1.0, **counts: int) -> None:
    """Puts counts of `lines` in place of those that would be made."""

    def found(*args: Any) -> Iterator[Found]:
        yield Found(case="lines", counts={"units": 64, **counts}, growth=growth, instructions=None)

    monkeypatch.setattr(command, "found", found)


def asked(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(program, ["counts", "lines", *options])
    return done.exit_code, done.output


def test_a_figure_at_its_ceiling_holds(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch, calls=702, allocations=5863)
    assert asked()[0] == 0


def test_a_figure_that_another_process_has_at_its_ceiling_holds(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = iter([{"calls": 702, "allocations": 5991}, {"calls": 703, "allocations": 5863}])
    asked_for: list[Sequence[str]] = []

    def found(names: Sequence[str], *others: Any) -> Iterator[Found]:
        asked_for.append(names)
        yield Found(case="lines", counts={"units": 64, **next(processes)}, growth=1.0, instructions=None)

    monkeypatch.setattr(command, "found", found)
    assert asked()[0] == 0
    assert asked_for == [["lines"], ["lines"]]


def test_one_more_a_token_fails_and_says_where_how_much_and_what_to_do(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting(monkeypatch, calls=766, allocations=5863)
    status, output = asked()
    assert status == 1
    assert "lines: calls rose from 702 to 766 in 64 tokens, +1.00 a token" in output
    assert "--write --raise" in output
    assert "allocations rose" not in output


def test_a_ceiling_falls_by_writing_and_rises_only_if_that_is_asked_for(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept() -> Mapping[str, int]:
        cases: Mapping[str, Mapping[str, int]] = json.loads(stored.read_text())["cases"]
        return cases["lines"]

    counting(monkeypatch, calls=700, allocations=5864, modules=42)
    assert asked("--write")[0] == 1
    assert kept() == {"units": 64, "calls": 700, "allocations": 5863, "modules": 42}
    assert asked("--write", "--raise")[0] == 0
    assert kept() == {"units": 64, "calls": 700, "allocations": 5864, "modules": 42}


def test_what_grows_with_the_number_of_units_fails(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch, growth=1.9, calls=702)
    status, output = asked()
    assert status == 1
    assert "lines: a token among eight times as many costs 1.90 times as much CPU" in output


def test_in_another_environment_counts_are_only_printed(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting(monkeypatch, growth=9.0, calls=9999)
    monkeypatch.setattr(ceilings, "pins", lambda: {"trio": "0.1"})
    status, output = asked()
    assert status == 0
    assert "no ceiling holds here: they are of trio 0.1" in output
    assert asked("--write")[0] == 1
    assert json.loads(stored.read_text())["cases"] == STORED


def test_each_workload_has_ceilings_of_its_figures() -> None:
    kept = ceilings.ceilings()
    assert list(kept) == list(CASES)
    for name, case in CASES.items():
        figures = {"units", *command.FIGURES}
        figures -= {"system calls"} if not case.sockets else set()
        figures -= {"bytes kept"} if not case.fresh else set()
        assert set(kept[name]) == figures
        assert kept[name]["units"] == case.units


def test_the_environment_is_exact() -> None:
    pins = ceilings.pins()
    assert {"trio", "h2", "msgspec", "memray", "numpy", "orjson"} <= set(pins)
    lines = [line for line in ceilings.REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == len(pins)
