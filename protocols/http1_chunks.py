"""The chunked transfer coding as it is received (RFC 9112 section 7.1), to the letter and within limits."""

from __future__ import annotations

import re
from typing import TypeAlias, final

from protocols.errors import RemoteProtocolError
from protocols.events import Buffer
from protocols.http1_head import read_trailer
from protocols.http1_input import Input
from protocols.http1_limits import HTTP1Limits

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
