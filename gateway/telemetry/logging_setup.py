"""Sets up the log of the standalone server: one line for each event, as JSON or as text. Libraries never call it."""

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
"""The logger of lines that are metrics. They are written at every `log.level`."""
METADATA = "_aws"
"""The member of a line of metrics that says which other members are metrics."""

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
    """Sends the log of the whole process to `stream`, by default standard error, in the configured format.

    `level` applies to the loggers under "gateway". Those of models and libraries show warnings and errors, unless their
    own level shows more. A second call replaces the first. A thread writes the lines (`log_queue`), so that tasks never
    wait for a reader of the log. `front` is the number of this process if several write to one stream: each line has it,
    and lines are not mixed.
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
    """Writes text for people behind the records so far, if the log is written to a terminal."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, QueuedHandler) and handler.terminal:
            handler.say(text)


def flush() -> None:
    """Returns when all records so far are written, or after 1 second."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, QueuedHandler):
            handler.flush()


def set_level(level: Level) -> None:
    """Sets the lowest level that the loggers under "gateway" log."""
    logging.getLogger("gateway").setLevel(_LEVELS[level])


def level() -> str:
    """Returns the lowest level that they log now: a Level, or another level of the logging module, in lower case."""
    return logging.getLevelName(logging.getLogger("gateway").getEffectiveLevel()).lower()


@contextmanager
def speaking_for_python() -> Iterator[None]:
    """Inside the block, logs the messages of the interpreter, which would otherwise wait for the reader of standard error:
    warnings, and uncaught exceptions of threads and finalizers. An exception that leaves the block ends the process. Its
    traceback goes to standard error's descriptor, within 1 second."""
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
    """Adds the process's number to every record."""

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
        if trace := _trace(record):
            log_data["exc_info"] = text_without_secrets(trace)
        # the exception and the stack, if any
        log_data.update(message_dict)

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_text:  # the text of another handler
            record.exc_text = text_without_secrets(record.exc_text)
        return super().format(record)

    def formatException(self, ei: Any) -> str:
        return _exception(ei)


@final
class TextFormatter(logging.Formatter):
    """Formats a record as one line, `time LEVEL logger: event key=value ...`, with an indented traceback behind it. Control
    characters are escaped, so that bytes from a peer cannot forge a line or control a terminal. Access lines and drains
    are written for people (`log_text`), with fewer facts than in JSON."""

    def __init__(self, *, colour: bool = False) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        fields = _extra(record)
        try:
            if record.name == "gateway.exchange" and record.levelno == logging.INFO:
                return access_line(timestamp(record)[11:19], fields, colour=self._colour)
            said = _told(record, fields)
        except (AttributeError, KeyError, TypeError):  # another library's record under this logger's name
            said = None
        if said is None:
            said = [" ".join([escape(_event(record)), *(f"{escape(key)}={_value(value)}" for key, value in fields.items())])]
        lines = [f"{timestamp(record)} {record.levelname:<7} {record.name}: {said[0]}", *said[1:]]
        if record.exc_info:
            lines += map(escape, _exception(record.exc_info).splitlines())
        elif trace := record.exc_text or _trace(record):
            lines += map(escape, text_without_secrets(trace).splitlines())
        if record.stack_info:
            lines += map(escape, record.stack_info.splitlines())
        return "\n    ".join(lines)


def _exception(info: Any) -> str:
    error = info[1] if isinstance(info, tuple) else None
    from models.tracebacks.text import text_of  # only now: a user's own folder may stand in the place of `models`

    return "" if error is None else text_without_secrets(text_of(error))


def _told(record: logging.LogRecord, fields: dict[str, Any]) -> list[str] | None:
    """Returns the lines of an event that `log_text` writes; None for any other."""
    if record.name != "gateway":
        return None
    match record.msg:
        case "draining" if fields["live"]:
            return [draining_line(fields["live"], fields["delay"] + fields["timeout"])]
        case "drain report":
            return list(report_lines(fields))
    return None


def timestamp(record: logging.LogRecord) -> str:
    """Returns the time of the record: RFC 3339, UTC, milliseconds."""
    # not by datetime: with a time zone it looks up method names that it makes again each time; CPython's method cache keeps
    # each of them, and with it the memory around it
    return time.strftime("%Y-%m-%dT%H:%M:%S.", time.gmtime(record.created)) + f"{int(record.msecs):03}Z"


# Secrets are removed from warnings and errors, which may quote a model's configuration, as exceptions and libraries do.
# Lines below a warning are many, and quote none.


def _event(record: logging.LogRecord) -> str:
    said = record.getMessage()
    if trace := _trace(record):
        said = said.removesuffix(f"\n{trace}")
    return said if record.levelno < logging.WARNING else text_without_secrets(said)


def _trace(record: logging.LogRecord) -> str:
    """Returns the traceback at the end of a message that came from a model's process; usually empty."""
    return str(getattr(record, "_trace", ""))


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
