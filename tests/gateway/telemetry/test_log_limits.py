"""Lines that peers can cause at no cost are limited and summed up; an exchange that reached a model always has its line."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gateway.config import Config, LogConfig
from gateway.log_limits import LogLimits
from gateway.testing.stories.hostile import frame
from gateway.testing.stories.talk import Leave
from models.errors import ModelError
from models.session import Session
from tests.gateway.promises import House, Probe, answering, serving, silent

BODY = json.dumps({"inputs": "x"}).encode()


def records(caplog: pytest.LogCaptureFixture, event: str) -> list[Any]:
    return [record for record in caplog.records if record.getMessage() == event]


def sums(caplog: pytest.LogCaptureFixture) -> list[tuple[Any, ...]]:
    """The `of`, count, seconds, level and other fields of each sum."""
    by = ("dialect", "ending", "model")
    return [
        (r.of, r.count, r.seconds, r.levelname, *(getattr(r, name) for name in by if hasattr(r, name)))
        for r in records(caplog, "suppressed")
    ]


# -- the rule ----------------------------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_event_has_a_burst_and_then_so_many_a_second(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    limits = LogLimits(clock)

    def written(n: int, event: str = "one") -> int:
        return sum(limits.allows(event) for _ in range(n))

    assert (written(100), written(100, "another")) == (20, 20)
    clock.now += 0.5
    assert written(100) == 5
    clock.now += 1000
    assert written(100) == 20
    assert sums(caplog) == []


def test_what_is_not_written_is_summed_up_ten_seconds_after_the_first(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    limits = LogLimits(clock, model="m")
    for ending in ["refused"] * 23 + ["left"] * 2:
        limits.allows("exchange", ending=ending)
    for _ in range(22):
        limits.allows("model raised", level=logging.ERROR)
    clock.now += 9
    limits.tick(clock.now)
    assert sums(caplog) == []
    clock.now += 1
    limits.tick(clock.now)
    told = [("exchange", 3, 10.0, "INFO", "refused", "m"), ("exchange", 2, 10.0, "INFO", "left", "m")]
    assert sums(caplog) == [*told, ("model raised", 2, 10.0, "ERROR", "m")]
    limits.tick(clock.now + 100)
    limits.flush()
    assert len(sums(caplog)) == 3
    for _ in range(21):
        limits.allows("exchange", ending="left")
    limits.flush()  # the server ends
    assert sums(caplog)[3:] == [("exchange", 1, 0.0, "INFO", "left", "m")]


# -- the access line ---------------------------------------------------------------------------------------------------


async def ask(house: House, times: int, path: str) -> None:
    line = house.line("http1")
    for _ in range(times):
        await house.ask(path, BODY, line=line)


@pytest.mark.parametrize(("access", "lines"), [("all", 90), ("limited", 20), ("none", 0)])
async def test_refused_exchanges_have_few_lines_and_a_sum_and_are_all_counted(
    access: Any, lines: int, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway")
    async with serving(Probe(silent).spec("json-http1"), config=Config(log=LogConfig(access=access))) as house:
        registry = house.gateway.registry
        await ask(house, 60, "/nothing/here")
        await ask(house, 30, "/predictions/nobody")
        assert len(records(caplog, "exchange")) == lines
        assert house.endings == {"refused": 90}
        assert registry.get_sample_value(
            "everywire_exchanges_total", {"wire": "http/1.1", "dialect": "lmi", "model": "", "ending": "refused"}
        )
        await trio.sleep(11)
        expected = [("exchange", 40, "INFO", "", "refused"), ("exchange", 30, "INFO", "lmi", "refused")]
        assert [(of, n, *rest) for of, n, _, *rest in sums(caplog)] == (expected if access == "limited" else [])


async def test_those_that_reached_a_model_have_one_line_each_and_others_that_completed_few(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway")
    probe = Probe(answering)
    async with serving(probe.spec("json-http1", timeout=0)) as house:
        for _ in range(30):  # the clients of these leave
            call = await house.call("json-http1")
            await house.still()
            await call.leave(Leave.CLOSE)
            await house.still()
        probe.go.set()
        await ask(house, 30, "/predictions/probe")
        line = house.line("http1")
        for _ in range(30):
            await house.ask("/v2", method=b"GET", line=line)
            await house.ask("/v2/models/probe/infer", method=b"OPTIONS", line=line)
        assert len(records(caplog, "exchange")) == 60 + 20
        assert house.endings == {"cancelled-by-client": 30, "complete": 90}
        assert probe.calls == 60


async def test_those_that_leave_before_a_slot_have_few(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway")
    async with serving(Probe(silent).spec("json-http1", capacity=1)) as house:
        first = await house.call("json-http1")
        await house.still()
        waiting = [await house.call("json-http1") for _ in range(50)]
        await house.still()
        for call in waiting:
            await call.leave(Leave.CLOSE)
        await house.still()
        assert len(records(caplog, "exchange")) == 20
        await first.leave(Leave.CLOSE)
        await house.still()
        assert len(records(caplog, "exchange")) == 21


# -- the rest of what peers cause ------------------------------------------------------------------------------------


async def test_connections_that_break_the_rules_write_few_lines(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway")
    async with serving(Probe(silent).spec("json-http1")) as house:
        for _ in range(50):
            house.line("http1").transport.try_send([b"NONSENSE\r\n\r\n"])
        await house.still()
        assert len(records(caplog, "protocol error")) == 20
        for _ in range(50):
            house.line("http1").transport.try_send([b"\x16\x03\x01"])
        await house.still()
        assert len(records(caplog, "connection not established")) == 20
        await trio.sleep(12)
        assert [of[:2] for of in sums(caplog)] == [("protocol error", 30), ("connection not established", 30)]


async def test_floods_and_what_never_came_whole_write_few_lines(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway")
    opening = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
    async with serving(Probe(silent).spec("json-http1")) as house:
        for _ in range(50):
            house.line("http1").transport.try_send([opening + frame(6, 0, 0, bytes(8)) * 300])
            house.line("http1").transport.try_send([opening + frame(1, 0, 1, b"\x82")])
        await trio.sleep(12)
        assert (len(records(caplog, "flood")), len(records(caplog, "protocol error"))) == (20, 20)
        await trio.sleep(12)
        assert [(of, n, level) for of, n, _, level in sums(caplog)] == [
            ("flood", 30, "WARNING"),
            ("protocol error", 30, "INFO"),
        ]


async def test_a_model_that_refuses_again_and_again_has_few_reasons(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def refusing(probe: Probe, session: Session[Any, Any]) -> None:
        raise ModelError("not this", status=400)

    caplog.set_level(logging.INFO, "gateway")
    async with serving(Probe(refusing).spec("json-http1")) as house:
        await ask(house, 50, "/predictions/probe")
        assert (len(records(caplog, "model failed")), len(records(caplog, "exchange"))) == (20, 50)
        await trio.sleep(12)
        assert [(of, n, rest[-1]) for of, n, _, *rest in sums(caplog)] == [("model failed", 30, "lmi")]


async def test_a_model_that_raises_again_and_again_has_few_tracebacks(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(probe: Probe, session: Session[Any, Any]) -> None:
        raise ZeroDivisionError("again")

    caplog.set_level(logging.INFO, "gateway")
    specs = [Probe(broken).spec("json-http1"), Probe(broken, "other").spec("json-http1")]
    async with serving(*specs) as house:
        await ask(house, 50, "/predictions/probe")
        await ask(house, 3, "/predictions/other")
        raised = [record.model for record in records(caplog, "model raised")]
        assert (raised.count("probe"), raised.count("other")) == (20, 3)
        assert len(records(caplog, "exchange")) == 53
        await trio.sleep(12)
        assert [(of, n, level, model) for of, n, _, level, model in sums(caplog)] == [("model raised", 30, "ERROR", "probe")]
