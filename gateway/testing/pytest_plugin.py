"""Runs async tests of models under Trio, with a mocked clock and a seed; needs no other plugin and disturbs none.

It runs only tests that are marked `@pytest.mark.gateway`, or that use its fixture `serve`. Its fixture `scripted_model` is
for all tests.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

# Neither trio nor the gateway is imported before a test needs it, because pytest loads this plugin for every project.

_TIMEOUT = 3600.0
_FIXTURE = "_gateway_seed"
_KEY = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gateway", "tests of models in a gateway in memory")
    group.addoption("--gateway-seeds", type=int, metavar="N", help="run each of them under the seeds 0 to N-1")
    group.addoption("--gateway-seed", type=int, metavar="K", help="run them under this seed alone")


def pytest_configure(config: pytest.Config) -> None:
    many = config.getoption("--gateway-seeds")
    if many is not None and many < 1:
        raise pytest.UsageError(f"--gateway-seeds takes a number above 0, not {many}")
    config.addinivalue_line(
        "markers",
        "gateway(seeds=1, timeout=3600): an async test under Trio with a mocked clock; once for each of so many seeds, or "
        "of these; it fails after so many seconds of its clock",
    )


def _has(definition: Any) -> bool:
    """True if this plugin runs the test."""
    if not inspect.iscoroutinefunction(definition.obj):
        return False
    return definition.get_closest_marker("gateway") is not None or _uses_ours(definition, "serve")


def _uses_ours(definition: Any, name: str) -> bool:
    """True if the test uses this fixture of ours, and not another one of the same name."""
    found = definition._fixtureinfo.name2fixturedefs.get(name)
    return bool(found) and found[-1].func.__module__ == __name__


def _seeds(definition: Any) -> list[int]:
    option = definition.config.getoption
    if (one := option("--gateway-seed")) is not None:
        return [one]
    if (many := option("--gateway-seeds")) is not None:
        return list(range(many))
    marker = definition.get_closest_marker("gateway")
    chosen = marker.kwargs.get("seeds", 1) if marker is not None else 1
    return list(chosen if isinstance(chosen, Iterable) else range(chosen))


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not _has(metafunc.definition):
        return
    names, asked = metafunc.fixturenames, metafunc.definition._fixtureinfo.argnames
    if "anyio_backend" in names and "anyio_backend" not in asked:
        names.remove("anyio_backend")  # anyio's auto mode adds it to all async tests, which then run once per backend
    if (seeds := _seeds(metafunc.definition)) != [0]:
        metafunc.fixturenames.append(_FIXTURE)
        ids = [f"seed{seed}" for seed in seeds]
        metafunc.parametrize(_FIXTURE, seeds, ids=ids, indirect=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and _has(item):
        item.stash[_KEY] = item.obj  # the unwrapped function: other plugins may wrap it later


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Replaces the async test by a plain function, which other plugins for async tests ignore."""
    function = pyfuncitem.stash.get(_KEY, None)
    if function is None:
        return (yield)
    marker = pyfuncitem.get_closest_marker("gateway")
    timeout = marker.kwargs.get("timeout", _TIMEOUT) if marker is not None else _TIMEOUT

    def run(**arguments: Any) -> None:
        __tracebackhide__ = True
        _run(function, arguments, _seed_of(pyfuncitem), timeout)

    theirs, pyfuncitem.obj = pyfuncitem.obj, run
    try:
        return (yield)
    finally:
        pyfuncitem.obj = theirs


def _seed_of(item: pytest.Function) -> int:
    callspec = getattr(item, "callspec", None)
    seed: int = callspec.params.get(_FIXTURE, 0) if callspec is not None else 0
    return seed


def _run(function: Any, arguments: dict[str, Any], seed: int, timeout: float) -> None:
    __tracebackhide__ = True
    import trio
    from trio.testing import MockClock

    from gateway.testing import seeded

    clocks = [value for value in arguments.values() if isinstance(value, trio.abc.Clock)]
    clock = clocks[0] if clocks else MockClock(autojump_threshold=0)

    async def main() -> None:
        __tracebackhide__ = True
        with trio.move_on_after(timeout) as scope:
            await function(**arguments)
        if scope.cancelled_caught:
            pytest.fail(f"the test was not over after {timeout:g} s of its clock: what does it wait for?", pytrace=False)

    with seeded(seed):
        trio.run(main, clock=clock)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.when == "call" and report.failed and isinstance(item, pytest.Function) and _KEY in item.stash:
        report.sections.append(("gateway", f"to see it again: {_again(item)}"))
    return report


def _again(item: pytest.Function) -> str:
    """Returns the command for the same test under the same seed."""
    seed = _seed_of(item)
    test = re.sub(rf"(?<=\[)seed{seed}-|-seed{seed}(?=\])|\[seed{seed}\]$", "", item.nodeid)
    return f"pytest {shlex.quote(test)} --gateway-seed {seed}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed under which the test runs."""
    return _seed_of(request.node)


@pytest.fixture
def clock() -> Any:
    """The test's clock, a `trio.testing.MockClock`: it jumps when all tasks wait."""
    from trio.testing import MockClock

    return MockClock(autojump_threshold=0)


@pytest.fixture
def serve() -> Any:
    """Runs a gateway in memory with these models: `async with serve(model, ...) as served`. It takes the keyword arguments
    of `gateway.testing.memory_gateway`. At the end of the block all client connections are closed, and the test fails if
    the gateway still holds something of them."""
    from gateway.testing import memory_gateway

    def start(*models: Any, **options: Any) -> Any:
        return memory_gateway(models, **{"check": True, **options})

    return start


@pytest.fixture
def scripted_model() -> Iterator[Any]:
    """Serves a scripted model on a loopback port: `scripted_model(turns)` returns the `ScriptedServer` of
    `gateway.testing.scripted_gateway`, whose keyword arguments it takes. It works for sync tests, and for async tests of
    every plugin. All servers of a test are stopped at its end."""
    from gateway.testing import scripted_gateway

    with ExitStack() as servers:

        def start(turns: Any = None, **options: Any) -> Any:
            return servers.enter_context(scripted_gateway(turns, **options))

        yield start


@pytest.fixture
def _gateway_seed(request: pytest.FixtureRequest) -> int:
    seed: int = request.param
    return seed
