"""What the gateway has logged as an error during a run, and how an exception is told in one line."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # pytest tells of objects in a failed assertion


@final
class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def errors_logged() -> Iterator[list[logging.LogRecord]]:
    """The errors that the gateway logs inside, which go nowhere else; afterwards its logger is as it was."""
    kept, logger = _Kept(), logging.getLogger("gateway")
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    logger.addHandler(kept)
    try:
        yield kept.records
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)  # not by the attribute: loggers below remember what they asked of it
        logger.propagate = propagate


def brief(error: BaseException) -> str:
    """The exception, or those of a group, and where each came from: the same in each run, so without addresses."""
    if isinstance(error, BaseExceptionGroup):
        return f"{type(error).__name__}[{', '.join(brief(e) for e in error.exceptions)}]"
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = f" at {at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno}" if at is not None else ""
    return _ADDRESS.sub("", repr(error)) + where
