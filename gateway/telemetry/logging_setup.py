"""Sets up the log of the standalone server: one line an event, as JSON or as text to read. A library never calls it."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Literal, TypeAlias, final

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from gateway.config import LogConfig
from gateway.config.text import text_without_secrets, without_secrets
from gateway.telemetry.log_queue import QueuedHandler, descriptor_of, last_words
from gateway.telemetry.log_text import access_line, draining_line, report_lines
from gateway.untrusted_text import escape

log = logging.getLogger("gateway")

METRICS = "gateway.metrics"
"""The logger of lines that are metrics. They are no events of some severity, and are written whatever `log.level` is."""
METADATA = "_aws"
"""The member of such a line that says which others are metrics."""

Level: TypeAlias = Literal["debug", "info", "warning", "error"]

_LEVELS: dict[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_OURS = ("timestamp", "level", "logger", "event")
_RESERVED = frozenset({*RESERVED_ATTRS, *_OURS})


def configure(config: LogConfig, *, stream: IO[str] | None = None, front: int | None = None) -> None:
    """Sends the log of the whole process to `stream` (standard error) in the configured format.

    `level` holds for the loggers under "gateway"; those of models and libraries show warnings and errors unless their
    own level says more. A second call replaces the first. Lines are written by a thread of their own (`log_queue`): whoever
    logs never waits for whoever reads. `front` is the number of this process where several write to one stream: each line
    has it, and comes whole.
    """
    stream = stream or sys.stderr or open(os.devnull, "w")  # noqa: SIM115  # a process may have no standard error
    text = config.format == "text" or (config.format == "auto" and stream.isatty())
    handler = QueuedHandler(stream, shared=front is not None)
    if front is not None:
        handler.addFilter(_Numbered(front))
    handler.setFormatter(TextFormatter(colour=has_colours(stream)) if text else JSONFormatter())
    root = logging.getLogger()
    for old in [other for other in root.handlers if isinstance(other, QueuedHandler)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    set_level(config.level)
    logging.getLogger(METRICS).setLevel(logging.INFO)


def has_colours(stream: IO[str]) -> bool:
    """True for a terminal that shows colours, unless the environment has NO_COLOR (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def has_terminal_log() -> bool:
    """True if the log is written to a terminal."""
    return any(isinstance(handler, QueuedHandler) and handler.terminal for handler in logging.getLogger().handlers)


def say(text: str) -> None:
    """Writes text for people after what was logged, if the log is written to a terminal."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, QueuedHandler) and handler.terminal:
            handler.say(text)


def flush() -> None:
    """Returns when what was logged is written, a second later at the latest."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, QueuedHandler):
            handler.flush()


def set_level(level: Level) -> None:
    """The least severity that the loggers under "gateway" log from now on."""
    logging.getLogger("gateway").setLevel(_LEVELS[level])


def level() -> str:
    """The one that they log now: a Level, or another name of the logging module's, in small letters."""
    return logging.getLevelName(logging.getLogger("gateway").getEffectiveLevel()).lower()


@contextmanager
def speaking_for_python() -> Iterator[None]:
    """Inside the block, what the interpreter would write to standard error itself, and wait for who reads it there, is in
    the log: warnings, and exceptions that nobody can catch, in a thread or as an object goes. An exception that leaves the
    block ends the process: its traceback goes to the descriptor, within a second."""
    raising, unraisable, threads = sys.excepthook, sys.unraisablehook, threading.excepthook
    logging.captureWarnings(True)
    sys.unraisablehook, threading.excepthook = _ignored, _thread_ended
    sys.excepthook = last_words
    if not faulthandler.is_enabled() and (descriptor := descriptor_of(sys.stderr)) is not None:
        faulthandler.enable(descriptor)
    yield
    sys.excepthook, sys.unraisablehook, threading.excepthook = raising, unraisable, threads
    logging.captureWarnings(False)


def _ignored(found: sys.UnraisableHookArgs) -> None:
    where = {"reason": found.err_msg or "", "object": repr(found.object)[:200]}
    log.error("exception ignored", extra=where, exc_info=found.exc_value)


def _thread_ended(found: threading.ExceptHookArgs) -> None:
    if found.exc_type is not SystemExit:
        name = "" if found.thread is None else found.thread.name
        log.error("a thread has ended with an exception", extra={"of": name}, exc_info=found.exc_value)


@final
class _Numbered(logging.Filter):
    """Lets every record through, and says which process it is of."""

    def __init__(self, front: int) -> None:
        super().__init__()
        self._front = front

    def filter(self, record: logging.LogRecord) -> bool:
        record.front = self._front
        return True


@final
class JSONFormatter(JsonFormatter):
    """One JSON object a line: timestamp (RFC 3339, UTC), level, logger, event, then the fields of `extra`."""

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        log_data["timestamp"] = timestamp(record)
        log_data["level"] = record.levelname.lower()
        log_data["logger"] = record.name
        log_data["event"] = _event(record)
        log_data.update(_extra(record))
        # The exception and the stack, where there are some.
        log_data.update(message_dict)

    def formatException(self, ei: Any) -> str:
        return text_without_secrets(logging.Formatter.formatException(self, ei))


@final
class TextFormatter(logging.Formatter):
    """`time LEVEL logger: event key=value ...`, on one line; control characters are escaped, so that nothing a peer
    sends can forge a line or drive a terminal. A traceback follows, indented. Access lines and drains are written for people
    (`log_text`), and say less than the JSON form does."""

    def __init__(self, *, colour: bool = False) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        fields = _extra(record)
        try:
            if record.name == "gateway.exchange" and record.levelno == logging.INFO:
                return access_line(timestamp(record)[11:19], fields, colour=self._colour)
            said = _told(record, fields)
        except (AttributeError, KeyError, TypeError):  # somebody else's record under a name of ours
            said = None
        if said is None:
            said = [" ".join([escape(_event(record)), *(f"{escape(key)}={_value(value)}" for key, value in fields.items())])]
        lines = [f"{timestamp(record)} {record.levelname:<7} {record.name}: {said[0]}", *said[1:]]
        if record.exc_info:
            lines += map(escape, text_without_secrets(self.formatException(record.exc_info)).splitlines())
        if record.stack_info:
            lines += map(escape, record.stack_info.splitlines())
        return "\n    ".join(lines)


def _told(record: logging.LogRecord, fields: dict[str, Any]) -> list[str] | None:
    """The lines of an event that has a text of its own; None for any other."""
    if record.name != "gateway":
        return None
    match record.msg:
        case "draining" if fields["live"]:
            return [draining_line(fields["live"], fields["delay"] + fields["timeout"])]
        case "drain report":
            return list(report_lines(fields))
    return None


def timestamp(record: logging.LogRecord) -> str:
    """When the record was made: RFC 3339, UTC, milliseconds."""
    # not by datetime: with a time zone it asks by names that it makes anew, which CPython's method cache keeps, and with
    # each the memory around it
    return time.strftime("%Y-%m-%dT%H:%M:%S.", time.gmtime(record.created)) + f"{int(record.msecs):03}Z"


# Warnings and errors may quote a model's configuration: its exceptions do, and so do lines of libraries. Lines below a
# warning are many, and quote nothing.


def _event(record: logging.LogRecord) -> str:
    said = record.getMessage()
    return said if record.levelno < logging.WARNING else text_without_secrets(said)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    fields = record.__dict__.items()
    extra = {key: value for key, value in fields if key == METADATA or not (key in _RESERVED or key.startswith("_"))}
    return extra if record.levelno < logging.WARNING else {key: without_secrets("", value) for key, value in extra.items()}


def _value(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{key}:{one}" for key, one in value.items()]
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if text and text.isprintable() and not any(character in ' "=\\' for character in text):
        return text
    return escape(json.dumps(text, ensure_ascii=False))
