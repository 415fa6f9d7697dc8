"""The tests that `pytest` runs by default and those that it leaves out; a test that starts a process needs a marker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("start", [lambda: subprocess.run([sys.executable, "-c", ""]), lambda: os.system("true")])
def test_a_test_that_starts_a_process_and_is_not_marked_for_it_fails(start: Callable[[], object]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"starts a process .* and is marked neither pages nor programs"):
        start()


@pytest.mark.programs
def test_one_that_is_marked_may() -> None:
    assert subprocess.run([sys.executable, "-c", ""]).returncode == 0


# Once in a process of their own, which imports everything once.
_COLLECT = """
import json, sys, pytest

class Names:
    def pytest_collection_finish(self, session):
        self.found = [item.nodeid for item in session.items]

found = []
for arguments in json.loads(sys.argv[1]):
    names = Names()
    assert pytest.main(["--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments], plugins=[names]) == 0
    found.append(names.found)
print("\\n" + json.dumps(found))
"""


def collected(*runs: list[str]) -> list[set[str]]:
    """The tests that pytest would run with each list of arguments, if the suite were those of the tutorial and the attacks
    alone."""
    suite = ["-o", "testpaths=tests/docs/test_tutorial.py tests/attacks"]
    command = [sys.executable, "-c", _COLLECT, json.dumps([[*suite, *arguments] for arguments in runs])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [set(found) for found in json.loads(done.stdout.rstrip().rpartition("\n")[2])]


@pytest.mark.programs
def test_pages_are_followed_where_somebody_asks_for_them() -> None:
    page = "tests/docs/test_tutorial.py::test_the_tutorial_works_as_it_is_written"
    by_default, rest, soak, everything, named, *asked = collected(
        [], ["--rest"], ["--soak"], ["--all"], ["tests/docs/test_tutorial.py", "tests/attacks"],
        ["tests/docs/test_tutorial.py"], ["-k", "the_tutorial_works"], ["-m", "pages and not sweep"],
    )  # fmt: skip
    assert page in rest
    assert page not in by_default
    assert by_default
    assert by_default | rest | soak == everything
    assert len(by_default) + len(rest) + len(soak) == len(everything)
    assert named == everything - soak
    for found in asked:
        assert page in found


@pytest.mark.programs
def test_long_runs_are_made_where_somebody_asks_for_them_or_names_one() -> None:
    attacks = "tests/attacks/test_attacks.py"
    one = f"{attacks}::test_each_attack_for_some_seconds_costs_its_maker_alone[flood-reset-collector]"
    everything, named, soak, marked, *others = collected(
        ["--all", attacks], [one], ["--soak", attacks], ["-m", "soak", attacks],
        [attacks], ["--rest", attacks], [attacks, "-k", "attack"],
    )  # fmt: skip
    long = {test for test in everything if "for_some_seconds" in test or "on_two_processes" in test}
    assert one in long
    assert named == {one}
    assert soak == marked == long
    for found in others:
        assert found
        assert not found & long
