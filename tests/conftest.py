"""Settings of the whole suite: which driver and which lane the gateway's promises are tested with, that no example of
hypothesis is late, and that Ctrl-C reaches the programs that tests start."""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings

from tests.gateway import ways

# How long an example takes, and how long it takes to make one, is the machine's affair.
settings.register_profile("any machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs have it, and whatever they start
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--driver", choices=ways.DRIVERS, default=ways.driver, help="who tells connections what is ready")
    parser.addoption("--lane", choices=ways.LANES, default=ways.lane, help="how HTTP/2 and WebSocket machines work")


def pytest_configure(config: pytest.Config) -> None:
    ways.take(config.getoption("--driver"), config.getoption("--lane"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"gateway: driver {ways.driver}, lane {ways.lane}"
