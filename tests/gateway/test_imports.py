"""Nothing is started by an import: tools that collect modules, and documentation, import them all."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = """
import importlib, sys, threading
sys.argv = ["nobody", "--no-such-option"]
for name in sys.stdin.read().split():
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as e:  # a package that is not installed
        assert e.name.partition(".")[0] not in ("protocols", "models", "gateway", "benchmarks"), e
    assert threading.active_count() == 1, name
print("all", end="")
"""


@pytest.mark.programs
@pytest.mark.parametrize("package", ["protocols", "models", "gateway", "benchmarks"])
def test_an_import_starts_nothing(package: str) -> None:
    names = [package, *(m.name for m in pkgutil.walk_packages([str(ROOT / package)], f"{package}."))]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=" ".join(names),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "all", "")
