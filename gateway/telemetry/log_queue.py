"""The log's own thread: a task that logs hands the record over and goes on, even if nobody reads the log.

A record is rendered by the thread where nothing in it can change meanwhile: a message without arguments, and fields that
are text, numbers or None, as the access line's are. Any other is rendered where it is logged: its arguments may change, and
the frames of a traceback would keep alive what they hold. So is one that many others are before: until it is written it
takes a third of the memory as text.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from itertools import islice
from types import TracebackType
from typing import IO, TypeAlias, final

RECORDS = 8192
"""The most records that wait to be written."""
BYTES = 8 * 1024 * 1024
"""The most that their text comes to, about; a record that would pass it is dropped."""
AS_RECORDS = 256
"""The most that wait to be rendered."""
PATIENCE = 1.0
"""Seconds that waiting records have at the end of the process."""
_AT_ONCE = 64  # records
_FIXED = len(logging.makeLogRecord({}).__dict__)  # attributes that every record has; the fields of `extra` come after them
_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
_RECORD = 512  # bytes of a record apart from its texts
_ATOMIC = 4096  # POSIX's PIPE_BUF on Linux: what fits into a pipe that says it has room

_Item: TypeAlias = "tuple[logging.LogRecord | str | threading.Event | None, int]"

_dropped = 0


def dropped() -> int:
    """Records of this process that were never written: there was no room for them, or nobody was left to read them."""
    return _dropped


@final
class QueuedHandler(logging.Handler):
    """Writes records to a stream from a thread of its own; `handle` never waits for the stream.

    While RECORDS records or BYTES bytes wait, what comes is dropped and counted, and a record that says how many were
    dropped stands before the next that fits. `flush` and `close` wait for at most PATIENCE seconds; a process that ends
    meanwhile loses what waits. In a child made by `fork`, which has no such thread, records are written as they come.
    """

    def __init__(self, stream: IO[str], *, shared: bool = False) -> None:
        """`shared`: other processes write to it too, and no line of ours is to begin within one of theirs."""
        super().__init__()
        self._shared = shared
        self._stream = stream
        self.terminal = stream.isatty()
        """True if people read the stream as it is written."""
        self._descriptor = descriptor_of(stream)
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()  # its `put` is reentrant: a signal handler may log
        # each is changed by one side alone: `_put*` by the holder of the handler's lock, the others by the thread
        self._put = self._put_bytes = self._taken = self._taken_bytes = 0
        self._unsaid = 0
        self._in_vain = -1  # `_taken` when a flush gave up: the end of a process has one second, not one for each
        self._forked = self._closed = False
        self._thread = threading.Thread(target=self._write_all, name="everywire log", daemon=True)
        self._thread.start()
        os.register_at_fork(after_in_child=self._in_child)

    # -- callers that log ------------------------------------------------------------------------------------------

    def emit(self, record: logging.LogRecord) -> None:
        """Hands the record over, or drops it."""
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
        """Writes the text as it is, after what was logged before it. It is dropped as a record is."""
        with self.lock:  # type: ignore[union-attr]
            if self._forked:
                self._written(text)
            elif self._closed or self._full(len(text)):
                self._lost(1)
            else:
                self._give(text, len(text))

    def flush(self) -> None:
        """Returns when everything that was logged before is written, after PATIENCE seconds at the latest; at once where
        a flush has waited that long and nothing was written since."""
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
        """As `flush`, then ends the thread. A second call does nothing."""
        if not self._closed:
            self.flush()
            self._closed = True
            self._queue.put((None, 0))
        super().close()

    def _waiting(self, record: logging.LogRecord) -> tuple[logging.LogRecord | str, int]:
        """The record as it waits in the queue, and its bytes."""
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
        """Queues the record that says how many were dropped; the caller holds the lock."""
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
            for together in _atomic(lines) if self._shared else [lines]:
                if together and not self._written("".join(together)):
                    with self.lock:  # type: ignore[union-attr]
                        self._lost(len(together))
            self._taken += len(lines)
            self._taken_bytes += sum(size for _, size in items)
            for item, _ in items:
                if item is None:
                    return
                if isinstance(item, threading.Event):
                    item.set()
            # a flush may hold the lock: then it has said it
            if self._unsaid and waiting.empty() and lines and self.lock and self.lock.acquire(blocking=False):
                try:
                    if self._unsaid:
                        self._say_dropped()
                finally:
                    self.lock.release()
            del items, lines  # the thread outlives them

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
        # not by the stream, whose lock anybody who prints would wait for
        data = memoryview(text.encode(self._encoding, "backslashreplace"))
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:  # somebody has made it so
                poll = select.poll()
                poll.register(descriptor, select.POLLOUT)
                poll.poll()

    def _in_child(self) -> None:
        self._forked = True
        self._queue = queue.SimpleQueue()  # the parent writes what waits


def _atomic(lines: list[str]) -> Iterator[list[str]]:
    """The lines, as many at once as a pipe takes without those of another writer between; a longer one goes alone."""
    together, size = list[str](), 0
    for line in lines:
        size += (more := len(line.encode("utf-8", "backslashreplace")))
        if size > _ATOMIC and together:
            yield together
            together, size = [], more
        together.append(line)
    yield together


def descriptor_of(stream: IO[str]) -> int | None:
    """Its descriptor, with everything written that the stream still held; None for one of memory."""
    try:
        stream.flush()
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For `sys.excepthook`: what waits in the log, then the traceback, straight to the descriptor of standard error, each
    within PATIENCE: also where nobody reads it the process ends."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, QueuedHandler):
            handler.flush()
    descriptor = None if sys.stderr is None else descriptor_of(sys.stderr)
    if descriptor is None:
        sys.__excepthook__(kind, error, trace)
        return
    data = "".join(traceback.format_exception(kind, error, trace)).encode("utf-8", "backslashreplace")
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
