"""Captures the errors that the gateway logs during a run, and shows an exception in one line."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # as in pytest's text of a failed assertion


@final
class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def errors_logged() -> Iterator[list[logging.LogRecord]]:
    """Yields the list of the errors that the gateway logs within the block. They go nowhere else. Afterwards the logger is
    as before."""
    kept, logger = _Kept(), logging.getLogger("gateway")
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    logger.addHandler(kept)
    try:
        yield kept.records
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)  # not by the attribute: child loggers cache the level
        logger.propagate = propagate


def brief(error: BaseException) -> str:
    """Returns an exception in one line, with the place that raised it; of a group, all its exceptions. The text is the same
    in each run, because it has no addresses."""
    if isinstance(error, BaseExceptionGroup):
        return f"{type(error).__name__}[{', '.join(brief(e) for e in error.exceptions)}]"
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = f" at {at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno}" if at is not None else ""
    return _ADDRESS.sub("", repr(error)) + where
