"""Which tests were run where the suite needs several environments: `.ci/run` fails if one was skipped in each of them.

With PYTEST_OUTCOMES=FILE in the environment, pytest adds a line for each test to that file: what became of it, its id,
and why it was skipped. `python -m tests.outcomes FILE` reads the file and names the tests that no environment could run.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

ABSENT = re.compile(r"not installed|is not there|not here|curl has no HTTP/2|files may not be open")
"""The reasons of a skip that another environment, or a program of the system, would remove."""
UNPACKAGED = {
    "grpcurl": "no package of Debian, PyPI or npm brings it",
    "multi-model-server": "it needs Python 3.10 or older",
}
"""Programs that .ci/run cannot install, and why. Their tests are run where somebody has them."""


def record(report: pytest.TestReport | pytest.CollectReport, path: str) -> None:
    """Adds the line of a test that is over, or of a file that was skipped as a whole."""
    if report.skipped and (isinstance(report, pytest.CollectReport) or not hasattr(report, "wasxfail")):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        line = f"skipped\t{report.nodeid}\t{' '.join(why.split())}"
    elif isinstance(report, pytest.TestReport) and report.when == "call":
        line = f"run\t{report.nodeid}\t"
    else:
        return
    with open(path, "a", encoding="utf-8") as file:  # a line at once: stages that run side by side add to one file
        file.write(line + "\n")


def never_run(lines: list[str]) -> dict[str, str]:
    """The tests that were skipped for want of something in each environment that met them, and why."""
    told = [line.split("\t") for line in lines]
    # one that was skipped for another reason had all that it needs
    ran = {test for outcome, test, why in told if outcome == "run" or not ABSENT.search(why)}
    ran |= {test.partition("::")[0] for test in ran}  # a file that was skipped as a whole is named without a test
    return {test: why for outcome, test, why in told if outcome == "skipped" and test not in ran and ABSENT.search(why)}


def main() -> int:
    missing = never_run(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())
    for test, why in sorted(missing.items()):
        known = [f"{name}: {because}" for name, because in UNPACKAGED.items() if why.endswith(f" {name}")]
        if known:
            del missing[test]
        print(f"{test}: {known[0] if known else why}")
    if missing:
        print(f"{len(missing)} tests were skipped in every environment; install what they need in .ci/run")
    return bool(missing)


PATH = os.environ.get("PYTEST_OUTCOMES", "")

if __name__ == "__main__":
    sys.exit(main())
