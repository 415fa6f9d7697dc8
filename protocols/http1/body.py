"""Bytes received on an HTTP/1.1 connection, and the ways to consume them: heads, lines, pieces of a body, chunks of one."""

from __future__ import annotations

import re
from typing import TypeAlias, final

from protocols.errors import RemoteProtocolError
from protocols.events import Buffer
from protocols.http1.head import read_trailer
from protocols.http1.limits import HTTP1Limits

LARGE = 16 * 1024
"""From here on bytes travel by reference; below, a copy costs less than one more buffer does."""

# Received crumbs are stored together up to this size, so that a peer who sends single bytes costs no object for each.
_CRUMBS = 4 * 1024


@final
class Input:
    """What was received and not consumed: the rest of one buffer, then the buffers behind it.

    They are joined only where a head is cut across them; a body comes out as it came in, and a line is carried over.
    """

    __slots__ = ("_carry", "_more", "_scanned", "blank_line", "data", "pos", "unread")

    def __init__(self) -> None:
        self.data = b""
        """The buffer being consumed: empty when nothing is here, but perhaps the start of a line."""
        self.unread = 0
        """Bytes received and not consumed."""
        self.blank_line = False
        """Whether an empty line was skipped before the head that is due."""
        self.pos = 0
        """How much of `data` is consumed."""
        self._more: list[bytes] = []  # the buffers behind it: few, for crumbs are joined
        self._scanned = 0  # bytes of an incomplete head that were searched already
        self._carry = b""  # the start of a line that the next buffer continues

    def feed(self, data: Buffer) -> None:
        """Stores a copy."""
        chunk = data.tobytes() if type(data) is memoryview else bytes(data)
        self.unread += len(chunk)
        if not self.data:
            self.data = chunk
        elif self._more and len(self._more[-1]) + len(chunk) <= _CRUMBS:
            self._more[-1] += chunk
        else:
            self._more.append(chunk)

    def clear(self) -> bytes:
        """Forgets everything, and returns it."""
        rest = self._joined()
        self.data, self.pos, self._carry, self.unread = b"", 0, b"", 0
        return rest

    def take(self, at_most: int) -> Buffer | None:
        """The next piece of a body of which `at_most` bytes are left, a view of what was received where it is large;
        None if there is nothing."""
        data, start = self.data, self.pos
        size, end = len(data), start + at_most
        if end < size:
            self.pos = end
        elif size:
            end = size
            self._forward()
        else:
            return None
        self.unread -= end - start
        if end - start < LARGE or end - start == size:
            return data[start:end]  # of the whole, bytes makes no copy
        return memoryview(data)[start:end]

    def accept(self, expected: bytes) -> bool:
        """Consumes `expected` if it comes next, whole and in one buffer."""
        start = self.pos
        if not self.data.startswith(expected, start) or self._carry:
            return False
        n = len(expected)
        self.unread -= n
        if start + n < len(self.data):
            self.pos = start + n
        else:
            self._forward()
        self._scanned, self.blank_line = 0, False
        return True

    def match(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """Consumes what matches if it comes next, whole and in one buffer."""
        match = None if self._carry else pattern.match(self.data, self.pos)
        if match is not None:
            self.unread -= match.end() - self.pos
            self._consume(match.end())
        return match

    def line(self, limit: int, too_long: str) -> bytes | None:
        """The next line without its CRLF, at most `limit` bytes; None until it is here. Raises RemoteProtocolError,
        with the text `too_long` as soon as that is certain."""
        while True:
            start = self.pos
            stop = min(start + limit + 2 - len(self._carry), len(self.data))
            end = self.data.find(b"\n", start, stop)
            line = self._carry + self.data[start : stop if end < 0 else end + 1]
            if end >= 0:
                if not line.endswith(b"\r\n"):
                    raise RemoteProtocolError("chunks: a LF without its CR")
                self._carry = b""
                self.unread -= len(line)
                self._consume(end + 1)
                return line[:-2]
            if len(line) > limit + (1 if line.endswith(b"\r") else 0):
                raise RemoteProtocolError(too_long)
            self._carry = line
            self._consume(stop)
            if not self.data:
                return None

    def head(self, limit: int, line_limit: int, *, blank_line: bool) -> bytes | None:
        """The next head with its empty line, or None until it is here; with `blank_line`, one empty line before it is
        skipped. Raises RemoteProtocolError for one beyond its limits before anything reads it."""
        while True:
            # RFC 9112 section 2.2: a server should ignore at least one empty line before a request
            if blank_line and not self.blank_line and self.accept(b"\r\n"):
                self.blank_line = True
            start = self.pos
            if self.data.startswith(b"\r\n", start):
                raise RemoteProtocolError("head: begins with an empty line")
            end = self.data.find(b"\r\n\r\n", start + max(0, self._scanned - 3), start + limit)
            if end >= 0:
                break
            if not self._more:
                self._check_partial(limit, line_limit)
                return None
            self.data, self.pos = self._joined(), 0
        if self.data.find(b"\r\n", start, start + line_limit + 2) < 0:
            raise _long_line(line_limit)
        head = self.data[start : end + 4]
        self.unread -= len(head)
        self._consume(end + 4)
        self._scanned, self.blank_line = 0, False
        return head

    def _check_partial(self, limit: int, line_limit: int) -> None:
        size = len(self.data) - self.pos
        if size > line_limit + 1 and self.data.find(b"\r\n", self.pos, self.pos + line_limit + 2) < 0:
            raise _long_line(line_limit)
        if size >= limit:
            raise RemoteProtocolError(f"head: over {limit} bytes, the limit (head)", status=431)
        start = self.pos + self._scanned
        if start > self.pos and self.data[start - 1] == 0x0D:
            start -= 1
        # it could wait for the whole head, but a peer that ends its lines with LF alone would never complete one
        if self.data.count(b"\n", start) != self.data.count(b"\r\n", start):
            raise RemoteProtocolError("head: a LF without its CR")
        self._scanned = size

    def _consume(self, end: int) -> None:
        """All before `end` is consumed."""
        if end < len(self.data):
            self.pos = end
        else:
            self._forward()

    def _forward(self) -> None:
        """All of this buffer is consumed."""
        self.pos = 0
        if self._more:
            self.data = self._more.pop(0)
        else:
            self.data = b""  # an idle connection must not hold what it last received

    def _joined(self) -> bytes:
        """What is not consumed, as one, taken away from behind."""
        rest = b"".join((self.data[self.pos :], *self._more))
        self._more.clear()
        return rest


def _long_line(limit: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"first line: over {limit} bytes, the limit (request_line)", status=414)


Trailers: TypeAlias = tuple[tuple[bytes, bytes], ...]

_WORD = rb"[ \t]*[0-9A-Za-z!#$%&'*+.^_`|~-]+"
_QUOTED = rb'[ \t]*"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*"'
_EXTENSION = rb"[ \t]*;" + _WORD + rb"(?:[ \t]*=(?:" + _WORD + rb"|" + _QUOTED + rb"))?"
# 16 digits at most: longer sizes differ between readers. The first is the usual line, found whole in the input.
_PLAIN = re.compile(rb"([0-9A-Fa-f]{1,16})\r\n")
_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})((?:" + _EXTENSION + rb")*)")
_SIZE_LIMIT = 2**63


@final
class Chunks:
    """One chunked body: `read` gives its pieces, then its trailers."""

    __slots__ = (
        "_ended",
        "_extensions",
        "_input",
        "_inside",
        "_limits",
        "_rest",
        "_trailer_bytes",
        "_trailer_fields",
        "_trailers",
    )

    def __init__(self, source: Input, limits: HTTP1Limits) -> None:
        self._input = source
        self._limits = limits
        self._rest = 0  # bytes of this chunk
        self._inside = False  # the CRLF behind a chunk is due
        self._ended = False  # the last chunk was read
        self._extensions = 0
        self._trailers: list[tuple[bytes, bytes]] = []
        self._trailer_bytes = self._trailer_fields = 0

    def read(self) -> Buffer | Trailers | None:
        """A piece of the body, the trailers when it is complete, None when the input is short. Raises
        RemoteProtocolError with status 400."""
        while not self._ended:
            if self._rest:
                piece = self._input.take(self._rest)
                if piece is not None:
                    self._rest -= len(piece)
                return piece
            if self._inside:
                if not self._input.accept(b"\r\n") and self._input.line(0, "chunk: data longer than its size") is None:
                    return None
                self._inside = False
            size = self._size()
            if size is None:
                return None
            self._rest = size
            self._inside = size > 0
            self._ended = size == 0
        return self._read_trailers()

    def _size(self) -> int | None:
        match = self._input.match(_PLAIN)
        if match is None:
            limits = self._limits
            line = self._input.line(limits.chunk_line, f"chunk line: over {limits.chunk_line} bytes, the limit (chunk_line)")
            if line is None:
                return None
            match = _LINE.fullmatch(line)
            if match is None:
                raise RemoteProtocolError(
                    f"chunk line: expected a size in hexadecimal and perhaps extensions, got {line[:40]!r}"
                )
            self._extensions += len(match[2])
            if self._extensions > limits.chunk_extensions:
                raise RemoteProtocolError(
                    f"chunk extensions: over {limits.chunk_extensions} bytes, the limit (chunk_extensions)"
                )
        size = int(match[1], 16)
        if size >= _SIZE_LIMIT:
            raise RemoteProtocolError(f"chunk size: expected less than 2**63, got {match[1]!r}")
        return size

    def _read_trailers(self) -> Trailers | None:
        limits = self._limits
        too_long = f"trailers: over {limits.trailers} bytes, the limit (trailers)"
        while True:
            line = self._input.line(max(limits.trailers - self._trailer_bytes - 2, 0), too_long)
            if line is None:
                return None
            if not line:
                return tuple(self._trailers)
            self._trailer_bytes += len(line) + 2
            self._trailer_fields += 1
            if self._trailer_fields > limits.trailer_fields:
                raise RemoteProtocolError(f"trailers: over {limits.trailer_fields} fields, the limit (trailer_fields)")
            trailer = read_trailer(line)
            if trailer is not None:
                self._trailers.append(trailer)
