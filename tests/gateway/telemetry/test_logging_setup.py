"""The log is one line an event, as JSON or as text, and nothing that a peer sends can forge one."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest

from gateway.config import LogConfig
from gateway.telemetry.logging_setup import configure, has_terminal_log, say
from gateway.untrusted_text import escape

EXCHANGE = {
    "id": "01J",
    "wire": "http/2",
    "dialect": "v2",
    "model": "add_sub",
    "method": "POST",
    "path": "/v2/models/add_sub/infer",
    "status": 200,
    "ending": "complete",
    "ms": 1.5,
    "bytes_in": 300,
    "bytes_out": 200,
    "peer": "127.0.0.1:50000",
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("gateway")
    handlers, level = list(root.handlers), ours.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    ours.setLevel(level)


class Written(io.StringIO):
    """The text of the log, as soon as it is written."""

    def getvalue(self) -> str:
        for handler in logging.getLogger().handlers:
            handler.flush()
        return super().getvalue()


def configured(level: str = "info", format: str = "json") -> io.StringIO:
    stream = Written()
    root = logging.getLogger()
    # pytest's own would put what is no UTF-8 into its report
    root.handlers[:] = [handler for handler in root.handlers if not type(handler).__module__.startswith("_pytest")]
    configure(LogConfig(level=level, format=format), stream=stream)  # type: ignore[arg-type]
    return stream


def crash() -> None:
    raise ValueError("first\nERROR second\x1b[2J")


# ---- JSON ----


def test_an_exchange_is_one_json_object_with_its_fields() -> None:
    stream = configured()
    logging.getLogger("gateway.exchange").info("exchange", extra=EXCHANGE)
    (line,) = stream.getvalue().splitlines()
    record = json.loads(line)
    assert list(record) == ["timestamp", "level", "logger", "event", *EXCHANGE]
    assert (record["level"], record["logger"], record["event"]) == ("info", "gateway.exchange", "exchange")
    assert {key: record[key] for key in EXCHANGE} == EXCHANGE


def test_the_timestamp_is_rfc_3339_in_utc_to_the_millisecond() -> None:
    stream = configured()
    record = logging.LogRecord("gateway", logging.INFO, "", 0, "x", None, None)
    record.created, record.msecs = 1.0625, 62.5
    logging.getLogger("gateway").handle(record)
    text = json.loads(stream.getvalue())["timestamp"]
    assert text == "1970-01-01T00:00:01.062Z"
    assert datetime.fromisoformat(text).utcoffset() == timedelta(0)


def test_control_characters_and_line_ends_stay_inside_the_json_line() -> None:
    stream = configured()
    logging.getLogger("gateway").warning("a\nb\x1b\u2028%s", "\udcff", extra={"path": "/\r\n\x00"})
    (line,) = stream.getvalue().splitlines()
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["event"] == "a\nb\x1b\u2028\udcff"
    assert json.loads(line)["path"] == "/\r\n\x00"


def test_a_field_cannot_replace_what_every_line_has() -> None:
    stream = configured()
    logging.getLogger("gateway").info("true", extra={"event": "false", "level": "false", "timestamp": "", "logger": ""})
    record = json.loads(stream.getvalue())
    assert (record["event"], record["level"], record["logger"]) == ("true", "info", "gateway")
    assert record["timestamp"]


def test_a_traceback_is_a_field_of_the_json_line() -> None:
    stream = configured()
    try:
        crash()
    except ValueError:
        logging.getLogger("gateway.models").exception("model crashed", extra={"id": "7"}, stack_info=True)
    (line,) = stream.getvalue().splitlines()
    record = json.loads(line)
    assert (record["event"], record["id"]) == ("model crashed", "7")
    assert "in crash" in record["exc_info"]
    assert "Stack" in record["stack_info"]


def test_a_value_of_any_type_can_be_logged() -> None:
    stream = configured()
    logging.getLogger("gateway").info("x", extra={"peer": object(), "error": ValueError("why")})
    assert json.loads(stream.getvalue())["error"] == "ValueError: why"


# ---- text ----


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("two words", '"two words"'),
        ("", '""'),
        ("a=b", '"a=b"'),
        ('say "hi"', r'"say \"hi\""'),
        ("back\\slash", r'"back\\slash"'),
        ("x\nERROR forged", r'"x\nERROR forged"'),
        ("\x1b[2J", r'"\u001b[2J"'),
        ("\x7f\x9b\u2028\u202e\udcff", r'"\x7f\x9b\u2028\u202e\udcff"'),
        ("café", "café"),
        (None, "None"),
        (0, "0"),
        (["a", "b"], "a,b"),
        (["a", "b c"], '"a,b c"'),
        ({"complete": 2, "drained": 1}, "complete:2,drained:1"),
    ],
)
def test_a_value_that_could_be_misread_is_quoted_and_escaped(value: object, shown: str) -> None:
    stream = configured(format="text")
    logging.getLogger("gateway").info("x", extra={"path": value})
    assert stream.getvalue().endswith(f" gateway: x path={shown}\n")


def test_an_event_cannot_forge_a_second_line() -> None:
    stream = configured(format="text")
    logging.getLogger("gateway").info("got %s", "x\n2026 ERROR forged\x1b[0m")
    assert len(stream.getvalue().splitlines()) == 1
    assert r"got x\n2026 ERROR forged\x1b[0m" in stream.getvalue()


def test_a_traceback_in_text_is_indented_and_escaped() -> None:
    stream = configured(format="text")
    try:
        crash()
    except ValueError:
        logging.getLogger("gateway").error("crashed", exc_info=True, stack_info=True)
    first, *others = stream.getvalue().splitlines()
    assert first.endswith("ERROR   gateway: crashed")
    assert all(line.startswith("    ") for line in others)
    assert r"    ERROR second\x1b[2J" in others
    assert any("Stack (most recent call last)" in line for line in others)


def test_what_is_printable_is_not_changed() -> None:
    assert escape("plain, café ✓") == "plain, café ✓"


@pytest.mark.parametrize("terminal", [True, False])
def test_people_are_told_something_behind_the_log_if_they_read_it(terminal: bool) -> None:
    stream = Written()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    configure(LogConfig(format="json"), stream=stream)
    assert has_terminal_log() is terminal
    logging.getLogger("gateway").info("first")
    say("  a block\n  of lines\n")
    lines = stream.getvalue().splitlines()
    assert json.loads(lines[0])["event"] == "first"
    assert lines[1:] == (["  a block", "  of lines"] if terminal else [])


# ---- levels and loggers ----


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_the_level_holds_for_our_loggers(level: str, count: int) -> None:
    stream = configured(level)
    ours = logging.getLogger("gateway.any")
    for method in (ours.debug, ours.info, ours.warning, ours.error):
        method("x")
    assert len(stream.getvalue().splitlines()) == count


def test_other_loggers_show_their_warnings_in_the_same_form() -> None:
    stream = configured("debug")
    theirs = logging.getLogger("someone.else")
    theirs.info("not shown")
    theirs.warning("shown")
    assert json.loads(stream.getvalue())["logger"] == "someone.else"


def test_a_second_set_up_replaces_the_first_and_leaves_other_handlers() -> None:
    other = logging.NullHandler()
    logging.getLogger().addHandler(other)
    first = configured()
    second = configured("warning", "text")
    logging.getLogger("gateway").warning("once")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1
    assert other in logging.getLogger().handlers


def test_the_log_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig())
    logging.getLogger("gateway").info("here")
    logging.getLogger().handlers[-1].flush()
    captured = capsys.readouterr()
    assert json.loads(captured.err)["event"] == "here"
    assert captured.out == ""


def test_without_a_set_up_the_library_leaves_logging_alone() -> None:
    assert logging.getLogger("gateway").handlers == []
    assert "gateway.telemetry.logging_setup" in sys.modules
