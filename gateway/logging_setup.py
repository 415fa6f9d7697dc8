"""Sets up the log of the standalone server: one line an event, as JSON or as text to read. A library never calls it."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import IO, Any, Literal, TypeAlias, final

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from gateway.config import LogConfig
from gateway.printable import escape

Level: TypeAlias = Literal["debug", "info", "warning", "error"]

_LEVELS: dict[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_OURS = ("timestamp", "level", "logger", "event")
_RESERVED = frozenset({*RESERVED_ATTRS, *_OURS})


def configure(config: LogConfig, *, stream: IO[str] | None = None) -> None:
    """Sends the log of the whole process to `stream` (standard error) in the configured format.

    `level` holds for the loggers under "gateway"; those of models and libraries show warnings and errors unless their
    own level says more. A second call replaces the first.
    """
    stream = stream or sys.stderr
    text = config.format == "text" or (config.format == "auto" and stream.isatty())
    handler = _Handler(stream)
    handler.setFormatter(TextFormatter() if text else JSONFormatter())
    root = logging.getLogger()
    for old in [other for other in root.handlers if isinstance(other, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    set_level(config.level)


def set_level(level: Level) -> None:
    """The least severity that the loggers under "gateway" log from now on."""
    logging.getLogger("gateway").setLevel(_LEVELS[level])


def level() -> str:
    """The one that they log now: a Level, or another name of the logging module's, in small letters."""
    return logging.getLevelName(logging.getLogger("gateway").getEffectiveLevel()).lower()


@final
class _Handler(logging.StreamHandler[IO[str]]):
    """Ours, to be known again by a second `configure`."""


@final
class JSONFormatter(JsonFormatter):
    """One JSON object a line: timestamp (RFC 3339, UTC), level, logger, event, then the fields of `extra`."""

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        log_data["timestamp"] = timestamp(record)
        log_data["level"] = record.levelname.lower()
        log_data["logger"] = record.name
        log_data["event"] = record.getMessage()
        log_data.update(_extra(record))
        # The exception and the stack, where there are some.
        log_data.update(message_dict)


@final
class TextFormatter(logging.Formatter):
    """`time LEVEL logger: event key=value ...`, on one line; control characters are escaped, so that nothing a peer
    sends can forge a line or drive a terminal. A traceback follows, indented."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{timestamp(record)} {record.levelname:<7} {record.name}: {escape(record.getMessage())}"
        lines = [" ".join([head, *(f"{escape(key)}={_value(value)}" for key, value in _extra(record).items())])]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        if record.stack_info:
            lines += record.stack_info.splitlines()
        return "\n    ".join([lines[0], *map(escape, lines[1:])])


def timestamp(record: logging.LogRecord) -> str:
    """When the record was made: RFC 3339, UTC, milliseconds."""
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{int(record.msecs):03}Z"


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in record.__dict__.items() if key not in _RESERVED and not key.startswith("_")}


def _value(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if text and text.isprintable() and not any(character in ' "=\\' for character in text):
        return text
    return escape(json.dumps(text, ensure_ascii=False))
