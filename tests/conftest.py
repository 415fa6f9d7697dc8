"""What holds for the whole suite: which driver and which lane the gateway's promises are tested with, and that no example of
hypothesis is late."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.gateway import ways

# How long an example takes, and how long it takes to make one, is the machine's affair.
settings.register_profile("any machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--driver", choices=ways.DRIVERS, default=ways.driver, help="who tells connections what is ready")
    parser.addoption("--lane", choices=ways.LANES, default=ways.lane, help="how HTTP/2 and WebSocket machines work")


def pytest_configure(config: pytest.Config) -> None:
    ways.take(config.getoption("--driver"), config.getoption("--lane"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"gateway: driver {ways.driver}, lane {ways.lane}"
