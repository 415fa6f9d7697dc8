"""Bytes received on an HTTP/1.1 connection, and the ways to consume them: heads, lines, pieces of a body."""

from __future__ import annotations

import re
from collections import deque
from typing import final

from protocols.errors import RemoteProtocolError
from protocols.events import Buffer

LARGE = 16 * 1024
"""From here on bytes travel by reference; below, a copy costs less than one more buffer does."""

# Received crumbs are stored together up to this size, so that a peer who sends single bytes costs no object for each.
_CRUMBS = 4 * 1024


@final
class Input:
    """What was received and not consumed: the rest of one buffer, then the buffers behind it.

    They are joined only where a head is cut across them; a body comes out as it came in, and a line is carried over.
    """

    __slots__ = ("_blank_line", "_carry", "_data", "_more", "_pos", "_scanned", "unread")

    def __init__(self) -> None:
        self._data = b""  # empty only when there is nothing behind it
        self._pos = 0
        self._more: deque[bytes] = deque()
        self._scanned = 0  # bytes of an incomplete head that were searched already
        self._blank_line = False  # an empty line was skipped before this head
        self._carry = b""  # the start of a line that the next buffer continues
        self.unread = 0

    def feed(self, data: Buffer) -> None:
        """Stores a copy."""
        chunk = bytes(data)
        self.unread += len(chunk)
        if not self._data:
            self._data = chunk
        elif self._more and len(self._more[-1]) + len(chunk) <= _CRUMBS:
            self._more[-1] += chunk
        else:
            self._more.append(chunk)

    def clear(self) -> bytes:
        """Forgets everything, and returns it."""
        rest = b"".join((self._data[self._pos :], *self._more))
        self._data, self._pos, self._carry = b"", 0, b""
        self._more.clear()
        self.unread = 0
        return rest

    def take(self, at_most: int) -> Buffer | None:
        """The next piece of a body, a view of what was received where it is large; None if there is nothing."""
        data, start = self._data, self._pos
        size = len(data) - start
        if size > at_most:
            size = at_most
        if not size:
            return None
        self._consume(size)
        if size < LARGE or size == len(data):
            return data[start : start + size]  # of the whole, bytes makes no copy
        return memoryview(data)[start : start + size]

    def accept(self, expected: bytes) -> bool:
        """Consumes `expected` if it comes next, whole and in one buffer."""
        if self._carry or not self._data.startswith(expected, self._pos):
            return False
        self._consume(len(expected))
        self._scanned, self._blank_line = 0, False
        return True

    def match(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """Consumes what matches if it comes next, whole and in one buffer."""
        match = None if self._carry else pattern.match(self._data, self._pos)
        if match is not None:
            self._consume(match.end() - self._pos)
        return match

    def line(self, limit: int, too_long: str) -> bytes | None:
        """The next line without its CRLF, at most `limit` bytes; None until it is here. Raises RemoteProtocolError,
        with the text `too_long` as soon as that is certain."""
        while True:
            start = self._pos
            stop = min(start + limit + 2 - len(self._carry), len(self._data))
            end = self._data.find(b"\n", start, stop)
            line = self._carry + self._data[start : stop if end < 0 else end + 1]
            if end >= 0:
                if not line.endswith(b"\r\n"):
                    raise RemoteProtocolError("chunks: a LF without its CR")
                self._carry = b""
                self.unread -= len(line)
                self._forward(end + 1 - start)
                return line[:-2]
            if len(line) > limit + (1 if line.endswith(b"\r") else 0):
                raise RemoteProtocolError(too_long)
            self._carry = line
            self._forward(stop - start)
            if not self._data:
                return None

    def head(self, limit: int, line_limit: int, *, blank_line: bool) -> bytes | None:
        """The next head with its empty line, or None until it is here; with `blank_line`, one empty line before it is
        skipped. Raises RemoteProtocolError for one beyond its limits before anything reads it."""
        while True:
            # RFC 9112 section 2.2: a server should ignore at least one empty line before a request
            if blank_line and not self._blank_line and self.accept(b"\r\n"):
                self._blank_line = True
            start = self._pos
            if self._data.startswith(b"\r\n", start):
                raise RemoteProtocolError("head: begins with an empty line")
            end = self._data.find(b"\r\n\r\n", start + max(0, self._scanned - 3), start + limit)
            if end >= 0:
                break
            if not self._more:
                self._check_partial(limit, line_limit)
                return None
            self._data, self._pos = b"".join((self._data[start:], *self._more)), 0
            self._more.clear()
        if self._data.find(b"\r\n", start, start + line_limit + 2) < 0:
            raise _long_line(line_limit)
        head = self._data[start : end + 4]
        self._consume(len(head))
        self._scanned, self._blank_line = 0, False
        return head

    def _check_partial(self, limit: int, line_limit: int) -> None:
        size = len(self._data) - self._pos
        if size > line_limit + 1 and self._data.find(b"\r\n", self._pos, self._pos + line_limit + 2) < 0:
            raise _long_line(line_limit)
        if size >= limit:
            raise RemoteProtocolError(f"head: over {limit} bytes, the limit (head)", status=431)
        start = self._pos + self._scanned
        if start > self._pos and self._data[start - 1] == 0x0D:
            start -= 1
        # it could wait for the whole head, but a peer that ends its lines with LF alone would never complete one
        if self._data.count(b"\n", start) != self._data.count(b"\r\n", start):
            raise RemoteProtocolError("head: a LF without its CR")
        self._scanned = size

    def _consume(self, n: int) -> None:
        self.unread -= n
        self._forward(n)

    def _forward(self, n: int) -> None:
        self._pos += n
        if self._pos == len(self._data):  # an idle connection must not hold what it last received
            self._data, self._pos = self._more.popleft() if self._more else b"", 0


def _long_line(limit: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"first line: over {limit} bytes, the limit (request_line)", status=414)
