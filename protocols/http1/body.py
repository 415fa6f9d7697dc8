"""The received bytes of an HTTP/1.1 connection, and how they are consumed: heads, lines, pieces of bodies, chunks."""

from __future__ import annotations

import re
from typing import TypeAlias, final

from protocols.errors import RemoteProtocolError
from protocols.events import Buffer
from protocols.http1.head import read_trailer
from protocols.http1.limits import HTTP1Limits

LARGE = 16 * 1024
"""From this size on, bytes go by reference. Below it, a copy costs less than one more buffer."""

# Small received pieces are joined up to this size: a peer that sends single bytes must not cost an object for each.
_CRUMBS = 4 * 1024


@final
class Input:
    """Received bytes that are not consumed: the rest of one buffer, then the buffers behind it.

    Buffers are joined only if a head is split across them. Body bytes come out in the pieces that came in, and the start of
    a split line is kept apart.
    """

    __slots__ = ("_carry", "_more", "_scanned", "blank_line", "data", "pos", "unread")

    def __init__(self) -> None:
        self.data = b""
        """The buffer being consumed. If it is empty, no input is left except perhaps the start of a line."""
        self.unread = 0
        """Bytes received and not consumed."""
        self.blank_line = False
        """True if an empty line was skipped before the next head."""
        self.pos = 0
        """How much of `data` is consumed."""
        self._more: list[bytes] = []  # the buffers behind it: few, because small ones are joined
        self._scanned = 0  # bytes of an incomplete head that are already searched
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
        """Drops all input, and returns it."""
        rest = self._joined()
        self.data, self.pos, self._carry, self.unread = b"", 0, b"", 0
        return rest

    def take(self, at_most: int) -> Buffer | None:
        """The next piece of a body that has `at_most` bytes left, or None if no input is here. A large piece is a view of
        the received buffer."""
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
            return data[start:end]  # slicing a whole bytes object makes no copy
        return memoryview(data)[start:end]

    def accept(self, expected: bytes) -> bool:
        """Consumes `expected` if it is next, whole and in one buffer. True if it was."""
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
        """Consumes a match of the pattern if it is next, whole and in one buffer."""
        match = None if self._carry else pattern.match(self.data, self.pos)
        if match is not None:
            self.unread -= match.end() - self.pos
            self._consume(match.end())
        return match

    def line(self, limit: int, too_long: str) -> bytes | None:
        """The next line without its CRLF, at most `limit` bytes; None until it is complete. RemoteProtocolError with the
        text `too_long` as soon as the line must be longer."""
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
        """The next head with its empty line, or None until it is complete. With `blank_line`, one empty line before it is
        skipped. RemoteProtocolError for a head beyond its limits, before anything parses it."""
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
        # waiting for the whole head is not enough: a peer that ends its lines with LF alone would never complete one
        if self.data.count(b"\n", start) != self.data.count(b"\r\n", start):
            raise RemoteProtocolError("head: a LF without its CR")
        self._scanned = size

    def _consume(self, end: int) -> None:
        """Marks all bytes before `end` as consumed."""
        if end < len(self.data):
            self.pos = end
        else:
            self._forward()

    def _forward(self) -> None:
        """Marks all of this buffer as consumed."""
        self.pos = 0
        if self._more:
            self.data = self._more.pop(0)
        else:
            self.data = b""  # an idle connection must not keep its last input alive

    def _joined(self) -> bytes:
        """All input that is not consumed, as one buffer. The buffers behind the first are removed."""
        rest = b"".join((self.data[self.pos :], *self._more))
        self._more.clear()
        return rest


def _long_line(limit: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"first line: over {limit} bytes, the limit (request_line)", status=414)


Trailers: TypeAlias = tuple[tuple[bytes, bytes], ...]

_WORD = rb"[ \t]*[0-9A-Za-z!#$%&'*+.^_`|~-]+"
_QUOTED = rb'[ \t]*"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*"'
_EXTENSION = rb"[ \t]*;" + _WORD + rb"(?:[ \t]*=(?:" + _WORD + rb"|" + _QUOTED + rb"))?"
# At most 16 digits: readers differ about longer sizes. `_PLAIN` matches the usual line, complete in the input.
_PLAIN = re.compile(rb"([0-9A-Fa-f]{1,16})\r\n")
_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})((?:" + _EXTENSION + rb")*)")
_SIZE_LIMIT = 2**63


@final
class Chunks:
    """One chunked body: `read` returns its pieces, then its trailers."""

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
        self._rest = 0  # bytes left of this chunk
        self._inside = False  # the CRLF behind a chunk must come next
        self._ended = False  # the last chunk was read
        self._extensions = 0
        self._trailers: list[tuple[bytes, bytes]] = []
        self._trailer_bytes = self._trailer_fields = 0

    def read(self) -> Buffer | Trailers | None:
        """A piece of the body; the trailers when it is complete; None while input is missing. RemoteProtocolError with
        status 400."""
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
