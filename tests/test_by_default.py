"""The tests that `pytest` runs by default and those that it leaves out; a test that starts a process needs a marker."""

from __future__ import annotations

import os
import re
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


def collected(*arguments: str) -> set[str]:
    """The tests that pytest would run if the suite were those of the documentation alone."""
    command = f"{sys.executable} -m pytest --collect-only -q -p no:cacheprovider -o testpaths=tests/docs".split()
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(re.findall(r"^tests/\S+::.+$", done.stdout, re.MULTILINE))


@pytest.mark.programs
def test_pages_are_followed_where_somebody_asks_for_them() -> None:
    page = "tests/docs/test_tutorial.py::test_the_tutorial_works_as_it_is_written"
    by_default, rest, everything = collected(), collected("--rest"), collected("--all")
    assert page in rest
    assert page not in by_default
    assert by_default
    assert by_default | rest == everything
    assert not by_default & rest
    for named in (["tests/docs/test_tutorial.py"], ["-k", "the_tutorial_works"], ["-m", "pages and not sweep"]):
        assert page in collected(*named)
    assert collected("tests/docs") == everything
