"""The log's own thread: a task that logs hands the record over and goes on, even if no program reads the log.

The thread formats a record in which nothing can change meanwhile: a message without arguments, with fields that are text,
numbers or None, as the access line has. Any other record is formatted by the task that logs: its arguments may change, and
the frames of a traceback would keep objects alive. If many records wait already, the task formats every record: as text it
takes a third of the memory.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from types import TracebackType
from typing import IO, TypeAlias, final

RECORDS = 8192
"""The most records that may wait to be written."""
BYTES = 8 * 1024 * 1024
"""The most bytes of waiting records, approximately. A record that would exceed it is dropped."""
AS_RECORDS = 256
"""The most records that may wait unformatted."""
PATIENCE = 1.0
"""Seconds for waiting records to be written at the end of the process."""
_AT_ONCE = 64  # records
_FIXED = len(logging.makeLogRecord({}).__dict__)  # attributes that every record has; the fields of `extra` come after them
_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
_RECORD = 512  # bytes of a record without its texts
_ATOMIC = 4096  # PIPE_BUF on Linux: the most bytes that a writable pipe takes at once, without another writer's in between

_Item: TypeAlias = "tuple[logging.LogRecord | str | threading.Event | None, int]"

_dropped = 0


def dropped() -> int:
    """Returns the number of this process's records that were never written: the queue was full, or the stream's reader was
    gone."""
    return _dropped


@final
class QueuedHandler(logging.Handler):
    """Writes records to a stream from a thread of its own; `handle` never waits for the stream.

    While RECORDS records or BYTES bytes wait, new records are dropped. Before the next that fits, a record gives the
    number dropped. `flush` and `close` wait for at most PATIENCE seconds; if the process ends then, waiting records are
    lost. A child made by `fork` has no such thread: it writes each record itself.
    """

    def __init__(self, stream: IO[str], *, shared: bool = False) -> None:
        """`shared`: other processes write to the stream too, and lines must not be mixed."""
        super().__init__()
        self._shared = shared
        self._stream = stream
        self.terminal = stream.isatty()
        """True if the stream is a terminal."""
        self._descriptor = descriptor_of(stream)
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()  # reentrant: a signal handler may log
        # no lock: only the holder of the handler's lock changes `_put*`, only the thread the others
        self._put = self._put_bytes = self._taken = self._taken_bytes = 0
        self._unsaid = 0
        self._in_vain = -1  # `_taken` when a flush gave up: all flushes at the end together have one second
        self._forked = self._closed = False
        self._thread = threading.Thread(target=self._write_all, name="everywire log", daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._in_child)

    # -- callers that log ------------------------------------------------------------------------------------------

    def emit(self, record: logging.LogRecord) -> None:
        """Hands the record to the thread, or drops it if the queue is full."""
        if self._forked:
            self._written(self._line(record))
            return
        item, size = self._waiting(record)
        if self._closed or self._full(size):
            self._lost(1)
            return
        if self._unsaid:
            self._say_dropped()
        self._give(item, size)

    def say(self, text: str) -> None:
        """Writes the text as it is, after the records logged before. Dropped if the queue is full."""
        with self.lock:  # type: ignore[union-attr]
            if self._forked:
                self._written(text)
            elif self._closed or self._full(len(text)):
                self._lost(1)
            else:
                self._give(text, len(text))

    def flush(self) -> None:
        """Returns when all earlier records are written, or after PATIENCE seconds. Returns at once if a flush has given up
        and nothing was written since."""
        if self._forked or self._closed or not self._thread.is_alive() or self._in_vain == self._taken:
            return
        with self.lock:  # type: ignore[union-attr]
            if self._unsaid:
                self._say_dropped()
        written = threading.Event()
        self._queue.put((written, 0))
        if not written.wait(PATIENCE):
            self._in_vain = self._taken

    def close(self) -> None:
        """Flushes as `flush` does, then ends the thread. A second call does nothing."""
        if not self._closed:
            self.flush()
            self._closed = True
            self._queue.put((None, 0))
        super().close()

    def _waiting(self, record: logging.LogRecord) -> tuple[logging.LogRecord | str, int]:
        """Returns the record as it waits in the queue, and its size in bytes."""
        message = record.msg
        few = self._put - self._taken < AS_RECORDS
        if few and type(message) is str and not (record.args or record.exc_info or record.stack_info or record.exc_text):
            size = _RECORD + len(message)
            for value in islice(record.__dict__.values(), _FIXED, None):
                kind = type(value)
                if kind not in _PLAIN:
                    break
                if kind is str or kind is bytes:
                    size += len(value)
            else:
                return record, size
        line = self._line(record)
        return line, len(line)

    def _full(self, size: int) -> bool:
        return self._put - self._taken >= RECORDS or self._put_bytes - self._taken_bytes + size > BYTES

    def _give(self, item: logging.LogRecord | str, size: int) -> None:
        self._put += 1
        self._put_bytes += size
        self._queue.put((item, size))

    def _lost(self, count: int) -> None:
        global _dropped
        _dropped += count
        self._unsaid += count

    def _say_dropped(self) -> None:
        """Queues the record with the number of dropped ones. The caller must hold the lock."""
        count, self._unsaid = self._unsaid, 0
        record = logging.makeLogRecord(
            {"name": "gateway", "levelno": logging.WARNING, "levelname": "WARNING", "msg": "log records dropped"}
        )
        record.count = count
        self._give(record, _RECORD)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        waiting = self._queue
        while True:
            items = [waiting.get()]
            while len(items) < _AT_ONCE and not waiting.empty():
                items.append(waiting.get())
            lines = [line for item, _ in items if (line := self._text(item))]
            wrote = bool(lines)
            for together in _atomic(lines) if self._shared else [lines]:
                if together and not self._written("".join(together)):
                    wrote = False  # nor would the record be that gives their number: the reader is gone
                    with self.lock:  # type: ignore[union-attr]
                        self._lost(len(together))
            self._taken += len(lines)
            self._taken_bytes += sum(size for _, size in items)
            for item, _ in items:
                if item is None:
                    return
                if isinstance(item, threading.Event):
                    item.set()
            # if a flush holds the lock, it queues the record itself
            if self._unsaid and waiting.empty() and wrote and self.lock and self.lock.acquire(blocking=False):
                try:
                    if self._unsaid:
                        self._say_dropped()
                finally:
                    self.lock.release()
            del items, lines  # else the waiting thread would keep them

    def _text(self, item: logging.LogRecord | str | threading.Event | None) -> str:
        return item if isinstance(item, str) else self._line(item) if isinstance(item, logging.LogRecord) else ""

    def _line(self, record: logging.LogRecord) -> str:
        try:
            return self.format(record) + "\n"
        except Exception as e:
            sorry = logging.makeLogRecord({"name": record.name, "levelno": record.levelno, "levelname": record.levelname})
            sorry.msg = "a log record cannot be formatted"
            sorry.reason, sorry.record = str(e)[:200], repr(record.msg)[:200]
            return self.format(sorry) + "\n"

    def _written(self, text: str) -> bool:
        try:
            self._write(text)
        except (OSError, ValueError):  # the reader is gone, or the stream is closed
            return False
        return True

    def _write(self, text: str) -> None:
        descriptor = self._descriptor
        if descriptor is None:
            self._stream.write(text)
            self._stream.flush()
            return
        # not by the stream: whoever prints would wait for its lock
        data = memoryview(text.encode(self._encoding, "backslashreplace"))
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:  # another program has made the descriptor non-blocking
                poll = select.poll()
                poll.register(descriptor, select.POLLOUT)
                poll.poll()

    def _in_child(self) -> None:
        self._forked = True
        self._queue = queue.SimpleQueue()  # the parent writes the waiting records


def _atomic(lines: list[str]) -> Iterator[list[str]]:
    """Groups the lines: as many at once as a pipe takes without mixing in another writer's. A longer line goes alone."""
    together, size = list[str](), 0
    for line in lines:
        size += (more := len(line.encode("utf-8", "backslashreplace")))
        if size > _ATOMIC and together:
            yield together
            together, size = [], more
        together.append(line)
    yield together


def descriptor_of(stream: IO[str]) -> int | None:
    """Flushes the stream and returns its descriptor; None if it has none."""
    try:
        stream.flush()
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A `sys.excepthook`: writes the waiting log, then the traceback, directly to the descriptor of standard error. Each has
    PATIENCE seconds, so that the process ends even if no program reads them."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, QueuedHandler):
            handler.flush()
    descriptor = None if sys.stderr is None else descriptor_of(sys.stderr)
    if descriptor is None:
        sys.__excepthook__(kind, error, trace)
        return
    from models.tracebacks.text import text_of  # only now: a user's own folder may stand in the place of `models`

    data = f"{text_of(error)}\n".encode("utf-8", "backslashreplace")
    until = time.monotonic() + PATIENCE
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    while data and poll.poll(max(until - time.monotonic(), 0) * 1000):
        try:
            data = data[os.write(descriptor, data[:_ATOMIC]) :]
        except BlockingIOError:
            continue
        except OSError:
            return
