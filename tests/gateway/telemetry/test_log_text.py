"""The log for people: an access line that fits a terminal, and a drain that is told as `models drain` tells it."""

from __future__ import annotations

import io
import logging
import re
from typing import Any

import pytest

from gateway.telemetry.log_text import COLUMNS, access_line, report_lines
from gateway.telemetry.logging_setup import TextFormatter, has_colours

COMPLETE: dict[str, Any] = {
    "id": "07ce461b598", "wire": "http/1.1", "dialect": "lmi", "model": "chat", "method": "POST",
    "path": "/predictions/chat", "status": 200, "ending": "complete", "ms": 3100.4, "ms_begin": 0.05, "ms_slot": 1040.0,
    "ms_input": 0.0, "ms_room": 20.0, "ms_flush": 0.2, "ms_model": 2060.0, "ms_first": 1041.0, "items_in": 1,
    "items_out": 100, "bytes_in": 46, "bytes_out": 6451, "peer": "127.0.0.1:50150",
}  # fmt: skip
QUICK = {"ms": 610.0, "ms_slot": 0.0, "ms_room": 0.9, "ms_model": 609.0, "ms_first": None}
FAILED = COMPLETE | QUICK | {"ending": "model-error", "model": "flaky", "items_out": 41, "incident": "3f2a01b7c9de"}
REPORT = {"endings": {"complete": 2, "drained": 1}, "seconds": 1.25}


def line_of(fields: dict[str, Any], **more: Any) -> str:
    return access_line("05:56:34", fields | more, colour=False)


def test_an_access_line_says_how_it_ended_and_where_its_time_went() -> None:
    assert line_of(COMPLETE) == (
        "05:56:34 200 complete  chat  3.10s (slot 1.04s, model 2.06s)  first 1.04s  100 items 6.3 KiB  "
        "POST /predictions/chat  lmi http/1.1  127.0.0.1  07ce461b598"
    )


def test_parts_that_say_nothing_are_left_out_and_an_incident_is_said() -> None:
    assert line_of(FAILED) == (
        "05:56:34 200 MODEL-ERROR  flaky  0.61s  41 items 6.3 KiB  incident 3f2a01b7c9de  "
        "POST /predictions/chat  lmi http/1.1  127.0.0.1  07ce461b598"
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"status": 404, "ending": "refused", "model": "", "dialect": ""}, "34 404 refused  3.10s (slot"),
        ({"dialect": ""}, "  http/1.1  127.0.0.1"),
        ({"ending": "cancelled-by-client"}, "200 cancelled-by-client  chat"),
        ({"status": 0, "ending": "transport-lost"}, "0 TRANSPORT-LOST  chat"),
        ({"items_in": 30, "bytes_in": 98304, "items_out": 1}, "30 in 96.0 KiB  1 item 6.3 KiB"),
        ({"bytes_out": 1023}, "100 items 1023 B"),
        ({"bytes_out": 3 * 2**40}, "100 items 3.0 TiB"),
        ({"ms": 0.42, "ms_slot": 0.0, "ms_model": 0.3, "ms_room": 0.0}, "chat  0.4ms  100 items"),
        ({"ms_first": 3090.0}, "model 2.06s)  100 items"),
        ({"wire": "websocket", "dialect": "websocket"}, "  websocket  127.0.0.1"),
        ({"ms": 252_000.0, "ms_slot": 3.0, "ms_room": 100_000.0}, "4m 12s (room 100.00s)"),
        ({"ms": 90_000_000.0}, "25h 00m"),
        ({"key": "alice", "front": 2, "instance": 1}, "  key alice  front 2  instance 1  07ce461b598"),
        ({"grpc_status": 5}, "grpc-status 5"),
        ({"peer": "[::1]:4711"}, "  ::1  "),
        ({"peer": "unix:/run/app.sock"}, "  unix:/run/app.sock  "),
    ],
)
def test_what_a_line_has_is_said_where_it_matters(more: dict[str, Any], said: str) -> None:
    more = {"ms_model": 0.0, "ms_slot": 0.0, "ms_room": 0.0} | more if "ms" in more else more
    line = line_of(COMPLETE, **more)
    assert said in line
    assert len(line) <= COLUMNS


def test_a_long_path_is_cut_and_the_id_stays() -> None:
    line = line_of(COMPLETE, path="/" + "p" * 199)
    assert len(line) == COLUMNS
    assert "ppp…  lmi http/1.1  127.0.0.1  07ce461b598" in line


def test_a_path_that_would_lose_its_end_to_parts_of_the_time_keeps_it() -> None:
    line = line_of(FAILED, ms_flush=40.0, ms_slot=30.0, ms_first=1.0)
    assert len(line) <= COLUMNS
    assert "  0.61s  first 1.0ms  41 items 6.3 KiB  incident 3f2a01b7c9de  POST /predictions/chat  lmi" in line


def test_the_shortest_parts_make_way_first() -> None:
    line = line_of(COMPLETE, ms_begin=90.0, ms_input=80.0, ms_flush=70.0, ms_room=60.0)
    assert len(line) <= COLUMNS
    assert "  3.10s (slot 1.04s, model 2.06s)  first" in line


def test_no_line_is_longer_whatever_a_client_chooses() -> None:
    assert len(line_of(COMPLETE, path="/" * 200, model="m" * 100, method="M" * 32, peer="unix:/" + "x" * 100)) == COLUMNS


@pytest.mark.parametrize(
    ("fields", "shade"),
    [
        (COMPLETE, "\x1b[32m200 complete\x1b[0m"),
        (COMPLETE | {"status": 404, "ending": "refused"}, "\x1b[33m404 refused\x1b[0m"),
        (COMPLETE | {"status": 503, "ending": "refused"}, "\x1b[31m503 refused\x1b[0m"),
        (FAILED, "\x1b[31m200 MODEL-ERROR\x1b[0m"),
    ],
)
def test_a_terminal_has_the_status_in_colour(fields: dict[str, Any], shade: str) -> None:
    line = access_line("05:56:34", fields, colour=True)
    assert line.startswith(f"05:56:34 {shade}  ")
    assert re.sub(r"\x1b\[\d+m", "", line) == line_of(fields)


@pytest.mark.parametrize(
    ("terminal", "environ", "coloured"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False)],
)
def test_colours_are_for_a_terminal_that_has_them(
    terminal: bool, environ: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NO_COLOR": "", "TERM": "xterm", **environ}.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    assert has_colours(stream) is coloured


# ---- the log ----


def logged(name: str, event: str, **fields: Any) -> str:
    made = {"name": name, "levelno": logging.INFO, "levelname": "INFO", "msg": event, "created": 0.0, "msecs": 0.0}
    return TextFormatter().format(logging.makeLogRecord(made | fields))


def test_the_log_has_the_line_at_the_time_of_its_record() -> None:
    assert logged("gateway.exchange", "exchange", **COMPLETE) == access_line("00:00:00", COMPLETE, colour=False)


def test_a_record_of_somebody_elses_is_written_as_any_other() -> None:
    assert logged("gateway.exchange", "exchange", id="01J").endswith("INFO    gateway.exchange: exchange id=01J")
    assert logged("gateway", "drain report", live=3).endswith("INFO    gateway: drain report live=3")


def test_a_drain_says_how_long_it_may_take_and_that_a_second_signal_ends_it() -> None:
    said = logged("gateway", "draining", live=3, delay=5.0, timeout=25.0)
    assert said.endswith("gateway: Draining 3 streams, up to 30 s. Ctrl-C again ends them now.")
    assert logged("gateway", "draining", live=1, delay=0.0, timeout=0.5).count("Draining 1 stream, up to 0.5 s.") == 1
    assert logged("gateway", "draining", live=0, delay=0.0, timeout=30.0).endswith("draining live=0 delay=0.0 timeout=30.0")


def cut(count: int) -> list[dict[str, Any]]:
    row = {
        "wire": "http/1.1",
        "dialect": "lmi",
        "model": "chat",
        "ending": "drained",
        "age": 30.0,
        "bytes_in": 1,
        "bytes_out": 2,
    }
    return [row | {"id": f"7ce461b2-{number}"} for number in range(count)]


def test_the_report_has_a_line_for_each_stream_that_was_cut() -> None:
    first, *others = logged("gateway", "drain report", live=3, cut=cut(1), **REPORT).splitlines()
    assert first.endswith("INFO    gateway: drained in 1.2s: 2 complete, 1 drained")
    assert others == ["    cut      7ce461b2-0  chat  http/1.1  drained  after 30.0s"]


def test_many_that_were_cut_are_counted() -> None:
    lines = list(report_lines({**REPORT, "cut": cut(23)}))
    assert len(lines) == 1 + 20 + 1
    assert lines[-1] == "cut      and 3 more"
