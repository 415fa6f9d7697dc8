"""CloudWatch's embedded metric format: a line of the log each period, as its specification has it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import trio

from gateway.config import Config, LogConfig, MetricsConfig, TracingConfig
from gateway.config.load import load
from gateway.config.problem import ConfigError
from gateway.telemetry.logging_setup import configure, flush
from tests.gateway.promises import EPOCH, Probe, answering, serving

_UNITS = (
    "Seconds|Microseconds|Milliseconds|Bytes|Kilobytes|Megabytes|Gigabytes|Terabytes|Bits|Kilobits|Megabits|Gigabits|Terabits"
    "|Percent|Count|Bytes/Second|Kilobytes/Second|Megabytes/Second|Gigabytes/Second|Terabytes/Second|Bits/Second"
    "|Kilobits/Second|Megabits/Second|Gigabits/Second|Terabits/Second|Count/Second|None"
)


def text(longest: int) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": longest}


def an_object(**members: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(members), "properties": members, "additionalProperties": False}


METRIC = an_object(Name=text(1024))
METRIC["properties"] |= {
    "Unit": {"type": "string", "pattern": f"^({_UNITS})$"},
    "StorageResolution": {"enum": [1, 60]},
}
DIMENSIONS = {"type": "array", "maxItems": 30, "items": text(250)}
DIRECTIVE = an_object(
    Namespace=text(1024),
    Dimensions={"type": "array", "minItems": 1, "items": DIMENSIONS},
    Metrics={"type": "array", "minItems": 1, "maxItems": 100, "items": METRIC},
)
METADATA = an_object(Timestamp={"type": "integer", "minimum": 0}, CloudWatchMetrics={"type": "array", "items": DIRECTIVE})
# The root may have any other member.
ROOT = {"type": "object", "required": ["_aws"], "properties": {"_aws": METADATA}}


def read(line: str) -> dict[str, float]:
    """The metrics of a line, by the rules of the specification: which members are one, is in `_aws` alone."""
    document: dict[str, Any] = json.loads(line)
    jsonschema.Draft7Validator(ROOT).validate(document)
    assert len(line.encode()) <= 256 * 1024
    found = {}
    for directive in document["_aws"]["CloudWatchMetrics"]:
        for dimension in (name for names in directive["Dimensions"] for name in names):
            assert isinstance(document[dimension], str)
            assert 0 < len(document[dimension]) <= 1024
        for metric in directive["Metrics"]:
            value = document[metric["Name"]]
            assert isinstance(value, int | float)
            assert not isinstance(value, bool)
            found[metric["Name"]] = value
    return found


class Lines(io.StringIO):
    def metrics(self) -> list[str]:
        """The lines that CloudWatch makes metrics of."""
        flush()
        return [line for line in self.getvalue().splitlines() if "_aws" in json.loads(line)]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """The log of a server that says nothing below an error."""
    root, ours = logging.getLogger(), logging.getLogger("gateway")
    handlers, level = list(root.handlers), ours.level
    stream = Lines()
    configure(LogConfig(level="error", format="json"), stream=stream)
    yield stream
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    ours.setLevel(level)


async def test_a_line_each_period_has_what_is_so_then(lines: Lines, autojump_clock: Any) -> None:
    probe = Probe(answering)
    config = Config(metrics=MetricsConfig(emf=60), tracing=TracingConfig(service_name="voices"))
    async with serving(
        probe.spec("lmi-http1", capacity=1, queue=1, queue_timeout=0, idle_when_wanted=0), config=config
    ) as house:
        await trio.sleep(59)
        assert lines.metrics() == []
        await trio.sleep(3)
        (line,) = lines.metrics()
        assert read(line) == {"SlotsInUse": 0, "Queued": 0, "LiveStreams": 0, "Refusals": 0}
        calls = [await house.call("lmi-http1") for _ in range(2)]
        await house.still()
        for _ in range(3):
            assert (await house.ask("/predictions/probe", b'{"inputs": "x"}'))[0] == 503
        await trio.sleep_until(122.5)
        probe.go.set()
        for call in calls:
            await call.rest()
        await trio.sleep_until(183.5)
        _, second, third = lines.metrics()
        assert read(second) == {"SlotsInUse": 1, "Queued": 1, "LiveStreams": 2, "Refusals": 3}
        assert read(third) == {"SlotsInUse": 0, "Queued": 0, "LiveStreams": 0, "Refusals": 0}
        document = json.loads(second)
        assert document["_aws"]["Timestamp"] == int(EPOCH * 1000)
        assert (document["_aws"]["CloudWatchMetrics"][0]["Namespace"], document["service"]) == ("everywire", "voices")
        assert "StorageResolution" not in second


async def test_a_shorter_period_is_kept_by_cloudwatch_only_where_it_is_asked_to(lines: Lines, autojump_clock: Any) -> None:
    async with serving(config=Config(metrics=MetricsConfig(emf=10))):
        await trio.sleep(32)
        assert len(lines.metrics()) == 3
        for line in lines.metrics():
            read(line)
            metrics = json.loads(line)["_aws"]["CloudWatchMetrics"][0]["Metrics"]
            assert {metric["StorageResolution"] for metric in metrics} == {1}


async def test_without_a_period_there_is_no_line(lines: Lines, autojump_clock: Any) -> None:
    async with serving():
        await trio.sleep(200)
        assert lines.metrics() == []


def test_a_log_of_text_is_none_that_cloudwatch_reads() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.emf .*is set and log\.format .*is 'text'"):
        load(file=None, environ={}, overrides={"metrics.emf": "60s", "log.format": "text"})


@pytest.mark.parametrize(
    ("wrong", "instead"),
    [
        (("_aws", "Timestamp"), "now"),
        (("_aws", "CloudWatchMetrics", 0, "Namespace"), ""),
        (("_aws", "CloudWatchMetrics", 0, "Metrics", 0, "Unit"), "Things"),
        (("_aws", "CloudWatchMetrics", 0, "Dimensions"), []),
        (("Queued",), "3"),
        (("service",), 3),
    ],
)
def test_the_check_can_fail(wrong: tuple[Any, ...], instead: Any) -> None:
    metric = {"Name": "Queued", "Unit": "Count"}
    directive = {"Namespace": "n", "Dimensions": [["service"]], "Metrics": [metric]}
    document: Any = {"_aws": {"Timestamp": 1, "CloudWatchMetrics": [directive]}, "service": "s", "Queued": 3}
    assert read(json.dumps(document)) == {"Queued": 3}
    inner = document
    for key in wrong[:-1]:
        inner = inner[key]
    inner[wrong[-1]] = instead
    with pytest.raises((AssertionError, jsonschema.ValidationError)):
        read(json.dumps(document))
