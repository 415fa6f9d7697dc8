"""Settings of the whole suite: the tests that run by default, the number of processes, no deadline for examples of
hypothesis, and Ctrl-C for the programs that tests start."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import outcomes

# The time to make an example and to run it depends on the machine.
settings.register_profile("any machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs have it, and whatever they start
    signal.signal(signal.SIGINT, signal.default_int_handler)

LEFT_OUT = ("pages", "programs", "sweep")
"""Markers of tests that `pytest` leaves out, unless they are marked `by_default` too. pyproject.toml explains them."""
PARTS = {
    "all": ("default", "rest", "soak"),
    "rest": ("rest",),
    "soak": ("soak",),
    "named": ("default", "rest"),
    "default": ("default",),
}
"""Which parts of the suite a run has, by its option. A run of named tests, by a path or a word, leaves the long runs out."""
STARTS_PROCESSES = ("pages", "programs", "soak")
"""Markers of the tests that may start a process."""
MOST_WORKERS = 8
"""Most processes for tests by default: each imports and collects everything, and more would do little else."""


def pytest_addoption(parser: pytest.Parser) -> None:
    for part, what in {
        "all": f"run all tests: also those marked {', '.join(LEFT_OUT)} or soak",
        "rest": f"run what `pytest` alone leaves out, but for the long runs: the tests marked {', '.join(LEFT_OUT)}",
        "soak": "run the tests marked soak, which take an hour: all seeds, all attacks, ten thousand calls",
    }.items():
        parser.addoption(f"--{part}", action="store_const", const=part, dest="part", help=what)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.part is None:  # workers are told what was decided here
        options = config.option
        named = config.args_source is config.ArgsSource.ARGS or options.keyword or options.markexpr
        options.part = "all" if "soak" in options.markexpr or one_by_one(config) else "named" if named else "default"


def one_by_one(config: pytest.Config) -> bool:
    """True if each test of the run is named by its own id."""
    return config.args_source is config.ArgsSource.ARGS and all("::" in named for named in config.args)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if config.option.part == "default":
        return [f"left out: the tests marked {', '.join(LEFT_OUT)} or soak; all of them: pytest --all"]
    return ["left out: the tests marked soak; they are run by --soak"] if config.option.part == "named" else []


def part_of(item: pytest.Item) -> str:
    """The one part of the suite that a test belongs to."""
    if item.get_closest_marker("soak"):
        return "soak"
    left_out = any(item.get_closest_marker(name) for name in LEFT_OUT) and not item.get_closest_marker("by_default")
    return "rest" if left_out else "default"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parts = PARTS[config.option.part]
    config.hook.pytest_deselected(items=[item for item in items if part_of(item) not in parts])
    items[:] = [item for item in items if part_of(item) in parts]


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if outcomes.PATH and "PYTEST_XDIST_WORKER" not in os.environ:
        outcomes.record(report, outcomes.PATH)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if outcomes.PATH and os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        outcomes.record(report, outcomes.PATH)


def pytest_collection(session: pytest.Session) -> None:
    gc.disable()  # collected tests stay: there is no garbage to be found among them


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # twenty thousand tests are here now: freeze them, so that each collection skips them
    gc.enable()


# -- processes -----------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> Generator[None, int, int]:
    workers = yield
    if one_by_one(config) or config.option.capture == "no":  # somebody looks into a few tests, and workers have no terminal
        return 0
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else workers
    return min(workers, usable, MOST_WORKERS)


_STARTING = {
    "subprocess.Popen",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "os.spawn",
    "os.startfile",
    "pty.spawn",
}
_running: pytest.Item | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Fails a test that starts a process without a marker: it would run by default."""
    if event in _STARTING and _running is not None and not any(map(_running.get_closest_marker, STARTS_PROCESSES)):
        pytest.fail(
            f"{_running.nodeid} starts a process ({event}) and is marked neither {' nor '.join(STARTS_PROCESSES[:2])}"
        )


sys.addaudithook(_audit)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    global _running
    _running = item
    try:
        return (yield)
    finally:
        _running = None
        if (log := logging.getLogger("gateway")).level:  # an operation of a gateway may set it, for the whole process
            log.setLevel(logging.NOTSET)
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()  # pytest keeps data of the tests that ran
